"""Fp8MoEMethod and UnquantizedFusedMoEMethod: parameters, loading, numbers, ranks, and what they refuse."""

import pytest
import torch
from linear_kit import group_rounded, random_x
from moe_kit import ACTS, E, H, I, config, done, expected, layer_of, matrices, put, randn, routed
from torch import Tensor

from fpk.check import assert_close, bits, rel_error
from fpk.device import pretend
from fpk.formats import E4M3FN, encode, expand_groups
from fpk.methods import Fp8Config, Fp8MoEMethod, MoEConfig, UnquantizedFusedMoEMethod, pre_processed_weights

pytestmark = pytest.mark.usefixtures("references")


def fp8(**fields):
    return lambda layer: Fp8MoEMethod(Fp8Config(is_checkpoint_fp8_serialized=True, **fields), layer)


def codes_of(w: Tensor, scale: Tensor) -> Tensor:
    return encode(w / scale, E4M3FN).view(torch.float8_e4m3fn)


def tensor_checkpoint(seed: int = 0, inter: int = I) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Codes and scale of each expert's w1, w3, w2; the values they stand for."""
    return {
        n: [(codes_of(e, s), s) for e, s in zip(w, w.abs().amax((1, 2)) / 448, strict=True)]
        for n, w in matrices(seed, inter=inter).items()
    }


def load_tensor(layer, stored, inputs=None):
    for name, experts in stored.items():
        matrix = "w2" if name == "w2" else "w13"
        for e, (codes, scale) in enumerate(experts):
            put(layer, f"{matrix}_weight", codes, name, e)
            put(layer, f"{matrix}_weight_scale", scale.clone(), name, e)
            if inputs is not None:
                put(layer, f"{matrix}_input_scale", inputs[name][e], name, e)
    return done(layer)


def requantized(stored) -> tuple[Tensor, Tensor]:
    """w13 and w2 as values: gate and up at the larger of their scales, each rounded again unless it had that scale."""
    w13 = []
    for (a, sa), (b, sb) in zip(stored["w1"], stored["w3"], strict=True):
        s = torch.maximum(sa, sb)
        parts = [c.float() * t if t == s else codes_of(c.float() * t, s).float() * s for c, t in ((a, sa), (b, sb))]
        w13.append(torch.cat(parts))
    return torch.stack(w13), torch.stack([c.float() * s for c, s in stored["w2"]])


def static(scale: Tensor):
    """Rounds as activations with this scale are rounded."""
    return lambda v: codes_of(v.float(), scale).float() * scale


def run(layer, T: int = 5, **more):
    x, (weights, ids) = random_x(T, layer.moe_config.hidden_size), routed(T)
    return x, weights, ids, layer.quant_method.apply(layer, x, weights, ids, **more)


def test_parameters():
    layer = layer_of(fp8(activation_scheme="static"), moe=config(has_bias=True))
    found = {n: (tuple(p.shape), p.dtype) for n, p in layer.named_parameters()}
    f8, f32, bf16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
    assert found == {
        "w13_weight": ((E, 2 * I, H), f8), "w2_weight": ((E, H, I), f8),
        "w13_weight_scale": ((E, 2), f32), "w2_weight_scale": ((E,), f32),
        "w13_input_scale": ((E,), f32), "w2_input_scale": ((E,), f32),
        "w13_bias": ((E, 2 * I), bf16), "w2_bias": ((E, H), bf16),
    }  # fmt: skip
    assert layer.w13_weight_scale.quant_method == "tensor" and layer.weight_block_size is None
    block = layer_of(fp8(weight_block_size=[128, 128]), moe=config(intermediate_size_per_partition=256))
    assert block.w13_weight_scale_inv.shape == (E, 4, 2) and block.w2_weight_scale_inv.shape == (E, 2, 2)
    assert block.w13_input_scale is None and block.w13_bias is None and block.weight_block_size == [128, 128]
    assert block.w2_weight_scale_inv.quant_method == "block" and block.quant_method.supports_eplb


@pytest.mark.parametrize("is_static", (False, True))
def test_tensor_scales(is_static):
    """Gate and up with different scales; static activations take the largest scale of all experts."""
    inputs = {n: [torch.tensor(0.01 + 0.003 * e + i) for e in range(E)] for i, n in enumerate(("w1", "w3", "w2"))}
    layer = layer_of(fp8(activation_scheme="static" if is_static else "dynamic"))
    stored = tensor_checkpoint()
    load_tensor(layer, stored, inputs if is_static else None)
    w13, w2 = requantized(stored)
    assert layer.w13_weight_scale.shape == (E,)
    ours13, ours2 = layer.quant_method.dequantize(layer)
    assert_close(ours13, w13, 1e-7), assert_close(ours2, w2, 0.0)
    x, weights, ids, out = run(layer)
    act = act2 = "fp8_token"
    if is_static:
        s13, s2 = max(inputs["w1"] + inputs["w3"]), max(inputs["w2"])
        assert layer.w13_input_scale.shape == () and layer.w13_input_scale == s13 and layer.w2_input_scale == s2
        act, act2 = static(s13), static(s2)
    want = expected(x, weights, ids, w13, w2, act, act2 if is_static else ACTS["fp8_token"])
    assert rel_error(out, want) < 0.008
    assert layer.quant_method.scheme(layer) == f"fp8_tensor:{'fp8_tensor_static' if is_static else 'fp8_token'}"


