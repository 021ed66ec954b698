"""Which rows of which expert the tiles of grouped_mm_shuffled have, and which tiles a program."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fpk.kernels._tile import after_previous


@triton.jit(do_not_specialize=["R", "E"])
def expert_schedule_kernel(
    offs_ptr, table_ptr, R, E, PDL: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """table: the number of row tiles, the first row of no expert, then of each tile its expert, first row, and row
    after the expert's last."""
    after_previous(PDL)
    e = tl.arange(0, BLOCK_E)
    end = tl.minimum(tl.load(offs_ptr + e, mask=e < E, other=R), R)
    begin = tl.minimum(tl.load(offs_ptr + e - 1, mask=(e > 0) & (e < E), other=0), R)
    tiles = tl.where(e < E, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M), 0)
    done = tl.cumsum(tiles, axis=0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    earlier = done[None, :] <= i[:, None]
    expert = tl.sum(earlier.to(tl.int32), axis=1)
    here = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(here, begin[None, :], 0), axis=1)
    before = tl.sum(tl.where(earlier, tiles[None, :], 0), axis=1)
    total = tl.sum(tiles, axis=0)
    mask = i < total
    tl.store(table_ptr + 2 + 3 * i, expert, mask=mask)
    tl.store(table_ptr + 3 + 3 * i, first + (i - before) * BLOCK_M, mask=mask)
    tl.store(table_ptr + 4 + 3 * i, tl.sum(tl.where(here, end[None, :], 0), axis=1), mask=mask)
    tl.store(table_ptr, total)
    tl.store(table_ptr + 1, tl.min(tl.load(offs_ptr + E - 1 + tl.arange(0, 1)), axis=0))


@gluon.jit
def _share(table_ptr, tiles_n, steps, SPLIT: gl.constexpr):
    """(first tile, tile after the last, distance of tiles, first step, step after the last) of a program; steps count
    through the list of all tiles."""
    tiles = gl.load(table_ptr) * tiles_n
    program, programs = gl.program_id(0), gl.num_programs(0)
    if SPLIT:
        per_program = gl.cdiv(tiles * steps, programs)
        begin = program * per_program
        end = min(begin + per_program, tiles * steps)
        first, last = begin // steps, gl.cdiv(end, steps)
        last = gl.where(begin < end, last, first)
        stride = 1
    else:
        first, last, stride = program, tiles, programs
        begin, end = 0, tiles * steps
    return first, last, stride, begin, end


@gluon.jit
def _entry(table_ptr, tile, tiles_n):
    """(row of units, expert, first row, row after the expert's last) of a tile."""
    entry = table_ptr + 2 + tile // tiles_n * 3
    return tile % tiles_n, gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)


@gluon.jit
def _boxes(rows, BOX: gl.constexpr, BOXES: gl.constexpr, SPLIT: gl.constexpr):
    """How many boxes of rows, up to eight, a tile is multiplied with."""
    boxes = min(gl.cdiv(rows, BOX), BOXES)
    for count in gl.static_range(3, BOXES):
        if not _is_multiplied(count, SPLIT):
            boxes = gl.where(boxes == count, 4 if count < 4 else 8, boxes)
    return boxes


@gluon.constexpr_function
def _is_multiplied(count, SPLIT):
    """Are there products of so many boxes: powers of two, and sums of two of those if programs share no tile."""
    return count & (count - 1) == 0 or (count < 7 and not SPLIT)


@gluon.constexpr_function
def _parts(count):
    """A number of boxes as a power of two and a rest."""
    main = 1 << (count.bit_length() - 1)
    return main, count - main
