"""What the ops that write NVFP4 share: their reference, the global scale, blocks to codes, and the store."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_shape
from fpk.formats import E2M1, E4M3FN, NVFP4_BLOCK, decode, encode, finite_amax
from fpk.kernels._amax import total_amax
from fpk.kernels._microscale import any_odd, decode_narrow, largest_magnitude, narrow_codes, scaled, store_packed
from fpk.kernels._packed import pack_codes
from fpk.kernels._tile import amax_key, amax_of_key, cast_fp8, clamp_to, decode_fp8

LARGEST = torch.finfo(torch.float32).max
ZEROS_GLOBAL = 3.7202382710272136e-34
"""1 / (2688 / 1e-30), in fp32: the global scale of zeros."""

# of the scales' e4m3, rounded by integers: where their bytes are decoded again, the ptxas of triton 3.6 merges two
# conversions and then reads a register before it is written
E4M3 = dict(MANTISSA=E4M3FN.mantissa_bits, BIAS=E4M3FN.bias, NAN_CODE=E4M3FN.nan_code)


def quantized_nvfp4(
    x: Tensor, global_scale: Tensor | None, per_token: bool, four_over_six: bool, packed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and global scale of quantize_nvfp4 in plain torch."""
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


def global_shape(shape: tuple[int, ...], per_token: bool) -> tuple[int, ...]:
    return (*shape[:-1], 1) if per_token else (*shape[:-2], 1, 1)


def expect_global_scale(what: str, global_scale: Tensor | None, shape: tuple[int, ...], per_token: bool) -> None:
    if global_scale is not None:
        expect_dtype(f"{what}.global_scale", global_scale, torch.float32)
        expect_shape(f"{what}.global_scale", global_scale, global_shape(shape, per_token))


def nvfp4_buffers(
    shape: tuple[int, ...], per_token: bool, packed: bool, device: torch.device | str
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty codes, scales and global scale for values of `shape`."""
    *lead, K = shape
    codes = torch.empty((*lead, K // 2 if packed else K), dtype=torch.uint8, device=device)
    scale = torch.empty((*lead, triton.cdiv(K, NVFP4_BLOCK)), dtype=torch.float8_e4m3fn, device=device)
    return codes, scale, torch.empty(global_shape(shape, per_token), dtype=torch.float32, device=device)


def global_strides(global_scale: Tensor | None, per_token: bool) -> tuple[int, int]:
    """Distances of a given global scale between matrices and between rows."""
    if global_scale is None:
        return 0, 0
    return (
        global_scale.stride(0) if global_scale.dim() == 3 else 0,
        global_scale.stride(-2) if per_token else 0,
    )


@triton.jit
def global_of(
    given_ptr, key_ptr, e, M, offs_m, mask_m, parts, stride_ge, stride_gm, PER_TOKEN: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Global scale and g, its reciprocal, of each row: as given, or from the keys of rows or of parts of a matrix."""
    if given_ptr is not None:
        given = tl.load(given_ptr + e * stride_ge + offs_m * stride_gm, mask=mask_m, other=1.0)
        g = tl.math.div_rn(tl.full(given.shape, 1.0, tl.float32), given)
    else:
        if PER_TOKEN:
            top = amax_of_key(tl.load(key_ptr + e * M + offs_m, mask=mask_m, other=0x80800000))
        else:
            top = tl.full(offs_m.shape, 1.0, tl.float32) * total_amax(key_ptr, e, parts, BLOCK_P)
        g = tl.math.div_rn(tl.full(top.shape, 2688.0, tl.float32), tl.maximum(top, 1e-30))
        given = tl.math.div_rn(tl.full(top.shape, 1.0, tl.float32), g)
    return given, g


@triton.jit
def store_global(global_ptr, given, e, M, offs_m, mask_m, first_of_rows, PER_TOKEN: tl.constexpr):
    """One program of each row's (`first_of_rows`), or of each matrix, stores the global scale."""
    if PER_TOKEN:
        if first_of_rows:
            tl.store(global_ptr + e * M + offs_m, given, mask=mask_m)
    elif tl.program_id(0) == 0:
        tl.store(global_ptr + e + offs_m, given, mask=offs_m == 0)


@triton.jit
def _scaled_blocks(
    x, amax, g, TOP: tl.constexpr, MEASURE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN_CODE: tl.constexpr,
):  # fmt: skip
    """Codes of blocks [M, G, 16] whose maximum is to have the code of TOP, their scale codes, and squared errors."""
    raw = tl.minimum(g * tl.math.div_rn(amax, TOP), 448.0)
    stored = cast_fp8(tl.where(amax == float("inf"), 448.0, raw), MANTISSA, BIAS, NAN_CODE, None)
    scale = decode_fp8(stored, MANTISSA, BIAS, NAN_CODE, False)
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


@triton.jit
def nvfp4_blocks(
    x, mask, g, FOUR_OVER_SIX: tl.constexpr, HUGE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN_CODE: tl.constexpr,
):  # fmt: skip
    """Codes [M, G, 16] of blocks along the last axis of fp32 x, and their e4m3 scale codes [M, G]; g by rows, [M].

    x must be 0 off the mask. HUGE is the largest finite fp32, which stands for Inf.
    """
    largest = largest_magnitude(x)
    amax = largest.to(tl.float32, bitcast=True)
    if any_odd(largest):
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=2))
        x = tl.where(x != x, 0.0, clamp_to(x, -HUGE, HUGE))
    g = tl.broadcast_to(g[:, None], amax.shape)
    codes, stored, error = _scaled_blocks(x, amax, g, 6.0, FOUR_OVER_SIX, MANTISSA, BIAS, NAN_CODE)
    if FOUR_OVER_SIX:
        others, other, less = _scaled_blocks(x, amax, g, 4.0, True, MANTISSA, BIAS, NAN_CODE)
        better = less < error
        codes = tl.where(better[:, :, None], others, codes)
        stored = tl.where(better, other, stored)
    return codes, stored


@triton.jit
def store_nvfp4(
    codes_ptr, scale_ptr, codes, stored, rows, offs_g, mask_m, K, width, BLOCK: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Store codes [M, G, BLOCK] and scale codes [M, G] of blocks offs_g of output rows (int64, [M])."""
    groups = tl.cdiv(K, BLOCK)
    if PACKED:
        store_packed(codes_ptr + rows * width, codes, offs_g * (BLOCK // 2), mask_m, width, 4, False, False)
    else:
        cols = (offs_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
        mask = mask_m[:, None, None] & (cols < K)
        tl.store(codes_ptr + rows[:, None, None] * K + cols, codes.to(tl.uint8), mask=mask)
    scale_ptrs = scale_ptr + rows[:, None] * groups + offs_g[None, :]
    tl.store(scale_ptrs, stored, mask=mask_m[:, None] & (offs_g < groups)[None, :])
