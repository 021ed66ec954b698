"""Grouped block-scaled FP8 products on sm90 in which nothing that is loaded passes through registers: kernel `streams`.

    out[r, n] = sum_k a[r, k] sa[r, k / 128] b[e, n, k] sb[e, n / 128, k / 128], e the expert of row r

A tile is 128 rows of one expert by 256 columns. One program an SM; the loading warps fill a ring of STAGES slots (rows,
weights, the rows' scales, two scales of weights) by one barrier a step, two consumers have 64 rows each and both blocks
of columns.

- Rows in order come by TMA, rows to gather 16 bytes a lane by cp.async (TMA of sm90 reads only boxes). Consumers read
  rows into registers, so that copies of both kinds are visible to them by the barrier alone, and gathering costs the
  loading warps some instructions and nobody a wait.
- Scales come by cp.async: a lane for each row, one for both weights. (TMA wants multiples of 16 bytes.)

CLUSTER programs have neighbouring columns and load the rows for each other (multicast). AHEAD: a step's rows and scales
go to registers while the last product of the step before is scaled. ORDER: consumers issue their products by turns.
BOXES: places of 64 x 64 results of a consumer, on their way out. What a box reads behind an expert's last row are rows
of others: each row has its own sums, and a consumer's rows leave by TMA only where all 64 are the expert's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fpk.kernels.gemm._cluster import arrive_everywhere, cluster_meet, cluster_rank, cluster_sync, in_clusters, wait
from fpk.kernels.gemm._gluon import after_previous, barrier, halves
from fpk.kernels.gemm._multicast import ring_at_start
from fpk.kernels.gemm._streams import (
    codes_of,
    copy_line,
    copy_two,
    expect,
    here,
    load,
    pass_turn,
    put_box,
    rows_of,
    send_box,
    take,
    tell,
    wait_if,
    wait_turn,
    warp,
    words_of,
)
from fpk.kernels.moe._gluon_grouped import _tile

NAME = gl.constexpr("expert_streams_kernel")


@gluon.jit
def _copy_rows(at, rows, chunks, pointers, bytes):
    """Chunks of 16 bytes of rows of 128 to byte `at`, a multiple of 1024, swizzled as TMA would. bytes: 16 or 0 of each
    come from memory, the others are zeros."""
    to = at + rows * 128 + (chunks ^ (rows & 7)) * 16
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        cp.async.cg.shared.global [a], [$2], 16, $3;
        mov.u32 $0, 0;
        }
        """, "=r,r,l,r,~{memory}", [to, pointers, bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _fetch(
    table_ptr, a_ptr, sa_ptr, sb_ptr, gather_ptr, tiles_m, tiles_n, steps, N, K, top_k, stride_am, stride_sam,
    stride_sak, stride_sbe, stride_sbn, STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    cluster_meet(CLUSTER)
    SLOT: gl.constexpr = 384 * 128
    SHARE: gl.constexpr = 128 // CLUSTER
    GATHER: gl.constexpr = gather_ptr is not None
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    CHUNKS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    rank = cluster_rank()
    blocks = gl.cdiv(N, 128)
    me, all_of = gl.program_id(0) // CLUSTER, gl.num_programs(0) // CLUSTER
    slot = 0
    phase = 1
    lanes = gl.arange(0, 128, layout=LINE)
    next_n, next_expert, next_first, next_end = _tile(table_ptr, me, max(tiles_m, 1), tiles_n, GROUP_M)
    for item in range(me, tiles_m * tiles_n, all_of):
        expert = next_expert
        first = next_first
        end = next_end
        block = (next_n * CLUSTER + rank) * 2
        next_n, next_expert, next_first, next_end = _tile(table_ptr, item + all_of, tiles_m, tiles_n, GROUP_M)
        weight = expert * N + block * 128
        sb_0 = sb_ptr + expert * stride_sbe + min(block, blocks - 1) * stride_sbn
        sb_1 = sb_ptr + expert * stride_sbe + min(block + 1, blocks - 1) * stride_sbn
        source = gl.where(first + lanes < end, first + lanes, first)
        if GATHER:
            source = gl.maximum(gl.load(gather_ptr + source), 0) // top_k
        sa_ptrs = sa_ptr + source * stride_sam
        if GATHER:
            rows = gl.arange(0, 128, layout=gl.SliceLayout(1, CHUNKS))
            chunks = gl.arange(0, 8, layout=gl.SliceLayout(0, CHUNKS))[None, :]
            places = gl.where(first + rows < end, first + rows, first)
            source_rows = gl.maximum(gl.load(gather_ptr + places), 0) // top_k
            offs = source_rows[:, None] * stride_am + chunks * 16
        for k in range(steps):
            full = BARS_AT + slot * 8
            wait(BARS_AT + (STAGES + slot) * 8, phase)
            if warp() == 0:
                expect(full, 256 * 128 + (0 if GATHER else 128 * 128))
                load(NAME, 0, slot * SLOT + 128 * 128, weight, k * 128, full)
                load(NAME, 0, slot * SLOT + 256 * 128, weight + 128, k * 128, full)
                if not GATHER:
                    at = rank * SHARE
                    load(NAME, 10, slot * SLOT + at * 128, first + at, k * 128, full, CLUSTER)
                copy_two(SB_AT + slot * 256, sb_0 + k, sb_1 + k, full)
            copy_line(SA_AT + slot * 512 + lanes * 4, sa_ptrs + k * stride_sak)
            if GATHER:
                bytes = gl.where(k * 128 + chunks * 16 < K, 16, 0)
                _copy_rows(slot * SLOT, rows[:, None], chunks, a_ptr + k * 128 + offs, bytes)
            tell(full)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    cluster_sync(CLUSTER)


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
def _multiply(
    a_desc, b_desc, out_desc, pool, table_ptr, out_ptr, tiles_m, tiles_n, steps, begin_lost, R, N, stride_om,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CLUSTER: gl.constexpr, AHEAD: gl.constexpr, ORDER: gl.constexpr, BOXES: gl.constexpr, OUT_AT: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile, two products of 128 columns a step. Who has no rows of a tile lets its steps pass, and its
    turns. Consumer 0 begins, and takes what the last turn of consumer 1 passes on, so that nothing is left."""
    cluster_meet(CLUSTER)
    if ORDER and WHICH == 1:
        pass_turn(1)
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
        column = (next_n * CLUSTER + rank) * 256
        row = next_first + MINE
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
                if ORDER:
                    wait_turn(WHICH)
                t_0 = warpgroup_mma(left, w_0, gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True)
                if ORDER:
                    pass_turn(WHICH)
                f_0 = (sa * sb_0)[:, None]
                f_1 = (sa * sb_1)[:, None]
                p_0 = warpgroup_mma_wait(0, deps=[t_0])
                acc_0 = here(acc_0 + p_0 * f_0)
                if ORDER:
                    wait_turn(WHICH)
                t_1 = warpgroup_mma(left, w_1, gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True)
                if ORDER:
                    pass_turn(WHICH)
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
                if ORDER:
                    for _turn in gl.static_range(2):
                        wait_turn(WHICH)
                        pass_turn(WHICH)
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
    if ORDER and WHICH == 0:
        wait_turn(0)
    _clear(out_ptr, begin_lost, R, N, stride_om, WHICH)
    tma.store_wait(0)
    cluster_sync(CLUSTER)


@gluon.jit(do_not_specialize=["R", "E", "top_k", "stride_sam", "stride_sak", "stride_sbe", "stride_sbn"])
def expert_streams_kernel(
    b_desc, out_desc, a_desc, offs_ptr, table_ptr, a_ptr, sa_ptr, sb_ptr, gather_ptr, out_ptr,
    R, E, N, K, top_k, stride_am, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_om,
    PDL: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CLUSTER: gl.constexpr, AHEAD: gl.constexpr, ORDER: gl.constexpr, BOXES: gl.constexpr,
    OUT_AT: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent. One pool: the ring, the outputs, the scales, the barriers."""
    after_previous(PDL)
    pool = gl.allocate_shared_memory(gl.int8, [BARS_AT // 1024 + 1, 8, 128], a_desc.layout)
    barriers = pool.index(BARS_AT // 1024)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=130)  # every loading thread, and one twice more
        mbarrier.init(barriers.index(STAGES + i), count=8 * CLUSTER)
    fence_async_shared()
    # rows of no expert come last in the table, and are nobody's product
    begin_lost = min(gl.load(offs_ptr + E - 1), R)
    tiles_m = gl.load(table_ptr) - gl.cdiv(R - begin_lost, 128)
    tiles_n, steps = gl.cdiv(N, 256 * CLUSTER), gl.cdiv(K, 128)
    # the loading warps first, in Triton's own partition: in the others ptxas sees that all threads take one way, and
    # keeps what describes the operands in uniform registers
    gl.warp_specialize(
        [
            (_fetch, (
                table_ptr, a_ptr, sa_ptr, sb_ptr, gather_ptr, tiles_m, tiles_n, steps, N, K, top_k, stride_am,
                stride_sam, stride_sak, stride_sbe, stride_sbn, STAGES, GROUP_M, CLUSTER, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply, (
                a_desc, b_desc, out_desc, pool, table_ptr, out_ptr, tiles_m, tiles_n, steps, begin_lost, R, N,
                stride_om, 0, CODES, OUT, STAGES, GROUP_M, CLUSTER, AHEAD, ORDER, BOXES, OUT_AT, SA_AT, SB_AT,
                BARS_AT,
            )),
            (_multiply, (
                a_desc, b_desc, out_desc, pool, table_ptr, out_ptr, tiles_m, tiles_n, steps, begin_lost, R, N,
                stride_om, 1, CODES, OUT, STAGES, GROUP_M, CLUSTER, AHEAD, ORDER, BOXES, OUT_AT, SA_AT, SB_AT,
                BARS_AT,
            )),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip


in_clusters(expert_streams_kernel, ring_at_start)
