"""A Gluon kernel of scaled_mm_group for many tokens: two multiprocessors share the weights they load.

What reaches the multiprocessors from L2 bounds products in tiles of 128 x 128 when every one loads both operands by
itself. Here the programs of a pair take tiles of the same columns, each loads half of the weights of a step, and TMA
delivers it to both. With BLOCK_N = 256 a tile is two blocks of 128 columns: each multiplying group of warps has 64 rows
and the sums of both blocks; with 128 it queues the products of two steps. The fetching warps also multiply the scales
of a step and leave the factors of its rows in shared memory.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fpk.db import Config
from fpk.device import Device
from fpk.kernels.gemm._cluster import (
    arrive,
    arrive_everywhere,
    cluster_meet,
    cluster_rank,
    cluster_sync,
    expect,
    in_clusters,
    init_ring,
    load,
    place,
    wait,
)
from fpk.kernels.gemm._gluon import (
    TYPES,
    after_previous,
    columns_of,
    descriptor,
    locate,
)
from fpk.kernels.gemm._gluon_group import bias_of, block_row
from fpk.kernels.gemm._gluon_put import _put_128, _put_128_and_64, _put_256
from fpk.kernels.gemm._launch import dependent

NAME = gl.constexpr("group_pairs_kernel")


@gluon.jit
def scales_of(
    sa_ptr, sb_ptr, sa_at, sb_0, sb_1, k, steps, stride_sak, stride_sbk, COLS: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """Scales of the rows and of COUNT blocks of columns at step k, or at the last one."""
    k = min(k, steps - 1)
    sa = gl.load(sa_ptr + (sa_at + k * stride_sak))
    block_k = k * stride_sbk if COLS > 0 else 0
    f = gl.load(sb_ptr + (sb_0 + block_k))
    return sa, f, gl.load(sb_ptr + (sb_1 + block_k)) if COUNT == 2 else f


@gluon.jit
def _fetch(
    factors, sa_ptr, sb_ptr, tiles_m, tiles_n, steps, blocks, M, N, offset_n, offset_k,
    stride_sam, stride_sak, stride_sbn, stride_sbk,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    A_AT: gl.constexpr, B_AT: gl.constexpr, MORE_AT: gl.constexpr, BARS_AT: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """Fill the ring: 128 rows of `a`, this program's share of the rows of each block of `b`, the rows' factors."""
    cluster_meet(CLUSTER)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    COUNT: gl.constexpr = (BLOCK_N + 127) // 128
    SHARE: gl.constexpr = 128 // CLUSTER
    MANY: gl.constexpr = CLUSTER > 1
    rank = cluster_rank()
    turn = 0
    for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row, column = (tile_m * CLUSTER + rank) * 128, tile_n * BLOCK_N
        # offsets of scales are int32: fewer registers. Rows beyond M have some scale: nothing is stored of them
        sa_at = min(row + gl.arange(0, 128, layout=LINE), M - 1) * stride_sam
        if BLOCK_N == 192:
            column, second = columns_of(column, 128, 64)
        else:
            second = column + 128
        sb_0 = block_row(column, N, offset_n, ROWS) * stride_sbn
        sb_1 = block_row(second, N, offset_n, ROWS) * stride_sbn
        # scales are fetched four steps ahead: they take longer to come than a step to multiply
        sa_0, f_0, g_0 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 0, steps, stride_sak, stride_sbk, COLS, COUNT)
        sa_1, f_1, g_1 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 1, steps, stride_sak, stride_sbk, COLS, COUNT)
        sa_2, f_2, g_2 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 2, steps, stride_sak, stride_sbk, COLS, COUNT)
        sa_3, f_3, g_3 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 3, steps, stride_sak, stride_sbk, COLS, COUNT)
        for k in range(steps):
            slot = turn % STAGES
            full = BARS_AT + slot * 8
            wait(BARS_AT + (STAGES + slot) * 8, ((turn // STAGES) & 1) ^ 1)
            expect(full, 16384 + BLOCK_N * 128)
            load(NAME, 0, A_AT + slot * 16384, row, k * 128, full)
            share = rank * (SHARE * 128)
            if BLOCK_N == 192:
                load(NAME, 5, B_AT + slot * 16384 + share, column + rank * SHARE, k * 128, full, MANY, 3)
                load(
                    NAME, 15, MORE_AT + slot * 8192 + share // 2, second + rank * (SHARE // 2), k * 128, full, MANY, 3
                )  # fmt: skip
            else:
                load(NAME, 5, B_AT + slot * COUNT * 16384 + share, column + rank * SHARE, k * 128, full, MANY, 3)
                if BLOCK_N == 256:
                    load(NAME, 5, B_AT + (slot * 2 + 1) * 16384 + share, second + rank * SHARE, k * 128, full, MANY, 3)
            factors.index(COUNT * slot).store(sa_0 * f_0)
            if COUNT == 2:
                factors.index(COUNT * slot + 1).store(sa_0 * g_0)
            arrive(full)
            sa_0, f_0, g_0, sa_1, f_1, g_1, sa_2, f_2, g_2 = sa_1, f_1, g_1, sa_2, f_2, g_2, sa_3, f_3, g_3
            sa_3, f_3, g_3 = scales_of(
                sa_ptr, sb_ptr, sa_at, sb_0, sb_1, k + 4, steps, stride_sak, stride_sbk, COLS, COUNT
            )  # fmt: skip
            turn += 1
    cluster_sync(CLUSTER)


@gluon.jit
def _multiply_two_steps(
    out_desc, a_bufs, b_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, BARS_AT: gl.constexpr,
    CLUSTER: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of 128 columns; the unit works on the second step's product while the first is scaled."""
    cluster_meet(CLUSTER)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    rank = cluster_rank()
    turn = 0
    for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row, column = (tile_m * CLUSTER + rank) * 128 + WHICH * 64, tile_n * 128
        acc = gl.zeros((64, 128), gl.float32, L)
        for _ in range(steps // 2):
            slot = turn % STAGES
            slot_1 = (turn + 1) % STAGES
            wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
            token_0 = warpgroup_mma(
                a_bufs.index(2 * slot + WHICH), b_bufs.index(slot).permute((1, 0)), gl.zeros((64, 128), gl.float32, L),
                use_acc=False, is_async=True,
            )  # fmt: skip
            factor_0 = factors.index(slot).slice(WHICH * 64, 64, dim=0).load(LM)
            wait(BARS_AT + slot_1 * 8, ((turn + 1) // STAGES) & 1)
            token_1 = warpgroup_mma(
                a_bufs.index(2 * slot_1 + WHICH), b_bufs.index(slot_1).permute((1, 0)),
                gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
            )  # fmt: skip
            factor_1 = factors.index(slot_1).slice(WHICH * 64, 64, dim=0).load(LM)
            product = warpgroup_mma_wait(1, deps=[token_0])
            arrive_everywhere(BARS_AT + (STAGES + slot) * 8, CLUSTER)
            acc += product * factor_0[:, None]
            product = warpgroup_mma_wait(0, deps=[token_1])
            arrive_everywhere(BARS_AT + (STAGES + slot_1) * 8, CLUSTER)
            acc += product * factor_1[:, None]
            turn += 2
        if steps % 2 == 1:
            slot = turn % STAGES
            wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
            token_0 = warpgroup_mma(
                a_bufs.index(2 * slot + WHICH), b_bufs.index(slot).permute((1, 0)), gl.zeros((64, 128), gl.float32, L),
                use_acc=False, is_async=True,
            )  # fmt: skip
            factor_0 = factors.index(slot).slice(WHICH * 64, 64, dim=0).load(LM)
            product = warpgroup_mma_wait(0, deps=[token_0])
            arrive_everywhere(BARS_AT + (STAGES + slot) * 8, CLUSTER)
            acc += product * factor_0[:, None]
            turn += 1
        if bias_ptr is not None:
            acc += bias_of(bias_ptr, column + gl.arange(0, 128, layout=gl.SliceLayout(0, L)), N)[None, :]
        _put_128(out_desc, out_bufs, acc.to(OUT), row, column, WHICH, WHOLE)
    tma.store_wait(0)
    cluster_sync(CLUSTER)


@gluon.jit
def _multiply_two_blocks(
    out_desc, a_bufs, b_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, BARS_AT: gl.constexpr,
    CLUSTER: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of 256 columns, a product of 128 columns at a time."""
    cluster_meet(CLUSTER)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    rank = cluster_rank()
    turn = 0
    for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row, column = (tile_m * CLUSTER + rank) * 128 + WHICH * 64, tile_n * 256
        acc_0 = gl.zeros((64, 128), gl.float32, L)
        acc_1 = gl.zeros((64, 128), gl.float32, L)
        for _ in range(steps):
            slot = turn % STAGES
            wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
            token = warpgroup_mma(
                a_bufs.index(2 * slot + WHICH), b_bufs.index(2 * slot).permute((1, 0)),
                gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
            )  # fmt: skip
            factor = factors.index(2 * slot).slice(WHICH * 64, 64, dim=0).load(LM)
            product = warpgroup_mma_wait(0, deps=[token])
            acc_0 += product * factor[:, None]
            token = warpgroup_mma(
                a_bufs.index(2 * slot + WHICH), b_bufs.index(2 * slot + 1).permute((1, 0)),
                gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
            )  # fmt: skip
            factor = factors.index(2 * slot + 1).slice(WHICH * 64, 64, dim=0).load(LM)
            product = warpgroup_mma_wait(0, deps=[token])
            arrive_everywhere(BARS_AT + (STAGES + slot) * 8, CLUSTER)
            acc_1 += product * factor[:, None]
            turn += 1
        if bias_ptr is not None:
            offs_n = column + gl.arange(0, 128, layout=gl.SliceLayout(0, L))
            acc_0 += bias_of(bias_ptr, offs_n, N)[None, :]
            acc_1 += bias_of(bias_ptr, offs_n + 128, N)[None, :]
        _put_256(out_desc, out_bufs, acc_0.to(OUT), acc_1.to(OUT), row, column, WHICH, WHOLE)
    tma.store_wait(0)
    cluster_sync(CLUSTER)


@gluon.jit
def _multiply_wide_and_narrow(
    out_desc, a_bufs, b_bufs, more_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, BARS_AT: gl.constexpr,
    CLUSTER: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile of 192 columns; the unit works on 64 columns while the product of 128 is scaled."""
    cluster_meet(CLUSTER)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    LN: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    rank = cluster_rank()
    turn = 0
    for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row = (tile_m * CLUSTER + rank) * 128 + WHICH * 64
        column, column_more = columns_of(tile_n * 192, 128, 64)
        acc = gl.zeros((64, 128), gl.float32, L)
        acc_more = gl.zeros((64, 64), gl.float32, LN)
        for _ in range(steps):
            slot = turn % STAGES
            wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
            token_0 = warpgroup_mma(
                a_bufs.index(2 * slot + WHICH), b_bufs.index(slot).permute((1, 0)), gl.zeros((64, 128), gl.float32, L),
                use_acc=False, is_async=True,
            )  # fmt: skip
            token_1 = warpgroup_mma(
                a_bufs.index(2 * slot + WHICH), more_bufs.index(slot).permute((1, 0)),
                gl.zeros((64, 64), gl.float32, LN), use_acc=False, is_async=True,
            )  # fmt: skip
            factor_0 = factors.index(2 * slot).slice(WHICH * 64, 64, dim=0).load(gl.SliceLayout(1, L))
            factor_1 = factors.index(2 * slot + 1).slice(WHICH * 64, 64, dim=0).load(gl.SliceLayout(1, LN))
            product_0 = warpgroup_mma_wait(1, deps=[token_0])
            acc += product_0 * factor_0[:, None]
            product_1 = warpgroup_mma_wait(0, deps=[token_1])
            arrive_everywhere(BARS_AT + (STAGES + slot) * 8, CLUSTER)
            acc_more += product_1 * factor_1[:, None]
            turn += 1
        if bias_ptr is not None:
            acc += bias_of(bias_ptr, column + gl.arange(0, 128, layout=gl.SliceLayout(0, L)), N)[None, :]
            acc_more += bias_of(bias_ptr, column_more + gl.arange(0, 64, layout=gl.SliceLayout(0, LN)), N)[None, :]
        _put_128_and_64(out_desc, out_bufs, acc.to(OUT), acc_more.to(OUT), row, column, column_more, WHICH, WHOLE)
    tma.store_wait(0)
    cluster_sync(CLUSTER)


@gluon.jit
def _multiply(
    out_desc, a_bufs, b_bufs, more_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, OUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    BARS_AT: gl.constexpr, CLUSTER: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    if BLOCK_N == 128:
        _multiply_two_steps(
            out_desc, a_bufs, b_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N, WHICH, OUT, STAGES,
            GROUP_M, BARS_AT, CLUSTER, WHOLE,
        )  # fmt: skip
    elif BLOCK_N == 192:
        _multiply_wide_and_narrow(
            out_desc, a_bufs, b_bufs, more_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N, WHICH,
            OUT, STAGES, GROUP_M, BARS_AT, CLUSTER, WHOLE,
        )  # fmt: skip
    else:
        _multiply_two_blocks(
            out_desc, a_bufs, b_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N, WHICH, OUT, STAGES,
            GROUP_M, BARS_AT, CLUSTER, WHOLE,
        )  # fmt: skip
    if WHICH == 0:  # a use of `bars` behind the work, so that nothing is laid over them
        mbarrier.invalidate(bars.index(0))


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n", "offset_k"])
def group_pairs_kernel(
    a_desc, b_desc, out_desc, more_desc, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, offset_n, offset_k, stride_sam, stride_sak, stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, OUT: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, WHOLE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent; CLUSTER programs take tiles of the same columns."""
    gl.static_assert(BLOCK_M == 128 and BLOCK_K == 128)
    after_previous(PDL)
    COUNT: gl.constexpr = (BLOCK_N + 127) // 128
    PIECES: gl.constexpr = BLOCK_N // 32 if WHOLE else 4
    B: gl.constexpr = STAGES * (BLOCK_N // 128) * 16384
    A: gl.constexpr = STAGES * 16384
    MORE: gl.constexpr = STAGES * 8192 if BLOCK_N == 192 else 0
    PUT: gl.constexpr = PIECES * 64 * out_desc.block_shape[1] * (OUT.primitive_bitwidth // 8)
    B_AT: gl.constexpr = place(0, B, A, MORE, PUT)
    A_AT: gl.constexpr = place(1, B, A, MORE, PUT)
    MORE_AT: gl.constexpr = place(2, B, A, MORE, PUT)
    BARS_AT: gl.constexpr = B + A + MORE + PUT + STAGES * COUNT * 512
    b_bufs = gl.allocate_shared_memory(CODES, [STAGES * (BLOCK_N // 128), 128, 128], a_desc.layout)
    a_bufs = gl.allocate_shared_memory(CODES, [STAGES * 2, 64, 128], b_desc.layout)
    more_bufs = b_bufs  # unused
    if BLOCK_N == 192:
        more_bufs = gl.allocate_shared_memory(CODES, [STAGES, 64, 128], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(OUT, [PIECES, 64, out_desc.block_shape[1]], out_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * COUNT, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # more than the captures of the partitions: so these come before them
    bars = gl.allocate_shared_memory(gl.int64, [64, 1], mbarrier.MBarrierLayout())
    init_ring(BARS_AT, STAGES, 1 + 4, 8 * CLUSTER)
    tiles_m, tiles_n, steps = gl.cdiv(M, 128 * CLUSTER), gl.cdiv(N, BLOCK_N), gl.cdiv(K, 128)
    gl.warp_specialize(
        [
            (_multiply, (
                out_desc, a_bufs, b_bufs, more_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N,
                0, OUT, BLOCK_N, STAGES, GROUP_M, BARS_AT, CLUSTER, WHOLE,
            )),
            (_multiply, (
                out_desc, a_bufs, b_bufs, more_bufs, out_bufs, factors, bars, bias_ptr, tiles_m, tiles_n, steps, N,
                1, OUT, BLOCK_N, STAGES, GROUP_M, BARS_AT, CLUSTER, WHOLE,
            )),
            (_fetch, (
                factors, sa_ptr, sb_ptr, tiles_m, tiles_n, steps, 0, M, N, offset_n, offset_k,
                stride_sam, stride_sak, stride_sbn, stride_sbk, ROWS, COLS, BLOCK_N, STAGES, GROUP_M,
                A_AT, B_AT, MORE_AT, BARS_AT, CLUSTER,
            )),
        ],
        [4, 4], [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


in_clusters(group_pairs_kernel)


def launch_pairs(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    offset_n: int, offset_k: int, config: Config, **scaling: int,
) -> None:  # fmt: skip
    (M, K), N = a.shape, b.shape[0]
    cluster, block_n = config["CLUSTER"], config["BLOCK_N"]
    pairs = triton.cdiv(M, 128 * cluster) * triton.cdiv(N, block_n)
    group_pairs_kernel[(min(device.sm_count // cluster, pairs),)](
        descriptor(a, 128, 128), descriptor(b, 128 // cluster, 128), descriptor(out, 64, 64 if config["WHOLE"] else 32),
        descriptor(b, 64 // cluster, 128) if block_n == 192 else None,
        scale_a, scale_b, bias, M, N, K, offset_n, offset_k, *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], OUT=TYPES[out.dtype], **scaling,
        REGISTERS=224, **config, **dependent(device, M),
    )  # fmt: skip
