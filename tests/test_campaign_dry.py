"""Every command of the campaign's plan walked through without a GPU: no name is met for the first time on one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

from campaign_plan import PLAN

from fpk import db
from fpk.device import pretend
from fpk.op import OPS
from fpk.tune.arguments import outline

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench"
LAWS = [m for m in PLAN if m.dry[0] == "pytest"]
TABLES = [m for m in PLAN if m.table]
WALKED = [m for m in PLAN if m not in LAWS + TABLES[1:]]


SCRIPT = """
import sys
from pathlib import Path
from types import SimpleNamespace as Measurement
sys.path.insert(0, "tests/bench")
import dry
from campaign_plan import PLAN
out = Path(sys.argv[1])
well = dry.walk([m for m in PLAN if m.name in sys.argv[2:]], out)
wrong = [("no_option", ("dense", "--no-such")), ("fine", ("imports", "notebooks/5_model.py")), ("gone", ("no_module",))]
broken = dry.walk([Measurement(name=name, dry=words) for name, words in wrong], out)
sys.exit(well + 2 * broken)
"""


def test_every_command_gets_to_its_rows_and_a_broken_one_is_seen(tmp_path):
    env = {n: v for n, v in os.environ.items() if n not in ("TRITON_INTERPRET", "FPK_GATE")}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path), *(m.name for m in WALKED)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    said = done.stdout[-6000:] + done.stderr[-2000:]
    assert done.returncode == 2 and f"all {len(WALKED)} walked" in said and "2 of 3 fail: no_option, gone" in said, said
    written = {m.name for m in WALKED if list((tmp_path / m.name).glob("*.csv"))}
    assert {"dense_few", "packed", "layer_block", "layer_gpt_oss", "soak", "expert_parallel", "dispatch"} <= written


@pytest.mark.parametrize("measurement", LAWS, ids=lambda m: m.name)
def test_laws_that_are_planned_exist(measurement):
    paths = [w for w in measurement.dry[1:] if w.startswith("tests/")]
    assert paths and all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("measurement", TABLES, ids=lambda m: m.name)
def test_cases_of_tables_are_the_ops_own(measurement):
    """And each is there once; look-ups know them, which a few are asked for."""
    op, cases = OPS[measurement.table], [db.parse_case(c) for c in measurement.wanted.split(";")]
    assert len({db.spell_case(c) for c in cases}) == len(cases)
    few = cases[:: max(1, len(cases) // 3)]
    with pretend("sm90"):
        keys = {db.spell_case(op.key(**outline(op, case))) for case in few}
    assert len(keys) == len(few)


def test_the_plan_is_sound():
    names = [m.name for m in PLAN]
    assert len(set(names)) == len(names) and all(n.replace("_", "").isalnum() for n in names)
    for m in PLAN:
        assert 0 < m.floor < m.most and m.fills and m.command[0] == "{python}", m.name
        assert m.quiet or not m.host, m.name
        scripts = [w for w in m.command if w.startswith(("{bench}/", "{root}/")) and w.endswith(".py")]
        assert all(Path(w.replace("{bench}", str(BENCH)).replace("{root}", str(ROOT))).exists() for w in scripts), (
            m.name
        )
        assert any("{out}" in w for w in m.command), m.name
    some = ("tables_group", "dense_block_many", "packed", "dispatch")
    assert sorted(map(names.index, some)) == list(map(names.index, some))


def test_what_is_planned_and_what_results_lack_is_listed(capsys):
    from campaign_list import show

    wanted = [m for m in PLAN if m.name in ("verify_packed", "dense_few", "laws_dense")]
    assert show(wanted) == 0
    said = capsys.readouterr().out
    assert all(m.name in said for m in wanted)
    assert "8 cases, " in said and "results/nv-h200-sm90-132/products.csv: " in said and "no file of results" in said


def test_unknown_names_are_told(capsys, monkeypatch):
    import campaign

    monkeypatch.setattr(sys, "argv", ["campaign.py", "--only", "dense_few,no_such", "--list"])
    with pytest.raises(SystemExit):
        campaign.main()
    assert "got no_such" in capsys.readouterr().err
