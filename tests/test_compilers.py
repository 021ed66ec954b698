"""What compilers were seen to get wrong is noticed, and no candidate meets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compilers import halved, undone
from shared_run import once

from fpk.device import pretend, pretend_triton
from fpk.op import OPS
from fpk.tune.arguments import legal_candidates, outline

DOT = (
    "%p = tt.dot %a, %b, %c : tensor<16x{k}xf16, #ttg.dot_op<{{opIdx = 0, parent = #mma, kWidth = {w}}}>>"
    " * tensor<{k}x32xf16, #ttg.dot_op<{{opIdx = 1, parent = #mma, kWidth = {w}}}>> -> tensor<16x32xf32, #mma>"
)


@pytest.mark.parametrize("k, w, wrong", [(16, 8, True), (32, 8, False), (16, 4, False), (8, 4, True)])
def test_steps_that_are_too_short(k, w, wrong):
    assert halved(DOT.format(k=k, w=w)) == [f"{k} columns, kWidth {w}"] * 2 * wrong


def test_other_lines_have_no_steps():
    assert not halved(DOT.format(k=16, w=8).replace("tt.dot", "tt.trans"))


ENCODE = "cvt.rn.satfinite.e4m3x2.f32  %rs1, %r2, %r1; "
DECODE = "cvt.rn.f16x2.e4m3x2 %r9, {}"
MOVED = "mov.b32 %r5, {%rs1, %rs3};\n\tand.b32 \t%r6, %r5, 255;\n@%p1 mov.u16 %rs7, %r6; "
WRONG = {
    "at once": (ENCODE + DECODE.format("%rs1") + ";", "%rs1"),
    "moved": (ENCODE + MOVED + DECODE.format("%rs7") + ";", "%rs7"),
    "in braces": ("{ .reg .b16 a;\n" + ENCODE + "}\n{ " + DECODE.format("%rs1") + "; }", "%rs1"),
}
RIGHT = {
    "another's": ENCODE + "ld.global.u16 %rs2, [%rd1]; " + DECODE.format("%rs2") + ";",
    "through memory": ENCODE + "st.shared.b16 [%r7], %rs1; ld.shared.u16 %rs2, [%r7]; " + DECODE.format("%rs2") + ";",
    "the other way": "cvt.rn.f16x2.e4m3x2 %r1, %rs1; cvt.rn.satfinite.e4m3x2.f32 %rs4, %r1, %r1;",
    "computed": ENCODE + "mul.lo.s32 %r8, %rs1, 3; " + DECODE.format("%r8") + ";",
}


@pytest.mark.parametrize("name", WRONG)
def test_codes_that_are_decoded_where_they_were_made(name):
    text, register = WRONG[name]
    assert undone(text) == [DECODE.format(register)]


@pytest.mark.parametrize("name", RIGHT)
def test_codes_from_elsewhere(name):
    assert undone(RIGHT[name]) == []


def test_no_candidate_reads_half_of_its_steps():
    """By the compiler that is installed; 3.6 and 3.7 have the fault."""

    def run() -> dict:
        env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
        command = [sys.executable, "-W", "ignore", Path(__file__).parent / "short_steps.py"]
        return json.loads(subprocess.run(command, env=env, capture_output=True, check=True, timeout=600).stdout)

    made = once("short_steps", run)
    assert not made["wrong"]
    assert made["looked"][0] and made["looked"][-1]  # on sm90 warp groups read whole steps in any version


@pytest.mark.parametrize("version, whole", [("3.6.0", False), ("3.7.1", False), ("3.8.0", True), ("3.9.0", True)])
@pytest.mark.parametrize("name", ["mm_packed", "grouped_mm_packed"])
def test_short_steps_of_packed_columns(name, version, whole):
    """Warp groups take them in any version, threads where the compiler is right; codes of a byte are not concerned."""
    op, case = OPS[name], dict(M=16, N=256, K=192) | (dict(E=2) if name.startswith("grouped") else {})
    for target, groups in (("sm80", False), ("sm90", True), ("sm100", True), ("sm120", False), ("gfx942", False)):
        with pretend(target) as device, pretend_triton(version):
            pairs = (("none", "int4", -1, 16), ("int8", "mxint8", 48, -1))
            args = [outline(op, case | dict(pair=pair, a_dtype=torch.float16)) for pair in pairs]
            packed, bytes_ = ([c for c in legal_candidates(op, a, device) if c["BLOCK_K"] == 16] for a in args)
        tall = [c for c in packed if c["BLOCK_N" if c["SWAP"] else "BLOCK_M"] >= 64]
        assert any(not c["SWAP"] and c["BLOCK_M"] < 64 for c in bytes_)
        assert bool(packed) == (whole or groups or target == "gfx942")
        assert (tall == packed) == ((groups and not whole) or not packed)


def test_where_no_step_is_whole():
    case = dict(M=16, N=256, K=192, pair=("none", "int4", -1, 16))
    with pretend("sm89"), pretend_triton("3.6.0"), pytest.raises(NotImplementedError, match="no config of it is legal"):
        OPS["mm_packed"].config_for(**outline(OPS["mm_packed"], case))
