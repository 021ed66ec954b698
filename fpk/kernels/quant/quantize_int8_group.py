"""quantize_int8_group: INT8 codes with one scale per row and group of columns.

    amax[m, j]  = max_{k in group j} |x[m, k]| over finite elements
    scale[m, j] = max(amax[m, j], 1e-10) / 127
    codes[m, k] = clamp(round_half_even(x[m, k] / scale[m, k // group]), qmin, 127)

qmin is -128 for activations, -127 for symmetric weights. A group width that does not divide K leaves a short last
group. NaN becomes code 0 and does not touch the scale; +-Inf saturates; a group of nothing but Inf gets scale Inf and
codes 0.

Source: semantics of vLLM's `per_token_group_quant_int8`, which truncates; this rounds.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.formats import encode_int8 as encode_codes
from fpk.formats import expand_groups
from fpk.kernels._groups import expect_group, group_amax
from fpk.kernels._tile import amax_key, amax_of_key, any_infinite, cast_int8, divide, quantize_int8
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(x: Tensor, group: int = 128, qmin: int = -128) -> tuple[Tensor, Tensor]:
    amax = group_amax(x, 1, group)
    scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(127.0)
    return encode_codes(x.float() / expand_groups(scale, x.shape, 1, group), qmin).contiguous(), scale


def check(x: Tensor, group: int, qmin: int, **_: Any) -> None:
    expect_dtype("quantize_int8_group.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_int8_group.x", x, 2, 3)
    expect_not_empty("quantize_int8_group.x", x, -1)
    expect_group("quantize_int8_group.group", group)
    expect_one_of("quantize_int8_group.qmin", qmin, (-128, -127))


@triton.jit(do_not_specialize=["M"])
def _group_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, QMIN: tl.constexpr,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS groups, each group padded to a power of two: one read, one write."""
    groups = tl.cdiv(K, GROUP)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, WIDTH)[None, :]
    offs_k = offs_g[:, None] * GROUP + inside  # [GROUPS, WIDTH]
    mask_k = offs_k < K
    if WIDTH != GROUP:
        mask_k = mask_k & (inside < GROUP)
    rows, cols = offs_m[:, None, None], offs_k[None, :, :]
    mask = (rows < M) & mask_k[None, :, :]
    x = tl.load(x_ptr + e * stride_xe + rows * stride_xm + cols * stride_xk, mask=mask, other=0.0).to(tl.float32)

    amax = tl.max(tl.abs(x), axis=2)  # [BLOCK_M, GROUPS]
    infinite = any_infinite(amax)
    if infinite:
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=2))
    scale = tl.math.div_rn(tl.maximum(amax, 1e-10), 127.0)
    codes_ptrs = codes_ptr + (e * M + rows) * K + cols
    if infinite:
        tl.store(codes_ptrs, quantize_int8(x, scale[:, :, None], QMIN), mask=mask)
    else:  # nothing lies beyond the range; stored here, since codes that leave the branch cost registers
        tl.store(codes_ptrs, cast_int8(divide(x, scale[:, :, None])), mask=mask)
    scale_ptrs = scale_ptr + (e * M + offs_m)[:, None] * groups + offs_g[None, :]
    tl.store(scale_ptrs, scale, mask=(offs_m < M)[:, None] & (offs_g < groups)[None, :])


def configs(x: Tensor, group: int, **_: Any):
    width = triton.next_power_of_2(group)
    rows = 8 if x.shape[-2] > 4 else 1
    default = max(1, 2048 // rows // width)
    rows = max(1, min(rows, 2048 // width))
    yield Config(BLOCK_M=rows, GROUPS=default, num_warps=2 if width <= 2048 else 8)
    shapes = [(1, 1024), (1, 2048), (1, 4096), (2, 1024), (2, 2048), (4, 512), (4, 1024), (8, 256), (8, 512),
              (8, 1024), (16, 128), (16, 256), (16, 512), (32, 128), (32, 256), (64, 128)]  # fmt: skip
    for (rows, cols), warps in itertools.product(shapes, (2, 4, 8)):
        yield Config(BLOCK_M=rows, GROUPS=max(1, cols // width), num_warps=warps)


def legal(config: Config, group: int, **_: Any) -> bool:
    # at most 128 elements a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * triton.next_power_of_2(group) <= 4096 * config["num_warps"]


def key(x: Tensor, group: int, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(x.shape[:-1].numel()), K=x.shape[-1], group=group, x=str(x.dtype))


def cost(x: Tensor, group: int, **_: Any) -> Cost:
    groups = x.shape[:-1].numel() * triton.cdiv(x.shape[-1], group)
    return Cost(flops=3 * x.numel(), bytes=x.numel() * (x.element_size() + 1) + 4 * groups)


def inputs(
    *, M, K, E=0, group=128, qmin=-128, x_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda",
    seed=0,
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    return dict(x=x, group=group, qmin=qmin)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 5, 8, 13), K=(1, 16, 33, 64, 100, 128, 257), E=(0, 1, 3), group=(1, 16, 48, 64, 128, 300),
        qmin=(-128, -127), x_dtype=FLOAT_INPUTS, kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(group=Kernel(_group_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_int8_group(x: Tensor, group: int = 128, qmin: int = -128, *, config: Config) -> tuple[Tensor, Tensor]:
    """Quantize rows to INT8, one scale per `group` columns.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        group: columns that share a scale, 1 to 16384; the last group of a row may be short.
        qmin: smallest code, -128 or -127.

    Returns:
        codes int8 of x's shape, contiguous, and scale (M, cdiv(K, group)) or (E, M, cdiv(K, group)), fp32;
        value = code * scale.

    Raises:
        ValueError: dtype, rank, group or qmin does not fit, or K is 0.
    """
    *_, M, K = x.shape
    groups = triton.cdiv(K, group)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-1], groups), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(groups, config["GROUPS"])
    _group_kernel[(tiles, E)](
        x, codes, scale,
        M, K,
        stride_xe, x.stride(-2), x.stride(-1),
        GROUP=group, WIDTH=triton.next_power_of_2(group), QMIN=qmin,
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes, scale
