"""`fpk.sweep`: time ops, cases and implementations against each other, each result with where it comes from.

Every implementation's output is compared with the op's reference before it is timed. On a GPU times are medians over
alternating rounds of CUDA-graph replays, operands out of L2; on a CPU an op is its reference, and so is what is timed.
"""

import dataclasses
import fnmatch
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close, rel_error
from fpk.device import INTERPRETING, Device, of
from fpk.op import OPS, Op
from fpk.study.peers import Peer, peers_of
from fpk.study.recorded import from_recorded, is_recorded
from fpk.tune.records import run_of
from fpk.tune.timing import GraphTimer, Sample, Timer, WallTimer, duplicate

COLUMNS = (
    "op", "case", "M", "N", "K", "E", "T", "impl", "status", "us", "p20_us", "p80_us", "noise_percent", "samples",
    "error", "flops", "bytes", "tflops", "gb_per_s", "note", "gpu", "date", "fpk", "torch", "triton", "cuda", "driver",
    "source", "timer", "clock_mhz", "sm_clock_mhz", "memory_clock_mhz", "power_limit_w", "copy_gb_per_s", "bf16_tflops",
)  # fmt: skip
"""Columns of a result: times in microseconds, `error` relative to the reference, the last two this machine's own
ceilings, measured in the same process."""

SIZES = ("M", "N", "K", "E", "T")
CPU_LIMITS = {"M": 32, "T": 32, "N": 256, "K": 512, "H": 512, "E": 8, "tokens": 64}
"""What sizes of an op's own cases are cut to on a CPU, where references stand for kernels."""

MOST_ERROR = 0.05  # an implementation of others may round elsewhere, but not compute something else
OURS = ("fpk", "default", "reference", "interpreter")

Call = Callable[[dict[str, Any]], Any]
Cases = Sequence[str] | Mapping[str, Mapping[str, Any]] | None


