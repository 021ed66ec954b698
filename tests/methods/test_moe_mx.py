"""Packed experts: OCP MX pairs, gpt-oss, NVFP4: parameters, loading, ranks, refusals."""

import pytest
import torch
from linear_kit import random_x
from moe_kit import E, config, done, expected, layer_of, matrices, put, routed

import fpk
from fpk.check import bits, rel_error
from fpk.methods import Mxfp4MoEMethod, Nvfp4ExpertsMethod, QuarkNvfp4MoEMethod, QuarkOCP_MX_MoEMethod
from fpk.methods.mx_moe import PAIRS

pytestmark = pytest.mark.usefixtures("references")

H, I = 160, 96
DTYPES = {"mxfp4": "fp4", "mxfp6_e3m2": "fp6_e3m2", "mxfp6_e2m3": "fp6_e2m3", "mxfp8_e4m3": "fp8_e4m3"}


def spec(scheme, dynamic=True):
    """Quark's spec of a scheme."""
    if scheme == "none":
        return None
    if scheme.startswith("fp8"):
        return dict(dtype="fp8_e4m3", qscheme="per_tensor", is_dynamic=scheme == "fp8_token")
    return dict(dtype=DTYPES[scheme], qscheme="per_group", group_size=32, scale_format="e8m0", is_dynamic=dynamic)


def ocp(weight, act="none"):
    return lambda layer: QuarkOCP_MX_MoEMethod(spec(weight, False), spec(act), layer.moe_config)


def mx_checkpoint(scheme, inter=I, hidden=H, seed=0):
    """Packed codes, scales, values of each expert's w1, w3, w2."""
    made = {}
    for name, w in matrices(seed, hidden=hidden, inter=inter).items():
        q = fpk.quantize(w, scheme)
        made[name] = (q.codes, q.scale, q.dequantize(), q.global_scale)
    return made


def load_mx(layer, made):
    for name, (codes, scale, *_) in made.items():
        matrix = "w2" if name == "w2" else "w13"
        for e in range(E):
            put(layer, f"{matrix}_weight", codes[e], name, e)
            put(layer, f"{matrix}_weight_scale", scale[e], name, e)
    return layer


