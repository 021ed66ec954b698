"""Tuning in the process that asks, and the stages of an expert layer."""

import pytest
import torch

import fpk
from fpk.study import cell
from fpk.study.moe_layer import expert_load, layer_errors, plot_stages, stage_cases, time_stages
from fpk.tune.timing import FakeTimer
from fpk.tune.trials import canonical

CASE = dict(M=3, K=64)


@pytest.fixture
def tuned(monkeypatch):
    """An op whose candidates take a hundred microseconds, less by their warps; one computes wrongly, one not at all."""
    op = fpk.OPS["quantize_fp8_token"]
    candidates = [
        dict(kernel="loop", BLOCK_M=m, BLOCK_K=64, num_warps=w, num_stages=1)
        for m, w in ((4, 1), (2, 8), (1, 4), (8, 2), (4, 16))
    ]
    original = op.launcher

    def launcher(*args, config, **kwargs):
        if config["num_warps"] == 16:
            raise RuntimeError("out of memory")
        codes, scale = original(*args, config=config, **kwargs)
        return codes, scale * 2 if config["num_warps"] == 8 else scale

    launcher.__name__ = original.__name__
    monkeypatch.setattr(op, "launcher", launcher)
    monkeypatch.setattr(op, "configs", lambda **_: iter(candidates))
    timer = FakeTimer(lambda config: 100.0 - config["num_warps"])
    monkeypatch.setattr(cell, "WallTimer", lambda: timer)
    monkeypatch.setattr(cell, "GraphTimer", lambda: timer)
    return op, candidates


@pytest.mark.skipif(torch.cuda.is_available(), reason="its fake launcher has nothing to compile")
def test_the_fastest_right_candidate_wins(tuned):
    op, candidates = tuned
    lines = []
    trials, tables = cell.tune_here(op, {"small": CASE}, progress=lines.append)
    screened = trials[trials["stage"] == "screen"].set_index("config")["status"].to_dict()
    expected = ("ok", "incorrect", "ok", "ok", "out_of_resources")
    assert screened == {canonical(c): s for c, s in zip(candidates, expected, strict=True)}
    assert "3 of 5 candidates ran" in lines[0] and "best 96 us" in lines[0]
    arguments = op.inputs(**CASE, device="cpu")
    with fpk.use(tables):
        assert op.config_for(**arguments) == candidates[2]
    assert op.config_for(**arguments) == candidates[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="its fake launcher has nothing to compile")
def test_a_budget_is_kept(tuned):
    op, candidates = tuned
    trials, _ = cell.tune_here(op, {"small": CASE}, budget=2, progress=None)
    assert set(trials["config"]) == {canonical(c) for c in candidates[:2]}


def test_stages_are_those_of_the_layer():
    stages = stage_cases("mixtral_8x7b", 16, shrink=64)
    assert [op for _, op, _ in stages] == [
        "route", "sort_by_expert", "quantize_fp8_token", "moe_permute", "grouped_scaled_mm",
        "act_and_mul_quantize_fp8_token", "grouped_scaled_mm", "moe_unpermute",
    ]  # fmt: skip
    first, second = (case for _, op, case in stages if op == "grouped_scaled_mm")
    assert (first["M"], first["N"], first["K"], first["E"]) == (32, 2 * 224, 64, 8)
    assert (second["M"], second["N"], second["K"]) == (32, 64, 224)
    with pytest.raises(ValueError, match=r"stage_cases\.model: expected one of mixtral_8x7b"):
        stage_cases("no_such", 1)


def test_stages_are_timed():
    table = time_stages("mixtral_8x7b", (1, 2), shrink=128, device="cpu", about_ms=0.1, rounds=1)
    assert (table["status"] == "ok").all() and len(table) == 16 and set(table["tokens"]) == {1, 2}
    left, right = plot_stages(table).axes
    assert len(left.patches) == 16 and right.lines[0].get_ydata() == pytest.approx(table.groupby("tokens")["us"].sum())


def test_errors_of_a_layer_and_its_load():
    torch.manual_seed(0)
    x, logits = torch.randn(8, 32).bfloat16(), torch.randn(8, 4)
    w13, w2 = torch.randn(4, 64, 32).bfloat16(), torch.randn(4, 32, 32).bfloat16()
    table = layer_errors(["fp8_channel:fp8_token", "int8_channel:none"], x, logits, w13, w2, 2).set_index("scheme")
    fp8, int8 = table.loc["fp8_channel:fp8_token"], table.loc["int8_channel:none"]
    assert 0 < int8["rel_err"] == int8["from_weights"] < fp8["from_weights"] < fp8["rel_err"] < 0.15
    load = expert_load(torch.tensor([[3.0, 2.0, 1.0], [3.0, 1.0, 2.0]]), 2)
    assert load.tolist() == [2, 1, 1]
