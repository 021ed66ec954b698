"""A Gluon kernel of scaled_mm for many tokens: consumers take turns at tiles, programs in pairs share the weights.

Each group of four warps that multiplies has whole output tiles, every other one of its program's. While one finishes a
tile (waits for the last product, scales, writes), the other one multiplies, so that the matrix unit does not wait. They
hand the unit to one another by two barriers, `order`. On an H200 the larger tiles of `late`, which shares the rest (the
ring, and weights that the programs of a cluster load for one another), were 11 to 25 % faster at every K tried: this
kernel is a candidate, and no default.
"""

import torch
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
from fpk.device import Device, triton_is
from fpk.kernels.gemm._cluster import in_clusters
from fpk.kernels.gemm._gluon import TYPES, descriptor, piece_columns, put_pieces
from fpk.kernels.gemm._gluon_mm import _finish
from fpk.kernels.gemm._mm import fits_descriptors
from fpk.kernels.gemm._multicast import fill, meet, place, release, ring_at_start, tokens_of, wait_alone, weights_of

NAME = gl.constexpr("alternate_kernel")


@gluon.jit
def _consume(
    out_desc, left_desc, right_desc, pool, barriers, out_bufs,
    scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, tiles_m, tiles_n, steps, M, N,
    stride_sa, stride_sb, stride_za,
    WHICH: gl.constexpr, CLUSTER: gl.constexpr, CODES: gl.constexpr, INT8: gl.constexpr, OUT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Every other tile. A slot's barrier tells by parity which use of the slot has been filled, and the other consumer
    has every other run of uses: this one waits for its turn first, when the other's slots are all filled."""
    rank = gl.program_id(0) % CLUSTER
    meet(rank)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    FULL: gl.constexpr = STAGES * (BLOCK_M + BLOCK_N) * 128
    EMPTY: gl.constexpr = FULL + STAGES * 8
    clusters = gl.num_programs(0) // CLUSTER
    turn = WHICH * steps
    phase = 0
    for item in range(gl.program_id(0) // CLUSTER + WHICH * clusters, tiles_m * tiles_n, 2 * clusters):
        tile_m, tile_n = place(item, tiles_m, tiles_n, GROUP_M)
        row, column = (tile_m * CLUSTER + rank) * BLOCK_M, tile_n * BLOCK_N
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.int32 if INT8 else gl.float32, layout)
        mbarrier.wait(barriers.index(2 * STAGES + WHICH), phase ^ (1 - WHICH))
        for k in range(steps):
            slot = turn % STAGES
            wait_alone(FULL + slot * 8, (turn // STAGES) & 1)
            mbarrier.arrive(barriers.index(2 * STAGES + 1 - WHICH), count=1, pred=k == steps - 1)
            left = tokens_of(pool, slot, 0, BLOCK_M, left_desc, CODES, BLOCK_M + BLOCK_N)
            right = weights_of(pool, slot, right_desc, CODES, BLOCK_M, BLOCK_N)
            acc = warpgroup_mma_wait(1, deps=[warpgroup_mma(left, right, acc, is_async=True)])
            if k > 0:  # the product before this one is done
                release(EMPTY + (turn + STAGES - 1) % STAGES * 8, CLUSTER)
            turn += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(EMPTY + (turn + STAGES - 1) % STAGES * 8, CLUSTER)
        turn += steps
        phase ^= 1
        offs_m = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
        offs_n = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
        tile = _finish(
            acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, offs_m, offs_n, M, N,
            stride_sa, stride_sb, stride_za, 1, 0,
        )  # fmt: skip
        put_pieces(out_desc, out_bufs, 2 * WHICH, tile.to(OUT), row, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def alternate_kernel(
    right_desc, left_desc, out_desc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
    M, N, K, stride_sa, stride_sb, stride_za,
    CLUSTER: gl.constexpr, CODES: gl.constexpr, INT8: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Persistent. The pool is the ring, then its barriers: those for full slots, those for empty ones, `order`."""
    CHUNKS: gl.constexpr = STAGES * (BLOCK_M + BLOCK_N) // 8
    pool = gl.allocate_shared_memory(gl.int8, [CHUNKS + 1, 8, 128], left_desc.layout)
    out_bufs = gl.allocate_shared_memory(OUT, [4, BLOCK_M, out_desc.block_shape[1]], out_desc.layout)
    barriers = pool.index(CHUNKS)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
        mbarrier.init(barriers.index(STAGES + i), count=CLUSTER)  # one consumer of each program of the cluster
    for i in gl.static_range(2):
        mbarrier.init(barriers.index(2 * STAGES + i), count=1)
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, BLOCK_M * CLUSTER), gl.cdiv(N, BLOCK_N), gl.cdiv(K, 128)
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, left_desc, right_desc, pool, barriers, out_bufs,
                scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, tiles_m, tiles_n, steps, M, N,
                stride_sa, stride_sb, stride_za, 0, CLUSTER, CODES, INT8, OUT, BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
            (_consume, (
                out_desc, left_desc, right_desc, pool, barriers, out_bufs,
                scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, tiles_m, tiles_n, steps, M, N,
                stride_sa, stride_sb, stride_za, 1, CLUSTER, CODES, INT8, OUT, BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
            (fill, (
                NAME, right_desc, left_desc, pool, barriers, tiles_m, tiles_n, steps,
                CLUSTER, CODES, BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
        ],
        [4, 4], [232, 40],
    )  # fmt: skip


in_clusters(alternate_kernel, ring_at_start)


def alternate_fits(config: Config, device: Device, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Can the `alternate` kernel run this? The sum of a tile stays in a consumer's registers, one for all of K."""
    m, n, size = config["BLOCK_M"], config["BLOCK_N"], out_dtype.itemsize
    if not triton_is("3.6") or not fits_descriptors(a, b) or b.shape[0] * size % 16 != 0 or m * n > 128 * 128:
        return False
    if a.dtype is torch.int8 and n > 128:  # triton knows no such instruction
        return False
    return config["STAGES"] * (m + n) * 128 + 4 * m * piece_columns(n) * size + 2048 <= device.shared_limit


def launch_alternate(
    device: Device, a: Tensor, b: Tensor, epilogue: tuple[Tensor | None, ...], strides: list[int], out: Tensor,
    config: Config,
) -> None:  # fmt: skip
    """Launch the kernel; `epilogue`: scale_a, scale_b, bias, zero_point_a, colsum_b; `strides`: of the scales' rows."""
    (M, K), N, cluster = a.shape, b.shape[0], config["CLUSTER"]
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    clusters = min(device.sm_count // cluster, triton.cdiv(M, m * cluster) * triton.cdiv(N, n))
    alternate_kernel[(clusters,)](
        descriptor(b, n // cluster, 128), descriptor(a, m, 128), descriptor(out, m, piece_columns(n)), *epilogue,
        M, N, K, *strides,
        CODES=TYPES[a.dtype], INT8=a.dtype is torch.int8, OUT=TYPES[out.dtype], enable_fp_fusion=False, **config,
    )  # fmt: skip
