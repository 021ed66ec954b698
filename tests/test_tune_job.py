"""The command for a lent GPU, with an executor of its own: budget, resuming, what it writes."""

import json
from pathlib import Path

import pytest
import torch

import fpk
from fpk import db
from fpk.db import Config
from fpk.tune.export import read_trials
from fpk.tune.h200_job import EXHAUSTIVE, grid, main, thinned, with_variants

OP = "quantize_fp8_token"


def command(tmp_path, *more):
    return [
        "--ops", OP, "--out", str(tmp_path / "out"), "--state", str(tmp_path / "state"), "--executor",
        "tune_stubs:make", "--processes", "2", "--layers", "64x512", "--budget", "6", *more,
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def workers_find_the_stubs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_a_job_resumes_and_writes_tables_and_trials(tmp_path, capsys):
    main(command(tmp_path, "--tokens", "16", "--minutes", "0.01"))
    assert "out of time" in capsys.readouterr().out
    for _ in range(2):
        main(command(tmp_path, "--tokens", "16,32", "--minutes", "5"))
    assert "all done" in capsys.readouterr().out
    trials = read_trials(tmp_path / "out" / "trials.jsonl.gz")
    assert trials == read_trials(tmp_path / "out" / "trials.sqlite")
    assert {t.case for t in trials} == {"M=16 K=512", "M=32 K=512"}
    assert sum(t.stage == "screen" for t in trials) == 12
    tables = db.Tables(db.DirectorySource(tmp_path / "out" / "autotune_db"))
    (gpu,) = tables.gpus()
    rows = db.parse_table((tmp_path / "out" / "autotune_db" / gpu / f"{OP}.csv").read_text())
    assert {row.key["M"] for row in rows} == {16, 32} and {row.run for row in rows} <= set(tables.runs(gpu))
    assert json.loads((tmp_path / "out" / "runs.json").read_text())


def test_an_exhaustive_log_has_every_candidate(tmp_path):
    main(command(tmp_path, "--tokens", "16", "--minutes", "5", "--exhaustive", "1", "--only-exhaustive"))
    trials = read_trials(tmp_path / "out" / "trials.jsonl.gz")
    op = fpk.OPS[OP]
    bound = op.bind(**op.inputs(M=16, K=512, device="cpu"))
    distinct = {json.dumps(c, sort_keys=True) for c in op.configs(**bound) if op.legal(config=c, **bound)}
    assert {json.dumps(json.loads(t.config), sort_keys=True) for t in trials if t.stage == "screen"} == distinct


def test_cases_may_be_named(tmp_path):
    main(command(tmp_path, "--minutes", "5", "--cases", "M=16 K=512; M=64 K=256"))
    assert {t.case for t in read_trials(tmp_path / "out" / "trials.jsonl.gz")} == {"M=16 K=512", "M=64 K=256"}


def test_variants_multiply_the_cases():
    cases = with_variants([dict(M=1, K=8)], "fast_accum=True;dtype=torch.int8 a=tensor")
    assert cases == [dict(M=1, K=8), dict(M=1, K=8, fast_accum=True), dict(M=1, K=8, dtype=torch.int8, a="tensor")]
    assert with_variants(cases, "") == cases


def test_shapes_of_the_log_are_many_and_apart():
    assert len(set(EXHAUSTIVE)) == len(EXHAUSTIVE) >= 8
    assert len({(n, k) for _, n, k in EXHAUSTIVE[:8]}) >= 5 and len({m for m, _, _ in EXHAUSTIVE[:8]}) >= 5


def test_grid_takes_the_variants_of_the_cases():
    op = fpk.OPS["scaled_mm"]
    cases = grid(op, [(4096, 7168)], [16, 64])
    rest = {repr(sorted((n, str(v)) for n, v in c.items() if n not in "MNK")) for c in op.cases.values()}
    assert len(cases) == 2 * len(rest)
    assert [(c["M"], c["N"], c["K"]) for c in cases[:2]] == [(16, 4096, 7168), (64, 4096, 7168)]


def test_thinning_keeps_the_default_and_is_fixed():
    candidates = [Config(B=i) for i in range(50)]
    assert thinned(candidates, 50) == candidates
    few = thinned(candidates, 10)
    assert len(few) == 10 and few[0] == candidates[0] and few == thinned(candidates, 10)


def test_preferred_candidates_compete_first(tmp_path):
    op = fpk.OPS[OP]
    bound = op.bind(**op.inputs(M=16, K=512, device="cpu"))
    found = [c for c in op.configs(**bound) if op.legal(config=c, **bound)]
    assert thinned(found, 3, found[-2:]) == [found[0], *found[-2:]]
    assert thinned(found, 3) != [found[0], *found[-2:]]
    (tmp_path / "prefer.json").write_text(json.dumps({OP: found[-2:]}))
    prefer = ["--tokens", "16", "--minutes", "5", "--prefer", str(tmp_path / "prefer.json")]
    main(command(tmp_path, *prefer, "--max-candidates", "3", "--budget", "0"))
    tried = {t.config for t in read_trials(tmp_path / "out" / "trials.jsonl.gz") if t.stage == "screen"}
    assert tried == {json.dumps(c, sort_keys=True, separators=(",", ":")) for c in (found[0], *found[-2:])}
