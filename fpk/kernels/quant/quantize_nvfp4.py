"""quantize_nvfp4: FP4 codes with an e4m3 scale for every 16 columns and an fp32 scale above those.

    g           = 2688 / max(amax, 1e-30)     amax of the matrix, or of each row; or 1 / global_scale where one is given
    scale[m, j] = e4m3(min(g * (amax[m, j] / 6), 448))
    codes[m, k] = e2m1(clamp(x[m, k] * (g / scale[m, j]), -6, 6)), 0 where the scale is 0
    value       = codes * scale * global_scale,   global_scale = 1 / g

2688 = 6 * 448. Maxima are taken over finite elements. NaN gives code 0; +-Inf is quantized as the largest finite fp32,
which saturates. A block of nothing but Inf has scale 448; a matrix of nothing but Inf has global scale Inf and decodes
to NaN. A short last block is allowed.

`four_over_six` also tries 4 instead of 6 as the code of a block's maximum and keeps it where the sum of squared errors
(x * g - code * scale)^2 is smaller, the 16 squares summed as a binary tree: the steps between 4 and 6 are wide.

Source: NVIDIA's NVFP4 as ModelOpt stores it (compressed-tensors writes g instead of 1 / g); "Four Over Six" for the
choice of 4 or 6.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    expect_dtype,
    expect_multiple,
    expect_not_empty,
    expect_rank,
    expect_shape,
)
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import E2M1, E4M3FN, NVFP4_BLOCK, decode, encode, finite_amax
from fpk.kernels._amax import partial_amax, total_amax
from fpk.kernels._microscale import any_odd, decode_narrow, largest_magnitude, narrow_codes, scaled, store_packed
from fpk.kernels._packed import pack_codes
from fpk.kernels._tile import amax_key, amax_of_key, cast_fp8, clamp_to, decode_fp8, fp8_constants
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, scales, strided
from fpk.shapes import activation_cases

LARGEST = torch.finfo(torch.float32).max
ZEROS_GLOBAL = 3.7202382710272136e-34
"""1 / (2688 / 1e-30), in fp32."""


def reference(
    x: Tensor, global_scale: Tensor | None = None, per_token: bool = False, four_over_six: bool = False,
    packed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    x = x.float()
    one = x.new_tensor(1.0)
    if global_scale is None:
        amax = finite_amax(x, (-1,) if per_token else (-2, -1))
        g = x.new_tensor(2688.0) / torch.maximum(amax, x.new_tensor(1e-30))
        stored = one / g
    else:
        g, stored = one / global_scale, global_scale.clone()
    *lead, K = x.shape
    blocks = -(-K // NVFP4_BLOCK)
    filled = x.new_full((*lead, blocks * NVFP4_BLOCK), float("inf"))  # where the short block has nothing
    filled[..., :K] = x
    amax = finite_amax(filled.unflatten(-1, (blocks, NVFP4_BLOCK)), (-1,))
    exists = torch.arange(blocks * NVFP4_BLOCK, device=x.device) < K
    x = torch.where(exists & ~filled.isnan(), filled, 0.0).clamp(-LARGEST, LARGEST).unflatten(-1, (blocks, NVFP4_BLOCK))
    g = g[..., None]
    codes, scale, error = _blocks(x, amax, g, 6.0)
    if four_over_six:
        others, other, less = _blocks(x, amax, g, 4.0)
        codes, scale = torch.where(less < error, others, codes), torch.where(less < error, other, scale)
    codes = codes.flatten(-2)[..., :K].contiguous()
    scale = scale.squeeze(-1).contiguous().view(torch.float8_e4m3fn)
    return (pack_codes(codes, 4) if packed else codes), scale, stored.contiguous()


def _blocks(x: Tensor, amax: Tensor, g: Tensor, top: float) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scale codes and squared error of blocks whose maximum is to have the code of `top`."""
    raw = torch.minimum(g * (amax / amax.new_tensor(top)), amax.new_tensor(448.0))
    stored = encode(torch.where(amax.isinf(), 448.0, raw), E4M3FN)
    scale = decode(stored, E4M3FN)
    value = x * torch.where(scale == 0, 0.0, g / scale)
    codes = encode(torch.where(scale == 0, 0.0, value), E2M1)
    square = (x * g - decode(codes, E2M1) * scale) ** 2
    while square.shape[-1] > 1:
        square = square[..., 0::2] + square[..., 1::2]
    return codes, stored, square


