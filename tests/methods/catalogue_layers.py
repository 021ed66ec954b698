"""Rows of the catalogue: layers, from their parameters to their products."""

from typing import Any

import torch
from catalogue import raises
from catalogue_configs import FP4, FP6, mx, spec
from linear_kit import random_weight, random_x
from moe_kit import E, H, I, config, done, layer_of, matrices, put, routed

from fpk import methods
from fpk.formats import E4M3FN, encode
from fpk.methods import Fp8Config, Linear, pre_processed_weights
from fpk.methods._families import LayerSpec
from fpk.methods.kv_cache import Fp8KVCacheMethod

Made = Any
NVFP4 = [spec(FP4, "per_group", group_size=16), spec("fp8_e4m3")]


def fp8(**fields: Any) -> Any:
    return lambda layer: methods.Fp8MoEMethod(Fp8Config(True, **fields), layer)


def ocp(weight: str, act: Any = None) -> Any:
    return lambda layer: methods.QuarkOCP_MX_MoEMethod(mx(weight, False), act, layer.moe_config)


def nvfp4(layer: Any) -> Any:
    return methods.QuarkNvfp4MoEMethod(NVFP4, NVFP4, layer.moe_config)


def int8(act: dict[str, Any]) -> Any:
    return lambda layer: methods.QuarkW8A8Int8MoEMethod(spec("int8"), act, layer.moe_config)


def linear(K: int = 64, widths: Any = (32,), **fields: Any) -> Linear:
    return Linear(K, list(widths), quant_method=methods.Fp8LinearMethod(Fp8Config(True, **fields)), prefix="p.linear")


def codes(n: int, k: int) -> torch.Tensor:
    return encode(random_weight(n, k) * 30, E4M3FN).view(torch.float8_e4m3fn)


def load(layer: Linear, *names: str, **values: Any) -> Linear:
    """Parameters of a linear layer through their loaders; the rest of `names` with what fits."""
    fit = dict(weight=codes(layer.output_size, layer.input_size), weight_scale=torch.tensor(0.01))
    for name in (*names, *values):
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, values.get(name, fit.get(name)))
    return layer


def filled(layer: Any, skip: tuple[str, ...] = ()) -> Any:
    """An expert layer with every parameter but `skip` loaded, all experts at once."""
    for name, parameter in list(layer.named_parameters()):
        if name in skip or not hasattr(parameter, "weight_loader"):
            continue
        raw = torch.full(parameter.shape, 0x38, dtype=torch.uint8)  # 1.0 in e4m3, scales 2^-71, any codes
        value = raw.view(parameter.dtype) if parameter.dtype.itemsize == 1 else torch.full_like(parameter, 0.01)
        put(layer, name, value)
    return layer


def unquantized(**fields: Any) -> Any:
    layer = layer_of(lambda layer: methods.UnquantizedFusedMoEMethod(layer.moe_config), **fields)
    for name, w in matrices().items():
        for e in range(E):
            put(layer, "w2_weight" if name == "w2" else "w13_weight", w[e].bfloat16(), name, e)
    return done(layer)


# ---- creating parameters


@raises(
    "create", "packed FP4 with an odd size (experts)", ValueError, "hidden_size: expected a multiple of 2 for mxfp4"
)
def odd_fp4() -> Made:
    return lambda: layer_of(ocp(FP4), moe=config(hidden_size=161))


@raises(
    "create", "packed FP6 with a size whose codes end inside a byte (experts)", ValueError, "multiple of 4 for mxfp6"
)
def odd_fp6() -> Made:
    return lambda: layer_of(ocp(FP6), moe=config(intermediate_size_per_partition=94))


@raises("create", "NVFP4 experts whose sizes are no multiple of 16", ValueError, "expected a multiple of 16, got 168")
def odd_nvfp4() -> Made:
    return lambda: layer_of(nvfp4, moe=config(hidden_size=168))


@raises("create", "INT4 experts whose sizes are no multiple of 8", ValueError, "multiple of 8 for packed INT4")
def odd_int4() -> Made:
    moe = config(hidden_size=164)
    return lambda: layer_of(lambda _: methods.QuarkW4A8Fp8MoEMethod([], spec("fp8_e4m3"), moe), moe=moe)


