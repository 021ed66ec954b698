"""Errors that say what, expected, got; and the comparison that laws, tuner and sweeps share."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fpk.device import of

FLOAT_INPUTS = (torch.float32, torch.bfloat16, torch.float16)
GRID_Y = 65_535
"""Programs along the second axis of a grid on NVIDIA GPUs, at most."""


def _spell(shape: Iterable[int]) -> str:
    values = tuple(int(n) for n in shape)
    return "(" + ", ".join(map(str, values)) + ("," if len(values) == 1 else "") + ")"


def expect_shape(what: str, tensor: Tensor, *allowed: tuple[int, ...]) -> None:
    """Raise ValueError unless `tensor.shape` is one of `allowed`."""
    if not any(len(tensor.shape) == len(a) and tuple(tensor.shape) == a for a in allowed):
        raise ValueError(f"{what}: expected {' or '.join(map(_spell, allowed))}, got {_spell(tensor.shape)}")


def expect_rank(what: str, tensor: Tensor, *allowed: int) -> None:
    """Raise ValueError for another number of dimensions; 2 or 3 is a matrix or a stack, along a grid's second axis."""
    if tensor.dim() not in allowed:
        ranks = " or ".join(map(str, allowed))
        raise ValueError(f"{what}: expected {ranks} dimensions, got shape {_spell(tensor.shape)}")
    if allowed == (2, 3) and tensor.dim() == 3 and tensor.shape[0] > GRID_Y:
        raise ValueError(f"{what}: expected at most {GRID_Y} matrices, got shape {_spell(tensor.shape)}")


def expect_dtype(what: str, tensor: Tensor, *allowed: torch.dtype) -> None:
    if tensor.dtype not in allowed:
        raise ValueError(f"{what}: expected {' or '.join(map(_dtype, allowed))}, got {_dtype(tensor.dtype)}")


def expect_bias(what: str, bias: Tensor | None, n: int) -> None:
    """A bias of a product is None or (N,) floats."""
    if bias is not None:
        expect_shape(what, bias, (n,))
        expect_dtype(what, bias, *FLOAT_INPUTS)


def expect_one_of(what: str, got: object, allowed: Iterable[object]) -> None:
    values = list(allowed)
    if got not in values:
        raise ValueError(f"{what}: expected one of {', '.join(map(_dtype, values))}, got {_dtype(got)}")


def expect_granularity(what: str, **elements: int) -> None:
    """Elements that share a scale, by argument: a positive number along each dimension, or -1 for all of them."""
    for name, value in elements.items():
        if value != -1 and value < 1:
            raise ValueError(f"{what}.{name}: expected a positive number or -1 (the full extent), got {value}")


def expect_inner_contiguous(what: str, tensor: Tensor) -> None:
    """Rows may lie anywhere, but the elements of a row must be neighbours."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise ValueError(
            f"{what}: expected stride 1 along the last dimension, got strides {_spell(tensor.stride())} "
            f"(pass a contiguous tensor)"
        )


def expect_near(what: str, tensor: Tensor) -> None:
    """Rows may lie anywhere, but kernels step along a row in 32 bits."""
    if tensor.dim() and (tensor.shape[-1] - 1) * tensor.stride(-1) >= 2**31:
        raise ValueError(
            f"{what}: expected rows that span less than 2^31 elements, got shape {_spell(tensor.shape)} with strides "
            f"{_spell(tensor.stride())}"
        )


def expect_own_places(what: str, tensor: Tensor) -> None:
    """What is written in place must not be expanded: its elements would overwrite one another."""
    if tensor.numel() > 1 and any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(
            f"{what}: expected a place for every element, got strides {_spell(tensor.stride())} for shape "
            f"{_spell(tensor.shape)}"
        )


def expect_slots(what: str, tensor: Tensor, slots: int, most: int = 2**31 - 1) -> None:
    """Kernels number the rows of experts in int32; some have a program for each along a grid's second axis."""
    if slots > most:
        bound = "2^31 - 1" if most == 2**31 - 1 else most
        raise ValueError(f"{what}: expected at most {bound} slots, got {slots} by shape {_spell(tensor.shape)}")


def expect_not_empty(what: str, tensor: Tensor, dim: int) -> None:
    if tensor.shape[dim] == 0:
        raise ValueError(f"{what}: expected at least one element along dimension {dim}, got {_spell(tensor.shape)}")


def expect_multiple(what: str, tensor: Tensor, multiple: int) -> None:
    """The last dimension must hold whole groups of `multiple` elements."""
    if tensor.shape[-1] % multiple:
        raise ValueError(f"{what}: expected a multiple of {multiple} columns, got shape {_spell(tensor.shape)}")


def expect_same_device(what: str, tensors: dict[str, Tensor]) -> None:
    names = list(tensors)
    for name in names[1:]:
        if tensors[name].device != tensors[names[0]].device:
            raise ValueError(
                f"{what}.{name}: expected {tensors[names[0]].device} (as {names[0]}), got {tensors[name].device}"
            )


