"""What the grouped products share: which tile of which expert a program has, their candidates, and their arguments.

Rows are sorted by expert and offs holds the row after each expert's last one. Only the device knows offs, so a launch
has as many programs as the worst routing could need, and each finds its tile by itself; no layout depends on a tile.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fpk.check import (
    FLOAT_INPUTS,
    expect_dtype,
    expect_inner_contiguous,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from fpk.db import Config, bucket
from fpk.kernels.gemm._mm import load_k, tile_space


@triton.jit
def expert_tile(offs_ptr, R, E, tiles_n, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its row after the last, first row of the tile, column of the tile) of this program.

    Expert E has the rows of no expert, from offs[-1] to R; a larger number means that there is nothing to do. All tiles
    of an expert follow one another, rows fastest: neighbours share weights.
    """
    pid = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    end = tl.where(e < E, tl.minimum(tl.load(offs_ptr + e, mask=e < E, other=0), R), R)
    begin = tl.minimum(tl.load(offs_ptr + e - 1, mask=(e > 0) & (e <= E), other=0), R)
    tiles = tl.where(e <= E, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M), 0)
    done = tl.cumsum(tiles, axis=0) * tiles_n <= pid
    expert = tl.sum(done.to(tl.int32), axis=0)
    here = e == expert
    own = tl.maximum(tl.sum(tl.where(here, tiles, 0), axis=0), 1)
    inside = pid - tl.sum(tl.where(done, tiles, 0), axis=0) * tiles_n
    first = tl.sum(tl.where(here, begin, 0), axis=0) + inside % own * BLOCK_M
    return expert, tl.sum(tl.where(here, end, 0), axis=0), first, inside // own


