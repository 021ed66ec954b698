"""attention_prefill: new tokens of every sequence attend to a paged KV cache that holds them already.

    out[t, i] = sum_n softmax_n(softmax_scale * q[t, i] . k[n]) v[n]      over the tokens n of its sequence up to t

Rows query_starts[b] up to query_starts[b + 1] of q are the last tokens of sequence b, in order. Keys, values, scales,
rounding and what is summed how are those of `attention_decode`; a program has some tokens with all query heads of one
KV head and walks the cache once for all of them. Steps that every row sees whole are done without masks.

Source: paged attention (vLLM) with the blocks of FlashAttention-2.
"""

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import GRID_Y, expect_dtype, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import E4M3FN, FP8
from fpk.kernels._tile import after_previous, early_start, fp8_constants
from fpk.kernels.attention._paged import (
    attention_reference,
    check_attention,
    check_scales,
    check_table,
    decode_tolerance,
    prefill_cost,
    prefill_inputs,
    scale_strides,
)
from fpk.kernels.attention._step import attend
from fpk.kernels.attention._tiles import code_constants, decode_tile, power_below, tile_widths
from fpk.op import Kernel, op

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def reference(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_starts: Tensor,
    softmax_scale: float | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, q_scale: Tensor | None = None,
    p_scale: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The last query_starts[b + 1] - query_starts[b] tokens of every sequence: each is a sequence up to itself."""
    if block_table.shape[0] == 0:
        return q.new_zeros(
            (*q.shape[:2], value_cache.shape[3]),
            dtype=out_dtype or (q.dtype if q.dtype.itemsize > 1 else torch.bfloat16),
        )
    row = torch.arange(q.shape[0], device=q.device)
    b = (query_starts[1:] <= row[:, None]).sum(1)  # sequences that end before
    within = b < block_table.shape[0]
    b = torch.where(within, b, 0)
    seen = torch.minimum(seq_lens[b] - (query_starts[b + 1] - row) + 1, seq_lens[b])
    return attention_reference(
        q, key_cache, value_cache, block_table[b], torch.where(within, seen, 0), softmax_scale, k_scale, v_scale,
        key_scales, value_scales, q_scale, p_scale, out_dtype,
    )  # fmt: skip


def check(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_starts: Tensor,
    softmax_scale: float | None, q_scale: Tensor | None, p_scale: Tensor | None, out_dtype: torch.dtype | None,
    **scales: Tensor | None,
) -> None:  # fmt: skip
    name = "attention_prefill"
    check_attention(name, q, key_cache, value_cache, softmax_scale, q_scale, p_scale, out_dtype)
    expect_rank(f"{name}.block_table", block_table, 2)
    check_table(name, block_table.shape[0], block_table, seq_lens)
    check_scales(name, key_cache, **scales)
    expect_shape(f"{name}.query_starts", query_starts, (block_table.shape[0] + 1,))
    expect_dtype(f"{name}.query_starts", query_starts, torch.int32)


@triton.jit(do_not_specialize=["T", "B", "capacity"])
def _prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, starts_ptr, k_scale_ptr, v_scale_ptr, k_stored_ptr, v_stored_ptr,
    q_scale_ptr, p_scale_ptr, out_ptr,
    softmax_scale, T, B, H, capacity,
    stride_qt, stride_qh, stride_tb,
    stride_kp: tl.constexpr, stride_kt: tl.constexpr, stride_kh, stride_vp: tl.constexpr, stride_vt: tl.constexpr,
    stride_vh, stride_ks, stride_vs, stride_qs, stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr,
    KIND: tl.constexpr, CODE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr,
    IEEE: tl.constexpr, MAX: tl.constexpr, HARDWARE: tl.constexpr, PDL: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """BLOCK_M // GROUP tokens with the query heads of one KV head; long ones, the last of their sequences, first.

    Programs beyond the last tile of the last sequence write zeros behind it.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    after_previous(PDL)
    h = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    offs_b, offs_m, offs_n = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    firsts = tl.load(starts_ptr + offs_b, mask=offs_b < B, other=0)
    ends = tl.load(starts_ptr + offs_b + 1, mask=offs_b < B, other=0)
    tiles = tl.cdiv(tl.maximum(ends - firsts, 0), TOKENS)  # [BLOCK_B], of each sequence
    b = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), axis=0)  # those before this tile: its sequence, or more
    b = tl.minimum(b, B)
    tile -= tl.sum(tl.where(offs_b < b, tiles, 0), axis=0)
    first = tl.load(starts_ptr + b)
    query = tile * TOKENS + offs_m // GROUP
    heads = h * GROUP + offs_m % GROUP
    rows = (first + query).to(tl.int64)
    out_ptrs = out_ptr + (rows * (H * GROUP) + heads)[:, None] * DV + offs_dv[None, :]
    if b == B:
        mask = (offs_m < TOKENS * GROUP) & (rows < T)
        zeros = tl.zeros((BLOCK_M, BLOCK_DV), out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zeros, mask=mask[:, None] & (offs_dv < DV)[None, :])
        return
    count = tl.load(starts_ptr + b + 1) - first
    length = tl.load(lens_ptr + b)
    valid = (offs_m < TOKENS * GROUP) & (query < count) & (rows < T)
    limits = tl.where(valid, tl.minimum(length - count + query + 1, capacity), 0)  # tokens that each row sees
    end = tl.max(limits, axis=0)
    whole = tl.maximum(tl.min(tl.where(valid, limits, end), axis=0), 0) // BLOCK_N * BLOCK_N
    q_ptrs = q_ptr + (rows * stride_qt + heads * stride_qh)[:, None] + offs_d[None, :]
    q = tl.load(q_ptrs, mask=valid[:, None] & (offs_d < D)[None, :], other=0.0)

    score_scale = softmax_scale * 1.4426950408889634  # exponents of 2
    if k_scale_ptr is not None:
        score_scale *= tl.load(k_scale_ptr + h * stride_ks)
    if q_scale_ptr is not None:
        score_scale *= tl.load(q_scale_ptr + h * stride_qs)
        q = decode_tile(q, TYPE, KIND, MANTISSA, BIAS, NAN_CODE, IEEE)
    row_scale = tl.full((BLOCK_M,), 1.0, tl.float32) * score_scale
    if q.dtype != TYPE:  # bf16 queries of a cache of codes
        power, inverse = power_below(q)
        q = (q.to(tl.float32) * inverse[:, None]).to(TYPE)
        row_scale *= power

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    k_base, v_base = k_ptr + h * stride_kh, v_ptr + h * stride_vh
    if k_stored_ptr is not None:
        k_stored_ptr += h * stride_ksh
        v_stored_ptr += h * stride_vsh
    pages = table_ptr + b.to(tl.int64) * stride_tb
    for n in range(0, whole, BLOCK_N):
        page = tl.load(pages + (n + offs_n) // PAGE)
        top, total, acc, _ = attend(
            n, end, None, page, q, q, row_scale, top, total, acc, acc, k_base, v_base, k_stored_ptr, v_stored_ptr,
            p_scale_ptr, stride_kp, stride_kt, stride_vp, stride_vt, stride_ksp, stride_kst, stride_vsp, stride_vst,
            D, DV, PAGE, TYPE, KIND, CODE, MANTISSA, BIAS, NAN_CODE, IEEE, MAX, HARDWARE, False, BLOCK_N, BLOCK_D,
            BLOCK_DV, False,
        )  # fmt: skip
    for n in range(whole, end, BLOCK_N):
        page = tl.load(pages + (n + offs_n) // PAGE, mask=n + offs_n < end, other=0)
        top, total, acc, _ = attend(
            n, end, tl.maximum(limits, 1), page, q, q, row_scale, top, total, acc, acc, k_base, v_base, k_stored_ptr,
            v_stored_ptr, p_scale_ptr, stride_kp, stride_kt, stride_vp, stride_vt, stride_ksp, stride_kst, stride_vsp,
            stride_vst, D, DV, PAGE, TYPE, KIND, CODE, MANTISSA, BIAS, NAN_CODE, IEEE, MAX, HARDWARE, False, BLOCK_N,
            BLOCK_D, BLOCK_DV, True,
        )  # fmt: skip
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + h * stride_vs)
    out = tl.where((limits > 0)[:, None], acc / tl.where(total == 0, 1.0, total)[:, None], 0.0)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=valid[:, None] & (offs_dv < DV)[None, :])


