"""Serialized FP8: the checkpoint holds e4m3 weights and their scales, per tensor or per block.

Fused layers arrive as shards with a scale each. Per tensor the layer keeps the largest, and the other shards are
quantized anew from their fp32 values; per block every shard keeps its own grid.
"""

from typing import Any

import torch
from torch import Tensor

from fpk.check import expect_valid_scale, fp8_dtype
from fpk.formats import E4M3FN, E8M0, decode
from fpk.kernels.quant.dequantize import dequantize
from fpk.kernels.quant.quantize_fp8_static import quantize_fp8_static
from fpk.methods.base import QuantizedLinearMethod, add_parameter, store_sizes
from fpk.methods.loading import Staging
from fpk.methods.parameter import MISSING, Blocks, BlockScale, TensorScale, Weight, adopt, name_of, replace
from fpk.methods.products import dequantize_blocks, fp8_block_product, fp8_product, note_units, weight_only_product

CHUNK = 16 << 20  # elements that are held in fp32 at a time when a shard is quantized anew: 64 MiB


class Fp8LinearMethod(QuantizedLinearMethod):
    """FP8 linear layers of a serialized checkpoint.

    Parameters, before and after processing:
        weight: (N, K) e4m3fn; the device's e4m3 afterwards.
        weight_scale: (shards,) fp32, afterwards (1,). Without block scales.
        weight_scale_inv: (cdiv(N, rows), cdiv(K, columns)) fp32, a multiplier whatever its name says; finer rows where
            shards do not begin at blocks. With block scales.
        input_scale: (shards,) fp32, afterwards (1,), their maximum. Static activations; None for dynamic ones.

    Activations are quantized per token, per group of the block's columns, or by the static scale; on GPUs without FP8
    units they stay as they are.
    """

    def __init__(self, quant_config: Any) -> None:
        self.quant_config = quant_config
        block = quant_config.weight_block_size
        self.block: tuple[int, int] | None = None if block is None else (block[0], block[1])
        self.is_static = quant_config.activation_scheme == "static"
        self.scale_format = "e8m0" if getattr(quant_config, "scale_fmt", None) == "ue8m0" else "fp32"

    @property
    def scale_name(self) -> str:
        return "weight_scale" if self.block is None else "weight_scale_inv"

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        cut = store_sizes(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        )
        layer.loading = staging = Staging()
        nan_codes = torch.full((cut.N, cut.K), E4M3FN.nan_code, dtype=torch.uint8).view(torch.float8_e4m3fn)
        weight = add_parameter(
            layer, "weight", nan_codes, Weight(cut),
            input_dim=1, output_dim=0, fixed_dtype=True, **extra_weight_attrs,
        )  # fmt: skip
        rows = {str(i): range(o, o + w) for i, (o, w) in enumerate(zip(cut.offsets, cut.widths, strict=True))}
        staging.expect("weight", weight, None, rows)
        shards = TensorScale(len(cut.widths))
        if self.block is None:
            self._expect_scale(layer, "weight_scale", (len(cut.widths),), shards, extra_weight_attrs)
        else:
            layer.weight_block_size = list(self.block)
            layer.blocks = Blocks(cut, self.block)
            self._expect_scale(
                layer, "weight_scale_inv", layer.blocks.shape, BlockScale(layer.blocks), extra_weight_attrs,
                input_dim=1, output_dim=0, is_e8m0=self.quant_config.is_scale_e8m0,
            )  # fmt: skip
        if self.is_static:
            self._expect_scale(layer, "input_scale", (len(cut.widths),), shards, extra_weight_attrs)
        self._finish(layer)

    def _expect_scale(
        self, layer: Any, name: str, shape: tuple[int, ...], layout: Any, extra: dict[str, Any], is_e8m0: bool = False,
        **attributes: Any,
    ) -> None:  # fmt: skip
        data = torch.full(shape, MISSING, dtype=torch.float32)
        if is_e8m0:
            data = torch.full(shape, E8M0.nan_code, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        kind = "input_scale" if name == "input_scale" else "weight_scale"
        attributes |= dict(scale_type=kind, fixed_dtype=True) | extra
        parameter = add_parameter(layer, name, data, layout, **attributes)
        layer.loading.expect(name, parameter, float("nan") if is_e8m0 else MISSING)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring weight and scales into the form that `apply` runs with.

        Raises:
            ValueError: a shard's weight or a scale is missing, or a scale is not finite and positive.
        """
        staging: Staging = layer.loading
        if not self.leave_pre_processed(layer):
            loaded = staging.loaded(layer)
            if loaded:
                self._expect_together(layer, loaded)
                self._process(layer, loaded)
        staging.done()
        self._finish(layer)

    def _expect_together(self, layer: Any, loaded: dict[str, Tensor]) -> None:
        for name in ("weight", self.scale_name):
            if name not in loaded:
                raise ValueError(
                    f"{name_of(layer)}.{name}: missing, expected it to be loaded again with {', '.join(sorted(loaded))}"
                )

    def _process(self, layer: Any, loaded: dict[str, Tensor]) -> None:
        name = name_of(layer)
        dtype = fp8_dtype(loaded["weight"].device)
        doubled = 2.0 if dtype is torch.float8_e4m3fnuz else 1.0  # the same code means half as much there
        widths = layer.logical_widths
        layer.loading.expect_whole(layer)
        _expect_codes(f"{name}.weight", loaded["weight"], widths)
        inputs = None  # all checks come before the first code changes
        if "input_scale" in loaded:
            inputs = _present(f"{name}.input_scale", loaded["input_scale"], widths) * doubled
        if self.block is None:
            scale = _present(f"{name}.weight_scale", loaded["weight_scale"], widths) * doubled
            codes = in_format(loaded["weight"], dtype)
            replace(layer, "weight_scale", _requantize(codes, scale, widths))
        else:
            scale = _present_blocks(f"{name}.weight_scale_inv", loaded["weight_scale_inv"]) * doubled
            codes = in_format(loaded["weight"], dtype)
            replace(layer, "weight_scale_inv", scale)
        replace(layer, "weight", codes)
        if inputs is not None:
            replace(layer, "input_scale", _largest(inputs, widths))

    def is_processed(self, layer: Any, state: dict[str, Tensor]) -> bool:
        """By a scale or a type that checkpoints do not have. Without a difference, processing would change nothing."""
        if layer.loading.processed or not {"weight", self.scale_name} <= state.keys():
            return False
        scale = state[self.scale_name]
        return scale.shape != getattr(layer, self.scale_name).shape or state["weight"].dtype != layer.weight.dtype

    def adopt(self, layer: Any, state: dict[str, Tensor]) -> None:
        adopt(layer, state, layer.weight.device)
        layer.loading.done()
        self._finish(layer)

    def _finish(self, layer: Any) -> None:
        if "input_scale" not in layer._parameters:
            layer.register_parameter("input_scale", None)
        self.moved(layer)

    def moved(self, layer: Any) -> None:
        note_units(layer)

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.block is not None:
            scale = layer.weight_scale_inv
            return fp8_block_product(
                x, layer.weight, scale, layer.blocks, bias, layer.weight_only, self.fast_accum, self.scale_format
            )
        scale = layer.weight_scale.view(1, 1)
        if layer.weight_only:
            return weight_only_product(x, layer.weight, scale, bias)
        return fp8_product(
            x, layer.weight, scale, bias, input_scale=layer.input_scale,
            scale_ub=getattr(layer, "input_scale_ub", None), fast_accum=self.fast_accum,
        )  # fmt: skip

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        if self.block is not None:
            return dequantize_blocks(layer.weight, layer.weight_scale_inv, layer.blocks, dtype)
        return dequantize(layer.weight, layer.weight_scale.view(1, 1), out_dtype=dtype)

    def scheme(self, layer: Any) -> str:
        if self.block is None:
            weights, inputs = "fp8_tensor", "fp8_tensor_static" if self.is_static else "fp8_token"
        else:
            rows, columns = self.block
            weights = f"fp8_block{rows}" if rows == columns else f"fp8_block{rows}x{columns}"
            inputs = f"fp8_group{columns}{'_e8m0' if self.scale_format == 'e8m0' else ''}"
        return f"{weights}:{'none' if layer.weight_only else inputs}"


def _expect_codes(what: str, codes: Tensor, widths: list[int]) -> None:
    """Raise ValueError if a shard holds nothing but the NaN that a weight has before it is loaded."""
    shards = codes.view(torch.uint8).split(widths)
    missing = [i for i, s in enumerate(shards) if s.numel() and bool((s == E4M3FN.nan_code).all())]
    if missing:
        raise ValueError(f"{what}: expected one for each of {len(widths)} shards, shards {missing} were never loaded")


def _present(what: str, scales: Tensor, widths: list[int]) -> Tensor:
    """The scales (shards,), if those of all shards that have rows were loaded and are valid."""
    used = [i for i, w in enumerate(widths) if w > 0]
    values = scales.float()
    missing = [i for i in used if values[i].item() == MISSING]
    if missing and len(missing) == len(used):
        raise ValueError(f"{what}: missing from the checkpoint, expected {len(used)} of them")
    if missing:
        raise ValueError(f"{what}: expected one for each of {len(widths)} shards, shards {missing} have none")
    expect_valid_scale(what, values[used])
    return values


def _present_blocks(what: str, scales: Tensor) -> Tensor:
    """Block scales as fp32, if all were loaded and are valid."""
    values = decode(scales.view(torch.uint8), E8M0) if scales.dtype is torch.float8_e8m0fnu else scales
    count = int((values == MISSING).sum())
    if count:
        raise ValueError(f"{what}: {count} of {values.numel()} block scales are missing from the checkpoint")
    expect_valid_scale(what, values)
    return values


def _largest(scales: Tensor, widths: list[int]) -> Tensor:
    used = [i for i, w in enumerate(widths) if w > 0]
    return scales[used].amax(0, keepdim=True) if used else torch.ones_like(scales[:1])


def in_format(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """e4m3fn codes as `dtype`, in place: fnuz has the same bit patterns for half the values, and NaN where -0 was."""
    if dtype is not torch.float8_e4m3fnuz:
        return codes
    raw = codes.view(torch.uint8)
    # 0x7F and 0xFF are NaN as e4m3fn but +-240 as fnuz, whose only NaN is 0x80
    is_nan = (raw & 0x7F) == 0x7F
    raw.masked_fill_(raw == 0x80, 0).masked_fill_(is_nan, 0x80)
    return raw.view(dtype)


def _requantize(codes: Tensor, scales: Tensor, widths: list[int]) -> Tensor:
    """Bring all shards to the largest scale (1,), in place; those that have it already stay as they are."""
    largest = _largest(scales, widths)
    requantize(codes, scales, widths, largest[0])
    return largest


def requantize(codes: Tensor, scales: Tensor, widths: list[int], target: Tensor) -> None:
    """Bring shards of `widths` rows from their `scales` to the scale `target`, in place, a part at a time."""
    row = 0
    for i, width in enumerate(widths):
        if width > 0 and not torch.equal(scales[i], target):
            step = max(1, CHUNK // codes.shape[1])
            for start in range(row, row + width, step):
                part = codes[start : min(start + step, row + width)]
                values = dequantize(part, scales[i].view(1, 1))
                again = quantize_fp8_static(values, target.view(1, 1), dtype=codes.dtype)
                part.view(torch.uint8).copy_(again.view(torch.uint8))
        row += width
