"""README.md says what is true now: its tables come from OPS and committed results, its code runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_generated_parts_are_current():
    done = subprocess.run([sys.executable, ROOT / "tests" / "bench" / "readme.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run python tests/bench/readme.py"


BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run(number):
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", BLOCKS[number]], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 3
