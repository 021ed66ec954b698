"""What a worker does with a candidate: compile it, check it against the reference, time it."""

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close
from fpk.device import Device, of
from fpk.op import OPS, Op
from fpk.tune.arguments import outline
from fpk.tune.timing import GraphTimer, Timer, WallTimer, duplicate

# words in the text of errors after which a GPU context is useless; torch's type for them changed over its versions
_POISONED = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "device-side assert",
    "unspecified launch",
)


@dataclass
class Call:
    """A launch with a config; timers call it with the arguments to use."""

    op: Op[..., Any]
    config: dict[str, Any]

    def __call__(self, bound: dict[str, Any]) -> Any:
        return self.op.launcher(**bound, config=self.config)


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Every new tensor is full of ones (NaN in any float type): what a kernel leaves unwritten is seen."""
    names = ("empty", "empty_like", "empty_strided")
    originals = {name: getattr(torch, name) for name in names}

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            out = make(*args, **kwargs)
            if out.numel():
                originals["empty"](0, dtype=torch.uint8, device=out.device).set_(out.untyped_storage()).fill_(0xFF)
            return out

        return made

    for name, make in originals.items():
        setattr(torch, name, poison(make))
    try:
        yield
    finally:
        for name, make in originals.items():
            setattr(torch, name, make)


def _results(op: Op[..., Any], out: Any, arguments: dict[str, Any]) -> Any:
    """What a call gives back: its outputs, and for an op that writes in place the tensors it wrote."""
    if not op.mutates:
        return out
    outputs = () if out is None else out if isinstance(out, tuple) else (out,)
    return (*outputs, *(arguments[n] for n in op.mutates if arguments[n] is not None))


class OpExecutor:
    """Serves a worker for real ops on one device."""

    def __init__(self, device: str, timer: Timer, screen_ms: float = 4.0, final_ms: float = 100.0, rounds: int = 5):
        self.device = device
        self.timer = timer
        self.screen_ms, self.final_ms, self.rounds = screen_ms, final_ms, rounds
        self._case: tuple[str, str] | None = None
        self._bound: dict[str, Any] = {}
        self._timed: dict[str, Any] = {}
        self._expected: Any = None

    def describe(self) -> dict[str, Any]:
        """The device and versions that a run's record needs."""
        device = of(torch.device(self.device))
        return {"device": asdict(device), "timer": self.timer.name, "clock_mhz": self.timer.clock_mhz()}

    def verdict(self, error: Exception) -> str:
        """The verdict that an exception out of a call means."""
        text, kind = str(error), type(error).__name__
        if isinstance(error, AssertionError):
            return "incorrect"
        if any(words in text for words in _POISONED) or kind == "AcceleratorError":
            return "crash"
        if kind in ("OutOfResources", "OutOfMemoryError") or "out of memory" in text:
            return "out_of_resources"
        if getattr(error, "during", "") == "launch":
            return "crash"
        return "compile_error"

    def _prepare(self, op: Op[..., Any], case: dict[str, Any], expected: bool) -> None:
        at = (op.name, repr(sorted(case.items())))
        if self._case != at:
            self._case, self._expected = None, None
            self._bound = op.bind(**op.inputs(**case, device=self.device))
            op._validate(self._bound)
            self._timed = self._private(op)  # timing writes into tensors of its own
            self._case = at
        if expected and self._expected is None:
            arguments = self._private(op)
            self._expected = _results(op, op.reference(**arguments), arguments)

    def _private(self, op: Op[..., Any]) -> dict[str, Any]:
        return {n: duplicate(v) if n in op.mutates else v for n, v in self._bound.items()}

    def compile(self, name: str, case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """Compile through the op's own launcher, without launching. {} on a CPU."""
        if self.device == "cpu":
            return {}
        from fpk.tune.compile import compile_launch

        op, start = OPS[name], time.monotonic()
        self._prepare(op, case, expected=False)
        kernels = compile_launch(op, self._bound, config)
        limit = of(torch.device(self.device)).shared_limit
        for kernel in kernels:
            if kernel.metadata.shared > limit:
                raise OutOfResources(kernel.metadata.shared, limit, "shared memory")
            kernel._init_handles()
        return {
            "shared_bytes": max(k.metadata.shared for k in kernels),
            "registers": max(getattr(k, "n_regs", 0) or 0 for k in kernels),
            "spills": max(getattr(k, "n_spills", 0) or 0 for k in kernels),
            "compile_s": time.monotonic() - start,
        }

    def trial(self, name: str, case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """Compile, compare with the reference on poisoned private buffers, time shortly."""
        op = OPS[name]
        found = self.compile(name, case, config)
        self._prepare(op, case, expected=True)
        self._check(op, config)
        sample = self.timer.screen(Call(op, config), self._timed, self.screen_ms)
        return found | asdict(sample) | {"clock_mhz": self.timer.clock_mhz()}

    def _check(self, op: Op[..., Any], config: dict[str, Any]) -> None:
        arguments = self._private(op)
        try:
            with poisoned():
                out = op._launch_on_device(arguments, config)
            if self.device != "cpu":
                torch.cuda.synchronize()
        except Exception as error:
            error.during = "launch"  # type: ignore[attr-defined]
            raise
        assert_close(_results(op, out, arguments), self._expected, op.tolerance(self._bound))

    def finals(self, name: str, case: dict[str, Any], configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Time configs that passed against each other, in alternating rounds."""
        op = OPS[name]
        self._prepare(op, case, expected=False)
        samples = self.timer.finals([Call(op, c) for c in configs], self._timed, self.final_ms, self.rounds)
        return [asdict(s) | {"clock_mhz": self.timer.clock_mhz()} for s in samples]


def cuda(**options: Any) -> OpExecutor:
    """Executor of a worker that owns a GPU (the first one CUDA_VISIBLE_DEVICES leaves)."""
    return OpExecutor("cuda", GraphTimer(), **options)


def interpreter(preload: str = "", **options: Any) -> OpExecutor:
    """Executor for machines without a GPU: kernels in Triton's interpreter, timed by the wall clock.

    preload: a module to import first (repairs of the interpreter).
    """
    if preload:
        importlib.import_module(preload)
    return OpExecutor("cpu", WallTimer(), **options)


class Filter:
    """Executor of the static filter: compiles for a device that is not there and reads the binary."""

    def __init__(self, device: dict[str, Any]) -> None:
        self.device = Device(**device)
        self._bound: tuple[str, dict[str, Any]] | None = None

    def verdict(self, error: Exception) -> str:
        return "out_of_resources" if type(error).__name__ == "OutOfResources" else "compile_error"

    def compile(self, name: str, case: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """shared_bytes, registers and spills of the binary; OutOfResources if it cannot be launched."""
        from fpk.tune.compile import cross_compile

        op, start = OPS[name], time.monotonic()
        at = f"{name} {sorted(case.items())!r}"
        if self._bound is None or self._bound[0] != at:
            self._bound = (at, outline(op, case))
        binaries = cross_compile(op, self._bound[1], config, self.device)
        shared = max(b.shared_bytes for b in binaries)
        if shared > self.device.shared_limit:
            raise OutOfResources(shared, self.device.shared_limit, "shared memory")
        return {
            "shared_bytes": shared,
            "registers": max(b.registers for b in binaries),
            "spills": max(b.spills for b in binaries),
            "compile_s": time.monotonic() - start,
        }


def static_filter(**device: Any) -> Filter:
    return Filter(device)
