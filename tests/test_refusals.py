"""Arguments that do not fit: refused, by the name of the op and of the argument, before anything is computed."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_laws import ample, make, middle

from fpk.check import GRID_Y, assert_close
from fpk.op import OPS

MX_PAIRS = [
    ("none", "mxfp6_e2m3", -1, -1),
    ("int8", "mxfp4", -1, -1),
    ("fp8", "nvfp4", -1, -1),
    ("none", "int4", -1, 32),
]


def others(value: Any) -> Iterator[Any]:
    """The same a row or column shorter and longer, with another rank, of other types; other numbers."""
    if isinstance(value, torch.Tensor):
        plain = value.view(torch.uint8) if value.element_size() == 1 else value
        for dim, size in enumerate(value.shape):
            if size:
                yield value.narrow(dim, 0, size - 1)
                yield torch.cat([plain, plain.narrow(dim, 0, 1)], dim).view(value.dtype)
        yield value[None]
        yield value.flatten()[:1].reshape(()) if value.numel() else value.new_zeros(())
        for dtype in (torch.uint8, torch.float8_e4m3fn, torch.int8) if value.element_size() == 1 else ():
            yield value.view(dtype)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield from (0, -2, value + 1)


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_what_the_checks_let_pass_can_be_computed(op):
    for case in (middle(op), ample(op)[0]):
        for name, value in make(op, case).items():
            for changed in others(value):
                given = make(op, case) | {name: changed}
                try:
                    op._validate(op.bind(**given))
                except (ValueError, NotImplementedError) as error:
                    assert str(error).startswith((f"{op.name}.", f"{op.name}:")), error
                else:
                    op.reference(**given)


@pytest.mark.parametrize("name", ["mm_packed", "grouped_mm_packed"])
@pytest.mark.parametrize("pair", MX_PAIRS, ids=lambda pair: "/".join(pair[:2]))
def test_packed_rows_of_another_length(name, pair, device):
    """A column more or less may be of as many bytes."""
    op = OPS[name]
    shape = dict(M=5, N=8, K=100, pair=pair) | ({"E": 2} if "E" in op.domain else {})
    for columns in (99, 101):
        args = op.inputs(**shape, device=device)
        args["a"] = torch.zeros(5, columns, device=device).to(args["a"].dtype)
        with pytest.raises(ValueError, match=rf"{name}\.b: expected rows of {columns} values, as a has them, got 100"):
            op(**args)


@pytest.mark.parametrize("name", ["mm_packed", "grouped_mm_packed"])
def test_exponents_as_scales_come_with_groups(name, device, launches):
    """Bytes of exponents that would go onto sums are refused, not taken for numbers; inside groups they are right."""
    op = OPS[name]
    shape = dict(M=5, N=8, K=128, per_row=True) | ({"E": 2} if "E" in op.domain else {})
    for side, pair in (
        ("a", ("fp8", "mxfp4", -1, -1)),
        ("a", ("int8", "mxfp4", -1, -1)),
        ("b", ("none", "int4", -1, -1)),
    ):
        args = op.inputs(**shape, pair=pair, device=device)
        args[f"scale_{side}"] = torch.full_like(args[f"scale_{side}"], 126, dtype=torch.uint8)
        with pytest.raises(ValueError, match=rf"{name}\.scale_{side}: expected float32, got uint8"):
            op(**args)
    args = op.inputs(**shape, pair=("fp8", "mxfp4", 64, -1), device=device)
    args["scale_a"] = torch.arange(120, 130, dtype=torch.uint8, device=device).reshape(5, 2)
    assert_close(op(**args), op.reference(**args), op.tolerance(op.bind(**args)))
    assert launches() > 0


@pytest.mark.parametrize("name", ["scaled_mm_group", "grouped_scaled_mm_group"])
@pytest.mark.parametrize("argument", ["block_rows", "block_cols"])
def test_granularities_are_called_by_their_arguments(name, argument, device):
    op = OPS[name]
    args = make(op, middle(op)) | {argument: 0}
    with pytest.raises(ValueError, match=rf"^{name}\.{argument}: expected a positive number or -1"):
        op(**args)


def test_caches_have_a_place_for_every_element(device):
    """What is written in place may not be expanded: tokens would overwrite one another."""
    op = OPS["kv_cache_write"]
    for name in op.mutates:
        args = op.inputs(M=3, H=2, D=16, granularity="token_head", device=device)
        args[name] = args[name][:1].expand(args[name].shape)
        with pytest.raises(ValueError, match=rf"kv_cache_write\.{name}: expected a place for every element"):
            op(**args)


def test_grids_have_an_end(device):
    """The second axis of a grid holds 65535 programs; what would need more is refused before a GPU does."""
    many = GRID_Y + 1
    with pytest.raises(ValueError, match=r"quantize_fp8_token\.x: expected at most 65535 matrices"):
        OPS["quantize_fp8_token"](torch.zeros(1, 1, 16, device=device).expand(many, 1, 16))
    for name in ("moe_up", "moe_down"):
        op = OPS[name]
        args = make(op, middle(op))
        args["ids"] = args["ids"][:1, :1].expand(many, 1)
        with pytest.raises(ValueError, match=rf"{name}\.ids: expected at most 65535 slots"):
            op(**args)
    op = OPS["attention_prefill"]
    bound = op.bind(**op.inputs(B=1, T=4, H=1, group=64, D=16, tokens=8, device=device))
    config, gpu = op.config_for(**bound), op._device(bound)
    short = bound["q"]
    assert op.is_legal(config, bound, gpu)
    bound["q"] = short[:1].expand(many * max(1, config["BLOCK_M"] // 64), *short.shape[1:])
    assert not op.is_legal(config, bound, gpu)


def test_a_tensor_that_is_none_is_named():
    for op in OPS.values():
        parameters = op.__signature__.parameters
        required = [n for n, p in parameters.items() if p.annotation is torch.Tensor]
        with pytest.raises(ValueError, match=rf"{op.name}\.{required[0]}: expected a tensor, got None"):
            op(**make(op, middle(op)) | {required[0]: None})
