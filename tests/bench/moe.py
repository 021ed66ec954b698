"""The table of expert layers of a GPU: every stage and the whole layer, for layers of real models.

    python tests/bench/moe.py --csv FILE [--models NAME ...] [--schemes NAME ...] [--tokens T ...] [--jobs N]
                              [--others FILE] [--minutes M]

A layer goes from tokens and router logits to tokens; inputs rotate over several routings, so that few tokens do not
find their experts in cache. `--others` (by default `layers.py` in the folder FPK_PEERS) names a Python file with
functions `layer(case)` and `stage(case, name)` that give {name: callable of an index of a routing} or nothing: other
implementations, timed in turns with fpk's. `--jobs` processes compile everything first. Run it on a quiet GPU.
"""

import argparse
import csv
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gate
import peers
import torch
from moe_stages import MODELS, SCHEMES, Case, layer_error, outlined_weights, random_weights, stages, with_tokens
from tables import provenance
from turns import time_in_turns
from warm import compiling

import fpk

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
FIELDS = (
    "model", "scheme", "routing", "T", "stage", "us", "other", "other_us", "ratio", "share", "gb_per_s", "tflops",
    "error", "experts", "gpu", "torch", "triton", "date",
)  # fmt: skip


def cases(options, weights: Callable[..., Any] = random_weights) -> Any:
    """Cases in the order of their weights, which are made once."""
    for model in options.models:
        E, _, H, I = MODELS[model]
        kept: Any = None
        for scheme in options.schemes:
            if ("block" in scheme and (H % 128 or I % 128)) or (scheme == "mxfp4" and model != "gpt_oss_120b"):
                continue
            same = scheme.startswith("fp8") and kept is not None
            w13 = weights(E, 2 * I, H, scheme, kept[0] if same else None)
            w2 = weights(E, H, I, scheme, kept[1] if same else None)
            kept = (w13.codes, w2.codes) if scheme.startswith("fp8") else None
            more: dict[str, Any] = {}
            if scheme == "mxfp4":  # as gpt-oss is served
                w13, w2 = fpk.shuffle(w13), fpk.shuffle(w2)
                biases = {n: torch.randn((E, k), device="cuda") for n, k in (("bias13", 2 * I), ("bias2", H))}
                more = dict(activation="swigluoai", interleaved=True, **biases)
            for T in options.tokens:
                for routing in ("balanced", "zipf") if T >= 64 else ("balanced",):
                    yield with_tokens(Case(model, scheme, T, routing, w13, w2, more=more))
            del w13, w2
        del kept
        torch.cuda.empty_cache()


def copy_bandwidth() -> float:
    """GB/s of a large device copy, read and written."""
    x = torch.empty(64 << 20, device="cuda", dtype=torch.bfloat16)
    y = torch.empty_like(x)
    return 4 * x.numel() / time_in_turns({"copy": lambda _: y.copy_(x)}, [0], 20, 3)["copy"].us / 1e3