@raises("create", "packed codes with an odd K (serialized linear)", ValueError, "expected a multiple of 2 for mxfp4")
def odd_linear() -> Made:
    method = methods.SchemeLinearMethod(LayerSpec("mxfp4", "mxfp4"), "quark")
    return lambda: Linear(65, 32, quant_method=method, prefix="p.linear")


@raises("create", "packed codes with an odd K (online linear)", ValueError, "expected a multiple of 2 for mxfp4")
def odd_online_linear() -> Made:
    return lambda: Linear(65, 32, quant_method=methods.Mxfp4OnlineLinearMethod(), prefix="p.linear")


@raises("create", "packed codes with an odd size (online experts)", ValueError, "expected a multiple of 2 for nvfp4")
def odd_online_experts() -> Made:
    return lambda: layer_of(lambda layer: methods.Nvfp4OnlineMoEMethod(layer=layer), moe=config(hidden_size=161))


@raises("create", "ranks that share K inside a group of 32 (serialized linear)", ValueError, "multiple of 32 for mxfp8")
def group_of_ranks() -> Made:
    method = methods.SchemeLinearMethod(LayerSpec("mxfp8_e4m3", "mxfp8_e4m3"), "quark")
    return lambda: Linear(96, 32, quant_method=method, split="row", tp_size=2, prefix="p.linear")


@raises("create", "ranks that share K inside a group (online linear)", ValueError, "share K in groups of 32, got 48")
def group_of_online_ranks() -> Made:
    method = methods.Mxfp8OnlineLinearMethod()
    return lambda: Linear(96, 32, quant_method=method, split="row", tp_size=2, prefix="p.linear")


@raises(
    "create", "ranks that share I inside a group of 32 (experts)", ValueError, "multiple of 32 for mxfp4 shared by 2"
)
def group_of_expert_ranks() -> Made:
    moe = config(intermediate_size_per_partition=48, tp_size=2)
    return lambda: layer_of(ocp(FP4), moe=moe)


@raises("create", "sizes that the ranks do not divide", ValueError, "expected a multiple of 3 ranks, got 64")
def ranks_do_not_divide() -> Made:
    method = methods.Fp8PerTensorOnlineLinearMethod()
    return lambda: Linear(64, 32, quant_method=method, split="row", tp_size=3, prefix="p.linear")


@raises("create", "parameters in a dtype that is none of a model", ValueError, "params_dtype: expected one of")
def params_dtype() -> Made:
    return lambda: layer_of(fp8(), dtype=torch.int8)


# ---- loading


@raises("load", "an unknown shard id (linear)", ValueError, r"shard id out of 0\.\.1 .* got 'q'")
def shard_of_linear() -> Made:
    layer = linear(widths=(16, 16))
    return lambda: layer.weight.weight_loader(layer.weight, codes(16, 64), "q")


@raises("load", "an unknown shard id (experts)", ValueError, "shard id out of w1, w3, w13 or None, got 'w4'")
def shard_of_experts() -> Made:
    layer = layer_of(fp8())
    return lambda: put(layer, "w13_weight", codes(I, H), "w4", 0)


@raises("load", "a kind of scale that no loader knows", ValueError, "quant_method: expected one of .* got 'row'")
def kind_of_scale() -> Made:
    layer = layer_of(fp8())
    layer.w13_weight_scale.quant_method = "row"
    return lambda: put(layer, "w13_weight_scale", torch.tensor(1.0), "w1", 0)


@raises("load", "an expert that no rank has", ValueError, r"expected an expert id in 0\.\.3, got 4")
def number_of_expert() -> Made:
    layer = layer_of(fp8())
    return lambda: put(layer, "w13_weight", codes(I, H), "w1", E)


@raises("load", "a tensor of another shape", ValueError, r"p.linear.weight: expected \(32, 64\), got \(32, 63\)")
def shape_of_weight() -> Made:
    layer = linear()
    return lambda: load(layer, weight=codes(32, 63))


@raises("load", "unquantized values where codes belong", ValueError, "p.linear.weight: expected .*float8_e4m3fn")
def dtype_of_weight() -> Made:
    layer = linear()
    return lambda: load(layer, weight=random_weight(32, 64))


@raises("load", "several scales for one tensor", ValueError, r"weight_scale: expected \(\) or \(1,\), got \(2,\)")
def scales_of_tensor() -> Made:
    layer = linear()
    return lambda: load(layer, weight_scale=torch.ones(2))


