"""The Gluon kernel of scaled_mm_group: warps that load and warps that multiply and scale."""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fpk.db import Config
from fpk.device import Device
from fpk.kernels.gemm._gluon import (
    TYPES,
    after_previous,
    columns_of,
    consumer_tile,
    descriptor,
    locate,
    piece_columns,
    produce,
    put_pieces,
    put_pointers,
    right_parts,
)
from fpk.kernels.gemm._launch import dependent


@gluon.jit
def scales_a(sa_rows, mask_m, k, end, stride_sak, GROUP: gl.constexpr, BLOCK_K: gl.constexpr):
    """Scales of the tokens at step k; 0 from step `end` on."""
    group_k = k if GROUP == BLOCK_K else k * BLOCK_K // GROUP
    return gl.load(sa_rows + group_k * stride_sak.to(gl.int64), mask=mask_m & (k < end), other=0.0)


@gluon.jit
def scale_b(sb_row, k, end, offset_k, stride_sbk, COLS: gl.constexpr, BLOCK_K: gl.constexpr):
    """The weights' scale at step k; 0 from step `end` on."""
    if COLS == BLOCK_K:  # then whole steps make a block, and there is no offset
        block_k = k
    else:
        block_k = (k * BLOCK_K + offset_k) // COLS if COLS > 0 else 0
    return gl.load(sb_row + block_k * stride_sbk.to(gl.int64), mask=k < end, other=0.0)


@gluon.jit
def block_row(column, N, offset_n, ROWS: gl.constexpr):
    """Row of scale_b for the columns from `column` on, the last one's if a part of a tile lies beyond N."""
    return (min(column, N - 1) + offset_n) // ROWS if ROWS > 0 else 0


@gluon.jit
def bias_of(bias_ptr, offs_n, N):
    return gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)


