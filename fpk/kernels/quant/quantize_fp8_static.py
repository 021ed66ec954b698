"""quantize_fp8_static: FP8 codes by scales that are given, of any granularity.

    codes[e, m, k] = fp8(clamp(x[e, m, k] / scale[e, m // rows, k // cols], -max, max))

rows and cols say what shares a scale, -1 meaning the full extent: (-1, -1) tensor, (1, -1) token or channel, (1, g)
group, (b, b) block. The scale divides; `value = code * scale`. Source: static activation quantization of W8A8
checkpoints (vLLM `scaled_fp8_quant` with a scale), with true division.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_granularity, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, Granularity, encode, expand_groups
from fpk.kernels._pairs import as_words, converts_pairs, fp8_of_quotients, halves, has_flat_pairs
from fpk.kernels._tile import after_previous, early_start, fp8_constants, quantize_fp8, quotient_within
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, scales, strided
from fpk.shapes import activation_cases


def reference(
    x: Tensor, scale: Tensor, rows: int = -1, cols: int = -1, dtype: torch.dtype = torch.float8_e4m3fn
) -> Tensor:
    return encode(x.float() / expand_groups(scale, x.shape, rows, cols), FP8[dtype]).view(dtype).contiguous()


def check(x: Tensor, scale: Tensor, rows: int, cols: int, dtype: torch.dtype, **_: Any) -> None:
    expect_dtype("quantize_fp8_static.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_fp8_static.x", x, 2, 3)
    expect_one_of("quantize_fp8_static.dtype", dtype, FP8)
    expect_granularity("quantize_fp8_static", rows=rows, cols=cols)
    expect_shape("quantize_fp8_static.scale", scale, Granularity("", rows, cols).scale_shape(x.shape))
    expect_dtype("quantize_fp8_static.scale", scale, torch.float32)


@triton.jit(do_not_specialize=["M", "stride_se"])
def _static_kernel(
    x_ptr, scale_ptr, codes_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, stride_se, stride_sm, stride_sk,
    PDL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(K, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]

    group_m = offs_m * 0 if ROWS == -1 else offs_m // ROWS
    scale_rows = scale_ptr + e * stride_se + group_m[:, None] * stride_sm
    if COLS == -1:  # one scale a row or fewer: a column of loads, not a tile of them
        scale = tl.load(scale_rows, mask=(offs_m < M)[:, None], other=1.0)
    else:
        scale = tl.load(scale_rows + (offs_k // COLS)[None, :] * stride_sk, mask=mask, other=1.0)
    codes = quantize_fp8(x, scale, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
    tl.store(codes_ptr + (e * M + offs_m)[:, None] * K + offs_k[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    words_ptr, scale_ptr, codes_ptr,
    M, K,
    stride_we, stride_se, PDL: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bf16 rows without gaps, two values to a register, one scale a matrix."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    total = M.to(tl.int64) * (K // 2)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + e * stride_we + offs, mask=offs < total, other=0)
    scale = tl.load(scale_ptr + e * stride_se + tl.arange(0, 1))
    low, high = halves(words)
    low, high = quotient_within(low, scale, -MAX, MAX), quotient_within(high, scale, -MAX, MAX)
    codes = fp8_of_quotients(low, high, MANTISSA, BIAS, NAN_CODE, HARDWARE, NATIVE)
    tl.store(codes_ptr + e * total + offs, codes, mask=offs < total)


def configs(**_: Any):
    yield Config(kernel="pairs", BLOCK=2048, num_warps=4, num_stages=1)
    for block, warps in ((1024, 2), (2048, 2), (4096, 4), (4096, 8), (8192, 8)):
        yield Config(kernel="pairs", BLOCK=block, num_warps=warps, num_stages=1)
    yield Config(kernel="static", BLOCK_M=2, BLOCK_K=2048, num_warps=4, num_stages=1)
    for rows, cols in ((1, 8192), (1, 4096), (4, 1024), (1, 2048), (4, 2048), (8, 1024), (16, 512), (1, 1024)):
        for warps in (4, 8):
            yield Config(kernel="static", BLOCK_M=rows, BLOCK_K=cols, num_warps=warps, num_stages=1)


def legal(config: Config, x: Tensor, rows: int, cols: int, **_: Any) -> bool:
    return config["kernel"] == "static" or (rows == cols == -1 and has_flat_pairs(x))


def key(x: Tensor, rows: int, cols: int, dtype: torch.dtype, **_: Any) -> dict[str, int | str]:
    M = x.shape[:-1].numel()
    return dict(M=bucket(M), K=x.shape[-1], rows=rows, cols=cols, x=str(x.dtype), dtype=str(dtype))


def cost(x: Tensor, scale: Tensor, **_: Any) -> Cost:
    return Cost(flops=2 * x.numel(), bytes=x.numel() * x.element_size() + x.numel() + 4 * scale.numel())


def inputs(
    *, M, K, E=0, granularity=(-1, -1), x_dtype=torch.bfloat16, dtype=torch.float8_e4m3fn, kind="normal",
    layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    rows, cols = granularity
    scale = scales(Granularity("", rows, cols).scale_shape(x.shape), device, seed + 1)
    return dict(x=x, scale=scale, rows=rows, cols=cols, dtype=dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 2),
        granularity=((-1, -1), (1, -1), (-1, 1), (1, 16), (4, 32), (3, 5)),
        x_dtype=FLOAT_INPUTS, dtype=tuple(FP8), kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(static=Kernel(_static_kernel), pairs=Kernel(_pairs_kernel)),
    configs=configs, legal=legal, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_fp8_static(
    x: Tensor, scale: Tensor, rows: int = -1, cols: int = -1, dtype: torch.dtype = torch.float8_e4m3fn, *,
    config: Config,
) -> Tensor:  # fmt: skip
    """Quantize to FP8 by given scales.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        scale: one element per group, x's rank: (1, 1) for the tensor, (M, 1) for tokens, (cdiv(M, rows),
            cdiv(K, cols)) in general, fp32. Must be positive; that is checked where scales are loaded, not here.
        rows, cols: elements that share a scale, -1 for the full extent.
        dtype: the fp8 type of the codes.

    Returns:
        codes of x's shape, contiguous; value = code * scale.

    Raises:
        ValueError: dtype or rank does not fit, or the scale's shape is not the granularity's.
    """
    fmt = FP8[dtype]
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return codes
    *_, M, K = x.shape
    stacked = x.dim() == 3
    config, device = dict(config), of(x.device)
    constants = dict(**fp8_constants(fmt, device), **early_start(device), enable_fp_fusion=False)
    if config.pop("kernel") == "pairs":
        _pairs_kernel[(triton.cdiv(M * K // 2, config["BLOCK"]), x.shape[0] if stacked else 1)](
            as_words(x), scale, codes.view(torch.int16), M, K,
            x.stride(0) // 2 if stacked else 0, scale.stride(0) if stacked else 0,
            NATIVE=converts_pairs(fmt, device), **constants, **config,
        )  # fmt: skip
        return codes
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"])
    _static_kernel[(tiles, x.shape[0] if stacked else 1)](
        x, scale, codes.view(torch.uint8),
        M, K,
        x.stride(0) if stacked else 0, x.stride(-2), x.stride(-1),
        scale.stride(0) if stacked else 0, scale.stride(-2), scale.stride(-1),
        ROWS=rows, COLS=cols, **constants, **config,
    )  # fmt: skip
    return codes
