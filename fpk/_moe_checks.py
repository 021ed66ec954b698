"""What `fpk.moe_experts` checks before it launches anything: metadata only."""

from typing import NamedTuple

import torch
from torch import Tensor

from fpk._pairs import no_product
from fpk._shuffled import Shuffled
from fpk.api import Quantized
from fpk.check import FLOAT_INPUTS, expect_dtype, expect_rank, expect_shape
from fpk.formats import INT8, Scheme, scheme_of

Weight = Tensor | Quantized
Experts = Tensor | Quantized | Shuffled


def codes_of(weight: Experts) -> Tensor:
    """Codes, or the tensor itself; of shuffled weights a tensor without elements that has their shape."""
    if isinstance(weight, Shuffled):
        return torch.empty(weight.shape, dtype=torch.bfloat16, device="meta")
    return weight.codes if isinstance(weight, Quantized) else weight


def scheme_of_weight(weight: Experts) -> Scheme:
    assert isinstance(weight, Quantized)
    return scheme_of(weight.scheme)


def result_dtype(x: Weight, act: str, on_input: bool, wanted: torch.dtype | None) -> torch.dtype:
    """What the layer computes in between and gives back; ValueError for tokens that do not fit the other arguments."""
    if not isinstance(x, Quantized):
        expect_dtype("moe.x", x, *FLOAT_INPUTS)
        if wanted not in (None, x.dtype):
            raise ValueError(f"moe.out_dtype: expected None or x's {x.dtype}, got {wanted}")
        return x.dtype
    if x.scheme != act:
        raise ValueError(f"moe.x: expected tokens quantized by act {act!r}, got {x.scheme}")
    if on_input:
        raise ValueError("moe.apply_router_weight_on_input: expected False with Quantized x, got True")
    dtype = wanted or torch.bfloat16
    if dtype not in FLOAT_INPUTS:
        raise ValueError(f"moe.out_dtype: expected one of {', '.join(map(str, FLOAT_INPUTS))}, got {dtype}")
    return dtype


def expect_weights(x: Weight, dtype: torch.dtype, w13: Experts, w2: Experts, gated: bool) -> int:
    """Raise ValueError unless both weights fit x and each other; the number of experts."""
    for name, weight in (("w13", w13), ("w2", w2)):
        expect_rank(f"moe.{name}", codes_of(weight), 3)
        if isinstance(weight, Quantized):
            if weight.zero_point is not None and not (scheme_of_weight(weight).product or weight.format is INT8):
                raise ValueError(f"moe.{name}: expected weights without zero points, got {weight!r}")
        else:
            expect_dtype(f"moe.{name}", codes_of(weight), dtype)
    E, H, I = tuple(w2.shape or ())
    wanted = (E, 2 * I if gated else I, H)
    if tuple(w13.shape or ()) != wanted:
        raise ValueError(f"moe.w13: expected {wanted}, got {tuple(w13.shape or ())}")
    wide = tuple(x.shape or ())
    if wide != (codes_of(x).shape[0], H):
        raise ValueError(f"moe.x: expected ({codes_of(x).shape[0]}, {H}), got {wide}")
    return E


def activation_scheme(act: str, weights: dict[str, Experts], static: dict[str, Tensor | None]) -> Scheme | None:
    """The scheme of the activations, None for "none"; ValueError where it has no product with the weights."""
    given = [name for name, scale in static.items() if scale is not None]
    if act == "none":
        if given:
            raise ValueError(f"moe.input_scale{given[0]}: expected None with act 'none', got a tensor")
        return None
    scheme = scheme_of(act)
    if scheme.granularity.rows > 1:
        raise ValueError(f"moe.act: expected codes with a scale per tensor, token or group, got {act!r}")
    for name, weight in weights.items():
        if not isinstance(weight, Quantized):
            raise ValueError(f"moe.{name}: expected Quantized weights with act {act!r}, got a plain tensor")
        if reason := no_product(scheme_of_weight(weight), scheme):
            raise ValueError(f"moe.act: {reason} ({name})")
        if "zero_point" in scheme.outputs and weight.granularity.cols > 0:
            raise ValueError(f"moe.act: {act} activations have no product with {weight.scheme} weights ({name})")
    if given:
        if scheme.granularity.rows > 0 and "global_scale" not in scheme.outputs:
            raise ValueError(f"moe.input_scale{given[0]}: expected None with act {act!r}, whose scales are dynamic")
        for name, scale in static.items():
            if scale is None:
                raise ValueError(f"moe.input_scale{name}: expected a tensor, as the other input scale, got None")
            experts = codes_of(weights["w13"]).shape[0]
            expect_shape(f"moe.input_scale{name}", scale, (1, 1), (experts, 1, 1))
            expect_dtype(f"moe.input_scale{name}", scale, torch.float32)
    return scheme


class Static(NamedTuple):
    """What activations are quantized by without looking at them: one value for all, or one a row."""

    scale: Tensor | None
    zero_point: Tensor | None
    by_row: bool = False

    def of_rows(self, offs: Tensor, rows: int) -> "Static":
        """The values (E, 1, 1) of experts as those of their rows, (rows, 1); rows of no expert get any."""
        if self.scale is None or self.scale.dim() == 2:
            return self
        order = torch.arange(rows, dtype=torch.int32, device=offs.device)
        expert = torch.searchsorted(offs, order, right=True).clamp_(max=offs.shape[0] - 1)
        scale, zero = (None if v is None else v.flatten()[expert, None] for v in (self.scale, self.zero_point))
        return Static(scale, zero, True)


def expect_zero_points(scheme: Scheme | None, inputs: list[Static]) -> None:
    for name, static in zip(("13", "2"), inputs, strict=True):
        if static.zero_point is None:
            continue
        if static.scale is None or scheme is None or scheme.format is not INT8:
            raise ValueError(f"moe.zero_point{name}: expected None without a static int8 input scale, got a tensor")
        expect_shape(f"moe.zero_point{name}", static.zero_point, tuple(static.scale.shape))
