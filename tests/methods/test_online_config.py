"""OnlineConfig: names, slots, rules, the dry run; and online linear layers with block scales."""

import pytest
import torch
from linear_kit import Ranks, loaded, random_weight, random_x

import fpk
from fpk import methods
from fpk.check import bits, rel_error
from fpk.methods import Linear, MoEConfig, OnlineConfig, RoutedExperts
from fpk.methods.online_config import EXPERTS, LINEAR

pytestmark = pytest.mark.usefixtures("references")

Q, DOWN, EXP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.experts"


def method_of(config, name, experts=False):
    layer = RoutedExperts(MoEConfig(4, 2, 64, 64), prefix=name) if experts else Linear(64, 64, prefix=name)
    return type(config.get_quant_method(layer, name)).__name__


@pytest.mark.parametrize("name", {**LINEAR, **EXPERTS})
def test_every_name(name):
    config = OnlineConfig(name)
    assert method_of(config, Q) == LINEAR.get(name, "UnquantizedLinearMethod")
    assert method_of(config, EXP, True) == EXPERTS[name]
    assert config.get_quant_method(torch.nn.LayerNorm(4), "norm") is None and config.get_name() == "online"


def test_slots_go_before_the_name():
    config = OnlineConfig("fp8_per_tensor", moe={"weight": "mxfp4"})
    assert method_of(config, Q) == "Fp8PerTensorOnlineLinearMethod"
    assert method_of(config, EXP, True) == "Mxfp4OnlineMoEMethod"
    config = OnlineConfig(linear="fp8_per_channel_static")
    assert method_of(config, Q) == "Fp8PtpcOnlineLinearMethod"
    assert method_of(config, EXP, True) == "UnquantizedFusedMoEMethod"


def test_ignore_and_rules():
    config = OnlineConfig(
        "fp8_per_tensor", ignore=["re:.*q_proj", "typo"], rules={"re:.*down_proj": "mxfp8", "model.layers.0": None}
    )
    assert method_of(config, Q) == "UnquantizedLinearMethod" and method_of(config, DOWN) == "Mxfp8OnlineLinearMethod"
    assert method_of(config, "model.layers.0.mlp.up_proj") == "UnquantizedLinearMethod"
    assert method_of(config, "model.layers.10.mlp.up_proj") == "Fp8PerTensorOnlineLinearMethod"
    names = [Q, DOWN, "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.k_proj"]
    plan = config.plan({n: Linear(64, 64, prefix=n) for n in names})
    assert [r.method for r in plan.rows] == [
        "UnquantizedLinearMethod", "Mxfp8OnlineLinearMethod", "UnquantizedLinearMethod",
        "Fp8PerTensorOnlineLinearMethod",
    ]  # fmt: skip
    assert [r.skipped_by for r in plan.rows][:1] == ["re:.*q_proj"] and plan.rows[2].skipped_by == "model.layers.0"
    assert plan.unmatched == ["typo"] and "typo" in str(plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (dict(), "expected a scheme's name, or linear or moe"),
        (dict(name="fp9"), "expected one of fp8_per_tensor"),
        (dict(linear="int8_per_channel_weight_only"), "OnlineConfig.linear: expected one of"),
        (dict(moe={"weights": "mxfp4"}), "OnlineConfig.moe: expected a weight's scheme"),
        (dict(linear={"weight": "mxfp4", "activation": "fp8_per_token"}), "activations follow from its weights"),
        (dict(name="mxfp4", rules={"a": "b"}), "rules\\['a'\\]: expected a scheme's name or None, got 'b'"),
    ),
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        OnlineConfig(**arguments)


def test_what_a_layer_or_a_checkpoint_cannot_have():
    config = OnlineConfig("fp8_per_tensor", rules={Q: "int8_per_channel_weight_only"})
    with pytest.raises(ValueError, match="for linear layers, got 'int8_per_channel_weight_only'"):
        method_of(config, Q)
    with pytest.raises(NotImplementedError, match="the caller names the scheme"):
        OnlineConfig.from_config({})
    config = OnlineConfig("mxfp4", ignore=["a.q_proj"])
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    with pytest.raises(ValueError, match="all parts of the fused layer or none"):
        method_of(config, "a.qkv_proj")


# ---- block-scaled linear layers -------------------------------------------------------------------------------------
BLOCKS = {"Mxfp8OnlineLinearMethod": ("mxfp8_e4m3", "mxfp8_e4m3"), "Mxfp4OnlineLinearMethod": ("mxfp4", "none"),
          "Nvfp4OnlineLinearMethod": ("nvfp4", "none")}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_block_scaled_numbers(name):
    weight, act = BLOCKS[name]
    w, x = random_weight(96, 160), random_x(5, 160)
    layer = loaded(Linear(160, [64, 32], bias=True, quant_method=getattr(methods, name)(), prefix="p"), w)
    want = fpk.quantize(w, weight).dequantize()
    assert torch.equal(layer.dequantize(), want) and layer.quant_method.scheme(layer) == f"{weight}:{act}"
    rows = x.float() if act == "none" else fpk.quantize(x, act).dequantize()
    assert rel_error(layer(x), rows @ want.T) < 0.004
    pointers = {n: p.data_ptr() for n, p in layer.named_parameters()}
    again = random_weight(96, 160, seed=5)
    loaded(layer, [again[:64], again[64:]])
    assert pointers == {n: p.data_ptr() for n, p in layer.named_parameters()}
    assert torch.equal(layer.dequantize(), fpk.quantize(again, weight).dequantize())


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("split", ("row", "column"))
def test_block_scaled_ranks(name, split):
    w = random_weight(64, 128)
    whole = loaded(Linear(128, 64, quant_method=getattr(methods, name)(), prefix="p"), w)

    def rank(r):
        layer = Linear(128, 64, quant_method=getattr(methods, name)(), split=split, tp_size=2, tp_rank=r, prefix="p")
        return loaded(layer, w)

    for r, layer in enumerate(Ranks(2).run(rank)):
        full = whole.dequantize()
        part = full[:, 64 * r : 64 * r + 64] if split == "row" else full[32 * r : 32 * r + 32]
        assert torch.equal(bits(layer.dequantize()), bits(part))
    with pytest.raises(ValueError, match="share K in groups of"):
        layer = Linear(80, 64, quant_method=getattr(methods, name)(), split="row", tp_size=2, tp_rank=0, prefix="p")
        loaded(layer, random_weight(64, 80))
