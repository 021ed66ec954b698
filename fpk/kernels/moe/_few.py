"""Experts of few tokens, without a matrix unit, which would mostly multiply padding: each program multiplies one row by
some of its expert's weights.

A lane reads 16 neighbouring weights at a time and sums their products before they meet a scale; columns of activations
lie in the same lanes, so that nothing moves between threads but the last sums.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.kernels._activation import activate
from fpk.kernels._tile import amax_key, amax_of_key, any_infinite, clamp_to, divide

LANE = tl.constexpr(16)
"""Columns that a lane reads at a time: scales change only between them."""


@triton.jit
def _start(PDL: tl.constexpr):
    """Wait, then let the next kernel get ready: when that one starts, all that this one waited for is there."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def _expert(ids_ptr, map_ptr, offs, mask, num_mapped, E):
    """Local experts at these places of ids; -1 for slots that are dropped."""
    expert = tl.load(ids_ptr + offs, mask=mask, other=-1).to(tl.int64)
    if map_ptr is not None:
        known = (expert >= 0) & (expert < num_mapped)
        expert = tl.load(map_ptr + tl.where(known, expert, 0), mask=known, other=-1).to(tl.int64)
    return tl.where((expert >= 0) & (expert < E), expert, -1)


@triton.jit
def _dots(w_ptrs, a, k, cols, K, EVEN: tl.constexpr):
    """Sums of 16 products each: weights [..., LANES, 16] times a, which broadcasts."""
    if EVEN:
        w = tl.load(w_ptrs + k)
    else:
        w = tl.load(w_ptrs + k, mask=cols < K - k, other=0.0)
    return tl.sum(w.to(tl.float32) * a, axis=len(w.shape) - 1)


@triton.jit
def _row(scale_row, bias_ptr, value, rows, mask, stride, ROWS: tl.constexpr):
    """Sums times the scales of their channels, plus their biases."""
    if scale_row is not None:
        channel = rows // ROWS if ROWS > 0 else rows * 0
        value *= tl.load(scale_row + channel * stride, mask=mask, other=0.0)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["num_mapped", "E", "top_k"])
