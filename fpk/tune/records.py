"""From trials to winners: which rows deserve to be stored, and the run they belong to."""

import datetime
import json
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import triton

import fpk
from fpk import db
from fpk.device import Device
from fpk.op import Op
from fpk.tune.lint import kernel_hash
from fpk.tune.trials import Trial, TrialStore

RANKS = 5
LEAST_GAIN_PERCENT = 1.0


def run_of(op: Op[..., Any], device: Device, timer: str, clock_mhz: float | None) -> db.Run:
    """The record of a run that starts now."""
    facts = _nvml_facts()
    cuda = torch.version.cuda or getattr(torch.version, "hip", None) or ""
    return db.Run(
        op=op.name, gpu=db.gpu_id(device), date=datetime.date.today().isoformat(), fpk=fpk.__version__,
        torch=torch.__version__, triton=triton.__version__, cuda=cuda, driver=facts.get("driver", ""),
        source=kernel_hash(op), timer=timer, sm_clock_mhz=_whole(facts.get("sm_clock_mhz") or clock_mhz),
        memory_clock_mhz=_whole(facts.get("memory_clock_mhz")), power_limit_w=_whole(facts.get("power_limit_w")),
    )  # fmt: skip


def _whole(value: Any) -> str:
    return "" if value is None else f"{float(value):.0f}"


def _nvml_facts() -> dict[str, Any]:
    """Driver, largest clocks and power limit, if nvidia-smi says."""
    import subprocess

    names = ("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")
    try:
        done = subprocess.run(
            ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, timeout=20,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    words = [w.strip() for w in done.stdout.splitlines()[0].split(",")] if done.returncode == 0 and done.stdout else []
    if len(words) != len(names):
        return {}
    facts: dict[str, Any] = {"driver": words[0]}
    for name, word in zip(("sm_clock_mhz", "memory_clock_mhz", "power_limit_w"), words[1:], strict=True):
        try:
            facts[name] = float(word)
        except ValueError:
            continue
    return facts


def winners(finals: Iterable[Trial], default: str, ranks: int = RANKS) -> list[db.Row]:
    """Rows of one key from its final trials: what beat the default by more than the noise, fastest first.

    If nothing did, one row of rank 0 says so with the default's own config and time; if the default itself has no
    time, there is nothing to compare with and no row.
    """
    ok = [t for t in finals if t.status == "ok" and t.us is not None]
    standing = next((t for t in ok if t.config == default), None)
    if standing is None or standing.us is None:
        return []
    faster = []
    for trial in ok:
        noise = max(trial.noise_percent or 0.0, standing.noise_percent or 0.0, LEAST_GAIN_PERCENT)
        assert trial.us is not None
        if trial is not standing and db.round_us(trial.us) < db.round_us(standing.us) * (1 - noise / 100):
            faster.append((trial, noise))
    faster.sort(key=lambda item: (db.round_us(item[0].us or 0.0), item[0].shared_bytes or 0, item[0].config))
    if not faster:
        return [_row(standing, 0, standing.us, standing.noise_percent or 0.0)]
    return [_row(trial, rank, standing.us, noise) for rank, (trial, noise) in enumerate(faster[:ranks], 1)]


def _row(trial: Trial, rank: int, default_us: float, noise: float) -> db.Row:
    assert trial.us is not None
    return db.Row(
        json.loads(trial.key), rank, json.loads(trial.config), db.round_us(trial.us), db.round_us(default_us),
        round(noise, 2), trial.shared_bytes or 0, trial.case, trial.run,
    )  # fmt: skip


def rows_of_store(store: TrialStore) -> dict[tuple[str, str], list[db.Row]]:
    """Winner rows by (gpu, op) of every key that has final trials; of several runs of a key, the latest."""
    groups: dict[tuple[str, str, str], dict[str, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    for trial in store.trials(stage="final"):
        groups[trial.gpu, trial.op, trial.key][trial.run].append(trial)
    rows: dict[tuple[str, str], list[db.Row]] = defaultdict(list)
    for (gpu, op, _), by_run in sorted(groups.items()):
        latest = max(by_run.values(), key=lambda trials: (max(t.created for t in trials), trials[0].run))
        # the executor times the default first; a marker in `detail` keeps that through merges of stores
        default = next((t.config for t in latest if t.detail == "default"), "")
        rows[gpu, op] += winners(latest, default)
    return rows


def texts_of_store(store: TrialStore) -> dict[str, str]:
    """Files of a database directory: "<gpu>/<op>.csv" and "<gpu>/runs.csv"."""
    texts = {}
    runs: dict[str, list[db.Run]] = defaultdict(list)
    known = {run: db.Run(**fields) for run, fields in store.runs().items()}
    for (gpu, op), rows in rows_of_store(store).items():
        if rows:
            texts[f"{gpu}/{op}.csv"] = db.dump_table(rows)
            runs[gpu] += [known[run] for run in sorted({row.run for row in rows})]
    for gpu, of_gpu in runs.items():
        texts[f"{gpu}/runs.csv"] = db.dump_runs(of_gpu)
    return texts
