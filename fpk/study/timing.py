"""Time of a layer's call on a GPU."""

import math
from typing import Any

import torch
from torch import Tensor, nn


class LayerTimer:
    """Median milliseconds of a layer's call from a replayed CUDA graph, weights warm in the cache; NaN on a CPU.

    Layers of one shape and scheme are timed once.
    """

    calls, replays = 16, 15

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], float] = {}

    def ms(self, scheme: str, layer: nn.Module, x: Tensor) -> float:
        if x.device.type != "cuda":
            return math.nan
        key = (scheme, tuple(x.shape), layer.out_features, getattr(layer, "bias", None) is not None)
        if key not in self._known:
            self._known[key] = self._measure(layer, x)
        return self._known[key]

    def _measure(self, layer: nn.Module, x: Tensor) -> float:
        stream = torch.cuda.Stream(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):  # compilation and look-ups must be over before the capture
            for _ in range(3):
                layer(x)
        torch.cuda.current_stream(x.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.calls):
                layer(x)
        times = []
        for _ in range(self.replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / self.calls)
        return sorted(times)[len(times) // 2]
