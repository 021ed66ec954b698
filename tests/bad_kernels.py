"""Ops that break one rule each: `--extra bad_kernels` makes cross.py and variants.py say so."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.db import Config
from fpk.op import Cost, Kernel, Op, op


@triton.jit
def _shared_kernel(x_ptr, y_ptr, B: tl.constexpr):
    square = tl.arange(0, B)[:, None] * B + tl.arange(0, B)[None, :]
    x = tl.load(x_ptr + square)
    for _ in range(4):
        x = tl.dot(x, tl.load(x_ptr + square)).to(x.dtype)
    tl.store(y_ptr + square, x)


@triton.jit
def _spills_kernel(x_ptr, y_ptr, B: tl.constexpr):
    offs = tl.arange(0, B)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, x * tl.cumsum(x, 0))  # one warp holds all of x while it sums


@triton.jit
def _sum_kernel(x_ptr, y_ptr, B: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, B), tl.load(x_ptr + tl.arange(0, B)))


@triton.jit
def _undone_kernel(x_ptr, y_ptr, B: tl.constexpr):
    code = tl.load(x_ptr + tl.arange(0, B)).to(tl.float32).to(tl.float8e4nv)
    tl.store(y_ptr + tl.arange(0, B), code.to(tl.float32) * 2)


@triton.jit
def _broken_kernel(x_ptr, y_ptr, B: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, B), tl.load(x_ptr + tl.arange(0, B + 1)))


@triton.jit
def _rows_kernel(x_ptr, y_ptr, M, B: tl.constexpr):
    offs = tl.arange(0, B)
    tl.store(y_ptr + offs, tl.load(x_ptr + offs, mask=offs < M, other=0.0), mask=offs < M)


def _declare(name: str, kernel: Any, config: Config, matrix: bool = False) -> Op:
    def launcher(x: Tensor, *, config: Config) -> Tensor:
        y = torch.empty_like(x)
        rows = (x.shape[0],) if kernel is _rows_kernel else ()
        kernel[(1,)](x, y, *rows, **config)
        return y

    launcher.__name__ = name
    return op(
        reference=lambda x: x, check=lambda **_: None,
        inputs=lambda *, M, device="cpu", seed=0: dict(x=torch.empty(M, dtype=torch.bfloat16, device=device)),
        domain=dict(M=(1,)), tol=0.0, kernels=dict(only=Kernel(kernel, matrix=matrix)),
        configs=lambda **_: [config], key=lambda **_: {}, cost=lambda **_: Cost(0, 0), cases=dict(one=dict(M=65536)),
    )(launcher)  # fmt: skip


_declare("bad_shared", _shared_kernel, Config(B=256, num_warps=8, num_stages=4))
_declare("bad_spills", _spills_kernel, Config(B=16384, num_warps=1))
_declare("bad_matrix", _sum_kernel, Config(B=256, num_warps=4), matrix=True)
_declare("bad_variants", _rows_kernel, Config(B=256, num_warps=4))
_declare("bad_compile", _broken_kernel, Config(B=256, num_warps=4))
_declare("bad_undone", _undone_kernel, Config(B=256, num_warps=4))
