"""Multiplying warps of _gluon_ordered: 64 rows and 256 or 192 columns of every tile.

A step's 64 rows of `a` and its scales are fetched into registers while the last product of the step before is scaled. A
product ends in registers of its own and is scaled into the sum; there are registers for 128 x 128 of it or three times
64. The two consumers issue by turns: products of both would run mixed, end together, and leave the unit idle while both
are scaled.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from fpk.kernels.gemm._cluster import arrive_everywhere, cluster_rank, wait
from fpk.kernels.gemm._gluon import barrier, columns_of, halves, locate
from fpk.kernels.gemm._streams import (
    codes_of,
    here,
    pass_turn,
    put_box,
    rows_of,
    send_box,
    take,
    wait_if,
    wait_turn,
    words_of,
)


@gluon.jit
def multiply_256(
    out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CLUSTER: gl.constexpr, OUT_AT: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    """Two products of 128 columns a step, the first one scaled before the second one is issued."""
    if WHICH == 1:
        pass_turn(1)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    SLOT: gl.constexpr = 128 + 256
    MINE: gl.constexpr = WHICH * 64  # first row
    rank = cluster_rank()
    sa_at = SA_AT + (MINE + gl.arange(0, 64, layout=gl.SliceLayout(1, L))) * 4
    slot = 0
    phase = 0
    me, all_of = gl.program_id(0) // CLUSTER, gl.num_programs(0) // CLUSTER
    remain = gl.cdiv(tiles_m * tiles_n - me, all_of) * steps
    wait(BARS_AT, 0)
    sa, sb_0, sb_1 = take(sa_at), take(SB_AT + 0), take(SB_AT + 128)
    words = words_of(pool, 0, MINE, a_desc, SLOT, L)
    for item in range(me, tiles_m * tiles_n, all_of):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row, column = (tile_m * CLUSTER + rank) * 128 + MINE, tile_n * 256
        acc_0 = gl.zeros((64, 128), gl.float32, L)
        acc_1 = gl.zeros((64, 128), gl.float32, L)
        for _ in range(steps):
            left = codes_of(words, CODES, L)
            w_0 = rows_of(pool, slot, 128, 128, b_desc, CODES, SLOT).permute((1, 0))
            w_1 = rows_of(pool, slot, 256, 128, b_desc, CODES, SLOT).permute((1, 0))
            wait_turn(WHICH)
            t_0 = warpgroup_mma(left, w_0, gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True)
            pass_turn(WHICH)
            f_0 = (sa * sb_0)[:, None]
            f_1 = (sa * sb_1)[:, None]
            p_0 = warpgroup_mma_wait(0, deps=[t_0])
            acc_0 = here(acc_0 + p_0 * f_0)
            wait_turn(WHICH)
            t_1 = warpgroup_mma(left, w_1, gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True)
            pass_turn(WHICH)
            empty = BARS_AT + (STAGES + slot) * 8
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            p_1 = warpgroup_mma_wait(0, deps=[t_1])
            arrive_everywhere(empty, CLUSTER)
            remain -= 1
            wait_if(BARS_AT + slot * 8, phase, remain)
            sa, sb_0, sb_1 = take(sa_at + slot * 512), take(SB_AT + slot * 256), take(SB_AT + 128 + slot * 256)
            words = words_of(pool, slot, MINE, a_desc, SLOT, L)
            acc_1 += p_1 * f_1
        AT: gl.constexpr = OUT_AT + WHICH * (4 * 8192)
        tma.store_wait(0)
        barrier()
        acc_a, acc_b = halves(acc_0)
        acc_c, acc_d = halves(acc_1)
        put_box(out_desc, pool, AT, acc_a, bias_ptr, column, N, OUT)
        put_box(out_desc, pool, AT + 8192, acc_b, bias_ptr, column + 64, N, OUT)
        put_box(out_desc, pool, AT + 16384, acc_c, bias_ptr, column + 128, N, OUT)
        put_box(out_desc, pool, AT + 24576, acc_d, bias_ptr, column + 192, N, OUT)
        fence_async_shared()
        barrier()
        send_box(out_desc, pool, AT, row, column, OUT)
        send_box(out_desc, pool, AT + 8192, row, column + 64, OUT)
        send_box(out_desc, pool, AT + 16384, row, column + 128, OUT)
        send_box(out_desc, pool, AT + 24576, row, column + 192, OUT)
    if WHICH == 0:
        wait_turn(0)  # the other consumer's last word


@gluon.jit
def multiply_192(
    out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CLUSTER: gl.constexpr, OUT_AT: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    """Three products of 64 columns a step, issued together, each scaled while the next ones run."""
    if WHICH == 1:
        pass_turn(1)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    SLOT: gl.constexpr = 128 + 192
    MINE: gl.constexpr = WHICH * 64  # first row
    rank = cluster_rank()
    sa_at = SA_AT + (MINE + gl.arange(0, 64, layout=gl.SliceLayout(1, L))) * 4
    slot = 0
    phase = 0
    me, all_of = gl.program_id(0) // CLUSTER, gl.num_programs(0) // CLUSTER
    remain = gl.cdiv(tiles_m * tiles_n - me, all_of) * steps
    wait(BARS_AT, 0)
    sa, sb_0, sb_1 = take(sa_at), take(SB_AT + 0), take(SB_AT + 128)
    words = words_of(pool, 0, MINE, a_desc, SLOT, L)
    for item in range(me, tiles_m * tiles_n, all_of):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row, column = (tile_m * CLUSTER + rank) * 128 + MINE, tile_n * 192
        wide, narrow = columns_of(column, 128, 64)
        at_0, at_2 = 128 + wide - column, 128 + narrow - column  # rows of a slot
        acc_0 = gl.zeros((64, 64), gl.float32, L)
        acc_1, acc_2 = acc_0, acc_0
        for _ in range(steps):
            left = codes_of(words, CODES, L)
            wait_turn(WHICH)
            w_0 = rows_of(pool, slot, at_0, 64, b_desc, CODES, SLOT).permute((1, 0))
            t_0 = warpgroup_mma(left, w_0, gl.zeros((64, 64), gl.float32, L), use_acc=False, is_async=True)
            w_1 = rows_of(pool, slot, at_0 + 64, 64, b_desc, CODES, SLOT).permute((1, 0))
            t_1 = warpgroup_mma(left, w_1, gl.zeros((64, 64), gl.float32, L), use_acc=False, is_async=True)
            w_2 = rows_of(pool, slot, at_2, 64, b_desc, CODES, SLOT).permute((1, 0))
            t_2 = warpgroup_mma(left, w_2, gl.zeros((64, 64), gl.float32, L), use_acc=False, is_async=True)
            pass_turn(WHICH)
            f_0 = (sa * sb_0)[:, None]
            f_1 = (sa * sb_1)[:, None]
            p_0 = warpgroup_mma_wait(2, deps=[t_0])
            acc_0 = here(acc_0 + p_0 * f_0)
            p_1 = warpgroup_mma_wait(1, deps=[t_1])
            acc_1 = here(acc_1 + p_1 * f_0)
            empty = BARS_AT + (STAGES + slot) * 8
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            p_2 = warpgroup_mma_wait(0, deps=[t_2])
            arrive_everywhere(empty, CLUSTER)
            remain -= 1
            wait_if(BARS_AT + slot * 8, phase, remain)
            sa, sb_0, sb_1 = take(sa_at + slot * 512), take(SB_AT + slot * 256), take(SB_AT + 128 + slot * 256)
            words = words_of(pool, slot, MINE, a_desc, SLOT, L)
            acc_2 += p_2 * f_1
        AT: gl.constexpr = OUT_AT + WHICH * (3 * 8192)
        tma.store_wait(0)
        barrier()
        put_box(out_desc, pool, AT, acc_0, bias_ptr, wide, N, OUT)
        put_box(out_desc, pool, AT + 8192, acc_1, bias_ptr, wide + 64, N, OUT)
        put_box(out_desc, pool, AT + 16384, acc_2, bias_ptr, narrow, N, OUT)
        fence_async_shared()
        barrier()
        send_box(out_desc, pool, AT, row, wide, OUT)
        send_box(out_desc, pool, AT + 8192, row, wide + 64, OUT)
        send_box(out_desc, pool, AT + 16384, row, narrow, OUT)
    if WHICH == 0:
        wait_turn(0)  # the other consumer's last word
