"""What the grouped products share: which tile of which expert a program has, their candidates, and their arguments.

Rows are sorted by expert and offs holds the row after each expert's last one. Only the device knows offs, so a launch
has as many programs as the worst routing could need, and each finds its tile by itself; no layout depends on a tile.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from fpk.kernels.gemm._mm import tile_space


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
    return ((R + owners * (block_m - 1)) // block_m * triton.cdiv(N, config["BLOCK_N"]),)


def expert_bins(E: int) -> int:
    """Experts, and one more for rows of none."""
    return triton.next_power_of_2(E + 1)


def expert_of_rows(offs: Tensor, rows: int) -> Tensor:
    """(rows,) int64: the expert of each row, E for those behind the last expert's."""
    return torch.searchsorted(offs, torch.arange(rows, dtype=offs.dtype, device=offs.device), right=True)


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


def rows_per_expert(a: Tensor, b: Tensor) -> int:
    """Rows of an expert if they were even, on the key grid."""
    return bucket(-(-bucket(a.shape[0]) // b.shape[0]))


def grouped_tiles(rows: int, widths: tuple[int, ...]) -> Iterator[Config]:
    """Candidates for experts with about `rows` rows: tiles as of the dense products, in the order of expert_tile."""
    for config in tile_space(2 * rows, widths):
        if config["kernel"] == "tile" and config["GROUP_M"] == 1:
            yield Config(**{n: v for n, v in config.items() if n != "GROUP_M"})


def strides_of(tensor: Tensor | None, *sizes: int) -> list[int]:
    """Strides of a tensor; 0 along dimensions where one element serves all of `sizes`, or where there is no tensor."""
    if tensor is None:
        return [0] * len(sizes)
    return [0 if n == 1 and size != 1 else s for n, s, size in zip(tensor.shape, tensor.stride(), sizes, strict=True)]
