"""Block-scaled formats beyond their references: rules against exact arithmetic, rounding against ml_dtypes, edges."""

import copy
import pickle
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

import fpk
from fpk.check import bits
from fpk.formats import E2M1, E4M3FN, MX, MX_RULES, decode
from fpk.op import OPS
from fpk.samples import sample

PEERS = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
}
every_format = pytest.mark.parametrize("format", PEERS)
INF, NAN = float("inf"), float("nan")
TALL = dict(kernel="mx", BLOCK_M=128, GROUPS=1, num_warps=8)  # few programs: each costs the interpreter as much


def exact_exponent(amax: float, format: str, rule: str) -> int:
    """The shared exponent by rational arithmetic, straight from the definitions."""
    mx, a = MX[format], Fraction(amax)

    def floor_log2(v: Fraction) -> int:
        e = v.numerator.bit_length() - v.denominator.bit_length()
        return e if Fraction(2) ** e <= v else e - 1

    def ceil_log2(v: Fraction) -> int:
        e = floor_log2(v)
        return e if Fraction(2) ** e == v else e + 1

    t = floor_log2(a)
    if rule == "even":  # round the significand to the element's mantissa, ties up
        m = mx.element.mantissa_bits if mx.element.is_float else 6
        step = Fraction(2) ** (t - m)
        a = step * ((a / step + Fraction(1, 2)).__floor__())
        return floor_log2(a) - mx.element.emax
    exact = {"floor": t - mx.element.emax, "ceil": ceil_log2(a) - mx.element.emax}
    return exact[rule] if rule in exact else ceil_log2(a / Fraction(mx.max))


def maxima() -> list[float]:
    """Where rules change their mind, with neighbours; the ends of the range; subnormals."""
    points = [1.0, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.984375, 1.9921875, 1.25]
    values = [p * 2.0**e for p in points for e in (-126, -125, -20, -1, 0, 1, 7, 100, 127)]
    values += [2.0**-149, 2.0**-140, 2.0**-127, 1.5 * 2.0**-127, 1.99 * 2.0**-127, 3.4028234663852886e38]
    array = np.array(values, np.float32)
    with np.errstate(over="ignore"):
        around = np.concatenate([array, np.nextafter(array, np.float32(np.inf)), np.nextafter(array, np.float32(0))])
    return sorted({float(v) for v in around if np.isfinite(v) and v > 0})


@pytest.mark.parametrize("rule", MX_RULES)
@pytest.mark.parametrize("format", MX)
def test_scale_rules(format, rule, device):
    points = maxima()
    x = torch.zeros(len(points), 32, device=device)
    x[:, 5] = torch.tensor(points, device=device)
    _, scale = OPS["quantize_mx"](x, format=format, rule=rule)
    expected = [min(max(exact_exponent(p, format, rule), -127), 127) + 127 for p in points]
    wrong = [(p, got, e) for p, got, e in zip(points, scale[:, 0].tolist(), expected, strict=True) if got != e]
    assert not wrong, wrong[:5]


def peer_codes(value: np.ndarray, format: str) -> np.ndarray:
    """Codes by ml_dtypes of values that may lie beyond the range."""
    top = MX[format].element.max
    with np.errstate(all="ignore"):
        narrow = np.clip(np.where(np.isnan(value), 0, value), -top, top).astype(np.float32).astype(PEERS[format])
    return np.where(np.isnan(value), MX[format].element.nan_code, narrow.view(np.uint8))


def beside(values: torch.Tensor, top: float) -> torch.Tensor:
    """Rows of 31 of the values, with `top` for a maximum in the last column; zeros fill the last row."""
    padded = torch.nn.functional.pad(values, (0, -len(values) % 31)).reshape(-1, 31)
    return torch.nn.functional.pad(padded, (0, 1), value=top)


@every_format
@pytest.mark.parametrize("exponent, rule", [(-120, "floor"), (0, "ceil"), (0, "even"), (100, "rceil")])
def test_every_bf16_within_a_block(format, exponent, rule, device):
    """Every bf16 up to the maximum, and those that are not finite: codes by ml_dtypes, of x / 2^e exactly."""
    top = 1.75 * 2.0**exponent
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = beside(every[(every.abs() <= top) | ~every.isfinite()], top)
    codes, scale = OPS["quantize_mx"].launch(x.to(device), format=format, rule=rule, packed=False, config=TALL)
    byte = max(exact_exponent(top, format, rule), -127) + 127
    assert set(scale.flatten().tolist()) == {byte}
    expected = peer_codes(x.double().numpy() * 2.0 ** (127 - byte), format)
    assert np.array_equal(codes.view(torch.uint8).cpu().numpy(), expected)


