"""The Gluon kernel of mm_packed for two MXFP8 operands: products of 32 columns leave the tensor core to be scaled.

One warp loads tiles, four load scales, decode them once and leave them in shared memory by groups of columns, and two
groups of four warps multiply: the unit works on one product of 32 columns while the one before is scaled.
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
from fpk.kernels.gemm._gluon import TYPES, after_previous, barrier, descriptor, locate, put_halves, tma_load
from fpk.kernels.gemm._launch import dependent


@gluon.jit
def _powers(ptrs, mask):
    """fp32 values of e8m0 bytes."""
    byte = gl.load(ptrs, mask=mask, other=0).to(gl.int32)
    bits = gl.where(byte == 0, 0x00400000, byte << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _load_scales(
    sa_ptr, sb_ptr, sa_bufs, sb_bufs, full, empty, tiles_m, tiles_n, steps, M, N, G,
    stride_sam, stride_sak, stride_sbn, stride_sbk,
    ROWS_M: gl.constexpr, ROWS_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    turn = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n, _, begin, end = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        offs_m = tile_m * ROWS_M + gl.arange(0, ROWS_M, layout=layout)
        offs_n = tile_n * ROWS_N + gl.arange(0, ROWS_N, layout=layout)
        a_ptrs = sa_ptr + offs_m.to(gl.int64) * stride_sam
        b_ptrs = sb_ptr + offs_n.to(gl.int64) * stride_sbn
        for k in range(begin, end):
            slot = turn % STAGES
            g0 = k * 4
            a_0 = _powers(a_ptrs + g0 * stride_sak, (offs_m < M) & (g0 < G))
            a_1 = _powers(a_ptrs + (g0 + 1) * stride_sak, (offs_m < M) & (g0 + 1 < G))
            a_2 = _powers(a_ptrs + (g0 + 2) * stride_sak, (offs_m < M) & (g0 + 2 < G))
            a_3 = _powers(a_ptrs + (g0 + 3) * stride_sak, (offs_m < M) & (g0 + 3 < G))
            b_0 = _powers(b_ptrs + g0 * stride_sbk, (offs_n < N) & (g0 < G))
            b_1 = _powers(b_ptrs + (g0 + 1) * stride_sbk, (offs_n < N) & (g0 + 1 < G))
            b_2 = _powers(b_ptrs + (g0 + 2) * stride_sbk, (offs_n < N) & (g0 + 2 < G))
            b_3 = _powers(b_ptrs + (g0 + 3) * stride_sbk, (offs_n < N) & (g0 + 3 < G))
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            sa_bufs.index(slot * 4).store(a_0)
            sa_bufs.index(slot * 4 + 1).store(a_1)
            sa_bufs.index(slot * 4 + 2).store(a_2)
            sa_bufs.index(slot * 4 + 3).store(a_3)
            sb_bufs.index(slot * 4).store(b_0)
            sb_bufs.index(slot * 4 + 1).store(b_1)
            sb_bufs.index(slot * 4 + 2).store(b_2)
            sb_bufs.index(slot * 4 + 3).store(b_3)
            barrier()
            mbarrier.arrive(full.index(slot), count=1)
            turn += 1


@gluon.jit
def _load_tiles(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles_m, tiles_n, steps,
    ROWS_M: gl.constexpr, ROWS_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Each consumer has ROWS_M rows of its own."""
    turn = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n, _, begin, end = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        for k in range(begin, end):
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (2 * ROWS_M + ROWS_N) * 128)
            for i in gl.static_range(2):
                tma_load(a_desc, [(2 * tile_m + i) * ROWS_M, k * 128], bar, a_bufs.index(slot * 2 + i))
            tma_load(b_desc, [tile_n * ROWS_N, k * 128], bar, b_bufs.index(slot))
            turn += 1


@gluon.jit
def _product(left, right, i, zero):
    """The product of 32 columns, on its way."""
    return warpgroup_mma(
        left.slice(i * 32, 32, dim=1), right.slice(i * 32, 32, dim=1).permute((1, 0)), zero, use_acc=False,
        is_async=True,
    )  # fmt: skip


