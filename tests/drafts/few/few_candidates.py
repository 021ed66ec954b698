"""The drafts' candidates and what each is checked and timed on."""

from typing import Any

import torch
from few_shares import config, few, fits, tokens_held

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import rel_error
from fpk.op import OPS

BEHIND = (4096, 4096)  # (N, K) behind another kernel
OP, FRONT = OPS["scaled_mm"], OPS["quantize_fp8_token"]

# name -> arguments of few_shares.config
CANDIDATES: dict[str, dict[str, Any]] = {
    "one": dict(wide=1),
    "one-wide": dict(wide=2),
    "one-early": dict(wide=1, early=True),
    "whole": dict(wide=1, per_sm=0),
    "whole-early": dict(wide=1, per_sm=0, early=True),
    "pair": dict(wide=1, cluster=2),
    "four": dict(wide=1, cluster=4),
    "tall": dict(rows=2, wide=1),
    "tall-alone": dict(rows=2, wide=1, held=1),
    "tall-whole": dict(rows=2, wide=1, per_sm=0),
    "tall-pair": dict(rows=2, wide=1, cluster=2),
    "two": dict(wide=1, per_sm=2),
    "three": dict(wide=1, per_sm=3, held=3),
}
# for a second run, once something is right: by --only
MORE: dict[str, dict[str, Any]] = {
    "one-of-three": dict(wide=1, held=3),
    "one-alone": dict(wide=2, held=1),
    "tall-wide": dict(rows=2, wide=2, held=1),
    "tall-early": dict(rows=2, wide=1, early=True),
    "pair-early": dict(wide=1, cluster=2, early=True),
    "two-early": dict(wide=1, per_sm=2, early=True),
    "four-of-four": dict(wide=1, per_sm=4, held=4),
}
FIRST, ALL = tuple(CANDIDATES), (*CANDIDATES, *MORE)

PRODUCTS: dict[str, dict[str, Any]] = {
    "fp8_token": dict(fast_accum=True),
    "fp8_tensor": dict(fast_accum=True, a_granularity="tensor", b_granularity="tensor"),
    "fp8_full": dict(fast_accum=False),
    "int8_token": dict(dtype=torch.int8),
}
LAYERS = [
    (4096, 7168), (7168, 2048), (6144, 4096), (2112, 7168), (24576, 1536), (4096, 14336), (10240, 8192), (4096, 4096),
    (7168, 16384), (28672, 4096), (8192, 28672), (57344, 8192),
]  # fmt: skip
# (product, M, N, K) timed, the most telling first
SHAPES = [
    *(("fp8_token", m, *layer) for layer in LAYERS for m in (16, 64, 1)),
    *(("int8_token", m, *layer) for layer in LAYERS[:4] for m in (16, 64)),
    *(("fp8_full", m, *layer) for layer in LAYERS[:3] for m in (16, 64)),
    *(("fp8_tensor", 16, *layer) for layer in LAYERS[:2]),
]
# whole tiles; tails of rows, odd rows of results, odd steps; bias; fp16; many tiles and few steps; exact; full accuracy
CHECKS: list[dict[str, Any]] = [
    dict(M=64, N=1024, K=1024, fast_accum=True), dict(M=33, N=1096, K=1168), dict(M=1, N=327, K=1568, bias=True),
    dict(M=16, N=2112, K=7168, fast_accum=True), dict(M=17, N=776, K=272, out_dtype=torch.float16, bias=True),
    dict(M=5, N=24576, K=1536, dtype=torch.int8), dict(M=64, N=4096, K=4096, dtype=torch.int8, bias=True),
    dict(M=48, N=4096, K=4096, a_granularity="tensor", b_granularity="tensor"), dict(M=8, N=16, K=1040),
    dict(M=16, N=7168, K=16384), dict(M=64, N=7168, K=2048, dtype=torch.float8_e5m2, fast_accum=True),
]  # fmt: skip


def draft(name: str) -> tuple[Any, dict[str, Any]]:
    """(function, config) of a candidate."""
    return few, config(**(CANDIDATES | MORE)[name])


def checks(name: str) -> list[dict[str, Any]]:
    return CHECKS


def runs(name: str, case: dict[str, Any]) -> bool:
    """Can a candidate run a case?"""
    full = case.get("dtype") is not torch.int8 and not case.get("fast_accum")
    return fits(case["M"], case["N"], case["K"], draft(name)[1], full)


def case_of(product: str, m: int, n: int, k: int) -> dict[str, Any]:
    return dict(M=m, N=n, K=k) | PRODUCTS[product]


def sizes(name: str) -> list[dict[str, Any]]:
    """One of each kernel of those that a candidate is timed at."""
    some = {(p, tokens_held(m)): case_of(p, m, n, k) for p, m, n, k in SHAPES}
    return list(some.values())


def behind_another(name: str) -> None:
    """Activations come from a kernel in front that lets this one start early; memory is the same again and again."""
    (fn, launch), (n, k) = draft(name), BEHIND
    weights = OP.inputs(M=1, N=n, K=k, device="cuda", seed=4)
    for m in (1, 16, 64):
        xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 3.0**i for i in range(8)]
        if not fits(m, n, k, launch, False):
            continue
        found = []
        for x in xs:
            codes, scale = FRONT(x)
            found.append(fn(**weights | dict(a=codes, scale_a=scale, fast_accum=True), config=launch))
            del codes, scale
        for x, out in zip(xs, found, strict=True):
            codes, scale = FRONT(x)
            torch.cuda.synchronize()
            bound = OP.bind(**weights | dict(a=codes, scale_a=scale, fast_accum=True))
            error = rel_error(out, OP.reference(**bound))
            if not error <= OP.tolerance(bound):
                raise SystemExit(f"{name} WRONG behind a kernel that makes {m} tokens: error {error:.3e}")
