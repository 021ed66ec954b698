"""`fpk db`: look into the autotune database, check it, merge contributions."""

import difflib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Grid

if TYPE_CHECKING:
    from fpk import db

db_app = typer.Typer(help="The autotune database: winners, where they come from, whether they still hold.")
_out = Console(soft_wrap=True)

Where = Annotated[Path | None, typer.Option("--db", help="A directory of tables; default: those that look-ups use.")]


def _tables(where: Path | None) -> "db.Tables":
    from fpk import db

    if where is None:
        return db.default()
    if not where.is_dir():
        raise typer.BadParameter(f"--db: expected a directory, got {where}")
    return db.Tables(db.DirectorySource(where))


def _device(gpu: str | None) -> Any:
    import torch

    from fpk.device import of
    from fpk.tune.lint import device_of

    if gpu:
        return device_of(gpu)
    return of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _op(name: str) -> Any:
    import fpk

    if name not in fpk.OPS:
        raise typer.BadParameter(f"op: expected one of {', '.join(fpk.OPS)}, got {name!r}")
    return fpk.OPS[name]


@db_app.command()
def show(op: str | None = None, gpu: str | None = None, where: Where = None, all_ranks: bool = False) -> None:
    """Winners with their gain over the default."""
    tables = _tables(where)
    if op is not None:
        _op(op)
    if gpu is not None and gpu not in tables.gpus():
        raise typer.BadParameter(f"--gpu: expected one of {', '.join(tables.gpus()) or 'none recorded'}, got {gpu!r}")
    shown = 0
    for g in [gpu] if gpu else tables.gpus():
        for name in [op] if op else tables.ops(g):
            grid = Grid(title=f"{g} / {name}")
            for column in ("key", "rank", "config", "us", "default us", "gain", "noise %"):
                grid.add_column(column, justify="left" if column in ("key", "config") else "right")
            for i in range(len(tables.sources)):
                table = tables.table(i, g, name)
                for row in table.rows if table else []:
                    if all_ranks or row.rank <= 1:
                        grid.add_row(
                            _words(row.key), str(row.rank), _words(row.config), f"{row.us:g}", f"{row.default_us:g}",
                            f"{row.default_us / row.us:.2f}x", f"{row.noise_percent:.1f}",
                        )  # fmt: skip
            if grid.row_count:
                _out.print(grid)
                shown += 1
    if not shown:
        _out.print("no rows recorded")


def _words(values: dict[str, Any]) -> str:
    return " ".join(f"{n}={str(v).removeprefix('torch.')}" for n, v in values.items())


@db_app.command()
def explain(op: str, case: list[str], gpu: str | None = None, where: Where = None) -> None:
    """Which level answers for a call, and what the other rows say: `explain scaled_mm M=64 N=4096 K=4096`."""
    from fpk import db
    from fpk.tune.explain import explain_case

    target, device = _op(op), _device(gpu)
    answer = explain_case(target, db.parse_case(" ".join(case)), device, _tables(where))
    _out.print(f"{op} on {db.gpu_id(device)}: {_words(answer.key)}")
    for line in answer.lines:
        _out.print(line, highlight=False)
    _out.print(f"answer: {answer.level}: {_words(answer.config)}", highlight=False)


@db_app.command()
def lint(where: Where = None) -> None:
    """Every row: reachable, complete, legal, known config keys, fits shared memory. Exit code 1 if one is not."""
    import fpk.kernels  # noqa: F401  declares every op
    from fpk import db
    from fpk.tune.lint import lint as problems_of

    directory = where or db.packaged_directory()
    problems = problems_of(db.DirectorySource(directory))
    for problem in problems:
        _out.print(problem, highlight=False, soft_wrap=True)
    _out.print(f"{directory}: {len(problems)} problems")
    raise typer.Exit(1 if problems else 0)


