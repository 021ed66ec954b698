"""DRAFT, compiled for sm90 by triton 3.6 but never run: block-scaled FP8 products whose scales come by TMA.

out[m, n] = sum_k a[m, k] sa[m, k / 128] b[n, k] sb[n / 128, k / 128]; a, b fp8, sa, sb fp32, out bf16 or fp16.

One program an SM, in clusters of CLUSTER along M that share the rows of `b` they load (multicast). One barrier a step
tells of BLOCK_M rows of `a`, BLOCK_N rows of `b` (TMA), the rows' scales (TMA of a line where scale_a is column-major,
else a copy by each lane of the loading warps) and the blocks' two scales (copies by one lane). Two consumers.

DESIGN:
- "shared": 64 rows and 256 or 192 columns a consumer; `a` from shared memory, products of 64 x 128, each scaled before
  the next is issued. The unit works for the other consumer meanwhile. (What DeepGEMM does, with the tile turned by 90
  degrees; the next step's scales are fetched while the last product is scaled.)
- "registers": the same with the step's rows of `a` fetched into 16 registers once instead of read by both products.
- "ahead": and fetched, as the scales are, for the next step while the last product of this one is scaled.
- "parts": "ahead" in products of 64 x 64, one to three of them in flight at once, each scaled while the next ones run.
  With BLOCK_M = 128 a consumer has 64 rows and all columns (128 or 192), with 64 all rows and half of the columns (128
  or 256): for few tokens, where clusters of 2 or 4 cover all tokens, so that each weight leaves L2 once a cluster.
ORDER: consumers issue by turns (two named barriers), so that products of both do not run mixed and end together.
"""

import torch
import triton
from blocks import multiply_blocks
from parts import multiply_parts
from pieces import box_rows, copy_line, copy_two, expect, line, load, tell, warp
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fpk.device import of
from fpk.kernels.gemm._cluster import cluster_meet, cluster_rank, cluster_sync, in_clusters, wait
from fpk.kernels.gemm._gluon import TYPES, after_previous, columns_of, descriptor, locate
from fpk.kernels.gemm._gluon_group import block_row
from fpk.kernels.gemm._launch import dependent
from fpk.kernels.gemm._multicast import ring_at_start

NAME = gl.constexpr("block_lean_kernel")


