"""dequantize_nvfp4: NVFP4 codes back to values.

    out[m, k] = codes[m, k] * scale[m, k // 16] * global_scale

codes * scale is exact in fp32; the product with the global scale is rounded to fp32, and then once to the output. A
global scale is a multiplier; whoever loads a checkpoint that stores the reciprocal inverts it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.formats import E2M1, E4M3FN, NVFP4_BLOCK, decode
from fpk.kernels._microscale import decode_narrow, load_packed
from fpk.kernels._packed import unpack_codes
from fpk.kernels._tile import decode_fp8
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, scales, strided
from fpk.shapes import activation_cases


def reference(
    codes: Tensor, scale: Tensor, global_scale: Tensor, packed: bool = True, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    if packed:
        codes = unpack_codes(codes, 4)
    K = codes.shape[-1]
    blocks = decode(scale.view(torch.uint8), E4M3FN).repeat_interleave(NVFP4_BLOCK, -1)[..., :K]
    return (decode(codes, E2M1) * blocks * global_scale).to(out_dtype).contiguous()


def check(
    codes: Tensor, scale: Tensor, global_scale: Tensor, packed: bool, out_dtype: torch.dtype, **_: Any
) -> None:  # fmt: skip
    expect_dtype("dequantize_nvfp4.codes", codes, torch.uint8)
    expect_rank("dequantize_nvfp4.codes", codes, 2, 3)
    K = codes.shape[-1] * (2 if packed else 1)
    expect_dtype("dequantize_nvfp4.scale", scale, torch.float8_e4m3fn, torch.uint8)
    expect_shape("dequantize_nvfp4.scale", scale, (*codes.shape[:-1], triton.cdiv(K, NVFP4_BLOCK)))
    expect_dtype("dequantize_nvfp4.global_scale", global_scale, torch.float32)
    expect_shape("dequantize_nvfp4.global_scale", global_scale, (*codes.shape[:-2], 1, 1), (*codes.shape[:-1], 1))
    expect_one_of("dequantize_nvfp4.out_dtype", out_dtype, FLOAT_INPUTS)


@triton.jit(do_not_specialize=["M", "stride_se"])
def _dequantize_kernel(
    codes_ptr, scale_ptr, global_ptr, out_ptr,
    M, K, width,
    stride_ce, stride_cm, stride_ck, stride_se, stride_sm, stride_sk, stride_ge, stride_gm,
    BLOCK: tl.constexpr, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
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
        codes = load_packed(rows, offs_g * (BLOCK // 2), mask_m, width, stride_ck, BLOCK, 4, False)
    else:
        codes = tl.load(rows[:, None, None] + cols * stride_ck, mask=mask, other=0).to(tl.int32)
    scale_ptrs = scale_ptr + e * stride_se + offs_m[:, None] * stride_sm + offs_g[None, :] * stride_sk
    stored = tl.load(scale_ptrs, mask=mask_m[:, None] & (offs_g < groups)[None, :], other=0)
    scale = decode_fp8(stored, 3, 7, 0x7F, False)
    over = tl.load(global_ptr + e * stride_ge + offs_m * stride_gm, mask=mask_m, other=1.0)
    value = decode_narrow(codes, 1, 1, 4) * scale[:, :, None] * over[:, None, None]
    tl.store(out_ptr + (e * M + offs_m)[:, None, None] * K + cols, value.to(out_ptr.dtype.element_ty), mask=mask)


def configs(codes: Tensor, **_: Any):
    rows = 8 if codes.shape[-2] > 4 else 1
    yield Config(BLOCK_M=rows, GROUPS=128 // rows, num_warps=4)
    for rows, groups in ((1, 64), (1, 128), (1, 256), (2, 64), (4, 32), (4, 64), (8, 16), (16, 8)):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, GROUPS=groups, num_warps=warps)


def key(
    codes: Tensor, global_scale: Tensor, packed: bool, out_dtype: torch.dtype, **_: Any
) -> dict[str, int | str]:  # fmt: skip
    K = codes.shape[-1] * (2 if packed else 1)
    return dict(M=bucket(codes.shape[:-1].numel()), K=K, packed=int(packed), out=str(out_dtype))


def cost(codes: Tensor, scale: Tensor, packed: bool, out_dtype: torch.dtype, **_: Any) -> Cost:
    count = codes.numel() * (2 if packed else 1)
    return Cost(flops=2 * count, bytes=codes.numel() + count * out_dtype.itemsize + scale.numel())


def inputs(
    *, M, K, E=0, per_token=False, packed=True, out_dtype=torch.bfloat16, layout="contiguous", device="cuda", seed=0
):  # fmt: skip
    lead, g = ((E, M) if E else (M,)), generator(seed, device)
    K = -(-K // 2) * 2 if packed else K
    # every code and every scale there is
    codes = torch.randint(
        0, 256 if packed else 16, (*lead, K // 2 if packed else K), generator=g, device=device, dtype=torch.int16
    )  # fmt: skip
    scale = torch.randint(0, 256, (*lead, triton.cdiv(K, NVFP4_BLOCK)), generator=g, device=device, dtype=torch.int16)
    return dict(
        codes=strided(codes.to(torch.uint8), layout),
        scale=strided(scale.to(torch.uint8), layout).view(torch.float8_e4m3fn),
        global_scale=scales((*lead, 1) if per_token else (*lead[:-1], 1, 1), device, seed + 1),
        packed=packed, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 272), E=(0, 1, 2), per_token=(False, True), packed=(False, True),
        out_dtype=FLOAT_INPUTS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(dequantize=Kernel(_dequantize_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def dequantize_nvfp4(
    codes: Tensor, scale: Tensor, global_scale: Tensor, packed: bool = True, out_dtype: torch.dtype = torch.float32,
    *, config: Config,
) -> Tensor:  # fmt: skip
    """Values of NVFP4 codes.

    Args:
        codes: (M, K / 2) or (E, M, K / 2) uint8, the first code of a pair in the low half; unpacked (..., K) codes 0 to
            15. Any strides.
        scale: (M, cdiv(K, 16)) or (E, M, cdiv(K, 16)) float8_e4m3fn, or its bytes as uint8.
        global_scale: fp32, a multiplier: (1, 1), (E, 1, 1), or one for each row, (M, 1), (E, M, 1).
        packed: whether codes are packed.
        out_dtype: fp32, bf16 or fp16; values beyond fp16 become Inf.

    Returns:
        (M, K) or (E, M, K) of out_dtype, contiguous.

    Raises:
        ValueError: a dtype or shape does not fit.
    """
    *lead, M, width = codes.shape
    K = width * (2 if packed else 1)
    out = torch.empty((*lead, M, K), dtype=out_dtype, device=codes.device)
    if out.numel() == 0:
        return out
    stacked = codes.dim() == 3
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(triton.cdiv(K, NVFP4_BLOCK), config["GROUPS"])
    _dequantize_kernel[(tiles, codes.shape[0] if stacked else 1)](
        codes, scale.view(torch.uint8), global_scale, out,
        M, K, width,
        codes.stride(0) if stacked else 0, codes.stride(-2), codes.stride(-1),
        scale.stride(0) if stacked else 0, scale.stride(-2), scale.stride(-1),
        global_scale.stride(0) if stacked else 0, global_scale.stride(-2) if global_scale.shape[-2] > 1 else 0,
        BLOCK=NVFP4_BLOCK, PACKED=packed, enable_fp_fusion=False, **config,
    )  # fmt: skip
    return out
