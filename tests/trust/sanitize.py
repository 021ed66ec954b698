"""fpk's kernels under compute-sanitizer, many processes side by side on one GPU, and a table of what it found.

    PYTHONPATH=tests python -m trust.sanitize compare memcheck --jobs 14 --out DIRECTORY [op ...]

Each process compares its share of the ops with their references, which also compiles what they launch, and then runs
the same launches under each tool. A line for every op and tool is written as it comes (`verdicts.csv`), beside the
logs; an op that takes its process with it costs the others nothing. `planted` shows that a tool sees what it is for.
"""

import argparse
import contextlib
import csv
import functools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.gate import RunningClock

from fpk.op import OPS

TOOLS = ("compare", "repeat", "memcheck", "racecheck", "initcheck", "synccheck")
COLUMNS = ("op", "tool", "launches", "verdict", "note", "seconds")
VERDICTS = {"compare": "right", "repeat": "same bits"}
QUIET = 60  # seconds of running without a line: it hangs
FINDING = re.compile(r"^========= (?!COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|\s|Target application)(.*\S)")

# one fault for each tool, chosen by the first argument
PLANTED = r"""
#include <cstdio>
#include <cstdlib>
__global__ void beyond(float *p, int n) { p[n + threadIdx.x] = 1; }
__global__ void sum(const float *p, float *out) { out[threadIdx.x] = p[threadIdx.x] + 1; }
__global__ void race(float *out) {
  __shared__ float s[128];
  s[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = s[127 - threadIdx.x];
}
int main(int argc, char **argv) {
  float *p, *out;
  cudaMalloc(&p, 512);
  cudaMalloc(&out, 512);
  switch (atoi(argv[1])) {
    case 0: beyond<<<1, 32>>>(p, 1 << 28); break;
    case 1: sum<<<1, 128>>>(p, out); break;
    case 2: race<<<1, 128>>>(out); break;
  }
  printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
}
"""
PLANTS = {"memcheck": "0", "initcheck": "1", "racecheck": "2"}

write_lock = threading.Lock()
clock = RunningClock()  # somebody may stop all of this while he measures


# what the options are for: many processes that start slowly side by side, and a kernel that fails alone
OPTIONS = {
    "--print-limit": "40", "--destroy-on-device-error": "kernel", "--launch-timeout": "120", "--max-connections": "64",
    "--target-processes": "application-only", "--check-exit-code": "no",
}  # fmt: skip
PADDING = ["--padding", "4096"]  # between allocations, which otherwise lie side by side


@functools.cache
def sanitizer(tool: str) -> list[str]:
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    told = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
    known = [word for option, value in OPTIONS.items() if option in told for word in (option, value)]
    return [program, "--tool", tool, *known, *(PADDING if tool == "memcheck" and "--padding" in told else [])]


def note(out: Path, *row: object) -> None:
    with write_lock, (out / "verdicts.csv").open("a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(row)
    print(*row, flush=True)


def planted(tool: str, out: Path) -> None:
    if tool not in PLANTS:
        return
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "planted.cu"), Path(folder, "planted")
        source.write_text(PLANTED)
        built = subprocess.run(
            ["nvcc", "-arch=native", "-lineinfo", "-o", program, source], capture_output=True, text=True
        )
        if built.returncode:
            note(out, "a planted fault", tool, 0, "not built", built.stderr[-200:], 0)
            return
        done = subprocess.run([*sanitizer(tool), program, PLANTS[tool]], capture_output=True, text=True, timeout=60)
        found = [m[1] for line in done.stdout.splitlines() if (m := FINDING.match(line))]
        (out / f"planted-{tool}.log").write_text(done.stdout[-4000:] + done.stderr[-2000:])
        note(out, "a planted fault", tool, 1, "found" if found else "NOT found", "; ".join(found)[:200], 0)


