"""What the docs site takes from the code: pages of ops, schemes, API, methods and commands, from docstrings.

MkDocs calls `on_config` and `on_files`. Adding an op, a scheme or a method changes the site without an edit here.
"""

import csv
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIRST = ("index.md", "guide.md", "writing-an-op.md", "database.md", "numerics.md", "benchmarks.md", "measured.md")
TITLES = {
    "quant": "Quantizers", "pack": "Packing and layouts", "gemm": "Matrix products", "moe": "Mixture of experts",
    "attention": "Attention and KV caches",
}  # fmt: skip
_FOLDERS = sorted(p.parent.name for p in (ROOT / "fpk" / "kernels").glob("*/__init__.py"))
FAMILIES = {n: TITLES.get(n, n.replace("_", " ").capitalize()) for n in [*TITLES, *_FOLDERS]}
"""Folders of kernels and the titles of their pages; a new one has its name."""
COMMANDS = {  # group -> (module, attribute); the others are commands of `fpk` itself
    "tune": ("fpk.cli_tune", "tune_app"), "bench": ("fpk.cli_bench", "bench_app"), "db": ("fpk.cli_db", "db_app"),
    "report": ("fpk.cli_bench", "report_app"), "inspect": ("fpk.cli_checkpoint", "inspect_app"),
    "quantize": ("fpk.cli_checkpoint", "quantize_app"), "dequantize": ("fpk.cli_checkpoint", "dequantize_app"),
}  # fmt: skip


def on_config(config: Any, **_: Any) -> Any:
    """The order of pages: those that are named here, those that are not, then what is generated."""
    docs = Path(config["docs_dir"])
    named = [name for name in FIRST if (docs / name).is_file()]
    others = sorted(p.name for p in docs.glob("*.md") if p.name not in (*FIRST, "contributing.md"))
    reference = [*(f"reference/{family}.md" for family in FAMILIES), *(f"reference/{n}.md" for n in _PAGES)]
    config["nav"] = [*named, *others, {"Notebooks": "notebooks.md"}, {"Reference": reference}, "contributing.md"]
    return config


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Add the generated pages, and the notebooks as they were last rendered."""
    from mkdocs.structure.files import File

    pages = {f"reference/{name}.md": make() for name, make in _PAGES.items()}
    pages |= {f"reference/{family}.md": _family(family) for family in FAMILIES}
    pages["notebooks.md"] = _notebooks()
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for page in sorted((ROOT / "notebooks" / "rendered").glob("*.html")):
        files.append(File.generated(config, f"notebooks/{page.name}", abs_src_path=str(page)))
    return files


# ---- docstrings

_SECTIONS = ("Args:", "Returns:", "Raises:", "Yields:")


def markdown_of(docstring: str | None) -> str:
    """A docstring as Markdown: paragraphs, indented blocks as code, sections of arguments as lists."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    out: list[str] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        if line in _SECTIONS:
            block = _indented(lines, i + 1)
            out += ["", f"**{line[:-1]}**", "", *_items(block), ""]
            i += 1 + len(block)
        elif line.startswith("    ") and (not out or not out[-1].strip()):
            block = _indented(lines, i)
            out += ["```text", *(b[4:] for b in block), "```", ""]
            i += len(block)
        else:
            out.append(_plain(line))
            i += 1
    return "\n".join(out).strip() + "\n"


def _indented(lines: list[str], start: int) -> list[str]:
    """Lines from `start` that are indented or empty, without empty ones at the end."""
    end = start
    while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
        end += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return lines[start:end]


def _items(block: list[str]) -> list[str]:
    """`name: text` entries, continued on deeper lines, as a list."""
    entries: list[str] = []
    for line in (b[4:] for b in block if b.strip()):
        if line.startswith(" ") and entries:
            entries[-1] += " " + line.strip()
        else:
            entries.append(line.strip())
    made = []
    for entry in entries:
        found = re.match(r"([\w*, ]+): (.*)", entry)
        made.append(f"- `{found[1]}`: {_plain(found[2])}" if found else f"- {_plain(entry)}")
    return made


