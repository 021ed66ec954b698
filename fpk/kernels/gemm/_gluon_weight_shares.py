"""The `shares` kernel of mm_weight_only for sm90: equal shares of K and of the weights, decoded in registers.

A warp loads codes and activations by TMA; groups of four warps decode 64 rows of codes each, straight into the left
operand of wgmma. ROWS groups have rows of their own, TURNS of them share rows and take turns at K. A program takes
consecutive steps of the rows' K; where it holds only part of a row, it leaves a partial sum, and the last of those that
share the row adds them up, in order: results do not depend on timing. Ticket counters are zero before and after.

RENAMED: a thread reads sixteen neighbouring codes at a time, and the activations come with their columns in the order
that this makes. Without, it reads them in pairs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.kernels.gemm._cluster import in_clusters
from fpk.kernels.gemm._gluon import barrier, tma_load
from fpk.kernels.gemm._gluon_weight_cluster import everybody
from fpk.kernels.gemm._gluon_weight_sums import finish, finish_in_cluster, give, in_a_row, take, two


@gluon.constexpr_function
def _sixteens():
    """Codes (64, 128) of a consumer: rows as wgmma wants them, sixteen columns a thread at a time."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 16]]
    return gl.DistributedLinearLayout(
        registers, [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 128]
    )  # fmt: skip


@gluon.constexpr_function
def _integers_asm() -> str:
    """Four int8 to bf16: 128 + the low seven bits, less 128 or, if the sign bit is set, 256; all exact."""
    return """
        {
        .reg .b32 a, b, s;
        prmt.b32 a, $2, 0x43434343, 0x4140;
        prmt.b32 b, $2, 0x43434343, 0x4342;
        and.b32 s, a, 0xFF80FF80;
        and.b32 a, a, 0xFF7FFF7F;
        sub.rn.bf16x2 $0, a, s;
        and.b32 s, b, 0xFF80FF80;
        and.b32 b, b, 0xFF7FFF7F;
        sub.rn.bf16x2 $1, b, s;
        }
        """


@gluon.jit
def _decode(codes, FP8: gl.constexpr, DTYPE: gl.constexpr):
    """Codes as DTYPE, exactly. FP16 holds every code; from there to bf16 the way through fp32 is the fast one."""
    if FP8:
        value = codes.to(gl.float16)
        if gl.bfloat16 == DTYPE:
            value = value.to(gl.float32).to(gl.bfloat16)
    elif gl.bfloat16 == DTYPE:
        value = gl.inline_asm_elementwise(
            _integers_asm(), "=&r,=&r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=4
        )  # fmt: skip
    else:
        value = codes.to(DTYPE)
    return value


@gluon.jit
def _halves(buffer, RENAMED: gl.constexpr, LEFT: gl.constexpr):
    """Codes (64, 128) in shared memory as two halves of 64 columns."""
    if RENAMED:
        codes = buffer.load(_sixteens())
        codes = codes.reshape((64, 4, 2, 4, 2, 2)).permute((0, 3, 4, 1, 5, 2)).reshape((64, 64, 2))
    else:
        codes = buffer.load(LEFT).reshape((64, 2, 64)).permute((0, 2, 1))
    return codes.split()


@gluon.jit
def _multiply(
    acc, codes, tiles, at, slot, FP8: gl.constexpr, DTYPE: gl.constexpr, RENAMED: gl.constexpr, LEFT: gl.constexpr
):  # fmt: skip
    """acc + codes @ activations. The second half of the codes is decoded while the unit multiplies the first."""
    first, second = _halves(codes.index(at), RENAMED, LEFT)
    left = gl.convert_layout(_decode(first, FP8, DTYPE), LEFT, assert_trivial=True)
    token = warpgroup_mma(left, tiles.index(2 * slot).permute((1, 0)), acc, is_async=True)
    more = gl.convert_layout(_decode(second, FP8, DTYPE), LEFT, assert_trivial=True)
    token = warpgroup_mma(more, tiles.index(2 * slot + 1).permute((1, 0)), token, is_async=True)
    acc, _ = warpgroup_mma_wait(0, deps=[token, left])
    return acc


@gluon.jit
def _share(work, CLUSTER: gl.constexpr):
    """(tile of tokens, program, first step, step after the last, tile of weights and step of K of the first)."""
    per_program, steps, tiles_n = work
    if CLUSTER > 1:  # the programs of a cluster divide one tile
        m, program = gl.program_id(1), gl.program_id(0)
        tile = program // CLUSTER
        begin = tile * steps + program % CLUSTER * per_program
        end = min(begin + per_program, tile * steps + steps)
    else:
        m, program = gl.program_id(0), gl.program_id(1)
        begin = program * per_program
        tile = begin // steps
        end = min(begin + per_program, tiles_n * steps)
    return m, program, begin, end, tile, begin - tile * steps


