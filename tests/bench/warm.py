"""Compile ahead what calls of ops will launch, on CPU cores alone: nothing runs on the GPU, its binaries are cached."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import of, pretend
from fpk.op import OPS
from fpk.tune.arguments import outline
from fpk.tune.sweep import binary_tag
from fpk.tune.worker import Worker, run_all

LIMIT_S = 120.0  # of one launch


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
