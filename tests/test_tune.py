"""Sweeps in real worker processes: verdicts of candidates that go wrong, resuming, winners."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tune_stubs as stubs

import fpk
from fpk import db
from fpk.device import Device
from fpk.tune.arguments import key_of, legal_candidates, outline
from fpk.tune.lint import lint
from fpk.tune.records import winners
from fpk.tune.sweep import Options, order_cases, sweep
from fpk.tune.trials import Trial, TrialStore
from fpk.tune.worker import Worker, run_all

TESTS = Path(__file__).parent
H200 = Device("sm90", "NVIDIA H200", "nv", 132)
OP = "quantize_fp8_token"
GOOD = [dict(kernel="loop", BLOCK_M=m, BLOCK_K=256, num_warps=w, num_stages=1) for m in (4, 2, 8, 16) for w in (4, 8)]
BAD = {
    stubs.HANG: "timeout", stubs.ABORT: "crash", stubs.SEGFAULT: "crash", stubs.ILLEGAL: "crash",
    stubs.BIG: "out_of_resources", stubs.BROKEN: "compile_error", stubs.WRONG: "incorrect",
    stubs.UNWRITTEN: "incorrect",
}  # fmt: skip


def options(configs=GOOD, log="", **more):
    """A trial may take as long as a loaded machine makes it; who hangs is given up after a second, see `impatient`."""
    patient = dict.fromkeys(("trial_limit_s", "compile_limit_s", "finals_limit_s"), 300.0)
    return Options(
        "tune_stubs:make", H200, {"log": str(log)}, {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)},
        candidates=lambda op, case: [dict(c) for c in configs], **(patient | more),
    )  # fmt: skip


@pytest.fixture
def impatient(monkeypatch):
    """A candidate that never answers costs one second."""
    submit = Worker.submit

    def soon(self, method, *args, limit_s):
        hangs = args and isinstance(args[-1], dict) and args[-1].get("num_stages") == stubs.HANG
        submit(self, method, *args, limit_s=1.0 if hangs else limit_s)

    monkeypatch.setattr(Worker, "submit", soon)


def test_every_bad_candidate_gets_its_verdict_and_the_sweep_goes_on(tmp_path, impatient):
    bad = [GOOD[0] | dict(num_stages=kind) for kind in BAD]
    table = fpk.tune(
        OP, cases={"a": dict(M=16, K=512)}, options=options([*GOOD[:2], *bad, *GOOD[2:]]), budget=0,
        store=tmp_path / "t.sqlite", into=tmp_path / "db", verbose=False,
    )  # fmt: skip
    screen = table[table.stage == "screen"]
    got = {json.loads(c)["num_stages"]: s for c, s in zip(screen.config, screen.status, strict=True)}
    assert got == BAD | {1: "ok"}
    assert (screen.status == "ok").sum() == len(GOOD)
    assert screen[screen.status == "timeout"].seconds.tolist() == [pytest.approx(1.0)]
    finals = table[(table.stage == "final") & (table.status == "ok")]
    assert json.loads(finals.iloc[0].config) == GOOD[5], "the fastest of the good ones wins"
    rows = db.parse_table((tmp_path / "db" / H200.id / f"{OP}.csv").read_text())
    assert rows[0].config == GOOD[5] and rows[0].us == 10.0 and rows[0].default_us == 15.0
    problems = lint(db.DirectorySource(tmp_path / "db"))
    assert problems == []
    op = fpk.OPS[OP]
    with fpk.use(tmp_path / "db") as tables:
        key = key_of(op, dict(M=16, K=512), H200)
        assert tables.candidates(OP, key, H200)[0] == GOOD[5]


def test_known_trials_are_not_repeated(tmp_path):
    log, store = tmp_path / "log", tmp_path / "t.sqlite"
    for _ in range(2):
        fpk.tune(OP, {"a": dict(M=16, K=512)}, options=options(log=log), store=store, verbose=False)
    screened = len(GOOD)
    finals = len(GOOD)
    assert len(log.read_text().splitlines()) == screened + 2 * finals


def test_candidates_that_got_no_memory_are_tried_again(tmp_path):
    candidates = [config | dict(num_stages=stubs.SHORT) for config in GOOD]
    for taken, verdict in (("1", "out_of_resources"), (None, "ok"), ("1", "ok")):
        asked = options(candidates)
        asked.env |= {"FPK_TEST_MEMORY_IS_TAKEN": taken}
        store = tmp_path / "t.sqlite"
        table = fpk.tune(OP, {"a": dict(M=16, K=512)}, options=asked, store=store, verbose=False)
        assert set(table[table.stage == "screen"].status) == {verdict}


SWEEP = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background inherits that it is ignored
from test_tune import options
from fpk.tune.sweep import sweep
from fpk.tune.trials import TrialStore

class Ended(TrialStore):
    left = int(sys.argv[4])

    def record(self, *trials):
        super().record(*trials)
        self.left -= len(trials)
        if self.left <= 0:
            os.kill(os.getpid(), int(sys.argv[3]))
            time.sleep(600)

sweep(Ended(sys.argv[1]), "s", options(log=sys.argv[2]))
"""
CASES = [dict(M=m, K=k) for m in (16, 32) for k in (256, 512)]


