"""A dense model's MLPs as experts that sum to them: through every method of expert layers."""

import copy
import csv
from pathlib import Path

import pytest
import torch
from torch import nn

import fpk
import fpk.op
from fpk.study.experts import COLUMNS, METHODS, SplitMLP, split_mlps
from fpk.study.measure import relative_error

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "results" / "experts-smollm2-135m-2layers.csv"
BOUNDS = {"none": 0.005, "fp8": 0.075, "int8": 0.03, "mxfp8": 0.08, "mxfp6": 0.16, "mxfp4": 0.4, "nvfp4": 0.3}


@pytest.fixture(autouse=True)
def _references(monkeypatch):
    for op in fpk.OPS.values():
        op._memo.clear()
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    with torch.no_grad():
        yield
    for op in fpk.OPS.values():
        op._memo.clear()


class MLP(nn.Module):
    def __init__(self, hidden=160, inter=256):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, (n, k) in dict(gate=(inter, hidden), up=(inter, hidden), down=(hidden, inter)).items():
            linear = nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
            linear.weight.data = (torch.randn(n, k, generator=generator) / k**0.5).bfloat16()
            setattr(self, f"{name}_proj", linear)

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("index", range(len(METHODS)))
def test_the_experts_sum_to_the_mlp(index):
    model = nn.ModuleDict({"mlp": MLP()})
    split = nn.ModuleDict({"mlp": copy.deepcopy(model["mlp"])})
    assert split_mlps(split, METHODS[index], experts=4) == ["mlp"] and isinstance(split["mlp"], SplitMLP)
    x = torch.randn(2, 3, 160, generator=torch.Generator().manual_seed(1)).bfloat16()
    scheme = split["mlp"].method.scheme(split["mlp"].layer)
    kind = "none" if scheme.startswith("unquantized") else scheme.split("_")[0].split(":")[0]
    error = relative_error(split["mlp"](x), model["mlp"](x))
    assert (0 if kind == "none" else 0.002) <= error < BOUNDS[kind], scheme


def test_experts_are_made_where_the_mlp_lies():
    """An MLP on another device than torch's default one, as a model on a GPU is."""
    made = []

    def make(layer):
        method = METHODS[0](layer)
        method.create_weights = lambda *args, **kwargs: made.append(torch.zeros(0).device.type)
        method.process_weights_after_loading = lambda layer: None
        return method

    with pytest.raises(AttributeError, match="weight"):  # none was created
        SplitMLP(MLP().to("meta"), make, experts=4)
    assert made == ["meta"]


def test_what_does_not_divide():
    with pytest.raises(ValueError, match="expected a divisor of 256, got 3"):
        SplitMLP(MLP(), METHODS[0], experts=3)


def test_the_recorded_study():
    """Real weights and activations, the model cut to two layers: the split costs nothing, finer formats cost less."""
    rows = list(csv.DictReader(RECORDED.open(newline="")))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 1 + len(METHODS)
    error = {f"{r['method']} {r['scheme']}": float(r["rel_err"]) for r in rows}
    assert error["UnquantizedFusedMoEMethod unquantized:none"] < 0.005  # an expert's output is rounded to bf16
    ocp = {s: error[f"QuarkOCP_MX_MoEMethod {s}"] for s in ("mxfp6_e2m3:none", "mxfp4:none", "mxfp4:mxfp4")}
    assert ocp["mxfp6_e2m3:none"] < error["Nvfp4OnlineMoEMethod nvfp4:none"] < ocp["mxfp4:none"] < ocp["mxfp4:mxfp4"]
    assert max(v for k, v in error.items() if k.split()[1].startswith(("fp8", "int8"))) < 0.03
