"""The table of parallel layers: which method, by which scheme, gives on several ranks what it gives on one.

python tests/parallel/table.py results/parallel.csv
python tests/parallel/table.py results/nv-h200-sm90-132/parallel.csv --jobs 6      on two or four GPUs, under NCCL
python tests/parallel/table.py CSV --one-gpu        four processes on one GPU with its kernels, exchanging under gloo
"""

import argparse
import concurrent.futures
import csv
import math
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":
    import conftest  # noqa: F401  the interpreter where there is no GPU

import world

from fpk.parallel import Placement

INVARIANT, GRAPH = "batch-invariant", "CUDA graph, changed routing"
COLUMNS = ("TP2", "TP4", "EP2", "EP4 uneven")
HEADER = ("method", "scheme", "column", "what", "equal", "difference", "bound", "moved")
UNEVEN = Placement(((3, 1), (0, 2, 4, 9, 5), (8,), (6, 7)), 10)

# What a difference may be. Sums of ranks are rounded once more; activations that are quantized by the row are quantized
# by this rank's part of it where ranks share the row, so the codes themselves differ: it is the format's own step.
# A rank with fewer experts may run the first product in other tiles, whose sums round differently; where a result then
# falls to another side of a rounding, the second product's operand differs by a step. "gather" is told apart from that:
# what those operands change is computed, and the bound is for the rest.
SUM = 5e-3
LINEAR = {
    "Fp8PerTensorOnlineLinearMethod": ("fp8_tensor:fp8_token", 5e-2),
    "Fp8PtpcOnlineLinearMethod": ("fp8_channel:fp8_token", 5e-2),
    "Fp8PerBlockOnlineLinearMethod": ("fp8_block128:fp8_group128", SUM),
    "Int8PtpcOnlineLinearMethod": ("int8_channel:int8_token", 2e-2),
}
EXPERTS = {
    "Fp8PerTensorOnlineMoEMethod": ("fp8_tensor:fp8_token", 5e-2),
    "Fp8PtpcOnlineMoEMethod": ("fp8_channel:fp8_token", 5e-2),
    "Fp8PerBlockOnlineMoEMethod": ("fp8_block128:fp8_group128", SUM),
    "Int8PtpcOnlineMoEMethod": ("int8_channel:int8_token", 3e-2),
    "Int8WeightOnlyOnlineMoEMethod": ("int8_channel:none", SUM),
    "Mxfp8OnlineMoEMethod": ("mxfp8_e4m3:mxfp8_e4m3", SUM),
    "Mxfp4OnlineMoEMethod": ("mxfp4:none", SUM),
    "Nvfp4OnlineMoEMethod": ("nvfp4:none", SUM),
}
# fpk.moe_experts with the payload that tokens travel in
FUNCTIONS = {
    "bf16:none": (None, SUM),
    "fp8_channel:fp8_token": ("fp8_token", 5e-2),
    "fp8_block128:fp8_group128": ("fp8_group128", SUM),
    "int8_channel:int8_token": ("int8_token", 3e-2),
}


# what goes wrong at the end, and on how many ranks; the last leaves the world with a rank less
FAULTS = {"uncovered": 2, "disagreeing": 2, "dying": 4}
OTHERS = {"balanced": 4}


def placements(column: str) -> tuple[int, Placement | None]:
    ranks = int(column[2])
    return ranks, None if column.startswith("TP") else UNEVEN if "uneven" in column else Placement.linear(10, ranks)


def cells() -> list[tuple[str, str, str, str, float, str, tuple[Any, ...]]]:
    """(method, scheme, column, what is compared, bound, check, its arguments)."""
    found: list[tuple[str, str, str, str, float, str, tuple[Any, ...]]] = []
    for column in COLUMNS:
        ranks, placement = placements(column)
        for method, (scheme, bound) in LINEAR.items():
            if placement is None:
                found.append(
                    (method, scheme, column, "column", 0.0, "tensor_parallel_linear", (ranks, method, "column"))
                )
                found.append((method, scheme, column, "row", bound, "tensor_parallel_linear", (ranks, method, "row")))
        for method, (scheme, bound) in EXPERTS.items():
            limit = bound if placement is None else EP
            found.append((method, scheme, column, "layer", limit, "expert_method", (ranks, method, placement)))
        for scheme, (payload, bound) in FUNCTIONS.items():
            weight, act = scheme.split(":")
            if placement is None:
                arguments: tuple[Any, ...] = (ranks, weight, act)
                found.append(("moe_experts", scheme, column, "layer", bound, "tensor_parallel_experts", arguments))
                continue
            for exchange, limit in (("all_to_all", EP), ("gather", SUM)):
                if exchange == "gather" or column == "EP2" or payload:
                    arguments = (ranks, weight, act, exchange, placement, payload)
                    found.append(("moe_experts", scheme, column, exchange, limit, "expert_parallel", arguments))
    return found


# Rows travel by themselves and are summed in order: equal bits where a product does not depend on how many rows it has.
# The references' are torch's, and those may differ by a rounding.
EP = 1e-3


