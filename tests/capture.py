"""Launches of an op on a GPU that is not there: caught instead of run, and specialised as Triton would.

For processes in which TRITON_INTERPRET is unset.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime import jit
from triton.runtime.jit import JITFunction

from fpk.device import pretend
from fpk.op import Op
from fpk.tune.arguments import outline

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm89": GPUTarget("cuda", 89, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
FNUZ = {torch.float8_e4m3fn: torch.float8_e4m3fnuz, torch.float8_e5m2: torch.float8_e5m2fnuz}


@functools.cache
def _binder(fn: JITFunction, target: GPUTarget) -> tuple[Any, Any]:
    backend = make_backend(target)
    return backend, jit.create_function_from_signature(fn.signature, fn.params, backend)


@dataclass
class Launch:
    """One `kernel[grid](*args, **kwargs)`; kwargs hold constexprs and launch options alike."""

    fn: JITFunction
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grid: Any

    @property
    def name(self) -> str:
        return self.fn.fn.__name__

    def specialised(self, target: GPUTarget) -> tuple[Any, Any, Any, Any]:
        """(options, signature, constexprs, attributes), by the very code that Triton's launcher runs."""
        backend, binder = _binder(self.fn, target)
        # the launcher adds these itself, under names that differ between versions
        kwargs = self.kwargs | {"debug": False}
        bound, specialization, options = binder(*self.args, **kwargs)
        return self.fn._pack_args(backend, kwargs, bound, specialization, options)

    def variant(self, target: GPUTarget) -> str:
        """What tells one compiled variant of the kernel from another."""
        options, signature, constexprs, attributes = self.specialised(target)
        return repr((self.name, sorted(signature.items()), sorted(constexprs.items(), key=repr), attributes, options))

    def source(self, target: GPUTarget) -> tuple[ASTSource, dict[str, Any]]:
        """What triton.compile takes: the source, and the options."""
        options, signature, constexprs, attributes = self.specialised(target)
        kind = ASTSource
        if self.fn.is_gluon():
            from triton.experimental.gluon._runtime import GluonASTSource as kind
        return kind(self.fn, signature, constexprs, attributes), options.__dict__


@contextlib.contextmanager
def captured() -> Iterator[list[Launch]]:
    """Inside the block no kernel runs; each launch is appended to the list."""
    launches: list[Launch] = []
    original = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        launches.append(Launch(self, args, kwargs, grid))

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def case_for(op: Op, case: dict[str, Any], arch: str) -> dict[str, Any]:
    """The case as `arch` has it: on gfx942 the fp8 types are the fnuz ones, defaults of `op.inputs` included."""
    if arch != "gfx942":
        return case
    defaults = {n: p.default for n, p in inspect.signature(op.inputs).parameters.items() if p.default is not p.empty}
    return {
        n: FNUZ.get(v, v) if isinstance(v, torch.dtype) else v for n, v in (defaults | case).items() if n != "device"
    }


def representative(op: Op) -> list[dict[str, Any]]:
    """One prefill and one decode case of the op's real-model shapes; just one where the op has no tokens."""
    cases = list(op.cases.values())
    tokens = next((n for n in ("M", "T") if n in cases[0]), None)
    if tokens is None:
        return cases[:1]
    return [min(cases, key=lambda c, want=want: abs(c[tokens] - want)) for want in (4096, 16)]


def launches_of(op: Op, bound: dict[str, Any], config: dict[str, Any], arch: str) -> list[Launch]:
    with pretend(arch), captured() as launches:
        op.launch(**bound, config=config)
    return launches


def arguments(op: Op, case: dict[str, Any], arch: str) -> dict[str, Any]:
    with pretend(arch):
        return outline(op, case_for(op, case, arch))
