"""How a layer of experts scales over ranks: tokens a second of every exchange, and where its time goes.

    python tests/bench/ep.py --csv FILE [--ranks 2]

The layer of DeepSeek-V3 (256 experts, 8 a token, H 7168, I 2048, FP8 by blocks of 128) with 4096 tokens a rank, against
one GPU with all experts and 4096 tokens. One process a GPU, NCCL. A time is the slowest rank's median over rounds of
several calls. "experts" is the layer on the tokens that an exchange brings, without the exchange.
"""

import argparse
import contextlib
import csv
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gate
import torch
from moe import MODELS, random_weights
from tables import provenance

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))

import world

import fpk
from fpk.api import Quantized, quantize
from fpk.check import bits, rel_error
from fpk.op import OPS
from fpk.parallel import ExpertParallel, Group, Placement, join
from fpk.parallel.exchange import combine, dispatch

E, TOP_K, H, I = MODELS["deepseek_v3"]
T = 4096
ACT, SCHEME = "fp8_group128", "fp8_block128:fp8_group128"
CALLS, ROUNDS = 8, 5  # of a timing
EXCHANGES = (("gather", ACT), ("all_to_all", ACT), ("all_to_all", None))
FIELDS = ("layer", "ranks", "tokens", "exchange", "payload", "part", "us", "speedup", "share", "error", "gpu", "torch",
          "triton", "date")  # fmt: skip


