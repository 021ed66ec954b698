"""Laws of products that read packed weights: every pair, what a layer allocates, and the shuffled layout."""

import itertools

import guarded
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fpk
from fpk._pairs import no_product
from fpk.api import Quantized, parse_layer_scheme, quantize
from fpk.check import assert_close, rel_error
from fpk.formats import SCHEMES
from fpk.kernels.gemm._gluon_mx import decode_activations_kernel
from fpk.kernels.gemm._operands import ACTIVATIONS, WEIGHTS, exact_in, operand
from fpk.kernels.pack._shuffle import ELEMENTS
from fpk.op import OPS

PACKED = [s.name for s in SCHEMES.values() if s.product]
ALLOWED = [s.name for s in SCHEMES.values() if not no_product(SCHEMES["mxfp4"], s)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_pair(activation, device, launches):
    """Each format of activations with each of weights, in every type that the pair is exact in."""
    op = OPS["mm_packed"]
    for weight in WEIGHTS:
        args = op.inputs(M=5, N=24, K=96, pair=(activation, weight, -1, 32), out_dtype=torch.float32, device=device)
        bound = op.bind(**args)
        first: dict[str, dict] = {}
        for config in op.configs(**bound):
            if op.is_legal(config, bound, op._device(bound)):
                first.setdefault(config["COMPUTE"], config)
        assert "half" in first, weight
        expected = op.reference(**args)
        for config in first.values():
            assert_close(op.launch(**args, config=config), expected, op.tolerance(bound), f"{weight} {config}")
    assert launches() >= len(WEIGHTS)


def test_codes_are_exact_in_the_types_they_are_multiplied_in():
    """Every code of a pair survives FP8 and INT8, checked value by value."""
    device = OPS["mm_packed"]._device(dict(a=torch.zeros(1)))
    for weight in WEIGHTS:
        this = operand(weight, torch.float8_e4m3fn, torch.uint8, 32)
        codes = torch.arange(1 << min(this.bits, 8), dtype=torch.int16)
        value = fpk.formats.decode(codes.to(torch.uint8).view(this.element.dtype), this.element)
        value = value[value.isfinite()]
        if exact_in("fp8", this, this, device):
            dtype = torch.float8_e5m2 if this.element.name == "e5m2" else torch.float8_e4m3fn
            assert torch.equal(value.to(dtype).float(), value), weight
        if exact_in("int8", this, this, device):
            shift = {"e2m1": 1, "e2m3": 3}.get(this.element.name, 0)
            assert torch.equal((value * 2**shift).to(torch.int8).float(), value * 2**shift), weight
        assert torch.equal(value.bfloat16().float(), value), weight
    assert {w for w in WEIGHTS if exact_in("int8", *[operand(w, torch.int8, torch.uint8, 32)] * 2, device)} == {
        "mxfp4", "mxfp6_e2m3", "mxint8", "int4"
    }  # fmt: skip


@pytest.mark.parametrize("weight", PACKED)
def test_mm_takes_every_activation_scheme(weight, device):
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(5, 64, generator=g), torch.randn(24, 64, generator=g)
    qw = quantize(w.to(device), weight)
    which = PACKED.index(weight) % 3  # the formats of all pairs are multiplied above
    for activation in (None, *ALLOWED[which::3]):
        qx = x.bfloat16().to(device) if activation is None else quantize(x.to(device), activation)
        value = qx.float() if isinstance(qx, Tensor) else qx.dequantize()
        out = fpk.mm(qx, qw, out_dtype=torch.float32)
        expected = value.double() @ qw.dequantize().double().T
        assert rel_error(out, expected) < (1e-5 if device == "cpu" else 4e-4), activation


def test_pairs_without_a_product():
    for weight, activation in itertools.product(SCHEMES.values(), SCHEMES.values()):
        if not weight.activation:
            continue
        reason = no_product(weight, activation)
        if not reason:
            parse_layer_scheme(f"{weight}:{activation}")
            continue
        with pytest.raises(ValueError, match=str(activation)):
            parse_layer_scheme(f"{weight}:{activation}")
    with pytest.raises(ValueError, match="mxfp4 activations have no product with fp8_channel weights"):
        fpk.mm(quantize(torch.ones(2, 32), "mxfp4"), quantize(torch.ones(4, 32), "fp8_channel"))
    zero = Quantized(torch.ones(2, 32, dtype=torch.int8), torch.ones(2, 1), "int8_token", torch.ones(2, 1).int())
    with pytest.raises(ValueError, match="int8_token with zero points has no product with mxfp4 weights"):
        fpk.mm(zero, quantize(torch.ones(4, 32), "mxfp4"))


def test_a_nan_scale_reaches_its_products_alone(device):
    w = quantize(torch.randn(16, 64).to(device), "mxfp4")
    scale = w.scale.clone()
    scale[3, 1] = 255
    for x in (
        torch.ones(2, 64, dtype=torch.bfloat16, device=device),
        quantize(torch.ones(2, 64).to(device), "fp8_token"),
    ):
        out = fpk.mm(x, Quantized(w.codes, scale, "mxfp4", check=False))
        assert out[:, 3].isnan().all() and int(out.isnan().sum()) == 2


class _Largest(TorchDispatchMode):
    """The most bytes that any tensor had which was made inside, less the zone that the suite puts behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = {t.untyped_storage().data_ptr() for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, Tensor) and t.untyped_storage().data_ptr() not in inputs:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes() - guarded.ZONE)
        return out


@pytest.mark.parametrize("weight", ("mxfp4", "mxfp6_e3m2", "mxint8", "nvfp4", "int4_group128_asymmetric"))
def test_no_weight_is_ever_dequantized(weight, device):
    """No tensor that a layer or an expert layer makes is as large as the packed weights."""
    N, K = 64, 256
    linear = nn.Linear(K, N).to(device)
    model = nn.Sequential(linear)
    x = torch.randn(3, K, device=device).bfloat16()
    for activation in ("none", "fp8_token"):
        layer = nn.Sequential(nn.Linear(K, N).to(device))
        layer.load_state_dict(model.state_dict())
        fpk.quantize_(layer, f"{weight}:{activation}")
        with torch.no_grad(), _Largest() as largest:
            out = layer(x)
        assert largest.bytes < N * K // 2, activation
        exact = x.double() @ layer[0].dequantize().double().T + linear.bias.detach().double()
        assert rel_error(out, exact) < {"none": 3e-3, "fp8_token": 0.05}[activation]
        if weight in ELEMENTS and (activation == "none" or weight == "mxfp4"):
            layer[0].shuffle_()
            with torch.no_grad(), _Largest() as largest:
                out = layer(x)
            assert largest.bytes < N * K // 2, activation
            assert rel_error(out, exact) < {"none": 3e-3, "fp8_token": 0.05}[activation]
    w13, w2 = (quantize(torch.randn(2, n, k).to(device), weight) for n, k in ((64, 128), (128, 32)))
    ids = torch.tensor([[0, 1], [1, 0]], device=device)
    with torch.no_grad(), _Largest() as largest:
        fpk.moe_experts(x[:2, :128].contiguous(), torch.ones(2, 2, device=device), ids, w13, w2, act="fp8_token")
    assert largest.bytes < w13.shape.numel() // 2


@pytest.mark.parametrize("target", ("bf16", "fp8"))
def test_shuffled_weights_give_the_same_product(target, device):
    for format in ELEMENTS if target == "bf16" else ("mxfp4",):
        g = torch.Generator().manual_seed(2)
        w, x = torch.randn(70, 160, generator=g).to(device), torch.randn(3, 160, generator=g).to(device)
        q = quantize(w, format)
        packed, row_scale, outside = OPS["shuffle_weight"](q.codes, q.scale, format, target)
        assert outside.item() == 0
        codes, scale = OPS["unshuffle_weight"](packed, row_scale, 160, format, target)
        assert torch.equal(codes, q.codes) and torch.equal(scale, q.scale.view(torch.uint8))
        a = x.bfloat16() if target == "bf16" else quantize(x, "fp8_token")
        expected = fpk.mm(a, q, out_dtype=torch.float32)
        over = row_scale if q.global_scale is None else row_scale * q.global_scale
        given = (a, None) if isinstance(a, Tensor) else (a.codes, a.scale)
        out = OPS["mm_shuffled"](given[0], packed, over, format, given[1], out_dtype=torch.float32)
        assert_close(out, expected, 2e-6 if device == "cpu" or target == "bf16" else 4e-4)


@pytest.mark.parametrize("weight", ("mxfp4/bf16", "mxfp6_e2m3/bf16", "mxfp4/fp8"))  # NVFP4 has no NaN in this layout
def test_nan_scales_stay_in_their_row_of_units(weight, device):
    """Three units of K, which steps of two and four units do not divide: nothing of the next row reaches a product."""
    op = OPS["mm_shuffled"]
    args = op.inputs(M=5, N=320, K=320, weight=weight, out_dtype=torch.float32, device=device)
    expected = op.reference(**args)
    per_row = 3 * 64 * 128 // 32
    args["packed"].flatten()[-5 * per_row :].view(5, per_row)[1::2] = 255
    bound = op.bind(**args)
    first: dict[tuple, dict] = {}
    for config in op.configs(**bound):
        if op.is_legal(config, bound, op._device(bound)):
            shape = tuple(config.get(n) for n in ("kernel", "BLOCK_N", "BLOCK_K", "HELD"))
            first.setdefault(shape, config)
    rows = torch.arange(320, device=device) // 64 % 2 == 0
    for config in first.values():
        out = op.launch(**args, config=config)
        assert_close(out[:, rows], expected[:, rows], op.tolerance(bound), f"{config}")
        assert "fp8" in weight or out[:, ~rows].isnan().any()


def test_scales_too_far_apart_are_counted(device):
    """Target fp8 folds the scales of a row into e4m3, up to 2^11 apart; blocks of zeros do not count."""
    codes = torch.full((2, 48), 0x11, dtype=torch.uint8, device=device)
    scale = torch.tensor([[120, 109, 130], [120, 119, 108]], dtype=torch.uint8, device=device)
    assert OPS["shuffle_weight"](codes, scale, "mxfp4", "fp8")[2].item() == 2
    codes[0, 16:32] = 0x80
    assert OPS["shuffle_weight"](codes, scale, "mxfp4", "fp8")[2].item() == 1
    assert OPS["shuffle_weight"](codes, scale, "mxfp4", "bf16")[2].item() == 0


@pytest.mark.parametrize("dtype", (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16))
def test_activations_of_an_mxfp8_product_on_hopper(dtype, device):
    """Every code under small, middling and large scales is decoded exactly and finds its new place."""
    bytes_ = torch.tensor([0, 1, 96, 127, 158, 254, 255], dtype=torch.uint8, device=device)
    if dtype is torch.bfloat16:
        codes, scale = torch.randn(3, 272, device=device).bfloat16(), None
        expected = codes
    else:
        codes = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).repeat(len(bytes_), 1)
        scale = bytes_[:, None].repeat(1, 8)
        power = torch.exp2(scale.double() - 127).masked_fill(scale == 255, torch.nan)
        expected = (codes.double() * power.repeat_interleave(32, 1)).bfloat16()
    out = torch.full(codes.shape, 7.0, dtype=torch.bfloat16, device=device)
    strides = codes.stride(0), 0 if scale is None else scale.stride(0), out.stride(0)
    decode_activations_kernel[(len(codes), 2)](codes, scale, out, codes.shape[1], *strides, BLOCK=256)
    column = torch.arange(codes.shape[1], device=device)
    place = column // 16 * 16 + column // 2 % 2 * 8 + column // 4 % 4 * 2 + column % 2
    assert torch.equal(out[:, place].nan_to_num(3.5), expected.nan_to_num(3.5))
