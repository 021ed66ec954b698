"""Compile ahead what calls of ops will launch, on CPU cores alone: nothing runs on the GPU, its binaries are cached."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any
from unittest import mock

import seeming
import torch
import triton

import fpk.kernels
import fpk.op
from fpk.device import of, pretend
from fpk.op import OPS
from fpk.tune.arguments import outline
from fpk.tune.compile import _Driver, _launching_off, target_of
from fpk.tune.sweep import binary_tag
from fpk.tune.worker import Worker, run_all

LIMIT_S = 120.0  # of one launch
SMALL = 1 << 20  # elements


def warm(cases: Iterable[tuple[str, dict[str, Any]]], processes: int) -> int:
    """Compile what each (op, arguments of its `inputs`) would launch with the config that a call gets; how many."""
    device, calls = of(torch.device("cuda")), {}
    if device.arch == "cpu":
        return 0
    for name, case in cases:
        op = OPS[name]
        with pretend(device):
            config = op.config_for(**outline(op, case))
        calls.setdefault(binary_tag(op, case, config), ("compile", (name, case, config)))
    workers = [
        Worker("fpk.tune.executor:static_filter", asdict(device), {"TRITON_INTERPRET": None})
        for _ in range(min(processes, len(calls)))
    ]
    done = 0
    try:
        for number, reply in run_all(workers, calls.values(), LIMIT_S):
            done += reply.status == "ok"
            if reply.status != "ok":
                print(f"{list(calls.values())[number][1]}: {reply.status} {reply.detail}"[:300], flush=True)
    finally:
        for worker in workers:
            worker.close()
    print(f"{done} of {len(calls)} launches compiled", flush=True)
    return done


def _zeroed(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Numbers of experts and the like, which somebody looks at, are numbers."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*args, **kwargs)
        return out.zero_() if out.numel() < SMALL else out

    return made


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """In the block, calls of ops with tensors "on the GPU" compile what they would launch there, and nothing else.

    What they return is zero, or uninitialised where it is large; the tensors are on the CPU.
    """
    device = of(torch.device("cuda"))
    triton.runtime.driver.set_active(_Driver(target_of(device.arch)))  # for the rest of the process
    with (
        pretend(device), _launching_off([]), seeming.gpu(),
        mock.patch.object(fpk.op, "INTERPRETING", True),  # CPU tensors go to kernels as well
        mock.patch.object(torch, "empty", _zeroed(torch.empty)),
    ):  # fmt: skip
        yield
