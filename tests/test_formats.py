"""fpk.formats against ml_dtypes: every code, every 16-bit pattern, and fp32 values around every code."""

import ml_dtypes
import numpy as np
import pytest
import torch

from fpk import formats as F
from fpk.check import bits

PEERS = {
    "e4m3fn": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}
FLOATS = [F.FORMATS[n] for n in PEERS]
EVERY_CODE = np.arange(256, dtype=np.uint8)
SOURCES = ("bf16", "fp16", "fp32")

every_float = pytest.mark.parametrize("fmt", FLOATS, ids=repr)
either = pytest.mark.parametrize("saturate", (True, False), ids=("saturating", "not_saturating"))
every_source = pytest.mark.parametrize("source", SOURCES)


def codes_of(fmt: F.Format) -> np.ndarray:
    return EVERY_CODE[: 1 << fmt.bits]


def peer_values(fmt: F.Format) -> np.ndarray:
    """Value of every code by ml_dtypes, fp32."""
    return codes_of(fmt).view(PEERS[fmt.name]).astype(np.float32)


def around_every_code(fmt: F.Format) -> torch.Tensor:
    """fp32: the codes' values, the midpoints between neighbours, and the fp32 neighbours of all of these."""
    values = np.unique(peer_values(fmt)[np.isfinite(peer_values(fmt))])
    step = values[-1] - values[-2]
    # the midpoint above the largest value decides between it and overflow
    edges = np.array([values[-1] + step / 2, values[-1] + step, 2 * values[-1], 3.4028235e38], np.float32)
    positive = np.concatenate([values[values >= 0], edges])
    points = np.concatenate([positive, (positive[1:] + positive[:-1]) / 2]).astype(np.float32)
    with np.errstate(over="ignore"):
        near = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))]
    points = np.concatenate([*near, np.array([np.inf, np.nan, 1e-45, 1.17549435e-38], np.float32)])
    return torch.from_numpy(np.concatenate([points, -points]))


def patterns(source: str, fmt: F.Format) -> torch.Tensor:
    if source == "fp32":
        return around_every_code(fmt)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    return every.view(torch.bfloat16 if source == "bf16" else torch.float16)


def peer_codes(x: torch.Tensor, fmt: F.Format, saturate: bool) -> np.ndarray:
    """Codes by ml_dtypes, which never saturates fp8 (FP4 and FP6 always do): clip first; NaN is fpk's code."""
    v = x.float().numpy()
    nan = np.isnan(v)
    if saturate:
        v = np.clip(v, -fmt.max, fmt.max)
    with np.errstate(all="ignore"):
        narrow = np.where(nan, np.float32(0), v).astype(PEERS[fmt.name])
    made_nan = np.isnan(narrow.astype(np.float32))  # overflow of a format without Inf
    return np.where(nan | made_nan, np.uint8(fmt.nan_code), narrow.view(np.uint8))


def assert_codes(got: torch.Tensor, expected: np.ndarray, x: torch.Tensor) -> None:
    assert got.dtype == torch.uint8
    wrong = np.flatnonzero(got.numpy() != expected)
    shown = [(x[i].item(), hex(got[i].item()), hex(expected[i])) for i in wrong[:8]]
    assert not wrong.size, f"{wrong.size} of {expected.size} differ; (value, got, expected): {shown}"


@every_float
def test_every_code_decodes(fmt):
    got = F.decode(torch.from_numpy(codes_of(fmt).copy()), fmt).numpy()
    expected = peer_values(fmt)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    number = ~np.isnan(expected)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))  # the sign of zero counts


@pytest.mark.parametrize("fmt", F.FP8.values(), ids=repr)
def test_decode_takes_the_torch_dtype(fmt):
    codes = torch.from_numpy(EVERY_CODE.copy())
    assert torch.equal(bits(F.decode(codes.view(fmt.dtype), fmt)), bits(F.decode(codes, fmt)))
    typed = codes.view(fmt.dtype).float()
    got = F.decode(codes, fmt)
    assert torch.equal(got.isnan(), typed.isnan())
    assert torch.equal(got[~got.isnan()], typed[~typed.isnan()])


@every_float
@either
@every_source
def test_encode_equals_ml_dtypes(fmt, saturate, source):
    x = patterns(source, fmt)
    assert_codes(F.encode(x, fmt, saturate), peer_codes(x, fmt, saturate), x)


@every_float
@either
@every_source
def test_encode_by_bits_equals_ml_dtypes(fmt, saturate, source):
    """The integer path alone: `encode` takes torch's cast where it can."""
    x = patterns(source, fmt)
    assert_codes(F._encode_by_bits(x.float(), fmt, saturate), peer_codes(x, fmt, saturate), x)


@every_float
def test_finite_codes_survive_a_round_trip(fmt):
    codes = torch.from_numpy(codes_of(fmt).copy())
    values = F.decode(codes, fmt)
    finite = values.isfinite()
    assert int(finite.sum()) > len(codes) - 9
    assert torch.equal(F.encode(values[finite], fmt), codes[finite])
    assert values[finite].max().item() == fmt.max


@every_float
def test_special_values(fmt):
    """NaN is the code of interfaces 4; Inf saturates on request, else is Inf, NaN, or the largest value."""
    top = F.encode(torch.tensor(fmt.max), fmt).item()
    negative = 1 << (fmt.bits - 1)
    nan = {"e4m3fn": 0x7F, "e5m2": 0x7F, "e4m3fnuz": 0x80, "e5m2fnuz": 0x80}.get(fmt.name, 0)
    x = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf")])
    assert F.encode(x, fmt).tolist() == [nan, nan, top, negative + top]
    unsaturated = {
        "e4m3fn": [0x7F, 0x7F],
        "e5m2": [0x7C, 0xFC],
        "e4m3fnuz": [0x80, 0x80],
        "e5m2fnuz": [0x80, 0x80],
    }.get(fmt.name, [top, negative + top])
    assert F.encode(x, fmt, saturate=False).tolist() == [nan, nan, *unsaturated]
    zero = F.encode(torch.tensor([0.0, -0.0, -1e-30]), fmt).tolist()
    assert zero == ([0, 0, 0] if fmt.kind == "fnuz" else [0, negative, negative])


