"""A study on paper: terminal table, CSV, Parquet, plots, and one HTML page that stands alone."""

import base64
import datetime
import html
import importlib.metadata
import importlib.util
import io
import json
import math
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from fpk.study.measure import BASELINE, Study
from fpk.study.model import StudyError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

SMALL_MODEL_NOTE = (
    "A model of 135 M parameters loses several times more than one of 7 B does: read the order of the schemes, not the "
    "percentages. Differences of one or two points are noise at a few thousand tokens."
)


def provenance(study: Study, seconds: float | None = None) -> dict[str, str]:
    """Everything needed to repeat the numbers: versions, machine, model, tokens, date."""
    texts = {
        row["text"]: f"{row['sequences']} x {row['length']} tokens, sha256 {row['tokens_hash']}"
        for row in study.perplexity_rows
        if row["scheme"] == BASELINE
    }
    facts = {
        "model": f"{study.model}, sha256 {study.fingerprint[:16]}",
        "dtype": study.dtype,
        "device": study.device,
        **{f"text {name}": what for name, what in texts.items()},
        "layer errors": f"on {study.captured_tokens} tokens of the first text",
        **{name: _version(name) for name in ("fpk", "torch", "triton", "transformers")},
        "python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "threads": str(torch.get_num_threads()),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if study.calibration_tokens:
        facts["static activations"] = f"calibrated on {study.calibration_tokens} tokens that follow the measured ones"
    if seconds is not None:
        facts["duration"] = f"{seconds:.0f} s"
    if not study.complete:
        facts["complete"] = "no: interrupted, the tables hold what was measured until then"
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


# ---- tables

_WIDEST_NAME = 32  # the table fits 80 columns with it; longer names take two lines in a terminal


def _columns(table: pd.DataFrame) -> list[tuple[str, str]]:
    """(column, heading) of the summary table, without what was not measured. Headings of two lines fit 80 columns."""
    columns = [("scheme", "weights:activations")]
    for name in (c[len("delta_pct[") : -1] for c in table.columns if c.startswith("delta_pct[")):
        columns += [(f"perplexity[{name}]", f"{name}\nppl"), (f"delta_pct[{name}]", "\n+%")]
    columns += [
        ("sqnr_db", "SQNR\ndB"),
        ("rel_err", "err\n%"),
        ("worst_rel_err", "worst\n%"),
        ("bytes", "\nMB"),
        ("ms", "\nms"),
    ]
    if not table["ms"].notna().any():
        columns.remove(("ms", "\nms"))
    return columns


def _cell(column: str, value: Any) -> str:
    if isinstance(value, str):
        return "unquantized" if value == BASELINE else value
    if value is None or math.isnan(value):
        return "-"
    if column == "bytes":
        return f"{value / 1e6:.1f}"
    if column.endswith("rel_err"):
        return f"{100 * value:.2f}" if value else "-"
    if column.startswith("delta_pct"):
        return f"{value:+.2f}" if value else "-"
    if math.isinf(value):
        return "-"
    if column.startswith("perplexity"):
        return f"{value:.2f}" if value < 1e4 else f"{value:.0e}"
    return f"{value:.3f}" if column == "ms" else f"{value:.1f}"


def _rows(study: Study) -> tuple[list[str], list[list[str]], list[str]]:
    """(headings, cells, notes) of the summary."""
    table = study.summary()
    columns = _columns(table)
    cells = [[_cell(c, row[c]) for c, _ in columns] for row in table.to_dict("records")]
    notes = [
        f"{r['scheme']}: {r['note']}" for r in table.to_dict("records") if isinstance(r["note"], str) and r["note"]
    ]
    return [heading for _, heading in columns], cells, notes


def rich_table(study: Study) -> "Table":
    """The summary for a terminal."""
    from rich.table import Table

    headings, cells, notes = _rows(study)
    table = Table(box=None, padding=(0, 1, 0, 0), caption="\n".join(notes) or None, caption_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", no_wrap=True)
    for name, *numbers in cells:
        table.add_row(name if len(name) <= _WIDEST_NAME else name.replace(":", ":\n  "), *numbers)
    return table


# ---- files


def write_report(study: Study, out: str | Path, seconds: float | None = None) -> list[Path]:
    """Write tables (CSV, and Parquet if pyarrow is there), plots (PNG), provenance (JSON) and index.html.

    Args:
        study: complete or not.
        out: directory; made if absent, files of an earlier report are replaced.
        seconds: how long it took, for the record.

    Returns:
        The files, index.html last.

    Raises:
        StudyError: the directory cannot be written.
    """
    from fpk.study.plots import PLOTS

    directory = Path(out)
    facts = provenance(study, seconds)
    written: list[Path] = []
    figures: list[tuple[str, bytes]] = []
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in (("schemes", study.summary()), ("perplexity", study.perplexity), ("layers", study.layers)):
            frame.to_csv(directory / f"{name}.csv", index=False)
            written.append(directory / f"{name}.csv")
            if importlib.util.find_spec("pyarrow"):
                frame.to_parquet(directory / f"{name}.parquet", index=False)
                written.append(directory / f"{name}.parquet")
        if (study.schemes["layers"] > 0).sum() > 1:  # a scheme beside the unquantized model
            for name, (plot, caption) in PLOTS.items():
                png = png_of(plot(study))
                (directory / f"{name}.png").write_bytes(png)
                written.append(directory / f"{name}.png")
                figures.append((caption, png))
        (directory / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n")
        (directory / "index.html").write_text(html_page(study, facts, figures), encoding="utf-8")
    except OSError as error:
        raise StudyError(f"{directory}: cannot be written ({error.strerror or error})") from error
    return [*written, directory / "provenance.json", directory / "index.html"]


def png_of(figure: "Figure") -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", metadata={"Software": None})
    return stream.getvalue()


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.9rem; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child { text-align: left; }
table.facts td { text-align: left; overflow-wrap: anywhere; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #555; font-size: 0.9rem; }
.wide { overflow-x: auto; }
"""


def html_page(study: Study, facts: dict[str, str], figures: Iterable[tuple[str, bytes]]) -> str:
    """A page without links to anything: tables and plots are inside."""
    headings, cells, notes = _rows(study)
    kinds = study.layers[study.layers["scheme"] != BASELINE]
    worst = kinds.sort_values("rel_err", ascending=False).head(10)
    worst_cells = [
        [r["scheme"], r["layer"], f"{r['N']} x {r['K']}", f"{r['sqnr_db']:.1f}", f"{100 * r['rel_err']:.2f}"]
        for r in worst.to_dict("records")
    ]
    pictures = "".join(
        f'<figure><img alt="{html.escape(caption)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>\n"
        for caption, png in figures
    )
    title = f"{study.model} under quantization"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>Perplexity (ppl) and its change over the unquantized model; SQNR of the weights; relative error of layer outputs on
real activations (median and worst layer); bytes of the quantized layers. {html.escape(SMALL_MODEL_NOTE)}</p>
{_html_table(headings, cells)}
{"".join(f"<p>{html.escape(note)}</p>" for note in notes)}
{pictures}<h2>Layers with the largest output error</h2>
{_html_table(["weights:activations", "layer", "N x K", "weight dB", "out err %"], worst_cells)}
<h2>Provenance</h2>
{_html_table([], [[k, v] for k, v in facts.items()], "facts")}
</body></html>
"""


def _html_table(headings: list[str], rows: list[list[str]], css: str = "") -> str:
    def row(cells: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(c.strip())}</{tag}>" for c in cells) + "</tr>\n"

    head = f"<thead>{row(headings, 'th')}</thead>" if headings else ""
    body = "".join(row(r, "td") for r in rows)
    return f'<div class="wide"><table class="{css}">{head}<tbody>\n{body}</tbody></table></div>'
