"""Dialects of `quantization_config`: what each says of a layer, skip lists, and configs that say nothing."""

import pytest
from checkpoint_kit import config_of

from fpk.methods._families import LayerSpec, dialect_of
from fpk.methods.compressed_tensors import CompressedTensorsConfig
from fpk.methods.quark import QuarkConfig

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def spec(config, layer=Q, **options):
    found = dialect_of(config, **options).spec(layer)
    return None if found is None else str(found)


# ---- skip lists -------------------------------------------------------------
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
CT = config_of("lc_FP8_DYNAMIC")["quantization_config"]
QUARK = config_of("q_ptpc_fp8")["quantization_config"]
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
SKIPS = [  # config without the list, its key, entry, layers that it names, layers that it does not
    (FP8, "ignored_layers", Q, [Q], [UP, Q + "2"]),
    (FP8, "modules_to_not_convert", "model.layers.0.mlp", [UP], [Q, "model.layers.0.mlp2.up_proj"]),
    (FP8, "modules_to_not_convert", "model.layers.*.self_attn", [Q, Q.replace("0", "11")], [UP]),
    (FP8, "modules_to_not_convert", "q_proj", [Q], [UP, "model.xq_proj"]),
    (FP8, "ignored_layers", "re:.*up_proj", [UP], [Q]),
    (FP8, "ignored_layers", "a[", ["a[", "x.a["], [Q]),
    (CT, "ignore", Q, [Q], [UP]),
    (CT, "ignore", r"re:.*self_attn\..*", [Q], [UP]),
    (CT, "ignore", "model.layers.0.mlp", [], [UP, Q]),
    (CT, "ignore", "Linear", [Q, UP], []),
    (QUARK, "exclude", Q, [Q], [UP]),
    (QUARK, "exclude", "*up_proj", [UP], [Q]),
    (QUARK, "exclude", "re:.*self_attn", [Q], [UP]),
    (QUARK, "exclude", "model.layers.1", [Q.replace("0", "1")], [Q, Q.replace("0", "10")]),
    (MODELOPT, "ignore", "model.layers.0*", [Q, UP], [Q.replace("0", "1")]),
    (MODELOPT, "exclude_modules", "self_attn", [Q], [UP, "model.xself_attn.q_proj"]),
    (MODELOPT, "ignore", "*.up_proj", [UP], [Q]),
]


@pytest.mark.parametrize("case", SKIPS, ids=lambda c: f"{c[0]['quant_method']} {c[2]}")
def test_skip_entries(case):
    config, key, entry, named, others = case
    dialect = dialect_of(config | {key: [entry, "typo"]})
    assert [dialect.spec(n) for n in named] == [None] * len(named)
    assert all(dialect.spec(n) is not None for n in others)
    assert dialect.unmatched() == (["typo"] if named else [entry, "typo"])


@pytest.mark.parametrize("config", [FP8, CT, QUARK, MODELOPT], ids=lambda c: c["quant_method"])
def test_skip_lists_that_are_none(config):
    key = {"fp8": "ignored_layers", "compressed-tensors": "ignore", "quark": "exclude", "modelopt": "ignore"}
    key = key[config["quant_method"]]
    for empty in (None, []):
        assert spec(config | {key: empty}) is not None
    for bad in ("lm_head", [3], {"a": 1}, 7):
        with pytest.raises(ValueError, match=rf"{key}: expected a list of names"):
            dialect_of(config | {key: bad})


def test_parts_of_a_fused_layer_must_agree():
    skipped = [f"model.layers.0.self_attn.{n}_proj" for n in "qkv"]
    for config, key in ((FP8, "ignored_layers"), (QUARK, "exclude"), (MODELOPT, "ignore"), (CT, "ignore")):
        fused = "model.layers.0.self_attn.qkv_proj"
        assert spec(config | {key: skipped}, fused, fused=FUSED) is None
        assert spec(config | {key: [fused]}, fused, fused=FUSED) is None
        with pytest.raises(ValueError, match=r"qkv_proj: expected all parts .* but v_proj"):
            spec(config | {key: skipped[:2]}, fused, fused=FUSED)


