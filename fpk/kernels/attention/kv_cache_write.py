"""kv_cache_write: keys and values of new tokens into a paged KV cache, quantized on the way, in place.

    cache[slot // page, slot % page, h, d] = code(x[m, h, d] / s)      slot = slots[m]; nothing if the cache lacks it

`s` is 1, one scale a tensor, one a head, or, with scale caches, one a token and head that is computed and stored beside
the slot: s = max(amax / F, 1e-6) over the finite elements of the head. FP8 saturates and keeps NaN, INT8 rounds half to
even into -128..127 and makes NaN 0; a 16-bit cache takes the values as they are.

Source: `reshape_and_cache` of paged attention (vLLM), its per-token-head form among them, with true division.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_inner_contiguous, expect_not_empty, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import E4M3FN, FP8, INT8, encode, finite_amax
from fpk.kernels._tile import after_previous, amax_along, early_start, fp8_constants, quantize_fp8, quantize_int8
from fpk.kernels.attention._paged import check_scales, make_cache, make_scales, scale_strides
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, generator, sample, strided

CACHE_TYPES = (*FP8, torch.int8, torch.bfloat16, torch.float16)
FLOOR = 1e-6  # of scales a token and head


def reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, key_scales: Tensor | None = None, value_scales: Tensor | None = None,
) -> None:  # fmt: skip
    if slots.shape[0] == 0:
        return
    _write(key, key_cache, slots, k_scale, key_scales)
    _write(value, value_cache, slots, v_scale, value_scales)


def _write(x: Tensor, cache: Tensor, slots: Tensor, scale: Tensor | None, stored: Tensor | None) -> None:
    fmt = INT8 if cache.dtype is torch.int8 else FP8.get(cache.dtype)
    if fmt is None:
        return _scatter(cache, x.to(cache.dtype), slots)
    x = x.float()
    if stored is not None:
        amax = finite_amax(x, (-1,))
        s = torch.maximum(amax / amax.new_tensor(fmt.qmax), amax.new_tensor(FLOOR))
        _scatter(stored, s[..., 0], slots)
        x = x / s
    elif scale is not None:
        x = x / scale[:, None]
    _scatter(cache.view(torch.uint8) if fmt is not INT8 else cache, encode(x, fmt), slots)


def _scatter(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows (M, ...) to their slots of (pages, page, ...)."""
    page = cache.shape[1]
    inside = (slots >= 0) & (slots < cache.shape[0] * page)
    some = inside.any()
    # tokens without a slot repeat the write of one that has; if none has, they write back what is there
    source = torch.where(inside, torch.arange(slots.shape[0], device=slots.device), inside.int().argmax())
    slot = torch.where(some, slots.long()[source], 0)
    at = (slot // page, slot % page)
    cache.index_put_(at, torch.where(some, rows[source], cache[at]))


def check(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, key_scales: Tensor | None, value_scales: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    name = "kv_cache_write"
    expect_rank(f"{name}.key", key, 3)
    expect_rank(f"{name}.key_cache", key_cache, 4)
    M, H, D = key.shape
    pages, page = key_cache.shape[:2]
    expect_rank(f"{name}.value", value, 3)
    DV = value.shape[-1]
    expect_shape(f"{name}.value", value, (M, H, DV))
    expect_shape(f"{name}.key_cache", key_cache, (pages, page, H, D))
    expect_shape(f"{name}.value_cache", value_cache, (pages, page, H, DV))
    expect_dtype(f"{name}.key", key, *FLOAT_INPUTS)
    expect_dtype(f"{name}.value", value, key.dtype)
    expect_dtype(f"{name}.key_cache", key_cache, *CACHE_TYPES)
    expect_dtype(f"{name}.value_cache", value_cache, key_cache.dtype)
    for what, tensor in (("key", key), ("value", value), ("key_cache", key_cache), ("value_cache", value_cache)):
        expect_inner_contiguous(f"{name}.{what}", tensor)
        expect_not_empty(f"{name}.{what}", tensor, -1)
        expect_not_empty(f"{name}.{what}", tensor, -2)
    expect_not_empty(f"{name}.key_cache", key_cache, 0)
    expect_not_empty(f"{name}.key_cache", key_cache, 1)
    expect_shape(f"{name}.slots", slots, (M,))
    expect_dtype(f"{name}.slots", slots, torch.int64, torch.int32)
    check_scales(name, key_cache, k_scale, v_scale, key_scales, value_scales)


@triton.jit
def _write_rows(
    x_ptr, cache_ptr, slot_ptr, scale_ptr, stored_ptr, M, H, SLOTS, PAGE,
    stride_xm, stride_xh, stride_cp, stride_ct, stride_ch, stride_s, stride_sp, stride_st, stride_sh,
    D: tl.constexpr, KIND: tl.constexpr, QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, FLOOR: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_R heads of tokens: a row is one head of one token."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_D)
    m, h = rows // H, rows % H
    slot = tl.load(slot_ptr + m, mask=m < M, other=-1).to(tl.int64)
    used = (slot >= 0) & (slot < SLOTS)
    slot = tl.where(used, slot, 0)
    page, inside = slot // PAGE, slot % PAGE
    mask = used[:, None] & (offs_d < D)[None, :]
    x_ptrs = x_ptr + (m * stride_xm + h * stride_xh)[:, None] + offs_d[None, :]
    x = tl.load(x_ptrs, mask=mask, other=0.0)  # [BLOCK_R, BLOCK_D]
    cache_ptrs = cache_ptr + (page * stride_cp + inside * stride_ct + h * stride_ch)[:, None] + offs_d[None, :]
    if KIND == "plain":
        tl.store(cache_ptrs, x.to(cache_ptr.dtype.element_ty), mask=mask)
    else:
        x = x.to(tl.float32)
        if stored_ptr is not None:
            scale = tl.maximum(tl.math.div_rn(amax_along(x, mask, 1), QMAX), FLOOR)
            tl.store(stored_ptr + page * stride_sp + inside * stride_st + h * stride_sh, scale, mask=used)
        elif scale_ptr is not None:
            scale = tl.load(scale_ptr + h * stride_s, mask=used, other=1.0)
        else:
            scale = tl.full((BLOCK_R,), 1.0, tl.float32)
        if KIND == "int8":
            codes = quantize_int8(x, scale[:, None], -128)
        else:
            codes = quantize_fp8(x, scale[:, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        tl.store(cache_ptrs, codes, mask=mask)


@triton.jit(do_not_specialize=["M"])
def _write_kernel(
    key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, slot_ptr, k_scale_ptr, v_scale_ptr, k_stored_ptr, v_stored_ptr,
    M, H, SLOTS, PAGE,
    stride_km, stride_kh, stride_vm, stride_vh,
    stride_kcp, stride_kct, stride_kch, stride_vcp, stride_vct, stride_vch,
    stride_ks, stride_vs, stride_ksp, stride_kst, stride_ksh, stride_vsp, stride_vst, stride_vsh,
    D: tl.constexpr, DV: tl.constexpr, KIND: tl.constexpr, QMAX: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, FLOOR: tl.constexpr,
    PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    if tl.program_id(1) == 0:
        _write_rows(
            key_ptr, key_cache_ptr, slot_ptr, k_scale_ptr, k_stored_ptr, M, H, SLOTS, PAGE,
            stride_km, stride_kh, stride_kcp, stride_kct, stride_kch, stride_ks, stride_ksp, stride_kst, stride_ksh,
            D, KIND, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, FLOOR, BLOCK_R, BLOCK_D,
        )  # fmt: skip
    else:
        _write_rows(
            value_ptr, value_cache_ptr, slot_ptr, v_scale_ptr, v_stored_ptr, M, H, SLOTS, PAGE,
            stride_vm, stride_vh, stride_vcp, stride_vct, stride_vch, stride_vs, stride_vsp, stride_vst, stride_vsh,
            DV, KIND, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, FLOOR, BLOCK_R, BLOCK_DV,
        )  # fmt: skip


def configs(key: Tensor, value: Tensor, **_: Any):
    width = triton.next_power_of_2(max(key.shape[-1], value.shape[-1]))
    for elements, warps in ((1024, 2), (512, 1), (1024, 4), (2048, 2), (2048, 4), (4096, 4), (8192, 8)):
        yield Config(BLOCK_R=max(1, elements // width), num_warps=warps, num_stages=1)


def key_of(key: Tensor, value: Tensor, key_cache: Tensor, key_scales: Tensor | None, **_: Any) -> dict[str, int | str]:
    M, H, D = key.shape
    return dict(
        M=bucket(M), H=H, D=D, DV=value.shape[-1], x=str(key.dtype), cache=str(key_cache.dtype),
        stored=int(key_scales is not None),
    )  # fmt: skip


def cost(key: Tensor, value: Tensor, key_cache: Tensor, key_scales: Tensor | None, **_: Any) -> Cost:
    M, H = key.shape[:2]
    elements = key.numel() + value.numel()
    stored = 8 * M * H if key_scales is not None else 0
    moved = elements * (key.element_size() + key_cache.element_size()) + 8 * M + stored
    return Cost(flops=2 * elements, bytes=moved)


def inputs(
    *, M, H, D, dv=None, page=16, dtype=torch.float8_e4m3fn, x_dtype=torch.bfloat16, granularity="tensor",
    slots="random", kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    dv = dv or D
    dtype = dtype or (x_dtype if x_dtype.itemsize == 2 else torch.bfloat16)
    pages = 1 + triton.cdiv(max(M, 64), page)
    plain = "contiguous" if layout == "heads_first" else layout
    at = torch.randperm(pages * page, generator=generator(seed + 6, device), device=device)[:M]
    if slots == "padded":
        at = torch.where(torch.arange(M, device=device) % 3 == 1, -1, at)
    elif slots == "none":
        at = torch.full_like(at, -1)
    elif slots == "outside":  # of the first token
        at = torch.where(torch.arange(M, device=device) == 0, pages * page, at).int()
    caches = [make_cache((pages, page, H, d), dtype, layout, device, seed + 2 + i) for i, d in enumerate((D, dv))]
    return dict(
        key=strided(sample((M, H, D), x_dtype, kind, device, seed), plain),
        value=strided(sample((M, H, dv), x_dtype, kind, device, seed + 1), plain),
        key_cache=caches[0], value_cache=caches[1], slots=at, **make_scales(granularity, caches[0], device, seed + 4),
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 2, 3, 5, 8, 13), H=(1, 2, 3), D=(1, 33, 64, 80, 128), dv=(None, 24), page=(1, 3, 16),
        dtype=(*FP8, torch.int8, None), x_dtype=FLOAT_INPUTS, granularity=("none", "tensor", "head", "token_head"),
        slots=("random", "padded", "none", "outside"), kind=KINDS,
        layout=("contiguous", "rows", "offset", "heads_first"),
    ),
    kernels=dict(rows=Kernel(_write_kernel)),
    configs=configs, key=key_of, cost=cost,
    cases={
        f"{model}/{name}/M={m}": dict(M=m, H=heads, D=size, granularity=granularity, dtype=dtype)
        for model, heads, size in (("llama3_70b", 8, 128), ("gemma2_9b", 8, 256), ("phi3_mini", 32, 96))
        for name, granularity, dtype in (
            ("fp8", "tensor", torch.float8_e4m3fn), ("fp8_per_token_head", "token_head", torch.float8_e4m3fn),
            ("int8_per_token_head", "token_head", torch.int8),
        )
        for m in (16, 64, 4096)
    },
    mutates=("key_cache", "value_cache", "key_scales", "value_scales"),
)  # fmt: skip
def kv_cache_write(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None, key_scales: Tensor | None = None, value_scales: Tensor | None = None,
    *, config: Config,
) -> None:  # fmt: skip
    """Write tokens into a paged KV cache, in place.

    Args:
        key, value: (M, H, D) and (M, H, DV), fp32, bf16 or fp16, heads contiguous, other strides any.
        key_cache, value_cache: (pages, page, H, D) and (pages, page, H, DV), an fp8 type, int8, bf16 or fp16, heads
            contiguous, other strides any (a cache (pages, H, page, D) is passed transposed).
        slots: (M,) int64 or int32, slot = page index * page + position; -1, or any other slot that the cache does not
            have, leaves the cache as it is. Two tokens must not have the same slot.
        k_scale, v_scale: (1,) or (H,) fp32, positive: value = code * scale; None is 1. For fp8 and int8 caches.
        key_scales, value_scales: (pages, page, H) fp32, or None; scales are then computed for every token and head and
            stored there.

    Raises:
        ValueError: a shape, dtype or stride does not fit, or scales come in two ways.
    """
    M, H, D = key.shape
    pages, page, _, DV = value_cache.shape
    if M == 0:
        return
    fmt = INT8 if key_cache.dtype is torch.int8 else FP8.get(key_cache.dtype)
    caches = (
        [key_cache, value_cache] if fmt in (INT8, None) else [c.view(torch.uint8) for c in (key_cache, value_cache)]
    )
    _write_kernel[(triton.cdiv(M * H, config["BLOCK_R"]), 2)](
        key, value, *caches, slots, k_scale, v_scale, key_scales, value_scales,
        M, H, pages * page, page,
        *key.stride()[:2], *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        *scale_strides(k_scale, v_scale, key_scales, value_scales),
        D=D, DV=DV, KIND="plain" if fmt is None else "int8" if fmt is INT8 else "fp8", QMAX=fmt.qmax if fmt else 0.0,
        FLOOR=FLOOR, **fp8_constants(fmt if fmt and fmt.is_float else E4M3FN, of(key.device)),
        BLOCK_D=triton.next_power_of_2(D), BLOCK_DV=triton.next_power_of_2(DV), enable_fp_fusion=False,
        **early_start(of(key.device)), **config,
    )  # fmt: skip
