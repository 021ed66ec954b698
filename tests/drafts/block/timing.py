"""Times of the drafts beside today's kernel and DeepGEMM: CUDA graphs over rotated inputs, by turns, medians."""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import peers
import torch
from candidates import LEAN, OP, SHAPES, draft, meant_for
from race import Call, race, save, sets_needed

FIELDS = ("M", "N", "K", "kernel", "us", "deep_gemm_over_it", "error_to_today")
BLOCK_MS, ROUNDS = 10.0, 4


def deep_gemm() -> Call | None:
    """DeepGEMM's product of an argument set."""
    peers.load()
    try:
        from deep_gemm import fp8_gemm_nt
    except Exception as problem:
        print(f"no DeepGEMM: {type(problem).__name__}: {problem}"[:200], flush=True)
        return None

    def call(s: dict[str, Any]) -> torch.Tensor:
        out = torch.empty((s["a"].shape[0], s["b"].shape[0]), dtype=torch.bfloat16, device=s["a"].device)
        fp8_gemm_nt((s["a"], s["scale_a"]), (s["b"], s["scale_b"]), out, disable_ue8m0_cast=True)
        return out

    return call


def warm(indices: Sequence[int]) -> None:
    """Let DeepGEMM compile what these shapes need."""
    gemm = deep_gemm()
    for m, n, k in [SHAPES[i] for i in indices] if gemm else ():
        gemm(OP.inputs(M=m, N=n, K=k, scale_layout="column", device="cuda"))
        torch.cuda.synchronize()


def busiest(config: dict[str, Any], m: int, n: int, sms: int = 132) -> int:
    """Columns that the busiest program computes, in rows of 128: what decides between widths."""
    rows, cluster = config["BLOCK_M"], config["CLUSTER"]
    clusters = -(-m // (rows * cluster)) * -(-n // config["BLOCK_N"])
    return -(-clusters // (sms // cluster - (cluster > 2))) * config["BLOCK_N"] * rows // 128


def time_shape(size: tuple[int, int, int], names: Sequence[str], gemm: Call | None) -> dict[str, tuple[float, float]]:
    """(microseconds, error to today's kernel) of everything that runs."""
    m, n, k = size
    count = sets_needed(m * k + n * k)
    sets = [OP.inputs(M=m, N=n, K=k, scale_layout="column", device="cuda", seed=7 * i) for i in range(count)]
    calls: dict[str, Call] = {"today": lambda s: OP(**s)}
    if gemm is not None:
        calls["DeepGEMM"] = gemm
    for name in names:
        if meant_for(name, m):
            fn, config = draft(name)
            calls[name] = lambda s, fn=fn, config=config: fn(**s, config=config)
    return race(size, calls, sets, BLOCK_MS, ROUNDS)


def show(size: tuple[int, int, int], found: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    m, n, k = size
    us = {who: value for who, (value, _) in found.items()}
    best = min((who for who in us if who != "DeepGEMM"), key=us.__getitem__)
    print(f"\n{m} x {n} x {k}   {2e-6 * m * n * k / us[best]:.0f} TFLOP/s by {best}", flush=True)
    rows = []
    for who, (value, error) in sorted(found.items(), key=lambda x: x[1]):
        over = us["DeepGEMM"] / value if "DeepGEMM" in us else math.nan
        wave = busiest(draft(who)[1], m, n) if who in LEAN else ""
        print(
            f"  {who:18s} {value:9.2f} us   DeepGEMM / it {over:5.3f}   error to today {error:.1e}   {wave}", flush=True
        )
        values = (m, n, k, who, round(value, 2), round(over, 3), f"{error:.1e}")
        rows.append(dict(zip(FIELDS, values, strict=True)))
    return rows


def means(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means over the shapes of so many tokens: today's kernel, and the best of all for each."""
    for low, high in itertools.pairwise((0, 64, 256, 1024, 4096, 9999)):
        part = [r for r in rows if low < r["M"] <= high and not math.isnan(r["deep_gemm_over_it"])]
        best: dict[Any, float] = {}
        for r in (r for r in part if r["kernel"] != "DeepGEMM"):
            size = (r["M"], r["N"], r["K"])
            best[size] = max(best.get(size, 0.0), r["deep_gemm_over_it"])
        today = [r["deep_gemm_over_it"] for r in part if r["kernel"] == "today"]
        if today:
            of_today, of_best = statistics.geometric_mean(today), statistics.geometric_mean(best.values())
            print(f"M {low + 1}..{high}: DeepGEMM / today {of_today:.3f}, / best {of_best:.3f}", flush=True)


def time_all(names: Sequence[str], indices: Sequence[int], path: str) -> None:
    gemm, rows = deep_gemm(), []
    for index in indices:
        rows += show(SHAPES[index], time_shape(SHAPES[index], names, gemm))
        torch.cuda.empty_cache()
        save(path, rows)
    means(rows)