# ---- fp8 --------------------------------------------------------------------
def test_fp8_schemes():
    assert spec(FP8) == spec({"quant_method": "FP8"}) == "fp8_tensor:fp8_token"
    assert spec(FP8 | {"activation_scheme": "static"}) == "fp8_tensor:fp8_tensor_static"
    assert spec(FP8 | {"weight_block_size": [128, 128]}) == "fp8_block128:fp8_group128"
    assert spec({"quant_method": "fbgemm_fp8", "activation_scale_ub": None}) == "fp8_channel:fp8_token"
    assert spec(FP8 | {"weight_block_size": [128, 64]}) == "fp8_block128x64:fp8_group64"
    powers = FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    assert spec(powers) == "fp8_block128:fp8_group128_e8m0"
    assert (
        spec({"quant_method": "mxfp8"}) == "mxfp8_e4m3:mxfp8_e4m3" and spec({"quant_method": "mxfp4"}) == "mxfp4:none"
    )
    for change in (
        {"activation_scheme": "sometimes"}, {"activation_scheme": None}, {"weight_block_size": [128]},
        {"weight_block_size": [128, 0]}, {"weight_block_size": 128}, {"weight_block_size": [128.0, 128]},
        {"weight_block_size": [128, 128], "activation_scheme": "static"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"activation_scheme|weight_block_size"):
            dialect_of(FP8 | change)


@pytest.mark.parametrize("method", [None, 8, ["fp8"]])
def test_a_method_that_is_none(method):
    with pytest.raises(ValueError, match="quant_method: expected a name"):
        dialect_of({"quant_method": method})


# ---- modelopt ---------------------------------------------------------------
def test_modelopt_algorithms_in_both_dialects():
    for algo, expected in {
        "FP8": "fp8_tensor:fp8_tensor_static", "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel:fp8_token",
        "fp8_pb_wo": "fp8_block128:none", "W8A8_SQ_PER_CHANNEL": "int8_channel:int8_tensor_static",
        "NVFP4": "nvfp4:nvfp4_static", "W4A16_NVFP4": "nvfp4:none", "MXFP8": "mxfp8_e4m3:mxfp8_e4m3",
        "mxfp4": "mxfp4:mxfp4", "NVFP4_AWQ": "NVFP4_AWQ",
    }.items():  # fmt: skip
        assert spec({"quant_method": "modelopt", "quant_algo": algo}) == expected
        assert spec({"quantization": {"quant_algo": algo, "exclude_modules": ["lm_head"]}}) == expected
        assert spec({"quantization": {"quant_algo": algo, "exclude_modules": [Q]}}) is None
    groups = {"group_0": {"weights": {"num_bits": 4}}}
    alone = {"quant_method": "modelopt", "quant_algo": "NVFP4", "config_groups": groups}
    assert spec(alone) == "nvfp4:none"  # the same name for weights alone
    groups["group_0"]["input_activations"] = {"num_bits": 4}
    assert spec(alone) == "nvfp4:nvfp4_static"
    for bad in (None, 3):
        with pytest.raises(ValueError, match="quant_algo: expected a name"):
            dialect_of({"quant_method": "modelopt", "quant_algo": bad})
    with pytest.raises(ValueError, match="quantization: expected an object"):
        dialect_of({"quant_method": "modelopt", "quantization": 3})


def test_modelopt_mixed_precision():
    layers = {Q: {"quant_algo": "FP8"}, UP: {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert spec(config, Q) == "fp8_tensor:fp8_tensor_static" and spec(config, UP) == "nvfp4:nvfp4_static"
    assert spec(config, "lm_head") is None
    for bad in (None, {Q: "FP8"}, [Q]):
        with pytest.raises(ValueError, match="quantized_layers"):
            dialect_of(config | {"quantized_layers": bad})


# ---- compressed-tensors -----------------------------------------------------
def group(weights, inputs=None, targets=("Linear",), **more):
    base = {"num_bits": 8, "symmetric": True, "dynamic": False}
    inputs = None if inputs is None else base | inputs
    return {"targets": list(targets), "weights": base | weights, "input_activations": inputs} | more


def ct(*groups, **more):
    return {"quant_method": "compressed-tensors", "config_groups": {f"g{i}": g for i, g in enumerate(groups)}} | more


FLOAT, INT = {"type": "float", "strategy": "channel"}, {"type": "int", "strategy": "channel"}
TOKEN = {"strategy": "token", "dynamic": True}
CT_SPECS = [
    (FLOAT, None, "fp8_channel:none"),
    (FLOAT, FLOAT | TOKEN, "fp8_channel:fp8_token"),
    (FLOAT | {"strategy": "tensor"}, FLOAT | {"strategy": "tensor"}, "fp8_tensor:fp8_tensor_static"),
    (FLOAT | {"strategy": "tensor"}, FLOAT | TOKEN | {"strategy": "tensor"}, "fp8_tensor:fp8_tensor"),
    (FLOAT | {"strategy": "block", "block_structure": [128, 128]},
     FLOAT | TOKEN | {"strategy": "group", "group_size": 128}, "fp8_block128:fp8_group128"),
    (INT, INT | TOKEN, "int8_channel:int8_token"),
    (INT, INT | TOKEN | {"symmetric": False}, "int8_channel:int8_token_asymmetric"),
    (INT | {"strategy": "group", "group_size": 128}, None, "int8_group128:none"),
]  # fmt: skip
CT_UNSUPPORTED = [
    (FLOAT | {"num_bits": 4}, None), (INT | {"symmetric": False}, None), (INT | {"actorder": "group"}, None),
    (FLOAT | {"strategy": "tensor_group", "group_size": 16}, None), (FLOAT, FLOAT | TOKEN | {"dynamic": "local"}),
    (FLOAT, FLOAT | {"strategy": "token"}), (INT, INT | {"strategy": "tensor", "symmetric": False}),
    (INT | {"strategy": "group", "group_size": 64}, None),
]  # fmt: skip


@pytest.mark.parametrize("case", CT_SPECS, ids=lambda c: c[2])
def test_compressed_tensors_specs(case):
    weights, inputs, expected = case
    assert spec(ct(group(weights, inputs))) == expected
    nulls = dict.fromkeys(("actorder", "block_structure", "group_size", "scale_dtype"))
    assert spec(ct(group(nulls | weights, inputs and nulls | inputs, output_activations=None))) == expected


def mx(bits, size=32, **more):
    return {"num_bits": bits, "type": "float", "group_size": size, "strategy": "group"} | more


PACKED = [  # format, weights, input, expected
    ("mxfp4-pack-quantized", mx(4), mx(4, dynamic=True), "mxfp4:mxfp4"),
    ("mxfp4-pack-quantized", mx(4), None, "mxfp4:none"),
    ("mxfp6-pack-quantized", mx(6), mx(8, dynamic=True), "mxfp6_e2m3:mxfp8_e4m3"),
    ("mxfp6-pack-quantized", mx(6), None, "mxfp6_e2m3:none"),
    ("mxfp8-quantized", mx(8), mx(8, dynamic=True), "mxfp8_e4m3:mxfp8_e4m3"),
    ("mxfp4-pack-quantized", mx(4), FLOAT | TOKEN | {"group_size": None}, "mxfp4:fp8_token"),
    ("nvfp4-pack-quantized", mx(4, 16), mx(4, 16, dynamic="local"), "nvfp4:nvfp4_static"),
    ("nvfp4-pack-quantized", mx(4, 16), None, "nvfp4:none"),
    ("nvfp4-pack-quantized", mx(4, 32), None, None), ("mxfp4-pack-quantized", mx(4), mx(4, 16, dynamic=True), None),
    ("nvfp4-pack-quantized", mx(4, 16), mx(8, 16, dynamic=True), None),
]  # fmt: skip


@pytest.mark.parametrize("case", PACKED, ids=lambda c: f"{c[0]} {c[3]}")
def test_compressed_tensors_of_blocks(case):
    layout, weights, inputs, expected = case
    found = dialect_of(ct(group(weights, inputs), format=layout)).spec(Q)
    assert str(found) == expected if expected else found.unsupported
    assert found.divides == ("nvfp4:" in str(expected))


@pytest.mark.parametrize("case", CT_UNSUPPORTED, ids=str)
def test_compressed_tensors_without_a_layer(case):
    assert dialect_of(ct(group(*case))).spec(Q).unsupported


def test_compressed_tensors_targets_and_formats():
    config = ct(
        group(FLOAT, targets=["re:.*mlp.*"]), group(INT, format="int-quantized"), group(FLOAT, FLOAT | TOKEN, [UP]),
        format="mixed-precision",
    )  # fmt: skip
    config["config_groups"]["g0"]["format"] = config["config_groups"]["g2"]["format"] = "float-quantized"
    assert spec(config, UP) == "fp8_channel:none"  # the first group that names it
    assert spec(config, Q) == "int8_channel:none"  # by class only
    assert dialect_of(config).default() is None
    assert spec(ct(group(FLOAT, targets=["Conv2d"])), Q) is None
    assert dialect_of(ct(group(FLOAT), format="nvfp4-pack-quantized")).spec(Q).unsupported  # of 8 bits
    assert spec(ct(group(FLOAT, format="float-quantized"), format="pack-quantized")) == "fp8_channel:none"
    assert dialect_of(ct(group(FLOAT), sparsity_config={"format": "sparse-24-bitmask"})).spec(Q).unsupported
    assert spec({"config_groups": {"g": group(FLOAT)}}) == "fp8_channel:none"  # the oldest files have no method


@pytest.mark.parametrize(
    "config",
    [ct(), ct(3), ct(group(FLOAT, targets=[])), ct(group(FLOAT, targets=["re:("])), ct(group({"type": "complex"})),
     ct(group(FLOAT | {"dynamic": True})), ct(group(FLOAT) | {"weights": None}), ct(group(FLOAT) | {"weights": [1]}),
     ct(group(FLOAT, {"type": "bool"})), ct(group(FLOAT | {"strategy": "block", "block_structure": [1]}))],
    ids=str,
)  # fmt: skip
def test_compressed_tensors_configs_that_are_none(config):
    with pytest.raises(ValueError, match=r"config_groups(\.g0)?(\.|:)"):
        CompressedTensorsConfig.from_config(config)


# ---- quark ------------------------------------------------------------------
TENSOR = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
CHANNEL = TENSOR | {"qscheme": "per_channel", "ch_axis": 0}
DYNAMIC = CHANNEL | {"is_dynamic": True, "ch_axis": 1}
BLOCK = TENSOR | {"qscheme": "per_block", "block_size": [128, 128]}
GROUP = TENSOR | {"qscheme": "per_group", "group_size": 128, "is_dynamic": True}
MXFP4 = TENSOR | {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}


def int8(of):
    return of | {"dtype": "int8"}


def pair(weight, inputs=None, **more):
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None} | more


def quark(config=None, **more):
    return {"quant_method": "quark", "export": {}, "global_quant_config": config or pair(TENSOR, TENSOR)} | more


QUARK_SPECS = [
    (pair(TENSOR, TENSOR), "fp8_tensor:fp8_tensor_static"),
    (pair(TENSOR), "fp8_tensor:none"),
    (pair([TENSOR], [TENSOR]), "fp8_tensor:fp8_tensor_static"),
    (pair(TENSOR, TENSOR | {"is_dynamic": True}), "fp8_tensor:fp8_tensor"),
    (pair(CHANNEL, DYNAMIC), "fp8_channel:fp8_token"),
    (pair(CHANNEL, TENSOR), "fp8_channel:fp8_tensor_static"),
    (pair(BLOCK, GROUP), "fp8_block128:fp8_group128"),
    (pair(BLOCK | {"block_size": [64, 32]}, GROUP | {"group_size": 64}), "fp8_block64x32:fp8_group64"),
    (pair(int8(TENSOR), int8(TENSOR)), "int8_tensor:int8_tensor_static"),
    (pair(int8(CHANNEL), int8(DYNAMIC)), "int8_channel:int8_token"),
    (pair(int8(CHANNEL), int8(DYNAMIC) | {"symmetric": False}), "int8_channel:int8_token_asymmetric"),
]
QUARK_UNSUPPORTED = [
    pair(MXFP4, MXFP4), pair(MXFP4), pair([MXFP4, TENSOR], [MXFP4, TENSOR]), pair(TENSOR, int8(TENSOR)),
    pair(CHANNEL | {"ch_axis": 1}), pair(TENSOR | {"is_dynamic": True}), pair(TENSOR, CHANNEL),
    pair(int8(TENSOR) | {"symmetric": False}), pair(TENSOR, TENSOR, output_tensors=TENSOR), pair(TENSOR, bias=TENSOR),
]  # fmt: skip


@pytest.mark.parametrize("case", QUARK_SPECS, ids=lambda c: c[1])
def test_quark_specs(case):
    assert spec(quark(case[0])) == case[1]


@pytest.mark.parametrize("config", QUARK_UNSUPPORTED, ids=str)
def test_quark_without_a_layer(config):
    assert dialect_of(quark(config)).spec(Q).unsupported


def test_quark_layer_before_type_before_global():
    layers = {"*up_proj": pair(CHANNEL, DYNAMIC), "self_attn": pair(BLOCK, GROUP), UP.replace("0", "3"): pair(CHANNEL)}
    config = quark(layer_quant_config=layers, layer_type_quant_config={"Linear": pair(TENSOR)})
    assert spec(config, UP) == "fp8_channel:fp8_token"
    assert spec(config, UP.replace("0", "3")) == "fp8_channel:none"  # its own name before a wildcard
    assert spec(config, Q) == "fp8_block128:fp8_group128"
    assert spec(config, "model.layers.0.xself_attn.q_proj") == "fp8_tensor:none"  # by class
    named = {"<class 'torch.nn.modules.linear.Linear'>": pair(CHANNEL)}
    assert spec(quark(layer_type_quant_config=named)) == "fp8_channel:none"
    assert spec(quark(layer_type_quant_config={"Conv2d": pair(CHANNEL)})) == "fp8_tensor:fp8_tensor_static"
    assert spec(quark(layer_quant_config={Q + "_and_more": pair(CHANNEL)})) == "fp8_tensor:fp8_tensor_static"
    assert spec({"quant_method": "quark", "export": {}, "layer_quant_config": layers}, "other") is None


def test_quark_parts_of_a_fused_layer_have_one_spec():
    fused = "model.layers.0.self_attn.qkv_proj"
    config = quark(layer_quant_config={"*.v_proj": pair(TENSOR, TENSOR)})
    assert spec(config, fused, fused=FUSED) == "fp8_tensor:fp8_tensor_static"
    # a list that is longer by a stage is another spec, whichever comes first
    for odd in (pair([TENSOR, TENSOR]), pair(CHANNEL)):
        for name in ("*.q_proj", "*.v_proj"):
            with pytest.raises(ValueError, match=r"qkv_proj: expected one quantization for q_proj, k_proj, v_proj"):
                spec(quark(pair([TENSOR]), layer_quant_config={name: odd}), fused, fused=FUSED)


def test_quark_kv_cache():
    kv, patterns = pair(TENSOR, TENSOR, output_tensors=TENSOR), ["*k_proj", "*v_proj"]
    layers = dict.fromkeys([*patterns, "*q_proj"], kv)
    config = QuarkConfig.from_config(quark(export={"kv_cache_group": patterns}, layer_quant_config=layers))
    assert config.kv_cache_spec == TENSOR and config.kv_cache_group == patterns
    # what the cache does with outputs is no matter of the layer
    for name in ("q_proj", "k_proj", "v_proj"):
        assert config.spec(f"a.{name}") == LayerSpec("fp8_tensor", "fp8_tensor_static")
    assert layers["*k_proj"]["output_tensors"] == TENSOR  # the config given is left alone
    for export in ({}, {"kv_cache_group": None}, {"kv_cache_group": []}):
        assert QuarkConfig.from_config(quark(export=export)).kv_cache_spec is None
    for wrong, words in (
        ({}, "expected an entry for kv_cache_group"),
        ({"*k_proj": kv, "*v_proj": pair(TENSOR)}, "expected output_tensors in each"),
        ({"*k_proj": kv, "*v_proj": pair(TENSOR, output_tensors=CHANNEL)}, "the same output_tensors"),
    ):
        with pytest.raises(ValueError, match=words):
            QuarkConfig.from_config(quark(export={"kv_cache_group": patterns}, layer_quant_config=wrong))


@pytest.mark.parametrize(
    "change",
    [{"export": None}, {"export": [1]}, {"layer_quant_config": [1]}, {"layer_quant_config": {"a": 1}},
     {"global_quant_config": "fp8"}, {"layer_type_quant_config": {"Linear": 1}}, {"export": {"kv_cache_group": "k"}}],
    ids=str,
)  # fmt: skip
def test_quark_configs_that_are_none(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        QuarkConfig.from_config(quark() | change)
    missing = quark()
    del missing["export"]
    with pytest.raises(ValueError, match="export"):
        QuarkConfig.from_config(missing)


def test_a_spec_that_is_none():
    for bad in (3, "fp8", [3]):
        with pytest.raises(ValueError, match=r"weight: expected an object or a list"):
            spec(quark(pair(bad)))
