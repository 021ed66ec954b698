"""act_and_mul_quantize_fp8_group: an MLP's activation, quantized to FP8 with one scale per row and group of columns.

    act         = act_and_mul(x), rounded to x's type
    amax[m, j]  = max_{k in group j} |act[m, k]| over finite elements
    scale[m, j] = max(amax[m, j], 1e-10) / F                 e8m0: rounded up to a power of two, from its bits
    codes[m, k] = fp8(clamp(act[m, k] / scale[m, k // group], -max, max))

Bit-equal to act_and_mul followed by quantize_fp8_group: the activation is rounded to x's type before it is quantized.
Short groups, NaN and Inf are treated as there.

Source: the fused activation and 1 x 128 quantization of block-scaled FP8 MoE layers.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_one_of
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, encode, expand_groups
from fpk.kernels._activation import (
    CASES,
    activated,
    activation_constexprs,
    activation_inputs,
    activation_width,
    expect_activation,
    load_activation,
)
from fpk.kernels._groups import (
    LAYOUTS,
    SCALE_FORMATS,
    expect_group,
    expect_scale_layout,
    group_amax,
    in_layout,
    power_of_two_above,
    scale_buffer,
    stored_scale,
)
from fpk.kernels._tile import (
    after_previous,
    amax_key,
    amax_of_key,
    any_infinite,
    cast_fp8,
    divide,
    early_start,
    fp8_constants,
    quantize_fp8,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS
from fpk.shapes import activation_cases

# the activation may differ by its last place, and then a code by one; see act_and_mul
TOLERANCE = 0.02


def reference(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    group: int = 128, scale_format: str = "fp32", layout: str = "row", dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    fmt = FP8[dtype]
    act = activated(x, activation, gated, interleaved, alpha, beta, limit)
    amax = group_amax(act, 1, group)
    scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(fmt.qmax)
    stored, scale = stored_scale(scale, scale_format)
    codes = encode(act.float() / expand_groups(scale, act.shape, 1, group), fmt).view(dtype).contiguous()
    return codes, in_layout(stored, layout, scale_format)


def check(x: Tensor, group: int, scale_format: str, layout: str, dtype: torch.dtype, **arguments: Any) -> None:
    expect_activation("act_and_mul_quantize_fp8_group", x, **arguments)
    expect_group("act_and_mul_quantize_fp8_group.group", group)
    expect_scale_layout("act_and_mul_quantize_fp8_group", scale_format, layout)
    expect_one_of("act_and_mul_quantize_fp8_group.dtype", dtype, FP8)


@triton.jit(do_not_specialize=["M", "stride_s"])
def _group_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, I,
    stride_xe, stride_xm, stride_xk, stride_s,
    PDL: tl.constexpr, FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, E8M0: tl.constexpr, COLUMNS: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS groups, each group padded to a power of two: one read, one write."""
    groups = tl.cdiv(I, GROUP)
    tiles = tl.cdiv(groups, GROUPS)
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    x_rows = x_ptr + e * stride_xe + offs_m * stride_xm
    act, mask, cols = load_activation(
        x_rows, offs_m < M, offs_g * GROUP, I, stride_xk,
        FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, GROUPS, GROUP, WIDTH,
    )  # fmt: skip

    amax = tl.max(tl.abs(act), axis=2)  # [BLOCK_M, GROUPS]
    infinite = any_infinite(amax)
    if infinite:
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(act), 0), axis=2))
    scale = tl.math.div_rn(tl.maximum(amax, 1e-10), QMAX)
    stored = scale
    if E8M0:
        stored, scale = power_of_two_above(scale)
    codes_ptrs = codes_ptr + (e * M + offs_m)[:, None, None] * I + cols
    if infinite:
        codes = quantize_fp8(act, scale[:, :, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        tl.store(codes_ptrs, codes, mask=mask)
    else:  # nothing lies beyond the range; stored here, since codes that leave the branch cost registers
        tl.store(codes_ptrs, cast_fp8(divide(act, scale[:, :, None]), MANTISSA, BIAS, NAN_CODE, HARDWARE), mask=mask)

    scale_ptr += e * groups * stride_s
    if COLUMNS:
        scale_ptrs = scale_ptr + offs_g[None, :] * stride_s + offs_m[:, None]
    else:
        scale_ptrs = scale_ptr + offs_m[:, None] * groups + offs_g[None, :]
    mask_s = (offs_m < M)[:, None] & (offs_g < groups)[None, :]
    tl.store(scale_ptrs, stored.to(scale_ptr.dtype.element_ty), mask=mask_s)


def configs(x: Tensor, group: int, **_: Any):
    width = triton.next_power_of_2(group)
    rows = 8 if x.shape[-2] > 4 else 1
    default = max(1, 2048 // rows // width)
    rows = max(1, min(rows, 2048 // width))
    if x.shape[-2] <= 64 and width <= 512:  # few rows: more programs
        yield Config(BLOCK_M=1, GROUPS=max(1, 512 // width), num_warps=2)
    yield Config(BLOCK_M=rows, GROUPS=default, num_warps=2 if width <= 2048 else 8)
    shapes = [(1, 512), (1, 1024), (1, 2048), (2, 512), (2, 1024), (4, 256), (4, 512), (4, 1024), (8, 128), (8, 256),
              (8, 512), (16, 128), (16, 256), (32, 128)]  # fmt: skip
    for (rows, cols), warps in itertools.product(shapes, (2, 4, 8)):
        yield Config(BLOCK_M=rows, GROUPS=max(1, cols // width), num_warps=warps)


def legal(config: Config, group: int, **_: Any) -> bool:
    # at most 64 activations a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * triton.next_power_of_2(group) <= 2048 * config["num_warps"]


def key(
    x: Tensor,
    activation: str,
    gated: bool,
    interleaved: bool,
    group: int,
    scale_format: str,
    layout: str,
    dtype: torch.dtype,
    **_: Any,
) -> dict[str, int | str]:
    return dict(
        M=bucket(x.shape[:-1].numel()), K=activation_width(x, gated), activation=activation, gated=int(gated),
        interleaved=int(interleaved), group=group, scale=scale_format, layout=layout, x=str(x.dtype),
        dtype=str(dtype),
    )  # fmt: skip


def cost(x: Tensor, gated: bool, group: int, scale_format: str, **_: Any) -> Cost:
    rows, width = x.shape[:-1].numel(), activation_width(x, gated)
    scale_bytes = rows * triton.cdiv(width, group) * (4 if scale_format == "fp32" else 1)
    return Cost(flops=11 * rows * width, bytes=x.numel() * x.element_size() + rows * width + scale_bytes)


def inputs(
    *, M, K, E=0, case="silu", group=128, scale_format="fp32", scale_layout="row", x_dtype=torch.bfloat16,
    dtype=torch.float8_e4m3fn, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    arguments = activation_inputs(M, K, E, case, x_dtype, kind, layout, device, seed)
    return arguments | dict(group=group, scale_format=scale_format, layout=scale_layout, dtype=dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=TOLERANCE,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 3), case=tuple(CASES), group=(1, 16, 48, 128, 300),
        scale_format=SCALE_FORMATS, scale_layout=LAYOUTS, x_dtype=FLOAT_INPUTS,
        dtype=tuple(FP8), kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(group=Kernel(_group_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def act_and_mul_quantize_fp8_group(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    group: int = 128, scale_format: str = "fp32", layout: str = "row", dtype: torch.dtype = torch.float8_e4m3fn, *,
    config: Config,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Activate, multiply, and quantize rows to FP8, one scale per `group` columns.

    Args:
        x: (M, 2I) or (E, M, 2I), (M, I) or (E, M, I) if not gated; fp32, bf16 or fp16, any strides.
        activation: silu, swigluoai, swiglustep, gelu, gelu_tanh or relu2; formulas in act_and_mul.
        gated: False for activations of a whole row (relu2: always; swigluoai, swiglustep: never).
        interleaved: gate and up columns alternate instead of lying in halves.
        alpha, beta, limit: parameters of silu and swigluoai (limit also of swiglustep), None for their own.
        group: columns of the activation that share a scale, 1 to 16384; the last group of a row may be short.
        scale_format: "fp32", or "e8m0" for powers of two stored as exponent + 127.
        layout: strides of the scale: "row" (G, 1), "column" (1, M), "tma" (1, M rounded up to 16 bytes), where
            G = cdiv(I, group).
        dtype: the fp8 type of the codes.

    Returns:
        codes (M, I) or (E, M, I), contiguous, and scale (M, G) or (E, M, G), fp32 or uint8; value = code * scale.

    Raises:
        ValueError: a dtype, rank, group, scale_format, layout or number of columns does not fit, or the activation does
            not take an argument given.
    """
    fmt = FP8[dtype]
    I = activation_width(x, gated)
    groups = triton.cdiv(I, group)
    codes = torch.empty((*x.shape[:-1], I), dtype=dtype, device=x.device)
    scale, stride_s = scale_buffer((*x.shape[:-1], groups), layout, scale_format, x.device)
    if codes.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    M = x.shape[-2]
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(groups, config["GROUPS"])
    _group_kernel[(tiles, E)](
        x, codes.view(torch.uint8), scale,
        M, I,
        stride_xe, x.stride(-2), x.stride(-1), stride_s,
        **activation_constexprs(x, activation, gated, interleaved, alpha, beta, limit),
        **early_start(of(x.device)),
        GROUP=group, WIDTH=triton.next_power_of_2(group), E8M0=scale_format == "e8m0", COLUMNS=layout != "row",
        QMAX=fmt.qmax, **fp8_constants(fmt, of(x.device)),
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes, scale
