"""One command for a GPU machine that is lent for minutes: compile everything in parallel, then time on the quiet GPU.

    python -m fpk.tune.h200_job --ops scaled_mm,quantize_fp8_token --exhaustive 8 --minutes 9 --out DIR --state DIR

Needs only torch and triton. Two parts, each optional: `--exhaustive n` times every launchable candidate of the first op
at n shapes; `--ops` tunes each op at six layer sizes and four token counts by search. What is unfinished when the
minutes are over goes on in the next call with the same --state. DIR gets `trials.sqlite`, `trials.jsonl.gz` (for
`fpk tune export`) and `autotune_db/` with the winners.
"""

import argparse
import gzip
import hashlib
import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import fpk.kernels  # noqa: F401  declares every op
from fpk import db
from fpk.device import Device, of
from fpk.op import OPS, Op
from fpk.tune.arguments import legal_candidates, outline
from fpk.tune.records import texts_of_store
from fpk.tune.search import Config
from fpk.tune.sweep import CaseTuner, Options, OutOfTime, binary_tag, order_cases, summary
from fpk.tune.trials import TrialStore, canonical
from fpk.tune.worker import Reply, Worker, run_all

# (N, K) of layers that are tuned, apart from each other by about a factor of two in either size
LAYERS = ((2112, 7168), (4096, 4096), (7168, 2048), (6144, 4096), (4096, 14336), (28672, 4096))
TOKENS = (16, 128, 1024, 4096)
# the exhaustive log: every shape has 500 candidates or more; the first eight cover layers and token counts evenly
EXHAUSTIVE = (
    (64, 4096, 4096), (1024, 6144, 4096), (128, 7168, 2048), (4096, 4096, 14336), (64, 28672, 4096), (256, 2112, 7168),
    (512, 4096, 4096), (128, 4096, 14336), (1024, 7168, 2048), (64, 2112, 7168), (4096, 6144, 4096), (256, 28672, 4096),
)  # fmt: skip


def say(start: float, text: str) -> None:
    print(f"[{time.monotonic() - start:6.1f} s] {text}", flush=True)


def grid(op: Op[..., Any], layers: Iterable[tuple[int, int]], tokens: Iterable[int]) -> list[dict[str, Any]]:
    """Cases of an op over layers and token counts; what else its own cases say is taken from each of their variants."""
    variants: dict[str, dict[str, Any]] = {}
    for case in op.cases.values():
        rest = {n: v for n, v in case.items() if n not in ("M", "N", "K")}
        variants.setdefault(repr(sorted(rest.items(), key=str)), rest)
    example = next(iter(op.cases.values()))
    found: dict[str, dict[str, Any]] = {}
    for rest in variants.values():
        for n, k in layers:
            for m in tokens:
                case = {name: v for name, v in (("M", m), ("N", n), ("K", k)) if name in example} | rest
                found.setdefault(db.spell_case(case), case)
    return list(found.values())


def with_variants(cases: list[dict[str, Any]], variants: str) -> list[dict[str, Any]]:
    """Every case as it is and with each variant: `fast_accum=True;dtype=int8 a=tensor`, spelled as in tables."""
    more = [db.parse_case(v) for v in variants.split(";") if v.strip()]
    return cases + [case | variant for variant in more for case in cases]


def thinned(candidates: list[Config], limit: int, preferred: Iterable[Config] = ()) -> list[Config]:
    """The default, those preferred, and a fixed choice of the others, in their order.

    The same configs at every shape that has them, so that shapes can be compared config by config.
    """
    if len(candidates) <= limit:
        return candidates
    first = {canonical(c) for c in preferred}
    texts = [canonical(c) for c in candidates]
    ranks = {i: (t not in first, hashlib.sha256(t.encode()).digest()) for i, t in enumerate(texts) if i}
    return [candidates[i] for i in sorted([0, *sorted(ranks, key=ranks.__getitem__)[: limit - 1]])]


