"""Expensive results that the workers of one test run share: one computes, the others read."""

import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

ALONE = uuid.uuid4().hex  # a number of a process comes again


def once(name: str, make: Callable[[], Any]) -> Any:
    """make()'s value, which JSON must hold, computed once a test run. Workers that come meanwhile wait for it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", ALONE)
    path = Path(tempfile.gettempdir()) / f"fpk-tests-{run}-{name}.json"
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            written = path.with_suffix(".part")
            written.write_text(json.dumps(make()))
            written.replace(path)
    return json.loads(path.read_text())
