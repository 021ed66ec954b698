"""Online methods of expert layers: the checkpoint is unquantized, a layer quantizes as it streams in.

w13 and w2 are registered on the meta device and quantized as soon as all experts are there (see loading.py). Scales
whose groups extend over several ranks' parts of I are the maximum over the ranks (see parallel.py).
"""

from typing import Any

import torch
from torch import Tensor

from fpk.api import Quantized, quantize
from fpk.check import FLOAT_INPUTS, fp8_dtype, has_fp8_units
from fpk.formats import FP8, INT8, scheme_of
from fpk.kernels.quant.amax import amax
from fpk.kernels.quant.quantize_fp8_static import quantize_fp8_static
from fpk.kernels.quant.quantize_int8_static import quantize_int8_static
from fpk.methods.expert_weights import ExpertMatrix, Sizes, expect_packable
from fpk.methods.loading import Loading, Streaming
from fpk.methods.moe import ExpertWeights, FusedMoEMethod, add_expert_parameter
from fpk.methods.online import expect_finite_scale
from fpk.methods.parallel import reduce_max
from fpk.methods.parameter import adopt, name_of, replace

MATRICES = ("w13", "w2")


class OnlineMoEMethod(FusedMoEMethod):
    """Streams unquantized experts in and quantizes them by `weight_scheme`; subclasses name the schemes.

    Parameters, afterwards: `w13_weight`, `w2_weight` codes, `w13_weight_scale`, `w2_weight_scale` (`_inv` with blocks),
    and `w13_weight_scale_2`, `w2_weight_scale_2` (E,) where the scheme has a second scale; input scales are None.

    Args:
        layer: with `moe_config`.

    Raises:
        ValueError: the method needs a matrix unit that the default device has not.
    """

    uses_meta_device = True
    weight_scheme = ""
    act = "none"
    needs_fp8_units = False
    suffix = "weight_scale"

    def __init__(self, *, layer: Any) -> None:
        super().__init__(layer.moe_config)
        device = torch.empty(0).device  # the default device at this moment
        if self.needs_fp8_units and not has_fp8_units(device):
            raise ValueError(
                f"{name_of(layer)}: {type(self).__name__} quantizes activations and needs FP8 matrix units (sm89 or "
                f"newer, gfx942), {device} has none; fp8_tensor and fp8_block fall back to weights only"
            )

    def make_loading(self, layer: Any) -> Loading:
        return Streaming(self, torch.empty(0).device)

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        self.check_sizes(layer, sizes)
        for matrix in MATRICES:
            shape = (sizes.experts, sizes.rows(matrix), sizes.cols(matrix))
            data = torch.empty(shape, dtype=params_dtype, device="meta")
            parameter = add_expert_parameter(layer, f"{matrix}_weight", data, ExpertMatrix(sizes, matrix), **attributes)
            layer.loading.expect(f"{matrix}_weight", parameter)

    def check_sizes(self, layer: Any, sizes: Sizes) -> None:
        """Raise ValueError for sizes that the format cannot have."""
        for name, size in (("hidden_size", sizes.hidden), ("intermediate_size_per_partition", sizes.inter)):
            expect_packable(f"{name_of(layer)}.{name}", self.weight_scheme, size)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Quantize the weights unless streaming has done so.

        Raises:
            ValueError: a weight is missing or incomplete, or has no finite scale.
        """
        loading: Streaming = layer.loading
        weights = {n: layer._parameters[n] for n in loading.templates}
        plain = [n for n, w in weights.items() if not w.is_meta and w.dtype in FLOAT_INPUTS]
        if self.leave_pre_processed(layer):
            if plain or any(w.is_meta for w in weights.values()):
                raise RuntimeError(f"{name_of(layer)}: expected quantized weights, got {layer.w13_weight.dtype} ones")
            self.finish(layer)
            return
        if len(plain) == len(weights):
            self.weights_arrived(layer, {n: w.data for n, w in weights.items()})  # somebody put them there directly
        elif any(w.is_meta for w in weights.values()) or loading.pending:
            loading.expect_complete(layer)
            loading.finish(layer)
        self.finish_biases(layer)

    def weights_arrived(self, layer: Any, weights: dict[str, Tensor]) -> None:
        """Quantize w13 and w2 into the layer's parameters, in place if it has them already."""
        made: dict[str, Tensor] = {}
        for matrix in MATRICES:
            quantized = self.quantize_weight(layer, matrix, weights.pop(f"{matrix}_weight"))
            made[f"{matrix}_weight"] = quantized.codes
            made[f"{matrix}_{self.suffix}"] = self.stored_scale(quantized)
            if quantized.global_scale is not None:
                made[f"{matrix}_weight_scale_2"] = quantized.global_scale.view(-1)
        for name in made.keys() - {f"{matrix}_weight" for matrix in MATRICES}:
            expect_finite_scale(f"{name_of(layer)}.{name}", made[name])
        for name, tensor in made.items():
            replace(layer, name, tensor)
            layer._parameters[name].fixed_dtype = True
        self.finish(layer)

    def is_processed(self, layer: Any, state: dict[str, Tensor]) -> bool:
        return layer.w13_weight.is_meta and "w13_weight" in state and state["w13_weight"].dtype not in FLOAT_INPUTS

    def adopt(self, layer: Any, state: dict[str, Tensor]) -> None:
        adopt(layer, {n: v for n, v in state.items() if not n.endswith("_bias")}, layer.loading.device)
        self.finish(layer)

    def finish(self, layer: Any) -> None:
        """Set what is not a parameter of the checkpoint."""
        for matrix in MATRICES:
            if f"{matrix}_input_scale" not in layer._parameters:
                layer.register_parameter(f"{matrix}_input_scale", None)
        self.moved(layer)

    def quantize_weight(self, layer: Any, matrix: str, weight: Tensor) -> Quantized:
        """Codes and scales of a stack of matrices, the same as slices of a single device's."""
        scheme, ranks = scheme_of(self.weight_scheme), layer.experts.ranks
        options: dict[str, Any] = {"qmin": -127} if scheme.format is INT8 else {}
        rows, cols = scheme.granularity.rows, scheme.granularity.cols
        # a group that is a whole row of w2, or all of a matrix, extends over the ranks' parts of I
        shared = ranks.size > 1 and cols < 0 and (rows < 0 or matrix == "w2")
        what = f"{name_of(layer)}.{matrix}_{self.suffix}"
        if "global_scale" in scheme.outputs:
            scale = quantize(weight, scheme).global_scale
            assert scale is not None
            return quantize(weight, scheme, global_scale=reduce_max(scale, ranks.size, ranks.group, what))
        if not shared:
            return quantize(weight, scheme, **options)
        local = quantize(weight, scheme, **options).scale if rows > 0 else self.tensor_scale(weight, options)
        scale = reduce_max(local, ranks.size, ranks.group, what)
        if scheme.format is INT8:
            codes = quantize_int8_static(weight, scale, rows=rows, **options)
        else:
            codes = quantize_fp8_static(weight, scale, rows=rows, dtype=fp8_dtype(weight.device))
        return Quantized(codes, scale, scheme.name, check=False)

    def tensor_scale(self, weight: Tensor, options: dict[str, Any]) -> Tensor:
        """The scale that a tensor of this amax has: quantizing the maximum alone costs one row."""
        return quantize(amax(weight), scheme_of(self.weight_scheme), **options).scale

    def stored_scale(self, quantized: Quantized) -> Tensor:
        granularity = quantized.granularity
        return quantized.scale.view(-1) if granularity.rows < 0 else quantized.scale

    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        w13, w2 = (self.weights(layer, matrix) for matrix in MATRICES)
        return ExpertWeights(w13, w2, "none" if layer.weight_only else self.act, **self.biases(layer))

    def weights(self, layer: Any, matrix: str) -> Quantized:
        scale = layer._parameters[f"{matrix}_{self.suffix}"]
        second = layer._parameters.get(f"{matrix}_weight_scale_2")
        return Quantized(
            layer._parameters[f"{matrix}_weight"], scale.view(-1, 1, 1) if scale.dim() == 1 else scale,
            self.weight_scheme, global_scale=None if second is None else second.view(-1, 1, 1), check=False,
        )  # fmt: skip

    def moved(self, layer: Any) -> None:
        is_fp8 = scheme_of(self.weight_scheme).format.dtype in FP8
        layer.weight_only = is_fp8 and not has_fp8_units(layer.w13_weight.device)


