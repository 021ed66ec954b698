"""The `shares` kernel of scaled_mm for sm90: few tokens, equal shares of K and of the weights, one launch.

A step of ROWS * 64 weights (N) by WIDE * 128 columns (K) and the tokens' same columns come by TMA, told by one barrier,
and go from shared memory into the matrix unit, the weights on its 64-row side. Every program takes equally many
consecutive steps, across the ends of tiles. One that ends inside a tile leaves its sum in memory, and the last of those
that share the tile adds all up in their order (tickets): results depend neither on timing nor, with one config, on how
many tokens there are. CLUSTER programs may instead divide each tile, and add up in each other's shared memory.

PROMOTE (full accuracy): each step's sum begins in the unit and moves to fp32 registers.
EARLY: the next launch may start before the kernel in front of this one has finished, if there is room on an SM.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.kernels.gemm._cluster import in_clusters, memory_of, take_fours
from fpk.kernels.gemm._gluon import barrier, tma_load
from fpk.kernels.gemm._gluon_weight_cluster import both_groups, everybody, put_fours
from fpk.kernels.gemm._gluon_weight_shares import _share
from fpk.kernels.gemm._gluon_weight_sums import _as_tile, in_a_row


@gluon.constexpr_function
def _sums(tokens: int) -> gl.NVMMADistributedLayout:
    """Where the sums of 64 weights by so many tokens lie in four warps' registers."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.jit
def _fetch_weights(desc, bufs, full, slot, tile, step, ROWS: gl.constexpr, WIDE: gl.constexpr, BYTES: gl.constexpr):
    bar = full.index(slot)
    mbarrier.expect(bar, BYTES)
    for i in gl.static_range(WIDE):
        for r in gl.static_range(ROWS):
            at = (slot * WIDE + i) * ROWS + r
            tma_load(desc, [(tile * ROWS + r) * 64, (step * WIDE + i) * 128], bar, bufs.index(at))


@gluon.jit
def _fetch_tokens(desc, bufs, full, slot, token, step, WIDE: gl.constexpr):
    for i in gl.static_range(WIDE):
        tma_load(desc, [token, (step * WIDE + i) * 128], full.index(slot), bufs.index(slot * WIDE + i))


