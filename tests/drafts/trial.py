"""Drafts checked against the reference of their op, then timed: what the `run_*.py` of the folders here have alike.

    run_NAME.py [--only NAME,...] [--shapes I,...] [--csv FILE] [--jobs N]
    run_NAME.py --dry       no GPU: arguments of every launch, and what they compile to

FPK_PEERS names the folder of peers (tests/bench/peers.py). Kernels are compiled first, without the GPU. Checks: one
process a candidate, all at once, each killed after 75 s; what is wrong, hangs or raises is not timed. Peers compile
meanwhile. Then one process times the others.
"""

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gate
import torch
import triton
from launches import as_there, outlined, recording

from fpk.check import rel_error
from fpk.kernels.gemm._cluster import available
from fpk.op import Op
from fpk.tune.compile import _Driver, _launching_off, _needs, target_of

CHECK_S, TIME_S = 75.0, 120.0
REPEATS = 20
Draft = tuple[Callable[..., torch.Tensor], dict[str, Any]]


@dataclass
class Plan:
    """The candidates of a folder. draft: (function, config) of a name; checks: its cases of the op; fits: does it run
    a case?; sizes: cases that it is timed at; shapes: how many there are for `--shapes`; more: a check beside those."""

    script: str
    op: Op[..., Any]
    names: Sequence[str]
    first: Sequence[str]
    shapes: int
    draft: Callable[[str], Draft]
    checks: Callable[[str], Sequence[dict[str, Any]]]
    fits: Callable[[str, dict[str, Any]], bool]
    sizes: Callable[[str], Sequence[dict[str, Any]]]
    time_all: Callable[[Sequence[str], Sequence[int], str], None]
    warm: Callable[[Sequence[int]], None] | None = None
    more: Callable[[str], None] | None = None
    launches: int = 1  # of a call

    def calls(self, name: str) -> Iterator[tuple[dict[str, Any], Any]]:
        """(case, call) of every check and timed size that a candidate runs: as if on the H200, with tensors of which
        nothing is read."""
        fn, config = self.draft(name)
        for case in (*self.sizes(name), *self.checks(name)):
            if self.fits(name, case):
                bound = outlined(self.op.name, *sorted(case.items()))
                yield case, functools.partial(as_there, fn, **bound, config=config)


def check(plan: Plan, name: str) -> None:
    (fn, config), op = plan.draft(name), plan.op
    worst = 0.0
    for case in plan.checks(name):
        if not plan.fits(name, case):
            print(f"{name}: not for {case}", flush=True)
            continue
        inputs = op.inputs(**case, device="cuda", seed=3)
        expected = op.reference(**op.bind(**inputs))
        for _ in range(3):  # what the next output will lie in
            torch.full_like(expected, float("nan"))
        out = fn(**inputs, config=config)
        torch.cuda.synchronize()
        error, tolerance = rel_error(out, expected), op.tolerance(op.bind(**inputs))
        again = [fn(**inputs, config=config) for _ in range(REPEATS)]
        torch.cuda.synchronize()
        same = all(torch.equal(out, x) for x in again)
        if not (error <= tolerance and same):
            bad = (out.float() - expected.float()).abs() > 0.05 * expected.float().abs().mean()
            where = bad.nonzero()[:4].tolist()
            raise SystemExit(f"{name} WRONG {case}: error {error:.3e} > {tolerance:.1e}, repeats {same}, {where}")
        worst = max(worst, error)
    if plan.more:
        plan.more(name)
    print(f"{name} OK {worst:.2e}", flush=True)


def arguments(plan: Plan, names: Iterable[str]) -> None:
    """Let launchers make what they would launch with, for every check and timed size a candidate."""
    count = 0
    for name in names:
        for case, call in plan.calls(name):
            with recording() as seen:
                call()
            assert len(seen) == plan.launches, f"{name} {case}: {len(seen)} launches"
            count += 1
    print(f"arguments of {count} launches", flush=True)


