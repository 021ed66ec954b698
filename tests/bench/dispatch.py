"""What a call costs before its kernel is launched: memo hits, look-ups without a memo, and dispatch over a launch.

    python tests/bench/dispatch.py --csv FILE [--core N]

Wall clock of Python on one core, the fastest of many short runs. Hosts differ: `strides` is a cost in calls of
`Tensor.stride()` on the same host, and the first rows are the pieces that the others are made of. Cold look-ups are
means over shapes that no table has, each asked once with every memo empty: arguments to key to the configs that the
database offers; then also whether the first of them is sound and legal here, or which default; then the checks of the
arguments and filing the answer too, which is all that a first call of a shape adds.
"""

import argparse
import csv
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gate
import torch
from tables import provenance

import fpk
from fpk import db
from fpk._dispatch import _guard
from fpk.device import INTERPRETING, of

FIELDS = ("what", "op", "us", "strides", "bound_us", "gpu", "cpu", "python", "torch", "triton", "date")
HITS = {"scaled_mm": dict(M=64, N=4096, K=4096), "quantize_fp8_token": dict(M=16, K=4096)}
RUNS, SHORT = 60, 40  # of launches, and how many are in one
COLD = ("scaled_mm", "scaled_mm_group", "mm_weight_only", "quantize_fp8_token")
TOKENS, COLUMNS, DEPTHS = (1, 3, 24, 77, 200, 900, 3000), (1536, 3072, 5120, 7680), (2304, 3584, 6144)


def fastest(call: Callable[[], Any], calls: int = 200, runs: int = 60) -> float:
    """Microseconds of a call: the fastest mean of many short runs, less an empty call's."""
    return _fastest(call, calls, runs) - _fastest(lambda: None, calls, runs)


def _fastest(call: Callable[[], Any], calls: int, runs: int) -> float:
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    return 1e6 * best


def pieces(device: str) -> Iterator[tuple[str, str, float]]:
    tensors = [torch.zeros(shape, device=device) for shape in ((64, 4096), (4096, 4096), (64, 1), (4096, 1))]
    x = tensors[0]
    one, four = _guard((x,)), _guard(tuple(tensors))

    def function(x: Any) -> None:
        return None

    yield "Tensor.stride()", "", fastest(x.stride)
    yield "Tensor.data_ptr()", "", fastest(x.data_ptr)
    yield "a Python function", "", fastest(lambda: function(x))
    yield "torch's guard of one tensor", "", fastest(lambda: one(x))
    yield "torch's guard of four", "", fastest(lambda: four(*tensors))


def in_order(op: Any, bound: dict[str, Any]) -> list[Any]:
    return [bound[name] for name in op._parameters]


def hits(device: str) -> Iterator[tuple[str, str, float]]:
    for name, case in HITS.items():
        op = fpk.OPS[name]
        args = in_order(op, op.bind(**op.inputs(**case, device=device)))
        op.look_up(*args)
        yield "memo hit", name, fastest(lambda op=op, args=args: op.look_up(*args))


def cold(device: str) -> Iterator[tuple[str, str, float]]:
    """Means over shapes, the fastest of a few rounds."""
    for name in COLD:
        op = fpk.OPS[name]
        sizes = (
            [dict(M=m, N=n, K=k) for m in TOKENS for n in COLUMNS for k in DEPTHS]
            if "N" in op.key(**op.bind(**op.inputs(**next(iter(op.cases.values())), device=device)))
            else [dict(M=m, K=k) for m in TOKENS for k in DEPTHS]
        )
        bounds = [op.bind(**op.inputs(**size, device=device)) for size in sizes]
        op._choose(bounds[0])  # reads the table
        database = db.active()

        def empty(op: Any = op, database: Any = database) -> None:
            database._memo.clear()
            op._memo.clear()

        def mean(call: Callable[[Any], Any], bounds: Any = bounds, empty: Any = empty) -> float:
            best = float("inf")
            for _ in range(7):
                empty()
                start = time.perf_counter()
                for bound in bounds:
                    call(bound)
                best = min(best, (time.perf_counter() - start) / len(bounds))
            return 1e6 * best

        gpu, ask = op._device(bounds[0]), database.candidates
        yield "cold look-up", name, mean(lambda bound, op=op, ask=ask, gpu=gpu: ask(op.name, op.key(**bound), gpu))
        yield "and whether its answer is legal", name, mean(op._choose)
        yield "and all arguments right", name, mean(lambda bound, op=op: op.look_up(*in_order(op, bound)))


def launches(device: str) -> Iterator[tuple[str, str, float]]:
    """The launcher by itself, and what a call of the op adds to it. Runs are short: the GPU's queue must not fill."""
    for name, case in HITS.items():
        op = fpk.OPS[name]
        args = op.inputs(**case, device=device)
        bound, config = op.bind(**args), op.config_for(**args)

        def run(call: Callable[[], Any]) -> float:
            call()
            best = float("inf")
            for _ in range(RUNS):
                if device == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(SHORT):
                    call()
                best = min(best, (time.perf_counter() - start) / SHORT)
            return 1e6 * best

        launcher = op.reference if device == "cpu" and not INTERPRETING else op.launcher
        more = {} if launcher is op.reference else dict(config=config)
        alone = run(lambda launcher=launcher, bound=bound, more=more: launcher(**bound, **more))
        yield "the launcher", name, alone
        yield "dispatch over it", name, run(lambda op=op, args=args: op(**args)) - alone


PARTS = (pieces, hits, cold, launches)
BOUNDS = {"memo hit": 1.0, "cold look-up": 20.0, "dispatch over it": 15.0}


def rows(device: str, parts: Sequence[Any] = PARTS) -> Iterator[dict[str, Any]]:
    facts = (
        {n: v for n, v in provenance().items() if n in FIELDS}
        if device == "cuda"
        else dict(gpu=of(torch.device("cpu")).id)
    )
    facts |= dict(cpu=cpu(), python=platform.python_version())
    stride = 0.0
    for part in parts:
        for what, name, us in part(device):
            stride = us if what == "Tensor.stride()" else stride
            yield dict(
                what=what, op=name, us=f"{us:.3f}" if us < 10 else f"{us:.1f}", strides=f"{us / stride:.1f}",
                bound_us=BOUNDS.get(what, ""), **facts,
            )  # fmt: skip


def cpu() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    parser.add_argument("--core", type=int, help="run on this core alone")
    options = parser.parse_args()
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    gate.turn()
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        for row in rows("cuda" if torch.cuda.is_available() else "cpu"):
            writer.writerow(row)
            file.flush()
            print(*row.values(), flush=True)


if __name__ == "__main__":
    main()
