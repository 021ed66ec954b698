"""bf16 values two to a register: the same codes in fewer instructions and registers.

Words of two values stay packed until their codes are formed. FP8 and INT8 codes come from plain fp32 arithmetic (NATIVE
adds an instruction that converts two at once); FP4 codes from packed bf16 arithmetic by inline assembly (sm90 and
newer), a third of the instructions of fp32's. What is rare (Inf, NaN, blocks at the end of the range) goes another way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.device import Device
from fpk.formats import E4M3FN, E5M2, Format
from fpk.kernels._tile import amax_key, cast_fp8, clamp_to, divide

TARGETS = ("sm90", "sm100", "sm103", "sm120", "sm121")
"""Where the kernels by inline assembly run."""


def has_pairs(x: Tensor) -> bool:
    """Can rows of x be read as words of two bf16?"""
    return (
        x.dtype is torch.bfloat16
        and x.stride(-1) == 1
        and x.shape[-1] % 2 == 0
        and x.data_ptr() % 4 == 0
        and all(s % 2 == 0 for s in x.stride()[:-1])
    )


def has_flat_pairs(x: Tensor) -> bool:
    """The same, and the rows of each matrix follow each other without a gap."""
    return has_pairs(x) and (x.stride(-2) == x.shape[-1] or x.shape[-2] == 1)


def converts_pairs(fmt: Format, device: Device) -> bool:
    """Does one instruction convert two fp32 to this FP8 format? NATIVE of the functions below."""
    return device.vendor == "nv" and device.capability >= 89 and fmt in (E4M3FN, E5M2)


def as_words(x: Tensor) -> Tensor:
    """The same rows as int32 words; a pointer that is cast inside a kernel loses its alignment."""
    return x.view(torch.int32)


@triton.jit
def load_pairs(rows, offs_g, mask_m, K, BLOCK: tl.constexpr):
    """Words [M, G, BLOCK / 2] of blocks offs_g, [G]; 0 beyond K values. rows: pointers to words, [M]."""
    at = offs_g[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    mask = mask_m[:, None, None] & (at < K // 2)[None, :, :]
    return tl.load(rows[:, None, None] + at[None, :, :], mask=mask, other=0)


@triton.jit
def halves(words):
    """The two values of each word, as fp32."""
    low = (words << 16).to(tl.float32, bitcast=True)
    high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def larger_magnitude(words):
    """The larger magnitude of each word's two, as the bits of an fp32: NaN above Inf above every number."""
    return tl.maximum((words << 16) & 0x7FFFFFFF, words & 0x7FFF0000)


@triton.jit
def amax_key_of_pairs(words):
    """The larger `amax_key` of each word's two."""
    low, high = halves(words)
    return tl.maximum(amax_key(low), amax_key(high))


@triton.jit
def _rare_quotient(x, scale, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x / scale inside LOW..HIGH for any x, NaN kept, Inf saturated (but Inf / Inf is NaN); 2^-80 <= scale < 2^122."""
    low, high = tl.maximum(scale * LOW, -3.4028234663852886e38), tl.minimum(scale * HIGH, 3.4028234663852886e38)
    inside = divide(clamp_to(x, low, high), scale)
    quotient = clamp_to(tl.where(tl.abs(x) == float("inf"), x, inside), LOW, HIGH)
    return tl.where(scale == float("inf"), float("nan"), quotient)


@triton.jit
def _quotients(words, scale, RARE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, NATIVE: tl.constexpr):
    if NATIVE:  # opaque to the compiler, which would otherwise keep both halves in registers from the maximum on
        words = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)
    low, high = halves(words)
    if RARE:
        low, high = _rare_quotient(low, scale, LOW, HIGH), _rare_quotient(high, scale, LOW, HIGH)
    else:
        low, high = divide(low, scale), divide(high, scale)
    return low, high


@triton.jit
def fp8_of_quotients(
    low, high, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Two fp8 codes to an int16, the first in the low byte, of fp32 values within the format's range, or NaN."""
    if NATIVE and MANTISSA == 3:
        codes = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
        )
    elif NATIVE:
        codes = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e5m2x2.f32 $0, $2, $1;", "=h,f,f", [low, high], dtype=tl.int16, is_pure=True, pack=1
        ).to(tl.int32)
        codes = tl.where(low != low, (codes & 0xFF00) | NAN_CODE, codes)
        codes = tl.where(high != high, (codes & 0xFF) | (NAN_CODE << 8), codes).to(tl.int16)
    else:
        first = cast_fp8(low, MANTISSA, BIAS, NAN_CODE, HARDWARE).to(tl.int32)
        second = cast_fp8(high, MANTISSA, BIAS, NAN_CODE, HARDWARE).to(tl.int32)
        codes = (first | (second << 8)).to(tl.int16)
    return codes


