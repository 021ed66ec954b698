"""Online methods: the checkpoint is unquantized, layers quantize as it streams in.

Weights are registered on the meta device and quantized as soon as a layer is complete (see loading.py). Where a scale's
group extends over several ranks, its maximum does too (see parallel.py), so every rank holds exactly its slice of what
a single device would hold.
"""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from fpk.check import FLOAT_INPUTS, expect_valid_scale, fp8_dtype, has_fp8_units
from fpk.kernels.quant.dequantize import dequantize
from fpk.kernels.quant.quantize_fp8_static import quantize_fp8_static
from fpk.kernels.quant.quantize_fp8_tensor import quantize_fp8_tensor
from fpk.kernels.quant.quantize_fp8_token import quantize_fp8_token
from fpk.kernels.quant.quantize_int8_static import quantize_int8_static
from fpk.kernels.quant.quantize_int8_token import quantize_int8_token
from fpk.methods.base import QuantizedLinearMethod, add_parameter, store_sizes
from fpk.methods.loading import Streaming
from fpk.methods.parallel import reduce_weight_scale
from fpk.methods.parameter import Weight, name_of, replace
from fpk.methods.products import fp8_product, int8_product


class OnlineLinearMethod(QuantizedLinearMethod):
    """Streams an unquantized weight in and quantizes it; subclasses say how, and what they keep."""

    uses_meta_device = True

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        cut = store_sizes(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        )
        device = torch.empty(0).device  # the default device at this moment
        self.check_device(layer, device)
        data = torch.empty(cut.N, cut.K, dtype=params_dtype, device="meta")
        weight = add_parameter(layer, "weight", data, Weight(cut), input_dim=1, output_dim=0, **extra_weight_attrs)
        layer.loading = Streaming(self, device)
        layer.loading.expect("weight", weight)
        self.moved(layer)

    def check_device(self, layer: nn.Module, device: torch.device) -> None:
        """Raise ValueError if the method cannot do what it promises on this device."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weight unless streaming has done so.

        Raises:
            ValueError: the weight is missing or incomplete, or has no finite scale.
        """
        loading: Streaming = layer.loading
        if self.leave_pre_processed(layer):
            if layer.weight.is_meta or layer.weight.dtype in FLOAT_INPUTS:
                raise RuntimeError(f"{name_of(layer)}.weight: expected quantized weights, got {layer.weight.dtype}")
            self.finish(layer)
            return
        if layer.weight.dtype in FLOAT_INPUTS and not layer.weight.is_meta:
            self.weights_arrived(layer, {"weight": layer.weight.data})  # somebody put it there directly
        elif layer.weight.is_meta or loading.pending:
            loading.expect_complete(layer)
            loading.finish(layer)  # nothing was missing and nothing came: a weight without elements

    def weights_arrived(self, layer: Any, weights: dict[str, Tensor]) -> None:
        """Quantize (N, K) weights into the layer's parameters, in place if it has them already."""
        for name, tensor in self.quantize_weight(layer, weights["weight"]).items():
            if name != "weight":
                expect_valid_scale(f"{name_of(layer)}.{name}", tensor)
            replace(layer, name, tensor)
            layer._parameters[name].fixed_dtype = True
        self.finish(layer)

    def finish(self, layer: Any) -> None:
        """Set what is not a parameter of the checkpoint."""
        if "input_scale" not in layer._parameters:
            layer.register_parameter("input_scale", None)
        self.moved(layer)

    @abstractmethod
    def quantize_weight(self, layer: Any, weight: Tensor) -> dict[str, Tensor]:
        """Parameters by name from a weight (N, K): codes and scales."""


class Fp8PerTensorOnlineLinearMethod(OnlineLinearMethod):
    """FP8 weights with one scale [1] for the whole layer, fused shards and ranks included; activations per token."""

    def quantize_weight(self, layer: Any, weight: Tensor) -> dict[str, Tensor]:
        dtype = fp8_dtype(weight.device)
        codes, local = quantize_fp8_tensor(weight, dtype=dtype)
        scale = reduce_weight_scale(layer, local, over_output=True, what=f"{name_of(layer)}.weight_scale")
        if scale is not local:
            codes = quantize_fp8_static(weight, scale, dtype=dtype)
        return {"weight": codes, "weight_scale": scale.view(1)}

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return fp8_product(x, layer.weight, layer.weight_scale.view(1, 1), bias)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(layer.weight, layer.weight_scale.view(1, 1), out_dtype=dtype)

    def scheme(self, layer: Any) -> str:
        return "fp8_tensor:fp8_token"


class Fp8PtpcOnlineLinearMethod(OnlineLinearMethod):
    """FP8 weights with a scale a row, [N, 1]; activations per token. Refuses GPUs without FP8 units."""

    def check_device(self, layer: nn.Module, device: torch.device) -> None:
        if not has_fp8_units(device):
            raise ValueError(
                f"{name_of(layer)}: Fp8PtpcOnlineLinearMethod quantizes activations and needs FP8 matrix units "
                f"(sm89 or newer, gfx942), {device} has none; fp8_tensor and fp8_block fall back to weights only"
            )

    def quantize_weight(self, layer: Any, weight: Tensor) -> dict[str, Tensor]:
        dtype = fp8_dtype(weight.device)
        codes, local = quantize_fp8_token(weight, dtype=dtype)
        scale = reduce_weight_scale(layer, local, over_output=False, what=f"{name_of(layer)}.weight_scale")
        if scale is not local:
            codes = quantize_fp8_static(weight, scale, rows=1, dtype=dtype)
        return {"weight": codes, "weight_scale": scale}

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return fp8_product(x, layer.weight, layer.weight_scale, bias)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(layer.weight, layer.weight_scale, rows=1, out_dtype=dtype)

    def scheme(self, layer: Any) -> str:
        return "fp8_channel:fp8_token"


class Int8PtpcOnlineLinearMethod(OnlineLinearMethod):
    """INT8 weights within +-127 with a scale a row, [N, 1]; activations per token, -128..127."""

    def quantize_weight(self, layer: Any, weight: Tensor) -> dict[str, Tensor]:
        codes, local = quantize_int8_token(weight, qmin=-127)
        scale = reduce_weight_scale(layer, local, over_output=False, what=f"{name_of(layer)}.weight_scale")
        if scale is not local:
            codes = quantize_int8_static(weight, scale, rows=1, qmin=-127)
        return {"weight": codes, "weight_scale": scale}

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        return int8_product(x, layer.weight, layer.weight_scale, bias)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(layer.weight, layer.weight_scale, rows=1, out_dtype=dtype)

    def scheme(self, layer: Any) -> str:
        return "int8_channel:int8_token"
