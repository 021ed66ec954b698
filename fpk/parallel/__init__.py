"""Ranks that serve one model together: tensor and expert parallel layers over torch.distributed, balanced experts.

    group = join(rank, world_size, store)             # one frozen database for all ranks, time limits on everything
    placement = Placement.linear(256, group.size)     # which rank has which experts
    layer = ExpertParallel(group, placement, payload="fp8_group128")
    y = layer(x, weights, ids, experts)               # dispatch, this rank's experts, combine

Names are imported when they are first touched.
"""

import importlib
from typing import Any

_NAMES = {
    "Balancer": "balance",
    "ExpertParallel": "experts",
    "Group": "group",
    "Placement": "placement",
    "column_parallel": "tensor",
    "join": "group",
    "row_parallel": "tensor",
    "shard_experts": "tensor",
}

__all__ = sorted(_NAMES)


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'fpk.parallel' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fpk.parallel.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
