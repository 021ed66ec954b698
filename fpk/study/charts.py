"""Plots of benchmarks, of tuning trials and of formats, readable at half a page. Each returns a matplotlib Figure.

Colours are Okabe and Ito's and cividis, which colour-blind readers can tell apart; markers and dashes say the same.
"""

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fpk.study.report import png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches: half a page of text at a size that needs no zoom
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442", "#444444")
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
_GREY = "#555555"


def figure(height: float, rows: int = 1, columns: int = 1, **more: Any) -> "tuple[Figure, list[Axes]]":
    """An empty figure of `rows` x `columns` panels; needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH, height), dpi=160, layout="constrained")
    FigureCanvasAgg(made)
    made._repr_png_ = lambda: png_of(made)  # type: ignore[attr-defined]  # so that a notebook shows it
    axes = made.subplots(rows, columns, squeeze=False, **more)
    return made, list(axes.flat)


def tidy(ax: "Axes", xlabel: str = "", ylabel: str = "", title: str = "", grid: str = "both") -> None:
    """Sizes, grid and frame that all plots share."""
    ax.set_xlabel(xlabel, fontsize=8)
    ax.set_ylabel(ylabel, fontsize=8)
    if title:
        ax.set_title(title, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.grid(axis=grid, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def legend(ax: "Axes", columns: int = 4) -> None:
    """Above the axes: inside, it would lie on points."""
    if ax.get_legend_handles_labels()[1]:
        ax.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2)


def logarithmic(ax: "Axes", x: float | None = 2, y: float | None = 10) -> None:
    """Logarithmic axes of these bases (None: linear), labelled with plain numbers."""
    for base, axis, scale in ((x, ax.xaxis, ax.set_xscale), (y, ax.yaxis, ax.set_yscale)):
        if base is not None:
            scale("log", base=base)
            axis.set_major_formatter(_plain)
            axis.set_minor_formatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else "")
    ax.tick_params(which="minor", labelsize=7)


def _plain(value: float, _: Any = None) -> str:
    return f"{value:g}"


def style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of the n-th series."""
    return dict(
        color=COLOURS[number % len(COLOURS)], marker=MARKERS[number % len(MARKERS)],
        linestyle=DASHES[number % len(DASHES)], markersize=4.5, linewidth=1.4,
    )  # fmt: skip


def timed(frame: pd.DataFrame, *impls: str) -> pd.DataFrame:
    """Rows of a result that have a time, of these implementations or of all."""
    rows = frame[(frame["status"] == "ok") & frame["us"].notna()]
    return rows[rows["impl"].isin(impls)] if impls else rows


# ---- benchmarks


def roofline(frame: pd.DataFrame, impls: Sequence[str] = ("fpk", "reference", "interpreter")) -> "Figure":
    """Work per byte against what is reached, below the ceilings that the same run measured.

    The sloped line is the copy rate; the level ones are torch's bf16 product and twice that, which is what 8-bit matrix
    units promise.
    """
    rows = timed(frame, *impls)
    rows = rows[(rows["flops"] > 0) & (rows["bytes"] > 0)]
    made, (ax,) = figure(3.9)
    intensity = rows["flops"] / rows["bytes"]
    for number, (op, part) in enumerate(rows.groupby("op")):
        look = style(number) | dict(linestyle="none")
        ax.plot(intensity[part.index], part["tflops"], label=str(op), alpha=0.85, **look)
    if len(rows):
        copy, product = rows["copy_gb_per_s"].median() / 1e3, rows["bf16_tflops"].median()
        x = np.geomspace(intensity.min() / 2, max(intensity.max() * 2, 4 * product / copy), 200)
        ax.plot(x, np.minimum(x * copy, 2 * product), color="black", linewidth=1.3)
        ax.plot(x, np.where(x * copy > product, product, np.nan), color="black", linewidth=0.9, linestyle="--")
        ridge = 2 * product / copy
        ax.annotate(f"copy {1e3 * copy:.4g} GB/s", (ridge / 4, product / 2), xytext=(-4, 2), fontsize=8, ha="right",
                    textcoords="offset points")  # fmt: skip
        for height, what in ((product, "bf16 product"), (2 * product, "twice that, for 8 bits")):
            ax.annotate(f"{what}: {height:.4g} TFLOP/s", (height / copy, height), xytext=(-4, 0), fontsize=8,
                        ha="right", textcoords="offset points")  # fmt: skip
    ax.set_xscale("log")
    ax.set_yscale("log")
    tidy(ax, "operations per byte that must move", "TFLOP/s reached")
    legend(ax, 3)
    return made