@gluon.jit
def _fetch_codes(w_desc, codes, full, first, tile, step, ROWS: gl.constexpr, TURNS: gl.constexpr, BYTES: gl.constexpr):
    for t in gl.static_range(TURNS):
        bar = full.index(first + t)
        mbarrier.expect(bar, BYTES)
        for r in gl.static_range(ROWS):
            at = (first + t) * ROWS + r
            tma_load(w_desc, [(tile * ROWS + r) * 64, (step * TURNS + t) * 128], bar, codes.index(at))


@gluon.jit
def _fetch_activations(a_desc, tiles, full, first, step, m, TURNS: gl.constexpr, BLOCK_M: gl.constexpr):
    for t in gl.static_range(TURNS):
        for h in gl.static_range(2):
            k = (step * TURNS + t) * 128 + h * 64
            tma_load(a_desc, [m * BLOCK_M, k], full.index(first + t), tiles.index((first + t) * 2 + h))


@gluon.jit
def _produce(
    descs, buffers, work,
    PDL: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    CLUSTER: gl.constexpr,
):  # fmt: skip
    """Fill the ring of stages. Weights are read before the kernel in front has finished, nothing else."""
    codes, tiles, full, empty, _sums, _handed, _taken = buffers
    steps = work[1]
    w_desc, a_desc = descs
    BYTES: gl.constexpr = ROWS * 64 * 128 + BLOCK_M * 256
    m, _, begin, end, tile, k = _share(work, CLUSTER)
    first, a_k = min(begin + STAGES, end), k
    for at in range(begin, first):
        _fetch_codes(w_desc, codes, full, (at - begin) * TURNS, tile, k, ROWS, TURNS, BYTES)
        k += 1
        tile = gl.where(k == steps, tile + 1, tile)
        k = gl.where(k == steps, 0, k)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    for at in range(begin, first):
        _fetch_activations(a_desc, tiles, full, (at - begin) * TURNS, a_k, m, TURNS, BLOCK_M)
        a_k = gl.where(a_k + 1 == steps, 0, a_k + 1)
    stage, phase = 0, 0
    for _ in range(first, end):
        for t in gl.static_range(TURNS):
            mbarrier.wait(empty.index(stage * TURNS + t), phase)
        _fetch_codes(w_desc, codes, full, stage * TURNS, tile, k, ROWS, TURNS, BYTES)
        _fetch_activations(a_desc, tiles, full, stage * TURNS, k, m, TURNS, BLOCK_M)
        k += 1
        tile = gl.where(k == steps, tile + 1, tile)
        k = gl.where(k == steps, 0, k)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    if CLUSTER > 1:
        everybody()
        everybody()


