"""The life of expert layers: copies, pickles, casts, engines' own loaders, layers that no holder of fpk is."""

import copy
import pickle

import method_table
import pytest
import torch
from test_reload import Live
from torch import nn

import fpk.op
from fpk import methods
from fpk.check import bits
from fpk.methods import Fp8Config, Fp8MoEMethod, MoEConfig, QuarkW8A8Int8MoEMethod

pytestmark = pytest.mark.usefixtures("references", "on_cpu")

KINDS = ("Fp8MoEMethod 1", "Fp8MoEMethod 2", "Fp8PtpcOnlineMoEMethod 0", "QuarkW8A8Int8MoEMethod 0",
         "QuarkW4A8Fp8MoEMethod 0", "QuarkOCP_MX_MoEMethod 4", "QuarkNvfp4MoEMethod 0")  # fmt: skip
CASES = {f"{c.method} {c.index}": c for c in method_table.cases()}
every_kind = pytest.mark.parametrize("case", [CASES[k] for k in KINDS], ids=KINDS)


def same(case, a, b):
    inputs = case.inputs()
    ours, theirs = dict(a.named_parameters()), dict(b.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(bits(ours[n]), bits(theirs[n])) for n in ours)
    assert torch.equal(case.call(a, *inputs), case.call(b, *inputs))


@every_kind
def test_a_copy_is_a_layer_of_its_own(case):
    layer = case.load(case.make(), 1)
    other = copy.deepcopy(layer)
    same(case, other, layer)
    case.load(other, 2)  # its loaders fill the copy
    same(case, other, case.load(case.make(), 2))
    same(case, layer, case.load(case.make(), 1))


@every_kind
def test_pickles_come_back_with_their_loaders(case):
    layer = case.load(case.make(), 1)
    other = pickle.loads(pickle.dumps(layer))
    same(case, other, layer)
    same(case, case.load(other, 3), case.load(case.make(), 3))


@every_kind
def test_casting_a_model_leaves_codes_and_scales(case):
    layer = case.load(case.make(), 1)
    kept = {n: t.dtype for n, t in [*layer.named_parameters(), *layer.named_buffers()] if "bias" not in n}
    out = case.call(layer, *case.inputs())
    layer.half()
    assert kept == {n: t.dtype for n, t in [*layer.named_parameters(), *layer.named_buffers()] if "bias" not in n}
    assert layer.w2_bias.dtype is torch.float16
    layer.to(torch.float32)
    assert torch.equal(case.call(layer, *case.inputs()), out) or layer.w2_bias.dtype is torch.float32


def test_an_engines_loader_and_layer():
    """Any module with a moe_config will do, and its own loader is called with what it is given."""
    calls = []

    class Layer(nn.Module):
        moe_config = MoEConfig(2, 1, 32, 16)
        activation, expert_map = "silu", None

    def weight_loader(param, loaded, weight_name, shard_id, expert_id, return_success=False):
        calls.append((weight_name, shard_id, expert_id))
        if param.dim() == 3:
            half = param.shape[1] // 2
            rows = {"w1": slice(0, half), "w3": slice(half, None), "w2": slice(None)}[shard_id]
            param.data[expert_id, rows].copy_(loaded)
        elif param.dim() == 2:
            param.data[expert_id, {"w1": 0, "w3": 1}[shard_id]] = loaded
        else:
            param.data[expert_id] = loaded
        return True if return_success else None

    layer = Layer()
    method = Fp8MoEMethod(Fp8Config(True), layer)
    method.create_weights(layer, 2, 32, 16, torch.bfloat16, weight_loader=weight_loader, tag="mine")
    assert layer.w13_weight.tag == "mine"
    shapes = dict(w1=(16, 32), w3=(16, 32), w2=(32, 16))
    for e in range(2):
        for shard, shape in shapes.items():
            if (e, shard) == (1, "w3"):
                continue
            stem = "w2" if shard == "w2" else "w13"
            weight, scale = layer.get_parameter(f"{stem}_weight"), layer.get_parameter(f"{stem}_weight_scale")
            assert weight.weight_loader(weight, torch.ones(shape).to(torch.float8_e4m3fn), "a", shard, e, True) is True
            scale.weight_loader(scale, torch.tensor(0.5), "b", shard, e)
    assert calls[0] == ("a", "w1", 0)
    with pytest.raises(ValueError, match=r"Layer.w13_weight: .*\[expert 1 w3\] were never loaded"):
        method.process_weights_after_loading(layer)
    weight, scale = layer.w13_weight, layer.w13_weight_scale
    weight.weight_loader(weight, torch.ones(16, 32).to(torch.float8_e4m3fn), "a", "w3", 1)
    scale.weight_loader(scale, torch.tensor(0.25), "b", "w3", 1)
    method.process_weights_after_loading(layer)
    assert layer.w13_weight_scale.tolist() == [0.5, 0.5]
    assert method.dequantize(layer)[0][1, 16:].unique().tolist() == [0.25]