@every_format
def test_rounding_of_fp32_around_every_code(format, device):
    """Midpoints and codes with their fp32 neighbours: rounded once, ties to even."""
    top = 2.0 ** MX[format].element.emax  # a scale of 1 by the rule "floor", also for all up to nearly twice that
    values = np.arange(1 << MX[format].element.bits, dtype=np.uint8).view(PEERS[format]).astype(np.float64)
    values = np.unique(values[np.isfinite(values) & (values >= 0)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    around = np.concatenate([points, np.nextafter(points, np.float32(1e30)), np.nextafter(points, np.float32(-1e30))])
    x = beside(torch.from_numpy(np.concatenate([around, -around])), top)
    codes, scale = OPS["quantize_mx"](x.to(device), format=format, rule="floor", packed=False)
    assert set(scale.flatten().tolist()) == {127}
    assert np.array_equal(codes.view(torch.uint8).cpu().numpy(), peer_codes(x.double().numpy(), format))


@pytest.mark.parametrize("rule", MX_RULES)
def test_every_bf16_as_a_maximum(rule):
    """The reference's scale, with the exponent by numpy."""
    x = torch.arange(1, 0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)[:, None]
    _, scale = OPS["quantize_mx"].reference(x, rule=rule, packed=False)
    fraction, exponent = np.frexp(x.double().numpy())
    fraction, exponent = fraction * 2, exponent - 1
    up = {"floor": False, "ceil": fraction > 1, "even": fraction >= 1.75, "rceil": fraction > 1.5}[rule]
    assert np.array_equal(scale.numpy(), np.clip(exponent + up - 2, -127, 127) + 127)


@pytest.mark.parametrize("format", MX)
def test_zero_blocks(format, device):
    x = torch.zeros(3, 70, device=device)
    x[1] = -0.0
    x[2, 40] = 1.0
    codes, scale = OPS["quantize_mx"](x, format=format, packed=False)
    assert not bits(codes)[:2].any() and not scale[:2].any() and scale[2].tolist()[::2] == [0, 0]
    assert int(bits(codes)[2].count_nonzero()) == 1


@pytest.mark.parametrize("bad", [NAN, -NAN, INF, -INF])
@pytest.mark.parametrize("format", MX)
def test_one_bad_element_changes_only_its_own_code(format, bad, device):
    x = sample((6, 64), torch.bfloat16, "normal", device)
    x[2, 10] = 0.0
    spoiled = x.clone()
    spoiled[2, 10] = bad
    (clean, scale), (codes, got) = (OPS["quantize_mx"](t, format=format, packed=False) for t in (x, spoiled))
    assert got.equal(scale)
    assert (bits(codes) != bits(clean)).nonzero().tolist() in ([], [[2, 10]])
    element = MX[format].element
    code = int(bits(codes)[2, 10])
    if bad != bad:
        assert code == element.nan_code
    else:
        value = float(codes[2, 10]) if format == "mxint8" else decode(bits(codes)[2, 10], element).item()
        assert value == (element.max if bad > 0 else -element.max)


@pytest.mark.parametrize("format", MX)
def test_a_block_of_inf_decodes_to_nan_and_its_neighbours_do_not(format, device):
    x = sample((3, 96), torch.float32, "normal", device)
    x[1, 32:64] = INF
    codes, scale = OPS["quantize_mx"](x, format=format)
    assert scale[1].tolist()[1] == 255 and int((scale == 255).sum()) == 1
    back = OPS["dequantize_mx"](codes, scale, format=format)
    assert back[1, 32:64].isnan().all() and int(back.isnan().sum()) == 32


@pytest.mark.parametrize("format", MX)
def test_a_short_last_block_is_a_block_of_its_own(format, device):
    x = sample((5, 76), torch.bfloat16, "outliers", device)
    codes, scale = OPS["quantize_mx"](x, format=format, packed=False)
    assert scale.shape == (5, 3)
    last, last_scale = OPS["quantize_mx"](x[:, 64:], format=format, packed=False)
    assert bits(codes[:, 64:]).equal(bits(last)) and scale[:, 2:].equal(last_scale)


@pytest.mark.parametrize("kind", ["normal", "wide", "outliers", "zero_rows"])
@pytest.mark.parametrize("scheme", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4"])
def test_round_trip_error(scheme, kind, device):
    """Half a step of the element, or what saturation takes: with "even" up to an eighth of the maximum (6 of 7)."""
    x = sample((13, 128), torch.float32, kind, device)
    q = fpk.quantize(x, scheme)
    width = q.granularity.cols
    amax = x.abs().unflatten(-1, (-1, width)).amax(-1, keepdim=True).expand(-1, -1, width).flatten(-2)
    mantissa = q.format.mantissa_bits
    error = (q.dequantize() - x).abs()
    # the smallest step, relative to the maximum of the block: 2^(1 - bias - m) of 2^emax at least
    smallest = 2.0 ** (1 - q.format.bias - mantissa - q.format.emax)
    bound = torch.maximum(x.abs() * 2.0 ** -(mantissa + 1), amax * smallest) * (1.07 if scheme == "nvfp4" else 1.0)
    saturated = amax / 8 if scheme in ("mxfp4", "nvfp4") else amax / 16
    near_top = x.abs() > amax * 0.8
    floor = 2.0**-9 * float(q.global_scale) * 6 if scheme == "nvfp4" else 0.0  # blocks that e4m3 cannot tell from 0
    assert bool((error <= torch.where(near_top, torch.maximum(bound, saturated), bound) * (1 + 1e-6) + floor).all())


# ---- nvfp4 -----------------------------------------------------------------
def test_nvfp4_in_plain_arithmetic(device):
    """The formulas written out element by element, with ml_dtypes for the roundings."""
    x = sample((4, 64), torch.float32, "outliers", device)
    codes, scale, over = OPS["quantize_nvfp4"](x, packed=False)
    v = x.cpu().numpy()
    one = np.float32
    g = one(2688) / max(np.abs(v).max(), one(1e-30))
    assert over.item() == one(1) / g
    for row, block in np.ndindex(4, 4):
        part = v[row, 16 * block : 16 * block + 16]
        s = min(g * (np.abs(part).max() / one(6)), one(448)).astype(ml_dtypes.float8_e4m3fn)
        assert s.view(np.uint8) == bits(scale)[row, block]
        with np.errstate(all="ignore"):
            want = np.clip(part * (g / s.astype(one)), -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
        want = want if s > 0 else np.zeros(16, np.uint8)
        assert codes[row, 16 * block : 16 * block + 16].tolist() == want.tolist()


def test_nvfp4_tiny_blocks_beside_large_ones_are_zero(device):
    x = torch.full((1, 32), 1.0, device=device)
    x[0, 16:] = -(2.0**-24)
    codes, scale, over = OPS["quantize_nvfp4"](x, packed=False)
    assert bits(scale)[0, 1] == 0 and not codes[0, 16:].any()
    assert OPS["dequantize_nvfp4"](codes, scale, over, packed=False)[0, :16].sub(1).abs().max() < 1e-6


def test_nvfp4_experts_and_tokens_share_no_global_scale(device):
    x = (
        sample((3, 4, 32), torch.bfloat16, "normal", device)
        * torch.tensor([1.0, 64.0, 2.0**-10], device=device)[:, None, None].bfloat16()
    )
    whole = OPS["quantize_nvfp4"](x)
    rows = OPS["quantize_nvfp4"](x, per_token=True)
    assert whole[2].shape == (3, 1, 1) and rows[2].shape == (3, 4, 1)
    for e in range(3):
        for got, want in zip(whole, OPS["quantize_nvfp4"](x[e]), strict=True):
            assert bits(got[e]).equal(bits(want))
        for m in range(4):
            for got, want in zip(rows, OPS["quantize_nvfp4"](x[e, m : m + 1]), strict=True):
                assert bits(got[e, m : m + 1]).equal(bits(want))


@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_four_over_six_never_errs_more(kind, device):
    x = sample((64, 64), torch.float32, kind, device)

    def errors(**options):
        q = OPS["quantize_nvfp4"](x, **options)
        return (OPS["dequantize_nvfp4"](*q) - x).double().unflatten(-1, (-1, 16)).pow(2).sum(-1)

    plain, chosen = errors(), errors(four_over_six=True)
    assert bool((chosen <= plain * (1 + 1e-5)).all()) and bool((chosen < plain * 0.99).any())


def test_nvfp4_global_scale_is_a_multiplier(device):
    x = sample((4, 32), torch.float32, "normal", device)
    over = torch.tensor([[2.0**-9]], device=device)
    codes, scale, returned = OPS["quantize_nvfp4"](x, over)
    assert returned.equal(over) and returned.data_ptr() != over.data_ptr()
    by_hand = decode(OPS["unpack_fp4"](codes), E2M1) * decode(bits(scale), E4M3FN).repeat_interleave(16, 1) * over
    assert OPS["dequantize_nvfp4"](codes, scale, over).equal(by_hand)


# ---- schemes ---------------------------------------------------------------
@pytest.mark.parametrize("scheme, per_value", [("mxfp8_e4m3", 8.25), ("mxfp6_e3m2", 6.25), ("mxfp6_e2m3", 6.25),
                                               ("mxfp4", 4.25), ("nvfp4", 4.5)])  # fmt: skip
def test_schemes_tell_shape_and_bytes(scheme, per_value, device):
    x = sample((2, 8, 64), torch.bfloat16, "normal", device)
    q = fpk.quantize(x, scheme)
    second = 0 if q.global_scale is None else 8
    assert q.shape == (2, 8, 64) and q.nbytes == 2 * 8 * 64 * per_value / 8 + second
    assert q.dequantize(torch.bfloat16).shape == x.shape
    again = fpk.Quantized(q.codes, q.scale, scheme, global_scale=q.global_scale)
    assert again.shape == q.shape and bits(again.dequantize()).equal(bits(q.dequantize()))
    assert f"shape={(2, 8, 64)}" in repr(q)
    for copied in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert repr(copied) == repr(q) and bits(copied.dequantize()).equal(bits(q.dequantize()))


@pytest.mark.parametrize("act, weight", [("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e5m2", "mxfp8_e5m2"),
                                         (None, "mxfp8_e4m3"), (None, "mxfp8_e5m2")])  # fmt: skip
def test_products_of_mxfp8(act, weight, device):
    x, w = sample((5, 80), torch.bfloat16, "normal", device), sample((24, 80), torch.bfloat16, "normal", device, 1)
    qw = fpk.quantize(w, weight)
    qx = x if act is None else fpk.quantize(x, act)
    values = x.double() if act is None else qx.dequantize().double()
    expected = values @ qw.dequantize().double().T
    out = fpk.mm(qx, qw, out_dtype=torch.float32)
    # tensor cores of sm90 cut the sums of FP8 products: what the op says that it may lose by that
    about = dict(a=x if act is None else qx.codes, format_a=act or "none", out_dtype=torch.float32)
    allowed = max(1e-5, OPS["mm_packed"].tolerance(about))
    assert float((out.double() - expected).norm() / expected.norm()) < allowed


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda x: OPS["quantize_mx"](x, format="mxfp5"), ValueError, "quantize_mx.format: expected one of"),
        (lambda x: OPS["quantize_mx"](x, rule="up"), ValueError, "quantize_mx.rule: expected one of None, 'floor'"),
        (lambda x: OPS["quantize_mx"](x[:, :3]), ValueError, r"quantize_mx.x \(packed\): expected a multiple of 2"),
        (lambda x: OPS["quantize_mx"](x[:, :6], format="mxfp6_e2m3"), ValueError, "expected a multiple of 4 columns"),
        (lambda x: OPS["quantize_nvfp4"](x[:, :3]), ValueError, "expected a multiple of 2 columns"),
        (
            lambda x: OPS["quantize_nvfp4"](x, x.new_ones(4, 1)),
            ValueError,
            r"global_scale: expected \(1, 1\), got \(4, 1",
        ),
        (lambda x: fpk.quantize(x, "mxfp4", scale=1.0), ValueError, "quantize.scale: expected None for mxfp4"),
        (lambda x: fpk.quantize(x, "mxfp4", packed=False), ValueError, "got option 'packed'"),
        (lambda x: fpk.quantize(x, "mxfp4", format="mxfp8_e5m2"), ValueError, "got option 'format'"),
        (
            lambda x: fpk.mm(fpk.quantize(x, "mxfp4"), fpk.quantize(x, "int8_channel")),
            ValueError,
            "mxfp4 activations have no product with int8_channel weights",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message, device):
    with pytest.raises(error, match=message):
        call(torch.ones(4, 64, device=device))