@db_app.command()
def diff(old: Path, new: Path) -> None:
    """Lines of the tables of two directories that differ. Exit code 1 if any does."""
    from fpk import db

    one, two = db.DirectorySource(old), db.DirectorySource(new)
    changed = False
    for path in sorted(_paths(one) | _paths(two)):
        before, after = ((s.read(*path.split("/", 1)) or "").splitlines(keepends=True) for s in (one, two))
        for line in difflib.unified_diff(before, after, f"{old}/{path}", f"{new}/{path}", n=0):
            changed = True
            typer.echo(line, nl=not line.endswith("\n"))
    raise typer.Exit(1 if changed else 0)


def _paths(source: "db.Source") -> set[str]:
    return {f"{gpu}/{file}" for gpu in source.gpus() for file in source.files(gpu)}


@db_app.command()
def merge(sources: list[Path], into: Annotated[Path, typer.Option(help="Directory that is written.")]) -> None:
    """Union of directories of tables: for each key the fastest measured block. The order does not matter."""
    from fpk import db

    for path, text in merged([db.DirectorySource(p) for p in (*sources, into)]).items():
        _write(into / path, text)


def merged(sources: "list[db.DirectorySource]") -> dict[str, str]:
    """Text of every file of the union."""
    from fpk import db

    texts = {}
    for path in sorted(set().union(*map(_paths, sources))):
        found = [text for source in sources if (text := source.read(*path.split("/", 1)))]
        if path.endswith("/runs.csv"):
            texts[path] = db.dump_runs(run for text in found for run in db.parse_runs(text).values())
        else:
            texts[path] = db.dump_table(db.merge_rows([db.parse_table(text) for text in found]))
    return texts


def _write(path: Path, text: str) -> None:
    """Replace the file at once, and only if its content changes."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8", newline="\n")
    temporary.replace(path)
    _out.print(f"wrote {path}", highlight=False)


@db_app.command()
def export(into: Path, where: Where = None) -> None:
    """Write the tables that look-ups use, sorted and normalised; .parquet or .csv for one flat file of all rows."""
    from fpk import db

    if into.suffix in (".parquet", ".csv"):
        from fpk.tune.export import frame_of_tables

        frame = frame_of_tables(_tables(where))
        frame.to_parquet(into) if into.suffix == ".parquet" else frame.to_csv(into, index=False)
        _out.print(f"wrote {into}: {len(frame)} rows", highlight=False)
        return
    sources = [s for s in _tables(where).sources if isinstance(s, db.DirectorySource)]
    for path, text in merged(sources).items():
        _write(into / path, text)


@db_app.command()
def verify(
    stale: Annotated[bool, typer.Option("--stale", help="List rows measured with other kernels or versions.")] = False,
    retime: Annotated[bool, typer.Option("--retime", help="Time stale rows again on this GPU.")] = False,
    where: Where = None,
) -> None:
    """Do the rows still hold? Lists stale rows, with --retime measures them again. Exit code 1 if any is stale."""
    import torch
    import triton

    import fpk.kernels  # noqa: F401
    from fpk import db
    from fpk.tune.lint import stale as stale_rows
    from fpk.tune.lint import untried

    directory = where or db.packaged_directory()
    source = db.DirectorySource(directory)
    found = stale_rows(source, {"torch": torch.__version__, "triton": triton.__version__})
    for gpu, op, row, why in found if stale or not retime else []:
        _out.print(f"{gpu}/{op}: {_words(row.key)} rank {row.rank}: {why}", highlight=False, soft_wrap=True)
    for gpu, op, run, kernels in untried(source) if stale or not retime else []:
        _out.print(f"{gpu}/{op}: run {run} did not try {', '.join(kernels)}, which came later", highlight=False)
    _out.print(f"{directory}: {len(found)} stale rows")
    if retime and found:
        from fpk.tune.verify import retime as retime_rows

        retime_rows(found, directory)
    raise typer.Exit(1 if found and not retime else 0)


@db_app.command()
def snapshot(into: Path, where: Where = None) -> None:
    """Freeze the tables in one file; prints its content hash. `with fpk.use(file)` reads it."""
    from fpk import db

    frozen = db.snapshot(_tables(where))
    into.write_bytes(frozen.content)
    typer.echo(frozen.hash)
