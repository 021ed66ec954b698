"""The faster interpreter does what the plain one does, bit for bit, and leaves triton.language as it was."""

import contextlib

import pytest
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

if torch.cuda.is_available():
    pytest.skip("where kernels are compiled nobody interprets", allow_module_level=True)

import interpreter_speed
from op_laws import make, middle, results

from fpk.check import assert_close
from fpk.op import OPS

OWNERS = (tl, core, core.tensor, tl.math, core.dtype, core.tensor_descriptor_base)


def language():
    return [dict(vars(owner)) for owner in OWNERS]


@contextlib.contextmanager
def plain():
    """The interpreter as it comes, which does not take back all that it patches in the language."""
    fast = [getattr(owner, name) for owner, name in interpreter_speed.REPLACED]
    before = language()
    for (owner, name), original in zip(interpreter_speed.REPLACED, interpreter_speed.ORIGINALS, strict=True):
        setattr(owner, name, original)
    try:
        yield
    finally:
        for owner, names in zip(OWNERS, before, strict=True):
            for name, value in names.items():
                if vars(owner).get(name) is not value:
                    setattr(owner, name, value)
        for (owner, name), value in zip(interpreter_speed.REPLACED, fast, strict=True):
            setattr(owner, name, value)


# with functions that call functions, tl.sum and tl.max, products, descriptors, atomics and more than one kernel
@pytest.mark.parametrize("name", ["quantize_fp8_group", "scaled_mm_group", "grouped_mm", "sort_by_expert", "amax"])
def test_same_bits(name):
    op = OPS[name]
    with plain():
        expected = results(op, op, make(op, middle(op)))
    assert_close(results(op, op, make(op, middle(op))), expected, 0.0)


def test_a_launch_leaves_the_language_as_it_was():
    before, op = language(), OPS["scaled_mm_group"]
    for _ in range(2):
        op(**make(op, middle(op)))
        assert language() == before
    assert not interpreter_speed._launches


def test_so_does_one_that_fails(monkeypatch):
    before, op = language(), OPS["scaled_mm_group"]
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_store", lambda *args: 1 / 0)
    with pytest.raises(interpreter.InterpreterError, match="ZeroDivisionError"):
        op(**make(op, middle(op)))
    assert language() == before and not interpreter_speed._launches


@pytest.mark.parametrize("element", [tl.float32, tl.float8e4nv, tl.int1, tl.pointer_type(tl.bfloat16)])
def test_types_are_the_same(element):
    shapes = ([4], [4, 2], [8], [core.constexpr(4), 2], core.tuple([4, 2]), core.tuple([core.constexpr(16)]))
    for shape in (*shapes, *shapes):  # the second time they are known
        made = core.block_type(element, shape)
        handle = object()
        tensor = core.tensor(handle, made)
        with plain():
            known = core.block_type(element, shape)
            plainly = core.tensor(handle, known)
        assert made == known and (made.name, made.numel) == (known.name, known.numel)
        assert made.element_ty is element and list(made.shape) == list(known.shape)
        assert vars(tensor).keys() == vars(plainly).keys()
        assert tensor.handle is handle and tensor.type is made and tensor.dtype is element
        assert [s.value for s in tensor.shape] == [s.value for s in plainly.shape]
        assert all(type(s) is core.constexpr for s in tensor.shape) and tensor.numel.value == plainly.numel.value
    assert list(core.tensor(handle, element).shape) == []
    for wrong in ([], [3], [2**21], (8,)):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError, AssertionError)):
                core.block_type(element, wrong)


def test_numpy_types_are_the_same():
    scalars = [value for value in vars(tl).values() if type(value) is core.dtype and value is not tl.void]
    assert len(scalars) >= 15
    for dtype in (*scalars, tl.pointer_type(tl.int8), core.block_type(tl.int16, [4]), *scalars):
        with plain():
            try:
                expected = interpreter._get_np_dtype(dtype)
            except KeyError:
                expected = None
        if expected is None:
            with pytest.raises(KeyError):
                interpreter._get_np_dtype(dtype)
        else:
            assert interpreter._get_np_dtype(dtype) == expected
