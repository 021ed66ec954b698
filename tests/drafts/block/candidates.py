"""The drafts' candidates and what each is checked and timed on."""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import lean
import share
import torch
from launches import GPU, recording  # noqa: F401  for drafts that are made of these
from launches import as_there as _as_there  # noqa: F401

import fpk.kernels  # noqa: F401  declares every op
from fpk.op import OPS

OP = OPS["scaled_mm_group"]

# name -> arguments of lean.config, in the order in which they are worth trying
MANY = {
    "ahead256": dict(design="ahead", n=256, stages=3),
    "parts192": dict(design="parts", n=192, stages=4),
    "ahead256-order": dict(design="ahead", n=256, stages=3, order=True),
    "registers256": dict(design="registers", n=256, stages=3),
    "parts192-order": dict(design="parts", n=192, stages=4, order=True),
    "parts128": dict(design="parts", n=128, stages=5),
    "shared192": dict(design="shared", n=192, stages=4),
}
FEW = {
    "few128-x4": dict(design="parts", n=128, stages=8, m=64, cluster=4, group=1),
    "few128-x2": dict(design="parts", n=128, stages=8, m=64, cluster=2, group=2),
    "few128-x1": dict(design="parts", n=128, stages=8, m=64, cluster=1, group=4),
    "parts128-few": dict(design="parts", n=128, stages=5, group=1),
    "parts192-few": dict(design="parts", n=192, stages=4, group=1),
}
# for a second run, once something is right: by --only
MORE = {
    "ahead192": dict(design="ahead", n=192, stages=4),
    "ahead256-alone": dict(design="ahead", n=256, stages=3, cluster=1),
    "ahead256-group4": dict(design="ahead", n=256, stages=3, group=4),
    "ahead256-group16": dict(design="ahead", n=256, stages=3, group=16),
}
MORE_FEW = {
    "few256-x4": dict(design="parts", n=256, stages=4, m=64, cluster=4, group=1),
}
# share.py: up to 64 tokens
SHARE = {
    "share128-x2": dict(n=128, stages=8, cluster=2),
    "share64-x2": dict(n=64, stages=12, cluster=2),
    "share64-x1": dict(n=64, stages=12, cluster=1),
    "share128-x1": dict(n=128, stages=8, cluster=1),
}
FEW_TOO = FEW | MORE_FEW
LEAN = MANY | FEW | MORE | MORE_FEW
FIRST = (*MANY, *FEW, *SHARE)
ALL = (*LEAN, *SHARE)

# (M, N, K) timed; the worst and the typical of 12 layers
SHAPES = [
    (4096, 4096, 7168), (4096, 24576, 1536), (4096, 7168, 16384), (4096, 2112, 7168), (4096, 7168, 2048),
    (8192, 4096, 4096), (1024, 4096, 7168), (1024, 24576, 1536), (1024, 6144, 4096), (1024, 2112, 7168),
    (256, 4096, 7168), (256, 10240, 8192), (256, 6144, 4096), (256, 8192, 28672), (64, 24576, 1536), (64, 8192, 28672),
    (64, 4096, 7168), (64, 6144, 4096),
]  # fmt: skip
# whole tiles; tails of rows and columns and odd steps; a tail of K; scales in rows; bias; fp16; many tiles a program
CHECKS = [
    dict(M=512, N=1024, K=1024), dict(M=300, N=1096, K=1152), dict(M=129, N=328, K=1568),
    dict(M=700, N=2112, K=1536, scale_layout="row"), dict(M=1024, N=4096, K=512, bias=True),
    dict(M=257, N=776, K=128, out_dtype="float16"), dict(M=2500, N=6144, K=256), dict(M=4096, N=2112, K=7168),
]  # fmt: skip
CHECKS_SHARE = [
    dict(M=64, N=1024, K=1024), dict(M=33, N=1096, K=1152), dict(M=130, N=328, K=1568),
    dict(M=64, N=2112, K=1536, scale_layout="row"), dict(M=17, N=4096, K=512, bias=True),
    dict(M=5, N=776, K=128, out_dtype="float16"), dict(M=64, N=6144, K=256), dict(M=64, N=4096, K=7168),
]  # fmt: skip
CHECKS_FEW = [
    dict(M=256, N=1024, K=1024), dict(M=65, N=1096, K=1152), dict(M=200, N=328, K=1568),
    dict(M=256, N=2112, K=1536, scale_layout="row"), dict(M=130, N=4096, K=512, bias=True),
    dict(M=5, N=776, K=128, out_dtype="float16"), dict(M=600, N=6144, K=256), dict(M=256, N=10240, K=8192),
]  # fmt: skip


def draft(name: str) -> tuple[Any, dict[str, Any]]:
    """(function, config) of a candidate."""
    if name in SHARE:
        return share.share, share.config(**SHARE[name])
    return lean.lean, lean.config(**LEAN[name])


def checks(name: str) -> list[dict[str, Any]]:
    """Cases of scaled_mm_group that a candidate is checked on."""
    return [case_of(c) for c in (CHECKS_SHARE if name in SHARE else CHECKS_FEW if name in FEW_TOO else CHECKS)]


def meant_for(name: str, m: int) -> bool:
    """Is a candidate timed at so many tokens?"""
    if name in SHARE:
        return m <= 64
    return (name in FEW_TOO) == (m <= 256) and (m > 64 or name == "few128-x1")


def sizes(name: str) -> list[dict[str, Any]]:
    """One of those that a candidate is timed at: all have the same kernel."""
    size = next(s for s in SHAPES if meant_for(name, s[0]))
    return [case_of(dict(zip("MNK", size, strict=True)))]


def case_of(c: dict[str, Any]) -> dict[str, Any]:
    """A check as a case of scaled_mm_group."""
    case = dict(scale_layout="column") | c
    if "out_dtype" in case:
        case["out_dtype"] = getattr(torch, case["out_dtype"])
    return case


def fits(name: str, case: dict[str, Any]) -> bool:
    """Is there shared memory for a case?"""
    return name in SHARE or lean.fits(draft(name)[1])
