"""fpk on a GPU for minutes: all ops on threads, streams and in graphs at once; two GPUs; a sweep without memory.

    PYTHONPATH=tests python -m trust.soak soak --seconds 120 [op ...]   every output is compared to the first
    PYTHONPATH=tests python -m trust.soak two [op ...]                  arguments on a GPU that is not the current one
    PYTHONPATH=tests python -m trust.soak sweep                         out of memory in the middle of tuning

Exits 1 if something is wrong.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import op_laws
from op_laws import ample, results

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import bits
from fpk.op import OPS, Op
from trust.on_gpu import arguments, tensors

THREADS, DEPTH = 4, 100  # DEPTH: calls that a stream may be behind
PREPARING = 0.5  # of the time


def copied(args: dict[str, Any]) -> dict[str, Any]:
    """The tensors that are written need to be this caller's own, with their strides."""
    made = {}
    for name, value in args.items():
        if isinstance(value, Tensor):
            raw = torch.empty(0, dtype=torch.uint8, device=value.device).set_(value.untyped_storage()).clone()
            there = torch.empty(0, dtype=value.dtype, device=value.device)
            value = there.set_(raw.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        made[name] = value
    return made


class Work:
    """One op with arguments of its own, and what it gave first."""

    def __init__(self, op: Op, args: dict[str, Any]) -> None:
        self.op, self.args = op, copied(args)
        self.written = {n: self.args[n].clone() for n in op.mutates if self.args[n] is not None}
        self.graph: torch.cuda.CUDAGraph | None = None
        self.kept: list[Tensor] = []

    def call(self) -> list[Tensor]:
        for name, value in self.written.items():
            self.args[name].copy_(value)
        return tensors(results(self.op, self.op, self.args))

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.kept = self.call()

    def replay(self) -> list[Tensor]:
        assert self.graph is not None
        self.graph.replay()
        return self.kept


def soak(names: list[str], seconds: float) -> list[str]:
    """`seconds` in all: preparing, at most PREPARING of them, then all ops at random on every thread."""
    failures: list[str] = []
    first: list[list[Tensor]] = []
    ready: list[str] = []
    shares: list[list[tuple[int, Work]]] = [[] for _ in range(THREADS)]
    begin = time.monotonic()
    for name in names:
        if time.monotonic() - begin > PREPARING * seconds:
            print(f"no time for the ops from {name} on", flush=True)
            break
        op = OPS[name]
        try:
            args = arguments(op, ample(op)[0])
            works = [Work(op, args) for _ in range(THREADS)]
            outs = [bits(o).clone() for o in works[0].call()]
            for work in works:
                work.call()
                work.capture()
        except NotImplementedError as error:
            print(f"{name}: not here, {error}", flush=True)
            continue
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__} {str(error)[:300]}")
            continue
        for share, work in zip(shares, works, strict=True):
            share.append((len(ready), work))
        ready.append(name)
        first.append(outs)
    torch.cuda.synchronize()
    took = time.monotonic() - begin
    print(f"{len(ready)} ops on {THREADS} threads, each also as a graph, prepared in {took:.0f} s", flush=True)
    wrong = torch.zeros(THREADS, len(ready), dtype=torch.int64, device="cuda")
    counts: list[Counter] = [Counter() for _ in range(THREADS)]

    def work_through(thread: int) -> None:
        rng = random.Random(thread)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while time.monotonic() < begin + seconds:
                for _ in range(DEPTH):
                    number, work = rng.choice(shares[thread])
                    replayed = rng.random() < 0.5
                    outs = work.replay() if replayed else work.call()
                    for o, f in zip(outs, first[number], strict=True):
                        wrong[thread, number] += (bits(o) != f).sum()
                    counts[thread].update(["replays" if replayed else "calls", number])
                stream.synchronize()

    def guarded(thread: int) -> None:
        try:
            work_through(thread)
        except Exception as error:
            failures.append(f"thread {thread}: {type(error).__name__} {str(error)[:300]}")

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(THREADS)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    differing = wrong.sum(0).tolist()
    failures += [f"{n}: {d} elements differ from the first" for n, d in zip(ready, differing, strict=True) if d]
    total = sum(counts, Counter())
    least, most = min(total[n] for n in range(len(ready))), max(total[n] for n in range(len(ready)))
    print(
        f"soak: {time.monotonic() - start:.0f} s, {total['calls']} calls and {total['replays']} replays, of each op "
        f"{least} to {most}", flush=True,
    )  # fmt: skip
    return failures


