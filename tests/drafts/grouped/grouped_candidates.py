"""The grouped drafts' candidates and what each is checked and timed on."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import lean_grouped  # first: it finds the other drafts
import torch
from launches import recording
from triton.runtime.interpreter import InterpretedFunction

import fpk.kernels  # noqa: F401  declares every op
from fpk.op import OPS

OP = OPS["grouped_scaled_mm_group"]

# name -> arguments of lean_grouped.config, in the order in which they are worth trying; "gather*" fetch rows themselves
CANDIDATES = {
    "rows": dict(),
    "gather": dict(),
    "rows-pairs": dict(cluster=2, along="rows"),
    "gather-pairs": dict(cluster=2, along="rows"),
    "columns-pairs": dict(cluster=2, along="columns"),
    "rows-deep": dict(stages=4, boxes=1),
    "rows-same-step": dict(ahead=False),
}
# for a second run, once something is right: by --only
MORE = {
    "gather-deep": dict(stages=4, boxes=1),
    "rows-group4": dict(group=4),
    "rows-group16": dict(group=16),
}
ALL = CANDIDATES | MORE

# (model, tokens, experts, experts per token, columns, K, does it read tokens): timed; those with the most time first
SHAPES = [
    ("mixtral w13", 4096, 8, 2, 28672, 4096, True), ("mixtral w2", 4096, 8, 2, 4096, 14336, False),
    ("qwen3 w13", 4096, 128, 8, 1536, 2048, True), ("qwen3 w2", 4096, 128, 8, 2048, 768, False),
    ("deepseek_v3 w13", 4096, 256, 8, 4096, 7168, True), ("deepseek_v3 w2", 4096, 256, 8, 7168, 2048, False),
    ("deepseek_v3_tp8 w13", 4096, 256, 8, 512, 7168, True), ("deepseek_v3_tp8 w2", 4096, 256, 8, 7168, 256, False),
    ("mixtral w13", 1024, 8, 2, 28672, 4096, True), ("qwen3 w13", 1024, 128, 8, 1536, 2048, True),
]  # fmt: skip
# whole tiles; tails of rows and columns and odd steps; a tail of K; experts without rows; rows of none; one expert;
# many tiles a program, many experts
CHECKS = [
    dict(M=1024, N=1024, K=1024, E=4), dict(M=600, N=1096, K=1152, E=5), dict(M=777, N=328, K=1168, E=3),
    dict(M=900, N=512, K=384, E=40, spread="skewed"), dict(M=1500, N=776, K=128, E=7, dropped=0.5, out_dtype="float16"),
    dict(M=700, N=768, K=640, E=5, spread="one"), dict(M=4096, N=6144, K=512, E=8), dict(M=8192, N=1536, K=768, E=128),
]  # fmt: skip


def gathers(name: str) -> bool:
    return name.startswith("gather")


def draft(name: str) -> tuple[Any, dict[str, Any]]:
    """(function, config) of a candidate."""
    return lean_grouped.grouped, lean_grouped.config(**ALL[name])


def case_of(name: str, c: dict[str, Any]) -> dict[str, Any]:
    """A check as a case of the op for a candidate."""
    case = dict(scale_layout="row", gather=4 if gathers(name) else 0) | c
    if "out_dtype" in case:
        case["out_dtype"] = getattr(torch, case["out_dtype"])
    return case


def checks(name: str) -> list[dict[str, Any]]:
    return [case_of(name, c) for c in CHECKS]


def sizes(name: str) -> list[dict[str, Any]]:
    """One of those that a candidate is timed at: all have the same kernel."""
    _, tokens, experts, top_k, n, k, _ = SHAPES[2]
    return [case_of(name, dict(M=tokens * top_k, N=n, K=k, E=experts))]


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Launches of the draft in the block, (kernel, arguments, options), of which and of the table's nothing happens."""
    with recording() as every, mock.patch.object(InterpretedFunction, "run", lambda *_, **__: None):
        seen: list[Any] = []
        yield seen
        seen += [launch for launch in every if launch[0] is lean_grouped.grouped_lean_kernel]