@pytest.mark.parametrize("name", [n for n in method_table.EXPERTS if n.endswith("OnlineMoEMethod")])
def test_loading_needs_the_quantized_model_and_one_layer(name, monkeypatch):
    """Expert by expert, as checkpoints have them; what a layer needs while it is quantized does not add up."""
    monkeypatch.undo()  # the suite's guarded memory keeps allocations alive
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    experts, H, I, count = 4, 128, 128, 12
    layer_bytes = experts * 3 * H * I * 2
    shapes = dict(w1=(I, H), w3=(I, H), w2=(H, I))
    source = {n: torch.randn(s).bfloat16() for n, s in shapes.items()}

    def peak(count):
        with Live() as live:
            layers = []
            for _ in range(count):
                layer = method_table.RoutedExperts(MoEConfig(experts, 2, H, I))
                layer.quant_method = getattr(methods, name)(layer=layer)
                layer.quant_method.create_weights(layer, experts, H, I, torch.bfloat16)
                layers.append(layer)
            assert live.now < layer_bytes / 8  # nothing is there before it is loaded
            for layer in layers:
                for e in range(experts):
                    for shard, w in source.items():
                        parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
                        parameter.weight_loader(parameter, w.clone(), shard, shard, e)  # the checkpoint's own memory
                layer.quant_method.process_weights_after_loading(layer)
            return live.peak, sum(p.nbytes for layer in layers for p in layer.parameters() if p is not None)

    base, one = peak(1)
    most, all_of_them = peak(count)
    assert most <= base + (all_of_them - one) + layer_bytes // 8
    assert all_of_them < 0.54 * count * layer_bytes


def test_experts_of_a_map_that_changes():
    """A layer that gets other experts takes the next load's by its map of that moment."""
    moe = MoEConfig(4, 1, 32, 16)
    layer = method_table.RoutedExperts(moe, expert_map=torch.tensor([0, 1, -1, -1]))
    spec = dict(qscheme="per_tensor", is_dynamic=True)
    layer.quant_method = method = QuarkW8A8Int8MoEMethod(spec, spec, moe)
    method.create_weights(layer, 2, 32, 16, torch.bfloat16)

    def load(experts):
        for e in range(4):
            for name, shape in dict(w1=(16, 32), w3=(16, 32), w2=(32, 16)).items():
                stem = "w2" if name == "w2" else "w13"
                weight, scale = layer.get_parameter(f"{stem}_weight"), layer.get_parameter(f"{stem}_weight_scale")
                taken = weight.weight_loader(weight, torch.full(shape, e + 1, dtype=torch.int8), "", name, e)
                assert taken is (e in experts)
                scale.weight_loader(scale, torch.tensor(1.0), "", name, e)
        method.process_weights_after_loading(layer)
        return method.dequantize(layer)[1].amax((1, 2)).tolist()

    assert load([0, 1]) == [1, 2]
    layer.expert_map = torch.tensor([-1, 1, -1, 0])
    assert load([1, 3]) == [4, 2]
