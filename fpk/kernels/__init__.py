"""Importing this package declares every op: each module below without a leading underscore holds one."""

import importlib
import pkgutil
import warnings

from triton.runtime.jit import JITFunction

from fpk._parsing import steady
from fpk.device import INTERPRETING

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if not _module.ispkg and not _module.name.rsplit(".", 1)[-1].startswith("_"):
        importlib.import_module(_module.name)

# kernels that several threads launch first are parsed by all of them
JITFunction.parse = steady(JITFunction.parse)

if INTERPRETING:
    from triton.runtime import interpreter

    interpreter.FunctionRewriter._transform_ast = steady(interpreter.FunctionRewriter._transform_ast)

    if not hasattr(interpreter, "fpk_fixes"):
        warnings.warn(
            "TRITON_INTERPRET=1: Triton's interpreter computes wrong numbers with bf16 and FP8 unless "
            "tests/interpreter_fixes.py is imported before fpk's kernels",
            stacklevel=2,
        )