@gluon.jit
def fetch(
    sa_ptr, sb_ptr, tiles_m, tiles_n, steps, M, N, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, SA_COLUMNS: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr,
    BARS_AT: gl.constexpr,
):  # fmt: skip
    cluster_meet(CLUSTER)
    SLOT: gl.constexpr = (BLOCK_M + BLOCK_N) * 128
    SHARE: gl.constexpr = BLOCK_N // CLUSTER
    BOX: gl.constexpr = box_rows(SHARE)
    SA: gl.constexpr = BLOCK_M * 4
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rank = cluster_rank()
    lanes = gl.arange(0, 128, layout=LINE) % BLOCK_M
    if not SA_COLUMNS or warp() == 0:
        slot = 0
        phase = 1
        for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
            tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
            row, column = (tile_m * CLUSTER + rank) * BLOCK_M, tile_n * BLOCK_N
            if BLOCK_N == 192:
                first, second = columns_of(column, 128, 64)
            else:
                first, second = column, column + 128
            sb_0 = sb_ptr + block_row(first, N, offset_n, ROWS) * stride_sbn
            sb_1 = sb_ptr + block_row(second, N, offset_n, ROWS) * stride_sbn
            sa_ptrs = sa_ptr + gl.where(row + lanes < M, row + lanes, 0) * stride_sam
            for k in range(steps):
                full = BARS_AT + slot * 8
                wait(BARS_AT + (STAGES + slot) * 8, phase)
                if warp() == 0:
                    expect(full, SLOT + (SA if SA_COLUMNS else 0))
                    load(NAME, 0, slot * SLOT, row, k * 128, full)
                    for i in gl.static_range(SHARE // BOX):
                        at = rank * SHARE + i * BOX
                        load(NAME, 5, slot * SLOT + (BLOCK_M + at) * 128, column + at, k * 128, full, CLUSTER)
                    if SA_COLUMNS:
                        load(NAME, 15, SA_AT + slot * SA, 0, k * stride_sak + row, full, 1, True)
                    block_k = k * stride_sbk if COLS > 0 else 0
                    copy_two(SB_AT + slot * 256, sb_0 + block_k, sb_1 + block_k, full)
                if not SA_COLUMNS:
                    copy_line(SA_AT + slot * SA + lanes * 4, sa_ptrs + k * stride_sak)
                    tell(full)
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
    cluster_sync(CLUSTER)


@gluon.jit
def _multiply(
    out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, OUT_AT: gl.constexpr, SA_AT: gl.constexpr,
    SB_AT: gl.constexpr, BARS_AT: gl.constexpr, DESIGN: gl.constexpr, ORDER: gl.constexpr,
):  # fmt: skip
    cluster_meet(CLUSTER)
    if DESIGN == "parts":
        multiply_parts(
            out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N, WHICH, CODES, OUT, BLOCK_M, BLOCK_N,
            STAGES, GROUP_M, CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT, ORDER,
        )  # fmt: skip
    else:
        multiply_blocks(
            out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N, WHICH, CODES, OUT, BLOCK_N,
            STAGES, GROUP_M, CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT, DESIGN, ORDER,
        )  # fmt: skip
    tma.store_wait(0)
    cluster_sync(CLUSTER)


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n"])
def block_lean_kernel(
    a_desc, b_desc, out_desc, sa_desc, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    SA_COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, DESIGN: gl.constexpr, ORDER: gl.constexpr, OUT_AT: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent. One pool: the ring, the outputs, the scales, the barriers."""
    after_previous(PDL)
    CHUNKS: gl.constexpr = BARS_AT // 1024
    pool = gl.allocate_shared_memory(gl.int8, [CHUNKS + 1, 8, 128], a_desc.layout)
    barriers = pool.index(CHUNKS)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=2 if SA_COLUMNS else 130)
        mbarrier.init(barriers.index(STAGES + i), count=8 * CLUSTER)
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, BLOCK_M * CLUSTER), gl.cdiv(N, BLOCK_N), gl.cdiv(K, 128)
    # the loading warps first, in Triton's own partition: in the others ptxas sees that all threads take one way, and
    # keeps what describes the operands in uniform registers
    gl.warp_specialize(
        [
            (fetch, (
                sa_ptr, sb_ptr, tiles_m, tiles_n, steps, M, N, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
                ROWS, COLS, BLOCK_M, BLOCK_N, STAGES, GROUP_M, CLUSTER, SA_COLUMNS, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply, (
                out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
                0, CODES, OUT, BLOCK_M, BLOCK_N, STAGES, GROUP_M, CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT,
                DESIGN, ORDER,
            )),
            (_multiply, (
                out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
                1, CODES, OUT, BLOCK_M, BLOCK_N, STAGES, GROUP_M, CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT,
                DESIGN, ORDER,
            )),
        ],
        [4, 4], [REGISTERS, REGISTERS],
    )  # fmt: skip


in_clusters(block_lean_kernel, ring_at_start)


def places(m: int, n: int, stages: int) -> dict[str, int]:
    """Where in the pool what lies."""
    out = stages * (m + n) * 128
    sa = out + m * n * 2
    sb = sa + stages * m * 4
    bars = -(-(sb + stages * 256) // 1024) * 1024
    return dict(OUT_AT=out, SA_AT=sa, SB_AT=sb, BARS_AT=bars)


def fits(config: dict, limit: int = 232448) -> bool:
    """Is there shared memory for this?"""
    return places(config["BLOCK_M"], config["BLOCK_N"], config["STAGES"])["BARS_AT"] + 1024 + 256 <= limit


def lean(
    a, b, scale_a, scale_b, group=128, block_rows=128, block_cols=128, bias=None, offset_n=0, offset_k=0,
    out_dtype=torch.bfloat16, fast_accum=False, *, config,
):  # fmt: skip
    """scaled_mm_group for fp8, fp32 scales, group 128, blocks of 128 columns and a multiple of 128 rows."""
    (M, K), N = a.shape, b.shape[0]
    assert group == 128 and block_cols in (128, -1) and offset_k == 0 and out_dtype.itemsize == 2 and N % 8 == 0
    assert block_rows < 0 or (block_rows % 128 == 0 and offset_n % 128 == 0)
    device = of(a.device)
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    config = dict(config)
    m, n, cluster, stages = config["BLOCK_M"], config["BLOCK_N"], config["CLUSTER"], config["STAGES"]
    sa = line(scale_a, m)
    assert fits(config, device.shared_limit), config
    clusters = triton.cdiv(M, m * cluster) * triton.cdiv(N, n)
    # of 16 or 18 multiprocessors that may form a cluster, 18 leave two over where clusters have four: a 33rd would wait
    at_once = device.sm_count // cluster - (cluster > 2)
    block_lean_kernel[(min(at_once, clusters),)](
        descriptor(a, m, 128), descriptor(b, box_rows(n // cluster), 128), descriptor(out, 64, 64), sa,
        scale_a, scale_b, bias, M, N, K, offset_n, *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], OUT=TYPES[out.dtype], ROWS=block_rows, COLS=block_cols, SA_COLUMNS=sa is not None,
        REGISTERS=232, num_warps=4, **places(m, n, stages), **config, **dependent(device, M),
    )  # fmt: skip
    return out


def config(design, n, stages, m=128, cluster=2, group=8, order=False):
    return dict(BLOCK_M=m, BLOCK_N=n, STAGES=stages, DESIGN=design, ORDER=order, GROUP_M=group, CLUSTER=cluster)
