"""`fpk db` and `fpk tune` as commands."""

import json

import pytest
import torch
from typer.testing import CliRunner

import fpk
from fpk import db
from fpk.cli import app
from fpk.tune.arguments import key_of
from fpk.tune.lint import device_of
from fpk.tune.sources import sources_of
from fpk.tune.trials import Trial, TrialStore, canonical

GPU = "nv-h200-sm90-132"
OP = "quantize_fp8_token"
CONFIG = dict(kernel="row", BLOCK_M=1, BLOCK_K=4096, num_warps=8, num_stages=1)
DEFAULT = dict(kernel="loop", BLOCK_M=4, BLOCK_K=1024, num_warps=4, num_stages=2)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


@pytest.fixture
def tables(tmp_path):
    """Written by `fpk tune finish` from a store with finals of one key."""
    store = TrialStore(tmp_path / "t.sqlite")
    source = sources_of(fpk.OPS[OP])
    record = db.Run(OP, GPU, "2026-01-01", "0.1", "2.11.0", "3.6.0", "13", "580", source, "graph", "1980", "", "700")
    store.add_run(record.run, {n: getattr(record, n) for n in record.__dataclass_fields__})
    key = canonical(key_of(fpk.OPS[OP], dict(M=64, K=4096), device_of(GPU)))
    for config, us, detail in ((DEFAULT, 5.2, "default"), (CONFIG, 2.4, "")):
        store.record(
            Trial(
                OP, GPU, source, key, "M=64 K=4096", canonical(config), "final", "ok", us=us, noise_percent=0.4,
                shared_bytes=32, detail=detail, run=record.run,
            )
        )  # fmt: skip
    out = run("tune", "finish", "--store", tmp_path / "t.sqlite", "--into", tmp_path / "db")
    assert "median gain 2.17x" in out
    return tmp_path / "db"


def test_finish_show_lint_and_explain(tables):
    assert "2.17x" in run("db", "show", "--db", tables)
    assert "0 problems" in run("db", "lint", "--db", tables)
    exact = run("db", "explain", OP, "M=64", "K=4096", "--gpu", GPU, "--db", tables)
    assert "answer: exact" in exact and "num_warps=8" in exact
    assert "answer: nearest" in run("db", "explain", OP, "M=64", "K=3584", "--gpu", GPU, "--db", tables)
    wider = run("db", "explain", OP, "M=64", "K=8192", "--gpu", GPU, "--db", tables)
    assert "not legal" in wider and "answer: default" in wider
    sibling = run("db", "explain", OP, "M=64", "K=4096", "--gpu", "nv-h100-sm90-114", "--db", tables)
    assert "answer: sibling" in sibling
    assert "answer: default" in run("db", "explain", OP, "M=64", "K=4096", "--gpu", "nv-a100-sm80-108", "--db", tables)


def test_lint_fails_on_a_bad_table(tables):
    path = tables / GPU / f"{OP}.csv"
    path.write_text(path.read_text().replace(",4096,1,1,8,", ",2048,1,1,8,"))
    assert "not legal" in run("db", "lint", "--db", tables, code=1)


def test_export_twice_and_diff(tables, tmp_path):
    run("db", "export", tmp_path / "a", "--db", tables)
    run("db", "export", tmp_path / "b", "--db", tmp_path / "a")
    run("db", "diff", tmp_path / "a", tmp_path / "b")
    for file in ("runs.csv", f"{OP}.csv"):
        assert (tmp_path / "a" / GPU / file).read_bytes() == (tables / GPU / file).read_bytes()
    path = tmp_path / "b" / GPU / f"{OP}.csv"
    path.write_text(path.read_text().replace(",2.4,", ",2.3,"))
    assert "+64,4096" in run("db", "diff", tmp_path / "a", tmp_path / "b", code=1)
    run("db", "merge", tmp_path / "a", tmp_path / "b", "--into", tmp_path / "c")
    assert ",2.3," in (tmp_path / "c" / GPU / f"{OP}.csv").read_text()
    run("db", "export", tmp_path / "flat.parquet", "--db", tables)
    assert (tmp_path / "flat.parquet").stat().st_size


def test_verify_lists_stale_rows(tables):
    out = run("db", "verify", "--stale", "--db", tables, code=1)
    assert "1 stale rows" in out and "triton 3.6.0, now" in out


def test_snapshot_prints_the_hash_of_the_file(tables, tmp_path):
    printed = run("db", "snapshot", tmp_path / "frozen.json", "--db", tables).strip()
    assert printed == db.Snapshot((tmp_path / "frozen.json").read_bytes()).hash
    with fpk.use(tmp_path / "frozen.json") as frozen:
        key = key_of(fpk.OPS[OP], dict(M=64, K=4096), device_of(GPU))
        assert frozen.candidates(OP, key, device_of(GPU))[0] == CONFIG


def test_mistakes_are_told_in_one_line(tables):
    out = run("db", "explain", OP, "M=64", "K=4096", "--gpu", "h200", "--db", tables, code=1)
    assert out.startswith("fpk: autotune_db: expected a directory like") and out.count("\n") == 1


@pytest.mark.parametrize("wrong", [("--op", "no_such_op"), ("--gpu", "nv-h900-sm90-1")], ids=lambda w: w[0])
def test_show_of_what_is_not_there_is_a_mistake(tables, wrong):
    assert wrong[1] in run("db", "show", *wrong, "--db", tables, code=2)


def test_show_says_that_nothing_is_recorded(tables):
    assert "no rows recorded" in run("db", "show", "--op", "amax", "--db", tables)


def test_plan_and_status(tmp_path):
    store = tmp_path / "t.sqlite"
    assert "has 2 cases" in run("tune", "plan", OP, "--case", "one_4096", "--case", "M=4 K=64", "--store", store)
    assert "has 2 cases" in run("tune", "plan", OP, "--case", "one_4096", "--store", store)
    assert "default" in run("tune", "status", "--store", store)
    assert "no_such_op" in run("tune", "plan", "no_such_op", "--store", store, code=2)
    assert "no case" in run("tune", "plan", OP, "--case", "typo", "--store", store, code=2)
    assert "is planned" in run("tune", "sweep", "--name", "other", "--store", store, code=2)


def test_a_small_sweep_end_to_end(tmp_path):
    """On a machine without a GPU the interpreter is timed: slow, but every step is the real one."""
    store = tmp_path / "t.sqlite"
    run("tune", "plan", "amax", "--case", "M=4 K=64", "--budget", "3", "--store", store)
    if not torch.cuda.is_available():
        assert "no GPU is here" in run("tune", "sweep", "--store", store, code=2)
    assert "done" in run("tune", "sweep", "--interpreter", "--store", store)
    assert "done" in run("tune", "resume", "--interpreter", "--store", store)
    run("tune", "finish", "--store", store, "--into", tmp_path / "db")
    run("tune", "export", tmp_path / "x.t4.json", "--store", store)
    results = json.loads((tmp_path / "x.t4.json").read_text())["results"]
    assert len(results) >= 3 and "expected .parquet" in run(
        "tune", "export", tmp_path / "x.y", "--store", store, code=2
    )