@pytest.mark.parametrize("weight", DTYPES)
def test_ocp_mx_parameters_and_values(weight):
    layer = layer_of(ocp(weight), moe=config(has_bias=True))
    bits_of = {"fp4": 4, "fp6_e3m2": 6, "fp6_e2m3": 6, "fp8_e4m3": 8}[DTYPES[weight]]
    assert layer.w13_weight.shape == (E, 2 * I, H * bits_of // 8) and layer.w2_weight_scale.shape == (E, H, I // 32)
    assert layer.w13_weight_scale.dtype is torch.uint8 and layer.w13_bias.dtype is torch.float32
    made = mx_checkpoint(weight)
    done(load_mx(layer, made))
    w13, w2 = layer.quant_method.dequantize(layer)
    assert torch.equal(w13, torch.cat([made["w1"][2], made["w3"][2]], 1)) and torch.equal(w2, made["w2"][2])


@pytest.mark.parametrize("pays", (False, True), ids=("plain", "shuffled"))
@pytest.mark.parametrize("pair", [(w, a) for w, acts in PAIRS.items() for a in acts], ids=":".join)
def test_every_ocp_mx_pair(pair, pays, monkeypatch):
    """The ecosystem's eleven schemes, and what engines refuse: fp6 weights alone or with FP8, dynamic FP8, MXFP8. On a
    GPU with and without kernels for shuffled weights."""
    monkeypatch.setattr("fpk.methods.mx_moe.shuffle_pays", lambda device: pays)
    weight, act = pair
    layer, made = layer_of(ocp(weight, act)), mx_checkpoint(weight)
    load_mx(layer, made)
    fakes = [lambda v: v.float() if act == "none" else fpk.quantize(v.contiguous(), act).dequantize()] * 2
    if act == "fp8_tensor":
        for i, name in enumerate(("w1", "w3", "w2")):
            for e in range(E):
                put(layer, f"{'w2' if name == 'w2' else 'w13'}_input_scale", torch.tensor(0.01 * (i + 1)), name, e)
        fakes = [static(0.02), static(0.03)]
    done(layer)
    x, (weights, ids) = random_x(5, H), routed(5)
    out = layer.quant_method.apply(layer, x, weights, ids)
    assert rel_error(out, expected(x, weights, ids, *layer.quant_method.dequantize(layer), *fakes)) < 0.008
    told = "fp8_tensor_static" if act == "fp8_tensor" else act
    assert layer.quant_method.scheme(layer) == f"{weight}:{told}"


def static(scale):
    return lambda v: fpk.quantize(v.contiguous(), "fp8_tensor", scale=scale).dequantize()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    (
        ((dict(dtype="fp4", qscheme="per_channel"), None), ValueError, "expected per_group, got 'per_channel'"),
        ((spec("mxfp6_e3m2"), spec("mxfp4")), ValueError, "mxfp6_e3m2 weights do not go with mxfp4 activations"),
        ((spec("mxfp6_e3m2"), spec("mxfp6_e2m3")), ValueError, "do not go with mxfp6_e2m3"),
        ((dict(dtype="int4", qscheme="per_group"), None), ValueError, "int4 weights do not go with none"),
        ((spec("mxfp4") | dict(group_size=16), None), ValueError, "do not go with"),
        ((spec("mxfp4"), dict(dtype="bf16")), NotImplementedError, "expected one of fp4, .* got 'bf16'"),
        ((spec("mxfp4"), spec("mxfp4", False)), NotImplementedError, "follow the data, got static ones"),
    ),
)
def test_ocp_mx_refusals(arguments, error, message):
    with pytest.raises(error, match=message):
        QuarkOCP_MX_MoEMethod(*arguments, config())


def test_sizes_that_do_not_pack():
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of 2 for mxfp4, got 161"):
        layer_of(ocp("mxfp4"), moe=config(hidden_size=161))
    with pytest.raises(ValueError, match="intermediate_size_per_partition: expected a multiple of 4 for mxfp6_e3m2"):
        layer_of(ocp("mxfp6_e3m2"), moe=config(intermediate_size_per_partition=94))
    with pytest.raises(ValueError, match="hidden_size: expected a multiple of 16, got 168"):
        layer_of(nvfp4, moe=config(hidden_size=168))


def test_scales_that_never_came_are_named():
    layer, made = layer_of(ocp("mxfp4")), mx_checkpoint("mxfp4")
    for name, (codes, scale, *_) in made.items():
        for e in range(E):
            put(layer, f"{'w2' if name == 'w2' else 'w13'}_weight", codes[e], name, e)
            if (name, e) != ("w3", 2):
                put(layer, f"{'w2' if name == 'w2' else 'w13'}_weight_scale", scale[e], name, e)
    with pytest.raises(ValueError, match=r"w13_weight_scale: 480 of 3840 scales are NaN or missing .* experts 2"):
        done(layer)
    layer = layer_of(ocp("mxfp4"))
    for e in range(E):
        put(layer, "w13_weight", made["w1"][0][e], "w1", e)
    with pytest.raises(ValueError, match=r"shards \[expert 0 w3, expert 1 w3"):
        load = {n: v for n, v in made.items() if n == "w2"}
        for name in ("w1", "w3"):
            for e in range(E):
                put(layer, "w13_weight_scale", made[name][1][e], name, e)
        done(load_mx(layer, load))


