"""What the search and the look-up are worth on measured trials (`tune_data/*.parquet`, one GPU's log each).

`exhaustive_<op>.parquet` holds every launchable candidate at several shapes, `tuned_<...>.parquet` the trials behind
shipped tables, `verify_<...>.parquet` trials of shapes that the shipped tables do not have. All come from
`python -m fpk.tune.h200_job` by `fpk tune export`.
"""

import json
import statistics
from pathlib import Path

import pytest

import fpk
from fpk import db
from fpk.device import pretend, pretend_triton
from fpk.tune.arguments import legal_candidates, outline
from fpk.tune.export import read_trials
from fpk.tune.lint import device_of
from fpk.tune.replay import (
    lookup_regret,
    random_regret,
    search_regret,
    searched,
    sizes_of,
    summary,
    times_of,
    warm_start,
)
from fpk.tune.trials import canonical

DATA = Path(__file__).parent / "tune_data"
VERIFY = sorted(DATA.glob("verify_*.parquet"))
EXHAUSTIVE = sorted(DATA.glob("exhaustive_*.parquet"))
TUNED = sorted(DATA.glob("tuned_*.parquet"))
TRITON = "3.6.0"  # that the logs are of
GONE = {"scaled_mm": "alternate", "scaled_mm_group": "pairs"}  # kernels that logs speak of and that lost


def defaults_of(trials):
    """{op: {key: the config that the op takes by itself, as JSON}} where these trials were measured."""
    found = {}
    for op, key, case, gpu in sorted({(t.op, t.key, t.case, t.gpu) for t in trials}):
        bound, device = outline(fpk.OPS[op], fpk.db.parse_case(case)), device_of(gpu)
        with pretend(device), pretend_triton(TRITON):
            config = next(c for c in fpk.OPS[op].configs(**bound) if fpk.OPS[op].is_legal(c, bound, device))
        found.setdefault(op, {})[key] = canonical(config)
    return found


class Log:
    """One op's exhaustive log: times by key, and per key the candidates in the op's order, the default first.

    Times are those of screening, the same short measurement for every candidate: that is what a search sees. Finals, of
    a few candidates, ran minutes later on a warmer chip, up to a fifth slower, and would be another scale.
    """

    def __init__(self, path):
        self.op = path.stem.removeprefix("exhaustive_")
        self.trials = [t for t in read_trials(path) if t.op == self.op]
        screened = [t for t in self.trials if t.stage == "screen"]
        times = times_of(screened, self.op)
        self.order = {}
        for key, case, gpu in sorted({(t.key, t.case, t.gpu) for t in screened}):
            logged = {t.config for t in screened if t.key == key}
            bound = outline(fpk.OPS[self.op], fpk.db.parse_case(case))
            own = [canonical(c) for c in legal_candidates(fpk.OPS[self.op], bound, device_of(gpu))]
            self.order[key] = [c for c in own if c in logged]
        self.times = {k: times[k] for k in self.order if len(times.get(k, ())) >= 500}


@pytest.fixture(scope="module", params=EXHAUSTIVE, ids=lambda p: p.stem)
def log(request):
    return Log(request.param)


def test_the_log_is_large(log):
    assert len(log.times) >= 8
    assert all(len(times) >= 500 for times in log.times.values())
    statuses = {t.status for t in log.trials}
    assert "ok" in statuses


def test_a_cold_search_needs_a_hundred_trials(log):
    found = {k: search_regret(t, log.order[k], 100, sizes=sizes_of(k))[0] for k, t in log.times.items()}
    drawn = {k: random_regret(t, log.order[k], 100) for k, t in log.times.items()}
    assert sum(r <= 5 for r in found.values()) >= 0.9 * len(found), found
    assert sum(found.values()) < sum(drawn.values())


def test_a_warm_search_needs_thirty_trials(log):
    sweep = {k: searched(t, log.order[k]) for k, t in log.times.items()}
    found = {k: search_regret(t, log.order[k], 30, **warm_start(sweep, k))[0] for k, t in log.times.items()}
    assert sum(r <= 5 for r in found.values()) >= 0.9 * len(found), found


@pytest.fixture(scope="module", params=TUNED, ids=lambda p: p.stem)
def tuned(request):
    """{op: (times, each key's default)}"""
    trials = read_trials(request.param)
    screened = [t for t in trials if t.stage == "screen"]  # one scale: finals ran warmer, up to a fifth slower
    return {op: (times_of(screened, op), defaults) for op, defaults in defaults_of(trials).items()}