def speedups(frame: pd.DataFrame, over: str = "torch", most: int = 40) -> "Figure":
    """How much faster than `over` fpk is, a bar per case, grouped by op. Whiskers: the noise of both."""
    ours = timed(frame, "fpk", "reference", "interpreter")
    other = timed(frame, over)[["op", "case", "us", "noise_percent"]]
    both = ours.merge(other, on=["op", "case"], suffixes=("", "_other"))
    both["ratio"] = both["us_other"] / both["us"]
    both["noise"] = np.hypot(both["noise_percent"], both["noise_percent_other"]) / 100 * both["ratio"]
    both = both.sort_values(["op", "N", "K", "M", "case"] if "N" in both else ["op", "case"]).head(most)
    made, (ax,) = figure(1.2 + 0.2 * max(len(both), 3))
    ops = list(dict.fromkeys(both["op"]))
    colours = [COLOURS[ops.index(o) % len(COLOURS)] for o in both["op"]]
    y = np.arange(len(both))
    ax.barh(y, both["ratio"] - 1, left=1, height=0.66, color=colours, xerr=both["noise"],
            error_kw={"ecolor": _GREY, "elinewidth": 0.9})  # fmt: skip
    for position, ratio in zip(y, both["ratio"], strict=True):
        label = f"{ratio:.2f}" if ratio > 0.1 else f"{ratio:.1g}"
        ax.annotate(
            label, (max(ratio, 1), position), xytext=(9, 0), textcoords="offset points", fontsize=7, va="center"
        )
    ax.axvline(1, color="black", linewidth=1)
    ax.set_yticks(y, [f"{o}  {c}" for o, c in zip(both["op"], both["case"], strict=True)], fontsize=7)
    ax.set_ylim(len(both) - 0.4, -0.6)
    ax.set_xscale("log")
    ax.margins(x=0.12)
    ax.xaxis.set_major_formatter(_plain)
    low, high = ax.get_xlim()
    told = "25" if high > 4 * low else "123456789"  # or a narrow axis has no number but its 1
    ax.xaxis.set_minor_formatter(lambda v, _: f"{v:.3g}" if f"{v:e}"[0] in told else "")
    tidy(ax, f"time of {over} / time of fpk (right of 1: fpk is faster)", grid="x")
    ax.tick_params(axis="x", which="both", labelsize=8)
    ax.tick_params(axis="y", length=0, labelsize=7)
    return made


def floor_us(frame: pd.DataFrame) -> "pd.Series[float]":
    """The time that the ceilings allow: bytes at the copy rate or operations at the product's, whichever takes longer.

    The product's rate is the bf16 one for ops that multiply 16-bit numbers, and twice that for the rest.
    """
    sixteen_bits = frame["op"].str.contains("weight_only|^grouped_mm$")
    products = frame["bf16_tflops"] * np.where(sixteen_bits, 1, 2)
    return np.maximum(frame["bytes"] / frame["copy_gb_per_s"] / 1e3, frame["flops"] / products / 1e6)


def over_tokens(frame: pd.DataFrame, op: str, most: int = 4) -> "Figure":
    """Share of the time that the ceilings allow, over M (or T): a line per implementation, a panel per layer."""
    rows = timed(frame)
    rows = rows[rows["op"] == op]
    axis = "M" if rows["M"].notna().any() else "T"
    layer = [str(c).rpartition("/")[0] or _without(str(c), axis) for c in rows["case"]]
    rows = rows.assign(layer=layer, share=100 * floor_us(rows) / rows["us"])
    counts = rows.groupby("layer")[axis].nunique().sort_values(ascending=False, kind="stable")
    layers = [str(n) for n in counts.index[:most]]
    wide = 2 if len(layers) > 1 else 1
    tall = math.ceil(max(len(layers), 1) / wide)
    made, axes = figure(2.7 * tall, tall, wide, sharey=True)
    impls = list(dict.fromkeys(rows["impl"]))
    for ax, name in zip(axes, layers, strict=False):
        for impl, part in rows[rows["layer"] == name].sort_values(axis).groupby("impl", sort=False):
            look = style(impls.index(str(impl)))
            noise = part["noise_percent"] / 100
            ax.plot(part[axis], part["share"], label=str(impl), **look)
            ax.fill_between(part[axis].astype(float), part["share"] * (1 - noise), part["share"] * (1 + noise),
                            color=look["color"], alpha=0.15, linewidth=0)  # fmt: skip
        ax.set_xscale("log", base=2)
        ax.set_ylim(bottom=0)
        ax.xaxis.set_major_formatter(_plain)
        tidy(ax, f"{axis}, tokens", "" if axes.index(ax) % wide else "share of the ceiling, %")
        ax.annotate(name, (0.02, 0.97), xycoords="axes fraction", fontsize=8, va="top")
    if layers:
        legend(axes[0], 5)
    for ax in axes[len(layers) :]:
        ax.set_visible(False)
    return made


