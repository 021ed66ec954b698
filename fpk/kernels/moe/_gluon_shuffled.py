"""The Gluon kernel of grouped_mm_shuffled: units of packed codes, as in the dense product (gemm._gluon_units).

Row tiles of experts come from a table that a small kernel writes. Every program takes the same number of consecutive
steps along K of the list of tiles (row tile, then row of units); where it holds only part of a tile's K it leaves a
partial sum, and the last of those that share the tile adds them up, in order. A tile's ticket counter is that of the
first program that has a part of it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.kernels.gemm._gluon import barrier, tma_load
from fpk.kernels.gemm._gluon_units import _multiply, _opaque


@gluon.jit
def _entry(table_ptr, tile, tiles_n, tiles):
    """(row tile, row of units) of a tile, the last one's for those behind it."""
    tile = min(tile, tiles - 1)
    return tile // tiles_n, tile % tiles_n


@gluon.jit
def _fetch(
    codes_desc, stored_desc, a_desc, codes, stored, tokens, bar, slot, table_ptr, tile, tiles_n, tiles, step, units_n,
    units_k, lines, E, pred, ROWS: gl.constexpr, UNITS: gl.constexpr, LINES: gl.constexpr, BYTES: gl.constexpr,
    BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Fetch codes, scales and activations of a step."""
    entry, row = _entry(table_ptr, tile, tiles_n, tiles)
    expert = min(gl.load(table_ptr + 1 + 3 * entry), E - 1)
    first = gl.load(table_ptr + 2 + 3 * entry)
    mbarrier.expect(bar, BYTES, pred=pred)
    for r in gl.static_range(ROWS):
        unit = (row * ROWS + r) * units_k + step * UNITS
        base = expert * lines
        tma_load(codes_desc, [base + unit * 16, 0], bar, codes.index(slot * ROWS + r), pred=pred)
        base += units_n * units_k * 16
        tma_load(stored_desc, [base + unit * LINES, 0], bar, stored.index(slot * ROWS + r), pred=pred)
    for i in gl.static_range(2 * UNITS):
        tma_load(a_desc, [first, (step * UNITS * 2 + i) * 64], bar, tokens.index(slot * 2 * UNITS + i), pred=pred)


@gluon.jit
def _finish(
    acc, out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, bias_ptr, table_ptr, E, N, stride_om, stride_bias, whole,
    entry, row, program, continues, first, last, ROWS: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Store the tile of a row of units, or this program's part of it; the last of `first`..`last` adds the parts up."""
    layout: gl.constexpr = acc.type.layout
    offs_n = _opaque(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))
    offs_m = _opaque(gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout)))
    ready = whole
    if not whole:
        inside = offs_m[None, :] * 64 + offs_n[:, None]
        # a program has at most two parts: of the tile it goes on with, and of the one that others go on with
        part = (2 * program + gl.where(continues, 0, 1)) * ROWS + R
        gl.store(parts_ptr + part.to(gl.int64) * (64 * BLOCK_M) + inside, acc)
        barrier()
        ticket = gl.atomic_add(tickets_ptr + first * ROWS + R, 1, sem="acq_rel")
        ready = ticket == last - first
        if ready:
            acc = gl.zeros((64, BLOCK_M), gl.float32, layout)
            for i in range(first, last + 1):
                barrier()  # keeps LLVM from unrolling, which would spill
                part = (2 * i + gl.where(i == first, 1, 0)) * ROWS + R
                acc += gl.load(parts_ptr + part.to(gl.int64) * (64 * BLOCK_M) + inside, cache_modifier=".cg")
            gl.atomic_xchg(tickets_ptr + first * ROWS + R, 0, sem="release")
    if ready:
        expert = gl.load(table_ptr + 1 + 3 * entry)
        at_m = gl.load(table_ptr + 2 + 3 * entry) + offs_m
        end = gl.load(table_ptr + 3 + 3 * entry)
        at_n = (row * ROWS + R) * 64 + offs_n
        mask_n, here = at_n < N, expert < E
        e = min(expert, E - 1).to(gl.int64)
        acc *= gl.load(row_scale_ptr + e * N + at_n, mask=mask_n, other=0.0)[:, None]
        if bias_ptr is not None:
            acc += gl.load(bias_ptr + e * stride_bias + at_n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
        if not here:  # rows of no expert become zeros, whatever they hold
            acc = gl.zeros((64, BLOCK_M), gl.float32, layout)
        ptrs = out_ptr + at_m.to(gl.int64)[None, :] * stride_om + at_n[:, None]
        gl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & (at_m < end)[None, :])


