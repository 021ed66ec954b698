"""The command line: what it prints where, exit codes, and that it starts quickly."""

import json
import subprocess
import sys

import pandas as pd
import pytest
import typer.testing
from test_study_models import directory, whole_directory  # noqa: F401  fixtures

import fpk
import fpk.op
from fpk import cli
from fpk.study.measure import layer_schemes

RUNNER = typer.testing.CliRunner()


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """On a CPU, ops run their references: what the command line does without TRITON_INTERPRET."""
    for op in fpk.OPS.values():
        op._memo.clear()
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    monkeypatch.setenv("COLUMNS", "120")
    yield
    for op in fpk.OPS.values():
        op._memo.clear()


def run(*arguments):
    return RUNNER.invoke(cli.app, [str(a) for a in arguments])


def one_line(result, code, *words):
    """The exit code, and one line on stderr that holds the words."""
    assert result.exit_code == code, result.output
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    line = result.stderr.strip()
    assert "\n" not in line and line.startswith("fpk: "), line
    for word in words:
        assert word in line
    return True


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['fpk', '--help']\n"
        "from fpk.cli import app\n"
        "try: app()\n"
        "except SystemExit as end: assert end.code in (0, None)\n"
        "heavy = {'torch', 'triton', 'pandas', 'numpy', 'matplotlib', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("study", "list", "doctor", "db"))


