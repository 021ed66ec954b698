"""Rows of the catalogue: configs, and the methods that they or an engine make for a layer."""

from typing import Any

import torch
from catalogue import raises
from moe_kit import config

from fpk import methods
from fpk.device import pretend
from fpk.hf import FpkConfig, FpkQuantizer
from fpk.methods import CompressedTensorsConfig, Fp8Config, Linear, OnlineConfig, QuarkConfig, RoutedExperts
from fpk.methods._families import dialect_of
from fpk.methods.kv_cache import Fp8KVCacheMethod

Made = Any
QKV = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
FP4, FP6, FP6B = "fp4", "fp6_e3m2", "fp6_e2m3"


def spec(dtype: str, qscheme: str = "per_tensor", dynamic: bool = False, **more: Any) -> dict[str, Any]:
    """A tensor's spec in Quark's words."""
    return dict(dtype=dtype, qscheme=qscheme, is_dynamic=dynamic, **more)


def mx(dtype: str, dynamic: bool = True) -> dict[str, Any]:
    return spec(dtype, "per_group", dynamic, group_size=32, scale_format="e8m0")


def quark(**more: Any) -> dict[str, Any]:
    return dict(quant_method="quark", export={}, **more)


def w8a8(**more: Any) -> dict[str, Any]:
    return dict(weight=spec("fp8_e4m3"), input_tensors=spec("fp8_e4m3", dynamic=True), **more)


def experts(**fields: Any) -> RoutedExperts:
    return RoutedExperts(config(**fields), prefix="model.layers.0.mlp.experts")


# ---- Fp8Config and skip lists


@raises("config", "FP8: an activation scheme that is neither static nor dynamic", ValueError, "got 'per_token'")
def fp8_scheme() -> Made:
    return lambda: Fp8Config(True, activation_scheme="per_token", weight_block_size=[128])  # the first thing wrong


@raises("config", "FP8: blocks without a serialized checkpoint", ValueError, "unless the checkpoint is FP8 already")
def fp8_block_online() -> Made:
    return lambda: Fp8Config(False, "static", weight_block_size=[128])


@raises("config", "FP8: a block size that is not two numbers", ValueError, "expected 2 sizes .* got 1")
def fp8_block_sizes() -> Made:
    return lambda: Fp8Config(True, "static", weight_block_size=[128])


@raises("config", "FP8: blocks with static activations", ValueError, "dynamic activations with block .* got 'static'")
def fp8_block_static() -> Made:
    return lambda: Fp8Config(True, "static", weight_block_size=[128, 128])


@raises("config", "FP8: quantization_config without a key", ValueError, r"one of the keys \['activation_scheme'\]")
def fp8_keys() -> Made:
    return lambda: Fp8Config.from_config({"quant_method": "fp8"})


@raises("config", "an unknown mode of matching skipped layers", ValueError, "expected one of exact, .* got 'prefix'")
def skip_mode() -> Made:
    made = Fp8Config(ignored_layers=["a"])
    made.ignored_layers_match_mode = "prefix"
    return lambda: made.is_skipped("a")


@raises("config", "only some parts of a fused layer are skipped", ValueError, "qkv_proj: expected all parts")
def skip_parts() -> Made:
    made = Fp8Config(True, ignored_layers=["a.q_proj"])
    made.packed_modules_mapping = QKV
    return lambda: Linear(64, [32, 32, 32], quant_config=made, prefix="a.qkv_proj")


@raises("config", "a skipped layer's expression that does not compile", ValueError, "ignored_layers.*re:")
def skip_expression() -> Made:
    made = Fp8Config(ignored_layers=["re:("])
    return lambda: made.is_skipped("a")


@raises("config", "an unknown quantization method", NotImplementedError, "expected one of fp8, .* got 'gptq'")
def unknown_method() -> Made:
    return lambda: dialect_of({"quant_method": "gptq"})


@raises("config", "ModelOpt: no algorithm", ValueError, "quant_algo: expected a name")
def modelopt_algorithm() -> Made:
    return lambda: dialect_of({"quant_method": "modelopt"})


# ---- online configs


@raises("config", "online: an unknown scheme", ValueError, "expected one of fp8_per_tensor.* got 'fp9'")
def online_unknown() -> Made:
    return lambda: OnlineConfig("fp9")


@raises("config", "online: nothing to quantize", ValueError, "expected a scheme's name, or linear or moe")
def online_nothing() -> Made:
    return lambda: OnlineConfig(ignore=["a"])


@raises("config", "online: linear layers by a scheme that only experts have", ValueError, "OnlineConfig.linear")
def online_slot() -> Made:
    return lambda: OnlineConfig(linear="int8_per_channel_weight_only")


@raises("config", "online: activations that the method would not honour", ValueError, "follow from its weights")
def online_activation() -> Made:
    return lambda: OnlineConfig(linear={"weight": "mxfp4", "activation": "fp8_per_token"})


