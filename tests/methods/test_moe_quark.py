"""Quark's methods of FP8, INT8 and INT4 experts: parameters, numbers, zero points, refusals."""

import itertools

import pytest
import torch
from linear_kit import random_x
from moe_kit import ACTS, E, H, I, config, done, expected, layer_of, matrices, put, randn, routed

from fpk.check import assert_close, rel_error
from fpk.formats import E4M3FN, encode, encode_int8
from fpk.methods import QuarkW4A8Fp8MoEMethod, QuarkW8A8Fp8MoEMethod, QuarkW8A8Int8MoEMethod
from fpk.methods.quark_moe import INT4_ORDER

pytestmark = pytest.mark.usefixtures("references")

NAMES = ("w1", "w3", "w2")


def spec(dtype="fp8_e4m3", qscheme="per_tensor", dynamic=False, **more):
    return dict(dtype=dtype, qscheme=qscheme, is_dynamic=dynamic, **more)


def matrix_of(name):
    return "w2" if name == "w2" else "w13"


def fp8(weight="per_channel", act="per_channel", dynamic=True):
    return lambda layer: QuarkW8A8Fp8MoEMethod(
        spec(qscheme=weight), spec(qscheme=act, dynamic=dynamic), layer.moe_config
    )


def run(layer, T=5):
    x, (weights, ids) = random_x(T, H), routed(T)
    return x, weights, ids, layer.quant_method.apply(layer, x, weights, ids)


def test_fp8_per_channel():
    layer, values = layer_of(fp8()), {}
    assert layer.w13_weight_scale.shape == (E, 2 * I) and layer.w13_weight_scale.quant_method == "channel"
    for name, w in matrices().items():
        scale = w.abs().amax(-1) / 448
        codes = encode(w / scale[..., None], E4M3FN).view(torch.float8_e4m3fn)
        values[name] = codes.float() * scale[..., None]
        for e in range(E):
            put(layer, f"{matrix_of(name)}_weight", codes[e], name, e)
            put(layer, f"{matrix_of(name)}_weight_scale", scale[e], name, e)
    done(layer)
    assert layer.w13_weight_scale.shape == (E, 2 * I, 1) and layer.w2_weight_scale.shape == (E, H, 1)
    w13, w2 = torch.cat([values["w1"], values["w3"]], 1), values["w2"]
    for ours, theirs in zip(layer.quant_method.dequantize(layer), (w13, w2), strict=True):
        assert_close(ours, theirs, 0.0)
    x, weights, ids, out = run(layer)
    assert rel_error(out, expected(x, weights, ids, w13, w2, "fp8_token")) < 0.008
    assert layer.quant_method.scheme(layer) == "fp8_channel:fp8_token"


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (("per_group", "per_tensor", True), "per tensor, or per channel and per token"),
        (("per_channel", "per_tensor", True), "per tensor, or per channel and per token"),
        (("per_tensor", "per_channel", True), "per tensor, or per channel and per token"),
        (("per_channel", "per_channel", False), "expected dynamic activations with weights per channel"),
    ),
)
def test_fp8_pairs_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer_of(fp8(*arguments))


def int8(weight, dynamic):
    return lambda layer: QuarkW8A8Int8MoEMethod(
        spec("int8", f"per_{weight}"), spec("int8", "per_channel" if dynamic else "per_tensor", dynamic),
        layer.moe_config,
    )  # fmt: skip


def load_int8(layer, weight, dynamic, zeros=None, input_zeros=None, seed=0, scales=None):
    """Codes, scales (and zero points) of a seeded checkpoint; the values they stand for, w13 and w2."""
    values = {}
    for i, (name, w) in enumerate(matrices(seed).items()):
        dims = (2,) if weight == "channel" else (1, 2)
        scale = w.abs().amax(dims, keepdim=True) / 127
        zero = torch.zeros_like(scale) if zeros is None else zeros(scale, i)
        if zeros is not None:
            scale = scale * 1.5
        codes = encode_int8(w / scale + zero)
        values[name] = (codes.float() - zero) * scale
        for e in range(E):
            s, z = (t[e].flatten() if weight == "channel" else t[e].reshape(()) for t in (scale, zero))
            put(layer, f"{matrix_of(name)}_weight", codes[e], name, e)
            put(layer, f"{matrix_of(name)}_weight_scale", s, name, e)
            if zeros is not None:
                put(layer, f"{matrix_of(name)}_weight_zero_point", z.to(torch.int8), name, e)
            if not dynamic:
                given = 0.02 + 0.005 * e if scales is None else scales[e]
                put(layer, f"{matrix_of(name)}_input_scale", torch.tensor(given), name, e)
                if input_zeros is not None:
                    put(layer, f"{matrix_of(name)}_input_zero_point", input_zeros[e], name, e)
    done(layer)
    return torch.cat([values["w1"], values["w3"]], 1), values["w2"]


