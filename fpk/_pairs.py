"""Which weights go with which activations, and the arguments of the op that multiplies them."""

from typing import Any

import torch
from torch import Tensor

from fpk.check import fp8_dtype, has_fp8_units
from fpk.formats import FP8, INT8, Scheme, scheme_of

__all__ = ["no_product", "packed_arguments", "reads_packed"]


def no_product(weight: Scheme, activation: Scheme | None) -> str:
    """Why the pair has no product; empty if it has one. activation None: bf16 or fp16."""
    if activation is None:
        return ""
    if activation.granularity.rows > 1:
        return (
            f"{activation} shares scales between the rows of a block and has no product as activations with {weight} "
            f"weights; use a scale per token or per group"
        )
    if weight.product:
        fits = "zero_point" not in activation.outputs and activation.product != "int4"
    else:
        # fp8 and int8 products: the same kind of codes on both sides, and nothing that they do not decode
        fits = activation.product in ("", "mxfp8_e4m3", "mxfp8_e5m2")
        fits = fits and (activation.format is INT8) == (weight.format is INT8)
    return "" if fits else f"{activation} activations have no product with {weight} weights"


def reads_packed(qx: Any, qw: Any) -> bool:
    """Does `mm_packed` multiply a Quantized or plain tensor by these weights? Else the FP8 and INT8 products do."""
    if not scheme_of(qw.scheme).product:
        return False
    device = qw.codes.device
    if isinstance(qx, Tensor) or qx.codes.dtype is not qw.codes.dtype or qw.codes.dtype not in FP8:
        return True
    if scheme_of(qx.scheme).product and qw.codes.dim() == 2:
        return True
    # elsewhere two FP8 operands need no decoding where the matrix unit takes them
    return not has_fp8_units(device) or fp8_dtype(device) is torch.float8_e4m3fnuz


def packed_arguments(qx: Any, qw: Any) -> dict[str, Any]:
    """Arguments of `mm_packed` and `grouped_mm_packed` for a Quantized or a plain tensor and Quantized weights."""
    weight = scheme_of(qw.scheme)
    made = dict(
        a=qx, b=qw.codes, scale_b=qw.scale, format_b=weight.product, global_scale_b=qw.global_scale,
        zero_point_b=qw.zero_point, group_b=weight.granularity.cols if weight.product == "int4" else -1,
    )  # fmt: skip
    if not isinstance(qx, Tensor):
        if qx.zero_point is not None:
            raise ValueError(f"mm: {qx.scheme} with zero points has no product with {qw.scheme} weights")
        scheme = scheme_of(qx.scheme)
        made |= dict(
            a=qx.codes, scale_a=qx.scale, format_a=scheme.product or ("int8" if scheme.format is INT8 else "fp8"),
            global_scale_a=qx.global_scale, group_a=-1 if scheme.product else scheme.granularity.cols,
        )  # fmt: skip
    return made