def end(process: subprocess.Popen) -> None:
    """The checker and the program that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


class Share:
    """The ops of one process after another, each ended by the op that kills it."""

    def __init__(self, tool: str, ops: list[str], out: Path, name: str, end: float) -> None:
        self.tool, self.waiting, self.out, self.end = tool, list(ops), out, end
        self.log = (out / f"{tool}-{name}.log").open("a")

    def run(self) -> None:
        while self.waiting and time.monotonic() < self.end:
            before = len(self.waiting)
            self.attempt()
            if len(self.waiting) == before and time.monotonic() < self.end:  # not even started
                note(self.out, self.waiting.pop(0), self.tool, 0, "did not start", "see the log", 0)
        for op in self.waiting:
            note(self.out, op, self.tool, 0, "not reached", "", 0)
        self.log.close()

    def attempt(self) -> None:
        bare = self.tool in ("compare", "repeat")
        what = self.tool if bare else "launch"
        command = [sys.executable, "-W", "ignore", "-m", "trust.on_gpu", what, *self.waiting]
        environment = dict(os.environ)
        if not bare:
            command = sanitizer(self.tool) + command
            environment |= {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,
        )  # fmt: skip
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self.read, args=(process, lines), daemon=True).start()
        current, found, launches, start = "", [], 0, time.monotonic()
        heard = clock()
        while True:
            try:
                line = lines.get(timeout=max(0.05, min(1.0, self.end - time.monotonic())))
                heard = clock()
            except queue.Empty:
                if time.monotonic() < self.end and clock() - heard < QUIET:
                    continue
                end(process)
                if time.monotonic() >= self.end:
                    return
                line = f"{current}: hangs" if current else None
            if line is None:
                break
            self.log.write(line + "\n")
            self.log.flush()
            if line.startswith("> "):
                current, launches = line.split()[1], launches + 1
            elif match := FINDING.match(line):
                found.append(match[1])
            elif self.waiting and line.startswith(f"{self.waiting[0]}: "):
                self.finish(line.partition(": ")[2], found, launches, time.monotonic() - start)
                found, launches, start, current = [], 0, time.monotonic(), ""
                if "hangs" in line or "the GPU is lost" in line:
                    break
        end(process)
        code = process.wait()
        if found and not current:
            note(self.out, "the end", self.tool, 0, f"{len(found)} findings", "; ".join(found)[:300], 0)
        if current and self.waiting and current == self.waiting[0]:
            self.finish(f"died with {code}", found, launches, time.monotonic() - start)

    def finish(self, said: str, found: list[str], launches: int, seconds: float) -> None:
        op = self.waiting.pop(0)
        if found:
            kinds = {k: found.count(k) for k in dict.fromkeys(found)}
            verdict, said = f"{len(found)} findings", "; ".join(f"{k} x{n}" for k, n in kinds.items())[:300]
        elif re.fullmatch(r"\d+ launches", said):
            launches, verdict = int(said.split()[0]), VERDICTS.get(self.tool, "clean")
            said = ""
        else:
            verdict = "not here" if said.startswith("not here") else "failed"
        note(self.out, op, self.tool, launches, verdict, said[:300], f"{seconds:.1f}")

    def read(self, process: subprocess.Popen, lines: queue.Queue) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.rstrip())
        lines.put(None)


def main() -> None:
    import fpk.kernels  # noqa: F401  declares every op

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help=f"tools ({', '.join(TOOLS)}) and names of ops; all")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1e6, help="then whatever is left is not reached")
    parser.add_argument("--out", type=Path, default=Path("out/sanitize"))
    args = parser.parse_intermixed_args()
    tools = [w for w in args.words if w in TOOLS] or ["compare", "memcheck"]
    ops = [w for w in args.words if w not in TOOLS] or list(OPS)
    args.out.mkdir(parents=True, exist_ok=True)
    note(args.out, *COLUMNS)
    end = time.monotonic() + args.seconds

    def work(number: int) -> None:
        share = ops[number :: args.jobs]
        for tool in tools:
            Share(tool, share, args.out, str(number), end).run()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(min(args.jobs, len(ops)))]
    threads += [threading.Thread(target=planted, args=(tool, args.out)) for tool in tools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
