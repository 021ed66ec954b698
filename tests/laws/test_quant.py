"""What quantizers must obey beyond their references: error bounds, locality, and agreement between granularities."""

import pytest
import torch

import fpk.kernels  # noqa: F401
from fpk.check import assert_close, bits
from fpk.formats import E8M0, FP8, INT8, decode, expand_groups
from fpk.op import OPS
from fpk.samples import sample

E4M3 = torch.float8_e4m3fn
FP8_OPS = {
    "quantize_fp8_tensor": (dict(), (-1, -1)),
    "quantize_fp8_token": (dict(), (1, -1)),
    "quantize_fp8_group": (dict(group=48), (1, 48)),
    "quantize_fp8_block": (dict(block_rows=4, block_cols=32), (4, 32)),
}
INT8_OPS = {
    "quantize_int8_tensor": (dict(), (-1, -1)),
    "quantize_int8_token": (dict(), (1, -1)),
    "quantize_int8_group": (dict(group=48), (1, 48)),
}
ASYMMETRIC_OPS = {"quantize_int8_tensor_asymmetric": (-1, -1), "quantize_int8_token_asymmetric": (1, -1)}
DYNAMIC_OPS = {**FP8_OPS, **INT8_OPS}


def values(codes, scale, granularity, zero_point=None):
    code = decode(codes, INT8 if codes.dtype is torch.int8 else FP8[codes.dtype])
    if zero_point is not None:
        code = code - expand_groups(zero_point, codes.shape, *granularity)
    return code.double() * expand_groups(scale, codes.shape, *granularity).double()


@pytest.mark.parametrize("kind", ["normal", "wide", "outliers", "zero_rows"])
@pytest.mark.parametrize("name", FP8_OPS)
def test_fp8_round_trip_within_half_a_step(name, kind, device):
    arguments, granularity = FP8_OPS[name]
    x = sample((13, 100), torch.float32, kind, device)
    codes, scale = OPS[name](x, **arguments)
    error = (values(codes, scale, granularity) - x.double()).abs()
    step = expand_groups(scale, x.shape, *granularity).double()
    # 3 mantissa bits: half a step is 2^-4 of the value; below the smallest normal code 2^-6 it is 2^-10 scales
    assert bool((error <= torch.maximum(x.double().abs() * 2.0**-4, step * 2.0**-10) * (1 + 1e-6)).all())


@pytest.mark.parametrize("kind", ["normal", "wide", "outliers", "zero_rows"])
@pytest.mark.parametrize("name", INT8_OPS)
def test_int8_round_trip_within_half_a_step(name, kind, device):
    arguments, granularity = INT8_OPS[name]
    x = sample((13, 100), torch.float32, kind, device)
    codes, scale = OPS[name](x, **arguments)
    error = (values(codes, scale, granularity) - x.double()).abs()
    assert bool((error <= expand_groups(scale, x.shape, *granularity).double() * (0.5 + 1e-5)).all())
    assert int(codes.min()) >= -127


@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0, 1e6])
@pytest.mark.parametrize("name", ASYMMETRIC_OPS)
def test_asymmetric_round_trip_within_half_a_step_and_zero_exact(name, shift, device):
    granularity = ASYMMETRIC_OPS[name]
    x = sample((13, 100), torch.float32, "normal", device) + shift
    x[:, ::7] = 0.0
    codes, scale, zero = OPS[name](x)
    back = values(codes, scale, granularity, zero)
    # the ends of the range may round half a step outwards and be clamped there: a whole step in all
    assert bool(((back - x.double()).abs() <= expand_groups(scale, x.shape, *granularity).double() * 1.001).all())
    assert bool((back[:, ::7] == 0).all())
    assert int(zero.min()) >= -128 and int(zero.max()) <= 127
    assert bits(OPS["quantize_int8_static"](x, scale, zero, *granularity)).equal(bits(codes))


@pytest.mark.parametrize("constant", [3.0, -3.0, 0.0, 1e-20, -1e30])
@pytest.mark.parametrize("name", ASYMMETRIC_OPS)
def test_asymmetric_constant_input(name, constant, device):
    x = torch.full((5, 33), constant, device=device)
    codes, scale, zero = OPS[name](x)
    back = values(codes, scale, ASYMMETRIC_OPS[name], zero)
    if constant == 0.0:
        assert bool((back == 0).all())
    # below 1e-10 the floor of the range sets the step
    assert float((back - x.double()).abs().max()) <= max(1e-6 * abs(constant), 1e-10 / 255)


