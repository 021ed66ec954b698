"""Sums of the `shares` kernel of mm_weight_only: from one group of warps to another, to other programs, and out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fpk.kernels.gemm._cluster import memory_of, take_fours
from fpk.kernels.gemm._gluon import barrier, tma_store
from fpk.kernels.gemm._gluon_weight_cluster import both_groups, everybody, put_fours


@gluon.jit
def _opaque(x):
    """Keeps LLVM from moving the arithmetic on this in front of the main loop, where it would hold registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def in_a_row(acc):
    """A tile (64, columns) as its registers lie, four neighbours a thread: no value moves."""
    COLUMNS: gl.constexpr = acc.shape[1]
    row = acc.reshape((4, 2, 8, COLUMNS // 8, 4, 2)).permute((3, 0, 2, 4, 1, 5)).reshape((COLUMNS * 64,))
    return gl.convert_layout(row, gl.BlockedLayout([4], [32], [4], [0]), assert_trivial=True)


@gluon.jit
def _as_tile(row, COLUMNS: gl.constexpr):
    return row.reshape((COLUMNS // 8, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5)).reshape((64, COLUMNS))


@gluon.jit
def two(row):
    """The halves of a tile in a row: of its columns."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    few, more = row.reshape((2, row.shape[0] // 2)).permute((1, 0)).split()
    return gl.convert_layout(few, layout, assert_trivial=True), gl.convert_layout(more, layout, assert_trivial=True)


@gluon.jit
def _pieces(row, SIZE: gl.constexpr):
    if row.shape[0] <= SIZE:
        pieces = (row,)
    else:
        few, more = two(row)
        pieces = _pieces(few, SIZE) + _pieces(more, SIZE)
    return pieces


@gluon.jit
def finish(
    row, ends, whole, m, tile, tiles_n, program, first, last, programs, ROWS: gl.constexpr, R: gl.constexpr,
    KEEPS: gl.constexpr, T: gl.constexpr, COLUMNS: gl.constexpr, ROWS_S: gl.constexpr,
):  # fmt: skip
    """Store a tile of COLUMNS columns, or this program's part of it; the last of programs `first`..`last` adds them."""
    out_desc, out_ptr, parts_ptr, tickets_ptr, scale_ptr, bias_ptr, M, N, stride_om, stride_sn, leaving = ends
    PIECE: gl.constexpr = min(COLUMNS, 64)
    PIECES: gl.constexpr = COLUMNS // PIECE
    ALL: gl.constexpr = ROWS * KEEPS
    STEP: gl.constexpr = ALL * (64 * COLUMNS)
    pieces = _pieces(row, PIECE * 64)
    inside = gl.arange(0, PIECE * 64, layout=pieces[0].type.layout)
    layout: gl.constexpr = _as_tile(pieces[0], PIECE).type.layout
    # fetched before they are needed: the parts take a while
    offs_n = _opaque(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))
    at_n = (tile * ROWS + R) * 64 + offs_n
    mask_n = at_n < N
    scale_rows = at_n // ROWS_S if ROWS_S > 0 else at_n * 0
    scale = gl.load(scale_ptr + scale_rows * stride_sn.to(gl.int64), mask=mask_n, other=0.0)
    ready = whole
    parts_ptr += (m * programs).to(gl.int64) * (2 * STEP) + (R * KEEPS + T) * (64 * COLUMNS)
    tickets_ptr += (m * tiles_n + tile) * ALL + R * KEEPS + T
    if not whole:
        # a program leaves at most two parts: one of a tile that it does not begin (0), one of one that it does (1)
        mine = parts_ptr + (2 * program + (program == first).to(gl.int32)).to(gl.int64) * STEP
        for i in gl.static_range(PIECES):
            gl.store(mine + i * (PIECE * 64) + inside, pieces[i])
        barrier()
        ticket = gl.atomic_add(tickets_ptr, 1, sem="acq_rel")
        ready = ticket == last - first
    if ready:
        for i in gl.static_range(PIECES):
            sums = pieces[i]
            if not whole:
                part = parts_ptr + (2 * first + 1).to(gl.int64) * STEP + i * (PIECE * 64) + inside
                sums = gl.load(part, cache_modifier=".cg")
                part += STEP
                if PIECE <= 16:
                    for k in range(first + 1, last + 1, 4):  # on their way together; the barrier forbids unrolling
                        barrier()
                        one = gl.load(part, cache_modifier=".cg")
                        two = gl.load(part + 2 * STEP, mask=(inside >= 0) & (k < last), other=0.0, cache_modifier=".cg")
                        three = gl.load(
                            part + 4 * STEP, mask=(inside >= 0) & (k + 1 < last), other=0.0, cache_modifier=".cg"
                        )
                        four = gl.load(
                            part + 6 * STEP, mask=(inside >= 0) & (k + 2 < last), other=0.0, cache_modifier=".cg"
                        )
                        sums = (((sums + one) + two) + three) + four
                        part += 8 * STEP
                else:
                    for k in range(first + 1, last + 1, 2):
                        barrier()
                        one = gl.load(part, cache_modifier=".cg")
                        two = gl.load(part + 2 * STEP, mask=(inside >= 0) & (k < last), other=0.0, cache_modifier=".cg")
                        sums = (sums + one) + two
                        part += 4 * STEP
            out = _as_tile(sums, PIECE)
            offs_m = _opaque(gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout)))
            at_m = (m * KEEPS + T) * COLUMNS + i * PIECE + offs_m
            out *= scale[:, None]
            if bias_ptr is not None:
                out += gl.load(bias_ptr + at_n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
            if out_desc is not None:
                buffer = leaving.index(2 * R + i % 2)
                tma.store_wait(1)  # the piece before the last one has left its buffer
                barrier()
                buffer.store(out.to(out_ptr.dtype.element_ty).permute((1, 0)))
                fence_async_shared()
                barrier()
                tma_store(out_desc, [m * COLUMNS + i * PIECE, (tile * ROWS + R) * 64], buffer)
            else:
                ptrs = out_ptr + at_m.to(gl.int64)[None, :] * stride_om + at_n[:, None]
                gl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & (at_m < M)[None, :])
                if PIECES > 1:
                    barrier()  # one piece after the other, or their addresses would spill
        if not whole:
            gl.store(tickets_ptr, 0)


@gluon.jit
def give(row, sums, handed, taken, which, given):
    """Put a sum where another group takes it."""
    mbarrier.wait(taken.index(which), (given & 1) ^ 1)
    sums.index(which).store(row)
    barrier()
    mbarrier.arrive(handed.index(which), count=1)


@gluon.jit
def take(row, sums, handed, taken, which, given):
    """Add what another group has put."""
    mbarrier.wait(handed.index(which), given & 1)
    row += sums.index(which).load(row.type.layout)
    barrier()
    mbarrier.arrive(taken.index(which), count=1)
    return row


@gluon.jit
def finish_in_cluster(
    row, ends, m, tile, rank, ROWS: gl.constexpr, R: gl.constexpr, TURNS: gl.constexpr, T: gl.constexpr,
    BLOCK_M: gl.constexpr, CLUSTER: gl.constexpr, ROWS_S: gl.constexpr,
):  # fmt: skip
    """Add up what the groups of a cluster's programs have summed for the same rows, each a share of the tokens."""
    _, out_ptr, _, _, scale_ptr, bias_ptr, M, N, stride_om, stride_sn, _ = ends
    SIZE: gl.constexpr = 64 * BLOCK_M
    TAKERS: gl.constexpr = TURNS if SIZE // (CLUSTER * TURNS) >= 512 else 1
    SHARE: gl.constexpr = SIZE // (CLUSTER * TAKERS)
    flat: gl.constexpr = row.type.layout
    if ROWS * TURNS > 1:
        both_groups()  # nobody uses the ring any more
    put_fours(4 * ((R * TURNS + T) * SIZE + gl.arange(0, SIZE, layout=flat)), row)
    everybody()
    if T < TAKERS:
        at = 4 * (R * TURNS * SIZE + (rank * TAKERS + T) * SHARE + gl.arange(0, SHARE, layout=flat))
        sums = gl.zeros((SHARE,), gl.float32, flat)
        for c in gl.static_range(CLUSTER):
            base = memory_of(c)
            for t in gl.static_range(TURNS):
                sums += take_fours(base + 4 * t * SIZE + at)
        COLUMNS: gl.constexpr = SHARE // 64
        out = _as_tile(sums, COLUMNS)
        layout: gl.constexpr = out.type.layout
        at_n = (tile * ROWS + R) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        at_m = m * BLOCK_M + (rank * TAKERS + T) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        mask_n = at_n < N
        scale_rows = at_n // ROWS_S if ROWS_S > 0 else at_n * 0
        out *= gl.load(scale_ptr + scale_rows * stride_sn.to(gl.int64), mask=mask_n, other=0.0)[:, None]
        if bias_ptr is not None:
            out += gl.load(bias_ptr + at_n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
        ptrs = out_ptr + at_m.to(gl.int64)[None, :] * stride_om + at_n[:, None]
        gl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & (at_m < M)[None, :])
    everybody()  # others may read from here until now
