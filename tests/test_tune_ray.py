"""A sweep over a real Ray cluster on this machine."""

from pathlib import Path

import pytest
from test_tune import CASES, GOOD, OP, options

from fpk import db
from fpk.tune.ray_sweep import ray_sweep
from fpk.tune.sweep import sweep
from fpk.tune.trials import TrialStore

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("TRITON_INTERPRET", "1")
        ray.init(num_cpus=2, num_gpus=0, include_dashboard=False, log_to_driver=False, configure_logging=False)
        yield
        ray.shutdown()


def planned(path):
    store = TrialStore(path)
    store.plan("s", [(OP, db.spell_case(c)) for c in CASES], {})
    return store


def outcome(store):
    return {(t.key, t.config, t.stage, t.status, t.us) for t in store.trials()}


def test_actors_tune_what_one_host_would(cluster, tmp_path):
    far, near = planned(tmp_path / "far.sqlite"), planned(tmp_path / "near.sqlite")
    lines = []
    assert ray_sweep(far, "s", options(), actors=2, gpus_per_actor=0, progress=lines.append)
    assert sweep(near, "s", options())
    assert outcome(far) == outcome(near) and far.count() == 2 * len(GOOD) * len(CASES)
    assert far.runs() == near.runs()
    assert len(lines) == len(CASES) and "min left" in lines[0]
    assert ray_sweep(far, "s", options(), actors=2, gpus_per_actor=0), "nothing is left to do"


def test_a_lost_actor_costs_its_case_only(cluster, tmp_path):
    store, lines = planned(tmp_path / "t.sqlite"), []
    lethal = options()
    lethal.executor_options["kill_parent_once"] = str(tmp_path / "killed")
    assert ray_sweep(store, "s", lethal, actors=2, gpus_per_actor=0, progress=lines.append)
    assert {t.case for t in store.trials(stage="final")} == {db.spell_case(c) for c in CASES}
    assert any("actor lost" in line for line in lines), lines
