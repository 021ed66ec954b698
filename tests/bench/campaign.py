"""Everything that a GPU has to say about fpk, measured in order of importance within a number of seconds.

    python tests/bench/campaign.py --seconds 520 --out OUT [--only NAME,...] [--gpus 0,1] [--resume OUT] [--pack FILE]
    python tests/bench/campaign.py --list        what there is, how long it takes, what results/ lacks
    python tests/bench/campaign.py --dry         every command walked through on a CPU, at tiny sizes

The plan is campaign_plan.py. This process alone says whose turn on a GPU it is: a measurement prepares on the CPU (see
gate.py), waits, has the GPU for itself, and is killed with all its processes when it takes longer than it may. What
needs no quiet GPU (laws, soak, sanitizers) runs in between and is stopped while somebody measures. OUT/<name>/ gets
what each one printed and its CSV files, also of those that were cut; caches lie elsewhere. Send SIGINT to end it early.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import gate
from campaign_job import HERE, ROOT, Job, Measurement, environment, keep, lacking

GRACE = 3.0  # seconds between asking a process to end and killing it
TICK = 0.1
SYNC = 5.0  # seconds between two copies of what there is


def filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)


class Campaign:
    def __init__(self, plan: Sequence[Measurement], options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch, self.out = options, scratch, Path(options.out)
        self.begin = self.last = time.monotonic()
        self.end = self.begin + options.seconds - GRACE - 2.0
        self.synced = self.begin
        self.load = dict.fromkeys(options.gpus.split(","), 0)  # quiet ones that are there for a GPU
        self.jobs = [Job(m, scratch / "work" / m.name) for m in plan]
        for job in self.jobs:
            job.work.mkdir(parents=True)
            (self.out / job.plan.name).mkdir(parents=True, exist_ok=True)
            old = Path(options.resume) / job.plan.name if options.resume else None
            for file in old.glob("*") if old is not None and old.is_dir() else ():
                if file.name != "stdout.txt":
                    shutil.copy(file, job.work / file.name)
            if missing := lacking(job.plan, options):
                job.state, job.why = "left out", missing
        self.base = environment(options, scratch)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:6.1f}] {text}", flush=True)

    # ---- processes

    def start(self, job: Job) -> None:
        plan, now = job.plan, time.monotonic()
        for gpu in job.gpus:
            self.load[gpu] += plan.quiet
        words = dict(
            python=sys.executable, bench=str(HERE), out=str(job.work), scratch=str(self.scratch), root=str(ROOT),
            seconds=f"{max(1.0, min(plan.most, self.end - now)):.0f}", jobs=str(self.options.compilers),
        )  # fmt: skip
        name, _, value = job.tag.partition("=")
        env = self.base | {"CUDA_VISIBLE_DEVICES": ",".join(job.gpus), name: value}
        theirs: list[int] = []
        if plan.quiet and plan.gated:
            (job.requests, write), (read, job.answers) = os.pipe(), os.pipe()
            os.set_blocking(job.requests, False)
            theirs = [read, write]
            env[gate.VARIABLE] = f"{read},{write}"
        with open(job.work / "stdout.txt", "wb") as log:
            job.process = subprocess.Popen(
                [filled(part, words) for part in plan.command], cwd=ROOT, env=env, stdin=subprocess.DEVNULL,
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, pass_fds=theirs,
            )  # fmt: skip
        for fd in theirs:
            os.close(fd)
        job.began = now
        job.state = "prepares" if theirs else "measures" if plan.quiet else "runs"
        if not plan.quiet:
            os.setpriority(os.PRIO_PROCESS, job.process.pid, 8)
        self.say(f"{plan.name}: {job.state} on GPU {','.join(job.gpus)}")

    def finish(self, job: Job, why: str = "") -> None:
        """Its process has ended, or has to: whatever it left behind ends too."""
        assert job.process is not None
        job.send(signal.SIGKILL)
        code = job.process.wait()
        for fd in (job.requests, job.answers):
            if fd >= 0:
                os.close(fd)
        job.requests = job.answers = -1
        job.why = job.why or why
        job.state = "cut" if job.why else "done" if code == 0 else "failed"
        job.why = job.why or ("" if code == 0 else f"exit code {code}")
        job.ended = time.monotonic()
        for gpu in job.gpus:
            self.load[gpu] -= job.plan.quiet
        self.say(f"{job.plan.name}: {job.state} {job.why}, {job.quiet or job.ran:.1f} s")

    def cut(self, job: Job, why: str) -> None:
        """Ask it to end; a little later it is killed."""
        now = time.monotonic()
        if not job.killing:
            job.why, job.killing, job.stopped = why, now + GRACE, False
            job.send(signal.SIGTERM)
            job.send(signal.SIGCONT)
        elif now > job.killing:
            job.send(signal.SIGKILL)

    # ---- whose turn it is

    def hear(self, job: Job) -> None:
        try:
            said = os.read(job.requests, 64)
        except BlockingIOError:
            return
        if said and job.state == "prepares":
            job.state, job.asked = "ready", time.monotonic()
            self.say(f"{job.plan.name}: ready after {job.asked - job.began:.0f} s")

    def places(self, job: Job) -> tuple[str, ...]:
        """Its GPUs, or those it would get: the least wanted."""
        return job.gpus or tuple(sorted(self.load, key=self.load.__getitem__)[: job.plan.gpus])

    def give(self, job: Job, now: float) -> None:
        seconds = min(job.plan.most, self.end - now)
        begun, job.gpus, job.state = job.process is not None, self.places(job), "measures"
        self.hold()  # before it begins
        if begun:
            job.stop(False)
            with contextlib.suppress(BrokenPipeError):  # it died meanwhile
                os.write(job.answers, f"go {seconds - 1:.1f}\n".encode())
            job.waited = max(0.0, now - job.asked)
            self.say(f"{job.plan.name}: measures")
        else:
            self.start(job)
        job.limit = now + seconds

    def turns(self, now: float) -> None:
        """GPUs that are free go to the most important that is ready; what it waits for is kept for it."""
        measuring = [j for j in self.jobs if j.state == "measures"]
        taken = {gpu for j in measuring for gpu in (self.load if j.plan.host else j.gpus)}
        unserved: set[str] = set()  # GPUs where something that is not quiet has not had its seconds
        for job in self.jobs:
            gpus = set(self.load) if job.plan.host else set(self.places(job))
            startable = job.state == "ready" or (job.state == "waits" and job.plan.quiet and not job.plan.gated)
            if job.state == "runs" and job.ran < job.plan.least:
                unserved |= gpus
            elif startable and not gpus & unserved and self.end - now > job.plan.floor:
                if not gpus & taken:
                    self.give(job, now)
                taken |= gpus

    def step(self) -> None:
        now = time.monotonic()
        passed, self.last = now - self.last, now
        for job in self.jobs:
            if not job.alive:
                continue
            assert job.process is not None
            if job.state == "measures":
                job.quiet += passed
            elif not job.stopped:
                job.ran += passed
            if job.requests >= 0:
                self.hear(job)
            if job.process.poll() is not None:
                self.finish(job)
            elif now > self.end:
                self.cut(job, "the time was over")
            elif now > job.limit or (job.state == "runs" and job.ran > job.plan.most):
                self.cut(job, f"more than {job.plan.most:.0f} s")
            elif job.state == "prepares" and job.ran > self.options.prepare:
                self.cut(job, f"not ready after {job.ran:.0f} s")
        if now < self.end:
            self.begin_some(now)
        self.hold()
        if now > self.synced + SYNC:
            self.sync()

    def begin_some(self, now: float) -> None:
        self.turns(now)
        if any(j.plan.host and j.state == "measures" for j in self.jobs):
            return  # also what is stopped at once has imported something by then
        ahead = sum(j.state in ("prepares", "ready") for j in self.jobs)
        others = sum(j.state == "runs" for j in self.jobs)
        for job in self.jobs:
            if job.state != "waits" or self.end - now < job.plan.floor or (job.plan.quiet and not job.plan.gated):
                continue
            if ahead < self.options.ahead if job.plan.quiet else others < self.options.background:
                job.gpus = self.places(job)
                self.start(job)
                ahead, others = ahead + job.plan.quiet, others + (not job.plan.quiet)

    def hold(self) -> None:
        """Stop what would disturb, let the rest go on: one that prepares, the others only while nobody measures."""
        measuring = [j for j in self.jobs if j.state == "measures"]
        taken = {gpu for j in measuring for gpu in j.gpus}
        alone, seen = any(j.plan.host for j in measuring), 0
        for job in self.jobs:
            if job.alive and job.state in ("prepares", "runs") and not job.killing:
                seen += job.state == "prepares"
                late = job.state == "prepares" and bool(measuring) and seen > 1
                job.stop(alone or late or (job.state == "runs" and bool(taken & set(job.gpus))))

    # ---- results

    def sync(self) -> None:
        self.synced = time.monotonic()
        for job in self.jobs:
            job.left_out = keep(job.work, self.out / job.plan.name)
        rows = {
            j.plan.name: dict(
                status=j.state, why=j.why, waited_s=round(j.waited, 1), quiet_s=round(j.quiet, 1),
                wall_s=round((j.ended or time.monotonic()) - j.began, 1) if j.began else 0.0,
                estimated_s=j.plan.seconds, left_out=j.left_out,
            )
            for j in self.jobs
        }  # fmt: skip
        (self.out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
        lines = [f"{'':24} {'status':10} {'waited':>7} {'quiet':>7} {'wall':>7}"]
        for name, r in rows.items():
            times = "".join(f"{r[n]:8}" for n in ("waited_s", "quiet_s", "wall_s"))
            more = " ".join([r["why"], *(f"left out: {n}" for n in r["left_out"])])
            lines.append(f"{name:24} {r['status']:10}{times} {more}".rstrip())
        (self.out / "summary.txt").write_text("\n".join(lines) + "\n")

    def run(self) -> int:
        try:
            while time.monotonic() < self.end + GRACE + 1.5:
                self.step()
                left = self.end - time.monotonic()
                if not any(j.alive or (j.state == "waits" and left > j.plan.floor) for j in self.jobs):
                    break
                time.sleep(TICK)
        finally:
            for job in self.jobs:
                if job.alive:
                    self.finish(job, "the time was over")
                elif job.state == "waits":
                    job.state = "not reached"
            self.sync()
        print((self.out / "summary.txt").read_text(), end="")
        return 0 if all(j.state in ("done", "left out") for j in self.jobs) else 1


def main() -> int:
    from campaign_plan import PLAN

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=520)
    parser.add_argument("--out", default="out/campaign")
    parser.add_argument("--only", default="", help="names, comma-separated, in the order in which they count")
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--resume", help="results of an earlier call: what is there is not measured again")
    parser.add_argument("--pack", help="a .tar.gz of the results")
    parser.add_argument("--model", help="a folder with the packages of the model and the text that studies run on")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--ahead", type=int, default=3, help="measurements that prepare while another one measures")
    parser.add_argument("--background", type=int, default=3, help="others that run while nobody measures")
    parser.add_argument("--compilers", type=int, default=max(1, (os.cpu_count() or 2) // 3), help="processes of each")
    parser.add_argument("--prepare", type=float, default=240, help="seconds until a measurement has to be ready")
    options = parser.parse_args()
    names = [n for n in options.only.split(",") if n]
    plan = {m.name: m for m in PLAN}
    if unknown := set(names) - plan.keys():
        parser.error(f"expected names out of {', '.join(plan)}, got {', '.join(sorted(unknown))}")
    chosen = [plan[n] for n in names] or list(PLAN)
    if options.list:
        from campaign_list import show

        return show(chosen)
    if options.dry:
        import dry

        return dry.walk(chosen, Path(options.out))
    with tempfile.TemporaryDirectory(prefix="campaign", ignore_cleanup_errors=True) as folder:
        code = Campaign(chosen, options, Path(folder)).run()
    if options.pack:
        with tarfile.open(options.pack, "w:gz") as tar:
            tar.add(options.out, "campaign")
    return code


if __name__ == "__main__":
    sys.exit(main())
