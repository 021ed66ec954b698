"""Judge search and look-up on trials that were measured once: no GPU, nothing new measured, the same answer always."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fpk import db
from fpk.tune.records import distinct_tiles
from fpk.tune.search import Prior, Search
from fpk.tune.trials import Trial, canonical

Times = dict[str, dict[str, float]]  # key as JSON -> config as JSON -> microseconds


@dataclass(frozen=True)
class Regret:
    """What an answer costs over the best measured one, in percent: 0 is perfect."""

    key: str
    percent: float
    trials: int = 0
    level: str = ""


def times_of(trials: Iterable[Trial], op: str, gpu: str | None = None) -> Times:
    """Times of every candidate that ran, by key; a final measurement counts more than a screening."""
    times: Times = defaultdict(dict)
    for stage in ("screen", "final"):
        for trial in trials:
            if (trial.op, trial.stage, trial.status) == (op, stage, "ok") and trial.us and gpu in (None, trial.gpu):
                times[trial.key][trial.config] = trial.us
    return dict(times)


def search_regret(
    times: Mapping[str, float], order: Sequence[str], budget: int, seeds: Sequence[str] = (), seed: int = 0,
    within: float = 0.0, prior: Sequence[Prior] = (), sizes: Mapping[str, int] | None = None,
) -> tuple[float, int]:  # fmt: skip
    """Replay a search over the recorded candidates.

    Args:
        times: microseconds by config; a candidate without one has failed.
        order: all candidates, the default first.
        within: stop as soon as the best found is within this many percent of the best there is.

    Returns:
        (percent over the best of all, trials used).
    """
    search = _search(order, budget, seeds, seed, prior, sizes)
    best, found, used = min(times.values()), float("inf"), 0
    while batch := search.ask():
        for i in batch:
            us = times.get(order[i])
            search.tell(i, us)
            found, used = min(found, us or found), used + 1
            if found <= best * (1 + within / 100):
                return 100 * (found / best - 1), used
    return 100 * (found / best - 1), used


def _search(
    order: Sequence[str],
    budget: int,
    seeds: Sequence[str],
    seed: int,
    prior: Sequence[Prior],
    sizes: Mapping[str, int] | None,
) -> Search:
    numbers = {text: i for i, text in enumerate(order)}
    known = [numbers[s] for s in seeds if s in numbers]
    return Search([json.loads(text) for text in order], known, budget, seed=seed, prior=prior, sizes=sizes)


def searched(times: Mapping[str, float], order: Sequence[str], budget: int = 100) -> dict[str, float]:
    """What a cold search of that budget would have measured."""
    search = _search(order, budget, (), 0, (), None)
    while batch := search.ask():
        for i in batch:
            search.tell(i, times.get(order[i]))
    return {order[i]: us for i, us in search.us.items() if us is not None}


def random_regret(times: Mapping[str, float], order: Sequence[str], budget: int, seed: int = 0) -> float:
    """The same for candidates in random order."""
    import random

    drawn = random.Random(seed).sample(list(order), min(budget, len(order)))
    return 100 * (min(times.get(text, float("inf")) for text in drawn) / min(times.values()) - 1)


def warm_start(sweep: Times, key: str, per_shape: int = 3) -> dict[str, Any]:
    """Seeds, prior and sizes for `key` from an earlier sweep of other shapes; `key` itself is left out."""
    others = {k: v for k, v in sweep.items() if k != key}
    return dict(seeds=warm_seeds(others, key, per_shape), prior=prior_of(others, key), sizes=sizes_of(key))


def sizes_of(key: str) -> dict[str, int]:
    return {n: v for n, v in json.loads(key).items() if n in db.SIZES}


def prior_of(sweep: Times, key: str, shapes: int = 8, per_shape: int = 120) -> list[Prior]:
    """Trials of the shapes nearest to `key` among those with the same flags: the fastest, and some of the others."""
    table = _table(sweep, 1)
    near = [block[0].key for _, block in table.nearest(json.loads(key), shapes)]
    prior = []
    for shape in near:
        text = canonical(shape)
        best = min(sweep[text].values())
        ordered = sorted(sweep[text].items(), key=lambda item: (item[1], item[0]))
        fastest, rest = ordered[: per_shape // 3], ordered[per_shape // 3 :]
        step = -(-len(rest) // (per_shape - per_shape // 3)) or 1
        prior += [Prior(json.loads(c), sizes_of(text), us / best) for c, us in (*fastest, *rest[::step])]
    return prior


def warm_seeds(times: Times, key: str, per_shape: int = 4) -> list[str]:
    """Winners of the recorded shapes nearest to `key`, which itself is left out: what a later sweep starts from."""
    table = _table({k: v for k, v in times.items() if k != key}, per_shape)
    found = [canonical(row.config) for _, block in table.nearest(json.loads(key)) for row in block]
    return list(dict.fromkeys(found))


def _table(times: Times, ranks: int) -> db.Table:
    return db.Table([row for key, found in _ordered(times) for row in _rows(key, found[:ranks])])


def _shipped(times: Times, sm_count: int, defaults: Mapping[str, str]) -> db.Table:
    """As tables hold them: the fastest config of each key, and of a product each other tile's fastest."""
    rows = []
    for key, found in _ordered(times):
        default_us = times[key].get(defaults.get(key, ""), 0.0)
        rows += [replace(row, default_us=default_us) for row in _rows(key, distinct_tiles(found, 1))]
    return db.Table(rows, sm_count)


