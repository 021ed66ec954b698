"""The search on landscapes that are known in full, and the formats trials are exported in."""

import json
import math
import subprocess
import sys
from itertools import product

import pandas as pd
import pytest
import torch

from fpk.tune import search as search_module
from fpk.tune.export import export, read_trials, t4, trials_of_frame
from fpk.tune.replay import Regret, lookup_regret, random_regret, search_regret, searched, summary, times_of, warm_start
from fpk.tune.run import frame
from fpk.tune.search import Search, features
from fpk.tune.trials import Trial, canonical

SPACE = [
    dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=w, num_stages=s, kernel=kernel)
    for m, n, k, w, s, kernel in product(
        (16, 32, 64, 128), (32, 64, 128, 256), (64, 128), (4, 8), (2, 3, 4, 5), ("tile", "persistent")
    )
]


def landscape(config, M, N=4096, K=4096):
    """Microseconds by a simple model of a matrix product: waves of tiles, each as fast as its shape allows."""
    m, n, k, warps, stages = (config[f] for f in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages"))
    waves = math.ceil(math.ceil(M / m) * math.ceil(N / n) / 132)
    work = m * n * K / 4e6 / min(1.0, (m * n / 16384) ** 0.5) / (1.0 if (warps == 8) == (m * n >= 16384) else 0.8)
    bytes_ = (m + n) * K / 25e3 * (1 + 1.0 / stages) * (1.1 if k == 64 else 1.0)
    spill = 1.6 if m * n > 4096 * warps else 1.0  # accumulators beyond the registers
    fixed = 3.0 if config["kernel"] == "persistent" and waves < 2 else 2.0
    return fixed + waves * max(work, bytes_) * spill * (0.95 if config["kernel"] == "persistent" else 1.0)


TIMES = {
    canonical(dict(M=m, N=n, K=4096)): {canonical(c): landscape(c, m, n) for c in SPACE}
    for m, n in product((16, 64, 256, 1024, 4096), (2048, 4096, 8192))
}
ORDER = [canonical(c) for c in SPACE]


@pytest.mark.parametrize("forest", [True, False], ids=["trees", "ridge"])
def test_search_finds_the_best_sooner_than_chance(forest, monkeypatch):
    if not forest:
        monkeypatch.setattr(search_module, "predict", lambda x, y, at, seed: search_module._ridge(x, y, at))
    else:
        pytest.importorskip("sklearn")
    found = [search_regret(times, ORDER, 100)[0] for times in list(TIMES.values())[::3]]
    drawn = [random_regret(times, ORDER, 100) for times in list(TIMES.values())[::3]]
    assert sum(r <= 5 for r in found) >= 0.9 * len(found), found
    assert sum(found) < sum(drawn)


def test_a_warm_start_needs_thirty_trials():
    sweep = {key: searched(times, ORDER) for key, times in TIMES.items()}
    found = [search_regret(TIMES[key], ORDER, 30, **warm_start(sweep, key))[0] for key in TIMES]
    assert sum(r <= 5 for r in found) >= 0.9 * len(found), found


def test_search_is_deterministic_and_tries_nothing_twice():
    def order():
        search, asked = Search(SPACE, [5, 9], budget=60), []
        while batch := search.ask():
            assert len(batch) <= search.batch
            for i in batch:
                asked.append(i)
                search.tell(i, None if i % 7 == 0 and i else landscape(SPACE[i], 64))
        return asked

    first = order()
    assert first == order() and len(first) == len(set(first)) == 60 and first[:3] == [0, 5, 9]


def test_a_small_space_is_tried_in_full():
    search = Search(SPACE[:10], budget=100)
    asked = []
    while batch := search.ask():
        asked += batch
        for i in batch:
            search.tell(i, 1.0)
    assert sorted(asked) == list(range(10)) and search.ranking() == list(range(10))
    assert Search([], budget=5).ask() == []


def test_failures_do_not_stop_a_search():
    search = Search(SPACE, budget=40)
    while batch := search.ask():
        for i in batch:
            search.tell(i, None)
    assert len(search.us) == 40 and search.ranking() == []


def test_features_measure_steps():
    x = features([dict(B=16, k="a"), dict(B=32, k="a"), dict(B=32, k="b"), dict(B=32)])
    assert float((x[0] - x[1]).abs().sum()) == 1.0 and float((x[1] - x[2]).abs().sum()) == 1.0
    assert torch.isfinite(x).all()


def test_lookup_regret_hides_what_it_should():
    by_layer, by_m = lookup_regret(TIMES, "layer"), lookup_regret(TIMES, "M")
    assert len(by_layer) == len(by_m) == len(TIMES)
    shapes = {k: json.loads(k) for k in TIMES}
    own = {k: {c: 1.0 + i + 100 * shapes[k]["N"] for i, c in enumerate(ORDER[:5])} for k in TIMES}
    assert all(r.percent == 0 for r in lookup_regret(own, "layer")), "the same order everywhere: no regret"
    assert summary([Regret("", float(p)) for p in range(101)]) == (50.0, 95.0)


def trials():
    base = dict(op="op", gpu="g", source="s", key='{"M":16}', case="M=16", stage="screen", run="r", created="2026")
    return [
        Trial(config='{"B":1}', status="ok", us=12.5, samples=7, shared_bytes=64, compile_s=1.5, seconds=2.0, **base),
        Trial(config='{"B":2}', status="crash", detail="exit code -6", **base),
        Trial(config='{"B":3}', status="compile_error", **base),
    ]


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.jsonl.gz"])
def test_trials_survive_their_formats(tmp_path, name):
    export(trials(), tmp_path / name)
    back = read_trials(tmp_path / name)
    assert sorted(back, key=lambda t: t.config) == trials()
    assert sorted(trials_of_frame(frame(trials())), key=lambda t: t.config) == trials()


def test_t4_follows_the_schema(tmp_path):
    document = t4(trials())
    assert document["schema_version"] == "1.0.0"
    words = ["correct", "runtime", "compile"]
    assert [r["invalidity"] for r in document["results"]] == words
    for result in document["results"]:
        assert {"configuration", "times", "invalidity", "correctness"} <= result.keys()
        assert all(isinstance(v, (int, float, list)) for v in result["times"].values())
    assert document["results"][0]["measurements"][0] == {"name": "time", "value": 0.0125, "unit": "ms"}
    export(trials(), tmp_path / "x.t4.json")
    assert json.loads((tmp_path / "x.t4.json").read_text()) == document
    export(trials(), tmp_path / "x.csv")
    assert list(pd.read_csv(tmp_path / "x.csv").us.dropna()) == [12.5]
    with pytest.raises(ValueError, match=r"expected \.parquet"):
        export(trials(), tmp_path / "x.yaml")


def test_finals_count_more_than_screening():
    first = trials()[0]
    final = Trial(**{**vars(first), "stage": "final", "us": 11.0})
    assert times_of([final, first], "op") == {'{"M":16}': {'{"B":1}': 11.0}}


def test_the_package_is_the_function():
    code = "import fpk.tune, sys; assert 'torch' not in sys.modules; print(callable(fpk.tune), fpk.tune.tune.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "tune"], done.stderr
