"""quantize_int8_token_asymmetric: INT8 codes with one scale and one zero point per row.

    high, low   = max(max_k x, 0), min(min_k x, 0) over finite elements of row m
    scale       = max(high - low, 1e-10) / 255
    zero_point  = round_half_even(-128 - low / scale)
    codes       = clamp(round_half_even(x / scale) + zero_point, -128, 127)

value = (code - zero_point) * scale. The range always includes 0: the zero point is itself a code, 0 (padding, ReLU)
is exact, and a constant row needs no special case (all zeros: scale 1e-10 / 255, zero point and codes -128). NaN
becomes the zero point, the code of 0, and does not touch the scale; +-Inf saturates; a row of nothing but Inf gets
scale Inf.

Source: the asymmetric per-token scheme of W8A8 inference (vLLM `scaled_int8_quant`, whose range need not include 0),
with true division and round half to even.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_rank
from fpk.db import Config, bucket
from fpk.kernels._asymmetric import (
    asymmetric_codes,
    asymmetric_parameters,
    quantize_around,
    range_along,
    range_keys,
    range_of_keys,
    scale_and_zero,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale, zero_point = asymmetric_parameters(x, (-1,))
    return asymmetric_codes(x, scale, zero_point), scale, zero_point


def check(x: Tensor, **_: Any) -> None:
    expect_dtype("quantize_int8_token_asymmetric.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_int8_token_asymmetric.x", x, 2, 3)
    expect_not_empty("quantize_int8_token_asymmetric.x", x, -1)


@triton.jit(do_not_specialize=["M"])
def _row_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers: one read, one write."""
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :].to(tl.int64) * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
    high, low = range_along(x, mask, 1)
    scale, zero = scale_and_zero(high, low)
    codes = quantize_around(x, scale[:, None], zero[:, None])
    rows = e * M + offs_m
    tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)
    tl.store(scale_ptr + rows, scale, mask=offs_m < M)
    tl.store(zero_ptr + rows, zero, mask=offs_m < M)


@triton.jit(do_not_specialize=["M"])
def _loop_kernel(
    x_ptr, codes_ptr, scale_ptr, zero_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of any length: one loop for the range, one to quantize (the second read comes from cache)."""
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x_rows = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm
    rows = e * M + offs_m

    highs = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.int32)
    lows = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        high, low = range_keys(x)
        highs, lows = tl.maximum(highs, tl.where(mask, high, 0)), tl.maximum(lows, tl.where(mask, low, 0))
    high, low = range_of_keys(tl.max(highs, axis=1), tl.max(lows, axis=1))
    scale, zero = scale_and_zero(high, low)
    tl.store(scale_ptr + rows, scale, mask=mask_m)
    tl.store(zero_ptr + rows, zero, mask=mask_m)

    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        codes = quantize_around(x, scale[:, None], zero[:, None])
        tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)


def configs(x: Tensor, **_: Any):
    width = triton.next_power_of_2(x.shape[-1])
    if width <= 8192:
        warps = max(4, width // 1024)
        yield Config(kernel="row", BLOCK_M=max(1, 1024 // width), BLOCK_K=width, num_warps=warps, num_stages=1)
    yield Config(kernel="loop", BLOCK_M=4, BLOCK_K=1024, num_warps=4, num_stages=2)
    for rows in (1, 2, 4, 8):
        for warps in (4, 8, 16):
            if 512 <= rows * width <= 32768:
                yield Config(kernel="row", BLOCK_M=rows, BLOCK_K=width, num_warps=warps, num_stages=1)
    for rows, cols in ((1, 2048), (1, 4096), (8, 512), (16, 256)):
        yield Config(kernel="loop", BLOCK_M=rows, BLOCK_K=cols, num_warps=8, num_stages=3)


def legal(config: Config, x: Tensor, **_: Any) -> bool:
    return config["kernel"] == "loop" or config["BLOCK_K"] >= x.shape[-1]


def key(x: Tensor, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(x.shape[:-1].numel()), K=x.shape[-1], x=str(x.dtype))


def cost(x: Tensor, **_: Any) -> Cost:
    rows = x.shape[:-1].numel()
    return Cost(flops=3 * x.numel(), bytes=x.numel() * x.element_size() + x.numel() + 8 * rows)


def inputs(*, M, K, E=0, x_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0):
    return dict(x=strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout))


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 2, 3, 5, 8, 13), K=(1, 16, 33, 64, 100, 128, 257), E=(0, 1, 2),
        x_dtype=FLOAT_INPUTS, kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(loop=Kernel(_loop_kernel), row=Kernel(_row_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_int8_token_asymmetric(x: Tensor, *, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows to asymmetric INT8, one scale and zero point each.

    Args:
        x: (M, K) or (E, M, K) activations, fp32, bf16 or fp16, any strides.

    Returns:
        codes int8 of x's shape, contiguous; scale fp32 and zero_point int32 in -128..127, both (M, 1) or (E, M, 1);
        value = (code - zero_point) * scale.

    Raises:
        ValueError: dtype or rank does not fit, or K is 0.
    """
    *_, M, K = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    zero_point = torch.empty(scale.shape, dtype=torch.int32, device=x.device)
    if x.numel() == 0:
        return codes, scale, zero_point
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    config = dict(config)
    kernel = {"loop": _loop_kernel, "row": _row_kernel}[config.pop("kernel")]
    kernel[(triton.cdiv(M, config["BLOCK_M"]), E)](
        x, codes, scale, zero_point,
        M, K,
        stride_xe, x.stride(-2), x.stride(-1),
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes, scale, zero_point
