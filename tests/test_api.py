"""fpk.quantize and fpk.mm against fake quantization in plain torch, and what they refuse."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import fpk
from fpk.api import Quantized, mm, parse_layer_scheme, quantize
from fpk.check import FLOAT_INPUTS, assert_close, bits, rel_error
from fpk.formats import SCHEMES

FP8_ROWS = ("fp8_token", "fp8_channel")
INT8_ROWS = ("int8_token", "int8_channel")
GROUPS = ("fp8_group128", "fp8_block128", "int8_group128")
ASYMMETRIC = ("int8_tensor_asymmetric", "int8_token_asymmetric")
# block-scaled schemes have tests of their own, laws/test_microscale.py
SYMMETRIC = [s.name for s in SCHEMES.values() if s.dequantizer == "dequantize" and s.name not in ASYMMETRIC]


def fake(x: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """Codes as fp32 values, and for each of them its scale, of a matrix or a stack, in plain torch."""
    x = x.float()
    amax = amax_of(x, scheme)
    if scheme.startswith("int8"):
        scale = amax.clamp(min=1e-10) / amax.new_tensor(127.0)
        low = -127 if scheme == "int8_channel" else -128
        return (x / scale).round().clamp(low, 127) + 0.0, scale  # int8 has no -0
    floor = {"fp8_group128": 1e-10, "fp8_block128": 1e-4}.get(scheme, 1 / 512)
    scale = amax.clamp(min=floor) / amax.new_tensor(448.0)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float(), scale


def amax_of(x: Tensor, scheme: str) -> Tensor:
    """The largest magnitude of what shares a scale with an element, for every element."""
    rows = {"tensor": x.shape[-2], "block128": 128}.get(scheme.split("_")[1], 1)
    cols = 128 if scheme in GROUPS else x.shape[-1]
    amax = torch.empty_like(x)
    for m in range(0, x.shape[-2], rows):
        for k in range(0, x.shape[-1], cols):
            at = (..., slice(m, m + rows), slice(k, k + cols))
            amax[at] = x[at].abs().amax((-2, -1), keepdim=True).expand_as(x[at])
    return amax


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


QUANTIZE = [
    *((s, shape, d) for s in SYMMETRIC for shape in ((5, 48), (3, 5, 48)) for d in FLOAT_INPUTS),
    *((s, shape, torch.bfloat16) for s in GROUPS for shape in ((130, 200), (2, 130, 144))),
]


@pytest.mark.parametrize(("scheme", "shape", "dtype"), QUANTIZE)
def test_quantize_is_fake_quantization(scheme, shape, dtype, device):
    x = randn(*shape, dtype=dtype)
    q = quantize(x.to(device), scheme)
    codes, scale = fake(x, scheme)
    assert q.scheme == scheme and q.shape == x.shape
    assert q.scale.shape == SCHEMES[scheme].granularity.scale_shape(shape)
    assert_close(q.codes.cpu().float(), codes, 0.0)
    assert_close(q.dequantize().cpu(), codes * scale, 0.0)
    assert_close(q.dequantize(torch.bfloat16).cpu(), (codes * scale).bfloat16(), 0.0)


@pytest.mark.parametrize("shape", [(5, 48), (3, 5, 48)])
@pytest.mark.parametrize("scheme", ASYMMETRIC)
def test_quantize_with_zero_points(scheme, shape, device):
    x = randn(*shape, dtype=torch.float32) + 0.5
    q = quantize(x.to(device), scheme)
    dims = (-2, -1) if scheme == "int8_tensor_asymmetric" else (-1,)
    high, low = x.amax(dims, keepdim=True).clamp(min=0), x.amin(dims, keepdim=True).clamp(max=0)
    scale = (high - low) / high.new_tensor(255.0)
    zero = (-128 - low / scale).round()
    codes = ((x / scale).round() + zero).clamp(-128, 127)
    assert_close(q.scale.cpu(), scale, 0.0)
    assert_close(q.zero_point.cpu(), zero.int(), 0.0)
    assert_close(q.codes.cpu(), codes.to(torch.int8), 0.0)
    assert_close(q.dequantize().cpu(), (codes - zero) * scale, 0.0)
    again = quantize(x.to(device), scheme, scale=q.scale, zero_point=q.zero_point)
    assert_close(again.codes, q.codes, 0.0)
    with pytest.raises(ValueError, match=r"quantize.zero_point: expected the zero points"):
        quantize(x.to(device), scheme, scale=q.scale)


def test_matrices_of_a_stack_share_nothing(device):
    x = randn(3, 4, 32, dtype=torch.float32).to(device) * torch.tensor([1.0, 100.0, 1e-3], device=device)[:, None, None]
    stack = quantize(x, "fp8_tensor")
    assert stack.scale.shape == (3, 1, 1)
    for e in range(3):
        one = quantize(x[e], "fp8_tensor")
        assert_close(stack.scale[e], one.scale, 0.0)
        assert_close(stack.codes[e].contiguous(), one.codes, 0.0)


def test_no_rows(device):
    for scheme in fpk.list_schemes():
        q = quantize(torch.zeros(0, 32, device=device), scheme)
        assert q.shape == (0, 32) and q.scale.shape == SCHEMES[scheme].granularity.scale_shape((0, 32))


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]]).half()])
def test_static_scale_of_a_matrix(scale, device):
    x = torch.tensor([[1.0, -3.0, 1000.0], [0.25, 0.0, -2.0]], device=device)
    q = quantize(x, "fp8_tensor", scale=scale.to(device) if isinstance(scale, Tensor) else scale)
    assert q.scale.shape == (1, 1) and q.scale.dtype is torch.float32
    assert q.codes.float().tolist() == [[2.0, -6.0, 448.0], [0.5, 0.0, -4.0]]


def test_a_static_scale_is_checked_unless_that_was_done(device):
    x, bad = torch.ones(1, 4, device=device), torch.zeros(1, 1, device=device)
    with pytest.raises(ValueError, match=r"quantize.scale: expected finite positive scales, got 0.0"):
        quantize(x, "fp8_tensor", scale=bad)
    assert quantize(x, "fp8_tensor", scale=bad, check=False).codes.float().tolist() == [[448.0] * 4]
    with pytest.raises(ValueError, match=r"quantize.scale: expected \(1, 1\)"):
        quantize(x, "fp8_tensor", scale=bad.expand(1, 2), check=False)


def test_static_scale_of_rows(device):
    x = torch.ones(2, 4, device=device)
    q = quantize(x, "fp8_token", scale=torch.tensor([[0.5], [0.25]], device=device))
    assert q.codes.float().tolist() == [[2.0] * 4, [4.0] * 4]
    assert_close(q.dequantize(), x, 0.0)


def test_given_its_own_scale_a_tensor_gets_the_same_codes(device):
    x = randn(5, 48).to(device)
    for scheme in ("fp8_tensor", "fp8_token"):
        dynamic = quantize(x, scheme)
        assert_close(quantize(x, scheme, scale=dynamic.scale).codes, dynamic.codes, 0.0)


def test_options_reach_the_op(device):
    x = torch.tensor([[1.0, 4.0]], device=device)
    bounded = quantize(x, "fp8_token", scale_ub=torch.tensor([1.0], device=device))
    assert bounded.dequantize().tolist() == [[1.0, 1.0]]
    wide = quantize(x, "fp8_token", dtype=torch.float8_e5m2)
    assert wide.codes.dtype is torch.float8_e5m2 and wide.format.name == "e5m2"
    assert quantize(-x, "int8_token", qmin=-127).codes.min() == -127


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_must_be_finite_and_positive(bad, device):
    x = torch.ones(2, 4, device=device)
    with pytest.raises(ValueError, match=r"quantize.scale: expected finite positive scales"):
        quantize(x, "fp8_tensor", scale=bad)
    with pytest.raises(ValueError, match=r"quantize.scale: expected finite positive scales"):
        quantize(x, "fp8_token", scale=torch.tensor([[1.0], [bad]], device=device))
    with pytest.raises(ValueError, match=r"quantize.scale_ub: expected finite positive scales"):
        quantize(x, "fp8_token", scale_ub=torch.tensor([bad], device=device))
    good = quantize(x, "fp8_token")
    with pytest.raises(ValueError, match=r"Quantized.scale: expected finite positive scales"):
        Quantized(good.codes, torch.tensor([[1.0], [bad]], device=device), "fp8_token")


def test_quantize_refuses():
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"scheme: expected one of fp8_tensor.*got 'fp7'"):
        quantize(x, "fp7")
    with pytest.raises(ValueError, match=r"quantize.x: expected 2 or 3 dimensions"):
        quantize(x[0], "fp8_token")
    with pytest.raises(ValueError, match=r"quantize.x: expected float32 or bfloat16 or float16, got int32"):
        quantize(x.int(), "fp8_token")
    with pytest.raises(ValueError, match=r"quantize.x: expected .* got float8_e4m3fn"):
        quantize(x.to(torch.float8_e4m3fn), "fp8_token")
    with pytest.raises(ValueError, match="got option 'group'"):
        quantize(x, "fp8_token", group=2)
    with pytest.raises(ValueError, match="got option 'rows'"):
        quantize(x, "fp8_tensor", scale=1.0, rows=1)
    with pytest.raises(ValueError, match="got option 'scale_up'"):
        quantize(x, "fp8_token", scale_up=None)
    with pytest.raises(ValueError, match=r"quantize.scale: expected \(1, 1\), got \(2,\)"):
        quantize(x, "fp8_tensor", scale=torch.ones(2))
    with pytest.raises(ValueError, match=r"quantize.scale: expected \(2, 1\), got \(\)"):
        quantize(x, "fp8_token", scale=1.0)
    with pytest.raises(ValueError, match=r"quantize.scale: expected .* got int64"):
        quantize(x, "fp8_tensor", scale=torch.tensor(1))
    with pytest.raises(ValueError, match=r"quantize.scale: expected cpu .as x., got meta"):
        quantize(x, "fp8_tensor", scale=torch.ones(1, 1, device="meta"))
    with pytest.raises(ValueError, match=r"quantize.zero_point: expected None"):
        quantize(x, "fp8_token", zero_point=torch.zeros(2, 1, dtype=torch.int32))
    with pytest.raises(ValueError, match="needs no gradient"):
        quantize(x.requires_grad_(), "fp8_token")


def test_quantized_refuses_parts_that_do_not_fit():
    q = quantize(torch.ones(2, 4), "fp8_token")
    with pytest.raises(ValueError, match=r"Quantized.scale: expected \(2, 1\), got \(1, 1\)"):
        Quantized(q.codes, torch.ones(1, 1), "fp8_token")
    with pytest.raises(ValueError, match=r"Quantized.scale: expected .* got float64"):
        Quantized(q.codes, q.scale.double(), "fp8_token")
    with pytest.raises(ValueError, match=r"Quantized.codes: expected int8, got float8_e4m3fn"):
        Quantized(q.codes, q.scale, "int8_token")
    with pytest.raises(ValueError, match=r"Quantized.zero_point: expected None"):
        Quantized(q.codes, q.scale, "fp8_token", zero_point=torch.zeros(2, 1, dtype=torch.int32))
    codes = torch.ones(2, 4, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"Quantized.zero_point: expected int32"):
        Quantized(codes, q.scale, "int8_token", zero_point=torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"Quantized.zero_point: expected a tensor for int8_token_asymmetric"):
        Quantized(codes, q.scale, "int8_token_asymmetric")
    with pytest.raises(ValueError, match=r"Quantized.shape: expected \(2, 4\) for codes of \(2, 4\), got \(2, 3\)"):
        Quantized(q.codes, q.scale, "fp8_token", shape=torch.Size((2, 3)))
    with pytest.raises(ValueError, match=r"Quantized.global_scale: expected None for fp8_token, got a tensor"):
        Quantized(q.codes, q.scale, "fp8_token", global_scale=torch.ones(1, 1))


def test_quantized_refuses_block_scales_that_are_no_numbers():
    packed = torch.zeros(1, 16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"Quantized.shape: expected \(1, 32\) for codes of \(1, 16\), got \(1, 16\)"):
        Quantized(packed, torch.full((1, 1), 127, dtype=torch.uint8), "mxfp4", shape=packed.shape)
    for codes, scheme in ((packed, "mxfp4"), (quantize(torch.ones(1, 32), "fp8_token").codes, "fp8_token")):
        assert Quantized(codes, torch.full((1, 1), 254, dtype=torch.uint8), scheme).shape == (1, 32)
        with pytest.raises(ValueError, match=r"Quantized.scale: expected finite positive scales, got nan"):
            Quantized(codes, torch.full((1, 1), 255, dtype=torch.uint8), scheme)
    one = torch.ones(1, 1)
    assert Quantized(packed, torch.zeros(1, 2).to(torch.float8_e4m3fn), "nvfp4", global_scale=one).shape == (1, 32)
    for bad in (float("nan"), -1.0):
        with pytest.raises(ValueError, match=f"Quantized.scale: expected finite positive scales, got {bad}"):
            Quantized(packed, torch.tensor([[1.0, bad]]).to(torch.float8_e4m3fn), "nvfp4", global_scale=one)
    with pytest.raises(ValueError, match=r"Quantized.global_scale: expected a tensor for nvfp4, got None"):
        Quantized(packed, torch.ones(1, 2).to(torch.float8_e4m3fn), "nvfp4")


def test_quantized_reads_well_and_counts_its_bytes():
    q = quantize(torch.ones(2, 4), "fp8_token")
    assert q.nbytes == 2 * 4 + 2 * 4
    assert repr(q) == "Quantized(fp8_token, shape=(2, 4), codes=e4m3fn, scale=(2, 1) float32, 16 bytes, cpu)"
    for copied in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert repr(copied) == repr(q)
        assert torch.equal(bits(copied.codes), bits(q.codes))


def test_bf16_scales_are_converted_by_value():
    q = Quantized(quantize(torch.ones(2, 4), "fp8_token").codes, torch.tensor([[0.77], [1.5]]).bfloat16(), "fp8_token")
    assert q.scale.dtype is torch.float32
    assert_close(q.scale, torch.tensor([[0.77], [1.5]]).bfloat16().float(), 0.0)


# ---- mm --------------------------------------------------------------------
FP8_PAIRS = [(a, w) for a in ("fp8_tensor", "fp8_token") for w in ("fp8_tensor", "fp8_channel")]
PAIRS = [*FP8_PAIRS, ("int8_token", "int8_channel"), ("int8_token", "int8_token")]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("act", "weight"), PAIRS)
def test_mm_is_the_product_of_the_values(act, weight, with_bias, device):
    x, w = randn(5, 48), randn(24, 48, seed=1)
    bias = randn(24, seed=2) if with_bias else None
    (xc, xs), (wc, ws) = fake(x, act), fake(w, weight)
    expected = (xc * xs).double() @ (wc * ws).double().T
    if bias is not None:
        expected = expected + bias.double()
    qx, qw = quantize(x.to(device), act), quantize(w.to(device), weight)
    on_device = None if bias is None else bias.to(device)
    for out_dtype, tol in ((torch.bfloat16, 3e-3), (torch.float16, 5e-4), (torch.float32, 1e-5)):
        out = mm(qx, qw, bias=on_device, out_dtype=out_dtype)
        assert out.dtype is out_dtype and out.shape == (5, 24)
        assert rel_error(out.cpu(), expected) <= tol
    assert mm(qx, qw).dtype is torch.bfloat16


GROUP_PAIRS = [
    ("fp8_group128", "fp8_block128"),
    ("fp8_group128", "fp8_group128"),
    ("fp8_token", "fp8_block128"),  # one scale a row counts for each of its groups
    ("fp8_tensor", "fp8_group128"),
    ("fp8_group128", "fp8_channel"),
    ("fp8_group128", "fp8_tensor"),
    ("int8_group128", "int8_group128"),
    ("int8_token", "int8_group128"),
]


@pytest.mark.parametrize(("act", "weight"), GROUP_PAIRS)
def test_mm_of_scales_that_change_along_k(act, weight, device):
    x, w, bias = randn(5, 200), randn(136, 200, seed=1), randn(136, seed=2)
    qx, qw = quantize(x.to(device), act), quantize(w.to(device), weight)
    (xc, xs), (wc, ws) = fake(x, act), fake(w, weight)
    expected = (xc * xs).double() @ (wc * ws).double().T + bias.double()
    for out_dtype, tol in ((torch.bfloat16, 3e-3), (torch.float32, 1e-5)):
        out = mm(qx, qw, bias=bias.to(device), out_dtype=out_dtype)
        assert out.dtype is out_dtype and rel_error(out.cpu(), expected) <= tol


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", SYMMETRIC)
def test_mm_of_plain_activations(weight, dtype, device):
    x, w, bias = randn(5, 200, dtype=dtype), randn(136, 200, seed=1), randn(136, seed=2)
    qw = quantize(w.to(device), weight)
    wc, ws = fake(w, weight)
    expected = x.double() @ (wc * ws).double().T + bias.double()
    out = mm(x.to(device), qw, bias=bias.to(device), out_dtype=dtype)
    assert out.dtype is dtype and rel_error(out.cpu(), expected) <= 5e-3
    strided = x.T.contiguous().T.to(device)
    assert_close(mm(strided, qw, bias=bias.to(device), out_dtype=dtype), out, 0.0)


def test_blocks_of_rows_are_no_activations():
    q = quantize(randn(5, 48), "fp8_block128")
    with pytest.raises(ValueError, match=r"fp8_block128 shares scales between the rows .* with fp8_block128 weights"):
        mm(q, q)
    with pytest.raises(ValueError, match="fp8_block128 shares scales between the rows"):
        parse_layer_scheme("fp8_channel:fp8_block128")


def test_mm_without_rows(device):
    qw = quantize(randn(24, 48).to(device), "fp8_channel")
    assert mm(quantize(torch.zeros(0, 48, device=device), "fp8_token"), qw).shape == (0, 24)


def test_mm_with_zero_points(device):
    """int8 activations with zero points: value = (code - zero_point) * scale."""
    codes = torch.randint(-128, 128, (5, 48), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scale = torch.rand(5, 1, generator=torch.Generator().manual_seed(1)) + 0.1
    zero = torch.tensor([[-128], [0], [7], [127], [-3]], dtype=torch.int32)
    qx = Quantized(codes.to(device), scale.to(device), "int8_token", zero_point=zero.to(device))
    values = (codes.float() - zero) * scale
    assert_close(qx.dequantize().cpu(), values, 0.0)
    w = randn(24, 48, seed=1)
    wc, ws = fake(w, "int8_channel")
    out = mm(qx, quantize(w.to(device), "int8_channel"), out_dtype=torch.float32)
    assert rel_error(out.cpu(), values.double() @ (wc * ws).double().T) <= 1e-5


def test_mm_refuses():
    x, w = randn(5, 48), randn(24, 48)
    qx, qw = quantize(x, "fp8_token"), quantize(w, "fp8_channel")
    with pytest.raises(ValueError, match=r"int8_token activations have no product with fp8_channel weights"):
        mm(quantize(x, "int8_token"), qw)
    with pytest.raises(ValueError, match=r"fp8_token activations have no product with int8_channel weights"):
        mm(qx, quantize(w, "int8_channel"))
    with pytest.raises(ValueError, match=r"mm.qx: expected \(M, 48\) for weights of \(24, 48\), got \(5, 32\)"):
        mm(quantize(x[:, :32], "fp8_token"), qw)
    with pytest.raises(ValueError, match=r"mm.qw: expected Quantized weights"):
        mm(qx, w)
    with pytest.raises(ValueError, match=r"mm.qw: expected 2 dimensions"):
        mm(qx, quantize(w[None], "fp8_channel"))
    with pytest.raises(ValueError, match=r"mm.qx: expected 2 dimensions"):
        mm(quantize(x[None], "fp8_token"), qw)
    with pytest.raises(ValueError, match=r"mm.qx: expected bfloat16 or float16, got float32"):
        mm(x.float(), qw)
    with pytest.raises(ValueError, match="bias"):
        mm(qx, qw, bias=torch.zeros(5))
    with pytest.raises(ValueError, match="out_dtype"):
        mm(qx, qw, out_dtype=torch.int8)
    zero_points = Quantized(
        torch.ones(24, 48, dtype=torch.int8), torch.ones(24, 1), "int8_token",
        zero_point=torch.ones(24, 1, dtype=torch.int32),
    )  # fmt: skip
    with pytest.raises(NotImplementedError, match=r"mm.qw: weights with zero points"):
        mm(quantize(x, "int8_token"), zero_points)


# ---- torch.compile, import -------------------------------------------------
def test_compiles_in_one_graph(device):
    qw = quantize(randn(24, 48).to(device), "fp8_channel")

    def layer(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        weight = Quantized(codes, scale, "fp8_channel", check=False)
        return mm(quantize(x, "fp8_token", dtype=torch.float8_e4m3fn), weight)

    x = randn(5, 48).to(device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, qw.codes, qw.scale), layer(x, qw.codes, qw.scale), 0.0)


def test_import_is_light():
    """No triton, no pandas, no plots, no transformers, no GPU, and no table read."""
    script = (
        "import sys, fpk; heavy = {'triton', 'pandas', 'matplotlib', 'transformers', 'torch', 'fpk.kernels', 'fpk.db'};"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys();"
        "assert {'quantize', 'mm', 'OPS', 'nn', 'quantize_'} <= set(dir(fpk));"
        "fpk.list_schemes(); assert 'triton' not in sys.modules;"
        "assert 'quantize_fp8_token' in fpk.OPS; assert not hasattr(fpk, 'nonsense');"
        "import torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_resolves():
    for name in fpk.__all__:
        assert getattr(fpk, name) is not None
