"""Linear layers of a checkpoint: which tensors belong to one, and its codes and scales in the form that fpk runs with.

Dtypes and neighbours of tensors decide whether a layer is quantized, the config how; where the skip list says something
else than the tensors, that is a note, not an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fpk.api import Quantized
from fpk.check import expect_valid_scale, fp8_dtype
from fpk.formats import E4M3FN, E8M0, FP8, INT8, Scheme, decode, scheme_of
from fpk.methods._families import KV_PROJECTIONS, KV_SCALES, ROLES, Dialect, LayerSpec
from fpk.methods.checkpoint import CODES, DTYPES, FLOATS, Checkpoint, StoredTensor

BLOCK_SUFFIXES = ("_blocks", "_scales")  # stacked MXFP4 experts
_SCALES = ("weight_scale", "weight_global_scale", "weight_zero_point")


@dataclass(frozen=True)
class StoredLayer:
    """A quantized layer of a checkpoint: its tensors by role, and what the config says of it."""

    name: str
    spec: LayerSpec
    parts: dict[str, StoredTensor]

    @property
    def weight(self) -> StoredTensor:
        return self.parts["weight"]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.parts.values())


@dataclass
class Found:
    """What a checkpoint holds.

    Attributes:
        layers: quantized layers by name.
        kv_scales: scales of the KV cache, by the attention module's name and "k", "v", "q", "kv" or "prob".
        plain: all other tensors.
        notes: where config and tensors disagree.
    """

    layers: dict[str, StoredLayer] = field(default_factory=dict)
    kv_scales: dict[tuple[str, str], StoredTensor] = field(default_factory=dict)
    plain: dict[str, StoredTensor] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find_layers(checkpoint: Checkpoint, dialect: Dialect) -> Found:
    """Sort a checkpoint's tensors into quantized layers, KV-cache scales and the rest.

    Raises:
        ValueError: codes without a scale, a scale without codes, two tensors for one thing.
    """
    found = Found(notes=list(dialect.notes))
    modules: dict[str, dict[str, StoredTensor]] = {}
    for tensor in checkpoint:
        module, _, last = tensor.name.rpartition(".")
        modules.setdefault(module, {})[last] = tensor
    for module, tensors in modules.items():
        parts = _parts(module, tensors)
        if parts:
            spec = dialect.spec(module)
            if spec is None:
                found.notes.append(f"{module}: skipped by the config, but its weight is {parts['weight'].dtype}")
                spec = dialect.default()
            if spec is None:
                raise ValueError(f"{parts['weight']}: {parts['weight'].dtype}, and the config does not say what it is")
            found.layers[module] = StoredLayer(module, spec, parts)
            given = [r for r in ("input_scale", "input_global_scale") if r in parts]
            if given and not (spec.activation or "").endswith("_static") and not spec.unsupported:
                found.notes.append(f"{parts[given[0]].name}: without effect, the config says {spec}")
        elif "weight" in tensors and len(tensors["weight"].shape) == 2 and _is_linear(module):
            said = dialect.spec(module)
            if said is not None:
                stored = tensors["weight"].dtype
                found.notes.append(f"{module}: {said} by the config, but its weight is {stored}")
        for last, tensor in tensors.items():
            if parts and tensor in parts.values():
                continue
            where = _kv_scale(module, last)
            if where is None:
                found.plain[tensor.name] = tensor
            elif where in found.kv_scales:
                raise ValueError(f"{tensor}: {found.kv_scales[where].name} is the same scale")
            else:
                found.kv_scales[where] = tensor
    return found


def _parts(module: str, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of a quantized layer by role; {} for a module that is none."""
    weight = tensors.get("weight") or tensors.get("weight_packed")
    marks = [t for last, t in tensors.items() if ROLES.get(last) in _SCALES and last != "scale"]
    if weight is None or (weight.dtype not in CODES and not marks):
        if weight is None and marks:
            raise ValueError(f"{marks[0]}: expected {module}.weight beside it, there is none")
        return {}
    if weight.dtype not in (*CODES, "I32"):
        raise ValueError(f"{weight}: expected codes (beside {marks[0].name}), got {weight.dtype}")
    parts: dict[str, StoredTensor] = {}
    for last, tensor in tensors.items():
        role = ROLES.get(last)
        if role is None:
            continue
        if role in parts:
            raise ValueError(f"{tensor}: {parts[role].name} is the same thing")
        parts[role] = tensor
    if "weight_scale" not in parts:
        raise ValueError(f"{weight}: {weight.dtype} without a scale: expected {module}.weight_scale, there is none")
    return parts