def _plan(path):
    store = TrialStore(path)
    store.plan("s", [(OP, db.spell_case(c)) for c in CASES], {})
    return store


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_goes_on_where_it_was(tmp_path, how):
    """The signal comes when a few trials of the second case are stored."""
    path, log = tmp_path / "t.sqlite", tmp_path / "log"
    store = _plan(path)
    words = [str(path), str(log), str(int(how)), str(2 * len(GOOD) + 3)]
    env = os.environ | {"PYTHONPATH": str(TESTS), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", SWEEP, *words], capture_output=True, env=env, timeout=600)
    assert done.returncode == -how, done.stderr
    assert store.integrity() == "ok"
    before = {t.trial_id for t in store.trials(stage="screen")}
    assert len(before) == len(GOOD) + 3
    assert [j["state"] for j in store.jobs("s")] == ["done", "open", "open", "open"]
    lines = []
    assert sweep(store, "s", options(log=log), lines.append)
    assert before <= {t.trial_id for t in store.trials(stage="screen")}
    assert all(j["state"] == "done" for j in store.jobs("s"))
    assert len(store.trials(stage="screen")) == len(CASES) * len(GOOD)
    assert "min left" in lines[-1]
    # every candidate was screened once and was once among the finals
    assert len(log.read_text().splitlines()) == 2 * len(CASES) * len(GOOD)


def test_two_gpus_share_the_work(tmp_path):
    store = _plan(tmp_path / "t.sqlite")
    assert sweep(store, "s", options(gpus=("0", "1")))
    assert {t.case for t in store.trials(stage="final")} == {db.spell_case(c) for c in CASES}


def test_a_sweep_stops_at_its_time(tmp_path):
    store = _plan(tmp_path / "t.sqlite")
    assert not sweep(store, "s", options(until=time.monotonic()))
    assert all(j["state"] == "open" for j in store.jobs("s"))


def test_candidates_compile_ahead_in_processes(tmp_path):
    bad = [GOOD[0] | dict(num_stages=kind) for kind in (stubs.BIG, stubs.BROKEN)]
    o = options([*GOOD, *bad])
    o.compilers, o.compile_executor, o.compile_env = 2, o.executor, o.env
    store = _plan(tmp_path / "t.sqlite")
    assert sweep(store, "s", o)
    statuses = [t.status for t in store.trials(stage="screen")]
    assert statuses.count("out_of_resources") == statuses.count("compile_error") == len(CASES)


def test_run_all_replaces_workers_that_die(impatient):
    calls = [("trial", (OP, dict(M=4, K=64), GOOD[0] | dict(num_stages=s))) for s in (1, stubs.ABORT, 1, stubs.HANG, 1)]
    o = options()
    workers = [Worker(o.executor, {}, o.env) for _ in range(2)]
    replies = dict(run_all(workers, calls, 300.0))
    for worker in workers:
        worker.close()
    assert [replies[i].status for i in range(5)] == ["ok", "crash", "ok", "timeout", "ok"]


def test_a_worker_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match=r"could not start.*no_such_module"):
        Worker("no_such_module:make").call("describe", limit_s=5)


def trial(us, config, noise=0.5, status="ok", detail="", shared=0):
    return Trial(
        OP, "g", "s", '{"M":16}', "M=16", config, "final", status, us=us, noise_percent=noise, detail=detail, run="r",
        shared_bytes=shared,
    )  # fmt: skip


def test_only_what_beats_the_default_by_more_than_the_noise_wins():
    default = trial(10.0, '{"B":0}', detail="default")
    assert [r.rank for r in winners([default, trial(9.0, '{"B":1}'), trial(8.0, '{"B":2}')], '{"B":0}')] == [1, 2]
    (stands,) = winners([default, trial(9.95, '{"B":1}')], '{"B":0}')
    assert (stands.rank, stands.config, stands.us) == (0, {"B": 0}, 10.0)
    assert winners([default, trial(9.0, '{"B":1}', noise=12.0)], '{"B":0}')[0].rank == 0
    assert winners([default, trial(5.0, '{"B":1}', status="incorrect")], '{"B":0}')[0].rank == 0
    assert winners([trial(9.0, '{"B":1}')], '{"B":0}') == [], "no default, nothing to compare with"
    tie = winners([default, trial(8.0, '{"B":2}', shared=9), trial(8.0, '{"B":3}', shared=1)], '{"B":0}')
    assert [r.config["B"] for r in tie] == [3, 2]


@pytest.mark.parametrize("name", sorted(fpk.OPS))
def test_outline_gives_the_key_of_real_arguments(name):
    """One key function: the tuner's key of a case is the key a call with such arguments looks up."""
    op = fpk.OPS[name]
    case = {n: tuple(v)[-1] for n, v in op.domain.items()}
    bound, real = outline(op, case), op.bind(**op.inputs(**case, device="cpu"))
    assert op.key(**bound) == op.key(**real)
    assert [c for c in op.configs(**bound)] == [c for c in op.configs(**real)]
    for n, value in real.items():
        if hasattr(value, "stride"):
            assert (value.shape, value.stride(), value.dtype) == (bound[n].shape, bound[n].stride(), bound[n].dtype)
    assert legal_candidates(op, bound, Device("cpu", "cpu"))


def test_neighbours_are_tuned_one_after_the_other():
    jobs = [("op", dict(M=m, N=n, K=64)) for m in (64, 1) for n in (128, 64)]
    assert [(c["N"], c["M"]) for _, c in order_cases(jobs)] == [(64, 1), (64, 64), (128, 1), (128, 64)]
