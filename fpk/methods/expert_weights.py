"""Stacked parameters of experts and how a checkpoint's tensors get into them.

w13 is (E, 2I, H), gate (w1) and up (w3), in halves or in alternating rows; w2 is (E, H, I). A tensor of the checkpoint
is one expert's (`expert_id`) or all experts' (None), gate and up are apart ("w1", "w3") or one ("w13" or None). Ranks
of tensor parallelism share I, in whole groups of `granule`; what a rank has more than its share is padding.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_one_of, expect_shape
from fpk.formats import scheme_of
from fpk.methods.moe_config import Ranks
from fpk.methods.parameter import Blocks, BlockScale, cdiv

SHARDS = {"w1": 0, "w3": 1}
SCALE_KINDS = (None, "tensor", "channel", "group", "block")
"""What engines call the kinds of scales that their loaders know: a parameter's `quant_method`."""


@dataclass(frozen=True)
class Sizes:
    """A rank's experts.

    Attributes:
        experts, hidden, inter: E, H and I as allocated on this rank.
        gated: w13 is gate and up.
        interleaved: their rows alternate.
        ranks: that share I.
        granule: of I, is not cut between ranks.
        slack: H and I of the checkpoint may be up to this much smaller than allocated (exclusive); 1: not at all.
    """

    experts: int
    hidden: int
    inter: int
    gated: bool = True
    interleaved: bool = False
    ranks: Ranks = field(default_factory=Ranks)
    granule: int = 1
    slack: int = 1

    @property
    def shards(self) -> int:
        return 2 if self.gated else 1

    def rows(self, matrix: str) -> int:
        return self.shards * self.inter if matrix == "w13" else self.hidden

    def cols(self, matrix: str) -> int:
        return self.hidden if matrix == "w13" else self.inter


@dataclass(frozen=True)
class Unit:
    """How many elements of a parameter stand for how many of a matrix along a row: 1 for 2 (FP4), 3 for 4, 1 for 32."""

    num: int = 1
    den: int = 1

    def of(self, size: int) -> int:
        return cdiv(size * self.num, self.den)


def unit_of(scheme: str) -> Unit:
    """Elements of a row of codes of a scheme."""
    return {4: Unit(1, 2), 6: Unit(3, 4)}.get(scheme_of(scheme).format.bits, Unit())


def expect_packable(what: str, scheme: str, size: int) -> None:
    """Raise ValueError for a row of `size` codes that ends inside a byte."""
    unit = unit_of(scheme)
    if size * unit.num % unit.den:
        raise ValueError(f"{what}: expected a multiple of {unit.den} for {scheme}, got {size}")


def shard_indices(what: str, shard_id: Any, sizes: Sizes) -> tuple[int, ...]:
    """Which shards of w13 a tensor holds.

    Raises:
        ValueError: an id that the layer does not have.
    """
    if shard_id in (None, "w13"):
        return tuple(range(sizes.shards))
    if SHARDS.get(shard_id, 2) < sizes.shards:
        return (SHARDS[shard_id],)
    known = "w1, w3, w13" if sizes.gated else "w1, w13"
    raise ValueError(f"{what}: expected a shard id out of {known} or None, got {shard_id!r}")


@dataclass(frozen=True)
class ExpertLayout:
    """Where one expert's tensor goes. `write` gets the expert's slice of the parameter."""

    sizes: Sizes
    matrix: str

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: Any) -> None:
        raise NotImplementedError

    def shards(self, what: str, shard_id: Any) -> tuple[int, ...]:
        if self.matrix == "w13":
            return shard_indices(what, shard_id, self.sizes)
        if shard_id not in (None, "w2"):
            raise ValueError(f"{what}: expected shard id w2 or None, got {shard_id!r}")
        return (0,)

    def shard(self, target: Tensor, index: int) -> Tensor:
        """Rows of a shard of w13."""
        sizes = self.sizes
        if not sizes.gated:
            return target
        return target[index::2] if sizes.interleaved else target.narrow(0, index * sizes.inter, sizes.inter)


