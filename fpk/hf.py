"""transformers' `from_pretrained` with fpk: importing this module registers the method "fpk" with transformers.

    from fpk.hf import FpkConfig
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=FpkConfig("fp8_channel", ignore=["lm_head"]))

The checkpoint is loaded unquantized, then its linear layers and experts are quantized one after the other.
"""

from collections.abc import Sequence
from typing import Any

from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fpk.api import parse_layer_scheme
from fpk.nn import quantize_

__all__ = ["FpkConfig", "FpkQuantizer"]


@register_quantization_config("fpk")
class FpkConfig(QuantizationConfigMixin):
    """What `fpk.quantize_` is told.

    Args:
        scheme: layer scheme, "weights:activations".
        ignore: layers to leave alone: names, wildcards, `re:` expressions.
        lm_head: quantize the output layer too.

    Raises:
        ValueError: no scheme, one with static activations, which need a calibration, or another argument.
    """

    def __init__(
        self, scheme: str = "fp8_channel", ignore: Sequence[str] = (), lm_head: bool = False, **others: Any
    ) -> None:
        unknown = sorted(others.keys() - {"quant_method"})  # transformers gives that when it reads a config
        if unknown:
            raise ValueError(f"FpkConfig: expected scheme, ignore and lm_head, got {', '.join(unknown)}")
        pair = parse_layer_scheme(scheme)
        if pair.static:
            raise ValueError(f"FpkConfig.scheme: expected dynamic activations, got {pair} (fpk.quantize_ takes those)")
        self.quant_method = "fpk"  # type: ignore[assignment]
        self.scheme, self.ignore, self.lm_head = str(pair), list(ignore), lm_head


@register_quantizer("fpk")
class FpkQuantizer(HfQuantizer):
    """Quantizes a model that transformers has loaded. The report of `quantize_` is the model's `fpk_report`."""

    requires_calibration = False
    requires_parameters_quantization = False

    def __init__(self, quantization_config: FpkConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if self.pre_quantized:
            raise ValueError("FpkQuantizer: expected an unquantized checkpoint (fpk.load_quantized reads others)")

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config: Any = self.quantization_config
        model.fpk_report = quantize_(model, config.scheme, config.ignore, lm_head=config.lm_head)
        return model

    def is_serializable(self) -> bool:
        """`save_pretrained` has no words for it: `fpk.save_quantized` has."""
        return False

    @property
    def is_trainable(self) -> bool:
        return False
