"""moe_unpermute: the outputs of experts back to their tokens, weighted and summed.

    out[t] = sum_j weights[t, j] * x[position[t, j]]        over slots whose position is not -1, in the order of j
             (+ residual_weight[t] * residual[t])           last: shared experts, or what zero-experts pass on

Products and sums in fp32, one rounding at the end; the order is fixed, so the result does not depend on timing. Rows
that no slot points to are never read.

Source: the reduction that ends vLLM's fused MoE (`moe_sum`, `moe_unpermute`).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    expect_dtype,
    expect_near,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
    expect_slots,
)
from fpk.db import Config, bucket
from fpk.device import of
from fpk.kernels._tile import after_previous, early_start
from fpk.kernels.moe._rows import sorted_slots
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, scales, strided
from fpk.shapes import routing_cases


def reference(
    x: Tensor, position: Tensor, weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None, residual_weight: Tensor | None = None,
) -> Tensor:  # fmt: skip
    T, top_k = position.shape
    total = torch.zeros((T, x.shape[1]), dtype=torch.float32, device=x.device)
    for j in range(top_k):
        row = position[:, j]
        value = x[row.long().clamp(min=0)].float()
        if weights is not None:
            value = value * weights[:, j, None]
        total = total + torch.where((row >= 0)[:, None], value, 0.0)
    if residual is not None:
        total = total + (residual.float() if residual_weight is None else residual.float() * residual_weight)
    return total.to(out_dtype or x.dtype)


def check(
    x: Tensor, position: Tensor, weights: Tensor | None, out_dtype: torch.dtype | None, residual: Tensor | None,
    residual_weight: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    expect_rank("moe_unpermute.x", x, 2)
    expect_dtype("moe_unpermute.x", x, *FLOAT_INPUTS)
    expect_not_empty("moe_unpermute.x", x, 1)
    expect_rank("moe_unpermute.position", position, 2)
    expect_not_empty("moe_unpermute.position", position, 1)
    expect_dtype("moe_unpermute.position", position, torch.int32)
    expect_near("moe_unpermute.position", position)
    T, top_k = position.shape
    expect_slots("moe_unpermute.position", position, T * top_k)
    expect_shape("moe_unpermute.x", x, (T * top_k, x.shape[1]))
    if weights is not None:
        expect_shape("moe_unpermute.weights", weights, (T, top_k))
        expect_dtype("moe_unpermute.weights", weights, torch.float32)
        expect_near("moe_unpermute.weights", weights)
    if out_dtype is not None:
        expect_one_of("moe_unpermute.out_dtype", out_dtype, FLOAT_INPUTS)
    if residual is not None:
        expect_shape("moe_unpermute.residual", residual, (T, x.shape[1]))
        expect_dtype("moe_unpermute.residual", residual, *FLOAT_INPUTS)
    if residual_weight is not None:
        if residual is None:
            raise ValueError("moe_unpermute.residual_weight: expected None without residual, got a tensor")
        expect_shape("moe_unpermute.residual_weight", residual_weight, (T, 1))
        expect_dtype("moe_unpermute.residual_weight", residual_weight, torch.float32)


@triton.jit
def _slot(
    x_cols, position_ptr, weights_ptr, offs_m, mask_m, mask_k, j, T,
    stride_xm, stride_pm, stride_pk, stride_wm, stride_wk, TOP_K: tl.constexpr,
):  # fmt: skip
    """What slot j of some tokens adds to them, fp32; 0 for slots that were dropped."""
    row = tl.load(position_ptr + offs_m * stride_pm + j * stride_pk, mask=mask_m, other=-1)
    there = (row >= 0) & (row < T * TOP_K)
    x_ptrs = x_cols + tl.where(there, row, 0).to(tl.int64)[:, None] * stride_xm
    value = tl.load(x_ptrs, mask=there[:, None] & mask_k, other=0.0).to(tl.float32)
    if weights_ptr is not None:
        w = tl.load(weights_ptr + offs_m * stride_wm + j * stride_wk, mask=there, other=0.0)
        value *= w[:, None]
    return value


@triton.jit(do_not_specialize=["T"])
def _unpermute_kernel(
    x_ptr, position_ptr, weights_ptr, residual_ptr, residual_weight_ptr, out_ptr,
    T, H,
    stride_xm, stride_xk, stride_pm, stride_pk, stride_wm, stride_wk, stride_rm, stride_rk, stride_rw,
    PDL: tl.constexpr, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    tiles_k = tl.cdiv(H, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.program_id(0) % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_m = offs_m < T
    mask_k = (offs_k < H)[None, :]
    x_cols = x_ptr + offs_k[None, :].to(tl.int64) * stride_xk
    total = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    if TOP_K <= 8:  # unrolled: the loads of all slots are under way at a time
        for j in tl.static_range(TOP_K):
            total += _slot(x_cols, position_ptr, weights_ptr, offs_m, mask_m, mask_k, j, T, stride_xm, stride_pm,
                           stride_pk, stride_wm, stride_wk, TOP_K)  # fmt: skip
    else:
        for j in range(TOP_K):
            total += _slot(x_cols, position_ptr, weights_ptr, offs_m, mask_m, mask_k, j, T, stride_xm, stride_pm,
                           stride_pk, stride_wm, stride_wk, TOP_K)  # fmt: skip
    if residual_ptr is not None:
        r_ptrs = residual_ptr + offs_m[:, None] * stride_rm + offs_k[None, :].to(tl.int64) * stride_rk
        value = tl.load(r_ptrs, mask=mask_m[:, None] & mask_k, other=0.0).to(tl.float32)
        if residual_weight_ptr is not None:
            value *= tl.load(residual_weight_ptr + offs_m * stride_rw, mask=mask_m, other=0.0)[:, None]
        total += value
    out_ptrs = out_ptr + offs_m[:, None] * H + offs_k[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_k)


def configs(x: Tensor, **_: Any):
    if of(x.device).arch == "cpu":  # the interpreter wants few programs
        yield Config(BLOCK_M=16, BLOCK_K=256, num_warps=4, num_stages=2)
    yield Config(BLOCK_M=1, BLOCK_K=1024, num_warps=4, num_stages=3)
    for rows, cols in ((1, 512), (1, 1024), (1, 2048), (1, 4096), (2, 512), (2, 1024), (4, 512), (4, 1024), (8, 256)):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps, num_stages=3)


def key(
    x: Tensor, position: Tensor, weights: Tensor | None, out_dtype: torch.dtype | None, residual: Tensor | None,
    **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    T, top_k = position.shape
    return dict(
        M=bucket(T), K=x.shape[1], top_k=top_k, x=str(x.dtype), out_dtype=str(out_dtype or x.dtype),
        weights=int(weights is not None), residual="" if residual is None else str(residual.dtype),
    )  # fmt: skip


def cost(
    x: Tensor, position: Tensor, out_dtype: torch.dtype | None, residual: Tensor | None, **_: Any
) -> Cost:  # fmt: skip
    T, H = position.shape[0], x.shape[1]
    added = 0 if residual is None else T * H * residual.element_size()
    moved = added + x.numel() * x.element_size() + T * H * (out_dtype or x.dtype).itemsize + 8 * position.numel()
    return Cost(flops=2 * x.numel(), bytes=moved)


def inputs(
    *, T, H, E=4, top_k=2, dropped=0.0, weighted=True, residual="no", x_dtype=torch.bfloat16, out_dtype=None,
    kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    _, position = sorted_slots(T, E, top_k, dropped, device, seed)
    x = strided(sample((T * top_k, H), x_dtype, kind, device, seed), layout)
    weights = scales((T, top_k), device, seed + 1) if weighted else None
    added = None if residual == "no" else strided(sample((T, H), x_dtype, kind, device, seed + 2), layout)
    return dict(
        x=x, position=position, weights=weights, out_dtype=out_dtype, residual=added,
        residual_weight=scales((T, 1), device, seed + 3) if residual == "weighted" else None,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        T=(0, 1, 3, 8, 13), H=(1, 16, 33, 100, 257), E=(1, 3, 8), top_k=(1, 2, 5), dropped=(0.0, 0.5, 1.0),
        weighted=(True, False), residual=("no", "plain", "weighted"), x_dtype=FLOAT_INPUTS,
        out_dtype=(None, *FLOAT_INPUTS), kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(unpermute=Kernel(_unpermute_kernel)),
    configs=configs, key=key, cost=cost, cases=routing_cases(),
)  # fmt: skip
def moe_unpermute(
    x: Tensor, position: Tensor, weights: Tensor | None = None, out_dtype: torch.dtype | None = None,
    residual: Tensor | None = None, residual_weight: Tensor | None = None, *, config: Config,
) -> Tensor:  # fmt: skip
    """Sum the experts' outputs of T tokens.

    Args:
        x: (T * top_k, H) rows in the order of their experts, fp32, bf16 or fp16, any strides.
        position: (T, top_k) int32, the row of each slot, -1 for slots that were dropped (sort_by_expert).
        weights: (T, top_k) fp32, any strides, or None for 1.
        out_dtype: fp32, bf16 or fp16; None is x's dtype.
        residual: (T, H) fp32, bf16 or fp16, any strides, or None; added in fp32 before the rounding.
        residual_weight: (T, 1) fp32 or None for 1; multiplies residual.

    Returns:
        (T, H) of out_dtype; a token without a row gets zeros.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    (T, top_k), H = position.shape, x.shape[1]
    out = torch.empty((T, H), dtype=out_dtype or x.dtype, device=x.device)
    if T == 0:
        return out
    _unpermute_kernel[(triton.cdiv(T, config["BLOCK_M"]) * triton.cdiv(H, config["BLOCK_K"]),)](
        x, position, weights, residual, residual_weight, out,
        T, H,
        x.stride(0), x.stride(1), position.stride(0), position.stride(1),
        *((0, 0) if weights is None else weights.stride()), *((0, 0) if residual is None else residual.stride()),
        0 if residual_weight is None else residual_weight.stride(0),
        TOP_K=top_k, enable_fp_fusion=False, **early_start(of(x.device)), **config,
    )  # fmt: skip
    return out
