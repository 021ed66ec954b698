"""The `warps` kernel of grouped_mm_shuffled for sm90: a warp that loads, and ROWS groups of four warps that decode and
multiply, as in the dense product (gemm._gluon_unit_warps).

Row tiles of experts come from a table that a small kernel writes. A tile has up to BLOCK_M rows of one expert and is
multiplied with as many boxes of BOX rows as it has rows for, or a few more: experts with few rows cost little, however
many others have.

With SPLIT every program takes the same number of consecutive steps along K of the list of tiles; where it holds only
part of a tile's K it leaves a partial sum, and the last of those that share the tile adds them up, in order. A tile's
ticket counter is that of the first program that has a part of it. Without it programs take whole tiles in turn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.kernels.gemm._gluon import barrier, tma_load
from fpk.kernels.gemm._gluon_units import RENAMED, _decode, _opaque, _pieces, _unit
from fpk.kernels.moe._expert_tiles import _boxes, _entry, _is_multiplied, _list, _parts, _put, _share

OF_TRITON = ("RENAMED",)  # no part of a kernel's hash


@gluon.jit
def _produce(
    descs, buffers, table_ptr, work, M, E,
    SIX: gl.constexpr, LINES: gl.constexpr, BYTES: gl.constexpr, BLOCK_M: gl.constexpr, BOX: gl.constexpr,
    ROWS: gl.constexpr, TAIL: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    BINS: gl.constexpr,
):  # fmt: skip
    """Fill the ring of stages. BYTES: of the codes and scales of a row of units; TAIL: rows of the last tile."""
    codes, seconds, stored, tiles, full, empty = buffers
    codes_desc, second_desc, stored_desc, a_desc = descs
    units_n, units_k, lines = work
    BOXES: gl.constexpr = BLOCK_M // BOX
    tiles_n, steps = gl.cdiv(units_n, ROWS), gl.cdiv(units_k, UNITS)
    tiles_m, done, _lost = _list(table_ptr, M, E, BINS, BLOCK_M, 1)
    first, last, stride, begin, end = _share(tiles_m * tiles_n, steps, SPLIT)
    slot, phase = 0, 1
    for tile in range(first, last, stride):
        row, expert, at_m, stop_m = _entry(table_ptr, done, M, tile, tiles_n, BINS, BLOCK_M)
        boxes = _boxes(stop_m - at_m, BOX, BOXES, SPLIT)
        is_full = (row + 1 < tiles_n) | (TAIL == ROWS)
        base = expert * lines
        second_base = base + units_n * units_k * 16
        stored_base = second_base + (units_n * units_k * 8 if SIX else 0)
        start, stop = max(tile * steps, begin) - tile * steps, min(tile * steps + steps, end) - tile * steps
        for step in range(start, stop):
            mbarrier.wait(empty.index(slot), phase)
            bar = full.index(slot)
            for count in gl.static_range(1, BOXES + 1):
                if _is_multiplied(count, SPLIT):
                    mbarrier.expect(bar, ROWS * BYTES + count * BOX * UNITS * 256, pred=(boxes == count) & is_full)
                    if TAIL < ROWS:
                        mbarrier.expect(
                            bar, TAIL * BYTES + count * BOX * UNITS * 256, pred=(boxes == count) & (not is_full)
                        )
            for r in gl.static_range(ROWS):
                unit = (row * ROWS + r) * units_k + step * UNITS
                here = is_full | (r < TAIL)
                tma_load(codes_desc, [base + unit * 16, 0], bar, codes.index(slot * ROWS + r), pred=here)
                if SIX:
                    tma_load(second_desc, [second_base + unit * 8, 0], bar, seconds.index(slot * ROWS + r), pred=here)
                tma_load(stored_desc, [stored_base + unit * LINES, 0], bar, stored.index(slot * ROWS + r), pred=here)
            for i in gl.static_range(2 * UNITS):
                for b in range(boxes):
                    box = tiles.index((slot * 2 * UNITS + i) * BOXES + b)
                    tma_load(a_desc, [at_m + b * BOX, (step * UNITS * 2 + i) * 64], bar, box)
            slot += 1
            phase = gl.where(slot == STAGES, phase ^ 1, phase)
            slot = gl.where(slot == STAGES, 0, slot)


@gluon.jit
def _right(tiles, at, W: gl.constexpr):
    """The activations of W rows from a box on, as the right operand."""
    BOX: gl.constexpr = tiles.shape[1]
    if RENAMED:  # no view may be larger than what it is one of: the box is named as one of W rows
        views = tiles.reinterpret(tiles.dtype, [tiles.shape[0] * BOX // W, W, 64], tiles.layout)
        view = views.index(at * BOX // W)
    else:
        first = tiles.index(at)
        view = first._reinterpret(first.dtype, [W, 64], first.layout)
    return view.permute((1, 0))


@gluon.jit
def _finish(
    acc, ends, N, row, expert, at_m, stop_m, whole, continues, first, last,
    ROWS: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Store the tile of a row of units, or this program's part of it; the last of `first`..`last` adds the parts up."""
    out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, bias_ptr, stride_om, stride_bias = ends
    W: gl.constexpr = acc.shape[1]
    PIECE: gl.constexpr = W if W <= 32 else 32
    SIZE: gl.constexpr = 64 * BLOCK_M
    pieces = _pieces(acc, PIECE)
    layout: gl.constexpr = pieces[0].type.layout
    offs_n = _opaque(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))
    offs_m = _opaque(gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout)))
    inside = offs_m[None, :] * 64 + offs_n[:, None]
    column = (row * ROWS + R) * 64
    at_n = column + offs_n
    mask_n = at_n < N
    row_scale = gl.load(row_scale_ptr + expert.to(gl.int64) * N + at_n, mask=mask_n, other=0.0)
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + expert.to(gl.int64) * stride_bias + at_n, mask=mask_n, other=0.0).to(gl.float32)
    ready = whole
    if not whole:
        # a program has at most two parts: of the tile it goes on with, and of the one that others go on with
        part = (2 * gl.program_id(0) + gl.where(continues, 0, 1)) * ROWS + R
        for i in gl.static_range(W // PIECE):
            gl.store(parts_ptr + part.to(gl.int64) * SIZE + i * PIECE * 64 + inside, pieces[i])
        barrier()
        ticket = gl.atomic_add(tickets_ptr + first * ROWS + R, 1, sem="acq_rel")
        ready = ticket == last - first
    if ready:
        for i in gl.static_range(W // PIECE):
            sums = pieces[i]
            if not whole:
                part = parts_ptr + ((2 * first + 1) * ROWS + R).to(gl.int64) * SIZE + i * PIECE * 64
                sums = gl.load(part + inside, cache_modifier=".cg")
                part += ROWS * SIZE
                for _ in range(first, last):
                    if W > 16:
                        barrier()  # keeps LLVM from unrolling, which would spill
                    sums += gl.load(part + inside, cache_modifier=".cg")
                    part += 2 * ROWS * SIZE
            sums *= row_scale[:, None]
            if bias_ptr is not None:
                sums += bias[:, None]
            _put(out_ptr, sums, at_m + i * PIECE, stop_m, column, N, stride_om, ACT)
        if not whole:
            gl.atomic_xchg(tickets_ptr + first * ROWS + R, 0, sem="release")


@gluon.jit
def _unit_product(
    acc, rest, buffers, slot, i,
    LEFT: gl.constexpr, LESS: gl.constexpr, R: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr,
    GROUP: gl.constexpr, SIX: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr,
    LINES: gl.constexpr, BOXES: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Sums with the product of unit i of a step, which is on its way when this returns."""
    codes, seconds, stored, tiles, _full, _empty = buffers
    at = slot * ROWS + R
    unit = _unit(codes.index(at), i, UNITS, 16)
    second = unit
    if SIX:
        second = _unit(seconds.index(at), i, UNITS, 8)
    scale = _unit(stored.index(at), i, UNITS, LINES)
    halves = _decode(unit, second, scale, False, GROUP, SIX, ASM, CONSTRAINTS, PACK, LEFT)
    for half in gl.static_range(2):
        box = (slot * 2 * UNITS + 2 * i + half) * BOXES
        acc = warpgroup_mma(halves[half], _right(tiles, box, MAIN * BOX), acc, is_async=True)
        if REST > 0:
            left = gl.convert_layout(halves[half], LESS, assert_trivial=True)
            rest = warpgroup_mma(left, _right(tiles, box + MAIN, REST * BOX), rest, is_async=True)
    return acc, rest


@gluon.jit
def _done(acc, rest, REST: gl.constexpr):
    if REST > 0:
        acc, rest = warpgroup_mma_wait(0, deps=[acc, rest])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, rest


@gluon.jit
def _tile(
    buffers, turn, start, stop, units_k,
    R: gl.constexpr, MAIN: gl.constexpr, REST: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr,
    SIX: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, LINES: gl.constexpr,
    BOXES: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Sums of a row of units over steps `start` to `stop`, for MAIN boxes of rows and for REST ones behind them."""
    full, empty = buffers[4], buffers[5]
    X: gl.constexpr = REST * BOX if REST > 0 else BOX
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN * BOX, 16])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, X, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    LESS: gl.constexpr = gl.DotOperandLayout(0, MORE, 2)
    acc, rest = gl.zeros((64, MAIN * BOX), gl.float32, SUMS), gl.zeros((64, X), gl.float32, MORE)
    whole = units_k // UNITS  # steps; what a last one fetches behind the row of units belongs to something else
    for _ in range(start, min(stop, whole)):
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        for i in gl.static_range(UNITS):
            acc, rest = _unit_product(
                acc, rest, buffers, slot, i,
                LEFT, LESS, R, MAIN, REST, BOX, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BOXES, ROWS, UNITS,
            )  # fmt: skip
        acc, rest = _done(acc, rest, REST)
        mbarrier.arrive(empty.index(slot), count=1)
        turn += 1
    if UNITS > 1:  # noqa: SIM102  the outer one is decided by the compiler
        if stop > whole:
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            for i in range(units_k - whole * UNITS):
                acc, rest = _unit_product(
                    acc, rest, buffers, slot, i,
                    LEFT, LESS, R, MAIN, REST, BOX, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BOXES, ROWS, UNITS,
                )  # fmt: skip
                acc, rest = _done(acc, rest, REST)
            mbarrier.arrive(empty.index(slot), count=1)
    return acc, rest


@gluon.jit
def _work(
    buffers, ends, turn, N, units_k, row, expert, at_m, stop_m, start, stop, whole, first, last,
    R: gl.constexpr, COUNT: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, LINES: gl.constexpr, BLOCK_M: gl.constexpr, BOX: gl.constexpr,
    ROWS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """A tile of COUNT boxes of rows, or a program's part of it."""
    MAIN: gl.constexpr = _parts(COUNT)[0]
    REST: gl.constexpr = _parts(COUNT)[1]
    acc, rest = _tile(
        buffers, turn, start, stop, units_k,
        R, MAIN, REST, BOX, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M // BOX, ROWS, UNITS, STAGES,
    )  # fmt: skip
    _finish(acc, ends, N, row, expert, at_m, stop_m, whole, start != 0, first, last, ROWS, R, BLOCK_M, ACT)
    if REST > 0:  # then no tile is shared
        _finish(rest, ends, N, row, expert, at_m + MAIN * BOX, stop_m, True, False, first, last, ROWS, R, BLOCK_M, ACT)


@gluon.jit
def _consume(
    buffers, ends, table_ptr, work, M, N, E,
    R: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
    PACK: gl.constexpr, LINES: gl.constexpr, BLOCK_M: gl.constexpr, BOX: gl.constexpr, ROWS: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, BINS: gl.constexpr, ACT: gl.constexpr,
):  # fmt: skip
    """Multiply row R of the units of each step."""
    units_n, units_k, _lines = work
    BOXES: gl.constexpr = BLOCK_M // BOX
    tiles_n, steps = gl.cdiv(units_n, ROWS), gl.cdiv(units_k, UNITS)
    tiles_m, done, lost = _list(table_ptr, M, E, BINS, BLOCK_M, 4)
    first_tile, last_tile, stride, begin, end = _share(tiles_m * tiles_n, steps, SPLIT)
    per_program = gl.cdiv(tiles_m * tiles_n * steps, gl.num_programs(0))
    turn = 0
    for tile in range(first_tile, last_tile, stride):
        row, expert, at_m, stop_m = _entry(table_ptr, done, M, tile, tiles_n, BINS, BLOCK_M)
        boxes = _boxes(stop_m - at_m, BOX, BOXES, SPLIT)
        start, stop = max(tile * steps, begin) - tile * steps, min(tile * steps + steps, end) - tile * steps
        first, last = tile * steps // per_program, (tile * steps + steps - 1) // per_program
        for count in gl.static_range(1, BOXES + 1):
            if _is_multiplied(count, SPLIT):  # noqa: SIM102  decided by the compiler
                if boxes == count:
                    _work(
                        buffers, ends, turn, N, units_k, row, expert, at_m, stop_m, start, stop,
                        stop - start == steps if SPLIT else True, first, last,
                        R, count, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, ACT,
                    )  # fmt: skip
        turn += stop - start
    # rows of no expert become zeros, whatever they hold
    out_ptr, _, _, _, _, stride_om, _ = ends
    columns = gl.cdiv(units_n, ROWS)
    if ACT is not None:
        N = N // 2
    for item in range(gl.program_id(0), gl.cdiv(max(M - lost, 0), 16) * columns, gl.num_programs(0)):
        zeros = gl.zeros((64, 16), gl.float32, gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
        _put(out_ptr, zeros, lost + item // columns * 16, M, (item % columns * ROWS + R) * 64, N, stride_om, None)


@gluon.jit(do_not_specialize=["M", "E", "units_n", "units_k", "lines"])
def expert_units_kernel(
    codes_desc, second_desc, stored_desc, a_desc, out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, bias_ptr, table_ptr,
    M, N, E, units_n, units_k, lines, stride_om, stride_bias,
    PDL: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
    PACK: gl.constexpr, BLOCK_M: gl.constexpr, BOX: gl.constexpr, ROWS: gl.constexpr, TAIL: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, BINS: gl.constexpr, ACT: gl.constexpr,
    CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """ROWS rows of units, one to four, of UNITS units along K at a time; lines: of one expert's codes and scales.
    ACT: formula, alpha, beta, limit and PRECISE of `activate` for rows that are gates and ups by turns, or None.
    CONSUMER, PRODUCER: registers of a thread."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    LINES: gl.constexpr = 32 // GROUP
    BYTES: gl.constexpr = UNITS * (4096 + (2048 if SIX else 0) + 256 * LINES)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, 16 * UNITS, 64], codes_desc.layout)
    seconds = codes
    if SIX:
        seconds = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, 8 * UNITS, 64], second_desc.layout)
    stored = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, LINES * UNITS, 64], stored_desc.layout)
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2 * UNITS * (BLOCK_M // BOX), BOX, 64], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ROWS)
    fence_async_shared()
    barrier()
    descs = (codes_desc, second_desc, stored_desc, a_desc)
    buffers = (codes, seconds, stored, tiles, full, empty)
    ends = (out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, bias_ptr, stride_om, stride_bias)
    work = (units_n, units_k, lines)
    if ROWS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    0, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_produce, (
                    descs, buffers, table_ptr, work, M, E,
                    SIX, LINES, BYTES, BLOCK_M, BOX, ROWS, TAIL, UNITS, STAGES, SPLIT, BINS,
                )),
            ],
            [1], [PRODUCER],
        )  # fmt: skip
    elif ROWS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    0, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    1, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_produce, (
                    descs, buffers, table_ptr, work, M, E,
                    SIX, LINES, BYTES, BLOCK_M, BOX, ROWS, TAIL, UNITS, STAGES, SPLIT, BINS,
                )),
            ],
            [4, 1], [CONSUMER, PRODUCER],
        )  # fmt: skip
    elif ROWS == 3:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    0, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    1, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    2, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_produce, (
                    descs, buffers, table_ptr, work, M, E,
                    SIX, LINES, BYTES, BLOCK_M, BOX, ROWS, TAIL, UNITS, STAGES, SPLIT, BINS,
                )),
            ],
            [4, 4, 1], [CONSUMER, CONSUMER, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    0, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    1, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    2, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_consume, (
                    buffers, ends, table_ptr, work, M, N, E,
                    3, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, BOX, ROWS, UNITS, STAGES, SPLIT, BINS, ACT,
                )),
                (_produce, (
                    descs, buffers, table_ptr, work, M, E,
                    SIX, LINES, BYTES, BLOCK_M, BOX, ROWS, TAIL, UNITS, STAGES, SPLIT, BINS,
                )),
            ],
            [4, 4, 4, 1], [CONSUMER, CONSUMER, CONSUMER, PRODUCER],
        )  # fmt: skip
