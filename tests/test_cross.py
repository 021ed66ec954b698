"""Every op's default config compiles for every supported GPU, and a few candidates for the target of the day."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from shared_run import once

from fpk.device import SHARED_LIMIT
from fpk.op import OPS

HERE = Path(__file__).parent
CANDIDATES = 2
EVERYWHERE = {"sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"}  # with FP8 in its matrix units


def _cross(*arguments: str) -> tuple[int, str, list[dict]]:
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "records.json"
        command = [sys.executable, "-W", "ignore", HERE / "cross.py", "--json", out, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
        assert out.exists(), done.stderr
        return done.returncode, done.stdout, json.loads(out.read_text())


@functools.cache
def compiled() -> list[dict]:
    _, table, records = once("cross", lambda: _cross("--sample", str(CANDIDATES)))
    print(table)  # shown with a failure: it names the day, which repeats the draw
    return records


@functools.cache
def wrong_kernels() -> tuple[int, list[dict]]:
    """What the checker says about kernels that break its rules (tests/bad_kernels.py)."""
    code, _, records = once("cross_bad", lambda: _cross("--extra", "bad_kernels", "--targets", "sm80,sm90"))
    return code, records


@functools.cache
def with_sizes_of_one() -> dict[str, list[str]]:
    def run() -> dict[str, list[str]]:
        env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
        command = [sys.executable, "-W", "ignore", HERE / "ones.py"]
        return json.loads(subprocess.run(command, env=env, capture_output=True, check=True, timeout=1200).stdout)

    return once("ones", run)


@pytest.mark.parametrize("name", OPS)
def test_sizes_may_be_one(name):
    assert not with_sizes_of_one()[name]


@pytest.mark.parametrize("name", OPS)
def test_compiles_everywhere(name):
    records = [r for r in compiled() if r["op"] == name]
    wrong = [
        f"{r['kernel']} on {r['target']} with {r['config']}: {'; '.join(r['wrong'])}" for r in records if r["wrong"]
    ]
    assert not wrong, "\n".join(wrong)
    assert {r["target"] for r in records} == {"sm80", "sm89", "sm90", "sm100", "sm120", "gfx942", "gfx950"}
    done = [r for r in records if not r["note"]]
    assert done, f"no target compiles {name}: {[r['note'] for r in records]}"
    assert all(r["shared"] <= SHARED_LIMIT[r["target"]] for r in done)
    for record in records:  # the only reason not to compile is a GPU without FP8
        assert not record["note"] or ("FP8" in record["note"] and record["target"] == "sm80"), record["note"]


def test_what_is_nearest_to_the_limit_fits():
    """On the target whose pipeline keeps most: every stage, with padding. `cross.py --hungry` looks at all."""
    ops = "scaled_mm,scaled_mm_group,grouped_mm,mm_packed"
    code, table, records = _cross("--hungry", "--targets", "gfx950", "--ops", ops)
    assert code == 0, table
    assert {r["op"] for r in records} == set(ops.split(","))
    assert max(r["shared"] for r in records) > 0.9 * SHARED_LIMIT["gfx950"]  # the choice does find what fills it


@pytest.mark.parametrize("name", [n for n, op in OPS.items() if any(k.matrix for k in op.kernels.values())])
def test_matrix_kernels_use_the_matrix_unit(name):
    used = {(r["target"], r["matrix"]) for r in compiled() if r["op"] == name and r["matrix"]}
    meant = {t for k in OPS[name].kernels.values() if k.matrix for t in k.targets or EVERYWHERE}
    assert ("sm90", "wgmma.mma_async") in used
    assert {t for t, _ in used} >= meant & EVERYWHERE


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("bad_shared", "shared memory"),
        ("bad_spills", "spills"),
        ("bad_matrix", "no matrix instruction"),
        ("bad_compile", "does not compile"),
        ("bad_undone", "decodes what it encoded"),
    ],
)
def test_the_checker_complains(name, complaint):
    code, records = wrong_kernels()
    assert code == 1
    found = [w for r in records if r["op"] == name and r["target"] == "sm90" for w in r["wrong"]]
    assert any(complaint in w for w in found), found
