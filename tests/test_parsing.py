"""Parsing while other threads parse: on Python 3.11 a tree may be thrown away for a count that is not its own."""

import ast
import gc
import sys
import threading
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

import fpk
from fpk import _parsing, db
from fpk.op import OPS

MISCOUNT = "AST constructor recursion depth mismatch (before=36, after=27)"


@pytest.fixture
def counting(monkeypatch):
    """As on Python 3.11, whichever Python this is."""
    monkeypatch.setattr(_parsing, "COUNTS_FOR_ALL_THREADS", True)


@pytest.fixture
def switching():
    """Threads take turns as often as they can, and the collector runs at every chance."""
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(1)
    yield
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def _failing(times: int, message: str):
    """A parser that fails so many times, and the list of its calls."""
    calls = []

    def parse(source: str) -> ast.AST:
        calls.append(source)
        if len(calls) <= times:
            raise SystemError(message)
        return ast.parse(source)

    return parse, calls


def test_a_miscount_is_asked_again(counting):
    parse, calls = _failing(2, MISCOUNT)
    assert ast.unparse(_parsing.steady(parse)("x = 1")) == "x = 1"
    assert calls == ["x = 1"] * 3


def test_other_errors_come_through(counting):
    parse, calls = _failing(1, "error return without exception set")
    with pytest.raises(SystemError, match="without exception"):
        _parsing.steady(parse)("x = 1")
    assert len(calls) == 1
    with pytest.raises(SyntaxError):
        _parsing.steady(ast.parse)("x =")


def test_a_miscount_that_stays_is_raised(counting):
    parse, calls = _failing(10**6, MISCOUNT)
    with pytest.raises(SystemError, match="mismatch"):
        _parsing.steady(parse)("x = 1")
    assert len(calls) == _parsing.TRIES


class _Cycle:
    """Garbage whose end runs code: where another thread may start."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        sum(range(50))


def _in_threads(work) -> list[BaseException]:
    """What four threads raise that call `work` side by side, 25 times each."""
    errors: list[BaseException] = []

    def repeat() -> None:
        for _ in range(25):
            _Cycle()
            try:
                work()
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=repeat) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_threads_hash_kernels_side_by_side(switching):
    """A sweep does so with a thread for each GPU."""
    kernels = [k.fn for k in OPS["quantize_fp8_token"].kernels.values()]
    found = []
    assert not _in_threads(lambda: found.append(db.source_hash(kernels)))
    assert len(set(found)) == 1


def test_threads_parse_a_kernel_side_by_side(switching):
    """A serving process does so whose threads launch a kernel for the first time."""
    assert not _in_threads(JITFunction(long_enough).parse)


def long_enough(x_ptr, y_ptr, N, BLOCK: int):
    pid = N // BLOCK
    for i in range(BLOCK):
        y_ptr[pid * BLOCK + i] = (x_ptr[pid * BLOCK + i] + i) * (x_ptr[i] - N) if i < N else x_ptr[0] + (N - 1) * 2
        y_ptr[pid + i] = [a + b for a in (x_ptr, y_ptr) for b in (i, N)] if i > 2 * (N + BLOCK) else (i, N, (BLOCK, i))


def test_nothing_else_in_the_package_parses():
    package = Path(fpk.__file__).parent
    calls = [
        f"{path.relative_to(package)}:{node.lineno}"
        for path in package.rglob("*.py")
        if path.name != "_parsing.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "ast.parse"
    ]
    assert not calls
