"""Online quantization by name: which scheme linear layers and experts of an unquantized checkpoint get.

OnlineConfig("fp8_per_tensor")
OnlineConfig(linear="fp8_per_block", moe="mxfp4", ignore=["re:.*self_attn", "lm_head"])
OnlineConfig("fp8_per_channel", rules={"re:.*down_proj": "mxfp8", "model.layers.0": None})
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from fpk.methods._expressions import expression
from fpk.methods.config import QuantizationConfig
from fpk.methods.engine import EngineConfig

LINEAR = {
    "fp8_per_tensor": "Fp8PerTensorOnlineLinearMethod",
    "fp8_per_block": "Fp8PerBlockOnlineLinearMethod",
    "fp8_per_channel": "Fp8PtpcOnlineLinearMethod",
    "int8_per_channel": "Int8PtpcOnlineLinearMethod",
    "mxfp8": "Mxfp8OnlineLinearMethod",
    "mxfp4": "Mxfp4OnlineLinearMethod",
    "nvfp4": "Nvfp4OnlineLinearMethod",
}
EXPERTS = {
    "fp8_per_tensor": "Fp8PerTensorOnlineMoEMethod",
    "fp8_per_block": "Fp8PerBlockOnlineMoEMethod",
    "fp8_per_channel": "Fp8PtpcOnlineMoEMethod",
    "int8_per_channel": "Int8PtpcOnlineMoEMethod",
    "int8_per_channel_weight_only": "Int8WeightOnlyOnlineMoEMethod",
    "mxfp8": "Mxfp8OnlineMoEMethod",
    "mxfp4": "Mxfp4OnlineMoEMethod",
    "nvfp4": "Nvfp4OnlineMoEMethod",
}
KEYS = {
    "fp8_per_tensor_static": "fp8_per_tensor", "fp8_per_tensor_dynamic": "fp8_per_tensor",
    "fp8_per_channel_static": "fp8_per_channel", "fp8_per_token": "fp8_per_channel",
    "fp8_per_block_static": "fp8_per_block", "fp8_per_block_dynamic": "fp8_per_block",
    "int8_per_channel_static": "int8_per_channel",
}  # fmt: skip
"""What engines call the weights' schemes besides."""


