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
from fpk.formats import E4M3FN, E8M0
from fpk.kernels.quant.dequantize import dequantize
from fpk.kernels.quant.quantize_fp8_block import quantize_fp8_block
from fpk.kernels.quant.quantize_fp8_static import quantize_fp8_static
from fpk.kernels.quant.quantize_fp8_tensor import quantize_fp8_tensor
from fpk.kernels.quant.quantize_fp8_token import quantize_fp8_token
from fpk.kernels.quant.quantize_int8_static import quantize_int8_static
from fpk.kernels.quant.quantize_int8_token import quantize_int8_token
from fpk.methods.base import QuantizedLinearMethod, add_parameter, store_sizes
from fpk.methods.loading import Streaming
from fpk.methods.parallel import is_column_sharded, is_row_sharded, reduce_max, reduce_weight_scale
from fpk.methods.parameter import Blocks, Weight, adopt, cdiv, name_of, replace
from fpk.methods.products import (
    dequantize_blocks,
    fp8_block_product,
    fp8_product,
    int8_product,
    note_units,
    weight_only_product,
)


class OnlineLinearMethod(QuantizedLinearMethod):
    """Streams an unquantized weight in and quantizes it; subclasses say how, and what they keep."""

    uses_meta_device = True
    block: tuple[int, int] | None = None  # rows and columns that share a scale, for methods with block scales

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        cut = store_sizes(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        )
        if self.block is not None:
            layer.weight_block_size, layer.blocks = list(self.block), Blocks(cut, self.block)
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
        parameters = self.quantize_weight(layer, weights["weight"])
        for name in parameters.keys() - {"weight"}:
            expect_finite_scale(f"{name_of(layer)}.{name}", parameters[name])
        for name, tensor in parameters.items():
            replace(layer, name, tensor)
            layer._parameters[name].fixed_dtype = True
        self.finish(layer)

    def is_processed(self, layer: Any, state: dict[str, Tensor]) -> bool:
        return layer.weight.is_meta and "weight" in state and state["weight"].dtype not in FLOAT_INPUTS

    def adopt(self, layer: Any, state: dict[str, Tensor]) -> None:
        adopt(layer, state, layer.loading.device)
        self.finish(layer)

    def finish(self, layer: Any) -> None:
        """Set what is not a parameter of the checkpoint."""
        if "input_scale" not in layer._parameters:
            layer.register_parameter("input_scale", None)
        self.moved(layer)

    @abstractmethod
    def quantize_weight(self, layer: Any, weight: Tensor) -> dict[str, Tensor]:
        """Parameters by name from a weight (N, K): codes and scales."""


def expect_finite_scale(what: str, scale: Tensor) -> None:
    """Raise ValueError for a scale of weights that has no number: fp32, e8m0 bytes, or e4m3."""
    if scale.dtype is torch.float32:
        expect_valid_scale(what, scale)
        return
    raw = scale.view(torch.uint8)
    bad = int((raw == E8M0.nan_code if scale.dtype is torch.uint8 else raw >= E4M3FN.nan_code).sum())
    if bad:
        raise ValueError(f"{what}: expected finite positive scales, {bad} of {raw.numel()} are not")


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
        scale = layer.weight_scale.view(1, 1)
        if layer.weight_only:
            return weight_only_product(x, layer.weight, scale, bias)
        return fp8_product(x, layer.weight, scale, bias, fast_accum=self.fast_accum)

    def moved(self, layer: Any) -> None:
        note_units(layer)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(layer.weight, layer.weight_scale.view(1, 1), out_dtype=dtype)

    def scheme(self, layer: Any) -> str:
        return "fp8_tensor:none" if layer.weight_only else "fp8_tensor:fp8_token"


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
        return fp8_product(x, layer.weight, layer.weight_scale, bias, fast_accum=self.fast_accum)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(layer.weight, layer.weight_scale, rows=1, out_dtype=dtype)

    def scheme(self, layer: Any) -> str:
        return "fp8_channel:fp8_token"


class Fp8PerBlockOnlineLinearMethod(OnlineLinearMethod):
    """FP8 weights with a scale per 128 x 128 block; activations per group of 128.

    Every logical shard has its own grid of blocks, as serialized checkpoints have, anchored at the shard's first row.
    Ranks may cut anywhere: blocks that several of them share get one scale.
    """

    block = (128, 128)

    def quantize_weight(self, layer: Any, weight: Tensor) -> dict[str, Tensor]:
        codes, scale = quantize_blocks(layer, weight)
        return {"weight": codes, "weight_scale_inv": scale}

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        scale = layer.weight_scale_inv
        return fp8_block_product(x, layer.weight, scale, layer.blocks, bias, layer.weight_only, self.fast_accum)

    def moved(self, layer: Any) -> None:
        note_units(layer)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize_blocks(layer.weight, layer.weight_scale_inv, layer.blocks, dtype)

    def scheme(self, layer: Any) -> str:
        return f"fp8_block128:{'none' if layer.weight_only else 'fp8_group128'}"


def quantize_blocks(layer: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (N, K) and scales in the grid of `layer.blocks` of a weight, each shard by its own blocks."""
    blocks: Blocks = layer.blocks
    cut, (height, width), dtype = blocks.cut, blocks.block, fp8_dtype(weight.device)
    shared = (is_column_sharded(layer) and any(w % height for w in cut.widths)) or (
        is_row_sharded(layer) and cut.K % width > 0
    )
    if not shared and blocks.rows == height:
        return quantize_fp8_block(weight, height, width, dtype=dtype)
    codes = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scale = torch.empty(blocks.shape, dtype=torch.float32, device=weight.device)
    for i, rows in enumerate(cut.widths):
        if rows == 0:
            continue
        top, left = cut.starts[i] % height, blocks.offset_k
        # zeros up to where the first block would have begun: they change no maximum
        part = weight.new_zeros(top + rows, left + cut.K)
        part[top:, left:] = weight.narrow(0, cut.offsets[i], rows)
        part_codes, part_scale = quantize_fp8_block(part, height, width, dtype=dtype)
        if shared:
            part_scale = _shared_scale(layer, i, part_scale)
            part_codes = quantize_fp8_static(part, part_scale, height, width, dtype)
        codes.view(torch.uint8).narrow(0, cut.offsets[i], rows).copy_(part_codes.view(torch.uint8)[top:, left:])
        count = cdiv(blocks.offset_n + rows, blocks.rows)
        at = (top - blocks.offset_n + blocks.rows * torch.arange(count, device=weight.device)) // height
        scale.narrow(0, cut.offsets[i] // blocks.rows, count).copy_(part_scale[at])
    return codes, scale


def _shared_scale(layer: Any, shard: int, scale: Tensor) -> Tensor:
    """This rank's block scales of a shard after the maximum over the ranks, each block at its place in the whole."""
    cut, (height, width) = layer.blocks.cut, layer.blocks.block
    whole = scale.new_zeros(cdiv(cut.full_widths[shard], height), cdiv(cut.full_K, width))
    here = whole[cut.starts[shard] // height :, cut.k_start // width :][: scale.shape[0], : scale.shape[1]]
    here.copy_(scale)
    whole = reduce_max(whole, layer.tp_size, getattr(layer, "tp_group", None), f"{name_of(layer)}.weight_scale_inv")
    here = whole[cut.starts[shard] // height :, cut.k_start // width :]
    return here[: scale.shape[0], : scale.shape[1]].contiguous()


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
