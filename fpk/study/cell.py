"""Tuning in the process that asks: for an op of a notebook cell, which no worker process could import."""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import torch

from fpk import db
from fpk.device import of
from fpk.op import Op
from fpk.tune.arguments import legal_candidates
from fpk.tune.executor import OpExecutor
from fpk.tune.records import run_of, winners
from fpk.tune.run import frame
from fpk.tune.sources import part
from fpk.tune.timing import GraphTimer, WallTimer
from fpk.tune.trials import Trial, canonical


def tune_here(
    op: Op[..., Any],
    cases: Mapping[str, Mapping[str, Any]] | None = None,
    budget: int = 100,
    finalists: int = 4,
    progress: Callable[[str], None] | None = print,
    **timing: Any,
) -> tuple[pd.DataFrame, db.Tables]:
    """Try candidates of an op in this process, each checked against the reference before it is timed.

    A candidate that crashes the process takes the notebook along: `fpk.tune` guards against that, for ops of the
    package. Without a GPU, import triton with TRITON_INTERPRET=1; times are then those of the interpreter.

    Args:
        op: any op, also one that a cell has just declared.
        cases: names and arguments of `op.inputs`; None: the op's own.
        budget: candidates tried per case, in the order of `op.configs`; the first is the default.
        finalists: how many of the fastest meet the default again, in alternating rounds.
        progress: called with a line per case.
        timing: `screen_ms`, `final_ms` and `rounds` of the executor.

    Returns:
        Every trial, as `fpk.tune` gives them, and the winners as a database: `with fpk.use(tables): op(...)`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    timer = GraphTimer() if device == "cuda" else WallTimer()
    executor = OpExecutor(device, timer, **({"screen_ms": 1.0, "final_ms": 20.0, "rounds": 3} | timing))
    here = of(torch.device(device))
    run = run_of(op, here, timer.name, timer.clock_mhz())
    trials: list[Trial] = []
    rows: list[db.Row] = []
    for name, case in (cases if cases is not None else op.cases).items():
        found = _tune_case(op, dict(case), name, executor, budget, finalists, run)
        finals = [t for t in found if t.stage == "final"]
        default = next((t.config for t in finals if t.detail == "default"), "")
        rows += winners(finals, default)
        trials += found
        if progress:
            best = min((t.us for t in finals if t.us), default=float("nan"))
            ok = sum(t.status == "ok" and t.stage == "screen" for t in found)
            progress(f"{op.name} {name}: {ok} of {len(found) - len(finals)} candidates ran, best {best:.4g} us")
    texts = {f"{here.id}/{op.name}.csv": db.dump_table(rows)} if rows else {}
    return frame(trials), db.Tables(db.MemorySource(texts, "tuned here"))


def _tune_case(
    op: Op[..., Any], case: dict[str, Any], name: str, executor: OpExecutor, budget: int, finalists: int, run: db.Run
) -> list[Trial]:
    device = of(torch.device(executor.device))
    bound = op.bind(**op.inputs(**case, device=executor.device))
    common: dict[str, Any] = dict(
        op=op.name, gpu=device.id, source=run.source, key=canonical(op.key(**bound)), case=name, run=run.run
    )
    candidates = legal_candidates(op, bound, device)[:budget]
    screened = [_screen(op, case, c, executor, common) for c in candidates]
    ranked = sorted((t.us, i) for i, t in enumerate(screened) if t.status == "ok" and t.us is not None and i)
    chosen = [candidates[i] for i in (0, *(i for _, i in ranked[:finalists]))] if screened[0].status == "ok" else []
    finals = []
    if len(chosen) > 1:
        for number, values in enumerate(executor.finals(op.name, case, chosen)):
            config, detail = canonical(chosen[number]), "" if number else "default"
            finals.append(_trial(common, config, "final", "ok", values, detail=detail))
    return screened + finals


def _screen(
    op: Op[..., Any], case: dict[str, Any], config: dict[str, Any], executor: OpExecutor, common: dict[str, Any]
) -> Trial:
    start = time.monotonic()
    try:
        values = executor.trial(op.name, case, config)
    except Exception as error:
        verdict = executor.verdict(error)
        if verdict == "crash" and executor.device == "cuda":
            raise  # the GPU's context is gone: nothing after this could be believed
        return _trial(common, canonical(config), "screen", verdict, {}, detail=str(error)[:200])
    return _trial(common, canonical(config), "screen", "ok", values | {"seconds": time.monotonic() - start})


def _trial(
    common: dict[str, Any], config: str, stage: str, status: str, values: dict[str, Any], detail: str = ""
) -> Trial:
    names = {f.name for f in dataclasses.fields(Trial)} - common.keys() - {"config", "stage", "status", "detail"}
    known = {n: v for n, v in values.items() if n in names} | {"samples": values.get("n")}
    common = common | {"source": part(common["source"], json.loads(config))}
    return Trial(**common, config=config, stage=stage, status=status, detail=detail, **known)
