"""Shared device code of the Gluon kernels for sm90: one warp loads tiles by TMA, two groups of four warps multiply.

A work item is an output tile, or a share of its K. `left` is the operand on the matrix instruction's 64-row side: the
activations, or the weights where there are few tokens (SWAP). Operand tiles go through a ring of STAGES buffers guarded
by two barriers each, `full` and `empty`.

Gluon's interface moves between versions of triton; on one that this module was not built with, `AVAILABLE` is False and
no config of these kernels is a candidate.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.db import Config

AVAILABLE = triton.__version__.startswith(("3.6.", "3.9."))
TYPES = {
    torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5, torch.int8: gl.int8,
    torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16,
}  # fmt: skip
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """A TMA descriptor of a matrix, by tiles of rows x cols, laid out in shared memory as wgmma reads them."""
    swizzle = min(128, cols * x.element_size())
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, [rows, cols], layout)


def consumer_tile(config: Config) -> tuple[int, int]:
    """(rows of the left operand, rows of the right one) of each consumer: one of them is halved, 64 rows are not."""
    left, right = (config["BLOCK_N"], config["BLOCK_M"]) if config["SWAP"] else (config["BLOCK_M"], config["BLOCK_N"])
    return (left // 2, right) if left >= 128 else (left, right // 2)


def right_parts(rows: int) -> tuple[int, int]:
    """(wide, narrow) rows of the right operand that a consumer multiplies by an instruction each; narrow may be 0."""
    wide = 1 << (rows.bit_length() - 1)
    return wide, rows - wide


def piece_columns(rows: int) -> int:
    """Columns of the pieces in which a consumer's tile of so many columns leaves."""
    wide = right_parts(rows)[0]
    return max(min(32, wide), wide // 4)


@gluon.jit
def columns_of(column, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """First columns of a tile's wide and narrow part; the wide one begins at a multiple of its width."""
    late = column % WIDE != 0 if NARROW > 0 else False
    return column + (NARROW if late else 0), column + (0 if late else WIDE)


@gluon.jit
def after_previous(PDL: gl.constexpr):
    """First line of a kernel launched early: let the next one get ready, and wait until the one before is done."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@gluon.jit
def locate(item, tiles_l, tiles_r, steps, GROUP: gl.constexpr, SPLIT_K: gl.constexpr):
    """(tile row, tile column, part, first step, step after the last) of a work item; GROUP rows share columns in L2."""
    part = item % SPLIT_K
    tile = item // SPLIT_K
    per_group = GROUP * tiles_r
    first = tile // per_group * GROUP
    height = min(tiles_l - first, GROUP)
    per_part = gl.cdiv(steps, SPLIT_K)
    begin = part * per_part
    return (
        first + tile % per_group % height, tile % per_group // height, part, begin, min(begin + per_part, steps),
    )  # fmt: skip


@gluon.jit
def produce(
    left_desc, right_desc, more_desc, left_bufs, right_bufs, more_bufs, full, empty, tiles_l, tiles_r, steps,
    ROWS_L: gl.constexpr, ROWS_R: gl.constexpr, MORE: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, SPLIT_K: gl.constexpr, MULTIPLE: gl.constexpr,
):  # fmt: skip
    """Fill the ring: LEFT pieces of ROWS_L rows, RIGHT ones of ROWS_R and one of MORE. Steps come in MULTIPLEs."""
    turn = 0
    for item in range(gl.program_id(0), tiles_l * tiles_r * SPLIT_K, gl.num_programs(0)):
        tile_l, tile_r, _, begin, end = locate(item, tiles_l, tiles_r, steps, GROUP, SPLIT_K)
        for k in range(begin, begin + gl.cdiv(end - begin, MULTIPLE) * MULTIPLE):
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (LEFT * ROWS_L + RIGHT * ROWS_R + MORE) * BLOCK_K)
            for i in gl.static_range(LEFT):
                row = (LEFT * tile_l + i) * ROWS_L
                tma_load(left_desc, [row, k * BLOCK_K], bar, left_bufs.index(slot * LEFT + i))
            if MORE > 0:
                wide, narrow = columns_of(tile_r * (ROWS_R + MORE), ROWS_R, MORE)
                tma_load(right_desc, [wide, k * BLOCK_K], bar, right_bufs.index(slot))
                tma_load(more_desc, [narrow, k * BLOCK_K], bar, more_bufs.index(slot))
            else:
                for i in gl.static_range(RIGHT):
                    row = (RIGHT * tile_r + i) * ROWS_R
                    tma_load(right_desc, [row, k * BLOCK_K], bar, right_bufs.index(slot * RIGHT + i))
            turn += 1


@gluon.jit
def put(out_desc, buf, tile, row, column):
    """Write a tile through shared memory; the caller waits for the last one (tma.store_wait)."""
    tma.store_wait(0)
    barrier()
    buf.store(tile)
    fence_async_shared()
    barrier()
    tma_store(out_desc, [row, column], buf)


@gluon.jit
def put_halves(out_desc, buf, tile, row, column):
    """`put` in two halves of the columns, so that the buffer is half a tile."""
    HALF: gl.constexpr = tile.shape[1] // 2
    first, second = tile.reshape((tile.shape[0], 2, HALF)).permute((0, 2, 1)).split()
    put(out_desc, buf, first, row, column)
    put(out_desc, buf, second, row, column + HALF)


@gluon.jit
def halves(tile):
    return tile.reshape((tile.shape[0], 2, tile.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _put_piece(out_desc, buf, tile, row, column):
    tma.store_wait(1)  # the piece before the last one has left its buffer
    barrier()
    buf.store(tile)
    fence_async_shared()
    barrier()
    tma_store(out_desc, [row, column], buf)


@gluon.jit
def put_pieces(out_desc, bufs, first, tile, row, column):
    """Write a tile in pieces of the columns by turns through two buffers, `first` and the one after it."""
    COLS: gl.constexpr = out_desc.block_shape[1]
    PIECES: gl.constexpr = tile.shape[1] // COLS
    if PIECES == 1:
        tma.store_wait(0)  # the next tile begins with the other buffer
        _put_piece(out_desc, bufs.index(first + 1), tile, row, column)
    elif PIECES == 2:
        a, b = halves(tile)
        _put_piece(out_desc, bufs.index(first), a, row, column)
        _put_piece(out_desc, bufs.index(first + 1), b, row, column + COLS)
    else:
        left, right = halves(tile)
        a, b = halves(left)
        c, d = halves(right)
        _put_piece(out_desc, bufs.index(first), a, row, column)
        _put_piece(out_desc, bufs.index(first + 1), b, row, column + COLS)
        _put_piece(out_desc, bufs.index(first), c, row, column + 2 * COLS)
        _put_piece(out_desc, bufs.index(first + 1), d, row, column + 3 * COLS)


@gluon.jit
def put_pointers(out_ptr, tile, offs_0, offs_1, limit_0, limit_1, stride_0, stride_1):
    """Write a tile with dimensions of any stride."""
    ptrs = out_ptr + offs_0.to(gl.int64)[:, None] * stride_0 + offs_1.to(gl.int64)[None, :] * stride_1
    gl.store(ptrs, tile.to(out_ptr.dtype.element_ty), mask=(offs_0 < limit_0)[:, None] & (offs_1 < limit_1)[None, :])