def weights_of(rank: int, ranks: int) -> tuple[Any, Any]:
    """w13 and w2 of a rank's experts, random; the same on every rank that asks."""
    torch.manual_seed(100 + rank)
    return random_weights(E // ranks, 2 * I, H, SCHEME), random_weights(E // ranks, H, I, SCHEME)


def joined(parts: list[Quantized]) -> Quantized:
    codes = torch.cat([p.codes.view(torch.uint8) for p in parts]).view(parts[0].codes.dtype)
    return Quantized(codes, torch.cat([p.scale for p in parts]), parts[0].scheme, check=False)


def routed(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return OPS["route"](torch.randn((T, E), device="cuda", generator=generator), TOP_K)


def timed(call: Callable[[], Any], group: Group, rounds: int = 5) -> float:
    """Microseconds a call of the slowest rank."""
    calls, rounds = CALLS, min(rounds, ROUNDS)
    found = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        group.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / calls)
    return float(group.all_reduce(torch.tensor([statistics.median(found[1:])], device="cuda"), "max"))


def parts_of(layer: ExpertParallel, experts: Callable[..., Any], x: Any, weights: Any, ids: Any) -> dict[str, Any]:
    """Parts of a layer's call by themselves."""
    group = layer.group
    if layer.exchange == "gather":
        q = quantize(x, ACT)
        tokens = Quantized(group.all_gather(q.codes), group.all_gather(q.scale), ACT, check=False)
        all_weights, all_ids = group.all_gather(weights), group.all_gather(ids)
        y = experts(tokens, all_weights, all_ids)
        return {
            "quantize": lambda: quantize(x, ACT), "gather codes": lambda: group.all_gather(q.codes),
            "gather scales": lambda: group.all_gather(q.scale),
            "gather routing": lambda: (group.all_gather(weights), group.all_gather(ids)),
            "experts": lambda: experts(tokens, all_weights, all_ids), "reduce-scatter": lambda: group.reduce_scatter(y),
        }  # fmt: skip

    def there() -> Any:
        return dispatch(group, x, ids, layer._owners, layer.payload)

    sent = there()
    ones = torch.ones(sent.ids.shape, dtype=torch.float32, device="cuda")
    y = experts(sent.rows, ones, sent.ids)
    rows = sent.rows.codes if isinstance(sent.rows, Quantized) else sent.rows
    out = torch.empty((sum(sent.send), H), dtype=rows.dtype, device="cuda")
    return {
        "dispatch": there, "of it the rows": lambda: group.all_to_all(out, sent.send, sent.receive),
        "experts": lambda: experts(sent.rows, ones, sent.ids), "combine": lambda: combine(group, y, sent, weights),
        "of it rows back": lambda: group.all_to_all(y, sent.receive, sent.send),
    }  # fmt: skip


def main_of_rank(rank: int, ranks: int, path: str, file: str, answers: Any) -> None:
    try:
        with contextlib.nullcontext() if rank else open(file, "a", newline="") as rows:
            measured(rank, ranks, path, rows)
        answers.put("")
    except BaseException:
        answers.put(traceback.format_exc())
    if multiprocessing.parent_process():
        answers.close()
        answers.join_thread()
        os._exit(0)  # a captured graph may hold its communicator


def measured(rank: int, ranks: int, path: str, file: Any) -> None:
    """The first rank writes rows into `file` as they come."""
    torch.set_grad_enabled(False)
    store = torch.distributed.FileStore(path, ranks)
    group = join(rank, ranks, store, device=torch.device("cuda", rank), timeout_s=60)
    w13, w2 = weights_of(rank, ranks)
    g = torch.Generator("cuda").manual_seed(rank)
    x = torch.randn((T, H), device="cuda", generator=g).bfloat16()
    weights, ids = routed(g)
    base, whole = torch.zeros(1, device="cuda"), None
    if rank == 0:
        every = [(w13, w2), *(weights_of(r, ranks) for r in range(1, ranks))]
        all13, all2 = (joined([w[j] for w in every]) for j in range(2))

        def one() -> Any:
            return fpk.moe_experts(x, weights, ids, all13, all2, act=ACT)

        whole = one()
        alone = Group(0, 1, group.device, None, None, group.database)
        base[0] = timed(one, alone)
        write(file, ranks, "one GPU", "", "layer", float(base), 1.0)
        del every, all13, all2
    us_of_one = float(group.all_reduce(base, "max"))

    def note(exchange: str, payload: str, part: str, us: float, layer_us: float, error: float | None) -> None:
        speedup = ranks * us_of_one / us if part in ("layer", "layer in a graph") else None
        if rank == 0:
            write(file, ranks, exchange, payload, part, us, speedup, None if speedup else us / layer_us, error)

    for exchange, payload in EXCHANGES:
        layer = ExpertParallel(group, Placement.linear(E, ranks), exchange, payload)
        expert_map, name = layer.expert_map, payload or "bf16"

        def experts(rows: Any, w: Any, i: Any, expert_map: Any = expert_map) -> Any:
            return fpk.moe_experts(rows, w, i, w13, w2, act=ACT, expert_map=expert_map)

        def call(layer: Any = layer, experts: Any = experts) -> Any:
            return layer(x, weights, ids, experts)

        out = call()
        error = None if whole is None else float(rel_error(out, whole))
        if whole is not None and exchange == "all_to_all":
            assert torch.equal(bits(out), bits(whole)), "not the bits of one GPU"
        us = timed(call, group)
        note(exchange, name, "layer", us, us, error)
        for part, alone_call in parts_of(layer, experts, x, weights, ids).items():
            note(exchange, name, part, timed(alone_call, group, rounds=3), us, None)
        if exchange == "gather":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = call()
            kept = weights.clone(), ids.clone()
            for old, new in zip((weights, ids), routed(g), strict=True):
                old.copy_(new)
            graph.replay()
            assert torch.equal(bits(captured), bits(call())), "a graph does not follow the routing"
            note(exchange, name, "layer in a graph", timed(graph.replay, group), us, None)
            for old, new in zip((weights, ids), kept, strict=True):
                old.copy_(new)


def write(
    file: Any, ranks: int, exchange: str, payload: str, part: str, us: float, speedup: float | None = None,
    share: float | None = None, error: float | None = None,
) -> None:  # fmt: skip
    numbers = [f"{us:.1f}", *("" if v is None else f"{v:.3f}" for v in (speedup, share))]
    where, found = provenance(), "" if error is None else f"{error:.2e}"
    row = [
        f"deepseek_v3 {SCHEME}",
        ranks,
        T,
        exchange,
        payload,
        part,
        *numbers,
        found,
        *(where[n] for n in FIELDS[-4:]),
    ]
    csv.writer(file, lineterminator="\n").writerow(row)
    file.flush()
    print(*row[3:10], flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    limit = min(time.monotonic() + 240, gate.turn())
    with open(options.csv, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerow(FIELDS)
    with (
        tempfile.TemporaryDirectory() as folder,
        world.processes(options.ranks, main_of_rank, str(Path(folder) / "store"), options.csv) as (started, answers),
    ):
        for _ in started:
            if answer := answers.get(timeout=max(1.0, limit - time.monotonic())):
                raise RuntimeError(answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
