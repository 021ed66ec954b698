"""What a process of its own does on a CPU: references, whatever modes surround the call, or the interpreter."""

import os
import subprocess
import sys

AUTOCAST = """
import torch
import fpk

SCHEMES = {"int8_channel": "int8_token", "fp8_channel": "fp8_token", "fp8_block128": "fp8_group128"}
torch.manual_seed(0)
x, w = torch.randn(16, 256, dtype=torch.bfloat16), torch.randn(64, 256, dtype=torch.bfloat16)
layer = torch.nn.Sequential(torch.nn.Linear(256, 64)).bfloat16()
fpk.quantize_(layer, "int8_channel")
for scheme, activation in SCHEMES.items():
    qw = fpk.quantize(w, scheme)
    for a in (x, fpk.quantize(x, activation)):
        plain = fpk.mm(a, qw, out_dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(fpk.mm(a, qw, out_dtype=torch.float32), plain), (scheme, type(a))
with torch.no_grad():
    plain = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x), plain)
"""

EMPTY = """
import torch
import fpk

weight = fpk.quantize(torch.randn(8, 16), "fp8_channel")
none = torch.empty(0, 16, dtype=torch.bfloat16).as_strided((0, 16), (0, 0))  # as torch.from_numpy gives them
assert fpk.mm(none, weight).shape == (0, 8)
"""


def run(script: str, interpret: str = "0") -> str:
    env = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_autocast_changes_no_number():
    run(AUTOCAST)


def test_no_rows_with_any_strides():
    run(EMPTY)


def test_interpreter_as_it_comes_is_warned_about():
    assert "interpreter_fixes.py" in run("import fpk.kernels", interpret="1")
    assert "interpreter_fixes.py" not in run("import interpreter_fixes, fpk.kernels", interpret="1")