@raises("load", "a grid of block scales that does not fit", ValueError, r"weight_scale_inv: expected \(1, 1\)")
def grid_of_blocks() -> Made:
    layer = linear(weight_block_size=[128, 128])
    return lambda: load(layer, weight_scale_inv=torch.ones(2, 1))


@raises("load", "KV cache: several scales", ValueError, r"k_scale: expected \(\) or \(1,\), got \(2,\)")
def scales_of_cache() -> Made:
    layer = methods.Attention(2, 64, kv_cache_dtype="fp8")
    Fp8KVCacheMethod(None).create_weights(layer)
    return lambda: layer.k_scale.weight_loader(layer.k_scale, torch.ones(2))


# ---- processing what was loaded


def processing(layer: Any) -> Made:
    return lambda: layer.quant_method.process_weights_after_loading(layer)


@raises("process", "weights that never came (linear)", ValueError, "p.linear.weight: expected")
def no_weights() -> Made:
    return processing(load(linear(), "weight_scale"))


@raises("process", "weights of some shards that never came (linear)", ValueError, r"shards \[1\] were never loaded")
def some_weights() -> Made:
    layer = load(linear(widths=(16, 16)), "weight_scale")
    layer.weight.weight_loader(layer.weight, codes(16, 64), 0)
    return processing(layer)


@raises("process", "an unquantized weight of which a part came (online)", ValueError, "expected 2048 elements")
def some_elements() -> Made:
    layer = Linear(64, [16, 16], quant_method=methods.Fp8PerTensorOnlineLinearMethod(), prefix="p.linear")
    layer.weight.weight_loader(layer.weight, random_weight(16, 64), 0)
    return processing(layer)


@raises("process", "weights of an expert that never came", ValueError, "expert 3 w3")
def no_expert() -> Made:
    layer = filled(layer_of(fp8()), skip=("w13_weight",))
    for e in range(E):
        for shard in ("w1", "w3")[: 1 if e == E - 1 else 2]:
            put(layer, "w13_weight", codes(I, H), shard, e)
    return processing(layer)


@raises("process", "no scale of the weights", ValueError, "weight_scale: .*missing from the checkpoint")
def no_scale() -> Made:
    return processing(load(linear(), "weight"))


@raises("process", "no scale of some shard", ValueError, "weight_scale: 1 of 2 scales are missing|shards? .*1")
def no_scale_of_shard() -> Made:
    layer = load(linear(widths=(16, 16)), "weight")
    layer.weight_scale.weight_loader(layer.weight_scale, torch.tensor(0.01), 0)
    return processing(layer)


@raises("process", "a scale of zero", ValueError, "weight_scale: expected finite positive")
def zero_scale() -> Made:
    return processing(load(linear(), "weight", weight_scale=torch.tensor(0.0)))


@raises("process", "a negative scale", ValueError, "weight_scale_inv: expected finite positive")
def negative_scale() -> Made:
    return processing(load(linear(weight_block_size=[128, 128]), "weight", weight_scale_inv=-torch.ones(1, 1)))


@raises("process", "a scale that is NaN", ValueError, "input_scale: expected finite positive")
def nan_scale() -> Made:
    layer = linear(activation_scheme="static")
    return processing(load(layer, "weight", "weight_scale", input_scale=torch.tensor(float("nan"))))


@raises("process", "static INT8 experts without input scales", ValueError, "w13_input_scale: 4 of 4 scales are missing")
def int8_inputs() -> Made:
    return processing(filled(layer_of(int8(spec("int8"))), skip=("w13_input_scale",)))


@raises("process", "INT8 zero points of activations that are dynamic", ValueError, "expected zeros with dynamic")
def int8_zero_points() -> Made:
    layer = filled(layer_of(int8(spec("int8", "per_channel", True))), skip=("w13_input_zero_point",))
    put(layer, "w13_input_zero_point", torch.ones(E, 2, dtype=torch.int8))
    return processing(layer)


@raises("process", "NVFP4 experts without scales of the activations", ValueError, "w2_input_scale_2: 4 of 4 scales")
def nvfp4_inputs() -> Made:
    return processing(filled(layer_of(nvfp4), skip=("w2_input_scale_2",)))


