"""Experts with packed weights: OCP microscaling (MXFP4, MXFP6, MXFP8) and NVFP4.

Codes stay packed as the checkpoint has them: two FP4 in a byte, four FP6 in three. Ranks share I in whole groups of 32
(NVFP4: 16); where that does not come out even, the last rank's rest is codes of zero.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpk._shuffled import FORMATS, Shuffled, shuffle, shuffle_pays
from fpk.api import Quantized
from fpk.check import has_fp8_units
from fpk.formats import E4M3FN, E8M0, FP8, MX_BLOCK, NVFP4_BLOCK, scheme_of
from fpk.methods.expert_weights import ExpertMatrix, ExpertScalar, Sizes, Unit, expect_packable, unit_of
from fpk.methods.fp8_moe import MATRICES, add_input_scales, input_scales, present, static_scale
from fpk.methods.moe import ExpertWeights, SerializedMoEMethod, add_codes
from fpk.methods.parameter import MISSING, name_of, set_derived

Spec = Mapping[str, Any]

MX_NAMES = {"fp4": "mxfp4", "fp6_e3m2": "mxfp6_e3m2", "fp6_e2m3": "mxfp6_e2m3", "fp8_e4m3": "mxfp8_e4m3"}
"""Quark's element dtypes with a scale per 32, and the schemes that they are."""

PAIRS = {
    "mxfp4": ("none", "mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e4m3", "fp8_tensor", "fp8_token"),
    "mxfp6_e3m2": ("none", "mxfp6_e3m2", "mxfp8_e4m3", "fp8_tensor", "fp8_token"),
    "mxfp6_e2m3": ("none", "mxfp6_e2m3", "mxfp8_e4m3", "fp8_tensor", "fp8_token"),
    "mxfp8_e4m3": ("none", "mxfp8_e4m3"),
}
"""Weights and the activations that they go with."""


