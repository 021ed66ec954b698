"""What a quantized KV cache costs a model: attention that reads keys and values as the cache gives them back."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fpk.formats import E4M3FN, E5M2, INT8, Format
from fpk.kernels.attention.kv_cache_write import kv_cache_write
from fpk.kernels.quant.dequantize import dequantize

PREFIX = "kv:"
"""Of these names among a study's schemes."""

# name: element format, and whether every token and head has a scale; without one codes are values, as engines have it
# where a checkpoint brings no scales
CACHES: dict[str, tuple[Format, bool]] = {
    "fp8_e4m3": (E4M3FN, False),
    "fp8_e5m2": (E5M2, False),
    "fp8_per_token_head": (E4M3FN, True),
    "int8_per_token_head": (INT8, True),
}
_PAGE = 16


def through_cache(key: Tensor, value: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Keys and values (tokens, heads, size), written into a paged cache and read back.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in CACHES:
        raise ValueError(f"cache: expected one of {', '.join(CACHES)}, got {kind!r}")
    fmt, by_token = CACHES[kind]
    tokens, heads = key.shape[:2]
    pages = -(-tokens // _PAGE)
    key_cache, value_cache = (
        torch.zeros(pages, _PAGE, heads, t.shape[2], dtype=torch.uint8, device=t.device).view(fmt.dtype)
        for t in (key, value)
    )
    key_scales, value_scales = (
        torch.zeros(pages, _PAGE, heads, device=key.device) if by_token else None for _ in range(2)
    )
    slots = torch.randperm(pages * _PAGE, generator=torch.Generator().manual_seed(0), device="cpu")[:tokens]
    slots = slots.to(key.device)
    kv_cache_write(
        key.contiguous(), value.contiguous(), key_cache, value_cache, slots, key_scales=key_scales,
        value_scales=value_scales,
    )  # fmt: skip
    read = []
    for cache, scales in ((key_cache, key_scales), (value_cache, value_scales)):
        codes = cache.view(torch.uint8).flatten(0, 1)[slots].flatten(0, 1).view(fmt.dtype)  # (tokens * heads, size)
        if scales is None:
            scale = torch.ones((codes.shape[0], 1), device=codes.device)
        else:
            scale = scales.flatten(0, 1)[slots].reshape(-1, 1)
        read.append(dequantize(codes, scale, rows=1, cols=-1, out_dtype=key.dtype).view(tokens, heads, -1))
    return read[0], read[1]


@contextlib.contextmanager
def quantized_cache(model: nn.Module, kind: str) -> Iterator[nn.Module]:
    """Inside the block the attention of a transformers model sees keys and values as a cache of this kind has them.

    Raises:
        NotImplementedError: the model computes attention by itself, not through transformers' table of functions.
        ValueError: unknown kind.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if kind not in CACHES:
        raise ValueError(f"cache: expected one of {', '.join(CACHES)}, got {kind!r}")
    name = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise NotImplementedError(f"cache: expected attention by transformers' functions (sdpa), got {name!r}")
    original, mine = ALL_ATTENTION_FUNCTIONS[name], set(model.modules())
    ALL_ATTENTION_FUNCTIONS.register(name, _reading(original, mine, kind))
    try:
        yield model
    finally:
        ALL_ATTENTION_FUNCTIONS.register(name, original)


def _reading(original: Callable[..., Any], modules: set[nn.Module], kind: str) -> Callable[..., Any]:
    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        if module in modules:
            batch, heads, tokens, _ = key.shape
            rows = [t.transpose(1, 2).reshape(batch * tokens, heads, -1) for t in (key, value)]
            key, value = (
                t.view(batch, tokens, heads, -1).transpose(1, 2) for t in through_cache(rows[0], rows[1], kind)
            )
        return original(module, query, key, value, *rest, **options)

    return attend