@triton.jit
def fp8_of_pairs(
    words, scale, RARE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """fp8 codes of words / scale, two to an int16. Not RARE: all are finite and within the range."""
    low, high = _quotients(words, scale, RARE, -MAX, MAX, NATIVE)
    return fp8_of_quotients(low, high, MANTISSA, BIAS, NAN_CODE, HARDWARE, NATIVE)


@triton.jit
def int8_of_pairs(words, scale, RARE: tl.constexpr, QMIN: tl.constexpr, NATIVE: tl.constexpr):
    """int8 codes of words / scale, two to an int16. Not RARE: all are finite and within the range."""
    low, high = _quotients(words, scale, RARE, QMIN, 127.0, NATIVE)
    if RARE:
        low, high = tl.where(low != low, 0.0, low), tl.where(high != high, 0.0, high)
    # the sums' last mantissa bits are the rounded integers in two's complement
    first = (low + 12582912.0).to(tl.int32, bitcast=True)
    second = (high + 12582912.0).to(tl.int32, bitcast=True)
    return ((first & 255) | (second << 8)).to(tl.int16)


@triton.jit
def words_of(x):
    """Words [M, G, n / 2] of fp32 values [M, G, n] that are exactly bf16."""
    low, high = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2] // 2, 2)))
    return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & -65536)