def test_look_up_answers_unseen_layers_well(tuned):
    """Each layer is hidden in turn and answered by the others' rows; all ops together.

    (Of four token counts that lie a factor of eight apart none can be hidden: those between them are verified below.)
    """
    regrets = [r for times, default in tuned.values() for r in lookup_regret(times, "layer", defaults=default)]
    middle, p95 = summary(regrets)
    assert len(regrets) >= 60 and middle <= 8.0 and p95 <= 20.0, sorted((r.percent, r.key) for r in regrets)[-8:]


def test_look_up_answers_token_counts_between_those_of_a_layer_well(tuned):
    """Where a layer's token counts lie a factor of four apart, those between two others are hidden in turn."""
    regrets = []
    for times, default in tuned.values():
        counts: dict[str, list[int]] = {}
        for key in times:
            shape = json.loads(key)
            counts.setdefault(json.dumps(shape | dict(M=0)), []).append(shape["M"])
        for r in lookup_regret(times, "M", defaults=default):
            shape = json.loads(r.key)
            sizes = counts[json.dumps(shape | dict(M=0))]
            if {shape["M"] // 4, shape["M"] * 4} <= set(sizes):
                regrets.append(r)
    middle, p95 = summary(regrets)
    assert len(regrets) >= 12 and middle <= 5.0 and p95 <= 12.0, sorted((r.percent, r.key) for r in regrets)[-4:]


@pytest.fixture(scope="module", params=VERIFY, ids=lambda p: p.stem)
def verified(request):
    """Per op and key that no shipped row has: is the same for other M shipped, and what does the answer cost, in %.

    The first answer that was measured counts, the op's default where there is none. Logs are as old as the tables and
    estimates of their day: where those have changed since, another answer comes first now and then.
    """
    shipped = db.Tables(db.DirectorySource(db.packaged_directory(), "packaged"))
    trials, found, later = read_trials(request.param), [], 0
    defaults = defaults_of(trials)
    for op, gpu in sorted({(t.op, t.gpu) for t in trials}):
        device = device_of(gpu)
        layers = [{n: v for n, v in r.key.items() if n != "M"} for r in shipped.table(0, gpu, op).rows]
        for key, times in times_of([t for t in trials if t.stage == "screen"], op, gpu).items():
            shape = json.loads(key)
            answers = shipped.answers(op, shape, device)
            if answers and answers[0].level == "exact":
                continue
            offered = [*(canonical(a.row.config) for a in answers), defaults[op][key]]
            answer = next(config for config in offered if config in times)
            later += answer != offered[0]
            regret = 100 * (times[answer] / min(times.values()) - 1)
            found.append(({n: v for n, v in shape.items() if n != "M"} in layers, regret, f"{op} {key}"))
    assert later <= 0.1 * len(found), f"{later} of {len(found)} answers were not measured"
    return found


@pytest.mark.parametrize("known_layer,median,worst", [(False, 8.0, 20.0), (True, 5.0, 12.0)])
def test_shipped_rows_answer_shapes_they_do_not_have(verified, known_layer, median, worst):
    regrets = sorted((regret, where) for known, regret, where in verified if known is known_layer)
    assert len(regrets) >= 12
    values = [regret for regret, _ in regrets]
    assert statistics.median(values) <= median, regrets[-8:]
    assert values[round(0.95 * (len(values) - 1))] <= worst, regrets[-8:]


@pytest.mark.parametrize("path", EXHAUSTIVE + TUNED, ids=lambda p: p.stem)
def test_logged_candidates_are_the_ops_own(path):
    """Every config of the log is one that the op yields for that key: the log and the code speak of the same space."""
    trials = read_trials(path)
    for op_name, case, gpu in sorted({(t.op, t.case, t.gpu) for t in trials})[::5]:
        op = fpk.OPS[op_name]
        bound = outline(op, fpk.db.parse_case(case))
        with pretend_triton("3.6.0"):  # all logs so far
            yielded = {canonical(c) for c in legal_candidates(op, bound, device_of(gpu))}
        logged = {t.config for t in trials if (t.op, t.case, t.gpu) == (op_name, case, gpu)}
        logged = {c for c in logged if json.loads(c).get("kernel") != GONE.get(op_name, "")}
        assert len(logged & yielded) >= 0.9 * len(logged), f"{op_name} {case}"
