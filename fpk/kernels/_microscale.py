"""What the block-scaled formats (MX, NVFP4) share: power-of-two scales by integers, narrow codes, packing."""

import triton
import triton.language as tl

from fpk.device import Device
from fpk.formats import INT8, Format, Microscaling
from fpk.kernels._tile import cast_fp8, cast_int8, clamp_to, decode_fp8, fp8_constants


def scale_constants(mx: Microscaling, rule: str) -> dict[str, int]:
    """Constexpr arguments of `scale_byte` for a rule (`formats.mx_scale` says what they are).

    Each rule is "add to the bits of the maximum, keep the exponent": the addend carries into the exponent exactly where
    the rule rounds up.
    """
    mantissa = mx.element.mantissa_bits if mx.element.is_float else 6
    largest = int((mx.max * 2.0**-mx.element.emax - 1) * 2**23)  # fraction of the largest element's significand
    addend = {"floor": 0, "ceil": 0x7FFFFF, "even": 1 << (22 - mantissa), "rceil": 0x7FFFFF - largest}[rule]
    return dict(ADDEND=addend, EMAX=mx.element.emax)


def element_constants(fmt: Format, device: Device) -> dict[str, object]:
    """Constexpr arguments of `element_codes` for an element format."""
    if fmt is INT8:
        return dict(BITS=8, MANTISSA=0, BIAS=0, MAX=fmt.max, NAN_CODE=0, HARDWARE=None)
    if fmt.bits == 8:
        return dict(BITS=8, **fp8_constants(fmt, device))
    return dict(
        BITS=fmt.bits, MANTISSA=fmt.mantissa_bits, BIAS=fmt.bias, MAX=fmt.max, NAN_CODE=None, HARDWARE=None
    )  # fmt: skip


