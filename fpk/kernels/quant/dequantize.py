"""dequantize: FP8 or INT8 codes and their scales back to values.

    out[e, m, k] = (codes[e, m, k] - zero_point[g]) * scale[g],   g = (e, m // rows, k // cols)

One op for every granularity: rows and cols say what shares a scale, -1 meaning the full extent. The product is formed
in fp32 and rounded once. Scales are fp32, or e8m0 bytes (powers of two; byte 0 is 2^-127, 255 is NaN).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_granularity, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.formats import E8M0, FP8, Granularity, decode, expand_groups
from fpk.kernels._tile import decode_e8m0, decode_fp8
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, generator, sample, scales, strided
from fpk.shapes import activation_cases


def reference(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, rows: int = -1, cols: int = -1,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    factor = decode(scale, E8M0) if scale.dtype is torch.uint8 else scale
    value = codes.float() if codes.dtype is torch.int8 else decode(codes, FP8[codes.dtype])
    if zero_point is not None:
        value = value - expand_groups(zero_point.float(), codes.shape, rows, cols)
    return (value * expand_groups(factor, codes.shape, rows, cols)).to(out_dtype).contiguous()


def check(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, rows: int, cols: int, out_dtype: torch.dtype, **_: Any
) -> None:
    expect_dtype("dequantize.codes", codes, *FP8, torch.int8)
    expect_rank("dequantize.codes", codes, 2, 3)
    expect_granularity("dequantize", rows=rows, cols=cols)
    expect_shape("dequantize.scale", scale, Granularity("", rows, cols).scale_shape(codes.shape))
    expect_dtype("dequantize.scale", scale, torch.float32, torch.uint8)
    expect_one_of("dequantize.out_dtype", out_dtype, FLOAT_INPUTS)
    if zero_point is not None:
        expect_dtype("dequantize.codes (with a zero_point)", codes, torch.int8)
        expect_shape("dequantize.zero_point", zero_point, tuple(scale.shape))
        expect_dtype("dequantize.zero_point", zero_point, torch.int32)


@triton.jit(do_not_specialize=["M", "stride_se"])
def _dequantize_kernel(
    codes_ptr, scale_ptr, zero_ptr, out_ptr,
    M, K,
    stride_ce, stride_cm, stride_ck, stride_se, stride_sm, stride_sk, stride_ze, stride_zm, stride_zk,
    ROWS: tl.constexpr, COLS: tl.constexpr, FLOAT: tl.constexpr, E8M0: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(K, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    code_ptrs = codes_ptr + e * stride_ce + offs_m[:, None] * stride_cm + offs_k[None, :] * stride_ck
    code = tl.load(code_ptrs, mask=mask, other=0)  # [BLOCK_M, BLOCK_K]
    if FLOAT:
        value = decode_fp8(code, MANTISSA, BIAS, NAN_CODE, IEEE)
    else:
        value = code.to(tl.float32)
    group_m = (offs_m * 0 if ROWS == -1 else offs_m // ROWS)[:, None]
    group_k = (offs_k * 0 if COLS == -1 else offs_k // COLS)[None, :]
    scale = tl.load(scale_ptr + e * stride_se + group_m * stride_sm + group_k * stride_sk, mask=mask, other=0)
    if E8M0:
        scale = decode_e8m0(scale)
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + e * stride_ze + group_m * stride_zm + group_k * stride_zk, mask=mask, other=0)
        value -= zero.to(tl.float32)
    out = (value * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (e * M + offs_m)[:, None] * K + offs_k[None, :], out, mask=mask)


def configs(**_: Any):
    yield Config(BLOCK_M=4, BLOCK_K=1024, num_warps=4, num_stages=2)
    for rows, cols in ((1, 2048), (1, 4096), (2, 2048), (4, 512), (8, 1024), (16, 256)):
        for warps in (4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps, num_stages=1)


def key(codes: Tensor, scale: Tensor, rows: int, cols: int, out_dtype: torch.dtype, **_: Any) -> dict[str, int | str]:
    M = codes.shape[:-1].numel()
    return dict(
        M=bucket(M), K=codes.shape[-1], rows=rows, cols=cols, codes=str(codes.dtype), scale=str(scale.dtype),
        out=str(out_dtype),
    )  # fmt: skip


def cost(codes: Tensor, scale: Tensor, out_dtype: torch.dtype, **_: Any) -> Cost:
    scale_bytes = scale.numel() * scale.element_size()
    return Cost(flops=codes.numel(), bytes=codes.numel() * (1 + out_dtype.itemsize) + scale_bytes)


def inputs(
    *, M, K, E=0, granularity=(1, -1), dtype=torch.float8_e4m3fn, scale_format="fp32", zero_point=False,
    out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    shape = (E, M, K) if E else (M, K)
    codes = strided(sample(shape, dtype, kind, device, seed), layout)
    rows, cols = granularity
    grid = Granularity("", rows, cols).scale_shape(shape)
    g = generator(seed + 2, device)
    if scale_format == "e8m0":
        scale = torch.randint(0, 256, grid, generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    else:
        scale = scales(grid, device, seed + 1)
    zero = None
    if zero_point and dtype is torch.int8:
        zero = torch.randint(-128, 128, grid, generator=g, device=device, dtype=torch.int32)
    return dict(codes=codes, scale=scale, zero_point=zero, rows=rows, cols=cols, out_dtype=out_dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 2),
        granularity=((-1, -1), (1, -1), (-1, 1), (1, 16), (4, 32), (3, 5)), dtype=(*FP8, torch.int8),
        scale_format=("fp32", "e8m0"), zero_point=(False, True), out_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(dequantize=Kernel(_dequantize_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def dequantize(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, rows: int = -1, cols: int = -1,
    out_dtype: torch.dtype = torch.float32, *, config: Config,
) -> Tensor:  # fmt: skip
    """Values of quantized codes.

    Args:
        codes: (M, K) or (E, M, K), an fp8 type or int8, any strides.
        scale: one element per group, codes' rank, fp32 or uint8 (e8m0).
        zero_point: int32 of scale's shape or None; int8 only.
        rows, cols: elements that share a scale, -1 for the full extent.
        out_dtype: fp32, bf16 or fp16; values beyond fp16 become Inf.

    Returns:
        values of codes' shape, contiguous.

    Raises:
        ValueError: a dtype or shape does not fit.
    """
    out = torch.empty(codes.shape, dtype=out_dtype, device=codes.device)
    if codes.numel() == 0:
        return out
    fmt = FP8.get(codes.dtype)
    *_, M, K = codes.shape
    stacked = codes.dim() == 3
    zero_strides = (0, 0, 0)
    if zero_point is not None:
        zero_strides = (zero_point.stride(0) if stacked else 0, zero_point.stride(-2), zero_point.stride(-1))
    grid = (triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"]), codes.shape[0] if stacked else 1)
    _dequantize_kernel[grid](
        codes if fmt is None else codes.view(torch.uint8), scale, zero_point, out,
        M, K,
        codes.stride(0) if stacked else 0, codes.stride(-2), codes.stride(-1),
        scale.stride(0) if stacked else 0, scale.stride(-2), scale.stride(-1), *zero_strides,
        ROWS=rows, COLS=cols, FLOAT=fmt is not None, E8M0=scale.dtype is torch.uint8,
        MANTISSA=fmt.mantissa_bits if fmt else 0, BIAS=fmt.bias if fmt else 0, NAN_CODE=fmt.nan_code if fmt else 0,
        IEEE=fmt is not None and fmt.kind == "ieee", enable_fp_fusion=False, **config,
    )  # fmt: skip
    return out