def _ordered(times: Times) -> list[tuple[str, list[tuple[str, float]]]]:
    return [(key, sorted(found.items(), key=lambda item: (item[1], item[0]))) for key, found in times.items()]


def _rows(key: str, found: Sequence[tuple[str, float]]) -> list[db.Row]:
    return [db.Row(json.loads(key), n, json.loads(c), us, 0.0, 0.0, 0, "", "") for n, (c, us) in enumerate(found, 1)]


def lookup_regret(
    times: Times, hide: str, sm_count: int = 132, defaults: Mapping[str, str] | None = None
) -> list[Regret]:
    """Regret of the look-up's answer from other shapes when a shape's own rows are hidden.

    hide: "layer" hides every M of the shape's (N, K, ...); "M" hides only the key itself, so its layer remains.
    A config that was not measured at the shape (it was not legal there) is passed over, as a look-up does. defaults:
    each key's default config, which answers where the look-up has none.
    """
    defaults = defaults or {}
    result = []
    for key, by_config in times.items():
        shape = json.loads(key)
        rest = {n: v for n, v in shape.items() if n != "M"}
        known = {
            k: v
            for k, v in times.items()
            if k != key and (hide == "M" or {n: v for n, v in json.loads(k).items() if n != "M"} != rest)
        }
        best = min(by_config.values())
        table = _shipped(known, sm_count, defaults)
        rows = [row for _, _, row in table.scaled(shape, sm_count, len(by_config))]
        if not rows and not table.prefers_default(shape, sm_count):
            rows = [row for _, block in table.nearest(shape) for row in block]
        offered = [text for row in rows if (text := canonical(row.config)) in by_config]
        level = "nearest" if offered else "default"
        offered += [text for text in [defaults.get(key)] if text in by_config]
        if offered:
            result.append(Regret(key, 100 * (by_config[offered[0]] / best - 1), level=level))
    return result


def summary(regrets: Sequence[Regret]) -> tuple[float, float]:
    """Median and 95th percentile."""
    values = sorted(r.percent for r in regrets)
    return statistics.median(values), values[min(len(values) - 1, round(0.95 * (len(values) - 1)))]


def report(path: str) -> None:
    """Print what search and look-up are worth on a file of trials."""
    from pathlib import Path

    from fpk import _db_lookup
    from fpk.tune.export import read_trials

    trials = read_trials(Path(path))
    for op in sorted({t.op for t in trials}):
        times = times_of(trials, op)
        order: dict[str, list[str]] = defaultdict(list)
        for t in trials:
            if t.op == op and t.stage == "screen":
                order[t.key].append(t.config)
        full = {k: t for k, t in times.items() if len(t) >= 300}
        sweep = {k: searched(t, order[k]) for k, t in full.items()}
        for key, by_config in full.items():
            cold = search_regret(by_config, order[key], 100, sizes=sizes_of(key))[0]
            warm = search_regret(by_config, order[key], 30, **warm_start(sweep, key))[0]
            drawn = random_regret(by_config, order[key], 100)
            print(f"{op} {sizes_of(key)}: {len(by_config)} candidates; regret cold {cold:.1f} %, warm {warm:.1f} %, "
                  f"random {drawn:.1f} %", flush=True)  # fmt: skip
        for weight in (0.5, 1.0, 2.0, 4.0):
            _db_lookup.WEIGHT_M = weight
            lines = [f"{hide} hidden {m:.1f} / {p:.1f} %" for hide in ("layer", "M")
                     if (found := lookup_regret(times, hide)) for m, p in [summary(found)]]  # fmt: skip
            print(f"{op}: look-up with M weighing {weight}: median / p95 with {'; with '.join(lines)}", flush=True)


if __name__ == "__main__":
    import sys

    report(sys.argv[1])