def sweep(
    ops: Op[..., Any] | str | Sequence[Op[..., Any] | str],
    cases: Cases = None,
    impls: Sequence[str] | Mapping[str, Callable[..., Any]] | None = None,
    *,
    device: str | None = None,
    about_ms: float = 60.0,
    rounds: int | None = None,
    minutes: float = 0.0,
    progress: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Time implementations of ops against each other.

    Args:
        ops: an op, its name, or several.
        cases: names out of `op.cases`, with wildcards ("llama3_8b/*/M=64"), or a mapping of names to arguments of
            `op.inputs`; None: all of the op's, on a CPU cut to `CPU_LIMITS`.
        impls: names ("fpk", "default", "copy", "torch", "vllm", ...), None for all that there are; or a mapping of
            names to functions of the op's arguments, which are timed beside "fpk".
        device: "cuda" or "cpu"; default: the GPU if there is one.
        about_ms: time spent on an implementation of a case, milliseconds.
        rounds: alternating rounds that it is spread over; None: 5 on a GPU, 2 on a CPU.
        minutes: begin no case after this long; 0: never stop.
        progress: called with a line for every case.

    Returns:
        DataFrame with `COLUMNS`, a row per op, case and implementation. `status` is ok, refused (an implementation
        does not take the case) or incorrect; only ok has a time.

    Raises:
        ValueError: an unknown op or case, or a pattern that fits none.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    chosen = [_op(o) for o in (ops if isinstance(ops, Sequence) and not isinstance(ops, str) else [ops])]
    jobs = [(op, name, case) for op in chosen for name, case in _cases(op, cases, device).items()]
    timer: Timer = GraphTimer(device) if torch.device(device).type == "cuda" else WallTimer()
    rounds = rounds or (5 if isinstance(timer, GraphTimer) else 2)
    machine = ceilings(device)
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    rows: list[dict[str, Any]] = []
    for number, (op, name, case) in enumerate(jobs, 1):
        if time.monotonic() > until:
            _say(progress, f"out of time: {len(jobs) - number + 1} of {len(jobs)} cases left")
            break
        found = list(_Case(op, name, dict(case), device, timer).rows(impls, about_ms, rounds))
        rows += [row | machine for row in found]
        times = ", ".join(f"{r['impl']} {r['us']:.2f} us" if r["us"] else f"{r['impl']} {r['status']}" for r in found)
        _say(progress, f"[{number}/{len(jobs)}] {op.name} {name}: {times}")
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _say(progress: Callable[[str], None] | None, line: str) -> None:
    if progress:
        progress(line)


def _op(op: Op[..., Any] | str) -> Op[..., Any]:
    if isinstance(op, Op):
        return op
    if op not in OPS:
        raise ValueError(f"sweep.ops: expected names out of {', '.join(OPS)}, got {op!r}")
    return OPS[op]


def _cases(op: Op[..., Any], cases: Cases, device: str) -> Mapping[str, Mapping[str, Any]]:
    if isinstance(cases, Mapping):
        return cases
    if cases is None:
        return op.cases if torch.device(device).type == "cuda" else small_cases(op)
    found: dict[str, Mapping[str, Any]] = {}
    for pattern in cases:
        matching = [n for n in op.cases if fnmatch.fnmatchcase(n, pattern)]
        if not matching:
            raise ValueError(f"sweep.cases: expected names or patterns of {op.name}.cases, got {pattern!r}")
        found |= {n: op.cases[n] for n in matching}
    return found


def small_cases(op: Op[..., Any]) -> dict[str, dict[str, Any]]:
    """The op's cases cut to `CPU_LIMITS`, each once, named by their sizes."""
    cut = [{n: min(v, CPU_LIMITS[n]) if n in CPU_LIMITS else v for n, v in case.items()} for case in op.cases.values()]
    return {" ".join(f"{n}={v}".replace(" ", "") for n, v in case.items()): case for case in cut}


class _Case:
    """One op with one set of arguments: its implementations, checked and timed."""

    def __init__(self, op: Op[..., Any], name: str, case: dict[str, Any], device: str, timer: Timer) -> None:
        self.op, self.name, self.case, self.device, self.timer = op, name, case, torch.device(device), timer
        self.bound = op.bind(**op.inputs(**case, device=device))
        self.extra: dict[str, Any] = {}
        self.expected = self._outputs(lambda arguments: op.reference(**arguments))
        self.cost = op.cost(**self.bound)

    def rows(
        self, impls: Sequence[str] | Mapping[str, Callable[..., Any]] | None, about_ms: float, rounds: int
    ) -> Iterator[dict[str, Any]]:
        verdicts = {name: self._verdict(name, call) for name, call in self._calls(impls).items()}
        good = {name: call for name, (call, status, _, _) in verdicts.items() if status == "ok"}
        samples = self._timed(good, about_ms, rounds)
        facts = self._facts()
        for name, (_, status, error, note) in verdicts.items():
            sample = samples.get(name)
            if status == "ok" and sample is None:
                status, note = "refused", "runs, but not inside a CUDA graph"
            yield facts | self._measured(sample) | dict(impl=name, status=status, error=error, note=note)

    def _calls(self, impls: Sequence[str] | Mapping[str, Callable[..., Any]] | None) -> dict[str, Call]:
        """Implementations by name, as functions of the arguments; those of others come from tables."""
        op = self.op

        def with_own(function: Callable[..., Any]) -> Call:
            return lambda arguments: function(**{n: v for n, v in arguments.items() if n in self.bound})

        calls: dict[str, Call] = {self._own_name(): with_own(op)}
        if isinstance(impls, Mapping):
            return calls | {name: with_own(function) for name, function in impls.items()}
        if self.device.type == "cuda":
            default = next(c for c in op.configs(**self.bound) if op.is_legal(c, self.bound, of(self.device)))
            if default != op.config_for(**self.bound):
                calls["default"] = with_own(lambda **arguments: op.launch(**arguments, config=default))
        calls |= {name: with_own(function) for name, function in op.baselines.items()}
        calls |= {name: self._with_extra(peer, with_own(peer.call)) for name, peer in peers_of(op.name).items()}
        if not any(kernel.matrix for kernel in op.kernels.values()):
            calls["copy"] = lambda arguments: arguments["copy into"].copy_(arguments["copy from"])
        wanted = None if impls is None else {self._own_name() if n == "fpk" else n for n in impls}
        return {name: call for name, call in calls.items() if wanted is None or name in wanted}

    def _with_extra(self, peer: Peer, plain: Call) -> Call:
        """A peer's call. What it needs beside the op's arguments joins them, so that the timer rotates it too."""
        if peer.extra is None:
            return plain
        try:
            extra = peer.extra(**self.bound)
        except (NotImplementedError, ValueError, RuntimeError) as error:
            return _raising(error)
        self.extra |= extra
        names = {*self.bound, *extra}
        return lambda arguments: peer.call(**{n: v for n, v in arguments.items() if n in names})

    def _own_name(self) -> str:
        return "fpk" if self.device.type == "cuda" else "interpreter" if INTERPRETING else "reference"

    def _arguments(self) -> dict[str, Any]:
        """Private ones of an op that writes in place, and two buffers for a copy of as many bytes as the op moves."""
        arguments = self._private()
        if any(kernel.matrix for kernel in self.op.kernels.values()):
            return arguments
        buffer = torch.zeros(2, max(self.cost.bytes // 2, 1), dtype=torch.uint8, device=self.device)
        return arguments | {"copy from": buffer[0], "copy into": buffer[1]}

    def _private(self) -> dict[str, Any]:
        return {n: duplicate(v) if n in self.op.mutates else v for n, v in (self.bound | self.extra).items()}

    def _outputs(self, call: Call) -> list[Tensor]:
        arguments = self._private()
        out = call(arguments)
        found = [] if out is None else list(out) if isinstance(out, (tuple, list)) else [out]
        return [*found, *(arguments[n] for n in self.op.mutates if arguments[n] is not None)]

    def _verdict(self, name: str, call: Call) -> tuple[Call, str, float, str]:
        """(call, status, error, note) of an implementation that has run once."""
        if name == "copy":
            return call, "ok", 0.0, f"{self.cost.bytes} bytes"
        try:
            out = self._outputs(call)
        except Exception as error:
            if "illegal" in str(error) or "unspecified launch" in str(error):
                raise  # nothing on this GPU can be trusted from here on
            return call, "refused", float("nan"), _first_line(error)
        try:
            if name in OURS:
                assert_close(out, self.expected, self.op.tolerance(self.bound))
            distance = max((_error(o, e) for o, e in zip(out, self.expected, strict=True)), default=0.0)
        except (AssertionError, RuntimeError, ValueError) as problem:
            return call, "incorrect", float("nan"), _first_line(problem)
        fine = name in OURS or distance <= MOST_ERROR
        return call, "ok" if fine else "incorrect", distance, "" if fine else f"error above {MOST_ERROR}"

    def _timed(self, calls: dict[str, Call], about_ms: float, rounds: int) -> dict[str, Sample]:
        """All in turns; if one of them cannot be captured, each by itself."""
        arguments = self._arguments()
        try:
            return dict(zip(calls, self.timer.finals(list(calls.values()), arguments, about_ms, rounds), strict=True))
        except Exception:
            samples = {}
            for name, call in calls.items():
                try:
                    samples[name] = self.timer.finals([call], arguments, about_ms, rounds)[0]
                except Exception:
                    if self.device.type == "cuda":
                        torch.cuda.synchronize()
            return samples

    def _facts(self) -> dict[str, Any]:
        run = _run(self.op, of(self.device), self.timer.name)
        sizes = {n: self.case.get(n) for n in SIZES}
        return (
            dict(case=self.name, flops=self.cost.flops, bytes=self.cost.bytes, clock_mhz=self.timer.clock_mhz())
            | sizes | run | dict(gpu=of(self.device).id)
        )  # fmt: skip

    def _measured(self, sample: Sample | None) -> dict[str, Any]:
        if sample is None:
            return dict(us=None)
        return dict(
            us=sample.us, p20_us=sample.p20_us, p80_us=sample.p80_us, samples=sample.n,
            noise_percent=sample.noise_percent, tflops=self.cost.flops / sample.us / 1e6,
            gb_per_s=self.cost.bytes / sample.us / 1e3,
        )  # fmt: skip


@functools.cache
def _run(op: Op[..., Any], device: Device, timer: str) -> dict[str, Any]:
    """Where and by what an op's rows are measured; asked once, as it starts nvidia-smi and reads sources."""
    return dataclasses.asdict(run_of(op, device, timer, None))


def _raising(error: Exception) -> Call:
    def call(arguments: dict[str, Any]) -> Any:
        raise error

    return call


def _error(out: Tensor, expected: Tensor) -> float:
    if out.shape != expected.shape:
        raise ValueError(f"shape {tuple(out.shape)}, expected {tuple(expected.shape)}")
    return rel_error(out, expected)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:160]


@functools.cache
def ceilings(device: str) -> dict[str, float]:
    """What this machine reaches: GB/s of a copy (read and written), TFLOP/s of torch's bf16 product. Measured once."""
    gpu = torch.device(device).type == "cuda"
    count, side = (1 << 29, 8192) if gpu else (1 << 24, 512)
    x = torch.randn(count // 2, device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    copy_us = _shortest_us(lambda: y.copy_(x), gpu)
    product_us = _shortest_us(lambda: a @ b.T, gpu)
    return {"copy_gb_per_s": 2 * x.nbytes / copy_us / 1e3, "bf16_tflops": 2 * side**3 / product_us / 1e6}


def _shortest_us(call: Callable[[], Any], gpu: bool) -> float:
    """The median of eleven calls: enough for a ceiling."""
    times = []
    for _ in range(14 if gpu else 5):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if gpu:
            torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - start))
    return sorted(times[-11:])[len(times[-11:]) // 2]


# ---- files


def write_results(frame: pd.DataFrame, path: str | Path) -> Path:
    """Write a result as the file's name says: .csv or .parquet.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    if path.suffix == ".csv":
        shown = frame.copy()
        for column in ("us", "p20_us", "p80_us", "noise_percent", "tflops", "gb_per_s", "copy_gb_per_s", "bf16_tflops"):
            shown[column] = shown[column].astype("float64").round(3)
        shown.to_csv(path, index=False, lineterminator="\n")
    elif path.suffix == ".parquet":
        whole = frame.astype(dict.fromkeys((*SIZES, "samples"), "Int64"))
        whole.to_parquet(path, index=False, compression="zstd")
    else:
        raise ValueError(f"bench: expected a file ending in .csv or .parquet, got {path.name}")
    return path


def read_results(path: str | Path) -> pd.DataFrame:
    """The inverse of `write_results`; takes the committed tables of `results/` too.

    Raises:
        ValueError: another ending, or a file without the columns of a result.
    """
    path = Path(path)
    if path.suffix not in (".csv", ".parquet"):
        raise ValueError(f"bench: expected a file ending in .csv or .parquet, got {path.name}")
    frame = pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)
    if is_recorded(frame):
        frame = from_recorded(frame)
    missing = [c for c in ("op", "case", "impl", "status", "us", "noise_percent", "gpu") if c not in frame.columns]
    if missing:
        raise ValueError(f"{path.name}: expected a result of `fpk bench`, got no column {missing[0]!r}")
    return frame
