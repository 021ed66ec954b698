"""Configs as an engine asks them: methods of layers, fed with the exporters' tensors one by one; the dry run."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from checkpoint_kit import FIXTURES, config_of, values
from linear_kit import random_x
from moe_kit import routed

import fpk
from fpk.check import rel_error
from fpk.checkpoint import empty_parameters
from fpk.methods import (
    CompressedTensorsConfig,
    Fp8Config,
    Linear,
    ModelOptConfig,
    MoEConfig,
    Mxfp4Config,
    QuarkConfig,
    RoutedExperts,
)

pytestmark = pytest.mark.usefixtures("references", "on_cpu")

CONFIGS = {"quark": QuarkConfig, "compressed-tensors": CompressedTensorsConfig, "modelopt": ModelOptConfig,
           "mxfp4": Mxfp4Config, "fp8": Fp8Config}  # fmt: skip
DENSE = sorted(
    p.name for p in FIXTURES.iterdir() if p.name.startswith(("lc_", "mo_", "q_", "qf_")) and "mixtral" not in p.name
)
SCALES = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale",
          "input_scale_2", "input_global_scale")  # fmt: skip


def engine_config(fixture):
    given = config_of(fixture)["quantization_config"]
    return CONFIGS[given["quant_method"]].from_config(given)


def feed(layer, stored, name, shard=None):
    """What the checkpoint has for a layer, through the loaders of the parameters of the same names."""
    count = 0
    for last in SCALES:
        if f"{name}.{last}" in stored and last in layer._parameters and layer._parameters[last] is not None:
            parameter = layer._parameters[last]
            parameter.weight_loader(parameter, stored[f"{name}.{last}"], shard)
            count += 1
    return count


@pytest.mark.parametrize("fixture", DENSE)
def test_linear_layers_of_every_fixture(fixture):
    """q, k and v as one layer, and down alone: the same values as `load_quantized` gives."""
    transformers = pytest.importorskip("transformers")
    config, stored = engine_config(fixture), values(fixture)
    given = {k: v for k, v in config_of(fixture).items() if k != "quantization_config"}
    with empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**given))
    fpk.load_quantized(model, FIXTURES / fixture)
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    attention = "model.layers.0.self_attn"
    qkv = Linear(128, [128, 64, 64], quant_config=config, prefix=f"{attention}.qkv_proj")
    assert all(feed(qkv, stored, f"{attention}.{n}_proj", n) >= 2 for n in "qkv")
    down = Linear(256, 128, quant_config=config, prefix="model.layers.0.mlp.down_proj")
    assert feed(down, stored, "model.layers.0.mlp.down_proj") >= 2
    for layer, parts in ((qkv, [f"{attention}.{n}_proj" for n in "qkv"]), (down, ["model.layers.0.mlp.down_proj"])):
        layer.quant_method.process_weights_after_loading(layer)
        want = torch.cat([model.get_submodule(p).dequantize() for p in parts])
        assert rel_error(layer.dequantize(), want) < (0.05 if len(parts) > 1 and "fp8_tensor" in repr(layer) else 1e-6)
        x = random_x(3, layer.input_size)
        out = torch.cat([model.get_submodule(p)(x) for p in parts], 1)
        assert rel_error(layer(x), out) < (0.05 if len(parts) > 1 else 2e-3)
    head = Linear(128, 256, quant_config=config, prefix="lm_head")
    assert type(head.quant_method).__name__ == "UnquantizedLinearMethod"


@pytest.mark.parametrize(
    ("fixture", "method"),
    (
        ("lc_FP8_mixtral", "Fp8ExpertsMethod"), ("lc_FP8_DYNAMIC_mixtral", "Fp8ExpertsMethod"),
        ("mom_FP8_DEFAULT_CFG", "Fp8ExpertsMethod"), ("qff_mxfp4", "QuarkOCP_MX_MoEMethod"),
    ),
)  # fmt: skip
def test_experts_of_every_fixture(fixture, method):
    config, stored, name = engine_config(fixture), values(fixture), "model.layers.0.block_sparse_moe.experts"
    layer = RoutedExperts(MoEConfig(4, 2, 128, 256), prefix=name)
    layer.quant_method = config.get_quant_method(layer, name)
    assert type(layer.quant_method).__name__ == method
    layer.quant_method.create_weights(layer, 4, 128, 256, torch.bfloat16)
    shards = {"w1": "w1", "gate_proj": "w1", "w3": "w3", "up_proj": "w3", "w2": "w2", "down_proj": "w2"}
    for key, tensor in stored.items():
        if not key.startswith(name):
            continue
        expert, projection, last = key.removeprefix(f"{name}.").split(".")
        shard = shards[projection]
        parameter = layer.get_parameter(f"{'w2' if shard == 'w2' else 'w13'}_{last}")
        assert parameter.weight_loader(parameter, tensor, key, shard, int(expert)) is True
    layer.quant_method.process_weights_after_loading(layer)
    source = values("mixtral")
    w13, w2 = layer.quant_method.dequantize(layer)
    for e in range(4):
        whole = torch.cat([source[f"{name}.{e}.{w}.weight"] for w in ("w1", "w3")])
        assert rel_error(w13[e], whole) < (0.13 if "mx" in fixture else 0.04)
        assert rel_error(w2[e], source[f"{name}.{e}.w2.weight"]) < (0.13 if "mx" in fixture else 0.0305)
    x, (weights, ids) = random_x(4, 128), routed(4)
    assert layer.quant_method.apply(layer, x, weights, ids).isfinite().all()


def test_gptoss_config():
    config, stored = engine_config("gptoss_mx"), values("gptoss_mx")
    name = "model.layers.0.mlp.experts"
    layer = RoutedExperts(MoEConfig(4, 2, 64, 96, has_bias=True), prefix=name, activation="swigluoai", swiglu_limit=7.0)
    layer.quant_method = config.get_quant_method(layer, name)
    layer.quant_method.create_weights(layer, 4, 64, 96, torch.bfloat16)
    for matrix, stem in (("w13", "gate_up_proj"), ("w2", "down_proj")):
        for last, end in (("weight", "blocks"), ("weight_scale", "scales"), ("bias", "bias")):
            parameter = layer.get_parameter(f"{matrix}_{last}")
            parameter.weight_loader(parameter, stored[f"{name}.{stem}_{end}"])
    layer.quant_method.process_weights_after_loading(layer)
    w13, w2 = layer.quant_method.dequantize(layer)
    source = values("gptoss_bf16")
    assert rel_error(w13, source[f"{name}.gate_up_proj"].mT) < 0.13
    assert rel_error(w2, source[f"{name}.down_proj"].mT) < 0.13
    linear = Linear(64, 64, quant_config=config, prefix="model.layers.0.self_attn.q_proj")
    assert type(linear.quant_method).__name__ == "UnquantizedLinearMethod"


# ---- Quark's dispatch ----------------------------------------------------------------------------------------------
def spec(dtype, qscheme="per_tensor", dynamic=False, **more):
    return dict(dtype=dtype, qscheme=qscheme, is_dynamic=dynamic, symmetric=True) | more


MX4 = spec("fp4", "per_group", group_size=32, scale_format="e8m0")
NVFP4 = [spec("fp4", "per_group", group_size=16), spec("fp8_e4m3")]
TOKEN = spec("fp8_e4m3", "per_channel", True)
DISPATCH = [
    ([spec("fp8_e4m3"), spec("int4", "per_channel")], TOKEN, "QuarkW4A8Fp8MoEMethod"),
    (NVFP4, NVFP4, "QuarkNvfp4MoEMethod"),
    (spec("fp8_e4m3"), spec("fp8_e4m3"), "QuarkW8A8Fp8MoEMethod"),
    (spec("fp8_e4m3", "per_channel"), TOKEN, "QuarkW8A8Fp8MoEMethod"),
    (spec("fp8_e4m3", "per_block", block_size=[128, 128]), TOKEN, "Fp8ExpertsMethod"),
    (MX4, None, "QuarkOCP_MX_MoEMethod"),
    (MX4, spec("fp8_e4m3"), "QuarkOCP_MX_MoEMethod"),
    (spec("int8"), spec("int8"), "QuarkW8A8Int8MoEMethod"),
    (spec("int8", "per_channel"), spec("int8", "per_channel", True), "QuarkW8A8Int8MoEMethod"),
    (None, None, "UnquantizedFusedMoEMethod"),
]


def quark(weight, inputs, **more):
    layer = dict(weight=weight, input_tensors=inputs, output_tensors=None, bias=None)
    return QuarkConfig.from_config({"export": {}, "global_quant_config": layer | more})


@pytest.mark.parametrize("case", DISPATCH, ids=lambda c: c[2])
def test_quark_experts(case):
    weight, inputs, expected = case
    layer = RoutedExperts(MoEConfig(4, 2, 128, 256))
    assert type(quark(weight, inputs).get_quant_method(layer, "model.layers.0.mlp.experts")).__name__ == expected


def test_quark_experts_that_are_refused():
    layer, name = RoutedExperts(MoEConfig(4, 2, 128, 256)), "model.layers.0.mlp.experts"
    for key in ("output_tensors", "bias"):
        with pytest.raises(NotImplementedError, match=f"quantized {key}"):
            quark(spec("int8"), spec("int8"), **{key: spec("int8")}).get_quant_method(layer, name)
    for weight, inputs in ((spec("uint4", "per_group"), None), (spec("int8"), spec("fp8_e4m3")), (spec("int8"), None)):
        with pytest.raises(RuntimeError, match="no method for experts"):
            quark(weight, inputs).get_quant_method(layer, name)
    config = quark(spec("int8"), spec("int8"))
    config.layer_configs = {"*down_proj": dict(weight=MX4)}
    with pytest.raises(ValueError, match="expected one quantization for gate_proj, up_proj, down_proj"):
        config.get_quant_method(layer, name)
    config.layer_configs = {"*experts*": dict(weight=MX4)}
    assert type(config.get_quant_method(layer, name)).__name__ == "QuarkOCP_MX_MoEMethod"
    for entry in (name, "*experts*", f"{name}.0.w1"):
        skipping = copy.deepcopy(quark(spec("int8"), spec("int8")))
        skipping.skips.entries = [entry]
        assert type(skipping.get_quant_method(layer, name)).__name__ == "UnquantizedFusedMoEMethod"


def test_dry_run():
    config = CompressedTensorsConfig.from_config(
        json.loads((FIXTURES / "lc_FP8_mixtral" / "config.json").read_text())["quantization_config"]
    )
    layers = {
        "model.layers.0.self_attn.q_proj": SimpleNamespace(input_size=8, output_size=8),
        "model.layers.0.block_sparse_moe.gate": SimpleNamespace(input_size=8, output_size=8),
        "model.layers.0.block_sparse_moe.experts": RoutedExperts(MoEConfig(4, 2, 128, 256)),
        "model.norm": torch.nn.LayerNorm(4),
    }
    plan = config.plan(layers)
    assert [r.method for r in plan.rows] == ["Fp8LinearMethod", "UnquantizedLinearMethod", "Fp8ExpertsMethod", "none"]
    assert plan.rows[1].skipped_by == "model.layers.0.block_sparse_moe.gate" and plan.rows[0].skipped_by == ""
    assert "lm_head" in plan.unmatched
    told = str(plan)
    assert "Fp8ExpertsMethod" in told and "skip entry 'lm_head' matches no layer" in told