def others_of(path: str | None) -> Any:
    if path is None:
        return None
    spec = importlib.util.spec_from_file_location("others", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compile_all(options) -> None:
    """Everything once, whatever fails; nothing runs on the GPU."""
    other = others_of(options.others)
    with compiling():
        compile_cases(options, other)


def compile_cases(options, other: Any) -> None:
    for case in cases(options, outlined_weights):
        if case.routing != "balanced":
            continue
        for name, (call, _, _) in stages(case).items():
            if options.stages and name not in options.stages:
                continue
            calls = [call]
            if other is not None:
                try:
                    calls += list((other.layer(case) if name == "layer" else other.stage(case, name)).values())
                except Exception as error:  # what wants a GPU compiles in its turn
                    print(f"{case.model} {case.scheme} T={case.T} {name}, others: {type(error).__name__}")
            for f in calls:
                try:
                    f(0)
                except Exception as error:
                    print(f"{case.model} {case.scheme} T={case.T} {name}: {type(error).__name__} {str(error)[:200]}")
        torch.cuda.synchronize()


MOVES = ("permute", "activation", "unpermute", "quantize")  # stages that do little but move bytes


def copy_of(moved: int) -> Callable[[int], Any]:
    """A device copy that moves as many bytes, read and written together."""
    x = torch.empty((moved // 2,), device="cuda", dtype=torch.uint8)
    y = torch.empty_like(x)
    return lambda _: y.copy_(x)


def rows(case: Case, copy: float, other: Any, options) -> Any:
    peak = SCHEMES[case.scheme]
    for name, (call, moved, flops) in stages(case).items():
        if (case.routing != "balanced" and name != "layer") or (options.stages and name not in options.stages):
            continue
        # many calls a graph where they are short: its start, some 10 us, is no part of them
        is_long = name in ("w13", "w13 activated", "w2", "layer")
        sets = list(range(len(case.x))) * (3 if case.T <= 64 else 2 if is_long else 12)
        calls: dict[str, Callable[[int], Any]] = {"fpk": call}
        if name in MOVES and case.T >= 1024:
            calls["device copy of as many bytes"] = copy_of(moved)
        if other is not None:
            calls |= other.layer(case) if name == "layer" else other.stage(case, name)
        timed = None
        while calls and timed is None:
            try:
                timed = time_in_turns(calls, sets, options.block_ms, options.rounds)
            except Exception as error:  # drop what does not run
                lost = list(calls)[-1]
                print(f"{case.model} {case.scheme} T={case.T} {name} {lost}: {str(error)[:200]}", flush=True)
                del calls[lost]
        if timed is None or "fpk" not in timed:
            continue
        us = timed["fpk"].us
        best = min((n for n in timed if n != "fpk"), key=lambda n: timed[n].us, default="")
        limit = max(moved / copy / 1e3, flops / peak / 1e6)
        yield dict(
            model=case.model, scheme=case.scheme, routing=case.routing, T=case.T, stage=name, us=f"{us:.2f}",
            other=best, other_us=f"{timed[best].us:.2f}" if best else "",
            ratio=f"{timed[best].us / us:.3f}" if best else "", share=f"{limit / us:.3f}",
            gb_per_s=f"{moved / us / 1e3:.0f}", tflops=f"{flops / us / 1e6:.1f}",
            error=f"{layer_error(case):.2e}" if name == "layer" else "", experts=MODELS[case.model][0], **provenance(),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES)[:2])
    parser.add_argument("--tokens", nargs="*", type=int, default=list(TOKENS))
    parser.add_argument("--stages", nargs="*", default=[], help="all if none are named")
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--others", default=peers.file("layers.py"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--block-ms", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only-compile", action="store_true")
    options = parser.parse_args()
    begun = time.monotonic()
    if options.only_compile:
        return compile_all(options)
    if options.jobs:
        shares = [(m, s) for m in options.models for s in options.schemes]
        command = [sys.executable, "-W", "ignore", __file__, "--csv", "-", "--only-compile"]
        if options.others:
            command += ["--others", options.others]
        running = []
        for half in range(max(1, min(2, options.jobs // max(1, len(shares))))):
            tokens = [str(t) for t in options.tokens[half::2]] if options.jobs >= 2 * len(shares) else None
            for m, s in shares:
                more = ["--tokens", *(tokens or [str(t) for t in options.tokens])]
                running.append(subprocess.Popen([*command, "--models", m, "--schemes", s, *more]))
        for process in running:
            try:
                process.wait(max(1.0, 0.5 * 60 * options.minutes - (time.monotonic() - begun)))
            except subprocess.TimeoutExpired:
                process.kill()
        print(f"compiled after {time.monotonic() - begun:.0f} s", flush=True)
    gate.turn()
    copy = copy_bandwidth()
    other = others_of(options.others)
    with open(options.csv, "w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        for case in cases(options):
            if time.monotonic() - begun > 60 * options.minutes or gate.left() < 2:
                print("out of time", flush=True)
                return
            for row in rows(case, copy, other, options):
                table.writerow(row)
                file.flush()
                print(*(f"{n}={row[n]}" for n in FIELDS[:13] if row[n] != ""), flush=True)


if __name__ == "__main__":
    main()
