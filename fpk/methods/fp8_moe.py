"""Experts of serialized FP8 checkpoints: e4m3 weights with scales per tensor or per block.

Gate and up arrive with a scale each. Per tensor an expert keeps the larger one, and the other shard is quantized anew
from its fp32 values; per block every shard keeps its own grid. Where ranks cut inside a block, its scale is repeated
for smaller blocks that begin where the rank's part does; nothing is lost by that.
"""

from typing import Any

import torch
from torch import Tensor

from fpk.api import Quantized
from fpk.check import expect_valid_scale, fp8_dtype, has_fp8_units
from fpk.formats import E4M3FN, per_block
from fpk.methods.expert_weights import ExpertBlocks, ExpertMatrix, ExpertScalar, Sizes
from fpk.methods.fp8 import in_format, requantize
from fpk.methods.moe import ExpertWeights, SerializedMoEMethod, add_codes
from fpk.methods.parameter import MISSING, Blocks, Cut, name_of

MATRICES = ("w13", "w2")


class Fp8ExpertsMethod(SerializedMoEMethod):
    """FP8 experts of a serialized checkpoint, weights scaled per tensor, per channel or per block.

    Parameters, before and after processing:
        w13_weight, w2_weight: (E, 2I, H), (E, H, I) e4m3fn; the device's e4m3 afterwards.
        w13_weight_scale, w2_weight_scale: per tensor (E, 2), (E,) fp32, afterwards (E,); per channel (E, 2I), (E, H),
            afterwards (E, 2I, 1), (E, H, 1).
        w13_weight_scale_inv, w2_weight_scale_inv: (E, 2 cdiv(I, rows), cdiv(H, columns)), (E, cdiv(H, rows),
            cdiv(I, columns)) fp32 multipliers; finer where shards or ranks do not begin at blocks. With block scales.
        w13_input_scale, w2_input_scale: (E,) fp32, afterwards () or (E,). Static activations; None for dynamic ones.
        w13_bias, w2_bias: (E, 2I), (E, H) or None.

    Activations are quantized per token, per group of the block's columns, or by the static scale; on GPUs without FP8
    units they stay as they are.

    Args:
        moe: the layer's `moe_config`.
        is_static: whether the checkpoint has the activations' scales.
        block: [rows, columns] that share a scale, or None.
        per_channel: whether rows have a scale each.
        per_expert_input_scale: keep one static scale an expert instead of the largest.
        powers_of_two: whether dynamic scales of groups are powers of two.
    """

    def __init__(
        self, moe: Any, is_static: bool, block: Any = None, per_channel: bool = False,
        per_expert_input_scale: bool = False, powers_of_two: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(moe)
        self.block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        self.is_static, self.per_channel = is_static, per_channel
        self.per_expert_input_scale = per_expert_input_scale
        self.powers = "_e8m0" if powers_of_two else ""

    @property
    def scale_suffix(self) -> str:
        return "weight_scale" if self.block is None else "weight_scale_inv"

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        add_codes(self, layer, sizes, attributes, torch.float8_e4m3fn, code=E4M3FN.nan_code)
        if self.per_channel:
            for matrix in MATRICES:
                rows = ExpertMatrix(sizes, matrix, unit=None, fill=1)
                shape = (sizes.experts, sizes.rows(matrix))
                self.expect_scale(layer, f"{matrix}_weight_scale", shape, rows, attributes, quant_method="channel")
        elif self.block is None:
            for matrix in MATRICES:
                one = ExpertScalar(sizes, matrix)
                self.expect_scale(layer, f"{matrix}_weight_scale", one.shape, one, attributes, quant_method="tensor")
        else:
            layer.weight_block_size = list(self.block)
            layer.blocks = blocks_of(sizes, self.block)
            layer.block_schemes = {m: f"fp8_{per_block(*b.whole_sizes).name}" for m, b in layer.blocks.items()}
            for matrix in MATRICES:
                blocks = layer.blocks[matrix]
                grid = ExpertBlocks(sizes, matrix, blocks)
                self.expect_scale(
                    layer,
                    f"{matrix}_weight_scale_inv",
                    (sizes.experts, *blocks.shape),
                    grid,
                    attributes,
                    quant_method="block",
                )
        if self.is_static:
            add_input_scales(self, layer, sizes, attributes)
        else:
            for matrix in MATRICES:
                layer.register_parameter(f"{matrix}_input_scale", None)

    def expect_scale(self, layer: Any, name: str, shape: Any, layout: Any, attributes: Any, **more: Any):
        data = torch.full(shape, MISSING, dtype=torch.float32)
        self.expect(layer, name, data, layout, attributes, fill=MISSING, **more)

    def convert(self, layer: Any, loaded: dict[str, Tensor]) -> dict[str, Tensor | None]:
        name, sizes = name_of(layer), layer.experts
        dtype = fp8_dtype(loaded["w13_weight"].device)
        doubled = 2.0 if dtype is torch.float8_e4m3fnuz else 1.0  # the same code means half as much there
        scales, made = {}, {}
        for matrix in MATRICES:  # all checks come before the first code changes
            expect_codes(f"{name}.{matrix}_weight", loaded[f"{matrix}_weight"], sizes.shards if matrix == "w13" else 1)
            key = f"{matrix}_{self.scale_suffix}"
            scales[matrix] = present(f"{name}.{key}", loaded[key]) * doubled
            if self.is_static:
                scale = static_scale(layer, matrix, loaded, self.per_expert_input_scale)
                made[f"{matrix}_input_scale"] = scale * doubled
        for matrix in MATRICES:
            codes = in_format(loaded[f"{matrix}_weight"], dtype)
            scale = scales[matrix]
            if self.block is not None:
                scale = self.whole(layer.blocks[matrix], scale)
            elif self.per_channel:
                scale = scale.unsqueeze(-1)
            elif matrix == "w13":
                scale = requantize_experts(codes, scale, sizes)
            made[f"{matrix}_{self.scale_suffix}"] = scale
            made[f"{matrix}_weight"] = codes
        return made  # type: ignore[return-value]

    @staticmethod
    def whole(blocks: Blocks, scale: Tensor) -> Tensor:
        return blocks.whole_stack(scale) if blocks.begins_inside else scale

    def moved(self, layer: Any) -> None:
        layer.weight_only = not has_fp8_units(layer.w13_weight.device)

    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        if self.block is None:
            name, experts = "fp8_channel" if self.per_channel else "fp8_tensor", layer.w13_weight.shape[0]
            w13 = Quantized(layer.w13_weight, layer.w13_weight_scale.view(experts, -1, 1), name, check=False)
            w2 = Quantized(layer.w2_weight, layer.w2_weight_scale.view(experts, -1, 1), name, check=False)
            act = "fp8_tensor" if self.is_static else "fp8_token"
        else:
            schemes = layer.block_schemes
            w13 = Quantized(layer.w13_weight, layer.w13_weight_scale_inv, schemes["w13"], check=False)
            w2 = Quantized(layer.w2_weight, layer.w2_weight_scale_inv, schemes["w2"], check=False)
            act = f"fp8_group{self.block[1]}{self.powers}"
        if layer.weight_only:
            return ExpertWeights(w13, w2, **self.biases(layer))
        return ExpertWeights(w13, w2, act, **self.biases(layer), **input_scales(layer))


class Fp8MoEMethod(Fp8ExpertsMethod):
    """FP8 experts of `quant_method: fp8` checkpoints: a scale per tensor, or per block.

    Args:
        quant_config: an `Fp8Config`.
        layer: with `moe_config`.
        per_expert_input_scale: keep one static scale an expert instead of the largest.
    """

    def __init__(self, quant_config: Any, layer: Any, per_expert_input_scale: bool = False) -> None:
        super().__init__(
            layer.moe_config, quant_config.activation_scheme == "static", quant_config.weight_block_size,
            per_expert_input_scale=per_expert_input_scale or getattr(quant_config, "per_expert_input_scale", False),
            powers_of_two=getattr(quant_config, "scale_fmt", None) == "ue8m0",
        )  # fmt: skip
        self.quant_config = quant_config


def blocks_of(sizes: Sizes, block: tuple[int, int]) -> dict[str, Blocks]:
    """The grids of block scales of a rank's w13 and w2."""
    ranks, H, I = sizes.ranks, sizes.hidden, sizes.inter
    start, full, S = ranks.rank * I, ranks.size * I, sizes.shards
    cut13 = Cut((I,) * S, (start,) * S, (full,) * S, H, 0, H)
    cut2 = Cut((H,), (0,), (H,), I, start, full)
    return {"w13": Blocks(cut13, block), "w2": Blocks(cut2, block)}


def add_input_scales(method: Any, layer: Any, sizes: Sizes, attributes: dict[str, Any]) -> None:
    """Register `w13_input_scale` and `w2_input_scale` (E,)."""
    for matrix in MATRICES:
        layout = ExpertScalar(sizes, matrix, joint=True)
        data = torch.full((sizes.experts,), MISSING, dtype=torch.float32)
        method.expect(
            layer, f"{matrix}_input_scale", data, layout, attributes, fill=MISSING, quant_method="tensor",
            scale_type="input_scale",
        )  # fmt: skip


def static_scale(layer: Any, matrix: str, loaded: dict[str, Tensor], per_expert: bool) -> Tensor:
    """The static scale of all experts, (): the largest; or one an expert, (E,)."""
    values = present(f"{name_of(layer)}.{matrix}_input_scale", loaded[f"{matrix}_input_scale"])
    return values if per_expert else values.amax()


def input_scales(layer: Any) -> dict[str, Any]:
    """The static scales as `moe_experts` takes them."""
    made = {}
    for matrix in MATRICES:
        scale = layer._parameters.get(f"{matrix}_input_scale")
        shape = (1, 1) if scale is None or scale.dim() == 0 else (-1, 1, 1)
        made[f"input_scale{matrix[1:]}"] = None if scale is None else scale.view(shape)
    return made


def present(what: str, scales: Tensor) -> Tensor:
    """The scales (E, ...), if those of all experts were loaded and are valid."""
    values = scales.float()
    missing = (values == MISSING).reshape(values.shape[0], -1)
    if bool(missing.any()):
        experts = missing.any(1).nonzero().flatten().tolist()
        told = f"{', '.join(map(str, experts[:8]))}{', ...' if len(experts) > 8 else ''}"
        count = int(missing.sum())
        raise ValueError(f"{what}: {count} of {values.numel()} scales are missing from the checkpoint, experts {told}")
    expect_valid_scale(what, values)
    return values


def expect_codes(what: str, codes: Tensor, shards: int) -> None:
    """Raise ValueError if a shard of an expert holds nothing but the NaN that weights have before they are loaded."""
    raw = codes.view(torch.uint8).unflatten(1, (shards, -1))
    rows = (raw[:, :, 0] == E4M3FN.nan_code).all(-1)  # a look at the first rows costs nothing
    missing = [
        (e, s) for e, s in rows.nonzero().tolist() if raw[e, s].numel() and bool((raw[e, s] == E4M3FN.nan_code).all())
    ]
    if missing:
        told = ", ".join(f"expert {e} shard {s}" for e, s in missing[:8])
        raise ValueError(f"{what}: expected weights for each of {raw.shape[0]} experts, {told} were never loaded")


def requantize_experts(codes: Tensor, scales: Tensor, sizes: Sizes) -> Tensor:
    """Bring both shards of each expert to the larger of its scales (E,), in place; `scales` (E, shards)."""
    largest = scales.amax(1)
    for e in (scales != largest[:, None]).any(1).nonzero().flatten().tolist():
        for i in range(sizes.shards):
            part = codes[e, i::2] if sizes.interleaved else codes[e].narrow(0, i * sizes.inter, sizes.inter)
            requantize(part, scales[e, i : i + 1], [sizes.inter], largest[e])
    return largest
