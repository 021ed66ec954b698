"""What a config says is read, refused or warned about, never dropped: unknown keys, transforms, caches, lists."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fpk.hf import FpkConfig
from fpk.methods import CompressedTensorsConfig, Fp8Config, ModelOptConfig, OnlineConfig, QuarkConfig
from fpk.methods._dense import find_layers
from fpk.methods._families import dialect_of
from fpk.methods.checkpoint import Checkpoint

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = {
    path.parent.name: found
    for path in sorted(FIXTURES.glob("*/config.json"))
    if (found := Checkpoint(path.parent).quantization) is not None
}
NESTED = {path.parent.name: json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*/hf_quant_config.json"))}
CLASSES = {"fp8": Fp8Config, "compressed-tensors": CompressedTensorsConfig, "quark": QuarkConfig,
           "modelopt": ModelOptConfig}  # fmt: skip
FP8 = dict(quant_method="fp8", activation_scheme="dynamic")
BLOCK = dict(weight_block_size=[128, 128])


def readers(config):
    """All ways in which a config is read."""
    made = [lambda: dialect_of(config)]
    if config.get("quant_method") in CLASSES:
        made.append(lambda: CLASSES[config["quant_method"]].from_config(config))
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_exporters_configs_are_known_whole_and_another_key_is_not(name):
    config = CONFIGS[name]
    for read in readers(config):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            read()
    for read in readers(config | dict(hadamard=True)):
        with pytest.warns(UserWarning, match=r"quantization_config\.hadamard: not known to fpk, without effect"):
            read()
    with pytest.warns(UserWarning):
        assert any("hadamard" in note for note in dialect_of(config | dict(hadamard=True)).notes)


@pytest.mark.parametrize("name", NESTED)
def test_both_forms_of_modelopt(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dialect_of(NESTED[name])
    inner = NESTED[name]["quantization"] | dict(rotate=True)
    with pytest.warns(UserWarning, match=r"quantization\.rotate: not known"):
        dialect_of(NESTED[name] | dict(quantization=inner))


def deep(config, *path, **more):
    """A copy with keys added at a place."""
    made = json.loads(json.dumps(config))
    at = made
    for key in path:
        at = at[key]
    at.update(more)
    return made


@pytest.mark.parametrize("name, path, told", [
    ("lc_FP8_llama", ["config_groups", "group_0"], r"config_groups\.group_0\.clip"),
    ("lc_FP8_llama", ["config_groups", "group_0", "weights"], r"config_groups\.group_0\.weights\.clip"),
    ("lc_FP8_llama", ["config_groups", "group_0", "input_activations"], r"group_0\.input_activations\.clip"),
    ("q_fp8", ["global_quant_config"], r"global_quant_config\.clip"),
    ("q_fp8", ["global_quant_config", "weight"], r"global_quant_config\.weight\.clip"),
    ("q_nvfp4", ["global_quant_config", "input_tensors", 0], r"global_quant_config\.input_tensors\.clip"),
])  # fmt: skip
def test_unknown_keys_inside(name, path, told):
    with pytest.warns(UserWarning, match=told):
        made = dialect_of(deep(CONFIGS[name], *path, clip=1))
    assert any("clip" in note for note in made.notes)


def transform(location):
    return dict(transform_config=dict(config_groups=dict(R=dict(type="hadamard", apply=[dict(location=location)]))))


@pytest.mark.parametrize("location", ("input", "output", None, "elsewhere"))
def test_transforms_of_activations_are_refused(location):
    for read in readers(CONFIGS["lc_FP8_llama"] | transform(location)):
        with pytest.raises(NotImplementedError, match=r"transform_config\.R: .* transform no activations"):
            read()


def test_transforms_that_stored_weights_have_are_not():
    base = CONFIGS["lc_FP8_llama"]
    assert not dialect_of(base | transform("weight_input")).notes
    assert "k_cache is not transformed" in dialect_of(base | transform("k_cache")).notes[0]
    for wrong in ("R1", dict(config_groups=[1])):
        with pytest.raises(ValueError, match="transform_config: expected an object"):
            dialect_of(base | dict(transform_config=wrong))
    with pytest.raises(ValueError, match="sparsity_config: expected an object"):
        dialect_of(base | dict(sparsity_config="2:4"))


@pytest.mark.parametrize("entry", (dict(name="rotation", r1=True, r4=True), dict(online_r1_rotation=True)))
def test_quarks_rotations_of_activations_are_refused(entry):
    for read in readers(CONFIGS["q_fp8"] | dict(algo_config=[dict(name="gptq"), entry])):
        with pytest.raises(NotImplementedError, match="rotate no activations"):
            read()
    assert not dialect_of(CONFIGS["q_fp8"] | dict(algo_config=[dict(name="rotation", r1=True, r2=True)])).notes
    with pytest.raises(ValueError, match="algo_config: expected objects"):
        dialect_of(CONFIGS["q_fp8"] | dict(algo_config=["rotation"]))


def test_what_quark_asks_for_and_layers_do_otherwise():
    softmax = dialect_of(CONFIGS["q_fp8"] | dict(softmax_quant_spec=dict(dtype="fp8_e4m3")))
    assert "does not quantize its probabilities" in softmax.notes[0]
    other = deep(CONFIGS["q_mxfp4"], "global_quant_config", "input_tensors", scale_calculation_mode="floor")
    assert "activations do not follow 'floor'" in dialect_of(other).notes[0]


@pytest.mark.parametrize("more, told", [
    (dict(kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo 'NVFP4'"),
    (dict(kv_cache_scheme=dict(type="int", num_bits=4)), "type 'int', num_bits 4"),
    (dict(kv_cache_scheme=dict(type="float", num_bits=8, dynamic=True)), "dynamic True"),
    (dict(quantization=dict(quant_algo="FP8", kv_cache_quant_algo="INT8")), "kv_cache_quant_algo 'INT8'"),
])  # fmt: skip
def test_modelopts_caches(more, told):
    """A layer of an engine that has a KV cache gets its method as fpk's own holder does."""
    layer = SimpleNamespace(num_kv_heads=2, head_size=64, kv_cache_dtype="fp8")
    config = ModelOptConfig.from_config(dict(quant_algo="FP8") | more)
    with pytest.raises(NotImplementedError, match=rf"a\.attn: expected a KV cache of FP8 .* got {told}"):
        config.get_quant_method(layer, "a.attn")
    fitting = dict(quant_algo="FP8", kv_cache_quant_algo="FP8", kv_cache_scheme=dict(type="float", num_bits=8))
    for made in (ModelOptConfig.from_config(fitting), Fp8Config(True), QuarkConfig.from_config(CONFIGS["q_fp8"])):
        assert type(made.get_quant_method(layer, "a.attn")).__name__ == "Fp8KVCacheMethod"
    assert OnlineConfig("mxfp4").get_quant_method(layer, "a.attn") is None
    assert Fp8Config(True).get_quant_method(torch.nn.LayerNorm(4), "norm") is None


