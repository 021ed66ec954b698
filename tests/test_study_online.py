"""A model through every online method: what is replaced, and how far its outputs move."""

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

import fpk
import fpk.op
from fpk import methods
from fpk.study import online
from fpk.study.measure import relative_error

BOUNDS = {"fp8": 0.05, "int8": 0.02, "mxfp8": 0.06, "mxfp4": 0.2, "nvfp4": 0.15}


@pytest.fixture(autouse=True)
def _references(monkeypatch):
    for op in fpk.OPS.values():
        op._memo.clear()
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    with torch.no_grad():
        yield
    for op in fpk.OPS.values():
        op._memo.clear()


def model():
    generator = torch.Generator().manual_seed(0)
    sizes = dict(up=(96, 160, True), down=(160, 96, False), lm_head=(96, 8, True))
    made = nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})
    for parameter in made.parameters():
        parameter.data = (torch.randn(parameter.shape, generator=generator) / 10).bfloat16()
    return made.bfloat16()


@pytest.mark.parametrize("name", online.LINEAR)
def test_linear_layers_keep_their_weights_and_biases(name):
    plain, swapped = model(), model()
    assert online.swap_linears(swapped, getattr(methods, name)) == ["up", "down"]
    assert type(swapped["lm_head"]) is nn.Linear
    x = torch.randn(3, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    kind = swapped["up"].quant_method.scheme(swapped["up"]).split("_")[0].split(":")[0]
    errors = [relative_error(swapped["up"](x), plain["up"](x))]
    errors.append(relative_error(swapped["down"](plain["up"](x)), plain["down"](plain["up"](x))))
    assert all(0.002 < e < BOUNDS[kind] for e in errors), errors
    assert online._bytes(swapped["down"]) < 0.6 * online._bytes(plain["down"])


def test_every_online_method_has_a_case():
    listed = {c.make.__name__ for c in online.cases() if c.layers == "linear"}
    assert listed == {n for n in methods.__all__ if n.endswith("OnlineLinearMethod")}
    experts = {n for n in methods.__all__ if n.endswith("OnlineMoEMethod")}
    layer = methods.RoutedExperts(methods.MoEConfig(2, 2, 64, 64), prefix="experts")
    made = {type(c.make(layer)).__name__ for c in online.cases() if c.layers == "experts"}
    assert experts < made


RESULTS = Path(__file__).parents[1] / "results"
ON_CPU, ON_GPU = RESULTS / "online-smollm2-135m.csv", RESULTS / "nv-h200-sm90-132" / "online.csv"


@pytest.mark.parametrize("path", (ON_CPU, ON_GPU), ids=("cpu", "gpu"))
def test_the_recorded_studies(path):
    """All of the model; the GPU's was cut short after its first method, and no row is made up."""
    rows = list(csv.DictReader(path.open(newline="")))
    assert tuple(rows[0]) == online.COLUMNS and rows[0]["method"] == "none" and float(rows[0]["perplexity"]) < 30
    assert len({(r["sequences"], r["length"], r["tokens_hash"], r["gpu"]) for r in rows}) == 1
    cost = {(r["layers"], r["method"], r["scheme"]): float(r["delta_pct"]) for r in rows[1:]}
    for (layers, _, scheme), percent in cost.items():
        if scheme.startswith(("fp8", "int8")):
            assert -1 < percent < 6, (layers, scheme, percent)
    if path is ON_GPU:
        return
    assert {r["method"] for r in rows if r["layers"] == "linear"} == set(online.LINEAR)
    experts = {n for n in methods.__all__ if n.endswith("OnlineMoEMethod")} | {"UnquantizedFusedMoEMethod"}
    assert {r["method"] for r in rows if r["layers"] == "experts"} == experts
    assert abs(cost["experts", "UnquantizedFusedMoEMethod", "unquantized:none"]) < 0.5  # the split itself costs nothing
    for layers in ("linear", "experts"):
        order = ("Fp8PtpcOnline", "Nvfp4Online", "Mxfp4Online")
        found = [next(v for (of, m, _), v in cost.items() if of == layers and m.startswith(name)) for name in order]
        assert found == sorted(found) and found[0] < found[1] - 3
