"""Quantized checkpoints to and from torch and transformers models.

    report = fpk.load_quantized(model, "path/to/checkpoint")
    fpk.save_quantized(model, "out", family="compressed-tensors")

Quantized layers become `QuantizedLinear`, the one layer that `quantize_` makes and `save_quantized` writes: so what was
loaded, quantized here, or saved and loaded again runs the same kernels on the same bits. (The methods of
`fpk.methods` are for engines, which build their own layers and feed them tensor by tensor.)
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fpk._experts_loading import ExpertsPlan
from fpk._saving import save_quantized
from fpk.methods._dense import (
    BLOCK_SUFFIXES,
    Dense,
    Found,
    StoredLayer,
    find_layers,
    join,
    read_layer,
    read_scales,
    refuse_codes,
    values_shape,
)
from fpk.methods._families import Dialect, dialect_of
from fpk.methods._stored_experts import renamed
from fpk.methods.checkpoint import FLOATS, Checkpoint, StoredTensor
from fpk.nn import QuantizedLinear

__all__ = ["LoadReport", "empty_parameters", "load_quantized", "save_quantized"]

_ACCEPTED = re.compile(r".*(?:\.|^)(?:g_idx|weight_g_idx|rotary_emb\.inv_freq|masked_bias)$")
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


@dataclass
class LoadReport:
    """What `load_quantized` did.

    Attributes:
        family: the checkpoint's dialect.
        layers: quantized layers and their schemes, "weights:activations".
        plain: tensors that were loaded as they are.
        kv_scales: scales of the KV cache in the checkpoint, by attention module and "k", "v", "q", "kv" or "prob".
            Linear layers have no use for them; they are here for whoever holds the cache.
        missing: parameters and buffers of the model that the checkpoint does not have; they are as they were.
        unused: tensors of the checkpoint that the model has no place for.
        accepted: unused tensors that models do without: rotary frequencies, further prediction layers.
        notes: where config and tensors disagree, skip entries that match nothing, what is done otherwise than asked.
    """

    family: str
    layers: dict[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    kv_scales: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for scheme in self.layers.values():
            counts[scheme] = counts.get(scheme, 0) + 1
        schemes = ", ".join(f"{n} {scheme}" for scheme, n in counts.items()) or "no quantized layers"
        lines = [f"{self.family}: {schemes}; {len(self.plain)} other tensors"]
        for what in ("kv_scales", "missing", "unused", "accepted", "notes"):
            values = list(getattr(self, what))
            lines += [f"{what}: {_listed(values)}"] if values else []
        return "\n".join(lines)


@contextlib.contextmanager
def empty_parameters() -> Iterator[None]:
    """Modules made inside the block have parameters without data (on the meta device), and real buffers.

    A model made so takes no memory until `load_quantized` fills it; buffers that no checkpoint holds, such as rotary
    frequencies, are there.
    """
    register = nn.Module.register_parameter

    def register_empty(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        made = self._parameters[name]
        if made is not None and not made.is_meta:
            self._parameters[name] = nn.Parameter(made.to("meta"), requires_grad=made.requires_grad)

    nn.Module.register_parameter = register_empty  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def load_quantized(
    model: nn.Module,
    checkpoint: str | Path | Checkpoint,
    *,
    device: torch.device | str | None = None,
    fused: Mapping[str, Sequence[str]] | None = None,
    strict: bool = True,
) -> LoadReport:
    """Load a quantized checkpoint into a model, in place.

    Quantized linear layers are replaced by `QuantizedLinear`, everything else is loaded into the parameters and buffers
    that are there, in their dtypes. Files, shapes, dtypes and scales are checked before the model is touched, and it
    changes only once every layer has been read: an error leaves it as it was.

    Args:
        model: unquantized; best made without data, on the meta device or under `fpk.checkpoint.empty_parameters()`, so
            that memory never holds more than the quantized model. Layers that are `QuantizedLinear` already are
            replaced.
        checkpoint: a directory with config.json and safetensors files. Linear layers and experts in FP8, INT8, MX
            formats and NVFP4 of the families fp8 (AutoFP8, DeepSeek and Qwen blocks, transformers), compressed-tensors,
            Quark, ModelOpt, fbgemm_fp8 and gpt-oss.
        device: where parameters without data are made; None is that of the model's first parameter with data, else CPU.
        fused: fused projections of the model whose parts the checkpoint has, {"qkv_proj": ["q_proj", "k_proj",
            "v_proj"]}: the parts become one layer.
        strict: raise if the checkpoint lacks parameters or has tensors without a place; False reports them.

    Returns:
        A report that prints.

    Raises:
        ValueError: a file, config or tensor that is not as it should be, codes without scale, a layer that the model
            does not have as `nn.Linear` of that shape, or (strict) missing and unused names.
        NotImplementedError: a scheme that has no layer (zero points, sparse weights, scales before the product); names
            tensor and scheme.
    """
    source = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
    if source.quantization is None:
        raise ValueError(
            f"{source.path}: expected a quantization_config in config.json, or hf_quant_config.json: is it quantized?"
        )
    dialect = dialect_of(source.quantization, fused)
    found = find_layers(source, dialect)
    report = LoadReport(dialect.name, notes=found.notes)
    plan = _Plan(model, found, fused or {}, source, dialect, report)
    plan.check(strict)
    target = torch.device(device) if device is not None else _device(model)
    made: dict[str, Any] = {name: plan.build(name, target) for name in plan.layers}
    made |= {name: plan.experts.build(name, target) for name in plan.experts.quantized}
    loaded = {name: _plain(source, stored, plan.places[name], target) for name, stored in plan.plain.items()}
    for (module, kind), stored in found.kv_scales.items():
        report.kv_scales.setdefault(module, {})[kind] = source.read(stored.name).float().clone()
    # from here on nothing can fail
    report.layers = {name: layer.scheme for name, layer in made.items()}
    loaded |= plan.experts.plain(plan.places, target)
    _put(model, [(plan.places[name], tensor) for name, tensor in loaded.items()])
    _swap(model, {plan.modules[name]: layer for name, layer in made.items()})
    report.plain = list(loaded)
    report.notes += [f"skip entry {e!r} matches no layer" for e in _unmatched(model, dialect)]
    return report


class _Plan:
    """Which stored tensors go where in a model."""

    def __init__(
        self, model: nn.Module, found: Found, fused: Mapping[str, Sequence[str]], source: Checkpoint,
        dialect: Dialect, report: LoadReport,
    ) -> None:  # fmt: skip
        self.model, self.found, self.source, self.report = model, found, source, report
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.places: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))
        }  # fmt: skip
        self.experts = self._match_experts(dialect)
        self.layers = self._match_layers(fused)
        self.plain = self._match_plain()

    def _match_experts(self, dialect: Dialect) -> "ExpertsPlan":
        modules = {n: m for n, m in self.modules.items() if ExpertsPlan.takes(m)}
        return ExpertsPlan(modules, self.found, dialect.spec, self.source)

    def _match_layers(self, fused: Mapping[str, Sequence[str]]) -> dict[str, list[StoredLayer]]:
        """Layers of the model by name, with the stored layers that make them up."""
        layers: dict[str, list[StoredLayer]] = {}
        joined: set[str] = set()
        for name in self.modules:
            parent, _, last = name.rpartition(".")
            parts = [f"{parent}.{p}" if parent else p for p in fused.get(last, ())]
            present = [p for p in parts if p in self.found.layers]
            if not present or name in self.found.layers:
                continue
            if len(present) < len(parts):
                missing = ", ".join(p for p in parts if p not in self.found.layers)
                raise ValueError(f"{name}: expected all parts of the fused layer to be quantized, {missing} is not")
            layers[name] = [self.found.layers[p] for p in parts]
            joined.update(parts)
        for name, stored in self.found.layers.items():
            if name in joined:
                continue
            if name in self.modules:
                layers[name] = [stored]
            elif "experts" in name.split("."):
                raise NotImplementedError(f"{stored.weight}: {stored.spec}: experts have no layer in this model yet")
            elif self._is_further_layer(stored.weight.name):
                self.report.accepted += [t.name for t in stored.parts.values()]
            else:
                self.report.unused += [t.name for t in stored.parts.values()]
        return layers

    def _match_plain(self) -> dict[str, StoredTensor]:
        state = set(self.model.state_dict(keep_vars=True))
        plain: dict[str, StoredTensor] = {}
        for name, stored in self.found.plain.items():
            if name in state or renamed(name) in state:
                plain[name if name in state else renamed(name)] = stored
            elif name.endswith(BLOCK_SUFFIXES):
                refuse_codes(stored)
                self.report.unused.append(name)
            elif _ACCEPTED.match(name) or self._is_further_layer(name):
                self.report.accepted.append(name)
            else:
                self.report.unused.append(name)
        self.report.unused = sorted(self.report.unused + self.source.unlisted)
        filled = {id(self.places[name]) for name in plain}  # tied parameters have two names and one tensor
        of_layers = {f"{layer}.{n}" for layer in self.layers for n in self._state_of(layer)} | self.experts.state()
        self.report.missing = sorted(
            name for name in state - plain.keys() - of_layers
            if name in self.places and id(self.places[name]) not in filled
        )  # fmt: skip
        return plain

    def _state_of(self, layer: str) -> list[str]:
        """Names in a layer that its stored tensors fill, the bias only if it is stored."""
        has_bias = all("bias" in part.parts for part in self.layers[layer])
        names = ["weight", "weight_scale", "weight_global_scale", "weight_zero_point", "input_scale"]
        return [*names, "bias"] if has_bias else names

    def _is_further_layer(self, name: str) -> bool:
        """Is it of a layer behind the model's last (multi-token prediction)?"""
        match, count = _LAYER.match(name), self.source.config.get("num_hidden_layers")
        return match is not None and type(count) is int and int(match[1]) >= count

    def check(self, strict: bool) -> None:
        """Raise for everything that headers and scales can tell."""
        for name, parts in self.layers.items():
            module = self.modules[name]
            if not isinstance(module, (nn.Linear, QuantizedLinear)):
                raise ValueError(f"{parts[0].weight}: expected a linear layer {name}, got {type(module).__name__}")
            for part in parts:
                read_scales(self.source, part)  # checks header and values
            shape = (sum(p.weight.shape[0] for p in parts), values_shape(parts[0])[1])
            if shape != (module.out_features, module.in_features):
                wanted = (module.out_features, module.in_features)
                raise ValueError(f"{parts[0].weight}: expected {wanted} for {name}, got {shape}")
            self._check_bias(name, parts, module)
        self.experts.check()
        for name, stored in self.plain.items():
            _check_plain(stored, self.places[name])
        real = {id(t) for t in self.model.state_dict(keep_vars=True).values()}
        lost = [n for n, b in self.model.named_buffers() if b.is_meta and id(b) not in real]
        if lost:
            raise ValueError(
                f"{_listed(lost)}: on the meta device, and no part of checkpoints: make the model under "
                "fpk.checkpoint.empty_parameters()"
            )
        for what in ("missing", "unused") if strict else ():
            names = getattr(self.report, what)
            if names:
                raise ValueError(f"{self.source.path}: {what}: {_listed(names)} (strict=False reports them)")

    def _check_bias(self, name: str, parts: list[StoredLayer], module: Any) -> None:
        with_bias = [p for p in parts if "bias" in p.parts]
        if not with_bias:
            return
        if len(with_bias) < len(parts) or module.bias is None:
            raise ValueError(f"{with_bias[0].parts['bias']}: expected no bias, {name} has none in all of its parts")
        for part in parts:
            bias = part.parts["bias"]
            if bias.shape != (part.weight.shape[0],) or bias.dtype not in FLOATS:
                raise ValueError(f"{bias}: expected {part.weight.shape[0]} floats, got {bias.dtype} {bias.shape}")

    def build(self, name: str, device: torch.device) -> QuantizedLinear:
        parts, module = self.layers[name], self.modules[name]
        read: list[Dense] = [read_layer(self.source, part, device) for part in parts]
        dense = read[0] if len(read) == 1 else join(name, read)
        bias: Any = module.bias
        if bias is not None and all("bias" in part.parts for part in parts):
            stored = torch.cat([self.source.read(part.parts["bias"].name).float() for part in parts])
            bias = stored.to(device, bias.dtype)
        return QuantizedLinear(dense.weight, dense.activation, bias, dense.input_scale).train(module.training)


