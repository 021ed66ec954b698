"""Asymmetric INT8: the range of finite values, and the scale and zero point that cover it.

The range always includes 0, so the zero point is a code, 0 is represented exactly, and a constant or one-sided input
needs no special case.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.kernels._tile import quotient_within


def asymmetric_parameters(
    x: Tensor, dims: tuple[int, ...], num_valid_rows: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale (fp32) and zero point (int32) over `dims`, kept as size 1.

    scale = max(max - min, 1e-10) / 255, zero = round_half_even(-128 - min / scale), with max >= 0 >= min over finite
    elements of rows before `num_valid_rows`; scale Inf and zero -128 where every element that counts is Inf. Halves are
    subtracted so that the range of fp32 values cannot overflow; halving changes no bit of the quotient.
    """
    value = x.float()
    counts = torch.ones_like(value, dtype=torch.bool)
    if num_valid_rows is not None:
        counts = (torch.arange(x.shape[-2], device=x.device)[:, None] < num_valid_rows) & counts
    shape = [1 if d - x.dim() in dims else n for d, n in enumerate(x.shape)]
    if value.numel() == 0:
        low = high = value.new_zeros(shape)
        infinite = torch.zeros_like(low, dtype=torch.bool)
    else:
        finite = torch.where(counts & value.isfinite(), value, 0.0)
        low, high = finite.amin(dims, keepdim=True), finite.amax(dims, keepdim=True)
        low, high = low.clamp(max=0.0), high.clamp(min=0.0)
        infinite = (value.isinf() | ~counts).all(dims, keepdim=True)
        if num_valid_rows is not None:
            infinite = infinite & (num_valid_rows > 0)
    scale = torch.maximum(high * 0.5 - low * 0.5, high.new_tensor(0.5e-10)) / high.new_tensor(127.5)
    scale = torch.where(infinite, float("inf"), scale)
    return scale, (-128 - low / scale).round().to(torch.int32)


def asymmetric_codes(x: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """int8 codes around a zero point in -128..127; NaN becomes the code of 0."""
    quotient = x.float() / scale
    code = (quotient.round() + zero_point).clamp(-128, 127)
    return torch.where(quotient.isnan(), zero_point.float(), code).to(torch.int8).contiguous()


@triton.jit
def range_keys(v):
    """int32 keys whose maxima give the range: 0 for Inf, else 1 plus the bits of a finite positive (negative) value."""
    bits = v.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    finite = tl.where(magnitude < 0x7F800000, magnitude, 0)
    infinite = magnitude == 0x7F800000
    high = tl.where(infinite, 0, tl.where(bits >= 0, finite, 0) + 1)
    low = tl.where(infinite, 0, tl.where(bits < 0, finite, 0) + 1)
    return high, low


@triton.jit
def range_of_keys(high_key, low_key):
    """The range that maxima of `range_keys` stand for, as fp32; high is Inf if every element was Inf."""
    high = (tl.maximum(high_key, 1) - 1).to(tl.float32, bitcast=True)
    low = -(tl.maximum(low_key, 1) - 1).to(tl.float32, bitcast=True)
    return tl.where(high_key == 0, float("inf"), high), low


@triton.jit
def range_along(x, mask, axis: tl.constexpr):
    """Range of finite values and 0 along `axis`; lanes off the mask must hold 0."""
    high = tl.maximum(tl.max(x, axis=axis), 0.0)
    low = tl.minimum(tl.min(x, axis=axis), 0.0)
    if tl.max(tl.where((high < float("inf")) & (low > -float("inf")), 0, 1), axis=None) > 0:  # rare: an Inf
        high_key, low_key = range_keys(x)
        high_key = tl.max(tl.where(mask, high_key, 0), axis=axis)
        low_key = tl.max(tl.where(mask, low_key, 0), axis=axis)
        high, low = range_of_keys(high_key, low_key)
    return high, low


@triton.jit
def scale_and_zero(high, low):
    """fp32 scale and int32 zero point of a range."""
    scale = tl.math.div_rn(tl.maximum(high * 0.5 - low * 0.5, 0.5e-10), 127.5)
    zero = -128.0 - tl.math.div_rn(low, scale)
    return scale, ((zero + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def quantize_around(x, scale, zero):
    """int8 codes of x / scale around zero points in -128..127: round half to even, saturate, NaN to the zero point.

    scale and zero broadcast to x.
    """
    quotient = quotient_within(x, scale, -512.0, 512.0)
    zero = zero.to(tl.float32)
    code = ((quotient + 12582912.0) - 12582912.0) + zero
    code = tl.minimum(tl.maximum(tl.where(quotient != quotient, zero, code), -128.0), 127.0)
    # the sum's last mantissa bits are the integer in two's complement
    return (code + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
