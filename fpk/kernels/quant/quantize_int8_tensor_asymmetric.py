"""quantize_int8_tensor_asymmetric: INT8 codes with one scale and one zero point per matrix, taken from the data.

    high, low   = max(max_k x, 0), min(min_k x, 0) over finite elements of rows before num_valid_tokens
    scale       = max(high - low, 1e-10) / 255
    zero_point  = round_half_even(-128 - low / scale)
    codes       = clamp(round_half_even(x / scale) + zero_point, -128, 127)

value = (code - zero_point) * scale. The range always includes 0: the zero point is itself a code, 0 (padding, ReLU)
is exact, and a constant matrix needs no special case (all zeros: scale 1e-10 / 255, zero point and codes -128). NaN
becomes the zero point, the code of 0, and does not touch the scale; +-Inf saturates; a matrix of nothing but Inf gets
scale Inf.

Two launches: ranges of parts, then a pass in which every program finishes the range for itself. A given scale and zero
point: quantize_int8_static. Source: the asymmetric per-tensor scheme of W8A8 inference, with true division and round
half to even.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.kernels._asymmetric import (
    asymmetric_codes,
    asymmetric_parameters,
    quantize_around,
    range_keys,
    range_of_keys,
    scale_and_zero,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(x: Tensor, num_valid_tokens: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    scale, zero_point = asymmetric_parameters(x, (-2, -1), num_valid_tokens)
    return asymmetric_codes(x, scale, zero_point), scale, zero_point


def check(x: Tensor, num_valid_tokens: Tensor | None, **_: Any) -> None:
    expect_dtype("quantize_int8_tensor_asymmetric.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_int8_tensor_asymmetric.x", x, 2, 3)
    expect_not_empty("quantize_int8_tensor_asymmetric.x", x, -1)
    if num_valid_tokens is not None:
        expect_shape("quantize_int8_tensor_asymmetric.num_valid_tokens", num_valid_tokens, (1,))
        expect_dtype("quantize_int8_tensor_asymmetric.num_valid_tokens", num_valid_tokens, torch.int32)


@triton.jit(do_not_specialize=["M", "parts"])
def _partial_kernel(
    x_ptr, valid_ptr, key_ptr,
    M, K, parts,
    stride_xe, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    rows = M
    if valid_ptr is not None:
        rows = tl.minimum(M, tl.load(valid_ptr))
    tiles_k = tl.cdiv(K, BLOCK_K)
    highs = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.int32)
    lows = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_k, parts):
        offs_m = (tile // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_k = (tile % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (offs_m < rows)[:, None] & (offs_k < K)[None, :]
        x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
        high, low = range_keys(tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32))  # [BLOCK_M, BLOCK_K]
        highs, lows = tl.maximum(highs, tl.where(mask, high, 0)), tl.maximum(lows, tl.where(mask, low, 0))
    # with no row that counts the range is 0, not the "all Inf" that keys of nothing stand for
    least = tl.where(rows > 0, 0, 1)
    key_ptr += (e * parts + tl.program_id(0)) * 2
    tl.store(key_ptr, tl.maximum(tl.max(tl.max(highs, axis=1), axis=0), least))
    tl.store(key_ptr + 1, tl.maximum(tl.max(tl.max(lows, axis=1), axis=0), least))


@triton.jit(do_not_specialize=["M", "parts"])
def _quantize_kernel(
    x_ptr, key_ptr, codes_ptr, scale_ptr, zero_ptr,
    M, K, parts,
    stride_xe, stride_xm, stride_xk,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    offs_p = tl.arange(0, BLOCK_P)
    keys = key_ptr + (e * parts + offs_p) * 2
    high = tl.max(tl.load(keys, mask=offs_p < parts, other=0), axis=0)
    low = tl.max(tl.load(keys + 1, mask=offs_p < parts, other=0), axis=0)
    high, low = range_of_keys(high, low)
    scale, zero = scale_and_zero(high, low)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + e, scale)
        tl.store(zero_ptr + e, zero)
    # last tiles first: the first pass read them last, so they are still in L2
    tiles_k = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    offs_m = (tile // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = (tile % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
    codes = quantize_around(x, tl.full((1, 1), 0.0, tl.float32) + scale, zero)
    tl.store(codes_ptr + (e * M + offs_m)[:, None] * K + offs_k[None, :], codes, mask=mask)


def configs(**_: Any):
    yield Config(BLOCK_M=4, BLOCK_K=1024, PROGRAMS=256, num_warps=4, num_stages=2)
    for rows, cols in ((1, 4096), (1, 8192), (2, 4096), (4, 1024), (4, 2048), (8, 1024)):
        for programs in (132, 264, 528, 1056):
            for warps in (4, 8):
                yield Config(BLOCK_M=rows, BLOCK_K=cols, PROGRAMS=programs, num_warps=warps, num_stages=3)


def key(x: Tensor, **_: Any) -> dict[str, int | str]:
    E = x.shape[0] if x.dim() == 3 else 0
    return dict(M=bucket(x.shape[-2]), K=x.shape[-1], E=E, x=str(x.dtype))


def cost(x: Tensor, **_: Any) -> Cost:
    # two reads: the scale must be known before the first code can be written
    return Cost(flops=3 * x.numel(), bytes=2 * x.numel() * x.element_size() + x.numel() + 8)


def inputs(
    *, M, K, E=0, x_dtype=torch.bfloat16, kind="normal", layout="contiguous", valid=None,
    device="cuda", seed=0,
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    count = None if valid is None else torch.tensor([int(valid * M)], dtype=torch.int32, device=device)
    return dict(x=x, num_valid_tokens=count)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 2), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"), valid=(None, 0.0, 0.5, 1.0),
    ),
    kernels=dict(quantize=Kernel(_quantize_kernel), partial=Kernel(_partial_kernel, named=False)),
    configs=configs, launcher_fields=("PROGRAMS",), key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_int8_tensor_asymmetric(
    x: Tensor, num_valid_tokens: Tensor | None = None, *, config: Config
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix, or each matrix of a stack, to asymmetric INT8 with one scale and zero point.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        num_valid_tokens: (1,) int32 on x's device or None; rows from it on are padding: quantized, but not part of the
            range.

    Returns:
        codes int8 of x's shape, contiguous; scale fp32 and zero_point int32 in -128..127, both (1, 1) or (E, 1, 1);
        value = (code - zero_point) * scale.

    Raises:
        ValueError: dtype, rank or num_valid_tokens does not fit, or K is 0.
    """
    *_, M, K = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-2], 1, 1), dtype=torch.float32, device=x.device)
    zero_point = torch.empty(scale.shape, dtype=torch.int32, device=x.device)
    if scale.numel() == 0:
        return codes, scale, zero_point
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    config = dict(config)
    tiles = max(1, triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"]))
    programs = config.pop("PROGRAMS")
    parts = min(programs, tiles)
    keys = torch.empty((E, parts, 2), dtype=torch.int32, device=x.device)
    _partial_kernel[(parts, E)](x, num_valid_tokens, keys, M, K, parts, stride_xe, x.stride(-2), x.stride(-1), **config)
    _quantize_kernel[(tiles, E)](
        x, keys, codes, scale, zero_point,
        M, K, parts,
        stride_xe, x.stride(-2), x.stride(-1),
        BLOCK_P=triton.next_power_of_2(programs), enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes, scale, zero_point
