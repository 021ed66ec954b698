"""Fp8Config: constructor, checkpoints' dictionaries, dispatch; and the matcher of skip lists."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fpk import methods
from fpk.methods import (
    Attention,
    Fp8Config,
    Fp8LinearMethod,
    Fp8PerTensorOnlineLinearMethod,
    Linear,
    RoutedExperts,
    UnquantizedLinearMethod,
    is_layer_skipped,
)

QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


def test_defaults():
    config = Fp8Config()
    assert config.is_checkpoint_fp8_serialized is False and config.activation_scheme == "dynamic"
    assert config.ignored_layers == [] and config.weight_block_size is None and config.store_dtype is None
    assert config.ignored_layers_match_mode == "exact" and config.packed_modules_mapping == {}
    assert config.use_deep_gemm is None and config.is_scale_e8m0 is False
    assert Fp8Config.get_name() == config.get_name() == "fp8"
    assert set(Fp8Config.get_supported_act_dtypes()) == {torch.bfloat16, torch.float16}
    assert Fp8Config.get_min_capability() == 75 and Fp8Config.get_config_filenames() == []


# each case also breaks every rule that comes after the one it names
@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        (
            dict(activation_scheme="blockwise", weight_block_size=[1, 2, 3]),
            "expected static or dynamic, got 'blockwise'",
        ),
        (dict(activation_scheme="static", weight_block_size=[128]), "unless the checkpoint is FP8 already"),
        (
            dict(is_checkpoint_fp8_serialized=True, activation_scheme="static", weight_block_size=[128]),
            "expected 2 sizes .* got 1",
        ),
        (dict(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128, 1]), "expected 2 sizes .* got 3"),
        (
            dict(is_checkpoint_fp8_serialized=True, activation_scheme="static", weight_block_size=[128, 0]),
            "expected dynamic activations with block scales, got 'static'",
        ),
        (dict(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 0]), "expected positive sizes"),
    ),
)
def test_refuses_arguments_in_order(arguments, message):
    with pytest.raises(ValueError, match=message):
        Fp8Config(**arguments)


def test_reads_a_checkpoint_s_dictionary():
    config = Fp8Config.from_config(
        {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head"],
        }
    )  # fmt: skip
    assert config.is_checkpoint_fp8_serialized and config.weight_block_size == [128, 128]
    assert config.ignored_layers == ["lm_head"]
    static = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["a"]}
    assert Fp8Config.from_config(static | {"modules_to_not_convert": ["b"]}).ignored_layers == ["a"]
    assert Fp8Config.from_config(static | {"ignored_layers": [], "modules_to_not_convert": ["b"]}).ignored_layers == [
        "b"
    ]
    assert Fp8Config.from_config(static | {"store_dtype": "mxfp4"}).store_dtype == "mxfp4"
    assert Fp8Config.from_config(static).activation_scheme == "static"
    plain = {"quant_method": "online", "activation_scheme": "dynamic"}
    assert not Fp8Config.from_config(plain).is_checkpoint_fp8_serialized


@pytest.mark.parametrize("missing", ("quant_method", "activation_scheme"))
def test_names_the_key_that_is_missing(missing):
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    del config[missing]
    with pytest.raises(ValueError, match=rf"one of the keys \['{missing}'\]"):
        Fp8Config.from_config(config)


def linear(config: Fp8Config, prefix: str = "model.layers.0.mlp.down_proj"):
    return Linear(32, 16, quant_config=config, prefix=prefix).quant_method


def test_linear_layers_get_the_method_of_the_checkpoint():
    assert isinstance(linear(Fp8Config()), Fp8PerTensorOnlineLinearMethod)
    assert isinstance(linear(Fp8Config(is_checkpoint_fp8_serialized=True)), Fp8LinearMethod)
    for serialized in (False, True):
        config = Fp8Config(serialized, ignored_layers=["model.layers.0.mlp.down_proj"])
        assert isinstance(linear(config), UnquantizedLinearMethod)
        assert not isinstance(linear(config, "model.layers.1.mlp.down_proj"), UnquantizedLinearMethod)
    assert Fp8Config().get_quant_method(nn.Embedding(4, 4), "model.embed_tokens") is None
    assert Fp8Config().get_quant_method(nn.Linear(4, 4), "lm_head") is None


def test_experts_and_attention_get_theirs(monkeypatch):
    for name in ("UnquantizedFusedMoEMethod", "Mxfp4MoEMethod", "Fp8MoEMethod", "Fp8PerTensorOnlineMoEMethod",
                 "Fp8KVCacheMethod"):  # fmt: skip
        monkeypatch.setattr(methods, name, lambda *a, _name=name, **k: (_name, a, k), raising=False)
    moe = SimpleNamespace(num_experts=4, intermediate_size_per_partition=32)
    experts = RoutedExperts(moe)
    prefix = "model.layers.0.mlp.experts"
    online, offline = Fp8Config(), Fp8Config(True)
    assert online.get_quant_method(experts, prefix) == ("Fp8PerTensorOnlineMoEMethod", (), {"layer": experts})
    assert offline.get_quant_method(experts, prefix) == ("Fp8MoEMethod", (offline, experts), {})
    # mxfp4 wins over serialized
    assert Fp8Config(True, store_dtype="mxfp4").get_quant_method(experts, prefix) == ("Mxfp4MoEMethod", (moe,), {})
    ignoring = Fp8Config(True, ignored_layers=[prefix + ".3.down_proj"], store_dtype="mxfp4")
    assert ignoring.get_quant_method(experts, prefix) == ("UnquantizedFusedMoEMethod", (moe,), {})
    attention = Attention(2, 64)
    assert online.get_quant_method(attention, "model.layers.0.self_attn.attn")[:2] == ("Fp8KVCacheMethod", (online,))


def test_names_of_cache_scales():
    mapper = Fp8Config().get_cache_scale_mapper()
    assert mapper[".k_proj.output_scale"] == ".attn.k_scale"
    assert mapper[".self_attn.prob_output_scale"] == ".self_attn.attn.prob_scale"


def test_renames_ignored_layers_with_the_model():
    config = Fp8Config(ignored_layers=["a.x", "b.x"])
    config.apply_vllm_mapper(SimpleNamespace(apply_list=lambda names: [n.replace("a.", "model.") for n in names]))
    assert config.ignored_layers == ["model.x", "b.x"]


@pytest.mark.parametrize(
    ("prefix", "entries", "mode", "skipped"),
    (
        ("a.b.gate", ["a.b.gate"], "exact", True),
        ("a.b.gate", ["b.gate"], "exact", False),
        ("a.b.gate_proj", ["a.b.gate"], "exact", False),
        ("a.b.gate", ["b.ga"], "substring", True),
        ("a.b.gate", ["c"], "substring", False),
        ("a.b.gate", ["b.gate"], "suffix", True),
        ("a.b.gate", ["a.b.gate"], "suffix", True),
        ("a.b.xgate", ["gate"], "suffix", False),
        ("a.b.gate", ["a.b"], "suffix", False),
        ("a.b.gate", [], "exact", False),
        ("model.layers.3.mlp", [r"re:model\.layers\.[0-3]\.mlp$"], "exact", True),
        ("model.layers.3.mlp.x", [r"re:model\.layers\.[0-3]\.mlp$"], "exact", False),
        ("x.model.layers.3", [r"re:model"], "exact", False),  # anchored at the start
        ("model.layers.3", [r"re:.*\.3"], "suffix", True),
        ("a.re:b", ["re:b"], "substring", False),  # a regex is never a substring
        ("a.mlp.experts", ["a.mlp.experts.0.up_proj"], "exact", True),
        ("a.mlp.experts", ["a.mlp.experts"], "exact", True),
        ("a.mlp.experts", ["a.mlp"], "exact", False),
        ("a.mlp.experts", ["re:.*experts"], "exact", True),
        ("a.mlp.experts", ["b.mlp.experts.0.up_proj"], "exact", False),
        ("a.mlp.experts", ["a.mlp.experts.0.up_proj"], "suffix", False),
        ("a.mlp.expert", ["a.mlp.expert.0.up_proj"], "exact", False),
    ),
)
def test_matcher(prefix, entries, mode, skipped):
    assert is_layer_skipped(prefix, entries, {}, mode) is skipped


@pytest.mark.parametrize(
    ("entries", "mode", "skipped"),
    (
        (["m.qkv_proj"], "exact", True),
        (["m.q_proj", "m.k_proj", "m.v_proj"], "exact", True),
        (["m.gate_proj", "m.up_proj"], "exact", False),
        ([], "exact", False),
        (["qkv"], "substring", True),
        (["q_proj", "k_proj", "v_proj"], "suffix", True),
        ([r"re:m\.[qkv]_proj"], "exact", True),
    ),
)
def test_fused_layers_follow_their_parts(entries, mode, skipped):
    assert is_layer_skipped("m.qkv_proj", entries, QKV, mode) is skipped


def test_parts_of_a_fused_layer_must_agree():
    with pytest.raises(ValueError, match=r"m\.qkv_proj: expected all parts .* got all but k_proj, v_proj"):
        is_layer_skipped("m.qkv_proj", ["m.q_proj"], QKV)
    config = Fp8Config(ignored_layers=["m.gate_proj"])
    config.packed_modules_mapping = QKV
    with pytest.raises(ValueError, match=r"m\.gate_up_proj"):
        Linear(32, [16, 16], quant_config=config, prefix="m.gate_up_proj")


def test_only_the_last_part_of_a_name_is_replaced():
    """The fused name may occur further up."""
    names = [f"qkv_proj_tower.qkv_proj.{p}" for p in ("q_proj", "k_proj", "v_proj")]
    assert is_layer_skipped("qkv_proj_tower.qkv_proj.qkv_proj", names, QKV)
    assert is_layer_skipped("qkv_proj", ["q_proj", "k_proj", "v_proj"], QKV)


def test_refuses_unknown_modes_and_broken_expressions():
    with pytest.raises(ValueError, match="expected one of exact, substring, suffix, got 'prefix'"):
        is_layer_skipped("a", ["a"], {}, "prefix")
    with pytest.raises(ValueError, match=r"expected a regular expression, got 're:\('"):
        is_layer_skipped("a", ["re:("], {})


def test_reports_entries_that_matched_nothing():
    config = Fp8Config(
        ignored_layers=["m.0.down_proj", "m.7.down_proj", "re:.*up_proj", "m.q_proj", "m.k_proj", "m.v_proj"]
    )
    config.packed_modules_mapping = QKV
    assert config.unmatched_layers() == config.ignored_layers
    for prefix in ("m.0.down_proj", "m.0.up_proj", "m.qkv_proj", "m.o_proj"):
        linear(config, prefix)
    assert config.unmatched_layers() == ["m.7.down_proj"]


def test_an_unknown_method_is_said_to_be_unknown(monkeypatch):
    from fpk.methods import config

    with pytest.raises(NotImplementedError, match=r"fpk\.methods has no NoSuchMethod"):
        config._method("NoSuchMethod")


def test_scales_of_activations_that_are_powers_of_two():
    given = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    for more, told in (({}, "fp8_group128"), ({"scale_fmt": "ue8m0"}, "fp8_group128_e8m0")):
        config = Fp8Config.from_config(given | more)
        layer = Linear(256, 128, quant_config=config, prefix="p")
        assert layer.quant_method.scheme(layer) == f"fp8_block128:{told}"
