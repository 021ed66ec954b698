"""act_and_mul_quantize_fp8_static: an MLP's activation, quantized to FP8 by a given scale per matrix.

    act   = act_and_mul(x), rounded to x's type
    codes = fp8(clamp(act[e, m, k] / scale[e], -max, max))

Bit-equal to act_and_mul followed by quantize_fp8_static: the activation is rounded to x's type before it is quantized.

Source: the static input scale of the second product in W8A8 FP8 layers.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_one_of, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, encode
from fpk.kernels._activation import (
    CASES,
    activated,
    activation_constexprs,
    activation_inputs,
    activation_width,
    expect_activation,
    load_activation,
)
from fpk.kernels._tile import after_previous, early_start, fp8_constants, quantize_fp8
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, scales
from fpk.shapes import activation_cases

# the activation may differ by its last place, and then a code by one; see act_and_mul
TOLERANCE = 0.02


def reference(
    x: Tensor, scale: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False,
    alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> Tensor:  # fmt: skip
    act = activated(x, activation, gated, interleaved, alpha, beta, limit)
    return encode(act.float() / scale, FP8[dtype]).view(dtype).contiguous()


def check(x: Tensor, scale: Tensor, dtype: torch.dtype, **arguments: Any) -> None:
    expect_activation("act_and_mul_quantize_fp8_static", x, **arguments)
    expect_one_of("act_and_mul_quantize_fp8_static.dtype", dtype, FP8)
    expect_shape("act_and_mul_quantize_fp8_static.scale", scale, (*x.shape[:-2], 1, 1))
    expect_dtype("act_and_mul_quantize_fp8_static.scale", scale, torch.float32)


@triton.jit(do_not_specialize=["M"])
def _static_kernel(
    x_ptr, scale_ptr, codes_ptr,
    M, I,
    stride_xe, stride_xm, stride_xk, stride_se,
    PDL: tl.constexpr, FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(I, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, 1)
    x_rows = x_ptr + e * stride_xe + offs_m * stride_xm
    act, mask, cols = load_activation(
        x_rows, offs_m < M, first, I, stride_xk, FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE,
        BLOCK_M, 1, BLOCK_K, BLOCK_K,
    )  # fmt: skip
    scale = tl.full((1, 1, 1), 0.0, tl.float32) + tl.load(scale_ptr + e * stride_se)
    codes = quantize_fp8(act, scale, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
    tl.store(codes_ptr + (e * M + offs_m)[:, None, None] * I + cols, codes, mask=mask)


def configs(**_: Any):
    yield Config(BLOCK_M=4, BLOCK_K=512, num_warps=4)
    for rows, cols in ((1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 1024), (4, 1024), (8, 256), (8, 512), (16, 128)):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps)


def key(
    x: Tensor, activation: str, gated: bool, interleaved: bool, dtype: torch.dtype, **_: Any
) -> dict[str, int | str]:
    return dict(
        M=bucket(x.shape[:-1].numel()), K=activation_width(x, gated), activation=activation, gated=int(gated),
        interleaved=int(interleaved), x=str(x.dtype), dtype=str(dtype),
    )  # fmt: skip


def cost(x: Tensor, scale: Tensor, gated: bool, **_: Any) -> Cost:
    out = x.shape[:-1].numel() * activation_width(x, gated)
    return Cost(flops=10 * out, bytes=x.numel() * x.element_size() + out + 4 * scale.numel())


def inputs(
    *, M, K, E=0, case="silu", x_dtype=torch.bfloat16, dtype=torch.float8_e4m3fn, kind="normal",
    layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    arguments = activation_inputs(M, K, E, case, x_dtype, kind, layout, device, seed)
    return arguments | dict(scale=scales((E, 1, 1) if E else (1, 1), device, seed + 1), dtype=dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=TOLERANCE,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 3), case=tuple(CASES), x_dtype=FLOAT_INPUTS,
        dtype=tuple(FP8), kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(static=Kernel(_static_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def act_and_mul_quantize_fp8_static(
    x: Tensor, scale: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False,
    alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn, *, config: Config,
) -> Tensor:  # fmt: skip
    """Activate, multiply, and quantize to FP8 by a given scale.

    Args:
        x: (M, 2I) or (E, M, 2I), (M, I) or (E, M, I) if not gated; fp32, bf16 or fp16, any strides.
        scale: (1, 1) or (E, 1, 1) fp32. Must be positive; that is checked where scales are loaded, not here.
        activation: silu, swigluoai, swiglustep, gelu, gelu_tanh or relu2; formulas in act_and_mul.
        gated: False for activations of a whole row (relu2: always; swigluoai, swiglustep: never).
        interleaved: gate and up columns alternate instead of lying in halves.
        alpha, beta, limit: parameters of silu and swigluoai (limit also of swiglustep), None for their own.
        dtype: the fp8 type of the codes.

    Returns:
        codes (M, I) or (E, M, I), contiguous; value = code * scale.

    Raises:
        ValueError: a dtype, rank, scale or number of columns does not fit, or the activation does not take an argument
            given.
    """
    fmt = FP8[dtype]
    I = activation_width(x, gated)
    codes = torch.empty((*x.shape[:-1], I), dtype=dtype, device=x.device)
    if codes.numel() == 0:
        return codes
    stacked, M = x.dim() == 3, x.shape[-2]
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(I, config["BLOCK_K"])
    _static_kernel[(tiles, x.shape[0] if stacked else 1)](
        x, scale, codes.view(torch.uint8),
        M, I,
        x.stride(0) if stacked else 0, x.stride(-2), x.stride(-1), scale.stride(0) if stacked else 0,
        **activation_constexprs(x, activation, gated, interleaved, alpha, beta, limit),
        **early_start(of(x.device)),
        **fp8_constants(fmt, of(x.device)),
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes
