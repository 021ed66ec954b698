"""What drafts' launchers would launch on the H200, without one."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from triton.runtime.jit import JITFunction

from fpk.device import pretend
from fpk.op import OPS
from fpk.tune.arguments import outline
from fpk.tune.lint import device_of

GPU = "nv-h200-sm90-132"


@functools.cache
def outlined(op: str, *case: tuple[str, Any]) -> dict[str, Any]:
    """Arguments of an op for a case, as tensors of which nothing is read."""
    return outline(OPS[op], dict(case))


def as_there(fn: Any, **arguments: Any) -> Any:
    """fn(**arguments) as if on the H200."""
    with pretend(device_of(GPU)):
        return fn(**arguments)


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """What launches in the block are given is noted, and nothing else happens: (kernel, arguments, options)."""
    seen: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        seen.append((kernel, args, options))

    with mock.patch.object(JITFunction, "run", note):
        yield seen
