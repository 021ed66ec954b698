"""A Gluon kernel of scaled_mm_group for many tokens: scales stream with the operands, consumers issue by turns.

One program an SM, in clusters of CLUSTER along M that share the rows of `b` they load (multicast). One barrier a step
tells of 128 rows of `a`, BLOCK_N rows of `b` (TMA), the rows' scales (TMA of a line where scale_a is column-major, else
a copy by each lane of the loading warps) and the blocks' two scales (copies by one lane). No load of a scale is waited
for before the next one is asked for. Two consumers, of 64 rows and all columns: _gluon_ordered_tiles.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from fpk.db import Config
from fpk.device import Device
from fpk.kernels.gemm._cluster import cluster_meet, cluster_rank, cluster_sync, in_clusters, wait
from fpk.kernels.gemm._gluon import TYPES, after_previous, columns_of, descriptor, locate
from fpk.kernels.gemm._gluon_group import block_row
from fpk.kernels.gemm._gluon_ordered_tiles import multiply_192, multiply_256
from fpk.kernels.gemm._launch import dependent
from fpk.kernels.gemm._multicast import ring_at_start
from fpk.kernels.gemm._streams import box_rows, copy_line, copy_two, expect, line, load, tell, warp

NAME = gl.constexpr("group_ordered_kernel")


@gluon.jit
def _fetch(
    sa_ptr, sb_ptr, tiles_m, tiles_n, steps, M, N, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    CLUSTER: gl.constexpr, SA_COLUMNS: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    cluster_meet(CLUSTER)
    SLOT: gl.constexpr = (128 + BLOCK_N) * 128
    SHARE: gl.constexpr = BLOCK_N // CLUSTER
    BOX: gl.constexpr = box_rows(SHARE)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    rank = cluster_rank()
    lanes = gl.arange(0, 128, layout=LINE)
    if not SA_COLUMNS or warp() == 0:
        slot = 0
        phase = 1
        for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
            tile_m, tile_n, _, _, _ = locate(item, tiles_m, tiles_n, steps, GROUP_M, 1)
            row, column = (tile_m * CLUSTER + rank) * 128, tile_n * BLOCK_N
            if BLOCK_N == 192:
                first, second = columns_of(column, 128, 64)
            else:
                first, second = column, column + 128
            sb_0 = sb_ptr + block_row(first, N, offset_n, ROWS) * stride_sbn.to(gl.int64)
            sb_1 = sb_ptr + block_row(second, N, offset_n, ROWS) * stride_sbn.to(gl.int64)
            sa_ptrs = sa_ptr + gl.where(row + lanes < M, row + lanes, 0).to(gl.int64) * stride_sam
            for k in range(steps):
                full = BARS_AT + slot * 8
                wait(BARS_AT + (STAGES + slot) * 8, phase)
                if warp() == 0:
                    expect(full, SLOT + (512 if SA_COLUMNS else 0))
                    load(NAME, 0, slot * SLOT, row, k * 128, full)
                    for i in gl.static_range(SHARE // BOX):
                        at = rank * SHARE + i * BOX
                        load(NAME, 5, slot * SLOT + (128 + at) * 128, column + at, k * 128, full, CLUSTER)
                    if SA_COLUMNS:
                        load(NAME, 15, SA_AT + slot * 512, 0, k * stride_sak + row, full, 1, True)
                    block_k = k * stride_sbk if COLS > 0 else 0
                    copy_two(SB_AT + slot * 256, sb_0 + block_k, sb_1 + block_k, full)
                if not SA_COLUMNS:
                    copy_line(SA_AT + slot * 512 + lanes * 4, sa_ptrs + k * stride_sak.to(gl.int64))
                    tell(full)
                slot += 1
                if slot == STAGES:
                    slot = 0
                    phase ^= 1
    cluster_sync(CLUSTER)


@gluon.jit
def _multiply(
    out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
    WHICH: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, OUT_AT: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr,
    BARS_AT: gl.constexpr,
):  # fmt: skip
    cluster_meet(CLUSTER)
    if BLOCK_N == 256:
        multiply_256(
            out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N, WHICH, CODES, OUT, STAGES, GROUP_M,
            CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT,
        )  # fmt: skip
    else:
        multiply_192(
            out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N, WHICH, CODES, OUT, STAGES, GROUP_M,
            CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT,
        )  # fmt: skip
    tma.store_wait(0)
    cluster_sync(CLUSTER)


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n"])
def group_ordered_kernel(
    a_desc, b_desc, out_desc, sa_desc, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    SA_COLUMNS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, CLUSTER: gl.constexpr, OUT_AT: gl.constexpr, SA_AT: gl.constexpr,
    SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    """Persistent. One pool: the ring, the outputs, the scales, the barriers."""
    gl.static_assert(BLOCK_M == 128 and BLOCK_K == 128)
    after_previous(PDL)
    CHUNKS: gl.constexpr = BARS_AT // 1024
    pool = gl.allocate_shared_memory(gl.int8, [CHUNKS + 1, 8, 128], a_desc.layout)
    barriers = pool.index(CHUNKS)._reinterpret(gl.int64, [128, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers.index(i), count=2 if SA_COLUMNS else 130)
        mbarrier.init(barriers.index(STAGES + i), count=8 * CLUSTER)
    fence_async_shared()
    tiles_m, tiles_n, steps = gl.cdiv(M, 128 * CLUSTER), gl.cdiv(N, BLOCK_N), gl.cdiv(K, 128)
    # the loading warps first, in Triton's own partition: in the others ptxas sees that all threads take one way, and
    # keeps what describes the operands in uniform registers
    gl.warp_specialize(
        [
            (_fetch, (
                sa_ptr, sb_ptr, tiles_m, tiles_n, steps, M, N, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
                ROWS, COLS, BLOCK_N, STAGES, GROUP_M, CLUSTER, SA_COLUMNS, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply, (
                out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
                0, CODES, OUT, BLOCK_N, STAGES, GROUP_M, CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply, (
                out_desc, a_desc, b_desc, pool, bias_ptr, tiles_m, tiles_n, steps, N,
                1, CODES, OUT, BLOCK_N, STAGES, GROUP_M, CLUSTER, OUT_AT, SA_AT, SB_AT, BARS_AT,
            )),
        ],
        [4, 4], [232, 232],
    )  # fmt: skip


in_clusters(group_ordered_kernel, ring_at_start)


def _places(config: Config) -> dict[str, int]:
    """Where in the pool what lies."""
    n, stages = config["BLOCK_N"], config["STAGES"]
    out = stages * (128 + n) * 128
    sa = out + 128 * n * 2
    sb = sa + stages * 512
    bars = -(-(sb + stages * 256) // 1024) * 1024
    return dict(OUT_AT=out, SA_AT=sa, SB_AT=sb, BARS_AT=bars)


def ordered_fits(config: Config, device: Device) -> bool:
    """Is there such a tile, and shared memory for it?"""
    if config["BLOCK_M"] != 128 or config["BLOCK_N"] not in (192, 256) or config["CLUSTER"] not in (1, 2):
        return False
    return _places(config)["BARS_AT"] + 1024 + 256 <= device.shared_limit


def launch_ordered(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    offset_n: int, config: Config, ROWS: int, COLS: int,
) -> None:  # fmt: skip
    """Launch the kernel."""
    (M, K), N, n, cluster = a.shape, b.shape[0], config["BLOCK_N"], config["CLUSTER"]
    sa = line(scale_a, 128)
    clusters = min(device.sm_count // cluster, triton.cdiv(M, 128 * cluster) * triton.cdiv(N, n))
    group_ordered_kernel[(clusters,)](
        descriptor(a, 128, 128), descriptor(b, box_rows(n // cluster), 128), descriptor(out, 64, 64), sa,
        scale_a, scale_b, bias, M, N, K, offset_n, *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], OUT=TYPES[out.dtype], ROWS=ROWS, COLS=COLS, SA_COLUMNS=sa is not None,
        **_places(config), **config, **dependent(device, M),
    )  # fmt: skip
