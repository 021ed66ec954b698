"""DRAFT, compiled for sm90 by triton 3.6 but never run: `joint` for up to 64 tokens, its scales by TMA.

The programs of a cluster share a tile's K, as in fpk.kernels.gemm._gluon_joint; what is new is that one thread loads
operands and scales by one barrier, that `a` comes into registers a step ahead, and that no load is waited for.
"""

import torch
import triton
from pieces import codes_of, copy_line, copy_two, expect, line, load, rows_of, take, tell, wait_if, warp, words_of
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fpk.device import of
from fpk.kernels.gemm._cluster import (
    arrive_everywhere,
    cluster_meet,
    cluster_rank,
    cluster_sync,
    in_clusters,
    meet,
    memory_of,
    put_pairs,
    take_fours,
    wait,
)
from fpk.kernels.gemm._gluon import TYPES, after_previous, descriptor
from fpk.kernels.gemm._gluon_group import bias_of, block_row
from fpk.kernels.gemm._launch import dependent
from fpk.kernels.gemm._multicast import ring_at_start

NAME = gl.constexpr("block_share_kernel")


@gluon.jit
def _fetch_share(
    sa_ptr, sb_ptr, tile_m, tile_n, begin, end, M, N, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr,
    SA_COLUMNS: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    SLOT: gl.constexpr = (64 + BLOCK_N) * 128
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, 128, layout=LINE) % 64
    if not SA_COLUMNS or warp() == 0:
        sb = sb_ptr + block_row(tile_n * BLOCK_N, N, offset_n, ROWS) * stride_sbn
        rows = tile_m * 64 + lanes
        sa_ptrs = sa_ptr + gl.where(rows < M, rows, 0) * stride_sam
        slot = 0
        phase = 1
        for k in range(begin, end):
            full = BARS_AT + slot * 8
            wait(BARS_AT + (STAGES + slot) * 8, phase)
            if warp() == 0:
                expect(full, SLOT + (256 if SA_COLUMNS else 0))
                load(NAME, 0, slot * SLOT, tile_m * 64, k * 128, full)
                load(NAME, 5, slot * SLOT + 8192, tile_n * BLOCK_N, k * 128, full)
                if SA_COLUMNS:
                    load(NAME, 10, SA_AT + slot * 256, 0, k * stride_sak + tile_m * 64, full, 1, True)
                scale = sb + (k * stride_sbk if COLS > 0 else 0)
                copy_two(SB_AT + slot * 256, scale, scale, full)
            if not SA_COLUMNS:
                copy_line(SA_AT + slot * 256 + lanes * 4, sa_ptrs + k * stride_sak)
                tell(full)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    cluster_sync(CLUSTER)
    cluster_meet(CLUSTER)


