"""One step of attention: a block of queries and the next tokens of a paged KV cache."""

import triton
import triton.language as tl

from fpk.kernels._tile import decode_fp8, quantize_fp8
from fpk.kernels.attention._tiles import decode_pairs, decode_tile


@triton.jit
def attend(
    n, end, limits, page, q, q_odd, row_scale, top, total, acc, odd, k_base, v_base, k_stored_ptr, v_stored_ptr,
    p_scale_ptr, stride_kp: tl.constexpr, stride_kt: tl.constexpr, stride_vp: tl.constexpr, stride_vt: tl.constexpr,
    stride_ksp, stride_kst, stride_vsp, stride_vst,
    D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr, CODE: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, IEEE: tl.constexpr, MAX: tl.constexpr,
    HARDWARE: tl.constexpr, PAIRS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """BLOCK_N tokens from n on, of these pages; with MASKED those before `end`, and before each row's limit if any.

    Every row must see the first token of its first step.
    """
    PARTS: tl.constexpr = 2 if PAIRS else 1
    ZERO: tl.constexpr = 0 if PAIRS else 0.0
    offs_d, offs_v = tl.arange(0, BLOCK_D // PARTS), tl.arange(0, BLOCK_DV // PARTS)
    offs_n = tl.arange(0, BLOCK_N)
    position = n + offs_n
    # a step that begins with a page has its tokens at the same places of pages as all others
    inside = ((offs_n if BLOCK_N % PAGE == 0 else position) % PAGE).to(tl.int64)
    page = page.to(tl.int64)
    present = position < end
    k_ptrs = k_base + (inside * stride_kt)[:, None] + offs_d[None, :] + (page * stride_kp)[:, None]
    if MASKED:
        k = tl.load(k_ptrs, mask=present[:, None] & (offs_d < D // PARTS)[None, :], other=ZERO)
    elif D < BLOCK_D:
        k = tl.load(k_ptrs, mask=(offs_d < D // PARTS)[None, :], other=ZERO)
    else:
        k = tl.load(k_ptrs)
    if PAIRS:
        k, k_odd = decode_pairs(k, KIND, CODE, MANTISSA, BIAS, NAN_CODE, IEEE)
        scores = tl.dot(q_odd, tl.trans(k_odd), tl.dot(q, tl.trans(k)))
    else:
        scores = tl.dot(q, tl.trans(decode_tile(k, TYPE, KIND, MANTISSA, BIAS, NAN_CODE, IEEE)))
    scores *= row_scale[:, None]  # [BLOCK_H, BLOCK_N]
    if k_stored_ptr is not None:
        k_stored = k_stored_ptr + page * stride_ksp + inside * stride_kst
        scores *= tl.load(k_stored, mask=present, other=0.0)[None, :]
    if MASKED:
        scores = tl.where(present[None, :], scores, float("-inf"))
        if limits is not None:
            scores = tl.where(position[None, :] < limits[:, None], scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))  # finite from the first step on
    if p_scale_ptr is not None:
        higher = tl.math.ceil(higher)  # fades are powers of two then, and steps those of the format
    p = tl.math.exp2(scores - higher[:, None])
    fade = tl.math.exp2(top - higher)
    total *= fade
    if p_scale_ptr is not None:
        p_scale = tl.load(p_scale_ptr + tl.zeros((1, 1), tl.int32))
        p = quantize_fp8(p, p_scale, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        p = decode_fp8(p, MANTISSA, BIAS, NAN_CODE, IEEE)
    if v_stored_ptr is not None:
        total += tl.sum(p, axis=1)
        v_stored = v_stored_ptr + page * stride_vsp + inside * stride_vst
        p *= tl.load(v_stored, mask=present, other=0.0)[None, :]
        largest = tl.maximum(tl.max(p, axis=1), 1e-30)  # a 16-bit float must hold the products
        p *= (1.0 / largest)[:, None]
    rounded = p.to(TYPE)
    if v_stored_ptr is None:
        # the sum of what multiplies the values: rounding that many tokens share then cancels
        total += tl.sum(rounded.to(tl.float32), axis=1)
    v_ptrs = v_base + (inside * stride_vt)[:, None] + offs_v[None, :] + (page * stride_vp)[:, None]
    if MASKED:
        v = tl.load(v_ptrs, mask=present[:, None] & (offs_v < DV // PARTS)[None, :], other=ZERO)
    elif DV < BLOCK_DV:
        v = tl.load(v_ptrs, mask=(offs_v < DV // PARTS)[None, :], other=ZERO)
    else:
        v = tl.load(v_ptrs)
    if PAIRS:
        v, v_odd = decode_pairs(v, KIND, CODE, MANTISSA, BIAS, NAN_CODE, IEEE)
    else:
        v = decode_tile(v, TYPE, KIND, MANTISSA, BIAS, NAN_CODE, IEEE)
    acc *= fade[:, None]
    odd *= fade[:, None]
    if v_stored_ptr is not None:
        acc += tl.dot(rounded, v) * largest[:, None]
        if PAIRS:
            odd += tl.dot(rounded, v_odd) * largest[:, None]
    else:
        acc = tl.dot(rounded, v, acc)
        if PAIRS:
            odd = tl.dot(rounded, v_odd, odd)
    return higher, total, acc, odd
