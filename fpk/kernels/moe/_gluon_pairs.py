"""A grouped product of FP8 with 1 x 128 by 128 x 128 scales for Hopper: two multiprocessors share the rows they load.

The programs of a pair take neighbouring tiles of columns of the same 128 rows. Each loads half of the rows of a step,
and TMA delivers them to both: what reaches the multiprocessors from L2 bounds these products. BLOCK_N = 128 queues the
products of two steps, 256 is two blocks of 128 columns, whose products come one at a time (like `wide`).
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.db import Config
from fpk.device import Device, of
from fpk.kernels._tile import early_start
from fpk.kernels.gemm._cluster import (
    AVAILABLE,
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
from fpk.kernels.gemm._gluon_pairs import scales_of
from fpk.kernels.moe._gluon_grouped import _descriptor, _tile, schedule_kernel
from fpk.kernels.moe._gluon_wide import _finish, wide_legal
from fpk.op import Kernel

NAME = gl.constexpr("grouped_pairs_kernel")


@gluon.jit
def _fetch(
    factors, table_ptr, sa_ptr, sb_ptr, E, N, K, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, A_AT: gl.constexpr,
    B_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    cluster_meet(CLUSTER)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    COUNT: gl.constexpr = BLOCK_N // 128
    SHARE: gl.constexpr = 128 // CLUSTER
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, BLOCK_N * CLUSTER)
    blocks = gl.cdiv(N, 128)
    rank = cluster_rank()
    turn = 0
    for tile in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        n, expert, first, end = _tile(table_ptr, tile, tiles_m, tiles_n, GROUP_M)
        steps = gl.where(expert == E, 0, gl.cdiv(K, 128))
        block = (n * CLUSTER + rank) * COUNT
        row = expert * N + block * 128
        at = first + gl.arange(0, 128, layout=LINE)
        sa_at = gl.where(at < end, at, first) * stride_sam
        sb_at = min(expert, E - 1) * stride_sbe
        sb_0 = sb_at + min(block, blocks - 1) * stride_sbn
        sb_1 = sb_at + min(block + 1, blocks - 1) * stride_sbn
        # scales are fetched four steps ahead: they take longer to come than a step to multiply
        sa_0, f_0, g_0 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 0, steps, stride_sak, stride_sbk, 128, COUNT)
        sa_1, f_1, g_1 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 1, steps, stride_sak, stride_sbk, 128, COUNT)
        sa_2, f_2, g_2 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 2, steps, stride_sak, stride_sbk, 128, COUNT)
        sa_3, f_3, g_3 = scales_of(sa_ptr, sb_ptr, sa_at, sb_0, sb_1, 3, steps, stride_sak, stride_sbk, 128, COUNT)
        for k in range(steps):
            slot = turn % STAGES
            full = BARS_AT + slot * 8
            wait(BARS_AT + (STAGES + slot) * 8, ((turn // STAGES) & 1) ^ 1)
            expect(full, 16384 + BLOCK_N * 128)
            load(
                NAME, 0, A_AT + slot * 16384 + rank * (SHARE * 128), first + rank * SHARE, k * 128, full,
                CLUSTER > 1, 3,
            )  # fmt: skip
            for i in gl.static_range(COUNT):
                load(NAME, 5, B_AT + (slot * COUNT + i) * 16384, row + i * 128, k * 128, full)
            factors.index(COUNT * slot).store(sa_0 * f_0)
            if COUNT == 2:
                factors.index(COUNT * slot + 1).store(sa_0 * g_0)
            arrive(full)
            sa_0, f_0, g_0, sa_1, f_1, g_1, sa_2, f_2, g_2 = sa_1, f_1, g_1, sa_2, f_2, g_2, sa_3, f_3, g_3
            sa_3, f_3, g_3 = scales_of(
                sa_ptr, sb_ptr, sa_at, sb_0, sb_1, k + 4, steps, stride_sak, stride_sbk, 128, COUNT
            )
            turn += 1
    cluster_sync(CLUSTER)


@gluon.jit
def _multiply(
    out_desc, a_bufs, b_bufs, out_bufs, factors, bars, table_ptr, bias_ptr, out_ptr, E, N, K, stride_bias, stride_om,
    W: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
    BARS_AT: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile."""
    cluster_meet(CLUSTER)
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    LN: gl.constexpr = gl.SliceLayout(0, L)
    EMPTY: gl.constexpr = BARS_AT + STAGES * 8
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, BLOCK_N * CLUSTER)
    rank = cluster_rank()
    turn = 0
    for tile in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        n, expert, first, end = _tile(table_ptr, tile, tiles_m, tiles_n, GROUP_M)
        steps = gl.where(expert == E, 0, gl.cdiv(K, 128))
        row = first + W * 64
        column = (n * CLUSTER + rank) * BLOCK_N
        if row < end:
            acc_0 = gl.zeros((64, 128), gl.float32, L)
            if BLOCK_N == 128:
                for _ in range(steps // 2):
                    slot = turn % STAGES
                    slot_1 = (turn + 1) % STAGES
                    wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
                    token_0 = warpgroup_mma(
                        a_bufs.index(2 * slot + W), b_bufs.index(slot).permute((1, 0)),
                        gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    factor_0 = factors.index(slot).slice(W * 64, 64, dim=0).load(LM)
                    wait(BARS_AT + slot_1 * 8, ((turn + 1) // STAGES) & 1)
                    token_1 = warpgroup_mma(
                        a_bufs.index(2 * slot_1 + W), b_bufs.index(slot_1).permute((1, 0)),
                        gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    factor_1 = factors.index(slot_1).slice(W * 64, 64, dim=0).load(LM)
                    product = warpgroup_mma_wait(1, deps=[token_0])
                    arrive_everywhere(EMPTY + slot * 8, CLUSTER)
                    acc_0 += product * factor_0[:, None]
                    product = warpgroup_mma_wait(0, deps=[token_1])
                    arrive_everywhere(EMPTY + slot_1 * 8, CLUSTER)
                    acc_0 += product * factor_1[:, None]
                    turn += 2
                if steps % 2 == 1:
                    slot = turn % STAGES
                    wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
                    token_0 = warpgroup_mma(
                        a_bufs.index(2 * slot + W), b_bufs.index(slot).permute((1, 0)),
                        gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    factor_0 = factors.index(slot).slice(W * 64, 64, dim=0).load(LM)
                    product = warpgroup_mma_wait(0, deps=[token_0])
                    arrive_everywhere(EMPTY + slot * 8, CLUSTER)
                    acc_0 += product * factor_0[:, None]
                    turn += 1
            else:
                acc_1 = gl.zeros((64, 128), gl.float32, L)
                for _ in range(steps):
                    slot = turn % STAGES
                    wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
                    token_0 = warpgroup_mma(
                        a_bufs.index(2 * slot + W), b_bufs.index(2 * slot).permute((1, 0)),
                        gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    factor_0 = factors.index(2 * slot).slice(W * 64, 64, dim=0).load(LM)
                    product = warpgroup_mma_wait(0, deps=[token_0])
                    acc_0 += product * factor_0[:, None]
                    token_1 = warpgroup_mma(
                        a_bufs.index(2 * slot + W), b_bufs.index(2 * slot + 1).permute((1, 0)),
                        gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    factor_1 = factors.index(2 * slot + 1).slice(W * 64, 64, dim=0).load(LM)
                    product = warpgroup_mma_wait(0, deps=[token_1])
                    arrive_everywhere(EMPTY + slot * 8, CLUSTER)
                    acc_1 += product * factor_1[:, None]
                    turn += 1
            bias_row = bias_ptr
            if bias_ptr is not None:
                bias_row = bias_ptr + min(expert, E - 1).to(gl.int64) * stride_bias
            buf, here = out_bufs.index(W), expert < E
            _finish(acc_0, out_desc, buf, bias_row, out_ptr, row, end, column, N, stride_om, here, LM, LN)
            if BLOCK_N == 256:
                _finish(acc_1, out_desc, buf, bias_row, out_ptr, row, end, column + 128, N, stride_om, here, LM, LN)
        else:
            for _ in range(steps):
                slot = turn % STAGES
                wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
                arrive_everywhere(EMPTY + slot * 8, CLUSTER)
                turn += 1
    tma.store_wait(0)
    cluster_sync(CLUSTER)
    if W == 0:  # a use of `bars` behind the work, so that nothing is laid over them
        mbarrier.invalidate(bars.index(0))


@gluon.jit(do_not_specialize=["E"])
def grouped_pairs_kernel(
    a_desc, b_desc, out_desc, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
    stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias, stride_om,
    PDL: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    COUNT: gl.constexpr = BLOCK_N // 128
    B: gl.constexpr = STAGES * COUNT * 16384
    A: gl.constexpr = STAGES * 16384
    B_AT: gl.constexpr = place(0, B, A)
    A_AT: gl.constexpr = place(1, B, A)
    BARS_AT: gl.constexpr = B + A + 2 * 64 * 64 * 2 + STAGES * COUNT * 512
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES * COUNT, 128, 128], b_desc.layout)
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, 128], a_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2, 64, out_desc.block_shape[1]], out_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * COUNT, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # more than the captures of the partitions: so these come before them
    bars = gl.allocate_shared_memory(gl.int64, [64, 1], mbarrier.MBarrierLayout())
    init_ring(BARS_AT, STAGES, 1 + 4, 8 * CLUSTER)
    gl.warp_specialize([
            (_multiply, (
                out_desc, a_bufs, b_bufs, out_bufs, factors, bars, table_ptr, bias_ptr, out_ptr, E, N, K,
                stride_bias, stride_om, 0, BLOCK_N, STAGES, GROUP_M, CLUSTER, BARS_AT,
            )),
            (_multiply, (
                out_desc, a_bufs, b_bufs, out_bufs, factors, bars, table_ptr, bias_ptr, out_ptr, E, N, K,
                stride_bias, stride_om, 1, BLOCK_N, STAGES, GROUP_M, CLUSTER, BARS_AT,
            )),
            (_fetch, (
                factors, table_ptr, sa_ptr, sb_ptr, E, N, K,
                stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, BLOCK_N, STAGES, GROUP_M, CLUSTER, A_AT,
                B_AT, BARS_AT,
            )),
        ], [4, 4], [224, 56])  # fmt: skip


in_clusters(grouped_pairs_kernel)


PAIRS_KERNEL = Kernel(
    grouped_pairs_kernel, targets=("sm90",) if AVAILABLE else ("none",), interpretable=False, matrix=True
)


def pairs_legal(config: Config, device: Device, b: Tensor, scale_b: Tensor, **operands: Any) -> bool:
    """The operands are those of wide_legal."""
    near = b.shape[0] * scale_b.stride(0) < 2**31  # offsets are int32
    return near and wide_legal(config, device, b=b, scale_b=scale_b, **operands)


def pairs_configs() -> Iterator[Config]:
    for (n, stages), group in itertools.product(((128, 6), (256, 4)), (2, 4, 8, 16)):
        yield Config(kernel="pairs", BLOCK_N=n, STAGES=stages, GROUP_M=group, CLUSTER=2, num_warps=4)


def launch_pairs(
    config: Config, a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None,
    out: Tensor, bins: int,
) -> None:  # fmt: skip
    """out (R, N) = grouped product of a (R, K) and b (E, N, K)."""
    (R, K), (E, N) = a.shape, b.shape[:2]
    cluster, block_n = config["CLUSTER"], config["BLOCK_N"]
    most = (R + min(E + 1, R) * 127) // 128
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=a.device)
    early = early_start(of(a.device))
    schedule_kernel[(triton.cdiv(most, 32),)](
        offs, table, R, E, BLOCK_E=bins, BLOCK_M=128, BLOCK=32, num_warps=4, **early
    )
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    pairs = most * triton.cdiv(N, block_n * cluster)
    grouped_pairs_kernel[(min(of(a.device).sm_count // cluster, pairs),)](
        _descriptor(a, 128 // cluster, 128), _descriptor(matrix, 128, 128), _descriptor(out, 64, 64),
        table, scale_a, scale_b, bias, out, E, N, K,
        *scale_a.stride(), *scale_b.stride(), 0 if bias is None else bias.stride(0), out.stride(0),
        BLOCK_N=block_n, STAGES=config["STAGES"], GROUP_M=config["GROUP_M"], CLUSTER=cluster,
        num_warps=config["num_warps"], **early,
    )  # fmt: skip
