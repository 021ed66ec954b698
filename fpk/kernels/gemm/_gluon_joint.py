"""A Gluon kernel of scaled_mm_group for few tokens: the programs of a cluster share a tile's K, and add up at once.

One program a tile would leave most multiprocessors idle where there are few tokens, and a second kernel that adds up
takes longer than the sums are worth. Here every program of a cluster multiplies its share of K, leaves its sum in its
shared memory, and then adds up some of the tile's rows over the shared memory of all, in their order.

Two groups of warps multiply every other step each. One thread loads operands and, where scale_a is column-major, its
scales by one barrier a step; `a` comes into registers while the product before is scaled, and no load is waited for.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fpk.db import Config
from fpk.device import Device
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
from fpk.kernels.gemm._streams import (
    codes_of,
    copy_line,
    copy_two,
    expect,
    line,
    load,
    rows_of,
    take,
    tell,
    wait_if,
    warp,
    words_of,
)

NAME = gl.constexpr("group_joint_kernel")


@gluon.jit
def _fetch(
    sa_ptr, sb_ptr, tile_m, tile_n, begin, end, M, N, offset_n, stride_sam, stride_sak, stride_sbn, stride_sbk,
    ROWS: gl.constexpr, COLS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr,
    SA_COLUMNS: gl.constexpr, SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    SLOT: gl.constexpr = (64 + BLOCK_N) * 128
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, 128, layout=LINE) % 64
    if not SA_COLUMNS or warp() == 0:
        sb = sb_ptr + block_row(tile_n * BLOCK_N, N, offset_n, ROWS) * stride_sbn.to(gl.int64)
        rows = tile_m * 64 + lanes
        sa_ptrs = sa_ptr + gl.where(rows < M, rows, 0).to(gl.int64) * stride_sam
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
                copy_line(SA_AT + slot * 256 + lanes * 4, sa_ptrs + k * stride_sak.to(gl.int64))
                tell(full)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
    cluster_sync(CLUSTER)
    cluster_meet(CLUSTER)


@gluon.jit
def _multiply(
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
def group_joint_kernel(
    a_desc, b_desc, sa_desc, sa_ptr, sb_ptr, out_ptr, bias_ptr, M, N, K, offset_n, stride_om, stride_sam, stride_sak,
    stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, SA_COLUMNS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, CLUSTER: gl.constexpr,
    SA_AT: gl.constexpr, SB_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    """A cluster for every tile of 64 tokens; STAGES is even, so that each group of warps has slots of its own."""
    gl.static_assert(BLOCK_M == 64 and BLOCK_K == 128 and STAGES % 2 == 0)
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
            (_fetch, (
                sa_ptr, sb_ptr, tile_m, tile_n, begin, end, M, N, offset_n, stride_sam, stride_sak, stride_sbn,
                stride_sbk, ROWS, COLS, BLOCK_N, STAGES, CLUSTER, SA_COLUMNS, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply, (
                a_desc, b_desc, pool, bias_ptr, out_ptr, tile_m, tile_n, begin, end, rank, M, N, stride_om,
                0, CODES, BLOCK_N, STAGES, CLUSTER, SA_AT, SB_AT, BARS_AT,
            )),
            (_multiply, (
                a_desc, b_desc, pool, bias_ptr, out_ptr, tile_m, tile_n, begin, end, rank, M, N, stride_om,
                1, CODES, BLOCK_N, STAGES, CLUSTER, SA_AT, SB_AT, BARS_AT,
            )),
        ],
        [4, 4], [232, 232],
    )  # fmt: skip


in_clusters(group_joint_kernel, ring_at_start)


def _places(config: Config) -> dict[str, int]:
    """Where in the pool what lies, behind the ring."""
    stages = config["STAGES"]
    sa = stages * (64 + config["BLOCK_N"]) * 128
    sb = sa + stages * 256
    return dict(SA_AT=sa, SB_AT=sb, BARS_AT=-(-(sb + stages * 256) // 1024) * 1024)


def joint_fits(config: Config, device: Device) -> bool:
    """Is there such a tile, and shared memory for it and, in the ring, for two sums of it?"""
    n, stages = config["BLOCK_N"], config["STAGES"]
    if config["BLOCK_M"] != 64 or n not in (64, 128) or stages % 2 != 0 or config["CLUSTER"] not in (1, 2, 4, 8):
        return False
    places = _places(config)
    return 2 * 64 * (n + 8) * 4 <= places["SA_AT"] and places["BARS_AT"] + 1024 + 256 <= device.shared_limit


def launch_joint(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    offset_n: int, config: Config, ROWS: int, COLS: int,
) -> None:  # fmt: skip
    """Launch the kernel."""
    (M, K), N = a.shape, b.shape[0]
    sa = line(scale_a, 64)
    tiles = triton.cdiv(M, 64) * triton.cdiv(N, config["BLOCK_N"])
    group_joint_kernel[(tiles,)](
        descriptor(a, 64, 128), descriptor(b, config["BLOCK_N"], 128), sa, scale_a, scale_b, out, bias, M, N, K,
        offset_n, out.stride(0), *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], ROWS=ROWS, COLS=COLS, SA_COLUMNS=sa is not None, **_places(config), **config,
        **dependent(device, M),
    )  # fmt: skip
