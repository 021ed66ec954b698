"""The documentation says what is true: floors, code, pages of every op, a site without warnings."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fpk

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("fpk_docs_hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FLOORS = re.search(r"<!-- floors -->\n(.*?)<!-- end -->", (DOCS / "numerics.md").read_text(), re.S)[1].splitlines()[2:]


@pytest.mark.parametrize("line", FLOORS, ids=lambda line: line.split("`")[1])
def test_zeros_get_the_scale_that_the_page_says(line):
    names, _, floor, _ = (cell.strip() for cell in line.strip("|").split("|"))
    numerator, denominator = (eval(part) for part in floor.strip("`").split(" / ", 1))
    expected = torch.tensor(numerator, dtype=torch.float32) / torch.tensor(float(denominator))
    for name in re.findall(r"`(\w+)`", names):
        q = fpk.quantize(torch.zeros(256, 256), name, **({"dtype": torch.float8_e4m3fn} if "fp8" in name else {}))
        assert torch.equal(q.scale, expected.expand_as(q.scale)), (name, q.scale.flatten()[0].item(), expected.item())
        assert not q.dequantize(torch.float32).any()


def test_floors_cover_every_scheme_with_fp32_scales():
    named = set(re.findall(r"`((?:fp8|int8|int4)_\w+)`", "\n".join(FLOORS)))
    assert named == {n for n, s in fpk.formats.SCHEMES.items() if s.scale_format == "fp32"}


def _blocks(*pages):
    return [(p, b) for p in pages for b in re.findall(r"```python\n(.*?)```", (DOCS / p).read_text(), re.S)]


@pytest.mark.parametrize("page, block", _blocks("index.md", "guide.md", "benchmarks.md"), ids=lambda v: v[:20])
def test_python_runs(page, block):
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{page}: {done.stderr[-2000:]}"


def test_the_op_of_the_page_works(tmp_path):
    """The file that the page shows, used as the page says: the laws' core, with every candidate."""
    ((_, source),) = _blocks("writing-an-op.md")
    (tmp_path / "row_scale.py").write_text(source)
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1])\n"
        "import torch, fpk, row_scale as page\n"
        "from fpk.check import assert_close\n"
        "op = page.row_scale; count = 0\n"
        "device = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
        "for M in op.domain['M']:\n"
        "    for K in op.domain['K']:\n"
        "        for layout in op.domain['layout']:\n"
        "            a = op.inputs(M=M, K=K, layout=layout, device=device)\n"
        "            for config in op.configs(**op.bind(**a)):\n"
        "                assert_close(op.launch(**a, config=config), op.reference(**a), op.tol); count += 1\n"
        "print(count, fpk.OPS['row_scale'] is op)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["108", "True"]


def test_every_op_scheme_method_and_command_has_an_entry(hooks):
    pages = "\n".join(hooks._family(f) for f in hooks.FAMILIES)
    assert {n for n in fpk.OPS if f"## `{n}`\n" not in pages} == set()
    from fpk.methods import __all__ as methods

    assert not [n for n in methods if f"## `{n}`\n" not in hooks._methods()]
    assert not [n for n in fpk.list_schemes() if f"`{n}`" not in hooks._schemes()]
    assert not [n for n in fpk.__all__ if n != "OPS" and f"## `{n}`\n" not in hooks._api()]
    commands = hooks._commands()
    assert not [n for n in ("list", "study", "doctor", "bench compare", "tune sweep", "db explain", "report")
                if f"`fpk {n}`" not in commands]  # fmt: skip


def test_docstrings_become_markdown(hooks):
    text = hooks.markdown_of(
        "One_line *as* <is>.\n\n    a * b\n\nArgs:\n    x: (M, K) of\n        `this`.\n\nReturns:\n    All."
    )
    lines = [line for line in text.splitlines() if line]
    assert lines == [
        "One\\_line \\*as\\* &lt;is&gt;.", "```text", "a * b", "```", "**Args**", "- `x`: (M, K) of `this`.",
        "**Returns**", "- All.",
    ]  # fmt: skip


@pytest.mark.skipif(
    shutil.which("mkdocs") is None and importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs"
)
def test_site_builds_without_warnings(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= 15
    for page in pages:
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?:', page.read_text()), page.name
