"""The Gluon kernel of mm_weight_only: weights are decoded in registers and multiplied from there.

wgmma reads its left operand from registers in pairs of columns 2q, 2q + 1 and 2q + 8, 2q + 9 of every 16 (q: a thread's
place among four), whereas a thread best reads four neighbouring codes. So columns are renamed: inside each 16, code
4q + 2h + e stands where wgmma expects 8h + 2q + e. The activations, which go through shared memory, are reordered there
by warps of their own (RENAME). Without RENAME a thread reads its codes in pairs as wgmma wants them: twice as many
reads of codes, and nothing else to read or write.
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

from fpk.kernels.gemm._gluon import after_previous, barrier, locate, put, put_pointers, tma_load


@gluon.jit
def _produce(
    w_desc, a_desc, w_bufs, a_bufs, landed, empty, tiles_n, tiles_m, steps,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Fill the ring with codes and activations."""
    turn = 0
    for item in range(gl.program_id(0), tiles_n * tiles_m * SPLIT_K, gl.num_programs(0)):
        tile_n, tile_m, _, begin, end = locate(item, tiles_n, tiles_m, steps, GROUP_M, SPLIT_K)
        for k in range(begin, end):
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            bar = landed.index(slot)
            mbarrier.expect(bar, (2 * ROWS + 2 * BLOCK_M) * BLOCK_K)
            for i in gl.static_range(2):
                tma_load(w_desc, [(2 * tile_n + i) * ROWS, k * BLOCK_K], bar, w_bufs.index(slot * 2 + i))
            for h in gl.static_range(BLOCK_K // 64):
                buf = a_bufs.index(slot * (BLOCK_K // 64) + h)
                tma_load(a_desc, [tile_m * BLOCK_M, k * BLOCK_K + h * 64], bar, buf)
            turn += 1


@gluon.jit
def _rename(
    a_bufs, landed, full, tiles_n, tiles_m, steps,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Reorder the columns of the activations where they landed, as many rows at a time as registers hold."""
    PIECE: gl.constexpr = min(BLOCK_M, 64)
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    turn = 0
    for item in range(gl.program_id(0), tiles_n * tiles_m * SPLIT_K, gl.num_programs(0)):
        _, _, _, begin, end = locate(item, tiles_n, tiles_m, steps, GROUP_M, SPLIT_K)
        for _ in range(begin, end):
            slot = turn % STAGES
            mbarrier.wait(landed.index(slot), (turn // STAGES) & 1)
            for h in gl.static_range(BLOCK_K // 64):
                for first in gl.static_range(0, BLOCK_M, PIECE):
                    buf = a_bufs.index(slot * (BLOCK_K // 64) + h).slice(first, PIECE, dim=0)
                    a = buf.load(layout)
                    a = a.reshape((PIECE, 4, 4, 2, 2)).permute((0, 1, 3, 2, 4)).reshape((PIECE, 64))
                    barrier()
                    buf.store(a)
            fence_async_shared()
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            turn += 1


@gluon.jit
def _decode(codes, FP8: gl.constexpr, DTYPE: gl.constexpr):
    """Codes as DTYPE, exactly. FP16 holds every code; from there to bf16 the way through fp32 is the fast one."""
    if FP8:
        value = codes.to(gl.float16)
        if gl.bfloat16 == DTYPE:
            value = value.to(gl.float32).to(gl.bfloat16)
    else:
        value = codes.to(DTYPE)
    return value


@gluon.jit
def _operand(codes, FP8: gl.constexpr, DTYPE: gl.constexpr, RENAME: gl.constexpr, layout: gl.constexpr):
    """Codes [rows, 64] as the left operand of wgmma, columns renamed or in place."""
    values = _decode(codes, FP8, DTYPE)
    if RENAME:
        values = values.reshape((codes.shape[0], 4, 4, 2, 2)).permute((0, 1, 3, 2, 4)).reshape((codes.shape[0], 64))
    return gl.convert_layout(values, layout)


@gluon.jit
def _multiply(
    acc, codes, a_bufs, slot, use_acc, FP8: gl.constexpr, DTYPE: gl.constexpr, RENAME: gl.constexpr,
    BLOCK_K: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """acc + codes @ activations. The second half of the codes is decoded while the unit multiplies the first."""
    if BLOCK_K == 64:
        weights = _operand(codes, FP8, DTYPE, RENAME, layout)
        token = warpgroup_mma(weights, a_bufs.index(slot).permute((1, 0)), acc, use_acc=use_acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[token])
    else:
        first, second = codes.reshape((codes.shape[0], 2, 64)).permute((0, 2, 1)).split()
        weights_0 = _operand(first, FP8, DTYPE, RENAME, layout)
        token = warpgroup_mma(weights_0, a_bufs.index(2 * slot).permute((1, 0)), acc, use_acc=use_acc, is_async=True)
        weights_1 = _operand(second, FP8, DTYPE, RENAME, layout)
        token = warpgroup_mma(weights_1, a_bufs.index(2 * slot + 1).permute((1, 0)), token, is_async=True)
        acc, _ = warpgroup_mma_wait(0, deps=[token, weights_0])
    return acc


@gluon.jit
def _consume(
    out_desc, out_ptr, out_bufs, w_bufs, a_bufs, landed, full, empty, scale_ptr, bias_ptr, tiles_n, tiles_m, steps,
    M, N, stride_om, stride_sn, stride_sk,
    WHICH: gl.constexpr, ROWS_S: gl.constexpr, COLS: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr,
    OUT: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr, RENAME: gl.constexpr,
):  # fmt: skip
    """Multiply one half of the weights of each tile. COLS > 0: a scale per COLS columns, in whole steps."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    fours: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    pairs: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    turn = 0
    for item in range(gl.program_id(0), tiles_n * tiles_m * SPLIT_K, gl.num_programs(0)):
        tile_n, tile_m, part, begin, end = locate(item, tiles_n, tiles_m, steps, GROUP_M, SPLIT_K)
        offs_n = (2 * tile_n + WHICH) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        offs_m = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
        scale_rows = scale_ptr + (offs_n // ROWS_S if ROWS_S > 0 else offs_n * 0) * stride_sn.to(gl.int64)
        acc = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
        for k in range(begin, end):
            slot = turn % STAGES
            mbarrier.wait(landed.index(slot), (turn // STAGES) & 1)
            codes = w_bufs.index(slot * 2 + WHICH).load(fours if RENAME else pairs)
            if RENAME:
                mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            if COLS > 0:
                scale = gl.load(scale_rows + k * BLOCK_K // COLS * stride_sk.to(gl.int64), mask=offs_n < N, other=0.0)
                zero = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
                product = _multiply(zero, codes, a_bufs, slot, False, FP8, DTYPE, RENAME, BLOCK_K, pairs)
                mbarrier.arrive(empty.index(slot), count=1)
                acc += product * scale[:, None]
            else:
                acc = _multiply(acc, codes, a_bufs, slot, True, FP8, DTYPE, RENAME, BLOCK_K, pairs)
                mbarrier.arrive(empty.index(slot), count=1)
            turn += 1
        if COLS <= 0:
            acc *= gl.load(scale_rows, mask=offs_n < N, other=0.0)[:, None]
        if SPLIT_K > 1:
            put_pointers(out_ptr + part.to(gl.int64) * M * N, acc, offs_n, offs_m, N, M, 1, N)
        else:
            if bias_ptr is not None:
                acc += gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)[:, None]
            if out_desc is None:
                put_pointers(out_ptr, acc, offs_n, offs_m, N, M, 1, stride_om)
            else:
                few, more = acc.to(OUT).reshape((ROWS, 2, BLOCK_M // 2)).permute((0, 2, 1)).split()
                row, column = tile_m * BLOCK_M, (2 * tile_n + WHICH) * ROWS
                put(out_desc, out_bufs.index(WHICH), few.permute((1, 0)), row, column)
                put(out_desc, out_bufs.index(WHICH), more.permute((1, 0)), row + BLOCK_M // 2, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "stride_sn", "stride_sk"])
def weight_warps_kernel(
    w_desc, a_desc, out_desc, out_ptr, scale_ptr, bias_ptr, M, N, K, stride_om, stride_sn, stride_sk,
    PDL: gl.constexpr, CODES: gl.constexpr, FP8: gl.constexpr, DTYPE: gl.constexpr, OUT: gl.constexpr,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr, RENAME: gl.constexpr,
):  # fmt: skip
    """Persistent; weights on the 64-row side; SPLIT_K > 1: scaled sums to out_ptr, for an ordered reduction."""
    after_previous(PDL)
    HALF: gl.constexpr = BLOCK_N // 2
    w_bufs = gl.allocate_shared_memory(CODES, [STAGES * 2, HALF, BLOCK_K], w_desc.layout)
    a_bufs = gl.allocate_shared_memory(DTYPE, [STAGES * (BLOCK_K // 64), BLOCK_M, 64], a_desc.layout)
    if out_desc is None:
        out_bufs = a_bufs  # unused
    else:
        out_bufs = gl.allocate_shared_memory(OUT, [2, BLOCK_M // 2, HALF], out_desc.layout)
    landed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(landed.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    tiles_n, tiles_m, steps = gl.cdiv(N, BLOCK_N), gl.cdiv(M, BLOCK_M), gl.cdiv(K, BLOCK_K)
    if RENAME:
        gl.warp_specialize(
            [
                (_consume, (
                    out_desc, out_ptr, out_bufs, w_bufs, a_bufs, landed, full, empty, scale_ptr, bias_ptr, tiles_n,
                    tiles_m, steps, M, N, stride_om, stride_sn, stride_sk,
                    0, ROWS, COLS, FP8, DTYPE, OUT, HALF, BLOCK_M, BLOCK_K, STAGES, GROUP_M, SPLIT_K, RENAME,
                )),
                (_consume, (
                    out_desc, out_ptr, out_bufs, w_bufs, a_bufs, landed, full, empty, scale_ptr, bias_ptr, tiles_n,
                    tiles_m, steps, M, N, stride_om, stride_sn, stride_sk,
                    1, ROWS, COLS, FP8, DTYPE, OUT, HALF, BLOCK_M, BLOCK_K, STAGES, GROUP_M, SPLIT_K, RENAME,
                )),
                (_rename, (
                    a_bufs, landed, full, tiles_n, tiles_m, steps, BLOCK_M, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
                )),
                (_produce, (
                    w_desc, a_desc, w_bufs, a_bufs, landed, empty, tiles_n, tiles_m, steps,
                    HALF, BLOCK_M, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
                )),
            ],
            [4, 4, 1], [208, 56, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (
                    out_desc, out_ptr, out_bufs, w_bufs, a_bufs, landed, full, empty, scale_ptr, bias_ptr, tiles_n,
                    tiles_m, steps, M, N, stride_om, stride_sn, stride_sk,
                    0, ROWS, COLS, FP8, DTYPE, OUT, HALF, BLOCK_M, BLOCK_K, STAGES, GROUP_M, SPLIT_K, RENAME,
                )),
                (_consume, (
                    out_desc, out_ptr, out_bufs, w_bufs, a_bufs, landed, full, empty, scale_ptr, bias_ptr, tiles_n,
                    tiles_m, steps, M, N, stride_om, stride_sn, stride_sk,
                    1, ROWS, COLS, FP8, DTYPE, OUT, HALF, BLOCK_M, BLOCK_K, STAGES, GROUP_M, SPLIT_K, RENAME,
                )),
                (_produce, (
                    w_desc, a_desc, w_bufs, a_bufs, landed, empty, tiles_n, tiles_m, steps,
                    HALF, BLOCK_M, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
                )),
            ],
            [4, 4], [240, 24],
        )  # fmt: skip
