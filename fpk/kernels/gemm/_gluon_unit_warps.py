"""The `warps` kernel of mm_shuffled: a warp that loads, and groups of four warps that decode and multiply.

A program has ROWS rows of units, each group HELD of them; all share the activations of a step. Groups that multiply
issue no loads and wait for nobody, so that one of them decodes while another's product runs; a group that holds several
rows decodes the next while the product of the one before runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.kernels.gemm._gluon import barrier, tma_load
from fpk.kernels.gemm._gluon_units import _finish, _multiply_unit


@gluon.jit
def _share(program, per_program, steps, tiles_n):
    """(first step, step after the last, row of units and column of the first) of a program."""
    begin = program * per_program
    tile = begin // steps
    return begin, min(begin + per_program, tiles_n * steps), tile, begin - tile * steps


@gluon.jit
def _fetch_units(
    descs, codes, seconds, stored, bar, slot, tile, step,
    SIX: gl.constexpr, LINES: gl.constexpr, BYTES: gl.constexpr, ROWS: gl.constexpr, UNITS: gl.constexpr,
):  # fmt: skip
    """Fetch the codes and scales of a step; and say how many bytes will come, its activations included."""
    codes_desc, second_desc, stored_desc, _ = descs
    mbarrier.expect(bar, BYTES)
    for r in gl.static_range(ROWS):
        row, unit = tile * ROWS + r, step * UNITS
        tma_load(codes_desc, [row, unit * 16, 0], bar, codes.index(slot * ROWS + r))
        if SIX:
            tma_load(second_desc, [row, unit * 8, 0], bar, seconds.index(slot * ROWS + r))
        tma_load(stored_desc, [row, unit * LINES, 0], bar, stored.index(slot * ROWS + r))


@gluon.jit
def _fetch_activations(a_desc, tiles, bar, slot, step, m, UNITS: gl.constexpr, BLOCK_M: gl.constexpr):
    for i in gl.static_range(2 * UNITS):
        tma_load(a_desc, [m * BLOCK_M, (step * UNITS * 2 + i) * 64], bar, tiles.index(slot * 2 * UNITS + i))


@gluon.jit
def _produce(
    descs, buffers, work,
    PDL: gl.constexpr, SIX: gl.constexpr, LINES: gl.constexpr, BYTES: gl.constexpr, BLOCK_M: gl.constexpr,
    ROWS: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fill the ring of stages."""
    codes, seconds, stored, tiles, full, empty = buffers
    per_program, steps, tiles_n = work
    a_desc = descs[3]
    m = gl.program_id(0)
    begin, end, tile, k = _share(gl.program_id(1), per_program, steps, tiles_n)
    first, a_k = min(begin + STAGES, end), k
    for at in range(begin, first):
        slot = at - begin
        _fetch_units(descs, codes, seconds, stored, full.index(slot), slot, tile, k, SIX, LINES, BYTES, ROWS, UNITS)
        k += 1
        tile = gl.where(k == steps, tile + 1, tile)
        k = gl.where(k == steps, 0, k)
    if PDL:  # weights may be read before the kernel in front has finished, nothing else
        gdc_wait()
        gdc_launch_dependents()
    for at in range(begin, first):
        _fetch_activations(a_desc, tiles, full.index(at - begin), at - begin, a_k, m, UNITS, BLOCK_M)
        a_k = gl.where(a_k + 1 == steps, 0, a_k + 1)
    slot, phase = 0, 0
    for _ in range(first, end):
        mbarrier.wait(empty.index(slot), phase)
        _fetch_units(descs, codes, seconds, stored, full.index(slot), slot, tile, k, SIX, LINES, BYTES, ROWS, UNITS)
        _fetch_activations(a_desc, tiles, full.index(slot), slot, k, m, UNITS, BLOCK_M)
        k += 1
        tile = gl.where(k == steps, tile + 1, tile)
        k = gl.where(k == steps, 0, k)
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)


