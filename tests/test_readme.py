"""README.md says what is true now: its tables come from OPS and committed results, its code runs."""

import ast
import csv
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import fpk

ROOT = Path(__file__).resolve().parents[1]


def test_generated_parts_are_current():
    done = subprocess.run([sys.executable, ROOT / "tests" / "bench" / "readme.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run python tests/bench/readme.py"


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run(number):
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", BLOCKS[number]], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 3


PRODUCTS = {
    "fp8_token": "scaled_mm", "fp8_tensor": "scaled_mm", "int8_token": "scaled_mm", "fp8_block": "scaled_mm_group",
    "fp8_weight_only": "mm_weight_only", "int8_weight_only": "mm_weight_only",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/products.csv")), ids=lambda p: p.parent.name)
def test_results_are_of_kernels_that_are_here(path):
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            op = fpk.OPS[PRODUCTS[row["product"]]]
            config = ast.literal_eval(row["config"]) if row["config"] else {}
            assert config.get("kernel", next(iter(op.kernels))) in op.kernels, row


def test_counted_mutants_are_those_of_the_table():
    with (ROOT / "results" / "mutants.csv").open(newline="") as file:
        found = Counter(row["verdict"] for row in csv.DictReader(file))
    valid = found["killed"] + found["survived"] + found["open"]
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"{found['killed']} of {valid} mutants" in text
