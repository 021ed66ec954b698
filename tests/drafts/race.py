"""Times of several ways to the same result: CUDA graphs over rotated inputs, by turns, medians."""

import csv
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from turns import graphs_of_a_moment

from fpk.check import rel_error

Call = Callable[[dict[str, Any]], Any]
BYTES = 180_000_000  # of inputs that rotate: more than L2 holds
MOST_SETS = 24


def sets_needed(size: int) -> int:
    """Input sets of so many bytes each that are timed by turns."""
    return max(1, min(MOST_SETS, -(-BYTES // size)))


def captured(call: Call, sets: Sequence[dict[str, Any]], stream: Any) -> Any:
    for s in sets:  # what meets weights for the first time waits for them
        call(s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for s in sets:
            call(s)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def block(graph: Any, sets: int, block_ms: float) -> list[float]:
    """Microseconds of a call, of every replay but the first."""
    begun, times = time.perf_counter(), []
    while (time.perf_counter() - begun) * 1e3 < block_ms or len(times) < 3:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / sets)
    return times[1:]


def race(
    what: object, calls: Mapping[str, Call], sets: Sequence[dict[str, Any]], block_ms: float, rounds: int
) -> dict[str, tuple[float, float]]:
    """(microseconds, error to the first one) of everything that runs."""
    expected, errors, graphs, stream = None, {}, {}, torch.cuda.Stream()
    with graphs_of_a_moment():
        for who, call in calls.items():
            try:
                out = call(sets[0])
                expected = out if expected is None else expected
                errors[who] = rel_error(out, expected)
                torch.cuda.synchronize()
                graphs[who] = captured(call, sets, stream)
            except Exception as problem:
                print(f"{what} {who}: {type(problem).__name__}: {problem}"[:300], flush=True)
                if "illegal" in str(problem) or "launch fail" in str(problem):
                    raise
        samples: dict[str, list[float]] = {who: [] for who in graphs}
        for turn in range(rounds):
            for who in list(graphs)[:: 1 if turn % 2 == 0 else -1]:
                samples[who] += block(graphs[who], len(sets), block_ms)
    return {who: (statistics.median(us), errors[who]) for who, us in samples.items()}


def save(path: str, rows: Sequence[dict[str, Any]]) -> None:
    """Whatever comes next, this is there."""
    if path and rows:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
