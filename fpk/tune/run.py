"""`fpk.tune(op, cases)`: tune in one call and look at every trial."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import fpk.kernels  # noqa: F401  declares every op
from fpk import db
from fpk.device import of
from fpk.op import OPS, Op
from fpk.tune.records import texts_of_store
from fpk.tune.sweep import Options, gpu_options, order_cases, sweep
from fpk.tune.trials import Trial, TrialStore


def state_directory() -> Path:
    """Where sweeps keep their trials: FPK_TUNE_DIR, else the user's state directory, else the working directory."""
    named = os.environ.get("FPK_TUNE_DIR")
    if named:
        return Path(named)
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "fpk" if Path(state).is_absolute() else Path.cwd() / ".fpk"


def default_options(**more: Any) -> Options:
    """For the GPUs that are here. Without one, kernels run in Triton's interpreter, timed by the wall clock."""
    if torch.cuda.is_available():
        return gpu_options(of(torch.device("cuda")), **more)
    settings: dict[str, Any] = {"env": {"TRITON_INTERPRET": "1"}, "trial_limit_s": 60.0} | more
    return Options("fpk.tune.executor:interpreter", of(torch.device("cpu")), **settings)


def tune(
    op: Op[..., Any] | str,
    cases: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    budget: int = 100,
    store: str | Path | None = None,
    into: str | Path | None = None,
    options: Options | None = None,
    verbose: bool = True,
) -> pd.DataFrame:
    """Tune an op and return one row per trial.

    Args:
        op: the op or its name.
        cases: names out of `op.cases`, or a mapping of names to `op.inputs` arguments; None: all of the op's cases.
        budget: candidates tried per case, 0 for all.
        store: SQLite file of the trials; known ones are not repeated. Default: `trials.sqlite` in `state_directory()`.
        into: directory of tables that gets the winners; None: none is written.
        options: executor, device and limits; `default_options()` uses the GPUs that are here.

    Returns:
        DataFrame of trials, columns as in `Trial`, times in microseconds, fastest first within a case and stage.

    Raises:
        ValueError: an unknown op or case.
    """
    if isinstance(op, str):
        if op not in OPS:
            raise ValueError(f"tune.op: expected one of {', '.join(OPS)}, got {op!r}")
        op = OPS[op]
    jobs = order_cases((op.name, dict(case)) for case in _cases(op, cases))
    options = options or default_options()
    options.budget = budget
    trials = TrialStore(store or state_directory() / "trials.sqlite")
    name = f"tune {db.gpu_id(options.device)} {time.time_ns()}"
    trials.plan(name, [(n, db.spell_case(case)) for n, case in jobs], {"budget": budget})
    sweep(trials, name, options, print if verbose else lambda line: None)
    if into is not None:
        write_tables(texts_of_store(trials), Path(into))
    wanted = {db.spell_case(case) for _, case in jobs}
    found = [t for t in trials.trials(op=op.name, gpu=db.gpu_id(options.device)) if t.case in wanted]
    trials.close()
    return frame(found)


def _cases(op: Op[..., Any], cases: Any) -> Iterable[Mapping[str, Any]]:
    if cases is None:
        return op.cases.values()
    if isinstance(cases, Mapping):
        return cases.values()
    for name in cases:
        if name not in op.cases:
            raise ValueError(f"tune.cases: expected names out of {op.name}.cases, got {name!r}")
    return [op.cases[name] for name in cases]


def frame(trials: Iterable[Trial]) -> pd.DataFrame:
    """Trials as a DataFrame, sorted by case, stage and time."""
    table = pd.DataFrame([vars(t) for t in trials], columns=[f.name for f in fields(Trial)])
    return table.sort_values(["op", "case", "stage", "us", "config"], ignore_index=True)


def write_tables(texts: Mapping[str, str], into: Path) -> list[Path]:
    """Lay winner tables over a directory's: new keys are added, re-measured ones replaced. Returns what changed."""
    changed = []
    for path, text in sorted(texts.items()):
        target = into / path
        old = target.read_text(encoding="utf-8") if target.exists() else ""
        if path.endswith("/runs.csv"):
            merged = db.dump_runs([*(db.parse_runs(old).values() if old else ()), *db.parse_runs(text).values()])
        else:
            rows = db.parse_table(text)
            keys = {frozenset(row.key.items()) for row in rows}
            kept = [row for row in (db.parse_table(old) if old else ()) if frozenset(row.key.items()) not in keys]
            merged = db.dump_table([*kept, *rows])
        if merged != old:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_suffix(".tmp")
            temporary.write_text(merged, encoding="utf-8", newline="\n")
            temporary.replace(target)
            changed.append(target)
    return changed
