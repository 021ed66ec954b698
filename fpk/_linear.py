"""The layer that `quantize_` puts in the place of `nn.Linear`. It composes `fpk.quantize` and `fpk.mm`."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fpk._shuffled import Shuffled, shuffle
from fpk.api import LayerScheme, Quantized, mm, parse_layer_scheme, plain_bytes, quantize
from fpk.check import FLOAT_INPUTS, expect_dtype, expect_shape, expect_valid_scale
from fpk.formats import FP8, INT8, Scheme, scheme_of
from fpk.methods.base import ACTIVATIONS
from fpk.op import OPS

_KEPT = ("weight", "weight_scale", "weight_global_scale", "weight_zero_point", "input_scale")
"""Buffers whose dtype is part of what they say."""


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights: y = x @ weight.T + bias, forward only.

    Buffers: `weight` (N, K) codes, (N, K / 2) and (N, 3 K / 4) where they are packed, `weight_scale` of the scheme's
    granularity, `weight_global_scale` and `weight_zero_point` where the scheme has them, else None, `input_scale`
    (1, 1) for static activations, else None, `bias` (N,) or None. They keep their dtypes when the module is cast
    (`.half()`, `.to(torch.bfloat16)`), the bias excepted, and follow it between devices.
    For activations with zero points there is `colsum` too, the sums of the codes' rows; it is not in the state dict.

    Args:
        weight: (N, K), as `fpk.quantize` gives it.
        activation: scheme that x is quantized with at every call; "fp8_tensor_static" and "int8_tensor_static" take
            the scale from `input_scale`; None leaves x as it is (weight-only, x in bf16 or fp16).
        bias: (N,) or None.
        input_scale: (1, 1) fp32, with static activations only.

    Raises:
        ValueError: weight is no matrix, the two schemes have no product, or the input scale is missing, superfluous or
            not finite and positive.
    """

    weight: Tensor
    weight_scale: Tensor
    weight_global_scale: Tensor | None
    weight_zero_point: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    colsum: Tensor | None

    def __init__(
        self, weight: Quantized, activation: str | None = None, bias: Tensor | None = None,
        input_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if weight.codes.dim() != 2 or (weight.zero_point is not None and not scheme_of(weight.scheme).product):
            raise ValueError(f"QuantizedLinear.weight: expected an (N, K) matrix, int8 symmetric, got {weight!r}")
        scheme = parse_layer_scheme(f"{weight.scheme}:{activation or 'none'}")
        if scheme.static != (input_scale is not None):
            wanted = "a tensor (1, 1)" if scheme.static else "None"
            raise ValueError(f"QuantizedLinear.input_scale: expected {wanted} for {scheme}, got {_told(input_scale)}")
        if input_scale is not None:
            expect_shape("QuantizedLinear.input_scale", input_scale, (1, 1))
            expect_dtype("QuantizedLinear.input_scale", input_scale, torch.float32)
            expect_valid_scale("QuantizedLinear.input_scale", input_scale)
        assert weight.shape is not None
        self.out_features, self.in_features = weight.shape
        self.weight_scheme = weight.scheme
        self.shuffled: str | None = None
        self.activation_scheme = activation
        self._quantizer = str(scheme.activation)
        has_two = scheme.activation is not None and "global_scale" in scheme.activation.outputs
        self._static = "global_scale" if has_two else "scale"
        # decided here, so that a traced forward looks no device up
        same_format = scheme.activation is not None and scheme.activation.format is scheme.weight.format
        follows = same_format and weight.codes.dtype in FP8 and _takes_dtype(scheme.activation)
        self._options: dict[str, Any] = {"dtype": weight.codes.dtype} if follows else {}
        if scheme.static:
            self._options["check"] = False
        if weight.granularity.rows > 1 and self._quantizer.startswith("fp8_group"):
            self._options["layout"] = "tma"  # of scales, with which block-scaled products are measured
        self.register_buffer("weight", weight.codes)
        self.register_buffer("weight_scale", weight.scale)
        self.register_buffer("weight_global_scale", weight.global_scale)
        self.register_buffer("weight_zero_point", weight.zero_point)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("colsum", None, persistent=False)
        if scheme.activation is not None and "zero_point" in scheme.activation.outputs:
            self.colsum = weight.codes.sum(1, dtype=torch.int32)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: str | LayerScheme, name: str = "linear", input_amax: float | None = None
    ) -> "QuantizedLinear":
        """Quantize the weights of `linear`.

        Args:
            linear: left as it is.
            scheme: of the layer.
            name: how errors call it.
            input_amax: largest magnitude of the activations, with static ones only; the input scale is what a tensor
                with this maximum would be quantized by.

        Raises:
            ValueError: weights without data or finite scale, or of a dtype that cannot be quantized; an input_amax that
                is missing, superfluous, negative or not finite.
        """
        pair = parse_layer_scheme(scheme)
        weight = linear.weight.detach()
        if weight.is_meta:
            raise ValueError(f"{name}.weight: expected a tensor with data, got one on the meta device")
        expect_dtype(f"{name}.weight", weight, *FLOAT_INPUTS)
        symmetric = pair.weight.format is INT8 and not pair.weight.product
        options: dict[str, Any] = {"qmin": -127} if symmetric else {}
        codes = quantize(weight, pair.weight, **options)
        if codes.scale.dtype is torch.float32:
            expect_valid_scale(f"{name}.weight_scale", codes.scale)
        activation = pair.activation_name if pair.activation else None
        made = cls(codes, activation, linear.bias, _input_scale(name, pair, input_amax, weight.device))
        return made.train(linear.training)

    @property
    def scheme(self) -> str:
        """The layer scheme, "weights:activations"."""
        return f"{self.weight_scheme}:{self.activation_scheme or 'none'}"

    def shuffle_(self) -> "QuantizedLinear":
        """Store the weight as `fpk.shuffle` does, for inputs in bf16 (and any float, where activations are FP8).

        State dicts keep the plain layout: saving and loading undoes this one for the time that it takes.

        Raises:
            ValueError: as `fpk.shuffle`.
        """
        if self.shuffled is None:
            made = shuffle(self.quantized_weight, self.activation_scheme or "none")
            self.weight, self.weight_scale, self.shuffled = made.packed, made.row_scale, made.target
        return self

    def unshuffle_(self) -> "QuantizedLinear":
        """Undo `shuffle_`."""
        if self.shuffled is not None:
            plain = self.quantized_weight
            self.weight, self.weight_scale, self.shuffled = plain.codes, plain.scale, None
        return self

    @property
    def _stored_weight(self) -> Shuffled:
        assert self.shuffled is not None
        shape = torch.Size((self.out_features, self.in_features))
        return Shuffled(
            self.weight, self.weight_scale, self.weight_scheme, self.shuffled, shape, self.weight_global_scale
        )  # fmt: skip

    @property
    def quantized_weight(self) -> Quantized:
        if self.shuffled is not None:
            return Quantized(**self._stored_weight.parts(), check=False)
        return Quantized(
            self.weight, self.weight_scale, self.weight_scheme, self.weight_zero_point, self.weight_global_scale,
            check=False,
        )  # fmt: skip

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights that the layer multiplies by, (N, K)."""
        return self.quantized_weight.dequantize(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) bf16, fp16 or fp32 (not fp32 if weight-only) -> (..., N) in the same dtype; under autocast in its.

        The argument is called as in `nn.Linear`.

        Raises:
            ValueError: the input has another last dimension or dtype, or needs a gradient.
        """
        if input.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "QuantizedLinear.input: expected a tensor that needs no gradient (forward only: use torch.no_grad() or "
                "torch.inference_mode()), got requires_grad=True"
            )
        input = as_autocast(input)
        expect_dtype("QuantizedLinear.input", input, *(ACTIVATIONS if self.activation_scheme is None else FLOAT_INPUTS))
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(f"QuantizedLinear.input: expected (..., {self.in_features}), got {tuple(input.shape)}")
        rows = input.reshape(-1, self.in_features)
        activations: Tensor | Quantized = rows
        if self.activation_scheme is not None:
            static: dict[str, Any] = {} if self.input_scale is None else {self._static: self.input_scale}
            activations = quantize(rows, self._quantizer, **static, **self._options)
        weight = self.quantized_weight if self.shuffled is None else self._stored_weight
        out = mm(activations, weight, self.bias, out_dtype=input.dtype, colsum=self.colsum)
        return out.reshape(*input.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        layout = ", shuffled" if self.shuffled else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme}{layout}, weight={dtype_name(self.weight)} {tuple(self.weight.shape)}, "
            f"weight_scale={dtype_name(self.weight_scale)} {tuple(self.weight_scale.shape)}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Move codes and scales with the module, but never cast them: codes of another dtype are other numbers."""
        kept = {id(self._buffers[name]) for name in _KEPT}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            return moved

        return cast(QuantizedLinear, super()._apply(move, recurse))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy, with the codes as plain bytes."""
        state = self.__dict__.copy()
        codes = {"weight": self.weight, "weight_scale": self.weight_scale}
        state["_buffers"] = self._buffers | {name: plain_bytes(tensor) for name, tensor in codes.items()}
        state["_dtypes"] = {name: tensor.dtype for name, tensor in codes.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        dtypes = state.pop("_dtypes")
        super().__setstate__(state)
        for name, dtype in dtypes.items():
            setattr(self, name, getattr(self, name).view(dtype))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if self.shuffled is not None:
            plain = self.quantized_weight
            destination |= {prefix + "weight": plain.codes, prefix + "weight_scale": plain.scale}
            for name in ("weight_global_scale", "weight_zero_point", "bias", "input_scale"):
                if (value := getattr(self, name)) is not None:
                    destination[prefix + name] = value if keep_vars else value.detach()
            return
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Refuse weights of another dtype (copying would cast them) and scales that cannot be."""
        again = self.shuffled is not None
        self.unshuffle_()
        wrong = []
        for name in _KEPT:
            value = state_dict.get(prefix + name)
            if value is None or getattr(self, name) is None:
                continue
            if value.dtype != getattr(self, name).dtype:
                wrong.append(f"{prefix}{name}: expected {dtype_name(getattr(self, name))}, got {dtype_name(value)}")
            elif name != "weight" and value.dtype is torch.float32 and not value.is_meta:
                try:
                    expect_valid_scale(prefix + name, value)
                except ValueError as error:
                    wrong.append(str(error))
        if wrong:
            error_msgs.extend(wrong)
            if again:
                self.shuffle_()
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self.colsum is not None and not self.weight.is_meta:
            self.colsum = self.weight.sum(1, dtype=torch.int32)
        if again:
            self.shuffle_()


def as_autocast(x: Tensor) -> Tensor:
    """x in the dtype that autocast gives products, where it is on."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _input_scale(name: str, scheme: LayerScheme, amax: float | None, device: torch.device) -> Tensor | None:
    """The scale that the dynamic quantizer gives a tensor whose largest magnitude is `amax`: its floor, its format."""
    if not scheme.static:
        if amax is not None:
            raise ValueError(f"{name}.input_amax: expected None for {scheme}, got {amax}")
        return None
    if amax is None or not 0 <= amax < math.inf:
        raise ValueError(f"{name}.input_amax: expected a finite magnitude for {scheme}, got {amax}")
    assert scheme.activation is not None
    largest = quantize(torch.full((1, 16), amax, dtype=torch.float32, device=device), scheme.activation)
    return largest.scale if largest.global_scale is None else largest.global_scale


def _takes_dtype(scheme: Scheme | None) -> bool:
    """May the scheme's codes be another FP8 type than the format's? Microscaling has but one."""
    return scheme is not None and "dtype" in OPS[scheme.quantizer].__signature__.parameters


def _told(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"a tensor {tuple(tensor.shape)}"
