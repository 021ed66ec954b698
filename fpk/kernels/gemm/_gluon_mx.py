"""The Gluon kernel of mm_packed for MXFP8 weights, with MXFP8 or bf16 activations: a bf16 product of exact values.

Scaling sums of 32 columns in fp32 instead costs two operations for each of them, which take longer than their product
in FP8. Weights are decoded in registers, from which wgmma takes its left operand, as in `_gluon_weight`; activations
before, by a kernel of their own, which also renames their columns to match. One warp loads tiles, one decodes scales,
two groups of four warps decode codes and multiply.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fpk.db import Config
from fpk.device import Device
from fpk.kernels.gemm._gluon import TYPES, barrier, descriptor, locate, put, tma_load

HALF = 64
"""Rows of weights of each group that multiplies."""


@triton.jit
def decode_activations_kernel(a_ptr, scale_ptr, out_ptr, K, stride_am, stride_sm, stride_om, BLOCK: tl.constexpr):
    """bf16 values of BLOCK columns of a row: inside each 16, column 4q + 2h + e moves to 8h + 2q + e."""
    row, offs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < K
    value = tl.load(a_ptr + row * stride_am + offs, mask=mask, other=0.0)
    if scale_ptr is not None:
        byte = tl.load(scale_ptr + row * stride_sm + offs // 32, mask=mask, other=0).to(tl.int32)
        bits = tl.where(byte == 0, 0x00400000, byte << 23)
        scale = tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
        value = (value.to(tl.float32) * scale).to(tl.bfloat16)
    value = tl.permute(tl.reshape(value, (BLOCK // 16, 4, 2, 2)), (0, 2, 1, 3))
    tl.store(out_ptr + row * stride_om + offs, tl.reshape(value, (BLOCK,)), mask=mask)


@gluon.constexpr_function
def _assembly(E5M2):
    """Four FP8 codes of a word to bf16, through fp16 and fp32 (NaN and Inf included), times two pairs of scales."""
    lines = ["{", ".reg .b16 p, q, x, y;", ".reg .b32 t;", ".reg .f32 f, g;", "mov.b32 {p, q}, $2;"]
    for i, half in enumerate("pq"):
        lines += [
            f"cvt.rn.f16x2.{'e5m2' if E5M2 else 'e4m3'}x2 t, {half};", "mov.b32 {x, y}, t;", "cvt.f32.f16 f, x;",
            "cvt.f32.f16 g, y;", "cvt.rn.bf16x2.f32 t, g, f;", f"mul.rn.bf16x2 ${i}, t, ${3 + i};",
        ]  # fmt: skip
    return "\n".join([*lines, "}"])


@gluon.jit
def _power(word, i):
    """bf16 value of byte i of words of e8m0."""
    byte = (word >> (8 * i)) & 255
    bits = gl.where(byte == 0, 0x0040, byte << 7)
    return gl.where(byte == 255, 0x7FC0, bits).to(gl.int16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _load_scales(
    scale_ptr, s_bufs, full, empty, tiles_n, tiles_m, words, N, stride_s,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The scales of 128 columns are one word a row; four words are fetched at a time, one turn ahead."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [1, 1], [1, 0])
    BLOCKS: gl.constexpr = BLOCK_K // 32
    turn, offs_k = 0, gl.arange(0, 4, layout=gl.SliceLayout(0, layout))[None, :]
    for item in range(gl.program_id(0), tiles_n * tiles_m, gl.num_programs(0)):
        tile_n, _, _, _, _ = locate(item, tiles_n, tiles_m, words, GROUP_M, 1)
        offs_n = tile_n * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        mask = (offs_n < N)[:, None]
        ptrs = (scale_ptr + offs_n.to(gl.int64) * stride_s).to(gl.pointer_type(gl.int32))[:, None] + offs_k
        ahead = gl.load(ptrs, mask=mask & (offs_k < words), other=0)
        for k in range(0, words, 4):
            even, odd = ahead.reshape((ROWS, 2, 2)).split()
            ahead = gl.load(ptrs + k + 4, mask=mask & (offs_k + k + 4 < words), other=0)
            first, third = even.split()
            second, fourth = odd.split()
            four = (first, second, third, fourth)
            for w in gl.static_range(4):
                if k + w < words:
                    for step in gl.static_range(4 // BLOCKS):
                        slot = turn % STAGES
                        mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
                        for i in gl.static_range(BLOCKS):
                            s_bufs.index(slot * BLOCKS + i).store(_power(four[w], step * BLOCKS + i))
                        barrier()
                        mbarrier.arrive(full.index(slot), count=1)
                        turn += 1


@gluon.jit
def _load_tiles(
    w_desc, a_desc, w_bufs, a_bufs, full, empty, tiles_n, tiles_m, steps,
    ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = BLOCK_K // 64
    turn = 0
    for item in range(gl.program_id(0), tiles_n * tiles_m, gl.num_programs(0)):
        tile_n, tile_m, _, _, _ = locate(item, tiles_n, tiles_m, steps, GROUP_M, 1)
        for k in range(steps):
            slot = turn % STAGES
            mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, (2 * ROWS + 2 * BLOCK_M) * BLOCK_K)
            for i in gl.static_range(2):
                tma_load(w_desc, [(2 * tile_n + i) * ROWS, k * BLOCK_K], bar, w_bufs.index(slot * 2 + i))
            for i in gl.static_range(PARTS):
                tma_load(a_desc, [tile_m * BLOCK_M, k * BLOCK_K + i * 64], bar, a_bufs.index(slot * PARTS + i))
            turn += 1


@gluon.jit
def _consume(
    out_desc, out_bufs, w_bufs, a_bufs, s_bufs, full, empty, bias_ptr, tiles_n, tiles_m, steps, N,
    WHICH: gl.constexpr, E5M2: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Multiply one half of the weights of each tile, 32 columns at a time, which share scales."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    fours: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    pairs: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    BLOCKS: gl.constexpr = BLOCK_K // 32
    turn = 0
    for item in range(gl.program_id(0), tiles_n * tiles_m, gl.num_programs(0)):
        tile_n, tile_m, _, _, _ = locate(item, tiles_n, tiles_m, steps, GROUP_M, 1)
        acc = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
        for _ in range(steps):
            slot = turn % STAGES
            mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
            for i in gl.static_range(BLOCKS):
                codes = w_bufs.index(slot * 2 + WHICH).slice(i * 32, 32, dim=1).load(fours)
                scale = s_bufs.index(slot * BLOCKS + i).slice(WHICH * ROWS, ROWS).load(gl.SliceLayout(1, fours))
                scale = gl.broadcast(scale[:, None], codes)[0]
                left = gl.inline_asm_elementwise(
                    _assembly(E5M2), "=&r,=&r,r,r,r", [codes, scale], dtype=gl.bfloat16, is_pure=True, pack=4
                )
                left = left.reshape((ROWS, 2, 4, 2, 2)).permute((0, 1, 3, 2, 4)).reshape((ROWS, 32))
                left = gl.convert_layout(left, pairs, assert_trivial=True)
                right = a_bufs.index(slot * (BLOCKS // 2) + i // 2).slice(i % 2 * 32, 32, dim=1).permute((1, 0))
                acc = warpgroup_mma(left, right, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(slot), count=1)
            turn += 1
        row, column = tile_m * BLOCK_M, (2 * tile_n + WHICH) * ROWS
        if bias_ptr is not None:
            offs_n = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
            acc += gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(gl.float32)[:, None]
        few, more = acc.to(OUT).reshape((ROWS, 2, BLOCK_M // 2)).permute((0, 2, 1)).split()
        put(out_desc, out_bufs.index(WHICH), few.permute((1, 0)), row, column)
        put(out_desc, out_bufs.index(WHICH), more.permute((1, 0)), row + BLOCK_M // 2, column)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M"])
def mx_warps_kernel(
    w_desc, a_desc, out_desc, scale_ptr, bias_ptr, M, N, K, stride_s,
    E5M2: gl.constexpr, OUT: gl.constexpr, ROWS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Persistent; tiles of 2 ROWS weights; K is a multiple of 128."""
    PARTS: gl.constexpr = BLOCK_K // 64
    w_bufs = gl.allocate_shared_memory(gl.int8, [STAGES * 2, ROWS, BLOCK_K], w_desc.layout)
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, BLOCK_M, 64], a_desc.layout)
    s_bufs = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES * 2 * PARTS, 2 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    out_bufs = gl.allocate_shared_memory(OUT, [2, BLOCK_M // 2, ROWS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # codes and scales
        mbarrier.init(empty.index(i), count=2)  # two groups
    fence_async_shared()
    tiles_n, tiles_m, steps = gl.cdiv(N, 2 * ROWS), gl.cdiv(M, BLOCK_M), K // BLOCK_K
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, out_bufs, w_bufs, a_bufs, s_bufs, full, empty, bias_ptr, tiles_n, tiles_m, steps, N,
                0, E5M2, OUT, ROWS, BLOCK_M, BLOCK_K, STAGES, GROUP_M,
            )),
            (_consume, (
                out_desc, out_bufs, w_bufs, a_bufs, s_bufs, full, empty, bias_ptr, tiles_n, tiles_m, steps, N,
                1, E5M2, OUT, ROWS, BLOCK_M, BLOCK_K, STAGES, GROUP_M,
            )),
            (_load_scales, (
                scale_ptr, s_bufs, full, empty, tiles_n, tiles_m, K // 128, N, stride_s,
                2 * ROWS, BLOCK_K, STAGES, GROUP_M,
            )),
            (_load_tiles, (
                w_desc, a_desc, w_bufs, a_bufs, full, empty, tiles_n, tiles_m, steps,
                ROWS, BLOCK_M, BLOCK_K, STAGES, GROUP_M,
            )),
        ],
        [4, 1, 1], [216, 96, 32],
    )  # fmt: skip


