"""What the ops that write microscaling formats share: their reference, blocks to codes, and the store."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_one_of
from fpk.formats import (
    E8M0,
    INT8,
    MX,
    MX_BLOCK,
    MX_RULES,
    decode,
    encode,
    encode_int8,
    finite_amax,
    mx_scale,
)
from fpk.kernels._microscale import (
    any_odd,
    element_codes,
    largest_magnitude,
    reciprocal_of_scale,
    scale_byte,
    scaled,
    store_packed,
)
from fpk.kernels._packed import pack_codes
from fpk.kernels._tile import amax_key, amax_of_key, clamp_to


def quantized_mx(x: Tensor, format: str, rule: str | None, packed: bool) -> tuple[Tensor, Tensor]:
    """Codes and e8m0 scales of quantize_mx in plain torch."""
    mx = MX[format]
    *lead, K = x.shape
    blocks = -(-K // MX_BLOCK)
    # Inf in the short block's missing places: it never counts as a finite magnitude
    filled = x.new_full((*lead, blocks * MX_BLOCK), float("inf"), dtype=torch.float32)
    filled[..., :K] = x
    grouped = filled.reshape(*lead, blocks, MX_BLOCK)
    scale = mx_scale(finite_amax(grouped, (-1,)), mx, rule or mx.rule)  # (..., blocks, 1)
    exists = (torch.arange(blocks * MX_BLOCK, device=x.device) < K).reshape(blocks, MX_BLOCK)
    nothing = ((grouped == 0) | ~exists).all(-1, keepdim=True)
    power = torch.where(scale == 255, 2.0**127, decode(scale, E8M0).double())
    value = torch.where(nothing, 0.0, grouped / power).flatten(-2)[..., :K]
    scale = scale.squeeze(-1).contiguous()
    if mx.element is INT8:
        return encode_int8(value * 2.0**-mx.shift, -127).contiguous(), scale
    codes = encode(value.float(), mx.element).contiguous()
    if mx.element.bits == 8:
        return codes.view(mx.element.dtype), scale
    return (pack_codes(codes, mx.element.bits) if packed else codes), scale


def expect_mx(what: str, format: str, rule: str | None) -> None:
    expect_one_of(f"{what}.format", format, MX)
    expect_one_of(f"{what}.rule", rule, (None, *MX_RULES))


def packs(format: str, packed: bool) -> bool:
    """Do several codes of this format share bytes?"""
    return packed and MX[format].element.bits < 8


def expect_packable(what: str, columns: int, format: str, packed: bool) -> None:
    """Raise ValueError unless a row of codes fills whole bytes."""
    together = 2 if MX[format].element.bits == 4 else 4
    if packs(format, packed) and columns % together:
        raise ValueError(f"{what} (packed): expected a multiple of {together} columns, got {columns}")


def mx_buffers(shape: tuple[int, ...], format: str, packed: bool, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Empty codes and scales for values of `shape`."""
    element = MX[format].element
    *lead, K = shape
    width = K * element.bits // 8 if packs(format, packed) else K
    codes = torch.empty((*lead, width), dtype=element.dtype, device=device)
    return codes, torch.empty((*lead, triton.cdiv(K, MX_BLOCK)), dtype=torch.uint8, device=device)


@triton.jit
def mx_blocks(
    x, mask, ADDEND: tl.constexpr, EMAX: tl.constexpr, CLAMP: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes [M, G, n] of blocks along the last axis of fp32 x, and their scale bytes [M, G] as int32.

    x must be 0 off the mask.
    """
    largest = largest_magnitude(x)
    amax = largest.to(tl.float32, bitcast=True)
    if any_odd(largest):  # values leave the branch, not codes: triton 3.6 mixes up bytes that do
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=2))
        byte = scale_byte(amax, ADDEND, EMAX)
        v = scaled(x, reciprocal_of_scale(byte), largest > 0)
        v = tl.where(v != v, 0.0, v) if BITS < 8 else clamp_to(v, -MAX, MAX)
    else:
        byte = scale_byte(amax, ADDEND, EMAX)
        v = scaled(x, reciprocal_of_scale(byte), largest > 0)
    return element_codes(v, CLAMP, BITS, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE), byte


@triton.jit
def store_mx(
    codes_ptr, scale_ptr, codes, byte, rows, offs_g, mask_m, K, width,
    BLOCK: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Store codes [M, G, BLOCK] and scale bytes [M, G] of blocks offs_g of output rows (int64, [M])."""
    groups = tl.cdiv(K, BLOCK)
    if PACKED:
        store_packed(codes_ptr + rows * width, codes, offs_g * (BLOCK * BITS // 8), mask_m, width, BITS, WORDS, False)
    else:
        cols = (offs_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
        mask = mask_m[:, None, None] & (cols < K)
        codes_ptrs = codes_ptr + rows[:, None, None] * K + cols
        tl.store(codes_ptrs, codes.to(codes_ptr.dtype.element_ty), mask=mask)
    scale_ptrs = scale_ptr + rows[:, None] * groups + offs_g[None, :]
    tl.store(scale_ptrs, byte.to(tl.uint8), mask=mask_m[:, None] & (offs_g < groups)[None, :])
