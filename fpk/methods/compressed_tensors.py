"""The compressed-tensors dialect of `quantization_config`: groups of layers, each with arguments for weights and input.

Source: vllm-project/compressed-tensors, `QuantizationConfig` and `QuantizationArgs`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fpk.methods._expressions import expression
from fpk.methods._families import LayerSpec, SkipList, block_spec, names, unsupported
from fpk.methods._known import CT_ARGUMENTS, CT_GROUP, method_keys, transform_notes, unknown_keys
from fpk.methods.engine import EngineConfig

FORMATS = {"float-quantized": "float", "int-quantized": "int", "naive-quantized": ""}
"""Formats whose weights are one code an element, and the type of the codes; the others pack."""

PACKED = {
    "mxfp4-pack-quantized": "mxfp4", "mxfp6-pack-quantized": "mxfp6_e2m3", "mxfp8-quantized": "mxfp8_e4m3",
    "nvfp4-pack-quantized": "nvfp4",
}  # fmt: skip
"""Formats of block-scaled weights, and their scheme."""


@dataclass
class CompressedTensorsConfig(EngineConfig):
    """What a compressed-tensors config says of linear layers.

    Attributes:
        groups: (targets, spec) in the order of the config.
        skips: the list of ignored layers: exact names, `re:` expressions, class names.
        notes: what the config asks for and fpk's layers do otherwise.
        cache: the arguments of the KV cache (`kv_cache_scheme`), or None.
    """

    groups: list[tuple[list[str], LayerSpec]]
    skips: SkipList
    notes: list[str] = field(default_factory=list)
    name: str = "compressed-tensors"
    cache: Mapping[str, Any] | None = None

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], fused: Mapping[str, Any] | None = None
    ) -> "CompressedTensorsConfig":
        """Read a `quantization_config`.

        Raises:
            ValueError: no groups, targets that are no names, or an argument with a value it cannot have.
        """
        listed = config.get("config_groups")
        if not isinstance(listed, Mapping) or not listed:
            raise ValueError(f"quantization_config.config_groups: expected groups by name, got {listed!r:.80}")
        groups, notes = [], []
        for name, group in listed.items():
            what = f"config_groups.{name}"
            if not isinstance(group, Mapping):
                raise ValueError(f"{what}: expected an object, got {group!r:.80}")
            notes += unknown_keys(what, group, CT_GROUP)
            for key in ("weights", "input_activations"):
                notes += unknown_keys(f"{what}.{key}", _arguments(what, group, key) or {}, CT_ARGUMENTS)
            targets = names(f"{what}.targets", group.get("targets"))
            if not targets:
                raise ValueError(f"{what}.targets: expected names of layers or classes, got none")
            for target in targets:
                if target.startswith("re:"):
                    expression(f"{what}.targets", target[3:])
            groups.append((targets, _group_spec(what, group, group.get("format") or config.get("format"))))
        sparsity = _arguments("quantization_config", config, "sparsity_config") or {}
        if sparsity.get("format", "dense") not in ("dense", None):
            sparse = unsupported(f"sparsity {sparsity['format']}", "fpk reads no sparse weights")
            groups = [(targets, sparse) for targets, _ in groups]
        notes += [*transform_notes(config), *method_keys(config, cls.name)]
        skips = SkipList(names("quantization_config.ignore", config.get("ignore")), _entries, fused or {})
        return cls(groups, skips, notes, cache=_arguments("quantization_config", config, "kv_cache_scheme"))

    def cache_refusal(self) -> str:
        if self.cache is None:
            return ""
        wanted = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
        other = [f"{k} {self.cache[k]!r}" for k, v in wanted.items() if self.cache.get(k, v) != v]
        return ", ".join(other)

    def spec(self, layer: str) -> LayerSpec | None:
        """The spec of a linear layer. A target that names it goes before one that names its class."""
        if self.skips.match(layer):
            return None
        for kind in (_by_name, _by_class):
            for targets, spec in self.groups:
                if any(kind(target, layer) for target in targets):
                    return spec
        return None

    def default(self) -> LayerSpec | None:
        return self.groups[0][1] if len(self.groups) == 1 else None

    def unmatched(self) -> list[str]:
        return self.skips.unmatched()


def _entries(entry: str) -> list[str]:
    return ["re:"] if entry == "Linear" else [entry]


def _by_name(target: str, layer: str) -> bool:
    return expression("targets", target[3:])(layer) if target.startswith("re:") else target == layer


def _by_class(target: str, layer: str) -> bool:
    return target == "Linear"


def _group_spec(what: str, group: Mapping[str, Any], layout: Any) -> LayerSpec:
    weights, inputs = _arguments(f"{what}.weights", group, "weights"), _arguments(what, group, "input_activations")
    if weights is None:
        raise ValueError(f"{what}.weights: expected an object, got None")
    if _arguments(what, group, "output_activations") is not None:
        return unsupported(f"{layout} with quantized outputs")
    if layout in PACKED:
        return _packed_spec(what, layout, weights, inputs)
    if layout is not None and layout not in FORMATS:
        return unsupported(str(layout))
    weight = _weight(f"{what}.weights", weights)
    if isinstance(weight, LayerSpec):
        return weight
    activation = None if inputs is None else _activation(f"{what}.input_activations", inputs)
    if isinstance(activation, LayerSpec):
        return activation
    return LayerSpec(weight, activation)


def _packed_spec(what: str, layout: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> LayerSpec:
    """The spec of a block-scaled format, whose name says what the weights are; the arguments must agree."""
    weight = PACKED[layout]
    bits = {"mxfp4": 4, "mxfp6_e2m3": 6, "mxfp8_e4m3": 8, "nvfp4": 4}[weight]
    size = 16 if weight == "nvfp4" else 32
    if (weights.get("type"), weights.get("num_bits"), weights.get("group_size")) != ("float", bits, size):
        return unsupported(f"{layout} with weights of {_told(weights)}")
    if inputs is None:
        return LayerSpec(weight, None, divides=weight == "nvfp4")
    kind = (inputs.get("type"), inputs.get("num_bits"), inputs.get("group_size"), inputs.get("dynamic"))
    if weight == "nvfp4":
        if kind[:3] == ("float", 4, 16):  # "local": blocks follow the data, the scale above them is fixed
            return LayerSpec(weight, "nvfp4_static" if kind[3] != True else "nvfp4", divides=True)  # noqa: E712
    elif kind[0] == "float" and kind[2] == 32 and kind[3] is True:
        microscaled = {4: "mxfp4", 6: "mxfp6_e2m3", 8: "mxfp8_e4m3"}.get(inputs.get("num_bits", 0))
        if microscaled:
            return LayerSpec(weight, microscaled)
    else:
        activation = _activation(f"{what}.input_activations", inputs)
        if isinstance(activation, str):
            return LayerSpec(weight, activation)
    return unsupported(f"{layout} with input of {_told(inputs)}")


def _arguments(what: str, group: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    found = group.get(key)
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"{what}: {key}: expected an object, got {found!r:.80}")
    return found


def _told(arguments: Mapping[str, Any]) -> str:
    kept = ("type", "num_bits", "strategy", "group_size", "block_structure", "dynamic")
    return " ".join(str(arguments[k]) for k in kept if arguments.get(k) is not None)


def _weight(what: str, arguments: Mapping[str, Any]) -> str | LayerSpec:
    kind, strategy = arguments.get("type"), arguments.get("strategy")
    if kind not in ("float", "int"):
        raise ValueError(f"{what}.type: expected float or int, got {kind!r:.80}")
    if arguments.get("dynamic"):
        raise ValueError(f"{what}.dynamic: expected false for weights, got {arguments['dynamic']!r:.80}")
    told = f"weights of {_told(arguments)}"
    if arguments.get("num_bits") != 8 or not arguments.get("symmetric", True) or arguments.get("actorder"):
        return unsupported(told)
    prefix = "fp8" if kind == "float" else "int8"
    if strategy in ("tensor", "channel"):
        return f"{prefix}_{strategy}"
    if strategy == "block" and prefix == "fp8":
        return block_spec(f"{what}.block_structure", arguments.get("block_structure")).weight
    if strategy == "group" and arguments.get("group_size") == 128:
        return f"{prefix}_group128"
    return unsupported(told)


def _activation(what: str, arguments: Mapping[str, Any]) -> str | LayerSpec:
    kind, strategy, dynamic = arguments.get("type"), arguments.get("strategy"), arguments.get("dynamic", False)
    if kind not in ("float", "int"):
        raise ValueError(f"{what}.type: expected float or int, got {kind!r:.80}")
    told = f"input of {_told(arguments)}"
    if arguments.get("num_bits") != 8 or dynamic not in (True, False):
        return unsupported(told)
    prefix = "fp8" if kind == "float" else "int8"
    symmetric = arguments.get("symmetric", True)
    if not dynamic:
        return f"{prefix}_tensor_static" if strategy == "tensor" and symmetric else unsupported(told)
    if not symmetric:
        known = prefix == "int8" and strategy in ("tensor", "token")
        return f"int8_{strategy}_asymmetric" if known else unsupported(told)
    if strategy in ("tensor", "token"):
        return f"{prefix}_{strategy}"
    if strategy == "group" and arguments.get("group_size") == 128:
        return f"{prefix}_group128"
    return unsupported(told)
