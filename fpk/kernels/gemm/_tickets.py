"""Counters by which programs of one launch find out who comes last. A kernel leaves them at zero, as it found them.

Launches on one stream follow one another and share counters. A captured launch keeps counters of its own for ever,
since nobody knows which graphs will run side by side.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

LIMIT = 16_384
"""Counters of a launch at most."""
ROOM = 1 << 26
"""Sums that a launch of many tokens leaves in memory at most."""
AXIS = 65_535
"""Programs of a grid's second axis."""
_POOL = 1 << 20

_streams: dict[tuple[int, int], Tensor] = {}
_pools: dict[int, tuple[Tensor, int]] = {}
_full: list[Tensor] = []  # pools whose counters graphs have
_lock = threading.Lock()


def tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 zeros on the device, for a launch on its current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            pool, used = _pools.get(index, (None, 0))
            if pool is not None and used + count <= _POOL:
                _pools[index] = (pool, used + count)
                return pool[used : used + count]
        return torch.zeros(count, dtype=torch.int32, device=device)  # a further node of the graph
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _streams or _pools[index][1] > _POOL - LIMIT:
        _make(key, device)
    return _streams[key]


def _make(key: tuple[int, int], device: torch.device) -> None:
    """Counters of a stream, and of the graphs to come where they have none or few."""
    with _lock:
        pool, used = _pools.get(key[0], (None, 0))
        if pool is None or used > _POOL - LIMIT:
            if pool is not None:
                _full.append(pool)
            _pools[key[0]] = (_zeros(_POOL, device), 0)
        if key not in _streams:
            _streams[key] = _zeros(LIMIT, device)


def _zeros(count: int, device: torch.device) -> Tensor:
    """Zeros to keep, made by another thread: the calling one's memory may come from a pool that is somebody's, such as
    that of torch.compile's graphs, who counts what is alive there and hands the rest out again."""

    def make() -> Tensor:
        zeros = torch.zeros(count, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # once: other streams use them next
        return zeros

    with ThreadPoolExecutor(1) as apart:
        return apart.submit(make).result()


def pieces(M: int, block: int, counters: int, sums: int = 0) -> list[slice]:
    """Rows of launches with tickets and memory enough, `block` rows a tile of so many counters and sums: one launch,
    mostly."""
    most = block * min(LIMIT // counters, max(1, ROOM // max(1, sums)))
    return [slice(first, min(first + most, M)) for first in range(0, M, most)]
