"""Device choice, interpreter, poisoned memory, hypothesis profiles, and the count of kernel launches."""

import gc
import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
elif os.environ.get("TRITON_INTERPRET"):
    raise RuntimeError("the laws run compiled where there is a GPU: unset TRITON_INTERPRET")

import pytest
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    import interpreter_fixes  # noqa: F401
    import interpreter_speed  # noqa: F401

import guarded

if not torch.cuda.is_available():
    from triton.runtime.interpreter import InterpreterBuilder

    guarded.watch(InterpreterBuilder)

import fpk.kernels

ON_GPU = torch.cuda.is_available()

settings.register_profile(
    "fast", max_examples=15, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile(
    "big", parent=settings.get_profile("fast"), max_examples=int(os.environ.get("FPK_EXAMPLES", "150"))
)
settings.load_profile("big" if ON_GPU else os.environ.get("HYPOTHESIS_PROFILE", "fast"))

torch.set_num_threads(1)  # pytest-xdist brings the parallelism


def pytest_collection_finish():
    """The collector does not look at what was imported again and again: that took a tenth of the time."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()  # for what modules clear at the end


_LAUNCHES = [0]


def _count_launches() -> None:
    if ON_GPU:
        from triton.runtime.jit import JITFunction as launcher

        name = "run"
    else:
        from triton.runtime.interpreter import GridExecutor as launcher

        name = "__call__"
    original = getattr(launcher, name)

    def counted(self, *args, **kwargs):
        if not kwargs.get("warmup"):
            _LAUNCHES[0] += 1
        return original(self, *args, **kwargs)

    setattr(launcher, name, counted)


_count_launches()


@pytest.fixture
def launches():
    """Call it for the number of kernels launched since the test began."""
    start = _LAUNCHES[0]
    return lambda: _LAUNCHES[0] - start


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """`torch.empty` and its like give poisoned memory, and nobody may write behind what they gave."""
    guarded.install(monkeypatch)
    yield
    guarded.check()


def pytest_terminal_summary(terminalreporter):
    """Minutes of every test file, longest first."""
    seconds: dict[str, float] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration"):
                file = report.nodeid.split("::")[0]
                seconds[file] = seconds.get(file, 0.0) + report.duration
    terminalreporter.section("minutes by file")
    for file, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{spent / 60:6.1f}  {file}")


@pytest.fixture(scope="session")
def device():
    return "cuda" if ON_GPU else "cpu"


@pytest.fixture
def on_references(monkeypatch):
    """Models run on the ops' references, without gradients, on the CPU: the kernels have their own laws."""
    for op in fpk.OPS.values():
        op._memo.clear()
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    with torch.no_grad(), torch.device("cpu"):
        yield
    for op in fpk.OPS.values():
        op._memo.clear()
