"""Which rows of which expert the tiles of grouped_mm_shuffled have, which tiles a program; and how they are stored."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fpk.db import Config
from fpk.kernels._activation import activate
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
def _add(a, b):
    return a + b


@gluon.jit
def _list(table_ptr, rows, E, BINS: gl.constexpr, BLOCK_M: gl.constexpr, WARPS: gl.constexpr):
    """(row tiles, how many up to each expert's last, first row of no expert). BINS: experts that a program lists by
    itself from `offs`, 0: the table of expert_schedule_kernel has them."""
    if BINS == 0:
        tiles, lost = gl.load(table_ptr), gl.load(table_ptr + 1)
        done = tiles
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([max(1, BINS // (32 * WARPS))], [32], [WARPS], [0])
        e = gl.arange(0, BINS, layout=LAYOUT)
        end = gl.minimum(gl.load(table_ptr + e, mask=e < E, other=0), rows)
        begin = gl.minimum(gl.load(table_ptr + e - 1, mask=(e > 0) & (e < E), other=0), rows)
        done = gl.associative_scan((gl.maximum(end - begin, 0) + (BLOCK_M - 1)) // BLOCK_M, 0, _add)
        tiles = gl.max(done, axis=0)
        lost = min(gl.load(table_ptr + E - 1), rows)
    return tiles, done, lost


@gluon.jit
def _share(tiles, steps, SPLIT: gl.constexpr):
    """(first tile, tile after the last, distance of tiles, first step, step after the last) of a program; steps count
    through the list of all tiles."""
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
def _entry(table_ptr, done, rows, tile, tiles_n, BINS: gl.constexpr, BLOCK_M: gl.constexpr):
    """(row of units, expert, first row, row after the expert's last) of a tile."""
    m = tile // tiles_n
    if BINS == 0:
        entry = table_ptr + 2 + m * 3
        expert, first, end = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    else:
        earlier = done <= m
        expert = gl.sum(earlier.to(gl.int32), axis=0)
        before = gl.max(gl.where(earlier, done, 0), axis=0)
        first = gl.load(table_ptr + max(expert - 1, 0))
        first = gl.where(expert > 0, first, 0) + (m - before) * BLOCK_M
        end = min(gl.load(table_ptr + expert), rows)
    return tile % tiles_n, expert, first, end


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


@gluon.constexpr_function
def _of(values, i):
    return values[i]


@gluon.jit
def _put(out_ptr, sums, at_m, stop_m, at_n, N, stride_om, ACT: gl.constexpr):
    """Store a piece [64, columns] of a tile with its rows of 64 neighbours; ACT: of 32 gates and ups by turns."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    piece = gl.convert_layout(sums.to(out_ptr.dtype.element_ty).permute((1, 0)), LAYOUT)
    if ACT is not None:
        gate, up = piece.reshape((sums.shape[1], 32, 2)).split()
        gate, up = gate.to(gl.float32), up.to(gl.float32)
        piece = activate(gate, up, _of(ACT, 0), True, _of(ACT, 1), _of(ACT, 2), _of(ACT, 3), _of(ACT, 4))
        piece = piece.to(out_ptr.dtype.element_ty)
        at_n = at_n // 2
        N = N // 2
    KEPT: gl.constexpr = piece.type.layout
    offs_m = at_m + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(1, KEPT))
    offs_n = at_n + gl.arange(0, piece.shape[1], layout=gl.SliceLayout(0, KEPT))
    ptrs = out_ptr + offs_m.to(gl.int64)[:, None] * stride_om + offs_n[None, :]
    gl.store(ptrs, piece, mask=(offs_m < stop_m)[:, None] & (offs_n < N)[None, :])


def registers(config: Config) -> dict[str, int]:
    """Registers of a thread, by what it does: those of a program that shares its SM are capped at the launch."""
    rows, per_sm = config["ROWS"], config["PER_SM"]
    if rows == 1:
        return dict(CONSUMER=0, PRODUCER=24, maxnreg={6: 40, 5: 48, 4: 64, 3: 80}.get(per_sm, 120))
    if per_sm > 1:
        return {
            (2, 2): dict(CONSUMER=104, PRODUCER=32, maxnreg=80), (2, 3): dict(CONSUMER=72, PRODUCER=24, maxnreg=56),
            (3, 2): dict(CONSUMER=72, PRODUCER=40, maxnreg=64),
        }[rows, per_sm]  # fmt: skip
    return dict(CONSUMER={2: 232, 3: 152, 4: 104}[rows], PRODUCER={2: 40, 3: 32, 4: 40}[rows])
