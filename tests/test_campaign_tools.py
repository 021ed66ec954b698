"""What a campaign runs: laws in processes that may die, tables that go on, compilation ahead, trials into tables."""

import csv
import gzip
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "bench"))

import campaign_plan
import fold
import gpu_laws
import pytest
import tune
from warm import warm

from fpk import db
from fpk.device import Device, pretend, pretend_triton
from fpk.kernels.moe._expert_streams import streams
from fpk.op import OPS
from fpk.tune.arguments import outline
from fpk.tune.export import read_trials
from fpk.tune.trials import Trial, canonical

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "tests" / "bench"
OP = "quantize_fp8_token"
LAWS = """
import os, time
import pytest
def test_a(): pass
def test_b(): assert 0, "because"
def test_dies(): os.kill(os.getpid(), 9)
def test_c(): pytest.skip("not here")
def test_lost(): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def test_hangs(): time.sleep(100)
def test_last(): assert os.environ["FPK_EXAMPLES"] == "4"
"""


def run(*command, **environment):
    env = {n: v for n, v in os.environ.items() if n != "FPK_GATE"} | environment
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True)


def test_laws_go_on_behind_what_dies_and_another_call_skips_what_passed(tmp_path):
    (tmp_path / "test_some.py").write_text(LAWS)
    command = (BENCH / "gpu_laws.py", "--out", tmp_path / "out", "--jobs", 1, "--examples", 4, "--quiet", 6)
    done = run(*command, tmp_path / "test_some.py")
    assert done.returncode == 1, done.stderr
    found = {t.rpartition("::")[2]: v for t, v in gpu_laws.read(tmp_path / "out").items()}
    assert found == dict(
        test_a="passed", test_b="failed", test_dies="died", test_c="skipped", test_lost="failed", test_hangs="died",
        test_last="passed",
    )  # fmt: skip
    rows = list(csv.DictReader((tmp_path / "out" / "laws-0.csv").open()))
    assert {r["test"].rpartition("::")[2]: r["why"] for r in rows if r["verdict"] == "died"} == {
        "test_dies": "exit -9", "test_hangs": "hangs"
    }  # fmt: skip
    (tmp_path / "test_some.py").write_text("def test_a(): assert 0\ndef test_b(): pass\n")
    done = run(*command, tmp_path / "test_some.py")
    found = {t.rpartition("::")[2]: v for t, v in gpu_laws.read(tmp_path / "out").items()}
    assert done.returncode == 0 and found["test_a"] == found["test_b"] == "passed", done.stdout


