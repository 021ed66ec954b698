"""Layers whose matrices are cut between ranks, and how experts are cut."""

from typing import Any

import torch
from torch import Tensor

from fpk.api import Quantized
from fpk.parallel.group import Group


def column_parallel(group: Group, layer: Any, x: Tensor, gather: bool = False) -> Tensor:
    """A layer whose output the ranks share (`Linear(split="column")`).

    Args:
        x: (..., K), the same on every rank.
        gather: whether every rank wants the whole output; a fused layer's shards then come rank by rank, not shard by
            shard.

    Returns:
        (..., N / ranks) of x's dtype, or (..., N).
    """
    y = layer(x)
    if not gather or group.size == 1:
        return y
    turned = y.reshape(-1, y.shape[-1]).T.contiguous()  # ranks behind each other along the output
    return group.all_gather(turned).T.reshape(*y.shape[:-1], -1)


def row_parallel(group: Group, layer: Any, x: Tensor, scatter: bool = False, fp32: bool = False) -> Tensor:
    """A layer whose input the ranks share (`Linear(split="row")`): the sum of their partial products.

    Args:
        x: (..., K / ranks), this rank's part; (T, K / ranks) with `scatter`.
        scatter: whether each rank wants its part of the tokens only (T a multiple of the ranks).
        fp32: whether to sum in fp32 and round once, instead of in x's dtype.

    Returns:
        (..., N) of x's dtype, the same on every rank; (T / ranks, N) with `scatter`.
    """
    y = layer(x)
    total = y.float() if fp32 else y
    total = group.reduce_scatter(total.contiguous()) if scatter else group.all_reduce(total.contiguous())
    return total.to(y.dtype)


def shard_experts(
    w13: Tensor | Quantized, w2: Tensor | Quantized, rank: int, ranks: int, gated: bool = True,
    interleaved: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """This rank's part of experts that are cut along I: rows of w13, columns of w2; outputs are partial sums.

    Args:
        w13: (E, 2I, H) gate and up, halves or `interleaved`; (E, I, H) if not gated.
        w2: (E, H, I).

    Returns:
        (E, 2I / ranks, H) and (E, H, I / ranks); views where that goes. Scales are those of the whole matrices, so the
        codes are slices of the single device's.

    Raises:
        ValueError: I is not a multiple of the ranks, or the cut goes through a group of scales.
    """
    inner = _shape(w2)[2]
    if not 0 <= rank < ranks or inner % ranks:
        raise ValueError(f"shard_experts.w2: expected I a multiple of {ranks} ranks, got {inner} for rank {rank}")
    part = inner // ranks
    halves = 2 if gated and not interleaved else 1
    width = part * 2 if gated and interleaved else part
    starts = [half * inner + rank * width for half in range(halves)]
    return _rows(w13, starts, width), _columns(w2, rank * part, part)


def _shape(weight: Tensor | Quantized) -> tuple[int, ...]:
    return tuple(weight.shape or ())


def _rows(weight: Tensor | Quantized, starts: list[int], count: int) -> Tensor | Quantized:
    if not isinstance(weight, Quantized):
        return torch.cat([weight[:, s : s + count] for s in starts], 1)
    rows = weight.granularity.rows
    if rows > 1 and any(n % rows for n in (*starts, count)):
        raise ValueError(f"shard_experts.w13: expected cuts at multiples of {rows} rows, got {count} rows a rank")
    codes = _cat([weight.codes[:, s : s + count] for s in starts], 1)
    if rows < 0:
        return _like(weight, codes, weight.scale)
    parts = [weight.scale[:, s // rows : -(-(s + count) // rows)] for s in starts]
    return _like(weight, codes, _cat(parts, 1))


def _columns(weight: Tensor | Quantized, start: int, count: int) -> Tensor | Quantized:
    if not isinstance(weight, Quantized):
        return weight[:, :, start : start + count].contiguous()
    cols = weight.granularity.cols
    if cols > 0 and (start % cols or count % cols):
        raise ValueError(f"shard_experts.w2: expected cuts at multiples of {cols} columns, got {count} columns a rank")
    bits = weight.codes.shape[2] * 8 // _shape(weight)[2] if weight.codes.dtype is torch.uint8 else 8
    first, last = start * bits // 8, (start + count) * bits // 8
    codes = _cat([weight.codes[:, :, first:last]], 2)
    scale = weight.scale if cols < 0 else _cat([weight.scale[:, :, start // cols : (start + count) // cols]], 2)
    return _like(weight, codes, scale)


def _cat(parts: list[Tensor], dim: int) -> Tensor:
    """torch.cat, which knows not every FP8 type."""
    raw = [p.view(torch.uint8) if p.dtype.itemsize == 1 else p for p in parts]
    return torch.cat(raw, dim).view(parts[0].dtype)


def _like(weight: Quantized, codes: Tensor, scale: Tensor) -> Quantized:
    return Quantized(codes, scale, weight.scheme, global_scale=weight.global_scale, check=False)