@gluon.jit
def _consume(
    buffers, ends, work,
    R: gl.constexpr, T: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr, RENAMED: gl.constexpr,
    ROWS_S: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    KEEPS: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """Multiply 64 rows of codes, number R of a tile, in turn T of every step. KEEPS groups end with a sum each: of one
    half of the columns, or one group with all."""
    codes, tiles, full, empty, sums, handed, taken = buffers
    per_program, steps, tiles_n = work
    m, program, begin, end, first_tile, _k = _share(work, CLUSTER)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    turn = 0
    for tile in range(first_tile, gl.cdiv(end, steps)):
        start, stop, given = max(tile * steps, begin), min(tile * steps + steps, end), tile - first_tile
        acc = gl.zeros((64, BLOCK_M), gl.float32, LAYOUT)
        for _ in range(start, stop):
            slot = turn % STAGES * TURNS + T
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            acc = _multiply(acc, codes, tiles, slot * ROWS + R, slot, FP8, DTYPE, RENAMED, LEFT)
            mbarrier.arrive(empty.index(slot), count=1)
            turn += 1
        row = in_a_row(acc)
        if CLUSTER > 1:
            finish_in_cluster(row, ends, m, tile, program % CLUSTER, ROWS, R, TURNS, T, BLOCK_M, CLUSTER, ROWS_S)
        elif KEEPS == 2:
            few, more = two(row)
            if T == 0:
                give(more, sums, handed, taken, 2 * R + 1, given)
                row = few
            else:
                give(few, sums, handed, taken, 2 * R, given)
                row = more
            row = take(row, sums, handed, taken, 2 * R + T, given)
        elif T > 0:
            give(row, sums, handed, taken, R * (TURNS - 1) + T - 1, given)
        else:
            for t in gl.static_range(TURNS - 1):
                row = take(row, sums, handed, taken, R * (TURNS - 1) + t, given)
        if CLUSTER == 1 and T < KEEPS:
            first, last = tile * steps // per_program, (tile * steps + steps - 1) // per_program
            finish(
                row, ends, stop - start == steps, m, tile, tiles_n, program, first, last, gl.num_programs(1),
                ROWS, R, KEEPS, T, BLOCK_M // KEEPS, ROWS_S,
            )  # fmt: skip
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "tiles_n", "steps", "per_program", "stride_sn"])
def weight_shares_kernel(
    w_desc, a_desc, out_desc, out_ptr, parts_ptr, tickets_ptr, scale_ptr, bias_ptr,
    M, N, tiles_n, steps, per_program, stride_om, stride_sn,
    PDL: gl.constexpr, CODES: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr, RENAMED: gl.constexpr,
    ROWS_S: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr,
    KEEPS: gl.constexpr, CLUSTER: gl.constexpr, CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
    PRODUCERS: gl.constexpr,
):  # fmt: skip
    """ROWS * TURNS groups of warps multiply. CONSUMER, PRODUCER: registers of a thread."""
    SLOTS: gl.constexpr = STAGES * TURNS
    codes = gl.allocate_shared_memory(CODES, [SLOTS * ROWS, 64, 128], w_desc.layout)
    tiles = gl.allocate_shared_memory(DTYPE, [SLOTS * 2, BLOCK_M, 64], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ROWS)
    sums, handed, taken = full, full, full  # unused
    if TURNS > 1 and CLUSTER == 1:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        GIVEN: gl.constexpr = ROWS * (2 if KEEPS == 2 else TURNS - 1)
        sums = gl.allocate_shared_memory(gl.float32, [GIVEN, 64 * BLOCK_M // KEEPS], FLAT)
        handed = gl.allocate_shared_memory(gl.int64, [GIVEN, 1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [GIVEN, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(GIVEN):
            mbarrier.init(handed.index(i), count=1)
            mbarrier.init(taken.index(i), count=1)
    fence_async_shared()
    barrier()
    leaving = full  # unused
    if out_desc is not None:
        leaving = gl.allocate_shared_memory(out_ptr.dtype.element_ty, [2 * ROWS, 64, 64], out_desc.layout)
    descs = (w_desc, a_desc)
    buffers = (codes, tiles, full, empty, sums, handed, taken)
    ends = (out_desc, out_ptr, parts_ptr, tickets_ptr, scale_ptr, bias_ptr, M, N, stride_om, stride_sn, leaving)
    work = (per_program, steps, tiles_n)
    if ROWS * TURNS == 1:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, work,
                    0, 0, FP8, DTYPE, RENAMED, ROWS_S, BLOCK_M, ROWS, TURNS, STAGES, KEEPS, CLUSTER,
                )),
                (_produce, (descs, buffers, work, PDL, BLOCK_M, ROWS, TURNS, STAGES, CLUSTER)),
            ],
            [PRODUCERS], [PRODUCER],
        )  # fmt: skip
    elif ROWS * TURNS == 2:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, work,
                    0, 0, FP8, DTYPE, RENAMED, ROWS_S, BLOCK_M, ROWS, TURNS, STAGES, KEEPS, CLUSTER,
                )),
                (_consume, (
                    buffers, ends, work,
                    ROWS - 1, TURNS - 1, FP8, DTYPE, RENAMED, ROWS_S, BLOCK_M, ROWS, TURNS, STAGES, KEEPS, CLUSTER,
                )),
                (_produce, (descs, buffers, work, PDL, BLOCK_M, ROWS, TURNS, STAGES, CLUSTER)),
            ],
            [4, PRODUCERS], [CONSUMER, PRODUCER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    buffers, ends, work,
                    0, 0, FP8, DTYPE, RENAMED, ROWS_S, BLOCK_M, ROWS, TURNS, STAGES, KEEPS, CLUSTER,
                )),
                (_consume, (
                    buffers, ends, work,
                    1 % ROWS, 1 // ROWS, FP8, DTYPE, RENAMED, ROWS_S, BLOCK_M, ROWS, TURNS, STAGES, KEEPS, CLUSTER,
                )),
                (_consume, (
                    buffers, ends, work,
                    2 % ROWS, 2 // ROWS, FP8, DTYPE, RENAMED, ROWS_S, BLOCK_M, ROWS, TURNS, STAGES, KEEPS, CLUSTER,
                )),
                (_consume, (
                    buffers, ends, work,
                    3 % ROWS, 3 // ROWS, FP8, DTYPE, RENAMED, ROWS_S, BLOCK_M, ROWS, TURNS, STAGES, KEEPS, CLUSTER,
                )),
                (_produce, (descs, buffers, work, PDL, BLOCK_M, ROWS, TURNS, STAGES, CLUSTER)),
            ],
            [4, 4, 4, PRODUCERS], [CONSUMER, CONSUMER, CONSUMER, PRODUCER],
        )  # fmt: skip


in_clusters(weight_shares_kernel)
