"""JIT variants are bounded: as M changes, a config compiles at most two variants of each of its kernels."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shared_run import once

from fpk.op import OPS

HERE = Path(__file__).parent


@functools.cache
def counted(*arguments: str) -> dict[str, dict]:
    return once("-".join(("variants", *arguments)).replace("--", ""), lambda: _counted(*arguments))


def _counted(*arguments: str) -> dict[str, dict]:
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", HERE / "variants.py", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", OPS)
def test_at_most_two_variants(name):
    told = counted()[name]
    assert "error" not in told, told["error"]
    if not told["variants"]:
        pytest.skip("no M")
    lines = "\n".join(told["which"])
    assert told["variants"] <= 2, f"{told['kernel']} with {told['config']} {told['option']}:\n{lines}"


def test_a_specialised_row_count_is_seen():
    """tests/bad_kernels.py has an op that forgets do_not_specialize."""
    told = counted("--extra", "bad_kernels")
    assert told["bad_variants"]["variants"] == 3  # M is 1, a multiple of 16, or neither
