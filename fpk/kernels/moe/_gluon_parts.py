"""What the Gluon kernels of grouped products share: names that move between versions of triton, the table of tiles."""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from fpk.kernels._tile import after_previous

# Gluon's interface moves between versions of triton; on one that this was not built with there are no candidates
AVAILABLE = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"])
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@triton.jit(do_not_specialize=["R", "E"])
def schedule_kernel(
    offs_ptr, table_ptr, R, E, PDL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """table: the number of row tiles, then of each its expert (E: rows of none), first row, and row after the last."""
    after_previous(PDL)
    e = tl.arange(0, BLOCK_E)
    end = tl.where(e < E, tl.minimum(tl.load(offs_ptr + e, mask=e < E, other=0), R), R)
    begin = tl.minimum(tl.load(offs_ptr + e - 1, mask=(e > 0) & (e <= E), other=0), R)
    tiles = tl.where(e <= E, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M), 0)
    done = tl.cumsum(tiles, axis=0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    earlier = done[None, :] <= i[:, None]
    expert = tl.sum(earlier.to(tl.int32), axis=1)
    here = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(here, begin[None, :], 0), axis=1)
    before = tl.sum(tl.where(earlier, tiles[None, :], 0), axis=1)
    total = tl.sum(tiles, axis=0)
    mask = i < total
    tl.store(table_ptr + 1 + 3 * i, expert, mask=mask)
    tl.store(table_ptr + 2 + 3 * i, first + (i - before) * BLOCK_M, mask=mask)
    tl.store(table_ptr + 3 + 3 * i, tl.sum(tl.where(here, end[None, :], 0), axis=1), mask=mask)
    tl.store(table_ptr, total)