@triton.jit
def largest_magnitude(x):
    """Largest magnitude along the last axis, as the bits of an fp32: NaN above Inf above every number."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=2)


@triton.jit
def any_odd(largest):
    """Is there an Inf or a NaN in any block of this program? Rare, and then all of it goes the long way."""
    return tl.max(tl.where(largest < 0x7F800000, 0, 1), axis=None) > 0


@triton.jit
def scale_byte(amax, ADDEND: tl.constexpr, EMAX: tl.constexpr):
    """e8m0 byte, as int32, of a block with this amax (`formats.mx_scale`)."""
    bits = amax.to(tl.int32, bitcast=True)
    # subnormals of at least 2^-127 as if fp32 had an exponent for them; what is below has byte 0 by every rule
    bits = tl.where(bits < 0x800000, tl.maximum(bits - 0x400000, 0) << 1, bits)
    byte = tl.minimum(tl.maximum(((bits + ADDEND) >> 23) - EMAX, 0), 254)
    return tl.where(amax == float("inf"), 255, byte)


@triton.jit
def reciprocal_of_scale(byte):
    """2^(127 - byte) as fp32; the smallest is a subnormal, and NaN's byte has it too."""
    return tl.where(byte >= 254, 0x00400000, (254 - byte) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scaled(x, factor, alive):
    """x * factor for factors per block [M, G]; blocks that are not `alive` give +0, also for -0."""
    zero = tl.where(alive, -2147483648, 0).to(tl.int32).to(tl.float32, bitcast=True)  # adding -0 changes nothing
    shape: tl.constexpr = x.shape
    return tl.fma(x, tl.broadcast_to(factor[:, :, None], shape), tl.broadcast_to(zero[:, :, None], shape))


@triton.jit
def narrow_codes(v, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, BITS: tl.constexpr):
    """Codes of a 4 or 6 bit format, as int32, of fp32 values without NaN: saturate, round half to even.

    The step between codes is 2^-MANTISSA of the power of two below the value, and constant below the smallest normal
    one. Adding a number whose last bit is that step rounds once, and leaves the count of steps in the lowest bits.
    """
    bits = v.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(v), MAX)
    power = (magnitude.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.maximum(power, 2.0 ** (1 - BIAS))
    KEEP: tl.constexpr = (1 << (BITS - 1)) - 1
    # the rebased exponent is added as steps too, an even number of them, modulo the number of codes
    REBASE: tl.constexpr = -((128 - BIAS) << MANTISSA) & KEEP
    magic = tl.full(v.shape, (2.0**23 + REBASE) * 2.0**-MANTISSA, tl.float32)
    steps = tl.fma(power, magic, magnitude).to(tl.uint32, bitcast=True)
    code = steps + (power.to(tl.uint32, bitcast=True) >> (23 - MANTISSA))
    return ((code & KEEP) | ((bits >> (32 - BITS)) & (KEEP + 1))).to(tl.int32, bitcast=True)


@triton.jit
def element_codes(
    v, CLAMP: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
):  # fmt: skip
    """Codes of scaled values: int32 for 4 and 6 bits (no NaN), uint8 for fp8, int8 (64 to the unit) for MANTISSA 0.

    CLAMP False: no fp8 value lies beyond the range.
    """
    if BITS < 8:
        codes = narrow_codes(v, MANTISSA, BIAS, MAX, BITS)
    elif MANTISSA == 0:
        codes = cast_int8(clamp_to(v * 64.0, -MAX, MAX))
    else:
        codes = cast_fp8(clamp_to(v, -MAX, MAX) if CLAMP else v, MANTISSA, BIAS, NAN_CODE, HARDWARE)
    return codes


@triton.jit
def decode_narrow(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr):
    """int32 codes of 4 or 6 bits to fp32, exactly."""
    SIGN: tl.constexpr = 1 << (BITS - 1)
    # the code's bits are an fp32 whose exponent is off by the difference of the biases; the product is exact
    value = ((code & (SIGN - 1)) << (23 - MANTISSA)).to(tl.float32, bitcast=True) * (2.0 ** (127 - BIAS))
    sign = (code & SIGN) << (32 - BITS)
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def decode_element(
    code, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Codes to fp32 values; MANTISSA 0 is int8 with 64 to the unit."""
    if BITS < 8:
        value = decode_narrow(code.to(tl.int32), MANTISSA, BIAS, BITS)
    elif MANTISSA == 0:
        value = code.to(tl.float32) * (1 / 64)
    else:
        value = decode_fp8(code, MANTISSA, BIAS, NAN_CODE, IEEE)
    return value


@triton.jit
def join_pairs(codes, WIDTH: tl.constexpr, HIGH_FIRST: tl.constexpr):
    """Neighbours along the last axis into one number of twice WIDTH bits: [M, G, 2n] to [M, G, n]."""
    M: tl.constexpr = codes.shape[0]
    G: tl.constexpr = codes.shape[1]
    N: tl.constexpr = codes.shape[2] // 2
    first, second = tl.split(tl.reshape(codes, (M, G, N, 2)))
    if HIGH_FIRST:
        pairs = (first << WIDTH) | second
    else:
        pairs = first | (second << WIDTH)
    return pairs


@triton.jit
def split_pairs(pairs, WIDTH: tl.constexpr, HIGH_FIRST: tl.constexpr):
    """The inverse of join_pairs."""
    M: tl.constexpr = pairs.shape[0]
    G: tl.constexpr = pairs.shape[1]
    N: tl.constexpr = pairs.shape[2] * 2
    low, high = pairs & ((1 << WIDTH) - 1), pairs >> WIDTH
    both = tl.join(high, low) if HIGH_FIRST else tl.join(low, high)
    return tl.reshape(both, (M, G, N))


@triton.jit
def store_packed(rows, codes, first, mask_m, width, BITS: tl.constexpr, WORDS: tl.constexpr, HIGH_FIRST: tl.constexpr):
    """Store codes [M, G, n], packed, into rows of `width` bytes; block g starts at byte first[g].

    rows: uint8 pointers [M]. WORDS: rows start at multiples of 4 bytes and hold whole groups of 16 codes, which then
    leave as three words (6 bits, low first only).
    """
    N: tl.constexpr = codes.shape[2]
    if BITS == 4:
        at = first[:, None] + tl.arange(0, N // 2)[None, :]
        mask = mask_m[:, None, None] & (at < width)[None, :, :]
        tl.store(rows[:, None, None] + at[None, :, :], join_pairs(codes, 4, HIGH_FIRST).to(tl.uint8), mask=mask)
    else:
        quads = join_pairs(join_pairs(codes, 6, HIGH_FIRST), 12, HIGH_FIRST)  # 24 bits each
        STEP: tl.constexpr = 12 if WORDS else 3
        at = first[:, None] + tl.arange(0, N * 3 // 4 // STEP)[None, :] * STEP
        mask = mask_m[:, None, None] & (at < width)[None, :, :]
        ptrs = rows[:, None, None] + at[None, :, :]
        if WORDS:
            M: tl.constexpr = codes.shape[0]
            G: tl.constexpr = codes.shape[1]
            even, odd = tl.split(tl.reshape(quads, (M, G, N // 16, 2, 2)))
            q0, q2 = tl.split(even)
            q1, q3 = tl.split(odd)
            words = ptrs.to(tl.pointer_type(tl.int32))
            tl.store(words, q0 | (q1 << 24), mask=mask)
            tl.store(words + 1, (q1 >> 8) | (q2 << 16), mask=mask)
            tl.store(words + 2, (q2 >> 16) | (q3 << 8), mask=mask)
        else:
            low, high = (ptrs + 2, ptrs) if HIGH_FIRST else (ptrs, ptrs + 2)
            tl.store(low, (quads & 255).to(tl.uint8), mask=mask)
            tl.store(ptrs + 1, ((quads >> 8) & 255).to(tl.uint8), mask=mask)
            tl.store(high, ((quads >> 16) & 255).to(tl.uint8), mask=mask)


@triton.jit
def load_packed(rows, first, mask_m, width, stride, N: tl.constexpr, BITS: tl.constexpr, HIGH_FIRST: tl.constexpr):
    """Codes [M, G, N] as int32 out of rows of `width` packed bytes; 0 beyond them. The inverse of store_packed."""
    if BITS == 4:
        at = first[:, None] + tl.arange(0, N // 2)[None, :]
        mask = mask_m[:, None, None] & (at < width)[None, :, :]
        packed = tl.load(rows[:, None, None] + (at * stride)[None, :, :], mask=mask, other=0)
        codes = split_pairs(packed.to(tl.int32), 4, HIGH_FIRST)
    else:
        at = first[:, None] + tl.arange(0, N // 4)[None, :] * 3
        mask = mask_m[:, None, None] & (at < width)[None, :, :]
        ptrs = rows[:, None, None] + (at * stride)[None, :, :]
        b0 = tl.load(ptrs, mask=mask, other=0).to(tl.int32)
        b1 = tl.load(ptrs + stride, mask=mask, other=0).to(tl.int32)
        b2 = tl.load(ptrs + 2 * stride, mask=mask, other=0).to(tl.int32)
        if HIGH_FIRST:
            quads = (b0 << 16) | (b1 << 8) | b2
        else:
            quads = b0 | (b1 << 8) | (b2 << 16)
        codes = split_pairs(split_pairs(quads, 12, HIGH_FIRST), 6, HIGH_FIRST)
    return codes
