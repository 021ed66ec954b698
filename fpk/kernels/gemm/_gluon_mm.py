"""The Gluon kernel of scaled_mm: warps that load and warps that multiply, scales in the epilogue."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fpk.kernels.gemm._gluon import after_previous, columns_of, locate, produce, put_pieces, put_pointers


@gluon.jit
def _finish(
    acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, offs_m, offs_n, M, N, stride_sa, stride_sb,
    stride_za, AXIS_M: gl.constexpr, AXIS_N: gl.constexpr,
):  # fmt: skip
    """Zero point, scales and bias on an accumulated tile, in fp32; AXIS_M is 1 for rows of tokens, 0 for columns."""
    mask_m, mask_n = offs_m < M, offs_n < N
    if zero_ptr is not None:
        zero = gl.expand_dims(gl.load(zero_ptr + offs_m * stride_za, mask=mask_m, other=0), AXIS_M)
        acc -= zero * gl.expand_dims(gl.load(colsum_ptr + offs_n, mask=mask_n, other=0), AXIS_N)
    out = acc.to(gl.float32)
    out *= gl.expand_dims(gl.load(scale_a_ptr + offs_m * stride_sa, mask=mask_m, other=0.0), AXIS_M)
    out *= gl.expand_dims(gl.load(scale_b_ptr + offs_n * stride_sb, mask=mask_n, other=0.0), AXIS_N)
    if bias_ptr is not None:
        out += gl.expand_dims(gl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(gl.float32), AXIS_N)
    return out


@gluon.jit
def _consume(
    out_desc, out_ptr, left_bufs, right_bufs, more_bufs, out_bufs, full, empty,
    scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, tiles_l, tiles_r, steps, M, N,
    stride_om, stride_sa, stride_sb, stride_za,
    WHICH: gl.constexpr, INT8: gl.constexpr, PROMOTE: gl.constexpr, OUT: gl.constexpr, SWAP: gl.constexpr,
    ROWS_L: gl.constexpr, ROWS_R: gl.constexpr, MORE: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Multiply one half of each tile; its columns are a wide part and perhaps MORE. PROMOTE > 0: the unit's own sums
    move to fp32 registers every PROMOTE steps."""
    SUM: gl.constexpr = gl.int32 if INT8 else gl.float32
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS_R, 32])
    layout_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 32])
    LEFT: gl.constexpr = 2 if TALL else 1
    RIGHT: gl.constexpr = 1 if TALL else 2
    PART_L: gl.constexpr = WHICH if TALL else 0
    PART_R: gl.constexpr = 0 if TALL else WHICH
    turn = 0
    for item in range(gl.program_id(0), tiles_l * tiles_r * SPLIT_K, gl.num_programs(0)):
        tile_l, tile_r, part, begin, end = locate(item, tiles_l, tiles_r, steps, GROUP, SPLIT_K)
        acc = gl.zeros((ROWS_L, ROWS_R), SUM, layout)
        if MORE > 0:
            acc_more = gl.zeros((ROWS_L, MORE), SUM, layout_more)
        if PROMOTE > 0:
            for first in range(begin, end, PROMOTE):
                product = gl.zeros((ROWS_L, ROWS_R), SUM, layout)
                if MORE > 0:
                    product_more = gl.zeros((ROWS_L, MORE), SUM, layout_more)
                for k in range(first, min(first + PROMOTE, end)):
                    slot = turn % STAGES
                    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
                    token = warpgroup_mma(
                        left_bufs.index(slot * LEFT + PART_L), right_bufs.index(slot * RIGHT + PART_R).permute((1, 0)),
                        product, use_acc=k != first, is_async=True,
                    )  # fmt: skip
                    if MORE > 0:
                        token_more = warpgroup_mma(
                            left_bufs.index(slot * LEFT + PART_L), more_bufs.index(slot).permute((1, 0)),
                            product_more, use_acc=k != first, is_async=True,
                        )  # fmt: skip
                        product, product_more = warpgroup_mma_wait(0, deps=[token, token_more])
                    else:
                        product = warpgroup_mma_wait(0, deps=[token])
                    mbarrier.arrive(empty.index(slot), count=1)
                    turn += 1
                acc += product
                if MORE > 0:
                    acc_more += product_more
        else:
            for k in range(begin, end):
                slot = turn % STAGES
                mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
                token = warpgroup_mma(
                    left_bufs.index(slot * LEFT + PART_L),
                    right_bufs.index(slot * RIGHT + PART_R).permute((1, 0)),
                    acc,
                    is_async=True,
                )
                if MORE > 0:
                    token_more = warpgroup_mma(
                        left_bufs.index(slot * LEFT + PART_L), more_bufs.index(slot).permute((1, 0)), acc_more,
                        is_async=True,
                    )  # fmt: skip
                    acc, acc_more = warpgroup_mma_wait(2, deps=[token, token_more])
                else:
                    acc = warpgroup_mma_wait(1, deps=[token])  # the product before this one is done
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k != begin)
                turn += 1
            if MORE > 0:
                acc, acc_more = warpgroup_mma_wait(0, deps=[acc, acc_more])
            else:
                acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=begin < end)
        row, column = (LEFT * tile_l + PART_L) * ROWS_L, (RIGHT * tile_r + PART_R) * ROWS_R
        if MORE > 0:
            column, column_more = columns_of(tile_r * (ROWS_R + MORE), ROWS_R, MORE)
        offs_l = row + gl.arange(0, ROWS_L, layout=gl.SliceLayout(1, layout))
        offs_r = column + gl.arange(0, ROWS_R, layout=gl.SliceLayout(0, layout))
        if SPLIT_K > 1:
            base = out_ptr + part.to(gl.int64) * M * N
            if SWAP:
                put_pointers(base, acc, offs_l, offs_r, N, M, 1, N)
            else:
                put_pointers(base, acc, offs_l, offs_r, M, N, N, 1)
        elif SWAP:
            tile = _finish(
                acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, offs_r, offs_l, M, N,
                stride_sa, stride_sb, stride_za, 0, 1,
            )  # fmt: skip
            put_pointers(out_ptr, tile, offs_l, offs_r, N, M, 1, stride_om)
        else:
            tile = _finish(
                acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, offs_l, offs_r, M, N,
                stride_sa, stride_sb, stride_za, 1, 0,
            )  # fmt: skip
            put_pieces(out_desc, out_bufs, 2 * WHICH, tile.to(OUT), row, column)
            if MORE > 0:
                offs_l = row + gl.arange(0, ROWS_L, layout=gl.SliceLayout(1, layout_more))
                offs_r = column_more + gl.arange(0, MORE, layout=gl.SliceLayout(0, layout_more))
                tile = _finish(
                    acc_more, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, offs_l, offs_r, M, N,
                    stride_sa, stride_sb, stride_za, 1, 0,
                )  # fmt: skip
                put_pieces(out_desc, out_bufs, 2 * WHICH, tile.to(OUT), row, column_more)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def warps_kernel(
    left_desc, right_desc, more_desc, out_desc, out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
    M, N, K, stride_om, stride_sa, stride_sb, stride_za,
    PDL: gl.constexpr, CODES: gl.constexpr, INT8: gl.constexpr, PROMOTE: gl.constexpr, OUT: gl.constexpr,
    SWAP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Persistent; SWAP: weights on the 64-row side; SPLIT_K > 1: raw sums to out_ptr, for an ordered reduction."""
    after_previous(PDL)
    ROWS_L: gl.constexpr = left_desc.block_shape[0]
    ROWS_R: gl.constexpr = right_desc.block_shape[0]
    TALL: gl.constexpr = (BLOCK_N if SWAP else BLOCK_M) == 2 * ROWS_L
    MORE: gl.constexpr = 0 if more_desc is None else more_desc.block_shape[0]
    left_bufs = gl.allocate_shared_memory(CODES, [STAGES * (2 if TALL else 1), ROWS_L, BLOCK_K], left_desc.layout)
    right_bufs = gl.allocate_shared_memory(CODES, [STAGES * (1 if TALL else 2), ROWS_R, BLOCK_K], right_desc.layout)
    more_bufs, out_bufs = right_bufs, left_bufs  # unused
    if MORE > 0:
        more_bufs = gl.allocate_shared_memory(CODES, [STAGES, MORE, BLOCK_K], more_desc.layout)
    if not SWAP and SPLIT_K == 1:
        out_bufs = gl.allocate_shared_memory(OUT, [4, ROWS_L, out_desc.block_shape[1]], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    tiles_l = gl.cdiv(N if SWAP else M, BLOCK_N if SWAP else BLOCK_M)
    tiles_r = gl.cdiv(M if SWAP else N, BLOCK_M if SWAP else BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, out_ptr, left_bufs, right_bufs, more_bufs, out_bufs, full, empty, scale_a_ptr, scale_b_ptr,
                bias_ptr, zero_ptr, colsum_ptr, tiles_l, tiles_r, steps, M, N,
                stride_om, stride_sa, stride_sb, stride_za, 0, INT8, PROMOTE, OUT, SWAP,
                ROWS_L, ROWS_R, MORE, TALL, STAGES, GROUP_M, SPLIT_K,
            )),
            (_consume, (
                out_desc, out_ptr, left_bufs, right_bufs, more_bufs, out_bufs, full, empty, scale_a_ptr, scale_b_ptr,
                bias_ptr, zero_ptr, colsum_ptr, tiles_l, tiles_r, steps, M, N,
                stride_om, stride_sa, stride_sb, stride_za, 1, INT8, PROMOTE, OUT, SWAP,
                ROWS_L, ROWS_R, MORE, TALL, STAGES, GROUP_M, SPLIT_K,
            )),
            (produce, (
                left_desc, right_desc, more_desc, left_bufs, right_bufs, more_bufs, full, empty,
                tiles_l, tiles_r, steps,
                ROWS_L, ROWS_R, MORE, 2 if TALL else 1, 1 if TALL else 2, BLOCK_K, STAGES, GROUP_M, SPLIT_K, 1,
            )),
        ],
        [4, 4], [240, 24],
    )  # fmt: skip
