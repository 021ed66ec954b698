"""Device functions that several kernels share: exact rounding, finite maxima, tile order."""

import triton
import triton.language as tl

from fpk.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Format


def fp8_constants(fmt: Format, hardware: bool) -> dict[str, object]:
    """The constexpr arguments of `encode_fp8` for a format: `hardware` uses the conversion instruction."""
    if fmt not in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ):
        raise ValueError(f"format: expected an fp8 format, got {fmt}")
    return dict(
        MANTISSA=fmt.mantissa_bits, BIAS=fmt.bias, MAX=fmt.max, NAN_CODE=fmt.nan_code,
        HARDWARE=_TL_TYPES[fmt.name] if hardware else None,
    )  # fmt: skip


_TL_TYPES = {"e4m3fn": tl.float8e4nv, "e5m2": tl.float8e5, "e4m3fnuz": tl.float8e4b8, "e5m2fnuz": tl.float8e5b16}


@triton.jit
def encode_fp8(
    v, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr
):
    """fp32 values to uint8 codes: saturate, round half to even, NaN by select. HARDWARE changes no bit."""
    clamped = tl.minimum(tl.maximum(v, -MAX), MAX)
    if HARDWARE is not None:
        code = clamped.to(HARDWARE).to(tl.uint8, bitcast=True)
    else:
        bits = clamped.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        SHIFT: tl.constexpr = 23 - MANTISSA
        # normal values: add half a step less one, plus the last kept bit, and cut; the exponent is rebased
        normal = (magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)) >> SHIFT
        normal -= (127 - BIAS) << MANTISSA
        # below the smallest normal value the step is constant: adding a number whose last bit is that step rounds
        MAGIC: tl.constexpr = 2.0 ** (23 + 1 - BIAS - MANTISSA)
        small = (magnitude.to(tl.float32, bitcast=True) + MAGIC).to(tl.int32, bitcast=True)
        small -= (127 + 23 + 1 - BIAS - MANTISSA) << 23
        code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
        sign = (bits >> 24) & 0x80
        if NAN_CODE == 0x80:  # fnuz has no negative zero: that code is its NaN
            sign = tl.where(code == 0, 0, sign)
        code = (code | sign).to(tl.uint8)
    return tl.where(v != v, NAN_CODE, code).to(tl.uint8)


@triton.jit
def decode_fp8(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, IEEE: tl.constexpr):
    """uint8 codes to fp32 by integer arithmetic, subnormals, NaN and Inf included: needs no FP8 unit."""
    c = code.to(tl.int32)
    magnitude = c & 0x7F
    # the code's bits are an fp32 whose exponent is off by the difference of the biases; the product also makes
    # subnormals right, since it is exact
    value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    if IEEE:
        value = tl.where(magnitude == (0x7F >> MANTISSA) << MANTISSA, float("inf"), value)
        value = tl.where(magnitude > (0x7F >> MANTISSA) << MANTISSA, float("nan"), value)
    elif NAN_CODE == 0x7F:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    value = tl.where(c >= 0x80, -value, value)
    if NAN_CODE == 0x80:
        value = tl.where(c == 0x80, float("nan"), value)
    return value


@triton.jit
def decode_e8m0(byte):
    """e8m0 bytes to fp32: 2^(byte - 127); byte 0 is the subnormal 2^-127, 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def amax_key(v):
    """uint32 whose unsigned maximum is the finite amax: finite magnitudes sort above NaN, NaN above Inf (0)."""
    magnitude = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return (magnitude - 0x7F800000).to(tl.uint32, bitcast=True)


@triton.jit
def amax_of_key(key):
    """The amax a maximum of `amax_key` stands for: finite, or Inf if every element was Inf, or 0 if none was finite."""
    magnitude = (key.to(tl.int32, bitcast=True) + 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(key >= 0x80000000, magnitude, tl.where(key == 0, float("inf"), 0.0))


@triton.jit
def round_half_even(v):
    """Nearest integer as fp32, ties to even, for |v| < 2^22; `libdevice.rint` exists neither on HIP nor interpreted."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def encode_int8(v, QMIN: tl.constexpr):
    """fp32 values to int8 in QMIN..127: round to nearest even, saturate, NaN to 0."""
    clamped = tl.minimum(tl.maximum(v, QMIN), 127.0)
    return tl.where(v != v, 0.0, round_half_even(clamped)).to(tl.int8)


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile `pid`, walking columns inside bands of GROUP_M rows so that operands stay in L2."""
    per_band = GROUP_M * tiles_n
    band = pid // per_band
    first = band * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    inside = pid - band * per_band
    return first + inside % rows, inside // rows
