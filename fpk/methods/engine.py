"""What an inference engine asks a checkpoint's config: which method a layer gets, for all families.

A dialect (see _families.py) says what a layer's schemes are; this turns them into methods. Methods are imported when
the first layer asks, so that reading a config compiles nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fpk.methods._families import Dialect, LayerSpec, dialect_of
from fpk.methods._known import cache_told

PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


class EngineConfig:
    """The part of a config that engines call; `self` is the dialect, or has it as `dialect`.

    Attributes:
        per_expert_input_scale: of the methods of experts; see `FusedMoEMethod`.
    """

    name = ""
    per_expert_input_scale = False

    @property
    def dialect(self) -> Any:
        return self

    def get_name(self) -> str:
        return str(self.name)

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        """Files beside config.json that hold the config."""
        return []

    @property
    def packed_modules_mapping(self) -> Mapping[str, Sequence[str]]:
        """Fused projections of the model and their parts; set by model code."""
        return self.dialect.skips.fused

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, mapping: Mapping[str, Sequence[str]]) -> None:
        self.dialect.skips.fused = mapping

    def apply_vllm_mapper(self, mapper: Any) -> None:
        """Rename the entries of the skip list as the model's weights are renamed."""
        skips = self.dialect.skips
        skips.entries = mapper.apply_list(skips.entries)
        skips.__dict__.pop("_translated", None)

    def get_cache_scale_mapper(self) -> dict[str, str]:
        """How names of KV-cache scales in checkpoints end, and what that becomes."""
        from fpk.methods.config import CACHE_SCALE_SUFFIXES

        return dict(CACHE_SCALE_SUFFIXES)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; None for layers that the config does not concern (embeddings, lm_head, ...).

        Raises:
            ValueError: only some parts of a fused layer are skipped, or have another quantization than the others.
            NotImplementedError: fpk has no method for the layer's schemes, or for the KV cache's.
        """
        from fpk.methods.base import Linear, RoutedExperts, UnquantizedLinearMethod
        from fpk.methods.holders import is_attention
        from fpk.methods.kv_cache import Fp8KVCacheMethod

        if isinstance(layer, Linear) or (hasattr(layer, "input_size") and hasattr(layer, "output_size")):
            spec = self.dialect.spec(prefix)
            return UnquantizedLinearMethod() if spec is None else linear_method(spec, self.get_name())
        if isinstance(layer, RoutedExperts) or hasattr(layer, "moe_config"):
            method = self.experts_method(layer, prefix)
            method.per_expert_input_scale |= self.per_expert_input_scale
            return method
        if not is_attention(layer):
            return None
        if told := self.cache_refusal():
            raise NotImplementedError(f"{prefix}: expected a KV cache of FP8 with a fixed scale a layer, got {told}")
        return Fp8KVCacheMethod(self)

    def cache_refusal(self) -> str:
        """What the config wants the KV cache to be, if fpk cannot; "" otherwise."""
        return ""

    def experts_method(self, layer: Any, prefix: str) -> Any:
        from fpk.methods.moe import UnquantizedFusedMoEMethod

        spec = experts_spec(self.dialect, prefix)
        if spec is None:
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return experts_method(spec, self.get_name(), layer)

    def plan(self, layers: Mapping[str, Any]) -> "Plan":
        """A dry run: which method each layer would get, and which entry of the skip list named it."""
        rows = []
        for name, layer in layers.items():
            before = set(self.dialect.skips._matched)
            try:
                method = self.get_quant_method(layer, name)
                told = "none" if method is None else type(method).__name__
            except (NotImplementedError, RuntimeError, ValueError) as error:
                told = f"{type(error).__name__}: {error}"
            skips = self.dialect.skips
            skips._matched, matched = set(), skips._matched
            try:
                by = ", ".join(sorted(skips._matched)) if skips.match(name) else ""
                by = by or ", ".join(sorted(skips._matched))
            except ValueError as error:
                by = str(error)
            skips._matched = matched | before
            rows.append(PlanRow(name, told, by))
        return Plan(rows, self.dialect.unmatched())


@dataclass(frozen=True)
class PlanRow:
    """One layer: its method's name, or the error; the entry of the skip list that names it, or ""."""

    layer: str
    method: str
    skipped_by: str


@dataclass(frozen=True)
class Plan:
    """What a config does to the layers of a model; prints as a table."""

    rows: list[PlanRow]
    unmatched: list[str]

    def __str__(self) -> str:
        lines = [("layer", "method", "skipped by"), *((r.layer, r.method, r.skipped_by) for r in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(3)]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*text, *(f"skip entry {e!r} matches no layer" for e in self.unmatched)])


def experts_spec(dialect: Dialect, prefix: str) -> LayerSpec | None:
    """The schemes of an expert layer: those of its first expert's projections, which must agree.

    Raises:
        ValueError: they do not, or only some of them are skipped.
    """
    if getattr(dialect, "skips", None) is not None and dialect.skips.match(prefix):  # type: ignore[attr-defined]
        return None
    found: list[LayerSpec | None] = []
    for names in PROJECTIONS:
        specs = [dialect.spec(f"{prefix}.0.{name}") for name in names]
        if any(s != specs[0] for s in specs[1:]):
            told = ", ".join(f"{n}: {s}" for n, s in zip(names, specs, strict=True))
            raise ValueError(f"{prefix}: expected one quantization for an expert's projections, got {told}")
        found.append(specs[0])
    # a list that names w1 says nothing of gate_proj: the one that is another than what all layers have
    if found[0] == found[1]:
        return found[0]
    default = dialect.default()
    return next((s for s in found if s != default), default)


