"""Laws on a GPU, a line for every test as it ends, in processes that a broken or hanging kernel costs little.

    python tests/bench/gpu_laws.py --out DIR [--jobs N] [--examples N] [--keyword EXPRESSION] TEST ...

Tests run in the order in which they are named. DIR gets `laws-<i>.csv`; what passed in an earlier call does not run
again. A process whose GPU context is lost, or that says nothing for `--quiet` seconds of running, is replaced; the test
that it was in counts as died.
"""

import argparse
import csv
import os
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import gate

ROOT = Path(__file__).resolve().parents[2]
FIELDS = ("test", "verdict", "seconds", "why")
LOST = ("illegal memory access", "CUDA error", "device-side assert", "unspecified launch failure", "misaligned address")


def read(folder: Path) -> dict[str, str]:
    """Test: its last verdict."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("laws-*.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if found.get(row["test"]) != "passed":
                    found[row["test"]] = row["verdict"]
    return found


class Recorder:
    """A plugin of pytest: this share of the tests, and their verdicts."""

    def __init__(self, path: Path, share: int, shares: int) -> None:
        self.share, self.shares, self.done = share, shares, read(path.parent)
        is_new = not path.exists()
        self.file = path.open("a", newline="")
        self.writer = csv.writer(self.file, lineterminator="\n")
        if is_new:
            self.write(*FIELDS)

    def write(self, *row: object) -> None:
        self.writer.writerow(row)
        self.file.flush()

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [
            t for t in items
            if zlib.crc32(t.nodeid.encode()) % self.shares == self.share and t.nodeid not in self.done
        ]  # fmt: skip
        print(f"{len(items)} tests of share {self.share}", flush=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.now, self.begin, self.verdict, self.why = nodeid, time.monotonic(), "passed", ""
        print(f"> {nodeid}", flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.verdict = "failed" if report.when == "call" else "error"
            self.why = " | ".join(str(report.longrepr).splitlines()[-6:])[-600:]
            print(str(report.longrepr)[-3000:], flush=True)
        elif report.skipped and self.verdict == "passed":
            self.verdict, self.why = "skipped", str(report.longrepr)[-200:]

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(nodeid, self.verdict, f"{time.monotonic() - self.begin:.1f}", self.why)
        print(f"< {self.verdict}", flush=True)
        if any(word in self.why for word in LOST):
            os._exit(7)


def one_share(options: argparse.Namespace) -> int:
    import pytest

    path = options.out / f"laws-{options.share}.csv"
    plugin = Recorder(path, options.share, options.jobs)
    command = ["-q", "-p", "no:cacheprovider", "-p", "no:warnings", "--maxfail=1000", "-m", "not bench", *options.tests]
    command += ["-k", options.keyword] if options.keyword else []
    code = pytest.main(command, plugins=[plugin])
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED) else 2


class Share:
    """A process for a share of the tests, and what it says."""

    def __init__(self, number: int, options: argparse.Namespace, clock: gate.RunningClock) -> None:
        self.number, self.options, self.clock = number, options, clock
        self.log = options.out / f"pytest-{number}.txt"
        self.start()

    def start(self) -> None:
        o = self.options
        more = ["--share", str(self.number), "--jobs", str(o.jobs), "--out", str(o.out), "--keyword", o.keyword]
        environment = os.environ | {"FPK_EXAMPLES": str(o.examples)}
        self.size, self.heard = 0, self.clock()
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, *more, *o.tests],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
            )

    def finished(self) -> bool:
        code = self.process.poll()
        if self.log.stat().st_size != self.size:
            self.size, self.heard = self.log.stat().st_size, self.clock()
        hangs = self.clock() - self.heard > self.options.quiet
        if code is None and hangs:
            self.process.send_signal(signal.SIGKILL)
            code = self.process.wait()
        if code in (None, 0, 2):
            return code is not None
        if lost := self.current():  # its verdict was not written, as the process died in it
            with (self.options.out / f"laws-{self.number}.csv").open("a", newline="") as file:
                csv.writer(file, lineterminator="\n").writerow((lost, "died", "", "hangs" if hangs else f"exit {code}"))
        print(f"share {self.number} ended with {code} in {lost or 'nothing'}", flush=True)
        if not lost and code != 7:
            return True  # it cannot even begin
        self.start()
        return False

    def current(self) -> str:
        last = [t for t in self.log.read_text(errors="replace").splitlines() if t[:2] in ("> ", "< ")][-1:]
        return last[0][2:] if last and last[0].startswith("> ") else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="+", help="files and ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--examples", type=int, default=6, help="of each property, for hypothesis")
    parser.add_argument("--keyword", default="", help="of the tests, as pytest's -k")
    parser.add_argument("--quiet", type=float, default=150.0)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.share is not None:
        return one_share(options)
    for path in options.out.glob("laws-*.csv"):  # of an earlier call: what did not pass has another chance
        with path.open(newline="") as file:
            kept = [r for r in csv.DictReader(file) if r["verdict"] in ("passed", "skipped")]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
    clock = gate.RunningClock()
    running = [Share(n, options, clock) for n in range(options.jobs)]
    while running:
        running = [share for share in running if not share.finished()]
        time.sleep(0.2)
    verdicts = list(read(options.out).values())
    print({v: verdicts.count(v) for v in sorted(set(verdicts))}, flush=True)
    return 0 if verdicts and not set(verdicts) & {"failed", "error", "died"} else 1


if __name__ == "__main__":
    sys.exit(main())
