"""`fpk tune`: plan a sweep, run it, resume it after a kill, look at it, and turn its trials into tables."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

if TYPE_CHECKING:
    from fpk.tune.sweep import Options
    from fpk.tune.trials import TrialStore

    pass

tune_app = typer.Typer(help="Measure candidates and keep the best: plan, sweep, resume, status, finish.")
_out = Console(soft_wrap=True)

Store = Annotated[Path | None, typer.Option("--store", help="SQLite file of the trials; default: the user's state.")]
Interpreter = Annotated[bool, typer.Option(help="Without a GPU: run in Triton's interpreter all the same.")]
Name = Annotated[str, typer.Option("--name", help="Name of the sweep.")]
Seconds = Annotated[float, typer.Option("--minutes", help="Stop cleanly after this long; 0: never.")]


def _open(store: Path | None, new: bool = False):  # type: ignore[no-untyped-def]
    """The trial store. Only a plan makes a new one: a wrong name must not leave an empty file behind."""
    from fpk.tune.run import state_directory
    from fpk.tune.trials import TrialStore

    path = store or state_directory() / "trials.sqlite"
    if not new and not path.is_file():
        raise typer.BadParameter(f"--store: expected a file of trials, got {path} (`fpk tune plan` makes one)")
    try:
        return TrialStore(path)
    except OSError as error:
        raise typer.BadParameter(f"--store: cannot write {path} ({error}); name another file") from error


@tune_app.command()
def plan(
    ops: Annotated[list[str], typer.Argument(help="Ops; `all` for every op.")],
    case: Annotated[list[str] | None, typer.Option(help="Names of cases, or words: `M=64 N=4096`.")] = None,
    name: Name = "default",
    budget: Annotated[int, typer.Option(help="Candidates tried per case; 0: all.")] = 100,
    store: Store = None,
) -> None:
    """Write down what is to be tuned. Repeating it adds to the plan."""
    import fpk
    from fpk import db
    from fpk.tune.sweep import order_cases

    jobs = []
    for op_name in fpk.OPS if ops == ["all"] else ops:
        if op_name not in fpk.OPS:
            raise typer.BadParameter(f"ops: expected names out of {', '.join(fpk.OPS)}, got {op_name!r}")
        cases = fpk.OPS[op_name].cases
        for wanted in case or list(cases):
            if wanted not in cases and "=" not in wanted:
                raise typer.BadParameter(f"--case: {op_name} has no case {wanted!r}")
            jobs.append((op_name, dict(cases[wanted]) if wanted in cases else db.parse_case(wanted)))
    trials = _open(store, new=True)
    trials.plan(name, [(n, db.spell_case(c)) for n, c in order_cases(jobs)], {"budget": budget})
    _out.print(f"{trials.path}: sweep {name!r} has {len(trials.jobs(name))} cases")


@tune_app.command()
def sweep(
    name: Name = "default",
    minutes: Seconds = 0.0,
    store: Store = None,
    ray: Annotated[int, typer.Option("--ray", help="Use this many GPUs of the Ray cluster that runs here.")] = 0,
    interpreter: Interpreter = False,
) -> None:
    """Work through the plan on all GPUs of this host, or of a Ray cluster. A kill loses at most one trial per GPU."""
    import json

    import torch

    import fpk.kernels  # noqa: F401  declares every op
    from fpk.tune.run import default_options
    from fpk.tune.sweep import sweep as work

    trials = _open(store)
    jobs = trials.jobs(name)
    if not jobs:
        raise typer.BadParameter(f"--name: no sweep {name!r} is planned in {trials.path}")
    if not (ray or interpreter or torch.cuda.is_available()):
        raise typer.BadParameter(
            "--interpreter: no GPU is here; times of Triton's interpreter do not matter, and unrepaired it calls right "
            "kernels wrong. Say --interpreter to try the machinery"
        )
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    options = default_options(budget=json.loads(jobs[0]["options"])["budget"], until=until)
    try:
        finished = _ray_sweep(trials, name, options, ray) if ray else work(trials, name, options, _say)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    _out.print("done: `fpk tune finish` writes the tables" if finished else "open cases left: `fpk tune resume`")


def _say(line: str) -> None:
    _out.print(line, highlight=False, soft_wrap=True)


def _ray_sweep(trials: "TrialStore", name: str, options: "Options", actors: int) -> bool:
    import ray

    from fpk.tune.ray_sweep import ray_sweep

    ray.init(address="auto", log_to_driver=False)
    return ray_sweep(trials, name, options, actors, progress=_say)


@tune_app.command()
def resume(
    name: Name = "default", minutes: Seconds = 0.0, store: Store = None, interpreter: Interpreter = False
) -> None:
    """Go on with a sweep that was interrupted, killed or ran out of time; known trials are not repeated."""
    sweep(name, minutes, store, interpreter=interpreter)


@tune_app.command()
def status(store: Store = None) -> None:
    """Sweeps with their open cases and time left; verdicts so far."""
    trials = _open(store)
    grid = Grid(title=str(trials.path))
    for column in ("sweep", "cases", "open", "minutes left"):
        grid.add_column(column, justify="left" if column == "sweep" else "right")
    jobs = trials.jobs()
    for name in sorted({j["sweep"] for j in jobs}):
        mine = [j for j in jobs if j["sweep"] == name]
        took = [j["seconds"] for j in mine if j["seconds"] is not None]
        still = sum(j["state"] == "open" for j in mine)
        left = f"{sum(took) / len(took) * still / 60:.1f}" if took else "?"
        grid.add_row(name, str(len(mine)), str(still), left)
    _out.print(grid)
    counts: dict[tuple[str, str], int] = {}
    for trial in trials.trials():
        counts[trial.op, trial.status] = counts.get((trial.op, trial.status), 0) + 1
    for (op, verdict), count in sorted(counts.items()):
        _out.print(f"{op}: {count} {verdict}", highlight=False)


@tune_app.command()
def finish(
    into: Annotated[Path | None, typer.Option(help="Directory of tables; default: the user's.")] = None,
    store: Store = None,
) -> None:
    """Turn final trials into winner tables; prints what each key gained."""
    import fpk.kernels  # noqa: F401
    from fpk import db
    from fpk.tune.records import texts_of_store
    from fpk.tune.run import write_tables

    target = into or db.user_directory()
    if target is None:
        raise typer.BadParameter("--into: this user has no data directory: name one")
    trials = _open(store)
    texts = texts_of_store(trials)
    for path, text in texts.items():
        if not path.endswith("runs.csv"):
            best = [row for row in db.parse_table(text) if row.rank <= 1]
            gains = sorted(row.default_us / row.us for row in best)
            _out.print(f"{path}: {len(best)} keys, median gain {gains[len(gains) // 2]:.2f}x", highlight=False)
    for changed in write_tables(texts, target):
        _out.print(f"wrote {changed}", highlight=False)


@tune_app.command()
def export(into: Path, source: Annotated[list[Path] | None, typer.Option("--from", help="Trials to read.")] = None,
           store: Store = None) -> None:  # fmt: skip
    """Write trials to .parquet, .csv, .t4.json (Kernel Tuner's format), .jsonl or .jsonl.gz."""
    from fpk.tune.export import export as write
    from fpk.tune.export import read_trials

    found = [t for path in source for t in read_trials(path)] if source else _open(store).trials()
    try:
        write(found, into)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    _out.print(f"wrote {into}: {len(found)} trials", highlight=False)
