"""The trial store under many writers and under kill -9, in real processes."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer.testing

from fpk.cli_tune import tune_app
from fpk.tune.trials import Trial, TrialStore

RUNNER = typer.testing.CliRunner()
ROOT = Path(__file__).parent.parent
WRITER = """
import sys, time
from fpk.tune.trials import Trial, TrialStore
path, name, count, gate = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
import os
while gate and not os.path.exists(gate):
    time.sleep(0.001)
store = TrialStore(path)
for i in range(count):
    trial = Trial("op", "gpu", "source", f"{name} {i}", "M=1", "{}", "screen", "ok", us=float(i), run="r")
    store.record(trial)
    print(trial.trial_id, flush=True)
"""


def writer(path, name, count, gate=""):
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(count), str(gate)],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_sixteen_writers_lose_nothing(tmp_path):
    """16 processes x 1000 trials; all open the file for the first time at the same moment."""
    path, gate = tmp_path / "trials.sqlite", tmp_path / "gate"
    processes = [writer(path, f"w{n}", 1000, gate) for n in range(16)]
    time.sleep(1.0)
    gate.touch()
    acknowledged = set()
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        acknowledged |= set(out.split())
    store = TrialStore(path)
    assert len(acknowledged) == 16_000 and store.count() == 16_000
    assert {t.trial_id for t in store.trials()} == acknowledged
    assert store.integrity() == "ok"


def test_hundred_kills_lose_nothing(tmp_path):
    path = tmp_path / "trials.sqlite"
    TrialStore(path).close()
    rng, acknowledged, killed = random.Random(0), set(), 0
    for n in range(100):
        process = writer(path, f"k{n}", 1_000_000)
        first = process.stdout.readline()
        time.sleep(rng.random() * 0.02)
        process.kill()
        rest = process.stdout.read()
        process.stderr.close()
        killed += process.wait() == -9
        lines = (first + rest).splitlines(keepends=True)
        acknowledged |= {line.strip() for line in lines if line.endswith("\n")}
        if n % 10 == 9:
            store = TrialStore(path)
            assert store.integrity() == "ok"
            store.close()
    store = TrialStore(path)
    assert killed == 100 and len(acknowledged) >= 100
    assert acknowledged <= {t.trial_id for t in store.trials()}


def test_a_trial_is_stored_once_and_comes_back(tmp_path):
    store = TrialStore(tmp_path / "deep" / "trials.sqlite")
    trial = Trial(
        "op", "gpu", "s", '{"M":1}', "M=1", '{"B":1}', "final", "ok", us=1.5, samples=3, run="r", created="2026"
    )
    store.record(trial)
    store.record(trial)
    assert store.trials() == [trial] and store.trials(op="other") == []
    other = TrialStore(tmp_path / "other.sqlite")
    other.add_run("r", {"a": "b"})
    other.absorb(store)
    assert other.trials(stage="final") == [trial] and other.runs() == {"r": {"a": "b"}}


@pytest.mark.parametrize("command", ("status", "sweep", "resume", "finish", "export"))
def test_only_a_plan_makes_a_store(command, tmp_path):
    more = [str(tmp_path / "out.csv")] if command == "export" else []
    done = RUNNER.invoke(tune_app, [command, *more, "--store", str(tmp_path / "new" / "typo.sqlite")])
    assert done.exit_code == 2 and "expected a file of trials" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("field,value", [("status", "great"), ("stage", "first")])
def test_unknown_words_are_refused(tmp_path, field, value):
    words = dict(stage="screen", status="ok") | {field: value}
    with pytest.raises(ValueError, match=value):
        TrialStore(tmp_path / "t.sqlite").record(Trial("op", "gpu", "s", "{}", "", "{}", **words))


def test_the_store_needs_no_torch():
    code = "import sys, fpk.tune.trials; print('torch' in sys.modules, 'pandas' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.split() == ["False", "False"], done.stderr
