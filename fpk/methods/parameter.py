"""Parameters of a layer and how a checkpoint's tensors get into them.

`Cut` says which part of a layer's weight a rank holds. A layout (`Weight`, `TensorScale`, `ChannelScale`, `BlockScale`)
writes one tensor of the checkpoint, for one logical shard or several, into the part of a parameter that it belongs to.
Parameters themselves are plain `nn.Parameter`s with attributes, which torch.compile and deepcopy understand.
"""

import math
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_shape
from fpk.formats import E8M0, decode

MISSING = torch.finfo(torch.float32).min
"""What fp32 scales hold until one is loaded."""

ShardId = str | int | tuple[int, ...] | None


@dataclass(frozen=True)
class Cut:
    """Which part of a layer's weight (N, K) a rank holds.

    Attributes:
        widths: rows of each logical shard (q, k, v; gate, up) on this rank.
        starts: the row of the whole shard at which this rank's part of it begins.
        full_widths: rows of the whole shards.
        K, k_start, full_K: columns here, the first of them in the whole, and the whole.
    """

    widths: tuple[int, ...]
    starts: tuple[int, ...]
    full_widths: tuple[int, ...]
    K: int
    k_start: int
    full_K: int

    @property
    def N(self) -> int:
        return sum(self.widths)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Row at which each shard begins on this rank."""
        return tuple(sum(self.widths[:i]) for i in range(len(self.widths)))

    @property
    def full_offsets(self) -> tuple[int, ...]:
        """Row at which each shard begins where the whole layer is one tensor."""
        return tuple(sum(self.full_widths[:i]) for i in range(len(self.widths)))


def cut_of(layer: Any, widths: list[int], K: int, output_size: int, input_size: int) -> Cut:
    """The cut of a layer from its `tp_size`, `tp_rank` (1 and 0 if it has none) and `num_kv_head_replicas`.

    The output is cut if `output_size` is not the sum of `widths`, the input if `input_size` is not K. Key and value
    heads that several ranks share (`num_kv_head_replicas`) are cut into fewer parts.

    Raises:
        ValueError: sizes that `tp_size` parts do not add up to.
    """
    ranks, rank = getattr(layer, "tp_size", 1), getattr(layer, "tp_rank", 0)
    replicas = getattr(layer, "num_kv_head_replicas", 1)
    name = name_of(layer)
    column = ranks > 1 and output_size != sum(widths)
    row = ranks > 1 and input_size != K
    if row and K * ranks != input_size:
        raise ValueError(f"{name}.input_size_per_partition: expected {input_size} / {ranks} ranks, got {K}")
    if column and replicas == 1 and sum(widths) * ranks != output_size:
        raise ValueError(
            f"{name}.output_partition_sizes: expected a sum of {output_size} / {ranks} ranks, got {list(widths)}"
        )
    shared = [replicas if column and len(widths) == 3 and i > 0 else 1 for i in range(len(widths))]
    return Cut(
        widths=tuple(widths),
        starts=tuple((rank // s) * w if column else 0 for s, w in zip(shared, widths, strict=True)),
        full_widths=tuple(ranks // s * w if column else w for s, w in zip(shared, widths, strict=True)),
        K=K, k_start=rank * K if row else 0, full_K=input_size if row else K,
    )  # fmt: skip


def shards_of(what: str, shard_id: ShardId, count: int) -> tuple[int, ...]:
    """Indices of logical shards: None is all of them, q, k, v are 0, 1, 2; ints and tuples of ints are themselves."""
    if shard_id is None:
        return tuple(range(count))
    ids = shard_id if isinstance(shard_id, tuple) else (shard_id,)
    indices = tuple({"q": 0, "k": 1, "v": 2}.get(i, -1) if isinstance(i, str) else i for i in ids)
    named = any(isinstance(i, str) for i in ids)
    if not ids or any(not 0 <= i < count for i in indices) or (named and count != 3):
        known = f"0..{count - 1}" + (", q, k, v" if count == 3 else "")
        raise ValueError(f"{what}: expected a shard id out of {known} (or a tuple of them, or None), got {shard_id!r}")
    return indices


class Layout(Protocol):
    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: ShardId) -> None: ...


@dataclass(frozen=True)
class Weight:
    """(N, K) weights, or an (N,) bias: rows by shard, columns by the cut of the input."""

    cut: Cut

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: ShardId) -> None:
        cut = self.cut
        shards = shards_of(what, shard_id, len(cut.widths))
        rows = sum(cut.full_widths[i] for i in shards)
        expect_shape(what + _of(shard_id), loaded, (rows, cut.full_K) if target.dim() == 2 else (rows,))
        # a conversion between codes and values would drop the scale
        expect_dtype(what + _of(shard_id), loaded, *(FLOAT_INPUTS if target.dtype in FLOAT_INPUTS else [target.dtype]))
        if target.dim() == 2:
            loaded = loaded.narrow(1, cut.k_start, cut.K)
        row = 0
        for i in shards:
            source = loaded.narrow(0, row + cut.starts[i], cut.widths[i])
            target.narrow(0, cut.offsets[i], cut.widths[i]).copy_(source)
            row += cut.full_widths[i]


@dataclass(frozen=True)
class PackedWeight:
    """(N, columns) codes or scales, of which `unit` says how many a row of K has; rows by shard."""

    cut: Cut
    unit: Any

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: ShardId) -> None:
        cut, unit = self.cut, self.unit
        scaled = replace_fields(cut, K=unit.of(cut.K), k_start=unit.of(cut.k_start), full_K=unit.of(cut.full_K))
        raw = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
        if target.dtype is torch.uint8 and loaded.dtype in raw:
            loaded = loaded.view(torch.uint8)  # the same bytes by other names
        Weight(scaled).write(what, target, loaded, shard_id)


@dataclass(frozen=True)
class TensorScale:
    """(shards,) scales, one a logical shard. A module that is one tensor on disk has one, written to every slot."""

    count: int

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: ShardId) -> None:
        shards = shards_of(what, shard_id, self.count)
        expect_shape(what + _of(shard_id), loaded, (), (1,))
        expect_dtype(what + _of(shard_id), loaded, *FLOAT_INPUTS)
        for i in shards:
            target.narrow(0, i, 1).copy_(loaded.reshape(1))


@dataclass(frozen=True)
class ChannelScale:
    """(N, 1) scales, one a row."""

    cut: Cut

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: ShardId) -> None:
        rows = sum(self.cut.full_widths[i] for i in shards_of(what, shard_id, len(self.cut.widths)))
        expect_shape(what + _of(shard_id), loaded, (rows,), (rows, 1))
        Weight(self.cut).write(what, target.view(-1), loaded.reshape(-1), shard_id)


@dataclass(frozen=True)
class Blocks:
    """The grid of block scales of a rank's weight: (rows of the grid, columns) with block (`rows`, `cols`).

    On disk every shard has its own grid of `block` anchored at its first row. Where the shards of a rank, or a tensor
    that holds several of them, do not begin at multiples of the block, scales are repeated for shorter blocks of `rows`
    rows that do; nothing is lost by that. A single shard, and the columns, keep their block and begin inside one:
    `offset_n`, `offset_k`.
    """

    cut: Cut
    block: tuple[int, int]

    @property
    def rows(self) -> int:
        if len(self.cut.widths) == 1:
            return self.block[0]
        return math.gcd(self.block[0], *self.cut.offsets, *self.cut.starts, *self.cut.full_offsets)

    @property
    def cols(self) -> int:
        return self.block[1]

    @property
    def offset_n(self) -> int:
        return self.cut.starts[0] % self.block[0] if len(self.cut.widths) == 1 else 0

    @property
    def offset_k(self) -> int:
        return self.cut.k_start % self.cols

    @property
    def shape(self) -> tuple[int, int]:
        return cdiv(self.offset_n + self.cut.N, self.rows), cdiv(self.offset_k + self.cut.K, self.cols)

    @property
    def begins_inside(self) -> bool:
        """Does the weight begin inside a block, so that `scale` does not start with a whole one?"""
        return self.offset_n > 0 or self.offset_k > 0

    @property
    def whole_sizes(self) -> tuple[int, int]:
        """Rows and columns of the largest blocks that begin where the weight does."""
        return math.gcd(self.rows, self.offset_n), math.gcd(self.cols, self.offset_k)

    def whole(self, scale: Tensor) -> tuple[Tensor, int, int]:
        """The scales repeated for blocks (rows, columns), returned too, that begin where the weight does."""
        return self.whole_stack(scale), *self.whole_sizes

    def whole_stack(self, scale: Tensor) -> Tensor:
        """The scales of one matrix or a stack of them, repeated for blocks of `whole_sizes`."""
        rows, cols = self.whole_sizes
        at_n = (self.offset_n + rows * torch.arange(cdiv(self.cut.N, rows), device=scale.device)) // self.rows
        at_k = (self.offset_k + cols * torch.arange(cdiv(self.cut.K, cols), device=scale.device)) // self.cols
        return scale.index_select(-2, at_n).index_select(-1, at_k)


@dataclass(frozen=True)
class BlockScale:
    """Block scales into the grid of `Blocks`; takes (n, k), (n, 1, k, 1), and e8m0 bytes beside floats."""

    blocks: Blocks

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: ShardId) -> None:
        blocks, cut = self.blocks, self.blocks.cut
        shards = shards_of(what, shard_id, len(cut.widths))
        if loaded.dim() == 4 and loaded.shape[1] == loaded.shape[3] == 1:
            loaded = loaded[:, 0, :, 0]
        height, width = blocks.block
        full = sum(cut.full_widths[i] for i in shards)
        expect_shape(what + _of(shard_id), loaded, (cdiv(full, height), cdiv(cut.full_K, width)))
        exponents = (torch.float8_e8m0fnu, torch.uint8)
        is_float = target.dtype is torch.float32
        expect_dtype(what + _of(shard_id), loaded, *exponents, *(FLOAT_INPUTS if is_float else ()))
        if is_float and loaded.dtype in exponents:
            loaded = decode(loaded.contiguous().view(torch.uint8), E8M0)
        columns = slice(cut.k_start // width, cdiv(cut.k_start + cut.K, width))
        first = cut.full_offsets[shards[0]]
        for i in shards:
            if cut.widths[i] == 0:
                continue
            # global rows at which this rank's blocks of `rows` begin, seen from the start of the loaded tensor
            begin = cut.full_offsets[i] - first if len(shards) > 1 else 0
            begin += cut.starts[i] - blocks.offset_n
            count = cdiv(blocks.offset_n + cut.widths[i], blocks.rows)
            at = (begin + blocks.rows * torch.arange(count, device=loaded.device)) // height
            where = cut.offsets[i] // blocks.rows
            source = _bytes(loaded)[at][:, columns]
            _bytes(target).narrow(0, where, count).copy_(source)


def _bytes(scale: Tensor) -> Tensor:
    return scale.view(torch.uint8) if scale.dtype is torch.float8_e8m0fnu else scale


def _of(shard_id: ShardId) -> str:
    return "" if shard_id is None else f" (shard {shard_id!r})"


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def name_of(layer: Any) -> str:
    """The layer's prefix, or its class: what errors call it."""
    return getattr(layer, "prefix", "") or type(layer).__name__


