"""Arguments of an op without their data: for keys, legality and compilation on machines that lack GPU and memory."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fpk.device import Device, pretend
from fpk.op import Op


def outline(op: Op[..., Any], case: dict[str, Any]) -> dict[str, Any]:
    """What `op.inputs(**case)` would give, as uninitialised CPU tensors of the same shapes, strides and dtypes.

    Their memory is never touched, so the operating system never provides it. Offsets into a buffer are kept modulo 16
    bytes, as alignment decides which kernel is compiled and which config is legal.
    """
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fake = op.inputs(**case, device="cpu")
    return op.bind(**{name: _real(value) for name, value in fake.items()})


def _real(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    extent = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) if value.numel() else 0
    per_line = max(16 // value.element_size(), 1)
    offset = value.storage_offset() % per_line
    # a storage by itself: torch fills new tensors where it is asked to be deterministic
    storage = torch.UntypedStorage((extent + offset) * value.element_size())
    return torch.empty(0, dtype=value.dtype).set_(storage, offset, value.shape, value.stride())


def key_of(op: Op[..., Any], case: dict[str, Any], device: Device) -> dict[str, int | str]:
    """The database key of a case on a device."""
    with pretend(device):
        return op.key(**outline(op, case))


def legal_candidates(op: Op[..., Any], bound: dict[str, Any], device: Device) -> list[dict[str, Any]]:
    """Candidates that may run with these arguments, each once, the default first."""
    found: dict[Any, dict[str, Any]] = {}
    with pretend(device):
        for config in op.configs(**bound):
            if op.is_legal(config, bound, device):
                found.setdefault(tuple(sorted(config.items(), key=str)), dict(config))
    return list(found.values())
