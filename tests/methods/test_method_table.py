"""The table of methods: what a CPU can tell of each row, and that the recorded one is whole and all yes."""

import csv
from pathlib import Path

import method_table
import pytest

pytestmark = pytest.mark.usefixtures("references", "on_cpu")

RECORDED = Path(__file__).parents[2] / "results" / "nv-h200-sm90-132" / "methods.csv"
CASES = method_table.cases()
TRACED = ("Fp8LinearMethod 2", "Fp8MoEMethod 2", "QuarkNvfp4MoEMethod 0", "QuarkOCP_MX_MoEMethod 5")
"""Traced here too: tracing takes seconds, and the GPU has done all."""


def spell(case):
    return f"{case.method} {case.index}"


@pytest.mark.parametrize("case", CASES, ids=spell)
def test_row(case):
    made = method_table.row(case, gpu=False, compiled=spell(case) in TRACED)
    told = {k: v for k, v in made.items() if k not in ("method", "scheme")}
    assert told == {"loads": "yes", "matches": "yes", "reload": "yes", "graph": "",
                    "fullgraph": "yes" if spell(case) in TRACED else ""}  # fmt: skip


def test_every_method_of_the_package_is_in_the_table():
    from fpk import methods

    listed = {c.method for c in CASES}
    abstract = {"FusedMoEMethod", "LinearMethod", "Nvfp4ExpertsMethod"}
    wanted = {n for n in methods.__all__ if n.endswith(("LinearMethod", "MoEMethod"))} - abstract
    assert wanted == listed


def test_the_recorded_table_is_whole():
    rows = list(csv.DictReader(RECORDED.open(newline="")))
    assert [r["method"] for r in rows] == [c.method for c in CASES]
    wrong = [r for r in rows if not r["scheme"] or any(r[c] != "yes" for c in method_table.COLUMNS[2:])]
    assert not wrong


def test_the_recorded_costs_of_methods():
    """Beside the bare layer: the same bits, at most 3 % more; while experts load: no more than one layer besides."""
    rows = list(csv.DictReader((RECORDED.parent / "moe-method.csv").open(newline="")))
    assert {int(r["T"]) for r in rows} == {1, 16, 64, 256, 1024, 4096}
    assert all(r["bit_equal"] == "yes" and float(r["eager_pct"]) <= 3 and float(r["graph_pct"]) <= 3 for r in rows)
    rows = list(csv.DictReader((RECORDED.parent / "loading.csv").open(newline="")))
    assert {r["method"] for r in rows} == {m for m in method_table.EXPERTS if m.endswith("OnlineMoEMethod")}
    assert all(float(r["over"]) <= 1 for r in rows)
