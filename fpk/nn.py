"""Quantized layers for torch and transformers models: swap `nn.Linear` in place, or for the length of a block.

    report = fpk.quantize_(model, "fp8_channel", ignore=["re:.*down_proj"])
    with fpk.quantized(model, "int8_channel"):
        ...

The layers compose `fpk.quantize` and `fpk.mm`; they are forward only.
"""

import contextlib
import fnmatch
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fpk._report import LayerReport, QuantizeReport
from fpk.api import LayerScheme, Quantized, mm, parse_layer_scheme, plain_bytes, quantize
from fpk.check import FLOAT_INPUTS, expect_dtype, expect_valid_scale
from fpk.formats import FP8, INT8
from fpk.methods.base import Attention, Linear, RoutedExperts

__all__ = [
    "Attention", "LayerReport", "Linear", "QuantizeReport", "QuantizedLinear", "RoutedExperts", "quantize_",
    "quantized",
]  # fmt: skip

Filter = Callable[[nn.Module, str], bool]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class QuantizedLinear(nn.Module):
    """A linear layer with quantized weights: y = x @ weight.T + bias, forward only.

    Buffers: `weight` (N, K) codes, `weight_scale` of the scheme's granularity, `bias` (N,) or None. They keep their
    dtypes when the module is cast (`.half()`, `.to(torch.bfloat16)`), the bias excepted, and follow it between devices.
    For activations with zero points there is `colsum` too, the sums of the codes' rows; it is not in the state dict.

    Args:
        weight: (N, K), as `fpk.quantize` gives it.
        activation: scheme that x is quantized with at every call; None leaves x as it is (weight-only).
        bias: (N,) or None.

    Raises:
        ValueError: weight is no matrix, or the two schemes have no product.
    """

    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    colsum: Tensor | None

    def __init__(self, weight: Quantized, activation: str | None = None, bias: Tensor | None = None) -> None:
        super().__init__()
        if weight.codes.dim() != 2 or weight.zero_point is not None or weight.global_scale is not None:
            raise ValueError(f"QuantizedLinear.weight: expected an (N, K) matrix with one scale tensor, got {weight!r}")
        scheme = parse_layer_scheme(f"{weight.scheme}:{activation or 'none'}")
        self.out_features, self.in_features = weight.codes.shape
        self.weight_scheme = weight.scheme
        self.activation_scheme = activation
        # decided here, so that a traced forward looks no device up
        same_format = scheme.activation is not None and scheme.activation.format is scheme.weight.format
        self._options: dict[str, Any] = (
            {"dtype": weight.codes.dtype} if same_format and weight.codes.dtype in FP8 else {}
        )
        self.register_buffer("weight", weight.codes)
        self.register_buffer("weight_scale", weight.scale)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("colsum", None, persistent=False)
        if scheme.activation is not None and "zero_point" in scheme.activation.outputs:
            self.colsum = weight.codes.sum(1, dtype=torch.int32)

    @classmethod
    def from_linear(cls, linear: nn.Linear, scheme: str | LayerScheme, name: str = "linear") -> "QuantizedLinear":
        """Quantize the weights of `linear`; `name` is how errors call it.

        Raises:
            ValueError: weights without data or finite scale, or of a dtype that cannot be quantized.
        """
        pair = parse_layer_scheme(scheme)
        weight = linear.weight.detach()
        if weight.is_meta:
            raise ValueError(f"{name}.weight: expected a tensor with data, got one on the meta device")
        expect_dtype(f"{name}.weight", weight, *FLOAT_INPUTS)
        options: dict[str, Any] = {"qmin": -127} if pair.weight.format is INT8 else {}
        codes = quantize(weight, pair.weight, **options)
        if codes.scale.dtype is torch.float32:
            expect_valid_scale(f"{name}.weight_scale", codes.scale)
        made = cls(codes, pair.activation.name if pair.activation else None, linear.bias)
        return made.train(linear.training)

    @property
    def scheme(self) -> str:
        """The layer scheme, "weights:activations"."""
        return f"{self.weight_scheme}:{self.activation_scheme or 'none'}"

    @property
    def quantized_weight(self) -> Quantized:
        return Quantized(self.weight, self.weight_scale, self.weight_scheme, check=False)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weights that the layer multiplies by, (N, K)."""
        return self.quantized_weight.dequantize(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) bf16, fp16 or fp32 -> (..., N) in x's dtype.

        Raises:
            ValueError: x has another last dimension or dtype, or needs a gradient.
        """
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "QuantizedLinear.x: expected a tensor that needs no gradient (forward only: use torch.no_grad() or "
                "torch.inference_mode()), got requires_grad=True"
            )
        expect_dtype("QuantizedLinear.x", x, *FLOAT_INPUTS)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"QuantizedLinear.x: expected (..., {self.in_features}), got {tuple(x.shape)}")
        rows = x.reshape(-1, self.in_features)
        activations: Tensor | Quantized = rows
        if self.activation_scheme is not None:
            activations = quantize(rows, self.activation_scheme, **self._options)
        out = mm(activations, self.quantized_weight, self.bias, out_dtype=x.dtype, colsum=self.colsum)
        return out.reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme}, weight={_dtype(self.weight)} {tuple(self.weight.shape)}, "
            f"weight_scale={_dtype(self.weight_scale)} {tuple(self.weight_scale.shape)}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedLinear":
        """Move codes and scales with the module, but never cast them: codes of another dtype are other numbers."""
        kept = {id(self.weight), id(self.weight_scale)}

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if id(tensor) in kept and moved.dtype != tensor.dtype:
                moved = tensor.to(moved.device)
            return moved

        return cast(QuantizedLinear, super()._apply(move, recurse))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and deepcopy, with the codes as plain bytes."""
        state = self.__dict__.copy()
        state["_buffers"] = self._buffers | {"weight": plain_bytes(self.weight)}
        state["_codes_dtype"] = self.weight.dtype
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        dtype = state.pop("_codes_dtype")
        super().__setstate__(state)
        self.weight = self.weight.view(dtype)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """Refuse weights of another dtype (copying would cast them) and scales that cannot be."""
        wrong = []
        for name in ("weight", "weight_scale"):
            value = state_dict.get(prefix + name)
            if value is None:
                continue
            if value.dtype != getattr(self, name).dtype:
                wrong.append(f"{prefix}{name}: expected {_dtype(getattr(self, name))}, got {_dtype(value)}")
            elif name == "weight_scale" and value.dtype is torch.float32 and not value.is_meta:
                try:
                    expect_valid_scale(prefix + name, value)
                except ValueError as error:
                    wrong.append(str(error))
        if wrong:
            error_msgs.extend(wrong)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self.colsum is not None and not self.weight.is_meta:
            self.colsum = self.weight.sum(1, dtype=torch.int32)


def quantize_(
    model: nn.Module,
    scheme: str | LayerScheme,
    ignore: Sequence[str] = (),
    filter: Filter | None = None,
    lm_head: bool = False,
) -> QuantizeReport:
    """Replace the `nn.Linear` layers of a model by `QuantizedLinear`, in place, one after the other.

    The output layer is left alone unless `lm_head` says otherwise: a layer called "lm_head", or the one that a
    transformers model names as its output embeddings. Always left alone are a layer whose weight belongs to another
    module too (tied embeddings), subclasses of `nn.Linear` and layers with hooks, which may not do what a linear layer
    does, and layers that are quantized already.

    Args:
        model: any module that holds `nn.Linear` layers.
        scheme: layer scheme, see `fpk.parse_layer_scheme`: "fp8_channel" quantizes activations per token as well,
            "fp8_tensor:none" the weights only.
        ignore: layers to leave alone, by full name: exact ("model.layers.0.mlp.up_proj", or a module that holds
            layers), with wildcards ("*.mlp.*"), or as a regular expression that matches from the start
            ("re:.*down_proj").
            Patterns that match nothing are warned about and reported.
        filter: called as filter(module, name) with every layer that is left; False leaves it alone.
        lm_head: quantize the output layer too.

    Returns:
        A report that prints: layers changed, layers left alone and why, bytes before and after.

    Raises:
        ValueError: unknown scheme, a pattern that is no regular expression, a model that is itself a linear layer, or
            weights that cannot be quantized (layers before that one stay quantized).
    """
    return _quantize(model, parse_layer_scheme(scheme), ignore, filter, lm_head, None)


@contextlib.contextmanager
def quantized(
    model: nn.Module,
    scheme: str | LayerScheme,
    ignore: Sequence[str] = (),
    filter: Filter | None = None,
    lm_head: bool = False,
) -> Iterator[QuantizeReport]:
    """Quantize a model's linear layers inside the block, as `quantize_` does, and put the old ones back after it."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        yield _quantize(model, parse_layer_scheme(scheme), ignore, filter, lm_head, replaced)
    finally:
        for parent, attribute, original in reversed(replaced):
            setattr(parent, attribute, original)


