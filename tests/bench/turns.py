"""Timing of several implementations of the same work on a GPU, in turns, so that clocks and heat treat them alike.

Each implementation is captured once into a CUDA graph that calls it on every one of several input sets (together
larger than L2), then the graphs are replayed in alternating blocks. Times are medians over replays, per call.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fpk.kernels.gemm import _tickets

L2_BYTES = 60 << 20


@dataclass
class Timed:
    us: float
    spread: float  # (p90 - p10) / median over replays
    calls: int


def copies_needed(bytes_per_set: int) -> int:
    """How many input sets make a working set of three L2 sizes; at most 64."""
    return max(1, min(64, -(-3 * L2_BYTES // max(bytes_per_set, 1))))


@contextlib.contextmanager
def graphs_of_a_moment() -> Iterator[None]:
    """Graphs captured in the block are not replayed behind it: counters of their launches are free for later ones.

    A captured launch keeps its counters for ever, and when there are no more of them each launch sets some to zero
    first: what is captured last in a long table would be slower than in a model.
    """
    before = {index: used for index, (_, used) in _tickets._pools.items()}
    try:
        yield
    finally:
        torch.cuda.synchronize()
        _tickets._pools.update({i: (pool, before.get(i, 0)) for i, (pool, _) in _tickets._pools.items()})


def capture(call: Callable[[Any], Any], sets: Sequence[Any]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for s in sets:  # what meets weights for the first time waits for them
            call(s)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for s in sets:
            call(s)
    graph.reads = call, sets  # its kernels have addresses alone, also of what a peer made beside its arguments
    return graph


def time_in_turns(
    calls: dict[str, Callable[[Any], Any]], sets: Sequence[Any], block_ms: float = 40.0, rounds: int = 5
) -> dict[str, Timed]:
    """Median microseconds per call of each implementation, measured in `rounds` alternating blocks of `block_ms`."""
    with graphs_of_a_moment():
        return _time_in_turns(calls, sets, block_ms, rounds)


def _time_in_turns(
    calls: dict[str, Callable[[Any], Any]], sets: Sequence[Any], block_ms: float, rounds: int
) -> dict[str, Timed]:
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, call in calls.items():
        graphs[name] = capture(call, sets)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for graph in graphs.values():
        graph.replay()
        torch.cuda.synchronize()
    for r in range(rounds):
        order = list(graphs) if r % 2 == 0 else list(graphs)[::-1]
        for name in order:
            begun, times = time.perf_counter(), []
            while (time.perf_counter() - begun) * 1e3 < block_ms or len(times) < 3:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graphs[name].replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / len(sets))
            samples[name] += times[1:]  # the first replay of a block follows an idle gap
    out = {}
    for name, values in samples.items():
        values.sort()
        median = statistics.median(values)
        spread = (values[int(0.9 * (len(values) - 1))] - values[int(0.1 * (len(values) - 1))]) / median
        out[name] = Timed(median, spread, len(values))
    return out
