"""Plots of a study. Each takes a Study and returns a matplotlib Figure, readable at half a page.

Colours are Okabe and Ito's and cividis, which colour-blind readers can tell apart; shapes and positions say the same.
"""

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fpk.formats import scheme_of
from fpk.study.measure import BASELINE, Study
from fpk.study.report import png_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"fp8": "#0072B2", "int8": "#E69F00", "fp6": "#009E73", "fp4": "#D55E00", "": "#999999"}
_MARKERS = ("o", "^", "s", "D", "v", "P")
_WIDTH = 7.2  # inches: half a page of text at a size that needs no zoom
_BOTTOM = 1.2


def family(scheme: str) -> str:
    """Colour group of a layer scheme: the kind of its weights' elements."""
    fmt = scheme_of(scheme.partition(":")[0]).format
    return "int8" if fmt.kind == "int" else f"fp{fmt.bits}"


def _figure(
    rows: int, panels: int = 1, sharey: bool = False, widths: tuple[int, ...] | None = None
) -> "tuple[Figure, list[Axes]]":
    """A figure that grows with its rows and needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _BOTTOM + 0.27 * rows), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    figure._repr_png_ = lambda: png_of(figure)  # type: ignore[attr-defined]  # so that a notebook shows it
    axes = figure.subplots(1, panels, sharey=sharey, width_ratios=widths, squeeze=False)
    return figure, list(axes[0])


def _measured(study: Study) -> pd.DataFrame:
    """Schemes with numbers, the smallest error on top."""
    table = study.summary()
    table = table[(table["scheme"] != BASELINE) & (table["layers"] > 0)]
    deltas = [c for c in table.columns if c.startswith("delta_pct")]
    return table.assign(order=table[deltas].mean(axis=1)).sort_values(["order", "scheme"]).reset_index(drop=True)


def _label_rows(ax: "Axes", names: list[str]) -> None:
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#dddddd", linewidth=0.7)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def plot_cost_and_gain(study: Study) -> "Figure":
    """What a scheme costs (perplexity over the unquantized model) beside what it saves (bytes of the layers)."""
    table = _measured(study)
    names = table["scheme"].tolist()
    colours = [_COLOURS[family(s)] for s in names]
    figure, (left, right) = _figure(len(names), 2, sharey=True, widths=(2, 1))
    rows = np.arange(len(names))
    texts = [c[len("delta_pct[") : -1] for c in table.columns if c.startswith("delta_pct[")]
    for marker, offset, text in zip(_MARKERS * len(texts), np.linspace(-0.16, 0.16, len(texts)), texts, strict=False):
        left.scatter(table[f"delta_pct[{text}]"], rows + offset, c=colours, marker=marker, s=28, zorder=3)
        left.scatter([], [], c="#444444", marker=marker, s=28, label=text)
    left.axvline(0, color="#444444", linewidth=0.8)
    values = table[[f"delta_pct[{t}]" for t in texts]].to_numpy()
    highest, lowest = float(np.nanmax(values, initial=0)), float(np.nanmin(values, initial=0))
    if highest > 25:  # FP4 and FP8 in one picture
        left.set_xscale("symlog", linthresh=5)
        left.set_xlim(1.3 * lowest - 0.5, 1.4 * highest)  # else the outermost points are cut
        ticks = [t for t in (0, 5, 10, 20, 50, 100, 200, 500, 1000) if t < 1.4 * highest]
        left.set_xticks(ticks, [str(t) for t in ticks])
        left.minorticks_off()
    left.set_xlabel("perplexity over the unquantized model, %", fontsize=8)
    # above the axes: inside, it would lie on points
    left.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(texts), borderaxespad=0)
    _label_rows(left, names)
    megabytes = table["bytes"] / 1e6
    right.barh(rows, megabytes, height=0.55, color=colours)
    baseline = study.schemes.loc[study.schemes["scheme"] == BASELINE, "bytes"]
    label = "quantized layers, MB"
    if len(baseline):
        right.axvline(baseline.iloc[0] / 1e6, color="#444444", linestyle="--", linewidth=1)
        label += f"\n(dashed: unquantized, {baseline.iloc[0] / 1e6:.0f})"
    right.set_xlabel(label, fontsize=8)
    _label_rows(right, names)
    for ax in (left, right):
        ax.tick_params(axis="x", labelsize=8)
    return figure


def plot_layer_sqnr(study: Study) -> "Figure":
    """Signal-to-noise ratio of weights and of layer outputs, in dB, through the depth of the model."""
    layers = study.layers
    layers = layers[layers["scheme"] != BASELINE].assign(block=_blocks(layers["layer"]))
    order = _measured(study)["scheme"].tolist()
    outputs = layers.pivot_table(index="scheme", columns="block", values="output_sqnr_db", aggfunc="median")
    weights = layers.assign(scheme=layers["scheme"].str.partition(":")[0]).pivot_table(
        index="scheme", columns="block", values="sqnr_db", aggfunc="median"
    )
    outputs = outputs.reindex(order)
    weights = weights.reindex(dict.fromkeys(s.partition(":")[0] for s in order))
    figure, axes = _figure(len(outputs) + 1, 2, widths=(1, 1))
    panels = (("weights, median of a block", weights), ("layer outputs, median of a block", outputs))
    low = min(float(np.nanmin(p.to_numpy())) for _, p in panels)
    high = max(float(np.nanmax(p.to_numpy())) for _, p in panels)
    image = None
    for ax, (title, panel) in zip(axes, panels, strict=True):
        image = ax.imshow(panel.to_numpy(), aspect="auto", cmap="cividis", vmin=low, vmax=high, interpolation="nearest")
        ax.set_yticks(range(len(panel)), panel.index.tolist(), fontsize=7)
        step = max(1, len(panel.columns) // 6)
        ax.set_xticks(range(0, len(panel.columns), step), [str(c) for c in panel.columns[::step]], fontsize=8)
        ax.set_title(title, fontsize=9)
        ax.set_xlabel("decoder block", fontsize=8)
        ax.tick_params(length=0)
    if image is not None:
        bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01)
        bar.set_label("SQNR, dB", fontsize=8)
        bar.ax.tick_params(labelsize=8)
    return figure


def plot_output_error(study: Study) -> "Figure":
    """How the relative error of layer outputs spreads over the layers: quartiles, extremes, single layers beyond."""
    names = _measured(study)["scheme"].tolist()
    layers = study.layers
    figure, (ax,) = _figure(len(names))
    values = [layers.loc[layers["scheme"] == s, "rel_err"].to_numpy() * 100 for s in names]
    parts = ax.boxplot(
        values,
        positions=range(len(names)),
        orientation="horizontal",
        widths=0.6,
        patch_artist=True,
        medianprops={"color": "black"},
        flierprops={"marker": ".", "markersize": 4, "markeredgecolor": "#444444"},
    )
    for box, name in zip(parts["boxes"], names, strict=True):
        box.set_facecolor(_COLOURS[family(name)])
        box.set_alpha(0.75)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    ax.xaxis.set_minor_formatter(lambda v, _: f"{v:g}" if f"{v:e}"[0] in "25" else "")
    _label_rows(ax, names)
    ax.grid(axis="x", which="minor", color="#eeeeee", linewidth=0.5)
    ax.tick_params(axis="x", which="both", labelsize=8)
    ax.set_xlabel(f"relative error of a layer's output on {study.captured_tokens} real tokens, %", fontsize=8)
    return figure


def _blocks(layers: "pd.Series[str]") -> "pd.Series[int]":
    """Number of the decoder block in a layer's name; 0 where there is none."""
    return layers.str.extract(r"\.(\d+)\.", expand=False).fillna("0").astype(int)


PLOTS = {
    "cost_and_gain": (plot_cost_and_gain, "Perplexity lost and memory saved, by scheme"),
    "layer_sqnr": (plot_layer_sqnr, "Signal-to-noise ratio through the depth of the model"),
    "output_error": (plot_output_error, "Relative error of layer outputs, spread over the layers"),
}
"""Plots by file name, each with its caption."""
