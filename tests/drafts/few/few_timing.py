"""Times of the drafts beside today's scaled_mm, torch's and vLLM's CUTLASS, and what reading takes."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

import peers
import tables
import torch
from few_candidates import OP, SHAPES, case_of, draft, runs
from race import Call, race, save, sets_needed

BLOCK_MS, ROUNDS = 4.0, 3
Size = tuple[str, int, int, int]


def rivals(product: str, m: int, n: int, k: int) -> dict[str, Call]:
    """Peers that do the same; CUTLASS accumulates fast."""
    found: dict[str, Call] = {}
    if product != "int8_token":
        found["torch"] = lambda s: OP.baselines["torch"](**s)
    if product != "fp8_full":
        found |= peers.calls(product, m, n, k, True)
    return found


def time_shape(size: Size, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """(microseconds, error to today's) of everything that runs."""
    _, m, n, k = size
    case = case_of(*size)
    sets = [OP.inputs(**case, device="cuda", seed=7 * i) for i in range(sets_needed(m * k + n * k))]
    calls: dict[str, Call] = {"today": lambda s: OP(**s)} | rivals(*size)
    for name in names:
        if runs(name, case):
            fn, config = draft(name)
            calls[name] = lambda s, fn=fn, config=config: fn(**s, config=config)
    return race(size, calls, sets, BLOCK_MS, ROUNDS)


def floor_us(size: Size, limits: tuple[float, float]) -> float:
    """Microseconds of reading and writing all once, and of an empty kernel."""
    _, m, n, k = size
    return (m * k + n * k + 2 * m * n + 4 * (m + n)) / limits[0] + limits[1]


def show(size: Size, found: dict[str, tuple[float, float]], names: Sequence[str], floor: float) -> list[dict[str, Any]]:
    us = {who: value for who, (value, _) in found.items()}
    best = min((t for who, t in us.items() if who not in names and who != "today"), default=math.nan)
    print(f"\n{' x '.join(map(str, size))}   floor {floor:.2f} us, the fastest peer {best:.2f}", flush=True)
    rows = []
    for who, (value, error) in sorted(found.items(), key=lambda x: x[1]):
        over, near = best / value, floor / value
        print(
            f"  {who:14s} {value:8.2f} us   peer / it {over:5.3f}   floor / it {near:5.3f}   error to today {error:.1e}"
        )
        row = dict(zip(("product", "M", "N", "K"), size, strict=True), kernel=who, us=round(value, 2))
        rows.append(
            row | dict(peer_over_it=round(over, 3), floor_over_it=round(near, 3), error_to_today=f"{error:.1e}")
        )
    return rows


def means(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Geometric means over the layers of a product and so many tokens: today's, each candidate's, the best of all's."""
    for key in dict.fromkeys((r["product"], r["M"]) for r in rows):
        part = [r for r in rows if (r["product"], r["M"]) == key]
        layers = {(r["N"], r["K"]) for r in part}
        print(f"\n{key[0]}, {key[1]} tokens, {len(layers)} layers", flush=True)
        for who in ("today", *names, "best"):
            mine = [r for r in part if r["kernel"] == who]
            if who == "best":
                own = [r for r in part if r["kernel"] in ("today", *names)]
                mine = [
                    max((r for r in own if (r["N"], r["K"]) == at), key=lambda r: r["floor_over_it"]) for at in layers
                ]
            if len(mine) == len(layers):
                over, near = ([r[f] for r in mine] for f in ("peer_over_it", "floor_over_it"))
                print(f"  {who:14s} peer / it {geometric(over):5.3f}   floor / it {geometric(near):5.3f}", flush=True)


def geometric(values: Sequence[float]) -> float:
    return statistics.geometric_mean(values) if all(v > 0 for v in values) else math.nan


def time_all(names: Sequence[str], indices: Sequence[int], path: str) -> None:
    limits, rows = tables.limits(), list[dict[str, Any]]()
    for index in indices:
        size = SHAPES[index]
        rows += show(size, time_shape(size, names), names, floor_us(size, limits))
        torch.cuda.empty_cache()
        save(path, rows)
    means(rows, names)