def static(scale, zero=0):
    return lambda x: (encode_int8(x.float() / scale + zero).float() - zero) * scale


@pytest.mark.parametrize(("weight", "dynamic"), [*itertools.product(("tensor", "channel"), (False, True))])
def test_int8_all_four(weight, dynamic):
    layer = layer_of(int8(weight, dynamic), moe=config(has_bias=True))
    shape = (E, 2) if weight == "tensor" else (E, 2 * I)
    assert layer.w13_weight_scale.shape == layer.w13_weight_zero_point.shape == shape
    assert layer.w13_weight_zero_point.dtype is torch.int8 and layer.w2_input_zero_point.shape == (E,)
    assert layer.w13_bias.dtype is torch.float32
    bias = randn(E, 2 * I, seed=3)
    put(layer, "w13_bias", bias)
    w13, w2 = load_int8(layer, weight, dynamic)
    assert layer.w13_weight_zero_point is None and layer.w2_input_zero_point is None
    ours13, ours2 = layer.quant_method.dequantize(layer)
    assert rel_error(ours13, w13) < (0.01 if weight == "tensor" else 1e-7)
    assert_close(ours2, w2, 1e-7)
    act = ACTS["int8_token"] if dynamic else static(torch.tensor(0.02 + 0.005 * (E - 1)))
    x, weights, ids, out = run(layer)
    assert rel_error(out, expected(x, weights, ids, ours13, w2, act, bias13=bias)) < 0.008
    act = "int8_token" if dynamic else "int8_tensor_static"
    assert layer.quant_method.scheme(layer) == f"int8_{weight}:{act}"


@pytest.mark.parametrize("weight", ("tensor", "channel"))
@pytest.mark.parametrize("inputs", ("dynamic", "static", "asymmetric", "uneven"))
def test_int8_zero_points_count(weight, inputs):
    """Of weights and of static activations; experts whose activations differ get the range that holds them all."""
    dynamic = inputs == "dynamic"
    layer = layer_of(int8(weight, dynamic))
    zeros = {"asymmetric": [9] * E, "uneven": [9, -20, 0, 31]}.get(inputs)
    given = None if zeros is None else [torch.tensor(z, dtype=torch.int8) for z in zeros]

    def weight_zeros(scale, i):
        return torch.full_like(scale, -7.0 + 5 * i)

    scales = [0.02 + (0.005 * e if inputs != "asymmetric" else 0) for e in range(E)]
    w13, w2 = load_int8(layer, weight, dynamic, weight_zeros, given, scales=scales)
    assert layer.w2_weight_zero_point is not None and (layer.w13_weight_zero_point is None) == (weight == "tensor")
    ours13, ours2 = layer.quant_method.dequantize(layer)
    assert rel_error(ours13, w13) < (0.012 if weight == "tensor" else 1e-6)
    assert_close(ours2, w2, 1e-6)
    act = ACTS["int8_token"]
    if inputs == "static":
        act = static(torch.tensor(scales[-1]))
    elif inputs == "asymmetric":
        act = static(torch.tensor(0.02), 9)
    elif inputs == "uneven":
        low = min(s * (-128 - z) for s, z in zip(scales, zeros, strict=True))
        high = max(s * (127 - z) for s, z in zip(scales, zeros, strict=True))
        scale = torch.tensor((high - low) / 255)
        act = static(scale, float((-128 - low / scale).round()))
        assert layer.w13_input_zero_point.shape == () and layer.w13_input_zero_point != 0
    x, weights, ids, out = run(layer)
    assert rel_error(out, expected(x, weights, ids, ours13, ours2, act)) < 0.008


