"""Parsing Python while other threads parse too.

On Python 3.11 `ast.parse` counts its depth in one place for all threads, and the garbage collector may let another
thread run in the middle: the count is then off, and a tree that was built in full is thrown away with a SystemError
(https://github.com/python/cpython/issues/106905). What was thrown away can be asked for again.
"""

import ast
import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

COUNTS_FOR_ALL_THREADS = sys.version_info[:2] == (3, 11)
TRIES = 100
"""Another thread spoils few parses in a row: threads that do nothing else spoil one in thousands."""


def steady(parse: Callable[P, T]) -> Callable[P, T]:
    """A function without side effects that parses, called again where Python miscounted."""
    if not COUNTS_FOR_ALL_THREADS:
        return parse

    @functools.wraps(parse)
    def again(*args: P.args, **kwargs: P.kwargs) -> T:
        for _ in range(TRIES - 1):
            try:
                return parse(*args, **kwargs)
            except SystemError as error:
                if "recursion depth mismatch" not in str(error):
                    raise
        return parse(*args, **kwargs)

    return again


parse = steady(ast.parse)
