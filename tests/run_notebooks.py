"""Run notebooks (percent scripts) cell by cell, and keep what they show as HTML, and as .ipynb.

    python tests/run_notebooks.py [NAME ...] [--out DIR] [--ipynb]

It needs no Jupyter: a cell's prints, and the value of its last line (a figure, a table, anything) are its output, as
there. Each notebook runs in a process of its own; the exit code is 1 if one failed, and its page ends with the error.
"""

import argparse
import ast
import base64
import contextlib
import html
import io
import json
import os
import re
import subprocess
import sys
import time
import traceback
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"


@dataclass
class Cell:
    """Source of a cell and where it begins; outputs are (kind, content): text, html, png (bytes) or error."""

    kind: str
    source: str
    line: int
    outputs: list[tuple[str, Any]] = field(default_factory=list)


def cells_of(text: str) -> list[Cell]:
    """Cells of a percent script; what stands before the first one is its header."""
    found: list[Cell] = []
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"# %%", line)]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        body = lines[start + 1 : end]
        markdown = "[markdown]" in lines[start]
        if markdown:
            body = [re.sub(r"^# ?", "", line) for line in body]
        found.append(Cell("markdown" if markdown else "code", "\n".join(body).strip("\n"), start + 1))
    return found


def run(path: Path) -> tuple[list[Cell], bool]:
    """Execute the code cells in order; stops at the first error. Returns the cells and whether all went well."""
    cells = cells_of(path.read_text(encoding="utf-8"))
    module = types.ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module  # functions of a cell believe to be in a notebook; sources are found in the file
    for cell in cells:
        if cell.kind == "code":
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    value = _execute(cell, path, module.__dict__)
            except BaseException:
                cell.outputs += [("text", printed.getvalue()), ("error", traceback.format_exc())]
                return cells, False
            cell.outputs += [("text", printed.getvalue()), *_shown(value)]
    return cells, True


def _execute(cell: Cell, path: Path, names: dict[str, Any]) -> Any:
    tree = ast.parse("\n" * cell.line + cell.source, str(path))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(path), "exec"), names)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), str(path), "eval"), names)


def _shown(value: Any) -> list[tuple[str, Any]]:
    if value is None:
        return []
    if hasattr(value, "savefig"):
        return [("png", _small_png(value))]
    if hasattr(value, "_repr_html_"):
        return [("html", value._repr_html_())]
    return [("text", repr(value))]


def _small_png(figure: Any) -> bytes:
    """A figure in 64 colours: a quarter of the bytes, and nobody sees it."""
    from PIL import Image

    stream, small = io.BytesIO(), io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    Image.open(stream).convert("RGB").quantize(64).save(small, format="png", optimize=True)
    return small.getvalue()


# ---- pages

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; max-width: 54rem; margin: 0 auto; padding: 1rem; color: #222; }
pre { background: #f5f7f9; padding: 0.7rem; overflow-x: auto; font-size: 0.85rem; line-height: 1.4; }
pre.out { background: none; border-left: 3px solid #0072B2; } pre.error { border-left: 3px solid #D55E00; }
table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; }
img { max-width: 100%; height: auto; } .wide { overflow-x: auto; } footer { color: #555; font-size: 0.85rem; }
"""


def page(name: str, cells: list[Cell], facts: str) -> str:
    """One HTML page with everything inside."""
    from markdown_it import MarkdownIt
    from pygments.formatters import HtmlFormatter

    markdown = MarkdownIt("commonmark").enable("table")
    body = [markdown.render(c.source) if c.kind == "markdown" else _code(c) for c in cells]
    style = _STYLE + HtmlFormatter().get_style_defs(".highlight")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(name)}</title>"
        f"<style>{style}</style></head><body>\n{''.join(body)}<footer>{html.escape(facts)}</footer></body></html>\n"
    )


def _code(cell: Cell) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    parts = [highlight(cell.source, PythonLexer(), HtmlFormatter())]
    for kind, content in cell.outputs:
        if kind == "png":
            parts.append(f'<img alt="figure" src="data:image/png;base64,{base64.b64encode(content).decode()}">\n')
        elif kind == "html":
            parts.append(f'<div class="wide">{content}</div>\n')
        elif content:
            parts.append(f'<pre class="out {kind}">{html.escape(content.rstrip())}</pre>\n')
    return "".join(parts)


def notebook(cells: list[Cell]) -> dict[str, Any]:
    """The notebook format that Jupyter reads, outputs included."""
    made = []
    for number, cell in enumerate(cells):
        base = {"id": f"cell-{number}", "metadata": {}, "source": cell.source.splitlines(keepends=True)}
        if cell.kind == "markdown":
            made.append(base | {"cell_type": "markdown"})
        else:
            outputs = [o for kind, content in cell.outputs if content for o in [_output(kind, content)]]
            made.append(base | {"cell_type": "code", "execution_count": None, "outputs": outputs})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": made}


def _output(kind: str, content: Any) -> dict[str, Any]:
    if kind in ("text", "error"):
        return {"output_type": "stream", "name": "stderr" if kind == "error" else "stdout", "text": content}
    data = {"image/png": base64.b64encode(content).decode()} if kind == "png" else {"text/html": content}
    return {"output_type": "display_data", "metadata": {}, "data": data}


def _one(path: Path, out: Path | None, ipynb: bool) -> bool:
    start = time.perf_counter()
    cells, well = run(path)
    facts = _facts(time.perf_counter() - start)
    errors = [content for cell in cells for kind, content in cell.outputs if kind == "error"]
    figures = sum(kind == "png" for cell in cells for kind, _ in cell.outputs)
    sys.__stdout__.write(f"{path.stem}: {'ran' if well else 'FAILED'}, {figures} figures, {facts}\n" + "".join(errors))  # type: ignore[union-attr]
    if out is not None:
        (out / f"{path.stem}.html").write_text(page(path.stem, cells, facts), encoding="utf-8")
        if ipynb:
            text = json.dumps(notebook(cells), indent=1) + "\n"
            (out / f"{path.stem}.ipynb").write_text(text, encoding="utf-8")
    return well


def _facts(seconds: float) -> str:
    import torch

    from fpk import __version__
    from fpk.device import INTERPRETING, of

    gpu = of(torch.device("cuda")).id if torch.cuda.is_available() else "on a CPU"
    mode = ", Triton's interpreter" if INTERPRETING else ""
    return f"{gpu}{mode}, fpk {__version__}, torch {torch.__version__}, {seconds:.0f} s, {time.strftime('%Y-%m-%d')}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ipynb", action="store_true")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    paths = [p for p in sorted(NOTEBOOKS.glob("*.py")) if not options.names or p.stem in options.names]
    if not paths:
        parser.error(f"no notebook called {', '.join(options.names)}")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        return 0 if all([_one(p, options.out, options.ipynb) for p in paths]) else 1
    more = (["--out", str(options.out)] if options.out else []) + (["--ipynb"] if options.ipynb else [])
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    codes = [
        subprocess.run([sys.executable, __file__, p.stem, "--inside", *more], cwd=ROOT, env=env | {"PYTHONPATH": path})
        for p in paths
    ]
    return max(done.returncode for done in codes)


if __name__ == "__main__":
    sys.exit(main())
