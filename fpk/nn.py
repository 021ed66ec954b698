"""Quantized layers for torch and transformers models: swap `nn.Linear` in place, or for the length of a block.

    report = fpk.quantize_(model, "fp8_channel", ignore=["re:.*down_proj"])
    with fpk.quantized(model, "int8_channel"):
        ...
    ranges = fpk.calibrate(model, batches)
    fpk.quantize_(model, "fp8_channel:fp8_tensor_static", calibration=ranges)

The layers compose `fpk.quantize` and `fpk.mm`; they are forward only.
"""

import contextlib
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fpk._calibration import Calibration, LayerRange, few
from fpk._experts import QuantizedExperts
from fpk._experts_layout import expert_layout, holds_experts
from fpk._linear import QuantizedLinear, dtype_name
from fpk._report import LayerReport, QuantizeReport
from fpk.api import LayerScheme, parse_layer_scheme
from fpk.check import FLOAT_INPUTS
from fpk.kernels.quant.amax import amax
from fpk.methods._expressions import expression
from fpk.methods.base import Attention, Linear, RoutedExperts

__all__ = [
    "Attention", "Calibration", "LayerRange", "LayerReport", "Linear", "QuantizeReport", "QuantizedExperts",
    "QuantizedLinear", "RoutedExperts", "calibrate", "quantize_", "quantized",
]  # fmt: skip

Filter = Callable[[nn.Module, str], bool]

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def quantize_(
    model: nn.Module,
    scheme: str | LayerScheme,
    ignore: Sequence[str] = (),
    filter: Filter | None = None,
    lm_head: bool = False,
    calibration: Calibration | None = None,
) -> QuantizeReport:
    """Replace the `nn.Linear` layers of a model by `QuantizedLinear`, in place, one after the other, and the experts of
    transformers' mixture-of-experts models by `QuantizedExperts`.

    The output layer is left alone unless `lm_head` says otherwise: a layer called "lm_head", or the one that a
    transformers model names as its output embeddings. Always left alone are a layer whose weight belongs to another
    module too (tied embeddings), subclasses of `nn.Linear` and layers with hooks, which may not do what a linear layer
    does, and layers that are quantized already.

    Args:
        model: any module that holds `nn.Linear` layers.
        scheme: layer scheme, see `fpk.parse_layer_scheme`: "fp8_channel" quantizes activations per token as well,
            "fp8_tensor:none" the weights only, "fp8_channel:fp8_tensor_static" the activations by one fixed scale.
        ignore: layers to leave alone, by full name: exact ("model.layers.0.mlp.up_proj", or a module that holds
            layers), with wildcards ("*.mlp.*"), or as a regular expression that matches from the start
            ("re:.*down_proj").
            Patterns that match nothing are warned about and reported.
        filter: called as filter(module, name) with every layer that is left; False leaves it alone.
        lm_head: quantize the output layer too.
        calibration: what `calibrate` found, for static activations only. It has a range for every layer that is
            quantized, and names no layer that the model has not.

    Returns:
        A report that prints: layers changed, layers left alone and why, bytes before and after.

    Raises:
        ValueError: unknown scheme, a pattern that is no regular expression, a model that is itself a linear layer, a
            calibration that is missing, superfluous or of another model, or weights that cannot be quantized (layers
            before that one stay quantized).
    """
    return _quantize(model, parse_layer_scheme(scheme), _Choice(ignore, filter, lm_head), calibration, None)