def check(x: Tensor, global_scale: Tensor | None, per_token: bool, packed: bool, **_: Any) -> None:
    expect_dtype("quantize_nvfp4.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_nvfp4.x", x, 2, 3)
    expect_not_empty("quantize_nvfp4.x", x, -1)
    if packed:
        expect_multiple("quantize_nvfp4.x (packed)", x, 2)
    if global_scale is not None:
        expect_dtype("quantize_nvfp4.global_scale", global_scale, torch.float32)
        expect_shape("quantize_nvfp4.global_scale", global_scale, _global_shape(x, per_token))


def _global_shape(x: Tensor, per_token: bool) -> tuple[int, ...]:
    return (*x.shape[:-1], 1) if per_token else (*x.shape[:-2], 1, 1)


@triton.jit(do_not_specialize=["M"])
def _row_amax_kernel(
    x_ptr, key_ptr, M, K, stride_xe, stride_xm, stride_xk, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The key of each row's amax."""
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x_rows = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm
    keys = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.uint32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        keys = tl.maximum(keys, tl.where(mask, amax_key(x), 0))
    tl.store(key_ptr + e * M + offs_m, tl.max(keys, axis=1), mask=mask_m)


@triton.jit
def _block_codes(
    x, amax, g, TOP: tl.constexpr, MEASURE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes of blocks [M, G, 16] whose maximum is to have the code of TOP, their scale codes, and squared errors."""
    raw = tl.minimum(g * tl.math.div_rn(amax, TOP), 448.0)
    stored = cast_fp8(tl.where(amax == float("inf"), 448.0, raw), MANTISSA, BIAS, NAN_CODE, HARDWARE)
    scale = decode_fp8(stored, MANTISSA, BIAS, 0x7F, False)
    dead = scale == 0.0
    factor = tl.where(dead, 0.0, tl.math.div_rn(g, tl.where(dead, 1.0, scale)))
    codes = narrow_codes(scaled(x, factor, scale > 0.0), 1, 1, 6.0, 4)
    error = amax
    if MEASURE:
        distance = x * g[:, :, None] - decode_narrow(codes, 1, 1, 4) * scale[:, :, None]
        square = distance * distance
        for _ in tl.static_range(4):
            first, second = tl.split(tl.reshape(square, (x.shape[0], x.shape[1], square.shape[2] // 2, 2)))
            square = first + second
        error = tl.reshape(square, amax.shape)
    return codes, stored, error


@triton.jit(do_not_specialize=["M", "parts"])
def _nvfp4_kernel(
    x_ptr, key_ptr, given_ptr, codes_ptr, scale_ptr, global_ptr,
    M, K, width, parts,
    stride_xe, stride_xm, stride_xk, stride_ge, stride_gm,
    BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, PACKED: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS blocks; the programs of the first columns also store the global scale."""
    groups = tl.cdiv(K, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    tile_m, tile_g = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = tile_g.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    cols = (offs_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
    mask = mask_m[:, None, None] & (cols < K)
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None, None] * stride_xm + cols * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)

    if given_ptr is not None:
        given = tl.load(given_ptr + e * stride_ge + offs_m * stride_gm, mask=mask_m, other=1.0)
        g = tl.math.div_rn(tl.full(given.shape, 1.0, tl.float32), given)
    else:
        if PER_TOKEN:
            top = amax_of_key(tl.load(key_ptr + e * M + offs_m, mask=mask_m, other=0x80800000))
        else:
            top = tl.full((BLOCK_M,), 1.0, tl.float32) * total_amax(key_ptr, e, parts, BLOCK_P)
        g = tl.math.div_rn(tl.full(top.shape, 2688.0, tl.float32), tl.maximum(top, 1e-30))
        given = tl.math.div_rn(tl.full(top.shape, 1.0, tl.float32), g)
    if PER_TOKEN:
        if tile_g == 0:
            tl.store(global_ptr + e * M + offs_m, given, mask=mask_m)
    elif tl.program_id(0) == 0:
        tl.store(global_ptr + e + offs_m, given, mask=offs_m == 0)

    largest = largest_magnitude(x)  # [BLOCK_M, GROUPS]
    amax = largest.to(tl.float32, bitcast=True)
    if any_odd(largest):
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=2))
        x = tl.where(x != x, 0.0, clamp_to(x, -LARGEST, LARGEST))
    g = tl.broadcast_to(g[:, None], amax.shape)
    codes, stored, error = _block_codes(x, amax, g, 6.0, FOUR_OVER_SIX, MANTISSA, BIAS, NAN_CODE, HARDWARE)
    if FOUR_OVER_SIX:
        others, other, less = _block_codes(x, amax, g, 4.0, True, MANTISSA, BIAS, NAN_CODE, HARDWARE)
        better = less < error
        codes = tl.where(better[:, :, None], others, codes)
        stored = tl.where(better, other, stored)
    rows = e * M + offs_m
    if PACKED:
        store_packed(codes_ptr + rows * width, codes, offs_g * (BLOCK // 2), mask_m, width, 4, False, False)
    else:
        tl.store(codes_ptr + rows[:, None, None] * K + cols, codes.to(tl.uint8), mask=mask)
    scale_ptrs = scale_ptr + rows[:, None] * groups + offs_g[None, :]
    tl.store(scale_ptrs, stored, mask=mask_m[:, None] & (offs_g < groups)[None, :])


def configs(x: Tensor, **_: Any):
    rows = 8 if x.shape[-2] > 4 else 1
    yield Config(BLOCK_M=rows, GROUPS=128 // rows, PROGRAMS=1024, BLOCK_K=2048, num_warps=2)
    for (rows, groups), warps in itertools.product(
        ((1, 64), (1, 128), (1, 256), (2, 64), (4, 16), (4, 32), (4, 64), (8, 16), (16, 8)), (2, 4, 8)
    ):
        yield Config(BLOCK_M=rows, GROUPS=groups, PROGRAMS=1024, BLOCK_K=2048, num_warps=warps)


def legal(config: Config, x: Tensor, **_: Any) -> bool:
    # at most 64 elements a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * NVFP4_BLOCK <= 2048 * config["num_warps"]


def key(
    x: Tensor, global_scale: Tensor | None, per_token: bool, four_over_six: bool, packed: bool, **_: Any
) -> dict[str, int | str]:  # fmt: skip
    scope = "given" if global_scale is not None else "token" if per_token else "tensor"
    return dict(
        M=bucket(x.shape[:-1].numel()), K=x.shape[-1], scope=scope, four_over_six=int(four_over_six),
        packed=int(packed), x=str(x.dtype),
    )  # fmt: skip


def cost(x: Tensor, global_scale: Tensor | None, packed: bool, **_: Any) -> Cost:
    # two reads, unless the global scale is known before
    read = x.numel() * x.element_size() * (1 if global_scale is not None else 2)
    written = x.numel() // (2 if packed else 1) + x.shape[:-1].numel() * triton.cdiv(x.shape[-1], NVFP4_BLOCK)
    return Cost(flops=4 * x.numel(), bytes=read + written)


def inputs(
    *, M, K, E=0, per_token=False, given=False, four_over_six=False, packed=True, x_dtype=torch.bfloat16,
    kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    K = -(-K // 2) * 2 if packed else K  # what cannot be packed is refused
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    # from far too small, where blocks saturate, to far too large, where scales become 0
    global_scale = scales(_global_shape(x, per_token), device, seed + 1) * 0.01 if given else None
    return dict(x=x, global_scale=global_scale, per_token=per_token, four_over_six=four_over_six, packed=packed)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 13), K=(1, 16, 33, 100, 272), E=(0, 1, 3), per_token=(False, True), given=(False, True),
        four_over_six=(False, True), packed=(False, True), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(nvfp4=Kernel(_nvfp4_kernel)),
    configs=configs, legal=legal, launcher_fields=("PROGRAMS", "BLOCK_K"), key=key, cost=cost,
    cases=activation_cases() | {f"{name}/static": case for name, case in activation_cases(given=True).items()},
)  # fmt: skip
def quantize_nvfp4(
    x: Tensor, global_scale: Tensor | None = None, per_token: bool = False, four_over_six: bool = False,
    packed: bool = True, *, config: Config,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantize rows to NVFP4.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        global_scale: None to take it from the data, else fp32, a multiplier: (1, 1), (E, 1, 1), or with per_token
            (M, 1), (E, M, 1).
        per_token: a global scale for every row, instead of one for every matrix (of a stack: every expert).
        four_over_six: let a block's maximum be 4 instead of 6 where that errs less.
        packed: two codes to a byte, the first in the low half; False: one.

    Returns:
        codes uint8, (..., K / 2) or (..., K), contiguous; scale (..., cdiv(K, 16)) float8_e4m3fn; and the global scale,
        fp32: (1, 1), (E, 1, 1), (M, 1) or (E, M, 1). value = code * scale * global_scale.

    Raises:
        ValueError: a dtype or shape does not fit, K is 0, or odd and packed.
    """
    *lead, M, K = x.shape
    codes = torch.empty((*lead, M, K // 2 if packed else K), dtype=torch.uint8, device=x.device)
    groups = triton.cdiv(K, NVFP4_BLOCK)
    scale = torch.empty((*lead, M, groups), dtype=torch.float8_e4m3fn, device=x.device)
    stored = torch.empty(_global_shape(x, per_token), dtype=torch.float32, device=x.device)
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    if x.numel() == 0:
        # without rows a matrix still has a global scale: that of zeros
        return codes, scale, stored.fill_(ZEROS_GLOBAL) if global_scale is None else global_scale.clone()
    keys = None
    if global_scale is None and per_token:
        keys = torch.empty((E, M), dtype=torch.uint32, device=x.device)
        _row_amax_kernel[(M, E)](
            x, keys, M, K, stride_xe, x.stride(-2), x.stride(-1), BLOCK_M=1, BLOCK_K=config["BLOCK_K"], num_warps=4
        )  # fmt: skip
    elif global_scale is None:
        keys = partial_amax(
            x, None, Config(BLOCK_M=1, BLOCK_K=8192, PROGRAMS=config["PROGRAMS"], num_warps=4, num_stages=3)
        )
    strides = (0, 0)
    if global_scale is not None:
        strides = (global_scale.stride(0) if x.dim() == 3 else 0, global_scale.stride(-2) if per_token else 0)
    constants = fp8_constants(E4M3FN, of(x.device))
    del constants["MAX"]
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(groups, config["GROUPS"])
    _nvfp4_kernel[(tiles, E)](
        x, keys, global_scale, codes, scale.view(torch.uint8), stored,
        M, K, codes.shape[-1], keys.shape[1] if keys is not None and not per_token else 1,
        stride_xe, x.stride(-2), x.stride(-1), *strides,
        BLOCK=NVFP4_BLOCK, PER_TOKEN=per_token, FOUR_OVER_SIX=four_over_six, PACKED=packed,
        BLOCK_P=triton.next_power_of_2(config["PROGRAMS"]), LARGEST=LARGEST, **constants,
        BLOCK_M=config["BLOCK_M"], GROUPS=config["GROUPS"], num_warps=config["num_warps"], enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scale, stored
