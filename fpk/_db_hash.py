"""A hash of what a kernel computes, blind to comments, docstrings, formatting and line numbers."""

import ast
import builtins
import dis
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fpk._parsing import parse


def source_hash(kernels: Iterable[Any], by_name: bool = False) -> str:
    """12 hex digits over the syntax of jitted functions, of the jitted functions they call, and captured constants.

    by_name: of functions with one name, take the first only, as the hashes did that old runs recorded.
    """
    seen: dict[Any, list[str]] = {}
    for kernel in kernels:
        _visit(_function(kernel), seen, by_name)
    text = "\n".join(sorted(line for lines in seen.values() for line in lines))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def jitted_by(function: Callable[..., Any]) -> list[Any]:
    """The jitted functions that a launcher names, for the hashes of old runs."""
    tree = parse(textwrap.dedent(inspect.getsource(function)))
    return [value for _, value in _captured(function, tree) if isinstance(getattr(value, "fn", None), Callable)]  # type: ignore[arg-type]


def launched_by(function: Callable[..., Any]) -> list[Any]:
    """The jitted functions that a launcher or a plain function of its package that it calls may launch."""
    seen: set[Any] = set()
    found: list[Any] = []
    waiting = [function]
    while waiting:
        for value in _globals_of(waiting.pop()):
            jitted = isinstance(getattr(value, "fn", None), Callable)  # type: ignore[arg-type]
            target: Any = _function(value) if jitted else inspect.unwrap(value) if callable(value) else None
            if isinstance(target, FunctionType) and target not in seen and _ours(target, function):
                seen.add(target)
                found += [value] if jitted else []
                waiting += [] if jitted else [target]
    return found


def _globals_of(function: Any) -> Iterator[Any]:
    """Globals and closure variables that a plain function's body reads, `module.attribute` resolved."""
    codes = [function.__code__]
    cells = zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=False)
    scope = {"LOAD_GLOBAL": function.__globals__, "LOAD_DEREF": dict(cells)}
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
        owner: Any = None
        for step in dis.get_instructions(code):
            value = getattr(owner, str(step.argval), None) if isinstance(owner, ModuleType) else None
            if step.opname in scope:
                value = scope[step.opname].get(step.argval)
            owner = value
            if value is not None and not isinstance(value, ModuleType):
                yield value


def _function(kernel: Any) -> Callable[..., Any]:
    """The function inside a jitted one, whatever lies around it (an op's Kernel, heuristics)."""
    while isinstance(getattr(kernel, "fn", None), Callable):  # type: ignore[arg-type]
        kernel = kernel.fn
    return kernel


def _visit(fn: Callable[..., Any], seen: dict[Any, list[str]], by_name: bool) -> None:
    name = fn.__qualname__
    if (key := name if by_name else fn) in seen:
        return
    tree = parse(textwrap.dedent(inspect.getsource(fn))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef) and body and _is_docstring(body[0]):
            node.body = body[1:] or [ast.Pass()]
    seen[key] = lines = [f"{name} {_spell(tree)}"]
    constants: dict[str, Any] = {}
    of_triton = fn.__globals__.get("OF_TRITON", ())
    for path, value in _captured(fn, tree):
        if path in of_triton:  # says which triton this is, which a run tells apart in a column of its own
            continue
        if isinstance(getattr(value, "fn", None), Callable):  # type: ignore[arg-type]
            if _ours(_function(value), fn):
                _visit(_function(value), seen, by_name)
        elif isinstance(value, (bool, int, float, str, tuple, type(None))):
            constants[path] = value
        elif type(value).__name__ == "constexpr":
            constants[path] = value.value
    lines += [f"{name}:{path} {value!r}" for path, value in constants.items()]


def _spell(node: Any) -> str:
    """A tree as text, without positions and without empty fields, which come and go with versions of Python."""
    if isinstance(node, list):
        return "[" + ", ".join(map(_spell, node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name in node._fields if (value := getattr(node, name, None)) not in (None, [])]
    return f"{type(node).__name__}({', '.join(f'{name}={_spell(value)}' for name, value in fields)})"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _ours(callee: Any, caller: Any) -> bool:
    """Same top-level package: triton's own functions are covered by its version."""
    return callee.__module__.split(".")[0] == caller.__module__.split(".")[0]


def _captured(fn: Callable[..., Any], tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """Globals and closure variables that the function's text names, `module.attribute` resolved."""
    scope = dict(fn.__globals__)
    scope.update(zip(fn.__code__.co_freevars, (c.cell_contents for c in fn.__closure__ or ()), strict=False))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope and not hasattr(builtins, node.id):
            yield node.id, scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            if isinstance(owner, ModuleType) and owner.__name__.split(".")[0] not in ("triton", "torch"):
                yield f"{node.value.id}.{node.attr}", getattr(owner, node.attr, None)
