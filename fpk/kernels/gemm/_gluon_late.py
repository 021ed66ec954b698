"""A Gluon kernel of scaled_mm for many tokens: programs in pairs share the weights, results leave late.

Products of thousands of tokens run into the GPU's power limit: what takes less power takes less time. Two programs of a
cluster have neighbouring tiles of tokens and the same weights. Each loads half of the weights, and the copy engine
writes it into the shared memory of both: L2 delivers a third less. A buffer is free once the consumers of both programs
are done with it.

A consumer holds its half of a tile, scaled and rounded, in registers while it begins the next tile, and writes a
quarter of it after each of the first steps. Between tiles stand the wait for the last product and the arithmetic alone.

Ring and barriers are one allocation, which Triton puts at the start of shared memory, where inline assembly finds them.
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
from fpk.kernels.gemm._gluon import TYPES, barrier, descriptor, halves, tma_store
from fpk.kernels.gemm._mm import fits_descriptors
from fpk.kernels.gemm._multicast import fill, meet, place, release, ring_at_start, tokens_of, wait_alone, weights_of

NAME = gl.constexpr("late_kernel")
EARLY = gl.constexpr(4)  # steps of a tile during which the tile before leaves


@gluon.jit
def _rounded(tile, OUT: gl.constexpr):
    """Pairs of neighbouring columns, rounded to a 16-bit type, in a word each: half the registers until they leave."""
    low, high = tile.reshape((tile.shape[0], tile.shape[1] // 2, 2)).split()
    TYPE: gl.constexpr = "f16x2" if OUT == gl.float16 else "bf16x2"  # noqa: SIM300
    return gl.inline_asm_elementwise(
        "cvt.rn." + TYPE + ".f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _put(out_desc, bufs, first: gl.constexpr, number: gl.constexpr, words, row, column):
    """Write the piece of this number, by turns through two buffers, `first` and the one after it."""
    COLS: gl.constexpr = words.shape[1]
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=min(128, 4 * COLS), element_bitwidth=32, rank=2)
    tma.store_wait(1)  # the piece before the last one has left its buffer
    barrier()
    buf = bufs.index(first + number % 2)
    buf._reinterpret(gl.int32, words.shape, WORDS).store(words)
    fence_async_shared()
    barrier()
    tma_store(out_desc, [row, column + number * 2 * COLS], buf)


@gluon.jit
def _quarters(tile):
    left, right = halves(tile)
    a, b = halves(left)
    c, d = halves(right)
    return a, b, c, d


@gluon.jit
def _along(ptr, first, N, LAYOUT: gl.constexpr, COLS: gl.constexpr, stride):
    """COLS elements from number `first` on, as columns of this layout; zeros from N on."""
    offs = first + gl.arange(0, COLS, layout=gl.SliceLayout(0, LAYOUT))
    return gl.load(ptr + offs * stride, mask=offs < N, other=0)


@gluon.jit
def _finish(
    acc, scale_a, scale_b, scale_b_ptr, bias_ptr, zero, colsum_ptr, column, N, stride_sb,
    LAYOUT: gl.constexpr, OUT: gl.constexpr, MORE: gl.constexpr,
):  # fmt: skip
    """Scales on a quarter of a sum, and rounding; MORE: zero point and bias too, nothing fetched ahead."""
    COLS: gl.constexpr = acc.shape[1]
    if MORE:
        barrier()  # or all quarters' columns would be fetched at once, and there are not so many registers
        scale_b = _along(scale_b_ptr, column, N, LAYOUT, COLS, stride_sb)
    if colsum_ptr is not None:
        acc -= zero[:, None] * _along(colsum_ptr, column, N, LAYOUT, COLS, 1)[None, :]
    out = acc.to(gl.float32)
    out *= scale_a[:, None]
    out *= scale_b[None, :]
    if bias_ptr is not None:
        out += _along(bias_ptr, column, N, LAYOUT, COLS, 1).to(gl.float32)[None, :]
    return _rounded(out, OUT)


@gluon.jit
def _consume(
    out_desc, left_desc, right_desc, pool, out_bufs, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
    tiles_m, tiles_n, steps, M, N, stride_sa, stride_sb, stride_za,
    WHICH: gl.constexpr, CLUSTER: gl.constexpr, CODES: gl.constexpr, INT8: gl.constexpr, OUT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Half of the rows of each tile. There are at least EARLY steps."""
    rank = gl.program_id(0) % CLUSTER
    meet(rank)
    ROWS: gl.constexpr = BLOCK_M // 2
    WIDE: gl.constexpr = 128 if INT8 else BLOCK_N  # triton knows no wider instruction for INT8
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 32])
    FULL: gl.constexpr = STAGES * (BLOCK_M + BLOCK_N) * 128
    EMPTY: gl.constexpr = FULL + STAGES * 8
    a, b, c, d = _quarters(gl.zeros((ROWS, BLOCK_N), gl.float32, layout))
    QUARTER: gl.constexpr = a.type.layout
    a, b, c, d = _rounded(a, OUT), _rounded(b, OUT), _rounded(c, OUT), _rounded(d, OUT)
    COLS: gl.constexpr = BLOCK_N // 4
    MORE: gl.constexpr = bias_ptr is not None or zero_ptr is not None
    row_before, column_before = tiles_m * (CLUSTER * BLOCK_M), 0  # beyond the last row nothing is written
    turn = 0
    for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        tile_m, tile_n = place(item, tiles_m, tiles_n, GROUP_M)
        row, column = (tile_m * CLUSTER + rank) * BLOCK_M + WHICH * ROWS, tile_n * BLOCK_N
        acc = gl.zeros((ROWS, BLOCK_N), gl.int32 if INT8 else gl.float32, layout)
        for k in gl.static_range(EARLY):
            slot = turn % STAGES
            wait_alone(FULL + slot * 8, (turn // STAGES) & 1)
            left = tokens_of(pool, slot, WHICH * ROWS, ROWS, left_desc, CODES, BLOCK_M + BLOCK_N)
            right = weights_of(pool, slot, right_desc, CODES, BLOCK_M, BLOCK_N)
            acc = warpgroup_mma_wait(1, deps=[warpgroup_mma(left, right, acc, is_async=True)])
            if k > 0:  # the product before this one is done
                release(EMPTY + (turn + STAGES - 1) % STAGES * 8, CLUSTER)
            piece = (a, b, c, d)[k]
            _put(out_desc, out_bufs, 2 * WHICH, k, piece, row_before, column_before)
            turn += 1
        offs_m = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUARTER))
        scale_a = gl.load(scale_a_ptr + offs_m * stride_sa, mask=offs_m < M, other=0.0)
        scale_0, scale_1, scale_2, scale_3 = scale_a, scale_a, scale_a, scale_a  # unused
        if not MORE:
            scale_0 = _along(scale_b_ptr, column, N, QUARTER, COLS, stride_sb)
            scale_1 = _along(scale_b_ptr, column + COLS, N, QUARTER, COLS, stride_sb)
            scale_2 = _along(scale_b_ptr, column + 2 * COLS, N, QUARTER, COLS, stride_sb)
            scale_3 = _along(scale_b_ptr, column + 3 * COLS, N, QUARTER, COLS, stride_sb)
        for _ in range(EARLY, steps):
            slot = turn % STAGES
            wait_alone(FULL + slot * 8, (turn // STAGES) & 1)
            left = tokens_of(pool, slot, WHICH * ROWS, ROWS, left_desc, CODES, BLOCK_M + BLOCK_N)
            right = weights_of(pool, slot, right_desc, CODES, BLOCK_M, BLOCK_N)
            acc = warpgroup_mma_wait(1, deps=[warpgroup_mma(left, right, acc, is_async=True)])
            release(EMPTY + (turn + STAGES - 1) % STAGES * 8, CLUSTER)
            turn += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        release(EMPTY + (turn + STAGES - 1) % STAGES * 8, CLUSTER)
        zero = scale_a  # unused
        if zero_ptr is not None:
            zero = gl.load(zero_ptr + offs_m * stride_za, mask=offs_m < M, other=0)
        a, b, c, d = _quarters(acc)
        a = _finish(
            a, scale_a, scale_0, scale_b_ptr, bias_ptr, zero, colsum_ptr, column, N, stride_sb,
            QUARTER, OUT, MORE,
        )  # fmt: skip
        b = _finish(
            b, scale_a, scale_1, scale_b_ptr, bias_ptr, zero, colsum_ptr, column + COLS, N, stride_sb,
            QUARTER, OUT, MORE,
        )  # fmt: skip
        c = _finish(
            c, scale_a, scale_2, scale_b_ptr, bias_ptr, zero, colsum_ptr, column + 2 * COLS, N, stride_sb,
            QUARTER, OUT, MORE,
        )  # fmt: skip
        d = _finish(
            d, scale_a, scale_3, scale_b_ptr, bias_ptr, zero, colsum_ptr, column + 3 * COLS, N, stride_sb,
            QUARTER, OUT, MORE,
        )  # fmt: skip
        row_before, column_before = row, column
    for k in gl.static_range(4):
        piece = (a, b, c, d)[k]
        _put(out_desc, out_bufs, 2 * WHICH, k, piece, row_before, column_before)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def late_kernel(
    right_desc, left_desc, out_desc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
    M, N, K, stride_sa, stride_sb, stride_za,
    CLUSTER: gl.constexpr, CODES: gl.constexpr, INT8: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Persistent. The pool is the ring, then its barriers: those for full slots, those for empty ones."""
    CHUNKS: gl.constexpr = STAGES * (BLOCK_M + BLOCK_N) // 8
    pool = gl.allocate_shared_memory(gl.int8, [CHUNKS + 1, 8, 128], left_desc.layout)
    out_bufs = gl.allocate_shared_memory(OUT, [4, BLOCK_M // 2, BLOCK_N // 4], out_desc.layout)
    barriers = pool.index(CHUNKS)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=1)
        mbarrier.init(barriers.index(STAGES + i), count=2 * CLUSTER)  # the consumers of all programs of the cluster
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, BLOCK_M * CLUSTER), gl.cdiv(N, BLOCK_N), gl.cdiv(K, 128)
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, left_desc, right_desc, pool, out_bufs, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr,
                colsum_ptr, tiles_m, tiles_n, steps, M, N, stride_sa, stride_sb, stride_za,
                0, CLUSTER, CODES, INT8, OUT, BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
            (_consume, (
                out_desc, left_desc, right_desc, pool, out_bufs, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr,
                colsum_ptr, tiles_m, tiles_n, steps, M, N, stride_sa, stride_sb, stride_za,
                1, CLUSTER, CODES, INT8, OUT, BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
            (fill, (
                NAME, right_desc, left_desc, pool, barriers, tiles_m, tiles_n, steps,
                CLUSTER, CODES, BLOCK_M, BLOCK_N, STAGES, GROUP_M,
            )),
        ],
        [4, 4], [232, 40],
    )  # fmt: skip


in_clusters(late_kernel, ring_at_start)


def late_fits(config: Config, device: Device, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Can the `late` kernel run this? A tile's sum and the rounded tile before it stay in registers."""
    K, m, n = a.shape[1], config["BLOCK_M"], config["BLOCK_N"]
    if not triton_is("3.6") or not fits_descriptors(a, b) or triton.cdiv(K, 128) < EARLY.value:
        return False
    if out_dtype.itemsize != 2 or b.shape[0] % 8 != 0 or m * n > 256 * 128:
        return False
    if n < 128:  # a quarter of a tile would have 16 columns, and a split of those has layouts that differ
        return False
    return config["STAGES"] * (m + n) * 128 + m * n + 2048 <= device.shared_limit


def launch_late(
    device: Device, a: Tensor, b: Tensor, epilogue: tuple[Tensor | None, ...], strides: list[int], out: Tensor,
    config: Config,
) -> None:  # fmt: skip
    """Launch the kernel; `epilogue`: scale_a, scale_b, bias, zero_point_a, colsum_b; `strides`: of the scales' rows."""
    (M, K), N, cluster = a.shape, b.shape[0], config["CLUSTER"]
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    clusters = min(device.sm_count // cluster, triton.cdiv(M, m * cluster) * triton.cdiv(N, n))
    late_kernel[(clusters,)](
        descriptor(b, n // cluster, 128), descriptor(a, m, 128), descriptor(out, m // 2, n // 4), *epilogue,
        M, N, K, *strides,
        CODES=TYPES[a.dtype], INT8=a.dtype is torch.int8, OUT=TYPES[out.dtype], enable_fp_fusion=False, **config,
    )  # fmt: skip
