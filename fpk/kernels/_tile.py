"""Device functions that several kernels share: exact rounding, finite maxima, tile order."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.device import Device
from fpk.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ, Format


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for whoever chooses configs: triton's, a function of both worlds, takes 20 times as long."""
    return -(-a // b)


def fp8_constants(fmt: Format, device: Device) -> dict[str, object]:
    """The constexpr arguments of `cast_fp8` for a format: HARDWARE names the type if the ISA converts to it.

    NAN_CODE is None where the conversion instruction writes fpk's NaN (+0x7F) by itself, as NVIDIA's to e4m3 does.
    """
    if fmt not in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ):
        raise ValueError(f"format: expected an fp8 format, got {fmt}")
    hardware = device.has_fp8_conversion(fmt.name)
    return dict(
        MANTISSA=fmt.mantissa_bits, BIAS=fmt.bias, MAX=fmt.max,
        NAN_CODE=None if hardware and device.vendor == "nv" and fmt is E4M3FN else fmt.nan_code,
        HARDWARE=_TL_TYPES[fmt.name] if hardware else None,
    )  # fmt: skip


def early_start(device: Device) -> dict[str, bool]:
    """Options of programmatic dependent launch (sm90 and newer), which hides a kernel's start behind the one before."""
    if device.vendor == "nv" and device.capability >= 90:
        return dict(PDL=True, launch_pdl=True)
    return dict(PDL=False)


_TL_TYPES = {"e4m3fn": tl.float8e4nv, "e5m2": tl.float8e5, "e4m3fnuz": tl.float8e4b8, "e5m2fnuz": tl.float8e5b16}


@triton.jit
def after_previous(PDL: tl.constexpr):
    """With early_start: let the next kernel start as well, then wait for all that the previous ones have written."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def divide(x, scale):
    """x / scale, correctly rounded, at four instructions an element; scale broadcasts (size 1 where it is shared).

    A reciprocal and its error are formed once a scale; a quotient from both is faithful, and one exact remainder then
    rounds it correctly (Markstein; Muller et al., Handbook of Floating-Point Arithmetic, division with an FMA). The
    first reciprocal lies below 1 / scale, so that its error is positive, and the remainder is negated: so -0 stays -0.
    Needs 2^-80 <= scale < 2^122 and finite or NaN x: the remainder is then exact down to quotients of 2^-20, and what
    lies below is code 0 in every format.
    """
    one = tl.full(scale.shape, 1.0, tl.float32)
    reciprocal = tl.math.div_rn(one, scale)
    below = reciprocal * (1.0 - 2.0**-23)
    rest = tl.fma(scale, -below, one) * reciprocal
    quotient = tl.fma(x, tl.broadcast_to(below, x.shape), x * rest)
    excess = tl.fma(quotient, tl.broadcast_to(scale, x.shape), x * -1.0)  # folds, where -x is 0 - x
    return tl.fma(excess, tl.broadcast_to(-reciprocal, x.shape), quotient)


@triton.jit
def clamp_to(x, low, high):
    """x inside low..high, NaN kept; the bounds broadcast."""
    x = tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def quotient_within(x, scale, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x / scale inside LOW..HIGH for any x and scale, NaN kept, Inf saturated (but Inf / Inf is NaN).

    Clamping x is clamping the quotient: what lies beyond rounds to the same code. Scales outside what `divide` takes,
    or so large that the clamp would overflow, go the long way, all of a program's together. The quotient leaves the
    branch, not its codes: triton 3.6 mixes up bytes that do.
    """
    if unusual(scale):
        quotient = clamp_to(tl.math.div_rn(x, tl.broadcast_to(scale, x.shape)), LOW, HIGH)
    else:
        quotient = divide(clamp_to(x, scale * LOW, scale * HIGH), scale)
    return quotient


@triton.jit
def unusual(scale):
    """Is this scale, or any of a tile of them, outside what quotient_within does the short way?"""
    outside = tl.where((scale >= 2.0**-80) & (scale < 2.0**110), 0, 1)
    if scale.type.is_block():
        outside = tl.max(outside, axis=None)
    return outside > 0


@triton.jit
def quantize_fp8(
    x, scale, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr,
):  # fmt: skip
    """fp8 codes of x / scale as uint8: saturate, round half to even, NaN to NaN."""
    return cast_fp8(quotient_within(x, scale, -MAX, MAX), MANTISSA, BIAS, NAN_CODE, HARDWARE)


@triton.jit
def cast_fp8(v, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr):
    """fp32 values within the format's range, or NaN, to uint8 codes: round half to even. HARDWARE changes no bit."""
    if HARDWARE is not None:
        # triton 3.6 converts to e5m2 in pairs by integers, and a NaN carries into its neighbour
        code = (v if NAN_CODE is None else tl.where(v != v, 0.0, v)).to(HARDWARE).to(tl.uint8, bitcast=True)
    else:
        bits = v.to(tl.int32, bitcast=True)
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
    if NAN_CODE is not None:
        code = tl.where(v != v, NAN_CODE, code).to(tl.uint8)
    return code


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
    # the sign by its bit: a unary minus is 0 - value to some compilers, and loses -0
    value = (value.to(tl.int32, bitcast=True) | ((c & 0x80) << 24)).to(tl.float32, bitcast=True)
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
def amax_along(x, mask, axis: tl.constexpr):
    """Largest finite magnitude along `axis` (formats.finite_amax); lanes off the mask must hold 0."""
    amax = tl.max(tl.abs(x), axis=axis)
    if any_infinite(amax):
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=axis))
    return amax


@triton.jit
def any_infinite(largest):
    """Do plain maxima of magnitudes tell of an Inf, or of NaN alone? Rare: one answer for the whole program."""
    return tl.max(tl.where(largest < float("inf"), 0, 1), axis=None) > 0


@triton.jit
def round_half_even(v):
    """Nearest integer as fp32, ties to even, for |v| < 2^22; `libdevice.rint` exists neither on HIP nor interpreted."""
    return (v + 12582912.0) - 12582912.0


@triton.jit
def cast_int8(v):
    """fp32 values in -128..127, or NaN, to int8: round half to even, NaN to 0."""
    v = tl.where(v != v, 0.0, v)
    # the sum's last mantissa bits are the rounded integer in two's complement
    return (v + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def quantize_int8(x, scale, QMIN: tl.constexpr):
    """int8 codes of x / scale in QMIN..127, NaN to 0."""
    return cast_int8(quotient_within(x, scale, QMIN, 127.0))


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Row and column of tile `pid`, walking columns inside bands of GROUP_M rows so that operands stay in L2."""
    per_band = GROUP_M * tiles_n
    band = pid // per_band
    first = band * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    inside = pid - band * per_band
    return first + inside % rows, inside // rows
