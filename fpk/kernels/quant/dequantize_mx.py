"""dequantize_mx: microscaling codes back to values.

    out[m, k] = element(codes[m, k]) * 2^(scale[m, k // 32] - 127)

The product is formed in fp32 and rounded once. Scale byte 255 makes its block NaN; byte 0 is 2^-127. quantize_mx says
what the formats are.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_multiple, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import E8M0, FP8, MX, MX_BLOCK, Microscaling, decode
from fpk.kernels._microscale import decode_element, element_constants, load_packed
from fpk.kernels._packed import unpack_codes
from fpk.kernels._tile import decode_e8m0
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, strided
from fpk.shapes import activation_cases


def reference(
    codes: Tensor, scale: Tensor, format: str = "mxfp4", packed: bool = True, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    mx = MX[format]
    if packed and mx.element.bits < 8:
        codes = unpack_codes(codes, mx.element.bits)
    K = codes.shape[-1]
    factor = decode(scale, E8M0).repeat_interleave(MX_BLOCK, -1)[..., :K]
    return (decode(codes, mx.element) * 2.0**mx.shift * factor).to(out_dtype).contiguous()


def check(codes: Tensor, scale: Tensor, format: str, packed: bool, out_dtype: torch.dtype, **_: Any) -> None:
    expect_one_of("dequantize_mx.format", format, MX)
    expect_dtype("dequantize_mx.codes", codes, MX[format].element.dtype)
    expect_rank("dequantize_mx.codes", codes, 2, 3)
    if _bits(format, packed) == 6:
        expect_multiple("dequantize_mx.codes", codes, 3)
    K = codes.shape[-1] * 8 // _bits(format, packed)
    expect_dtype("dequantize_mx.scale", scale, torch.uint8)
    expect_shape("dequantize_mx.scale", scale, (*codes.shape[:-1], triton.cdiv(K, MX_BLOCK)))
    expect_one_of("dequantize_mx.out_dtype", out_dtype, FLOAT_INPUTS)


def _bits(format: str, packed: bool) -> int:
    """Bits that a code takes in memory."""
    return MX[format].element.bits if packed else 8


@triton.jit(do_not_specialize=["M", "stride_se"])
def _dequantize_kernel(
    codes_ptr, scale_ptr, out_ptr,
    M, K, width,
    stride_ce, stride_cm, stride_ck, stride_se, stride_sm, stride_sk,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, IEEE: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, NAN_CODE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(K, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    cols = (offs_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
    mask = mask_m[:, None, None] & (cols < K)
    rows = codes_ptr + e * stride_ce + offs_m * stride_cm
    if PACKED:
        codes = load_packed(rows, offs_g * (BLOCK * BITS // 8), mask_m, width, stride_ck, BLOCK, BITS, False)
    else:
        codes = tl.load(rows[:, None, None] + cols * stride_ck, mask=mask, other=0)
    scale_ptrs = scale_ptr + e * stride_se + offs_m[:, None] * stride_sm + offs_g[None, :] * stride_sk
    byte = tl.load(scale_ptrs, mask=mask_m[:, None] & (offs_g < groups)[None, :], other=0)
    value = decode_element(codes, BITS, MANTISSA, BIAS, NAN_CODE, IEEE) * decode_e8m0(byte)[:, :, None]
    tl.store(out_ptr + (e * M + offs_m)[:, None, None] * K + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def configs(codes: Tensor, **_: Any):
    rows = 8 if codes.shape[-2] > 4 else 1
    yield Config(BLOCK_M=rows, GROUPS=64 // rows, num_warps=4)
    for rows, groups in ((1, 32), (1, 64), (1, 128), (2, 32), (4, 16), (4, 32), (8, 8), (16, 4)):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, GROUPS=groups, num_warps=warps)


def key(
    codes: Tensor, format: str, packed: bool, out_dtype: torch.dtype, **_: Any
) -> dict[str, int | str]:  # fmt: skip
    K = codes.shape[-1] * 8 // _bits(format, packed)
    return dict(M=bucket(codes.shape[:-1].numel()), K=K, format=format, packed=int(packed), out=str(out_dtype))


def cost(codes: Tensor, scale: Tensor, format: str, packed: bool, out_dtype: torch.dtype, **_: Any) -> Cost:
    count = codes.numel() * 8 // _bits(format, packed)
    return Cost(flops=count, bytes=codes.numel() + count * out_dtype.itemsize + scale.numel())


def inputs(
    *, M, K, E=0, format="mxfp4", packed=True, out_dtype=torch.bfloat16, layout="contiguous", device="cuda", seed=0
):  # fmt: skip
    mx: Microscaling = MX[format]
    K = -(-K // 4) * 4 if packed and mx.element.bits < 8 else K
    lead, g = ((E, M) if E else (M,)), generator(seed, device)
    # every code there is, and with unpacked FP4 and FP6 bits above the code that must not count
    shape = (*lead, K * _bits(format, packed) // 8)
    codes = torch.randint(0, 256, shape, generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    if not packed and mx.element.bits < 8:
        codes &= (1 << mx.element.bits) - 1
    scale = torch.randint(0, 256, (*lead, triton.cdiv(K, MX_BLOCK)), generator=g, device=device, dtype=torch.int16)
    codes = strided(codes, layout)
    codes = codes if mx.element.dtype is torch.uint8 else codes.view(mx.element.dtype)
    return dict(codes=codes, scale=strided(scale.to(torch.uint8), layout), format=format, packed=packed,
                out_dtype=out_dtype)  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 272), E=(0, 1, 2), format=tuple(MX), packed=(False, True),
        out_dtype=FLOAT_INPUTS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(dequantize=Kernel(_dequantize_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def dequantize_mx(
    codes: Tensor, scale: Tensor, format: str = "mxfp4", packed: bool = True, out_dtype: torch.dtype = torch.float32,
    *, config: Config,
) -> Tensor:  # fmt: skip
    """Values of microscaling codes.

    Args:
        codes: (M, K) or (E, M, K) fp8 or int8; uint8 for FP4 and FP6: (..., K / 2) or (..., 3 K / 4) if packed, else
            (..., K) codes of which no bit above the format's may be set. Any strides.
        scale: (M, cdiv(K, 32)) or (E, M, cdiv(K, 32)) uint8, e8m0.
        format: as of `quantize_mx`.
        packed: whether FP4 and FP6 codes are packed.
        out_dtype: fp32, bf16 or fp16; values beyond fp16 become Inf.

    Returns:
        (M, K) or (E, M, K) of out_dtype, contiguous.

    Raises:
        ValueError: a dtype, shape or format does not fit.
    """
    mx = MX[format]
    *lead, M, width = codes.shape
    bits = _bits(format, packed)
    K = width * 8 // bits
    out = torch.empty((*lead, M, K), dtype=out_dtype, device=codes.device)
    if out.numel() == 0:
        return out
    stacked = codes.dim() == 3
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(triton.cdiv(K, MX_BLOCK), config["GROUPS"])
    constants = element_constants(mx.element, of(codes.device))
    _dequantize_kernel[(tiles, codes.shape[0] if stacked else 1)](
        codes.view(torch.uint8) if codes.dtype in FP8 else codes, scale, out,
        M, K, width,
        codes.stride(0) if stacked else 0, codes.stride(-2), codes.stride(-1),
        scale.stride(0) if stacked else 0, scale.stride(-2), scale.stride(-1),
        BLOCK=MX_BLOCK, PACKED=bits < 8, IEEE=mx.element.kind == "ieee", BITS=constants["BITS"],
        MANTISSA=constants["MANTISSA"], BIAS=constants["BIAS"], NAN_CODE=mx.element.nan_code,
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return out