@raises("config", "online: read from a checkpoint", NotImplementedError, "the caller names the scheme")
def online_checkpoint() -> Made:
    return lambda: OnlineConfig.from_config({"quant_method": "online"})


@raises("config", "online: only some parts of a fused layer are ignored", ValueError, "all parts of the fused layer")
def online_parts() -> Made:
    made = OnlineConfig("mxfp4", ignore=["a.q_proj"])
    made.packed_modules_mapping = QKV
    return lambda: Linear(64, [32, 32, 32], quant_config=made, prefix="a.qkv_proj")


@raises("config", "transformers: fpk asked to quantize a quantized checkpoint", ValueError, "unquantized checkpoint")
def online_quantized() -> Made:
    return lambda: FpkQuantizer(FpkConfig("fp8_channel"), pre_quantized=True)


# ---- Quark and compressed-tensors


@raises("config", "Quark: no export section", ValueError, "export: expected an object")
def quark_export() -> Made:
    return lambda: QuarkConfig.from_config({"quant_method": "quark"})


def cache(layers: dict[str, Any]) -> dict[str, Any]:
    return dict(quant_method="quark", export=dict(kv_cache_group=["*k_proj", "*v_proj"]), layer_quant_config=layers)


@raises("config", "Quark: a KV cache group that no entry names", ValueError, "expected an entry for kv_cache_group")
def quark_cache_group() -> Made:
    return lambda: QuarkConfig.from_config(cache({"*o_proj": w8a8()}))


@raises("config", "Quark: outputs of keys and values without a spec", ValueError, "expected output_tensors in each")
def quark_cache_outputs() -> Made:
    found = cache({"*k_proj": w8a8(output_tensors=spec("fp8_e4m3")), "*v_proj": w8a8()})
    return lambda: QuarkConfig.from_config(found)


@raises("config", "Quark: outputs of keys and values that differ", ValueError, "expected the same output_tensors")
def quark_cache_differs() -> Made:
    outputs = spec("fp8_e4m3"), spec("int8")
    found = cache({f"*{n}_proj": w8a8(output_tensors=o) for n, o in zip("kv", outputs, strict=True)})
    return lambda: QuarkConfig.from_config(found)


@raises("config", "Quark: parts of a fused layer with different specs", ValueError, "one quantization for q_proj")
def quark_parts() -> Made:
    other = w8a8() | dict(weight=spec("fp8_e4m3", "per_channel", ch_axis=0))
    made = QuarkConfig.from_config(quark(global_quant_config=w8a8(), layer_quant_config={"*k_proj": other}), QKV)
    return lambda: Linear(64, [32, 32, 32], quant_config=made, prefix="a.qkv_proj")


@raises("config", "Quark: only some parts of a fused layer are excluded", ValueError, "all parts of the fused layer")
def quark_exclude() -> Made:
    made = QuarkConfig.from_config(quark(global_quant_config=w8a8(), exclude=["a.q_proj"]), QKV)
    return lambda: Linear(64, [32, 32, 32], quant_config=made, prefix="a.qkv_proj")


@raises(
    "config", "Quark: a linear layer with quantized outputs or bias", NotImplementedError, "quantized output_tensors"
)
def quark_outputs() -> Made:
    made = QuarkConfig.from_config(quark(global_quant_config=w8a8(output_tensors=spec("fp8_e4m3"))))
    return lambda: Linear(64, 32, quant_config=made, prefix="a.o_proj")


@raises("config", "Quark: a linear layer's specs that are no scheme", NotImplementedError, "weights of uint4")
def quark_scheme() -> Made:
    made = QuarkConfig.from_config(quark(global_quant_config=dict(weight=spec("uint4", "per_group"))))
    return lambda: Linear(64, 32, quant_config=made, prefix="a.o_proj")


@raises(
    "config", "Quark: experts with quantized outputs or biases", NotImplementedError, "no experts with quantized bias"
)
def quark_experts_bias() -> Made:
    made, layer = QuarkConfig.from_config(quark(global_quant_config=w8a8(bias=spec("int8")))), experts()
    return lambda: made.get_quant_method(layer, layer.prefix)


@raises("config", "Quark: experts' specs that are no scheme", RuntimeError, "no method for experts")
def quark_experts_scheme() -> Made:
    found = quark(global_quant_config=dict(weight=spec("fp8_e4m3"), input_tensors=spec("int8")))
    made, layer = QuarkConfig.from_config(found), experts()
    return lambda: made.get_quant_method(layer, layer.prefix)


@raises("config", "compressed-tensors: a group without targets", ValueError, "targets: expected names")
def compressed_targets() -> Made:
    group = dict(targets=[], weights=dict(num_bits=8, type="float", strategy="tensor"))
    return lambda: CompressedTensorsConfig.from_config(dict(config_groups=dict(group_0=group)))


@raises("config", "compressed-tensors: weights of an unknown kind", ValueError, "type: expected float or int")
def compressed_type() -> Made:
    group = dict(targets=["Linear"], weights=dict(num_bits=8, type="posit", strategy="tensor"))
    return lambda: CompressedTensorsConfig.from_config(dict(config_groups=dict(group_0=group)))


