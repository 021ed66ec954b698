"""KV caches of attention layers: scales from the checkpoint, and caches that are written and attended to by ops.

A layer has one scale for keys and one for values (value = code * scale), and, for attention kernels that quantize more,
one for queries and one for probabilities. Caches whose dtype ends in `per_token_head` compute theirs as they are
written.
"""

import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_one_of, expect_shape, fp8_dtype
from fpk.kernels.attention.attention_decode import attention_decode
from fpk.kernels.attention.attention_prefill import attention_prefill
from fpk.kernels.attention.kv_cache_write import kv_cache_write
from fpk.methods.base import add_parameter
from fpk.methods.config import CACHE_SCALE_SUFFIXES
from fpk.methods.loading import Loading, are_pre_processed
from fpk.methods.parameter import ShardId, name_of

SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")
NOT_LOADED = -1.0
Q_SCALE_POLICIES = ("one", "k")

PLAIN = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
STATIC = ("fp8", "fp8_e4m3")
PER_TOKEN_HEAD = ("fp8_per_token_head", "int8_per_token_head")
ABSENT = (
    "fp8_inc", "fp8_ds_mla", "int4_per_token_head", "nvfp4", "nvfp4_4over6",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
)  # fmt: skip
"""Cache dtypes that engines have and fpk does not."""


@dataclass(frozen=True)
class KVCache:
    """A layer's cache: (pages, page, heads, size) codes or values, and with scales by token (pages, page, heads)."""

    key: Tensor
    value: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    @property
    def nbytes(self) -> int:
        tensors = (self.key, self.value, self.key_scales, self.value_scales)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


@dataclass(frozen=True)
class CacheScale:
    """One scale a layer: a 0-d parameter that takes () or (1,)."""

    def write(self, what: str, target: Tensor, loaded: Tensor, shard_id: ShardId) -> None:
        if shard_id is not None:
            raise ValueError(f"{what}: expected no shard id (one scale a layer), got {shard_id!r}")
        expect_shape(what, loaded, (), (1,))
        expect_dtype(what, loaded, *FLOAT_INPUTS)
        target.copy_(loaded.reshape(()))


