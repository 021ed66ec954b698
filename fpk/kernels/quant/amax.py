"""amax: largest finite magnitude of a matrix, or of each matrix of a stack.

    amax[e] = max_{m < valid, k} |x[e, m, k]| over finite elements; Inf if every element is +-Inf; 0 if none counts

The first pass of dynamic per-tensor quantization, and the number that calibration and tensor parallelism reduce over.
NaN and Inf do not count, so that one of them cannot spoil a whole tensor's scale.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import finite_amax
from fpk.kernels._amax import flat_amax_kernel, partial_amax, partial_amax_kernel, total_amax
from fpk.kernels._tile import after_previous, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(x: Tensor, num_valid_tokens: Tensor | None = None) -> Tensor:
    return finite_amax(x, (-2, -1), num_valid_tokens)


def check(x: Tensor, num_valid_tokens: Tensor | None, **_: Any) -> None:
    expect_dtype("amax.x", x, *FLOAT_INPUTS)
    expect_rank("amax.x", x, 2, 3)
    expect_not_empty("amax.x", x, -1)
    if num_valid_tokens is not None:
        expect_shape("amax.num_valid_tokens", num_valid_tokens, (1,))
        expect_dtype("amax.num_valid_tokens", num_valid_tokens, torch.int32)


@triton.jit(do_not_specialize=["parts"])
def _total_kernel(key_ptr, out_ptr, parts, PDL: tl.constexpr, BLOCK_P: tl.constexpr):
    after_previous(PDL)
    e = tl.program_id(0)
    tl.store(out_ptr + e, total_amax(key_ptr, e, parts, BLOCK_P))


def configs(**_: Any):
    yield Config(BLOCK_M=1, BLOCK_K=8192, PROGRAMS=528, num_warps=8, num_stages=2)
    for rows, cols in ((1, 8192), (2, 4096), (4, 2048), (8, 1024), (16, 512)):
        for programs in (132, 264, 528, 1056):
            for warps in (4, 8):
                yield Config(BLOCK_M=rows, BLOCK_K=cols, PROGRAMS=programs, num_warps=warps, num_stages=3)


def key(x: Tensor, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(x.shape[-2]), K=x.shape[-1], E=x.shape[0] if x.dim() == 3 else 0, x=str(x.dtype))


def cost(x: Tensor, **_: Any) -> Cost:
    return Cost(flops=x.numel(), bytes=x.numel() * x.element_size() + 4)


def inputs(*, M, K, E=0, x_dtype=torch.bfloat16, kind="normal", layout="contiguous", valid=None, device="cuda", seed=0):
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    count = None if valid is None else torch.tensor([int(valid * M)], dtype=torch.int32, device=device)
    return dict(x=x, num_valid_tokens=count)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 2), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"), valid=(None, 0.0, 0.5, 1.0),
    ),
    kernels=dict(partial=Kernel(partial_amax_kernel), flat=Kernel(flat_amax_kernel, named=False)),
    configs=configs, launcher_fields=("PROGRAMS",), key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def amax(x: Tensor, num_valid_tokens: Tensor | None = None, *, config: Config) -> Tensor:
    """Largest finite magnitude of each matrix.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        num_valid_tokens: (1,) int32 on x's device or None; rows from it on are padding and do not count.

    Returns:
        (1, 1) or (E, 1, 1) fp32.

    Raises:
        ValueError: dtype, rank or num_valid_tokens does not fit, or K is 0.
    """
    out = torch.empty((*x.shape[:-2], 1, 1), dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    keys = partial_amax(x, num_valid_tokens, config)
    width = triton.next_power_of_2(config["PROGRAMS"])
    _total_kernel[(out.numel(),)](keys, out, keys.shape[1], BLOCK_P=width, num_warps=4, **early_start(of(x.device)))
    return out