def test_version_and_module_entry():
    assert run("--version").stdout.strip() == f"fpk {fpk.__version__}"
    done = subprocess.run([sys.executable, "-m", "fpk", "--version"], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == f"fpk {fpk.__version__}"


def test_usage_errors_exit_with_2():
    assert run("nosuch").exit_code == 2
    assert run("study", "--sequences", "0").exit_code == 2
    assert run("study", "--nosuch").exit_code == 2
    assert one_line(run("study", "--scheme", "fp9"), 2, "--scheme", "fp9", "fp8_channel")
    assert one_line(run("study", "--scheme", "fp8_channel:int8_token"), 2, "no product")


def test_list_knows_everything():
    found = json.loads(run("list", "--json").stdout)
    assert {o["name"] for o in found["ops"]} == set(fpk.OPS)
    assert all(o["doc"].endswith(".") and "\n" not in o["doc"] for o in found["ops"])
    token = next(o for o in found["ops"] if o["name"] == "quantize_fp8_token")
    assert token["formats"] == ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"] and token["family"] == "quant"
    assert [s["name"] for s in found["schemes"]] == fpk.list_schemes()
    assert [s["name"] for s in found["layer_schemes"]] == layer_schemes()
    assert {g["name"] for g in found["granularities"]} >= {"tensor", "token", "channel"}
    assert next(f for f in found["formats"] if f["name"] == "e4m3fn") == dict(
        name="e4m3fn", bits=8, max=448.0, step_at_1=0.125
    )
    text = run("list").stdout
    assert all(name in text for name in [*fpk.OPS, *fpk.list_schemes()])


def test_list_names_tuned_gpus(monkeypatch):
    class Tables:
        def gpus(self):
            return ["nv-h200-sm90-132"]

        def ops(self, gpu):
            return ["quantize_fp8_token"]

    monkeypatch.setattr("fpk.db.default", Tables)
    found = json.loads(run("list", "--json").stdout)
    assert found["tuned_gpus"] == [{"name": "nv-h200-sm90-132", "ops": ["quantize_fp8_token"]}]
    tuned = {o["name"]: o["tuned_gpus"] for o in found["ops"]}
    assert tuned["quantize_fp8_token"] == ["nv-h200-sm90-132"] and tuned["amax"] == []
    assert "tuned on nv-h200-sm90-132" in run("list").stdout


def test_doctor_tries_every_scheme():
    done = run("doctor", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["facts"]["fpk"] == fpk.__version__ and "GPU" in str(found["facts"])
    assert [s["scheme"] for s in found["schemes"]] == layer_schemes()
    for row in found["schemes"]:
        assert row["status"] == "ok" or "no op" in row["note"], row
        assert row["status"] != "ok" or 0 < row["rel_err"] < 0.3
    assert "environment" in run("doctor").stdout


def test_doctor_fails_when_a_scheme_computes_wrongly(monkeypatch):
    real = fpk.OPS["scaled_mm"].reference
    monkeypatch.setattr(fpk.OPS["scaled_mm"], "reference", lambda **a: real(**a) * 1.2)
    monkeypatch.setattr("fpk.study.doctor.layer_schemes", lambda: ["fp8_channel:fp8_token"])
    done = run("doctor", "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["schemes"][0]["status"] == "wrong"


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prose.txt"
    path.write_text("ABBA BEBA CAFE " * 200)
    return path


def study(directory, text, *more):  # noqa: F811
    return run(
        "study", "--model", directory, "--text", text, "--sequences", 2, "--length", 32, "--device", "cpu", *more
    )


def test_study_writes_a_report(directory, text, tmp_path):  # noqa: F811
    done = study(directory, text, "--scheme", "fp8_channel", "--scheme", "int8_channel", "--out", tmp_path / "a" / "b")
    assert done.exit_code == 0, done.output
    assert "fp8_channel:fp8_token" in done.stdout and "%" not in done.stdout.splitlines()[-1]
    assert "index.html" in done.stderr and " 66 %  int8_channel:int8_token on prose" in done.stderr
    table = pd.read_csv(tmp_path / "a" / "b" / "perplexity.csv")
    assert table["scheme"].tolist() == ["none", "fp8_channel:fp8_token", "int8_channel:int8_token"]
    assert set(table["text"]) == {"prose"} and set(table["length"]) == {32}


def test_study_calibrates_static_activations(directory, text, tmp_path):  # noqa: F811
    scheme = "int8_channel:int8_tensor_static"
    done = study(directory, text, "--scheme", scheme, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "calibrating static activations" in done.stderr and scheme in done.stdout
    facts = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert facts["static activations"].startswith("calibrated on 32 tokens")
    text.write_text("ABBA" * 16)  # 64 tokens, all of them measured
    whole = study(directory, text, "--scheme", scheme)
    assert whole.exit_code == 0 and "no text is left to calibrate on" in " ".join(whole.stdout.split())


def test_study_prints_json_to_stdout_alone(directory, text):  # noqa: F811
    done = study(directory, text, "--scheme", "fp8_channel", "--json")
    rows = json.loads(done.stdout)
    assert [r["scheme"] for r in rows] == ["none", "fp8_channel:fp8_token"]
    assert rows[1]["perplexity[prose]"] > 0 and rows[1]["ms"] is None


def test_study_tells_mistakes_in_one_line(directory, text, tmp_path, monkeypatch):  # noqa: F811
    assert one_line(study(tmp_path / "none", text), 1, "none", "got nothing")
    assert one_line(study(directory, tmp_path / "no.txt"), 1, "no.txt", "no such text file")
    text.write_text("")
    assert one_line(study(directory, text), 1, "empty")
    text.write_text("ABBA")
    assert one_line(study(directory, text), 1, "expected 64 tokens", "got 4")
    assert one_line(study(directory, text, "--out", text), 1, "--out: expected a directory, got the file", "prose.txt")
    for device in ("banana", "cuda:99"):
        assert one_line(study(directory, text, "--device", device), 1, "device: expected one that works here", device)
    (directory / "model.safetensors").write_bytes(b"short")
    assert one_line(study(directory, text), 1, "cut short or damaged")
    monkeypatch.setenv("FPK_TRACEBACK", "1")
    assert isinstance(study(directory, text).exception, ValueError)


def test_an_interrupted_study_prints_what_it_has(directory, text, monkeypatch, tmp_path):  # noqa: F811
    from fpk.study import measure

    real = measure._measure_layers

    def interrupt(study, model, scheme, *rest):
        if scheme.startswith("int8"):
            raise KeyboardInterrupt
        real(study, model, scheme, *rest)

    monkeypatch.setattr(measure, "_measure_layers", interrupt)
    done = study(directory, text, "--scheme", "fp8_channel", "--scheme", "int8_channel", "--out", tmp_path / "out")
    assert done.exit_code == 130
    assert "fp8_channel:fp8_token" in done.stdout and "interrupted" in done.stderr
    assert "interrupted" in json.loads((tmp_path / "out" / "provenance.json").read_text())["complete"]


@pytest.mark.parametrize(("group", "command"), [("db", "show"), ("tune", "sweep")])
def test_groups_of_commands_are_reached(group, command):
    def call(*words):
        return subprocess.run([sys.executable, "-m", "fpk", group, *words], capture_output=True, text=True, timeout=120)

    for words in ((), ("--help",)):
        done = call(*words)
        assert done.returncode == 0 and command in done.stdout, done.stderr
    assert call("nosuch").returncode == 2