def block_checkpoint(block, hidden=H, inter=I, seed=0):
    """Per expert and matrix codes, scales on a grid of the shard's own, values."""
    made = {}
    for i, (name, shape) in enumerate(dict(w1=(inter, hidden), w3=(inter, hidden), w2=(hidden, inter)).items()):
        grid = [-(-n // b) for n, b in zip(shape, block, strict=True)]
        scale = (randn(E, *grid, seed=seed + i + 10).abs() + 0.1) / 448
        codes = encode(randn(E, *shape, seed=seed + i) * 100, E4M3FN).view(torch.float8_e4m3fn)
        made[name] = (codes, scale, codes.float() * expand_groups(scale, codes.shape, *block))
    return made


def load_block(layer, made, experts=range(E)):
    for name, (codes, scale, _) in made.items():
        matrix = "w2" if name == "w2" else "w13"
        for e in experts:
            put(layer, f"{matrix}_weight", codes[e], name, e)
            put(layer, f"{matrix}_weight_scale_inv", scale[e], name, e)
    return done(layer)


@pytest.mark.parametrize(("block", "inter"), (((128, 128), 256), ((128, 128), 96), ((64, 32), 96), ((128, 128), 200)))
def test_block_scales(block, inter):
    """I that is no multiple of the block: up begins inside a block of the stacked matrix."""
    layer = layer_of(fp8(weight_block_size=list(block)), moe=config(intermediate_size_per_partition=inter))
    made = block_checkpoint(block, inter=inter)
    load_block(layer, made)
    w13, w2 = torch.cat([made["w1"][2], made["w3"][2]], 1), made["w2"][2]
    ours = layer.quant_method.dequantize(layer)
    assert_close(ours[0], w13, 0.0), assert_close(ours[1], w2, 0.0)
    x, weights, ids, out = run(layer)
    want = expected(x, weights, ids, w13, w2, lambda v: group_rounded(v, block[1]))
    assert rel_error(out, want) < 0.008


@pytest.mark.parametrize("scheme", ("tensor", "block"))
@pytest.mark.parametrize(("ranks", "inter"), ((2, 192), (2, 344), (3, 288)))
def test_ranks_hold_slices(scheme, ranks, inter):
    """Cuts inside a block: 192 / 2 = 96, 344 / 2 = 172. Outputs sum to the whole layer's, the bias counts once."""
    full = config(intermediate_size_per_partition=inter, has_bias=True)
    fields = dict(weight_block_size=[128, 128]) if scheme == "block" else {}
    bias13, bias2 = randn(E, 2 * inter, seed=20), randn(E, H, seed=21)
    stored = tensor_checkpoint(inter=inter) if scheme == "tensor" else block_checkpoint((128, 128), inter=inter)

    def made(moe: MoEConfig):
        layer = layer_of(fp8(**fields), moe=moe)
        put(layer, "w2_bias", bias2), put(layer, "w13_bias", bias13)
        return load_tensor(layer, stored) if scheme == "tensor" else load_block(layer, stored)

    whole = made(full)
    part = inter // ranks
    parts = []
    for rank in range(ranks):
        layer = made(config(intermediate_size_per_partition=part, has_bias=True, tp_size=ranks, tp_rank=rank))
        (a13, a2), (b13, b2) = whole.quant_method.dequantize(whole), layer.quant_method.dequantize(layer)
        rows = slice(rank * part, (rank + 1) * part)
        assert_close(b13, torch.cat([a13[:, :inter][:, rows], a13[:, inter:][:, rows]], 1), 0.0)
        assert_close(b2, a2[:, :, rows].contiguous(), 0.0)
        assert torch.equal(layer.w13_bias, whole.w13_bias.view(E, 2, inter)[:, :, rows].reshape(E, -1))
        layer.weight_only = whole.weight_only = True  # scales of dynamic activations are each rank's own
        parts.append(run(layer)[3].float())
    assert rel_error(sum(parts), run(whole)[3].float()) < 0.005


def test_experts_of_other_ranks():
    """A map: this rank has experts 1 and 3, as 0 and 1; the loader refuses the others without touching anything."""
    expert_map = torch.tensor([-1, 0, -1, 1], dtype=torch.int32)
    layer = layer_of(fp8(), expert_map=expert_map)
    whole = layer_of(fp8())
    stored = tensor_checkpoint()
    assert put(layer, "w13_weight", stored["w1"][0][0], "w1", 0) is False
    assert put(layer, "w13_weight", stored["w1"][1][0], "w1", 1) is True
    load_tensor(layer, stored)
    load_tensor(whole, stored)
    for ours, theirs in zip(layer.quant_method.dequantize(layer), whole.quant_method.dequantize(whole), strict=True):
        assert_close(ours, theirs[[1, 3]], 0.0)
    x, weights, ids, out = run(layer)
    w13, w2 = whole.quant_method.dequantize(whole)
    assert rel_error(out, expected(x, weights, ids, w13[[1, 3]], w2[[1, 3]], "fp8_token", local=[-1, 0, -1, 1])) < 0.008


def test_all_experts_at_once():
    stored = tensor_checkpoint()
    one = load_tensor(layer_of(fp8()), stored)
    layer = layer_of(fp8())
    both = [torch.cat([a[0], b[0]]) for a, b in zip(stored["w1"], stored["w3"], strict=True)]
    put(layer, "w13_weight", torch.stack(both))
    scales = [torch.stack([a[1], b[1]]) for a, b in zip(stored["w1"], stored["w3"], strict=True)]
    put(layer, "w13_weight_scale", torch.stack(scales), "w13")
    put(layer, "w2_weight", torch.stack([c for c, _ in stored["w2"]]), "w2")
    put(layer, "w2_weight_scale", torch.stack([s for _, s in stored["w2"]]), "w2")
    done(layer)
    for name, p in one.named_parameters():
        assert torch.equal(bits(p), bits(layer.get_parameter(name)))


@pytest.mark.parametrize("kind", ("tensor", "block"))
def test_loading_again_keeps_storages_and_is_whole(kind):
    block = kind == "block"
    layer = layer_of(fp8(**dict(weight_block_size=[128, 128]) if block else {}))
    make, load = (lambda s: block_checkpoint((128, 128), seed=s), load_block) if block else (
        tensor_checkpoint, load_tensor
    )  # fmt: skip
    load(layer, make(0))
    pointers = {n: p.data_ptr() for n, p in layer.named_parameters()}
    load(layer, make(50))
    assert pointers == {n: p.data_ptr() for n, p in layer.named_parameters()}
    fresh = load(layer_of(fp8(**dict(weight_block_size=[128, 128]) if block else {})),
                 make(50))  # fmt: skip
    for a, b in zip(layer.quant_method.dequantize(layer), fresh.quant_method.dequantize(fresh), strict=True):
        assert_close(a, b, 0.0)
    stored = make(70)
    for e in range(E):  # all but the last expert's up
        for name in stored:
            codes = stored[name][0][e] if block else stored[name][e][0]
            scale = stored[name][1][e] if block else stored[name][e][1]
            matrix = "w2" if name == "w2" else "w13"
            if (e, name) != (E - 1, "w3"):
                put(layer, f"{matrix}_weight", codes, name, e)
            put(layer, f"{matrix}_weight_scale{'_inv' if block else ''}", scale, name, e)
    with pytest.raises(ValueError, match=r"p.experts.w13_weight: .*shards \[expert 3 w3\] were never loaded"):
        done(layer)


def test_what_is_missing_or_wrong_is_named():
    stored = tensor_checkpoint()
    layer = layer_of(fp8())
    with pytest.raises(ValueError, match="shard id out of w1, w3, w13"):
        put(layer, "w13_weight", stored["w1"][0][0], "w5", 0)
    with pytest.raises(ValueError, match=r"expert id in 0\.\.3, got 7"):
        put(layer, "w13_weight", stored["w1"][0][0], "w1", 7)
    with pytest.raises(ValueError, match=r"w13_weight.*expert 0, shard w1: expected 96 along dimension 0"):
        put(layer, "w13_weight", stored["w1"][0][0][:90], "w1", 0)
    with pytest.raises(ValueError, match="expected float8_e4m3fn, got bfloat16"):
        put(layer, "w13_weight", torch.zeros(I, H, dtype=torch.bfloat16), "w1", 0)
    for name, experts in stored.items():
        for e, (codes, scale) in enumerate(experts):
            put(layer, f"{'w2' if name == 'w2' else 'w13'}_weight", codes, name, e)
            if (name, e) != ("w3", 2):
                put(layer, f"{'w2' if name == 'w2' else 'w13'}_weight_scale", scale, name, e)
    with pytest.raises(ValueError, match="w13_weight_scale: 1 of 8 scales are missing from the checkpoint, experts 2"):
        done(layer)
    put(layer, "w13_weight_scale", torch.tensor(-1.0), "w3", 2)
    with pytest.raises(ValueError, match="w13_weight_scale: expected finite positive scales, got -1"):
        done(layer)


def test_calls_that_are_refused():
    layer = load_tensor(layer_of(fp8()), tensor_checkpoint())
    x, (weights, ids) = random_x(3, H), routed(3)
    method = layer.quant_method
    with pytest.raises(ValueError, match=r"p.experts.x: expected bfloat16 or float16, got float32"):
        method.apply(layer, x.float(), weights, ids)
    with pytest.raises(ValueError, match=r"p.experts.x: expected \(T, 160\)"):
        method.apply(layer, x[:, :-1], weights, ids)
    layer.apply_router_weight_on_input = True
    with pytest.raises(ValueError, match="top_k > 1"):
        method.apply(layer, x, weights, ids)
    one = method.apply(layer, x, weights[:, :1], ids[:, :1])
    scaled = (x.float() * weights[:, :1]).to(x.dtype)
    layer.apply_router_weight_on_input = False
    assert torch.equal(one, method.apply(layer, scaled, torch.ones_like(weights[:, :1]), ids[:, :1]))
    layer.activation = "situ"
    with pytest.raises(ValueError, match="situ"):
        method.apply(layer, x, weights, ids)


def test_shared_experts_and_both_entries():
    layer = load_tensor(layer_of(fp8()), tensor_checkpoint())
    x, weights, ids, out = run(layer)
    shared = torch.nn.Linear(H, H, bias=False, dtype=x.dtype, device=x.device)
    method = layer.quant_method
    assert rel_error(method.apply(layer, x, weights, ids, shared), out + shared(x)) < 0.004
    other = random_x(5, H, seed=7)
    assert rel_error(method.apply(layer, x, weights, ids, shared, other), out + shared(other)) < 0.004
    logits = randn(5, E, seed=5)
    layer.renormalize = False
    assert_close(method.apply_monolithic(layer, x, logits), method.apply(layer, x, *routed(5)), 1e-5)
    assert method.apply(layer, x[:0], weights[:0], ids[:0]).shape == (0, H)


@pytest.mark.parametrize("kind", ("tensor", "block"))
def test_without_fp8_units_weights_only(kind, on_cpu):
    with pretend("sm80"):
        if kind == "tensor":
            layer = load_tensor(layer_of(fp8()), tensor_checkpoint())
        else:
            layer = load_block(layer_of(fp8(weight_block_size=[128, 128])), block_checkpoint((128, 128)))
        x, weights, ids, out = run(layer)
        assert layer.quant_method.scheme(layer).endswith(":none")
    want = expected(x, weights, ids, *layer.quant_method.dequantize(layer))
    assert rel_error(out, want) < 0.005


def test_fnuz_means_the_same_values(on_cpu):
    stored = tensor_checkpoint()
    plain = load_tensor(layer_of(fp8()), stored)
    with pretend("gfx942"):
        layer = load_tensor(layer_of(fp8()), stored)
    assert layer.w13_weight.dtype is torch.float8_e4m3fnuz
    assert_close(layer.quant_method.dequantize(layer)[1], plain.quant_method.dequantize(plain)[1], 0.0)


def test_pre_processed_weights():
    done_layer = load_tensor(layer_of(fp8()), tensor_checkpoint())
    layer = layer_of(fp8())
    for name, parameter in done_layer.named_parameters():
        layer.register_parameter(name, parameter)
    with pre_processed_weights():
        done(layer)
    assert torch.equal(run(layer)[3], run(done_layer)[3])


@pytest.mark.parametrize("gated", (True, False))
def test_unquantized(gated):
    moe = config(is_act_and_mul=gated, has_bias=True)
    layer = layer_of(
        lambda layer: UnquantizedFusedMoEMethod(moe), moe=moe, activation="silu" if gated else "relu2_no_mul"
    )
    w = {n: v.bfloat16() for n, v in matrices().items()}
    for e in range(E):
        for name in ("w1", "w3", "w2") if gated else ("w1", "w2"):
            put(layer, f"{'w2' if name == 'w2' else 'w13'}_weight", w[name][e], name, e)
    bias = randn(E, H, seed=4, dtype=torch.bfloat16)
    put(layer, "w2_bias", bias)
    done(layer)
    x, weights, ids, out = run(layer)
    if gated:
        w13, activate = torch.cat([w["w1"], w["w3"]], 1).float(), None
    else:
        w13, activate = w["w1"].repeat(1, 2, 1).float(), lambda g, u: g.clamp(min=0) ** 2
        with pytest.raises(ValueError, match="shard id out of w1, w13"):
            put(layer, "w13_weight", w["w3"][0], "w3", 0)
    more = {} if activate is None else dict(activate=activate)
    assert rel_error(out, expected(x, weights, ids, w13, w["w2"].float(), bias2=bias, **more)) < 0.008
    assert layer.quant_method.scheme(layer) == "unquantized:none"
