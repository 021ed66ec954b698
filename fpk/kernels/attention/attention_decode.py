"""attention_decode: one new token of every sequence attends to a paged KV cache.

    out[b, i] = sum_n softmax_n(softmax_scale * q[b, i] . k[n]) v[n]      over the seq_lens[b] tokens n of sequence b

k[n] and v[n] are head i // (heads / kv heads) of the cache's slot (block_table[b, n // page], n % page), code * scale
with scales of 1, a tensor, a head, or a token and head. A sequence without tokens gives 0.

Codes are decoded to fp16, which holds every FP8 and INT8 value, for the matrix unit; bf16 queries are divided by a
power of two for it. Scales are applied in fp32, to scores and probabilities. Probabilities are rounded to fp16, or bf16
with a bf16 cache. The sequence is divided over SPLITS programs; a second kernel adds their parts in order.

Source: paged attention (vLLM) with the split of Flash-Decoding.
"""

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import E4M3FN, FP8
from fpk.kernels._tile import after_previous, early_start, fp8_constants
from fpk.kernels.attention._paged import (
    attention_reference,
    check_attention,
    check_scales,
    check_table,
    decode_cost,
    decode_inputs,
    decode_tolerance,
    scale_strides,
)
from fpk.kernels.attention._step import attend
from fpk.kernels.attention._tiles import code_constants, decode_tile, has_pairs, power_below, tile_widths
from fpk.op import Kernel, op