@raises("config", "Quark: a KV cache that is not FP8 per tensor", NotImplementedError, "got int8 per_channel")
def quark_cache() -> Made:
    outputs = spec("int8", "per_channel")
    made = QuarkConfig.from_config(cache({f"*{n}_proj": w8a8(output_tensors=outputs) for n in "kv"}))
    return lambda: made.get_quant_method(methods.Attention(2, 64), "a.attn")


@raises("config", "compressed-tensors: a KV cache that is not FP8 per tensor", NotImplementedError, "got num_bits 4")
def compressed_cache() -> Made:
    group = dict(targets=["Linear"], weights=dict(num_bits=8, type="float", strategy="tensor"))
    found = dict(config_groups=dict(group_0=group), kv_cache_scheme=dict(num_bits=4, type="float", strategy="tensor"))
    made = CompressedTensorsConfig.from_config(found)
    return lambda: made.get_quant_method(methods.Attention(2, 64), "a.attn")


# ---- methods, when they are made


@raises("create", "OCP MX: weights that are not per group", ValueError, "expected per_group, got 'per_channel'")
def ocp_qscheme() -> Made:
    return lambda: methods.QuarkOCP_MX_MoEMethod(spec(FP4, "per_channel"), None, config())


@raises("create", "OCP MX: MXFP6 weights with MXFP4 activations", ValueError, "do not go with mxfp4 activations")
def ocp_pair() -> Made:
    return lambda: methods.QuarkOCP_MX_MoEMethod(mx(FP6, False), mx(FP4), config())


@raises("create", "OCP MX: the two MXFP6 formats together", ValueError, "do not go with mxfp6_e2m3 activations")
def ocp_pair_of_sixes() -> Made:
    return lambda: methods.QuarkOCP_MX_MoEMethod(mx(FP6, False), mx(FP6B), config())


@raises("create", "OCP MX: activations of an unknown type", NotImplementedError, "expected one of fp4, .* got 'bf16'")
def ocp_activation() -> Made:
    return lambda: methods.QuarkOCP_MX_MoEMethod(mx(FP4, False), spec("bf16"), config())


@raises("create", "OCP MX: microscaled activations with static scales", NotImplementedError, "got static ones")
def ocp_static() -> Made:
    return lambda: methods.QuarkOCP_MX_MoEMethod(mx(FP4, False), mx(FP4, False), config())


@raises(
    "create", "Quark FP8 experts: weights per tensor, activations per token", ValueError, "got per_tensor and per_ch"
)
def quark_fp8_pair() -> Made:
    given = spec("fp8_e4m3"), spec("fp8_e4m3", "per_channel", True)
    return lambda: methods.QuarkW8A8Fp8MoEMethod(*given, config())


@raises("create", "Quark FP8 experts: static activations with weights per channel", ValueError, "expected dynamic")
def quark_fp8_static() -> Made:
    given = spec("fp8_e4m3", "per_channel"), spec("fp8_e4m3", "per_channel")
    return lambda: methods.QuarkW8A8Fp8MoEMethod(*given, config())


@raises("create", "Quark INT8 experts: weights per group", ValueError, "expected per_tensor or per_channel")
def quark_int8_group() -> Made:
    return lambda: methods.QuarkW8A8Int8MoEMethod(spec("int8", "per_group"), spec("int8"), config())


@raises("create", "Quark INT4 experts: an unknown order of codes", ValueError, "expected reorder or order, got 'col'")
def quark_int4_order() -> Made:
    return lambda: methods.QuarkW4A8Fp8MoEMethod([], spec("fp8_e4m3"), config(), pack_method="col")


@raises("create", "PTPC experts on a GPU without FP8 units", ValueError, "needs FP8 matrix units")
def ptpc_experts() -> Made:
    layer = experts()

    def act() -> None:
        with pretend("sm80"):
            methods.Fp8PtpcOnlineMoEMethod(layer=layer)

    return act


@raises("create", "PTPC linear layers on a GPU without FP8 units", ValueError, "needs FP8 matrix units")
def ptpc_linear() -> Made:
    method = methods.Fp8PtpcOnlineLinearMethod()

    def act() -> None:
        with pretend("sm80"), torch.device("cpu"):
            Linear(64, 32, quant_method=method, prefix="p")

    return act


@raises("create", "KV cache: e5m2 with scales from a checkpoint", ValueError, "expected an e4m3 cache")
def cache_e5m2() -> Made:
    method, layer = Fp8KVCacheMethod(None), methods.Attention(2, 64, kv_cache_dtype="fp8_e5m2")
    return lambda: method.create_weights(layer)


@raises("create", "KV cache: a format that fpk has not", NotImplementedError, "fpk has no nvfp4 caches")
def cache_format() -> Made:
    method, layer = Fp8KVCacheMethod(None), methods.Attention(2, 64, kv_cache_dtype="nvfp4")
    return lambda: method.create_weights(layer)
