"""`fpk bench`: time ops against what else does the same, and compare two results."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd

bench_app = typer.Typer(help="Time ops, cases and implementations; compare two results; draw them.")


@bench_app.command()
def run(
    ops: Annotated[list[str], typer.Argument(help="Ops; `all` for every op.")],
    case: Annotated[list[str] | None, typer.Option(help="Names of cases, with wildcards; repeatable.")] = None,
    impl: Annotated[
        list[str] | None, typer.Option(help="fpk, default, copy, torch, vllm, ...; repeatable. Default: all there are.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Result: .csv or .parquet.")] = Path("bench.csv"),
    milliseconds: Annotated[float, typer.Option("--ms", min=0.1, help="Spent on each implementation of a case.")] = 60,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no case after this long; 0: never stop.")] = 0,
    device: Annotated[str | None, typer.Option(help="Default: cuda if there is a GPU, else cpu.")] = None,
) -> None:
    """Time implementations of ops in turns, each checked against the reference first."""
    import torch

    import fpk
    from fpk.study.bench import sweep, write_results

    if out.suffix not in (".csv", ".parquet"):
        raise typer.BadParameter(f"--out: expected a name that ends in .csv or .parquet, got {out}")
    if (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        print("no GPU: what is timed are references on a CPU, on small cases", file=sys.stderr)
    names = list(fpk.OPS) if ops == ["all"] else ops
    try:
        found = sweep(
            names, case, impl, device=device, about_ms=milliseconds, minutes=minutes,
            progress=lambda line: print(line, file=sys.stderr, flush=True),
        )  # fmt: skip
        out.parent.mkdir(parents=True, exist_ok=True)
        print(write_results(found, out))
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def _read(path: Path) -> "pd.DataFrame":
    from fpk.study.bench import read_results

    try:
        return read_results(path)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


@bench_app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="The earlier result.")],
    b: Annotated[Path, typer.Argument(help="The later one.")],
    least: Annotated[float, typer.Option(help="Percent below which a change is called the same.")] = 2.0,
    every: Annotated[bool, typer.Option("--all", help="Also rows that stayed the same.")] = False,
    strict: Annotated[bool, typer.Option(help="Exit code 1 if something became slower or broke.")] = False,
) -> None:
    """What became faster or slower by more than the noise of both measurements."""
    from rich.console import Console
    from rich.table import Table

    from fpk.study.compare import compare as compared
    from fpk.study.compare import machines

    earlier, later = _read(a), _read(b)
    try:
        found = compared(earlier, later, least)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    console = Console(soft_wrap=True)
    for line in machines(earlier, later):
        console.print(f"differs: {line}", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("op", "case", "impl", "a, us", "b, us", "speed-up", "drift", "beyond, %", "verdict"):
        table.add_column(column, justify="right" if column in ("a, us", "b, us", "speed-up", "drift") else "left")
    for r in found.to_dict("records"):
        if every or r["verdict"] != "same":
            table.add_row(*_cells(r))
    console.print(table)
    counts = found["verdict"].value_counts() if len(found) else {}
    console.print(", ".join(f"{n} {verdict}" for verdict, n in dict(counts).items()) or "nothing to compare")
    if strict and {"slower", "broken"} & set(dict(counts)):
        raise typer.Exit(1)


def _cells(r: dict[str, Any]) -> list[str]:
    def spell(value: float, digits: int) -> str:
        return "-" if value != value else f"{value:.{digits}f}"

    numbers = [spell(r["a_us"], 2), spell(r["b_us"], 2), spell(r["speedup"], 3), spell(r["drift"], 3)]
    return [r["op"], r["case"], r["impl"], *numbers, spell(r["threshold_percent"], 1), r["verdict"]]


@bench_app.command()
def plot(
    result: Annotated[Path, typer.Argument(help="A result of `fpk bench run`.")],
    out: Annotated[Path, typer.Option(help="Directory for the pictures.")] = Path("plots"),
) -> None:
    """Draw the roofline, speed-ups and times over tokens, each as far as the result has the rows."""
    from fpk.study.charts import bench_figures
    from fpk.study.report import png_of

    frame = _read(result)
    out.mkdir(parents=True, exist_ok=True)
    for name, (figure, _) in bench_figures(frame).items():
        (out / f"{name}.png").write_bytes(png_of(figure))
        print(out / f"{name}.png")


report_app = typer.Typer()


@report_app.command()
def report(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("report.html"),
    bench: Annotated[list[Path] | None, typer.Option(help="Result of `fpk bench run`; repeatable.")] = None,
    trials: Annotated[list[Path] | None, typer.Option(help="Trials: SQLite, Parquet, JSON lines; repeatable.")] = None,
    study: Annotated[list[Path] | None, typer.Option(help="Directory of `fpk study --out`; repeatable.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Whose winners; default: those of every GPU.")] = None,
    database: Annotated[bool, typer.Option(help="Winners of the autotune database.")] = True,
    title: Annotated[str, typer.Option(help="Heading.")] = "",
) -> None:
    """One HTML page, without requests to anywhere: benchmarks, tuning, winners and studies."""
    from fpk.study import page

    sections: list[page.Section] = []
    try:
        for path in bench or []:
            sections.append(page.bench_section(_read(path), path.stem.replace("_", " ").capitalize()))
        if trials:
            sections.append(_trials(trials, page))
        if database:
            from fpk import db
            from fpk.tune.export import frame_of_tables

            sections.append(page.database_section(frame_of_tables(db.default()), gpu))
        sections += [page.study_section(path) for path in study or []]
        heading = title or f"fpk on {gpu}" if gpu else title or "fpk report"
        text = page.page(heading, sections, "Low-precision kernels: what was measured, and on what.")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    print(out)


def _trials(paths: list[Path], page: Any) -> Any:
    from fpk.study.charts import trial_table
    from fpk.tune.export import read_trials

    for path in paths:
        if not path.is_file():
            raise ValueError(f"report: expected a file of trials, got {path}")
    found = [t for path in paths for t in read_trials(path)]
    if not found:
        raise ValueError(f"report: expected trials, got none in {', '.join(map(str, paths))}")
    return page.trials_section(trial_table(found))
