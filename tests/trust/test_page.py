"""docs/trust.md says what results/*.csv hold, and what they hold is good enough."""

import csv
from collections import Counter
from pathlib import Path

from fpk.device import SHARED_LIMIT
from fpk.op import OPS
from trust import summary

RESULTS = Path(__file__).parents[2] / "results"


def rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_page_is_current():
    assert summary.written(summary.PAGE.read_text()) == summary.PAGE.read_text(), "run python -m trust.summary"


def test_mutants_are_many_and_dead():
    found = Counter(row["verdict"] for row in rows("mutants.csv"))
    valid = found["killed"] + found["survived"] + found["open"]
    assert valid >= 200 and found["killed"] >= 0.95 * valid, found
    assert all(row["reason"] for row in rows("mutants.csv") if row["verdict"] == "survived")


def test_what_has_been_compiled_fits_its_target():
    """`make cross` adds ops that are new."""
    found = {(r["op"], r["target"]) for r in rows("cross.csv")}
    ops, targets = {op for op, _ in found}, {target for _, target in found}
    assert ops <= set(OPS) and len(ops) >= 50 and len(targets) == 7
    without = {op for op in ops for target in targets if (op, target) not in found and target != "sm80"}
    assert not without, f"{without}: run make cross"  # sm80 has no FP8 units
    assert all(int(r["wrong"]) == 0 and int(r["spills"]) == 0 for r in rows("cross.csv"))
    assert all(int(r["shared"]) <= SHARED_LIMIT[r["target"]] for r in rows("cross.csv"))
