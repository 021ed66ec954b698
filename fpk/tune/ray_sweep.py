"""A sweep over several hosts: Ray gives each GPU of the cluster to an actor; one process keeps the store.

Needs the extra `ray`. Every actor tunes whole cases with a store of its own on its host, starting from what the head
knows about the op, and sends its trials back; the head records them and marks the case done. A host that dies costs
the case it had, which another actor takes.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fpk import db
from fpk.op import OPS
from fpk.tune.sweep import CaseTuner, Options, OutOfTime, summary
from fpk.tune.trials import Trial, TrialStore


class Host:
    """Lives in an actor: tunes one case at a time on the GPU that Ray gave it."""

    def __init__(self, options: Options) -> None:
        import fpk.kernels  # noqa: F401  declares every op

        self._folder = tempfile.TemporaryDirectory()
        self._store = TrialStore(Path(self._folder.name) / "trials.sqlite")
        # what Ray gave this actor; without GPUs in the cluster it gives none
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES") or options.gpus[0]
        self._tuner = CaseTuner(self._store, options, gpu, print)

    def tune(self, op: str, case: str, known: list[Trial]) -> tuple[list[Trial], dict[str, dict[str, str]]]:
        """Trials of the case and the records of their runs. `known`: earlier trials of the op, for a warm start."""
        self._store.record(*known)
        trials = self._tuner.tune(OPS[op], db.parse_case(case))
        return trials, self._store.runs()


def ray_sweep(
    store: TrialStore, name: str, options: Options, actors: int, gpus_per_actor: float = 1.0,
    progress: Callable[[str], None] = lambda line: None,
) -> bool:  # fmt: skip
    """Work through the open jobs of a planned sweep with `actors` actors of the connected Ray cluster.

    Ray must be initialised. With `gpus_per_actor` it sets CUDA_VISIBLE_DEVICES of each actor, whose worker keeps it.
    Returns True if no job is left open.
    """
    import ray

    jobs = [j for j in store.jobs(name) if j["state"] == "open"]
    limit = None if options.until == float("inf") else time.time() + options.until - time.monotonic()
    remote: Any = ray.remote(num_gpus=gpus_per_actor, max_restarts=2)(Host)
    mine = replace(options, gpus=("0",), until=float("inf"))
    idle: list[Any] = [remote.remote(mine) for _ in range(min(actors, len(jobs)))]
    running: dict[Any, tuple[dict[str, Any], Any, float]] = {}
    begun, waiting, done, failures = time.monotonic(), list(jobs), 0, 0
    while waiting or running:
        while idle and waiting and (limit is None or time.time() < limit):
            job, actor = waiting.pop(0), idle.pop()
            known = [t for t in store.trials(op=job["op"]) if t.gpu == db.gpu_id(options.device)]
            running[actor.tune.remote(job["op"], job["case"], known)] = (job, actor, time.monotonic())
        if not running:
            break
        (ready,), _ = ray.wait(list(running), num_returns=1)
        job, actor, started = running.pop(ready)
        idle.append(actor)
        try:
            trials, runs = ray.get(ready)
        except ray.exceptions.RayActorError as error:  # its host died: Ray starts it elsewhere, the case is tried again
            failures += 1
            if failures > 3 * max(actors, 1):
                raise
            progress(f"{job['op']} {job['case']}: actor lost ({type(error).__name__}), again")
            waiting.append(job)
            continue
        except OutOfTime:
            continue
        for run, fields in runs.items():
            store.add_run(run, fields)
        store.record(*trials)
        store.finish_job(job["job_id"], "done" if trials else "nothing legal", time.monotonic() - started)
        done += 1
        left = (time.monotonic() - begun) / done * (len(jobs) - done)
        progress(f"{done}/{len(jobs)} {summary(job, trials)} | {left / 60:.1f} min left")
    for actor in idle:
        ray.kill(actor)
    return not any(j["state"] == "open" for j in store.jobs(name))
