"""How many variants Triton would compile of each kernel as the number of rows changes and nothing else does.

    python tests/variants.py        prints JSON: {op: {"variants": n, "kernel", "case", "config", ...}} of the worst

Run with TRITON_INTERPRET unset.
"""

import argparse
import importlib
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from capture import TARGETS, arguments, launches_of, representative

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import pretend
from fpk.op import OPS, Op
from fpk.tune.arguments import legal_candidates

ROWS = (*range(1, 41), 64, 100, 128, 1000, 4096)
FEW_ROWS = (1, 2, 3, 5, 8, 15, 16, 17, 32, 48, 64, 100, 128, 1000, 4096)
CONFIGS = 6
ARCH = "sm90"


def alignment(bound: dict[str, Any]) -> str:
    """What may rightly choose a variant: divisibility by 16 of addresses and strides, and strides of 1."""
    tensors = {n: v for n, v in bound.items() if isinstance(v, torch.Tensor)}
    told = {n: (t.data_ptr() % 16 == 0, [(math.gcd(s, 16), s == 1) for s in t.stride()]) for n, t in tensors.items()}
    return repr(told)


def calls(op: Op, tokens: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(case without M, arguments, config): candidates over every M; then each of the op's options, with defaults."""
    case = representative(op)[0]
    made: dict[str, dict[str, Any]] = {}

    def arguments_of(case: dict[str, Any]) -> dict[str, Any]:
        """Made once: every option has the value that all others are tried with."""
        spelled = repr(sorted(case.items()))
        if spelled not in made:
            made[spelled] = arguments(op, case, ARCH)
        return made[spelled]

    for m in ROWS:
        bound = arguments_of(case | {tokens: m})
        with pretend(ARCH) as device:
            legal = legal_candidates(op, bound, device)
        for config in legal[:: max(1, len(legal) // CONFIGS)][:CONFIGS]:
            yield "", bound, config
    for name, values in op.domain.items():
        for value in values if not _is_size(values) else ():
            for m in FEW_ROWS:
                try:
                    bound = arguments_of(case | {name: value, tokens: m})
                    with pretend(ARCH):
                        config = op.config_for(**bound)
                except (NotImplementedError, ValueError):  # an option that this shape or GPU does not have
                    continue
                yield f"{name}={value}", bound, config


def _is_size(values: Iterable[Any]) -> bool:
    return all(type(v) is int for v in values)


def worst(op: Op) -> dict[str, Any]:
    """The call of whose kernels most variants exist."""
    tokens = next((n for n in ("M", "T") if n in representative(op)[0]), None)
    if tokens is None:
        return dict(variants=0)
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for option, bound, config in calls(op, tokens):
        for launch in launches_of(op, bound, config, ARCH):
            key = (launch.name, option, repr(sorted(config.items(), key=str)), alignment(bound))
            found[key].add(launch.variant(TARGETS[ARCH]))
    kernel, option, config, aligned = max(found, key=lambda key: len(found[key]))
    most = found[kernel, option, config, aligned]
    return dict(
        variants=len(most), kernel=kernel, option=option, config=config, alignment=aligned, which=sorted(most)[:4],
        calls=len(found),
    )  # fmt: skip


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
