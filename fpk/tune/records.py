"""From trials to winners: which rows deserve to be stored, and the run they belong to."""

import dataclasses
import datetime
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import triton

import fpk
from fpk import db
from fpk.device import Device
from fpk.op import Op
from fpk.tune.sources import covers, sources_of
from fpk.tune.trials import Trial, TrialStore

RANKS = 5
TILES = 6  # rows of a product's key
WITHIN = 1.6  # of the winner's time: what is slower says nothing about neighbours
LEAST_GAIN_PERCENT = 1.0


def run_of(op: Op[..., Any], device: Device, timer: str, clock_mhz: float | None) -> db.Run:
    """The record of a run that starts now."""
    facts = _nvml_facts()
    cuda = torch.version.cuda or getattr(torch.version, "hip", None) or ""
    return db.Run(
        op=op.name, gpu=db.gpu_id(device), date=datetime.date.today().isoformat(), fpk=fpk.__version__,
        torch=torch.__version__, triton=triton.__version__, cuda=cuda, driver=facts.get("driver", ""),
        source=sources_of(op), timer=timer, sm_clock_mhz=_whole(facts.get("sm_clock_mhz") or clock_mhz),
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


def winners(finals: Iterable[Trial], default: str, screened: Iterable[Trial] = (), ranks: int = RANKS) -> list[db.Row]:
    """Rows of one key from its final trials: what beat the default by more than the noise, fastest first.

    If nothing did, a row of rank 0 says so with the default's own config and time; if the default itself has no
    time, there is nothing to compare with and no row.

    A product's further rows are for its neighbours (`fpk._db_scale`): the fastest config of each other tile, from rank
    2 on. Their times are those of screening, times what the winner's final took over its screening.
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
        faster = [(standing, standing.noise_percent or 0.0)]
    best, noise = faster[0]
    first = _row(best, 0 if best is standing else 1, standing.us, noise)
    if tile_of(first.config) is None:
        return [first, *(_row(t, rank, standing.us, n) for rank, (t, n) in enumerate(faster[1:ranks], 2))]
    return [first, *_other_tiles(first, best, screened)]


def tile_of(config: db.Config) -> tuple[Any, ...] | None:
    """What decides how a product's config divides the work: configs that agree in it scale alike. None: no product."""
    if "BLOCK_M" not in config or not {"BLOCK_N", "ROWS"} & config.keys():
        return None
    whole = "ROWS" in config and not config.get("PER_SM")  # tiles of weight-only products, or even shares of them
    return whole, *(config.get(name) for name in ("kernel", "BLOCK_M", "BLOCK_N", "ROWS", "SPLIT_K", "CLUSTER"))


def _other_tiles(first: db.Row, best: Trial, screened: Iterable[Trial]) -> list[db.Row]:
    ok = {t.config: t for t in screened if t.status == "ok" and t.us and t.key == best.key}
    if best.config not in ok or not best.us:
        return []
    scale = best.us / (ok[best.config].us or best.us)
    ordered = sorted(ok.values(), key=lambda t: (t.config != best.config, t.us or 0.0, t.shared_bytes or 0, t.config))
    rows: list[db.Row] = []
    for text, us in distinct_tiles([(t.config, (t.us or 0.0) * scale) for t in ordered])[1:]:
        row = _row(ok[text], len(rows) + 2, first.default_us, ok[text].noise_percent or 0.0)
        rows.append(dataclasses.replace(row, us=max(db.round_us(us), first.us)))
    return rows


def distinct_tiles(ordered: Sequence[tuple[str, float]], more: int = 0) -> list[tuple[str, float]]:
    """The first of each tile among (config as JSON, microseconds) in falling merit; if no product, the first `more`."""
    seen: set[Any] = set()
    chosen: list[tuple[str, float]] = []
    for text, us in ordered:
        tile = tile_of(json.loads(text))
        if tile is None:
            return list(ordered[:more])
        if us > WITHIN * ordered[0][1] or len(chosen) == TILES:
            break
        if tile not in seen:
            seen.add(tile)
            chosen.append((text, us))
    return chosen


def _row(trial: Trial, rank: int, default_us: float, noise: float) -> db.Row:
    assert trial.us is not None
    return db.Row(
        json.loads(trial.key), rank, json.loads(trial.config), db.round_us(trial.us), db.round_us(default_us),
        round(noise, 2), trial.shared_bytes or 0, trial.case, trial.run,
    )  # fmt: skip


def rows_of(trials: Iterable[Trial], sources: Mapping[str, str]) -> dict[tuple[str, str], list[db.Row]]:
    """Winner rows by (gpu, op) of every key that has final trials; of several runs of a key, the latest.

    sources: what runs recorded, by run. The latest run's screening is completed by that of earlier ones, as far as they
    found the kernels as it did: it did not try those candidates again.
    """
    groups: dict[tuple[str, str, str], dict[str, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    screened: dict[tuple[str, str, str], list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.stage == "final":
            groups[trial.gpu, trial.op, trial.key][trial.run].append(trial)
        elif trial.stage == "screen":
            screened[trial.gpu, trial.op, trial.key].append(trial)
    rows: dict[tuple[str, str], list[db.Row]] = defaultdict(list)
    for (gpu, op, key), by_run in sorted(groups.items()):
        latest = max(by_run.values(), key=lambda trials: (max(t.created for t in trials), trials[0].run))
        # the executor times the default first; a marker in `detail` keeps that through merges of stores
        default = next((t.config for t in latest if t.detail == "default"), "")
        run = latest[0].run
        usable = [t for t in screened[gpu, op, key] if t.run == run or covers(sources[run], t.source)]
        rows[gpu, op] += winners(latest, default, sorted(usable, key=lambda t: t.run == run))
    return rows


def texts_of_store(store: TrialStore) -> dict[str, str]:
    """Files of a database directory: "<gpu>/<op>.csv" and "<gpu>/runs.csv"."""
    return texts_of(store.trials(), store.runs())


def texts_of(trials: Iterable[Trial], about: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The same from trials that were read and the fields of their runs."""
    texts = {}
    runs: dict[str, list[db.Run]] = defaultdict(list)
    known = {run: db.Run(**fields) for run, fields in about.items()}
    for (gpu, op), rows in rows_of(trials, {run: of_run.source for run, of_run in known.items()}).items():
        if rows:
            texts[f"{gpu}/{op}.csv"] = db.dump_table(rows)
            runs[gpu] += [known[run] for run in sorted({row.run for row in rows})]
    for gpu, of_gpu in runs.items():
        texts[f"{gpu}/runs.csv"] = db.dump_runs(of_gpu)
    return texts
