"""A few of the wrong kernels of results/mutants.csv are caught again; `make mutants` judges them all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SAMPLE = 8

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="mutants live in the interpreter")


def test_mutants_of_the_table_are_still_caught():
    """In a process of its own: what forks must not be a pytest worker with threads."""
    environment = os.environ | dict(TRITON_INTERPRET="1", PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    command = [sys.executable, "-W", "ignore", "-m", "trust.mutate", "--recheck", str(SAMPLE)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{SAMPLE} of {SAMPLE} caught" in done.stdout
