"""Products of `scaled_mm` beside their peers, in blocks long enough for the GPU's power control to settle.

    python tests/bench/dense.py --csv FILE [--peers FILE] [--products ...] [--layers ...] [--tokens ...]

A product of thousands of tokens runs into the power limit, and for some tens of milliseconds it runs at the clock that
the one before it left behind: the first `--settle-ms` of each block do not count, blocks of one round come in random
order, and the clock is written down. Cells are captured and timed some at a time, layers in the order in which they are
named, each with every product and number of tokens. A CSV file that is there is continued.
"""

import argparse
import csv
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gate
import torch
from tables import PRODUCTS, limits, more_peers, provenance
from turns import capture, copies_needed, graphs_of_a_moment
from warm import warm

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import rel_error
from fpk.device import of
from fpk.op import OPS
from fpk.shapes import LINEAR_LAYERS

ROWS = 256  # of an output compared with the reference


def prepare(product: str, layer: str, m: int, fast: bool, options) -> dict[str, Any]:
    """Graphs of fpk and its peers over rotated inputs, and what their row says beside the times."""
    name, case = case_of(product, layer, m, fast)
    op, size = OPS[name], {x: case[x] for x in ("M", "N", "K")}
    count = min(24, copies_needed(m * size["K"] + size["N"] * size["K"]))
    sets = [op.inputs(**case, device="cuda", seed=7 * s) for s in range(count)]
    bound = op.bind(**sets[0])
    some = torch.linspace(0, m - 1, min(m, ROWS), device="cuda").long()
    part = sets[0] | {x: v[some] for x, v in sets[0].items() if x in ("a", "scale_a") and v.shape[0] == m}
    expected = op.reference(**part)
    named = {w: c for w, c in options.configs.items() if op.is_legal(c, bound, of(torch.device("cuda")))}
    calls = {"fpk": lambda s: op(**s)}
    calls |= {who: lambda s, config=config: op.launch(**s, config=config) for who, config in named.items()}
    if product != "int8_token" and "torch" in op.baselines:
        calls["torch"] = lambda s: op.baselines["torch"](**s)
    calls |= more_peers(options, product, size, fast)
    errors, graphs = {}, {}
    for who, call in calls.items():
        try:
            for s in sets:
                getattr(call, "prepare", id)(s)  # what it needs beside the arguments
            errors[who] = rel_error(call(sets[0])[some], expected)
            graphs[who] = capture(call, sets)
        except Exception as problem:
            print(f"{product} {layer} M={m} {who}: {type(problem).__name__}: {problem}"[:200], flush=True)
    return dict(
        row=dict(product=product, layer=layer, **size, fast_accum=int(fast)), graphs=graphs, calls=len(sets),
        errors=errors, cost=op.cost(**bound), configs={"fpk": op.config_for(**sets[0])} | named, sets=sets,
    )  # fmt: skip