def _is_linear(module: str) -> bool:
    """By name: embeddings have matrices too. Only for a note."""
    return module.rsplit(".", 1)[-1].endswith("proj")


def _kv_scale(module: str, last: str) -> tuple[str, str] | None:
    parent, _, projection = module.rpartition(".")
    if last == "output_scale" and projection in KV_PROJECTIONS:
        return parent, KV_PROJECTIONS[projection]
    if last in KV_SCALES:
        return (parent if projection in KV_PROJECTIONS else module), KV_SCALES[last]
    return None


def refuse_codes(stored: StoredTensor) -> None:
    """Raise for a tensor of codes that belongs to no quantized layer.

    Raises:
        NotImplementedError: stacked experts.
        ValueError: codes without a scale.
    """
    if stored.dtype not in CODES or (stored.dtype in ("U8", "I8") and len(stored.shape) < 2):
        return
    if stored.name.endswith(BLOCK_SUFFIXES) and stored.dtype == "U8":
        raise NotImplementedError(f"{stored}: stacked mxfp4 experts have no layer yet")
    if len(stored.shape) > 2:
        raise NotImplementedError(f"{stored}: stacked weights of {stored.dtype} {stored.shape} have no layer yet")
    raise ValueError(f"{stored}: {stored.dtype} without a scale")


@dataclass(frozen=True)
class Dense:
    """A linear layer as fpk runs it: codes (N, K) as the scheme stores them, scale of the scheme's shape, input_scale
    (1, 1) of static activations or None, and for NVFP4 global_scale (1, 1) or (N, 1)."""

    codes: Tensor
    scale: Tensor
    scheme: Scheme
    activation: str | None
    input_scale: Tensor | None
    global_scale: Tensor | None = None

    @property
    def weight(self) -> Quantized:
        return Quantized(
            self.codes, self.scale, self.scheme.name, global_scale=self.global_scale, check=False
        )  # fmt: skip


def check_layer(layer: StoredLayer) -> Scheme:
    """Check what the header tells of a layer; its weights' scheme.

    Raises:
        NotImplementedError: fpk has no layer for the scheme, or for a stack of matrices; names tensor and scheme.
        ValueError: a dtype or shape that does not fit the scheme, a missing scale.
    """
    spec, weight = layer.spec, layer.weight
    if spec.unsupported:
        raise NotImplementedError(f"{weight}: {spec}: {spec.unsupported}")
    if len(weight.shape) != 2:
        raise NotImplementedError(f"{weight}: {spec}: expected a matrix, got {list(weight.shape)}")
    if "pre_quant_scale" in layer.parts:
        raise NotImplementedError(f"{layer.parts['pre_quant_scale']}: {spec} with a pre_quant_scale has no layer yet")
    scheme = scheme_of(spec.weight)
    wanted = stored_dtypes(scheme)
    if weight.dtype not in wanted:
        raise ValueError(f"{weight}: expected {' or '.join(wanted)} for {spec.weight}, got {weight.dtype}")
    scales = {"e8m0": ("U8", "F8_E8M0"), "e4m3fn": ("F8_E4M3",)}.get(scheme.scale_format, (*FLOATS, "F8_E8M0"))
    _check_scale(layer.parts["weight_scale"], _scale_shapes(scheme, values_shape(layer)), spec.weight, scales)
    has_global = "global_scale" in scheme.outputs
    if has_global != ("weight_global_scale" in layer.parts):
        if has_global:
            raise ValueError(f"{weight}: expected {layer.name}.weight_scale_2 for {spec}, there is none")
        raise NotImplementedError(f"{layer.parts['weight_global_scale']}: {spec} with a second scale has no layer yet")
    if has_global:
        _check_scale(layer.parts["weight_global_scale"], ONE, spec.weight)
    if spec.activation and spec.activation.endswith("_static"):
        role = input_role(layer)
        if role is None:
            raise ValueError(f"{weight}: expected {layer.name}.input_scale for {spec}, there is none")
        _check_scale(layer.parts[role], ONE, spec.activation)
    return scheme


