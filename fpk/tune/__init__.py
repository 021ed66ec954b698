"""Tuning: candidates, compilation, timing, search, the trial store.

`fpk.tune(op, cases=...)` and `fpk.tune.tune(...)` are one: the package is callable. Importing it imports none of its
parts, so that workers of the store start fast.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpk.tune.run import tune

__all__ = ["tune"]


class _Callable(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("fpk.tune.run").tune(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable


def __getattr__(name: str) -> Any:
    if name == "tune":
        return importlib.import_module("fpk.tune.run").tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