def configs(q: Tensor, key_cache: Tensor, key_scales: Tensor | None, **_: Any):
    least = max(16, triton.next_power_of_2(q.shape[1] // key_cache.shape[2]))
    # the pipeline spends its stages on two loads, pages and then their tokens: five are two buffers
    deep = 3 if of(q.device).vendor == "amd" else 5
    if key_scales is not None:  # which take registers
        yield Config(BLOCK_M=max(least, 64), BLOCK_N=32, num_warps=8, num_stages=3)
    some = 8 if of(q.device).arch in ("sm120", "sm121", "gfx950") else 4  # four would spill there
    for rows, n, stages, warps in ((64, 64, deep, some), (64, 64, 2, some), (64, 32, 2, 4), (16, 16, 1, 4)):  # smaller
        yield Config(BLOCK_M=max(least, rows), BLOCK_N=n, num_warps=warps, num_stages=stages)
    for rows, n, warps, stages in itertools.product((32, 64, 128), (32, 64, 128), (2, 4, 8), (2, 3, deep)):
        yield Config(BLOCK_M=max(least, rows), BLOCK_N=n, num_warps=warps, num_stages=stages)


def legal(
    config: Config, device: Device, q: Tensor, key_cache: Tensor, value_cache: Tensor, seq_lens: Tensor, **_: Any
) -> bool:
    width = sum(tile_widths(q.shape[-1], value_cache.shape[-1]))
    tokens, rows = config["BLOCK_N"], config["BLOCK_M"]
    group = triton.cdiv(q.shape[1], max(key_cache.shape[2], 1))
    if rows < max(16, group):  # all heads of a token, one tile
        return False
    if triton.cdiv(q.shape[0], rows // group) + seq_lens.shape[0] > GRID_Y:
        return False
    buffers = config["num_stages"] - 1 if device.vendor == "amd" else config["num_stages"] // 2
    loaded = tokens * width * key_cache.element_size() * max(1, buffers)
    # decoded tiles, queries and probabilities pass through shared memory on their way to the matrix unit
    staged = 2 * tokens * width + 2 * rows * (width + 2 * tokens)
    return loaded + staged + 2048 <= device.shared_limit


def key_of(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, key_scales: Tensor | None,
    p_scale: Tensor | None, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    page, H = key_cache.shape[1:3]
    return dict(
        T=bucket(q.shape[0]), heads=q.shape[1], H=H, D=q.shape[2], DV=value_cache.shape[3], page=page,
        tokens=bucket(block_table.shape[1] * page), q=str(q.dtype), cache=str(key_cache.dtype),
        stored=int(key_scales is not None), rounded=int(p_scale is not None),
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=prefill_inputs, tol=decode_tolerance,
    domain=dict(
        B=(0, 1, 2, 3, 5), T=(0, 1, 7, 40, 90), H=(1, 2), group=(1, 3, 8, 20), D=(16, 33, 64, 80, 128), dv=(None, 24),
        page=(1, 3, 16), tokens=(1, 17, 130, 300), dtype=(*FP8, torch.int8, None), q_dtype=tuple(_TYPES),
        granularity=("none", "tensor", "head", "token_head"), lengths=("full", "random", "empty"), pages=(5, 29),
        rounded=("", "q", "p", "qp"), kind=("normal", "zeros", "zero_rows"),
        layout=("contiguous", "rows", "offset", "heads_first"),
    ),
    kernels=dict(tiles=Kernel(_prefill_kernel, matrix=True)),
    configs=configs, legal=legal, key=key_of, cost=prefill_cost,
    cases={
        f"{model}/{name}/T={rows}/sequences={sequences}": dict(
            B=sequences, T=rows, H=kv, group=group, D=size, tokens=tokens, granularity=granularity, dtype=dtype
        )
        for model, kv, group, size in (("llama3_70b", 8, 8, 128), ("phi3_mini", 32, 1, 96))
        for name, granularity, dtype in (
            ("fp8", "tensor", torch.float8_e4m3fn), ("int8_per_token_head", "token_head", torch.int8),
            ("bf16", "none", None),
        )
        for sequences, rows, tokens in ((1, 1024, 1024), (4, 1024, 1024), (16, 1024, 2048))
    },
)  # fmt: skip
def attention_prefill(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor, query_starts: Tensor,
    softmax_scale: float | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, q_scale: Tensor | None = None,
    p_scale: Tensor | None = None, out_dtype: torch.dtype | None = None, *, config: Config,
) -> Tensor:  # fmt: skip
    """Causal attention of several queries a sequence to a paged KV cache.

    Args:
        q: (T, heads, D) bf16 or fp16, or the cache's fp8 type with q_scale; heads contiguous.
        key_cache, value_cache, block_table: as in `attention_decode`; they hold the new tokens already.
        seq_lens: (B,) int32 tokens of each sequence, new ones included; at most width * page count.
        query_starts: (B + 1,) int32, ascending from 0: where each sequence's rows of q begin, and the end of the last.
            Its length stays on the device, so a captured graph serves any division of T.
        softmax_scale, k_scale, v_scale, key_scales, value_scales, q_scale, p_scale, out_dtype: as in
            `attention_decode`.

    Returns:
        (T, heads, DV) of q's type, or out_dtype; 0 for rows of no sequence and for those that have no token to see.

    Raises:
        ValueError: a shape, dtype or stride does not fit, or scales come in two ways.
    """
    T, heads, D = q.shape
    B, (_, page, H, DV) = len(seq_lens), value_cache.shape
    out = torch.empty(
        (T, heads, DV), dtype=out_dtype or (q.dtype if q.dtype.itemsize > 1 else torch.bfloat16), device=q.device
    )
    if T == 0:
        return out
    constants = code_constants(key_cache, of(q.device))
    rounding = fp8_constants(FP8.get(key_cache.dtype, E4M3FN), of(q.device))
    constants |= {n: rounding[n] for n in ("MAX", "HARDWARE")}
    as_bytes = constants["KIND"] == "bytes"
    k, v = (c.view(torch.uint8) if as_bytes else c for c in (key_cache, value_cache))
    tiles = triton.cdiv(T, config["BLOCK_M"] // (heads // H)) + B
    block_d, block_dv = tile_widths(D, DV)
    _prefill_kernel[(H, tiles)](
        q.view(torch.uint8) if as_bytes and q_scale is not None else q, k, v, block_table, seq_lens, query_starts,
        k_scale, v_scale, key_scales, value_scales, q_scale, p_scale, out,
        1 / math.sqrt(D) if softmax_scale is None else float(softmax_scale), T, B, H, block_table.shape[1] * page,
        *q.stride()[:2], block_table.stride(0), *k.stride()[:3], *v.stride()[:3],
        *scale_strides(k_scale, v_scale, key_scales, value_scales, q_scale),
        GROUP=heads // H, D=D, DV=DV, PAGE=page,
        TYPE=tl.float16 if key_cache.element_size() == 1 else _TYPES[q.dtype], **constants, **early_start(of(q.device)),
        BLOCK_B=triton.next_power_of_2(max(1, B)), BLOCK_D=block_d, BLOCK_DV=block_dv, **config,
    )  # fmt: skip
    return out