@gluon.jit
def _consume(
    out_desc, out_ptr, left_bufs, right_bufs, more_bufs, out_bufs, full, empty,
    sa_ptr, sb_ptr, bias_ptr, tiles_l, tiles_r, steps, M, N, offset_n, offset_k,
    stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
    WHICH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, OUT: gl.constexpr,
    SWAP: gl.constexpr, ROWS_L: gl.constexpr, ROWS_R: gl.constexpr, MORE: gl.constexpr, TALL: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Multiply one half of each tile, two products a turn: two steps, or the wide and the narrow part (MORE columns) of
    one step. The unit works on the second product while the first one is scaled. Scales are fetched two steps ahead."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS_R, 32])
    layout_more: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 32])
    AXIS_M: gl.constexpr = 0 if SWAP else 1
    LEFT: gl.constexpr = 2 if TALL else 1
    RIGHT: gl.constexpr = 1 if TALL else 2
    PART_L: gl.constexpr = WHICH if TALL else 0
    PART_R: gl.constexpr = 0 if TALL else WHICH
    turn = 0
    for item in range(gl.program_id(0), tiles_l * tiles_r * SPLIT_K, gl.num_programs(0)):
        tile_l, tile_r, part, begin, end = locate(item, tiles_l, tiles_r, steps, GROUP_M, SPLIT_K)
        row, column = (LEFT * tile_l + PART_L) * ROWS_L, (RIGHT * tile_r + PART_R) * ROWS_R
        if MORE > 0:
            column, column_more = columns_of(tile_r * (ROWS_R + MORE), ROWS_R, MORE)
        offs_l = row + gl.arange(0, ROWS_L, layout=gl.SliceLayout(1, layout))
        offs_r = column + gl.arange(0, ROWS_R, layout=gl.SliceLayout(0, layout))
        if SWAP:
            offs_m = offs_r
            first_n = row
        else:
            offs_m = offs_l
            first_n = column
        mask_m = offs_m < M
        sa_rows = sa_ptr + offs_m.to(gl.int64) * stride_sam
        sb_row = sb_ptr + block_row(first_n, N, offset_n, ROWS) * stride_sbn.to(gl.int64)
        acc = gl.zeros((ROWS_L, ROWS_R), gl.float32, layout)
        sa_0 = scales_a(sa_rows, mask_m, begin, end, stride_sak, GROUP, BLOCK_K)
        sa_1 = scales_a(sa_rows, mask_m, begin + 1, end, stride_sak, GROUP, BLOCK_K)
        sb_0 = scale_b(sb_row, begin, end, offset_k, stride_sbk, COLS, BLOCK_K)
        sb_1 = scale_b(sb_row, begin + 1, end, offset_k, stride_sbk, COLS, BLOCK_K)
        if MORE > 0:
            acc_more = gl.zeros((ROWS_L, MORE), gl.float32, layout_more)
            sb_row_more = sb_ptr + block_row(column_more, N, offset_n, ROWS) * stride_sbn.to(gl.int64)
            more_0 = scale_b(sb_row_more, begin, end, offset_k, stride_sbk, COLS, BLOCK_K)
            more_1 = scale_b(sb_row_more, begin + 1, end, offset_k, stride_sbk, COLS, BLOCK_K)
        for k in range(begin, end, 1 if MORE > 0 else 2):
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            token_0 = warpgroup_mma(
                left_bufs.index(slot * LEFT + PART_L), right_bufs.index(slot * RIGHT + PART_R).permute((1, 0)),
                gl.zeros((ROWS_L, ROWS_R), gl.float32, layout), use_acc=False, is_async=True,
            )  # fmt: skip
            if MORE > 0:
                token_1 = warpgroup_mma(
                    left_bufs.index(slot * LEFT + PART_L), more_bufs.index(slot).permute((1, 0)),
                    gl.zeros((ROWS_L, MORE), gl.float32, layout_more), use_acc=False, is_async=True,
                )  # fmt: skip
                factor_0 = (sa_0 * sb_0)[:, None]
                factor_1 = gl.convert_layout(sa_0 * more_0, gl.SliceLayout(1, layout_more))[:, None]
                sa_0, sb_0, more_0 = sa_1, sb_1, more_1
                sa_1 = scales_a(sa_rows, mask_m, k + 2, end, stride_sak, GROUP, BLOCK_K)
                sb_1 = scale_b(sb_row, k + 2, end, offset_k, stride_sbk, COLS, BLOCK_K)
                more_1 = scale_b(sb_row_more, k + 2, end, offset_k, stride_sbk, COLS, BLOCK_K)
                product_0 = warpgroup_mma_wait(1, deps=[token_0])
                acc += product_0 * factor_0
                product_1 = warpgroup_mma_wait(0, deps=[token_1])
                mbarrier.arrive(empty.index(slot), count=1)
                acc_more += product_1 * factor_1
                turn += 1
            else:
                slot_1 = (turn + 1) % STAGES
                mbarrier.wait(full.index(slot_1), ((turn + 1) // STAGES) & 1)
                token_1 = warpgroup_mma(
                    left_bufs.index(slot_1 * LEFT + PART_L), right_bufs.index(slot_1 * RIGHT + PART_R).permute((1, 0)),
                    gl.zeros((ROWS_L, ROWS_R), gl.float32, layout), use_acc=False, is_async=True,
                )  # fmt: skip
                factor_0 = gl.expand_dims(sa_0 * sb_0, AXIS_M)
                factor_1 = gl.expand_dims(sa_1 * sb_1, AXIS_M)
                sa_0 = scales_a(sa_rows, mask_m, k + 2, end, stride_sak, GROUP, BLOCK_K)
                sa_1 = scales_a(sa_rows, mask_m, k + 3, end, stride_sak, GROUP, BLOCK_K)
                sb_0 = scale_b(sb_row, k + 2, end, offset_k, stride_sbk, COLS, BLOCK_K)
                sb_1 = scale_b(sb_row, k + 3, end, offset_k, stride_sbk, COLS, BLOCK_K)
                product_0 = warpgroup_mma_wait(1, deps=[token_0])
                mbarrier.arrive(empty.index(slot), count=1)
                acc += product_0 * factor_0
                product_1 = warpgroup_mma_wait(0, deps=[token_1])
                mbarrier.arrive(empty.index(slot_1), count=1)
                acc += product_1 * factor_1
                turn += 2
        if SPLIT_K > 1:
            base = out_ptr + part.to(gl.int64) * M * N
            if SWAP:
                put_pointers(base, acc, offs_l, offs_r, N, M, 1, N)
            else:
                put_pointers(base, acc, offs_l, offs_r, M, N, N, 1)
        else:
            if bias_ptr is not None:
                offs_n = offs_l if SWAP else offs_r
                acc += gl.expand_dims(bias_of(bias_ptr, offs_n, N), 1 - AXIS_M)
            if SWAP:
                put_pointers(out_ptr, acc, offs_l, offs_r, N, M, 1, stride_om)
            else:
                put_pieces(out_desc, out_bufs, 2 * WHICH, acc.to(OUT), row, column)
            if MORE > 0:
                if bias_ptr is not None:
                    offs_n = column_more + gl.arange(0, MORE, layout=gl.SliceLayout(0, layout_more))
                    acc_more += bias_of(bias_ptr, offs_n, N)[None, :]
                put_pieces(out_desc, out_bufs, 2 * WHICH, acc_more.to(OUT), row, column_more)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n", "offset_k"])
def group_warps_kernel(
    left_desc, right_desc, more_desc, out_desc, out_ptr, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, offset_n, offset_k, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    OUT: gl.constexpr, SWAP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Persistent; SWAP: weights on the 64-row side; SPLIT_K > 1: raw sums to out_ptr, for an ordered reduction."""
    after_previous(PDL)
    ROWS_L: gl.constexpr = left_desc.block_shape[0]
    ROWS_R: gl.constexpr = right_desc.block_shape[0]
    MORE: gl.constexpr = 0 if more_desc is None else more_desc.block_shape[0]
    TALL: gl.constexpr = (BLOCK_N if SWAP else BLOCK_M) == 2 * ROWS_L
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
                out_desc, out_ptr, left_bufs, right_bufs, more_bufs, out_bufs, full, empty, sa_ptr, sb_ptr,
                bias_ptr, tiles_l, tiles_r, steps, M, N, offset_n, offset_k,
                stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk, 0, GROUP, ROWS, COLS, OUT, SWAP,
                ROWS_L, ROWS_R, MORE, TALL, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
            )),
            (_consume, (
                out_desc, out_ptr, left_bufs, right_bufs, more_bufs, out_bufs, full, empty, sa_ptr, sb_ptr,
                bias_ptr, tiles_l, tiles_r, steps, M, N, offset_n, offset_k,
                stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk, 1, GROUP, ROWS, COLS, OUT, SWAP,
                ROWS_L, ROWS_R, MORE, TALL, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
            )),
            (produce, (
                left_desc, right_desc, more_desc, left_bufs, right_bufs, more_bufs, full, empty, tiles_l, tiles_r,
                steps, ROWS_L, ROWS_R, MORE, 2 if TALL else 1, 1 if TALL else 2, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
                1 if MORE > 0 else 2,
            )),
        ],
        [4, 4], [240, 24],
    )  # fmt: skip


def launch(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    parts: Tensor, offset_n: int, offset_k: int, config: Config, **scaling: int,
) -> None:  # fmt: skip
    """Launch the kernel; the sums of a split K go to `parts`."""
    (M, K), N = a.shape, b.shape[0]
    block_m, block_n, block_k = (config[f"BLOCK_{d}"] for d in "MNK")
    items = triton.cdiv(M, block_m) * triton.cdiv(N, block_n) * config["SPLIT_K"]
    left, right = (b, a) if config["SWAP"] else (a, b)
    rows_l, rows_r = consumer_tile(config)
    wide, narrow = right_parts(rows_r)
    by_pointers = config["SWAP"] or config["SPLIT_K"] > 1
    group_warps_kernel[(min(device.sm_count, items),)](
        descriptor(left, rows_l, block_k), descriptor(right, wide, block_k),
        descriptor(right, narrow, block_k) if narrow else None,
        None if by_pointers else descriptor(out, rows_l, piece_columns(rows_r)), parts if by_pointers else None,
        scale_a, scale_b, bias, M, N, K, offset_n, offset_k, out.stride(0), *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], OUT=TYPES[out.dtype], **scaling, **config, **dependent(device, M),
    )  # fmt: skip