def _without(case: str, axis: str) -> str:
    return " ".join(word for word in case.split() if not word.startswith(f"{axis}="))


def bench_figures(frame: pd.DataFrame) -> "dict[str, tuple[Figure, str]]":
    """Every plot that a result has the rows for, by name, with its caption."""
    found: dict[str, tuple[Figure, str]] = {}
    gpus = ", ".join(str(g) for g in frame["gpu"].dropna().unique())
    ours = timed(frame, "fpk", "reference", "interpreter")
    if len(ours[ours["flops"] > 0]):
        found["roofline"] = roofline(frame), f"What each op reaches below the ceilings of {gpus}"
    for other in [i for i in dict.fromkeys(timed(frame)["impl"]) if i not in ("fpk", "reference", "interpreter")]:
        cases = set(map(tuple, timed(frame, other)[["op", "case"]].to_numpy()))
        if cases & set(map(tuple, ours[["op", "case"]].to_numpy())):
            word = str(other).replace(" ", "-")
            found[f"speedup-{word}"] = speedups(frame, str(other)), f"Time of {other} over time of fpk"
    for op, part in ours.groupby("op"):
        if part["M"].nunique() > 2 or part["T"].nunique() > 2:
            found[f"tokens-{op}"] = (
                over_tokens(frame, str(op)),
                f"{op}: share of what the ceilings allow, over the number of tokens",
            )
    return found


# ---- tuning


def trial_table(trials: Iterable[Any] | pd.DataFrame) -> pd.DataFrame:
    """Trials with a column for every config field (`config.BLOCK_M`) and key field (`key.M`)."""
    table = trials if isinstance(trials, pd.DataFrame) else pd.DataFrame([vars(t) for t in trials])
    parts = [table.reset_index(drop=True)]
    for column in ("config", "key"):
        fields = pd.DataFrame([json.loads(text) for text in table[column]])
        parts.append(fields.add_prefix(f"{column}."))
    return pd.concat(parts, axis=1)


def tuning_heat_map(table: pd.DataFrame, y: str = "BLOCK_M", x: str = "BLOCK_N", title: str = "") -> "Figure":
    """Best time of every tile at one key, as a multiple of the best of all; the other fields are free.

    table: `trial_table` of one op and key. Crosses mark tiles of which no candidate ran.
    """
    cells = table.assign(us=table["us"].where(table["status"].isin(["ok", "noisy"])))
    grid = cells.pivot_table(index=f"config.{y}", columns=f"config.{x}", values="us", aggfunc="min", dropna=False)
    grid = grid.sort_index().sort_index(axis=1)
    best = float(np.nanmin(grid.to_numpy()))
    ratio = grid.to_numpy(dtype=float) / best
    tried = cells.groupby([f"config.{y}", f"config.{x}"]).size()
    made, (ax,) = figure(1.1 + 0.42 * len(grid))
    image = ax.imshow(np.log2(ratio), aspect="auto", cmap="cividis_r", interpolation="nearest")
    for (i, row), (j, column) in ((a, b) for a in enumerate(grid.index) for b in enumerate(grid.columns)):
        if not math.isnan(ratio[i, j]):
            dark = ratio[i, j] > math.sqrt(np.nanmax(ratio))
            ax.text(
                j, i, f"{ratio[i, j]:.2f}", ha="center", va="center", fontsize=8, color="white" if dark else "black"
            )
        elif tried.get((row, column), 0):
            ax.text(j, i, "×", ha="center", va="center", fontsize=9, color=_GREY)
    ax.set_yticks(range(len(grid)), [f"{v:g}" for v in grid.index])
    ax.set_xticks(range(len(grid.columns)), [f"{v:g}" for v in grid.columns])
    tidy(ax, x, y, title or f"time over the best, {best:.3g} µs")
    ax.grid(False)
    bar = made.colorbar(image, ax=ax, pad=0.01)
    bar.ax.yaxis.set_major_formatter(lambda v, _: f"{2**v:.2g}×")
    bar.ax.tick_params(labelsize=8)
    return made


