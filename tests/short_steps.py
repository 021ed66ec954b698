"""Candidates of packed products with the shortest steps, as far as Triton's layouts: are all columns of a step read?

`python tests/short_steps.py` prints what is not, as JSON, and how many were looked at; run with TRITON_INTERPRET unset
"""

import json
import sys

import torch
from capture import TARGETS, Launch, arguments, launches_of
from compilers import halved
from triton._C.libtriton import ir
from triton.compiler import make_backend

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import pretend
from fpk.op import OPS, Op
from fpk.tune.arguments import legal_candidates

# steps of 16: activations, weights, groups, the type that both are multiplied in
CASES = (
    (("none", "int4", -1, 16), torch.float16),
    (("fp8", "mxfp6_e3m2", 48, -1), torch.bfloat16),
)
FIELDS = ("kernel", "SWAP", "BLOCK_M", "BLOCK_N")


def layouts(launch: Launch, target: str) -> str:
    """Triton's code with layouts, by the steps that triton.compile begins with."""
    source, options = launch.source(TARGETS[target])
    backend = make_backend(TARGETS[target])
    parsed = backend.parse_options(options | source.parse_options())
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    module = source.make_ir(TARGETS[target], parsed, codegen, modules, context)
    stages: dict = {}
    backend.add_stages(stages, parsed, source.language)
    metadata = {"target": TARGETS[target], **parsed.__dict__}
    for stage in ("ttir", "ttgir"):
        module = stages[stage](module, metadata)
    return str(module)


def failures(op: Op, target: str) -> tuple[list[str], int]:
    """What is wrong, and how many launches were looked at: none where no candidate is legal."""
    found, looked = [], 0
    for pair, dtype in CASES:
        bound = arguments(op, dict(M=16, N=256, K=192, pair=pair, a_dtype=dtype) | extra(op), target)
        with pretend(target) as device:
            legal = [c for c in legal_candidates(op, bound, device) if c["BLOCK_K"] == 16]
        few = [c for c in legal if c["BLOCK_M"] in (16, 64) and c["BLOCK_N"] <= 64]
        for config in {tuple(c.get(f) for f in FIELDS): c for c in few}.values():
            for launch in launches_of(op, bound, config, target):
                wrong = halved(layouts(launch, target)) if "BLOCK_K" in launch.kwargs else []
                found += [f"{op.name} {target} {pair} {config}: {w}" for w in wrong[:1]]
                looked += 1
    return found, looked


def extra(op: Op) -> dict:
    return dict(E=2) if "E" in op.domain else {}


if __name__ == "__main__":
    places = (("mm_packed", "sm90"), ("mm_packed", "sm120"), ("grouped_mm_packed", "sm90"))
    made = [failures(OPS[name], target) for name, target in places]
    print(json.dumps(dict(wrong=[w for wrong, _ in made for w in wrong], looked=[n for _, n in made])))
    sys.exit(0)