def replay(graph, count: int) -> float:
    """Microseconds of `count` replays."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def blocks(prepared: dict, block_ms: float, settle_ms: float, rounds: int, rng: random.Random, spans: list) -> dict:
    """{who: medians of its blocks, microseconds a call}; `spans` gets (who, begin, end) by the wall clock."""
    graphs, calls = prepared["graphs"], prepared["calls"]
    count = {who: max(1, round(1000 / max(replay(graph, 1), 1))) for who, graph in graphs.items()}
    found: dict[str, list[float]] = {who: [] for who in graphs}
    for _ in range(rounds):
        for who in rng.sample(list(graphs), len(graphs)):
            until = time.perf_counter() + settle_ms / 1e3
            while time.perf_counter() < until:
                replay(graphs[who], count[who])
            times, begin = [], time.time()
            until = time.perf_counter() + block_ms / 1e3
            while time.perf_counter() < until or len(times) < 3:
                times.append(replay(graphs[who], count[who]) / calls / count[who])
            spans.append((who, begin, time.time()))
            found[who].append(statistics.median(times))
    return found


@contextmanager
def clocks() -> Iterator[list[tuple[float, int]]]:
    """(time, MHz) of the SMs while the block runs; filled when it ends. Empty without nvidia-smi."""
    samples: list[tuple[float, int]] = []
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["--query-gpu=timestamp,clocks.sm", "--format=csv,noheader,nounits", "-lms", "20"]
    command = ["nvidia-smi", f"--id={gpu}", *query]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    except OSError:
        yield samples
        return
    try:
        yield samples
    finally:
        process.terminate()
        for line in process.communicate()[0].splitlines():
            try:
                when, mhz = line.split(", ")
                at = datetime.datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
                samples.append((at, int(mhz)))
            except ValueError:
                continue  # cut by the end


def row_of(prepared: dict, found: dict, mhz: dict, options) -> dict[str, Any]:
    """`us` is the fastest of the plain call (`default_us`) and of the named configs."""
    cost, configs, errors = prepared["cost"], prepared["configs"], prepared["errors"]
    us = {who: statistics.mean(times) for who, times in found.items()}
    rivals = {who: t for who, t in us.items() if who not in configs}
    best = min(rivals, key=rivals.get, default="")
    own = min((who for who in us if who in configs), key=us.get)
    mine = us[own]
    return prepared["row"] | dict(
        us=round(mine, 2), default_us=round(us["fpk"], 2), peer_us=round(rivals[best], 2) if best else "",
        ratio=round(rivals[best] / mine, 3) if best else "", tflops=round(cost.flops / mine / 1e6, 1),
        gb_per_s=round(cost.bytes / mine / 1e3), error=f"{errors[own]:.2e}",
        peer_error=f"{errors[best]:.2e}" if best else "", tried=len(configs), config=configs[own], peer=best,
        peers=" ".join(f"{who}={t:.2f}" for who, t in rivals.items()),
        floor_us=round(cost.bytes / limits()[0] + limits()[1], 2),
        blocks=" ".join(f"{who}={'/'.join(f'{t:.2f}' for t in times)}" for who, times in found.items()),
        block_ms=options.block_ms, settle_ms=options.settle_ms,
        mhz=" ".join(f"{who}={value}" for who, value in mhz.items()),
    )  # fmt: skip


def cells(options) -> list[tuple[str, str, int, bool]]:
    """What the file does not have yet, in the order in which it is measured."""
    wanted = [
        (product, layer, m, bool(fast))
        for layer in options.layers
        for m in options.tokens
        for product in options.products
        for fast in (options.fast if product in ("fp8_token", "fp8_tensor") else [0])
    ]
    done = set()
    if options.csv.exists():
        with options.csv.open(newline="") as file:
            done = {(r["product"], r["layer"], int(r["M"]), r["fast_accum"] == "1") for r in csv.DictReader(file)}
    return [cell for cell in wanted if cell not in done]


def case_of(product: str, layer: str, m: int, fast: bool) -> tuple[str, dict[str, Any]]:
    """Op and arguments of its inputs."""
    (name, arguments), (n, k) = PRODUCTS[product], LINEAR_LAYERS[layer]
    return name, dict(M=m, N=n, K=k) | arguments | (dict(fast_accum=fast) if name == "scaled_mm" else {})


def measured(some: list[tuple[str, str, int, bool]], options, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Rows of a few cells: captured together, then timed."""
    spans: list[tuple[str, float, float]] = []
    results = []
    with graphs_of_a_moment():
        ready = [prepare(*cell, options) for cell in some]
        with clocks() as samples:
            for prepared in ready:
                begun = len(spans)
                found = blocks(prepared, options.block_ms, options.settle_ms, options.rounds, rng, spans)
                results.append((prepared, found, spans[begun:]))
    for prepared, found, ran in results:
        mhz = {}
        for who in found:
            seen = [mhz for at, mhz in samples if any(name == who and b <= at <= e for name, b, e in ran)]
            mhz[who] = round(statistics.median(seen)) if seen else ""
        if any(who in prepared["configs"] for who in found):
            yield row_of(prepared, found, mhz, options) | provenance()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True, type=Path)
    parser.add_argument("--peers", help="a Python file with calls(product, M, N, K, fast_accum) -> {name: call}")
    parser.add_argument("--products", nargs="*", default=["fp8_token", "fp8_tensor", "int8_token"])
    parser.add_argument("--layers", nargs="*", default=list(LINEAR_LAYERS))
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 64, 256, 1024, 4096, 8192])
    parser.add_argument("--fast", type=int, nargs="*", default=[1])
    parser.add_argument("--block-ms", type=float, default=60)
    parser.add_argument("--settle-ms", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--configs", type=json.loads, default={}, help="{name: config} to be timed too")
    parser.add_argument("--slice", type=int, default=6, help="cells that are captured before they are timed")
    parser.add_argument("--warm", type=int, default=0, metavar="PROCESSES", help="compile everything first")
    options = parser.parse_args()
    waiting, count = cells(options), 0
    print(f"{len(waiting)} cells", flush=True)
    if options.warm:
        warm((case_of(*cell) for cell in waiting), options.warm)
    gate.turn()
    limits()
    rng, is_new = random.Random(0), not options.csv.exists()
    with options.csv.open("a", newline="") as file:
        for first in range(0, len(waiting), options.slice):
            some, begun = waiting[first : first + options.slice], time.monotonic()
            for row in measured(some, options, rng):
                writer = csv.DictWriter(file, list(row), lineterminator="\n")
                if is_new:
                    writer.writeheader()
                is_new, count = False, count + 1
                writer.writerow(row)
                file.flush()
                print(*(f"{name}={value}" for name, value in row.items() if name != "config"), flush=True)
            torch.cuda.empty_cache()
            if gate.left() < 1.2 * (time.monotonic() - begun):
                print("no time for more", flush=True)
                break
    return 0 if count or not waiting else 1


if __name__ == "__main__":
    sys.exit(main())
