"""quantize_int8_static: INT8 codes by scales, and zero points, that are given, of any granularity.

    q = round_half_even(x[e, m, k] / scale[e, m // rows, k // cols])
    codes[e, m, k] = clamp(clamp(q, -2^31, 2^31 - 1) + zero_point[e, m // rows, k // cols], qmin, 127)

rows and cols say what shares a scale, -1 meaning the full extent: (-1, -1) tensor, (1, -1) token or channel, (1, g)
group, (b, b) block. `value = (code - zero_point) * scale`. NaN becomes the code of 0: 0, or the zero point. Source: the
static schemes of W8A8 INT8 inference (vLLM `scaled_int8_quant` with a scale), with true division.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_granularity, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.formats import Granularity, expand_groups
from fpk.formats import encode_int8 as encode_codes
from fpk.kernels._tile import quantize_int8
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, generator, sample, scales, strided
from fpk.shapes import activation_cases


def reference(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, rows: int = -1, cols: int = -1, qmin: int = -128
) -> Tensor:
    quotient = x.float() / expand_groups(scale, x.shape, rows, cols)
    if zero_point is None:
        return encode_codes(quotient, qmin).contiguous()
    rounded = torch.where(quotient.isnan(), 0.0, quotient.round().clamp(-(2.0**31), 2.0**31)).long()
    shifted = rounded.clamp(max=2**31 - 1) + expand_groups(zero_point, x.shape, rows, cols)
    return shifted.clamp(qmin, 127).to(torch.int8).contiguous()


def check(x: Tensor, scale: Tensor, zero_point: Tensor | None, rows: int, cols: int, qmin: int, **_: Any) -> None:
    expect_dtype("quantize_int8_static.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_int8_static.x", x, 2, 3)
    expect_granularity("quantize_int8_static", rows=rows, cols=cols)
    shape = Granularity("", rows, cols).scale_shape(x.shape)
    expect_shape("quantize_int8_static.scale", scale, shape)
    expect_dtype("quantize_int8_static.scale", scale, torch.float32)
    if zero_point is not None:
        expect_shape("quantize_int8_static.zero_point", zero_point, shape)
        expect_dtype("quantize_int8_static.zero_point", zero_point, torch.int32)
    expect_one_of("quantize_int8_static.qmin", qmin, (-128, -127))


@triton.jit
def _shifted_int8(v, zero, QMIN: tl.constexpr):
    """fp32 values to int8 around any int32 zero point: round half to even, saturate to int32, add, saturate to int8."""
    magnitude = tl.abs(v)
    # adding 2^23 leaves no fraction bits; from there on every fp32 is an integer
    rounded = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    rounded = tl.where(v != v, 0.0, tl.minimum(rounded, 2147483648.0))
    code = tl.where(v < 0, -rounded, rounded).to(tl.int64)
    code = tl.minimum(code, 2147483647) + zero
    return tl.minimum(tl.maximum(code, QMIN), 127).to(tl.int8)


@triton.jit(do_not_specialize=["M", "stride_se", "stride_ze"])
def _static_kernel(
    x_ptr, scale_ptr, zero_ptr, codes_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, stride_se, stride_sm, stride_sk, stride_ze, stride_zm, stride_zk,
    ROWS: tl.constexpr, COLS: tl.constexpr, QMIN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(K, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]

    group_m = (offs_m * 0 if ROWS == -1 else offs_m // ROWS)[:, None]
    scale_ptrs = scale_ptr + e * stride_se + group_m * stride_sm
    mask_s = (offs_m < M)[:, None]
    if COLS != -1:  # else one scale a row or fewer: a column of loads, not a tile of them
        group_k = (offs_k // COLS)[None, :]
        scale_ptrs = scale_ptrs + group_k * stride_sk
        mask_s = mask
    scale = tl.load(scale_ptrs, mask=mask_s, other=1.0)
    if zero_ptr is None:
        codes = quantize_int8(x, scale, QMIN)
    else:
        quotient = tl.math.div_rn(x, tl.broadcast_to(scale, x.shape))
        zero_ptrs = zero_ptr + e * stride_ze + group_m * stride_zm
        if COLS != -1:
            zero_ptrs = zero_ptrs + group_k * stride_zk
        codes = _shifted_int8(quotient, tl.load(zero_ptrs, mask=mask_s, other=0), QMIN)
    tl.store(codes_ptr + (e * M + offs_m)[:, None] * K + offs_k[None, :], codes, mask=mask)


def configs(**_: Any):
    yield Config(BLOCK_M=4, BLOCK_K=1024, num_warps=4, num_stages=2)
    for rows, cols in ((1, 2048), (1, 4096), (1, 8192), (2, 2048), (4, 2048), (8, 1024), (16, 512)):
        for warps in (4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps, num_stages=1)


def key(x: Tensor, zero_point: Tensor | None, rows: int, cols: int, **_: Any) -> dict[str, int | str]:
    M, zero = x.shape[:-1].numel(), int(zero_point is not None)
    return dict(M=bucket(M), K=x.shape[-1], rows=rows, cols=cols, x=str(x.dtype), zero_point=zero)


def cost(x: Tensor, scale: Tensor, zero_point: Tensor | None, **_: Any) -> Cost:
    parameters = scale.numel() * (4 if zero_point is None else 8)
    return Cost(flops=2 * x.numel(), bytes=x.numel() * (x.element_size() + 1) + parameters)


def inputs(
    *, M, K, E=0, granularity=(-1, -1), zero_point=None, qmin=-128, x_dtype=torch.bfloat16, kind="normal",
    layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    rows, cols = granularity
    shape = Granularity("", rows, cols).scale_shape(x.shape)
    zero = None
    if zero_point is not None:
        span = 128 if zero_point == "int8" else 2**31
        g = generator(seed + 2, device)
        zero = torch.randint(-span, span, shape, generator=g, device=device, dtype=torch.int64).to(torch.int32)
    return dict(x=x, scale=scales(shape, device, seed + 1), zero_point=zero, rows=rows, cols=cols, qmin=qmin)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 2),
        granularity=((-1, -1), (1, -1), (-1, 1), (1, 16), (4, 32), (3, 5)),
        zero_point=(None, "int8", "int32"), qmin=(-128, -127), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(static=Kernel(_static_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_int8_static(
    x: Tensor, scale: Tensor, zero_point: Tensor | None = None, rows: int = -1, cols: int = -1, qmin: int = -128, *,
    config: Config,
) -> Tensor:  # fmt: skip
    """Quantize to INT8 by given scales and zero points.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        scale: one element per group, x's rank: (1, 1) for the tensor, (M, 1) for tokens, (cdiv(M, rows),
            cdiv(K, cols)) in general, fp32. Must be positive; that is checked where scales are loaded, not here.
        zero_point: scale's shape, int32: the code of 0; or None for 0.
        rows, cols: elements that share a scale, -1 for the full extent.
        qmin: smallest code, -128 or -127.

    Returns:
        codes int8 of x's shape, contiguous; value = (code - zero_point) * scale.

    Raises:
        ValueError: dtype, rank or qmin does not fit, or scale or zero_point has not the granularity's shape.
    """
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    if x.numel() == 0:
        return codes
    *_, M, K = x.shape
    stacked = x.dim() == 3
    zero = scale if zero_point is None else zero_point  # for its strides
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"])
    _static_kernel[(tiles, x.shape[0] if stacked else 1)](
        x, scale, zero_point, codes,
        M, K,
        x.stride(0) if stacked else 0, x.stride(-2), x.stride(-1),
        scale.stride(0) if stacked else 0, scale.stride(-2), scale.stride(-1),
        zero.stride(0) if stacked else 0, zero.stride(-2), zero.stride(-1),
        ROWS=rows, COLS=cols, QMIN=qmin, enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes
