"""Everything a GPU has to show, in one command and a time budget: laws compiled, exactness, tables.

    python tests/bench/h200.py --minutes 8 --out DIR [--skip laws exactness quantizers products]

Laws and exactness run side by side first (they are bound by compilation, so they use every core); the tables follow on
the quiet GPU. Each phase has its share of the minutes and is cut there; what it had written stays in DIR.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = [sys.executable, "-W", "ignore"]
SHARES = {"laws": 0.45, "quantizers": 0.22, "products": 0.3}  # of the minutes; exactness runs beside the laws
TABLES = {
    "quantizers": ["--search", "10", "--block-ms", "15", "--rounds", "3"],
    "products": [
        "--products", "fp8_token", "fp8_tensor", "fp8_block", "int8_token", "fp8_weight_only",
        "--layers", "deepseek_v3/gate_up", "llama3_70b/qkv", "--tokens", "1", "64", "1024", "4096",
        "--search", "8", "--block-ms", "40", "--rounds", "3",
    ],
}  # fmt: skip


def start(name: str, command: list[str], out: Path) -> subprocess.Popen[bytes]:
    log = open(out / f"{name}.txt", "wb")  # noqa: SIM115  the process owns it
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=environment)


def finish(running: dict[str, subprocess.Popen[bytes]], seconds: float) -> dict[str, str]:
    """Wait, and end what is still running when the time is over."""
    until = time.monotonic() + seconds
    ends = {}
    for name, process in running.items():
        try:
            ends[name] = str(process.wait(max(1.0, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            ends[name] = f"cut after {seconds:.0f} s"
    return ends


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--skip", nargs="*", default=[])
    parser.add_argument("--values", type=float, default=1.05e8)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    seconds, ends = options.minutes * 60, {}
    os.environ.setdefault("FPK_EXAMPLES", "12")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

    running = {}
    workers = str(max(2, (os.cpu_count() or 4) - 3))
    if "laws" not in options.skip:
        tests = ["tests/test_ops.py", "tests/test_gpu.py", "tests/laws"]
        running["laws"] = start(
            "laws", [*PYTHON, "-m", "pytest", *tests, "-n", workers, "-v", "-p", "no:warnings"], options.out
        )
    if "exactness" not in options.skip:
        for part in range(3):
            command = [*PYTHON, str(HERE / "exactness.py"), "--values", str(options.values), "--part", f"{part}/3"]
            name = f"exactness_{part}"
            running[name] = start(name, [*command, "--csv", str(options.out / f"{name}.csv")], options.out)
    ends |= finish(running, seconds * SHARES["laws"])

    for what, arguments in TABLES.items():
        if what not in options.skip:
            table = "quantizers" if what == "quantizers" else "mm"
            command = [*PYTHON, str(HERE / "tables.py"), table, "--csv", str(options.out / f"{what}.csv"), *arguments]
            ends |= finish({what: start(what, command, options.out)}, seconds * SHARES[what])
    for name, end in ends.items():
        print(f"{name}: {end}")
        print("".join((options.out / f"{name}.txt").read_text(errors="replace").splitlines(keepends=True)[-12:]))
    return 0 if all(end == "0" for end in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
