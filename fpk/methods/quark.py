"""The Quark dialect of `quantization_config`: specs of tensors by layer name, by class and for all others.

Source: AMD Quark's exported config.json. Where engines read it differently, it is read here as Quark means it: plain
names in `layer_quant_config` match the layers they name, sections may be absent, lists of specs are compared whole.
"""

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fpk.methods._families import LayerSpec, SkipList, block_spec, inside, names, unsupported, wildcard
from fpk.methods._known import QUARK_LAYER, QUARK_SPEC, algorithm_notes, method_keys, unknown_keys
from fpk.methods.engine import PROJECTIONS, EngineConfig

Spec = Mapping[str, Any]


@dataclass
class QuarkConfig(EngineConfig):
    """What a Quark config says of linear layers and of the KV cache.

    Attributes:
        global_config: specs of layers that nothing else names.
        layer_configs: specs by name or shell wildcard; they go first.
        type_configs: specs by class name.
        kv_cache_group: patterns of the projections whose outputs are the KV cache.
        kv_cache_spec: how the KV cache is quantized, or None.
        pack_method: of INT4 codes; without effect on the others.
        skips: excluded layers: names, shell wildcards, `re:` expressions.
        notes: what the config asks for and fpk's layers do otherwise.
    """

    global_config: Spec
    layer_configs: dict[str, Spec]
    type_configs: dict[str, Spec]
    kv_cache_group: list[str]
    kv_cache_spec: Spec | None
    pack_method: str
    skips: SkipList
    notes: list[str] = field(default_factory=list)
    name: str = "quark"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], fused: Mapping[str, Any] | None = None) -> "QuarkConfig":
        """Read a `quantization_config`.

        Raises:
            ValueError: no `export` section, a section that is no object, or a KV cache group that `layer_quant_config`
                does not say how to quantize, or in two ways.
        """
        export = config.get("export")
        if not isinstance(export, Mapping):
            raise ValueError(f"quantization_config.export: expected an object, got {export!r:.80}")
        layers = {k: dict(v) for k, v in _section(config, "layer_quant_config", nested=True).items()}
        group = names("quantization_config.export.kv_cache_group", export.get("kv_cache_group"))
        kv_spec = _kv_cache_spec(group, layers)
        if kv_spec is not None:
            # the outputs of these projections are the cache's matter, not the layer's
            for pattern, entry in layers.items():
                if pattern == "*q_proj" or _names_group(pattern, group):
                    entry["output_tensors"] = None
        every = _section(config, "global_quant_config")
        types = dict(_section(config, "layer_type_quant_config", nested=True))
        notes = algorithm_notes(config) + method_keys(config, cls.name)
        for what, entry in {"global_quant_config": every, **layers, **types}.items():
            notes += _notes(what, entry)
        return cls(
            every, dict(layers), types, group, kv_spec, str(export.get("pack_method", "reorder")),
            SkipList(names("quantization_config.exclude", config.get("exclude")), _entries, fused or {}), notes,
        )  # fmt: skip

    def layer_config(self, layer: str, class_name: str = "Linear") -> Spec:
        """The specs of a layer: of its name, else a pattern that matches it, else its class, else all layers.

        Raises:
            ValueError: a fused layer whose parts have different specs.
        """
        parent, _, projection = layer.rpartition(".")
        parts = self.skips.fused.get(projection)
        if parts and layer not in self.layer_configs:
            found = [self.layer_config(f"{parent}.{p}" if parent else p, class_name) for p in parts]
            if any(f != found[0] for f in found[1:]):
                raise ValueError(f"{layer}: expected one quantization for {', '.join(parts)}, got different ones")
            return found[0]
        if layer in self.layer_configs:
            return self.layer_configs[layer]
        for pattern, entry in self.layer_configs.items():
            if _matches(pattern, layer):
                return entry
        for name, entry in self.type_configs.items():
            if name.strip("<>'\" ").split(".")[-1] == class_name:
                return entry
        return self.global_config

    def spec(self, layer: str) -> LayerSpec | None:
        if self.skips.match(layer):
            return None
        return spec_of(layer, self.layer_config(layer))

    def default(self) -> LayerSpec | None:
        return spec_of("global_quant_config", self.global_config) if self.global_config else None

    def unmatched(self) -> list[str]:
        return self.skips.unmatched()

    def cache_refusal(self) -> str:
        spec = self.kv_cache_spec or dict(dtype="fp8_e4m3", qscheme="per_tensor")
        fits = (spec.get("dtype"), spec.get("qscheme")) == ("fp8_e4m3", "per_tensor")
        return "" if fits and not spec.get("is_dynamic") else _told([spec])

    def experts_method(self, layer: Any, prefix: str) -> Any:
        """The method of an expert layer, by Quark's own specs.

        Raises:
            NotImplementedError: quantized outputs or biases.
            RuntimeError: specs that no method has.
        """
        from fpk.methods.fp8_moe import Fp8ExpertsMethod
        from fpk.methods.moe import UnquantizedFusedMoEMethod
        from fpk.methods.mx_moe import QuarkNvfp4MoEMethod, QuarkOCP_MX_MoEMethod
        from fpk.methods.quark_moe import QuarkW4A8Fp8MoEMethod, QuarkW8A8Fp8MoEMethod, QuarkW8A8Int8MoEMethod

        moe = layer.moe_config
        if self.skips.match(prefix) or self.skips.match(f"{prefix}.0.w1") or self.skips.match(f"{prefix}.0.gate_proj"):
            return UnquantizedFusedMoEMethod(moe)
        config = self._experts_config(prefix)
        for key in ("output_tensors", "bias"):
            if config.get(key) is not None:
                raise NotImplementedError(f"{prefix}: fpk has no experts with quantized {key}")
        weight, inputs = _parts(prefix, config, "weight"), _parts(prefix, config, "input_tensors")
        if not weight:
            return UnquantizedFusedMoEMethod(moe)
        dtypes, act = [w.get("dtype") for w in weight], inputs[0] if len(inputs) == 1 else None
        if dtypes == ["fp8_e4m3", "int4"] and act and act.get("dtype") == "fp8_e4m3":
            return QuarkW4A8Fp8MoEMethod(weight, act, moe, self.pack_method)
        if is_nvfp4(weight) and (not inputs or is_nvfp4(inputs)):
            return QuarkNvfp4MoEMethod(weight, inputs, moe, self)
        if len(weight) == 1 and len(inputs) < 2:
            only = weight[0]
            if _microscaled(only):
                return QuarkOCP_MX_MoEMethod(only, act, moe)
            if act and dtypes == ["fp8_e4m3"] and act.get("dtype") == "fp8_e4m3":
                if only.get("qscheme") == "per_block":
                    block_spec(f"{prefix}.weight.block_size", only.get("block_size"))
                    return Fp8ExpertsMethod(moe, False, only["block_size"])
                return QuarkW8A8Fp8MoEMethod(only, act, moe)
            if act and dtypes == ["int8"] and act.get("dtype") == "int8":
                return QuarkW8A8Int8MoEMethod(only, act, moe)
        raise RuntimeError(f"{prefix}: no method for experts with weights of {_told(weight)}, input of {_told(inputs)}")

    def _experts_config(self, prefix: str) -> Spec:
        """The specs of an expert layer: of its name, else of its projections, which must agree."""
        if prefix in self.layer_configs:
            return self.layer_configs[prefix]
        for three in PROJECTIONS:
            found = [self.layer_config(f"{prefix}.0.{name}") for name in three]
            if any(f != found[0] for f in found[1:]):
                raise ValueError(f"{prefix}: expected one quantization for {', '.join(three)}, got different ones")
            if found[0] is not self.global_config:
                return found[0]
        return self.global_config


