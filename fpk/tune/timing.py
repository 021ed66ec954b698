"""Timers: cold L2, many calls per CUDA graph, finalists in alternating rounds. Tests put their own in their place."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Launch = Callable[[dict[str, Any]], Any]  # runs one call on the arguments it is given


@dataclass(frozen=True)
class Sample:
    """Microseconds of one call: median, 20th and 80th percentile of `n` samples.

    noise_percent: half the spread of the rounds' medians (finals) or of the percentiles (screening), over the median.
    """

    us: float
    p20_us: float
    p80_us: float
    n: int
    noise_percent: float


class Timer(Protocol):
    name: str

    def screen(self, launch: Launch, arguments: dict[str, Any], about_ms: float) -> Sample:
        """A short look at one candidate."""
        ...

    def finals(
        self, launches: Sequence[Launch], arguments: dict[str, Any], about_ms: float, rounds: int
    ) -> list[Sample]:
        """A long look at several, in alternating order, so that drift of the clock hits all of them."""
        ...

    def clock_mhz(self) -> float | None: ...


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * (len(ordered) - 1))))]


def sample_of(values: Sequence[float]) -> Sample:
    middle, low, high = statistics.median(values), percentile(values, 0.2), percentile(values, 0.8)
    return Sample(middle, low, high, len(values), 50 * (high - low) / middle if middle else 0.0)


def sample_of_rounds(rounds: Sequence[Sequence[float]]) -> Sample:
    """Median over the rounds' medians: a round that was disturbed does not count more than another."""
    medians = [statistics.median(r) for r in rounds]
    values = [v for r in rounds for v in r]
    middle = statistics.median(medians)
    # the outermost rounds may have met another process: the middle half tells the repeatable spread
    spread = percentile(medians, 0.8) - percentile(medians, 0.2) if len(medians) > 3 else max(medians) - min(medians)
    return Sample(middle, percentile(values, 0.2), percentile(values, 0.8), len(values), 50 * spread / middle)