def _quantize(
    model: nn.Module,
    scheme: LayerScheme,
    ignore: Sequence[str],
    filter: Filter | None,
    lm_head: bool,
    replaced: list[tuple[nn.Module, str, nn.Module]] | None,
) -> QuantizeReport:
    if isinstance(model, nn.Linear):
        raise ValueError(f"quantize_.model: expected a module that holds linear layers, got {type(model).__name__}")
    report = QuantizeReport(str(scheme), bytes_before=_model_bytes(model))
    patterns = _Patterns(ignore)
    names = _layers(model, _Skips(model, patterns, filter, lm_head), report)
    report.unmatched = patterns.unmatched([n for n, _ in model.named_modules() if n])
    for pattern in report.unmatched:
        warnings.warn(f"quantize_: ignore pattern {pattern!r} matches no module", stacklevel=3)
    for name in names:
        linear = cast(nn.Linear, model.get_submodule(name))
        made = QuantizedLinear.from_linear(linear, scheme, name)
        # one layer may stand in several places
        places = [(m, key) for m in model.modules() for key, child in m._modules.items() if child is linear]
        before = _module_bytes(linear)
        report.changed.append(LayerReport(name, tuple(linear.weight.shape), made.scheme, before, _module_bytes(made)))
        for parent, attribute in places:
            if replaced is not None:
                replaced.append((parent, attribute, linear))
            setattr(parent, attribute, made)
        del linear  # its weights can go before the next layer's are quantized
    report.bytes_after = _model_bytes(model)
    return report


