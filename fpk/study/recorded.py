"""Committed results (`results/<gpu>/*.csv`) in the columns of `fpk.sweep`, so that plots and pages read both."""

from typing import Any

import pandas as pd

# GB/s of a copy, TFLOP/s of torch's bf16 product: what was measured beside the committed results
CEILINGS = {"nv-h200-sm90-132": (4250.0, 780.5)}
_WIDTHS = {"fp8_weight_only": 1, "int8_weight_only": 1}  # bytes of a weight where activations have two
_IMPLS = {"us": "fpk", "default_us": "default", "peer_us": "torch", "copy_us": "copy"}


def is_recorded(frame: pd.DataFrame) -> bool:
    """Is this a committed table of products or of quantizers?"""
    return "us" in frame.columns and ("product" in frame.columns or "copy_us" in frame.columns)


def from_recorded(frame: pd.DataFrame) -> pd.DataFrame:
    """A row per implementation of a table with one row per case.

    `op` is the product's name where the table has one ("fp8_token", "fp8_block"); noise is the recorded spread, or NaN.
    """
    rows = []
    for r in frame.to_dict("records"):
        work = _work(r)
        for column, impl in _IMPLS.items():
            us = float(pd.to_numeric(r.get(column), errors="coerce")) if column in r else float("nan")
            if impl == "copy" and us == us:  # a copy of the input was timed: here, of as many bytes as the op moves
                us = work[1] / float(r["copy_gb_per_s"]) / 1e3
            if us == us:
                rows.append(_row(r, work, impl, us))
    return pd.DataFrame(rows)


def _work(r: dict[str, Any]) -> tuple[float, float]:
    """Operations and bytes of a case, from its rates."""
    m, k = int(r["M"]), int(r["K"])
    if "product" not in r:
        return 3.0 * m * k, r["gb_per_s"] * r["us"] * 1e3
    n, element = int(r["N"]), 2 if r["product"] in _WIDTHS else 1
    return 2.0 * m * n * k, float(m * k * element + n * k + 2 * m * n)


def _row(r: dict[str, Any], work: tuple[float, float], impl: str, us: float) -> dict[str, Any]:
    flops, moved = work
    name, layer = r.get("product") or r.get("op"), r.get("layer")
    if str(r.get("fast_accum")) in ("1", "1.0"):
        name = f"{name} (fast)"
    case = f"{layer}/M={r['M']}" if isinstance(layer, str) else f"K={r['K']}/M={r['M']}"
    for more in ("variant", "scale_layout"):
        if isinstance(r.get(more), str) and r[more]:
            name = f"{name} ({r[more]})"
    copy, product = CEILINGS.get(str(r["gpu"]), (float("nan"), float("nan")))
    error = pd.to_numeric(r.get("peer_error" if impl == "torch" else "error"), errors="coerce")
    return dict(
        op=name, case=case, M=int(r["M"]), N=r.get("N"), K=int(r["K"]), E=None, T=None, impl=impl, status="ok", us=us,
        noise_percent=50 * float(r.get("spread") or 0.0), error=float(error), flops=flops, bytes=moved, note="",
        tflops=flops / us / 1e6, gb_per_s=moved / us / 1e3, copy_gb_per_s=copy, bf16_tflops=product,
        **{n: r.get(n) for n in ("gpu", "date", "torch", "triton")},
    )  # fmt: skip