ONE: list[tuple[int, ...]] = [(), (1,), (1, 1)]
"""Shapes of a scale of a whole tensor."""


def stored_dtypes(scheme: Scheme) -> list[str]:
    """Dtypes that a checkpoint has a scheme's codes in."""
    if scheme.packed:
        return ["U8", "I8"]
    if scheme.format is INT8:
        return ["I8"]
    if scheme.product:  # microscaled: one FP8 type
        return [n for n in CODES if DTYPES.get(n) is scheme.format.dtype]
    return [n for n in CODES if DTYPES.get(n) in FP8]


def values_shape(layer: StoredLayer) -> tuple[int, int]:
    """(N, K) of a layer's values."""
    (rows, cols), scheme = layer.weight.shape, scheme_of(layer.spec.weight)
    return rows, cols * 8 // scheme.format.bits if scheme.packed else cols


def input_role(layer: StoredLayer) -> str | None:
    """Which part has the static scale of the activations: NVFP4's has two names."""
    names = ("input_global_scale", "input_scale") if layer.spec.weight == "nvfp4" else ("input_scale",)
    return next((name for name in names if name in layer.parts), None)


def _check_scale(
    tensor: StoredTensor, shapes: Sequence[tuple[int, ...]], scheme: str, dtypes: tuple[str, ...] = FLOATS
) -> None:
    if tensor.shape not in shapes:
        told = " or ".join(str(list(s)) for s in shapes)
        raise ValueError(f"{tensor}: expected {told} for {scheme}, got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{tensor}: expected {' or '.join(dtypes)}, got {tensor.dtype}")


