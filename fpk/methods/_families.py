"""Dialects of `quantization_config`: what a config says about a layer, and what the layer's tensors are called.

A dialect answers `spec(layer)`: None for a layer that its skip list names, else a `LayerSpec`. Whether a layer really
is quantized its tensors tell; see `_dense.py`.
"""

import fnmatch
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fpk.formats import per_block
from fpk.methods._known import expect_scale_format, method_keys
from fpk.methods.skip import is_layer_skipped

ROLES = {
    "weight": "weight",
    "weight_packed": "weight",
    "weight_scale": "weight_scale",
    "weight_scale_inv": "weight_scale",  # a multiplier, whatever its name says
    "scale": "weight_scale",
    "qscale_weight": "weight_scale",
    "weight_scale_2": "weight_global_scale",
    "weight_global_scale": "weight_global_scale",
    "input_scale": "input_scale",
    "act_scale": "input_scale",
    "activation_scale": "input_scale",
    "input_scale_2": "input_global_scale",
    "input_global_scale": "input_global_scale",
    "weight_zero_point": "weight_zero_point",
    "input_zero_point": "input_zero_point",
    "pre_quant_scale": "pre_quant_scale",
    "bias": "bias",
}
"""Last part of a tensor's name to its role, in every dialect. All scales of dense FP8 and INT8 layers multiply."""

KV_SCALES = {
    "k_scale": "k", "v_scale": "v", "q_scale": "q", "kv_scale": "kv", "prob_output_scale": "prob", "prob_scale": "prob",
}  # fmt: skip
KV_PROJECTIONS = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}  # their output_scale is a KV scale too


@dataclass(frozen=True)
class LayerSpec:
    """A layer's schemes as the config has them.

    Attributes:
        weight: name of a scheme, or, if no layer of fpk has it, what it is called.
        activation: what `QuantizedLinear` calls its activations, None for weight-only.
        unsupported: why there is no layer for it; empty if there is one.
        divides: do the second scales of NVFP4 divide, as compressed-tensors has them?
    """

    weight: str
    activation: str | None = None
    unsupported: str = ""
    divides: bool = False

    def __str__(self) -> str:
        return f"{self.weight}:{self.activation or 'none'}" if not self.unsupported else self.weight


def unsupported(scheme: str, why: str = "no layer of fpk reads it yet") -> LayerSpec:
    return LayerSpec(scheme, None, why)


class Dialect(Protocol):
    name: str
    notes: list[str]

    def spec(self, layer: str) -> LayerSpec | None: ...
    def default(self) -> LayerSpec | None: ...
    def unmatched(self) -> list[str]: ...


@dataclass
class SkipList:
    """A skip list in one dialect, read by the one matcher.

    Attributes:
        entries: as they stand in the config.
        translate: an entry to the entries of `is_layer_skipped` that mean the same.
        fused: names of fused projections and of their parts.
    """

    entries: list[str]
    translate: Any
    fused: Mapping[str, Any] = field(default_factory=dict)
    _matched: set[str] = field(default_factory=set)

    @functools.cached_property
    def _translated(self) -> dict[str, str]:
        return {made: entry for entry in self.entries for made in self.translate(entry)}

    def match(self, layer: str) -> bool:
        hits: set[str] = set()
        skipped = is_layer_skipped(layer, self._translated, self.fused, "exact", hits)
        self._matched |= {self._translated[h] for h in hits}
        return skipped

    def unmatched(self) -> list[str]:
        return [e for e in self.entries if e not in self._matched]