@pytest.mark.parametrize("more, told", [
    (dict(ignored_layers="lm_head"), "ignored_layers: expected a list of names, got 'lm_head'"),
    (dict(ignored_layers=[1]), "ignored_layers: expected a list of names"),
    (dict(quant_method=None), "quant_method: expected a name"),
    (dict(weight_block_size=128), r"weight_block_size: expected \[rows, columns\], got 128"),
    (dict(weight_block_size=["128", "128"]), "weight_block_size: expected positive sizes"),
    (dict(weight_block_size=[True, 128]), "weight_block_size: expected positive sizes"),
    (dict(store_dtype="mxfp6"), "store_dtype: expected mxfp4 or None"),
    (dict(scale_fmt="ue4m3", **BLOCK), "scale_fmt: expected float or ue8m0"),
])  # fmt: skip
def test_values_that_cannot_be(more, told):
    with pytest.raises(ValueError, match=told):
        Fp8Config.from_config(FP8 | more)
    if "store_dtype" not in more:  # engines alone ask for that
        with pytest.raises(ValueError):
            dialect_of(FP8 | more)


def test_scales_that_the_config_has_no_use_for_are_told():
    stored = Checkpoint(FIXTURES / "qf_fp8")
    found = find_layers(stored, dialect_of(stored.quantization | dict(activation_scheme="dynamic")))
    name = "model.layers.0.mlp.down_proj.input_scale"
    assert f"{name}: without effect, the config says fp8_tensor:fp8_token" in found.notes
    assert len(found.notes) == len(found.layers) and not find_layers(stored, dialect_of(stored.quantization)).notes


def test_arguments_that_transformers_would_swallow():
    with pytest.raises(ValueError, match="expected scheme, ignore and lm_head, got igonre"):
        FpkConfig("fp8_channel", igonre=["lm_head"])
    assert FpkConfig.from_dict(FpkConfig("mxfp4").to_dict()).scheme == "mxfp4:none"


def test_lists_of_any_kind_and_no_config():
    assert Fp8Config(ignored_layers=(n for n in ("a", "b"))).ignored_layers == ["a", "b"]
    assert Fp8Config.from_config(FP8 | dict(scale_fmt="float", **BLOCK)).scale_fmt is None
    with pytest.raises(ValueError, match="quantization_config: expected an object, got None"):
        dialect_of(None)
    with pytest.raises(ValueError, match="ignored_layers: expected a list of names"):
        OnlineConfig("mxfp4", ignore="lm_head")


def test_rules_of_fused_layers():
    """A rule that names the parts is the fused layer's; parts that go by different rules are no layer."""
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    rules = {"re:.*[qkv]_proj$": "mxfp8", "a.gate_up_proj": None, "re:.*gate_proj$": "mxfp4", "typo": None}
    config = OnlineConfig("fp8_per_tensor", rules=rules)
    config.packed_modules_mapping = parts
    assert config.scheme("a.qkv_proj") == "mxfp8" and config.scheme("a.gate_up_proj") is None
    assert config.scheme("a.o_proj") == "fp8_per_tensor" and config.unmatched_layers() == ["re:.*gate_proj$", "typo"]
    with pytest.raises(ValueError, match=r"b\.gate_up_proj: .* got gate_proj: mxfp4, up_proj: default"):
        config.scheme("b.gate_up_proj")
    with pytest.raises(ValueError, match="OnlineConfig: expected a regular expression"):
        OnlineConfig("mxfp4", rules={"re:(": None})
