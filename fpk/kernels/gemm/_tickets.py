"""Counters by which programs of one launch find out who comes last. A kernel leaves them at zero, as it found them.

Launches on one stream follow one another and share counters. A captured launch keeps counters of its own for ever,
since nobody knows which graphs will run side by side.
"""

import torch
from torch import Tensor

LIMIT = 16_384
"""Counters of a launch at most."""
_POOL = 1 << 20

_streams: dict[tuple[int, int], Tensor] = {}
_pools: dict[int, tuple[Tensor, int]] = {}


def tickets(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 zeros on the device, for a launch on its current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    pool, used = _pools.get(index, (None, 0))
    if torch.cuda.is_current_stream_capturing():
        if pool is None or used + count > _POOL:
            return torch.zeros(count, dtype=torch.int32, device=device)  # a further node of the graph
        _pools[index] = (pool, used + count)
        return pool[used : used + count]
    if pool is None:
        _pools[index] = (torch.zeros(_POOL, dtype=torch.int32, device=device), 0)
        torch.cuda.synchronize(device)  # once: other streams may use it next
    key = (index, torch.cuda.current_stream(device).cuda_stream)
    if key not in _streams:
        _streams[key] = torch.zeros(LIMIT, dtype=torch.int32, device=device)
    return _streams[key]


def pieces(M: int, block: int, counters: int) -> list[slice]:
    """Rows of launches with tickets enough, `block` rows a tile of so many counters: one launch, mostly."""
    most = block * (LIMIT // counters)
    return [slice(first, min(first + most, M)) for first in range(0, M, most)]