def _plain(text: str) -> str:
    """Text as it is: nothing but `code` is markup."""
    parts = re.split(r"(`[^`]*`)", text)
    for n in range(0, len(parts), 2):
        parts[n] = re.sub(r"([*_\[\]<>|#])", r"\\\1", parts[n]).replace("\\<", "&lt;").replace("\\>", "&gt;")
    return "".join(parts)


def _signature(name: str, obj: Any) -> str:
    try:
        text = str(inspect.signature(obj))
    except (TypeError, ValueError):
        return f"{name}(...)"
    text = re.sub(r"<(?:function|class|enum) ?'?([\w.]+)[^>]*>", r"\1", text).replace("torch.Tensor", "Tensor")
    return f"{name}{text}"


def _entry(name: str, obj: Any, level: int = 2) -> str:
    head = f"{'#' * level} `{name}`\n\n"
    signature = f"```python\n{_signature(name, obj)}\n```\n\n" if callable(obj) else ""
    return head + signature + markdown_of(inspect.getdoc(obj)) + "\n"


# ---- pages


def _ops() -> dict[str, Any]:
    sys.path[:0] = [] if str(ROOT) in sys.path else [str(ROOT)]
    import fpk

    return fpk.OPS


def _family(family: str) -> str:
    """Every op of a family: definition, signature, arguments, kernels, what is timed."""
    parts = [f"# {FAMILIES[family]}\n"]
    for name, op in sorted(_ops().items()):
        if op.launcher.__module__.split(".")[-2] != family:
            continue
        module = sys.modules[op.launcher.__module__]
        definition = (module.__doc__ or "").partition("\n")[2]
        kernels = ", ".join(
            f"`{k}`" + (f" ({', '.join(v.targets)})" if v.targets else "") for k, v in op.kernels.items()
        )
        cases = list(op.cases)
        more = f", such as `{cases[0]}`" if cases else ""
        parts += [
            f"## `{name}`\n", markdown_of(op.__doc__.partition("\n")[0]), f"```python\n{_signature(name, op)}\n```\n",
            markdown_of(op.__doc__.partition("\n")[2]), "**Definition**\n", markdown_of(definition),
            f"Kernels: {kernels}. {len(cases)} cases to time{more}. "
            f"{'Bit-exact.' if op.tol == 0 else 'Compared by relative error.'}\n",
        ]  # fmt: skip
    return "\n".join(parts)


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(header)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines) + "\n"


def _schemes() -> str:
    """Formats, schemes and their pairs."""
    _ops()
    from fpk.formats import FORMATS, SCHEMES
    from fpk.study.measure import layer_schemes

    formats = [
        (f"`{f.name}`", f.bits, f"{f.max:g}", f"{f.qmax:g}", f.exponent_bits, f.mantissa_bits) for f in FORMATS.values()
    ]
    schemes = [
        (f"`{s}`", f"`{s.format}`", s.granularity.name, s.scale_format, f"`{s.quantizer}`", s.activation or "-")
        for s in SCHEMES.values()
    ]
    return "\n".join(
        [
            "# Formats and schemes\n", "## Formats\n",
            _table(("format", "bits", "largest", "scaled to", "exponent bits", "mantissa bits"), formats),
            "## Schemes of tensors\n", "Groups and blocks may have other sizes: `int8_group64`, `fp8_block64x32`.\n",
            _table(("scheme", "format", "granularity", "scale", "quantizer", "usual activations"), schemes),
            "## Schemes of layers\n", "Weights and activations, as `fpk study` shows them.\n",
            _table(("weights:activations",), ((f"`{s}`",) for s in layer_schemes())),
        ]
    )  # fmt: skip


def _api() -> str:
    """The public names of `fpk`."""
    _ops()
    import fpk

    parts = ["# Python interface\n", "Everything here is `fpk.<name>`; importing `fpk` touches no GPU.\n"]
    parts += [_entry(name, getattr(fpk, name)) for name in sorted(fpk.__all__) if name != "OPS"]
    return "\n".join([*parts, _entry("tune", fpk.tune.tune)])