_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def reference(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    softmax_scale: float | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, q_scale: Tensor | None = None,
    p_scale: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    return attention_reference(
        q, key_cache, value_cache, block_table, seq_lens, softmax_scale, k_scale, v_scale, key_scales, value_scales,
        q_scale, p_scale, out_dtype,
    )  # fmt: skip


def check(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    softmax_scale: float | None, q_scale: Tensor | None, p_scale: Tensor | None, out_dtype: torch.dtype | None,
    **scales: Tensor | None,
) -> None:  # fmt: skip
    name = "attention_decode"
    check_attention(name, q, key_cache, value_cache, softmax_scale, q_scale, p_scale, out_dtype)
    check_table(name, q.shape[0], block_table, seq_lens)
    check_scales(name, key_cache, **scales)


@triton.jit(do_not_specialize=["capacity", "splits"])
def _split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, k_scale_ptr, v_scale_ptr, k_stored_ptr, v_stored_ptr,
    q_scale_ptr, p_scale_ptr, out_ptr, top_ptr, total_ptr,
    softmax_scale, H, capacity, splits,
    stride_qb, stride_qh, stride_tb,
    stride_kp: tl.constexpr, stride_kt: tl.constexpr, stride_kh, stride_vp: tl.constexpr, stride_vt: tl.constexpr,
    stride_vh, stride_ks, stride_vs, stride_qs, stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, TYPE: tl.constexpr, OUT: tl.constexpr,
    KIND: tl.constexpr, CODE: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr,
    IEEE: tl.constexpr, MAX: tl.constexpr, HARDWARE: tl.constexpr, ONLY: tl.constexpr, PDL: tl.constexpr,
    PAIRS: tl.constexpr, AHEAD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """BLOCK_H query heads of one KV head over one part of one sequence; with ONLY there is one part: the result.

    TYPE is what the matrix unit multiplies. PAIRS: keys and values come as words of two codes. AHEAD: pages are looked
    up a step early. Strides of the caches are constants, so that an address takes one instruction.
    """
    TILES: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    PARTS: tl.constexpr = 2 if PAIRS else 1
    after_previous(PDL)
    pid, part = tl.program_id(0), tl.program_id(1)
    b = (pid // (H * TILES)).to(tl.int64)
    h = (pid // TILES % H).to(tl.int64)
    offs_h = pid % TILES * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d, offs_n = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    heads = h * GROUP + offs_h  # [BLOCK_H]
    q_ptrs = q_ptr + b * stride_qb + heads[:, None] * stride_qh + offs_d[None, :]
    q = tl.load(q_ptrs, mask=(offs_h < GROUP)[:, None] & (offs_d < D)[None, :], other=0.0)

    length = tl.minimum(tl.load(lens_ptr + b), capacity)
    share = tl.cdiv(tl.cdiv(length, BLOCK_N), splits) * BLOCK_N
    begin = part * share
    end = tl.minimum(begin + share, length)
    score_scale = softmax_scale * 1.4426950408889634  # exponents of 2
    if k_scale_ptr is not None:
        score_scale *= tl.load(k_scale_ptr + h * stride_ks)
    if q_scale_ptr is not None:
        score_scale *= tl.load(q_scale_ptr + h * stride_qs)
        q = decode_tile(q, TYPE, KIND, MANTISSA, BIAS, NAN_CODE, IEEE)
    row_scale = tl.full((BLOCK_H,), 1.0, tl.float32) * score_scale
    if q.dtype != TYPE:  # bf16 queries of a cache of codes
        power, inverse = power_below(q)
        q = (q.to(tl.float32) * inverse[:, None]).to(TYPE)
        row_scale *= power
    q_odd = q
    if PAIRS:  # keys come as two tiles, and so do queries
        q, q_odd = tl.split(tl.reshape(q, (BLOCK_H, BLOCK_D // 2, 2)))

    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((BLOCK_H, BLOCK_DV // PARTS), tl.float32)  # of the even columns if PAIRS
    odd = tl.zeros((BLOCK_H, BLOCK_DV // PARTS), tl.float32)
    k_base, v_base = k_ptr + h * stride_kh, v_ptr + h * stride_vh
    if k_stored_ptr is not None:
        k_stored_ptr += h * stride_ksh
        v_stored_ptr += h * stride_vsh
    pages = table_ptr + b * stride_tb
    coming = offs_n  # the pages of a step, if AHEAD
    if AHEAD:
        coming = tl.load(pages + (begin + offs_n) // PAGE, mask=begin + offs_n < end, other=0)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK_N * BLOCK_N
    for n in range(begin, whole, BLOCK_N):
        if AHEAD:
            page = coming
            following = n + BLOCK_N + offs_n
            coming = tl.load(pages + following // PAGE, mask=following < end, other=0)
        else:
            page = tl.load(pages + (n + offs_n) // PAGE)
        top, total, acc, odd = attend(
            n, end, None, page, q, q_odd, row_scale, top, total, acc, odd, k_base, v_base, k_stored_ptr, v_stored_ptr,
            p_scale_ptr, stride_kp, stride_kt, stride_vp, stride_vt, stride_ksp, stride_kst, stride_vsp, stride_vst,
            D, DV, PAGE, TYPE, KIND, CODE, MANTISSA, BIAS, NAN_CODE, IEEE, MAX, HARDWARE, PAIRS, BLOCK_N, BLOCK_D,
            BLOCK_DV, False,
        )  # fmt: skip
    if whole < end:
        page = coming
        if not AHEAD:
            page = tl.load(pages + (whole + offs_n) // PAGE, mask=whole + offs_n < end, other=0)
        top, total, acc, odd = attend(
            whole, end, None, page, q, q_odd, row_scale, top, total, acc, odd, k_base, v_base, k_stored_ptr,
            v_stored_ptr, p_scale_ptr, stride_kp, stride_kt, stride_vp, stride_vt, stride_ksp, stride_kst, stride_vsp,
            stride_vst, D, DV, PAGE, TYPE, KIND, CODE, MANTISSA, BIAS, NAN_CODE, IEEE, MAX, HARDWARE, PAIRS, BLOCK_N,
            BLOCK_D, BLOCK_DV, True,
        )  # fmt: skip
    if PAIRS:
        acc = tl.reshape(tl.join(acc, odd), (BLOCK_H, BLOCK_DV))
    if v_scale_ptr is not None:
        acc *= tl.load(v_scale_ptr + h * stride_vs)

    offs_dv = tl.arange(0, BLOCK_DV)
    rows = b * H * GROUP + heads
    mask_h = offs_h < GROUP
    mask = mask_h[:, None] & (offs_dv < DV)[None, :]
    if ONLY:
        out = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out_ptr + rows[:, None] * DV + offs_dv[None, :], out.to(OUT), mask=mask)
    else:
        rows = rows * splits + part
        tl.store(out_ptr + rows[:, None] * DV + offs_dv[None, :], acc, mask=mask)
        tl.store(top_ptr + rows, top, mask=mask_h)
        tl.store(total_ptr + rows, total, mask=mask_h)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    part_ptr, top_ptr, total_ptr, out_ptr, splits, PDL: tl.constexpr, DV: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The parts of one query head, added BLOCK_P at a time."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    offs, offs_s = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_S)
    tops = tl.load(top_ptr + row * splits + offs_s, mask=offs_s < splits, other=float("-inf"))
    top = tl.max(tops, axis=0)
    top = tl.where(top == float("-inf"), 0.0, top)  # no tokens at all
    totals = tl.load(total_ptr + row * splits + offs_s, mask=offs_s < splits, other=0.0)
    total = tl.sum(tl.math.exp2(tops - top) * totals, axis=0)
    acc = tl.zeros((BLOCK_DV,), tl.float32)
    for s in range(0, splits, BLOCK_P):
        parts = s + tl.arange(0, BLOCK_P)
        at = row * splits + parts
        weight = tl.math.exp2(tl.load(top_ptr + at, mask=parts < splits, other=float("-inf")) - top)
        mask = (parts < splits)[:, None] & (offs < DV)[None, :]
        acc += tl.sum(
            weight[:, None] * tl.load(part_ptr + at[:, None] * DV + offs[None, :], mask=mask, other=0.0), axis=0
        )
    out = acc / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + row * DV + offs, out.to(out_ptr.dtype.element_ty), mask=offs < DV)


def configs(q: Tensor, key_cache: Tensor, block_table: Tensor, **_: Any):
    (B, heads), (page, H) = q.shape[:2], key_cache.shape[1:3]
    group = heads // H
    tall = min(64, max(16, triton.next_power_of_2(group)))
    programs = max(1, B) * H * triton.cdiv(group, tall)
    most = triton.cdiv(block_table.shape[1] * page, 256)  # parts of at least 256 tokens
    wanted = max(1, (12 * of(q.device).sm_count + programs // 2) // programs)  # all programs together: 12 an SM
    default = min(most, wanted)
    byte = key_cache.element_size() == 1
    # without AHEAD the pipeline spends its stages on two loads, pages and then their tokens: five are two buffers
    deep = 3 if of(q.device).vendor == "amd" else 5
    if byte:
        few = dict(BLOCK_N=32, num_warps=2) if tall == 16 else dict(BLOCK_N=64, num_warps=4)
        yield Config(BLOCK_H=tall, SPLITS=default, PAIRS=True, AHEAD=False, **few, num_stages=deep)
    plain = dict(BLOCK_H=tall, SPLITS=default, PAIRS=False, AHEAD=False, num_warps=4)
    for n, stages in ((64, deep), (64, 3), (64, 2), (32, 2), (16, 1)):  # ever less shared memory
        yield Config(BLOCK_N=n, num_stages=stages, **plain)
    parts = sorted({1, 3, default, min(most, triton.cdiv(wanted, 2)), min(most, 2 * wanted)})
    pipelines = ((True, 2), (True, 3), (True, 4), (False, 3), (False, 5), (False, 7))
    for splits, n, warps, (ahead, stages) in itertools.product(parts, (32, 64, 128), (1, 2, 4, 8), pipelines):
        for pairs in (True, False) if byte else (False,):
            shape = dict(BLOCK_H=tall, BLOCK_N=n, SPLITS=splits, PAIRS=pairs, AHEAD=ahead)
            yield Config(**shape, num_warps=warps, num_stages=stages)


def legal(config: Config, device: Device, q: Tensor, key_cache: Tensor, value_cache: Tensor, **_: Any) -> bool:
    if config["PAIRS"] and not (has_pairs(key_cache) and has_pairs(value_cache)):
        return False
    width = sum(tile_widths(q.shape[-1], value_cache.shape[-1], 2 if config["PAIRS"] else 1))
    tokens, tall = config["BLOCK_N"], config["BLOCK_H"]
    buffers = config["num_stages"] - 1 if device.vendor == "amd" or config["AHEAD"] else config["num_stages"] // 2
    loaded = tokens * width * key_cache.element_size() * max(1, buffers)
    # decoded tiles, queries and probabilities pass through shared memory on their way to the matrix unit
    staged = 2 * tokens * width + 2 * tall * (width + 2 * tokens)
    return loaded + staged + 2048 <= device.shared_limit


def key_of(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, key_scales: Tensor | None,
    p_scale: Tensor | None, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    page, H = key_cache.shape[1:3]
    return dict(
        M=bucket(q.shape[0]), heads=q.shape[1], H=H, D=q.shape[2], DV=value_cache.shape[3], page=page,
        tokens=bucket(block_table.shape[1] * page), q=str(q.dtype), cache=str(key_cache.dtype),
        stored=int(key_scales is not None), rounded=int(p_scale is not None),
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=decode_inputs, tol=decode_tolerance,
    domain=dict(
        M=(0, 1, 2, 3, 5), H=(1, 2), group=(1, 3, 8, 20), D=(16, 33, 64, 80, 128), dv=(None, 24), page=(1, 3, 16),
        tokens=(1, 17, 130, 600), dtype=(*FP8, torch.int8, None), q_dtype=tuple(_TYPES),
        granularity=("none", "tensor", "head", "token_head"), lengths=("full", "random", "empty"), pages=(5, 29),
        rounded=("", "q", "p", "qp"),
        kind=("normal", "zeros", "zero_rows"), layout=("contiguous", "rows", "offset", "heads_first"),
    ),
    kernels=dict(split=Kernel(_split_kernel, matrix=True)),
    configs=configs, legal=legal, key=key_of, cost=decode_cost, launcher_fields=("SPLITS",),
    cases={
        f"{model}/{name}/M={m}/tokens={tokens}": dict(
            M=m, H=kv, group=group, D=size, tokens=tokens, granularity=granularity, dtype=dtype
        )
        for model, kv, group, size, sizes in (
            ("falcon_7b", 1, 71, 64, ((16, 2048),)),
            ("llama3_70b", 8, 8, 128, ((64, 8192), (16, 2048), (1, 32768))),
            ("phi3_mini", 32, 1, 96, ((64, 2048), (1, 32768))),
        )
        for name, granularity, dtype in (
            ("fp8", "tensor", torch.float8_e4m3fn), ("int8_per_token_head", "token_head", torch.int8),
            ("bf16", "none", None),
        )
        for m, tokens in sizes
    },
)  # fmt: skip
def attention_decode(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    softmax_scale: float | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, q_scale: Tensor | None = None,
    p_scale: Tensor | None = None, out_dtype: torch.dtype | None = None, *, config: Config,
) -> Tensor:  # fmt: skip
    """Attention of one query a sequence to a paged KV cache.

    Args:
        q: (B, heads, D) bf16 or fp16, or the cache's fp8 type with q_scale; heads contiguous.
        key_cache, value_cache: (pages, page, H, D) and (pages, page, H, DV), an fp8 type, int8, or q's; heads
            contiguous, other strides any. `heads` is a multiple of H, neighbours share a KV head.
        block_table: (B, width) int32, the pages of each sequence in order; those beyond its end may be anything.
        seq_lens: (B,) int32 tokens of each sequence, 0 included; at most width * page count.
        softmax_scale: of the scores; None is 1 / sqrt(D).
        k_scale, v_scale: (1,) or (H,) fp32: value = code * scale; None is 1. For fp8 and int8 caches.
        key_scales, value_scales: (pages, page, H) fp32 or None: a scale for every token and head.
        q_scale: (1,) or (H,) fp32 of FP8 queries, one for all heads that share a KV head.
        p_scale: (1,) fp32 or None; probabilities are then rounded to the cache's fp8 type in steps of it. They count
            from the power of two above a row's largest, which lies in 1/2..1.
        out_dtype: bf16 or fp16 for FP8 queries; bf16 if None.

    Returns:
        (B, heads, DV) of q's type, or out_dtype; 0 for sequences without tokens.

    Raises:
        ValueError: a shape, dtype or stride does not fit, or scales come in two ways.
    """
    B, heads, D = q.shape
    _, page, H, DV = value_cache.shape
    dtype = out_dtype or (q.dtype if q.dtype.itemsize > 1 else torch.bfloat16)
    out = torch.empty((B, heads, DV), dtype=dtype, device=q.device)
    if B == 0:
        return out
    constants = code_constants(key_cache, of(q.device))
    rounding = fp8_constants(FP8.get(key_cache.dtype, E4M3FN), of(q.device))
    constants |= {n: rounding[n] for n in ("MAX", "HARDWARE")}
    as_bytes = constants["KIND"] == "bytes"
    k, v = (c.view(torch.uint8) if as_bytes else c for c in (key_cache, value_cache))
    if config["PAIRS"]:
        k, v = key_cache.view(torch.int16), value_cache.view(torch.int16)
    config = dict(config)
    splits = config.pop("SPLITS")
    early = early_start(of(q.device))
    part, top, total = out, None, None
    if splits > 1:
        part = torch.empty((B, heads, splits, DV), dtype=torch.float32, device=q.device)
        top, total = torch.empty((2, B, heads, splits), dtype=torch.float32, device=q.device)
    block_d, block_dv = tile_widths(D, DV, 2 if config["PAIRS"] else 1)
    _split_kernel[(B * H * triton.cdiv(heads // H, config["BLOCK_H"]), splits)](
        q.view(torch.uint8) if as_bytes and q_scale is not None else q, k, v, block_table, seq_lens,
        k_scale, v_scale, key_scales, value_scales, q_scale, p_scale, part, top, total,
        1 / math.sqrt(D) if softmax_scale is None else float(softmax_scale), H, block_table.shape[1] * page, splits,
        *q.stride()[:2], block_table.stride(0), *k.stride()[:3], *v.stride()[:3],
        *scale_strides(k_scale, v_scale, key_scales, value_scales, q_scale),
        GROUP=heads // H, D=D, DV=DV, PAGE=page, ONLY=splits == 1, OUT=_TYPES[dtype],
        TYPE=tl.float16 if key_cache.element_size() == 1 else _TYPES[q.dtype], **constants,
        **early, BLOCK_D=block_d, BLOCK_DV=block_dv, **config,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(B * heads,)](
            part, top, total, out, splits, DV=DV, BLOCK_S=triton.next_power_of_2(splits),
            BLOCK_P=min(8, triton.next_power_of_2(splits)), BLOCK_DV=block_dv, num_warps=1, **early,
        )  # fmt: skip
    return out