def test_e8m0_every_code():
    codes = torch.from_numpy(EVERY_CODE.copy())
    got = F.decode(codes, F.E8M0)
    expected = EVERY_CODE.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert torch.isnan(got[255]) and np.isnan(expected[255])
    assert np.array_equal(got[:255].numpy(), expected[:255])
    assert got[0].item() == 2.0**-127 and got[127].item() == 1.0 and got[254].item() == 2.0**127
    assert torch.equal(F.encode(got, F.E8M0), codes)


@pytest.mark.parametrize("source", ("bf16", "fp16"))
def test_e8m0_rounds_the_exponent_up(source):
    """Smallest power of two that is not below |x|, 2^-127 at least, by exact arithmetic in fp64."""
    x = patterns(source, F.E8M0)
    magnitude = x.double().abs().numpy()
    finite = np.isfinite(magnitude)
    fraction, exponent = np.frexp(np.where(finite & (magnitude > 0), magnitude, 1.0))
    up = np.where(fraction == 0.5, exponent - 1, exponent)
    up = np.where(magnitude == 0, -127, np.clip(up, -127, 127)) + 127
    expected = np.where(np.isnan(magnitude), 255, np.where(np.isinf(magnitude), 254, up))
    assert_codes(F.encode(x, F.E8M0), expected, x)
    inf = torch.tensor([float("inf"), -float("inf")])
    assert F.encode(inf, F.E8M0, saturate=False).tolist() == [255, 255]


def test_int8():
    """Round half to even, saturate to -128..127, NaN 0."""
    codes = torch.arange(-128, 128).to(torch.int8)
    assert torch.equal(F.decode(codes, F.INT8), torch.arange(-128.0, 128.0))
    for source in ("bf16", "fp16"):
        x = patterns(source, F.INT8)
        expected = np.clip(np.rint(np.nan_to_num(x.double().numpy(), nan=0.0)), -128, 127).astype(np.int8)
        got = F.encode(x, F.INT8)
        assert got.dtype == torch.int8
        assert np.array_equal(got.numpy(), expected)
    ties = torch.arange(-300, 300, dtype=torch.float32) / 2
    for x in (ties, torch.nextafter(ties, torch.tensor(1e9)), torch.nextafter(ties, torch.tensor(-1e9))):
        expected = np.clip(np.rint(x.double().numpy()), -128, 127).astype(np.int8)
        assert np.array_equal(F.encode(x, F.INT8).numpy(), expected)


@every_float
def test_declared_constants(fmt):
    """max, emax and the NaN code are what ml_dtypes says."""
    info = ml_dtypes.finfo(PEERS[fmt.name])
    assert (fmt.max, fmt.bits, fmt.mantissa_bits) == (float(info.max), info.bits, info.nmant)
    assert fmt.emax == int(np.floor(np.log2(float(info.max))))
    if fmt.has_nan:
        assert np.isnan(peer_values(fmt)[fmt.nan_code])
    else:
        assert not np.isnan(peer_values(fmt)).any()


def test_exponents():
    exponents = torch.arange(-127, 128, dtype=torch.int32)
    powers = F.power_of_two(exponents)
    assert torch.equal(powers.double(), torch.exp2(exponents.double()))
    assert torch.equal(F.exponent_of(powers), exponents)
    assert F.exponent_of(torch.tensor([0.0, 1e-45, 1.9999999, 3.4e38])).tolist() == [-127, -127, 0, 127]


def test_finite_amax():
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, -3.0, nan], [inf, -inf, 2.0], [inf, -inf, inf], [nan, nan, inf], [0.0, -0.0, 0.0]])
    assert F.finite_amax(x, (-1,)).flatten().tolist() == [3.0, 2.0, inf, 0.0, 0.0]
    assert F.finite_amax(x, (-2, -1)).tolist() == [[3.0]]


def test_scale_shapes():
    assert F.PER_TENSOR.scale_shape((5, 300)) == (1, 1)
    assert F.PER_TOKEN.scale_shape((2, 5, 300)) == (2, 5, 1)
    assert F.per_group(128).scale_shape((5, 300)) == (5, 3)
    assert F.per_block(128).scale_shape((5, 300)) == (1, 3)
    assert F.per_block(2, 100).scale_shape((3, 5, 300)) == (3, 3, 3)


def test_groups_and_blocks_of_any_size_have_a_name():
    assert F.scheme_of("fp8_group64").granularity == F.per_group(64)
    assert F.scheme_of("fp8_block64x96").activation == "fp8_group96" == F.scheme_of("fp8_group96").name
    assert F.scheme_of("fp8_block32").granularity == F.per_block(32)
    assert F.scheme_of("fp8_group128_e8m0").scale_format == "e8m0"
    assert F.scheme_of("fp8_group128") is F.SCHEMES["fp8_group128"] and "fp8_group64" not in F.list_schemes()
    for name in ("fp8_block64x64", "fp8_group0", "fp8_group064", "fp8_group64x2", "int8_block64", "int8_group64_e8m0"):
        with pytest.raises(ValueError, match="expected one of"):
            F.scheme_of(name)