@gluon.jit
def _multiply_share(
    a_desc, b_desc, pool, bias_ptr, out_ptr, tile_m, tile_n, begin, end, rank, M, N, stride_om,
    WHICH: gl.constexpr, CODES: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    """Every other step of this program's share, then some rows of the tile over all programs' sums."""
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    SLOT: gl.constexpr = 64 + BLOCK_N
    offs_l = gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    offs_r = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, L))
    sa_at = SA_AT + offs_l * 4
    acc = gl.zeros((64, BLOCK_N), gl.float32, L)
    slot = WHICH
    phase = 0
    mine = (end - begin - WHICH + 1) // 2
    wait_if(BARS_AT + slot * 8, phase, mine)
    sa, sb = take(sa_at + slot * 256), take(SB_AT + slot * 256)
    words = words_of(pool, slot, 0, a_desc, SLOT, L)
    for _ in range(mine):
        left = codes_of(words, CODES, L)
        right = rows_of(pool, slot, 64, BLOCK_N, b_desc, CODES, SLOT).permute((1, 0))
        token = warpgroup_mma(left, right, gl.zeros((64, BLOCK_N), gl.float32, L), use_acc=False, is_async=True)
        factor = (sa * sb)[:, None]
        empty = BARS_AT + (STAGES + slot) * 8
        slot += 2
        if slot >= STAGES:
            slot = WHICH
            phase ^= 1
        mine -= 1
        product = warpgroup_mma_wait(0, deps=[token])
        arrive_everywhere(empty, 1, rank)
        wait_if(BARS_AT + slot * 8, phase, mine)
        sa, sb = take(sa_at + slot * 256), take(SB_AT + slot * 256)
        words = words_of(pool, slot, 0, a_desc, SLOT, L)
        acc += product * factor
    meet()
    # the sum lies where the operands were; padding keeps a warp's pairs in different banks
    PITCH: gl.constexpr = BLOCK_N + 8
    put_pairs(WHICH * (64 * PITCH * 4) + (offs_l[:, None] * PITCH + offs_r[None, :]) * 4, acc)
    cluster_sync(CLUSTER)
    TOKENS: gl.constexpr = 64 // CLUSTER // 2
    ACROSS: gl.constexpr = min(32, BLOCK_N // 4)
    B: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    tokens = rank * (64 // CLUSTER) + WHICH * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, B))
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, B))
    at = (tokens[:, None] * PITCH + columns[None, :]) * 4
    total = gl.zeros((TOKENS, BLOCK_N), gl.float32, B)
    for part in gl.static_range(CLUSTER):
        there = at + memory_of(part)
        total += take_fours(there)
        total += take_fours(there + 64 * PITCH * 4)
    offs_n = tile_n * BLOCK_N + columns
    if bias_ptr is not None:
        total += bias_of(bias_ptr, offs_n, N)[None, :]
    rows = tile_m * 64 + tokens
    ptrs = out_ptr + rows.to(gl.int64)[:, None] * stride_om + offs_n[None, :]
    gl.store(ptrs, total.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (offs_n < N)[None, :])
    cluster_meet(CLUSTER)


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n"])
def block_share_kernel(
    a_desc, b_desc, sa_desc, sa_ptr, sb_ptr, out_ptr, bias_ptr, M, N, K, offset_n, stride_om, stride_sam, stride_sak,
    stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, SA_COLUMNS: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr,
    BARS_AT: gl.constexpr,
):  # fmt: skip
    """A cluster for every tile of 64 tokens; STAGES is even."""
    CHUNKS: gl.constexpr = BARS_AT // 1024
    pool = gl.allocate_shared_memory(gl.int8, [CHUNKS + 1, 8, 128], a_desc.layout)
    barriers = pool.index(CHUNKS)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=2 if SA_COLUMNS else 130)
        mbarrier.init(barriers.index(STAGES + i), count=4)
    fence_async_shared()
    after_previous(PDL)
    tiles_m, steps = gl.cdiv(M, 64), gl.cdiv(K, 128)
    tile = gl.program_id(0) // CLUSTER
    rank = cluster_rank()
    tile_m, tile_n = tile % tiles_m, tile // tiles_m
    each = gl.cdiv(steps, CLUSTER)
    begin = min(rank * each, steps)
    end = min(begin + each, steps)
    gl.warp_specialize(
        [
            (_fetch_share, (
                sa_ptr, sb_ptr, tile_m, tile_n, begin, end, M, N, offset_n, stride_sam, stride_sak, stride_sbn,
                stride_sbk, ROWS, COLS, BLOCK_N, STAGES, CLUSTER, SA_COLUMNS, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply_share, (
                a_desc, b_desc, pool, bias_ptr, out_ptr, tile_m, tile_n, begin, end, rank, M, N, stride_om,
                0, CODES, BLOCK_N, STAGES, CLUSTER, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply_share, (
                a_desc, b_desc, pool, bias_ptr, out_ptr, tile_m, tile_n, begin, end, rank, M, N, stride_om,
                1, CODES, BLOCK_N, STAGES, CLUSTER, SA_AT, SB_AT, BARS_AT,
            )),
        ],
        [4, 4], [232, 232],
    )  # fmt: skip


in_clusters(block_share_kernel, ring_at_start)


def share(
    a, b, scale_a, scale_b, group=128, block_rows=128, block_cols=128, bias=None, offset_n=0, offset_k=0,
    out_dtype=torch.bfloat16, fast_accum=False, *, config,
):  # fmt: skip
    """scaled_mm_group like lean.lean; config: BLOCK_N (64 or 128), STAGES (even), CLUSTER (1, 2, 4 or 8)."""
    (M, K), N = a.shape, b.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    config = dict(config)
    n, stages = config["BLOCK_N"], config["STAGES"]
    sa = line(scale_a, 64)
    sa_at = stages * (64 + n) * 128
    sb_at = sa_at + stages * 256
    bars = -(-(sb_at + stages * 256) // 1024) * 1024
    assert stages % 2 == 0 and 2 * 64 * (n + 8) * 4 <= sa_at and bars + 1280 <= of(a.device).shared_limit
    tiles = triton.cdiv(M, 64) * triton.cdiv(N, n)
    block_share_kernel[(tiles,)](
        descriptor(a, 64, 128), descriptor(b, n, 128), sa, scale_a, scale_b, out, bias, M, N, K,
        offset_n, out.stride(0), *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], ROWS=block_rows, COLS=block_cols, SA_COLUMNS=sa is not None, SA_AT=sa_at, SB_AT=sb_at,
        BARS_AT=bars, num_warps=4, **config, **dependent(of(a.device), M),
    )  # fmt: skip
    return out


def config(n=128, stages=8, cluster=2):
    return dict(BLOCK_N=n, STAGES=stages, CLUSTER=cluster)
