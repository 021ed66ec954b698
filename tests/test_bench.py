"""`fpk.sweep`, `fpk bench`, `fpk report`: rows that are right, verdicts that know noise, pages that stand alone."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import fpk
from fpk.cli_bench import bench_app, report_app
from fpk.study import bench, page
from fpk.study.charts import bench_figures, error_against_bits, floor_us, regret, trial_table, tuning_heat_map
from fpk.study.compare import compare, machines
from fpk.study.formats import scheme_errors, values_of
from fpk.study.mixed import pick_schemes, quantized_by
from fpk.tune.trials import Trial

ROOT = Path(__file__).resolve().parents[1]
QUICK = dict(device="cpu", about_ms=0.1, rounds=1)


@pytest.fixture(scope="module")
def result():
    parts = [
        bench.sweep(op, {f"layer/M={m}": dict(M=m, **more) for m in (1, 4, 16)}, **QUICK)
        for op, more in (("scaled_mm", dict(N=32, K=64)), ("amax", dict(K=64)))
    ]
    return pd.concat(parts, ignore_index=True)


def test_sweep_says_what_it_measured(result):
    assert list(result.columns) == list(bench.COLUMNS)
    ok = result[result["status"] == "ok"]
    assert set(ok[ok["op"] == "amax"]["impl"]) == {"interpreter", "copy"}
    assert set(result[result["op"] == "scaled_mm"]["impl"]) == {"interpreter", "torch"}
    assert (ok["us"] > 0).all() and (ok["p20_us"] <= ok["us"]).all() and (ok["us"] <= ok["p80_us"]).all()
    row = ok[(ok["op"] == "scaled_mm") & (ok["M"] == 4)].iloc[0]
    cost = fpk.OPS["scaled_mm"].cost(
        **fpk.OPS["scaled_mm"].bind(**fpk.OPS["scaled_mm"].inputs(M=4, N=32, K=64, device="cpu"))
    )
    assert (row["flops"], row["bytes"]) == (cost.flops, cost.bytes)
    assert row["tflops"] == pytest.approx(cost.flops / row["us"] / 1e6)
    assert row["torch"] == torch.__version__ and row["source"] and row["copy_gb_per_s"] > 0 and row["bf16_tflops"] > 0


def test_a_wrong_implementation_has_no_time():
    op = fpk.OPS["scaled_mm"]

    def half(**arguments):
        return op.reference(**arguments) / 2

    def refuses(**arguments):
        raise NotImplementedError("not this one")

    right = dict(right=op.reference, half=half, refuses=refuses)
    found = bench.sweep(op, {"one": dict(M=4, N=16, K=64)}, right, **QUICK).set_index("impl")
    assert found["status"].to_dict() == {"interpreter": "ok", "right": "ok", "half": "incorrect", "refuses": "refused"}
    assert found["us"].notna().to_dict() == {"interpreter": True, "right": True, "half": False, "refuses": False}
    assert found.loc["refuses", "note"] == "NotImplementedError: not this one"
    assert found.loc["half", "error"] == pytest.approx(0.5, abs=0.01)


def test_weight_only_is_timed_beside_the_plain_product():
    found = bench.sweep("mm_weight_only", {"one": dict(M=2, N=32, K=64)}, **QUICK).set_index("impl")
    assert found.loc["torch plain", "status"] == "ok" and found.loc["torch plain", "error"] < 0.02


def test_unknown_names_are_told():
    with pytest.raises(ValueError, match=r"sweep\.ops: expected names out of .*got 'no_such'"):
        bench.sweep("no_such")
    with pytest.raises(ValueError, match=r"sweep\.cases: .*got 'llama9/\*'"):
        bench.sweep("scaled_mm", ["llama9/*"], **QUICK)


def test_every_op_hassmall_cases_for_a_cpu():
    for op in fpk.OPS.values():
        small = bench.small_cases(op)
        assert small and all(
            v <= bench.CPU_LIMITS[n] for c in small.values() for n, v in c.items() if n in bench.CPU_LIMITS
        )


@pytest.mark.parametrize("ending", ("csv", "parquet"))
def test_files_give_back_what_was_written(result, tmp_path, ending):
    back = bench.read_results(bench.write_results(result, tmp_path / f"r.{ending}"))
    assert list(back.columns) == list(result.columns) and len(back) == len(result)
    assert back["us"].tolist() == pytest.approx(result["us"].tolist(), rel=1e-3, nan_ok=True)
    assert (compare(back, back)["verdict"].isin(["same", "no time"])).all()


def test_other_files_are_refused(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'op'"):
        bench.read_results(tmp_path / "x.csv")
    with pytest.raises(ValueError, match=r"\.csv or \.parquet, got x\.txt"):
        bench.read_results(tmp_path / "x.txt")


@pytest.mark.parametrize(
    "name, impls", (("products", {"fpk", "default", "torch"}), ("quantizers", {"fpk", "default", "copy"}))
)
def test_committed_results_are_read_too(name, impls):
    path = ROOT / "results" / "nv-h200-sm90-132" / f"{name}.csv"
    table, found = pd.read_csv(path), bench.read_results(path)
    assert impls <= set(found["impl"]) and len(found[found["impl"] == "fpk"]) == len(table)
    assert found[found["impl"] == "fpk"]["us"].tolist() == table["us"].tolist()
    assert not found.duplicated(["op", "case", "impl"]).any()
    share = floor_us(found) / found["us"]
    assert ((share > 0.02) & (share < 1.35)).all()  # caches of small quantizers help


# ---- verdicts


def rows(**us):
    """A result of one case: impl -> (us, noise in percent); no time if us is 0."""
    same = dict(op="o", case="c", gpu="g", torch="2")
    made = [
        same | dict(impl=impl, status="ok" if t else "refused", us=t or None, noise_percent=noise)
        for impl, (t, noise) in us.items()
    ]
    return pd.DataFrame(made)


def verdicts(a, b, **more):
    return compare(a, b, **more).set_index("impl")["verdict"].to_dict()


def test_a_change_counts_beyond_the_noise():
    assert verdicts(rows(fpk=(100, 0.1)), rows(fpk=(90, 0.1))) == {"fpk": "faster"}
    assert verdicts(rows(fpk=(100, 0.1)), rows(fpk=(110, 0.1))) == {"fpk": "slower"}
    assert verdicts(rows(fpk=(100, 5.0)), rows(fpk=(110, 5.0))) == {"fpk": "same"}
    assert verdicts(rows(fpk=(100, 0.1)), rows(fpk=(101, 0.1))) == {"fpk": "same"}
    assert verdicts(rows(fpk=(100, 0.1)), rows(fpk=(101, 0.1)), least_percent=0.5) == {"fpk": "slower"}


def test_a_slower_machine_is_not_a_slower_kernel():
    a, b = rows(fpk=(100, 0.5), copy=(50, 0.5)), rows(fpk=(110, 0.5), copy=(55, 0.5))
    assert verdicts(a, b) == {"fpk": "same", "copy": "slower"}
    found = compare(a, b).set_index("impl")
    assert found.loc["fpk", "drift"] == pytest.approx(1.1) and found.loc["fpk", "speedup"] == pytest.approx(1.0)
    assert verdicts(a, b.assign(torch="3")) == {"fpk": "slower", "copy": "slower"}  # copy's code may have changed too
    noisy = rows(fpk=(100, 0.5), copy=(50, 0.5)), rows(fpk=(100, 0.5), copy=(55, 8.0))
    assert verdicts(*noisy)["fpk"] == "same"


def test_what_came_and_went():
    before = rows(fpk=(100, 1), old=(5, 1), fine=(3, 1), odd=(0, 0))
    after = rows(fpk=(0, 0), new=(5, 1), fine=(3, 1), odd=(4, 1))
    assert verdicts(before, after) == {"fpk": "broken", "old": "gone", "new": "new", "fine": "same", "odd": "fixed"}
    assert machines(before, after.assign(gpu="h")) == ["gpu: g -> h"]
    with pytest.raises(ValueError, match="o c fpk twice"):
        compare(pd.concat([before, before]), after)


# ---- plots and pages


def trial(m, n, stages):
    fits = m * n <= 2048
    config = json.dumps(dict(BLOCK_M=m, BLOCK_N=n, num_stages=stages))
    key = json.dumps(dict(M=64, N=128, K=256))
    status, us = ("ok", m * n / stages) if fits else ("out_of_resources", None)
    return Trial("scaled_mm", "g", "s", key, "c", config, "screen", status, us=us)


def trials():
    return trial_table([trial(m, n, stages) for m in (16, 64) for n in (32, 64) for stages in (2, 3)])


def test_heat_map_shows_the_best_of_every_tile():
    (ax, _bar) = tuning_heat_map(trials()).axes
    assert [t.get_text() for t in ax.texts] == ["1.00", "2.00", "4.00", "×"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["32", "64"]


def test_regret_ends_at_the_best():
    (line,) = regret(trials(), draws=20).axes[0].lines
    assert line.get_ydata()[-1] == 0 and (line.get_ydata()[:-1] >= line.get_ydata()[1:]).all()


def test_floor_is_the_larger_of_two_times():
    measured = dict(bytes=[1e3, 1e3, 1e6], flops=[8e6, 8e6, 1e3], copy_gb_per_s=1.0, bf16_tflops=1.0)
    frame = pd.DataFrame(dict(op=["scaled_mm", "mm_weight_only", "amax"]) | measured)
    assert floor_us(frame).tolist() == [4.0, 8.0, 1000.0]


def test_page_stands_alone(result, tmp_path):
    figures = bench_figures(result)
    assert {"roofline", "tokens-scaled_mm", "tokens-amax", "speedup-copy"} <= figures.keys()
    text = page.page("<title>", [page.bench_section(result), page.trials_section(trials())])
    assert "&lt;title&gt;" in text and "<script" not in text
    links = re.findall(r'(?:src|href)="([^"]{0,12})', text)
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert not re.search(r"url\(|@import|https?://", text)
    assert text.count("<img alt=") == len(figures) + 2
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    for width in (1280, 500) if chromium else ():
        shot = tmp_path / f"{width}.png"
        done = subprocess.run(
            [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--hide-scrollbars",
             f"--window-size={width},900", f"--screenshot={shot}", f"file://{tmp_path}/page.html"],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert shot.is_file(), done.stderr[-2000:]
        assert "CONSOLE" not in done.stderr


def test_study_section_needs_a_study(tmp_path):
    with pytest.raises(ValueError, match="fpk study --out"):
        page.study_section(tmp_path)


def test_commands(result, tmp_path):
    quiet = result.assign(noise_percent=0.1)
    slow = quiet.assign(us=quiet["us"].where(quiet["impl"] != "interpreter", 2 * quiet["us"]))
    a, b = (bench.write_results(r, tmp_path / n) for r, n in ((quiet, "a.csv"), (slow, "b.csv")))
    run = CliRunner().invoke
    same = run(bench_app, ["compare", str(a), str(a), "--strict"])
    assert same.exit_code == 0 and "same" in same.output and "slower" not in same.output, same.output
    slower = run(bench_app, ["compare", str(a), str(b), "--strict"])
    assert slower.exit_code == 1 and "6 slower" in slower.output, slower.output
    assert run(bench_app, ["compare", str(a), str(b)]).exit_code == 0
    assert run(bench_app, ["compare", str(a), str(tmp_path / "none.csv")]).exit_code == 2
    assert run(bench_app, ["plot", str(a), "--out", str(tmp_path / "plots")]).exit_code == 0
    assert (tmp_path / "plots" / "roofline.png").read_bytes().startswith(b"\x89PNG")
    done = run(report_app, ["--bench", str(a), "--out", str(tmp_path / "r.html"), "--no-database"])
    assert done.exit_code == 0 and (tmp_path / "r.html").stat().st_size > 10_000
    assert (
        run(report_app, ["--trials", str(tmp_path / "none.parquet"), "--out", str(tmp_path / "r.html")]).exit_code == 2
    )


# ---- formats and mixed schemes


def test_errors_of_schemes():
    torch.manual_seed(0)
    table = scheme_errors(torch.randn(64, 256), ["fp8_channel", "int8_channel", "mxfp4"]).set_index("scheme")
    assert table.loc["fp8_channel", "bits"] == 8 + 32 / 256 and table.loc["mxfp4", "bits"] == 4.25
    assert 0.02 < table.loc["fp8_channel", "rel_err"] < 0.03 < 0.1 < table.loc["mxfp4", "rel_err"] < 0.13
    odd = scheme_errors(torch.randn(4, 100), ["int4_group128", "fp8_tensor"])
    assert len(odd) == 2 and odd["note"].notna().all()
    labels = {t.get_text() for t in error_against_bits(table.reset_index()).axes[0].texts}
    assert labels == {"fp8_channel", "int8_channel", "mxfp4"}
    assert values_of("e2m1").tolist() == [-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert len(values_of("int8")) == 256 and values_of("e4m3fn").max() == 448


CHOICES = pd.DataFrame(
    [dict(layer=layer, scheme=s, bytes=b, rel_err=e) for layer, scale in (("a", 1.0), ("b", 3.0))
     for s, b, e in (("none", 16, 0.0), ("w8", 8, 0.02 * scale), ("bad", 9, 0.5), ("w4", 4, 0.1 * scale))]
)  # fmt: skip


@pytest.mark.parametrize("budget", range(8, 34))
def test_mixed_schemes_are_the_best_that_fit(budget):
    found = pick_schemes(CHOICES, budget)
    assert found["bytes"].sum() <= budget and found["layer"].tolist() == ["a", "b"]
    options = [CHOICES[CHOICES["layer"] == n].to_dict("records") for n in "ab"]
    best = min(
        x["rel_err"] ** 2 + y["rel_err"] ** 2
        for x in options[0]
        for y in options[1]
        if x["bytes"] + y["bytes"] <= budget
    )
    worst_step = 0.3**2 - 0.06**2  # one step of the greedy path, at most
    assert best - 1e-12 <= (found["error"] ** 2).sum() <= best + worst_step
    if budget in (8, 12, 16, 24, 32):  # where steps end
        assert (found["error"] ** 2).sum() == pytest.approx(best)


def test_mixed_schemes_need_room():
    with pytest.raises(ValueError, match="at least 8 bytes"):
        pick_schemes(CHOICES, 7)


def test_a_choice_is_what_runs():
    model = torch.nn.ModuleDict({n: torch.nn.Linear(64, 64).bfloat16() for n in ("a", "b", "c")}).requires_grad_(False)
    choice = pd.DataFrame(
        [("a", "fp8_channel:fp8_token"), ("b", "none"), ("c", "int8_channel:none")], columns=["layer", "scheme"]
    )
    with quantized_by(model, choice):
        kinds = {n: str(getattr(m, "scheme", "none")) for n, m in model.items()}
        assert kinds == {"a": "fp8_channel:fp8_token", "b": "none", "c": "int8_channel:none"}
    assert all(type(m) is torch.nn.Linear for m in model.values())
