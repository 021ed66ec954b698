"""Online methods of expert layers: streaming, numbers, ranks, padding, loading again."""

import pytest
import torch
import torch.nn.functional as F
from linear_kit import DEVICE, Ranks, random_x
from moe_kit import E, H, I, config, done, expected, layer_of, matrices, put, routed

import fpk
from fpk import methods
from fpk.check import assert_close, bits, rel_error
from fpk.device import pretend
from fpk.methods import load_dummy_weights, pre_processed_weights

pytestmark = pytest.mark.usefixtures("references")

METHODS = {
    "Fp8PerTensorOnlineMoEMethod": ("fp8_tensor", "fp8_token"),
    "Fp8PtpcOnlineMoEMethod": ("fp8_channel", "fp8_token"),
    "Fp8PerBlockOnlineMoEMethod": ("fp8_block128", "fp8_group128"),
    "Int8PtpcOnlineMoEMethod": ("int8_channel", "int8_token"),
    "Int8WeightOnlyOnlineMoEMethod": ("int8_channel", "none"),
    "Mxfp8OnlineMoEMethod": ("mxfp8_e4m3", "mxfp8_e4m3"),
    "Mxfp4OnlineMoEMethod": ("mxfp4", "none"),
    "Nvfp4OnlineMoEMethod": ("nvfp4", "none"),
}
EVERY = [*METHODS]


def online(name, **more):
    return layer_of(lambda layer: getattr(methods, name)(layer=layer), **more)


def load(layer, w, names=("w1", "w3", "w2")):
    for name in names:
        for e in range(w[name].shape[0]):
            put(layer, f"{'w2' if name == 'w2' else 'w13'}_weight", w[name][e].bfloat16(), name, e)
    return done(layer)


def rounded(x, scheme):
    return fpk.quantize(x.contiguous(), scheme).dequantize() if scheme != "none" else x.float()


def padded(w, gate_up):
    """Gate and up begin at blocks: to 128 rows each, as the method holds them."""
    return torch.cat([F.pad(p, (0, -p.shape[2] % 128, 0, -p.shape[1] % 128)) for p in w], 1) if gate_up else w


@pytest.mark.parametrize("name", EVERY)
def test_numbers(name):
    """Weights are what fpk.quantize gives each expert, gate and up together."""
    weight, act = METHODS[name]
    layer, w = online(name, moe=config(has_bias=True)), matrices()
    assert layer.w13_weight.is_meta and layer.quant_method.uses_meta_device
    bias = torch.randn(E, H, device=DEVICE)
    put(layer, "w2_bias", bias)
    load(layer, w)
    assert not layer.w13_weight.is_meta and layer.w13_input_scale is None
    x, (weights, ids) = random_x(5, H), routed(5)
    out = layer.quant_method.apply(layer, x, weights, ids)
    plain = {n: v.bfloat16().float() for n, v in w.items()}
    if weight == "fp8_block128":
        w13 = rounded(padded([plain["w1"], plain["w3"]], True), weight)
        w13 = torch.cat([w13[:, :I, :H], w13[:, 128 : 128 + I, :H]], 1)
    else:
        w13 = rounded(torch.cat([plain["w1"], plain["w3"]], 1), weight)
    w2 = rounded(plain["w2"], weight)
    ours13, ours2 = layer.quant_method.dequantize(layer)
    if weight != "fp8_block128":
        assert_close(ours13, w13, 0.0), assert_close(ours2, w2, 0.0)
    want = expected(x, weights, ids, w13, w2, lambda v: rounded(v, act), bias2=bias.bfloat16())
    assert rel_error(out, want) < 0.008
    assert layer.quant_method.scheme(layer) == f"{weight}:{act}"


