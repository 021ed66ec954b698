"""A few cases by chance of every op; FPK_FUZZ_SECONDS gives each op that much time (see trust/fuzz.py)."""

import os

import pytest

from fpk.op import OPS
from trust.fuzz import run

SECONDS = float(os.environ.get("FPK_FUZZ_SECONDS", "0"))
LEAST = 6  # of three, all may lack a row


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_op_equals_reference_on_arguments_by_chance(op, launches):
    counts = run(op, SECONDS, LEAST)
    assert counts["refused"] < sum(counts.values()), "no case ran at all"
    assert launches() > 0
