"""A scheme for every layer under a budget of bytes: the smallest sum of errors that fits."""

import contextlib
import itertools
from collections.abc import Callable, Iterator

import pandas as pd
from torch import nn

from fpk.nn import quantized
from fpk.study.measure import BASELINE


def pick_schemes(layers: pd.DataFrame, budget: int, error: str = "rel_err") -> pd.DataFrame:
    """Choose a scheme for every layer so that the bytes fit and the summed squares of `error` are small.

    Starts with the smallest scheme of every layer, then takes, again and again, the step that lowers the error most per
    byte, along the lower convex hull of each layer's choices. That is optimal for every budget that a step ends on, and
    less than one step away from it in between.

    Args:
        layers: `Study.layers`: columns scheme, layer, bytes and `error`, a row for each choice. The unquantized layer
            ("none") is a choice like the others.
        budget: bytes of all layers together.
        error: the column whose squares are summed: errors of different layers are taken as independent, and equally
            bad. Both are approximations.

    Returns:
        A row per layer: layer, scheme, bytes, error.

    Raises:
        ValueError: no choices, or the budget is below the smallest scheme of every layer.
    """
    if not len(layers):
        raise ValueError("pick_schemes.layers: expected a row per layer and scheme, got none")
    hulls = {str(name): _hull(part, error) for name, part in layers.groupby("layer", sort=False)}
    place = dict.fromkeys(hulls, 0)
    spent = sum(hull[0][0] for hull in hulls.values())
    if spent > budget:
        raise ValueError(f"pick_schemes.budget: expected at least {spent} bytes, the smallest schemes, got {budget}")
    steps = [
        ((a[1] - b[1]) / (b[0] - a[0]), name, i + 1, b[0] - a[0])
        for name, hull in hulls.items()
        for i, (a, b) in enumerate(itertools.pairwise(hull))
    ]
    for _, name, to, more in sorted(steps, key=lambda step: (-step[0], step[1], step[2])):
        if spent + more <= budget and place[name] == to - 1:
            place[name], spent = to, spent + more
    rows = [
        dict(layer=name, scheme=hull[place[name]][2], bytes=hull[place[name]][0], error=hull[place[name]][1] ** 0.5)
        for name, hull in hulls.items()
    ]
    return pd.DataFrame(rows, columns=["layer", "scheme", "bytes", "error"])


def _hull(part: pd.DataFrame, error: str) -> list[tuple[int, float, str]]:
    """(bytes, squared error, scheme) of a layer's choices on their lower convex hull, smallest first."""
    points = sorted(
        (int(r["bytes"]), float(r[error]) ** 2, str(r["scheme"]))
        for r in part.to_dict("records")
        if r[error] == r[error]
    )
    hull: list[tuple[int, float, str]] = []
    for point in points:
        if hull and point[1] >= hull[-1][1]:
            continue  # as many bytes or more, and no better
        while len(hull) > 1 and _slope(hull[-2], point) >= _slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(point)
    return hull


def _slope(a: tuple[int, float, str], b: tuple[int, float, str]) -> float:
    """Error lowered per byte."""
    return (a[1] - b[1]) / (b[0] - a[0])


@contextlib.contextmanager
def quantized_by(model: nn.Module, choice: pd.DataFrame) -> Iterator[nn.Module]:
    """Quantize every layer by the scheme that `pick_schemes` chose, inside the block."""
    with contextlib.ExitStack() as stack:
        for scheme, part in choice.groupby("scheme"):
            if scheme != BASELINE:
                stack.enter_context(quantized(model, str(scheme), filter=_named(frozenset(part["layer"]))))
        yield model


def _named(names: frozenset[str]) -> Callable[[nn.Module, str], bool]:
    return lambda _, name: name in names