@gluon.jit
def _consume(
    buffers, ends, work,
    G: gl.constexpr, FP8: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, LINES: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    HELD: gl.constexpr, UNITS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply the rows of group G of the units of each step."""
    codes, seconds, stored, tiles, full, empty = buffers
    out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, scale_a_ptr, bias_ptr, M, N, stride_om, stride_sa = ends
    per_program, steps, tiles_n = work
    SIZE: gl.constexpr = 1 if FP8 else 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 32 // SIZE])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 4 // SIZE)
    begin, end, tile, _k = _share(gl.program_id(1), per_program, steps, tiles_n)
    turn = 0
    for row in range(tile, gl.cdiv(end, steps)):
        start, stop = max(row * steps, begin), min(row * steps + steps, end)
        sums = (gl.zeros((64, BLOCK_M), gl.float32, LAYOUT),) * HELD
        for _ in range(start, stop):
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            for i in gl.static_range(UNITS):
                after = ()
                for r in gl.static_range(HELD):
                    after += (_multiply_unit(  # type: ignore[assignment]
                        sums[r], codes, seconds, stored, tiles, slot * ROWS + G * HELD + r, slot, i, FP8, GROUP, SIX,
                        ASM, CONSTRAINTS, PACK, UNITS, LINES, BLOCK_M, LEFT,
                    ),)  # fmt: skip
                sums = after
            if not FP8:
                done = ()
                for r in gl.static_range(HELD):
                    done += (warpgroup_mma_wait(0, deps=[sums[r]]),)  # type: ignore[assignment]
                sums = done
            mbarrier.arrive(empty.index(slot), count=1)
            turn += 1
        first, last = row * steps // per_program, (row * steps + steps - 1) // per_program
        for r in gl.static_range(HELD):
            _finish(
                sums[r], out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, scale_a_ptr, bias_ptr, M, N, stride_om,
                stride_sa, stop - start == steps, gl.program_id(0), row, tiles_n, gl.program_id(1), first, last,
                gl.num_programs(1), ROWS, G * HELD + r, BLOCK_M,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["M", "units_n", "units_k", "per_program", "stride_sa"])
def unit_warps_kernel(
    codes_desc, second_desc, stored_desc, a_desc, out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, scale_a_ptr, bias_ptr,
    M, N, units_n, units_k, per_program, stride_om, stride_sa,
    PDL: gl.constexpr, FP8: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, HELD: gl.constexpr,
    UNITS: gl.constexpr, STAGES: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """ROWS rows of units of UNITS units along K at a time, HELD rows a group, of which there are one to three.

    CONSUMER, PRODUCER: registers of a thread.
    """
    LINES: gl.constexpr = 32 // GROUP
    SIZE: gl.constexpr = 1 if FP8 else 2
    BYTES: gl.constexpr = ROWS * UNITS * (4096 + (2048 if SIX else 0) + 256 * LINES) + BLOCK_M * UNITS * 128 * SIZE
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, 1, 16 * UNITS, 64], codes_desc.layout)
    seconds = codes
    if SIX:
        seconds = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, 1, 8 * UNITS, 64], second_desc.layout)
    stored = gl.allocate_shared_memory(gl.int32, [STAGES * ROWS, 1, LINES * UNITS, 64], stored_desc.layout)
    tiles = gl.allocate_shared_memory(
        gl.float8e4nv if FP8 else gl.bfloat16, [STAGES * 2 * UNITS, BLOCK_M, 64], a_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ROWS // HELD)
    fence_async_shared()
    barrier()
    descs = (codes_desc, second_desc, stored_desc, a_desc)
    buffers = (codes, seconds, stored, tiles, full, empty)
    ends = (out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, scale_a_ptr, bias_ptr, M, N, stride_om, stride_sa)
    work = (per_program, gl.cdiv(units_k, UNITS), gl.cdiv(units_n, ROWS))
    if ROWS == HELD:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, work,
                    0, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, ROWS, HELD, UNITS, STAGES,
                )),
                (_produce, (descs, buffers, work, PDL, SIX, LINES, BYTES, BLOCK_M, ROWS, UNITS, STAGES)),
            ],
            [1], [PRODUCER],
        )  # fmt: skip
    elif ROWS == 2 * HELD:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, work,
                    0, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, ROWS, HELD, UNITS, STAGES,
                )),
                (_consume, (
                    buffers, ends, work,
                    1, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, ROWS, HELD, UNITS, STAGES,
                )),
                (_produce, (descs, buffers, work, PDL, SIX, LINES, BYTES, BLOCK_M, ROWS, UNITS, STAGES)),
            ],
            [4, 1], [CONSUMER, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, work,
                    0, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, ROWS, HELD, UNITS, STAGES,
                )),
                (_consume, (
                    buffers, ends, work,
                    1, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, ROWS, HELD, UNITS, STAGES,
                )),
                (_consume, (
                    buffers, ends, work,
                    2, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, LINES, BLOCK_M, ROWS, HELD, UNITS, STAGES,
                )),
                (_produce, (descs, buffers, work, PDL, SIX, LINES, BYTES, BLOCK_M, ROWS, UNITS, STAGES)),
            ],
            [4, 4, 1], [CONSUMER, CONSUMER, PRODUCER],
        )  # fmt: skip
