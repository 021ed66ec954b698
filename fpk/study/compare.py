"""Two results of `fpk bench` side by side: what became faster, slower, or stayed within the noise."""

import math

import pandas as pd

LEAST_PERCENT = 2.0
VERDICTS = ("faster", "slower", "same", "fixed", "broken", "new", "gone", "no time")
_KEY = ["op", "case", "impl"]
_OURS = ("fpk", "default", "reference", "interpreter")


def compare(a: pd.DataFrame, b: pd.DataFrame, least_percent: float = LEAST_PERCENT) -> pd.DataFrame:
    """Compare results, b against a, row by row.

    `noise_percent` of a measurement is half the spread of its rounds' medians. A change counts if it exceeds twice the
    root of the summed squares of the noises that enter it, and `least_percent`. Clocks and heat move a whole machine
    between two runs: where both have a time of code that did not change between them ("copy", or torch's own of one
    version), fpk's ratio is divided by that code's, whose noise then counts too.

    Args:
        a: the earlier result, as `sweep` or `read_results` give it.
        b: the later one.
        least_percent: changes below this are called "same" however quiet the machine was.

    Returns:
        DataFrame with a row per op, case and implementation: `a_us`, `b_us`, `speedup` (a over b, drift taken out),
        `drift` (b over a of the unchanged code; 1 where there is none), `threshold_percent`, and `verdict`, one of
        `VERDICTS`.

    Raises:
        ValueError: a result has a row twice.
    """
    for name, frame in (("a", a), ("b", b)):
        twice = frame[frame.duplicated(_KEY)]
        if len(twice):
            op, case, impl = twice.iloc[0][_KEY]
            raise ValueError(
                f"compare.{name}: expected one row per op, case and implementation, got {op} {case} {impl} twice"
            )
    columns = [*_KEY, "status", "us", "noise_percent"]
    merged = a[columns].merge(b[columns], on=_KEY, how="outer", suffixes=("_a", "_b"))
    anchors = _anchors(merged, _same(a, b, "torch"), _same(a, b, "gpu"))
    rows = [_row(r, anchors.get((r["op"], r["case"]))) for r in merged.to_dict("records")]
    found = pd.DataFrame(rows)
    if len(found):
        found["verdict"] = [_verdict(r, least_percent) for r in found.to_dict("records")]
    found = found.drop(columns=["status_a", "status_b"], errors="ignore")
    return found.sort_values(["op", "case", "impl"], ignore_index=True) if len(found) else found


def _same(a: pd.DataFrame, b: pd.DataFrame, column: str) -> bool:
    if column not in a.columns or column not in b.columns:
        return False
    return set(a[column].dropna()) == set(b[column].dropna())


def _anchors(merged: pd.DataFrame, same_torch: bool, same_gpu: bool) -> dict[tuple[str, str], tuple[float, float]]:
    """(b over a, its noise in percent) of code that is the same in both results, by op and case; the quietest one."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    if not same_gpu or not same_torch:
        return found
    for r in merged.to_dict("records"):
        at = (r["op"], r["case"])
        if r["impl"] in _OURS or not _timed(r["us_a"]) or not _timed(r["us_b"]):
            continue
        noise = math.hypot(r["noise_percent_a"], r["noise_percent_b"])
        if at not in found or noise < found[at][1]:
            found[at] = (r["us_b"] / r["us_a"], noise)
    return found


def _timed(us: float | None) -> bool:
    return us is not None and not math.isnan(us)


def _row(r: dict, anchor: tuple[float, float] | None) -> dict:
    drift, extra = anchor if anchor is not None and r["impl"] in _OURS else (1.0, 0.0)
    both = _timed(r["us_a"]) and _timed(r["us_b"])
    noise = math.hypot(r["noise_percent_a"], r["noise_percent_b"], extra) if both else float("nan")
    return {n: r[n] for n in (*_KEY, "status_a", "status_b")} | dict(
        a_us=r["us_a"], b_us=r["us_b"], speedup=r["us_a"] / r["us_b"] * drift if both else float("nan"), drift=drift,
        threshold_percent=2 * noise,
    )  # fmt: skip


def _verdict(r: dict, least_percent: float) -> str:
    before, after = (r[n] if isinstance(r[n], str) else None for n in ("status_a", "status_b"))
    if before is None or after is None:
        return "new" if before is None else "gone"
    if (before == "ok") != (after == "ok"):
        return "fixed" if after == "ok" else "broken"
    if math.isnan(r["speedup"]):
        return "no time"
    limit = 1 + max(r["threshold_percent"], least_percent) / 100
    return "faster" if r["speedup"] > limit else "slower" if r["speedup"] < 1 / limit else "same"


def machines(a: pd.DataFrame, b: pd.DataFrame) -> list[str]:
    """What differs between the machines and versions of two results, a line each."""
    lines = []
    for column in ("gpu", "fpk", "torch", "triton", "driver", "timer"):
        if column in a.columns and column in b.columns:
            one, other = (" ".join(sorted(str(v) for v in f[column].dropna().unique())) for f in (a, b))
            if one != other:
                lines.append(f"{column}: {one or 'unknown'} -> {other or 'unknown'}")
    return lines