def expect_fp8_units(what: str, device: torch.device) -> None:
    """Raise NotImplementedError on a GPU whose matrix unit has no FP8."""
    gpu = of(device)
    if not gpu.has_fp8:
        raise NotImplementedError(
            f"{what}: needs a GPU with FP8 matrix units (sm89 or newer, gfx942), this is {gpu.arch}"
        )


def has_fp8_units(device: torch.device) -> bool:
    """Does the device's matrix unit multiply FP8? The interpreter's does."""
    return of(device).has_fp8


def fp8_dtype(device: torch.device) -> torch.dtype:
    """The e4m3 type of a device: fnuz on gfx942, fn everywhere else."""
    return torch.float8_e4m3fnuz if of(device).fnuz else torch.float8_e4m3fn


# what a device can do is a constant of a traced graph: torch.compile does not look it up
for _asks in (has_fp8_units, fp8_dtype):
    _asks._dynamo_marked_constant = True  # type: ignore[union-attr, attr-defined]


def expect_fp8_matmul(what: str, operand: Tensor) -> None:
    """Raise NotImplementedError if this device cannot multiply operands of this FP8 type; other types pass."""
    if operand.dtype.itemsize != 1 or not operand.dtype.is_floating_point:
        return
    expect_fp8_units(what, operand.device)
    gpu = of(operand.device)
    if "fnuz" in str(operand.dtype) and not gpu.fnuz and gpu.arch != "cpu":
        raise NotImplementedError(f"{what}: {_dtype(operand.dtype)} products need gfx942, this is {gpu.arch}")


def expect_valid_scale(what: str, scale: Tensor) -> None:
    """Raise ValueError unless every scale is finite and positive. Reads the values: load and quantize time only."""
    values = scale.detach().float()
    if values.numel() and not bool((values.isfinite() & (values > 0)).all()):
        bad = values[~(values.isfinite() & (values > 0))].flatten()[0].item()
        raise ValueError(f"{what}: expected finite positive scales, got {bad}")


def _dtype(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers: FP8 tensors on a CPU lack `equal`, and NaN differs from itself."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(integers[tensor.element_size()])


def rel_error(out: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error. Elements that are not finite must agree in kind, or the error is infinite."""
    a, b = out.double(), expected.double()
    finite = a.isfinite() & b.isfinite()
    odd = ~finite
    if bool((odd & ~((a == b) | (a.isnan() & b.isnan()))).any()):
        return float("inf")
    a, b = torch.where(finite, a, 0.0), torch.where(finite, b, 0.0)
    norm = b.norm()
    return float((a - b).norm() / norm) if norm > 0 else float((a - b).norm())


def assert_close(out: object, expected: object, tol: float, what: str = "out") -> None:
    """Shape, dtype and strides equal; values bit-equal if `tol` is 0, else `rel_error` at most `tol`.

    Integers are bit-equal in any case, except int8, which holds quantized values, and uint8, which holds codes or scale
    bytes: a value whose last place differs may fall to the other side of a tie, in one byte or a share of tol^2.
    """
    if isinstance(out, (tuple, list)):
        assert isinstance(expected, (tuple, list)) and len(out) == len(expected), f"{what}: number of outputs differs"
        for i, (o, e) in enumerate(zip(out, expected, strict=True)):
            assert_close(o, e, tol, f"{what}[{i}]")
        return
    assert isinstance(out, Tensor) and isinstance(expected, Tensor)
    assert out.shape == expected.shape, f"{what}: shape {_spell(out.shape)}, expected {_spell(expected.shape)}"
    assert out.dtype == expected.dtype, f"{what}: dtype {out.dtype}, expected {expected.dtype}"
    if out.numel():
        strides = [(s, t) for s, t, n in zip(out.stride(), expected.stride(), out.shape, strict=True) if n > 1]
        assert all(s == t for s, t in strides), f"{what}: strides {out.stride()}, expected {expected.stride()}"
    if tol == 0 or not (out.dtype.is_floating_point or out.dtype is torch.int8):
        wrong = bits(out) != bits(expected)
        if out.dtype.is_floating_point and out.element_size() > 1:  # NaN payloads are nobody's contract
            wrong &= ~(out.isnan() & expected.isnan())
        count = int(wrong.sum())
        if count > (max(1.0, tol**2 * out.numel()) if tol and out.dtype is torch.uint8 else 0):
            where = [tuple(i) for i in wrong.nonzero()[:4].tolist()]
            values = [(out[i].float().item(), expected[i].float().item()) for i in where]
            raise AssertionError(f"{what}: {count} of {out.numel()} differ, at {where}: (got, expected) {values}")
        return
    error = rel_error(out, expected)
    if not error <= tol:
        distance = (out.double() - expected.double()).abs().nan_to_num(float("inf")).flatten()
        at = distance.topk(min(4, distance.numel())).indices.tolist()
        worst = [(i, out.flatten()[i].item(), expected.flatten()[i].item()) for i in at]
        raise AssertionError(f"{what}: relative error {error:.3g} > {tol:.3g}; worst (index, got, expected) {worst}")