def words_of_scales(scale: Tensor) -> bool:
    """Can the scales of 128 columns be read as words?"""
    return scale.shape[1] % 4 == 0 and scale.stride(1) == 1 and scale.stride(0) % 4 == 0 and scale.data_ptr() % 4 == 0


def mx_warps_configs(M: int, N: int, sms: int) -> Iterator[Config]:
    """Candidates for M tokens: the wider tile reads less and is the first unless it leaves more of a wave idle."""
    waves = {m: triton.cdiv(triton.cdiv(M, m) * triton.cdiv(N, 2 * HALF), sms) * m for m in (256, 128)}
    for m in sorted(waves, key=lambda m: waves[m]):
        for stages, group in ((4, 8), (4, 16), (4, 4), (3, 8)):
            yield Config(
                kernel="warps", COMPUTE="half", BLOCK_M=m, BLOCK_N=2 * HALF, BLOCK_K=64 if m == 256 else 128,
                STAGES=stages, GROUP_M=group, num_warps=4,
            )  # fmt: skip


def shared_bytes(config: Config, out_bytes: int) -> int:
    """Shared memory of a program."""
    m, k = config["BLOCK_M"], config["BLOCK_K"]
    return config["STAGES"] * (2 * HALF * k + 2 * m * k + 2 * HALF * k // 16) + m * HALF * out_bytes + 1024


def launch(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    config: Config,
) -> None:  # fmt: skip
    """Multiply MXFP8 activations, or bf16 ones without scales, by MXFP8 weights."""
    (M, K), N, block = a.shape, b.shape[0], config["BLOCK_M"]
    decoded = torch.empty((M, K), dtype=torch.bfloat16, device=a.device)
    decode_activations_kernel[(M, triton.cdiv(K, 4096))](
        a, scale_a, decoded, K, a.stride(0), 0 if scale_a is None else scale_a.stride(0), decoded.stride(0),
        BLOCK=4096, num_warps=8,
    )  # fmt: skip
    tiles = triton.cdiv(M, block) * triton.cdiv(N, 2 * HALF)
    mx_warps_kernel[(min(device.sm_count, tiles),)](
        descriptor(b.view(torch.int8), HALF, config["BLOCK_K"]), descriptor(decoded, block, 64),
        descriptor(out, block // 2, HALF), scale_b, bias, M, N, K, scale_b.stride(0),
        E5M2=b.dtype is torch.float8_e5m2, OUT=TYPES[out.dtype], ROWS=HALF, **config,
    )  # fmt: skip