@contextlib.contextmanager
def quantized(
    model: nn.Module,
    scheme: str | LayerScheme,
    ignore: Sequence[str] = (),
    filter: Filter | None = None,
    lm_head: bool = False,
    calibration: Calibration | None = None,
) -> Iterator[QuantizeReport]:
    """Quantize a model's layers inside the block, as `quantize_` does, and put the old ones back after it."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    try:
        yield _quantize(model, parse_layer_scheme(scheme), _Choice(ignore, filter, lm_head), calibration, replaced)
    finally:
        for parent, attribute, original in reversed(replaced):
            setattr(parent, attribute, original)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    scheme: str | LayerScheme | None = None,
    ignore: Sequence[str] = (),
    filter: Filter | None = None,
    lm_head: bool = False,
) -> Calibration:
    """Run a model over batches and record the largest finite magnitude of each linear layer's activations.

    The model is run as it is, in eval mode and without gradients; nothing of it is changed. What is recorded serves
    every static scheme: "fp8_tensor_static" and "int8_tensor_static" activations.

    Args:
        model: unquantized; layers that are quantized already are passed over.
        batches: what the model takes: a tensor, a mapping of keyword arguments, or a tuple or list of positional ones.
            Where a mapping has an "attention_mask" (B, T), activations (B, T, K) and (B T, K) count only where it is
            not 0.
        scheme: the layer scheme that the calibration is meant for, to be told beforehand if it needs none; None to
            leave that open.
        ignore, filter, lm_head: which layers, as for `quantize_`.

    Returns:
        A range for each layer that `quantize_` would replace; prints, saves and loads.

    Raises:
        ValueError: the model has no layer to quantize or is one itself, no batch or one of another kind, a layer that
            no batch reached or that saw no finite value, or a scheme without static activations.
    """
    if scheme is not None and not parse_layer_scheme(scheme).static:
        raise ValueError(f"calibrate.scheme: expected static activations, got {parse_layer_scheme(scheme)}")
    names = _layers(model, _Choice(ignore, filter, lm_head), QuantizeReport(""), "calibrate")
    if not names:
        raise ValueError("calibrate.model: expected linear layers to quantize, found none")
    observers = {name: _Observer(cast(nn.Linear, model.get_submodule(name))) for name in names}
    training = [module for module in model.modules() if module.training]
    count = 0
    try:
        model.eval()
        with torch.no_grad():
            for batch in batches:
                count += 1
                mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
                for observer in observers.values():
                    observer.mask = mask
                _run(model, batch)
    finally:
        for observer in observers.values():
            observer.handle.remove()
        for module in training:
            module.training = True
    if not count:
        raise ValueError("calibrate.batches: expected at least one batch, got none")
    idle = [name for name, observer in observers.items() if not observer.tokens]
    if idle:
        raise ValueError(f"calibrate.batches: expected tokens for every layer, none reached {few(idle)}")
    blind = [name for name, observer in observers.items() if not observer.saw_finite]
    if blind:
        raise ValueError(f"calibrate.batches: expected finite activations, {few(blind)} saw only NaN and Inf")
    return Calibration({name: observer.range for name, observer in observers.items()}, count)


class _Observer:
    """Watches the input of one layer. The maximum stays on the device until it is asked for."""

    def __init__(self, layer: nn.Linear) -> None:
        self.shape = tuple(layer.weight.shape)
        self.mask: Tensor | None = None
        self.tokens = 0
        self._amax: Tensor | None = None
        self._finite: Tensor | None = None
        self.handle = layer.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, _: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x = args[0] if args else kwargs["input"]
        rows = x.reshape(-1, x.shape[-1])
        # layers of experts get (B T, K)
        if self.mask is not None and x.shape[:-1] in (self.mask.shape, (self.mask.numel(),)):
            rows = rows[self.mask.reshape(-1) != 0]
        self.tokens += rows.shape[0]
        found, finite = amax(rows), rows.isfinite().any()
        found = torch.where(found.isfinite(), found, 0.0)  # Inf: of a batch that held nothing else
        self._amax = found if self._amax is None else torch.maximum(self._amax, found)
        self._finite = finite if self._finite is None else self._finite | finite

    @property
    def saw_finite(self) -> bool:
        return self._finite is not None and bool(self._finite)

    @property
    def range(self) -> LayerRange:
        assert self._amax is not None
        return LayerRange(self._amax.item(), self.tokens, self.shape)


def _run(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Tensor):
        model(batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, (tuple, list)):
        model(*batch)
    else:
        raise ValueError(f"calibrate.batches: expected tensors, mappings, tuples or lists, got {type(batch).__name__}")


def _quantize(
    model: nn.Module,
    scheme: LayerScheme,
    choice: "_Choice",
    calibration: Calibration | None,
    replaced: list[tuple[nn.Module, str, nn.Module]] | None,
) -> QuantizeReport:
    report = QuantizeReport(str(scheme), bytes_before=_model_bytes(model))
    names = _layers(model, choice, report, "quantize_", experts=not scheme.static)
    for pattern in report.unmatched:
        warnings.warn(f"quantize_: ignore pattern {pattern!r} matches no module", stacklevel=3)
    if scheme.static and calibration is None:
        raise ValueError(f"quantize_.calibration: expected one for {scheme} (fpk.calibrate), got None")
    if calibration is not None:
        if not scheme.static:
            raise ValueError(f"quantize_.calibration: expected None for {scheme}, got a calibration")
        shapes = {name: tuple(cast(nn.Linear, model.get_submodule(name)).weight.shape) for name in names}
        calibration.expect_fits(names, {r.name: r.shape for r in report.skipped} | shapes)
    for name in names:
        layer = model.get_submodule(name)
        shape, before = _shape(layer), _module_bytes(layer)
        made: QuantizedLinear | QuantizedExperts
        if isinstance(layer, nn.Linear):
            input_amax = calibration.layers[name].amax if calibration is not None else None
            made = QuantizedLinear.from_linear(layer, scheme, name, input_amax)
        else:
            made = QuantizedExperts.from_module(layer, scheme, name)
        # one layer may stand in several places
        places = [(m, key) for m in model.modules() for key, child in m._modules.items() if child is layer]
        report.changed.append(LayerReport(name, shape, made.scheme, before, _module_bytes(made)))
        for parent, attribute in places:
            if replaced is not None:
                replaced.append((parent, attribute, layer))
            setattr(parent, attribute, made)
        del layer  # its weights can go before the next layer's are quantized
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
        return expression("quantize_.ignore", pattern[3:])
    if any(c in pattern for c in "*?["):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return lambda name: name == pattern or name.startswith(f"{pattern}.")


@dataclass(frozen=True)
class _Choice:
    """Which layers a caller wants."""

    ignore: Sequence[str]
    filter: Filter | None
    lm_head: bool


class _Skips:
    """Why a layer is left alone."""

    def __init__(self, model: nn.Module, patterns: _Patterns, choice: _Choice, experts: bool) -> None:
        self._experts = experts
        self._patterns, self._filter, self._lm_head = patterns, choice.filter, choice.lm_head
        output = getattr(model, "get_output_embeddings", lambda: None)()
        self._output = output if isinstance(output, nn.Module) else None
        self._owners: dict[int, list[str]] = {}
        for name, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._owners.setdefault(id(parameter), []).append(name)

    def reason(self, name: str, module: nn.Module) -> str:
        if isinstance(module, (QuantizedLinear, QuantizedExperts)):
            return f"already {module.scheme}"
        is_linear = isinstance(module, nn.Linear)
        if not is_linear and expert_layout(module) is None:
            if holds_experts(module):
                return "holds experts that compute what fpk has no layer for"
            return "holds stacked weights, not nn.Linear layers"
        if not is_linear and not self._experts:
            return "holds experts, which have no static activations"
        pattern = self._patterns.match(name)
        if pattern is not None:
            return f"ignored by {pattern!r}"
        if not is_linear:
            return self._plain_reason(name, module, next(p for p in module._parameters.values() if p is not None))
        if type(module) is nn.Linear and module._parameters.get("weight") is None:
            return "weight is computed at every call (weight_norm, prune), not a parameter"
        others = [n for n in self._owners[id(module.weight)] if n != name] if type(module) is nn.Linear else []
        if others:
            return f"weight shared with {', '.join(others)}"
        if not self._lm_head and (name.rsplit(".", 1)[-1] == "lm_head" or module is self._output):
            return "output layer (lm_head=True quantizes it)"
        if type(module) is not nn.Linear:
            return f"{type(module).__name__}, a subclass of nn.Linear"
        return self._plain_reason(name, module, module.weight)

    def _plain_reason(self, name: str, module: nn.Module, weight: Tensor) -> str:
        if "forward" in module.__dict__ or any(getattr(module, hooks) for hooks in _HOOKS):
            return "has hooks"
        if weight.dtype not in FLOAT_INPUTS:
            return f"weight is {dtype_name(weight)}"
        if self._filter is not None and not self._filter(module, name):
            return "refused by filter"
        return ""


def _layers(model: nn.Module, choice: _Choice, report: QuantizeReport, caller: str, experts: bool = False) -> list[str]:
    """Names of the layers to quantize, experts too if wanted; others, and patterns without a match, are reported."""
    if isinstance(model, nn.Linear):
        raise ValueError(f"{caller}.model: expected a module that holds linear layers, got {type(model).__name__}")
    patterns = _Patterns(choice.ignore)
    skips = _Skips(model, patterns, choice, experts)
    report.unmatched = patterns.unmatched([n for n, _ in model.named_modules() if n])
    names = []
    for name, module in model.named_modules():
        stacked = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
        if not isinstance(module, (nn.Linear, QuantizedLinear, QuantizedExperts)) and not stacked:
            continue
        reason = skips.reason(name, module)
        if not reason:
            names.append(name)
            continue
        size = _module_bytes(module)
        report.skipped.append(LayerReport(name, _shape(module), "", size, size, reason))
    return names


def _shape(module: nn.Module) -> tuple[int, ...]:
    """Of a layer's weight; of experts, the first stack."""
    if isinstance(module, QuantizedExperts):
        return tuple(module.weight("gate_up_proj").shape or ())
    stacked = [p for p in module._parameters.values() if p is not None and p.dim() == 3]
    return tuple(cast(Tensor, stacked[0] if stacked else module.weight).shape)


def _module_bytes(module: nn.Module) -> int:
    """Bytes of a module's own parameters and buffers."""
    own = (*module._parameters.values(), *module._buffers.values())
    return sum(t.nbytes for t in own if t is not None)


def _model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum({id(t): t.nbytes for t in (*model.parameters(), *model.buffers())}.values())
