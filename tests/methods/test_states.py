"""States of processed layers, for every method and scheme: into a fresh layer, into one that has other weights, and as
tensors that another process has processed. What a layer computes from its parameters follows them."""

import method_table
import pytest
import torch
from torch import nn

from fpk.methods import pre_processed_weights
from fpk.methods.parameter import attributes_of

pytestmark = pytest.mark.usefixtures("references", "on_cpu")

CASES = method_table.cases()


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(method_table, "SIZES", dict(H=64, I=128))


every_case = pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.method} {c.index}")


def same(case, layer, source):
    inputs = case.inputs()
    assert torch.equal(case.call(layer, *inputs), case.call(source, *inputs))
    assert {n: p.shape for n, p in layer.named_parameters()} == {n: p.shape for n, p in source.named_parameters()}


@every_case
def test_a_state_loads_into_a_new_layer_and_into_another(case):
    source, other = case.load(case.make(), 1), case.load(case.make(), 2)
    for layer in (case.make(), other):
        layer.load_state_dict(source.state_dict())
        layer.quant_method.process_weights_after_loading(layer)
        same(case, layer, source)


@every_case
def test_tensors_that_another_process_has_processed(case):
    source, layer = case.load(case.make(), 1), case.make()
    with pre_processed_weights():
        for name, parameter in source._parameters.items():
            if parameter is None:
                layer.register_parameter(name, None)
                continue
            made = nn.Parameter(parameter.data.clone(), requires_grad=False)
            made.__dict__.update(attributes_of(layer._parameters[name]) if name in layer._parameters else {})
            layer.register_parameter(name, made)
        layer.quant_method.process_weights_after_loading(layer)
    same(case, layer, source)


def test_a_state_with_zero_points_and_scales_that_divide():
    """Derived values that the table's symmetric checkpoints do not have."""
    spec = dict(qscheme="per_channel", is_dynamic=False)
    moe = method_table.MoEConfig(2, 1, 32, 16)

    def make(seed):
        layer = method_table.RoutedExperts(moe)
        static = dict(qscheme="per_tensor", is_dynamic=False)
        layer.quant_method = method_table.methods.QuarkW8A8Int8MoEMethod(spec, static, moe)
        layer.quant_method.create_weights(layer, 2, 32, 16, torch.bfloat16)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in list(layer.named_parameters()):
            value = torch.randint(1, 9, parameter.shape, generator=generator)
            value = value / 100 if "scale" in name else value
            parameter.weight_loader(parameter, value.to(parameter.dtype))
        layer.quant_method.process_weights_after_loading(layer)
        return layer

    source, other = make(1), make(2)
    x, weights, ids = torch.randn(3, 32).bfloat16(), torch.ones(3, 1), torch.tensor([[0], [1], [0]])
    want = source.quant_method.apply(source, x, weights, ids)
    assert source.w13_zero_point is not None and source.w2_colsum is not None
    assert not torch.equal(other.quant_method.apply(other, x, weights, ids), want)
    other.load_state_dict(source.state_dict())
    assert torch.equal(other.quant_method.apply(other, x, weights, ids), want)