def test_parameters_carry_the_names_of_checkpoints():
    layer = load(online("Fp8PerTensorOnlineMoEMethod"), matrices())
    assert layer.w13_weight_scale.shape == (E,) and layer.w2_weight_scale.shape == (E,)
    layer = load(online("Fp8PtpcOnlineMoEMethod"), matrices())
    assert layer.w13_weight_scale.shape == (E, 2 * I, 1) and layer.w2_weight_scale.shape == (E, H, 1)
    layer = load(online("Nvfp4OnlineMoEMethod"), matrices())
    assert layer.w13_weight.shape == (E, 2 * I, H // 2) and layer.w13_weight_scale_2.shape == (E,)


def test_blocks_are_padded():
    """160 x 96 is held as 256 x 128; padding is zeros and changes nothing."""
    layer = online("Fp8PerBlockOnlineMoEMethod")
    assert layer.quant_method.maybe_roundup_sizes(H, I, torch.bfloat16, None) == (256, 128)
    load(layer, matrices())
    assert layer.w13_weight.shape == (E, 256, 256) and layer.w13_weight_scale_inv.shape == (E, 2, 2)
    w13, w2 = layer.quant_method.dequantize(layer)
    assert not w13[:, I:128].any() and not w13[:, :, H:].any() and not w2[:, H:].any() and not w2[:, :, I:].any()
    x, (weights, ids) = random_x(5, H), routed(5)
    out = layer.quant_method.apply(layer, x, weights, ids)
    assert out.shape == (5, H)
    assert torch.equal(out, layer.quant_method.apply(layer, F.pad(x, (0, 256 - H)), weights, ids)[:, :H])


@pytest.mark.parametrize("name", EVERY)
def test_ranks_hold_slices_of_one_device(name):
    inter, ranks = 256, 2
    w, whole = matrices(inter=inter), online(name, moe=config(intermediate_size_per_partition=inter))
    load(whole, w)

    def rank(r):
        layer = online(name, moe=config(intermediate_size_per_partition=inter // ranks, tp_size=ranks, tp_rank=r))
        return load(layer, w)

    for r, layer in enumerate(Ranks(ranks).run(rank)):
        (a13, a2), (b13, b2) = whole.quant_method.dequantize(whole), layer.quant_method.dequantize(layer)
        rows, half = slice(r * inter // ranks, (r + 1) * inter // ranks), inter
        a13 = torch.cat([a13[:, :half][:, rows], a13[:, half:][:, rows]], 1)
        assert torch.equal(bits(a13), bits(b13)) and torch.equal(bits(a2[:, :, rows]), bits(b2))


@pytest.mark.parametrize("name", EVERY)
def test_loading_again_keeps_storages(name):
    layer = load(online(name), matrices())
    pointers = {n: p.data_ptr() for n, p in layer.named_parameters()}
    load(layer, matrices(seed=30))
    assert pointers == {n: p.data_ptr() for n, p in layer.named_parameters()}
    fresh = load(online(name), matrices(seed=30))
    for n, p in fresh.named_parameters():
        assert torch.equal(bits(p), bits(layer.get_parameter(n)))
    w = matrices(seed=31)
    put(layer, "w13_weight", w["w1"][0].bfloat16(), "w1", 0)
    with pytest.raises(ValueError, match=r"p.experts.w13_weight: expected \d+ elements to be loaded, got"):
        done(layer)


def test_incomplete_and_impossible_weights_are_named(on_cpu):
    layer = online("Fp8PtpcOnlineMoEMethod")
    with pytest.raises(ValueError, match=r"p.experts.w13_weight: expected .* elements to be loaded, got"):
        load(layer, matrices(), names=("w1", "w2"))
    layer = online("Fp8PtpcOnlineMoEMethod")
    w = matrices()
    w["w2"][1] = torch.inf
    with pytest.raises(ValueError, match=r"p\.experts\.w2_weight_scale: expected finite positive scales"):
        load(layer, w)
    with pretend("sm80"), pytest.raises(ValueError, match="Fp8PtpcOnlineMoEMethod quantizes activations"):
        online("Fp8PtpcOnlineMoEMethod")
    with pretend("sm80"):
        layer = load(online("Fp8PerTensorOnlineMoEMethod"), matrices())
        assert layer.quant_method.scheme(layer) == "fp8_tensor:none"


@pytest.mark.parametrize("name", EVERY)
def test_zero_experts(name):
    w = matrices()
    w = {n: v * (torch.arange(E, device=v.device) != 1).view(-1, 1, 1) for n, v in w.items()}
    layer = load(online(name), w)
    w13, w2 = layer.quant_method.dequantize(layer)
    assert not w13[1].any() and not w2[1].any()
    x, (weights, ids) = random_x(3, H), routed(3)
    assert layer.quant_method.apply(layer, x, weights, ids).isfinite().all()


def test_dummy_and_pre_processed_weights():
    layer = online("Fp8PerTensorOnlineMoEMethod")
    assert load_dummy_weights(torch.nn.ModuleList([layer])) == 1
    assert layer.w13_weight.dtype is torch.float8_e4m3fn
    with pre_processed_weights(), pytest.raises(RuntimeError, match="expected quantized weights"):
        done(online("Fp8PerTensorOnlineMoEMethod"))
    other = online("Fp8PerTensorOnlineMoEMethod")
    for name, parameter in layer.named_parameters():
        other.register_parameter(name, parameter)
    with pre_processed_weights():
        done(other)
    x, (weights, ids) = random_x(3, H), routed(3)
    for a, b in ((layer, other),):
        assert torch.equal(
            a.quant_method.apply(a, x, weights, ids), b.quant_method.apply(b, x, weights, ids)
        )  # fmt: skip
