"""Tune many (op, case) pairs: seeds, search, finals; all verdicts go to the store, so that a killed sweep resumes."""

import dataclasses
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fpk import db
from fpk.device import Device
from fpk.op import OPS, Op
from fpk.tune.arguments import key_of, legal_candidates, outline
from fpk.tune.records import run_of
from fpk.tune.replay import prior_of, sizes_of, times_of
from fpk.tune.search import Config, Prior, Search
from fpk.tune.sources import Sources, part
from fpk.tune.trials import Trial, TrialStore, canonical
from fpk.tune.worker import Reply, Worker, run_all

NOISY_PERCENT = 15.0


@dataclass
class Options:
    """How to tune. executor: "module:factory" of what a worker runs; device: the GPU that rows are for.

    budget: candidates tried per case; 0 tries every one. compilers: processes that compile ahead of timing.
    compile_for_device: let the compilers use the static filter, which needs no GPU (else they run `executor` too).
    """

    executor: str
    device: Device
    executor_options: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str | None] = field(default_factory=dict)
    gpus: Sequence[str] = ("0",)
    compilers: int = 0
    compile_executor: str = ""
    compile_options: dict[str, Any] = field(default_factory=dict)
    compile_env: dict[str, str | None] = field(default_factory=dict)
    budget: int = 100
    batch: int = 8
    finalists: int = 8
    trial_limit_s: float = 20.0
    compile_limit_s: float = 25.0
    finals_limit_s: float = 120.0
    until: float = float("inf")  # time.monotonic() after which nothing new is begun
    seeds: bool = True
    candidates: Callable[[Op[..., Any], dict[str, Any]], list[Config]] | None = None
    failures: dict[str, Reply] = field(default_factory=dict)  # by `binary_tag`: known not to compile


class OutOfTime(Exception):
    """The sweep's budget of seconds is spent; the case stays open."""