class Job:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.start = time.monotonic()
        self.until = self.start + 60 * arguments.minutes - 20  # what is left is for writing
        self.arguments = arguments
        self.state, self.out = Path(arguments.state or arguments.out), Path(arguments.out)
        self.state.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.env: dict[str, str | None] = {"TRITON_CACHE_DIR": str((self.state / "triton").resolve())}
        self.store = TrialStore(self.state / "trials.sqlite")
        self.failures: dict[str, Reply] = {}
        # both stay for all ops: to start a process takes seconds. Compilers that wait leave the GPU alone.
        self.compilers: list[Worker] = []
        self.tuner: CaseTuner | None = None
        self.device: Device = of(torch.device("cuda")) if torch.cuda.is_available() else of(torch.device("cpu"))
        self.executor = arguments.executor
        self.compiling: tuple[str, dict[str, Any]] = (self.executor, {})
        prefer = Path(arguments.prefer) if arguments.prefer else None
        self.preferred: dict[str, list[Config]] = json.loads(prefer.read_text()) if prefer else {}

    def candidates(self, op: Op[..., Any], case: dict[str, Any], limit: int) -> list[Config]:
        found = legal_candidates(op, outline(op, case), self.device)
        return thinned(found, limit, self.preferred.get(op.name, ())) if limit else found

    def compile(self, op: Op[..., Any], cases: list[dict[str, Any]], limit: int) -> None:
        """Fill triton's cache with each distinct binary once, and remember which do not compile."""
        path = self.state / "compiled.json"
        done: dict[str, list[str]] = json.loads(path.read_text()) if path.exists() else {}
        calls: dict[str, tuple[str, tuple[Any, ...]]] = {}
        for case in sorted(cases, key=lambda c: [c.get(n, 0) for n in ("M", "N", "K")]):  # small arguments first
            for config in self.candidates(op, case, limit):
                tag = binary_tag(op, case, config)
                if tag not in done:
                    calls.setdefault(tag, ("compile", (op.name, case, config)))
        tags, finished = list(calls), 0
        while len(self.compilers) < min(self.arguments.processes, len(calls)):
            self.compilers.append(Worker(*self.compiling, self.env))
        for position, reply in run_all(self.compilers, calls.values(), self.arguments.compile_limit, self.until):
            finished += 1
            done[tags[position]] = [] if reply.status == "ok" else [reply.status, reply.detail]
            if finished % 100 == 0:
                say(self.start, f"{op.name}: {finished}/{len(calls)} compiled in {len(self.compilers)} processes")
        path.write_text(json.dumps(done, indent=0, sort_keys=True))
        self.failures = {tag: Reply(failure[0], None, failure[1]) for tag, failure in done.items() if failure}
        say(self.start, f"{op.name}: {finished}/{len(calls)} compiled, {len(self.failures)} failures known")

    def tune(self, title: str, jobs: list[tuple[str, dict[str, Any]]], budget: int, limit: int, finalists: int) -> None:
        sweep = f"h200 {title} {budget} {limit}"
        self.store.plan(sweep, [(name, db.spell_case(case)) for name, case in jobs], {"budget": budget})
        options = Options(
            self.executor, self.device, {"final_ms": self.arguments.final_ms}, self.env, budget=budget,
            until=self.until, finalists=finalists,
            candidates=lambda op, case: self.candidates(op, case, limit), failures=self.failures,
            trial_limit_s=self.arguments.trial_limit,
        )  # fmt: skip
        open_jobs = [j for j in self.store.jobs(sweep) if j["state"] == "open"]
        if not open_jobs:
            return
        if self.tuner is None:
            self.tuner = CaseTuner(self.store, options, "0", print)
        self.tuner.options = options
        for n, job in enumerate(open_jobs, 1):
            begun = time.monotonic()
            if begun > self.until:
                raise OutOfTime
            trials = self.tuner.tune(OPS[job["op"]], db.parse_case(job["case"]))
            self.store.finish_job(job["job_id"], "done", time.monotonic() - begun)
            self.write_trials()
            left = (time.monotonic() - begun) * (len(open_jobs) - n)
            say(self.start, f"{title} {n}/{len(open_jobs)} {summary(job, trials)} | about {left:.0f} s left")

    def run(self) -> None:
        a = self.arguments
        names = [n for n in a.ops.split(",") if n]
        say(self.start, f"{db.gpu_id(self.device)}: {', '.join(names)}; {a.minutes} minutes")
        try:
            if a.exhaustive:
                op = OPS[names[0]]
                cases = [dict(M=m, N=n, K=k) for m, n, k in EXHAUSTIVE[: a.exhaustive]]
                if a.tokens or a.layers:
                    cases = grid(op, _pairs(a.layers), _numbers(a.tokens) or TOKENS)[: a.exhaustive]
                self.compile(op, cases, 0)
                self.tune("exhaustive", [(op.name, case) for case in cases], 0, 0, 16)
            for name in names if not a.only_exhaustive else []:
                cases = [db.parse_case(c) for c in a.cases.split(";") if c.strip()]
                cases = cases or grid(OPS[name], _pairs(a.layers) or LAYERS, _numbers(a.tokens) or TOKENS)
                cases = with_variants(cases, a.variants)
                self.compile(OPS[name], cases, a.max_candidates)
                self.tune("tune", order_cases((name, case) for case in cases), a.budget, a.max_candidates, 8)
            say(self.start, "all done")
        except OutOfTime:
            say(self.start, "out of time: the same command with the same --state goes on from here")
        finally:
            for worker in self.compilers:
                worker.close()
            if self.tuner is not None:
                self.tuner.close()
            self.write()

    def write_trials(self) -> None:
        """After every case: a job that is killed has lost one at most."""
        with gzip.open(self.out / "trials.jsonl.gz", "wt", encoding="utf-8") as file:
            for trial in self.store.trials():
                file.write(json.dumps(vars(trial)) + "\n")
        (self.out / "runs.json").write_text(json.dumps(self.store.runs(), indent=1, sort_keys=True))

    def write(self) -> None:
        trials = self.store.trials()
        self.write_trials()
        texts = texts_of_store(self.store)
        for path, text in texts.items():
            target = self.out / "autotune_db" / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8", newline="\n")
        self.store.close()
        if self.out != self.state:
            with sqlite3.connect(self.state / "trials.sqlite") as source:
                source.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            shutil.copyfile(self.state / "trials.sqlite", self.out / "trials.sqlite")
        counts: dict[str, int] = {}
        for trial in trials:
            what = f"{trial.op} {trial.stage} {trial.status}"
            counts[what] = counts.get(what, 0) + 1
        for what, count in sorted(counts.items()):
            say(self.start, f"{what}: {count}")
        say(self.start, f"wrote {len(trials)} trials, {sum(t.count(chr(10)) for t in texts.values())} table lines")


