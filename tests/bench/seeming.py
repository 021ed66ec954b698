"""A GPU that seems to be there: what is asked of it is done on the CPU, or not at all."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class OnCPU(TorchFunctionMode):
    """Whatever is asked of a GPU is done on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = [there(a) for a in args], {n: there(v) for n, v in (kwargs or {}).items()}
        if function is torch.device:
            return CPU if args[:1] == [CPU] else function(*args, **kwargs)
        if getattr(function, "__name__", "") == "cuda":
            return args[0]
        return function(*args, **kwargs)


def there(value: Any) -> Any:
    is_gpu = (isinstance(value, torch.device) and value.type == "cuda") or (
        isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    )
    return CPU if is_gpu else value


class _Event:
    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "_Event") -> float:
        return max(1e3 * (end.at - self.at), 1e-3)


class _Graph:
    def replay(self) -> None:
        pass


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    synchronize = query = lambda self: None


def _context(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


_GENERATOR = torch.Generator


class _Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        return _GENERATOR(there(device))


FAKES: dict[str, Any] = {
    "Event": _Event, "CUDAGraph": _Graph, "Stream": _Stream, "graph": _context, "stream": _context, "device": _context,
    "current_stream": lambda *_: _Stream(), "synchronize": lambda *_: None, "empty_cache": lambda: None,
    "set_device": lambda *_: None, "max_memory_allocated": lambda *_: 2e6, "memory_allocated": lambda *_: 1e6,
    "reset_peak_memory_stats": lambda *_: None, "mem_get_info": lambda *_: (1 << 30, 1 << 30),
}  # fmt: skip


@contextlib.contextmanager
def gpu() -> Iterator[None]:
    """Tensors "on the GPU" are on the CPU, events tell the wall clock, graphs replay nothing."""
    with contextlib.ExitStack() as stack:
        for name, fake in FAKES.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(OnCPU())
        yield