def test_asymmetric_range_may_be_all_of_fp32(device):
    top = torch.finfo(torch.float32).max
    x = torch.tensor([[-top, 0.0, top, top / 3]], device=device)
    codes, scale, zero = OPS["quantize_int8_token_asymmetric"](x)
    assert bool(scale.isfinite().all())
    back = values(codes, scale, (1, -1), zero)
    assert bool(((back - x.double()).abs() <= scale.double()).all())


@pytest.mark.parametrize("name", DYNAMIC_OPS)
def test_a_larger_element_never_lowers_a_scale(name, device):
    arguments, _ = DYNAMIC_OPS[name]
    x = sample((8, 96), torch.bfloat16, "normal", device)
    _, scale = OPS[name](x, **arguments)
    larger = x.clone()
    larger[3, 50] = 300.0
    _, raised = OPS[name](larger, **arguments)
    assert bool((raised >= scale).all()) and bool((raised > scale).any())
    _, doubled = OPS[name](x * 2, **arguments)
    assert doubled.equal(scale * 2)


@pytest.mark.parametrize("name", [*DYNAMIC_OPS, *ASYMMETRIC_OPS])
def test_what_lies_around_a_view_does_not_matter(name, device):
    arguments = DYNAMIC_OPS[name][0] if name in DYNAMIC_OPS else {}
    x = sample((7, 70), torch.bfloat16, "normal", device)
    buffer = torch.full((9, 90), 3e38, dtype=torch.bfloat16, device=device)
    buffer[1:8, 11:81] = x
    for got, expected in zip(OPS[name](buffer[1:8, 11:81], **arguments), OPS[name](x, **arguments), strict=True):
        assert_close(got, expected, 0.0)


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if "pairs" in op.kernels])
def test_rows_of_any_width_in_words_of_two(name, device):
    """Rows that fill no block and begin at any word: other loads and other code than where 16 divides all sizes."""
    op = OPS[name]
    for width in (2, 34, 70, 72, 100):
        args = op.inputs(M=5, K=width, E=2, device=device)
        bound = op.bind(**args)
        first: dict[str, dict] = {}
        for config in op.configs(**bound):
            if op.is_legal(config, bound, op._device(bound)):
                first.setdefault(config["kernel"], config)
        for config in first.values():
            assert_close(
                op.launch(**args, config=config), op.reference(**bound), op.tolerance(bound), f"{width} {config}"
            )