@gluon.jit
def _produce(
    descs, buffers, work,
    PDL: gl.constexpr, EARLY: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, WIDE: gl.constexpr,
    STAGES: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """Fill the ring. Weights are read before the kernel in front has finished, nothing else."""
    b_desc, a_desc = descs
    weights, tokens, full, empty = buffers
    steps = work[1]
    BYTES: gl.constexpr = WIDE * 128 * (ROWS * 64 + BLOCK_M)
    m, _, begin, end, tile, k = _share(work, CLUSTER)
    first, a_k = min(begin + STAGES, end), k
    if PDL and EARLY:
        gdc_launch_dependents()
    for at in range(begin, first):
        _fetch_weights(b_desc, weights, full, at - begin, tile, k, ROWS, WIDE, BYTES)
        k += 1
        tile = gl.where(k == steps, tile + 1, tile)
        k = gl.where(k == steps, 0, k)
    if PDL:
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    for at in range(begin, first):
        _fetch_tokens(a_desc, tokens, full, at - begin, m * BLOCK_M, a_k, WIDE)
        a_k = gl.where(a_k + 1 == steps, 0, a_k + 1)
    slot, phase = 0, 0
    for _ in range(first, end):
        mbarrier.wait(empty.index(slot), phase)
        _fetch_weights(b_desc, weights, full, slot, tile, k, ROWS, WIDE, BYTES)
        _fetch_tokens(a_desc, tokens, full, slot, m * BLOCK_M, k, WIDE)
        k += 1
        tile = gl.where(k == steps, tile + 1, tile)
        k = gl.where(k == steps, 0, k)
        slot += 1
        phase = gl.where(slot == STAGES, phase ^ 1, phase)
        slot = gl.where(slot == STAGES, 0, slot)
    if CLUSTER > 1:
        everybody()
        everybody()


@gluon.jit
def _multiply(
    acc, weights, tokens, slot, R: gl.constexpr, ROWS: gl.constexpr, WIDE: gl.constexpr, PROMOTE: gl.constexpr
):
    """acc + a step's product."""
    product = acc
    for i in gl.static_range(WIDE):
        left = weights.index((slot * WIDE + i) * ROWS + R)
        right = tokens.index(slot * WIDE + i).permute((1, 0))
        product = warpgroup_mma(left, right, product, use_acc=i > 0 or not PROMOTE, is_async=True)
    product = warpgroup_mma_wait(0, deps=[product])
    return acc + product if PROMOTE else product


@gluon.jit
def _add_up(
    acc, parts_ptr, ticket_ptr, program, first, last, R: gl.constexpr, ROWS: gl.constexpr, AT_ONCE: gl.constexpr
):  # fmt: skip
    """(Do all parts of the tile lie in memory?, then their sum.) Programs `first` to `last` have one each."""
    row = in_a_row(acc)
    SIZE: gl.constexpr = row.shape[0]
    STEP: gl.constexpr = ROWS * SIZE
    inside = R * SIZE + gl.arange(0, SIZE, layout=row.type.layout)
    # a program leaves at most two parts: one of a tile that it does not begin (0), one of one that it does (1)
    mine = (2 * program + (program == first).to(gl.int32)).to(gl.int64) * STEP
    gl.store(parts_ptr + mine + inside, row)
    barrier()
    ticket = gl.atomic_add(ticket_ptr, 1, sem="acq_rel")
    ready = ticket == last - first
    if ready:
        part = parts_ptr + (2 * first + 1).to(gl.int64) * STEP + inside
        row = gl.load(part, cache_modifier=".cg")
        part += STEP
        for k in range(first + 1, last + 1, AT_ONCE):  # on their way together; the barrier forbids unrolling
            barrier()
            more = ()
            for i in gl.static_range(AT_ONCE):
                wanted = (inside >= 0) & (k + i <= last)
                more += (gl.load(part + 2 * i * STEP, mask=wanted, other=0, cache_modifier=".cg"),)  # type: ignore[assignment]
            for i in gl.static_range(AT_ONCE):
                row += more[i]
            part += 2 * AT_ONCE * STEP
        gl.store(ticket_ptr, 0)
    return ready, gl.convert_layout(_as_tile(row, acc.shape[1]), acc.type.layout, assert_trivial=True)


@gluon.jit
def _add_up_in_cluster(acc, first, COLUMNS: gl.constexpr, R: gl.constexpr, ROWS: gl.constexpr, CLUSTER: gl.constexpr):
    """What the cluster's programs have summed for COLUMNS tokens from `first` on; the sums lie where the ring was."""
    row = in_a_row(acc)
    flat: gl.constexpr = row.type.layout
    SIZE: gl.constexpr = row.shape[0]
    if ROWS > 1:
        both_groups()  # nobody uses the ring any more
    put_fours(4 * (R * SIZE + gl.arange(0, SIZE, layout=flat)), row)
    everybody()
    at = 4 * (R * SIZE + first * 64 + gl.arange(0, COLUMNS * 64, layout=flat))
    sums = gl.zeros((COLUMNS * 64,), row.dtype, flat)
    for c in gl.static_range(CLUSTER):
        sums += take_fours(memory_of(c) + at).to(row.dtype, bitcast=True)
    return gl.convert_layout(_as_tile(sums, COLUMNS), _sums(COLUMNS), assert_trivial=True)


@gluon.jit
def _consume(
    buffers, ends, work,
    R: gl.constexpr, INT8: gl.constexpr, PROMOTE: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    WIDE: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """Multiply 64 weights, number R of a tile, by the tokens, and scale and store what of it is this program's."""
    weights, tokens, full, empty = buffers
    out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, sizes, parts_ptr, tickets_ptr = ends
    M, N, stride_om, stride_sa, stride_sb = sizes
    per_program, steps, tiles_n = work
    m, program, begin, end, first_tile, _ = _share(work, CLUSTER)
    parts_ptr += (2 * m * gl.num_programs(1)).to(gl.int64) * (ROWS * 64 * BLOCK_M)  # of these tokens
    COLUMNS: gl.constexpr = max(8, BLOCK_M // CLUSTER)  # tokens that this program scales and stores
    OUT: gl.constexpr = _sums(COLUMNS)
    first_token = program % CLUSTER * COLUMNS  # of the tile
    at_m = m * BLOCK_M + first_token + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, OUT))
    mbarrier.wait(full.index(0), 0)  # so the kernel in front has finished, and what it wrote can be read
    scale_a = gl.load(scale_a_ptr + at_m * stride_sa, mask=at_m < M, other=0.0)
    slot, phase = 0, 0
    for tile in range(first_tile, gl.cdiv(end, steps)):
        start, stop = max(tile * steps, begin), min(tile * steps + steps, end)
        at_n = (tile * ROWS + R) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
        scale_b = gl.load(scale_b_ptr + at_n * stride_sb, mask=at_n < N, other=0.0)
        bias = scale_b  # unused
        if bias_ptr is not None:
            bias = gl.load(bias_ptr + at_n, mask=at_n < N, other=0.0).to(gl.float32)
        acc = gl.zeros((64, BLOCK_M), gl.int32 if INT8 else gl.float32, _sums(BLOCK_M))
        for _ in range(start, stop):
            mbarrier.wait(full.index(slot), phase)
            acc = _multiply(acc, weights, tokens, slot, R, ROWS, WIDE, PROMOTE)
            mbarrier.arrive(empty.index(slot), count=1)
            slot += 1
            phase = gl.where(slot == STAGES, phase ^ 1, phase)
            slot = gl.where(slot == STAGES, 0, slot)
        ready = stop - start == steps
        if CLUSTER > 1:
            acc = _add_up_in_cluster(acc, first_token % BLOCK_M, COLUMNS, R, ROWS, CLUSTER)
            ready = first_token < BLOCK_M
        elif not ready:
            first, last = tile * steps // per_program, (tile * steps + steps - 1) // per_program
            ticket_ptr = tickets_ptr + (m * tiles_n + tile) * ROWS + R
            ready, acc = _add_up(acc, parts_ptr, ticket_ptr, program, first, last, R, ROWS, max(1, 64 // BLOCK_M))
        if ready:
            out = acc.to(gl.float32) * scale_a[None, :]
            out *= scale_b[:, None]
            if bias_ptr is not None:
                out += bias[:, None]
            at = (at_m.to(gl.int64) * stride_om)[None, :] + at_n[:, None]
            gl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=(at_n < N)[:, None] & (at_m < M)[None, :])
    if CLUSTER > 1:
        everybody()  # others may read from here until now


@gluon.jit(do_not_specialize=["M", "tiles_n", "steps", "per_program", "stride_sa", "stride_sb"])
def shares_kernel(
    b_desc, a_desc, out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, parts_ptr, tickets_ptr,
    M, N, tiles_n, steps, per_program, stride_om, stride_sa, stride_sb,
    PDL: gl.constexpr, EARLY: gl.constexpr, CODES: gl.constexpr, INT8: gl.constexpr, PROMOTE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    CLUSTER: gl.constexpr, CONSUMER: gl.constexpr, PRODUCERS: gl.constexpr,
):  # fmt: skip
    """ROWS groups of warps multiply. CONSUMER: registers of a thread of the second one."""
    ROWS: gl.constexpr = BLOCK_N // 64
    WIDE: gl.constexpr = BLOCK_K // 128
    weights = gl.allocate_shared_memory(CODES, [STAGES * WIDE * ROWS, 64, 128], b_desc.layout)
    tokens = gl.allocate_shared_memory(CODES, [STAGES * WIDE, BLOCK_M, 128], a_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=ROWS)
    fence_async_shared()
    barrier()
    descs, buffers, work = (b_desc, a_desc), (weights, tokens, full, empty), (per_program, steps, tiles_n)
    sizes = (M, N, stride_om, stride_sa, stride_sb)
    ends = (out_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, sizes, parts_ptr, tickets_ptr)
    if ROWS == 1:
        gl.warp_specialize(
            [
                (_consume, (buffers, ends, work, 0, INT8, PROMOTE, BLOCK_M, ROWS, WIDE, STAGES, CLUSTER)),
                (_produce, (descs, buffers, work, PDL, EARLY, BLOCK_M, ROWS, WIDE, STAGES, CLUSTER)),
            ],
            [PRODUCERS], [24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (buffers, ends, work, 0, INT8, PROMOTE, BLOCK_M, ROWS, WIDE, STAGES, CLUSTER)),
                (_consume, (buffers, ends, work, 1, INT8, PROMOTE, BLOCK_M, ROWS, WIDE, STAGES, CLUSTER)),
                (_produce, (descs, buffers, work, PDL, EARLY, BLOCK_M, ROWS, WIDE, STAGES, CLUSTER)),
            ],
            [4, PRODUCERS], [CONSUMER, 24],
        )  # fmt: skip


in_clusters(shares_kernel)
