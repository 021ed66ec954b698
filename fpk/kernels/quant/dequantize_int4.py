"""dequantize_int4: packed INT4 codes back to values.

    out[m, k] = (codes[m, k] - zero_point[m, k // group]) * scale[m, k // group]

The difference is an integer, the product is formed in fp32 and rounded once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.formats import INT4, decode, expand_groups
from fpk.kernels._microscale import load_packed
from fpk.kernels._packed import unpack_codes
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, scales, strided
from fpk.shapes import activation_cases


def reference(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, group: int = 128,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    code = decode(unpack_codes(codes, 4), INT4)
    if zero_point is not None:
        code = code - expand_groups(zero_point, code.shape, 1, group)
    return (code * expand_groups(scale, code.shape, 1, group)).to(out_dtype).contiguous()


def check(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, group: int, out_dtype: torch.dtype, **_: Any
) -> None:  # fmt: skip
    expect_dtype("dequantize_int4.codes", codes, torch.uint8)
    expect_rank("dequantize_int4.codes", codes, 2, 3)
    if group < 2 or group % 2:
        raise ValueError(f"dequantize_int4.group: expected an even positive number, got {group}")
    expect_dtype("dequantize_int4.scale", scale, torch.float32)
    expect_shape("dequantize_int4.scale", scale, (*codes.shape[:-1], triton.cdiv(codes.shape[-1] * 2, group)))
    if zero_point is not None:
        expect_dtype("dequantize_int4.zero_point", zero_point, torch.int32)
        expect_shape("dequantize_int4.zero_point", zero_point, tuple(scale.shape))
    expect_one_of("dequantize_int4.out_dtype", out_dtype, FLOAT_INPUTS)


@triton.jit(do_not_specialize=["M", "stride_se", "stride_ze"])
def _dequantize_kernel(
    codes_ptr, scale_ptr, zero_ptr, out_ptr,
    M, K, width,
    stride_ce, stride_cm, stride_ck, stride_se, stride_sm, stride_sk, stride_ze, stride_zm, stride_zk,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(K, BLOCK_K)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK_K + tl.arange(0, 1)
    cols = first[:, None] + tl.arange(0, BLOCK_K)[None, :]
    mask_m = offs_m < M
    mask = mask_m[:, None, None] & (cols < K)[None, :, :]
    codes = load_packed(
        codes_ptr + e * stride_ce + offs_m * stride_cm, first // 2, mask_m, width, stride_ck, BLOCK_K, 4, False
    )  # fmt: skip
    rows, groups = offs_m[:, None, None], (cols // GROUP)[None, :, :]
    value = ((codes << 28) >> 28).to(tl.float32)
    if zero_ptr is not None:
        at = zero_ptr + e * stride_ze + rows * stride_zm + groups * stride_zk
        value -= tl.load(at, mask=mask, other=0).to(tl.float32)
    value *= tl.load(scale_ptr + e * stride_se + rows * stride_sm + groups * stride_sk, mask=mask, other=0.0)
    at = out_ptr + (e * M + offs_m)[:, None, None] * K + cols[None, :, :]
    tl.store(at, value.to(out_ptr.dtype.element_ty), mask=mask)


def configs(codes: Tensor, **_: Any):
    rows = 8 if codes.shape[-2] > 4 else 1
    yield Config(BLOCK_M=rows, BLOCK_K=2048 // rows, num_warps=4)
    for rows, cols in ((1, 1024), (1, 2048), (1, 4096), (4, 512), (4, 1024), (8, 512), (16, 256)):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps)


def key(codes: Tensor, group: int, out_dtype: torch.dtype, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(codes.shape[:-1].numel()), K=codes.shape[-1] * 2, group=group, out=str(out_dtype))


def cost(codes: Tensor, scale: Tensor, out_dtype: torch.dtype, **_: Any) -> Cost:
    count = codes.numel() * 2
    return Cost(flops=2 * count, bytes=codes.numel() + count * out_dtype.itemsize + scale.numel() * 4)


def inputs(
    *, M, K, E=0, group=128, zero_point=False, out_dtype=torch.bfloat16, layout="contiguous", device="cuda", seed=0
):  # fmt: skip
    lead, g = ((E, M) if E else (M,)), generator(seed, device)
    codes = torch.randint(0, 256, (*lead, -(-K // 2)), generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    scale = scales((*lead, triton.cdiv(codes.shape[-1] * 2, group)), device, seed + 1)
    zero = torch.randint(-8, 8, scale.shape, generator=g, device=device, dtype=torch.int32) if zero_point else None
    return dict(codes=strided(codes, layout), scale=strided(scale, layout), zero_point=zero, group=group,
                out_dtype=out_dtype)  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(2, 16, 34, 100, 272), E=(0, 1, 2), group=(16, 48, 128), zero_point=(False, True),
        out_dtype=FLOAT_INPUTS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(dequantize=Kernel(_dequantize_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def dequantize_int4(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None = None, group: int = 128,
    out_dtype: torch.dtype = torch.float32, *, config: Config,
) -> Tensor:  # fmt: skip
    """Values of packed INT4 codes.

    Args:
        codes: (M, K / 2) or (E, M, K / 2) uint8, two's complement, the first of two in the low half. Any strides.
        scale: fp32 (..., M, cdiv(K, group)).
        zero_point: int32 of scale's shape, or None.
        group: columns that share a scale, even.
        out_dtype: fp32, bf16 or fp16; values beyond fp16 become Inf.

    Returns:
        (..., M, K) of out_dtype, contiguous.

    Raises:
        ValueError: a dtype, shape or group does not fit.
    """
    *lead, M, width = codes.shape
    K = width * 2
    out = torch.empty((*lead, M, K), dtype=out_dtype, device=codes.device)
    if out.numel() == 0:
        return out
    stacked = codes.dim() == 3
    strides = [(t.stride(0) if stacked else 0, *t.stride()[-2:]) if t is not None else (0, 0, 0)
               for t in (codes, scale, zero_point)]  # fmt: skip
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"])
    _dequantize_kernel[(tiles, codes.shape[0] if stacked else 1)](
        codes, scale, zero_point, out, M, K, width, *strides[0], *strides[1], *strides[2],
        GROUP=group, enable_fp_fusion=False, **config,
    )  # fmt: skip
    return out