def spec_of(what: str, config: Spec) -> LayerSpec | None:
    """Schemes of a layer's specs; None if it has no quantized weights.

    Raises:
        ValueError: specs that are no objects, or a block size that is none.
    """
    weight, inputs = _parts(what, config, "weight"), _parts(what, config, "input_tensors")
    if not weight:
        return None
    told = f"weights of {_told(weight)}, input of {_told(inputs)}"
    for key in ("output_tensors", "bias"):
        if config.get(key) is not None:
            return unsupported(f"{told}, quantized {key}")
    if len(weight) > 1 or len(inputs) > 1:
        return _two_stages(weight, inputs) or unsupported(told)
    microscaled = _microscaled(weight[0])
    if microscaled:
        activation = "" if inputs else None
        if inputs:
            activation = _microscaled(inputs[0]) or _activation(inputs[0])
        return unsupported(told) if activation == "" else LayerSpec(microscaled, activation)
    name = _weight(what, weight[0])
    activation = _activation(inputs[0]) if inputs else None
    if isinstance(name, LayerSpec):
        return name
    if name is None or activation == "" or (activation and activation.split("_")[0] != name.split("_")[0]):
        return unsupported(told)
    return LayerSpec(name, activation)


MX_DTYPES = {"fp4": "mxfp4", "fp6_e2m3": "mxfp6_e2m3", "fp6_e3m2": "mxfp6_e3m2", "fp8_e4m3": "mxfp8_e4m3"}


def _microscaled(spec: Spec) -> str:
    """The scheme of a spec with a power of two for every 32 columns; "" for others."""
    is_mx = spec.get("qscheme") == "per_group" and spec.get("group_size") == 32 and spec.get("scale_format") == "e8m0"
    return MX_DTYPES.get(str(spec.get("dtype")), "") if is_mx else ""


def _two_stages(weight: list[Spec], inputs: list[Spec]) -> LayerSpec | None:
    """NVFP4: FP4 per group of 16, and FP8 per tensor for its scales; None for other lists."""
    if not is_nvfp4(weight) or (inputs and not is_nvfp4(inputs)):
        return None
    if not inputs:
        return LayerSpec("nvfp4", None)
    return LayerSpec("nvfp4", "nvfp4" if inputs[1].get("is_dynamic") else "nvfp4_static")