class CaseTuner:
    """Tunes cases one after another on one worker."""

    def __init__(self, store: TrialStore, options: Options, gpu: str, progress: Callable[[str], None]) -> None:
        self.store, self.options, self.progress = store, options, progress
        env = dict(options.env)
        if options.executor.endswith(":cuda"):
            env |= {"CUDA_VISIBLE_DEVICES": gpu, "TRITON_INTERPRET": None}
        self.worker = Worker(options.executor, options.executor_options, env)
        self.compilers = [
            Worker(options.compile_executor, options.compile_options, options.compile_env)
            for _ in range(options.compilers)
        ]
        self._about: dict[str, Any] | None = None

    def close(self) -> None:
        for worker in (self.worker, *self.compilers):
            worker.close()

    def about(self) -> dict[str, Any]:
        """Device, timer and clock as the worker sees them."""
        if self._about is None:
            reply = self.worker.call("describe", limit_s=120)
            if reply.status != "ok":
                raise RuntimeError(f"tune: the worker cannot describe its device: {reply.detail}")
            self._about = reply.value
        return self._about

    def run(self, op: Op[..., Any]) -> str:
        """Id of the run record of this op, made now."""
        about = self.about()
        run = run_of(op, self.options.device, about["timer"], about["clock_mhz"])
        self.store.add_run(run.run, {n: getattr(run, n) for n in run.__dataclass_fields__})
        return run.run

    def tune(self, op: Op[..., Any], case: dict[str, Any]) -> list[Trial]:
        """Search and finals of one case; returns all its trials, those of earlier processes included."""
        options = self.options
        key = canonical(key_of(op, case, options.device))
        same: dict[str, Any] = dict(op=op.name, gpu=db.gpu_id(options.device), key=key)
        sources = Sources(op)
        if options.candidates is not None:
            candidates = options.candidates(op, case)
        else:
            candidates = legal_candidates(op, outline(op, case), options.device)
        if not candidates:
            return []
        run = self.run(op)
        template = Trial(
            **same, source=sources.text, case=db.spell_case(case), config="", stage="screen", status="ok", run=run
        )  # fmt: skip
        search = Search(
            candidates, self._seeds(op, key, candidates) if options.seeds else (), options.budget or len(candidates),
            options.batch, prior=self._prior(same, sources) if options.seeds else (), sizes=sizes_of(key),
            sm_count=options.device.sm_count,
        )  # fmt: skip
        # memory that somebody else had taken may be free now
        tried = [t for t in self.store.trials(**same, stage="screen") if sources.stands(t.source)]
        known = {t.config: t for t in tried if "out of memory" not in t.detail}
        for config in candidates:
            reply = options.failures.get(binary_tag(op, case, config))
            if reply is not None and canonical(config) not in known:
                known[canonical(config)] = trial = _trial(template, config, reply.status, {}, reply)
                self.store.record(trial)
        while batch := search.ask():
            missing = [i for i in batch if canonical(candidates[i]) not in known]
            failed = self._compile(op, case, [candidates[i] for i in missing], template)
            known |= {t.config: t for t in failed}
            for i in batch:
                text = canonical(candidates[i])
                if text not in known:
                    self._check_time()
                    known[text] = self._screen(op, case, candidates[i], template)
                trial = known[text]
                search.tell(i, trial.us if trial.status == "ok" else None)
        trials = [known[canonical(candidates[i])] for i in search.us]
        ranking = [i for i in search.ranking() if i != 0][: options.finalists]
        if search.us.get(0) is not None:
            trials += self._finals(op, case, [candidates[i] for i in (0, *ranking)], template, known)
        return trials

    def _check_time(self) -> None:
        if time.monotonic() > self.options.until:
            raise OutOfTime

    def _seeds(self, op: Op[..., Any], key: str, candidates: list[Config]) -> list[int]:
        """Winners of this op's nearest tuned shapes in the store, then what the database offers for the key."""
        numbers = {canonical(c): i for i, c in enumerate(candidates)}
        wanted = json.loads(key)
        finals = [t for t in self.store.trials(op=op.name, gpu=db.gpu_id(self.options.device), stage="final") if t.us]
        blocks: dict[str, list[Trial]] = {}
        for trial in finals:
            blocks.setdefault(trial.key, []).append(trial)
        table = db.Table(
            db.Row(json.loads(k), r, json.loads(t.config), t.us or 0.0, 0.0, 0.0, 0, "", "")
            for k, block in blocks.items()
            for r, t in enumerate(sorted(block, key=lambda t: (t.us or 0.0, t.config))[:4])
        )
        configs = [row.config for _, block in table.nearest(wanted) for row in block]
        configs += [answer.row.config for answer in db.explain(op.name, wanted, self.options.device)]
        found = [numbers[text] for c in configs if (text := canonical(c)) in numbers]
        return list(dict.fromkeys(found))[:16]

    def _prior(self, same: dict[str, Any], sources: Sources) -> list[Prior]:
        """Screening of the nearest shapes of this op, by the same kernels on the same kind of GPU."""
        screened = self.store.trials(op=same["op"], gpu=same["gpu"], stage="screen")
        times = times_of([t for t in screened if sources.stands(t.source)], same["op"])
        times.pop(same["key"], None)
        return prior_of(times, same["key"]) if times else []

    def _compile(self, op: Op[..., Any], case: dict[str, Any], configs: list[Config], template: Trial) -> list[Trial]:
        """Compile ahead in parallel; returns (and stores) the verdicts of those that cannot run."""
        if not self.compilers or not configs:
            return []
        failed = []
        calls = [("compile", (op.name, case, config)) for config in configs]
        for position, reply in run_all(self.compilers, calls, self.options.compile_limit_s, self.options.until):
            if reply.status != "ok":
                failed.append(_trial(template, configs[position], reply.status, reply.value or {}, reply))
        self.store.record(*failed)
        return failed

    def _screen(self, op: Op[..., Any], case: dict[str, Any], config: Config, template: Trial) -> Trial:
        reply = self.worker.call("trial", op.name, case, config, limit_s=self.options.trial_limit_s)
        trial = _trial(template, config, reply.status, reply.value or {}, reply)
        self.store.record(trial)
        return trial

    def _finals(
        self, op: Op[..., Any], case: dict[str, Any], configs: list[Config], template: Trial, known: dict[str, Trial]
    ) -> list[Trial]:
        """Time the best against the default. One that passed once and crashes now takes nobody else's result along."""
        self._check_time()
        reply = self.worker.call("finals", op.name, case, configs, limit_s=self.options.finals_limit_s)
        if reply.status != "ok" and len(configs) > 2:
            reply = self.worker.call("finals", op.name, case, configs[:2], limit_s=self.options.finals_limit_s)
            configs = configs[:2]
        trials = []
        for position, config in enumerate(configs):
            values = dict(reply.value[position]) if reply.status == "ok" else {}
            screened = known[canonical(config)]
            values |= {n: getattr(screened, n) for n in ("shared_bytes", "registers", "spills", "error")}
            status = reply.status
            if status == "ok" and values["noise_percent"] > NOISY_PERCENT:
                status = "noisy"
            trial = _trial(template, config, status, values, reply, "final", "default" if position == 0 else "")
            trials.append(trial)
        self.store.record(*trials)
        return trials


