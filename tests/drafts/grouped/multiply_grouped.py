"""Consumers of lean_grouped.py: 64 rows of every tile, two products of 128 columns a step."""

from pieces import codes_of, here, put_box, rows_of, send_box, take, wait_if, words_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait

from fpk.kernels.gemm._cluster import arrive_everywhere, cluster_meet, cluster_rank, cluster_sync, wait
from fpk.kernels.gemm._gluon import barrier, halves
from fpk.kernels.moe._gluon_grouped import _tile


@gluon.jit
def _store_rows(
    out_ptr, out_desc, pool, at: gl.constexpr, row, end, column, N, stride_om, OUT: gl.constexpr
):  # fmt: skip
    """A box of which not all rows are the expert's."""
    B: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tile = pool.index(at // 1024)._reinterpret(OUT, [64, 64], out_desc.layout).load(B)
    rows = row + gl.arange(0, 64, layout=gl.SliceLayout(1, B))
    columns = column + gl.arange(0, 64, layout=gl.SliceLayout(0, B))
    ptrs = out_ptr + rows.to(gl.int64)[:, None] * stride_om + columns[None, :]
    gl.store(ptrs, tile, mask=(rows < end)[:, None] & (columns < N)[None, :])


@gluon.jit
def _leave(
    boxes, out_desc, out_ptr, pool, row, end, column, N, stride_om,
    AT: gl.constexpr, BOXES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """Write four boxes of 64 columns through BOXES places of shared memory."""
    for i in gl.static_range(4):
        if i % BOXES == 0:
            tma.store_wait(0)
            barrier()
        put_box(out_desc, pool, AT + i % BOXES * 8192, boxes[i], None, 0, N, OUT)
        if i % BOXES == BOXES - 1:
            fence_async_shared()
            barrier()
            for j in gl.static_range(i - BOXES + 1, i + 1):
                if row + 64 <= end:
                    send_box(out_desc, pool, AT + j % BOXES * 8192, row, column + j * 64, OUT)
                else:
                    _store_rows(
                        out_ptr, out_desc, pool, AT + j % BOXES * 8192, row, end, column + j * 64, N, stride_om, OUT
                    )  # fmt: skip


@gluon.jit
def _clear(out_ptr, begin, R, N, stride_om, WHICH: gl.constexpr):
    """Zeros for rows of no expert."""
    B: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tiles_n = gl.cdiv(N, 64)
    tiles = gl.cdiv(max(R - begin, 0), 64) * tiles_n
    for item in range(gl.program_id(0) * 2 + WHICH, tiles, gl.num_programs(0) * 2):
        rows = begin + item // tiles_n * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, B))
        columns = item % tiles_n * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, B))
        ptrs = out_ptr + rows.to(gl.int64)[:, None] * stride_om + columns[None, :]
        zeros = gl.zeros((64, 64), out_ptr.dtype.element_ty, B)
        gl.store(ptrs, zeros, mask=(rows < R)[:, None] & (columns < N)[None, :])


@gluon.jit
def multiply_grouped(
    a_desc, b_desc, out_desc, pool, table_ptr, out_ptr, tiles_m, tiles_n, steps, begin_lost, R, N, stride_om,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CLUSTER: gl.constexpr, ALONG: gl.constexpr, AHEAD: gl.constexpr, BOXES: gl.constexpr, OUT_AT: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    """AHEAD: a step's rows of `a` and its scales are fetched while the last product of the step before is scaled. A
    consumer that has no rows of a tile lets its steps pass."""
    cluster_meet(CLUSTER)
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    AT: gl.constexpr = OUT_AT + WHICH * BOXES * 8192
    MINE: gl.constexpr = WHICH * 64
    rank = cluster_rank()
    sa_at = SA_AT + (MINE + gl.arange(0, 64, layout=gl.SliceLayout(1, L))) * 4
    me, all_of = gl.program_id(0) // CLUSTER, gl.num_programs(0) // CLUSTER
    remain = gl.cdiv(max(tiles_m * tiles_n - me, 0), all_of) * steps
    slot = 0
    phase = 0
    if AHEAD:
        wait_if(BARS_AT, 0, remain)
        sa, sb_0, sb_1 = take(sa_at), take(SB_AT + 0), take(SB_AT + 128)
        words = words_of(pool, 0, MINE, a_desc, 384, L)
    next_n, _, next_first, next_end = _tile(table_ptr, me, max(tiles_m, 1), tiles_n, GROUP_M)
    for item in range(me, tiles_m * tiles_n, all_of):
        column = (next_n * CLUSTER + rank if ALONG == "columns" else next_n) * 256
        row = next_first + MINE + (rank * 128 if ALONG == "rows" else 0)
        end = next_end
        next_n, _, next_first, next_end = _tile(table_ptr, item + all_of, tiles_m, tiles_n, GROUP_M)
        if row < end:
            acc_0 = gl.zeros((64, 128), gl.float32, L)
            acc_1 = gl.zeros((64, 128), gl.float32, L)
            for _ in range(steps):
                if not AHEAD:
                    wait(BARS_AT + slot * 8, phase)
                    sa, sb_0, sb_1 = take(sa_at + slot * 512), take(SB_AT + slot * 256), take(SB_AT + 128 + slot * 256)
                    words = words_of(pool, slot, MINE, a_desc, 384, L)
                left = codes_of(words, CODES, L)
                w_0 = rows_of(pool, slot, 128, 128, b_desc, CODES, 384).permute((1, 0))
                w_1 = rows_of(pool, slot, 256, 128, b_desc, CODES, 384).permute((1, 0))
                t_0 = warpgroup_mma(left, w_0, gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True)
                f_0 = (sa * sb_0)[:, None]
                f_1 = (sa * sb_1)[:, None]
                p_0 = warpgroup_mma_wait(0, deps=[t_0])
                acc_0 = here(acc_0 + p_0 * f_0)
                t_1 = warpgroup_mma(left, w_1, gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True)
                empty = BARS_AT + (STAGES + slot) * 8
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
                p_1 = warpgroup_mma_wait(0, deps=[t_1])
                arrive_everywhere(empty, CLUSTER)
                remain -= 1
                if AHEAD:
                    wait_if(BARS_AT + slot * 8, phase, remain)
                    sa, sb_0, sb_1 = take(sa_at + slot * 512), take(SB_AT + slot * 256), take(SB_AT + 128 + slot * 256)
                    words = words_of(pool, slot, MINE, a_desc, 384, L)
                acc_1 += p_1 * f_1
            boxes = halves(acc_0) + halves(acc_1)
            _leave(boxes, out_desc, out_ptr, pool, row, end, column, N, stride_om, AT, BOXES, OUT)
        else:
            for _ in range(steps):
                if not AHEAD:
                    wait(BARS_AT + slot * 8, phase)
                arrive_everywhere(BARS_AT + (STAGES + slot) * 8, CLUSTER)
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
                remain -= 1
                if AHEAD:
                    wait_if(BARS_AT + slot * 8, phase, remain)
            if AHEAD:
                sa, sb_0, sb_1 = take(sa_at + slot * 512), take(SB_AT + slot * 256), take(SB_AT + 128 + slot * 256)
                words = words_of(pool, slot, MINE, a_desc, 384, L)
    _clear(out_ptr, begin_lost, R, N, stride_om, WHICH)
    tma.store_wait(0)
    cluster_sync(CLUSTER)
