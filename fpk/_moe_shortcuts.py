"""A layer of one token needs no sorting (moe_token, moe_up, moe_down): when that is faster, and how."""

from typing import Any

import torch
from torch import Tensor

from fpk._moe_checks import Experts, Static, Weight, codes_of
from fpk.api import Quantized
from fpk.check import has_fp8_units
from fpk.formats import FP8, Scheme
from fpk.kernels.moe._token_launch import streams
from fpk.op import OPS, batch_must_not_matter

WIDTH = 512
"""Fewest columns of each product: below, there is nothing to win."""


def fits_few(
    x: Weight, ids: Tensor, w13: Experts, w2: Experts, scheme: Scheme | None, static: list[Static],
    dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Would moe_up and moe_down run this layer, and faster? Never in batch-invariant mode: its sums have another order.

    Measured on an H200; four tokens are faster sorted, and so is one whose experts are narrow.
    """
    if ids.shape[0] != 1 or min(codes_of(w2).shape[1:]) < WIDTH or dtype is torch.float32:
        return False
    if any(s.scale is not None for s in static) or not _has_product(w13, w2, scheme) or batch_must_not_matter():
        return False
    if isinstance(w13, Quantized) and not has_fp8_units(w13.codes.device):  # sorted experts decode codes to 16 bits
        return False
    if scheme is None or not isinstance(x, Quantized):
        return True
    return x.zero_point is None and x.scale.dtype is torch.float32 and x.scale.shape[0] == x.codes.shape[0]


def fits_token(
    x: Weight, ids: Tensor, w13: Experts, w2: Experts, scheme: Scheme | None, static: list[Static], dtype: torch.dtype,
    bias: bool, gated: bool, interleaved: bool,
) -> bool:  # fmt: skip
    """Would moe_token run this layer, on a GPU that its fast kernel is made for? As fits_few, of any width."""
    if ids.shape[0] != 1 or scheme is None or isinstance(x, Quantized) or dtype is torch.float32 or bias:
        return False
    if not gated or interleaved or any(s.scale is not None for s in static) or batch_must_not_matter():
        return False
    return (
        _has_product(w13, w2, scheme)
        and isinstance(w13, Quantized)
        and isinstance(w2, Quantized)
        and streams(x, ids.shape[1], w13.codes, w2.codes)
    )


def through(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Quantized, w2: Quantized, scheme: Scheme, dtype: torch.dtype,
    **more: Any,
) -> Tensor:  # fmt: skip
    """The layer in one op."""
    return OPS["moe_token"](
        x, weights, ids, w13.codes, w2.codes, w13.scale, w2.scale, group=scheme.granularity.cols,
        block_rows=w13.granularity.rows, out_dtype=dtype, **more,
    )  # fmt: skip


def _has_product(w13: Experts, w2: Experts, scheme: Scheme | None) -> bool:
    if not isinstance(w13, Quantized) or not isinstance(w2, Quantized):
        return scheme is None and isinstance(w13, Tensor) and isinstance(w2, Tensor)
    group = -1 if scheme is None else scheme.granularity.cols
    if scheme is not None and (
        scheme.product or scheme.options or scheme.scale_format != "fp32" or scheme.granularity.rows != 1
    ):
        return False
    granularities = ((-1, -1), (1, -1)) if group < 0 else ((128, 128),)
    return (
        group in (-1, 128)
        and w13.codes.dtype is w2.codes.dtype
        and w2.codes.dtype in FP8
        and w13.granularity == w2.granularity
        and all(
            (w.granularity.rows, w.granularity.cols) in granularities
            and w.zero_point is None
            and w.global_scale is None
            and w.scale.dtype is torch.float32
            for w in (w13, w2)
        )
    )


def up(
    x: Weight, ids: Tensor, w13: Experts, w2: Experts, bias: Tensor | None, expert_map: Tensor | None,
    dtype: torch.dtype, parameters: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Activated rows in the order of slots; of tokens that are quantized already if the layer quantizes them."""
    return OPS["moe_up"](
        codes_of(x), ids, codes_of(w13), **_scales(x, w13), bias=bias, expert_map=expert_map, out_dtype=dtype,
        upcoming=codes_of(w2), **parameters,
    )  # fmt: skip


def down(
    rows: Weight, weights: Tensor, ids: Tensor, w2: Experts, bias: Tensor | None, expert_map: Tensor | None,
    residual: Tensor | None, residual_weight: Tensor | None, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The layer's result from those rows."""
    return OPS["moe_down"](
        codes_of(rows), weights, ids, codes_of(w2), **_scales(rows, w2), bias=bias, expert_map=expert_map,
        residual=residual, residual_weight=residual_weight, out_dtype=dtype,
    )  # fmt: skip


def _scales(rows: Weight, weight: Experts) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if isinstance(rows, Quantized):
        made |= dict(scale_a=rows.scale, group=rows.granularity.cols)
    if isinstance(weight, Quantized):
        made |= dict(scale_b=weight.scale, block_rows=weight.granularity.rows)
    return made
