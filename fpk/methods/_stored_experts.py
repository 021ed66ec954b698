"""Experts of a checkpoint: one tensor an expert ("experts.3.w1.weight") or stacks ("experts.gate_up_proj_blocks")."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fpk.api import Quantized
from fpk.formats import E8M0, Granularity, per_block, scheme_of
from fpk.methods._dense import Dense, Found, StoredLayer, read_layer, read_scales
from fpk.methods._families import LayerSpec
from fpk.methods.checkpoint import CODES, Checkpoint, StoredTensor

ROLES = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
"""Names of an expert's projections, in the families' two spellings."""

RENAMED = ((".block_sparse_moe.", ".mlp."),)
"""What older checkpoints call modules, and what transformers 5 does."""

_ONE = re.compile(rf"(.*\.experts)\.(\d+)\.({'|'.join(ROLES)})")
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_blocks|\.weight|\.weight_packed)?")
_SCALES = ("_scales", "_scale_inv", "_scale", ".weight_scale", ".weight_scale_inv")


@dataclass
class StoredExperts:
    """Quantized experts: `one` by number and projection, or `stacks` by "gate_up" and "down"."""

    name: str
    one: dict[tuple[int, str], StoredLayer] = field(default_factory=dict)
    stacks: dict[str, StoredLayer] = field(default_factory=dict)
    biases: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def layers(self) -> list[StoredLayer]:
        return [*self.one.values(), *self.stacks.values()]

    @property
    def names(self) -> list[str]:
        """All tensors."""
        return [t.name for layer in self.layers for t in layer.parts.values()] + [t.name for t in self.biases.values()]

    @property
    def spec(self) -> LayerSpec:
        return self.layers[0].spec

    def check(self, checkpoint: Checkpoint, experts: int, hidden: int, inter: int) -> None:
        """Raise for everything that headers and scales can tell.

        Raises:
            ValueError: an expert or a projection that is missing, another size or scheme than the others.
            NotImplementedError: as `check_layer`.
        """
        shapes = {
            "gate": (inter, hidden),
            "up": (inter, hidden),
            "down": (hidden, inter),
            "gate_up": (2 * inter, hidden),
        }
        if self.stacks:
            wanted = [f"{self.name}.{n}_proj" for n in ("gate_up", "down") if n not in self.stacks]
        else:
            every = [(e, r) for e in range(experts) for r in ("gate", "up", "down")]
            wanted = [f"expert {e} {r}" for e, r in every if (e, r) not in self.one]
        if wanted:
            more = f" and {len(wanted) - 8} more" if len(wanted) > 8 else ""
            raise ValueError(
                f"{self.name}: expected all experts to be quantized, missing {', '.join(wanted[:8])}{more}"
            )
        extra = [e for e, _ in self.one if e >= experts]
        if extra:
            raise ValueError(f"{self.name}: expected {experts} experts, got number {max(extra)}")
        firsts: dict[bool, LayerSpec] = {}  # gate and up are one matrix, down another
        for key, layer in [*self.one.items(), *self.stacks.items()]:
            first = firsts.setdefault("down" in key, layer.spec)
            if layer.spec != first or layer.spec.activation != self.spec.activation:
                raise ValueError(f"{layer.weight}: expected {first} as its neighbours, got {layer.spec}")
        for (_, role), layer in self.one.items():
            read_scales(checkpoint, layer)
            rows, cols = layer.weight.shape
            got = (rows, cols * 8 // scheme_of(layer.spec.weight).format.bits)
            _expect(layer, got, shapes[role])
        for role, layer in self.stacks.items():
            stored = layer.weight.shape
            rest = stored[2] * stored[3] if len(stored) == 4 else stored[-1]
            bits = scheme_of(layer.spec.weight).format.bits
            _expect(layer, (*stored[:2], rest * 8 // bits), (experts, *shapes[role]))

    def read(self, checkpoint: Checkpoint, device: torch.device, interleaved: bool = False) -> "Experts":
        """The stacks on a device; nothing is rounded anew: gate and up of different scales get them per row.

        Args:
            interleaved: rows of gate and up alternate in the model, as they do in stacks.
        """
        if self.stacks:
            gate_up, down = (read_stack(checkpoint, self.stacks[n], device) for n in ("gate_up", "down"))
            return Experts(gate_up, down, self.spec.activation, None, None)
        count = 1 + max(e for e, _ in self.one)
        read = {key: read_layer(checkpoint, layer, device) for key, layer in self.one.items()}
        pairs = [_pair(read.pop((e, "gate")), read.pop((e, "up")), interleaved) for e in range(count)]
        downs = [read.pop((e, "down")) for e in range(count)]
        given13 = [p.input_scale for p in pairs if p.input_scale is not None]
        given2 = [d.input_scale for d in downs if d.input_scale is not None]
        return Experts(
            _stack(pairs), _stack(downs), self.spec.activation,
            torch.stack(given13).amax(0) if given13 else None, torch.stack(given2).amax(0) if given2 else None,
        )  # fmt: skip


@dataclass(frozen=True)
class Experts:
    """Experts as fpk runs them: (E, 2I, H), (E, H, I), the activations' scheme and its static scales."""

    gate_up: Quantized
    down: Quantized
    activation: str | None
    input_scale13: Tensor | None
    input_scale2: Tensor | None


