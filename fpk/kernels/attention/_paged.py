"""What ops on a paged KV cache share: checks of its scales, their strides, and caches for laws and benchmarks."""

import math
from typing import Any

import torch
from torch import Tensor

from fpk.check import expect_dtype, expect_inner_contiguous, expect_not_empty, expect_rank, expect_shape
from fpk.formats import FP8, decode, encode
from fpk.op import Cost
from fpk.samples import generator, sample, scales, strided


def attention_reference(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, seq_lens: Tensor,
    softmax_scale: float | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, q_scale: Tensor | None = None,
    p_scale: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A query for every sequence."""
    B, heads, D = q.shape
    pages, page, H, DV = value_cache.shape
    table = block_table.long().clamp(0, pages - 1)
    present = torch.arange(block_table.shape[1] * page, device=q.device) < seq_lens[:, None]  # (B, tokens)
    k = _gather(key_cache, table, present, k_scale, key_scales)
    v = _gather(value_cache, table, present, v_scale, value_scales)
    fmt = FP8.get(q.dtype)
    query = (q.float() if fmt is None else decode(q.view(torch.uint8), fmt)).reshape(B, H, heads // H, D)
    if q_scale is not None:
        query = query * q_scale[:, None, None]
    scores = torch.einsum("bhgd,bnhd->bhgn", query, k)
    scores = scores * (1 / math.sqrt(D) if softmax_scale is None else softmax_scale)
    scores = torch.where(present[:, None, None], scores, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if p_scale is None:
        p = (scores - torch.where(top == float("-inf"), 0.0, top)).exp()
    else:  # in units of p_scale below the next power of two, so that the format's steps do not depend on the maximum
        fmt, log2e = FP8[key_cache.dtype], math.log2(math.e)
        above = (top * log2e).ceil()
        p = (scores * log2e - torch.where(above == float("-inf"), 0.0, above)).exp2()
        p = decode(encode(p / p_scale, fmt), fmt)
    total = p.sum(-1, keepdim=True)
    out = torch.einsum("bhgn,bnhd->bhgd", p, v) / torch.where(total == 0, 1.0, total)
    return out.reshape(B, heads, DV).to(out_dtype or (q.dtype if q.dtype.itemsize > 1 else torch.bfloat16))


def _gather(cache: Tensor, table: Tensor, present: Tensor, scale: Tensor | None, stored: Tensor | None) -> Tensor:
    """Values (B, tokens, H, D) of the sequences' tokens as fp32, 0 beyond their ends."""
    fmt = FP8.get(cache.dtype)
    codes = (cache if fmt is None else cache.view(torch.uint8))[table]  # (B, pages, page, H, D)
    value = codes.float() if fmt is None else decode(codes, fmt)
    if stored is not None:
        value = value * stored[table][..., None]
    elif scale is not None:
        value = value * scale[:, None]
    return torch.where(present[..., None, None], value.flatten(1, 2), 0.0)


def check_attention(
    name: str, q: Tensor, key_cache: Tensor, value_cache: Tensor, softmax_scale: float | None,
    q_scale: Tensor | None, p_scale: Tensor | None, out_dtype: torch.dtype | None,
) -> None:  # fmt: skip
    """Queries (rows, heads, D) beside a cache (pages, page, H, D) and (pages, page, H, DV) of codes or their type."""
    expect_rank(f"{name}.q", q, 3)
    expect_rank(f"{name}.key_cache", key_cache, 4)
    expect_rank(f"{name}.value_cache", value_cache, 4)
    heads, D = q.shape[1:]
    pages, page, H = key_cache.shape[:3]
    fp8 = key_cache.dtype in FP8
    expect_dtype(f"{name}.q", q, torch.bfloat16, torch.float16, *((key_cache.dtype,) if fp8 else ()))
    expect_shape(f"{name}.key_cache", key_cache, (pages, page, H, D))
    expect_shape(f"{name}.value_cache", value_cache, (pages, page, H, value_cache.shape[-1]))
    expect_dtype(f"{name}.key_cache", key_cache, *FP8, torch.int8, *((q.dtype,) if q.dtype.itemsize > 1 else ()))
    expect_dtype(f"{name}.value_cache", value_cache, key_cache.dtype)
    for what, tensor in (("q", q), ("key_cache", key_cache), ("value_cache", value_cache)):
        expect_inner_contiguous(f"{name}.{what}", tensor)
        expect_not_empty(f"{name}.{what}", tensor, -1)
    for dim in (0, 1, 2):
        expect_not_empty(f"{name}.key_cache", key_cache, dim)
    if heads == 0 or heads % H:
        raise ValueError(f"{name}.q: expected a multiple of {H} heads (those of key_cache), got {heads}")
    if (q.dtype in FP8) != (q_scale is not None):
        wanted = f"(1,) or ({H},) for FP8 queries" if q.dtype in FP8 else "None with 16-bit queries"
        raise ValueError(f"{name}.q_scale: expected {wanted}, got {None if q_scale is None else tuple(q_scale.shape)}")
    if p_scale is not None and not fp8:
        raise ValueError(f"{name}.p_scale: expected None without an FP8 cache, got a tensor")
    for what, scale, shapes in (("q_scale", q_scale, ((1,), (H,))), ("p_scale", p_scale, ((1,),))):
        if scale is not None:
            expect_shape(f"{name}.{what}", scale, *shapes)
            expect_dtype(f"{name}.{what}", scale, torch.float32)
    allowed = (None, torch.bfloat16, torch.float16) if q.dtype in FP8 else (None, q.dtype)
    if out_dtype not in allowed:
        raise ValueError(f"{name}.out_dtype: expected one of {allowed}, got {out_dtype}")
    if softmax_scale is not None and not math.isfinite(softmax_scale):
        raise ValueError(f"{name}.softmax_scale: expected a finite number or None (1 / sqrt(D)), got {softmax_scale}")


def check_table(name: str, sequences: int, block_table: Tensor, seq_lens: Tensor) -> None:
    """Pages (sequences, width) and lengths (sequences,), int32."""
    expect_rank(f"{name}.block_table", block_table, 2)
    expect_inner_contiguous(f"{name}.block_table", block_table)
    expect_shape(f"{name}.block_table", block_table, (sequences, block_table.shape[1]))
    expect_not_empty(f"{name}.block_table", block_table, 1)
    expect_dtype(f"{name}.block_table", block_table, torch.int32)
    expect_shape(f"{name}.seq_lens", seq_lens, (sequences,))
    expect_dtype(f"{name}.seq_lens", seq_lens, torch.int32)


def check_scales(
    op: str, cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:  # fmt: skip
    """Scales (1,) or (H,), or stored ones (pages, page, H) of keys and values; none with a 16-bit cache."""
    pages, page, H, _ = cache.shape
    for what, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            expect_shape(f"{op}.{what}", scale, (1,), (H,))
            expect_dtype(f"{op}.{what}", scale, torch.float32)
    if (key_scales is None) != (value_scales is None):
        missing = "key_scales" if key_scales is None else "value_scales"
        raise ValueError(f"{op}.{missing}: expected ({pages}, {page}, {H}) as there are scales of the other, got None")
    for what, stored in (("key_scales", key_scales), ("value_scales", value_scales)):
        if stored is not None:
            expect_shape(f"{op}.{what}", stored, (pages, page, H))
            expect_dtype(f"{op}.{what}", stored, torch.float32)
    given = [n for n, s in (("k_scale", k_scale), ("v_scale", v_scale), ("key_scales", key_scales)) if s is not None]
    if key_scales is not None and len(given) > 1:
        raise ValueError(f"{op}.{given[0]}: expected None where scales are stored by token, got a tensor")
    if cache.dtype.itemsize > 1 and given:
        raise ValueError(f"{op}.{given[0]}: expected None with a 16-bit cache, got a tensor")


def scale_strides(
    k_scale: Tensor | None, v_scale: Tensor | None, key_scales: Tensor | None, value_scales: Tensor | None,
    *more: Tensor | None,
) -> tuple[int, ...]:  # fmt: skip
    """Along heads of the first two and of `more` (0 where all share one), then all three of the stored ones."""
    by_head = [0 if s is None or s.numel() == 1 else s.stride(0) for s in (k_scale, v_scale, *more)]
    stored = [stride for s in (key_scales, value_scales) for stride in ((0, 0, 0) if s is None else s.stride())]
    return (*by_head, *stored)


def make_cache(
    shape: tuple[int, int, int, int], dtype: torch.dtype, layout: str, device: torch.device | str, seed: int
) -> Tensor:
    """A filled cache (pages, page, H, D); `heads_first` has the memory order (pages, H, page, D)."""
    if layout == "heads_first":
        pages, page, H, D = shape
        return sample((pages, H, page, D), dtype, "normal", device, seed).transpose(1, 2)
    return strided(sample(shape, dtype, "normal", device, seed), layout)


def make_scales(
    granularity: str, cache: Tensor, device: torch.device | str, seed: int, factor: float = 1.0
) -> dict[str, Tensor | None]:
    """The four scale arguments for "none", "tensor", "head" or "token_head"; none for a 16-bit cache."""
    pages, page, H, _ = cache.shape
    shape = {"tensor": (1,), "head": (H,), "token_head": (pages, page, H)}.get(granularity)
    names = ("k_scale", "v_scale", "key_scales", "value_scales")
    made: dict[str, Tensor | None] = dict.fromkeys(names)
    if shape is not None and cache.dtype.itemsize == 1:
        for i, name in enumerate(names[2:] if granularity == "token_head" else names[:2]):
            made[name] = scales(shape, device, seed + i) * factor
    return made


def decode_inputs(
    *, M, H, group, D, dv=None, page=16, tokens=4096, dtype=torch.float8_e4m3fn, q_dtype=torch.bfloat16,
    granularity="tensor", lengths="full", pages=None, kind="normal", layout="contiguous", rounded="", device="cuda",
    seed=0,
):  # fmt: skip
    """Arguments of `attention_decode`. `rounded`: "q" for FP8 queries, "p" for probabilities, with an FP8 cache."""
    dv = dv or D
    dtype = dtype or q_dtype
    width = -(-tokens // page)
    pages = pages or min(M * width + 1, 2**16)
    # pages in any order; sequences share them where there are too few
    order = torch.randperm(pages, generator=generator(seed + 6, device), device=device)
    table = order[torch.arange(M * width, device=device) % pages].view(M, width).int()
    lens = torch.full((M,), tokens, dtype=torch.int32, device=device)
    if lengths != "full":
        lens = torch.randint(0, tokens + 1, (M,), generator=generator(seed + 7, device), device=device).int()
        lens[:1] = {"random": 1, "empty": 0}[lengths]
    caches = [make_cache((pages, page, H, d), dtype, layout, device, seed + 1 + i) for i, d in enumerate((D, dv))]
    plain = "contiguous" if layout == "heads_first" else layout
    fp8 = rounded if dtype in FP8 else ""
    q = sample((M, H * group, D), dtype if "q" in fp8 else q_dtype, kind, device, seed)
    return dict(
        q=strided(q, plain), key_cache=caches[0],
        value_cache=caches[1], block_table=table, seq_lens=lens, softmax_scale=None,
        **make_scales(granularity, caches[0], device, seed + 4, 1 / 16),  # codes are up to 240
        q_scale=scales((H,), device, seed + 8) / 16 if "q" in fp8 else None,
        p_scale=torch.full((1,), 1 / 256, device=device) if "p" in fp8 else None,
        out_dtype=q_dtype if "q" in fp8 else None,
    )  # fmt: skip


def decode_cost(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, key_scales: Tensor | None, **_: Any
) -> Cost:
    """Of sequences as long as the block table: their lengths are data."""
    (B, heads, D), (page, H, DV) = q.shape, value_cache.shape[1:]
    tokens = B * block_table.shape[1] * page
    stored = 8 * tokens * H if key_scales is not None else 0
    moved = tokens * H * (D + DV) * key_cache.element_size() + stored + 2 * B * heads * (D + DV)
    return Cost(flops=2 * tokens * heads * (D + DV), bytes=moved)


def decode_tolerance(
    q: Tensor, key_cache: Tensor, p_scale: Tensor | None, out_dtype: torch.dtype | None, **_: Any
) -> float:  # fmt: skip
    """One rounding of the result, and one of every probability; FP8 ones near the middle of two codes take either."""
    if p_scale is not None:
        return 1e-2
    if key_cache.dtype is torch.bfloat16:
        return 4e-3
    return 1e-3 if torch.float16 in (q.dtype, out_dtype) else 2.5e-3


def prefill_inputs(
    *, B, T, H, group, D, tokens, q_dtype=torch.bfloat16, lengths="full", kind="normal", layout="contiguous",
    rounded="", device="cuda", seed=0, **cache,
):  # fmt: skip
    """Arguments of `attention_prefill`: a sequence's last T // B tokens, or up to as many; other rows are padding."""
    made = decode_inputs(
        M=B, H=H, group=group, D=D, tokens=tokens, q_dtype=q_dtype, lengths=lengths, kind=kind, layout=layout,
        rounded=rounded, device=device, seed=seed, **cache,
    )  # fmt: skip
    new = T // max(1, B)
    counts = torch.full((B,), new, device=device)
    if lengths != "full":
        counts = torch.randint(0, new + 1, (B,), generator=generator(seed + 9, device), device=device)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    q = sample((T, H * group, D), made["q"].dtype, kind, device, seed)
    plain = "contiguous" if layout == "heads_first" else layout
    return made | dict(q=strided(q, plain), query_starts=starts)


def prefill_cost(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, block_table: Tensor, key_scales: Tensor | None, **_: Any
) -> Cost:
    """Of sequences as long as the block table, whose last tokens are new: their lengths are data."""
    (T, heads, D), (page, H, DV), (B, width) = q.shape, value_cache.shape[1:], block_table.shape
    seen = width * page - T / max(1, B) / 2
    held = B * width * page * H * ((D + DV) * key_cache.element_size() + (8 if key_scales is not None else 0))
    return Cost(flops=int(2 * T * seen * heads * (D + DV)), bytes=held + 2 * T * heads * (D + DV))