@pytest.mark.parametrize(("scheme", "inter", "ranks"), (("mxfp4", 192, 2), ("mxfp6_e2m3", 160, 2), ("mxfp4", 224, 3)))
def test_ranks_share_whole_groups(scheme, inter, ranks):
    """160 / 2: 96 and 64; 224 / 3: 96, 96 and 32. The rest of the last rank is zeros."""
    part = -(-inter // 32 // ranks) * 32
    made = mx_checkpoint(scheme, inter)
    whole = done(load_mx(layer_of(ocp(scheme), moe=config(intermediate_size_per_partition=inter)), made))
    w13, w2 = whole.quant_method.dequantize(whole)
    for rank in range(ranks):
        moe = config(intermediate_size_per_partition=part, tp_size=ranks, tp_rank=rank)
        layer = done(load_mx(layer_of(ocp(scheme), moe=moe), made))
        b13, b2 = layer.quant_method.dequantize(layer)
        n = min(part, inter - rank * part)
        rows = slice(rank * part, rank * part + n)
        assert torch.equal(b13[:, :n], w13[:, :inter][:, rows]) and torch.equal(b2[:, :, :n], w2[:, :, rows])
        assert torch.equal(b13[:, part : part + n], w13[:, inter:][:, rows])
        assert not b13[:, n:part].any() and not b2[:, :, n:].any()


@pytest.mark.parametrize("ranks", (1, 2))
def test_gptoss_layout(ranks):
    """Rows alternate, blocks are a dimension, all experts are one tensor; ranks cut pairs of rows."""
    inter = 192
    made = mx_checkpoint("mxfp4", inter)
    codes = torch.stack([made["w1"][0], made["w3"][0]], 2).flatten(1, 2)
    scales = torch.stack([made["w1"][1], made["w3"][1]], 2).flatten(1, 2)
    for rank in range(ranks):
        part = inter // ranks
        moe = config(intermediate_size_per_partition=part, tp_size=ranks, tp_rank=rank, has_bias=True)
        layer = layer_of(lambda layer, moe=moe: Mxfp4MoEMethod(moe), moe=moe, activation="swigluoai", swiglu_limit=7.0)
        put(layer, "w13_weight", codes.unflatten(-1, (-1, 16)))
        put(layer, "w13_weight_scale", scales)
        put(layer, "w2_weight", made["w2"][0].unflatten(-1, (-1, 16)))
        put(layer, "w2_weight_scale", made["w2"][1])
        put(layer, "w2_bias", torch.ones(E, H, dtype=torch.bfloat16))
        done(layer)
        rows = slice(rank * part, (rank + 1) * part)
        w13, w2 = layer.quant_method.dequantize(layer)
        assert torch.equal(w13[:, 0::2], made["w1"][2][:, rows]) and torch.equal(w13[:, 1::2], made["w3"][2][:, rows])
        assert torch.equal(w2, made["w2"][2][:, :, rows])
        assert layer.w2_bias.sum() == (E * H if rank == 0 else 0)
        x, (weights, ids) = random_x(4, H), routed(4)
        out = layer.quant_method.apply(layer, x, weights, ids)
        halves = torch.cat([w13[:, 0::2], w13[:, 1::2]], 1)
        want = expected(x, weights, ids, halves, w2, bias2=layer.w2_bias, activate=swigluoai)
        assert rel_error(out, want) < 0.008


@pytest.mark.parametrize("weight", ("mxfp4", "mxfp6_e3m2", "nvfp4"))
def test_shuffled_once_processed(weight, monkeypatch):
    """Where that pays: the same values, the same storage after a second load, fp16 tokens all the same."""
    make = (lambda layer: Nvfp4ExpertsMethod(layer.moe_config, "none")) if weight == "nvfp4" else ocp(weight)

    def load(layer, seed):
        made = mx_checkpoint(weight, seed=seed)
        load_mx(layer, made)
        for name in made if weight == "nvfp4" else ():
            for e in range(E):
                put(layer, f"{'w2' if name == 'w2' else 'w13'}_weight_scale_2", made[name][3][e].reshape(()), name, e)
        return done(layer)

    plain = load(layer_of(make), 0)
    monkeypatch.setattr("fpk.methods.mx_moe.shuffle_pays", lambda device: True)
    layer = load(layer_of(make), 1)
    where = [p.data_ptr() for p in (layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale)]
    load(layer, 0)
    assert where == [
        p.data_ptr() for p in (layer.w13_weight, layer.w2_weight, layer.w13_weight_scale, layer.w2_weight_scale)
    ]
    assert layer.w13_weight.shape[2] == 256 and layer.w2_weight_scale.shape == (E, H, 1)
    assert layer.quant_method.scheme(layer) == f"{weight}:none" == plain.quant_method.scheme(plain)
    for ours, theirs in zip(layer.quant_method.dequantize(layer), plain.quant_method.dequantize(plain), strict=True):
        assert torch.equal(ours, theirs)
    x, (weights, ids) = random_x(4, H), routed(4)
    for tokens in (x, x.half()):
        outs = [one.quant_method.apply(one, tokens, weights, ids) for one in (layer, plain)]
        assert rel_error(*outs) < 0.006


def swigluoai(gate, up):
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def nvfp4(layer):
    specs = [dict(dtype="fp4", qscheme="per_group", group_size=16), dict(dtype="fp8_e4m3", qscheme="per_tensor")]
    return QuarkNvfp4MoEMethod(specs, specs, layer.moe_config, None)


def load_nvfp4(layer, made):
    load_mx(layer, made)
    for i, (name, (*_, second)) in enumerate(made.items()):
        matrix = "w2" if name == "w2" else "w13"
        for e in range(E):
            put(layer, f"{matrix}_weight_scale_2", second[e].reshape(()), name, e)
            put(layer, f"{matrix}_input_scale_2", torch.tensor(0.001 * (1 + i + e)), name, e)
    return done(layer)


def test_nvfp4_keeps_the_second_scales_of_gate_and_up():
    layer = layer_of(nvfp4)
    assert layer.w13_weight_scale_2.shape == layer.w13_input_scale_2.shape == (E, 2)
    assert layer.w2_input_scale_2.shape == (E,) and layer.w13_weight_scale.dtype is torch.float8_e4m3fn
    made = mx_checkpoint("nvfp4")
    load_nvfp4(layer, made)
    assert not torch.equal(layer.w13_weight_scale_2[:, 0], layer.w13_weight_scale_2[:, 1])
    w13, w2 = layer.quant_method.dequantize(layer)
    assert torch.equal(w13, torch.cat([made["w1"][2], made["w3"][2]], 1)) and torch.equal(w2, made["w2"][2])
    torch.testing.assert_close(layer.w13_input_scale_2[1], torch.tensor([0.002, 0.003], device=w2.device))
    each = torch.arange(E, device=w2.device).view(E, 1, 1) / 1000
    torch.testing.assert_close(layer.w13_static_scale, 0.002 + each)
    x, (weights, ids) = random_x(5, H), routed(5)

    def fake(scale):
        given = torch.tensor([[scale]], device=x.device)
        return lambda v: fpk.quantize(v.contiguous(), "nvfp4", global_scale=given).dequantize()

    out = layer.quant_method.apply(layer, x, weights, ids)
    fakes = [(fake(0.002 + e / 1000), fake(0.003 + e / 1000)) for e in range(E)]
    want = sum(expected(x, weights * (ids == e), ids, w13, w2, *fakes[e]).float() for e in range(E))
    assert rel_error(out, want) < 0.008 and layer.quant_method.scheme(layer) == "nvfp4:nvfp4_static"


def test_nvfp4_experts_that_are_not_gated():
    """One matrix instead of gate and up, one second scale an expert."""
    layer = layer_of(nvfp4, moe=config(is_act_and_mul=False), activation="relu2_no_mul")
    made = {n: v for n, v in mx_checkpoint("nvfp4").items() if n != "w3"}
    assert layer.w13_weight.shape == (E, I, H // 2) and layer.w13_weight_scale_2.shape == (E, 1)
    load_nvfp4(layer, made)
    w13, w2 = layer.quant_method.dequantize(layer)
    assert torch.equal(w13, made["w1"][2]) and torch.equal(w2, made["w2"][2])
    x, (weights, ids) = random_x(5, H), routed(5)
    want = torch.zeros(5, H, device=x.device)
    for e in range(E):
        fakes = [fixed_nvfp4(0.001 * (1 + e)), fixed_nvfp4(0.001 * (2 + e))]
        hidden = (fakes[0](x) @ w13[e].T).to(x.dtype).float().relu().square().to(x.dtype)
        y = (fakes[1](hidden) @ w2[e].T).to(x.dtype).float()
        want += y * (weights * (ids == e)).sum(1, keepdim=True)
    assert rel_error(layer.quant_method.apply(layer, x, weights, ids), want) < 0.008


def fixed_nvfp4(scale):
    return lambda v: fpk.quantize(v.contiguous(), "nvfp4", global_scale=torch.full((1, 1), scale)).dequantize()


@pytest.mark.parametrize("family", ("modelopt", "compressed-tensors"))
def test_nvfp4_by_other_names(family):
    """compressed-tensors' second scales divide; the layer is the same."""
    divides = family == "compressed-tensors"

    def make(layer):
        method = Nvfp4ExpertsMethod(layer.moe_config)
        method.use_names(family)
        return method

    layer, made = layer_of(make), mx_checkpoint("nvfp4")
    code, over, given = ("weight_packed", "weight_global_scale", "input_global_scale") if divides else (
        "weight", "weight_scale_2", "input_scale"
    )  # fmt: skip
    for i, (name, (codes, scale, _, second)) in enumerate(made.items()):
        stem = "w2" if name == "w2" else "w13"
        for e in range(E):
            put(layer, f"{stem}_{code}", codes[e], name, e)
            put(layer, f"{stem}_weight_scale", scale[e], name, e)
            one, two = second[e].reshape(()), torch.tensor(0.001 * (1 + i + e))
            put(layer, f"{stem}_{over}", 1 / one if divides else one, name, e)
            put(layer, f"{stem}_{given}", 1 / two if divides else two, name, e)
    done(layer)
    other = load_nvfp4(layer_of(nvfp4), made)
    for ours, theirs in zip(layer.quant_method.dequantize(layer), other.quant_method.dequantize(other), strict=True):
        assert rel_error(ours, theirs) < 1e-6
    x, (weights, ids) = random_x(4, H), routed(4)
    outs = [a.quant_method.apply(a, x, weights, ids) for a in (layer, other)]
    assert rel_error(*outs) < 0.01


@pytest.mark.parametrize("kind", ("mxfp4", "mxfp8_e4m3", "nvfp4"))
def test_second_load_in_place(kind):
    def fresh(seed, layer=None):
        layer = layer or layer_of(nvfp4 if kind == "nvfp4" else ocp(kind))
        made = mx_checkpoint(kind, seed=seed)
        return load_nvfp4(layer, made) if kind == "nvfp4" else done(load_mx(layer, made))

    layer = fresh(0)
    pointers = {n: t.data_ptr() for n, t in [*layer.named_parameters(), *layer.named_buffers()]}
    fresh(60, layer)
    assert pointers == {n: t.data_ptr() for n, t in [*layer.named_parameters(), *layer.named_buffers()]}
    other = fresh(60)
    for name, parameter in other.named_parameters():
        assert torch.equal(bits(parameter), bits(layer.get_parameter(name)))
    layer.to(torch.float16)  # casting a model leaves codes and scales
    for name, parameter in other.named_parameters():
        assert layer.get_parameter(name).dtype is parameter.dtype
    if kind == "nvfp4":
        assert layer.w13_global_scale.dtype is torch.float32