class _Patterns:
    """Ignore patterns: exact names, wildcards, `re:` expressions."""

    def __init__(self, patterns: Sequence[str]) -> None:
        if isinstance(patterns, str):
            raise ValueError(f"quantize_.ignore: expected a list of patterns, got the string {patterns!r}")
        self._matchers = {p: _matcher(p) for p in patterns}

    def match(self, name: str) -> str | None:
        """The first pattern that matches."""
        return next((p for p, matches in self._matchers.items() if matches(name)), None)

    def unmatched(self, names: list[str]) -> list[str]:
        return [p for p, matches in self._matchers.items() if not any(matches(n) for n in names)]


def _matcher(pattern: str) -> Callable[[str], object]:
    if not isinstance(pattern, str) or not pattern:
        raise ValueError(f"quantize_.ignore: expected names, wildcards or 're:' expressions, got {pattern!r}")
    if pattern.startswith("re:"):
        try:
            return re.compile(pattern[3:]).match
        except re.error as error:
            raise ValueError(f"quantize_.ignore: {pattern!r} is no regular expression ({error})") from error
    if any(c in pattern for c in "*?["):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return lambda name: name == pattern or name.startswith(f"{pattern}.")


class _Skips:
    """Why a layer is left alone."""

    def __init__(self, model: nn.Module, patterns: _Patterns, filter: Filter | None, lm_head: bool) -> None:
        self._patterns, self._filter, self._lm_head = patterns, filter, lm_head
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self._output = output if isinstance(output, nn.Module) else None
        self._owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(name)

    def reason(self, name: str, module: nn.Module) -> str:
        if isinstance(module, QuantizedLinear):
            return f"already {module.scheme}"
        if not isinstance(module, nn.Linear):
            return "holds stacked weights, not nn.Linear layers"
        pattern = self._patterns.match(name)
        if pattern is not None:
            return f"ignored by {pattern!r}"
        others = [n for n in self._owners[id(module.weight)] if n != name] if type(module) is nn.Linear else []
        if others:
            return f"weight shared with {', '.join(others)}"
        if not self._lm_head and (name.rsplit(".", 1)[-1] == "lm_head" or module is self._output):
            return "output layer (lm_head=True quantizes it)"
        if type(module) is not nn.Linear:
            return f"{type(module).__name__}, a subclass of nn.Linear"
        if "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in _HOOKS):
            return "has hooks"
        if module.weight.dtype not in FLOAT_INPUTS:
            return f"weight is {_dtype(module.weight)}"
        if self._filter is not None and not self._filter(module, name):
            return "refused by filter"
        return ""


def _layers(model: nn.Module, skips: _Skips, report: QuantizeReport) -> list[str]:
    """Names of the layers to quantize; the others go into the report."""
    names = []
    for name, module in model.named_modules():
        stacked = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
        if not isinstance(module, (nn.Linear, QuantizedLinear)) and not stacked:
            continue
        reason = skips.reason(name, module)
        if not reason:
            names.append(name)
            continue
        shape = tuple(cast(Tensor, stacked[0] if stacked else module.weight).shape)
        size = _module_bytes(module)
        report.skipped.append(LayerReport(name, shape, "", size, size, reason))
    return names


def _module_bytes(module: nn.Module) -> int:
    """Bytes of a module's own parameters and buffers."""
    own = (*module._parameters.values(), *module._buffers.values())
    return sum(t.nbytes for t in own if t is not None)


def _model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