def duplicate(value: Any) -> Any:
    """A tensor in memory of its own with the same strides, offset and bits; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().clone()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        storage, value.storage_offset(), value.shape, value.stride()
    )


@dataclass
class _Graph:
    graph: Any
    calls: int
    start: Any
    end: Any

    def replay_us(self) -> float:
        """Microseconds of one replay."""
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return 1e3 * self.start.elapsed_time(self.end)


class GraphTimer:
    """CUDA graphs of many calls, each with its operands out of L2.

    Calls rotate through copies of the arguments that together exceed twice the L2. Where that would take too many
    copies (small operands), a buffer twice the size of L2 is written before every call, and the time of a graph of
    nothing but these writes, replayed next to it, is taken off.
    """

    MAX_COPIES = 48
    GRAPH_US = 400.0  # long enough that the replay's own start (some 5 us) does not count

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self.l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        self.name = f"cuda graph, L2 of {self.l2 >> 20} MiB cold"
        self._copies: tuple[dict[str, Any], list[dict[str, Any]]] | None = None
        self._flush: Tensor | None = None

    def clock_mhz(self) -> float | None:
        try:
            return float(torch.cuda.clock_rate(self.device))
        except Exception:  # NVML is missing or may not be asked
            return None

    def _rotation(self, arguments: dict[str, Any]) -> list[dict[str, Any]] | None:
        """Copies of the arguments that overflow L2, or None if they would be too many."""
        if self._copies is None or self._copies[0] is not arguments:
            self._copies = None  # frees the memory of the last case
            size = sum(v.untyped_storage().nbytes() for v in arguments.values() if isinstance(v, Tensor))
            needed = max(2, math.ceil(2 * self.l2 / max(size, 1)))
            copies = []
            if needed <= self.MAX_COPIES:
                copies = [{n: duplicate(v) for n, v in arguments.items()} for _ in range(needed)]
            self._copies = (arguments, copies)
        return self._copies[1] or None

    def _build(self, launch: Launch, arguments: dict[str, Any]) -> tuple[_Graph, _Graph | None]:
        copies = self._rotation(arguments)
        once = self._eager_us(launch, arguments)
        if copies:
            turns = max(1, math.ceil(self.GRAPH_US / max(once, 1.0) / len(copies)))
            for c in copies:  # what meets weights for the first time waits for them
                launch(c)
            return self._capture([lambda c=c: launch(c) for c in copies] * turns), None
        if self._flush is None:
            self._flush = torch.empty(2 * self.l2, dtype=torch.uint8, device=self.device)
        flush = self._flush
        calls = min(20, max(10, math.ceil(self.GRAPH_US / max(once, 1.0))))
        private = duplicate_all(arguments)
        launch(private)
        steps = [step for _ in range(calls) for step in (flush.zero_, lambda: launch(private))]
        full, empty = self._capture(steps), self._capture([flush.zero_] * calls)
        return _Graph(full.graph, calls, full.start, full.end), empty

    def _eager_us(self, launch: Launch, arguments: dict[str, Any]) -> float:
        launch(arguments)  # modules load here: they may not while a graph is captured
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch(arguments)
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end)

    def _capture(self, steps: Sequence[Callable[[], Any]]) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        graph.replay()
        torch.cuda.synchronize(self.device)
        return _Graph(graph, len(steps), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))

    def _values(self, graphs: tuple[_Graph, _Graph | None], about_ms: float, least: int) -> Iterator[float]:
        full, empty = graphs
        spent, n = 0.0, 0
        while n < least or spent < 1e3 * about_ms:
            us = full.replay_us()
            spent, n = spent + us, n + 1
            yield max(us - (empty.replay_us() if empty else 0.0), 0.01) / full.calls

    def screen(self, launch: Launch, arguments: dict[str, Any], about_ms: float) -> Sample:
        return sample_of(list(self._values(self._build(launch, arguments), about_ms, 5)))

    def finals(
        self, launches: Sequence[Launch], arguments: dict[str, Any], about_ms: float, rounds: int
    ) -> list[Sample]:
        graphs = [self._build(launch, arguments) for launch in launches]
        values: list[list[list[float]]] = [[] for _ in graphs]
        for r in range(rounds + 1):  # the first round warms the chip up
            for i in alternate(len(graphs), r):
                taken = list(self._values(graphs[i], about_ms / rounds, 5))
                if r:
                    values[i].append(taken)
        return [sample_of_rounds(v) for v in values]


def duplicate_all(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: duplicate(v) for n, v in arguments.items()}


def alternate(n: int, r: int) -> list[int]:
    """Order of round r: forwards and backwards in turn, each time beginning elsewhere."""
    order = [(i + r // 2) % n for i in range(n)] if n else []
    return order[::-1] if r % 2 else order


class WallTimer:
    """Wall clock of calls that return when they are done: the interpreter on a CPU."""

    name = "wall clock, interpreter"

    def clock_mhz(self) -> float | None:
        return None

    def _values(self, launch: Launch, arguments: dict[str, Any], about_ms: float) -> list[float]:
        values: list[float] = []
        while len(values) < 3 or sum(values) < 1e3 * about_ms:
            start = time.perf_counter()
            launch(arguments)
            values.append(1e6 * (time.perf_counter() - start))
        return values

    def screen(self, launch: Launch, arguments: dict[str, Any], about_ms: float) -> Sample:
        return sample_of(self._values(launch, arguments, about_ms))

    def finals(
        self, launches: Sequence[Launch], arguments: dict[str, Any], about_ms: float, rounds: int
    ) -> list[Sample]:
        values: list[list[list[float]]] = [[] for _ in launches]
        for r in range(rounds):
            for i in alternate(len(launches), r):
                values[i].append(self._values(launches[i], arguments, about_ms / rounds))
        return [sample_of_rounds(v) for v in values]


class FakeTimer:
    """Times from the config alone, for tests: `us(config)`, which may also count."""

    name = "fake"

    def __init__(self, us: Callable[[dict[str, Any]], float], noise_percent: float = 0.5) -> None:
        self._us = us
        self._noise = noise_percent

    def clock_mhz(self) -> float | None:
        return None

    def screen(self, launch: Launch, arguments: dict[str, Any], about_ms: float) -> Sample:
        us = self._us(launch.config)  # type: ignore[attr-defined]
        return Sample(us, us, us, 1, self._noise)

    def finals(
        self, launches: Sequence[Launch], arguments: dict[str, Any], about_ms: float, rounds: int
    ) -> list[Sample]:
        return [self.screen(launch, arguments, about_ms) for launch in launches]