def up_kernel(
    a_ptr, sa_ptr, w_ptr, sw_ptr, bias_ptr, ids_ptr, map_ptr, hidden_ptr,
    H, I, E, top_k, num_mapped,
    stride_am, stride_sam, stride_sak, stride_we, stride_wn, stride_swe, stride_swn, stride_swk, stride_be, stride_im,
    stride_ik,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FORMULA: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, ONE: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Hidden rows in the order of slots, of those that have an expert here: BLOCK_N columns of a slot.

    GROUP: columns that share a scale in `a` and in the weights, -1 for all; ROWS: rows of weights that share one; ONE:
    so do all gates of a program, and all its ups.
    """
    _start(PDL)
    slot = tl.program_id(1)
    token = (slot // top_k).to(tl.int64)
    e = _expert(ids_ptr, map_ptr, token * stride_im + slot % top_k * stride_ik, slot >= 0, num_mapped, E)
    if e >= 0:
        LANES: tl.constexpr = BLOCK_K // LANE
        lane = tl.arange(0, LANES)
        cols = lane[None, :, None] * LANE + tl.arange(0, LANE)[None, None, :]
        first = tl.program_id(0) * BLOCK_N
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < I
        inside = tl.where(mask_n, offs_n, first)
        step: tl.constexpr = 2 if INTERLEAVED else 1
        up_at = first * 0 + (1 if INTERLEAVED else I)
        g_rows = inside * step
        w_ptrs = w_ptr + e * stride_we + g_rows.to(tl.int64)[:, None, None] * stride_wn + cols
        a_ptrs = a_ptr + token * stride_am + cols
        if ONE:
            blocks, up_blocks = first * step // ROWS, (first * step + up_at) // ROWS
        else:
            blocks, up_blocks = (g_rows // ROWS)[:, None], ((g_rows + up_at) // ROWS)[:, None]
        gate = tl.zeros((BLOCK_N, LANES), dtype=tl.float32)
        up = gate
        for k in tl.range(0, H, BLOCK_K, num_stages=DEPTH):
            if EVEN:
                a = tl.load(a_ptrs + k).to(tl.float32)
            else:
                a = tl.load(a_ptrs + k, mask=cols < H - k, other=0.0).to(tl.float32)
            part = _dots(w_ptrs, a, k, cols, H, EVEN)
            if GROUP > 0:
                group = (k + lane * LANE) // GROUP
                there = (k + lane * LANE < H)[None, :]
                sa = tl.load(sa_ptr + token * stride_sam + group[None, :] * stride_sak, mask=there, other=0.0)
                sw_ptrs = sw_ptr + e * stride_swe + group[None, :] * stride_swk
                gate += part * (sa * tl.load(sw_ptrs + blocks * stride_swn, mask=there, other=0.0))
            else:
                gate += part
            if GATED:
                part = _dots(w_ptrs + up_at.to(tl.int64) * stride_wn, a, k, cols, H, EVEN)
                if GROUP > 0:
                    up += part * (sa * tl.load(sw_ptrs + up_blocks * stride_swn, mask=there, other=0.0))
                else:
                    up += part
        g, u = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        scale_row = None
        bias_row = bias_ptr
        if GROUP < 0 and sw_ptr is not None:
            scale_row = sw_ptr + e * stride_swe
        if bias_ptr is not None:
            bias_row = bias_ptr + e * stride_be
        if GROUP < 0 and sa_ptr is not None:
            scale = tl.load(sa_ptr + token * stride_sam)
            g *= scale
            u *= scale
        kind: tl.constexpr = hidden_ptr.dtype.element_ty
        g = _row(scale_row, bias_row, g, g_rows, mask_n, stride_swn, ROWS).to(kind).to(tl.float32)
        if GATED:
            u = _row(scale_row, bias_row, u, g_rows + up_at, mask_n, stride_swn, ROWS).to(kind).to(tl.float32)
        out = activate(g, u, FORMULA, GATED, ALPHA, BETA, LIMIT, False)
        tl.store(hidden_ptr + slot.to(tl.int64) * I + offs_n, out.to(kind), mask=mask_n)


@triton.jit
def _quantized(x, scale, MAX: tl.constexpr, CODE: tl.constexpr):
    """The values that FP8 codes of x under its scale stand for, the scale apart."""
    v = divide(clamp_to(x, scale * -MAX, scale * MAX), scale)
    odd = v != v  # triton 3.6 converts to e5m2 in pairs, and a NaN carries into its neighbour
    return tl.where(odd, v, tl.where(odd, 0.0, v).to(CODE).to(tl.float32))


@triton.jit
def _down_step(
    acc, w, h_ptrs, sw_rows, k, cols, lane, I, here, row_scale, stride_swk,
    GROUP: tl.constexpr, QMAX: tl.constexpr, MAX: tl.constexpr, CODE: tl.constexpr, SLOTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """acc plus the products of columns k.. of hidden rows and weights w, [SLOTS, BLOCK_N, LANES, 16]."""
    x = tl.load(h_ptrs + k, mask=here[:, None, None, None] & (cols < I - k), other=0.0).to(tl.float32)
    if GROUP > 0:
        WIDE: tl.constexpr = GROUP // LANE
        amax = tl.reshape(_finite_amax(x), (SLOTS, LANES // WIDE, WIDE))
        scale = tl.math.div_rn(tl.maximum(tl.max(amax, axis=2), 1e-10), QMAX)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (SLOTS, LANES // WIDE, WIDE)), (SLOTS, LANES))
        x = _quantized(x, scale[:, None, :, None], MAX, CODE)
    elif CODE is not None:
        x = _quantized(x, row_scale[:, None, None, None], MAX, CODE)
    part = tl.sum(w.to(tl.float32) * x, axis=3)
    if GROUP > 0:
        at = k + lane * LANE
        sw = tl.load(sw_rows[:, None] + (at // GROUP)[None, :] * stride_swk, mask=(at < I)[None, :], other=0.0)
        part *= (scale * sw)[:, None, :]
    return acc + part


@triton.jit
def _finite_amax(x):
    """Largest finite magnitude of a lane's columns, [SLOTS, LANES] of [SLOTS, 1, LANES, 16]."""
    amax = tl.max(tl.abs(x), axis=3)
    if any_infinite(amax):
        amax = amax_of_key(tl.max(amax_key(x), axis=3))
    return tl.max(amax, axis=1)


@triton.jit(do_not_specialize=["num_mapped", "E", "top_k"])
def down_kernel(
    h_ptr, w_ptr, sw_ptr, bias_ptr, ids_ptr, map_ptr, weights_ptr, residual_ptr, residual_weight_ptr, out_ptr,
    H, I, E, top_k, num_mapped,
    stride_we, stride_wn, stride_swe, stride_swn, stride_swk, stride_be, stride_im, stride_ik, stride_rm, stride_rk,
    stride_xm, stride_xk, stride_xw,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QMAX: tl.constexpr, MAX: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of a token: hidden rows of all its slots, quantized here if CODE is an FP8 type, times their
    experts' weights; weighted and summed.

    Up to the wait only weights and ids are read, which were there before the kernel in front of this one began.
    """
    LANES: tl.constexpr = BLOCK_K // LANE
    token = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, SLOTS)
    e = _expert(ids_ptr, map_ptr, token * stride_im + j * stride_ik, j < top_k, num_mapped, E)
    here = e >= 0
    e = tl.where(here, e, 0)
    lane = tl.arange(0, LANES)
    cols = lane[None, None, :, None] * LANE + tl.arange(0, LANE)[None, None, None, :]
    first = tl.program_id(0) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    mask_n = offs_n < H
    rows = tl.where(mask_n, offs_n, first)
    w_rows = e[:, None] * stride_we + rows.to(tl.int64)[None, :] * stride_wn
    w_ptrs = w_ptr + w_rows[:, :, None, None] + cols
    live = here[:, None, None, None]
    w = tl.load(w_ptrs, mask=live & (cols < I), other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    h_ptrs = h_ptr + (token * top_k + j)[:, None, None, None] * I + cols
    row_scale = here
    if CODE is not None and GROUP < 0:
        amax = tl.zeros((SLOTS, LANES), dtype=tl.float32)
        for k in range(0, I, BLOCK_K):
            x = tl.load(h_ptrs + k, mask=live & (cols < I - k), other=0.0).to(tl.float32)
            amax = tl.maximum(amax, _finite_amax(x))
        row_scale = tl.maximum(tl.math.div_rn(tl.max(amax, axis=1), QMAX), 1 / (512 * QMAX))
    sw_rows = sw_ptr
    if GROUP > 0:
        sw_rows = sw_ptr + e * stride_swe + first // ROWS * stride_swn
    acc = tl.zeros((SLOTS, BLOCK_N, LANES), dtype=tl.float32)
    acc = _down_step(
        acc, w, h_ptrs, sw_rows, 0, cols, lane, I, here, row_scale, stride_swk, GROUP, QMAX, MAX, CODE, SLOTS, LANES
    )
    for k in tl.range(BLOCK_K, I, BLOCK_K, num_stages=DEPTH):
        if EVEN:
            w = tl.load(w_ptrs + k, mask=live, other=0.0)
        else:
            w = tl.load(w_ptrs + k, mask=live & (cols < I - k), other=0.0)
        acc = _down_step(
            acc, w, h_ptrs, sw_rows, k, cols, lane, I, here, row_scale, stride_swk, GROUP, QMAX, MAX, CODE, SLOTS, LANES
        )
    out = tl.sum(acc, axis=2)
    if CODE is not None and GROUP < 0:
        out *= row_scale[:, None]
    mask = here[:, None] & mask_n[None, :]
    if GROUP < 0 and sw_ptr is not None:
        channel = rows // ROWS if ROWS > 0 else rows * 0
        out *= tl.load(sw_ptr + e[:, None] * stride_swe + channel[None, :] * stride_swn, mask=mask, other=0.0)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + e[:, None] * stride_be + rows[None, :], mask=mask, other=0.0).to(tl.float32)
    out = out.to(h_ptr.dtype.element_ty).to(tl.float32)
    out *= tl.load(weights_ptr + token * stride_rm + j * stride_rk, mask=here, other=0.0)[:, None]
    total = tl.sum(tl.where(mask, out, 0.0), axis=0)
    if residual_ptr is not None:
        added = tl.load(residual_ptr + token * stride_xm + offs_n.to(tl.int64) * stride_xk, mask=mask_n, other=0.0)
        added = added.to(tl.float32)
        if residual_weight_ptr is not None:
            added *= tl.load(residual_weight_ptr + token * stride_xw)
        total += added
    tl.store(out_ptr + token * H + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask_n)
