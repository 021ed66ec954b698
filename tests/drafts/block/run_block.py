"""Check the drafts of this folder against scaled_mm_group's reference, then time them beside today's and DeepGEMM.

    python tests/drafts/block/run_block.py [--only NAME,...] [--shapes I,...] [--csv FILE] [--jobs N]
    python tests/drafts/block/run_block.py --dry       no GPU: arguments of every launch, and what they compile to

FPK_PEERS names the folder of peers (tests/bench/peers.py). Kernels are compiled first, without the GPU. Checks: one
process a candidate, all at once, each killed after 75 s; what is wrong, hangs or raises is not timed. DeepGEMM compiles
meanwhile. Then one process times the others.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import gate
import timing
import torch
import triton
from candidates import ALL, FIRST, OP, SHAPES, calls, case_of, checks, draft, fits, recording

from fpk.check import rel_error
from fpk.kernels.gemm._cluster import available
from fpk.tune.compile import _Driver, _launching_off, _needs, target_of

CHECK_S, TIME_S = 75.0, 120.0
REPEATS = 20


def check(name: str) -> None:
    fn, config = draft(name)
    worst = 0.0
    for c in checks(name):
        case = case_of(c)
        if not fits(name, config, case["scale_layout"] == "column"):
            print(f"{name}: no shared memory for scales in rows", flush=True)
            continue
        inputs = OP.inputs(**case, device="cuda", seed=3)
        expected = OP.reference(**OP.bind(**inputs))
        for _ in range(3):  # what the next output will lie in
            torch.full_like(expected, float("nan"))
        out = fn(**inputs, config=config)
        torch.cuda.synchronize()
        error, tolerance = rel_error(out, expected), OP.tolerance(OP.bind(**inputs))
        again = [fn(**inputs, config=config) for _ in range(REPEATS)]
        torch.cuda.synchronize()
        same = all(torch.equal(out, x) for x in again)
        if not (error <= tolerance and same):
            bad = (out.float() - expected.float()).abs() > 0.05 * expected.float().abs().mean()
            where = bad.nonzero()[:4].tolist()
            raise SystemExit(f"{name} WRONG {c}: error {error:.3e} > {tolerance:.1e}, repeats {same}, {where}")
        worst = max(worst, error)
    print(f"{name} OK {worst:.2e}", flush=True)


def arguments(names: Iterable[str]) -> None:
    """Let launchers make what they would launch with, for every check and one timed shape a candidate."""
    count = 0
    for name in names:
        for case, call in calls(name):
            with recording() as seen:
                call()
            assert len(seen) == 1, f"{name} {case}: {len(seen)} launches"
            count += 1
    print(f"arguments of {count} launches", flush=True)


def compile_all(names: Iterable[str]) -> None:
    """Compile the same for sm90 into triton's cache; nothing is launched."""
    triton.runtime.driver.set_active(_Driver(target_of("sm90")))  # for the rest of the process
    for name in names:
        needs = set()
        for _, call in calls(name):
            kernels: list = []
            with _launching_off(kernels):
                call()
            needs |= {(n.registers, n.spills, n.shared_bytes) for n in map(_needs, kernels)}
        print(f"{name:18s} (registers, stack bytes, shared bytes): {sorted(needs)}", flush=True)


def start(
    what: str, names: Sequence[str], shapes: Sequence[int] = (), csv: str = "", out: int | None = subprocess.PIPE
) -> subprocess.Popen[str]:
    """This script in another process, for one part of the work."""
    which = ("--only", ",".join(names), "--shapes", ",".join(map(str, shapes)))
    command = (sys.executable, __file__, "--do", what, *which, "--csv", csv)
    return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, text=True)


def said(process: subprocess.Popen[str], until: float) -> str:
    """What it has printed into its pipe, once it is over or killed."""
    try:
        return (process.communicate(timeout=max(1.0, until - time.monotonic()))[0] or "").strip()
    except subprocess.TimeoutExpired:
        process.kill()
        return ((process.communicate()[0] or "") + "\nHANGS, or the machine is slow").strip()


def checked(names: Sequence[str], indices: Sequence[int]) -> list[str]:
    """Those that are right, while DeepGEMM compiles."""
    warming = [start("warm", (), indices[i::6]) for i in range(6) if indices[i::6]]
    checking = {name: start("check", (name,)) for name in names}
    good, until = [], time.monotonic() + min(CHECK_S, gate.left())
    for name, process in checking.items():
        text = said(process, until)
        print(name, *text.split("\n")[-3:], sep="\n  ", flush=True)
        if process.returncode == 0 and f"{name} OK" in text:
            good.append(name)
    for process in warming:
        text = said(process, until + 10)
        if process.returncode or "no DeepGEMM" in text:
            print("warming:", text[-300:], flush=True)
    return good


def run(names: Sequence[str], indices: Sequence[int], path: str, jobs: int) -> int:
    if not available():
        print(f"the drafts are kernels for triton 3.6, this is {triton.__version__}")
        return 1
    for process in [start("compile", names[i::jobs]) for i in range(jobs) if names[i::jobs]]:
        print(process.communicate()[0].strip(), flush=True)
    gate.turn()
    begun = time.monotonic()
    good = checked(names, indices)
    print(f"checked in {time.monotonic() - begun:.0f} s; timed: {', '.join(good)}", flush=True)
    timed = start("time", good, indices, path, out=None)
    print(said(timed, time.monotonic() + min(TIME_S, gate.left())))
    print(f"all in {time.monotonic() - begun:.0f} s", flush=True)
    return 0 if timed.returncode == 0 and len(good) == len(names) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of candidates, also those of MORE and MORE_FEW")
    parser.add_argument("--shapes", help="numbers of SHAPES")
    parser.add_argument("--csv", default="")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes that compile")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--do", choices=("check", "compile", "warm", "time"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    names, indices = list(ALL if options.dry else FIRST), list(range(len(SHAPES)))
    if options.only is not None:
        names = [n for n in options.only.split(",") if n]
    if options.shapes is not None:
        indices = [int(i) for i in options.shapes.split(",") if i]
    if unknown := set(names) - set(ALL):
        parser.error(f"expected names out of {', '.join(ALL)}, got {', '.join(sorted(unknown))}")
    if options.do == "check":
        check(*names)
    elif options.do == "compile":
        compile_all(names)
    elif options.do == "warm":
        timing.warm(indices)
    elif options.do == "time":
        timing.time_all(names, indices, options.csv)
    elif options.dry:
        arguments(names)
        if available():
            compile_all(names)
        else:
            print(f"not compiled: the drafts are kernels for triton 3.6, this is {triton.__version__}")
    else:
        return run(names, indices, options.csv, options.jobs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
