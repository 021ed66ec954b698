"""Experts of Quark checkpoints in FP8, INT8 and INT4 x FP8.

`weight_config` and `input_config` are Quark's specs of tensors: dtype, qscheme, is_dynamic, symmetric, group_size.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fpk.api import Quantized
from fpk.check import has_fp8_units
from fpk.formats import encode_int8
from fpk.kernels.quant.dequantize import dequantize
from fpk.kernels.quant.quantize_int8_static import quantize_int8_static
from fpk.methods.expert_weights import ExpertMatrix, ExpertScalar, Sizes, Unit
from fpk.methods.fp8_moe import (
    MATRICES,
    Fp8ExpertsMethod,
    add_input_scales,
    input_scales,
    present,
    static_scale,
)
from fpk.methods.moe import ExpertWeights, SerializedMoEMethod, add_codes
from fpk.methods.parameter import MISSING, name_of, set_derived

Spec = Mapping[str, Any]

INT4_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight elements the nibbles of a word hold, from the lowest, with pack_method "reorder"."""


class QuarkW8A8Fp8MoEMethod(Fp8ExpertsMethod):
    """FP8 weights and activations: per tensor (dynamic ones per token), or per channel and per token.

    Raises:
        ValueError: other granularities, or static scales with weights per channel.
    """

    def __init__(self, weight_config: Spec, input_config: Spec, moe: Any) -> None:
        weight, inputs = scheme_of_spec(weight_config), scheme_of_spec(input_config)
        is_static = not input_config.get("is_dynamic")
        if (weight, inputs) not in (("tensor", "tensor"), ("channel", "channel")):
            raise ValueError(
                f"QuarkW8A8Fp8MoEMethod: expected weights and activations per tensor, or per channel and per token, "
                f"got {weight_config.get('qscheme')} and {input_config.get('qscheme')}"
            )
        if weight == "channel" and is_static:
            raise ValueError(
                "QuarkW8A8Fp8MoEMethod.input_config: expected dynamic activations with weights per channel"
            )
        super().__init__(moe, is_static, per_channel=weight == "channel")
        self.weight_config, self.input_config = weight_config, input_config


def scheme_of_spec(spec: Spec) -> str:
    """ "tensor", "channel" (a channel of an activation is a token), or what else the spec says."""
    scheme = str(spec.get("qscheme") or "per_tensor").removeprefix("per_")
    return "channel" if scheme == "token" else scheme