@triton.jit
def _max_pairs(a, b):
    return tl.inline_asm_elementwise(
        "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def largest_of_pairs(words):
    """Largest magnitude along the last axis, as the bits of an fp32: NaN above Inf above every number."""
    pair = tl.reduce(words & 0x7FFF7FFF, 2, _max_pairs)
    return tl.maximum((pair << 16) & 0x7FFF0000, pair & 0x7FFF0000)


@triton.jit
def store_pairs(rows, pairs, offs_g, mask_m, width):
    """Store words of two FP4 codes, at bits 0 and 16, of blocks offs_g as bytes. rows: uint8 pointers [M]."""
    at = offs_g[:, None] * pairs.shape[2] + tl.arange(0, pairs.shape[2])[None, :]
    mask = mask_m[:, None, None] & (at < width)[None, :, :]
    tl.store(rows[:, None, None] + at[None, :, :], (pairs | (pairs >> 12)).to(tl.uint8), mask=mask)


@triton.jit
def fp4_times_power(words, byte, alive):
    """e2m1 codes, at bits 0 and 16, of words times 2^(127 - byte), byte in 1..254 [M, G]; +0 in blocks not alive.

    The code of a magnitude v is min(2v, v + 2, v / 2 + 4, 7) rounded half to even: the three lines meet where e2m1's
    step doubles, at even codes. A fused multiply-add that ends between 128 and 256, where bf16's step is 1, rounds the
    exact value once.
    """
    e = 255 - byte  # of 2^(128 - byte); the smaller powers may be subnormal
    two = e << 7
    one = tl.where(e >= 2, (e - 1) << 7, 0x40)
    half = tl.where(e >= 3, (e - 2) << 7, tl.where(e == 2, 0x40, 0x20))
    sign = tl.where(alive, 0x00080008, 0)
    shape: tl.constexpr = words.shape
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, t, u, c;
        and.b32 a, $1, 0x7FFF7FFF;
        mov.b32 c, 0x43004300;
        fma.rn.bf16x2 t, a, $2, c;
        mov.b32 c, 0x43024302;
        fma.rn.bf16x2 u, a, $3, c;
        min.bf16x2 t, t, u;
        mov.b32 c, 0x43044304;
        fma.rn.bf16x2 u, a, $4, c;
        min.bf16x2 t, t, u;
        mov.b32 c, 0x43074307;
        min.bf16x2 t, t, c;
        and.b32 t, t, 0x00070007;
        shr.u32 u, $1, 12;
        and.b32 u, u, $5;
        or.b32 $0, t, u;
        }""",
        "=r,r,r,r,r,r",
        [
            words,
            tl.broadcast_to((two * 0x10001)[:, :, None], shape),
            tl.broadcast_to((one * 0x10001)[:, :, None], shape),
            tl.broadcast_to((half * 0x10001)[:, :, None], shape),
            tl.broadcast_to(sign[:, :, None], shape),
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def nvfp4_scales(amax, g):
    """e4m3 scale codes, scales, and g / scale (0 for a scale of 0) of blocks; all [M, G], 2^-40 <= g <= 2^40.

    Quotients are corrected by an exact remainder, as in `_tile.divide`, and so rounded correctly: amax / 6 unless it is
    so small that its code is 0, g / scale always. One step makes the approximate reciprocal of a scale, which has four
    significant bits, the correctly rounded one.

    Codes and scales come from integer arithmetic: where an instruction decodes what another has just encoded, the
    assembler of triton 3.6 loses some of the first and reads what else was in the register (all codes of rows of 70
    were 0).
    """
    sixth = amax * (1 / 6)
    rest = tl.fma(sixth, tl.full(amax.shape, -6.0, tl.float32), amax)
    sixth = tl.fma(rest, tl.full(amax.shape, 1 / 6, tl.float32), sixth)
    stored = cast_fp8(tl.minimum(g * sixth, 448.0), 3, 7, None, None)
    scale = (stored.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**120  # no sign, no NaN; exact if subnormal
    inverse = tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
    )
    one = tl.full(amax.shape, 1.0, tl.float32)
    inverse = tl.fma(tl.fma(-scale, inverse, one), inverse, inverse)
    quotient = g * inverse
    quotient = tl.fma(tl.fma(-scale, quotient, g), inverse, quotient)
    return stored, scale, tl.where(scale > 0, quotient, 0.0)


@triton.jit
def fp4_times(words, factor, alive):
    """e2m1 codes, at bits 0 and 16, of fp32 products words * factor [M, G]; +0 in blocks that are not alive.

    Each product is rounded to fp32, as the definition says, then cut to bf16 with its last bit set if anything was cut
    off: that keeps it on its side of every tie of the much shorter FP4. From there as in fp4_times_power.
    """
    sign = tl.where(alive, 0x00080008, 0)
    shape: tl.constexpr = words.shape
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, t, u, c, l, h;
        .reg .f32 x, y;
        shl.b32 l, $1, 16;
        and.b32 h, $1, 0xFFFF0000;
        mov.b32 x, l;
        mov.b32 y, h;
        mul.rn.f32 x, x, $2;
        mul.rn.f32 y, y, $2;
        mov.b32 l, x;
        mov.b32 h, y;
        prmt.b32 a, l, h, 0x7632;
        prmt.b32 l, l, h, 0x5410;
        mov.b32 c, 0x00010001;
        min.u16x2 l, l, c;
        and.b32 a, a, 0x7FFF7FFF;
        or.b32 a, a, l;
        mov.b32 c, 0x43004300;
        mov.b32 u, 0x40004000;
        fma.rn.bf16x2 t, a, u, c;
        mov.b32 c, 0x43024302;
        mov.b32 u, 0x3F803F80;
        fma.rn.bf16x2 u, a, u, c;
        min.bf16x2 t, t, u;
        mov.b32 c, 0x43044304;
        mov.b32 u, 0x3F003F00;
        fma.rn.bf16x2 u, a, u, c;
        min.bf16x2 t, t, u;
        mov.b32 c, 0x43074307;
        min.bf16x2 t, t, c;
        and.b32 t, t, 0x00070007;
        shr.u32 u, $1, 12;
        and.b32 u, u, $3;
        or.b32 $0, t, u;
        }""",
        "=r,r,f,r",
        [
            words,
            tl.broadcast_to(factor[:, :, None], shape),
            tl.broadcast_to(sign[:, :, None], shape),
        ],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