def test_tables_are_tuned_case_by_case_go_on_and_are_folded_in(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "results" / "tables_any"
    command = ("tune.py", "--ops", OP, "--out", folder, "--state", tmp_path / "state", "--executor", "tune_stubs:make",
               "--processes", 1, "--budget", 3, "--max-candidates", 4, "--cases", "M=16 K=512")  # fmt: skip
    monkeypatch.setattr(sys, "argv", [str(word) for word in command])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert tune.main() == 0
    assert sorted(f.name for f in folder.iterdir()) == ["runs-0.json", "trials-0.jsonl.gz"]
    assert tune.tuned(folder) == {(OP, "M=16 K=512")}
    assert tune.main() == 0 and "nothing is left" in capsys.readouterr().out and len(list(folder.iterdir())) == 2

    root = tmp_path / "repository"
    for name in ("autotune_db", "tests/tune_data"):
        shutil.copytree(ROOT / name, root / name)
    gpu = root / "autotune_db" / "nv-h200-sm90-132"
    before = {f.name: f.read_bytes() for f in [*gpu.iterdir(), *(root / "tests/tune_data").iterdir()]}
    fold.fold([tmp_path / "nothing"], root)
    assert {f.name: f.read_bytes() for f in [*gpu.iterdir(), *(root / "tests/tune_data").iterdir()]} == before
    (trial, *_) = read_trials(folder / "trials-0.jsonl.gz")
    for _ in range(2):  # the second time in place of the first
        fold.fold([tmp_path / "results"], root)
        rows = db.parse_table((root / "autotune_db" / trial.gpu / f"{OP}.csv").read_text())
        assert rows and {row.key["M"] for row in rows} == {16}
        runs = db.parse_runs((root / "autotune_db" / trial.gpu / "runs.csv").read_text())
        assert set(runs) == {row.run for row in rows}
        logged = read_trials(root / "tests" / "tune_data" / "tuned_packed.parquet")
        assert sum(t.op == OP for t in logged) == len(read_trials(folder / "trials-0.jsonl.gz"))
    assert {f.name: f.read_bytes() for f in gpu.iterdir()}.items() <= before.items()


def test_tables_of_experts_answer_their_layers_and_no_others(tmp_path):
    """What `tables_grouped` measures reaches the op; neither few rows nor other layers are answered by it."""
    op, gpu = OPS["grouped_scaled_mm_group"], Device("sm90", "NVIDIA H200", "nv", 132)
    config = streams(deep=True)
    (measured,) = [m for m in campaign_plan.PLAN if m.name == "tables_grouped"]
    folder = tmp_path / "results" / measured.name
    folder.mkdir(parents=True)
    name, run = next(iter(db.parse_runs((ROOT / "autotune_db" / db.gpu_id(gpu) / "runs.csv").read_text()).items()))
    with pretend(gpu), pretend_triton("3.6"), gzip.open(folder / "trials-0.jsonl.gz", "wt") as file:
        for case in map(db.parse_case, measured.wanted.split(";")):
            for chosen, us, detail in ((config, 100.0, ""), (streams(), 110.0, "default")):
                trial = Trial(
                    op.name, db.gpu_id(gpu), "", canonical(op.key(**outline(op, case))), db.spell_case(case),
                    canonical(chosen), "final", "ok", us, us, us, 5, 0.1, shared_bytes=217_168, run=name,
                    detail=detail,
                )  # fmt: skip
                file.write(json.dumps(vars(trial)) + "\n")
    (folder / "runs-0.json").write_text(json.dumps({name: asdict(run)}))
    shutil.copytree(ROOT / "tests" / "tune_data", tmp_path / "tests" / "tune_data")
    before = {f.name: f.read_bytes() for f in (tmp_path / "tests" / "tune_data").iterdir()}
    fold.fold([tmp_path / "results"], tmp_path)
    assert {f.name: f.read_bytes() for f in (tmp_path / "tests" / "tune_data").iterdir()} == before
    tables = db.Tables(db.DirectorySource(tmp_path / "autotune_db"))
    found = {}
    with pretend(gpu), pretend_triton("3.6"), db.use(tables):
        for M, case in ((32768, {}), (24576, {}), (64, {}), (32768, dict(gather=8)), (32768, dict(K=8192))):
            bound = outline(op, dict(M=M, N=1536, K=2048, E=128) | case)
            found[M, *case] = op.config_for(**bound)
    assert found[32768,] == found[24576,] == config and found[64,]["kernel"] == "descriptor"
    assert found[32768, "gather"] == found[32768, "K"] == streams()


def test_what_the_look_up_answers_is_among_the_candidates(tmp_path):
    from fpk.tune.lint import device_of

    arguments = tune.arguments_of().parse_args(["--ops", "scaled_mm", "--out", str(tmp_path), "--all-of", "shares"])
    job, op, case = tune.Job(arguments), OPS["scaled_mm"], dict(M=64, N=2112, K=7168)
    job.device = device_of("nv-h200-sm90-132")
    found = [canonical(c) for c in job.candidates(op, case, 8)]
    with pretend(job.device):
        (first, *_) = db.explain("scaled_mm", op.key(**outline(op, case)), job.device)
        default = canonical(next(iter(tune.legal_candidates(op, outline(op, case), job.device))))
    assert len(found) == 8 and found[0] == default and canonical(first.row.config) in found
    with pretend_triton("3.6"):
        kernels = [c["kernel"] for c in job.candidates(op, case, 28)]
        every = [c["kernel"] for c in tune.legal_candidates(op, outline(op, case), job.device)]
    assert kernels.count("shares") == every.count("shares") > 10 and len(set(kernels)) > 2


def test_compiling_ahead_needs_no_gpu_and_fills_the_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with pretend("sm90"):
        assert warm([(OP, dict(M=16, K=512)), (OP, dict(M=32, K=512))], 2) == 1
    assert "1 of 1 launches compiled" in capsys.readouterr().out and list(tmp_path.rglob("*.cubin"))


LAYER = """
import sys
sys.path.insert(0, "tests/bench")
import moe
from fpk.tune.lint import device_of
from fpk.device import pretend, pretend_triton
sys.argv = ["moe.py", "--csv", "-", "--only-compile", "--models", "deepseek_v3_tp8", "--schemes",
            "fp8_block128:fp8_group128", "--tokens", "16"]
with pretend(device_of("nv-h200-sm90-132")):
    moe.main()
"""


@pytest.mark.slow
def test_layers_of_experts_compile_ahead_without_a_gpu(tmp_path):
    done = run("-W", "ignore", "-c", LAYER, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="")
    assert done.returncode == 0 and "Error" not in done.stdout, done.stdout + done.stderr[-2000:]
    names = {f.stem for f in tmp_path.rglob("*.cubin")}
    assert {"_route_kernel", "_permute_kernel", "_grouped_kernel", "_unpermute_kernel"} <= names


def test_rows_take_the_place_of_those_of_their_cell(tmp_path):
    """Other cells stay, new columns come behind; a file whose rows are measured together is replaced."""
    names = {m.name: m for m in campaign_plan.PLAN}

    def write(path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    old, new = tmp_path / "root" / "results", tmp_path / "out"
    products, dispatch = old / names["dense_few"].csv, old / names["dispatch"].csv
    write(products, "product,layer,M,fast_accum,us\np,a,1,1,9\np,b,1,1,8\n")
    write(dispatch, "what,us\nx,1\ny,2\n")
    write(new / "dense_few" / "dense.csv", "product,layer,M,fast_accum,us,mhz\np,b,1,1,7,1980\np,b,16,1,6,1970\n")
    write(new / "dispatch" / "dispatch.csv", "what,us\nx,3\n")
    for _ in range(2):
        fold.fold_rows([new, tmp_path / "nothing"], tmp_path / "root")
        assert products.read_text() == (
            "product,layer,M,fast_accum,us,mhz\np,a,1,1,9,\np,b,1,1,7,1980\np,b,16,1,6,1970\n"
        )
        assert dispatch.read_text() == "what,us\nx,3\n"