def names(what: str, value: Any) -> list[str]:
    """A list of strings, or None for an empty one."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{what}: expected a list of names, got {value!r:.80}")
    return list(value)


def wildcard(pattern: str) -> str:
    """A shell wildcard as an entry of the matcher."""
    return "re:" + fnmatch.translate(pattern)


def inside(name: str) -> str:
    """A name, a module that holds it, or the end of its name, as an entry of the matcher."""
    return f"re:(?:.*\\.)?{_escape(name)}(?:\\.|$)"


def _escape(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-" else f"\\{c}" for c in name)


def fp8_entries(entry: str) -> list[str]:
    """transformers reads an entry as a regular expression from the start up to a dot, or as a plain end of the name."""
    if entry.startswith("re:"):
        return [entry]
    made = [entry, f"re:.*\\.{_escape(entry)}$"]
    return [*made, f"re:(?:{entry})(?:\\.|$)" if _is_expression(entry) else f"re:{_escape(entry)}(?:\\.|$)"]


def modelopt_entries(entry: str) -> list[str]:
    """Wildcards; plain names by whole parts of the name, which is what older files count on."""
    if entry.startswith("re:"):
        return [entry]
    return [wildcard(entry)] if any(c in entry for c in "*?[") else [inside(entry)]


def _is_expression(text: str) -> bool:
    import re

    try:
        re.compile(text)
    except re.error:
        return False
    return True


@dataclass
class OneSpec:
    """A dialect in which all layers but the skipped ones have one spec."""

    name: str
    one: LayerSpec
    skips: SkipList
    notes: list[str] = field(default_factory=list)

    def spec(self, layer: str) -> LayerSpec | None:
        return None if self.skips.match(layer) else self.one

    def default(self) -> LayerSpec | None:
        return self.one

    def unmatched(self) -> list[str]:
        return self.skips.unmatched()


@dataclass
class NamedSpecs:
    """A dialect that lists the quantized layers one by one (ModelOpt, mixed precision)."""

    name: str
    by_name: dict[str, LayerSpec]
    skips: SkipList
    notes: list[str] = field(default_factory=list)

    def spec(self, layer: str) -> LayerSpec | None:
        return None if self.skips.match(layer) else self.by_name.get(layer)

    def default(self) -> LayerSpec | None:
        return None

    def unmatched(self) -> list[str]:
        return self.skips.unmatched()


def block_spec(what: str, size: Any, powers: str = "") -> LayerSpec:
    """FP8 weights with block scales, and activations by group; `powers`: "_e8m0" if theirs are powers of two."""
    if not isinstance(size, (list, tuple)) or len(size) != 2 or not all(type(n) is int and n > 0 for n in size):
        raise ValueError(f"{what}: expected [rows, columns], got {size!r:.80}")
    return LayerSpec(f"fp8_{per_block(*size).name}", f"fp8_group{size[1]}{powers}")


def _fp8(config: Mapping[str, Any], fused: Mapping[str, Any]) -> OneSpec:
    """AutoFP8, DeepSeek, Qwen and transformers: `quant_method: fp8`."""
    scheme = config.get("activation_scheme", "dynamic")
    if scheme not in ("static", "dynamic"):
        raise ValueError(f"quantization_config.activation_scheme: expected static or dynamic, got {scheme!r:.80}")
    skips = SkipList(_first_list(config, ("ignored_layers", "modules_to_not_convert")), fp8_entries, fused)
    size = config.get("weight_block_size")
    if size is None:
        one = LayerSpec("fp8_tensor", "fp8_tensor_static" if scheme == "static" else "fp8_token")
        return OneSpec("fp8", one, skips)
    if scheme != "dynamic":
        raise ValueError("quantization_config.activation_scheme: expected dynamic with weight_block_size, got 'static'")
    powers = "_e8m0" if expect_scale_format("quantization_config.scale_fmt", config.get("scale_fmt")) else ""
    return OneSpec("fp8", block_spec("quantization_config.weight_block_size", size, powers=powers), skips)


def _fbgemm(config: Mapping[str, Any], fused: Mapping[str, Any]) -> OneSpec:
    spec = LayerSpec("fp8_channel", "fp8_token")
    if config.get("activation_scale_ub") is not None:
        spec = unsupported(
            "fbgemm_fp8 with activation_scale_ub", "fpk's layers have no bound of the activations' scale"
        )
    return OneSpec("fbgemm_fp8", spec, SkipList(_first_list(config, ("modules_to_not_convert",)), fp8_entries, fused))


def _microscaled(config: Mapping[str, Any], fused: Mapping[str, Any]) -> OneSpec:
    """gpt-oss (`mxfp4`) and MiniMax (`mxfp8`)."""
    method = config["quant_method"].lower()
    one = LayerSpec("mxfp4", None) if method == "mxfp4" else LayerSpec("mxfp8_e4m3", "mxfp8_e4m3")
    skips = _first_list(config, ("ignored_layers", "modules_to_not_convert"))
    return OneSpec(method, one, SkipList(skips, fp8_entries, fused))


MODELOPT = {
    "FP8": LayerSpec("fp8_tensor", "fp8_tensor_static"),
    "FP8_PER_CHANNEL_PER_TOKEN": LayerSpec("fp8_channel", "fp8_token"),
    "FP8_PB_WO": LayerSpec("fp8_block128", None),
    "W8A8_SQ_PER_CHANNEL": LayerSpec("int8_channel", "int8_tensor_static"),
    "NVFP4": LayerSpec("nvfp4", "nvfp4_static"),
    "W4A16_NVFP4": LayerSpec("nvfp4", None),
    "MXFP8": LayerSpec("mxfp8_e4m3", "mxfp8_e4m3"),
    "MXFP4": LayerSpec("mxfp4", "mxfp4"),
    "W4A8_MXFP4_FP8": LayerSpec("mxfp4", "fp8_token"),
}


def _modelopt(config: Mapping[str, Any], fused: Mapping[str, Any]) -> Dialect:
    """Flat keys in config.json, or those under "quantization" in hf_quant_config.json. `quant_algo` decides."""
    inner = config.get("quantization", config)
    if not isinstance(inner, Mapping):
        raise ValueError(f"quantization: expected an object, got {inner!r:.80}")
    skips = SkipList(_first_list(inner, ("ignore", "exclude_modules")), modelopt_entries, fused)
    algo = inner.get("quant_algo")
    if not isinstance(algo, str):
        raise ValueError(f"quantization_config.quant_algo: expected a name, got {algo!r:.80}")
    if algo.upper() == "MIXED_PRECISION":
        layers = inner.get("quantized_layers")
        if not isinstance(layers, Mapping) or not all(isinstance(v, Mapping) for v in layers.values()):
            raise ValueError(f"quantization_config.quantized_layers: expected objects by layer, got {layers!r:.80}")
        by_name = {name: _algorithm(entry.get("quant_algo")) for name, entry in layers.items()}
        return NamedSpecs("modelopt", by_name, skips)
    groups = inner.get("config_groups")
    groups = groups if isinstance(groups, Mapping) else None
    inputs = [isinstance(g, Mapping) and g.get("input_activations") for g in groups.values()] if groups else [True]
    if algo.upper() == "NVFP4" and not any(inputs):
        algo = "W4A16_NVFP4"  # the same name for weights alone
    return OneSpec("modelopt", _algorithm(algo), skips)


def _algorithm(name: Any) -> LayerSpec:
    if not isinstance(name, str):
        raise ValueError(f"quant_algo: expected a name, got {name!r:.80}")
    return MODELOPT.get(name.upper()) or unsupported(name)


def _first_list(config: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
    return next((found for key in keys if (found := names(f"quantization_config.{key}", config.get(key)))), [])


def dialect_of(config: Mapping[str, Any], fused: Mapping[str, Any] | None = None) -> Dialect:
    """The dialect that a quantization config is written in.

    Args:
        config: `quantization_config` of config.json, or hf_quant_config.json.
        fused: fused projections of the model and their parts, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.

    Raises:
        ValueError: a key is missing or has a value that it cannot have.
        NotImplementedError: another quantization method.
    """
    from fpk.methods.compressed_tensors import CompressedTensorsConfig
    from fpk.methods.quark import QuarkConfig

    fused = fused or {}
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config: expected an object, got {config!r:.80}")
    method = config.get("quant_method")
    if method is None and isinstance(config.get("quantization"), Mapping):
        method = "modelopt"  # hf_quant_config.json has no such key
    if method is None and "config_groups" in config:
        method = "compressed-tensors"  # nor have its oldest files
    if not isinstance(method, str):
        raise ValueError(f"quantization_config.quant_method: expected a name, got {method!r:.80}")
    method = method.lower()
    if method == "compressed-tensors":
        return CompressedTensorsConfig.from_config(config, fused)
    if method == "quark":
        return QuarkConfig.from_config(config, fused)
    readers = {"fp8": _fp8, "fbgemm_fp8": _fbgemm, "modelopt": _modelopt, "mxfp4": _microscaled, "mxfp8": _microscaled}
    if method not in readers:
        known = ", ".join([*readers, "compressed-tensors", "quark"])
        raise NotImplementedError(f"quantization_config.quant_method: expected one of {known}, got {method!r:.80}")
    made: Any = readers[method](config, fused)
    made.notes += method_keys(config, method)
    return made  # type: ignore[no-any-return]
