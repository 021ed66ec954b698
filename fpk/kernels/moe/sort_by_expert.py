"""sort_by_expert: the order of routed rows by expert, and where each expert's rows end.

    slot s = t * top_k + j stands for expert l[s] = ids[t, j], through expert_map where there is one; a slot whose id or
    mapped id is out of range is dropped
    index[i]       = slot of the i-th row: by expert, then by slot; dropped slots come last, as -1
    position[t, j] = i with index[i] = t * top_k + j, or -1 for a dropped slot
    offs[e]        = number of rows of experts 0..e (torch.nn.functional.grouped_mm's offs)

The order is that of a stable sort, so nothing depends on timing. No tile size is known here: a grouped product finds
its tiles from offs by itself.

Kernels: `rank`, one launch in which each program counts the smaller (expert, slot) pairs of its slots; `chunks`, two
launches for many rows: histograms and ranks of chunks, then places; `scan`, three: a sum over the chunks between them.

Source: the alignment and permutation steps of vLLM's fused MoE, without padding to a block size.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_near, expect_rank, expect_slots
from fpk.db import Config, bucket
from fpk.device import of
from fpk.kernels._tile import after_previous, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import generator
from fpk.shapes import MOE_LAYERS, MOE_TOKENS


def reference(ids: Tensor, num_experts: int, expert_map: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    flat = ids.reshape(-1).long()
    if expert_map is not None:
        known = (flat >= 0) & (flat < expert_map.shape[0])
        flat = torch.where(known, expert_map.long()[flat.clamp(0, expert_map.shape[0] - 1)], -1)
    expert = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    order = expert.argsort(stable=True)
    dropped = expert[order] == num_experts
    index = torch.where(dropped, -1, order).to(torch.int32)
    position = order.argsort()
    position = torch.where(expert == num_experts, -1, position).to(torch.int32)
    counts = torch.zeros(num_experts + 1, dtype=torch.long, device=ids.device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))
    return index, position.reshape(ids.shape), counts.cumsum(0)[:num_experts].to(torch.int32)


def check(ids: Tensor, num_experts: int, expert_map: Tensor | None, **_: Any) -> None:
    expect_rank("sort_by_expert.ids", ids, 2)
    expect_dtype("sort_by_expert.ids", ids, torch.int32, torch.int64)
    expect_near("sort_by_expert.ids", ids)
    expect_slots("sort_by_expert.ids", ids, ids.shape[0] * ids.shape[1])
    if num_experts < 1:
        raise ValueError(f"sort_by_expert.num_experts: expected a positive number, got {num_experts}")
    if expert_map is not None:
        expect_rank("sort_by_expert.expert_map", expert_map, 1)
        expect_dtype("sort_by_expert.expert_map", expert_map, torch.int32, torch.int64)
        if expert_map.shape[0] == 0:
            raise ValueError("sort_by_expert.expert_map: expected at least one expert, got (0,)")


@triton.jit
def _expert_of(ids_ptr, map_ptr, slots, mask, top_k, num_experts, num_mapped, stride_im, stride_ik):
    """Local expert of slots, num_experts where they are dropped or lie off the mask."""
    offs = (slots // top_k).to(tl.int64) * stride_im + (slots % top_k) * stride_ik
    expert = tl.load(ids_ptr + offs, mask=mask, other=-1).to(tl.int64)
    if map_ptr is not None:
        known = (expert >= 0) & (expert < num_mapped)
        expert = tl.load(map_ptr + tl.where(known, expert, 0), mask=known, other=-1).to(tl.int64)
    local = (expert >= 0) & (expert < num_experts)
    return tl.where(local, expert, num_experts).to(tl.int32)


@triton.jit
def _store_places(index_ptr, position_ptr, slots, places, expert, mask, num_experts):
    local = expert < num_experts
    tl.store(index_ptr + places, tl.where(local, slots, -1), mask=mask)
    tl.store(position_ptr + slots, tl.where(local, places, -1), mask=mask)


@triton.jit(do_not_specialize=["R"])
def _rank_kernel(
    ids_ptr, map_ptr, index_ptr, position_ptr, offs_ptr,
    R, num_experts, num_mapped, top_k, stride_im, stride_ik,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Numbers from R on stand for the ends of experts: what is smaller than (e, all slots) is offs[e]."""
    after_previous(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    is_slot = row < R
    own = _expert_of(ids_ptr, map_ptr, row, is_slot, top_k, num_experts, num_mapped, stride_im, stride_ik)
    expert = tl.where(is_slot, own, row - R)
    smaller = tl.zeros((BLOCK_R, CHUNK), dtype=tl.int32)
    for start in range(0, R, CHUNK):
        other = start + tl.arange(0, CHUNK)
        there = other < R
        other_expert = _expert_of(
            ids_ptr, map_ptr, other, there, top_k, num_experts, num_mapped, stride_im, stride_ik
        )  # fmt: skip
        other_expert = tl.where(there, other_expert, num_experts + 1)[None, :]
        before = (other_expert < expert[:, None]) | (
            (other_expert == expert[:, None]) & (other[None, :] < row[:, None])
        )  # fmt: skip
        smaller += before.to(tl.int32)
    count = tl.sum(smaller, axis=1)
    _store_places(index_ptr, position_ptr, row, count, own, is_slot, num_experts)
    tl.store(offs_ptr + row - R, count, mask=(row >= R) & (row < R + num_experts))


@triton.jit(do_not_specialize=["R"])
def _count_kernel(
    ids_ptr, map_ptr, rank_ptr, counts_ptr,
    R, num_experts, num_mapped, top_k, stride_im, stride_ik,
    PDL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows of each expert in a chunk of slots, and each slot's rank among those of its expert in the chunk."""
    after_previous(PDL)
    chunk = tl.program_id(0)
    inside = tl.arange(0, CHUNK)
    slots = chunk * CHUNK + inside
    mask = slots < R
    expert = _expert_of(ids_ptr, map_ptr, slots, mask, top_k, num_experts, num_mapped, stride_im, stride_ik)
    # slots beyond the end count for the last bin, which nobody reads
    counts = tl.histogram(tl.where(mask, expert, BLOCK_E - 1), BLOCK_E)
    bins = tl.arange(0, BLOCK_E)
    tl.store(counts_ptr + chunk.to(tl.int64) * BLOCK_E + bins, counts)
    rank = tl.zeros((CHUNK, STEP), dtype=tl.int32)
    for start in range(0, CHUNK, STEP):
        other = start + tl.arange(0, STEP)
        there = chunk * CHUNK + other < R
        other_expert = _expert_of(
            ids_ptr, map_ptr, chunk * CHUNK + other, there, top_k, num_experts, num_mapped, stride_im, stride_ik
        )  # fmt: skip
        rank += ((other_expert[None, :] == expert[:, None]) & (other[None, :] < inside[:, None])).to(tl.int32)
    tl.store(rank_ptr + slots, tl.sum(rank, axis=1), mask=mask)


@triton.jit(do_not_specialize=["chunks"])
def _scan_kernel(
    counts_ptr, total_ptr, chunks,
    PDL: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """COLS experts: their rows in earlier chunks, in the place of their rows in each chunk, and in all."""
    after_previous(PDL)
    bins = tl.program_id(0) * COLS + tl.arange(0, COLS)
    before = tl.zeros((COLS,), dtype=tl.int32)
    for start in range(0, chunks, STEP):
        chunk = start + tl.arange(0, STEP)
        ptrs = counts_ptr + chunk[:, None].to(tl.int64) * BLOCK_E + bins[None, :]
        mask = (chunk < chunks)[:, None] & (bins < BLOCK_E)[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, tl.cumsum(counts, axis=0) - counts + before[None, :], mask=mask)
        before += tl.sum(counts, axis=0)
    tl.store(total_ptr + bins, before, mask=bins < BLOCK_E)


@triton.jit(do_not_specialize=["R"])
def _scatter_kernel(
    ids_ptr, map_ptr, rank_ptr, before_ptr, total_ptr, index_ptr, position_ptr, offs_ptr,
    R, num_experts, num_mapped, top_k, stride_im, stride_ik,
    PDL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A slot's place: rows of smaller experts, rows of its expert in earlier chunks, its rank in its own."""
    after_previous(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)
    total = tl.where(bins <= num_experts, tl.load(total_ptr + bins), 0)
    ends = tl.cumsum(total, axis=0)
    if chunk == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < num_experts)
    first = ends - total + tl.load(before_ptr + chunk.to(tl.int64) * BLOCK_E + bins)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = slots < R
    expert = _expert_of(ids_ptr, map_ptr, slots, mask, top_k, num_experts, num_mapped, stride_im, stride_ik)
    places = tl.gather(first, expert, 0) + tl.load(rank_ptr + slots, mask=mask, other=0)
    _store_places(index_ptr, position_ptr, slots, places, expert, mask, num_experts)


@triton.jit(do_not_specialize=["R", "chunks"])
def _place_kernel(
    ids_ptr, map_ptr, rank_ptr, counts_ptr, index_ptr, position_ptr, offs_ptr,
    R, chunks, num_experts, num_mapped, top_k, stride_im, stride_ik,
    PDL: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A slot's place: rows of smaller experts, rows of its expert in earlier chunks, its rank in its own."""
    after_previous(PDL)
    chunk = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)
    total = tl.zeros((STEP, BLOCK_E), dtype=tl.int32)
    before = tl.zeros((STEP, BLOCK_E), dtype=tl.int32)
    for start in range(0, chunks, STEP):
        other = start + tl.arange(0, STEP)
        ptrs = counts_ptr + other[:, None].to(tl.int64) * BLOCK_E + bins[None, :]
        counts = tl.load(ptrs, mask=(other < chunks)[:, None] & (bins <= num_experts)[None, :], other=0)
        total += counts
        before += tl.where((other < chunk)[:, None], counts, 0)
    ends = tl.cumsum(tl.sum(total, axis=0), axis=0)
    if chunk == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < num_experts)
    first = ends - tl.sum(total, axis=0) + tl.sum(before, axis=0)
    slots = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = slots < R
    expert = _expert_of(ids_ptr, map_ptr, slots, mask, top_k, num_experts, num_mapped, stride_im, stride_ik)
    places = tl.gather(first, expert, 0) + tl.load(rank_ptr + slots, mask=mask, other=0)
    _store_places(index_ptr, position_ptr, slots, places, expert, mask, num_experts)


def configs(ids: Tensor, **_: Any):
    R = bucket(ids.shape[0]) * ids.shape[1]
    if of(ids.device).arch == "cpu":  # the interpreter wants few programs
        yield Config(kernel="rank", BLOCK_R=64, CHUNK=64, num_warps=4)
    if R <= 1024:
        yield Config(kernel="rank", BLOCK_R=16, CHUNK=128, num_warps=4)
    elif R <= 16384:
        yield Config(kernel="chunks", CHUNK=128, STEP=8, num_warps=4)
    for step in (16, 4):
        yield Config(kernel="chunks", CHUNK=256 if R <= 65536 else 1024, STEP=step, num_warps=8)
    yield Config(kernel="rank", BLOCK_R=32, CHUNK=256, num_warps=8)  # any number of experts
    for rows, cols in ((8, 256), (16, 128), (16, 512), (32, 128), (32, 256), (64, 64)):
        for warps in (2, 4, 8):
            if R <= 32768:
                yield Config(kernel="rank", BLOCK_R=rows, CHUNK=cols, num_warps=warps)
    for chunk in (64, 128, 256, 1024):
        for step in (4, 8, 16):
            for warps in (4, 8):
                yield Config(kernel="chunks", CHUNK=chunk, STEP=step, num_warps=warps)
    for chunk in (64, 128, 256, 512):
        for warps in (2, 4, 8):
            yield Config(kernel="scan", CHUNK=chunk, num_warps=warps)


def legal(config: Config, num_experts: int, **_: Any) -> bool:
    if config["kernel"] == "rank":
        return True
    if config["kernel"] == "scan":
        return _bins(num_experts) <= 2048
    # two sums of STEP counts an expert in registers, at most 64 elements a thread each
    return config["STEP"] * _bins(num_experts) <= 2048 * config["num_warps"]


def _bins(num_experts: int) -> int:
    """Experts, the dropped slots, and slots beyond the end."""
    return max(16, triton.next_power_of_2(num_experts + 2))


def key(ids: Tensor, num_experts: int, expert_map: Tensor | None, **_: Any) -> dict[str, int | str]:
    return dict(
        M=bucket(ids.shape[0]), E=num_experts, top_k=ids.shape[1], ids=str(ids.dtype), map=int(expert_map is not None)
    )


def cost(ids: Tensor, num_experts: int, **_: Any) -> Cost:
    return Cost(flops=0, bytes=ids.numel() * (ids.element_size() + 8) + 4 * num_experts)


def inputs(
    *, M, E, top_k=2, mapped=None, kind="normal", dtype=torch.int32, layout="contiguous", device="cuda", seed=0
):  # fmt: skip
    """mapped: share of the experts that live elsewhere; E counts those that are here."""
    g = generator(seed, device)
    known = E if mapped is None else round(E / max(1 - mapped, 0.25)) + 1
    ids = torch.randint(0, known, (M, top_k), generator=g, device=device, dtype=dtype)
    if kind == "one":
        ids = torch.zeros_like(ids) + (known - 1)
    elif kind == "invalid":
        odd = torch.randint(0, 4, (M, top_k), generator=g, device=device)
        ids = torch.where(odd == 0, -1, torch.where(odd == 1, known + 5, ids)).to(dtype)
    expert_map = None
    if mapped is not None:
        place = torch.randperm(known, generator=g, device=device)
        expert_map = torch.where(place < E * (mapped < 1), place, -1).to(torch.int32)
    if layout == "transposed":
        ids = ids.T.contiguous().T
    return dict(ids=ids, num_experts=E, expert_map=expert_map)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 17, 200, 400), E=(1, 2, 7, 33, 257), top_k=(1, 2, 6), mapped=(None, 0.0, 0.5, 1.0),
        kind=("normal", "one", "invalid"), dtype=(torch.int32, torch.int64), layout=("contiguous", "transposed"),
    ),
    kernels=dict(rank=Kernel(_rank_kernel), chunks=Kernel(_place_kernel), scan=Kernel(_scatter_kernel)),
    configs=configs, legal=legal, key=key, cost=cost,
    cases={
        f"{n}/T={t}": dict(M=t, E=experts, top_k=top_k, mapped=dropped or None)
        for n, (experts, top_k, _, _, dropped) in MOE_LAYERS.items() for t in MOE_TOKENS
    },
)  # fmt: skip
def sort_by_expert(
    ids: Tensor, num_experts: int, expert_map: Tensor | None = None, *, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows of M tokens by expert.

    Args:
        ids: (M, top_k) int32 or int64, any strides; the expert of each slot. Any value is allowed: a slot whose id is
            negative or too large is dropped, an expert may stand in a token twice.
        num_experts: E, experts on this rank.
        expert_map: (experts of all ranks,) int32 or int64 or None; the number of an expert on this rank, -1 if it lives
            elsewhere. It may be uneven between ranks, and all -1.

    Returns:
        index (M * top_k,), position (M, top_k) and offs (E,), all int32; index and position hold -1 for dropped slots.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    M, top_k = ids.shape
    R = M * top_k
    index = torch.empty((R,), dtype=torch.int32, device=ids.device)
    position = torch.empty((M, top_k), dtype=torch.int32, device=ids.device)
    if R == 0:
        return index, position, torch.zeros((num_experts,), dtype=torch.int32, device=ids.device)
    offs = torch.empty((num_experts,), dtype=torch.int32, device=ids.device)
    config = dict(config)
    sizes = (num_experts, 0 if expert_map is None else expert_map.shape[0], top_k, ids.stride(0), ids.stride(1))
    kernel = config.pop("kernel")
    if kernel == "rank":
        _rank_kernel[(triton.cdiv(R + num_experts, config["BLOCK_R"]),)](
            ids, expert_map, index, position, offs, R, *sizes, **early_start(of(ids.device)), **config
        )
        return index, position, offs
    bins = _bins(num_experts)
    chunks = triton.cdiv(R, config["CHUNK"])
    rank = torch.empty((R,), dtype=torch.int32, device=ids.device)
    counts = torch.empty((chunks, bins), dtype=torch.int32, device=ids.device)
    _count_kernel[(chunks,)](
        ids, expert_map, rank, counts, R, *sizes,
        CHUNK=config["CHUNK"], BLOCK_E=bins, STEP=min(32, 8192 // config["CHUNK"]), num_warps=config["num_warps"],
        **early_start(of(ids.device)),
    )  # fmt: skip
    if kernel == "scan":
        total = torch.empty((bins,), dtype=torch.int32, device=ids.device)
        cols = min(bins, 32)
        _scan_kernel[(triton.cdiv(bins, cols),)](
            counts, total, chunks, BLOCK_E=bins, STEP=64, COLS=cols, num_warps=4, **early_start(of(ids.device))
        )
        _scatter_kernel[(chunks,)](
            ids, expert_map, rank, counts, total, index, position, offs, R, *sizes, BLOCK_E=bins,
            **early_start(of(ids.device)), **config,
        )  # fmt: skip
        return index, position, offs
    _place_kernel[(chunks,)](
        ids,
        expert_map,
        rank,
        counts,
        index,
        position,
        offs,
        R,
        chunks,
        *sizes,
        BLOCK_E=bins,
        **early_start(of(ids.device)),
        **config,
    )
    return index, position, offs
