"""How matrix products are launched."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fpk.device import Device
from fpk.kernels._tile import early_start

DEPENDENT_TOKENS = 256  # products of more last too long for their start to matter
_SETTLED_HELD = 65_536

_settled: dict[int, StorageWeakRef] = {}


def dependent(device: Device, M: int) -> dict[str, bool]:
    """Options of an early start for products short enough to gain by it."""
    return early_start(device) if M <= DEPENDENT_TOKENS else dict(PDL=False)


def ahead(device: Device, M: int, weights: Tensor) -> dict[str, bool]:
    """`dependent` for a kernel that reads weights while those in front of it still run: what makes them has ended.

    Quantizers let their successors start early, and the second one behind them may, even if the first waits for them.
    So once for every weight an ordinary kernel goes in front: it waits for all before it, and nothing overtakes it.
    """
    options = dependent(device, M)
    if options["PDL"] and is_new(weights) and weights.is_cuda:
        torch.zeros(1, device=weights.device)
    return options


def is_new(weights: Tensor) -> bool:
    """Is their memory met here for the first time? It is held weakly, so that no other gets its name."""
    storage = weights.untyped_storage()
    if storage._cdata in _settled:
        return False
    if len(_settled) >= _SETTLED_HELD:
        _settled.clear()
    _settled[storage._cdata] = StorageWeakRef(storage)
    return True
