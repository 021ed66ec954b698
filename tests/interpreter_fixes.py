"""Triton's interpreter, made to give the numbers a GPU gives.

The interpreter stores bf16 and fp8 as raw integers and handles some of their operations as if they were numbers. Each
function below repairs one such fault of triton 3.6 to 3.9, in place; importing this module applies all of them.
`test_interpreter_fixes.py` shows what goes wrong without each, by naming one in FPK_WITHOUT_INTERPRETER_FIX.

Not repaired: fnuz types and `tl.dot_scaled` before triton 3.8; reductions of bf16 tensors (kernels reduce in fp32).
"""

import os

import ml_dtypes
import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

NARROW = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
SATURATING = {tl.float8e4nv: 448.0, tl.float8e4b8: 240.0}  # as the conversion instructions do


def _is_narrow(value: object) -> bool:
    return isinstance(value, TensorHandle) and value.dtype.scalar in NARROW


def _widen(value: object) -> object:
    """A bf16 or fp8 handle as fp32, exactly; anything else as it is."""
    if not _is_narrow(value):
        return value
    return TensorHandle(value.data.view(NARROW[value.dtype.scalar]).astype(np.float32), tl.float32)


def _narrow(data: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """Numbers rounded to nearest even into bf16 or fp8, stored as the interpreter stores them."""
    with np.errstate(all="ignore"):
        data = data.astype(np.float32)
        if dtype in SATURATING:
            data = np.where(np.isnan(data), data, np.clip(data, -SATURATING[dtype], SATURATING[dtype]))
        rounded = data.astype(NARROW[dtype])
    return TensorHandle(rounded.view(np.uint16 if dtype == tl.bfloat16 else np.uint8), dtype)


def _convert(source: TensorHandle, dtype: tl.dtype) -> TensorHandle:
    wide = _widen(source).data
    if dtype in NARROW:
        return _narrow(wide, dtype)
    return TensorHandle(wide.astype(interpreter._get_np_dtype(dtype)), dtype)


def fp8_casts() -> None:
    """Casts to and from fp8 round ties, carries and subnormals wrongly, never saturate, and read NaN as a number."""
    original = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self, source, dtype, rounding_mode):
        narrow = source.dtype.scalar in NARROW or dtype.scalar in NARROW
        if narrow and rounding_mode != ir.ROUNDING_MODE.RTZ:
            return _convert(source, dtype.scalar)
        return original(self, source, dtype, rounding_mode)

    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp


def bf16_casts() -> None:
    """Casts from fp32 to bf16 truncate; casts between bf16 and integers take bit patterns for values."""
    original = InterpreterBuilder.cast_impl

    def cast_impl(self, source, dtype):
        if source.dtype.scalar in NARROW or dtype.scalar in NARROW:
            return _convert(source, dtype.scalar)
        return original(self, source, dtype)

    InterpreterBuilder.cast_impl = cast_impl  # the create_* casts of the builder call it


def bf16_arithmetic() -> None:
    """Arithmetic and comparisons of bf16 tensors work on bit patterns."""

    def on_values(original):
        def operation(self, *args):
            narrow = next((a.dtype.scalar for a in args if _is_narrow(a)), None)
            if narrow is None:
                return original(self, *args)
            out = original(self, *map(_widen, args))
            return out if out.data.dtype == np.bool_ else _narrow(out.data, narrow)

        return operation

    for name in ("binary_op", "unary_op", "create_clampf", "create_fma"):
        setattr(InterpreterBuilder, name, on_values(getattr(InterpreterBuilder, name)))


def narrow_dots() -> None:
    """`tl.dot` multiplies bf16 operands as bit patterns, and fp8 operands after a conversion that loses NaN and Inf."""
    original = InterpreterBuilder.create_dot

    def create_dot(self, a, b, acc, precision, imprecise):
        return original(self, _widen(a), _widen(b), acc, precision, imprecise)

    InterpreterBuilder.create_dot = create_dot


def masked_loads() -> None:
    """A masked load without `other` reads 0; a GPU leaves whatever was in the register. Here: all ones, NaN in floats.

    Loads of one element are left alone: `other=0` is falsy for a scalar and does not arrive here.
    """
    original = InterpreterBuilder.create_masked_load

    def create_masked_load(self, pointers, mask, other, *rest, **options):  # descriptor loads pass options by name
        out = original(self, pointers, mask, other, *rest, **options)
        if other is not None or out.data.size == 1:
            return out
        raw = np.ascontiguousarray(out.data).view(np.uint8).reshape(*out.data.shape, -1).copy()
        raw[~np.broadcast_to(mask.data, out.data.shape)] = 0xFF
        return TensorHandle(raw.view(out.data.dtype).reshape(out.data.shape), out.dtype)

    InterpreterBuilder.create_masked_load = create_masked_load


FIXES = {f.__name__: f for f in (fp8_casts, bf16_casts, bf16_arithmetic, narrow_dots, masked_loads)}

for _name, _fix in FIXES.items():
    if _name != os.environ.get("FPK_WITHOUT_INTERPRETER_FIX"):
        _fix()

interpreter.fpk_fixes = FIXES  # fpk.kernels warns where this is missing
