"""act_and_mul_quantize_fp8_token: an MLP's activation, quantized to FP8 with one scale per row.

    act      = act_and_mul(x), rounded to x's type
    amax[m]  = max_k |act[m, k]| over finite elements
    scale[m] = max(amax[m] / F, 1 / (512 F))
    codes    = fp8(clamp(act / scale[m], -max, max))

Bit-equal to act_and_mul followed by quantize_fp8_token: the activation is rounded to x's type before it is quantized.
NaN and Inf are treated as there.

Source: the fused activation and quantization of W8A8 MoE layers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_one_of
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, encode, finite_amax
from fpk.kernels._activation import (
    CASES,
    activated,
    activation_constexprs,
    activation_inputs,
    activation_width,
    expect_activation,
    load_activation,
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
    quotient_within,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS
from fpk.shapes import activation_cases

# the activation may differ by its last place, and then a code by one; see act_and_mul
TOLERANCE = 0.02


def reference(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    act = activated(x, activation, gated, interleaved, alpha, beta, limit)
    fmt = FP8[dtype]
    amax = finite_amax(act, (-1,))
    scale = torch.maximum(amax / amax.new_tensor(fmt.qmax), amax.new_tensor(1 / (512 * fmt.qmax)))
    return encode(act.float() / scale, fmt).view(dtype).contiguous(), scale.contiguous()


def check(x: Tensor, dtype: torch.dtype, **arguments: Any) -> None:
    expect_activation("act_and_mul_quantize_fp8_token", x, **arguments)
    expect_one_of("act_and_mul_quantize_fp8_token.dtype", dtype, FP8)


@triton.jit(do_not_specialize=["M"])
def _row_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, I,
    stride_xe, stride_xm, stride_xk,
    PDL: tl.constexpr, FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: one read, one write."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_rows = x_ptr + e * stride_xe + offs_m * stride_xm
    act, mask, cols = load_activation(
        x_rows, offs_m < M, tl.arange(0, 1).to(tl.int64), I, stride_xk,
        FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, 1, BLOCK_K, BLOCK_K,
    )  # fmt: skip
    amax = tl.max(tl.abs(act), axis=2)  # [BLOCK_M, 1]
    infinite = any_infinite(amax)
    if infinite:
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(act), 0), axis=2))
    scale = tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))
    if infinite:
        quotient = quotient_within(act, scale[:, :, None], -MAX, MAX)
    else:  # nothing lies beyond the range
        quotient = divide(act, scale[:, :, None])
    codes = cast_fp8(quotient, MANTISSA, BIAS, NAN_CODE, HARDWARE)
    rows = (e * M + offs_m)[:, None]
    tl.store(codes_ptr + rows[:, :, None] * I + cols, codes, mask=mask)
    tl.store(scale_ptr + rows, scale, mask=(offs_m < M)[:, None])


@triton.jit(do_not_specialize=["M"])
def _loop_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, I,
    stride_xe, stride_xm, stride_xk,
    PDL: tl.constexpr, FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of any length: one loop for the maximum, one that computes again and quantizes (x comes from cache)."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x_rows = x_ptr + e * stride_xe + offs_m * stride_xm

    keys = tl.zeros((BLOCK_M, 1, BLOCK_K), dtype=tl.uint32)
    for k in range(0, I, BLOCK_K):
        act, mask, cols = load_activation(
            x_rows, mask_m, k + tl.arange(0, 1).to(tl.int64), I, stride_xk,
            FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, 1, BLOCK_K, BLOCK_K,
        )  # fmt: skip
        keys = tl.maximum(keys, tl.where(mask, amax_key(act), 0))
    amax = amax_of_key(tl.max(keys, axis=2))  # [BLOCK_M, 1]
    scale = tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))
    rows = (e * M + offs_m)[:, None]
    tl.store(scale_ptr + rows, scale, mask=mask_m[:, None])

    for k in range(0, I, BLOCK_K):
        act, mask, cols = load_activation(
            x_rows, mask_m, k + tl.arange(0, 1).to(tl.int64), I, stride_xk,
            FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, 1, BLOCK_K, BLOCK_K,
        )  # fmt: skip
        codes = quantize_fp8(act, scale[:, :, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        tl.store(codes_ptr + rows[:, :, None] * I + cols, codes, mask=mask)


def configs(x: Tensor, gated: bool, **_: Any):
    width = triton.next_power_of_2(activation_width(x, gated))
    if width <= 16384:
        yield Config(
            kernel="row", BLOCK_M=max(1, 1024 // width), BLOCK_K=width, num_warps=max(4, width // 1024), num_stages=1
        )
    yield Config(kernel="loop", BLOCK_M=4, BLOCK_K=512, num_warps=4, num_stages=2)
    for rows in (1, 2, 4, 8):
        for warps in (4, 8, 16):
            if 512 <= rows * width <= 16384:
                yield Config(kernel="row", BLOCK_M=rows, BLOCK_K=width, num_warps=warps, num_stages=1)
    for rows, cols in ((1, 1024), (1, 2048), (8, 256), (16, 128)):
        yield Config(kernel="loop", BLOCK_M=rows, BLOCK_K=cols, num_warps=8, num_stages=3)


def legal(config: Config, x: Tensor, gated: bool, **_: Any) -> bool:
    return config["kernel"] == "loop" or config["BLOCK_K"] >= activation_width(x, gated)


def key(
    x: Tensor, activation: str, gated: bool, interleaved: bool, dtype: torch.dtype, **_: Any
) -> dict[str, int | str]:
    return dict(
        M=bucket(x.shape[:-1].numel()), K=activation_width(x, gated), activation=activation, gated=int(gated),
        interleaved=int(interleaved), x=str(x.dtype), dtype=str(dtype),
    )  # fmt: skip


def cost(x: Tensor, gated: bool, **_: Any) -> Cost:
    rows, width = x.shape[:-1].numel(), activation_width(x, gated)
    return Cost(flops=11 * rows * width, bytes=x.numel() * x.element_size() + rows * (width + 4))


def inputs(
    *, M, K, E=0, case="silu", x_dtype=torch.bfloat16, dtype=torch.float8_e4m3fn, kind="normal", layout="contiguous",
    device="cuda", seed=0,
):  # fmt: skip
    return activation_inputs(M, K, E, case, x_dtype, kind, layout, device, seed) | dict(dtype=dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=TOLERANCE,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 3), case=tuple(CASES), x_dtype=FLOAT_INPUTS,
        dtype=tuple(FP8), kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(loop=Kernel(_loop_kernel), row=Kernel(_row_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def act_and_mul_quantize_fp8_token(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn, *, config: Config,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Activate, multiply, and quantize rows to FP8, one scale each.

    Args:
        x: (M, 2I) or (E, M, 2I), (M, I) or (E, M, I) if not gated; fp32, bf16 or fp16, any strides.
        activation: silu, swigluoai, swiglustep, gelu, gelu_tanh or relu2; formulas in act_and_mul.
        gated: False for activations of a whole row (relu2: always; swigluoai, swiglustep: never).
        interleaved: gate and up columns alternate instead of lying in halves.
        alpha, beta, limit: parameters of silu and swigluoai (limit also of swiglustep), None for their own.
        dtype: the fp8 type of the codes.

    Returns:
        codes (M, I) or (E, M, I), contiguous, and scale (M, 1) or (E, M, 1), fp32; value = code * scale.

    Raises:
        ValueError: dtype, rank or number of columns does not fit, or the activation does not take an argument given.
    """
    fmt = FP8[dtype]
    I = activation_width(x, gated)
    codes = torch.empty((*x.shape[:-1], I), dtype=dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if codes.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    M = x.shape[-2]
    config = dict(config)
    kernel = {"loop": _loop_kernel, "row": _row_kernel}[config.pop("kernel")]
    kernel[(triton.cdiv(M, config["BLOCK_M"]), E)](
        x, codes.view(torch.uint8), scale,
        M, I,
        stride_xe, x.stride(-2), x.stride(-1),
        **activation_constexprs(x, activation, gated, interleaved, alpha, beta, limit),
        **early_start(of(x.device)),
        QMAX=fmt.qmax, **fp8_constants(fmt, of(x.device)),
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes, scale
