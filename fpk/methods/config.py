"""Quantization configs: which method a layer gets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fpk import methods
from fpk.methods._families import names
from fpk.methods._known import expect_scale_format, method_keys
from fpk.methods.base import Linear, LinearMethod, RoutedExperts, UnquantizedLinearMethod
from fpk.methods.fp8 import Fp8LinearMethod
from fpk.methods.holders import is_attention
from fpk.methods.online import Fp8PerTensorOnlineLinearMethod
from fpk.methods.skip import is_layer_skipped

ACTIVATION_SCHEMES = ("static", "dynamic")

CACHE_SCALE_SUFFIXES = {
    ".k_proj.output_scale": ".attn.k_scale",
    ".v_proj.output_scale": ".attn.v_scale",
    ".q_proj.output_scale": ".attn.q_scale",
    ".self_attn.prob_output_scale": ".self_attn.attn.prob_scale",
}
"""Ends of checkpoint names of KV-cache scales, and what layers call them."""


class QuantizationConfig:
    """What configs share: a skip list, names of fused projections, and a record of the entries that matched.

    Attributes:
        ignored_layers: layers that stay unquantized; see `is_layer_skipped`.
        ignored_layers_match_mode: "exact", "substring" or "suffix"; set by model code.
        packed_modules_mapping: fused projections of the model and their parts; set by model code.
    """

    def __init__(self, ignored_layers: Iterable[str] | None = None) -> None:
        listed = ignored_layers if isinstance(ignored_layers, str) else list(ignored_layers or [])
        self.ignored_layers = names("ignored_layers", listed)
        self.ignored_layers_match_mode = "exact"
        self.packed_modules_mapping: dict[str, list[str]] = {}
        self._matched: set[str] = set()

    def is_skipped(self, prefix: str) -> bool:
        """Is the layer on the skip list? Raises ValueError if only parts of a fused layer are."""
        return is_layer_skipped(
            prefix, self.ignored_layers, self.packed_modules_mapping, self.ignored_layers_match_mode, self._matched
        )

    def unmatched_layers(self) -> list[str]:
        """Entries of the skip list that have matched no layer yet: after a model is built, likely typing errors.

        Entries for layers that are never quantized (`lm_head`) are among them unless the model asked for a method.
        """
        return [e for e in self.ignored_layers if e not in self._matched]

    def apply_vllm_mapper(self, mapper: Any) -> None:
        """Rename the entries of the skip list as the model's weights are renamed.

        Args:
            mapper: with `apply_list(list of names) -> list of names`.
        """
        self.ignored_layers = mapper.apply_list(self.ignored_layers)

    @staticmethod
    def get_from_keys(config: Mapping[str, Any], keys: Sequence[str]) -> Any:
        """The value of the first of `keys` that the config has; ValueError naming the keys if it has none."""
        for key in keys:
            if key in config:
                return config[key]
        raise ValueError(f"quantization config: expected one of the keys {list(keys)}, got {sorted(config)}")


class Fp8Config(QuantizationConfig):
    """FP8: serialized checkpoints with scales per tensor or block, or unquantized ones that layers quantize on loading.

    Args:
        is_checkpoint_fp8_serialized: whether weights in the checkpoint are FP8 already.
        activation_scheme: "dynamic" (per token; per group with block weights) or "static" (scales in the checkpoint).
        ignored_layers: names of layers that stay unquantized.
        weight_block_size: [rows, columns] that share a scale, or None for one a tensor.
        store_dtype: "mxfp4" gives expert layers MXFP4 weights.

    Raises:
        ValueError: unknown scheme; block size without a serialized checkpoint, not two numbers, or not dynamic.
    """

    def __init__(
        self,
        is_checkpoint_fp8_serialized: bool = False,
        activation_scheme: str = "dynamic",
        ignored_layers: Iterable[str] | None = None,
        weight_block_size: Sequence[int] | None = None,
        store_dtype: str | None = None,
    ) -> None:
        super().__init__(ignored_layers)
        if activation_scheme not in ACTIVATION_SCHEMES:
            raise ValueError(f"activation_scheme: expected static or dynamic, got {activation_scheme!r}")
        if weight_block_size is not None:
            if not is_checkpoint_fp8_serialized:
                raise ValueError(
                    f"weight_block_size: expected None unless the checkpoint is FP8 already, got {weight_block_size}"
                )
            if not isinstance(weight_block_size, (list, tuple)):
                raise ValueError(f"weight_block_size: expected [rows, columns], got {weight_block_size!r:.80}")
            if len(weight_block_size) != 2:
                raise ValueError(
                    f"weight_block_size: expected 2 sizes (rows, columns), got {len(weight_block_size)}: "
                    f"{weight_block_size}"
                )
            if activation_scheme != "dynamic":
                raise ValueError(
                    f"weight_block_size: expected dynamic activations with block scales, got {activation_scheme!r}"
                )
            if not all(type(n) is int and n > 0 for n in weight_block_size):
                raise ValueError(f"weight_block_size: expected positive sizes, got {weight_block_size}")
        if store_dtype not in (None, "mxfp4"):
            raise ValueError(f"store_dtype: expected mxfp4 or None, got {store_dtype!r:.80}")
        self.is_checkpoint_fp8_serialized = is_checkpoint_fp8_serialized
        self.activation_scheme = activation_scheme
        self.weight_block_size = None if weight_block_size is None else list(weight_block_size)
        self.store_dtype = store_dtype
        self.is_scale_e8m0 = False
        """Whether block scales are stored as e8m0; set by model code."""
        self.scale_fmt: str | None = None
        """"ue8m0": the scales of activations by group are powers of two."""
        self.per_expert_input_scale = False
        """Whether experts with static activations keep a scale each; see `FusedMoEMethod`."""
        self.use_deep_gemm: bool | None = None
        """Accepted, without effect."""

    @classmethod
    def get_name(cls) -> str:
        return "fp8"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @classmethod
    def get_config_filenames(cls) -> list[str]:
        """Files beside config.json that hold the config: none."""
        return []

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Fp8Config":
        """Read the `quantization_config` of a checkpoint.

        Raises:
            ValueError: `quant_method` or `activation_scheme` is missing, or a value does not fit.
        """
        quant_method = cls.get_from_keys(config, ["quant_method"])
        if not isinstance(quant_method, str):
            raise ValueError(f"quant_method: expected a name, got {quant_method!r:.80}")
        activation_scheme = cls.get_from_keys(config, ["activation_scheme"])
        made = cls(
            is_checkpoint_fp8_serialized="fp8" in quant_method,
            activation_scheme=activation_scheme,
            ignored_layers=config.get("ignored_layers") or config.get("modules_to_not_convert"),
            weight_block_size=config.get("weight_block_size"),
            store_dtype=config.get("store_dtype"),
        )
        made.scale_fmt = expect_scale_format("scale_fmt", config.get("scale_fmt"))
        method_keys(config, "fp8")
        return made

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """The method of a layer; None for layers that FP8 does not concern (embeddings, lm_head, ...).

        fpk's holders are known by their type, an engine's layers by the sizes or the `moe_config` that they have.

        Raises:
            ValueError: only some parts of a fused layer are ignored.
        """
        if isinstance(layer, Linear) or (hasattr(layer, "input_size") and hasattr(layer, "output_size")):
            return self._linear_method(prefix)
        if isinstance(layer, RoutedExperts) or hasattr(layer, "moe_config"):
            return self._experts_method(layer, prefix)
        if is_attention(layer):
            return _method("Fp8KVCacheMethod")(self)
        return None

    def _linear_method(self, prefix: str) -> LinearMethod:
        if self.is_skipped(prefix):
            return UnquantizedLinearMethod()
        return Fp8LinearMethod(self) if self.is_checkpoint_fp8_serialized else Fp8PerTensorOnlineLinearMethod()

    def _experts_method(self, layer: RoutedExperts, prefix: str) -> Any:
        if self.is_skipped(prefix):
            return _method("UnquantizedFusedMoEMethod")(layer.moe_config)
        if self.store_dtype == "mxfp4":
            return _method("Mxfp4MoEMethod")(layer.moe_config)
        if self.is_checkpoint_fp8_serialized:
            return _method("Fp8MoEMethod")(self, layer)
        return _method("Fp8PerTensorOnlineMoEMethod")(layer=layer)

    def get_cache_scale_mapper(self) -> dict[str, str]:
        """How names of KV-cache scales in checkpoints end, and what that becomes."""
        return dict(CACHE_SCALE_SUFFIXES)

    def __repr__(self) -> str:
        parts = [f"serialized={self.is_checkpoint_fp8_serialized}", f"activations={self.activation_scheme}"]
        parts += [f"block={self.weight_block_size}"] if self.weight_block_size else []
        parts += [f"store={self.store_dtype}"] if self.store_dtype else []
        return f"Fp8Config({', '.join(parts)}, {len(self.ignored_layers)} ignored)"


def _method(name: str) -> Any:
    """A method class by name: experts and KV caches are looked up when asked for, so that linear layers do without."""
    if not hasattr(methods, name):
        raise NotImplementedError(f"Fp8Config: fpk.methods has no {name}")
    return getattr(methods, name)
