"""What the activations must obey: the formulas of their sources, and fused forms equal to the unfused pair."""

import pytest
import torch
from torch.nn import functional as F

import fpk.kernels  # noqa: F401
from fpk.check import assert_close, bits
from fpk.kernels._activation import CASES
from fpk.op import OPS
from fpk.samples import sample

act_and_mul = OPS["act_and_mul"]
FUSED = {
    "act_and_mul_quantize_fp8_token": ("quantize_fp8_token", dict()),
    "act_and_mul_quantize_int8_token": ("quantize_int8_token", dict()),
    "act_and_mul_quantize_fp8_group": ("quantize_fp8_group", dict(group=48, layout="tma", scale_format="e8m0")),
    "act_and_mul_quantize_fp8_static": ("quantize_fp8_static", dict()),
    "act_and_mul_quantize_mx": ("quantize_mx", dict(format="mxfp4")),
    "act_and_mul_quantize_nvfp4": ("quantize_nvfp4", dict()),
}


def arguments_of(case):
    return dict(CASES[case])


def columns(case, width):
    return 2 * width if CASES[case].get("gated", True) else width


def ulp_distance(a, b):
    """Steps of the dtype between two tensors, with -0 and +0 the same."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    low = torch.iinfo(integer).min

    def ordered(t):
        i = t.view(integer).long()
        return torch.where(i < 0, low - i, i)

    return (ordered(a) - ordered(b)).abs()


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("normal", torch.bfloat16), ("special", torch.bfloat16), ("special", torch.float16), ("wide", torch.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FUSED)
def test_fused_equals_the_unfused_pair_bit_for_bit(name, case, kind, dtype, device):
    quantizer, options = FUSED[name]
    x = sample((2, 5, columns(case, 70)), dtype, kind, device)
    options = dict(options)
    if name.endswith("static"):
        options["scale"] = torch.tensor([[[0.03]], [[0.5]]], device=device)
    act = act_and_mul(x, **arguments_of(case))
    unfused = OPS[quantizer](act, **options)
    assert_close(OPS[name](x, **arguments_of(case), **options), unfused, 0.0)
    # where both are wrong alike, or saturate, equality says nothing
    assert_close(unfused, OPS[quantizer].reference(**OPS[quantizer].bind(act, **options)), 0.0)


SOURCES = {
    "silu": lambda g, u: F.silu(g) * u,
    "silu_limit": lambda g, u: F.silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5),
    "swigluoai": lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7)),
    "swiglustep": lambda g, u: F.silu(g).clamp(max=1.0) * u.clamp(-1.0, 1.0),
    "gelu": lambda g, u: F.gelu(g) * u,
    "gelu_tanh": lambda g, u: F.gelu(g, approximate="tanh") * u,
    "silu_plain": lambda g, u: F.silu(g),
    "gelu_plain": lambda g, u: F.gelu(g),
    "gelu_tanh_plain": lambda g, u: F.gelu(g, approximate="tanh"),
    "relu2_plain": lambda g, u: F.relu(g) ** 2,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", SOURCES)
def test_activation_within_one_ulp_of_its_source(case, dtype, device):
    x = sample((17, columns(case, 100)), dtype, "normal", device) * 3
    out = act_and_mul(x, **arguments_of(case))
    wide = x.double()
    gate, up = wide, None
    if CASES[case].get("gated", True):
        gate, up = (wide[:, 0::2], wide[:, 1::2]) if CASES[case].get("interleaved") else wide.chunk(2, -1)
    expected = SOURCES[case](gate, up)
    # fp32 keeps the rounding of exp and of three more operations; erf(x) + 1 loses places where it is nearly 0
    steps = 16 if dtype is torch.float32 else 1
    noise = 1e-6 if case.startswith("gelu") else 1e-30
    near = ulp_distance(out, expected.to(dtype)) <= steps
    assert bool((near | ((out.double() - expected).abs() <= noise)).all())


@pytest.mark.parametrize("activation", ["silu", "swigluoai", "gelu"])
def test_interleaved_is_halves_in_another_order(activation, device):
    x = sample((5, 66), torch.bfloat16, "normal", device)
    mixed = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    assert_close(act_and_mul(mixed, activation, interleaved=True), act_and_mul(x, activation), 0.0)


def test_swigluoai_by_hand(device):
    gate = torch.tensor([1.0, 10.0, -10.0, 0.0, 7.0], device=device)
    up = torch.tensor([2.0, 10.0, -10.0, 5.0, -1.0], device=device)
    out = act_and_mul(torch.cat([gate, up])[None], "swigluoai")[0]
    expected = torch.tensor([2.5373, 55.99963, 2.4e-6, 0.0, 0.0], device=device)
    assert torch.allclose(out, expected, rtol=2e-4, atol=4e-6)


def test_a_limit_binds_the_gate_from_above_and_up_on_both_sides(device):
    x = torch.tensor([[9.0, -9.0, 1.0, 1.0, 1.0, 1.0, 9.0, -9.0]], device=device)  # gate, then up
    out = act_and_mul(x, limit=2.0)[0]
    silu = F.silu(torch.tensor([2.0, -9.0, 1.0, 1.0], device=device))
    expected = silu * torch.tensor([1.0, 1.0, 2.0, -2.0], device=device)
    assert torch.allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_nan_passes_through_limits(case, device):
    x = sample((3, columns(case, 8)), torch.bfloat16, "normal", device)
    x[1, 0] = float("nan")
    out = act_and_mul(x, **arguments_of(case))
    assert bool(out[1, 0].isnan()) and int(out.isnan().sum()) == 1


def test_columns_do_not_depend_on_the_width(device):
    x = sample((4, 2 * 257), torch.float32, "normal", device)
    assert bits(act_and_mul(x)[:, :100]).equal(bits(act_and_mul(torch.cat([x[:, :100], x[:, 257:357]], -1))))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(activation="swish"), "act_and_mul.activation: expected one of 'silu'"),
        (dict(activation="relu2"), "act_and_mul.gated: expected False with activation 'relu2', got True"),
        (dict(activation="swigluoai", gated=False), "act_and_mul.gated: expected True with activation 'swigluoai'"),
        (dict(gated=False, interleaved=True), "act_and_mul.interleaved: expected False"),
        (dict(gated=False, limit=7.0), "act_and_mul.limit: expected None with plain activation 'silu', got 7.0"),
        (dict(activation="gelu", alpha=1.702), "act_and_mul.alpha: expected None with gated activation 'gelu'"),
        (dict(limit=-1.0), "act_and_mul.limit: expected a positive number, got -1.0"),
    ],
)
def test_errors_name_the_argument(arguments, message, device):
    with pytest.raises(ValueError, match=message):
        act_and_mul(torch.zeros((4, 64), device=device), **arguments)
    with pytest.raises(ValueError, match="expected an even number of columns"):
        act_and_mul(torch.zeros((4, 65), device=device))
