"""The layer in the place of a transformers model's experts. It composes `fpk.quantize` and `fpk.moe_experts`."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fpk._experts_layout import MATRICES, expert_layout, matrices_of
from fpk._linear import as_autocast
from fpk._moe import moe_experts
from fpk.api import LayerScheme, Quantized, parse_layer_scheme, plain_bytes, quantize
from fpk.check import FLOAT_INPUTS, expect_dtype, expect_valid_scale
from fpk.formats import INT8, scheme_of
from fpk.methods._dense import Dense
from fpk.methods.base import ACTIVATIONS

_PARTS = ("", "_scale", "_global_scale", "_zero_point")
_KEPT = (*(f"{m}{p}" for m in MATRICES for p in _PARTS), *(f"{m}_input_scale" for m in MATRICES))


class QuantizedExperts(nn.Module):
    """The experts of a mixture-of-experts layer with quantized weights, forward only.

    Called as transformers calls its expert modules: (hidden_states (T, H), top_k_index (T, k), top_k_weights (T, k)).

    Buffers, for `gate_up_proj` (E, 2I, H) and `down_proj` (E, H, I): the codes, `*_scale`, `*_global_scale` and
    `*_zero_point` where the scheme has them, `*_input_scale` of static activations, `*_bias`. All but biases keep their
    dtypes when the module is cast.

    Args:
        gate_up: (E, 2I, H): gate and up in halves, or in alternating rows where `options` say "interleaved".
        down: (E, H, I).
        act: scheme of the activations of both products; None leaves them as they are.
        bias13, bias2: (E, 2I), (E, H) or None.
        input_scale13, input_scale2: of static activations.
        options: of `fpk.moe_experts`: activation, interleaved, alpha, beta, limit.
    """

    def __init__(
        self, gate_up: Quantized, down: Quantized, act: str | None = None, bias13: Tensor | None = None,
        bias2: Tensor | None = None, input_scale13: Tensor | None = None, input_scale2: Tensor | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        scheme = parse_layer_scheme(f"{gate_up.scheme}:{act or 'none'}")
        parse_layer_scheme(f"{down.scheme}:{act or 'none'}")
        if gate_up.codes.dim() != 3 or down.codes.dim() != 3:
            raise ValueError(f"QuantizedExperts: expected two stacks of matrices, got {gate_up!r} and {down!r}")
        if scheme.static != (input_scale13 is not None) or scheme.static != (input_scale2 is not None):
            raise ValueError(
                f"QuantizedExperts.input_scale: expected {'two' if scheme.static else 'none'} for {scheme}"
            )
        self.schemes = dict(zip(MATRICES, (gate_up.scheme, down.scheme), strict=True))
        self.activation_scheme, self.options = act, options
        self.act = "none" if scheme.activation is None else scheme.activation.name
        self.num_experts = gate_up.codes.shape[0]
        given = (gate_up, bias13, input_scale13), (down, bias2, input_scale2)
        for name, (weight, bias, scale) in zip(MATRICES, given, strict=True):
            self.register_buffer(name, weight.codes)
            self.register_buffer(f"{name}_scale", weight.scale)
            self.register_buffer(f"{name}_global_scale", weight.global_scale)
            self.register_buffer(f"{name}_zero_point", weight.zero_point)
            self.register_buffer(f"{name}_input_scale", scale)
            self.register_buffer(f"{name}_bias", None if bias is None else bias.detach())

    @classmethod
    def from_module(cls, module: nn.Module, scheme: str | LayerScheme, name: str = "experts") -> "QuantizedExperts":
        """Quantize the experts of a transformers module, which is left as it is.

        Raises:
            ValueError: no experts that fpk knows (see `expert_layout`), static activations, weights without data or
                finite scale.
        """
        pair = parse_layer_scheme(scheme)
        if pair.static:
            raise ValueError(f"{name}: expected dynamic activations for experts, got {pair}")
        layout = expert_layout(module)
        if layout is None:
            raise ValueError(f"{name}: expected experts with gate_up_proj and down_proj, got {type(module).__name__}")
        made = []
        for key in MATRICES:
            weight = matrices_of(module, key, layout)
            if weight.is_meta:
                raise ValueError(f"{name}.{key}: expected a tensor with data, got one on the meta device")
            expect_dtype(f"{name}.{key}", weight, *FLOAT_INPUTS)
            symmetric = pair.weight.format is INT8 and not pair.weight.product
            symmetric_options: dict[str, Any] = {"qmin": -127} if symmetric else {}
            codes = quantize(weight, pair.weight, **symmetric_options)
            if codes.scale.dtype is torch.float32:
                expect_valid_scale(f"{name}.{key}_scale", codes.scale)
            made.append(codes)
        activation = pair.activation_name if pair.activation else None
        bias13, bias2 = (getattr(module, f"{key}_bias", None) for key in MATRICES)
        return cls(made[0], made[1], activation, bias13, bias2, **layout["options"]).train(module.training)

    @property
    def scheme(self) -> str:
        """The layer scheme, "weights:activations"; the weights' two where they differ."""
        return f"{'/'.join(dict.fromkeys(self.schemes.values()))}:{self.activation_scheme or 'none'}"

    def weight(self, name: str) -> Quantized:
        codes, scale, over, zero = (self._buffers[f"{name}{p}"] for p in _PARTS)
        assert codes is not None and scale is not None
        return Quantized(codes, scale, self.schemes[name], zero, over, check=False)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """gate_up_proj (E, 2I, H) and down_proj (E, H, I) as the layer multiplies by them."""
        return self.weight("gate_up_proj").dequantize(dtype), self.weight("down_proj").dequantize(dtype)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(..., H) to (..., H) in the same dtype: bf16, fp16 or fp32 (not fp32 if weight-only, but under autocast).

        Raises:
            ValueError: a shape or dtype that does not fit, or an input that needs a gradient.
        """
        if hidden_states.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "QuantizedExperts.hidden_states: expected a tensor that needs no gradient (forward only: use "
                "torch.no_grad() or torch.inference_mode()), got requires_grad=True"
            )
        rows = as_autocast(hidden_states.reshape(-1, hidden_states.shape[-1]))
        if self.activation_scheme is None:
            expect_dtype("QuantizedExperts.hidden_states", rows, *ACTIVATIONS)
        out = moe_experts(
            rows, top_k_weights.reshape(rows.shape[0], -1).float(), top_k_index.reshape(rows.shape[0], -1),
            self.weight("gate_up_proj"), self.weight("down_proj"), act=self.act,
            bias13=self._buffers["gate_up_proj_bias"], bias2=self._buffers["down_proj_bias"],
            input_scale13=self._buffers["gate_up_proj_input_scale"],
            input_scale2=self._buffers["down_proj_input_scale"], **self.options,
        )  # fmt: skip
        return out.reshape(hidden_states.shape).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        shapes = ", ".join(f"{m}={list(self.weight(m).shape or ())}" for m in MATRICES)
        return f"experts={self.num_experts}, scheme={self.scheme}, {shapes}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedExperts":
        kept = {id(self._buffers[name]) for name in _KEPT}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if id(tensor) in kept and moved.dtype != tensor.dtype else moved

        return cast(QuantizedExperts, super()._apply(move, recurse))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy, with codes and scales as plain bytes."""
        state = self.__dict__.copy()
        tensors = {n: t for n, t in self._buffers.items() if t is not None}
        state["_buffers"] = self._buffers | {n: plain_bytes(t) for n, t in tensors.items()}
        state["_dtypes"] = {n: t.dtype for n, t in tensors.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        dtypes = state.pop("_dtypes")
        super().__setstate__(state)
        for name, dtype in dtypes.items():
            self._buffers[name] = cast(Tensor, self._buffers[name]).view(dtype)


def parts_of(name: str, module: QuantizedExperts) -> dict[str, Dense]:
    """Each expert's projections as layers of their own, by name; gate and up as transformers calls them."""
    made: dict[str, Dense] = {}
    for key in MATRICES:
        weight, given = module.weight(key), module._buffers[f"{key}_input_scale"]
        scheme = scheme_of(weight.scheme)
        N, count = cast(torch.Size, weight.shape)[1], 2 if key == "gate_up_proj" else 1
        rows = scheme.granularity.rows
        if rows > 1 and N // count % rows:
            raise ValueError(f"{name}: expected gate and up to begin at blocks of {rows} rows, they have {N // count}")
        for e in range(module.num_experts):
            for i, projection in enumerate(("gate_proj", "up_proj") if count == 2 else ("down_proj",)):

                def cut(tensor: Tensor | None, e: int = e, i: int = i, count: int = count) -> Tensor | None:
                    """The rows of one projection, of codes or of scales that have rows."""
                    if tensor is None or tensor.shape[1] == 1:
                        return None if tensor is None else tensor[e]
                    if module.options.get("interleaved") and count == 2:
                        return tensor[e, i::2]
                    return tensor[e].chunk(count)[i]

                codes, scale = cut(weight.codes), cut(weight.scale)
                assert codes is not None and scale is not None
                made[f"{name}.{e}.{projection}"] = Dense(
                    codes, scale, scheme, module.activation_scheme, given, cut(weight.global_scale)
                )
    return made
