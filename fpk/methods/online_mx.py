"""Online linear methods with block-scaled weights: MXFP8, MXFP4 and NVFP4 from unquantized checkpoints."""

from typing import Any

import torch
from torch import Tensor

from fpk.api import Quantized, mm, quantize
from fpk.check import has_fp8_units
from fpk.formats import FP8, scheme_of
from fpk.methods.expert_weights import expect_packable
from fpk.methods.online import OnlineLinearMethod
from fpk.methods.parallel import is_row_sharded, reduce_weight_scale
from fpk.methods.parameter import name_of


class BlockScaledOnlineLinearMethod(OnlineLinearMethod):
    """Weights with a scale for every few columns; subclasses name the schemes.

    Parameters, afterwards: `weight` codes, `weight_scale` (N, K / group), and for NVFP4 `weight_scale_2` (1,), one for
    the whole layer, fused shards and ranks included.
    """

    weight_scheme = ""
    act: str | None = None

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        expect_packable(f"{name_of(layer)}.input_size_per_partition", self.weight_scheme, input_size_per_partition)
        super().create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip
        group = scheme_of(self.weight_scheme).granularity.cols
        if is_row_sharded(layer) and input_size_per_partition % group:
            raise ValueError(
                f"{name_of(layer)}.input_size_per_partition: expected ranks to share K in groups of {group}, "
                f"got {input_size_per_partition}"
            )

    def quantize_weight(self, layer: Any, weight: Tensor) -> dict[str, Tensor]:
        scheme = scheme_of(self.weight_scheme)
        made = quantize(weight, scheme)
        if made.global_scale is None:
            return {"weight": made.codes, "weight_scale": made.scale}
        over = reduce_weight_scale(layer, made.global_scale, True, f"{name_of(layer)}.weight_scale_2")
        if over is not made.global_scale:
            made = quantize(weight, scheme, global_scale=over)
        return {"weight": made.codes, "weight_scale": made.scale, "weight_scale_2": over.view(1)}

    def weight(self, layer: Any) -> Quantized:
        second = layer._parameters.get("weight_scale_2")
        return Quantized(
            layer.weight, layer.weight_scale, self.weight_scheme,
            global_scale=None if second is None else second.view(1, 1), check=False,
        )  # fmt: skip

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        rows = x if self.act is None or layer.weight_only else quantize(x, self.act, check=False)
        return mm(rows, self.weight(layer), bias, out_dtype=x.dtype)

    def moved(self, layer: Any) -> None:
        is_fp8 = self.act is not None and scheme_of(self.act).format.dtype in FP8
        layer.weight_only = is_fp8 and not has_fp8_units(layer.weight.device)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight(layer).dequantize(dtype)

    def scheme(self, layer: Any) -> str:
        return f"{self.weight_scheme}:{'none' if layer.weight_only else self.act or 'none'}"


class Mxfp8OnlineLinearMethod(BlockScaledOnlineLinearMethod):
    """MXFP8 weights and activations: e4m3 with a power of two for every 32 columns."""

    weight_scheme, act = "mxfp8_e4m3", "mxfp8_e4m3"


class Mxfp4OnlineLinearMethod(BlockScaledOnlineLinearMethod):
    """MXFP4 weights; activations as they are."""

    weight_scheme = "mxfp4"


class Nvfp4OnlineLinearMethod(BlockScaledOnlineLinearMethod):
    """NVFP4 weights; activations as they are."""

    weight_scheme = "nvfp4"
