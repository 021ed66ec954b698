"""Triton's interpreter, made faster: the same work, done once instead of again and again.

Importing this module applies it all; no function below touches a number. For triton 3.6 to 3.9.

The interpreter patches `triton.language` anew in every call of one jitted function by another, of which a launch has
thousands, and does not take back what it patched there. Here a launch patches each module once, and takes all of it
back. Types of blocks and shapes of tensors are spelled and checked once for each that there is.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor

TYPES = 4096  # that are remembered: pointers have types of their own in every launch


class Launch:
    """What the running launch has patched, and the modules of the language that this covers."""

    def __init__(self) -> None:
        self.covered: frozenset[int] = frozenset()
        self.done: list[list[Change]] = []

    def cover(self, fn: Any, patch: Callable[[Any], Any]) -> None:
        modules = _modules(fn)
        if modules <= self.covered:
            return
        known = self.covered, modules
        if known in _changes:
            for owner, name, _, value in _changes[known]:
                setattr(owner, name, value)
        else:
            changes = patch(fn)._changes
            _changes[known] = [(owner, name, old, getattr(owner, name)) for owner, name, old in changes]
        self.done.append(_changes[known])
        self.covered |= modules

    def restore(self) -> None:
        for changes in reversed(self.done):
            for owner, name, old, _ in reversed(changes):
                if old is interpreter._MISSING:
                    if hasattr(owner, name):
                        delattr(owner, name)
                else:
                    setattr(owner, name, old)
        _launches.remove(self)


Change = tuple[Any, str, Any, Any]  # owner, name, what it was before any launch, what it is in one

_launches: list[Launch] = []
_changes: dict[tuple[frozenset[int], frozenset[int]], list[Change]] = {}
_modules_of: dict[int, tuple[dict[str, Any], frozenset[int]]] = {}  # by the globals of a function, which stay alive


def _modules(fn: Any) -> frozenset[int]:
    """Those of triton's language modules that a function sees, by their ids."""
    names = fn.__globals__
    if id(names) not in _modules_of:
        _modules_of[id(names)] = names, frozenset(id(m) for m in (tl, core) if any(v is m for v in names.values()))
    return _modules_of[id(names)][1]


def patch_once() -> None:
    original, call = interpreter._patch_lang, GridExecutor.__call__
    beginning = [False]

    def patch_lang(fn):
        if beginning[0]:  # by the launch itself, which will take it back
            beginning[0] = False
            _launches.append(Launch())
        if not _launches:
            return original(fn)
        _launches[-1].cover(fn, original)
        return _launches[-1]

    def begin(self, *args, **kwargs):
        beginning[0] = True
        try:
            return call(self, *args, **kwargs)
        finally:
            beginning[0] = False

    interpreter._patch_lang, GridExecutor.__call__ = patch_lang, begin


def plain_builtins() -> None:
    """What a patched function of the language does in each call: one dictionary less."""

    def patch_attr(obj, name, member, builder, scope):
        semantic = getattr(interpreter, "interpreter_semantic", None) or TritonSemantic(builder)  # 3.6 has no global

        def with_semantic(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, with_semantic)

    interpreter._patch_attr = patch_attr


def types_once() -> None:
    block_init, tensor_init, unwrap = core.block_type.__init__, core.tensor.__init__, core._unwrap_if_constexpr
    blocks: dict[Any, tuple[Any, dict[str, Any]]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}

    def init_block(self, element_ty, shape):
        if shape.__class__ is not list and shape.__class__ is not core.tuple:
            return block_init(self, element_ty, shape)
        # an id stands for a type as long as the entry keeps the type
        key = (id(element_ty), *[s if s.__class__ is int else unwrap(s) for s in _items(shape)])
        known = blocks.get(key)
        if known is None:
            block_init(self, element_ty, shape)
            if len(blocks) > TYPES:
                blocks.clear()
            blocks[key] = element_ty, dict(self.__dict__)
        else:
            self.__dict__.update(known[1])

    def init_tensor(self, handle, type):
        sizes = tuple(_items(type.shape)) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            tensor_init(self, handle, type)
            shapes[sizes] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor


def _items(shape: Any) -> Any:
    return shape.values if shape.__class__ is core.tuple else core._unwrap_if_constexpr(shape)


def dtypes_once() -> None:
    """numpy's type of a type of triton: asked many times for each operation, and each time a table was made."""
    original = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def get_np_dtype(tt_dtype):
        if tt_dtype.__class__ is not core.dtype:  # pointers and blocks
            return original(tt_dtype)
        found = known.get(tt_dtype.name)
        if found is None:
            found = known[tt_dtype.name] = original(tt_dtype)
        return found

    interpreter._get_np_dtype = get_np_dtype


REPLACED = (
    (interpreter, "_patch_lang"), (interpreter, "_patch_attr"), (interpreter, "_get_np_dtype"),
    (GridExecutor, "__call__"), (core.block_type, "__init__"), (core.tensor, "__init__"),
)  # fmt: skip
ORIGINALS = tuple(getattr(owner, name) for owner, name in REPLACED)

for _speedup in (patch_once, plain_builtins, types_once, dtypes_once):
    _speedup()