@raises("process", "microscaled experts without scales", ValueError, "w2_weight_scale: .* NaN or missing")
def mx_scales() -> Made:
    return processing(filled(layer_of(ocp(FP4)), skip=("w2_weight_scale",)))


@raises(
    "process", "an unquantized weight without a finite value for its scale (online)", ValueError, "weight_scale: exp"
)
def no_finite_value() -> Made:
    layer = Linear(64, 32, quant_method=methods.Fp8PerTensorOnlineLinearMethod(), prefix="p.linear")
    weight = torch.full((32, 64), float("inf"), dtype=torch.bfloat16)
    return lambda: layer.weight.weight_loader(layer.weight, weight)  # complete: processed as it arrives


@raises("process", "a second load that brings only some parameters", ValueError, "expected it to be loaded again with")
def half_a_reload() -> Made:
    layer = load(linear(), "weight", "weight_scale")
    layer.quant_method.process_weights_after_loading(layer)
    return processing(load(layer, "weight"))


@raises("process", "pre-processed weights for a method that has no such form", RuntimeError, "pre-processed weights")
def no_pre_processed() -> Made:
    class Method(methods.Fp8LinearMethod):
        supports_pre_processed_weights = False

    layer = Linear(64, 32, quant_method=Method(Fp8Config(True)), prefix="p.linear")

    def act() -> None:
        with pre_processed_weights():
            layer.quant_method.process_weights_after_loading(layer)

    return act


def cache_of(**scales: float) -> Made:
    layer, method = methods.Attention(2, 64, kv_cache_dtype="fp8", prefix="p.attn"), Fp8KVCacheMethod(None)
    method.create_weights(layer)
    for name, value in scales.items():
        parameter = layer.get_parameter(name)
        parameter.weight_loader(parameter, torch.tensor(value))
    return lambda: method.process_weights_after_loading(layer)


@raises("process", "KV cache: v_scale without k_scale", ValueError, "k_scale: missing from the checkpoint")
def cache_v_alone() -> Made:
    return cache_of(v_scale=0.5)


@raises("process", "KV cache: a scale of zero", ValueError, "v_scale: expected a finite positive scale, got 0")
def cache_zero() -> Made:
    return cache_of(k_scale=0.5, v_scale=0.0)


# ---- products


@raises("apply", "an activation that no kernel has", ValueError, "activation: expected one of .* got 'swish2'")
def activation() -> Made:
    layer = unquantized(activation="swish2")
    return lambda: layer.quant_method.apply(layer, random_x(3, H), *routed(3))


@raises(
    "apply",
    "router weights on the input with more than one expert a token",
    ValueError,
    "expected False with top_k > 1",
)
def weights_on_input() -> Made:
    layer = unquantized(apply_router_weight_on_input=True)
    return lambda: layer.quant_method.apply(layer, random_x(3, H), *routed(3))


@raises("apply", "x of another dtype", ValueError, "p.linear.x: expected .*bfloat16 .*float32")
def dtype_of_x() -> Made:
    layer = load(linear(), "weight", "weight_scale")
    layer.quant_method.process_weights_after_loading(layer)
    return lambda: layer(random_x(3, 64).float())


@raises("apply", "x of another K", ValueError, r"p.linear.x: expected \(..., 64\), got \(3, 60\)")
def size_of_x() -> Made:
    layer = load(linear(), "weight", "weight_scale")
    layer.quant_method.process_weights_after_loading(layer)
    return lambda: layer(random_x(3, 60))


@raises("apply", "experts' x of another H", ValueError, rf"x: expected \(T, {H}\), got \(3, 64\)")
def size_of_tokens() -> Made:
    layer = unquantized()
    return lambda: layer.quant_method.apply(layer, random_x(3, 64), *routed(3))


@raises("apply", "a tensor that needs a gradient", ValueError, "forward only")
def gradient() -> Made:
    layer = load(linear(), "weight", "weight_scale")
    layer.quant_method.process_weights_after_loading(layer)
    x = random_x(3, 64).requires_grad_()

    def act() -> None:
        with torch.enable_grad():
            layer(x)

    return act


@raises("apply", "a KV cache applied to anything", RuntimeError, "a KV cache multiplies nothing")
def cache_applied() -> Made:
    layer, method = methods.Attention(2, 64, kv_cache_dtype="fp8"), Fp8KVCacheMethod(None)
    method.create_weights(layer)
    return lambda: method.apply(layer)