@gluon.jit(do_not_specialize=["E", "units_n", "units_k", "lines"])
def grouped_units_kernel(
    codes_desc, stored_desc, a_desc, out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, bias_ptr, table_ptr,
    E, N, units_n, units_k, lines, stride_om, stride_bias,
    PDL: gl.constexpr, GROUP: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr,
    BLOCK_M: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """ROWS rows of units, one or two, of UNITS units along K at a time; lines: of one expert's codes and scales."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    LINES: gl.constexpr = 32 // GROUP
    BYTES: gl.constexpr = ROWS * UNITS * (4096 + 256 * LINES) + BLOCK_M * UNITS * 256
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, 16 * UNITS, 64], codes_desc.layout)
    stored = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, LINES * UNITS, 64], stored_desc.layout)
    tokens = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2 * UNITS, BLOCK_M, 64], a_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    program = gl.program_id(0)
    tiles_n, steps = gl.cdiv(units_n, ROWS), gl.cdiv(units_k, UNITS)
    tiles = gl.load(table_ptr) * tiles_n
    per_program = gl.cdiv(tiles * steps, gl.num_programs(0))
    begin = program * per_program
    end = min(begin + per_program, tiles * steps)
    tile = begin // steps
    k = begin - tile * steps
    k_begin, next_tile, next_k = k, tile, k
    for i in gl.static_range(STAGES - 1):
        _fetch(
            codes_desc, stored_desc, a_desc, codes, stored, tokens, bars.index(i), i, table_ptr, next_tile, tiles_n,
            tiles, next_k, units_n, units_k, lines, E, begin + i < end, ROWS, UNITS, LINES, BYTES, BLOCK_M,
        )  # fmt: skip
        next_k += 1
        next_tile = gl.where(next_k == steps, next_tile + 1, next_tile)
        next_k = gl.where(next_k == steps, 0, next_k)
    slot, refill, phase = 0, STAGES - 1, 0
    acc_0 = gl.zeros((64, BLOCK_M), gl.float32, LAYOUT)
    acc_1 = acc_0
    for at in range(begin, end):
        mbarrier.wait(bars.index(slot), phase)
        acc_0 = _multiply(
            acc_0, codes, codes, stored, tokens, slot * ROWS, slot, False, GROUP, False, ASM, CONSTRAINTS, PACK, UNITS,
            LINES, BLOCK_M, LEFT,
        )  # fmt: skip
        if ROWS == 2:
            acc_1 = _multiply(
                acc_1, codes, codes, stored, tokens, slot * 2 + 1, slot, False, GROUP, False, ASM, CONSTRAINTS, PACK,
                UNITS, LINES, BLOCK_M, LEFT,
            )  # fmt: skip
        barrier()  # everybody is done with the stage before this one, which is refilled now, while products run
        _fetch(
            codes_desc, stored_desc, a_desc, codes, stored, tokens, bars.index(refill), refill, table_ptr, next_tile,
            tiles_n, tiles, next_k, units_n, units_k, lines, E, at + (STAGES - 1) < end, ROWS, UNITS, LINES, BYTES,
            BLOCK_M,
        )  # fmt: skip
        next_k += 1
        next_tile = gl.where(next_k == steps, next_tile + 1, next_tile)
        next_k = gl.where(next_k == steps, 0, next_k)
        if ROWS == 2:
            acc_0, acc_1 = warpgroup_mma_wait(0, deps=[acc_0, acc_1])
        else:
            acc_0 = warpgroup_mma_wait(0, deps=[acc_0])
        refill = slot
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)
        k += 1
        if (k == steps) | (at == end - 1):
            whole, continues = (k_begin == 0) & (k == steps), k_begin != 0
            first = tile * steps // per_program
            last = (tile * steps + steps - 1) // per_program
            entry, row = _entry(table_ptr, tile, tiles_n, tiles)
            _finish(
                acc_0, out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, bias_ptr, table_ptr, E, N, stride_om,
                stride_bias, whole, entry, row, program, continues, first, last, ROWS, 0, BLOCK_M,
            )  # fmt: skip
            if ROWS == 2:
                _finish(
                    acc_1, out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, bias_ptr, table_ptr, E, N, stride_om,
                    stride_bias, whole, entry, row, program, continues, first, last, ROWS, 1, BLOCK_M,
                )  # fmt: skip
            tile += 1
            k, k_begin = 0, 0
            acc_0 = gl.zeros((64, BLOCK_M), gl.float32, LAYOUT)
            acc_1 = acc_0