def linear_method(spec: LayerSpec, family: str) -> Any:
    """The method of a linear layer with this spec."""
    from fpk.formats import scheme_of
    from fpk.methods.config import Fp8Config
    from fpk.methods.fp8 import Fp8LinearMethod
    from fpk.methods.scheme import SchemeLinearMethod

    if spec.unsupported:
        raise NotImplementedError(f"{spec}: {spec.unsupported}")
    granularity = scheme_of(spec.weight).granularity
    if granularity.rows > 1:
        config = Fp8Config(True, weight_block_size=[granularity.rows, granularity.cols])
        config.scale_fmt = "ue8m0" if (spec.activation or "").endswith("_e8m0") else None
        return Fp8LinearMethod(config)
    if spec in (LayerSpec("fp8_tensor", "fp8_token"), LayerSpec("fp8_tensor", "fp8_tensor_static")):
        scheme = "static" if spec.activation == "fp8_tensor_static" else "dynamic"
        return Fp8LinearMethod(Fp8Config(True, activation_scheme=scheme))
    return SchemeLinearMethod(spec, family)


def experts_method(spec: LayerSpec, family: str, layer: Any) -> Any:
    """The method of an expert layer with this spec.

    Raises:
        NotImplementedError: fpk has no method for it.
    """
    from fpk.formats import scheme_of
    from fpk.methods.fp8_moe import Fp8ExpertsMethod
    from fpk.methods.mx_moe import Nvfp4ExpertsMethod, PackedExpertsMethod
    from fpk.methods.quark_moe import QuarkW8A8Int8MoEMethod

    if spec.unsupported:
        raise NotImplementedError(f"{spec}: {spec.unsupported}")
    scheme, moe, act = scheme_of(spec.weight), layer.moe_config, spec.activation or "none"
    is_static = act.endswith("_static")
    if scheme.name == "nvfp4":
        method: Any = Nvfp4ExpertsMethod(moe, "nvfp4" if act != "none" else "none")
        method.use_names(family)
        return method
    if scheme.product:
        packed = PackedExpertsMethod(moe, scheme.name, act.removesuffix("_static"), is_static)
        packed.use_names(family)
        return packed
    if scheme.name.startswith("fp8"):
        rows, cols = scheme.granularity.rows, scheme.granularity.cols
        block = [rows, cols] if rows > 1 else None
        known = ("fp8_token", "fp8_tensor_static") if block is None else (f"fp8_group{cols}", f"fp8_group{cols}_e8m0")
        if act in known:
            return Fp8ExpertsMethod(
                moe, is_static, block, scheme.name == "fp8_channel", powers_of_two=act.endswith("_e8m0")
            )  # fmt: skip
    elif scheme.name in ("int8_tensor", "int8_channel") and act in ("int8_token", "int8_tensor_static"):
        weight = {"qscheme": f"per_{scheme.name.removeprefix('int8_')}"}
        return QuarkW8A8Int8MoEMethod(weight, {"is_dynamic": not is_static}, moe)
    raise NotImplementedError(f"{getattr(layer, 'prefix', '')}: fpk has no method for experts of {spec}")


class ModelOptConfig(EngineConfig):
    """NVIDIA ModelOpt: `quant_algo` of config.json, or hf_quant_config.json."""

    name = "modelopt"

    def __init__(self, dialect: Dialect, cache: str = "") -> None:
        self._dialect, self._cache = dialect, cache

    def cache_refusal(self) -> str:
        return self._cache

    @property
    def dialect(self) -> Any:
        return self._dialect

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], fused: Mapping[str, Any] | None = None) -> "ModelOptConfig":
        """Read either form; errors as `dialect_of`."""
        dialect = dialect_of({"quant_method": cls.name} | dict(config), fused)
        inner = config.get("quantization")
        return cls(dialect, cache_told(config, [config, *([inner] if isinstance(inner, Mapping) else [])]))


class Mxfp4Config(ModelOptConfig):
    """gpt-oss: MXFP4 experts, everything else unquantized."""

    name = "mxfp4"

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        from fpk.methods.base import Linear, RoutedExperts, UnquantizedLinearMethod

        if isinstance(layer, RoutedExperts) or hasattr(layer, "moe_config"):
            return self.experts_method(layer, prefix)
        return UnquantizedLinearMethod() if isinstance(layer, Linear) or hasattr(layer, "output_size") else None

    def experts_method(self, layer: Any, prefix: str) -> Any:
        from fpk.methods.moe import UnquantizedFusedMoEMethod
        from fpk.methods.mx_moe import Mxfp4MoEMethod

        if self.dialect.skips.match(prefix):
            return UnquantizedFusedMoEMethod(layer.moe_config)
        return Mxfp4MoEMethod(layer.moe_config)


class Mxfp8Config(ModelOptConfig):
    """`quant_method: mxfp8`: e4m3 codes with a power of two for every 32 columns."""

    name = "mxfp8"

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        return []
