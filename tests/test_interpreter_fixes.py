"""Every repair of the interpreter is needed: without it, and only it, its probe goes wrong.

Run as a script it prints, as JSON, which probes give the right numbers in this process.
"""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from interpreter_fixes import FIXES  # applies them, but for the one the environment names

N = 512


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, x.to(y_ptr.dtype.element_ty))


@triton.jit
def _arithmetic(x_ptr, y_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, -(x * x + x))
    tl.store(y_ptr + N + offs, tl.where(x < 0.0, x, tl.zeros_like(x)))


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    square = offs[:, None] * N + offs[None, :]
    tl.store(c_ptr + square, tl.dot(tl.load(a_ptr + square), tl.load(b_ptr + square)))


@triton.jit
def _masked(x_ptr, y_ptr, n, WITH_OTHER: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, N)
    if WITH_OTHER:
        x = tl.load(x_ptr + offs, mask=offs < n, other=0.0)
    else:
        x = tl.load(x_ptr + offs, mask=offs < n)
    tl.store(y_ptr + offs, x)


def _values() -> torch.Tensor:
    """fp32 in the range of fp8: ties, subnormals, carries, overflow, NaN, -0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, generator=generator) * torch.exp2(torch.randint(-12, 12, (N,), generator=generator).float())
    odd = [float("nan"), -0.0, 448.0, 464.0, -1e4, 2.0**-10, 3 * 2.0**-10, 4.25, 126.0, 1.00390625, 1.01171875, 0.4375]
    x[: len(odd)] = torch.tensor(odd)
    return x


def _cast_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    y = torch.zeros(x.shape, dtype=dtype)
    _cast[(1,)](x, y, N)
    return y


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def probe_fp8_casts() -> bool:
    x = _values()
    right = True
    for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        right &= _same(_cast_to(x, dtype).float(), x.clamp(-largest, largest).to(dtype).float())
        every = torch.arange(N).to(torch.uint8).view(dtype)
        right &= _same(_cast_to(every, torch.float32), every.float())
    return right


def probe_bf16_casts() -> bool:
    x = _values()
    integers = torch.arange(-256, 256, dtype=torch.int32)
    return (
        _same(_cast_to(x, torch.bfloat16), x.bfloat16())
        and _same(_cast_to(x.bfloat16(), torch.float32), x.bfloat16().float())
        and _same(_cast_to(integers, torch.bfloat16), integers.bfloat16())
    )


def probe_bf16_arithmetic() -> bool:
    x = _values().clamp(-100, 100).nan_to_num(1.0).bfloat16()
    y = torch.zeros(2 * N, dtype=torch.bfloat16)
    _arithmetic[(1,)](x, y, N)
    return _same(y[:N], -(x * x + x)) and _same(y[N:], torch.where(x < 0, x, 0.0))


def probe_narrow_dots() -> bool:
    generator = torch.Generator().manual_seed(1)
    right = True
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        a = torch.randint(-3, 4, (16, 16), generator=generator).float()
        a[3, 5] = float("nan")
        c = torch.zeros(16, 16)
        _dot[(1,)](a.to(dtype), a.nan_to_num(2.0).to(dtype), c, 16)
        right &= _same(c, a @ a.nan_to_num(2.0))
    return right


def probe_masked_loads() -> bool:
    x, y = torch.ones(N), torch.zeros(N)
    _masked[(1,)](x, y, 300, True, N)
    right = bool((y[:300] == 1).all() and (y[300:] == 0).all())
    _masked[(1,)](x, y, 300, False, N)
    return right and bool((y[:300] == 1).all() and y[300:].isnan().all())


PROBES = {name.removeprefix("probe_"): f for name, f in list(globals().items()) if name.startswith("probe_")}


@functools.cache
def probed(without: str) -> dict[str, bool]:
    env = os.environ | dict(TRITON_INTERPRET="1", FPK_WITHOUT_INTERPRETER_FIX=without)
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_probes_are_right_with_all_fixes():
    assert probed("") == dict.fromkeys(PROBES, True)


def test_every_fix_has_a_probe():
    assert list(PROBES) == list(FIXES)


@pytest.mark.parametrize("fix", FIXES)
def test_wrong_without(fix):
    assert probed(fix) == dict.fromkeys(PROBES, True) | {fix: False}


if __name__ == "__main__":
    print(json.dumps({name: probe() for name, probe in PROBES.items()}))
