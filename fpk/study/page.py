"""`fpk report`: what is known about a GPU and a model on one page that stands alone."""

import base64
import datetime
import html
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fpk.study.report import png_of

TOP_ROWS = 60


@dataclass
class Section:
    """A heading, paragraphs of plain text, tables (caption, headings, rows) and figures (caption, PNG)."""

    title: str
    text: list[str] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    figures: list[tuple[str, bytes]] = field(default_factory=list)


_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 0 auto; padding: 1rem; color: #222;
  background: #fff; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; }
h2 { font-size: 1.25rem; margin-top: 2.5rem; border-bottom: 2px solid #0072B2; }
nav a { display: inline-block; margin-right: 1rem; padding: 0.25rem 0; color: #0057a0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 0.875rem; }
caption { text-align: left; font-weight: 600; padding: 0.5rem 0; }
th, td { padding: 0.25rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { background: #f3f6f9; } th.left, td.left { text-align: left; }
.wide { overflow-x: auto; max-width: 100%; }
figure { margin: 1.5rem 0; } figcaption { color: #444; font-size: 0.9rem; }
figure img { width: 100%; min-width: 36rem; max-width: 46rem; height: auto; display: block; }
details { margin: 1rem 0; } summary { cursor: pointer; padding: 0.4rem 0; }
footer { margin-top: 3rem; color: #555; font-size: 0.85rem; }
"""


def page(title: str, sections: Iterable[Section], lead: str = "") -> str:
    """HTML of sections, with everything inside and no script: no request leaves the page."""
    kept = [s for s in sections if s.text or s.tables or s.figures]
    links = "".join(f'<a href="#s{i}">{html.escape(s.title)}</a>' for i, s in enumerate(kept))
    body = "".join(_section(i, s) for i, s in enumerate(kept))
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(lead)}</p>
<nav aria-label="Sections">{links}</nav>
<main>
{body}</main>
<footer>Written by fpk, {now}.</footer>
</body></html>
"""


def _section(number: int, section: Section) -> str:
    parts = [f'<section id="s{number}"><h2>{html.escape(section.title)}</h2>']
    parts += [f"<p>{html.escape(text)}</p>" for text in section.text]
    for caption, png in section.figures:
        words = html.escape(caption)
        picture = base64.b64encode(png).decode()
        image = f'<img alt="{words}" src="data:image/png;base64,{picture}">'
        parts.append(f'<figure><div class="wide" tabindex="0">{image}</div><figcaption>{words}</figcaption></figure>')
    for caption, headings, rows in section.tables:
        table = _table(caption, headings, rows)
        long = len(rows) > 20
        parts.append(f"<details><summary>{html.escape(caption)} ({len(rows)} rows)</summary>{table}</details>"
                     if long else table)  # fmt: skip
    return "\n".join([*parts, "</section>\n"])


def _table(caption: str, headings: list[str], rows: list[list[str]]) -> str:
    left = [not rows or not all(_is_number(r[i]) for r in rows) for i in range(len(headings))]

    def line(cells: list[str], tag: str) -> str:
        inner = "".join(
            f"<{tag}{' class=left' if to_left else ''}>{html.escape(c)}</{tag}>"
            for c, to_left in zip(cells, left, strict=True)
        )
        return f"<tr>{inner}</tr>\n"

    body = "".join(line(r, "td") for r in rows)
    return (
        f'<div class="wide" tabindex="0"><table><caption>{html.escape(caption)}</caption>'
        f"<thead>{line(headings, 'th')}</thead><tbody>\n{body}</tbody></table></div>"
    )


def _is_number(text: str) -> bool:
    try:
        float(text.rstrip(" %x").lstrip("+") or "0")
    except ValueError:
        return text in ("-", "")
    return True


# ---- sections


def bench_section(frame: pd.DataFrame, name: str = "Benchmarks") -> Section:
    """Tables and plots of a result of `fpk bench`, or of a committed table."""
    from fpk.study.charts import bench_figures, floor_us

    gpus = ", ".join(sorted(frame["gpu"].dropna().unique()))
    timed = frame[(frame["status"] == "ok") & frame["us"].notna()].copy()
    timed["share"] = floor_us(timed) / timed["us"]
    rows = [
        [
            r["op"], r["case"], r["impl"], f"{r['us']:.2f}", f"{r['noise_percent']:.1f}", f"{r['tflops']:.2f}",
            f"{r['gb_per_s']:.0f}", f"{100 * r['share']:.0f}", f"{r['error']:.1e}",
        ]
        for r in timed.to_dict("records")
    ]  # fmt: skip
    headings = ["op", "case", "implementation", "us", "noise, %", "TFLOP/s", "GB/s", "share of ceiling, %", "error"]
    section = Section(f"{name} on {gpus}", [_bench_text(frame)], [("All timings", headings, rows)])
    section.figures = [(caption, png_of(figure)) for figure, caption in bench_figures(frame).values()]
    bad = frame[frame["status"] != "ok"]
    if len(bad):
        refused = [[r["op"], r["case"], r["impl"], r["status"], str(r["note"])] for r in bad.to_dict("records")]
        section.tables.append(("Not timed", ["op", "case", "implementation", "status", "why"], refused))
    section.tables.append(("Provenance", ["what", "found"], _provenance(frame)))
    return section


def _bench_text(frame: pd.DataFrame) -> str:
    copy, product = frame["copy_gb_per_s"].median(), frame["bf16_tflops"].median()
    what = "references on a CPU, which say nothing about kernels" if (frame["impl"] == "reference").any() else "kernels"
    return (
        f"Medians of alternating rounds; each output was compared with the op's reference first. Timed are {what}. "
        f"Ceilings of this machine, measured in the same run: a copy moves {copy:.0f} GB/s, torch's bf16 product "
        f"reaches {product:.3g} TFLOP/s."
    )


def _provenance(frame: pd.DataFrame) -> list[list[str]]:
    columns = ("gpu", "date", "fpk", "torch", "triton", "cuda", "driver", "timer", "sm_clock_mhz", "memory_clock_mhz",
               "power_limit_w")  # fmt: skip
    found = []
    for column in columns:
        values = sorted({str(v) for v in frame[column].dropna()} - {""}) if column in frame.columns else []
        if values:
            found.append([column.replace("_", " "), ", ".join(values)])
    return found


def database_section(frame: pd.DataFrame, gpu: str | None = None) -> Section:
    """Winners of the autotune database, as `fpk.tune.export.frame_of_tables` gives them."""
    if gpu is not None and len(frame):
        frame = frame[frame["gpu"] == gpu]
    if not len(frame):
        return Section("Tuned configs", ["No winners are recorded: every op runs its default config."])
    best = frame[frame["rank"] <= 1]
    rows = []
    for (where, op), part in best.groupby(["gpu", "op"]):
        gains = part["gain"]
        rows.append([where, op, str(len(part)), f"{gains.median():.2f}", f"{gains.max():.2f}", str((gains > 1).sum())])
    headings = ["gpu", "op", "shapes", "median gain", "largest gain", "shapes with a gain"]
    keys = [c for c in best.columns if c.startswith("key.") and best[c].notna().any()]
    top = best.sort_values("gain", ascending=False).head(TOP_ROWS)
    shapes = [
        [r["op"], " ".join(f"{k[4:]}={_spell(r[k])}" for k in keys if not pd.isna(r[k])), f"{r['us']:g}",
         f"{r['default_us']:g}", f"{r['gain']:.2f}"]
        for r in top.to_dict("records")
    ]  # fmt: skip
    return Section(
        "Tuned configs",
        ["Measured winners over the default config of each op; a gain of 2 halves the time."],
        [("Gains by op", headings, rows), ("Largest gains", ["op", "key", "us", "default, us", "gain"], shapes)],
    )


def _spell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def trials_section(table: pd.DataFrame, most: int = 3) -> Section:
    """Heat maps and regret of tuning trials (`fpk.study.charts.trial_table`), for the keys with most trials."""
    from fpk.study.charts import regret, tuning_heat_map

    section = Section("Tuning", [f"{len(table)} trials of {table['key'].nunique()} keys."])
    counts = [[str(o), str(s), str(n)] for (o, s), n in table.groupby(["op", "status"]).size().items()]  # type: ignore[misc]
    section.tables.append(("Verdicts", ["op", "verdict", "trials"], counts))
    tiled = (
        table[table[["config.BLOCK_M", "config.BLOCK_N"]].notna().all(axis=1)]
        if "config.BLOCK_N" in table
        else table[:0]
    )
    tiled = tiled[tiled["us"].notna()]
    for (op, key), _ in sorted(tiled.groupby(["op", "key"]), key=lambda item: -len(item[1]))[:most]:
        part = table[(table["op"] == op) & (table["key"] == key) & table["config.BLOCK_N"].notna()]
        fields = json.loads(str(key))
        sizes = " ".join(f"{n}={fields[n]}" for n in ("M", "N", "K", "E") if n in fields)
        section.figures.append((f"{op}, {sizes}: best time of every tile", png_of(tuning_heat_map(part))))
    for op, part in table.groupby("op"):
        if (part["stage"] == "screen").any():
            section.figures.append((f"{op}: what is lost after so many random candidates", png_of(regret(part))))
    return section


def study_section(directory: Path) -> Section:
    """Tables and plots that `fpk study --out` wrote.

    Raises:
        ValueError: no study there.
    """
    from fpk.study.plots import PLOTS

    if not (directory / "schemes.csv").is_file():
        raise ValueError(f"report: expected a directory that `fpk study --out` wrote, got {directory}")
    schemes = pd.read_csv(directory / "schemes.csv")
    facts = json.loads((directory / "provenance.json").read_text())
    deltas = [c for c in schemes.columns if c.startswith("delta_pct[")]
    headings = ["weights:activations", "MB", *(f"{c[10:-1]}, +%" for c in deltas), "output error, %", "worst layer, %"]
    rows = [
        [str(r["scheme"]), f"{r['bytes'] / 1e6:.1f}", *(f"{r[c]:+.2f}" for c in deltas), f"{100 * r['rel_err']:.2f}",
         f"{100 * r['worst_rel_err']:.2f}"]
        for r in schemes[schemes["layers"] > 0].to_dict("records")
    ]  # fmt: skip
    section = Section(
        f"Study of {facts.get('model', directory.name).partition(',')[0]}",
        ["Perplexity over the unquantized model, and the relative error of layer outputs on real activations."],
        [
            ("Schemes", headings, rows),
            ("Provenance of the study", ["what", "found"], [[k, str(v)] for k, v in facts.items()]),
        ],
    )
    for name, (_, caption) in PLOTS.items():
        if (directory / f"{name}.png").is_file():
            section.figures.append((caption, (directory / f"{name}.png").read_bytes()))
    return section