@dataclass(frozen=True)
class ExpertMatrix(ExpertLayout):
    """Weights, scales per row, scales per group of a row, biases: what has the matrix' rows, and columns by `unit`.

    Attributes:
        unit: of the columns; None for one value a row.
        fill: of the padding.
        once: only the first rank has it: it is added before ranks are summed (w2's bias).
    """

    unit: Unit | None = Unit()
    fill: float = 0
    once: bool = False

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: Any) -> None:
        sizes, shards = self.sizes, self.shards(what, shard_id)
        if self.once and sizes.ranks.rank > 0:
            return
        values = loaded
        if self.unit is None:
            values = loaded.reshape(len(loaded), -1) if loaded.dim() in (1, 2) else loaded
            target = target.reshape(target.shape[0], 1) if target.dim() == 1 else target
        elif values.dim() == 3:  # blocks as a dimension of their own
            values = values.flatten(-2)
        if values.dim() != 2 or (self.unit is None and values.shape[1] != 1):
            self._refuse(what, loaded, shards)
        self._expect_dtype(what, target, loaded)
        if target.dtype is torch.uint32:  # torch computes little with it
            target, values = target.view(torch.int32), values.view(torch.int32)
        if self.matrix == "w2":
            values = self._hidden(what, values, 0, Unit())
            values = values if self.unit is None else self._share(what, values, 1, self.unit)
            _copy(target, values, self.fill)
            return
        if values.shape[0] % len(shards):
            self._refuse(what, loaded, shards)
        if self.unit is not None:
            values = self._hidden(what, values, 1, self.unit)
        for i, index in enumerate(shards):
            if len(shards) == 1:
                part = values
            elif sizes.interleaved:
                part = values[i::2]
            else:
                part = values.chunk(len(shards))[i]
            _copy(self.shard(target, index), self._share(what, part, 0, Unit()), self.fill)

    def _expect_dtype(self, what: str, target: Tensor, loaded: Tensor) -> None:
        same = target.dtype.itemsize == 1 and loaded.dtype.itemsize == 1
        raw = (torch.uint8, torch.float8_e8m0fnu)
        if same and target.dtype in raw and loaded.dtype in raw:
            return  # the same bytes
        if (target.dtype, loaded.dtype) in ((torch.uint8, torch.int8), (torch.uint32, torch.int32)):
            return  # packed codes by another name
        expect_dtype(what, loaded, *(FLOAT_INPUTS if target.dtype in FLOAT_INPUTS else (target.dtype,)))

    def _share(self, what: str, values: Tensor, dim: int, unit: Unit) -> Tensor:
        """This rank's part of a dimension that is I of all ranks."""
        sizes, ranks, full = self.sizes, self.sizes.ranks, values.shape[dim]
        granule = max(1, unit.of(sizes.granule))
        part = cdiv(cdiv(full, ranks.size), granule) * granule
        most, slack = unit.of(sizes.inter), max(granule, unit.of(sizes.slack))
        if not most - slack < part <= most:
            self._refuse_size(what, dim, full, most * ranks.size)
        start = min(ranks.rank * part, full)
        return values.narrow(dim, start, min(part, full - start))

    def _hidden(self, what: str, values: Tensor, dim: int, unit: Unit) -> Tensor:
        most = unit.of(self.sizes.hidden)
        if not most - max(1, unit.of(self.sizes.slack)) < values.shape[dim] <= most:
            self._refuse_size(what, dim, values.shape[dim], most)
        return values

    def _refuse_size(self, what: str, dim: int, got: int, expected: int) -> None:
        raise ValueError(f"{what}: expected {expected} along dimension {dim} (of one shard), got {got}")

    def _refuse(self, what: str, loaded: Tensor, shards: tuple[int, ...]) -> None:
        sizes, inter = self.sizes, self.sizes.inter * self.sizes.ranks.size
        rows = len(shards) * inter if self.matrix == "w13" else sizes.hidden
        cols = sizes.hidden if self.matrix == "w13" else inter
        shape = (rows,) if self.unit is None else (rows, self.unit.of(cols))
        expect_shape(what, loaded, shape)
        raise ValueError(f"{what}: expected {shape}, got {tuple(loaded.shape)}")