def _expect(layer: StoredLayer, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if got != wanted:
        raise ValueError(f"{layer.weight}: expected {wanted}, got {got}")


def _pair(gate: Dense, up: Dense, interleaved: bool) -> Dense:
    """Gate and up as one matrix: scales per tensor become scales per row, blocks get as short as it takes."""
    rows = gate.scheme.granularity.rows
    scheme, scales = gate.scheme, [gate.scale, up.scale]
    height = gate.codes.shape[0]
    if rows < 0:
        scheme = scheme_of(f"{scheme.name.split('_')[0]}_channel")
        scales = [s.expand(height, 1) for s in scales]
    elif rows > 1 and height % rows:
        short = _short(scheme.granularity, height)
        scheme = scheme_of(f"fp8_{short.name}")
        at = torch.arange(height // short.rows, device=gate.codes.device) * short.rows // rows
        scales = [s[at] for s in scales]
    over = None
    if gate.global_scale is not None and up.global_scale is not None:
        over = torch.cat([s.expand(height, 1) for s in (gate.global_scale, up.global_scale)])
    given = None
    if gate.input_scale is not None and up.input_scale is not None:
        given = torch.maximum(gate.input_scale, up.input_scale)
    codes, scale = _cat([gate.codes, up.codes]), _cat(scales)
    if interleaved:
        if scheme.granularity.rows > 1:
            raise NotImplementedError(f"{scheme}: blocks of rows of gate and up that alternate have no layer")
        codes, scale = (_alternate(t, height) for t in (codes, scale))
        over = None if over is None else _alternate(over, height)
    return replace(gate, codes=codes, scale=scale, scheme=scheme, input_scale=given, global_scale=over)


def _alternate(halves: Tensor, height: int) -> Tensor:
    """Rows of two halves, one after the other."""
    raw = halves.view(torch.uint8) if halves.dtype.itemsize == 1 else halves
    return raw.unflatten(0, (2, height)).transpose(0, 1).flatten(0, 1).contiguous().view(halves.dtype)


def _short(granularity: Granularity, height: int) -> Granularity:
    return per_block(math.gcd(granularity.rows, height), granularity.cols)


def _cat(parts: list[Tensor]) -> Tensor:
    """torch has no `cat` of 1-byte floats everywhere."""
    if parts[0].dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([p.contiguous().view(torch.uint8) for p in parts]).view(parts[0].dtype)


def _stack(parts: list[Dense]) -> Quantized:
    first = parts[0]

    def stacked(tensors: list[Tensor]) -> Tensor:
        return _cat([t[None] for t in tensors])

    over = [p.global_scale for p in parts if p.global_scale is not None]
    return Quantized(
        stacked([p.codes for p in parts]), stacked([p.scale for p in parts]), first.scheme.name,
        global_scale=stacked(over) if over else None, check=False,
    )  # fmt: skip


def read_stack(checkpoint: Checkpoint, layer: StoredLayer, device: torch.device) -> Quantized:
    codes = checkpoint.read(layer.weight.name).flatten(2).to(device, copy=True)
    stored, scheme = layer.parts["weight_scale"], scheme_of(layer.spec.weight)
    scale = checkpoint.read(stored.name).to(device, copy=True)
    if scheme.scale_format == "e8m0":
        scale = scale.view(torch.uint8)
        if bool((scale == E8M0.nan_code).any()):
            raise ValueError(f"{stored}: expected finite positive scales, some are NaN")
    elif scheme.scale_format == "fp32":
        scale = scale.float()
    shape = scheme.granularity.scale_shape((*codes.shape[:-1], codes.shape[-1] * 8 // scheme.format.bits))
    if math.prod(scale.shape) != math.prod(shape):
        raise ValueError(f"{stored}: expected {list(shape)} for {scheme}, got {list(scale.shape)}")
    return Quantized(codes, scale.reshape(shape), scheme.name)


def take_experts(
    found: Found, spec: Callable[[str], LayerSpec | None], has_experts: Callable[[str], bool]
) -> dict[str, StoredExperts]:
    """Move the tensors of quantized experts out of what a checkpoint holds, by the checkpoint's name of their module.

    Args:
        found: loses what is taken.
        spec: the config's word on a layer, for stacks.
        has_experts: does the model have a module of experts by this name?
    """
    experts: dict[str, StoredExperts] = {}
    for name in list(found.layers):
        match = _ONE.fullmatch(name)
        if match and has_experts(match[1]):
            at = experts.setdefault(match[1], StoredExperts(match[1]))
            at.one[(int(match[2]), ROLES[match[3]])] = found.layers.pop(name)
    for name in list(found.plain):
        match = _STACK.fullmatch(name)
        if not match or not has_experts(match[1]) or found.plain[name].dtype not in CODES:
            continue
        stem = f"{match[1]}.{match[2]}"
        scale, said = _scale_of(found.plain, stem), spec(stem)
        if scale is None:
            raise ValueError(f"{found.plain[name]}: {found.plain[name].dtype} without a scale: expected {stem}_scale")
        if said is None:
            raise ValueError(f"{found.plain[name]}: {found.plain[name].dtype}, and the config does not say what it is")
        at = experts.setdefault(match[1], StoredExperts(match[1]))
        parts = {"weight": found.plain.pop(name), "weight_scale": found.plain.pop(scale)}
        at.stacks[match[2].removesuffix("_proj")] = StoredLayer(stem, said, parts)
    for at in experts.values():
        for role in ("gate_up", "down"):
            bias = f"{at.name}.{role}_proj_bias"
            if bias in found.plain:
                at.biases[role] = found.plain.pop(bias)
    return experts


def take_plain_experts(
    found: Found, has_experts: Callable[[str], bool]
) -> dict[str, dict[tuple[int, str], StoredTensor]]:
    """The same for unquantized experts that stand one by one: by module, expert and projection."""
    experts: dict[str, dict[tuple[int, str], StoredTensor]] = {}
    for name in list(found.plain):
        match = _ONE.fullmatch(name.removesuffix(".weight"))
        if match and name.endswith(".weight") and has_experts(match[1]):
            at = experts.setdefault(match[1], {})
            at[(int(match[2]), ROLES[match[3]])] = found.plain.pop(name)
    return experts


def _scale_of(plain: Mapping[str, StoredTensor], stem: str) -> str | None:
    return next((stem + s for s in _SCALES if stem + s in plain), None)


def renamed(name: str) -> str:
    """A name of a checkpoint as transformers 5 has it."""
    for old, new in RENAMED:
        name = name.replace(old, new)
    return name
