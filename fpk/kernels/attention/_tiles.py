"""Tiles of a paged cache on their way to the matrix unit, and queries that fit 16-bit products."""

import triton
import triton.language as tl
from torch import Tensor

from fpk.device import INTERPRETING, Device
from fpk.formats import FP8, INT8
from fpk.kernels._tile import decode_fp8

_CODES = {"e4m3fn": tl.float8e4nv, "e5m2": tl.float8e5, "e4m3fnuz": tl.float8e4b8, "e5m2fnuz": tl.float8e5b16}


def code_constants(cache: Tensor, device: Device) -> dict[str, object]:
    """The constexpr arguments of `decode_tile` and `decode_pairs` for a cache.

    KIND is "values" (16 bits), "int8", "fp8" where the ISA converts the format, "bytes" where integers must do it, or
    "asm" and "int8_asm": NVIDIA's instructions for two codes, the first from sm89 on.
    """
    fmt = INT8 if INT8.dtype is cache.dtype else FP8.get(cache.dtype)
    if fmt is None or fmt is INT8:
        packed = device.vendor == "nv" and not INTERPRETING
        kind, code = "values" if fmt is None else "int8_asm" if packed else "int8", None
    else:
        hardware = device.has_fp8_conversion(fmt.name)
        packed = device.vendor == "nv" and device.capability >= 89 and not INTERPRETING
        kind = "asm" if packed and hardware else "fp8" if hardware else "bytes"
        code = _CODES[fmt.name] if kind == "fp8" else None
    is_float = fmt is not None and fmt is not INT8
    return dict(
        KIND=kind, CODE=code, MANTISSA=fmt.mantissa_bits if is_float and fmt else 0,
        BIAS=fmt.bias if is_float and fmt else 0, NAN_CODE=fmt.nan_code if is_float and fmt else 0,
        IEEE=bool(is_float and fmt and fmt.kind == "ieee"),
    )  # fmt: skip


def has_pairs(cache: Tensor) -> bool:
    """Can its rows be read as words of two codes, and do those fill a tile?"""
    DV = cache.shape[-1]
    even = all(s % 2 == 0 for s in cache.stride()[:-1]) and cache.data_ptr() % 2 == 0
    return cache.element_size() == 1 and DV % 2 == 0 and DV > 16 and even


def tile_widths(D: int, DV: int, parts: int = 1) -> tuple[int, int]:
    """Columns of tiles of keys and values, powers of two; a tile has `parts` operands of as many columns each.

    Both in one swizzle of shared memory, of rows of 16, 32, or 64 and more 16-bit elements. Their operands lie at one
    address in turn, and for two swizzles the assembler of CUDA 12.8, which Triton 3.6 brings along, leaves out the
    instruction that writes where the second's begin: most of a step's values would be read from anywhere.
    """
    keys, values = (max(16 * parts, triton.next_power_of_2(n)) for n in (D, DV))
    return max(keys, min(64 * parts, values)), max(values, min(64 * parts, keys))


@triton.jit
def decode_tile(
    codes, TYPE: tl.constexpr, KIND: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """A loaded tile as TYPE, exactly: a 16-bit float holds every FP8 and INT8 value."""
    if KIND == "bytes":
        codes = decode_fp8(codes, MANTISSA, BIAS, NAN_CODE, IEEE)
    return codes.to(TYPE)


@triton.jit
def decode_pairs(
    words, KIND: tl.constexpr, CODE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr,
    IEEE: tl.constexpr,
):  # fmt: skip
    """int16 words of two neighbouring codes as two tiles of fp16: of the even columns, and of the odd ones.

    Words, not bytes, because the matrix unit wants neighbours along the tokens: words are what shared memory can be
    read in that order by one instruction, and their two codes are then parted in registers.
    """
    if KIND == "asm":
        if NAN_CODE == 0x7F and not IEEE:
            low, high = tl.inline_asm_elementwise(
                """{ .reg .b32 t; .reg .b16 a, b;
                prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
                cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }""",
                "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
        else:
            low, high = tl.inline_asm_elementwise(
                """{ .reg .b32 t; .reg .b16 a, b;
                prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;
                cvt.rn.f16x2.e5m2x2 $0, a; cvt.rn.f16x2.e5m2x2 $1, b; }""",
                "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
            )  # fmt: skip
    elif KIND == "int8_asm":
        # the byte plus 128 as the last bits of 1024 is an fp16 of 1024 + 128 + code
        low, high = tl.inline_asm_elementwise(
            """{ .reg .b32 t, h, o;
            mov.b32 h, 0x64646464; mov.b32 o, 0x64806480; xor.b32 t, $2, 0x80808080;
            prmt.b32 $0, t, h, 0x4240; prmt.b32 $1, t, h, 0x4341;
            sub.rn.f16x2 $0, $0, o; sub.rn.f16x2 $1, $1, o; }""",
            "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif KIND == "int8":
        low, high = (words << 8) >> 8, words >> 8
    else:
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        if KIND == "bytes":
            low = decode_fp8(low, MANTISSA, BIAS, NAN_CODE, IEEE)
            high = decode_fp8(high, MANTISSA, BIAS, NAN_CODE, IEEE)
        else:
            low, high = low.to(CODE, bitcast=True), high.to(CODE, bitcast=True)
    return low.to(tl.float16), high.to(tl.float16)


@triton.jit
def power_below(x):
    """(2^e, 2^-e) with 2^e the power of two of each row's largest magnitude, [M]: x / 2^e is below 2, so fp16 holds it.

    It also holds it exactly, but for elements that are less than 2^-14 of the largest; those lose bits whose place is
    2^-24 of it.
    """
    largest = tl.max(tl.abs(x.to(tl.float32)), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.minimum(tl.maximum(exponent, 14), 240)  # of zeros, subnormals, Inf and NaN
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)