def is_nvfp4(stages: list[Spec]) -> bool:
    """Are these the two stages of NVFP4?"""
    if len(stages) != 2:
        return False
    element, scale = stages
    return (element.get("dtype"), element.get("qscheme"), element.get("group_size")) == ("fp4", "per_group", 16) and (
        scale.get("dtype"), scale.get("qscheme")
    ) == ("fp8_e4m3", "per_tensor")  # fmt: skip


def _weight(what: str, spec: Spec) -> str | LayerSpec | None:
    prefix = {"fp8_e4m3": "fp8", "int8": "int8"}.get(str(spec.get("dtype")))
    scheme = spec.get("qscheme")
    if prefix is None or spec.get("is_dynamic"):
        return None
    if prefix == "int8" and spec.get("symmetric") is False:
        return None
    if scheme == "per_tensor":
        return f"{prefix}_tensor"
    if scheme == "per_channel" and spec.get("ch_axis") in (0, None):
        return f"{prefix}_channel"
    if scheme == "per_block" and prefix == "fp8":
        return block_spec(f"{what}.weight.block_size", spec.get("block_size")).weight
    return None


def _activation(spec: Spec) -> str:
    """The activations' name, or "" if there is none."""
    prefix = {"fp8_e4m3": "fp8", "int8": "int8"}.get(str(spec.get("dtype")))
    scheme, symmetric = spec.get("qscheme"), spec.get("symmetric") is not False
    if prefix is None:
        return ""
    if not spec.get("is_dynamic"):
        return (
            f"{prefix}_tensor_static" if scheme == "per_tensor" else ""
        )  # zero points are looked at when they are read
    if not symmetric and prefix == "int8":
        return {"per_tensor": "int8_tensor_asymmetric", "per_channel": "int8_token_asymmetric"}.get(str(scheme), "")
    if scheme == "per_group":
        size = spec.get("group_size")
        return f"{prefix}_group{size}" if type(size) is int and size > 0 else ""
    # a channel of an activation is a token
    return {"per_tensor": f"{prefix}_tensor", "per_channel": f"{prefix}_token", "per_token": f"{prefix}_token"}.get(
        str(scheme), ""
    )


def _parts(what: str, config: Spec, key: str) -> list[Spec]:
    """A spec, or a list of its stages, as a list."""
    found = config.get(key)
    stages = [] if found is None else [found] if isinstance(found, Mapping) else found
    if not isinstance(stages, Sequence) or not all(isinstance(s, Mapping) for s in stages):
        raise ValueError(f"{what}.{key}: expected an object or a list of them, got {found!r:.80}")
    return list(stages)


def _notes(what: str, entry: Spec) -> list[str]:
    """Keys of a layer's specs that fpk does not know, and a rule of scales that its activations do not follow."""
    notes = unknown_keys(what, entry, QUARK_LAYER)
    for key in ("weight", "input_tensors"):
        for stage in _parts(what, entry, key):
            notes += unknown_keys(f"{what}.{key}", stage, QUARK_SPEC)
            rule = stage.get("scale_calculation_mode")
            if key == "input_tensors" and rule not in (None, "even"):
                notes.append(f"{what}.{key}.scale_calculation_mode: activations do not follow {rule!r:.80}")
    return notes


def _told(stages: list[Spec]) -> str:
    kept = ("dtype", "qscheme", "group_size", "block_size", "scale_format")
    each = (" ".join(str(s[k]) for k in kept if s.get(k) is not None) for s in stages)
    return " + ".join(each) or "none"


def _section(config: Mapping[str, Any], key: str, nested: bool = False) -> Mapping[str, Any]:
    found = config.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping) or (nested and not all(isinstance(v, Mapping) for v in found.values())):
        raise ValueError(f"quantization_config.{key}: expected {'objects by name' if nested else 'an object'}")
    return found


def _kv_cache_spec(group: list[str], layers: Mapping[str, Spec]) -> Spec | None:
    """The output spec that all entries of the KV cache group share."""
    if not group:
        return None
    entries = {pattern: entry for pattern, entry in layers.items() if _names_group(pattern, group)}
    if not entries:
        raise ValueError(
            f"quantization_config.layer_quant_config: expected an entry for kv_cache_group {group}, got none"
        )
    specs = [entry.get("output_tensors") for entry in entries.values()]
    if any(s is None for s in specs):
        raise ValueError(f"quantization_config.layer_quant_config: expected output_tensors in each of {list(entries)}")
    if any(s != specs[0] for s in specs[1:]):
        raise ValueError(f"quantization_config.layer_quant_config: expected the same output_tensors in {list(entries)}")
    return specs[0]


def _names_group(pattern: str, group: list[str]) -> bool:
    return any(pattern == g or fnmatch.fnmatchcase(pattern, g) for g in group)


def _matches(pattern: str, layer: str) -> bool:
    if any(c in pattern for c in "*?["):
        return fnmatch.fnmatchcase(layer, pattern)
    return f".{pattern}." in f".{layer}."


def _entries(entry: str) -> list[str]:
    if entry.startswith("re:"):
        return [entry]
    return [wildcard(entry)] if any(c in entry for c in "*?[") else [inside(entry)]
