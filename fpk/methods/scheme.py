"""Linear layers of any serialized scheme: what Quark, compressed-tensors and ModelOpt checkpoints need beside FP8 per
tensor and block. The layer multiplies as `fpk.mm` does; gate and up, q, k and v keep their own scales.
"""

from typing import Any

import torch
from torch import Tensor

from fpk.api import Quantized, mm, parse_layer_scheme, quantize
from fpk.check import expect_valid_scale, fp8_dtype, has_fp8_units
from fpk.formats import E4M3FN, E8M0, FP8
from fpk.methods._families import LayerSpec
from fpk.methods.base import QuantizedLinearMethod, add_parameter, store_sizes
from fpk.methods.expert_weights import Unit
from fpk.methods.fp8 import in_format
from fpk.methods.loading import Staging
from fpk.methods.parameter import MISSING, ChannelScale, Cut, PackedWeight, TensorScale, name_of, replace, set_derived

NAMES = {
    "quark": ("weight", "weight_scale_2", "input_scale_2"),
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
}
"""What families call the codes and the second scales of block-scaled layers."""


class SchemeLinearMethod(QuantizedLinearMethod):
    """A serialized linear layer of a spec.

    Parameters, by the family's names:
        weight (weight_packed): (N, K) codes, packed where the format packs.
        weight_scale: (shards,) per tensor, (N, 1) per channel, (N, K / group) microscaled.
        weight_scale_2 (weight_global_scale): (shards,) fp32, NVFP4.
        input_scale (input_scale_2, input_global_scale): (shards,) fp32, static activations.

    Args:
        spec: the schemes; block scales have methods of their own.
        family: "quark", "modelopt" or "compressed-tensors".

    Raises:
        NotImplementedError: fpk has no layer for the spec.
    """

    def __init__(self, spec: LayerSpec, family: str) -> None:
        if spec.unsupported:
            raise NotImplementedError(f"{spec}: {spec.unsupported}")
        pair = parse_layer_scheme(str(spec))
        self.spec, self.pair, self.family = spec, pair, family
        self.weights = pair.weight
        names = NAMES[family]
        blocks = self.weights.scale_format != "fp32"
        self.code_name = names[0] if self.weights.packed else "weight"
        self.over_name = names[1] if "global_scale" in self.weights.outputs else ""
        self.input_name = (names[2] if self.over_name else "input_scale") if pair.static else ""
        self.is_block_scaled = blocks

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        cut = store_sizes(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        )
        layer.loading = Staging()
        scheme, group = self.weights, self.weights.granularity.cols
        unit = {4: Unit(1, 2), 6: Unit(3, 4)}.get(scheme.format.bits, Unit())
        whole = max(unit.den, group)
        if cut.K * unit.num % unit.den or (cut.full_K != cut.K and cut.K % whole):
            raise ValueError(
                f"{name_of(layer)}.input_size_per_partition: expected a multiple of "
                f"{unit.den if cut.full_K == cut.K else whole} for {scheme}, got {cut.K}"
            )
        code = E4M3FN.nan_code if scheme.format.dtype in FP8 else 0
        raw = torch.full((cut.N, unit.of(cut.K)), code, dtype=torch.uint8).view(scheme.format.dtype)
        rows = {str(i): range(o, o + w) for i, (o, w) in enumerate(zip(cut.offsets, cut.widths, strict=True))}
        self._expect(layer, self.code_name, raw, PackedWeight(cut, unit), extra_weight_attrs, None, rows)
        shards = TensorScale(len(cut.widths))
        missing = torch.full((len(cut.widths),), MISSING, dtype=torch.float32)
        if self.is_block_scaled:
            fmt = E8M0 if scheme.scale_format == "e8m0" else E4M3FN
            nan = torch.full((cut.N, Unit(1, group).of(cut.K)), fmt.nan_code, dtype=torch.uint8)
            nan = nan if fmt is E8M0 else nan.view(torch.float8_e4m3fn)
            layout: Any = PackedWeight(cut, Unit(1, group))
            self._expect(layer, "weight_scale", nan, layout, extra_weight_attrs, float(fmt.nan_code))
        elif scheme.granularity.rows < 0:
            self._expect(layer, "weight_scale", missing.clone(), shards, extra_weight_attrs, MISSING)
        else:
            data = torch.full((cut.N, 1), MISSING, dtype=torch.float32)
            self._expect(layer, "weight_scale", data, ChannelScale(cut), extra_weight_attrs, MISSING)
        for name in (self.over_name, self.input_name):
            if name:
                self._expect(layer, name, missing.clone(), shards, extra_weight_attrs, MISSING)
        layer.register_load_state_dict_post_hook(self._state_loaded)
        self.moved(layer)

    def _expect(
        self, layer: Any, name: str, data: Tensor, layout: Any, extra: dict[str, Any], fill: float | None,
        rows: dict[str, range] | None = None,
    ) -> None:  # fmt: skip
        parameter = add_parameter(layer, name, data, layout, **dict(fixed_dtype=True) | extra)
        layer.loading.expect(name, parameter, fill, rows)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check what was loaded and bring it into the form that `apply` runs with.

        Raises:
            ValueError: a shard's codes or a scale is missing, or a scale is not finite and positive.
        """
        staging: Staging = layer.loading
        if not self.leave_pre_processed(layer):
            loaded = staging.loaded(layer)
            if loaded:
                lost = [n for n in staging.forms if n not in loaded]
                if lost:
                    names = ", ".join(sorted(loaded))
                    raise ValueError(
                        f"{name_of(layer)}.{lost[0]}: missing, expected it to be loaded again with {names}"
                    )
                staging.expect_whole(layer)
                self._process(layer, loaded)
        staging.done()
        self._derive(layer)
        self.moved(layer)

    def _process(self, layer: Any, loaded: dict[str, Tensor]) -> None:
        what, cut = name_of(layer), layer.cut
        scale = loaded["weight_scale"]
        if self.is_block_scaled:
            nan = E8M0.nan_code if self.weights.scale_format == "e8m0" else E4M3FN.nan_code
            raw = scale.view(torch.uint8)
            bad = int((raw == nan).sum() if nan == E8M0.nan_code else (raw >= nan).sum())
            if bad:
                raise ValueError(f"{what}.weight_scale: {bad} of {raw.numel()} scales are missing or not positive")
        else:
            scale = self._present(f"{what}.weight_scale", scale)
        over = self._present(f"{what}.{self.over_name}", loaded[self.over_name]) if self.over_name else None
        given = self._present(f"{what}.{self.input_name}", loaded[self.input_name]) if self.input_name else None
        codes = loaded[self.code_name]
        dtype = layer._parameters[self.code_name].dtype
        if codes.dtype is torch.float8_e4m3fn and not self.weights.product:
            dtype = fp8_dtype(codes.device)
            codes = in_format(codes, dtype)
            if dtype is torch.float8_e4m3fnuz:  # the same code means half as much there
                scale, given = scale * 2, None if given is None else given * 2
        if self.weights.granularity.rows < 0:
            scale = per_row(scale, cut)
        replace(layer, "weight_scale", scale)
        replace(layer, self.code_name, codes)
        for name, values in ((self.over_name, over), (self.input_name, given)):
            if values is not None:
                replace(layer, name, values)

    def _derive(self, layer: Any) -> None:
        """Set what `multiply` reads and no state dict holds, from the parameters that it follows from."""
        if self.over_name:
            over = layer._parameters[self.over_name]
            set_derived(layer, "global_scale", per_row(1 / over if self.spec.divides else over.data, layer.cut))
        if self.input_name:
            given = layer._parameters[self.input_name]
            set_derived(layer, "static_scale", (1 / given if self.spec.divides else given.data).amax().view(1, 1))

    def _state_loaded(self, layer: Any, *_: Any) -> None:
        if layer.loading.processed:
            self._derive(layer)
            self.moved(layer)

    def is_processed(self, layer: Any, state: dict[str, Tensor]) -> bool:
        return bool(layer.loading.is_processed(state))

    def adopt(self, layer: Any, state: dict[str, Tensor]) -> None:
        layer.loading.adopt(layer, state)

    @staticmethod
    def _present(what: str, values: Tensor) -> Tensor:
        missing = int((values == MISSING).sum())
        if missing:
            raise ValueError(f"{what}: {missing} of {values.numel()} scales are missing from the checkpoint")
        expect_valid_scale(what, values)
        return values

    def moved(self, layer: Any) -> None:
        codes = layer._parameters[self.code_name]
        needs = self.pair.activation is not None and self.pair.activation.format.dtype in FP8
        layer.weight_only = needs and not has_fp8_units(codes.device)
        follows = needs and self.pair.activation.format is self.weights.format and not self.weights.product  # type: ignore[union-attr]
        layer.quantize_options = {"dtype": codes.dtype} if follows else {}

    def weight(self, layer: Any) -> Quantized:
        # per tensor, each shard has its own: one a row
        name = f"{self.weights.name.split('_')[0]}_channel" if self.weights.granularity.rows < 0 else self.weights.name
        over = layer.global_scale if self.over_name else None
        return Quantized(
            layer._parameters[self.code_name], layer.weight_scale, name, global_scale=over, check=False
        )  # fmt: skip

    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight(layer)
        if self.pair.activation is None or layer.weight_only:
            return mm(x, weight, bias, out_dtype=x.dtype)
        options: dict[str, Any] = dict(layer.quantize_options)
        if self.input_name:
            options["global_scale" if self.over_name else "scale"] = layer.static_scale
        codes = quantize(x, self.pair.activation, check=False, **options)
        return mm(codes, weight, bias, out_dtype=x.dtype, fast_accum=self.fast_accum)

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.weight(layer).dequantize(dtype)

    def scheme(self, layer: Any) -> str:
        return f"{self.weights}:{'none' if layer.weight_only else self.pair.activation_name}"


def per_row(scales: Tensor, cut: Cut) -> Tensor:
    """One value a shard as one a row, (N, 1)."""
    widths = torch.tensor(cut.widths, device=scales.device)
    return scales.repeat_interleave(widths).unsqueeze(1)