class OnlineConfig(QuantizationConfig):
    """Methods that quantize on loading, by layer.

    Args:
        name: of the scheme of linear layers and experts; one that only experts have leaves linear layers alone.
        linear, moe: of either; go before `name`. A name, or {"weight": name}.
        ignore: layers that stay unquantized: names, or `re:` expressions that match from the start.
        rules: other schemes by layer: an exact name, a module that holds the layer, or a `re:` expression, to a name or
            None (unquantized); the first that matches counts. A fused layer goes by its own name, else by its parts'.

    Raises:
        ValueError: an unknown name, a scheme that a kind of layer does not have, none at all, an activation that the
            method would not honour, or an expression that is none.
    """

    def __init__(
        self, name: str | None = None, *, linear: Any = None, moe: Any = None, ignore: Iterable[str] | None = None,
        rules: Mapping[str, str | None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(ignore)
        if name is None and linear is None and moe is None:
            raise ValueError("OnlineConfig: expected a scheme's name, or linear or moe, got none")
        if name is not None and _key(name) not in {**LINEAR, **EXPERTS}:
            raise ValueError(f"OnlineConfig.name: expected one of {', '.join({**LINEAR, **EXPERTS})}, got {name!r}")
        short = None if name is None else _key(name)
        self.linear = _spec("linear", linear, LINEAR) if linear is not None else short if short in LINEAR else None
        self.moe = _spec("moe", moe, EXPERTS) if moe is not None else short if short in EXPERTS else None
        self.rules = dict(rules or {})
        for pattern, rule in self.rules.items():
            if rule is not None and _key(rule) not in {**LINEAR, **EXPERTS}:
                raise ValueError(f"OnlineConfig.rules[{pattern!r}]: expected a scheme's name or None, got {rule!r}")
            _names(pattern, "")  # raises for what is no expression

    @classmethod
    def get_name(cls) -> str:
        return "online"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "OnlineConfig":
        """A checkpoint cannot ask for it."""
        raise NotImplementedError("OnlineConfig.from_config: checkpoints are unquantized, the caller names the scheme")

    def scheme(self, prefix: str, experts: bool = False) -> str | None:
        """The scheme of a layer, None for unquantized.

        Raises:
            ValueError: a rule whose scheme this kind of layer does not have, or parts of a fused layer are ignored, or
                go by different rules.
        """
        if self.is_skipped(prefix):
            return None
        pattern = self.rule_of(prefix)
        if pattern is None:
            return self.moe if experts else self.linear
        rule = self.rules[pattern]
        if rule is None:
            return None
        known = EXPERTS if experts else LINEAR
        if _key(rule) not in known:
            kind = "experts" if experts else "linear layers"
            raise ValueError(f"{prefix}: expected one of {', '.join(known)} for {kind}, got {rule!r}")
        return _key(rule)

    def rule_of(self, prefix: str) -> str | None:
        """The pattern of the rule that a layer goes by, None for none."""
        pattern = self._first(prefix)
        parent, _, projection = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(projection, [])
        if pattern is not None or not parts:
            return pattern
        each = {part: self._first(f"{parent}.{part}" if parent else part) for part in parts}
        rules = ["default" if p is None else str(self.rules[p]) for p in each.values()]
        if len(set(rules)) > 1:
            told = ", ".join(f"{part}: {rule}" for part, rule in zip(each, rules, strict=True))
            raise ValueError(f"{prefix}: expected one rule for all parts of the fused layer, got {told}")
        return next(iter(each.values()))

    def _first(self, name: str) -> str | None:
        pattern = next((p for p in self.rules if _names(p, name)), None)
        if pattern is not None:
            self._matched.add(pattern)
        return pattern

    def unmatched_layers(self) -> list[str]:
        """Rules too that have matched no layer yet."""
        return [e for e in [*self.ignored_layers, *self.rules] if e not in self._matched]

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; None for layers that it does not concern, attention among them."""
        from fpk import methods
        from fpk.methods.base import Linear, RoutedExperts

        if isinstance(layer, Linear) or (hasattr(layer, "input_size") and hasattr(layer, "output_size")):
            scheme = self.scheme(prefix)
            return methods.UnquantizedLinearMethod() if scheme is None else getattr(methods, LINEAR[scheme])()
        if isinstance(layer, RoutedExperts) or hasattr(layer, "moe_config"):
            scheme = self.scheme(prefix, experts=True)
            if scheme is None:
                return methods.UnquantizedFusedMoEMethod(layer.moe_config)
            return getattr(methods, EXPERTS[scheme])(layer=layer)
        return None

    plan = EngineConfig.plan

    @property
    def dialect(self) -> Any:
        """What a dry run asks for the skip list."""
        return _Skips(self)


class _Skips:
    def __init__(self, config: OnlineConfig) -> None:
        self.config, self.skips = config, self

    @property
    def _matched(self) -> set[str]:
        return self.config._matched

    @_matched.setter
    def _matched(self, value: set[str]) -> None:
        self.config._matched = value

    def match(self, name: str) -> bool:
        if self.config.is_skipped(name):
            return True
        pattern = self.config.rule_of(name)
        return pattern is not None and self.config.rules[pattern] is None

    def unmatched(self) -> list[str]:
        return self.config.unmatched_layers()


def _key(name: Any) -> str:
    return KEYS.get(str(name), str(name))


def _spec(slot: str, given: Any, known: Mapping[str, str]) -> str:
    """A name out of a string or {"weight": name}."""
    weight = given
    if isinstance(given, Mapping):
        extra = sorted(set(given) - {"weight", "activation"})
        if extra or "weight" not in given:
            raise ValueError(f"OnlineConfig.{slot}: expected a weight's scheme, got {dict(given)!r}")
        if given.get("activation") is not None:
            raise ValueError(
                f"OnlineConfig.{slot}: a method's activations follow from its weights, got {given['activation']!r}"
            )
        weight = given["weight"]
    if _key(weight) not in known:
        raise ValueError(f"OnlineConfig.{slot}: expected one of {', '.join(known)}, got {weight!r}")
    return _key(weight)


def _names(pattern: str, name: str) -> bool:
    if pattern.startswith("re:"):
        return expression("OnlineConfig", pattern[3:])(name)
    return name == pattern or name.startswith(f"{pattern}.")