def _methods() -> str:
    """The classes of `fpk.methods`, with the methods they define."""
    _ops()
    from fpk import methods

    parts = ["# Methods\n", markdown_of(methods.__doc__)]
    for name in methods.__all__:
        obj = getattr(methods, name)
        parts.append(_entry(name, obj))
        if inspect.isclass(obj):
            own = [
                (n, m) for n, m in vars(obj).items() if inspect.isfunction(m) and not n.startswith("_") and m.__doc__
            ]
            parts += [f"**`{_signature(n, m)}`**\n\n{markdown_of(m.__doc__)}" for n, m in own]
    return "\n".join(parts)


def _commands() -> str:
    """Every command with its options, as its own help says."""
    import importlib

    import click
    import typer

    from fpk.cli import app

    parts = ["# Command line\n"]
    top = typer.main.get_command(app)
    for name in sorted(top.commands):  # type: ignore[attr-defined]
        command = top.commands[name]  # type: ignore[attr-defined]
        if name in COMMANDS:
            module, attribute = COMMANDS[name]
            command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
        parts += [f"## `fpk {name}`\n", *_command(command, f"fpk {name}", click)]
    return "\n".join(parts)


def _command(command: Any, path: str, click: Any) -> list[str]:
    parts = [_plain((command.help or "").strip()) + "\n"]
    if hasattr(command, "commands"):
        for name, inner in command.commands.items():
            parts += [f"### `{path} {name}`\n", *_command(inner, f"{path} {name}", click)]
        return parts
    rows = []
    for parameter in command.params:
        spelled = ", ".join(f"`{o}`" for o in (*parameter.opts, *parameter.secondary_opts) if o != "--help")
        if getattr(parameter, "param_type_name", "") == "argument":
            spelled = f"`{(parameter.name or '').upper()}`"
        if spelled:
            rows.append((spelled, _plain(getattr(parameter, "help", None) or "")))
    return [*parts, _table(("option", "what"), rows)] if rows else parts


WHEN = {
    "config": "Reading a config", "create": "Making a method, creating parameters", "load": "Loading a tensor",
    "process": "Processing what was loaded", "apply": "Multiplying",
    "checkpoint": "Loading a checkpoint into a model",
}  # fmt: skip


def _errors() -> str:
    """The catalogue of errors of configs, methods and layers, from the table that its tests write."""
    with open(ROOT / "results" / "errors.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    parts = [
        "# Errors of methods\n",
        "What a checkpoint, a config or a layer cannot be, when that is said and by which error; and what fpk computes "
        "where engines refuse or compute something else. Each row is a test in `tests/methods`.\n",
    ]
    for when, title in WHEN.items():
        told = [(_plain(r["condition"]), "supported" if r["outcome"] == "supported" else f"`{r['outcome']}`")
                for r in rows if r["when"] == when]  # fmt: skip
        parts += [f"## {title}\n", _table(("what", "outcome"), told)]
    return "\n".join(parts)


def _notebooks() -> str:
    """What each notebook is about, with a link to its page where it was rendered."""
    parts = [
        "# Notebooks\n",
        "Percent scripts in `notebooks/`, paired by jupytext. `make notebooks` runs all of them.\n",
    ]
    for path in sorted((ROOT / "notebooks").glob("*.py")):
        text = re.search(r"# %% \[markdown\]\n((?:#.*\n)+)", path.read_text(encoding="utf-8"))
        lines = [line.removeprefix("#").strip() for line in (text[1] if text else "").splitlines()]
        title = lines[0].removeprefix("# ").strip() if lines else path.stem
        rendered = (ROOT / "notebooks" / "rendered" / f"{path.stem}.html").is_file()
        parts += [f"## {title}\n", " ".join(lines[1:]) + "\n"]
        if rendered:
            parts.append(f'<a href="notebooks/{path.stem}.html">As it last ran</a>\n')
        parts.append(f"Source: `notebooks/{path.name}`\n")
    return "\n".join(parts)


_PAGES: dict[str, Callable[[], str]] = {
    "schemes": _schemes, "python": _api, "methods": _methods, "errors": _errors, "commands": _commands
}  # fmt: skip
