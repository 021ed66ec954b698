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
def _power(word, i):
    """fp32 value of byte i of words of e8m0."""
    byte = (word >> (8 * i)) & 255
    bits = gl.where(byte == 0, 0x00400000, byte << 23)
    return gl.where(byte == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)


@gluon.jit
def _load_scales(
    sa_ptr, sb_ptr, sa_bufs, sb_bufs, full, empty, tiles_m, tiles_n, steps, M, N, stride_sam, stride_sbn,
    ROWS_M: gl.constexpr, ROWS_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The scales of a step are one word a row; they are fetched three steps ahead."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    turn = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n, _, begin, end = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        offs_m = tile_m * ROWS_M + gl.arange(0, ROWS_M, layout=layout)
        offs_n = tile_n * ROWS_N + gl.arange(0, ROWS_N, layout=layout)
        a_ptrs = (sa_ptr + offs_m.to(gl.int64) * stride_sam).to(gl.pointer_type(gl.int32))
        b_ptrs = (sb_ptr + offs_n.to(gl.int64) * stride_sbn).to(gl.pointer_type(gl.int32))
        mask_m, mask_n = offs_m < M, offs_n < N
        a_0 = gl.load(a_ptrs + begin, mask=mask_m & (begin < end), other=0)
        b_0 = gl.load(b_ptrs + begin, mask=mask_n & (begin < end), other=0)
        a_1 = gl.load(a_ptrs + begin + 1, mask=mask_m & (begin + 1 < end), other=0)
        b_1 = gl.load(b_ptrs + begin + 1, mask=mask_n & (begin + 1 < end), other=0)
        a_2 = gl.load(a_ptrs + begin + 2, mask=mask_m & (begin + 2 < end), other=0)
        b_2 = gl.load(b_ptrs + begin + 2, mask=mask_n & (begin + 2 < end), other=0)
        for k in range(begin, end):
            slot = turn % STAGES
            a, b = a_0, b_0
            a_0, b_0 = a_1, b_1
            a_1, b_1 = a_2, b_2
            a_2 = gl.load(a_ptrs + k + 3, mask=mask_m & (k + 3 < end), other=0)
            b_2 = gl.load(b_ptrs + k + 3, mask=mask_n & (k + 3 < end), other=0)
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            for i in gl.static_range(4):
                sa_bufs.index(slot * 4 + i).store(_power(a, i))
                sb_bufs.index(slot * 4 + i).store(_power(b, i))
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


@gluon.jit(do_not_specialize=["M"])
def mx_warps_kernel(
    a_desc, b_desc, out_desc, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, stride_sam, stride_sbn,
    PDL: gl.constexpr, A: gl.constexpr, B: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Persistent; K, a multiple of 128, in steps of 128."""
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
                sa_ptr, sb_ptr, sa_bufs, sb_bufs, full, empty, tiles_m, tiles_n, steps, M, N, stride_sam, stride_sbn,
                BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
            (_load_tiles, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, tiles_m, tiles_n, steps, HALF, BLOCK_N, STAGES, GROUP_M,
            )),
        ],
        [4, 4, 1], [232, 24, 24],
    )  # fmt: skip


def words_of_scales(*scales: Tensor) -> bool:
    """Can the scales of 128 columns be read as words?"""
    return all(
        s.shape[1] % 4 == 0 and s.stride(1) == 1 and s.stride(0) % 4 == 0 and s.data_ptr() % 4 == 0 for s in scales
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
        scale_a, scale_b, bias, M, N, K, scale_a.stride(0), scale_b.stride(0),
        A=TYPES[a.dtype], B=TYPES[b.dtype], OUT=TYPES[out.dtype], **config, **dependent(device, M),
    )  # fmt: skip