def regret(table: pd.DataFrame, draws: int = 200, seed: int = 0) -> "Figure":
    """How far from the best one still is after so many random candidates, a line per key; median of `draws` orders."""
    rng = np.random.default_rng(seed)
    made, (ax,) = figure(3.2)
    screened = table[table["stage"].eq("screen") & table["status"].isin(["ok", "noisy"])]
    keys = [(str(k), p) for k, p in screened.groupby("key") if len(p) > 3]
    for number, (key, part) in enumerate(keys[:6]):
        us = part["us"].to_numpy(dtype=float)
        orders = np.stack([np.minimum.accumulate(rng.permutation(us)) for _ in range(draws)])
        left = np.median(orders, axis=0) / us.min() - 1
        sizes = json.loads(key)
        name = " ".join(f"{n}={sizes[n]}" for n in ("M", "N", "K", "E") if n in sizes)
        look = style(number) | dict(marker="")
        ax.step(np.arange(1, len(us) + 1), 100 * left, where="post", label=name, **look)
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(_plain)
    tidy(ax, "candidates tried, in random order", "slower than the best, %")
    legend(ax, 2)
    return made


# ---- formats


def error_against_bits(table: pd.DataFrame) -> "Figure":
    """Relative error over bits of an element, scales included; a colour per kind of element, a marker per granularity.

    table: columns scheme, bits, rel_err, family (`fpk.study.formats.scheme_errors`).
    """
    made, (ax,) = figure(4.0)
    families = list(dict.fromkeys(table["family"]))
    for number, name in enumerate(families):
        part = table[table["family"] == name]
        ax.plot(
            part["bits"], 100 * part["rel_err"], label=name, **(style(number) | dict(linestyle="none", markersize=6))
        )
    for _, part in table.groupby(np.floor(table["bits"])):
        _label_column(ax, part.sort_values("rel_err"), part["bits"].max() + 0.12)
    ax.set_yscale("log")
    ax.margins(y=0.1)
    ax.set_xlim(table["bits"].min() - 0.3, table["bits"].max() + 1.7)
    ax.yaxis.set_major_formatter(_plain)
    ax.yaxis.set_minor_formatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else "")
    ax.tick_params(axis="y", which="minor", labelsize=7)
    tidy(ax, "bits of an element, scales included", "relative error, %")
    legend(ax, 5)
    return made


def _label_column(ax: "Axes", points: pd.DataFrame, x: float) -> None:
    """Names in a column right of their points, none on another, with lines that lead to them."""
    logs = np.log10(100 * points["rel_err"].to_numpy(dtype=float))
    heights = logs.copy()
    for _ in range(60):
        for i in range(1, len(heights)):
            near = 0.062 - (heights[i] - heights[i - 1])
            if near > 0:
                heights[i] += near / 2
                heights[i - 1] -= near / 2
    for row, height in zip(points.to_dict("records"), heights, strict=True):
        at = (row["bits"], 100 * row["rel_err"])
        ax.annotate(row["scheme"], at, xytext=(x, 10**height), fontsize=7, va="center",
                    arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5, "shrinkA": 0})  # fmt: skip


def number_lines(formats: Sequence[str], low: float = 2.0**-4, high: float | None = None) -> "Figure":
    """The positive values of formats on a logarithmic line each, from `low` to their largest."""
    from fpk.study.formats import values_of

    made, (ax,) = figure(0.9 + 0.42 * len(formats))
    for number, name in enumerate(formats):
        values = values_of(name).numpy()
        values = values[(values >= low) & (values <= (high or math.inf))]
        ax.vlines(values, number - 0.32, number + 0.32, color=COLOURS[number % len(COLOURS)], linewidth=1)
        ax.annotate(f"to {values.max():g}", (values.max(), number), xytext=(5, 0), textcoords="offset points",
                    fontsize=8, va="center")  # fmt: skip
    ax.set_yticks(range(len(formats)), list(formats))
    ax.set_ylim(len(formats) - 0.4, -0.6)
    ax.set_xscale("log", base=2)
    ax.margins(x=0.1)
    ax.xaxis.set_major_formatter(_plain)
    tidy(ax, "positive values", grid="x")
    return made
