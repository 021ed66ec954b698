"""What mm_packed compiles to where the matrix unit has block scales: one JSON line a pair. TRITON_INTERPRET unset."""

import json
import re

import triton
from capture import TARGETS, arguments, launches_of

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import pretend
from fpk.op import OPS

PAIRS = (("mxfp8_e4m3", "mxfp8_e4m3"), ("mxfp8_e4m3", "mxfp4"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"))

if __name__ == "__main__":
    op = OPS["mm_packed"]
    for target in ("sm100", "sm120", "gfx950"):
        for pair in PAIRS:
            bound = op.bind(**arguments(op, dict(M=1024, N=4096, K=4096, pair=(*pair, -1, -1)), target))
            with pretend(target):
                config = op.config_for(**bound)
            if config["kernel"] != "native":
                print(json.dumps([target, *pair, ""]))
                continue
            (launch,) = launches_of(op, bound, config, target)
            source, options = launch.source(TARGETS[target])
            asm = triton.compile(source, target=TARGETS[target], options=options).asm
            text = asm.get("ptx") or asm.get("amdgcn")
            print(
                json.dumps(
                    [target, *pair, " ".join(sorted(set(re.findall(r"(?:tcgen05.mma|mma.sync|v_mfma)[\w.:]*", text))))]
                )
            )