def compile_all(plan: Plan, names: Iterable[str]) -> None:
    """Compile the same for sm90 into triton's cache; nothing is launched."""
    triton.runtime.driver.set_active(_Driver(target_of("sm90")))  # for the rest of the process
    for name in names:
        kernels: dict[str, Any] = {}
        for _, call in plan.calls(name):
            found: list[Any] = []
            with _launching_off(found):
                call()
            kernels |= {kernel.hash: kernel for kernel in found}
        needs = {(n.registers, n.spills, n.shared_bytes) for n in map(_needs, kernels.values())}
        print(f"{name:18s} (registers, stack bytes, shared bytes): {sorted(needs)}", flush=True)


def start(
    plan: Plan, what: str, names: Sequence[str], shapes: Sequence[int] = (), csv: str = "",
    out: int | None = subprocess.PIPE,
) -> subprocess.Popen[str]:  # fmt: skip
    """The plan's script in another process, for one part of the work."""
    which = ("--only", ",".join(names), "--shapes", ",".join(map(str, shapes)))
    command = (sys.executable, plan.script, "--do", what, *which, "--csv", csv)
    return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)


def said(process: subprocess.Popen[str], until: float) -> str:
    """What it has printed into its pipe, once it is over or killed."""
    try:
        return (process.communicate(timeout=max(1.0, until - time.monotonic()))[0] or "").strip()
    except subprocess.TimeoutExpired:
        process.kill()
        return ((process.communicate()[0] or "") + "\nHANGS, or the machine is slow").strip()


def checked(plan: Plan, names: Sequence[str], indices: Sequence[int]) -> list[str]:
    """Those that are right, while peers compile."""
    warming = [start(plan, "warm", (), indices[i::6]) for i in range(6) if plan.warm and indices[i::6]]
    checking = {name: start(plan, "check", (name,)) for name in names}
    good, until = [], time.monotonic() + min(CHECK_S, gate.left())
    for name, process in checking.items():
        text = said(process, until)
        print(name, *text.split("\n")[-7:], sep="\n  ", flush=True)
        if process.returncode == 0 and f"{name} OK" in text:
            good.append(name)
    for process in warming:
        text = said(process, until + 10)
        if process.returncode or "no DeepGEMM" in text:
            print("warming:", text[-300:], flush=True)
    return good


def run(plan: Plan, names: Sequence[str], indices: Sequence[int], path: str, jobs: int) -> int:
    if not available():
        print(f"the drafts are kernels for triton 3.6, this is {triton.__version__}")
        return 1
    for process in [start(plan, "compile", names[i::jobs]) for i in range(jobs) if names[i::jobs]]:
        print(process.communicate()[0].strip(), flush=True)
    gate.turn()
    begun = time.monotonic()
    good = checked(plan, names, indices)
    print(f"checked in {time.monotonic() - begun:.0f} s; timed: {', '.join(good)}", flush=True)
    timed = start(plan, "time", good, indices, path, out=None)
    print(said(timed, time.monotonic() + min(TIME_S, gate.left())))
    print(f"all in {time.monotonic() - begun:.0f} s", flush=True)
    return 0 if timed.returncode == 0 and len(good) == len(names) else 1


def main(plan: Plan) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of candidates, also those that a plain run leaves out")
    parser.add_argument("--shapes", help="numbers of timed shapes")
    parser.add_argument("--csv", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--do", choices=("check", "compile", "warm", "time"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, indices = list(plan.names if options.dry else plan.first), list(range(plan.shapes))
    if options.only is not None:
        names = [n for n in options.only.split(",") if n]
    if options.shapes is not None:
        indices = [int(i) for i in options.shapes.split(",") if i]
    if unknown := set(names) - set(plan.names):
        parser.error(f"expected names out of {', '.join(plan.names)}, got {', '.join(sorted(unknown))}")
    if options.do == "check":
        check(plan, *names)
    elif options.do == "compile":
        compile_all(plan, names)
    elif options.do == "warm" and plan.warm:
        plan.warm(indices)
    elif options.do == "time":
        plan.time_all(names, indices, options.csv)
    elif options.dry:
        arguments(plan, names)
        if available():
            compile_all(plan, names)
        else:
            print(f"not compiled: the drafts are kernels for triton 3.6, this is {triton.__version__}")
    else:
        return run(plan, names, indices, options.csv, options.jobs)
    return 0