def on_two(names: list[str]) -> list[str]:
    """Every op on each GPU while the same and while the other one is current, then both at once on two threads."""
    failures: list[str] = []
    shared: list[tuple[str, dict[int, Work], list[Tensor]]] = []
    for name in names:
        op = OPS[name]
        try:
            works = {d: Work(op, arguments(op, ample(op)[0], f"cuda:{d}")) for d in (0, 1)}
            outs = {}
            for current in (0, 1):
                for device, work in works.items():
                    with torch.cuda.device(current):
                        outs[current, device] = [bits(o).cpu() for o in work.call()]
            expected = outs[0, 0]
            for key, found in outs.items():
                if not all(torch.equal(f, e) for f, e in zip(found, expected, strict=True)):
                    failures.append(f"{name}: (current, arguments') device {key} differs")
            shared.append((name, works, expected))
        except NotImplementedError as error:
            print(f"{name}: not here, {error}", flush=True)
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__} {str(error)[:300]}")
    print(f"{len(shared)} ops on two GPUs, one after the other", flush=True)

    def turns(current: int) -> None:
        try:
            torch.cuda.set_device(current)
            for turn in range(20):
                for name, works, expected in shared:
                    outs = works[1 - current].call()
                    if turn % 5 == 0 and not all(
                        torch.equal(bits(o).cpu(), e) for o, e in zip(outs, expected, strict=True)
                    ):
                        failures.append(f"{name}: differs on cuda:{1 - current} while cuda:{current} is current")
        except Exception as error:
            failures.append(f"thread of cuda:{current}: {type(error).__name__} {str(error)[:300]}")

    threads = [threading.Thread(target=turns, args=(d,)) for d in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("and at once, each thread on the other one's GPU", flush=True)
    return failures


def sweep_without_memory() -> list[str]:
    """A case that no GPU has memory for, in the middle of a sweep: it says so, and those around it are tuned."""
    from fpk.tune.run import default_options, tune

    cases = {"a": dict(M=64, K=4096), "b": dict(M=1 << 24, K=8192), "c": dict(M=128, K=16384)}
    store = Path(tempfile.mkdtemp(), "trials.sqlite")
    table = tune("amax", cases, budget=3, store=store, options=default_options(compilers=2), verbose=False)
    found = {spelled: Counter(rows["status"]) for spelled, rows in table.groupby("case")}
    print(found, flush=True)
    large = next((c for case, c in found.items() if str(1 << 24) in case), Counter())
    fine = [c for case, c in found.items() if str(1 << 24) not in case]
    good = len(fine) == 2 and all(c["ok"] >= 2 for c in fine) and set(large) == {"out_of_resources"}
    return [] if good else [f"sweep: {found}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("soak", "two", "sweep"))
    parser.add_argument("ops", nargs="*", help="names; all")
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_intermixed_args()
    op_laws.DEVICE = "cpu"  # where `ample` makes what it measures
    names = args.ops or list(OPS)
    todo: dict[str, Callable[[], list[str]]] = {
        "soak": lambda: soak(names, args.seconds), "two": lambda: on_two(names), "sweep": sweep_without_memory
    }  # fmt: skip
    failures = todo[args.what]()
    print(f"{len(failures)} failures", *failures, sep="\n", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
