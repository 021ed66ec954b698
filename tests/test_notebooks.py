"""Notebooks run from top to bottom on whatever device there is, say what they teach, and end with a figure."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_notebooks import ROOT, cells_of

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
SAYS = {"1_tour": ("codes equal: True", "scales equal: True"), "6_own_op": ("64 draws agree with the reference",)}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs(path, tmp_path):
    command = [sys.executable, ROOT / "tests" / "run_notebooks.py", path.stem, "--out", str(tmp_path), "--ipynb"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    page = (tmp_path / f"{path.stem}.html").read_text()
    assert "<img alt=" in page and (tmp_path / f"{path.stem}.ipynb").stat().st_size > 1000
    assert not re.search(r'(?:src|href)="(?!data:)', page)
    for words in SAYS.get(path.stem, ()):
        assert words in page


def test_a_failing_cell_is_told(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("# %% [markdown]\n# # Title\n\n# %%\nprint('before')\n1 / 0\n\n# %%\nprint('never')\n")
    code = (
        "import sys, run_notebooks as r; c, well = r.run(r.Path(sys.argv[1])); print(well, c[1].outputs, c[2].outputs)"
    )
    done = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.stdout.startswith("False [('text', 'before\\n'), ('error', 'Traceback"), done.stdout + done.stderr
    assert "ZeroDivisionError" in done.stdout and done.stdout.rstrip().endswith("[]")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_is_readable(path):
    """Opens with what the reader will learn; no function is longer than a screen; jupytext pairs it."""
    text = path.read_text()
    cells = cells_of(text)
    assert text.startswith("# ---\n# jupyter:\n#   jupytext:") and "py:percent" in text
    assert cells[0].kind == "markdown" and "last figure" in cells[0].source.replace("\n", " ")
    assert cells[-1].kind == "markdown" and cells[-2].kind == "code"
    functions = re.split(r"\n(?=(?:def|@)\w*)", text)
    assert max(len(f.split("\n\n\n")[0].splitlines()) for f in functions[1:] or [""]) <= 40


def test_there_are_six():
    assert [p.stem for p in NOTEBOOKS] == ["1_tour", "2_formats", "3_tuning", "4_moe", "5_model", "6_own_op"]


def test_rendered_pages_are_of_these_notebooks():
    rendered = {p.stem for p in (ROOT / "notebooks" / "rendered").glob("*.html")}
    assert rendered <= {Path(p).stem for p in NOTEBOOKS}