def _trial(
    template: Trial, config: Config, status: str, values: dict[str, Any], reply: Any, stage: str = "screen",
    detail: str = "",
) -> Trial:  # fmt: skip
    names = ("us", "p20_us", "p80_us", "noise_percent", "error", "shared_bytes", "registers", "spills", "compile_s",
             "clock_mhz")  # fmt: skip
    found: dict[str, Any] = {n: values.get(n) for n in names}
    return dataclasses.replace(
        template, source=part(template.source, config), config=canonical(config), stage=stage, status=status,
        samples=values.get("n"), seconds=reply.seconds, detail=detail or reply.detail, **found,
    )  # fmt: skip


def binary_tag(op: Op[..., Any], case: dict[str, Any], config: Config) -> str:
    """What decides which binary is compiled; sizes do not, only their alignment, and real layers are aligned."""
    rest = {n: v for n, v in case.items() if n not in ("M", "N", "K")}
    return f"{op.name} {db.spell_case(rest)} {canonical(config)}"


def order_cases(jobs: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, dict[str, Any]]]:
    """Jobs so that neighbours follow each other and later ones find seeds: by op, then sizes but M, then M."""

    def order(job: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
        name, case = job
        sizes = [case.get(n, 0) for n in db.SIZES if n != "M"]
        rest = sorted((n, str(v)) for n, v in case.items() if n not in db.SIZES)
        return (name, rest, sizes, case.get("M", 0))

    return sorted(jobs, key=order)


def sweep(store: TrialStore, name: str, options: Options, progress: Callable[[str], None] = lambda line: None) -> bool:
    """Work through the open jobs of a planned sweep, one thread and worker per GPU; True if none is left open.

    Interrupt or kill it at any time: finished trials are in the store, and the next call goes on from there.
    """
    jobs = [j for j in store.jobs(name) if j["state"] == "open"]
    waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    start, done, stopped = time.monotonic(), [0], threading.Event()
    errors: list[BaseException] = []

    def work(gpu: str) -> None:
        tuner = CaseTuner(store, options, gpu, progress)
        try:
            while not stopped.is_set() and time.monotonic() < options.until:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                begun = time.monotonic()
                trials = tuner.tune(OPS[job["op"]], db.parse_case(job["case"]))
                store.finish_job(job["job_id"], "done" if trials else "nothing legal", time.monotonic() - begun)
                done[0] += 1
                left = (time.monotonic() - start) / done[0] * (len(jobs) - done[0])
                progress(f"{done[0]}/{len(jobs)} {summary(job, trials)} | {left / 60:.1f} min left")
        except OutOfTime:
            return
        except BaseException as error:
            errors.append(error)
            stopped.set()
        finally:
            tuner.close()

    threads = [threading.Thread(target=work, args=(gpu,), daemon=True) for gpu in options.gpus]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except KeyboardInterrupt:
        stopped.set()
        progress("interrupted: `fpk tune resume` goes on from here")
        raise
    if errors:
        raise errors[0]
    return not any(j["state"] == "open" for j in store.jobs(name))


def summary(job: dict[str, Any], trials: list[Trial]) -> str:
    """One line about a tuned case."""
    finals = [t for t in trials if t.stage == "final" and t.status == "ok" and t.us]
    bad = {s: n for s in sorted({t.status for t in trials}) if s != "ok" and (n := sum(t.status == s for t in trials))}
    text = f"{job['op']} {job['case']}: {sum(t.stage == 'screen' for t in trials)} tried"
    if finals:
        best, default = min(t.us or 0.0 for t in finals), finals[0].us or 0.0
        text += f", best {best:.4g} us, default {default:.4g} us ({default / best:.2f}x)"
    return text + "".join(f", {n} {s}" for s, n in bad.items())


def gpu_options(device: Device, compilers: int | None = None, **more: Any) -> Options:
    """Options for the GPUs that this process sees, compiling ahead in parallel processes."""
    import torch

    n = min(16, os.cpu_count() or 1) if compilers is None else compilers
    # a worker sees one GPU, by the name this process knows it by
    visible = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    return Options(
        executor="fpk.tune.executor:cuda", device=device,
        gpus=visible or [str(i) for i in range(torch.cuda.device_count())],
        compilers=n, compile_executor="fpk.tune.executor:cuda", compile_env={"TRITON_INTERPRET": None}, **more,
    )  # fmt: skip
