"""Static activations of experts with a scale each: every method that has them, zero points, NVFP4's second scales."""

import pytest
import torch
from linear_kit import random_x
from moe_kit import E, H, done, expected, layer_of, matrices, put, routed

import fpk
from fpk.check import rel_error
from fpk.formats import E4M3FN, INT8, encode
from fpk.methods import (
    Fp8Config,
    Fp8MoEMethod,
    ModelOptConfig,
    QuarkConfig,
    QuarkOCP_MX_MoEMethod,
    QuarkW8A8Fp8MoEMethod,
    QuarkW8A8Int8MoEMethod,
)

pytestmark = pytest.mark.usefixtures("references")

STATIC8 = dict(dtype="fp8_e4m3", qscheme="per_tensor")
MXFP4 = dict(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0")
MAKE = {
    "fp8": lambda layer: Fp8MoEMethod(Fp8Config(True, "static"), layer, per_expert_input_scale=True),
    "quark fp8": lambda layer: QuarkW8A8Fp8MoEMethod(STATIC8, STATIC8, layer.moe_config),
    "quark int8": lambda layer: QuarkW8A8Int8MoEMethod(dict(), dict(), layer.moe_config),
    "quark int8 zeros": lambda layer: QuarkW8A8Int8MoEMethod(dict(), dict(), layer.moe_config),
    "mxfp4": lambda layer: QuarkOCP_MX_MoEMethod(MXFP4, STATIC8, layer.moe_config),
}


def load(kind, each=True):
    """A layer whose experts' static scales grow with their number; its scales and zero points by matrix and expert."""
    layer = layer_of(MAKE[kind])
    layer.quant_method.per_expert_input_scale = each
    scales, zeros = {}, {}
    for name, w in matrices().items():
        matrix = "w2" if name == "w2" else "w13"
        for e in range(E):
            if kind == "mxfp4":
                q = fpk.quantize(w[e], "mxfp4")
                codes, scale = q.codes, q.scale
            else:
                scale = w[e].abs().amax() / (127 if "int8" in kind else 448)
                codes = encode(w[e] / scale, INT8 if "int8" in kind else E4M3FN)
                codes = codes if "int8" in kind else codes.view(torch.float8_e4m3fn)
            put(layer, f"{matrix}_weight", codes, name, e)
            put(layer, f"{matrix}_weight_scale", scale, name, e)
            scales[matrix, e] = (0.006 if matrix == "w13" else 0.2) * (1 + e) * (4 if "int8" in kind else 1)
            put(layer, f"{matrix}_input_scale", torch.tensor(scales[matrix, e]), name, e)
            if kind.endswith("zeros"):
                zeros[matrix, e] = 5 * e - 3
                put(layer, f"{matrix}_input_zero_point", torch.tensor(5 * e - 3, dtype=torch.int8), name, e)
    return done(layer), scales, zeros


def rounder(kind, scale, zero=0):
    if "int8" in kind:
        return lambda v: ((v.float() / scale).round() + zero).clamp(-128, 127).sub(zero) * scale
    return lambda v: encode(v.float() / scale, E4M3FN).view(torch.float8_e4m3fn).float() * scale


def expert_by_expert(layer, x, weights, ids, fakes):
    """The layer with roundings that differ by expert: the sum over the experts of what each adds."""
    w13, w2 = layer.quant_method.dequantize(layer)
    parts = [expected(x, weights * (ids == e), ids, w13, w2, *fakes[e]).float() for e in range(E)]
    return torch.stack(parts).sum(0)


@pytest.mark.parametrize("kind", MAKE)
def test_one_static_scale_an_expert(kind):
    layer, scales, zeros = load(kind)
    assert layer.w13_input_scale.shape == layer.w2_input_scale.shape == (E,)
    torch.testing.assert_close(layer.w2_input_scale.cpu(), torch.tensor([scales["w2", e] for e in range(E)]))
    x, (weights, ids) = random_x(7, H), routed(7)
    ids[0] = -1  # rows of no expert
    fakes = [[rounder(kind, scales[m, e], zeros.get((m, e), 0)) for m in ("w13", "w2")] for e in range(E)]
    want = expert_by_expert(layer, x, weights, ids, fakes)
    out = layer.quant_method.apply(layer, x, weights, ids)
    assert rel_error(out, want) < 0.008 and not out[0].any()
    common, *_ = load(kind, each=False)
    assert common.w13_input_scale.shape == ()
    assert rel_error(common.quant_method.apply(common, x, weights, ids), want) > 0.012  # the scales do matter


def test_loading_again_keeps_the_storages():
    layer, *_ = load("quark int8 zeros")
    pointers = {n: t.data_ptr() for n, t in [*layer.named_parameters(), *layer.named_buffers()]}
    other, *_ = load("quark int8 zeros")
    for name, w in matrices().items():
        matrix = "w2" if name == "w2" else "w13"
        for e in range(E):
            put(layer, f"{matrix}_weight", encode(w[e] / (w[e].abs().amax() / 127), INT8), name, e)
            put(layer, f"{matrix}_weight_scale", w[e].abs().amax() / 127, name, e)
            put(layer, f"{matrix}_input_scale", other.get_parameter(f"{matrix}_input_scale")[e], name, e)
            put(layer, f"{matrix}_input_zero_point", torch.tensor(5 * e - 3, dtype=torch.int8), name, e)
    done(layer)
    assert pointers == {n: t.data_ptr() for n, t in [*layer.named_parameters(), *layer.named_buffers()]}
    x, (weights, ids) = random_x(3, H), routed(3)
    assert torch.equal(*[a.quant_method.apply(a, x, weights, ids) for a in (layer, other)])


@pytest.mark.parametrize("family", ("fp8", "quark", "modelopt"))
def test_a_config_asks_for_it(family):
    config = {
        "fp8": lambda: Fp8Config(True, "static"),
        "quark": lambda: QuarkConfig.from_config(dict(
            quant_method="quark", export={}, global_quant_config=dict(weight=STATIC8, input_tensors=STATIC8))),
        "modelopt": lambda: ModelOptConfig.from_config(dict(quant_algo="FP8")),
    }[family]()  # fmt: skip
    for each in (False, True):
        config.per_expert_input_scale = each
        assert (
            layer_of(lambda layer: config.get_quant_method(layer, "p.experts")).quant_method.per_expert_input_scale
            is each
        )


def test_scales_of_another_number_of_experts():
    layer, *_ = load("fp8")
    x, (weights, ids) = random_x(3, H), routed(3)
    made = layer.quant_method.get_fused_moe_quant_config(layer)
    with pytest.raises(ValueError, match=rf"input_scale13: expected \(1, 1\) or \({E}, 1, 1\), got \(3, 1, 1\)"):
        fpk.moe_experts(
            x, weights, ids, made.w13, made.w2, act=made.act, input_scale13=made.input_scale13[:3],
            input_scale2=made.input_scale2,
        )  # fmt: skip