class Fp8KVCacheMethod:
    """The KV cache of an attention layer, of any of `PLAIN`, `STATIC` and `PER_TOKEN_HEAD`: its `kv_cache_dtype`.

    Parameters before processing, none afterwards:
        q_scale, k_scale, v_scale, prob_scale: 0-d fp32, -1 until loaded.

    Buffers `_q_scale`, `_k_scale`, `_v_scale`, `_prob_scale`: 0-d fp32, 1 until processed; with them the same as floats
    (`_k_scale_float`, ...) and, for keys and values, on the host (`_k_scale_cpu`, `_v_scale_cpu`). Processing anew,
    after another `create_weights`, writes into the buffers that are there.

    Args:
        quant_config: of the checkpoint.
        q_scale_policy: the scale of queries where the checkpoint has none: "one", or "k" for that of the keys. fpk's
            kernels do not quantize queries; it matters to backends that do.

    Raises:
        ValueError: unknown policy.
    """

    def __init__(self, quant_config: Any, q_scale_policy: str = "one") -> None:
        expect_one_of("Fp8KVCacheMethod.q_scale_policy", q_scale_policy, Q_SCALE_POLICIES)
        self.quant_config = quant_config
        self.q_scale_policy = q_scale_policy

    def create_weights(self, layer: Any, **extra_weight_attrs: Any) -> None:
        """Register the four parameters and the buffers.

        Args:
            layer: with `kv_cache_dtype`.
            extra_weight_attrs: attributes of every parameter; `weight_loader(param, loaded_weight)` among them, else
                fpk's own is used.

        Raises:
            ValueError: the cache's dtype is unknown, or e5m2, which has no scales to load.
            NotImplementedError: engines know the dtype, fpk does not.
        """
        _expect_cache_dtype(layer)
        layer.loading = Loading()
        for name in SCALES:
            data = torch.tensor(NOT_LOADED, dtype=torch.float32)
            add_parameter(layer, name, data, CacheScale(), fixed_dtype=True, **extra_weight_attrs)
        if not hasattr(layer, "_k_scale_float"):  # else the buffers' addresses may be in a captured graph
            for name in SCALES:
                if not hasattr(layer, f"_{name}"):
                    layer.register_buffer(f"_{name}", torch.tensor(1.0, dtype=torch.float32))
            _read_back(layer)
            layer.register_load_state_dict_post_hook(_read_back)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Turn what was loaded into the scales that run; a second call does nothing.

        With a cache that is quantized by loaded scales: both as they are; `k_scale` alone serves both (a checkpoint
        with the one old `kv_scale`); without either both are 1, with a warning. With fnuz types codes mean half as
        much, so loaded scales double. Other caches have 1, whatever was loaded.

        Raises:
            ValueError: a scale that is used is not finite and positive, or `v_scale` came without `k_scale`.
        """
        registered = [n for n in SCALES if n in layer._parameters]
        if not registered:
            return
        absent = [n for n in SCALES if n not in registered]
        if absent:
            raise ValueError(f"{name_of(layer)}.{absent[0]}: missing, expected all of {', '.join(SCALES)} or none")
        if are_pre_processed():
            _read_back(layer)
        else:
            for name, value in self._scales(layer).items():
                getattr(layer, f"_{name}").fill_(value)
            _read_back(layer)
        for name in SCALES:
            delattr(layer, name)

    def _scales(self, layer: Any) -> dict[str, float]:
        dtype = _expect_cache_dtype(layer)
        scales = dict.fromkeys(SCALES, 1.0)
        if dtype in PER_TOKEN_HEAD:
            return scales
        name = name_of(layer)
        doubled = 2.0 if fp8_dtype(layer.k_scale.device) is torch.float8_e4m3fnuz else 1.0
        if dtype in STATIC:
            k, v = (_loaded(f"{name}.{n}", getattr(layer, n)) for n in ("k_scale", "v_scale"))
            if k is None and v is not None:
                raise ValueError(f"{name}.k_scale: missing from the checkpoint, expected it with v_scale ({v})")
            if k is None:
                warnings.warn(
                    f"{name}: the checkpoint has no k_scale and v_scale, the {dtype} cache uses 1.0: values beyond the "
                    f"format's range saturate",
                    stacklevel=3,
                )
            else:
                if v is None:
                    warnings.warn(f"{name}: the checkpoint has no v_scale, k_scale serves both", stacklevel=3)
                scales["k_scale"] = k * doubled
                scales["v_scale"] = (k if v is None else v) * doubled
        for which, default in (("q_scale", scales["k_scale"] if self.q_scale_policy == "k" else 1.0),
                               ("prob_scale", 1.0)):  # fmt: skip
            value = _loaded(f"{name}.{which}", getattr(layer, which))
            scales[which] = default if value is None else value * doubled
        return scales

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Raises RuntimeError: a cache is not applied to anything."""
        raise RuntimeError("Fp8KVCacheMethod.apply: expected write or attend, a KV cache multiplies nothing")

    def moved(self, layer: Any) -> None:
        """A conversion of the layer's dtype is not meant for its scales."""
        for name in SCALES:
            buffer = layer._buffers.get(f"_{name}")
            if buffer is not None and buffer.dtype is not torch.float32:
                value = getattr(layer, f"_{name}_float")
                layer._buffers[f"_{name}"] = torch.tensor(value, dtype=torch.float32, device=buffer.device)

    def new_cache(self, layer: Any, pages: int, page: int = 16, dtype: torch.dtype = torch.bfloat16) -> KVCache:
        """A cache of zeros on the layer's device; `dtype` is what "auto" means."""
        kind = _expect_cache_dtype(layer)
        device = layer._k_scale.device
        if kind in PLAIN:
            of_cache = PLAIN[kind] or dtype
        else:
            of_cache = torch.int8 if kind.startswith("int8") else fp8_dtype(device)
        shape, v_size = (pages, page, layer.num_kv_heads), getattr(layer, "head_size_v", layer.head_size)
        raw = torch.uint8 if of_cache.itemsize == 1 else of_cache  # not every FP8 type has a fill
        key, value = (
            torch.zeros(*shape, n, dtype=raw, device=device).view(of_cache) for n in (layer.head_size, v_size)
        )
        if kind not in PER_TOKEN_HEAD:
            return KVCache(key, value)
        return KVCache(key, value, torch.zeros(shape, device=device), torch.zeros(shape, device=device))

    def write(self, layer: Any, cache: KVCache, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Keys (M, heads, size) and values of new tokens to their slots (M,); see the op `kv_cache_write`."""
        scales = self._of(layer, cache)
        kv_cache_write(key, value, cache.key, cache.value, slots, **scales)

    def attend(
        self, layer: Any, cache: KVCache, q: Tensor, block_table: Tensor, seq_lens: Tensor,
        softmax_scale: float | None = None, query_starts: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of one query (B, query heads, size) a sequence, as in the op `attention_decode`; with query_starts
        of several, as in `attention_prefill`."""
        scales = self._of(layer, cache)
        several = () if query_starts is None else (query_starts,)
        run: Any = attention_decode if query_starts is None else attention_prefill
        return run(
            q, cache.key, cache.value, block_table, seq_lens, *several, softmax_scale, scales.get("k_scale"),
            scales.get("v_scale"), scales.get("key_scales"), scales.get("value_scales"),
        )  # fmt: skip

    def _of(self, layer: Any, cache: KVCache) -> dict[str, Tensor | None]:
        """The scale arguments of the ops."""
        if any(n in layer._parameters for n in SCALES):
            raise ValueError(f"{name_of(layer)}: expected process_weights_after_loading before the cache is used")
        if cache.key_scales is not None:
            return dict(key_scales=cache.key_scales, value_scales=cache.value_scales)
        if cache.key.dtype.itemsize > 1:
            return {}
        return dict(k_scale=layer._k_scale.view(1), v_scale=layer._v_scale.view(1))


def _expect_cache_dtype(layer: Any) -> str:
    what, dtype = f"{name_of(layer)}.kv_cache_dtype", getattr(layer, "kv_cache_dtype", "auto")
    if dtype in ABSENT:
        raise NotImplementedError(f"{what}: fpk has no {dtype} caches")
    if dtype == "fp8_e5m2":
        raise ValueError(f"{what}: expected an e4m3 cache with scales from a checkpoint, got fp8_e5m2")
    expect_one_of(what, dtype, (*PLAIN, *STATIC, *PER_TOKEN_HEAD))
    return dtype


def _loaded(what: str, parameter: Tensor) -> float | None:
    """The value of a scale, None if none was loaded."""
    value = float(parameter)
    if value == NOT_LOADED:
        return None
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{what}: expected a finite positive scale, got {value}")
    return value


def _read_back(layer: Any, *_: Any) -> None:
    """Floats and host tensors from the buffers. Also a hook after a state has been loaded into them."""
    for name in SCALES:
        value = float(getattr(layer, f"_{name}"))
        setattr(layer, f"_{name}_float", value)
        if name in ("k_scale", "v_scale"):
            setattr(layer, f"_{name}_cpu", torch.tensor(value, dtype=torch.float32, device="cpu"))


RULES = tuple(
    (re.compile(pattern), target)
    for pattern, target in (
        (r"(?:\.attn)?\.kv_scale$", ".attn.k_scale"),  # one for both; processing gives it to the values too
        (r"\.self_attn\.([kv])_proj\.\1_scale$", r".self_attn.attn.\1_scale"),
        (r"\.self_attn\.(?:qkv|qkqkv)_proj\.([kv])_scale$", r".self_attn.attn.\1_scale"),
        (r"\.mixer\.([kv])_proj\.\1_scale$", r".mixer.attn.\1_scale"),
        (r"\.self_attn\.q\.scale$", ".self_attn.attn.q_scale"),
        (r"\.self_attn\.([kv])_cache\.scale$", r".self_attn.attn.\1_scale"),
        (r"(?<!\.attn)\.([qkv])_(scale|zero_point)$", r".attn.\1_\2"),
    )
)
"""Names of KV-cache scales in checkpoints, beside the suffixes of a config; the first that fits counts."""

# scales of an attention block that are not those of its linear layers' weights and inputs
_SUSPECT = re.compile(
    r"(?:^|\.)(?:self_attn|attn|attention|mixer)\.(?:.+\.)?(?!weight|input)[^.]*(?:scale|zero_point)[^.]*$"
)


def map_kv_scale_name(name: str, suffixes: Mapping[str, str] = CACHE_SCALE_SUFFIXES) -> str:
    """What layers call the KV-cache scale that a checkpoint calls `name`; other names as they are.

    Args:
        suffixes: of a config, see `get_cache_scale_mapper`; they come before the rules that all configs share.
    """
    for suffix, target in suffixes.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + target
    for pattern, target in RULES:
        mapped, count = pattern.subn(target, name)
        if count:
            return mapped
    return name


class KVScaleNames:
    """Maps names of a checkpoint's KV-cache scales to a model's parameters, and keeps account of both sides.

    Args:
        parameters: names of all of the model's parameters.
        suffixes: as in `map_kv_scale_name`.

    Attributes:
        unknown: names in the checkpoint that look like such scales but fit no parameter, and what they were mapped to.
    """

    def __init__(self, parameters: Iterable[str], suffixes: Mapping[str, str] = CACHE_SCALE_SUFFIXES) -> None:
        self.parameters = set(parameters)
        self.suffixes = suffixes
        self.unknown: dict[str, str] = {}
        self._sources: dict[str, str] = {}

    def map(self, name: str) -> str | None:
        """The parameter that takes the tensor `name`; names of other tensors unchanged; None if nothing takes it.

        Raises:
            ValueError: another tensor has been mapped to the same scale.
        """
        target = name if name in self.parameters else map_kv_scale_name(name, self.suffixes)
        if target in self.parameters:
            if target.rpartition(".")[2] in SCALES:
                source = self._sources.setdefault(target, name)
                if source != name:
                    raise ValueError(f"{target}: expected one tensor of the checkpoint, got {source} and {name}")
            return target
        if target != name or _SUSPECT.search(name):
            self.unknown[name] = target
            return None
        return name

    def unset(self) -> list[str]:
        """Scales of keys and values that no tensor was mapped to."""
        scales = {p for p in self.parameters if p.rpartition(".")[2] in ("k_scale", "v_scale")}
        shared = {f"{t.removesuffix('k_scale')}v_scale" for t, s in self._sources.items() if s.endswith(".kv_scale")}
        return sorted(scales - self._sources.keys() - shared)

    def report(self) -> str:
        """A line for each unknown name and each scale that is not set; empty if there are none."""
        lines = [f"{n}: nothing takes it" + (f" (no {t})" if t != n else "") for n, t in self.unknown.items()]
        return "\n".join(lines + [f"{n}: not in the checkpoint" for n in self.unset()])
