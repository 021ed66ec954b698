"""Consumers of lean.py whose products are 64 columns wide: design "parts"."""

from pieces import codes_of, here, pass_turn, put_box, rows_of, send_box, take, wait_if, wait_turn, words_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from fpk.kernels.gemm._cluster import arrive_everywhere, cluster_rank, wait
from fpk.kernels.gemm._gluon import barrier, columns_of, locate


@gluon.jit
def multiply_parts(
    out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
    OUT_AT: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile, in one to three products of 64 columns."""
    if ORDER and WHICH == 1:
        pass_turn(1)
    TALL: gl.constexpr = BLOCK_M == 128
    PARTS: gl.constexpr = BLOCK_N // 64 if TALL else BLOCK_N // 128
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    SLOT: gl.constexpr = BLOCK_M + BLOCK_N
    SA: gl.constexpr = BLOCK_M * 4
    MINE: gl.constexpr = WHICH * 64 if TALL else 0  # first row
    # where the scales of this consumer's first and last columns are
    SB_0: gl.constexpr = SB_AT + (128 if not TALL and BLOCK_N == 256 and WHICH == 1 else 0)
    SB_1: gl.constexpr = SB_AT + (128 if TALL and BLOCK_N == 192 else SB_0 - SB_AT)
    rank = cluster_rank()
    sa_at = SA_AT + (MINE + gl.arange(0, 64, layout=gl.SliceLayout(1, L))) * 4
    slot = 0
    phase = 0
    me, all_of = gl.program_id(0) // CLUSTER, gl.num_programs(0) // CLUSTER
    remain = gl.cdiv(tiles_m * tiles_n - me, all_of) * steps
    wait(BARS_AT, 0)
    sa, sb_0, sb_1 = take(sa_at), take(SB_0 + 0), take(SB_1 + 0)
    words = words_of(pool, 0, MINE, a_desc, SLOT, L)
    for item in range(me, tiles_m * tiles_n, all_of):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row, column = (tile_m * CLUSTER + rank) * BLOCK_M + MINE, tile_n * BLOCK_N
        if BLOCK_N == 192:
            first, last = columns_of(column, 128, 64)
        else:
            first = column + (0 if TALL else WHICH * (BLOCK_N // 2))
            last = first
        at_0, at_1 = BLOCK_M + first - column, BLOCK_M + last - column  # rows of a slot
        acc_0 = gl.zeros((64, 64), gl.float32, L)
        acc_1, acc_2 = acc_0, acc_0
        for _ in range(steps):
            left = codes_of(words, CODES, L)
            if ORDER:
                wait_turn(WHICH)
            w_0 = rows_of(pool, slot, at_0, 64, b_desc, CODES, SLOT).permute((1, 0))
            t_0 = warpgroup_mma(left, w_0, gl.zeros((64, 64), gl.float32, L), use_acc=False, is_async=True)
            if PARTS >= 2:
                w_1 = rows_of(pool, slot, at_0 + 64, 64, b_desc, CODES, SLOT).permute((1, 0))
                t_1 = warpgroup_mma(left, w_1, gl.zeros((64, 64), gl.float32, L), use_acc=False, is_async=True)
            if PARTS == 3:
                w_2 = rows_of(pool, slot, at_1, 64, b_desc, CODES, SLOT).permute((1, 0))
                t_2 = warpgroup_mma(left, w_2, gl.zeros((64, 64), gl.float32, L), use_acc=False, is_async=True)
            if ORDER:
                pass_turn(WHICH)
            f_0 = (sa * sb_0)[:, None]
            f_1 = (sa * sb_1)[:, None]
            if PARTS >= 2:
                p_0 = warpgroup_mma_wait(PARTS - 1, deps=[t_0])
                acc_0 = here(acc_0 + p_0 * f_0)
            if PARTS == 3:
                p_1 = warpgroup_mma_wait(1, deps=[t_1])
                acc_1 = here(acc_1 + p_1 * f_0)
            empty = BARS_AT + (STAGES + slot) * 8
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            if PARTS == 1:
                product = warpgroup_mma_wait(0, deps=[t_0])
            elif PARTS == 2:
                product = warpgroup_mma_wait(0, deps=[t_1])
            else:
                product = warpgroup_mma_wait(0, deps=[t_2])
            arrive_everywhere(empty, CLUSTER)
            remain -= 1
            wait_if(BARS_AT + slot * 8, phase, remain)
            sa, sb_0, sb_1 = take(sa_at + slot * SA), take(SB_0 + slot * 256), take(SB_1 + slot * 256)
            words = words_of(pool, slot, MINE, a_desc, SLOT, L)
            if PARTS == 1:
                acc_0 += product * f_0
            elif PARTS == 2:
                acc_1 += product * f_0
            else:
                acc_2 += product * f_1
        AT: gl.constexpr = OUT_AT + WHICH * PARTS * 8192
        tma.store_wait(0)
        barrier()
        put_box(out_desc, pool, AT, acc_0, bias_ptr, first, N, OUT)
        if PARTS >= 2:
            put_box(out_desc, pool, AT + 8192, acc_1, bias_ptr, first + 64, N, OUT)
        if PARTS == 3:
            put_box(out_desc, pool, AT + 16384, acc_2, bias_ptr, last, N, OUT)
        fence_async_shared()
        barrier()
        send_box(out_desc, pool, AT, row, first, OUT)
        if PARTS >= 2:
            send_box(out_desc, pool, AT + 8192, row, first + 64, OUT)
        if PARTS == 3:
            send_box(out_desc, pool, AT + 16384, row, last, OUT)
    if ORDER and WHICH == 0:
        wait_turn(0)  # the other consumer's last word