def results(
    size: int = 4, jobs: int = 1, columns: tuple[str, ...] = COLUMNS,
    note: Callable[[str, list[Any]], None] | None = None,
) -> dict[str, list[Any]]:  # fmt: skip
    """The answers of `size` ranks to every cell that they are enough for, by its number; `jobs` worlds side by side.

    note: called with a cell's number and answers when they are there, on several threads.
    """
    import checks

    wanted = [(i, c) for i, c in enumerate(cells()) if c[2] in columns and placements(c[2])[0] <= size]
    asked = [(str(i), getattr(checks, c[5]), c[6]) for i, c in wanted]
    last = [(n, getattr(checks, n), (ranks,)) for n, ranks in OTHERS.items() if ranks <= size]
    last += [(n, getattr(checks, n), (min(ranks, size),)) for n, ranks in FAULTS.items()]

    def one(job: int, folder: str) -> dict[str, list[Any]]:
        return world.run(size, asked[job::jobs] + (last if job == 0 else []), str(Path(folder) / f"store{job}"), note)

    answers: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(one, range(jobs), [folder] * jobs):
            answers |= found
    return {n: [str(a) if isinstance(a, Exception) else a for a in given] for n, given in answers.items()}


class Verdict(NamedTuple):
    """Of all ranks that took part: are the bits equal, and the largest relative difference.

    `rest`: the difference less what operands that differ explain, `effect`: how much those explain, `moved`: how many
    they are, of `operands`.
    """

    equal: bool
    error: float
    rest: float
    effect: float = 0.0
    moved: int = 0
    operands: int = 0


def verdict(answers: list[Any]) -> Verdict:
    """Raises AssertionError for an error on a rank."""
    given = [a for a in answers if a != {}]
    for answer in given:
        if isinstance(answer, str | Exception):
            raise AssertionError(str(answer))
    assert given, "no rank answered"
    assert all(a.get("scattered", True) for a in given), "reduce-scatter and all-reduce differ"

    def most(name: str, otherwise: float | None = None) -> float:
        found = [a.get(name, a["error"] if otherwise is None else otherwise) for a in given]
        return math.nan if any(f != f for f in found) else max(found)

    return Verdict(
        all(a["equal"] for a in given), most("error"), most("rest"), most("effect", 0.0),
        sum(a.get("moved", 0) for a in given), sum(a.get("operands", 0) for a in given),
    )  # fmt: skip


def engine_cell(column: str, method: str) -> bool | None:
    """What an engine asks of a method on one device; None for graphs where there is no GPU."""
    import conftest  # noqa: F401
    import engine
    import torch

    if torch.cuda.is_available():
        torch.set_default_device("cuda")
    elif column == GRAPH:
        return None
    return engine.replays_with_changed_routing(method) if column == GRAPH else engine.is_batch_invariant(method)


def main(path: str, jobs: int, columns: tuple[str, ...] = COLUMNS) -> int:
    """Write the table of as many ranks as there are GPUs, or of four without; 1 if a cell is not what it should be.

    Rows come as their answers do; in the end the file is written once more, in the order of `cells`.
    """
    import torch

    gpus = torch.cuda.device_count()
    size = min(4, gpus) if gpus > 1 else 4
    rows: dict[int, list[Any]] = {}
    bad, lock = [], threading.Lock()

    def note(number: str, answers: list[Any]) -> None:
        if not number.isdigit():
            return
        method, scheme, column, what, bound, *_ = cells()[int(number)]
        try:
            found = verdict(answers)
        except AssertionError as failure:
            print(method, scheme, column, what, str(failure)[-800:])
            found = Verdict(False, math.inf, math.inf)
        limit = f"{bound + found.effect:.1e}" if found.effect else bound
        moved = f"{found.moved} of {found.operands}" if found.operands else ""
        with lock:
            if not found.equal and not found.rest <= bound:
                bad.append(number)
                print(f"{method} {scheme} {column} {what}: {found} > {bound}")
            put(int(number), method, scheme, column, what, int(found.equal), f"{found.error:.1e}", limit, moved)

    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")

        def put(number: int, *row: Any) -> None:
            rows[number] = list(row)
            writer.writerow(row)
            file.flush()

        writer.writerow(HEADER)
        answers = results(size, jobs, columns, note)
        for number in answers.keys() - {str(n) for n in rows}:  # ranks that did not answer
            note(number, answers[number])
        asked = [(column, method) for column in (INVARIANT, GRAPH) for method in {**LINEAR, **EXPERTS}]
        spawn = torch.multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(jobs, spawn) as pool:
            for n, good in enumerate(pool.map(engine_cell, *zip(*asked, strict=True)), len(cells())):
                column, method = asked[n - len(cells())]
                told = ["n/a", "n/a"] if good is None else [int(good), "0.0e+00" if good else "inf"]
                put(n, method, {**LINEAR, **EXPERTS}[method][0], column, "layer", *told, 0.0, "")
                bad.extend([str(n)] * (good is False))
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([HEADER, *(rows[n] for n in sorted(rows))])
    for name in (*OTHERS, *FAULTS):
        print(name, [str(answer)[:300] for answer in answers.get(name, ["not asked"])])
    print(f"{len(bad)} cells are wrong")
    return int(bool(bad))


def command_line() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv")
    parser.add_argument("--jobs", type=int, default=1, help="worlds and processes side by side")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--columns", default=",".join(COLUMNS), help="the others are left out")
    options = parser.parse_args()
    if options.one_gpu:
        os.environ[world.ONE_GPU] = "1"
    return main(options.csv, options.jobs, tuple(options.columns.split(",")))


if __name__ == "__main__":
    sys.exit(command_line())