@pytest.mark.parametrize("name", ["quantize_fp8_tensor", "quantize_int8_tensor", "quantize_int8_tensor_asymmetric"])
@pytest.mark.parametrize("valid", [0, 1, 5])
def test_padding_rows_do_not_count(name, valid, device):
    x = sample((2, 9, 40), torch.bfloat16, "normal", device)
    padded = x.clone()
    padded[:, valid:] = -3e38
    count = torch.tensor([valid], dtype=torch.int32, device=device)
    got, expected = OPS[name](padded, count), OPS[name](x[:, :valid])
    for g, e in zip(got[1:], expected[1:], strict=True):
        assert_close(g, e, 0.0)
    assert bits(got[0][:, :valid]).equal(bits(expected[0]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [*DYNAMIC_OPS, *ASYMMETRIC_OPS])
def test_one_bad_element_changes_only_its_own_code(name, bad, device):
    arguments = DYNAMIC_OPS[name][0] if name in DYNAMIC_OPS else {}
    x = sample((6, 64), torch.bfloat16, "normal", device)
    x[2, 10] = 0.0
    spoiled = x.clone()
    spoiled[2, 10] = bad
    clean, got = OPS[name](x, **arguments), OPS[name](spoiled, **arguments)
    for g, e in zip(got[1:], clean[1:], strict=True):
        assert_close(g, e, 0.0)
    differs = bits(got[0]) != bits(clean[0])
    own = torch.zeros_like(differs)
    own[2, 10] = True
    assert not bool((differs & ~own).any())
    code = got[0][2, 10]
    if code.dtype is torch.int8:
        zero = 0 if len(got) == 2 else int(got[2][2 if got[2].shape[0] > 1 else 0, 0])
        assert int(code) == (zero if bad != bad else (127 if bad > 0 else -128))
    else:
        assert int(code.view(torch.uint8)) == (0x7F if bad != bad else (0x7E if bad > 0 else 0xFE))


@pytest.mark.parametrize("prefix", ["quantize_fp8", "quantize_int8"])
def test_a_group_is_a_token_of_its_own(prefix, device):
    x = sample((9, 150), torch.bfloat16, "normal", device)
    codes, scale = OPS[f"{prefix}_group"](x, group=64)
    for j, start in enumerate(range(0, 150, 64)):
        part, part_scale = OPS[f"{prefix}_token"](x[:, start : start + 64])
        assert bits(codes[:, start : start + 64]).equal(bits(part))
        assert scale[:, j : j + 1].equal(part_scale)


def test_blocks_of_one_row_are_groups_and_one_block_is_the_tensor(device):
    x = sample((9, 150), torch.bfloat16, "normal", device)
    for got, expected in (
        (OPS["quantize_fp8_block"](x, block_rows=1, block_cols=64), OPS["quantize_fp8_group"](x, group=64)),
        (OPS["quantize_fp8_block"](x, block_rows=9, block_cols=150), OPS["quantize_fp8_tensor"](x)),
        (OPS["quantize_fp8_group"](x, group=150), OPS["quantize_fp8_token"](x)),
    ):
        assert_close(got, expected, 0.0)


@pytest.mark.parametrize("name", ["quantize_fp8_group", "quantize_fp8_block"])
def test_e8m0_scales_are_the_next_power_of_two(name, device):
    arguments, _ = FP8_OPS[name]
    x = sample((13, 100), torch.float32, "wide", device)
    x[0, 0], x[4:8, :] = 448.0, 448.0 * (1 + 2.0**-20)  # a scale of 1, and one just above it
    _, plain = OPS[name](x, **arguments)
    _, stored = OPS[name](x, **arguments, scale_format="e8m0")
    power = decode(stored, E8M0)
    assert bool((power >= plain).all()) and bool((power < 2 * plain).all())


@pytest.mark.parametrize("name, floor", [("quantize_fp8_group", 1e-10), ("quantize_fp8_block", 1e-4)])
def test_zero_groups_have_the_floor_scale_and_zero_codes(name, floor, device):
    x = torch.zeros((4, 64), device=device)
    codes, scale = OPS[name](x)
    expected = torch.tensor(floor, device=device) / torch.tensor(448.0, device=device)
    assert bool((scale == expected).all()) and bool((codes.view(torch.uint8) == 0).all())
    _, stored = OPS[name](x, scale_format="e8m0")
    assert int(stored.max()) == int(stored.min()) == {1e-10: 0x55, 1e-4: 0x69}[floor]


@pytest.mark.parametrize("scale_format, line", [("fp32", 4), ("e8m0", 16)])
@pytest.mark.parametrize("m", [1, 5, 16, 18])
def test_scale_layouts(m, scale_format, line, device):
    x = sample((2, m, 300), torch.bfloat16, "normal", device)
    by = {
        layout: OPS["quantize_fp8_group"](x, scale_format=scale_format, layout=layout)[1]
        for layout in ("row", "column", "tma")
    }
    aligned = -(-m // line) * line
    assert by["row"].stride() == (3 * m, 3, 1)
    assert by["column"].stride() == (3 * m, 1, m)
    assert by["tma"].stride() == (3 * aligned, 1, aligned)
    assert by["tma"].data_ptr() % 16 == 0
    assert by["row"].equal(by["column"]) and by["row"].equal(by["tma"])


@pytest.mark.parametrize(
    "name, arguments, message",
    [
        ("quantize_fp8_group", dict(group=0), "quantize_fp8_group.group: expected 1 to 16384"),
        ("quantize_fp8_group", dict(layout="rows"), "quantize_fp8_group.layout: expected one of 'row'"),
        ("quantize_fp8_group", dict(scale_format="ue8m0"), "quantize_fp8_group.scale_format"),
        ("quantize_fp8_group", dict(dtype=torch.int8), "quantize_fp8_group.dtype"),
        ("quantize_fp8_block", dict(block_rows=-1), "quantize_fp8_block.block_rows: expected a positive number"),
        ("quantize_int8_group", dict(qmin=-129), "quantize_int8_group.qmin: expected one of -128, -127"),
        ("quantize_int8_tensor", dict(num_valid_tokens=torch.tensor(3)), "num_valid_tokens: expected"),
        ("quantize_int8_static", dict(scale=torch.ones(4, 2)), r"quantize_int8_static.scale: expected \(1, 1\)"),
        (
            "quantize_int8_static",
            dict(scale=torch.ones(1, 1), zero_point=torch.zeros(1, 1)),
            "quantize_int8_static.zero_point: expected int32",
        ),
    ],
)
def test_errors_name_the_argument(name, arguments, message, device):
    x = torch.zeros((4, 64), device=device)
    arguments = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        OPS[name](x, **arguments)