@triton.jit
def source_rows(gather_ptr, offs_m, end, first, top_k):
    """Rows of `a` that a tile's rows stand for.

    Rows beyond the edge read the tile's first row: no mask in the loop, and the store drops them.
    """
    rows = tl.where(offs_m < end, offs_m, first)
    if gather_ptr is not None:
        rows = (tl.maximum(tl.load(gather_ptr + rows), 0) // top_k).to(tl.int64)
    return rows


@triton.jit
def load_tile(desc, row, rows, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """BLOCK_K columns from column k on, zeros from column K on: by a descriptor from its row `row` on, or by pointers.

    What a descriptor reads behind an expert's last row belongs to another; the store drops it.
    """
    if desc is None:
        tile = load_k(rows, k, K, BLOCK_K, EVEN_K)
    else:
        tile = desc.load([row, k])
    return tile


@triton.jit
def store_zeros(out_ptr, m, R, n, N, stride_om, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of no expert are zeros: whatever reads them finds numbers."""
    offs_m = m.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < R)[:, None] & (offs_n < N)[None, :]
    zeros = tl.zeros((BLOCK_M, BLOCK_N), dtype=out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs_m[:, None] * stride_om + offs_n[None, :], zeros, mask=mask)


def grid(R: int, N: int, E: int, config: Config) -> tuple[int]:
    """Programs for the worst routing: every expert that can have a row has a tile that is not full."""
    block_m, owners = config["BLOCK_M"], min(E + 1, R)
    return ((R + owners * (block_m - 1)) // block_m * triton.cdiv(N, config["BLOCK_N"] * config.get("COLUMNS", 1)),)


def expert_bins(E: int) -> int:
    """Experts, and one more for rows of none."""
    return triton.next_power_of_2(E + 1)


def expert_of_rows(offs: Tensor, rows: int) -> Tensor:
    """(rows,) int64: the expert of each row, E for those behind the last expert's."""
    return torch.searchsorted(offs, torch.arange(rows, dtype=offs.dtype, device=offs.device), right=True)


def gathered(rows: Tensor, gather: Tensor | None, top_k: int) -> Tensor:
    """Rows of a matrix in the order of a product's rows."""
    if gather is None:
        return rows
    source = gather.long().clamp(min=0) // top_k
    codes = rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows
    return codes[source].view(rows.dtype)


def expect_gather(what: str, a: Tensor, gather: Tensor | None, top_k: int) -> None:
    if top_k < 1:
        raise ValueError(f"{what}.top_k: expected a positive number, got {top_k}")
    if gather is not None:
        expect_shape(f"{what}.gather", gather, (a.shape[0] * top_k,))
        expect_dtype(f"{what}.gather", gather, torch.int32)
    elif top_k != 1:
        raise ValueError(f"{what}.top_k: expected 1 without gather, got {top_k}")


def fits_weight_descriptor(b: Tensor) -> bool:
    """Can a tensor descriptor read the experts' matrices as one, below each other?"""
    size = b.element_size()
    together = b.shape[0] == 1 or b.stride(0) == b.shape[1] * b.stride(1)
    return together and b.data_ptr() % 16 == 0 and b.stride(1) * size % 16 == 0 and b.numel() > 0


def fits_row_descriptor(a: Tensor) -> bool:
    return a.data_ptr() % 16 == 0 and a.stride(0) * a.element_size() % 16 == 0 and a.numel() > 0


def descriptors(
    config: Config, a: Tensor, b: Tensor, gather: Tensor | None
) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Descriptors of rows and weights for a `descriptor` kernel; gathered rows have none."""
    if config["kernel"] != "descriptor":
        return None, None
    a_desc = None
    if gather is None:
        a_desc = TensorDescriptor.from_tensor(a, [config["BLOCK_M"], config["BLOCK_K"]])
    E, N, K = b.shape
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    return a_desc, TensorDescriptor.from_tensor(matrix, [config["BLOCK_N"], config["BLOCK_K"]])


def expect_grouped(what: str, a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: Any) -> None:
    """Raise ValueError unless ranks, shapes and strides of a grouped product's arguments fit."""
    expect_rank(f"{what}.a", a, 2)
    expect_rank(f"{what}.b", b, 3)
    E, N, _ = b.shape
    expect_shape(f"{what}.b", b, (E, N, a.shape[1]))
    expect_not_empty(f"{what}.b", b, 0)
    for name, tensor in (("a", a), ("b", b)):
        expect_inner_contiguous(f"{what}.{name}", tensor)
    expect_shape(f"{what}.offs", offs, (E,))
    expect_dtype(f"{what}.offs", offs, torch.int32)
    expect_one_of(f"{what}.out_dtype", out_dtype, FLOAT_INPUTS)
    if bias is not None:
        expect_shape(f"{what}.bias", bias, (E, N))
        expect_dtype(f"{what}.bias", bias, *FLOAT_INPUTS)
        expect_inner_contiguous(f"{what}.bias", bias)


def rows_per_expert(a: Tensor, b: Tensor, top_k: int = 1) -> int:
    """Rows of an expert if they were even, on the key grid; top_k: rows for each row of `a`."""
    return bucket(-(-bucket(a.shape[0]) * top_k // b.shape[0]))


def grouped_tiles(rows: int, widths: tuple[int, ...]) -> Iterator[Config]:
    """Candidates for experts with about `rows` rows: tiles as of the dense products, in the order of expert_tile."""
    for config in tile_space(2 * rows, widths):
        if config["kernel"] == "tile" and config["GROUP_M"] == 1:
            yield Config(**{n: v for n, v in config.items() if n != "GROUP_M"})


def measured_tiles(R: int, E: int, K: int, size: int, sums: int, changing: bool) -> Iterator[Config]:
    """Defaults from an H200, over the experts of Mixtral 8x7B, DeepSeek-V3, Qwen3-30B-A3B and gpt-oss-120b.

    R rows of E experts, K elements of `size` bytes; sums: accumulators of a tile; changing: scales that change along K.
    """
    few = 2 * R <= E  # then hardly an expert has two rows
    R = bucket(R)
    rows, line, deep = -(-R // E), 128 // size, K * size >= 4096  # line: elements of 128 bytes

    def tile(swap: bool, m: int, n: int, k: int, warps: int, stages: int) -> Config:
        return Config(
            kernel="descriptor", SWAP=swap, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps, num_stages=stages
        )

    if few and R <= 16 and not changing and K * size >= 512:
        if 4096 < K * size <= 8192:
            yield Config(kernel="vector", BLOCK_N=4, BLOCK_K=512, DEPTH=4, num_warps=2)
        yield Config(kernel="vector", BLOCK_N=4, BLOCK_K=256, DEPTH=4, num_warps=1)
    if sums == 1 and size == 1 and not changing and 512 < K <= 1024 and 16 <= rows <= 64:  # rows in order alone
        m, stages = (32, 5) if rows <= 24 else (64, 4)
        yield Config(kernel="gluon", BLOCK_M=m, BLOCK_N=128, GROUP_M=1, STAGES=stages, PER_SM=2, num_warps=4)
    if rows <= 8 and K * size <= 1024:
        yield tile(False, 16, 128, line, 4, 4)
    elif rows <= 8 and not changing:
        yield tile(True, 16, 128, 2 * line, 4, 3)
    elif rows <= 8:
        yield tile(True, 16, 64, line, 4, 6) if K * size < 8192 else tile(True, 16, 128, line, 4, 4)
    elif rows <= 24:
        yield tile(True, 32, 128, line, 4, 4)
    elif sums == 1 and size == 1 and K <= 512:  # short: a program takes several tiles side by side
        yield tile(False, 64, 128, line, 4, 3) | Config(COLUMNS=4, FLATTEN=True)
    elif sums == 1 and size == 1 and K < 4096 and rows >= 192:
        yield Config(kernel="gluon", BLOCK_N=128, GROUP_M=8, STAGES=6, num_warps=4)
    elif sums == 1 and ((rows >= 48 and deep) or (rows > 64 and K * size >= 2048)):
        yield tile(False, 128, 256, line, 8, 4)
    elif changing and rows >= 512:
        yield Config(kernel="wide", GROUP_M=2, STAGES=4, num_warps=4)
    elif changing and (rows >= 192 or (rows >= 48 and K <= 1024) or (48 <= rows <= 96 and deep)):
        yield Config(kernel="gluon", BLOCK_N=128, GROUP_M=8, STAGES=6, num_warps=4)
    yield tile(False, 64, 128, line, 4, 3)


def descriptor_tiles(rows: int, widths: tuple[int, ...]) -> Iterator[Config]:
    """Candidates of `descriptor` kernels for experts with about `rows` rows."""
    swapped = ((16, 64, 4), (16, 128, 4), (16, 128, 8), (32, 64, 4), (32, 128, 4), (64, 64, 4), (64, 128, 4))
    upright = ((64, 128, 4), (64, 256, 4), (64, 256, 8), (128, 128, 4), (128, 128, 8), (128, 256, 8))
    for swap, tiles in ((True, swapped), (False, upright)):
        for (m, n, warps), k, stages in itertools.product(tiles, widths, (3, 4, 5, 6)):
            if (m <= 4 * rows or m == 16) and (swap or m <= 2 * rows):
                yield Config(
                    kernel="descriptor", SWAP=swap, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps,
                    num_stages=stages,
                )  # fmt: skip


def wide_tiles(rows: int) -> Iterator[Config]:
    """Candidates whose programs take several tiles side by side: where K is short, starting a program costs most."""
    for (m, n, warps, swap), stages, columns, flatten in itertools.product(
        ((16, 128, 4, False), (16, 128, 4, True), (64, 128, 4, False), (128, 128, 8, False), (128, 256, 8, False)),
        (2, 3, 4), (2, 4, 8), (False, True),
    ):  # fmt: skip
        if m <= 2 * rows or m == 16:
            yield Config(
                kernel="descriptor", SWAP=swap, BLOCK_M=m, BLOCK_N=n, BLOCK_K=128, COLUMNS=columns, FLATTEN=flatten,
                num_warps=warps, num_stages=stages,
            )  # fmt: skip


def strides_of(tensor: Tensor | None, *sizes: int) -> list[int]:
    """Strides of a tensor; 0 along dimensions where one element serves all of `sizes`, or where there is no tensor."""
    if tensor is None:
        return [0] * len(sizes)
    return [0 if n == 1 and size != 1 else s for n, s, size in zip(tensor.shape, tensor.stride(), sizes, strict=True)]
