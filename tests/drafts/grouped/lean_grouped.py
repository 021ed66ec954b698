"""DRAFT, compiled for sm90 by triton 3.6 but never run: grouped block-scaled FP8 products without waits for scales.

out[r, n] = sum_k a[r, k] sa[r, k / 128] b[e, n, k] sb[e, n / 128, k / 128] of the expert e that has row r.

A tile is 128 rows of one expert by 256 columns. One program an SM; the loading warps fill a ring of STAGES slots (rows,
weights, the rows' scales, two scales of weights) by one barrier a step, two consumers have 64 rows each and both blocks
of columns (multiply_grouped.py). Nothing that is loaded goes through the loading warps' registers:

- rows in order come by TMA, rows to gather 16 bytes a lane by cp.async (TMA of sm90 reads only boxes). Consumers read
  rows into registers, so that copies of both kinds are visible to them by the barrier alone, and gathering costs the
  loading warps some instructions and nobody a wait.
- scales come by cp.async: a lane for each row, one for both weights. (TMA wants multiples of 16 bytes.)

CLUSTER programs have neighbouring tiles ALONG "columns" and load the rows for each other, or ALONG "rows" and load the
weights for each other (multicast). What a box reads behind an expert's last row are rows of others: each row has its
own sums, and a consumer's rows leave by TMA only where all 64 are the expert's. AHEAD, BOXES: multiply_grouped.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "block"))

import torch
import triton
from multiply_grouped import multiply_grouped
from pieces import copy_line, copy_two, expect, load, tell, warp
from row_copies import copy_rows
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fpk.device import of
from fpk.kernels._tile import early_start
from fpk.kernels.gemm._cluster import cluster_meet, cluster_rank, cluster_sync, in_clusters, wait
from fpk.kernels.gemm._gluon import TYPES, after_previous, descriptor
from fpk.kernels.gemm._multicast import ring_at_start
from fpk.kernels.moe._gluon_grouped import _tile
from fpk.kernels.moe._gluon_parts import schedule_kernel
from fpk.kernels.moe._grouped import expert_bins, fits_row_descriptor, fits_weight_descriptor

NAME = gl.constexpr("grouped_lean_kernel")


@gluon.jit
def fetch_grouped(
    table_ptr, a_ptr, sa_ptr, sb_ptr, gather_ptr, tiles_m, tiles_n, steps, N, K, top_k, stride_am, stride_sam,
    stride_sak, stride_sbe, stride_sbn,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, ALONG: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    cluster_meet(CLUSTER)
    SLOT: gl.constexpr = 384 * 128
    SHARE_A: gl.constexpr = 128 // CLUSTER if ALONG == "columns" else 128
    SHARE_B: gl.constexpr = 256 // CLUSTER if ALONG == "rows" else 256
    GATHER: gl.constexpr = gather_ptr is not None
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    CHUNKS: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    rank = cluster_rank()
    along_rows = rank if ALONG == "rows" else 0
    along_columns = rank if ALONG == "columns" else 0
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
        block = (next_n * (CLUSTER if ALONG == "columns" else 1) + along_columns) * 2
        next_n, next_expert, next_first, next_end = _tile(table_ptr, item + all_of, tiles_m, tiles_n, GROUP_M)
        row = first + along_rows * 128
        weight = expert * N + block * 128
        sb_0 = sb_ptr + expert * stride_sbe + min(block, blocks - 1) * stride_sbn
        sb_1 = sb_ptr + expert * stride_sbe + min(block + 1, blocks - 1) * stride_sbn
        source = gl.where(row + lanes < end, row + lanes, first)
        if GATHER:
            source = gl.maximum(gl.load(gather_ptr + source), 0) // top_k
        sa_ptrs = sa_ptr + source * stride_sam
        if GATHER:
            rows = gl.arange(0, 128, layout=gl.SliceLayout(1, CHUNKS))
            chunks = gl.arange(0, 8, layout=gl.SliceLayout(0, CHUNKS))[None, :]
            places = gl.where(row + rows < end, row + rows, first)
            source_rows = gl.maximum(gl.load(gather_ptr + places), 0) // top_k
            offs = source_rows[:, None] * stride_am + chunks * 16
        for k in range(steps):
            full = BARS_AT + slot * 8
            wait(BARS_AT + (STAGES + slot) * 8, phase)
            if warp() == 0:
                expect(full, 256 * 128 + (0 if GATHER else 128 * 128))
                for i in gl.static_range(SHARE_B // 128):
                    at = along_rows * SHARE_B + i * 128
                    to = slot * SLOT + (128 + at) * 128
                    load(NAME, 0, to, weight + at, k * 128, full, CLUSTER if ALONG == "rows" else 1)
                if not GATHER:
                    at = along_columns * SHARE_A
                    load(NAME, 10, slot * SLOT + at * 128, row + at, k * 128, full, 128 // SHARE_A)
                copy_two(SB_AT + slot * 256, sb_0 + k, sb_1 + k, full)
            copy_line(SA_AT + slot * 512 + lanes * 4, sa_ptrs + k * stride_sak)
            if GATHER:
                bytes = gl.where(k * 128 + chunks * 16 < K, 16, 0)
                copy_rows(slot * SLOT, rows[:, None], chunks, a_ptr + k * 128 + offs, bytes)
            tell(full)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    cluster_sync(CLUSTER)


@gluon.jit(do_not_specialize=["R", "E", "top_k", "stride_sam", "stride_sak", "stride_sbe", "stride_sbn"])
def grouped_lean_kernel(
    b_desc, out_desc, a_desc, offs_ptr, table_ptr, a_ptr, sa_ptr, sb_ptr, gather_ptr, out_ptr,
    R, E, N, K, top_k, stride_am, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_om,
    PDL: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, ALONG: gl.constexpr, AHEAD: gl.constexpr, BOXES: gl.constexpr,
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
    TALL: gl.constexpr = 128 * CLUSTER if ALONG == "rows" else 128
    begin_lost = min(gl.load(offs_ptr + E - 1), R)
    tiles_m = gl.load(table_ptr) - gl.cdiv(R - begin_lost, TALL)
    tiles_n, steps = gl.cdiv(N, 256 * CLUSTER if ALONG == "columns" else 256), gl.cdiv(K, 128)
    # the loading warps first, in Triton's own partition: see block/lean.py
    gl.warp_specialize(
        [
            (fetch_grouped, (
                table_ptr, a_ptr, sa_ptr, sb_ptr, gather_ptr, tiles_m, tiles_n, steps, N, K, top_k, stride_am,
                stride_sam, stride_sak, stride_sbe, stride_sbn, STAGES, GROUP_M, CLUSTER, ALONG, SA_AT, SB_AT, BARS_AT,
            )),
            (multiply_grouped, (
                a_desc, b_desc, out_desc, pool, table_ptr, out_ptr, tiles_m, tiles_n, steps, begin_lost, R, N,
                stride_om, 0, CODES, OUT, STAGES, GROUP_M, CLUSTER, ALONG, AHEAD, BOXES, OUT_AT, SA_AT, SB_AT, BARS_AT,
            )),
            (multiply_grouped, (
                a_desc, b_desc, out_desc, pool, table_ptr, out_ptr, tiles_m, tiles_n, steps, begin_lost, R, N,
                stride_om, 1, CODES, OUT, STAGES, GROUP_M, CLUSTER, ALONG, AHEAD, BOXES, OUT_AT, SA_AT, SB_AT, BARS_AT,
            )),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip


in_clusters(grouped_lean_kernel, ring_at_start)


def places(stages: int, boxes: int) -> dict[str, int]:
    """Where in the pool what lies."""
    out = stages * 384 * 128
    sa = out + 2 * boxes * 8192
    sb = sa + stages * 512
    return dict(OUT_AT=out, SA_AT=sa, SB_AT=sb, BARS_AT=-(-(sb + stages * 256) // 1024) * 1024)


def grouped(
    a, b, scale_a, scale_b, offs, group=128, block_rows=128, block_cols=128, bias=None, out_dtype=torch.bfloat16,
    fast_accum=False, gather=None, top_k=1, *, config,
):  # fmt: skip
    """grouped_scaled_mm_group for fp8, fp32 scales, groups and blocks of 128, without bias."""
    (T, K), (E, N) = a.shape, b.shape[:2]
    R, device = T * top_k, of(a.device)
    assert (group, block_rows, block_cols, bias) == (128, 128, 128, None) and out_dtype.itemsize == 2 and N % 8 == 0
    assert fits_row_descriptor(a) and fits_weight_descriptor(b)
    assert scale_b.stride(2) == 1
    assert T * max(a.stride(0), scale_a.stride(0)) < 2**31 and scale_b.numel() < 2**31  # offsets are int32
    cluster, along = config["CLUSTER"], config["ALONG"]
    at = places(config["STAGES"], config["BOXES"])
    assert at["BARS_AT"] + 1024 + 256 <= device.shared_limit
    assert gather is None or cluster == 1 or along == "rows"  # copies come to the program that asks for them
    out = torch.empty((R, N), dtype=out_dtype, device=a.device)
    tall, wide = (128 * cluster, 256) if along == "rows" else (128, 256 * cluster)
    most = (R + min(E + 1, R) * (tall - 1)) // tall
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=a.device)
    early = early_start(device)
    schedule_kernel[(triton.cdiv(most, 32),)](
        offs, table, R, E, BLOCK_E=expert_bins(E), BLOCK_M=tall, BLOCK=32, num_warps=4, **early
    )
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    shared = cluster if along == "columns" else 1
    grouped_lean_kernel[(min(device.sm_count // cluster, most * triton.cdiv(N, wide)),)](
        descriptor(matrix, 128, 128), descriptor(out, 64, 64), descriptor(a, 128 // shared, 128), offs,
        table, a, scale_a, scale_b, gather, out, R, E, N, K, top_k, a.stride(0), *scale_a.stride(),
        *scale_b.stride()[:2], out.stride(0), CODES=TYPES[a.dtype], OUT=TYPES[out.dtype], REGISTERS=232,
        num_warps=4, **at, **config, **early,
    )  # fmt: skip
    return out


def config(ahead=True, stages=3, boxes=4, group=8, cluster=1, along="columns"):
    return dict(AHEAD=ahead, STAGES=stages, BOXES=boxes, GROUP_M=group, CLUSTER=cluster, ALONG=along)
