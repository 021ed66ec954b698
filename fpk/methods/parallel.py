"""What the ranks of a parallel group must agree on: the maxima behind weight scales.

A scale that covers elements of several ranks must be the same on all of them, and the same as on a single device, or
the quantized weights depend on the number of ranks. fp32 maxima are exact and their order does not matter, and
`max(amax / F, floor)` is monotone, so reducing the scales is reducing the amaxes, bit for bit.

Every rank must reduce the same layers in the same order: a rank that skips one hangs the others.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from fpk.methods.parameter import cdiv

ReduceMax = Callable[[Tensor, Any], Tensor]

_reduce: ContextVar[ReduceMax | None] = ContextVar("fpk_reduce_max", default=None)


@contextlib.contextmanager
def use_reduce_max(reduce: ReduceMax) -> Iterator[None]:
    """Inside the block, ranks find maxima with `reduce(tensor, group)` instead of torch.distributed.

    Args:
        reduce: takes an fp32 tensor and the layer's group (whatever `layer.tp_group` holds, None for the default) and
            returns the element-wise maximum over the group's ranks, of the same shape.
    """
    token = _reduce.set(reduce)
    try:
        yield
    finally:
        _reduce.reset(token)


def reduce_max(tensor: Tensor, ranks: int, group: Any = None, what: str = "reduce_max") -> Tensor:
    """Element-wise maximum of an fp32 tensor over the ranks of a group; the tensor itself for a group of one.

    Args:
        tensor: any shape, fp32, the same shape on every rank.
        ranks: size of the group.
        group: a torch.distributed process group, or what the hook of `use_reduce_max` understands; None: the default.
        what: named in errors.

    Raises:
        ValueError: more than one rank, but neither a hook nor a process group of that size.
    """
    if ranks == 1:
        return tensor
    hook = _reduce.get()
    if hook is not None:
        return hook(tensor, group)
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        raise ValueError(
            f"{what}: expected torch.distributed to be initialized (or fpk.methods.use_reduce_max) to find the maximum "
            f"over {ranks} ranks, got neither"
        )
    world = torch.distributed.get_world_size(group)
    if world != ranks:
        raise ValueError(f"{what}: expected a process group of {ranks} ranks (layer.tp_group), got one of {world}")
    result = tensor.clone()
    torch.distributed.all_reduce(result, op=torch.distributed.ReduceOp.MAX, group=group)
    return result


def shard_range(size: int, group: int, ranks: int, rank: int) -> tuple[int, int]:
    """First and last-but-one index of a rank's part of a dimension whose groups must not be cut.

    Every rank gets as many whole groups as the first, until none are left: of 2880 in groups of 32, four ranks get 23,
    23, 23 and 21 groups. The last group of the dimension may be short.

    Raises:
        ValueError: group or ranks below 1, or a rank out of range.
    """
    if group < 1 or not 0 <= rank < ranks:
        raise ValueError(f"shard_range: expected group >= 1 and 0 <= rank < ranks, got {group}, {rank} and {ranks}")
    groups = cdiv(size, group)
    part = cdiv(groups, ranks) * group
    return min(rank * part, size), min((rank + 1) * part, size)


def is_row_sharded(layer: Any) -> bool:
    """Do the ranks of the layer share the input dimension (K)?"""
    return layer.tp_size > 1 and layer.input_size != layer.input_size_per_partition


def is_column_sharded(layer: Any) -> bool:
    """Do the ranks of the layer share the output dimension (N)? Replicated layers share neither."""
    return layer.tp_size > 1 and layer.output_size != sum(layer.output_partition_sizes)


def reduce_weight_scale(layer: Any, scale: Tensor, over_output: bool, what: str) -> Tensor:
    """A weight scale as on a single device: the maximum over the ranks if its groups extend over several of them.

    Args:
        layer: with tp_size, sizes and optionally tp_group.
        scale: fp32, local.
        over_output: whether the scale's groups extend along N (tensor) or only along K (channel).
    """
    if is_row_sharded(layer) or (over_output and is_column_sharded(layer)):
        return reduce_max(scale, layer.tp_size, getattr(layer, "tp_group", None), what)
    return scale
