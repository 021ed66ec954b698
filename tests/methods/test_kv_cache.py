"""Fp8KVCacheMethod: scales from a checkpoint to the cache, and the names they come under."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from fpk.device import pretend
from fpk.methods import Attention, Fp8Config, pre_processed_weights
from fpk.methods.kv_cache import SCALES, Fp8KVCacheMethod, KVScaleNames, map_kv_scale_name

NAME = "model.layers.3.self_attn.attn"


def attention(dtype="fp8", q_scale_policy="one", **loaded):
    """A layer with the scales `loaded` into it."""
    method = Fp8KVCacheMethod(Fp8Config(True), q_scale_policy)
    layer = Attention(2, 64, 32, kv_cache_dtype=dtype, prefix=NAME, quant_method=method)
    method.create_weights(layer)
    for name, value in loaded.items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, torch.as_tensor(value))
    return layer


def process(layer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer.quant_method.process_weights_after_loading(layer)
    return [str(w.message) for w in caught]


def scales(layer):
    """Of q, k, v and probabilities, after a look at all the places where they stand."""
    for name in SCALES:
        device, host = getattr(layer, f"_{name}"), getattr(layer, f"_{name}_float")
        assert device.dtype is torch.float32 and device.shape == ()
        assert type(host) is float and host == device.item()
        assert name not in layer._parameters
    for name in ("k_scale", "v_scale"):
        on_host = getattr(layer, f"_{name}_cpu")
        assert on_host.device.type == "cpu" and on_host.item() == getattr(layer, f"_{name}").item()
    return tuple(getattr(layer, f"_{n}").item() for n in SCALES)


def test_parameters_before_loading():
    layer = attention()
    for name in SCALES:
        parameter = getattr(layer, name)
        assert parameter.shape == () and parameter.dtype is torch.float32 and parameter.item() == -1.0
        assert getattr(layer, f"_{name}").item() == 1.0


def test_all_loaded():
    layer = attention(q_scale=0.5, k_scale=0.25, v_scale=torch.tensor([0.125]), prob_scale=2.0)
    assert process(layer) == []
    assert scales(layer) == (0.5, 0.25, 0.125, 2.0)


def test_none_loaded_means_one_and_a_warning():
    layer = attention("fp8_e4m3")
    [message] = process(layer)
    assert f"{NAME}: the checkpoint has no k_scale and v_scale" in message
    assert scales(layer) == (1.0, 1.0, 1.0, 1.0)


def test_k_alone_serves_both():
    layer = attention(k_scale=0.25)
    [message] = process(layer)
    assert "no v_scale" in message
    assert scales(layer) == (1.0, 0.25, 0.25, 1.0)


def test_v_alone_is_an_error():
    with pytest.raises(ValueError, match=rf"{NAME}.k_scale: missing from the checkpoint"):
        process(attention(v_scale=0.25))


@pytest.mark.parametrize("value", [0.0, -2.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", SCALES)
def test_values_that_are_no_scales(name, value):
    given = dict.fromkeys(("k_scale", "v_scale"), 0.5) | {name: value}
    with pytest.raises(ValueError, match=rf"{NAME}.{name}: expected a finite positive scale, got {value}"):
        process(attention(**given))


def test_a_zero_v_scale_is_not_replaced_by_k():
    with pytest.raises(ValueError, match=r"v_scale: expected a finite positive scale, got 0\.0"):
        process(attention(k_scale=0.5, v_scale=0.0))


def test_policies_of_a_missing_q_scale():
    for policy, expected in (("one", 1.0), ("k", 0.25)):
        layer = attention(q_scale_policy=policy, k_scale=0.25, v_scale=0.5)
        process(layer)
        assert scales(layer)[0] == expected
        layer = attention(q_scale_policy=policy, k_scale=0.25, v_scale=0.5, q_scale=4.0)
        process(layer)
        assert scales(layer)[0] == 4.0  # loaded: no policy asked
    with pytest.raises(ValueError, match="q_scale_policy: expected one of 'one', 'k', got 'max'"):
        Fp8KVCacheMethod(Fp8Config(), "max")


def test_fnuz_doubles_what_was_loaded():
    with pretend("gfx942"):
        layer = attention(k_scale=0.25, v_scale=0.5, q_scale=1.5)
        process(layer)
        assert scales(layer) == (3.0, 0.5, 1.0, 1.0)
        bare = attention()
        process(bare)
        assert scales(bare) == (1.0, 1.0, 1.0, 1.0)
        assert layer.quant_method.new_cache(layer, 2).key.dtype is torch.float8_e4m3fnuz
        by_k = attention(q_scale_policy="k", k_scale=0.25, v_scale=0.5)
        process(by_k)
        assert scales(by_k)[0] == 0.5  # the keys' scale has been doubled already


@pytest.mark.parametrize("arch", ["sm90", "gfx942"])
def test_second_processing_changes_nothing(arch):
    with pretend(arch):
        layer = attention(k_scale=0.25, v_scale=0.5)
        process(layer)
        before = scales(layer)
        assert process(layer) == []
        assert scales(layer) == before


@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16"])
def test_a_cache_that_is_not_quantized_uses_no_scales(dtype):
    layer = attention(dtype, k_scale=0.25, v_scale=0.0, prob_scale=0.5)
    assert process(layer) == []
    assert scales(layer) == (1.0, 1.0, 1.0, 0.5)


@pytest.mark.parametrize("dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_scales_by_token_ignore_loaded_ones(dtype):
    layer = attention(dtype, k_scale=0.25, v_scale=0.5, q_scale=3.0)
    assert process(layer) == []
    assert scales(layer) == (1.0, 1.0, 1.0, 1.0)


def test_loading_again_keeps_addresses():
    layer = attention(k_scale=0.25, v_scale=0.5)
    process(layer)
    address = layer._k_scale.data_ptr()
    layer.quant_method.create_weights(layer)
    for name, value in dict(k_scale=2.0, v_scale=4.0).items():
        parameter = getattr(layer, name)
        parameter.weight_loader(parameter, torch.tensor(value))
    process(layer)
    assert scales(layer) == (1.0, 2.0, 4.0, 1.0)
    assert layer._k_scale.data_ptr() == address


def test_a_parameter_that_is_gone_alone():
    layer = attention(k_scale=0.25, v_scale=0.5)
    del layer.v_scale
    with pytest.raises(ValueError, match=f"{NAME}.v_scale: missing, expected all of"):
        process(layer)


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(1, 1), torch.ones(0)])
def test_loader_refuses_other_shapes(value):
    layer = attention()
    with pytest.raises(ValueError, match=rf"{NAME}.k_scale: expected \(\) or \(1,\), got"):
        layer.k_scale.weight_loader(layer.k_scale, value)


def test_loader_refuses_integers_and_shards():
    layer = attention()
    with pytest.raises(ValueError, match="k_scale: expected float32"):
        layer.k_scale.weight_loader(layer.k_scale, torch.tensor(1))
    with pytest.raises(ValueError, match="k_scale: expected no shard id"):
        layer.k_scale.weight_loader(layer.k_scale, torch.tensor(1.0), 0)


def test_an_engines_loader_is_used():
    method, layer = Fp8KVCacheMethod(Fp8Config(True)), nn.Module()
    layer.kv_cache_dtype = "fp8"
    seen = []
    method.create_weights(layer, weight_loader=lambda param, loaded: seen.append(loaded) or param.data.copy_(loaded))
    layer.k_scale.weight_loader(layer.k_scale, torch.tensor(0.5))
    assert len(seen) == 1 and layer.k_scale.item() == 0.5


def test_cache_dtypes_that_are_refused():
    with pytest.raises(ValueError, match=f"{NAME}.kv_cache_dtype: expected an e4m3 cache .* got fp8_e5m2"):
        attention("fp8_e5m2")
    with pytest.raises(NotImplementedError, match=f"{NAME}.kv_cache_dtype: fpk has no nvfp4 caches"):
        attention("nvfp4")
    with pytest.raises(ValueError, match=f"{NAME}.kv_cache_dtype: expected one of 'auto'.* got 'fp9'"):
        attention("fp9")


def test_apply_is_never_called():
    layer = attention()
    with pytest.raises(RuntimeError, match="a KV cache multiplies nothing"):
        layer.quant_method.apply(layer, torch.ones(1))


def test_config_gives_it_to_attention_layers():
    config = Fp8Config(True)
    method = config.get_quant_method(Attention(2, 64), NAME)
    assert isinstance(method, Fp8KVCacheMethod) and method.quant_config is config


def test_scales_survive_casts_copies_and_states():
    layer = attention(k_scale=0.3, v_scale=0.7)
    assert all(p.dtype is torch.float32 for p in layer.to(torch.bfloat16).parameters())
    process(layer)
    expected = scales(layer)
    assert scales(layer.to(torch.bfloat16).to(torch.float16)) == expected
    assert scales(copy.deepcopy(layer)) == expected
    assert scales(pickle.loads(pickle.dumps(layer))) == expected
    other = attention(k_scale=5.0, v_scale=6.0)
    process(other)
    other.load_state_dict(layer.state_dict())
    assert scales(other) == expected


def test_pre_processed_scales_are_left_alone():
    layer = attention()
    layer._k_scale.fill_(0.5)
    layer._v_scale.fill_(0.25)
    with pre_processed_weights():
        assert process(layer) == []
    assert scales(layer) == (1.0, 0.5, 0.25, 1.0)


@pytest.mark.parametrize(
    "dtype, expected",
    [
        ("fp8", torch.float8_e4m3fn), ("fp8_per_token_head", torch.float8_e4m3fn), ("int8_per_token_head", torch.int8),
        ("auto", torch.float16), ("bfloat16", torch.bfloat16),
    ],
)  # fmt: skip
def test_write_and_attend(dtype, expected):
    """Through the method: what was written is attended to, with the scales of the layer."""
    loaded = dict(k_scale=1 / 64, v_scale=1 / 32) if dtype == "fp8" else {}
    layer = attention(dtype, **loaded)
    with pytest.raises(ValueError, match=f"{NAME}: expected process_weights_after_loading"):
        layer.quant_method.write(layer, layer.quant_method.new_cache(layer, 4), *(torch.ones(1, 2, 64),) * 2, None)
    process(layer)
    method, q_dtype = layer.quant_method, expected if expected.itemsize == 2 else torch.bfloat16
    cache = method.new_cache(layer, pages=4, page=4, dtype=q_dtype)
    assert cache.key.dtype is expected and cache.value.shape == (4, 4, 2, 32)
    assert (cache.key_scales is not None) == dtype.endswith("per_token_head")
    g = torch.Generator(layer._k_scale.device).manual_seed(0)
    key, value, q = (torch.randn(s, generator=g).to(q_dtype) for s in ((7, 2, 64), (7, 2, 32), (1, 4, 64)))
    slots = torch.tensor([8, 9, 10, 11, 0, 1, 2])  # pages 2 and 0
    method.write(layer, cache, key, value, slots)
    table, lens = torch.tensor([[2, 0]], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    out = method.attend(layer, cache, q, table, lens)
    k, v = (t.float().repeat_interleave(2, 1).transpose(0, 1) for t in (key, value))
    exact = nn.functional.scaled_dot_product_attention(q.float().transpose(0, 1), k, v).transpose(0, 1)
    error = (out.float() - exact).norm() / exact.norm()
    assert error < (0.01 if expected.itemsize == 2 else 0.06), error
    several = torch.cat([torch.zeros_like(q), q])  # the last two tokens
    both = method.attend(layer, cache, several, table, lens, query_starts=torch.tensor([0, 2], dtype=torch.int32))
    assert (both[1].float() - out[0].float()).norm() < 4e-3 * out.float().norm()
    values = v.transpose(0, 1)[:6].mean(0)  # a query of zeros sees six tokens alike
    assert (both[0].float() - values).norm() < 0.06 * values.norm()
    assert cache.nbytes == sum(
        t.numel() * t.element_size() for t in (cache.key, cache.value, cache.key_scales, cache.value_scales)
        if t is not None
    )  # fmt: skip


NAMES = {
    "layers.3.self_attn.k_proj.output_scale": "layers.3.self_attn.attn.k_scale",
    "layers.3.self_attn.v_proj.output_scale": "layers.3.self_attn.attn.v_scale",
    "layers.3.self_attn.q_proj.output_scale": "layers.3.self_attn.attn.q_scale",
    "layers.3.self_attn.prob_output_scale": "layers.3.self_attn.attn.prob_scale",
    "layers.3.self_attn.kv_scale": "layers.3.self_attn.attn.k_scale",
    "layers.3.self_attn.attn.kv_scale": "layers.3.self_attn.attn.k_scale",
    "layers.3.self_attn.k_proj.k_scale": "layers.3.self_attn.attn.k_scale",
    "layers.3.self_attn.v_proj.v_scale": "layers.3.self_attn.attn.v_scale",
    "layers.3.self_attn.qkv_proj.k_scale": "layers.3.self_attn.attn.k_scale",
    "layers.3.self_attn.qkqkv_proj.v_scale": "layers.3.self_attn.attn.v_scale",
    "layers.3.mixer.v_proj.v_scale": "layers.3.mixer.attn.v_scale",
    "layers.3.self_attn.q.scale": "layers.3.self_attn.attn.q_scale",
    "layers.3.self_attn.k_cache.scale": "layers.3.self_attn.attn.k_scale",
    "layers.3.self_attn.v_scale": "layers.3.self_attn.attn.v_scale",
    "layers.3.self_attn.k_zero_point": "layers.3.self_attn.attn.k_zero_point",
    "layers.3.self_attn.attn.k_scale": "layers.3.self_attn.attn.k_scale",
    "layers.3.mlp.down_proj.weight_scale": "layers.3.mlp.down_proj.weight_scale",
    "layers.3.self_attn.q_proj.weight": "layers.3.self_attn.q_proj.weight",
}


@pytest.mark.parametrize("name", NAMES)
def test_names(name):
    assert map_kv_scale_name(name) == NAMES[name]
    assert map_kv_scale_name(NAMES[name]) == NAMES[name]


def test_a_scale_under_the_other_projection_is_not_guessed():
    names = KVScaleNames([f"{NAME}.k_scale", f"{NAME}.v_scale"])
    assert names.map("model.layers.3.self_attn.k_proj.v_scale") is None
    assert list(names.unknown) == ["model.layers.3.self_attn.k_proj.v_scale"]


def test_unknown_names_are_told():
    layers = [f"model.layers.{i}.self_attn" for i in range(2)]
    parameters = [f"{layer}.attn.{s}" for layer in layers for s in SCALES]
    weight_scale = f"{layers[0]}.q_proj.weight_scale"
    names = KVScaleNames([*parameters, weight_scale], Fp8Config(True).get_cache_scale_mapper())
    assert names.map(f"{layers[0]}.k_proj.output_scale") == f"{layers[0]}.attn.k_scale"
    assert names.map(f"{layers[0]}.attn.v_scale") == f"{layers[0]}.attn.v_scale"
    assert names.map(weight_scale) == weight_scale
    assert names.map("model.norm.weight") == "model.norm.weight"
    assert names.map("model.layers.7.self_attn.o_proj.weight_scale") == "model.layers.7.self_attn.o_proj.weight_scale"
    for wrong in ("attn.k_scales", "k_zero_point", "attn.key_scale"):
        assert names.map(f"{layers[1]}.{wrong}") is None
    assert names.unset() == [f"{layers[1]}.attn.k_scale", f"{layers[1]}.attn.v_scale"]
    report = names.report().splitlines()
    assert report[0] == f"{layers[1]}.attn.k_scales: nothing takes it"
    assert report[1] == f"{layers[1]}.k_zero_point: nothing takes it (no {layers[1]}.attn.k_zero_point)"
    assert report[-1] == f"{layers[1]}.attn.v_scale: not in the checkpoint" and len(report) == 5
    assert names.map(f"{layers[1]}.kv_scale") == f"{layers[1]}.attn.k_scale"
    assert names.unset() == []


def test_two_names_for_one_scale():
    names = KVScaleNames([f"{NAME}.k_scale"])
    names.map(f"{NAME}.k_scale")
    assert names.map(f"{NAME}.k_scale") == f"{NAME}.k_scale"  # loading again
    with pytest.raises(ValueError, match=f"{NAME}.k_scale: expected one tensor of the checkpoint"):
        names.map("model.layers.3.self_attn.k_proj.output_scale")
