"""A Gluon kernel of scaled_mm_group for few tokens: consumers take turns at the steps of K.

Where the halves of a tile would be narrow, each consumer has the whole tile, and every other step. What a step costs
beside its products (a wait, scales, a release) is then paid half as often, and overlaps with the other consumer's
product. PER_SM programs share an SM, so that one begins while another ends.
"""

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
    barrier,
    descriptor,
    locate,
    piece_columns,
    put_pieces,
    put_pointers,
    tma_load,
)
from fpk.kernels.gemm._gluon_group import bias_of, scale_b, scales_a
from fpk.kernels.gemm._launch import dependent


@gluon.jit
def _consume_by_turns(
    out_desc, out_ptr, left_bufs, right_bufs, out_bufs, sum_buf, full, empty, handed, taken,
    sa_ptr, sb_ptr, bias_ptr, tiles_m, tiles_n, steps, M, N, offset_n, offset_k,
    stride_sam, stride_sak, stride_sbn, stride_sbk,
    WHICH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, OUT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Multiply every other step of each tile; the second consumer hands its sum to the first one."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    begun = 0
    phase = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        tile_m, tile_n, part, begin, end = locate(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        row, column = tile_m * BLOCK_M, tile_n * BLOCK_N
        offs_m = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
        offs_n = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        mask_m = offs_m < M
        sa_rows = sa_ptr + offs_m.to(gl.int64) * stride_sam
        sb_row = sb_ptr + ((column + offset_n) // ROWS if ROWS > 0 else 0) * stride_sbn.to(gl.int64)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
        first = begin + WHICH
        sa = scales_a(sa_rows, mask_m, first, end, stride_sak, GROUP, BLOCK_K)
        sb = scale_b(sb_row, first, end, offset_k, stride_sbk, COLS, BLOCK_K)
        next_sa = scales_a(sa_rows, mask_m, first + 2, end, stride_sak, GROUP, BLOCK_K)
        next_sb = scale_b(sb_row, first + 2, end, offset_k, stride_sbk, COLS, BLOCK_K)
        for k in range(first, end, 2):
            turn = begun + (k - first) // 2
            slot = WHICH * (STAGES // 2) + turn % (STAGES // 2)
            mbarrier.wait(full.index(slot), turn // (STAGES // 2) & 1)
            token = warpgroup_mma(
                left_bufs.index(slot), right_bufs.index(slot).permute((1, 0)),
                gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout), use_acc=False, is_async=True,
            )  # fmt: skip
            factor = sa * sb
            sa, sb = next_sa, next_sb
            next_sa = scales_a(sa_rows, mask_m, k + 4, end, stride_sak, GROUP, BLOCK_K)
            next_sb = scale_b(sb_row, k + 4, end, offset_k, stride_sbk, COLS, BLOCK_K)
            product = warpgroup_mma_wait(0, deps=[token])
            mbarrier.arrive(empty.index(slot), count=1)
            acc += product * factor[:, None]
        begun += max(end - first + 1, 0) // 2
        if WHICH == 1:
            mbarrier.wait(taken, phase ^ 1)
            sum_buf.store(acc)
            barrier()
            mbarrier.arrive(handed, count=1)
        else:
            mbarrier.wait(handed, phase)
            acc += sum_buf.load(layout)
            barrier()
            mbarrier.arrive(taken, count=1)
            if SPLIT_K > 1:
                put_pointers(out_ptr + part.to(gl.int64) * M * N, acc, offs_m, offs_n, M, N, N, 1)
            else:
                if bias_ptr is not None:
                    acc += bias_of(bias_ptr, offs_n, N)[None, :]
                put_pieces(out_desc, out_bufs, 0, acc.to(OUT), row, column)
        phase ^= 1
    tma.store_wait(0)


@gluon.jit
def _produce_by_turns(
    left_desc, right_desc, left_bufs, right_bufs, full, empty, tiles_m, tiles_n, steps,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    SPLIT_K: gl.constexpr,
):  # fmt: skip
    """Fill two rings, one a consumer.

    A consumer that met only every other use of a slot could not tell by the parity of its barrier whether the use
    before its own, the other consumer's, has been filled: loads of a far and of a near step may end in either order.
    """
    begun = 0  # steps of the first consumer so far
    begun_other = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n * SPLIT_K, gl.num_programs(0)):
        tile_m, tile_n, _, begin, end = locate(item, tiles_m, tiles_n, steps, GROUP_M, SPLIT_K)
        for k in range(begin, end):
            other = (k - begin) & 1
            turn = begun + (begun_other - begun) * other + (k - begin) // 2
            slot = other * (STAGES // 2) + turn % (STAGES // 2)
            mbarrier.wait(empty.index(slot), (turn // (STAGES // 2) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K)
            tma_load(left_desc, [tile_m * BLOCK_M, k * BLOCK_K], bar, left_bufs.index(slot))
            tma_load(right_desc, [tile_n * BLOCK_N, k * BLOCK_K], bar, right_bufs.index(slot))
        begun += max(end - begin + 1, 0) // 2
        begun_other += max(end - begin, 0) // 2


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n", "offset_k"])
def group_turns_kernel(
    left_desc, right_desc, out_desc, out_ptr, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, offset_n, offset_k, stride_sam, stride_sak, stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    OUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent; SPLIT_K > 1: raw sums to out_ptr, for an ordered reduction."""
    after_previous(PDL)
    left_bufs = gl.allocate_shared_memory(CODES, [STAGES, BLOCK_M, BLOCK_K], left_desc.layout)
    right_bufs = gl.allocate_shared_memory(CODES, [STAGES, BLOCK_N, BLOCK_K], right_desc.layout)
    sum_buf = gl.allocate_shared_memory(
        gl.float32, [BLOCK_M, BLOCK_N], gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2)
    )
    if SPLIT_K > 1:
        out_bufs = left_bufs  # unused
    else:
        out_bufs = gl.allocate_shared_memory(OUT, [2, BLOCK_M, out_desc.block_shape[1]], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    handed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(handed, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, BLOCK_K)
    gl.warp_specialize(
        [
            (_consume_by_turns, (
                out_desc, out_ptr, left_bufs, right_bufs, out_bufs, sum_buf, full, empty, handed, taken,
                sa_ptr, sb_ptr, bias_ptr, tiles_m, tiles_n, steps, M, N, offset_n, offset_k,
                stride_sam, stride_sak, stride_sbn, stride_sbk,
                0, GROUP, ROWS, COLS, OUT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
            )),
            (_consume_by_turns, (
                out_desc, out_ptr, left_bufs, right_bufs, out_bufs, sum_buf, full, empty, handed, taken,
                sa_ptr, sb_ptr, bias_ptr, tiles_m, tiles_n, steps, M, N, offset_n, offset_k,
                stride_sam, stride_sak, stride_sbn, stride_sbk,
                1, GROUP, ROWS, COLS, OUT, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
            )),
            (_produce_by_turns, (
                left_desc, right_desc, left_bufs, right_bufs, full, empty, tiles_m, tiles_n, steps,
                BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, SPLIT_K,
            )),
        ],
        [4, 4], [REGISTERS, 24],
    )  # fmt: skip


def launch_turns(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    parts: Tensor, offset_n: int, offset_k: int, config: Config, **scaling: int,
) -> None:  # fmt: skip
    """Launch the kernel; the sums of a split K go to `parts`."""
    (M, K), N = a.shape, b.shape[0]
    config = dict(config)
    per_sm, splits = config.pop("PER_SM"), config["SPLIT_K"] > 1
    block_m, block_n, block_k = (config[f"BLOCK_{d}"] for d in "MNK")
    items = triton.cdiv(M, block_m) * triton.cdiv(N, block_n) * config["SPLIT_K"]
    registers = dict(REGISTERS=240) if per_sm == 1 else dict(REGISTERS=104, maxnreg=80)
    group_turns_kernel[(min(per_sm * device.sm_count, items),)](
        descriptor(a, block_m, block_k), descriptor(b, block_n, block_k),
        None if splits else descriptor(out, block_m, piece_columns(block_n)), parts if splits else None,
        scale_a, scale_b, bias, M, N, K, offset_n, offset_k, *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], OUT=TYPES[out.dtype], **scaling, **config, **registers, **dependent(device, M),
    )  # fmt: skip
