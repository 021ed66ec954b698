"""A Gluon kernel of scaled_mm_group for few tokens: the programs of a cluster share a tile's K, and add up at once.

One program a tile would leave most multiprocessors idle where there are few tokens, and a second kernel that adds up
takes longer than the sums are worth. Here every program of a cluster multiplies its share of K, leaves its sum in its
shared memory, and then adds up some of the tile's rows over the shared memory of all, in their order.

`left` is the operand on the matrix instruction's 64-row side: the activations, or the weights (SWAP). With 128 rows of
it each multiplying group of warps has 64 (HALVES), with 64 the groups take turns at the steps of K.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fpk.db import Config
from fpk.device import Device
from fpk.kernels.gemm._cluster import (
    arrive_everywhere,
    cluster_meet,
    cluster_rank,
    cluster_sync,
    expect,
    in_clusters,
    init_ring,
    load,
    meet,
    memory_of,
    place,
    put_ones,
    put_pairs,
    take_fours,
    wait,
)
from fpk.kernels.gemm._gluon import TYPES, after_previous, descriptor
from fpk.kernels.gemm._gluon_group import bias_of, block_row, scale_b, scales_a
from fpk.kernels.gemm._launch import dependent

NAME = gl.constexpr("group_joint_kernel")


@gluon.jit
def _fetch(
    tile_m, tile_n, begin, end, mate, first_mate,
    SWAP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SHARE: gl.constexpr,
    SPLIT_K: gl.constexpr,
    LEFT_AT: gl.constexpr, RIGHT_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    if SHARE > 1:
        cluster_meet(SHARE * SPLIT_K)
    LEFT: gl.constexpr = BLOCK_N if SWAP else BLOCK_M
    RIGHT: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    for k in range(begin, end):
        turn = k - begin
        slot = turn % STAGES
        full = BARS_AT + slot * 8
        wait(BARS_AT + (STAGES + slot) * 8, ((turn // STAGES) & 1) ^ 1)
        expect(full, (LEFT + RIGHT) * 128)
        load(NAME, 0, LEFT_AT + slot * (LEFT * 128), (tile_n if SWAP else tile_m) * LEFT, k * 128, full)
        piece = mate * (RIGHT // SHARE)
        load(
            NAME, 5, RIGHT_AT + slot * (RIGHT * 128) + piece * 128, (tile_m if SWAP else tile_n) * RIGHT + piece,
            k * 128, full, SHARE > 1, ((1 << SHARE) - 1) << first_mate,
        )  # fmt: skip
    cluster_sync(SHARE * SPLIT_K)
    cluster_meet(SHARE * SPLIT_K)


@gluon.jit
def _multiply(
    left_bufs, right_bufs, bars, sa_ptr, sb_ptr, bias_ptr, out_ptr, tile_m, tile_n, begin, end, mate, first_mate, M, N,
    offset_n, offset_k, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
    WHICH: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, SWAP: gl.constexpr,
    HALVES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SPLIT_K: gl.constexpr,
    SHARE: gl.constexpr, SUMS_AT: gl.constexpr, BARS_AT: gl.constexpr,
):  # fmt: skip
    if SHARE > 1:
        cluster_meet(SHARE * SPLIT_K)
    R: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, R, 32])
    AXIS_M: gl.constexpr = 0 if SWAP else 1
    FIRST: gl.constexpr = WHICH * 64 if HALVES else 0  # row of `left`
    EACH: gl.constexpr = 1 if HALVES else 2
    offs_l = FIRST + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    offs_r = gl.arange(0, R, layout=gl.SliceLayout(0, L))
    if SWAP:
        offs_m = tile_m * BLOCK_M + offs_r
        first_n = tile_n * BLOCK_N + FIRST
    else:
        offs_m = tile_m * BLOCK_M + offs_l
        first_n = tile_n * BLOCK_N
    mask_m = offs_m < M
    sa_rows = sa_ptr + offs_m.to(gl.int64) * stride_sam
    sb_row = sb_ptr + block_row(first_n, N, offset_n, ROWS) * stride_sbn.to(gl.int64)
    acc = gl.zeros((64, R), gl.float32, L)
    first = begin + (0 if HALVES else WHICH)
    sa = scales_a(sa_rows, mask_m, first, end, stride_sak, GROUP, 128)
    sb = scale_b(sb_row, first, end, offset_k, stride_sbk, COLS, 128)
    next_sa = scales_a(sa_rows, mask_m, first + EACH, end, stride_sak, GROUP, 128)
    next_sb = scale_b(sb_row, first + EACH, end, offset_k, stride_sbk, COLS, 128)
    for k in range(first, end, EACH):
        turn = k - begin
        slot = turn % STAGES
        wait(BARS_AT + slot * 8, (turn // STAGES) & 1)
        token = warpgroup_mma(
            left_bufs.index(slot * (2 if HALVES else 1) + (WHICH if HALVES else 0)),
            right_bufs.index(slot).permute((1, 0)), gl.zeros((64, R), gl.float32, L), use_acc=False, is_async=True,
        )  # fmt: skip
        factor = sa * sb
        sa, sb = next_sa, next_sb
        next_sa = scales_a(sa_rows, mask_m, k + 2 * EACH, end, stride_sak, GROUP, 128)
        next_sb = scale_b(sb_row, k + 2 * EACH, end, offset_k, stride_sbk, COLS, 128)
        product = warpgroup_mma_wait(0, deps=[token])
        arrive_everywhere(BARS_AT + (STAGES + slot) * 8, SHARE, first_mate)
        acc += product * gl.expand_dims(factor, AXIS_M)
    meet()
    # the sum lies where the operands were, as tokens x weights; padding keeps a warp's pairs in different banks
    PITCH: gl.constexpr = BLOCK_N + 8
    here: gl.constexpr = SUMS_AT if HALVES else SUMS_AT + WHICH * BLOCK_M * PITCH * 4
    if SWAP:
        at = here + (offs_r[None, :] * PITCH + offs_l[:, None]) * 4
        put_ones(at, acc)
    else:
        at = here + (offs_l[:, None] * PITCH + offs_r[None, :]) * 4
        put_pairs(at, acc)
    cluster_sync(SHARE * SPLIT_K)
    # this program finishes BLOCK_M / SPLIT_K tokens, this group of warps half of them or half of their columns
    TOKENS: gl.constexpr = BLOCK_M // SPLIT_K if SWAP and HALVES else BLOCK_M // SPLIT_K // 2
    COLUMNS: gl.constexpr = 64 if SWAP and HALVES else BLOCK_N
    ACROSS: gl.constexpr = min(32, COLUMNS // 4)
    B: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    token_0 = first_mate // SHARE * (BLOCK_M // SPLIT_K) + (0 if SWAP and HALVES else WHICH * TOKENS)
    tokens = token_0 + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, B))
    columns = (WHICH * 64 if SWAP and HALVES else 0) + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, B))
    at = SUMS_AT + (tokens[:, None] * PITCH + columns[None, :]) * 4
    total = gl.zeros((TOKENS, COLUMNS), gl.float32, B)
    for part in gl.static_range(SPLIT_K):
        there = at + memory_of(part * SHARE + mate)
        total += take_fours(there)
        if not HALVES:
            total += take_fours(there + BLOCK_M * PITCH * 4)
    offs_n = tile_n * BLOCK_N + columns
    if bias_ptr is not None:
        total += bias_of(bias_ptr, offs_n, N)[None, :]
    rows = tile_m * BLOCK_M + tokens
    ptrs = out_ptr + rows.to(gl.int64)[:, None] * stride_om + offs_n[None, :]
    gl.store(ptrs, total.to(out_ptr.dtype.element_ty), mask=(rows < M)[:, None] & (offs_n < N)[None, :])
    cluster_meet(SHARE * SPLIT_K)
    if WHICH == 0:  # a use of `bars` behind the work, so that nothing is laid over them
        mbarrier.invalidate(bars.index(0))


@gluon.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n", "offset_k"])
def group_joint_kernel(
    left_desc, right_desc, out_ptr, sa_ptr, sb_ptr, bias_ptr,
    M, N, K, offset_n, offset_k, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
    PDL: gl.constexpr, CODES: gl.constexpr, GROUP: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
    SWAP: gl.constexpr, HALVES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, CLUSTER: gl.constexpr, SPLIT_K: gl.constexpr, REGISTERS: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """A cluster for every CLUSTER / SPLIT_K tiles of the same columns."""
    gl.static_assert(BLOCK_K == 128)
    SHARE: gl.constexpr = CLUSTER // SPLIT_K
    LEFT: gl.constexpr = BLOCK_N if SWAP else BLOCK_M
    RIGHT: gl.constexpr = BLOCK_M if SWAP else BLOCK_N
    PITCH: gl.constexpr = BLOCK_N + 8
    SUMS: gl.constexpr = (1 if HALVES else 2) * BLOCK_M * PITCH * 4
    # the sums may lie over the operands, which are used up by then
    LEFT_AT: gl.constexpr = place(0, STAGES * LEFT * 128, STAGES * RIGHT * 128)
    RIGHT_AT: gl.constexpr = place(1, STAGES * LEFT * 128, STAGES * RIGHT * 128)
    BARS_AT: gl.constexpr = STAGES * (LEFT + RIGHT) * 128
    gl.static_assert(SUMS <= BARS_AT)
    left_bufs = gl.allocate_shared_memory(CODES, [STAGES * LEFT // 64, 64, 128], left_desc.layout)
    right_bufs = gl.allocate_shared_memory(CODES, [STAGES, RIGHT, 128], right_desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [64, 1], mbarrier.MBarrierLayout())
    init_ring(BARS_AT, STAGES, 1, (8 if HALVES else 4) * SHARE)
    after_previous(PDL)
    tiles_m, steps = gl.cdiv(M, BLOCK_M * SHARE), gl.cdiv(K, 128)
    tile = gl.program_id(0) // CLUSTER
    rank = cluster_rank()
    mate = rank % SHARE
    first_mate = rank - mate
    tile_m, tile_n = tile % tiles_m * SHARE + mate, tile // tiles_m
    per_part = gl.cdiv(steps, SPLIT_K)
    begin = min(first_mate // SHARE * per_part, steps)
    end = min(begin + per_part, steps)
    gl.warp_specialize(
        [
            (_multiply, (
                left_bufs, right_bufs, bars, sa_ptr, sb_ptr, bias_ptr, out_ptr, tile_m, tile_n, begin, end, mate,
                first_mate, M, N, offset_n, offset_k, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
                0, GROUP, ROWS, COLS, SWAP, HALVES, BLOCK_M, BLOCK_N, STAGES, SPLIT_K, SHARE, 0, BARS_AT,
            )),
            (_multiply, (
                left_bufs, right_bufs, bars, sa_ptr, sb_ptr, bias_ptr, out_ptr, tile_m, tile_n, begin, end, mate,
                first_mate, M, N, offset_n, offset_k, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
                1, GROUP, ROWS, COLS, SWAP, HALVES, BLOCK_M, BLOCK_N, STAGES, SPLIT_K, SHARE, 0, BARS_AT,
            )),
            (_fetch, (
                tile_m, tile_n, begin, end, mate, first_mate, SWAP, BLOCK_M, BLOCK_N, STAGES, SHARE, SPLIT_K,
                LEFT_AT, RIGHT_AT, BARS_AT,
            )),
        ],
        [4, 4], [REGISTERS, REST],
    )  # fmt: skip


in_clusters(group_joint_kernel)


def launch_joint(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    offset_n: int, offset_k: int, config: Config, **scaling: int,
) -> None:  # fmt: skip
    (M, K), N = a.shape, b.shape[0]
    config = dict(config)
    swap, per_sm = config["SWAP"], config.pop("PER_SM")
    left, right = (b, a) if swap else (a, b)
    rows_l, rows_r = (config["BLOCK_N"], config["BLOCK_M"]) if swap else (config["BLOCK_M"], config["BLOCK_N"])
    registers = dict(REGISTERS=232, REST=40) if per_sm == 1 else dict(REGISTERS=104, REST=32, maxnreg=80)
    share = config["CLUSTER"] // config["SPLIT_K"]
    tiles = triton.cdiv(M, config["BLOCK_M"] * share) * triton.cdiv(N, config["BLOCK_N"])
    group_joint_kernel[(tiles,)](
        descriptor(left, rows_l, 128), descriptor(right, rows_r // share, 128), out, scale_a, scale_b, bias,
        M, N, K, offset_n, offset_k, out.stride(0), *scale_a.stride(), *scale_b.stride(),
        CODES=TYPES[a.dtype], HALVES=rows_l == 128, **scaling, **config, **registers, **dependent(device, M),
    )  # fmt: skip
