"""Where the time and the error of a mixture-of-experts layer go: its ops one by one, its schemes, its skew."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from fpk._moe import moe
from fpk.api import quantize
from fpk.shapes import MOE_LAYERS
from fpk.study.bench import sweep
from fpk.study.charts import COLOURS, figure, legend, logarithmic, tidy
from fpk.study.measure import relative_error

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def stage_cases(model: str, tokens: int, shrink: int = 1) -> list[tuple[str, str, dict[str, Any]]]:
    """(stage, op, arguments of the op's inputs) of a layer with FP8 weights and activations, in order.

    Args:
        model: a key of `fpk.shapes.MOE_LAYERS`.
        tokens: T; every one goes to `top_k` experts.
        shrink: divides hidden and intermediate size, for machines without a GPU.

    Raises:
        ValueError: an unknown model.
    """
    if model not in MOE_LAYERS:
        raise ValueError(f"stage_cases.model: expected one of {', '.join(MOE_LAYERS)}, got {model!r}")
    experts, top_k, hidden, inner, dropped = MOE_LAYERS[model]
    hidden, inner, rows = hidden // shrink, inner // shrink, tokens * top_k
    between = dict(T=tokens, H=hidden, E=experts, top_k=top_k, dropped=dropped)
    return [
        ("route", "route", dict(M=tokens, E=experts, top_k=top_k)),
        ("sort", "sort_by_expert", dict(M=tokens, E=experts, top_k=top_k)),
        ("quantize", "quantize_fp8_token", dict(M=tokens, K=hidden)),
        ("permute", "moe_permute", between | dict(x_dtype=torch.float8_e4m3fn, groups=1)),
        ("gate and up", "grouped_scaled_mm", dict(M=rows, N=2 * inner, K=hidden, E=experts, dropped=dropped)),
        ("activate", "act_and_mul_quantize_fp8_token", dict(M=rows, K=inner)),
        ("down", "grouped_scaled_mm", dict(M=rows, N=hidden, K=inner, E=experts, dropped=dropped)),
        ("unpermute", "moe_unpermute", between),
    ]


def time_stages(model: str, tokens: Iterable[int], shrink: int = 1, **options: Any) -> pd.DataFrame:
    """Time of every stage by itself: rows of `sweep` with columns `stage` and `tokens`."""
    parts = []
    for t in tokens:
        for stage, op, case in stage_cases(model, t, shrink):
            found = sweep(op, {f"{model}/{stage}/T={t}": case}, ["fpk"], **options)
            parts.append(found.assign(stage=stage, tokens=t))
    return pd.concat(parts, ignore_index=True)


def plot_stages(table: pd.DataFrame) -> "Figure":
    """Time of the stages over the number of tokens: sums as bars, and each stage's share within."""
    made, (left, right) = figure(3.4, 1, 2, width_ratios=(3, 2))
    stages = list(dict.fromkeys(table["stage"]))
    tokens = sorted(table["tokens"].unique())
    grid = table.pivot_table(index="stage", columns="tokens", values="us", sort=False).reindex(stages)[tokens]
    below = grid.sum() * 0
    for number, stage in enumerate(stages):
        share = 100 * grid.loc[stage] / grid.sum()
        colour = COLOURS[number % len(COLOURS)]
        left.bar(range(len(tokens)), share, bottom=below, color=colour, label=stage, edgecolor="white", width=0.75,
                 hatch="//" if number % 2 else None)  # fmt: skip
        below = below + share
    left.set_xticks(range(len(tokens)), [str(t) for t in tokens])
    tidy(left, "tokens", "share of the layer's time, %", grid="y")
    legend(left, 4)
    right.plot(tokens, grid.sum(), color=COLOURS[0], marker="o", markersize=4.5)
    logarithmic(right)
    tidy(right, "tokens", "all stages, µs")
    return made


def layer_errors(
    schemes: Iterable[str], x: Tensor, logits: Tensor, w13: Tensor, w2: Tensor, top_k: int
) -> pd.DataFrame:
    """Relative error of a layer's output by scheme ("weights:activations"), against the layer in fp32.

    Columns: scheme, rel_err, from_weights (the error if only the weights are quantized), bytes of the weights.
    """
    exact = moe(x.float(), logits, w13.float(), w2.float(), top_k)
    rows = []
    for name in schemes:
        weights, _, act = name.partition(":")
        q13, q2 = quantize(w13, weights), quantize(w2, weights)
        plain = relative_error(moe(x, logits, q13, q2, top_k), exact)
        error = plain if act in ("", "none") else relative_error(moe(x, logits, q13, q2, top_k, act=act), exact)
        rows.append(dict(scheme=name, rel_err=error, from_weights=plain, bytes=q13.nbytes + q2.nbytes))
    return pd.DataFrame(rows)


def plot_layer_errors(table: pd.DataFrame) -> "Figure":
    """Error of each scheme, and the part of it that the weights alone make."""
    made, (ax,) = figure(1.1 + 0.32 * len(table))
    ax.barh(range(len(table)), 100 * table["rel_err"], height=0.7, color=COLOURS[5], label="weights and activations")
    ax.barh(range(len(table)), 100 * table["from_weights"], height=0.35, color=COLOURS[0], label="weights alone")
    ax.set_yticks(range(len(table)), table["scheme"])
    ax.invert_yaxis()
    tidy(ax, "relative error of the layer's output, %", grid="x")
    legend(ax, 2)
    return made


def expert_load(logits: Tensor, top_k: int) -> Tensor:
    """(E,) int64: rows that each expert gets."""
    chosen = logits.topk(top_k, dim=-1).indices
    return torch.bincount(chosen.flatten().cpu(), minlength=logits.shape[-1])