@gluon.jit
def _consume(
    out_desc, a_bufs, b_bufs, sa_bufs, sb_bufs, out_bufs, full, empty, bias_ptr, tiles_m, tiles_n, steps, M, N,
    WHICH: gl.constexpr, OUT: gl.constexpr, ROWS_M: gl.constexpr, ROWS_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS_N, 32])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    columns: gl.constexpr = gl.SliceLayout(0, layout)
    zero = gl.zeros((ROWS_M, ROWS_N), gl.float32, layout)
    turn = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n, _, begin, end = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        acc = gl.zeros((ROWS_M, ROWS_N), gl.float32, layout)
        for _ in range(begin, end):
            slot = turn % STAGES
            left, right = a_bufs.index(slot * 2 + WHICH), b_bufs.index(slot)
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            token_0 = _product(left, right, 0, zero)
            token_1 = _product(left, right, 1, zero)
            scale_a = sa_bufs.index(slot * 4).slice(WHICH * ROWS_M, ROWS_M).load(rows)
            scale_b = sb_bufs.index(slot * 4).load(columns)
            part = warpgroup_mma_wait(1, deps=[token_0])
            acc += part * (scale_a[:, None] * scale_b[None, :])
            token_0 = _product(left, right, 2, zero)
            scale_a = sa_bufs.index(slot * 4 + 1).slice(WHICH * ROWS_M, ROWS_M).load(rows)
            scale_b = sb_bufs.index(slot * 4 + 1).load(columns)
            part = warpgroup_mma_wait(1, deps=[token_1])
            acc += part * (scale_a[:, None] * scale_b[None, :])
            token_1 = _product(left, right, 3, zero)
            scale_a = sa_bufs.index(slot * 4 + 2).slice(WHICH * ROWS_M, ROWS_M).load(rows)
            scale_b = sb_bufs.index(slot * 4 + 2).load(columns)
            part = warpgroup_mma_wait(1, deps=[token_0])
            acc += part * (scale_a[:, None] * scale_b[None, :])
            scale_a = sa_bufs.index(slot * 4 + 3).slice(WHICH * ROWS_M, ROWS_M).load(rows)
            scale_b = sb_bufs.index(slot * 4 + 3).load(columns)
            part = warpgroup_mma_wait(0, deps=[token_1])
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part * (scale_a[:, None] * scale_b[None, :])
            turn += 1
        row, column = (2 * tile_m + WHICH) * ROWS_M, tile_n * ROWS_N
        if bias_ptr is not None:
            offs_n = column + gl.arange(0, ROWS_N, layout=columns)
            acc += gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)[None, :]
        put_halves(out_desc, out_bufs.index(WHICH), acc.to(OUT), row, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak"])
def mx_warps_kernel(
    a_desc, b_desc, out_desc, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, stride_sam, stride_sak, stride_sbn, stride_sbk,
    PDL: gl.constexpr, A: gl.constexpr, B: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Persistent; K in steps of 128."""
    after_previous(PDL)
    HALF: gl.constexpr = BLOCK_M // 2
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_bufs = gl.allocate_shared_memory(A, [STAGES * 2, HALF, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(B, [STAGES, BLOCK_N, 128], b_desc.layout)
    sa_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * 4, BLOCK_M], flat)
    sb_bufs = gl.allocate_shared_memory(gl.float32, [STAGES * 4, BLOCK_N], flat)
    out_bufs = gl.allocate_shared_memory(OUT, [2, HALF, BLOCK_N // 2], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # codes and scales
        mbarrier.init(empty.index(i), count=2)  # two consumers
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), gl.cdiv(K, 128)
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, a_bufs, b_bufs, sa_bufs, sb_bufs, out_bufs, full, empty, bias_ptr, tiles_m, tiles_n, steps,
                M, N, 0, OUT, HALF, BLOCK_N, STAGES, GROUP_M,
            )),
            (_consume, (
                out_desc, a_bufs, b_bufs, sa_bufs, sb_bufs, out_bufs, full, empty, bias_ptr, tiles_m, tiles_n, steps,
                M, N, 1, OUT, HALF, BLOCK_N, STAGES, GROUP_M,
            )),
            (_load_scales, (
                sa_ptr, sb_ptr, sa_bufs, sb_bufs, full, empty, tiles_m, tiles_n, steps, M, N, gl.cdiv(K, 32),
                stride_sam, stride_sak, stride_sbn, stride_sbk, BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
            (_load_tiles, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles_m, tiles_n, steps, HALF, BLOCK_N, STAGES, GROUP_M,
            )),
        ],
        [4, 4, 1], [232, 24, 24],
    )  # fmt: skip


def launch(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    config: Config,
) -> None:  # fmt: skip
    """Multiply MXFP8 activations by MXFP8 weights."""
    (M, K), N = a.shape, b.shape[0]
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    mx_warps_kernel[(min(device.sm_count, tiles),)](
        descriptor(a, block_m // 2, 128), descriptor(b, block_n, 128), descriptor(out, block_m // 2, block_n // 2),
        scale_a, scale_b, bias, M, N, K, *scale_a.stride(), *scale_b.stride(),
        A=TYPES[a.dtype], B=TYPES[b.dtype], OUT=TYPES[out.dtype], **config, **dependent(device, M),
    )  # fmt: skip
