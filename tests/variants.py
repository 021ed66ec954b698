"""How many variants Triton would compile of each kernel as the number of rows changes and nothing else does.

    python tests/variants.py        prints JSON: {op: {"config": ..., "alignment": ..., "variants": n} of the worst}

Run with TRITON_INTERPRET unset.
"""

import argparse
import importlib
import json
import math
import sys
from collections import defaultdict
from typing import Any

import torch
from capture import TARGETS, arguments, launches_of, representative

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import pretend
from fpk.op import OPS, Op
from fpk.tune.arguments import legal_candidates

ROWS = (*range(1, 41), 64, 100, 128, 1000, 4096)
CONFIGS = 6
ARCH = "sm90"


def alignment(bound: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Largest power of two, up to 16, that divides the address of each tensor: what a memo keeps apart."""
    tensors = {n: v for n, v in bound.items() if isinstance(v, torch.Tensor)}
    return tuple((n, math.gcd(t.data_ptr(), 16)) for n, t in tensors.items())


def worst(op: Op) -> dict[str, Any]:
    """The config and alignment of which most variants of one kernel exist, over every M of ROWS."""
    case = representative(op)[0]
    tokens = next((n for n in ("M", "T") if n in case), None)
    if tokens is None:
        return dict(config={}, alignment=(), variants=0, kernel="")
    found: dict[tuple, set[str]] = defaultdict(set)
    configs: dict[str, dict[str, Any]] = {}
    for m in ROWS:  # a candidate may depend on M, so the union over all of them, few of each
        bound = arguments(op, case | {tokens: m}, ARCH)
        with pretend(ARCH) as device:
            legal = legal_candidates(op, bound, device)
        for config in legal[:: max(1, len(legal) // CONFIGS)][:CONFIGS]:
            configs.setdefault(repr(sorted(config.items(), key=str)), config)
    for m in ROWS:
        bound = arguments(op, case | {tokens: m}, ARCH)
        with pretend(ARCH) as device:
            for name, config in configs.items():
                if op.is_legal(config, bound, device):
                    for launch in launches_of(op, bound, config, ARCH):
                        found[launch.name, name, alignment(bound)].add(launch.variant(TARGETS[ARCH]))
    kernel, name, aligned = max(found, key=lambda key: len(found[key]))
    most = found[kernel, name, aligned]
    return dict(config=configs[name], alignment=aligned, variants=len(most), kernel=kernel, which=sorted(most)[:4])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--extra", help="a module that declares other ops: look at those alone")
    args = parser.parse_args()
    known = set(OPS) if args.extra else set()
    if args.extra:
        importlib.import_module(args.extra)
    answers = {}
    for name in OPS:
        if name not in known:
            try:
                answers[name] = worst(OPS[name])
            except Exception as error:  # one broken op must not hide the others
                answers[name] = dict(error=f"{type(error).__name__}: {error}")
    json.dump(answers, sys.stdout, default=str)


if __name__ == "__main__":
    main()
