"""act_and_mul: the activation between the two products of an MLP or expert.

With g the gate, u the up part, g' = min(g, limit) and u' = clamp(u, -limit, limit), where a limit is given:

    silu         g' sigmoid(alpha g') (u' + beta)      alpha 1, beta 0, no limit unless given
    swigluoai    the same                              alpha 1.702, beta 1, limit 7 unless given
    swiglustep   min(silu(g), limit) u'                limit 7 unless given
    gelu         g/2 (1 + erf(g / sqrt 2)) u
    gelu_tanh    g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)) u
    relu2        max(g, 0)^2                           not gated

Not gated (silu, gelu, gelu_tanh, relu2), g is the whole row and there is no factor u. Gate and up are the halves of a
row, or alternate (interleaved, as gpt-oss stores them). Computed in fp32 and rounded once; NaN passes clamps. With
quantization in the same pass: act_and_mul_quantize_*.

Source: the activations of vLLM's fused MoE layers; swigluoai: gpt-oss.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS
from fpk.db import Config, bucket
from fpk.device import of
from fpk.kernels._activation import (
    CASES,
    activated,
    activation_constexprs,
    activation_inputs,
    activation_width,
    expect_activation,
    load_activation,
)
from fpk.kernels._tile import after_previous, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS
from fpk.shapes import activation_cases

# one unit in the last place of the result's type; fp32 has a few of them, from exp
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def reference(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
) -> Tensor:  # fmt: skip
    return activated(x, activation, gated, interleaved, alpha, beta, limit)


def check(x: Tensor, **arguments: Any) -> None:
    expect_activation("act_and_mul", x, **arguments)


@triton.jit(do_not_specialize=["M"])
def _act_kernel(
    x_ptr, out_ptr,
    M, I,
    stride_xe, stride_xm, stride_xk,
    PDL: tl.constexpr, FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(I, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, 1)
    x_rows = x_ptr + e * stride_xe + offs_m * stride_xm
    out, mask, cols = load_activation(
        x_rows, offs_m < M, first, I, stride_xk, FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE,
        BLOCK_M, 1, BLOCK_K, BLOCK_K,
    )  # fmt: skip
    out_ptrs = out_ptr + (e * M + offs_m)[:, None, None] * I + cols
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def configs(**_: Any):
    yield Config(BLOCK_M=4, BLOCK_K=512, num_warps=4)
    for rows, cols in ((1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 1024), (4, 1024), (8, 256), (8, 512), (16, 128)):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps)


def key(x: Tensor, activation: str, gated: bool, interleaved: bool, **_: Any) -> dict[str, int | str]:
    return dict(
        M=bucket(x.shape[:-1].numel()), K=activation_width(x, gated), activation=activation, gated=int(gated),
        interleaved=int(interleaved), x=str(x.dtype),
    )  # fmt: skip


def cost(x: Tensor, gated: bool, **_: Any) -> Cost:
    out = x.shape[:-1].numel() * activation_width(x, gated)
    return Cost(flops=8 * out, bytes=(x.numel() + out) * x.element_size())


def inputs(
    *, M, K, E=0, case="silu", x_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0
):
    return activation_inputs(M, K, E, case, x_dtype, kind, layout, device, seed)


@op(
    reference=reference, check=check, inputs=inputs, tol=lambda x, **_: TOLERANCE[x.dtype],
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 3), case=tuple(CASES), x_dtype=FLOAT_INPUTS,
        kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(act=Kernel(_act_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def act_and_mul(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None, *, config: Config,
) -> Tensor:  # fmt: skip
    """Activate the gate and multiply by the up part.

    Args:
        x: (M, 2I) or (E, M, 2I), (M, I) or (E, M, I) if not gated; fp32, bf16 or fp16, any strides.
        activation: silu, swigluoai, swiglustep, gelu, gelu_tanh or relu2.
        gated: False for activations of a whole row (relu2: always; swigluoai, swiglustep: never).
        interleaved: gate and up columns alternate instead of lying in halves.
        alpha, beta, limit: parameters of silu and swigluoai (limit also of swiglustep), None for their own.

    Returns:
        (M, I) or (E, M, I) of x's dtype, contiguous.

    Raises:
        ValueError: dtype, rank or number of columns does not fit, or the activation does not take an argument given.
    """
    I = activation_width(x, gated)
    out = torch.empty((*x.shape[:-1], I), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    M = x.shape[-2]
    _act_kernel[(triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(I, config["BLOCK_K"]), E)](
        x, out,
        M, I,
        stride_xe, x.stride(-2), x.stride(-1),
        **activation_constexprs(x, activation, gated, interleaved, alpha, beta, limit),
        **early_start(of(x.device)),
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return out