class Fp8PerTensorOnlineMoEMethod(OnlineMoEMethod):
    """FP8 weights with one scale an expert, (E,), gate and up together; activations per token."""

    weight_scheme, act = "fp8_tensor", "fp8_token"


class Fp8PtpcOnlineMoEMethod(OnlineMoEMethod):
    """FP8 weights with a scale a row, (E, N, 1); activations per token. Refuses GPUs without FP8 units."""

    weight_scheme, act = "fp8_channel", "fp8_token"
    needs_fp8_units = True


class Fp8PerBlockOnlineMoEMethod(OnlineMoEMethod):
    """FP8 weights with a scale per 128 x 128 block; activations per group of 128.

    H and I are rounded up to 128: the padding is zeros, x is padded and the output cut. Blocks belong to one rank.
    """

    weight_scheme, act = "fp8_block128", "fp8_group128"
    suffix = "weight_scale_inv"
    slack = 128

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        super().add_weights(layer, sizes, params_dtype, attributes)
        layer.weight_block_size = [128, 128]


class Int8PtpcOnlineMoEMethod(OnlineMoEMethod):
    """INT8 weights within +-127 with a scale a row, (E, N, 1); activations per token."""

    weight_scheme, act = "int8_channel", "int8_token"


class Int8WeightOnlyOnlineMoEMethod(OnlineMoEMethod):
    """INT8 weights within +-127 with a scale a row, (E, N, 1); activations as they are."""

    weight_scheme = "int8_channel"


class Mxfp8OnlineMoEMethod(OnlineMoEMethod):
    """MXFP8 weights and activations: e4m3 with a power of two for every 32 columns."""

    weight_scheme, act = "mxfp8_e4m3", "mxfp8_e4m3"
    granule = 32


class Mxfp4OnlineMoEMethod(OnlineMoEMethod):
    """MXFP4 weights, packed, with a power of two for every 32 columns; activations as they are."""

    weight_scheme = "mxfp4"
    granule = 32


class Nvfp4OnlineMoEMethod(OnlineMoEMethod):
    """NVFP4 weights, packed, with an e4m3 scale for every 16 columns and an fp32 scale (E,) an expert; activations as
    they are."""

    weight_scheme = "nvfp4"
    granule = 16
