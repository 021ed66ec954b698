"""quantize_fp8_token: FP8 codes with one scale per row.

    amax[m]  = max_k |x[m, k]| over finite elements, at most scale_ub
    scale[m] = max(amax[m] / F, 1 / (512 F))
    codes[m, k] = fp8(clamp(x[m, k] / scale[m], -max, max))

Per-token activations and per-channel weights are the same operation. F is the format's `qmax`. NaN stays NaN and does
not touch the scale; +-Inf saturates; a row of nothing but Inf gets scale Inf and NaN codes.

Source: the dynamic per-token quantization of W8A8 FP8 inference (vLLM `scaled_fp8_quant`), with true division.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, encode, finite_amax
from fpk.kernels._pairs import amax_key_of_pairs, as_words, converts_pairs, fp8_of_pairs, has_pairs, larger_magnitude
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
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(
    x: Tensor, scale_ub: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    fmt = FP8[dtype]
    amax = finite_amax(x, (-1,))
    if scale_ub is not None:
        amax = torch.minimum(amax, scale_ub)
    scale = torch.maximum(amax / amax.new_tensor(fmt.qmax), amax.new_tensor(1 / (512 * fmt.qmax)))
    return encode(x.float() / scale, fmt).view(dtype).contiguous(), scale.contiguous()


def check(x: Tensor, scale_ub: Tensor | None, dtype: torch.dtype, **_: Any) -> None:
    expect_dtype("quantize_fp8_token.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_fp8_token.x", x, 2, 3)
    expect_not_empty("quantize_fp8_token.x", x, -1)
    expect_one_of("quantize_fp8_token.dtype", dtype, FP8)
    if scale_ub is not None:
        expect_shape("quantize_fp8_token.scale_ub", scale_ub, (1,))
        expect_dtype("quantize_fp8_token.scale_ub", scale_ub, torch.float32)


@triton.jit(do_not_specialize=["M"])
def _row_kernel(
    x_ptr, scale_ub_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: one read, one write."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :].to(tl.int64) * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
    amax = tl.max(tl.abs(x), axis=1)
    beyond = any_infinite(amax)  # can an element exceed the scale's range?
    if beyond:
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=1))
    if scale_ub_ptr is not None:
        amax = tl.minimum(amax, tl.load(scale_ub_ptr))
        beyond = True
    scale = tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))
    if beyond:
        quotient = quotient_within(x, scale[:, None], -MAX, MAX)
    else:
        quotient = divide(x, scale[:, None])
    codes = cast_fp8(quotient, MANTISSA, BIAS, NAN_CODE, HARDWARE)
    rows = e * M + offs_m
    tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)
    tl.store(scale_ptr + rows, scale, mask=offs_m < M)


@triton.jit(do_not_specialize=["M"])
def _loop_kernel(
    x_ptr, scale_ub_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of any length: one loop for the maximum, one to quantize (the second read comes from cache)."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x_rows = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm
    rows = e * M + offs_m

    keys = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.uint32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        keys = tl.maximum(keys, tl.where(mask, amax_key(x), 0))
    amax = amax_of_key(tl.max(keys, axis=1))
    if scale_ub_ptr is not None:
        amax = tl.minimum(amax, tl.load(scale_ub_ptr))
    scale = tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))
    tl.store(scale_ptr + rows, scale, mask=mask_m)

    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        codes = quantize_fp8(x, scale[:, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    words_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_we, stride_wm, PDL: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Whole rows of bf16 in registers, two values to each."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_w = tl.arange(0, BLOCK_K // 2)
    mask = (offs_m < M)[:, None] & (offs_w < K // 2)[None, :]
    word_rows = words_ptr + e * stride_we + offs_m[:, None] * stride_wm
    words = tl.load(word_rows + offs_w[None, :], mask=mask, other=0)
    amax = tl.max(larger_magnitude(words), axis=1).to(tl.float32, bitcast=True)
    rows = e * M + offs_m
    if any_infinite(amax):  # rare, and so in pieces that cost no registers
        PIECE: tl.constexpr = BLOCK_K // 16
        keys = tl.zeros((BLOCK_M, PIECE), dtype=tl.uint32)
        for first in range(0, BLOCK_K // 2, PIECE):
            at = first + tl.arange(0, PIECE)
            inside = (offs_m < M)[:, None] & (at < K // 2)[None, :]
            some = tl.load(word_rows + at[None, :], mask=inside, other=0)
            keys = tl.maximum(keys, tl.where(inside, amax_key_of_pairs(some), 0))
        amax = amax_of_key(tl.max(keys, axis=1))
        scale = tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))
        tl.store(scale_ptr + rows, scale, mask=offs_m < M)
        for first in range(0, BLOCK_K // 2, PIECE):
            at = first + tl.arange(0, PIECE)
            inside = (offs_m < M)[:, None] & (at < K // 2)[None, :]
            some = tl.load(word_rows + at[None, :], mask=inside, other=0)
            codes = fp8_of_pairs(some, scale[:, None], True, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, NATIVE)
            tl.store(codes_ptr + rows[:, None] * (K // 2) + at[None, :], codes, mask=inside)
    else:
        scale = tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))
        tl.store(scale_ptr + rows, scale, mask=offs_m < M)
        codes = fp8_of_pairs(words, scale[:, None], False, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, NATIVE)
        tl.store(codes_ptr + rows[:, None] * (K // 2) + offs_w[None, :], codes, mask=mask)


def configs(x: Tensor, **_: Any):
    width = triton.next_power_of_2(x.shape[-1])
    if 1024 <= width <= 16384:
        yield Config(kernel="pairs", BLOCK_M=1, BLOCK_K=width, num_warps=4 if width <= 8192 else 8, num_stages=1)
    if 1024 <= width <= 16384:
        yield Config(kernel="row", BLOCK_M=1, BLOCK_K=width, num_warps=4 if width <= 8192 else 8, num_stages=1)
    yield Config(kernel="loop", BLOCK_M=4, BLOCK_K=1024, num_warps=4, num_stages=2)
    for rows in (1, 2, 4, 8):
        for warps in (4, 8, 16):
            if 512 <= rows * width <= 32768:
                yield Config(kernel="pairs", BLOCK_M=rows, BLOCK_K=width, num_warps=warps, num_stages=1)
                yield Config(kernel="row", BLOCK_M=rows, BLOCK_K=width, num_warps=warps, num_stages=1)
    for rows, cols in ((1, 2048), (1, 4096), (8, 512), (16, 256)):
        yield Config(kernel="loop", BLOCK_M=rows, BLOCK_K=cols, num_warps=8, num_stages=3)


def legal(config: Config, x: Tensor, scale_ub: Tensor | None, **_: Any) -> bool:
    if config["kernel"] == "pairs" and (scale_ub is not None or not has_pairs(x)):
        return False
    return config["kernel"] == "loop" or config["BLOCK_K"] >= x.shape[-1]


def key(x: Tensor, dtype: torch.dtype, scale_ub: Tensor | None, **_: Any) -> dict[str, int | str]:
    rows = x.shape[:-1].numel()
    return dict(M=bucket(rows), K=x.shape[-1], x=str(x.dtype), dtype=str(dtype), scale_ub=int(scale_ub is not None))


def cost(x: Tensor, **_: Any) -> Cost:
    rows = x.shape[:-1].numel()
    return Cost(flops=3 * x.numel(), bytes=x.numel() * x.element_size() + x.numel() + 4 * rows)


def inputs(
    *, M, K, E=0, x_dtype=torch.bfloat16, dtype=torch.float8_e4m3fn, kind="normal", layout="contiguous",
    scale_ub=False, device="cuda", seed=0,
):  # fmt: skip
    shape = (E, M, K) if E else (M, K)
    x = strided(sample(shape, x_dtype, kind, device, seed), layout)
    return dict(x=x, scale_ub=torch.tensor([1.25], device=device) if scale_ub else None, dtype=dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 2, 3, 5, 8, 13), K=(1, 16, 33, 64, 100, 128, 257), E=(0, 1, 2),
        x_dtype=FLOAT_INPUTS, dtype=tuple(FP8), kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"), scale_ub=(False, True),
    ),
    kernels=dict(loop=Kernel(_loop_kernel), row=Kernel(_row_kernel), pairs=Kernel(_pairs_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_fp8_token(
    x: Tensor, scale_ub: Tensor | None = None, dtype: torch.dtype = torch.float8_e4m3fn, *, config: Config
) -> tuple[Tensor, Tensor]:
    """Quantize rows to FP8, one scale each.

    Args:
        x: (M, K) or (E, M, K) activations or weights, fp32, bf16 or fp16, any strides.
        scale_ub: (1,) fp32 or None; bounds the amax from above, elements beyond it saturate.
        dtype: the fp8 type of the codes.

    Returns:
        codes of x's shape, contiguous, and scale (M, 1) or (E, M, 1), fp32; value = code * scale.

    Raises:
        ValueError: dtype, rank or scale_ub does not fit, or K is 0.
    """
    fmt = FP8[dtype]
    *_, M, K = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    config, device = dict(config), of(x.device)
    constants = dict(QMAX=fmt.qmax, **fp8_constants(fmt, device), **early_start(device), enable_fp_fusion=False)
    grid = (triton.cdiv(M, config["BLOCK_M"]), E)
    if config["kernel"] == "pairs":
        del config["kernel"]
        _pairs_kernel[grid](
            as_words(x), codes.view(torch.int16), scale, M, K, stride_xe // 2, x.stride(-2) // 2,
            NATIVE=converts_pairs(fmt, device), **constants, **config,
        )  # fmt: skip
        return codes, scale
    kernel = {"loop": _loop_kernel, "row": _row_kernel}[config.pop("kernel")]
    kernel[grid](
        x, scale_ub, codes.view(torch.uint8), scale,
        M, K,
        stride_xe, x.stride(-2), x.stride(-1),
        **constants, **config,
    )  # fmt: skip
    return codes, scale