def _scale_shapes(scheme: Scheme, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All shapes in which exporters write a scheme's scale."""
    rows, cols = scheme.granularity.scale_shape(shape)
    shapes: list[tuple[int, ...]] = [(rows, cols)]
    if scheme.granularity.rows < 0:
        shapes += [(), (1,)]
    elif scheme.granularity.cols < 0:
        shapes.append((rows,))
    elif scheme.granularity.rows > 1:
        shapes.append((rows, 1, cols, 1))
    return shapes


@dataclass(frozen=True)
class Scales:
    """A layer's scales, checked: of the scheme's shape; (1, 1) fp32 or None."""

    weight: Tensor
    over: Tensor | None = None
    input: Tensor | None = None


def read_scales(checkpoint: Checkpoint, layer: StoredLayer) -> Scales:
    """A layer's scales: multipliers, whatever the family calls and stores them.

    Raises:
        ValueError: a scale that is not finite and positive.
        NotImplementedError: zero points that are not zero.
    """
    scheme = check_layer(layer)
    for role in ("weight_zero_point", "input_zero_point"):
        if role in layer.parts and bool((checkpoint.read(layer.parts[role].name) != 0).any()):
            raise NotImplementedError(f"{layer.parts[role]}: {layer.spec} with zero points has no layer yet")
    shape = scheme.granularity.scale_shape(values_shape(layer))
    stored = layer.parts["weight_scale"]
    scale = _block_scales(checkpoint, stored, scheme) if scheme.scale_format != "fp32" else _values(checkpoint, stored)
    over = _values(checkpoint, layer.parts["weight_global_scale"]) if "global_scale" in scheme.outputs else None
    given = None
    if (layer.spec.activation or "").endswith("_static"):
        given = _values(checkpoint, layer.parts[str(input_role(layer))]).reshape(1, 1)
    if layer.spec.divides:
        over, given = (None if t is None else 1 / t for t in (over, given))
    return Scales(scale.reshape(shape), None if over is None else over.reshape(1, 1), given)


def _values(checkpoint: Checkpoint, tensor: StoredTensor) -> Tensor:
    read = checkpoint.read(tensor.name)
    values = decode(read.view(torch.uint8), E8M0) if tensor.dtype == "F8_E8M0" else read.to(torch.float32, copy=True)
    expect_valid_scale(str(tensor), values)
    return values


def _block_scales(checkpoint: Checkpoint, tensor: StoredTensor, scheme: Scheme) -> Tensor:
    """e8m0 bytes, or e4m3 values, as they are stored; of which none is NaN."""
    read = checkpoint.read(tensor.name)
    raw = read.view(torch.uint8)
    bad = raw == E8M0.nan_code if scheme.scale_format == "e8m0" else raw >= E4M3FN.nan_code  # NaN, or negative
    if bool(bad.any()):
        raise ValueError(f"{tensor}: expected finite positive scales, {int(bad.sum())} of {bad.numel()} are not")
    return raw if scheme.scale_format == "e8m0" else read


def read_layer(
    checkpoint: Checkpoint, layer: StoredLayer, device: torch.device | str = "cpu", native: bool = True
) -> Dense:
    """A layer's codes and scales on a device, in memory of their own.

    Args:
        native: bring e4m3fn codes into the device's own FP8 type; False leaves them as they are stored.

    Raises:
        ValueError: as `check_layer` and `read_scales`, or NaN codes, which no exporter writes.
        NotImplementedError: as `check_layer` and `read_scales`.
    """
    scheme = check_layer(layer)
    scales = read_scales(checkpoint, layer)
    scale, given = scales.weight, scales.input
    codes = checkpoint.read(layer.weight.name).to(device, copy=True)
    if codes.dtype is torch.float8_e4m3fn:
        count = int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum())
        if count:
            raise ValueError(f"{layer.weight}: expected finite codes, {count} of {codes.numel()} are NaN")
        if native and not scheme.product and fp8_dtype(codes.device) is not codes.dtype:
            from fpk.methods.fp8 import in_format  # here: it brings triton, which reading headers does without

            codes = in_format(codes, fp8_dtype(codes.device))  # fnuz: the same code means half as much
            scale = scale * 2
            given = None if given is None else given * 2
    if scheme.packed:
        codes = codes.view(torch.uint8)
    over, given = (None if t is None else t.to(device) for t in (scales.over, given))
    return Dense(codes, scale.to(device, copy=True), scheme, layer.spec.activation, given, over)


def join(what: str, parts: Sequence[Dense]) -> Dense:
    """One layer from the parts of a fused one (q, k, v), without rounding anything anew.

    Scales per tensor become scales per row; a static input scale becomes the largest of the parts'.

    Raises:
        ValueError: parts of different schemes, or blocks that would begin inside another part's.
    """
    first = parts[0]
    if len({(p.scheme.name, p.activation, p.codes.dtype, p.codes.shape[1]) for p in parts}) > 1:
        told = ", ".join(f"{p.scheme}:{p.activation or 'none'} {tuple(p.codes.shape)}" for p in parts)
        raise ValueError(f"{what}: expected parts of one scheme and width, got {told}")
    rows = first.scheme.granularity.rows
    scheme, scales = first.scheme, [p.scale for p in parts]
    if rows < 0:
        scheme = scheme_of(f"{first.scheme.name.split('_')[0]}_channel")
        scales = [p.scale.expand(p.codes.shape[0], 1) for p in parts]
    elif rows > 1 and any(p.codes.shape[0] % rows for p in parts[:-1]):
        widths = [p.codes.shape[0] for p in parts]
        raise ValueError(f"{what}: expected parts of multiples of {rows} rows for {scheme}, got {widths}")
    codes = torch.cat([p.codes.view(torch.uint8) for p in parts]).view(first.codes.dtype)
    joined = torch.cat([s.contiguous().view(torch.uint8) for s in scales]).view(scales[0].dtype)
    over = [p.global_scale.expand(p.codes.shape[0], 1) for p in parts if p.global_scale is not None]
    inputs = [p.input_scale for p in parts if p.input_scale is not None]
    largest = torch.stack(inputs).amax(0) if inputs else None
    return replace(
        first, codes=codes, scale=joined, scheme=scheme, input_scale=largest,
        global_scale=torch.cat(over).contiguous() if over else None,
    )  # fmt: skip