def register(layer: nn.Module, name: str, data: Tensor, **attributes: Any) -> nn.Parameter:
    """Make `data` the layer's parameter `name` and give it attributes."""
    parameter = nn.Parameter(data, requires_grad=False)
    parameter.__dict__.update(attributes)
    layer.register_parameter(name, parameter)
    return parameter


def adopt(layer: nn.Module, state: dict[str, Tensor], device: torch.device) -> None:
    """Empty parameters for all but the bias of a processed layer's state, with the attributes that are there."""
    for name, value in state.items():
        if name != "bias":
            old = layer._parameters.get(name)
            attributes = attributes_of(old) if old is not None else {}
            data = torch.empty_like(value, device=device)
            register(layer, name, data, **attributes | {"fixed_dtype": True})


def attributes_of(parameter: Tensor) -> dict[str, Any]:
    """What fpk or an engine has attached to a parameter; not what torch has."""
    return {n: v for n, v in parameter.__dict__.items() if not n.startswith("_")}


def replace(layer: nn.Module, name: str, data: Tensor) -> None:
    """Give parameter `name` another value, in the storage it has if that fits: captured graphs hold its address.

    Attributes (`weight_loader`, `input_dim`, ...) stay.
    """
    old = layer._parameters.get(name)
    if (
        old is not None
        and not old.is_meta
        and (old.shape, old.dtype, old.device, old.stride()) == (data.shape, data.dtype, data.device, data.stride())
    ):
        if old.data_ptr() != data.data_ptr():
            old.data.view(torch.uint8).copy_(data.view(torch.uint8)) if old.dtype.itemsize == 1 else old.data.copy_(
                data
            )
        return
    register(layer, name, data, **(attributes_of(old) if old is not None else {}))


def set_parameter(layer: Any, name: str, tensor: Tensor | None) -> None:
    """Give a parameter its value in place where that fits; None deletes it."""
    if tensor is None:
        layer.register_parameter(name, None)
    else:
        replace(layer, name, tensor)


def set_derived(layer: Any, name: str, tensor: Tensor | None) -> None:
    """Keep what is computed from parameters on the layer as a buffer, in place where that fits; it is not saved."""
    old = layer._buffers.get(name)
    if old is not None and tensor is not None and (old.shape, old.dtype) == (tensor.shape, tensor.dtype):
        old.copy_(tensor)
    else:
        layer.register_buffer(name, tensor, persistent=False)
        if tensor is not None:
            tensor.fixed_dtype = True  # type: ignore[attr-defined]
