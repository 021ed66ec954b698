"""Kernels whose sizes are 1, as far as Triton's front end: it makes constants of such arguments, which lack methods.

`python tests/ones.py` prints what fails, as JSON; run with TRITON_INTERPRET unset
"""

import json
import sys
from typing import Any

from capture import TARGETS, Launch, arguments, launches_of
from triton._C.libtriton import ir
from triton.compiler import make_backend

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import pretend
from fpk.op import OPS, Op
from fpk.tune.arguments import legal_candidates

TARGET = "sm89"  # has FP8, and only kernels that run everywhere
SIZES = ("M", "N", "K", "T", "I", "H", "E", "D", "B", "top_k", "rows", "cols")


def traced(launch: Launch) -> None:
    """Make the kernel's first intermediate code, by the steps that triton.compile begins with."""
    source, options = launch.source(TARGETS[TARGET])
    backend = make_backend(TARGETS[TARGET])
    parsed = backend.parse_options(options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    source.make_ir(TARGETS[TARGET], parsed, codegen, modules, context)


def cases_of(op: Op) -> list[dict[str, Any]]:
    """All sizes 1, then all but K, then N alone; other sizes from the middle of the domain, options the first of it."""
    plain = {n: tuple(values)[len(values) // 2 if n in SIZES else 0] for n, values in op.domain.items()}
    sizes = [name for name in SIZES if isinstance(plain.get(name), int)]
    ones = plain | dict.fromkeys(sizes, 1)
    but_k = [ones | {"K": plain["K"]}] if "K" in sizes else []
    return [ones, *but_k, *([plain | {"N": 1}] if "N" in sizes else [])]


def failures(op: Op) -> list[str]:
    found, seen = [], set[str]()
    for case in cases_of(op):
        try:
            bound = arguments(op, case, TARGET)
            with pretend(TARGET) as device:
                op._validate(bound)
                configs = {c.get("kernel"): c for c in reversed(legal_candidates(op, bound, device))}
        except ValueError:  # what one op takes another may not: three columns, an odd number of codes
            continue
        for config in configs.values():
            for launch in launches_of(op, bound, config, TARGET):
                if (variant := launch.variant(TARGETS[TARGET])) in seen:
                    continue
                seen.add(variant)
                try:
                    traced(launch)
                except Exception as error:  # whatever a compiler throws
                    found.append(f"{op.name} {launch.name} {case}: {' '.join(str(error).split())[-200:]}")
    return found if seen else [f"{op.name}: nothing to compile"]


if __name__ == "__main__":
    print(json.dumps({op.name: failures(op) for op in OPS.values()}))
    sys.exit(0)
