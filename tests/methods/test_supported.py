"""What engines refuse or compute otherwise and fpk does, in numbers: the rows of the catalogue without another home."""

import pytest
import torch
from linear_kit import loaded, random_weight, random_x
from moe_kit import E, H, done, expected, layer_of, matrices, put, routed

import fpk
from fpk import methods
from fpk.check import rel_error
from fpk.formats import E4M3FN, encode
from fpk.methods import Linear, OnlineConfig, QuarkConfig
from fpk.methods._families import LayerSpec
from fpk.methods.engine import experts_method

pytestmark = pytest.mark.usefixtures("references")

STATIC8 = dict(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=False)


def fp8_codes(w, scale):
    return encode(w / scale, E4M3FN).view(torch.float8_e4m3fn)


def quark_layer(**config):
    """A layer of a Quark checkpoint with FP8 weights of one scale, and what it is of."""
    made = QuarkConfig.from_config(dict(quant_method="quark", export={}, **config))
    layer = Linear(96, 64, quant_config=made, prefix="model.layers.0.self_attn.o_proj")
    w = random_weight(64, 96).float()
    scale = w.abs().amax() / 448
    layer.weight.weight_loader(layer.weight, fp8_codes(w, scale))
    layer.weight_scale.weight_loader(layer.weight_scale, scale)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, fp8_codes(w, scale).float() * scale


def test_dynamic_activations_per_tensor():
    """One scale for all tokens, from the tokens: engines take it for a static one that the checkpoint has not."""
    inputs = STATIC8 | dict(is_dynamic=True)
    layer, weight = quark_layer(global_quant_config=dict(weight=STATIC8, input_tensors=inputs))
    x = random_x(6, 96) * torch.arange(1, 7, device=weight.device).bfloat16()[:, None]
    rounded = fpk.quantize(x, "fp8_tensor").dequantize()
    assert rel_error(layer(x), rounded @ weight.T) < 0.003 < rel_error(layer(x), x.float() @ weight.T)
    assert layer.quant_method.scheme(layer) == "fp8_tensor:fp8_tensor"


def test_a_quark_config_without_its_optional_sections():
    """No KV-cache group, no specs by layer or class, no list of exclusions."""
    inputs = STATIC8 | dict(is_dynamic=True, qscheme="per_channel")
    layer, weight = quark_layer(global_quant_config=dict(weight=STATIC8, input_tensors=inputs))
    x = random_x(5, 96)
    assert rel_error(layer(x), fpk.quantize(x, "fp8_token").dequantize() @ weight.T) < 0.003


@pytest.mark.parametrize("given", ("mxfp4", {"weight": "mxfp4"}, {"weight": "mxfp4", "activation": None}))
def test_online_mxfp4_by_name_or_as_a_mapping(given):
    w, x = random_weight(64, 96), random_x(4, 96)
    layer = loaded(Linear(96, 64, quant_config=OnlineConfig(linear=given), prefix="p"), w)
    want = x.float() @ fpk.quantize(w, "mxfp4").dequantize().T
    assert rel_error(layer(x), want) < 0.004


@pytest.mark.parametrize("K", (176, 168, 150))
@pytest.mark.parametrize("name", ("Mxfp8OnlineLinearMethod", "Mxfp4OnlineLinearMethod", "Nvfp4OnlineLinearMethod"))
def test_a_short_last_group(name, K):
    """K is no multiple of 32, or of NVFP4's 16: the last group is shorter."""
    layer = Linear(K, 48, quant_method=getattr(methods, name)(), prefix="p")
    w, x = random_weight(48, K), random_x(5, K)
    loaded(layer, w)
    weight, _, act = layer.quant_method.scheme(layer).partition(":")
    padded = torch.nn.functional.pad(w, (0, -K % 32))
    want = fpk.quantize(padded, weight).dequantize()[:, :K]
    assert torch.equal(layer.dequantize(), want)  # as if zeros followed, which change no group
    rows = x.float() if act == "none" else fpk.quantize(x, act).dequantize()
    assert rel_error(layer(x), rows @ want.T) < 0.004


def test_input_scales_of_gate_and_up_that_differ():
    """Gate and up get the same tokens: the larger of their ranges holds both, of all experts."""
    make = lambda layer: experts_method(LayerSpec("fp8_tensor", "fp8_tensor_static"), "compressed-tensors", layer)  # noqa: E731
    layer, w = layer_of(make), matrices()
    for name, each in w.items():
        matrix = "w2" if name == "w2" else "w13"
        for e in range(E):
            scale = each[e].abs().amax() / 448
            put(layer, f"{matrix}_weight", fp8_codes(each[e], scale), name, e)
            put(layer, f"{matrix}_weight_scale", scale, name, e)
            put(layer, f"{matrix}_input_scale", torch.tensor(0.02 if name == "w3" else 0.015), name, e)
    done(layer)
    assert layer.w13_input_scale.item() == pytest.approx(0.02) and layer.w2_input_scale.item() == pytest.approx(0.015)
    x, (weights, ids) = random_x(5, H), routed(5)

    def fake(scale):
        return lambda v: fp8_codes(v.float(), scale).float() * scale

    want = expected(x, weights, ids, *layer.quant_method.dequantize(layer), fake(0.02), fake(0.015))
    assert rel_error(layer.quant_method.apply(layer, x, weights, ids), want) < 0.008


@pytest.mark.parametrize("family", ("quark", "compressed-tensors"))
def test_second_scales_of_q_k_and_v_that_differ(family):
    """NVFP4: every shard keeps its own, in a family whose second scales multiply and in one where they divide."""
    layer = Linear(64, [32, 16, 16], quant_method=methods.SchemeLinearMethod(
        LayerSpec("nvfp4", None, divides=family == "compressed-tensors"), family), prefix="p.qkv_proj")  # fmt: skip
    over = layer.quant_method.over_name
    want = []
    for i, rows in enumerate((32, 16, 16)):
        q = fpk.quantize(random_weight(rows, 64, seed=i) * 4.0**i, "nvfp4")
        second = q.global_scale.reshape(())
        for name, value in (
            (layer.quant_method.code_name, q.codes), ("weight_scale", q.scale),
            (over, 1 / second if family == "compressed-tensors" else second),
        ):  # fmt: skip
            parameter = layer.get_parameter(name)
            parameter.weight_loader(parameter, value, "qkv"[i])
        want.append(q.dequantize())
    layer.quant_method.process_weights_after_loading(layer)
    weight, x = torch.cat(want), random_x(5, 64)
    assert rel_error(layer.dequantize(), weight) < 1e-6
    assert rel_error(layer(x), x.float() @ weight.T) < 0.004