class PackedExpertsMethod(SerializedMoEMethod):
    """Packed weights with a scale for every few columns; subclasses name the schemes.

    Parameters:
        w13_weight, w2_weight: (E, 2I, packed H), (E, H, packed I) uint8; MXFP8 e4m3fn.
        w13_weight_scale, w2_weight_scale: (E, 2I, H / group), (E, H, I / group), uint8 or e4m3fn.
        w13_input_scale, w2_input_scale: (E,) fp32, afterwards () or (E,). Static FP8 activations.
        w13_bias, w2_bias: fp32 or None.

    On sm90 the weights of a bf16 model without quantized activations are kept in the layout of `fpk.shuffle` once they
    are processed: w13_weight, w2_weight (E, lines, 256) uint8, w13_weight_scale, w2_weight_scale (E, rows, 1) fp32.
    """

    bias_dtype = torch.float32

    def __init__(self, moe: Any, weight: str, act: str = "none", is_static: bool = False) -> None:
        super().__init__(moe)
        self.weight, self.act, self.is_static = weight, act, is_static
        self.group = scheme_of(weight).granularity.cols
        self.granule = self.group
        self.use_names("quark")

    def use_names(self, family: str) -> None:
        """Take the names of a family; compressed-tensors calls packed codes `w13_weight_packed`."""
        packed = family == "compressed-tensors" and scheme_of(self.weight).packed
        self.code_name = "weight_packed" if packed else "weight"

    @property
    def unit(self) -> Unit:
        """Elements of a row of codes."""
        return unit_of(self.weight)

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        self.check_sizes(layer, sizes)
        scheme = scheme_of(self.weight)
        dtype = scheme.format.dtype
        code = E4M3FN.nan_code if dtype in FP8 else 0
        add_codes(self, layer, sizes, attributes, dtype, self.unit, code, name=self.code_name)
        for matrix in MATRICES:
            shape = (sizes.experts, sizes.rows(matrix), Unit(1, self.group).of(sizes.cols(matrix)))
            is_e8m0 = scheme.scale_format == "e8m0"
            data = torch.full(shape, (E8M0 if is_e8m0 else E4M3FN).nan_code, dtype=torch.uint8)
            layout = ExpertMatrix(sizes, matrix, Unit(1, self.group))
            data = data if is_e8m0 else data.view(torch.float8_e4m3fn)
            # NaN until it is loaded, again on a second load
            self.expect(
                layer, f"{matrix}_weight_scale", data, layout, attributes, float(data.view(torch.uint8).flatten()[0]),
                quant_method="block" if is_e8m0 else "group",
            )  # fmt: skip
        if self.is_static:
            add_input_scales(self, layer, sizes, attributes)
        else:
            for matrix in MATRICES:
                layer.register_parameter(f"{matrix}_input_scale", None)

    def check_sizes(self, layer: Any, sizes: Sizes) -> None:
        what = name_of(layer)
        for name, size in (("hidden_size", sizes.hidden), ("intermediate_size_per_partition", sizes.inter)):
            expect_packable(f"{what}.{name}", self.weight, size)
        if sizes.ranks.size > 1 and sizes.inter % self.granule:
            raise ValueError(
                f"{what}.intermediate_size_per_partition: expected a multiple of {self.granule} for {self.weight} "
                f"shared by {sizes.ranks.size} ranks, got {sizes.inter}"
            )

    def convert(self, layer: Any, loaded: dict[str, Tensor]) -> dict[str, Tensor | None]:
        name, made = name_of(layer), {}
        for matrix in MATRICES:
            expect_scales(f"{name}.{matrix}_weight_scale", loaded[f"{matrix}_weight_scale"])
            if self.is_static:
                made[f"{matrix}_input_scale"] = static_scale(layer, matrix, loaded, self.per_expert_input_scale)
        for matrix in MATRICES:
            for last in (self.code_name, "weight_scale"):
                made[f"{matrix}_{last}"] = loaded[f"{matrix}_{last}"]
        return made  # type: ignore[return-value]

    def stored(self, layer: Any, made: dict[str, Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
        """Shuffled where that serves, without another copy of the codes."""
        for matrix in MATRICES:
            codes, name = made[f"{matrix}_{self.code_name}"], f"{matrix}_{self.code_name}"
            if codes is None or not self.shuffles(layer, codes.device):
                continue
            plain = self.plain(layer, matrix, codes, made[f"{matrix}_weight_scale"])
            del made[name], codes
            one = shuffle(plain)
            del plain
            yield name, one.packed
            made[f"{matrix}_weight_scale"] = one.row_scale
        yield from made.items()

    def shuffles(self, layer: Any, device: torch.device) -> bool:
        """Do products run faster with weights in the layout of `fpk.shuffle`, which serves bf16 tokens only?"""
        serves = scheme_of(self.weight).product in FORMATS and self.act == "none"
        return serves and layer.orig_dtype is torch.bfloat16 and shuffle_pays(device)

    def moved(self, layer: Any) -> None:
        is_fp8 = self.act.startswith("fp8") or self.act.startswith("mxfp8")
        layer.weight_only = is_fp8 and not has_fp8_units(layer._parameters[f"w13_{self.code_name}"].device)

    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        w13, w2 = (self.weights(layer, matrix) for matrix in MATRICES)
        if layer.weight_only:
            return ExpertWeights(w13, w2, **self.biases(layer))
        return ExpertWeights(w13, w2, self.act, **self.biases(layer), **input_scales(layer))

    def weights(self, layer: Any, matrix: str) -> Quantized | Shuffled:
        codes, scale = layer._parameters[f"{matrix}_{self.code_name}"], layer._parameters[f"{matrix}_weight_scale"]
        if scale.dtype is not torch.float32:
            return self.plain(layer, matrix, codes, scale)
        sizes, second = layer.experts, getattr(layer, f"{matrix}_global_scale", None)
        shape = torch.Size((sizes.experts, sizes.rows(matrix), sizes.cols(matrix)))
        return Shuffled(codes, scale, self.weight, "bf16", shape, second)

    def plain(self, layer: Any, matrix: str, codes: Tensor, scale: Any) -> Quantized:
        """Codes and scales as the checkpoint has them."""
        return Quantized(codes, scale, self.weight, check=False)

    def weights_for(self, layer: Any, x: Tensor) -> ExpertWeights:
        """Tokens in fp16 find shuffled weights put back for each call: their dtype was not the model's."""
        found = self.weights_of(layer)
        if x.dtype is torch.bfloat16 or not isinstance(found.w13, Shuffled):
            return found
        w13, w2 = (Quantized(**w.parts(), check=False) if isinstance(w, Shuffled) else w for w in (found.w13, found.w2))
        return replace(found, w13=w13, w2=w2)


def expect_scales(what: str, scales: Tensor) -> None:
    """Raise ValueError for scales that were never loaded: they hold the NaN of their format."""
    raw = scales.view(torch.uint8)
    nan = (raw & 0x7F) == E4M3FN.nan_code if scales.dtype is torch.float8_e4m3fn else raw == E8M0.nan_code
    missing = nan.flatten(1).any(1)
    if bool(missing.any()):
        experts = missing.nonzero().flatten().tolist()
        told = f"{', '.join(map(str, experts[:8]))}{', ...' if len(experts) > 8 else ''}"
        raise ValueError(
            f"{what}: {int(nan.sum())} of {nan.numel()} scales are NaN or missing from the checkpoint, experts {told}"
        )
    if scales.dtype is torch.float8_e4m3fn and bool((raw >= 0x81).any()):
        raise ValueError(f"{what}: expected scales that are not negative")


class QuarkOCP_MX_MoEMethod(PackedExpertsMethod):
    """MXFP4, MXFP6 or MXFP8 weights; activations as they are, microscaled, or FP8 by a static scale or per token.

    Args:
        weight_config, input_config: Quark's specs; input_config None for weights only.
        moe: the layer's `moe_config`.

    Raises:
        ValueError: weights that are not per group of 32 with power-of-two scales, or a pair that nobody writes.
        NotImplementedError: activations of another type, or microscaled by fixed scales.
    """

    def __init__(self, weight_config: Spec, input_config: Spec | None, moe: Any) -> None:
        what = "QuarkOCP_MX_MoEMethod"
        if weight_config.get("qscheme") != "per_group":
            raise ValueError(f"{what}.weight_config: expected per_group, got {weight_config.get('qscheme')!r}")
        weight = MX_NAMES.get(str(weight_config.get("dtype")), str(weight_config.get("dtype")))
        act, is_static = _activation(what, input_config)
        if act not in PAIRS.get(weight, ()) or weight_config.get("group_size", MX_BLOCK) != MX_BLOCK:
            known = "; ".join(f"{w} with {', '.join(a)}" for w, a in PAIRS.items())
            raise ValueError(f"{what}: {weight} weights do not go with {act} activations; expected one of: {known}")
        if act in MX_NAMES.values() and is_static:
            raise NotImplementedError(f"{what}: scales of {act} activations follow the data, got static ones")
        super().__init__(moe, weight, act, is_static)
        self.weight_config, self.input_config = weight_config, input_config


def _activation(what: str, spec: Spec | None) -> tuple[str, bool]:
    """Scheme of the activations, and whether its scale is fixed."""
    if spec is None:
        return "none", False
    dtype, is_static = str(spec.get("dtype")), not spec.get("is_dynamic")
    if dtype not in MX_NAMES:
        raise NotImplementedError(f"{what}.input_config: expected one of {', '.join(MX_NAMES)}, got {dtype!r}")
    if dtype != "fp8_e4m3" or spec.get("qscheme") == "per_group":
        return MX_NAMES[dtype], is_static
    return "fp8_tensor" if is_static else "fp8_token", is_static


class Mxfp4MoEMethod(PackedExpertsMethod):
    """MXFP4 experts as gpt-oss has them: activations as they are, biases in fp32.

    With activation "swigluoai", gate and up alternate in the rows of w13. Tensors of the checkpoint may have their
    blocks as a dimension of their own, (..., K / 32, 16).
    """

    def __init__(self, moe: Any) -> None:
        super().__init__(moe, "mxfp4")


class Nvfp4ExpertsMethod(PackedExpertsMethod):
    """NVFP4 weights: an e4m3 scale for every 16 columns and an fp32 one per shard; activations the same, or as they
    are.

    Parameters beside those of packed experts:
        w13_weight_scale_2, w2_weight_scale_2: (E, 2), (E,) fp32 multipliers.
        w13_input_scale_2, w2_input_scale_2: (E, 2), (E,) fp32 multipliers. With quantized activations.

    Gate and up keep their own second scales, and experts those of their activations: of one that has two, the larger.
    """

    def __init__(self, moe: Any, act: str = "nvfp4") -> None:
        super().__init__(moe, "nvfp4", act)

    def use_names(self, family: str) -> None:
        """Take the names of a family: Quark's, ModelOpt's (`input_scale`) or those of compressed-tensors, whose second
        scales divide."""
        super().use_names(family)
        self.over_name = "weight_global_scale" if family == "compressed-tensors" else "weight_scale_2"
        known = {"compressed-tensors": "input_global_scale", "modelopt": "input_scale"}
        self.input_name = known.get(family, "input_scale_2")
        self.divides = family == "compressed-tensors"

    @property
    def has_inputs(self) -> bool:
        return self.act == "nvfp4"

    def check_sizes(self, layer: Any, sizes: Sizes) -> None:
        super().check_sizes(layer, sizes)
        for name, size in (("hidden_size", sizes.hidden), ("intermediate_size_per_partition", sizes.inter)):
            if size % NVFP4_BLOCK:
                raise ValueError(f"{name_of(layer)}.{name}: expected a multiple of {NVFP4_BLOCK}, got {size}")

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        super().add_weights(layer, sizes, params_dtype, attributes)
        names = [self.over_name, *([self.input_name] if self.has_inputs else [])]
        for matrix in MATRICES:
            for name in names:
                one = ExpertScalar(sizes, matrix)
                data = torch.full(one.shape, MISSING, dtype=torch.float32)
                self.expect(layer, f"{matrix}_{name}", data, one, attributes, MISSING, quant_method="tensor")

    def convert(self, layer: Any, loaded: dict[str, Tensor]) -> dict[str, Tensor | None]:
        made, name = super().convert(layer, loaded), name_of(layer)
        for matrix in MATRICES:
            for last in (self.over_name, *([self.input_name] if self.has_inputs else [])):
                made[f"{matrix}_{last}"] = present(f"{name}.{matrix}_{last}", loaded[f"{matrix}_{last}"])
        return made

    def derive(self, layer: Any, parameters: Mapping[str, Tensor | None]) -> None:
        sizes = layer.experts
        for matrix in MATRICES:
            rows = self._multiplier(parameters[f"{matrix}_{self.over_name}"]).view(sizes.experts, -1, 1)
            if matrix == "w13" and sizes.gated:
                rows = rows.repeat(1, sizes.inter, 1) if sizes.interleaved else rows.repeat_interleave(sizes.inter, 1)
            set_derived(layer, f"{matrix}_global_scale", rows)
            if self.has_inputs:
                inputs = self._multiplier(parameters[f"{matrix}_{self.input_name}"]).view(sizes.experts, -1)
                set_derived(layer, f"{matrix}_static_scale", inputs.amax(1).view(-1, 1, 1))

    def _multiplier(self, scale: Tensor | None) -> Tensor:
        assert scale is not None
        return 1 / scale if self.divides else scale.data

    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        w13, w2 = (self.weights(layer, matrix) for matrix in MATRICES)
        if not self.has_inputs:
            return ExpertWeights(w13, w2, **self.biases(layer))
        return ExpertWeights(
            w13, w2, self.act, **self.biases(layer), input_scale13=layer.w13_static_scale,
            input_scale2=layer.w2_static_scale,
        )  # fmt: skip

    def plain(self, layer: Any, matrix: str, codes: Tensor, scale: Any) -> Quantized:
        second = getattr(layer, f"{matrix}_global_scale")
        return Quantized(codes, scale, self.weight, global_scale=second, check=False)


class QuarkNvfp4MoEMethod(Nvfp4ExpertsMethod):
    """NVFP4 weights and activations as Quark writes them; see `Nvfp4ExpertsMethod`.

    Args:
        weight_config, input_config: Quark's specs, the element's and that of the scale.
        moe: the layer's `moe_config`.
        quant_config: kept.
    """

    def __init__(self, weight_config: Any, input_config: Any, moe: Any, quant_config: Any = None) -> None:
        super().__init__(moe, "nvfp4" if input_config else "none")
        self.weight_config, self.input_config, self.quant_config = weight_config, input_config, quant_config