def _numbers(text: str) -> list[int]:
    return [int(t) for t in text.split(",") if t]


def _pairs(text: str) -> list[tuple[int, int]]:
    """`4096x7168,2112x7168` as (N, K)."""
    return [(int(n), int(k)) for n, k in (p.split("x") for p in text.split(",") if p)]


def arguments_of(description: str | None = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", required=True, help="names, comma-separated")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", required=True)
    parser.add_argument("--state", default="", help="trials and triton's cache between calls; default: --out")
    parser.add_argument("--exhaustive", type=int, default=0, metavar="SHAPES", help="of the first op")
    parser.add_argument("--only-exhaustive", action="store_true")
    parser.add_argument("--layers", default="", help="NxK,... instead of the built-in six")
    parser.add_argument("--tokens", default="", help="M,... instead of the built-in four")
    parser.add_argument("--cases", default="", help="cases instead of layers by tokens: `M=16 N=4096 K=7168;...`")
    parser.add_argument("--variants", default="", help="further arguments of each op's inputs, ;-separated")
    parser.add_argument("--budget", type=int, default=60, help="candidates tried per case; 0: all that compete")
    parser.add_argument("--max-candidates", type=int, default=200, help="candidates of an op that compete; 0: all")
    parser.add_argument("--prefer", default="", help="JSON {op: [config, ...]}: these compete before any others")
    parser.add_argument("--processes", type=int, default=min(16, os.cpu_count() or 1))
    parser.add_argument("--compile-limit", type=float, default=60.0)
    parser.add_argument("--trial-limit", type=float, default=20.0)
    parser.add_argument("--final-ms", type=float, default=60.0, help="timing of each finalist")
    parser.add_argument("--executor", default="fpk.tune.executor:cuda")
    return parser


def main(arguments: list[str] | None = None) -> None:
    Job(arguments_of().parse_args(arguments)).run()


if __name__ == "__main__":
    main()
