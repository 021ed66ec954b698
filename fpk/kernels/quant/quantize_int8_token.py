"""quantize_int8_token: symmetric INT8 codes with one scale per row.

    amax[m]  = max_k |x[m, k]| over finite elements
    scale[m] = max(amax[m], 1e-10) / 127
    codes[m, k] = clamp(round_half_even(x[m, k] / scale[m]), qmin, 127)

qmin is -128 for activations, -127 for weights. NaN becomes 0 and does not touch the scale; +-Inf saturates; a row of
nothing but Inf gets scale Inf and zero codes. Source: per-token INT8 quantization of W8A8 inference (vLLM
`scaled_int8_quant`), with true division and round half to even.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import encode_int8 as encode_codes
from fpk.formats import finite_amax
from fpk.kernels._pairs import amax_key_of_pairs, as_words, has_pairs, int8_of_pairs, larger_magnitude
from fpk.kernels._tile import (
    after_previous,
    amax_key,
    amax_of_key,
    any_infinite,
    cast_int8,
    divide,
    early_start,
    quantize_int8,
    quotient_within,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(x: Tensor, qmin: int = -128) -> tuple[Tensor, Tensor]:
    amax = finite_amax(x, (-1,))
    scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(127.0)
    return encode_codes(x.float() / scale, qmin).contiguous(), scale.contiguous()


def check(x: Tensor, qmin: int, **_: Any) -> None:
    expect_dtype("quantize_int8_token.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_int8_token.x", x, 2, 3)
    expect_not_empty("quantize_int8_token.x", x, -1)
    expect_one_of("quantize_int8_token.qmin", qmin, (-128, -127))


@triton.jit(do_not_specialize=["M"])
def _row_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    QMIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
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
    beyond = any_infinite(amax)
    if beyond:
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=1))
    scale = tl.math.div_rn(tl.maximum(amax, 1e-10), 127.0)
    if beyond:
        quotient = quotient_within(x, scale[:, None], QMIN, 127.0)
    else:
        quotient = divide(x, scale[:, None])
    codes = cast_int8(quotient)
    rows = e * M + offs_m
    tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)
    tl.store(scale_ptr + rows, scale, mask=offs_m < M)


@triton.jit(do_not_specialize=["M"])
def _loop_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    QMIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
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
    scale = tl.math.div_rn(tl.maximum(amax, 1e-10), 127.0)
    tl.store(scale_ptr + rows, scale, mask=mask_m)

    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        codes = quantize_int8(x, scale[:, None], QMIN)
        tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    words_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_we, stride_wm, PDL: tl.constexpr,
    QMIN: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
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
        scale = tl.math.div_rn(tl.maximum(amax, 1e-10), 127.0)
        tl.store(scale_ptr + rows, scale, mask=offs_m < M)
        for first in range(0, BLOCK_K // 2, PIECE):
            at = first + tl.arange(0, PIECE)
            inside = (offs_m < M)[:, None] & (at < K // 2)[None, :]
            some = tl.load(word_rows + at[None, :], mask=inside, other=0)
            codes = int8_of_pairs(some, scale[:, None], True, QMIN, NATIVE)
            tl.store(codes_ptr + rows[:, None] * (K // 2) + at[None, :], codes, mask=inside)
    else:
        scale = tl.math.div_rn(tl.maximum(amax, 1e-10), 127.0)
        tl.store(scale_ptr + rows, scale, mask=offs_m < M)
        codes = int8_of_pairs(words, scale[:, None], False, QMIN, NATIVE)
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


def legal(config: Config, x: Tensor, **_: Any) -> bool:
    if config["kernel"] == "pairs" and not has_pairs(x):
        return False
    return config["kernel"] == "loop" or config["BLOCK_K"] >= x.shape[-1]


def key(x: Tensor, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(x.shape[:-1].numel()), K=x.shape[-1], x=str(x.dtype))


def cost(x: Tensor, **_: Any) -> Cost:
    rows = x.shape[:-1].numel()
    return Cost(flops=3 * x.numel(), bytes=x.numel() * x.element_size() + x.numel() + 4 * rows)


def inputs(*, M, K, E=0, qmin=-128, x_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0):
    return dict(x=strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout), qmin=qmin)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 2, 3, 5, 8, 13), K=(1, 16, 33, 64, 100, 128, 257), E=(0, 1, 2), qmin=(-128, -127),
        x_dtype=FLOAT_INPUTS, kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(loop=Kernel(_loop_kernel), row=Kernel(_row_kernel), pairs=Kernel(_pairs_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_int8_token(x: Tensor, qmin: int = -128, *, config: Config) -> tuple[Tensor, Tensor]:
    """Quantize rows to symmetric INT8, one scale each.

    Args:
        x: (M, K) or (E, M, K) activations or weights, fp32, bf16 or fp16, any strides.
        qmin: smallest code: -128 (activations) or -127 (weights).

    Returns:
        codes of x's shape, int8, contiguous, and scale (M, 1) or (E, M, 1), fp32; value = code * scale.

    Raises:
        ValueError: dtype, rank or qmin does not fit, or K is 0.
    """
    *_, M, K = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    if x.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    config, device = dict(config), of(x.device)
    constants = dict(QMIN=qmin, **early_start(device), enable_fp_fusion=False)
    grid = (triton.cdiv(M, config["BLOCK_M"]), E)
    if config["kernel"] == "pairs":
        del config["kernel"]
        _pairs_kernel[grid](
            as_words(x), codes.view(torch.int16), scale, M, K, stride_xe // 2, x.stride(-2) // 2,
            NATIVE=device.vendor == "nv", **constants, **config,
        )  # fmt: skip
        return codes, scale
    kernel = {"loop": _loop_kernel, "row": _row_kernel}[config.pop("kernel")]
    kernel[grid](x, codes, scale, M, K, stride_xe, x.stride(-2), x.stride(-1), **constants, **config)
    return codes, scale