@dataclass(frozen=True)
class ExpertScalar(ExpertLayout):
    """One value for each shard ("w13") or expert; `joint`: gate and up share it, the larger one counts."""

    joint: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        per_shard = self.matrix == "w13" and not self.joint
        return (self.sizes.experts, self.sizes.shards) if per_shard else (self.sizes.experts,)

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: Any) -> None:
        shards = self.shards(what, shard_id)
        expect_shape(what, loaded, (), (1,), *(((len(shards),),) if len(shards) > 1 else ()))
        expect_dtype(what, loaded, *(FLOAT_INPUTS if target.dtype in FLOAT_INPUTS else (target.dtype, torch.int32)))
        values = loaded.reshape(-1).expand(len(shards))
        if self.joint or self.matrix == "w2":
            value = values.max().to(target.device, target.dtype)
            both = self.joint and len(shards) < self.sizes.shards
            target.copy_(torch.maximum(target, value) if both else value)
            return
        for i, index in enumerate(shards):
            target[index].copy_(values[i])


@dataclass(frozen=True)
class ExpertBlocks(ExpertLayout):
    """Scales of blocks, in the grid of `blocks`."""

    blocks: Blocks | None = None

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: Any) -> None:
        assert self.blocks is not None
        shards = self.shards(what, shard_id)
        BlockScale(self.blocks).write(what, target, loaded, shards if self.matrix == "w13" else None)


class WriteExpert:
    """The loader of fpk's own expert layers, with the arguments of engines' ones.

    load(param, loaded_weight, weight_name="", shard_id=None, expert_id=None) -> False for an expert of another rank.
    Without an expert_id the tensor has a leading dimension, the experts of all ranks.
    """

    takes_layer = True  # its expert_map may have changed since the last time

    def __init__(self, what: str, layout: ExpertLayout) -> None:
        self.what, self.layout = what, layout

    def __call__(
        self, layer: Any, param: Tensor, loaded_weight: Tensor, weight_name: str = "", shard_id: Any = None,
        expert_id: int | None = None, return_success: bool = False,
    ) -> bool:  # fmt: skip
        kind = getattr(param, "quant_method", None)
        if kind not in SCALE_KINDS:
            expect_one_of(f"{self.what}.quant_method", kind, SCALE_KINDS[1:])
        local = LocalExperts(param.shape[0], getattr(layer, "expert_map", None))
        what = f"{self.what} ({weight_name})" if weight_name else self.what
        shard = "" if shard_id is None else f", shard {shard_id}"
        if expert_id is not None:
            index = local(what, expert_id)
            if index is None:
                return False
            self.layout.write(f"{what}, expert {expert_id}{shard}", param.data[index], loaded_weight, shard_id)
            return True
        count = local.count
        if loaded_weight.dim() == 0 or loaded_weight.shape[0] != count:
            raise ValueError(f"{what}: expected {count} experts in the leading dimension, got {loaded_weight.shape}")
        for expert in range(count):
            index = local(what, expert)
            if index is not None:
                self.layout.write(f"{what}, expert {expert}{shard}", param.data[index], loaded_weight[expert], shard_id)
        return True


class LocalExperts:
    """Numbers of all ranks' experts to those of this rank."""

    def __init__(self, experts: int, expert_map: Tensor | None) -> None:
        self.table = None if expert_map is None else [int(i) for i in expert_map.tolist()]
        self.count = experts if self.table is None else len(self.table)

    def __call__(self, what: str, expert: int) -> int | None:
        if not 0 <= expert < self.count:
            raise ValueError(f"{what}: expected an expert id in 0..{self.count - 1}, got {expert}")
        index = expert if self.table is None else self.table[expert]
        return None if index < 0 else index


def _copy(target: Tensor, values: Tensor, fill: float) -> None:
    """Values into the corner of a matrix, `fill` into the rest, in one write: loading counts elements by writes."""
    if values.numel() == 0 and target.numel() == 0:
        return
    if target.dtype.itemsize == 1:
        target, values = target.view(torch.uint8), values.contiguous().view(torch.uint8)
    if values.shape != target.shape:
        whole = torch.full(target.shape, fill, dtype=target.dtype, device=values.device)
        whole[: values.shape[0], : values.shape[1]] = values
        values = whole
    target.copy_(values)