def test_int8_zero_points_of_dynamic_activations_are_refused():
    layer = layer_of(int8("channel", True))
    put(layer, "w2_input_zero_point", torch.tensor(3, dtype=torch.int8), "w2", 1)
    with pytest.raises(ValueError, match="w2_input_zero_point: expected zeros with dynamic activations"):
        load_int8(layer, "channel", True)


def test_int8_shards_with_one_scale_stay_as_they_are():
    layer = layer_of(int8("tensor", True))
    codes = {n: encode_int8(w * 1000) for n, w in matrices().items()}
    for name, e in itertools.product(NAMES, range(E)):
        put(layer, f"{matrix_of(name)}_weight", codes[name][e], name, e)
        put(layer, f"{matrix_of(name)}_weight_scale", torch.tensor(0.001), name, e)
    done(layer)
    assert torch.equal(layer.w13_weight, torch.cat([codes["w1"], codes["w3"]], 1))


def test_int8_refusals():
    with pytest.raises(ValueError, match="expected per_tensor or per_channel, got 'per_group'"):
        layer_of(int8("group", True))
    layer = layer_of(int8("tensor", False))
    with pytest.raises(ValueError, match=r"w13_weight_scale: 8 of 8 scales are missing"):
        done(layer)


def test_int8_second_load_in_place_and_whole():
    layer = layer_of(int8("channel", False))
    load_int8(layer, "channel", False)
    pointers = {n: p.data_ptr() for n, p in layer.named_parameters()}
    w13, w2 = load_int8(layer, "channel", False, seed=40)
    assert pointers == {n: p.data_ptr() for n, p in layer.named_parameters()}
    for ours, theirs in zip(layer.quant_method.dequantize(layer), (w13, w2), strict=True):
        assert_close(ours, theirs, 1e-7)
    put(layer, "w13_weight_scale", torch.ones(I), "w1", 0)
    with pytest.raises(ValueError, match="w13_weight: missing, expected it to be loaded again"):
        done(layer)


@pytest.mark.parametrize("order", ("reorder", "order"))
@pytest.mark.parametrize("ranks", (1, 2))
def test_int4_by_fp8(order, ranks):
    """Words of eight codes; a scale a row and one a shard."""
    inter, values, stored = 96, {}, {}
    for i, (name, w) in enumerate(matrices(inter=inter).items()):
        rows = w.abs().amax(-1) / 7
        codes = (w / rows[..., None]).round().clamp(-8, 7).to(torch.int32)
        shard = torch.arange(1, E + 1, device=w.device) / 4 + i
        values[name] = codes.float() * (rows * shard[:, None])[..., None]
        at = INT4_ORDER if order == "reorder" else range(8)
        eight = codes.unflatten(-1, (-1, 8))
        words = sum((eight[..., k].long() & 15) << (4 * n) for n, k in enumerate(at))
        stored[name] = (words.to(torch.int32), rows, shard)
    w13, w2 = torch.cat([values["w1"], values["w3"]], 1), values["w2"]
    for rank in range(ranks):
        part = inter // ranks
        moe = config(intermediate_size_per_partition=part, tp_size=ranks, tp_rank=rank)
        layer = layer_of(lambda layer: QuarkW4A8Fp8MoEMethod([], spec(dynamic=True), layer.moe_config, order), moe=moe)
        assert layer.w13_weight.dtype is torch.uint32 and layer.w13_weight.shape == (E, 2 * part, H // 8)
        for name, (words, rows, shard) in stored.items():
            for e in range(E):
                put(layer, f"{matrix_of(name)}_weight", words[e], name, e)
                put(layer, f"{matrix_of(name)}_weight_scale", shard[e], name, e)
                put(layer, f"{matrix_of(name)}_weight_scale_2", rows[e], name, e)
        done(layer)
        at = slice(rank * part, (rank + 1) * part)
        b13, b2 = layer.quant_method.dequantize(layer)
        assert_close(b13, torch.cat([w13[:, :inter][:, at], w13[:, inter:][:, at]], 1), 1e-6)
        assert_close(b2, w2[:, :, at].contiguous(), 1e-6)
        x, weights, ids, out = run(layer)
        assert rel_error(out, expected(x, weights, ids, b13, b2, "fp8_token")) < 0.008
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of 8 for packed INT4, got 164"):
        layer_of(
            lambda layer: QuarkW4A8Fp8MoEMethod([], spec(dynamic=True), layer.moe_config), moe=config(hidden_size=164)
        )