class QuarkW8A8Int8MoEMethod(SerializedMoEMethod):
    """INT8 weights per tensor or channel; activations by a static scale, or dynamic ones per token.

    Parameters, before and after processing:
        w13_weight, w2_weight: (E, 2I, H), (E, H, I) int8.
        w13_weight_scale, w2_weight_scale: per channel (E, 2I), (E, H) fp32, afterwards (E, 2I, 1), (E, H, 1); per
            tensor (E, 2), (E,), afterwards (E,).
        w13_weight_zero_point, w2_weight_zero_point: int8, of the scales' shape before processing.
        w13_input_scale, w2_input_scale: (E,) fp32, afterwards () or (E,). Static activations.
        w13_input_zero_point, w2_input_zero_point: (E, 2), (E,) int8.
        w13_bias, w2_bias: fp32 or None.

    Zero points count: value = (code - zero point) * scale. Those that are zero for all experts are deleted. Shards of
    w13 per tensor get one scale: those that differ, or have a zero point, are quantized anew. Static activations of
    experts that differ get the smallest range that holds them all.

    Raises:
        ValueError: weights that are neither per tensor nor per channel.
    """

    bias_dtype = torch.float32

    def __init__(self, weight_config: Spec, input_config: Spec, moe: Any) -> None:
        super().__init__(moe)
        self.weight_config, self.input_config = weight_config, input_config
        weight = scheme_of_spec(weight_config)
        if weight not in ("tensor", "channel"):
            raise ValueError(
                f"QuarkW8A8Int8MoEMethod.weight_config: expected per_tensor or per_channel, "
                f"got {weight_config.get('qscheme')!r}"
            )
        self.per_channel = weight == "channel"
        self.is_static = not input_config.get("is_dynamic")

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        add_codes(self, layer, sizes, attributes, torch.int8)
        kind = "channel" if self.per_channel else "tensor"
        for matrix in MATRICES:
            one = ExpertScalar(sizes, matrix)
            rows: Any = ExpertMatrix(sizes, matrix, unit=None, fill=1) if self.per_channel else one
            zeros: Any = ExpertMatrix(sizes, matrix, unit=None) if self.per_channel else one
            shape = (sizes.experts, sizes.rows(matrix)) if self.per_channel else one.shape
            scale = torch.full(shape, MISSING, dtype=torch.float32)
            self.expect(layer, f"{matrix}_weight_scale", scale, rows, attributes, MISSING, quant_method=kind)
            for name, size, layout in (("weight", shape, zeros), ("input", one.shape, one)):
                data = torch.zeros(size, dtype=torch.int8)
                self.expect(layer, f"{matrix}_{name}_zero_point", data, layout, attributes, 0, quant_method=kind)
        if self.is_static:
            add_input_scales(self, layer, sizes, attributes)
        else:
            for matrix in MATRICES:
                layer.register_parameter(f"{matrix}_input_scale", None)

    def may_stay(self, name: str) -> bool:
        return name.endswith("_zero_point")

    def convert(self, layer: Any, loaded: dict[str, Tensor]) -> dict[str, Tensor | None]:
        name, scales, zeros = name_of(layer), {}, {}
        made: dict[str, Tensor | None] = {}
        for matrix in MATRICES:
            scales[matrix] = present(f"{name}.{matrix}_weight_scale", loaded[f"{matrix}_weight_scale"])
            zeros[matrix] = _unless_zero(loaded.get(f"{matrix}_weight_zero_point"))
            made |= self.inputs(layer, matrix, loaded)
        for matrix in MATRICES:
            codes = loaded[f"{matrix}_weight"]
            scale = scales[matrix].unsqueeze(-1) if self.per_channel else scales[matrix]
            zero = zeros[matrix]
            if matrix == "w13" and not self.per_channel:
                scale, zero = one_scale(codes, scale, zero, layer.experts), None
            made[f"{matrix}_weight"], made[f"{matrix}_weight_scale"] = codes, scale
            made[f"{matrix}_weight_zero_point"] = zero
        return made

    def derive(self, layer: Any, parameters: Mapping[str, Tensor | None]) -> None:
        for matrix in MATRICES:
            codes, zero = parameters[f"{matrix}_weight"], parameters[f"{matrix}_weight_zero_point"]
            assert codes is not None
            set_derived(layer, f"{matrix}_zero_point", None if zero is None else _stacked(zero.data).to(torch.int32))
            asymmetric = parameters[f"{matrix}_input_zero_point"] is not None
            set_derived(layer, f"{matrix}_colsum", codes.data.sum(2, dtype=torch.int32) if asymmetric else None)

    def inputs(self, layer: Any, matrix: str, loaded: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """The static scale of all experts and its zero point, () or (E,); None for dynamic or symmetric ones."""
        zero = _unless_zero(loaded.get(f"{matrix}_input_zero_point"))
        name = f"{matrix}_input_zero_point"
        if not self.is_static:
            if zero is not None:
                raise ValueError(f"{name_of(layer)}.{name}: expected zeros with dynamic activations, got others")
            return {name: None}
        if zero is None:
            each = self.per_expert_input_scale
            return {f"{matrix}_input_scale": static_scale(layer, matrix, loaded, each), name: None}
        scale = static_scale(layer, matrix, loaded, True)[:, None]
        zero = zero.float().view(scale.shape[0], -1)
        over: Any = (1,) if self.per_expert_input_scale else (0, 1)
        low, high = (scale * (-128 - zero)).amin(over), (scale * (127 - zero)).amax(over)
        same = (scale.amin(over) == scale.amax(over)) & (zero.amin(over) == zero.amax(over))
        common = torch.where(same, scale.amax(over), (high - low) / 255)
        shift = torch.where(same, zero.amax(over), encode_int8(-128 - low / common).float())
        return {f"{matrix}_input_scale": common, name: shift.to(torch.int8)}

    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        w13, w2 = (self.weights(layer, matrix) for matrix in MATRICES)
        options = tuple(
            (f"{argument}{matrix[1:]}", value)
            for matrix in MATRICES
            if (zero := layer._parameters[f"{matrix}_input_zero_point"]) is not None
            for argument, value in (
                ("zero_point", zero.view((1, 1) if zero.dim() == 0 else (-1, 1, 1))),
                ("colsum", getattr(layer, f"{matrix}_colsum")),
            )
        )
        act = "int8_tensor" if self.is_static else "int8_token"
        return ExpertWeights(w13, w2, act, options=options, **self.biases(layer), **input_scales(layer))

    def weights(self, layer: Any, matrix: str) -> Quantized:
        scale = layer._parameters[f"{matrix}_weight_scale"]
        return Quantized(
            layer._parameters[f"{matrix}_weight"], scale.view(scale.shape[0], -1, 1),
            "int8_channel" if self.per_channel else "int8_tensor", zero_point=getattr(layer, f"{matrix}_zero_point"),
            check=False,
        )  # fmt: skip


def _unless_zero(zero_point: Tensor | None) -> Tensor | None:
    return zero_point if zero_point is not None and bool((zero_point != 0).any()) else None


def _stacked(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1, 1)


def one_scale(codes: Tensor, scales: Tensor, zeros: Tensor | None, sizes: Sizes) -> Tensor:
    """Bring the shards of each expert to one symmetric scale (E,), in place: the larger one, or with zero points that
    of the largest value. Shards that have it already stay as they are."""
    made = scales.amax(1)
    for e in range(codes.shape[0]):
        zero = None if zeros is None or not bool((zeros[e] != 0).any()) else zeros[e].to(torch.int32)
        if zero is None and bool((scales[e] == made[e]).all()):
            continue
        parts = [
            codes[e, i :: sizes.shards] if sizes.interleaved else codes[e].narrow(0, i * sizes.inter, sizes.inter)
            for i in range(sizes.shards)
        ]
        values = [
            dequantize(part, scales[e, i].view(1, 1), None if zero is None else zero[i].view(1, 1))
            for i, part in enumerate(parts)
        ]
        if zero is not None:
            largest = torch.stack([v.abs().amax() for v in values]).amax()
            made[e] = torch.clamp(largest, min=1e-10) / largest.new_tensor(127.0)
        for i, (part, value) in enumerate(zip(parts, values, strict=True)):
            if zero is not None or scales[e, i] != made[e]:
                part.copy_(quantize_int8_static(value, made[e].view(1, 1)))
    return made


class QuarkW4A8Fp8MoEMethod(SerializedMoEMethod):
    """INT4 weights with a scale a row and one a shard; FP8 activations per token.

    Parameters, before and after processing:
        w13_weight, w2_weight: (E, 2I, H / 8), (E, H, I / 8) uint32 of eight codes; afterwards uint8 of two, the lower
            nibble first.
        w13_weight_scale, w2_weight_scale: (E, 2), (E,) fp32.
        w13_weight_scale_2, w2_weight_scale_2: (E, 2I), (E, H) fp32.

    value = code * weight_scale_2[row] * weight_scale[shard].

    Args:
        pack_method: "reorder", or "order" for codes that stand in their order.

    Raises:
        ValueError: H or I that eight does not divide, another pack_method.
    """

    granule = 8

    def __init__(self, weight_config: Any, input_config: Spec, moe: Any, pack_method: str = "reorder") -> None:
        super().__init__(moe)
        if pack_method not in ("reorder", "order"):
            raise ValueError(f"QuarkW4A8Fp8MoEMethod.pack_method: expected reorder or order, got {pack_method!r}")
        self.weight_config, self.input_config = weight_config, input_config
        self.order = INT4_ORDER if pack_method == "reorder" else tuple(range(8))

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        for name, size in (("hidden_size", sizes.hidden), ("intermediate_size_per_partition", sizes.inter)):
            if size % 8:
                raise ValueError(f"{name_of(layer)}.{name}: expected a multiple of 8 for packed INT4, got {size}")
        add_codes(self, layer, sizes, attributes, torch.uint32, Unit(1, 8))
        for matrix in MATRICES:
            one = ExpertScalar(sizes, matrix)
            scale = torch.full(one.shape, MISSING, dtype=torch.float32)
            self.expect(layer, f"{matrix}_weight_scale", scale, one, attributes, MISSING, quant_method="tensor")
            scale = torch.full((sizes.experts, sizes.rows(matrix)), MISSING, dtype=torch.float32)
            rows = ExpertMatrix(sizes, matrix, unit=None, fill=1)
            self.expect(layer, f"{matrix}_weight_scale_2", scale, rows, attributes, MISSING, quant_method="channel")
            layer.register_parameter(f"{matrix}_input_scale", None)

    def convert(self, layer: Any, loaded: dict[str, Tensor]) -> dict[str, Tensor | None]:
        made: dict[str, Tensor | None] = {
            n: present(f"{name_of(layer)}.{n}", loaded[n]) for n in loaded if "scale" in n
        }
        for matrix in MATRICES:
            codes = loaded[f"{matrix}_weight"]
            made[f"{matrix}_weight"] = torch.stack([bytes_of(words, self.order) for words in codes])
        return made

    def derive(self, layer: Any, parameters: Mapping[str, Tensor | None]) -> None:
        sizes = layer.experts
        for matrix in MATRICES:
            rows, shard = parameters[f"{matrix}_weight_scale_2"], parameters[f"{matrix}_weight_scale"]
            assert rows is not None and shard is not None
            shard = shard.data.view(sizes.experts, -1)
            if sizes.interleaved and matrix == "w13":
                each = shard.repeat(1, sizes.inter)
            else:
                each = shard.repeat_interleave(rows.shape[1] // shard.shape[1], 1)
            set_derived(layer, f"{matrix}_scale", (rows.data * each).unsqueeze(-1))

    def moved(self, layer: Any) -> None:
        layer.weight_only = not has_fp8_units(layer.w13_weight.device)

    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        w13, w2 = (self.weights(layer, matrix) for matrix in MATRICES)
        return ExpertWeights(w13, w2, "none" if layer.weight_only else "fp8_token", **self.biases(layer))

    def weights(self, layer: Any, matrix: str) -> Quantized:
        width = -(-layer.experts.cols(matrix) // 16) * 16  # a row is one group
        codes, scale = layer._parameters[f"{matrix}_weight"], getattr(layer, f"{matrix}_scale")
        return Quantized(codes, scale, f"int4_group{width}", check=False)


def bytes_of(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """Words of eight INT4 codes (N, K / 8), whose nibble i is element order[i], as bytes of two (N, K / 2)."""
    raw = words.contiguous().view(torch.uint8)
    nibbles = torch.stack([raw & 15, raw >> 4], -1).flatten(-2).unflatten(-1, (-1, 8))
    codes = nibbles[..., [order.index(i) for i in range(8)]].flatten(-2)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
