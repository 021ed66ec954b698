"""Consumers of lean.py whose products are 128 columns wide: designs "shared", "registers" and "ahead"."""

from pieces import codes_of, here, pass_turn, put_box, rows_of, send_box, take, wait_if, wait_turn, words_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from fpk.kernels.gemm._cluster import arrive_everywhere, cluster_rank, wait
from fpk.kernels.gemm._gluon import barrier, columns_of, halves, locate


@gluon.jit
def multiply_blocks(
    out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, OUT_AT: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr, DESIGN: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile, a product of 128 columns and one of the other 128 or 64."""
    if ORDER and WHICH == 1:
        pass_turn(1)
    MORE: gl.constexpr = BLOCK_N - 128
    AHEAD: gl.constexpr = DESIGN != "registers"
    WORDS: gl.constexpr = DESIGN == "ahead"
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    LM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MORE, 32])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, L, 4)
    LEFT_M: gl.constexpr = gl.DotOperandLayout(0, LM, 4)
    SLOT: gl.constexpr = 128 + BLOCK_N
    SA: gl.constexpr = 512
    rank = cluster_rank()
    sa_at = SA_AT + (WHICH * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))) * 4
    slot = 0
    phase = 0
    me, all_of = gl.program_id(0) // CLUSTER, gl.num_programs(0) // CLUSTER
    if AHEAD:
        remain = gl.cdiv(tiles_m * tiles_n - me, all_of) * steps
        wait(BARS_AT, 0)
        sa, sb_0, sb_1 = take(sa_at), take(SB_AT + 0), take(SB_AT + 128)
        if WORDS:
            words = words_of(pool, 0, WHICH * 64, a_desc, SLOT, L)
    for item in range(me, tiles_m * tiles_n, all_of):
        tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
        row, column = (tile_m * CLUSTER + rank) * 128 + WHICH * 64, tile_n * BLOCK_N
        if BLOCK_N == 192:
            first, second = columns_of(column, 128, 64)
        else:
            first, second = column, column + 128
        at_0, at_1 = 128 + first - column, 128 + second - column  # rows of a slot
        acc_0 = gl.zeros((64, 128), gl.float32, L)
        acc_1 = gl.zeros((64, MORE), gl.float32, LM)
        for _ in range(steps):
            if not AHEAD:
                wait(BARS_AT + slot * 8, phase)
                sa, sb_0, sb_1 = take(sa_at + slot * SA), take(SB_AT + slot * 256), take(SB_AT + 128 + slot * 256)
            if WORDS:
                left = codes_of(words, CODES, L)
            else:
                left = rows_of(pool, slot, WHICH * 64, 64, a_desc, CODES, SLOT)
                if DESIGN == "registers":
                    left = left.load(LEFT)
            w_0 = rows_of(pool, slot, at_0, 128, b_desc, CODES, SLOT).permute((1, 0))
            w_1 = rows_of(pool, slot, at_1, MORE, b_desc, CODES, SLOT).permute((1, 0))
            left_m = left if DESIGN == "shared" else gl.convert_layout(left, LEFT_M)
            if ORDER:
                wait_turn(WHICH)
            t_0 = warpgroup_mma(left, w_0, gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True)
            if MORE == 64:  # registers for both products: the second one runs while the first is scaled
                t_1 = warpgroup_mma(left_m, w_1, gl.zeros((64, MORE), gl.float32, LM), use_acc=False, is_async=True)
            if ORDER:
                pass_turn(WHICH)
            f_0 = (sa * sb_0)[:, None]
            f_1 = gl.convert_layout(sa * sb_1, gl.SliceLayout(1, LM))[:, None]
            if MORE == 64:
                p_0 = warpgroup_mma_wait(1, deps=[t_0])
                acc_0 += p_0 * f_0
            else:
                p_0 = warpgroup_mma_wait(0, deps=[t_0])
                acc_0 = here(acc_0 + p_0 * f_0)
                if ORDER:
                    wait_turn(WHICH)
                t_1 = warpgroup_mma(left_m, w_1, gl.zeros((64, MORE), gl.float32, LM), use_acc=False, is_async=True)
                if ORDER:
                    pass_turn(WHICH)
            empty = BARS_AT + (STAGES + slot) * 8
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            p_1 = warpgroup_mma_wait(0, deps=[t_1])
            arrive_everywhere(empty, CLUSTER)
            if AHEAD:
                remain -= 1
                wait_if(BARS_AT + slot * 8, phase, remain)
                sa, sb_0, sb_1 = take(sa_at + slot * SA), take(SB_AT + slot * 256), take(SB_AT + 128 + slot * 256)
                if WORDS:
                    words = words_of(pool, slot, WHICH * 64, a_desc, SLOT, L)
            acc_1 += p_1 * f_1
        AT: gl.constexpr = OUT_AT + WHICH * (BLOCK_N // 64) * 8192
        tma.store_wait(0)
        barrier()
        acc_a, acc_b = halves(acc_0)
        put_box(out_desc, pool, AT, acc_a, bias_ptr, first, N, OUT)
        put_box(out_desc, pool, AT + 8192, acc_b, bias_ptr, first + 64, N, OUT)
        if MORE == 128:
            acc_c, acc_d = halves(acc_1)
            put_box(out_desc, pool, AT + 16384, acc_c, bias_ptr, second, N, OUT)
            put_box(out_desc, pool, AT + 24576, acc_d, bias_ptr, second + 64, N, OUT)
        else:
            put_box(out_desc, pool, AT + 16384, acc_1, bias_ptr, second, N, OUT)
        fence_async_shared()
        barrier()
        send_box(out_desc, pool, AT, row, first, OUT)
        send_box(out_desc, pool, AT + 8192, row, first + 64, OUT)
        send_box(out_desc, pool, AT + 16384, row, second, OUT)
        if MORE == 128:
            send_box(out_desc, pool, AT + 24576, row, second + 64, OUT)
    if ORDER and WHICH == 0:
        wait_turn(0)  # the other consumer's last word
