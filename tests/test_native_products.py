"""On GPUs whose matrix unit takes block scales, products of packed codes use them."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BLOCK_SCALED = {"sm100": "tcgen05.mma", "sm120": "mma.sync", "gfx950": "v_mfma_scale"}
ELSEWHERE = {("sm120", "mxfp8_e4m3", "mxfp4"), ("gfx950", "nvfp4", "nvfp4")}  # no instruction for these: decoded


def test_block_scales_of_the_matrix_unit_are_used():
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(HERE / "native_products.py")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == 12
    for target, a, b, instructions in lines:
        if (target, a, b) in ELSEWHERE:
            assert instructions == "", (target, a, b)
            continue
        assert BLOCK_SCALED[target] in instructions, (target, a, b, instructions)
        assert target == "gfx950" or "block_scale" in instructions, (target, a, b, instructions)