def _check_plain(stored: StoredTensor, place: Tensor) -> None:
    if place.dtype.is_floating_point:
        refuse_codes(stored)
    if stored.shape != tuple(place.shape):
        raise ValueError(f"{stored}: expected {tuple(place.shape)}, got {stored.shape}")
    if place.dtype.is_floating_point != (stored.dtype in (*FLOATS, "F64")):
        raise ValueError(f"{stored}: expected {str(place.dtype).removeprefix('torch.')}, got {stored.dtype}")


def _plain(source: Checkpoint, stored: StoredTensor, place: Tensor, device: torch.device) -> Tensor:
    """The tensor in its place's dtype: made where that has no data, else on the CPU, to copy from.

    So the copy, when the model is already changing, allocates nothing and cannot fail for want of memory.
    """
    read = source.read(stored.name)
    return read.to(device, place.dtype, copy=True) if place.is_meta else read.to(place.dtype)


def _put(model: nn.Module, values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Give parameters and buffers their values: in place where they have data, everywhere where they have none."""
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for place, tensor in values:
            if not place.is_meta:
                place.copy_(tensor)
            elif isinstance(place, nn.Parameter):
                made[id(place)] = nn.Parameter(tensor, requires_grad=False)
            else:
                made[id(place)] = tensor
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            own.update({name: made[id(t)] for name, t in own.items() if id(t) in made})  # type: ignore[arg-type, misc]


def _swap(model: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Put layers in the place, or places, of others."""
    for module in list(model.modules()):
        module._modules.update({n: made[c] for n, c in module._modules.items() if c is not None and c in made})


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def _unmatched(model: nn.Module, dialect: Any) -> list[str]:
    """Skip entries that match no layer of the model, quantized or not."""
    for name, _ in model.named_modules():
        if name:
            with contextlib.suppress(ValueError):
                dialect.spec(name)
    return dialect.unmatched()


def _listed(names: Sequence[object], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
