"""fpk on a GPU for minutes: all ops on threads, streams and in graphs at once; two GPUs; a sweep without memory.

    PYTHONPATH=tests python -m trust.soak soak --seconds 120 [op ...]   every output is compared to the first; with
                                                                        --csv FILE a verdict of each op, as it goes
    PYTHONPATH=tests python -m trust.soak two [op ...]                  arguments on a GPU that is not the current one
    PYTHONPATH=tests python -m trust.soak sweep                         out of memory in the middle of tuning

Exits 1 if something is wrong.
"""

import argparse
import contextlib
import csv
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import op_laws
from bench.gate import RunningClock
from op_laws import ample, results

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import bits
from fpk.op import OPS, Op
from trust.on_gpu import arguments, tensors

THREADS, DEPTH = 4, 100  # DEPTH: calls that a stream may be behind
PREPARING = 0.5  # of the time
SLICE = 5.0  # seconds of work at a stretch


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


class Soak:
    """Ops at random on every thread, each on a stream, half of the calls as replays of a graph.

    `turn` is entered around everything that runs on the GPU: somebody else may want it in between. `clock` tells
    seconds of work; time in which the process is stopped is none.
    """

    def __init__(
        self, turn: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.turn, self.clock = turn, clock
        self.ready: list[str] = []
        self.first: list[list[Tensor]] = []
        self.shares: list[list[Work]] = [[] for _ in range(THREADS)]
        self.failures: list[str] = []
        self.active = 0.0  # seconds

    def prepare(self, names: list[str], end: float) -> None:
        """The first outputs of every op, and its graphs, until `end`."""
        begin = time.monotonic()
        for name in names:
            if time.monotonic() > end:
                print(f"no time for the ops from {name} on", flush=True)
                break
            op = OPS[name]
            try:
                args = arguments(op, ample(op)[0])
                with self.turn():
                    works = [Work(op, args) for _ in range(THREADS)]
                    outs = [bits(o).clone() for o in works[0].call()]
                    for work in works:
                        work.call()
                        work.capture()
                    torch.cuda.synchronize()
            except NotImplementedError as error:
                print(f"{name}: not here, {error}", flush=True)
                continue
            except Exception as error:
                self.failures.append(f"{name}: {type(error).__name__} {str(error)[:300]}")
                continue
            for share, work in zip(self.shares, works, strict=True):
                share.append(work)
            self.ready.append(name)
            self.first.append(outs)
        took = time.monotonic() - begin
        print(f"{len(self.ready)} ops on {THREADS} threads, each also as a graph, prepared in {took:.0f} s", flush=True)
        self.wrong = torch.zeros(THREADS, max(1, len(self.ready)), dtype=torch.int64, device="cuda")
        self.counts: list[Counter] = [Counter() for _ in range(THREADS)]

    def run(self, end: float, pause: float = 0.0) -> None:
        """Slices of work until `end`, or until a thread fails, with `pause` seconds between them."""
        threads = [_Turns(self, n) for n in range(THREADS)]
        number, failed = 0, len(self.failures)
        while time.monotonic() + 1 < end and self.ready and len(self.failures) == failed:
            with self.turn():
                start = self.clock()
                for thread in threads:
                    thread.begin(min(end, time.monotonic() + SLICE))
                for thread in threads:
                    thread.finish()
                torch.cuda.synchronize()
                self.active += self.clock() - start
            number += 1
            if number % 10 == 0:
                self.report()
            time.sleep(pause)
        for thread in threads:
            thread.stop()
        self.report()

    def report(self) -> None:
        total = sum(self.counts, Counter())
        of_each = [total[n] for n in range(len(self.ready))] or [0]
        print(
            f"soak: {self.active:.1f} s of work, {total['calls']} calls and {total['replays']} replays, of each op "
            f"{min(of_each)} to {max(of_each)}", flush=True,
        )  # fmt: skip

    def verdicts(self) -> Iterator[tuple[str, int, int]]:
        """(op, calls and replays, elements that differed from the first)."""
        total, differing = sum(self.counts, Counter()), self.wrong.sum(0).tolist()
        for n, name in enumerate(self.ready):
            yield name, total[n], differing[n]


class _Turns:
    """A thread that works while it is told to."""

    def __init__(self, soak: Soak, number: int) -> None:
        self.soak, self.number, self.end = soak, number, 0.0
        self.going, self.done, self.stopped = threading.Event(), threading.Event(), False
        self.thread = threading.Thread(target=self.main, daemon=True)
        self.thread.start()

    def begin(self, end: float) -> None:
        self.end = end
        self.done.clear()
        self.going.set()

    def finish(self) -> None:
        self.done.wait()

    def stop(self) -> None:
        self.stopped = True
        self.going.set()
        self.thread.join()

    def main(self) -> None:
        rng, stream = random.Random(self.number), torch.cuda.Stream()
        while True:
            self.going.wait()
            self.going.clear()
            if self.stopped:
                return
            try:
                with torch.cuda.stream(stream):
                    while time.monotonic() < self.end:
                        self.some(rng)
                        stream.synchronize()
            except Exception as error:
                self.soak.failures.append(f"thread {self.number}: {type(error).__name__} {str(error)[:300]}")
            self.done.set()

    def some(self, rng: random.Random) -> None:
        works, first = self.soak.shares[self.number], self.soak.first
        for _ in range(DEPTH):
            n = rng.randrange(len(works))
            replayed = rng.random() < 0.5
            outs = works[n].replay() if replayed else works[n].call()
            for o, f in zip(outs, first[n], strict=True):
                self.soak.wrong[self.number, n] += (bits(o) != f).sum()
            self.soak.counts[self.number].update(["replays" if replayed else "calls", n])


def soak(names: list[str], seconds: float, path: str = "") -> list[str]:
    """`seconds` in all: preparing, at most PREPARING of them, then all ops at random on every thread.

    Somebody may stop the process meanwhile: that counts among the seconds, and is no work.
    """
    begin, work = time.monotonic(), Soak(clock=RunningClock())
    work.prepare(names, begin + PREPARING * seconds)
    unprepared = len(work.failures)
    while time.monotonic() + 2 < begin + seconds and work.ready and len(work.failures) == unprepared:
        work.run(min(begin + seconds, time.monotonic() + 4 * SLICE))
        if path:
            write(path, work)
    wrong = [f"{n}: {d} elements differ from the first" for n, _, d in work.verdicts() if d]
    return work.failures + wrong


def write(path: str, work: Soak) -> None:
    with open(path, "w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(("op", "tool", "launches", "verdict", "note", "seconds"))
        for op, launches, differing in work.verdicts():
            verdict = f"{differing} elements differ" if differing else "same bits"
            out.writerow((op, "soak", launches, verdict, f"{work.active:.0f} s of work", f"{work.active:.1f}"))


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
    parser.add_argument("--csv", default="")
    args = parser.parse_intermixed_args()
    op_laws.DEVICE = "cpu"  # where `ample` makes what it measures
    names = args.ops or list(OPS)
    todo: dict[str, Callable[[], list[str]]] = {
        "soak": lambda: soak(names, args.seconds, args.csv), "two": lambda: on_two(names), "sweep": sweep_without_memory
    }  # fmt: skip
    failures = todo[args.what]()
    print(f"{len(failures)} failures", *failures, sep="\n", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
