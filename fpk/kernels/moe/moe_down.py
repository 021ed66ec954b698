"""moe_down: second product of a few tokens' experts, and the weighted sum over each token's experts.

    out[t] = sum_j weights[t, j] * (a[t, j] @ b[e].T + bias[e])        e: the expert of ids[t, j]
             (+ residual_weight[t] * residual[t])

What a grouped product and moe_unpermute give, from rows in the order of slots (moe_up): each product is rounded to
out_dtype, sums are fp32 and do not depend on timing. Weights are read once for each slot that uses them.

Kernels: `rows`, for long rows of weights, and `vector` (_vector): both give each program some columns of a slot, and a
small kernel behind them sums the slots of a token.

Source: the decode step of mixture-of-experts models.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_near, expect_shape
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.kernels._tile import after_previous, early_start
from fpk.kernels.moe._few import (
    LANE,
    expect_few,
    experts_of,
    few_inputs,
    load_lanes,
    local_expert,
    products,
    scaled_row,
    strides_of_ones,
)
from fpk.kernels.moe._vector import VECTOR_KERNEL, launch_vector
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, sample, scales
from fpk.shapes import MOE_LAYERS


def reference(
    a: Tensor, weights: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None,
    group: int = -1, block_rows: int = 1, bias: Tensor | None = None, expert_map: Tensor | None = None,
    residual: Tensor | None = None, residual_weight: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    T, top_k = ids.shape
    local, here = experts_of(ids, expert_map, b.shape[0])
    value = products(a, scale_a, b, scale_b, bias, local.flatten(), group, block_rows).to(out_dtype).float()
    value = value.reshape(T, top_k, b.shape[1])
    total = torch.zeros((T, b.shape[1]), dtype=torch.float32, device=a.device)
    for j in range(top_k):
        total = total + torch.where(here[:, j, None], value[:, j] * weights[:, j, None], 0.0)
    if residual is not None:
        total = total + (residual.float() if residual_weight is None else residual.float() * residual_weight)
    return total.to(out_dtype)


def check(
    a: Tensor, weights: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, group: int,
    block_rows: int, bias: Tensor | None, expert_map: Tensor | None, residual: Tensor | None,
    residual_weight: Tensor | None, out_dtype: torch.dtype,
) -> None:  # fmt: skip
    expect_few("moe_down", a, ids, b, scale_a, scale_b, group, block_rows, bias, expert_map, out_dtype)
    T, top_k = ids.shape
    expect_shape("moe_down.a", a, (T * top_k, b.shape[2]))
    expect_shape("moe_down.weights", weights, (T, top_k))
    expect_dtype("moe_down.weights", weights, torch.float32)
    expect_near("moe_down.weights", weights)
    if residual is not None:
        expect_shape("moe_down.residual", residual, (T, b.shape[1]))
        expect_dtype("moe_down.residual", residual, *FLOAT_INPUTS)
    if residual_weight is not None:
        if residual is None:
            raise ValueError("moe_down.residual_weight: expected None without residual, got a tensor")
        expect_shape("moe_down.residual_weight", residual_weight, (T, 1))
        expect_dtype("moe_down.residual_weight", residual_weight, torch.float32)


@triton.jit
def _store_sum(
    total, residual_ptr, residual_weight_ptr, out_ptr, token, offs_n, mask_n, N, stride_xm, stride_xk, stride_xw
):  # fmt: skip
    if residual_ptr is not None:
        added = tl.load(residual_ptr + token * stride_xm + offs_n.to(tl.int64) * stride_xk, mask=mask_n, other=0.0)
        added = added.to(tl.float32)
        if residual_weight_ptr is not None:
            added *= tl.load(residual_weight_ptr + token * stride_xw)
        total += added
    tl.store(out_ptr + token * N + offs_n, total.to(out_ptr.dtype.element_ty), mask=mask_n)


@triton.jit(do_not_specialize=["num_mapped", "E", "top_k"])
def _rows_kernel(
    a_ptr, sa_ptr, b_ptr, sb_ptr, bias_ptr, ids_ptr, map_ptr, out_ptr,
    N, K, E, top_k, num_mapped,
    stride_am, stride_sam, stride_sak, stride_be, stride_bn, stride_sbe, stride_sbn, stride_sbk, stride_bias, stride_im,
    stride_ik,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of a slot, which share their scales in every group of `b`. Dropped slots are left alone."""
    after_previous(PDL)
    slot = tl.program_id(1)
    e = local_expert(
        ids_ptr, map_ptr, (slot // top_k).to(tl.int64) * stride_im + slot % top_k * stride_ik, slot >= 0, num_mapped, E
    )
    if e >= 0:
        LANES: tl.constexpr = BLOCK_K // LANE
        lane = tl.arange(0, LANES)
        cols = lane[None, :, None] * LANE + tl.arange(0, LANE)[None, None, :]
        first = tl.program_id(0) * BLOCK_N
        offs_n = first + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        rows = tl.where(mask_n, offs_n, first)
        b_ptrs = b_ptr + e * stride_be + rows.to(tl.int64)[:, None, None] * stride_bn + cols
        row = slot.to(tl.int64)
        acc = tl.zeros((BLOCK_N, LANES), dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=DEPTH):
            a = load_lanes(a_ptr + row * stride_am + cols, k, cols, K, EVEN)
            part = tl.sum(load_lanes(b_ptrs, k, cols, K, EVEN) * a, axis=2)
            if GROUP > 0:
                group = (k + lane * LANE) // GROUP
                there = k + lane * LANE < K
                sa = tl.load(sa_ptr + row * stride_sam + group * stride_sak, mask=there, other=0.0)
                sb_ptrs = sb_ptr + e * stride_sbe + (first // ROWS).to(tl.int64) * stride_sbn + group * stride_sbk
                acc += part * (sa * tl.load(sb_ptrs, mask=there, other=0.0))[None, :]
            else:
                acc += part
        out = tl.sum(acc, axis=1)
        scale_row = None
        bias_row = bias_ptr
        if GROUP < 0 and sb_ptr is not None:
            scale_row = sb_ptr + e * stride_sbe
        if bias_ptr is not None:
            bias_row = bias_ptr + e * stride_bias
        if GROUP < 0 and sa_ptr is not None:
            out *= tl.load(sa_ptr + row * stride_sam)
        out = scaled_row(out, scale_row, bias_row, rows, mask_n, stride_sbn, ROWS)
        tl.store(out_ptr + row * N + offs_n, out.to(out_ptr.dtype.element_ty), mask=mask_n)


@triton.jit(do_not_specialize=["num_mapped", "E", "top_k"])
def _reduce_kernel(
    rows_ptr, weights_ptr, ids_ptr, map_ptr, residual_ptr, residual_weight_ptr, out_ptr,
    N, E, top_k, num_mapped, stride_im, stride_ik, stride_wm, stride_wk, stride_xm, stride_xk, stride_xw,
    PDL: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    token = tl.program_id(1).to(tl.int64)
    j = tl.arange(0, SLOTS)
    here = local_expert(ids_ptr, map_ptr, token * stride_im + j * stride_ik, j < top_k, num_mapped, E) >= 0
    offs_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask_n = offs_n < N
    w = tl.load(weights_ptr + token * stride_wm + j * stride_wk, mask=here, other=0.0)[:, None]
    ptrs = rows_ptr + (token * top_k + j)[:, None] * N + offs_n[None, :]
    value = tl.load(ptrs, mask=here[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
    _store_sum(
        tl.sum(value * w, axis=0), residual_ptr, residual_weight_ptr, out_ptr, token, offs_n, mask_n, N, stride_xm,
        stride_xk, stride_xw,
    )  # fmt: skip


def configs(a: Tensor, b: Tensor, **_: Any):
    K = triton.next_power_of_2(b.shape[2])
    if of(a.device).arch == "cpu":  # the interpreter wants few programs
        for kernel, rows, cols in (("rows", 128, 256), ("vector", 128, 256), ("rows", 32, 128), ("vector", 64, 128)):
            yield Config(kernel=kernel, BLOCK_N=rows, BLOCK_K=cols, DEPTH=1, num_warps=4)
        return
    wide = min(1024, max(128, K))
    if K >= 8192:
        yield Config(kernel="rows", BLOCK_N=2, BLOCK_K=1024, DEPTH=4, num_warps=1)
    yield Config(kernel="vector", BLOCK_N=4, BLOCK_K=256, DEPTH=4, num_warps=1)
    for rows in (1, 2, 4, 8, 16):
        for cols in (128, 256, 512, 1024, 2048):
            for warps, depth in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 3)):
                if 1024 <= rows * cols // warps <= 4096 and cols <= wide * 2:
                    yield Config(kernel="rows", BLOCK_N=rows, BLOCK_K=cols, DEPTH=depth, num_warps=warps)
                if 512 <= rows * cols // warps <= 2048 and cols <= wide * 2:
                    yield Config(kernel="vector", BLOCK_N=rows, BLOCK_K=cols, DEPTH=depth, num_warps=warps)


def legal(config: Config, device: Device, group: int, **_: Any) -> bool:
    return group < 0 or config["BLOCK_N"] <= group


def key(
    a: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, group: int, **_: Any
) -> dict[str, int | str]:
    E, N, K = b.shape
    return dict(
        M=bucket(ids.shape[0]), top_k=ids.shape[1], E=E, N=N, K=K, a=str(a.dtype), b=str(b.dtype), group=group,
        scales=int(scale_a is not None) + int(scale_b is not None),
    )  # fmt: skip


def cost(ids: Tensor, b: Tensor, **_: Any) -> Cost:
    slots, weights = ids.numel(), b.shape[1] * b.shape[2]
    return Cost(flops=2 * slots * weights, bytes=weights * min(slots, b.shape[0]) * b.element_size())


def tolerance(out_dtype: torch.dtype, **_: Any) -> float:
    return {torch.bfloat16: 4e-3, torch.float16: 5e-4}[out_dtype]  # two roundings


def inputs(
    *, T, N, K, E=4, top_k=2, scheme="channel", bias=False, mapped=False, residual="no",
    dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    made = few_inputs(
        T * top_k, T, N, K, E, top_k, scheme, bias, mapped, dtype, out_dtype, kind, layout, device, seed
    )  # fmt: skip
    return made | dict(
        weights=torch.rand((T, top_k), generator=generator(seed + 11, device), device=device),
        residual=None if residual == "no" else sample((T, N), out_dtype, "normal", device, seed + 8),
        residual_weight=scales((T, 1), device, seed + 9) if residual == "weighted" else None,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        T=(0, 1, 3), N=(1, 100, 256), K=(16, 128, 300), E=(2, 3), top_k=(1, 3),
        scheme=("plain", "weights", "tensor", "block", "channel"), bias=(False, True), mapped=(False, True),
        residual=("no", "plain", "weighted"), dtype=(torch.float8_e4m3fn, torch.float8_e5m2),
        out_dtype=(torch.bfloat16, torch.float16), kind=("normal", "zeros"), layout=("contiguous", "rows"),
    ),
    kernels=dict(rows=Kernel(_rows_kernel), vector=VECTOR_KERNEL),
    configs=configs, legal=legal, key=key, cost=cost,
    cases={
        f"{model}/T={t}": dict(T=t, N=hidden, K=inner, E=experts, top_k=top_k)
        for model, (experts, top_k, hidden, inner, _) in MOE_LAYERS.items() for t in (1, 4)
    },
)  # fmt: skip
def moe_down(
    a: Tensor, weights: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None,
    group: int = -1, block_rows: int = 1, bias: Tensor | None = None, expert_map: Tensor | None = None,
    residual: Tensor | None = None, residual_weight: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply a few tokens' activated rows by their experts' second weights, and sum each token's.

    Args:
        a: (T * top_k, K) rows in the order of slots: FP8 codes with scale_a, else bf16 or fp16; elements of a row
            contiguous.
        weights: (T, top_k) fp32, any strides.
        ids: (T, top_k) int32 or int64, any strides; a slot whose id or mapped id is out of range is dropped, its row
            of `a` not read.
        b: (E, N, K); a's dtype if `a` has scales, else FP8 codes with scales, or a's dtype without. Elements of a row
            contiguous.
        scale_a: (T * top_k, 1), or (T * top_k, cdiv(K, 128)) with group 128, fp32, or None.
        scale_b: fp32, (E, N, 1), (E, 1, 1) with block_rows -1, or (E, cdiv(N, 128), cdiv(K, 128)) with group 128; None
            for weights that are no codes.
        group: columns that share a scale, in `a` and `b`: -1 for all, or 128.
        block_rows: rows of `b` that share a scale: 1 or -1, 128 with group 128.
        bias: (E, N) fp32, bf16 or fp16, or None.
        expert_map: (experts of all ranks,) int32 or int64 or None, as in sort_by_expert.
        residual: (T, N) fp32, bf16 or fp16, any strides, or None; added in fp32 before the last rounding.
        residual_weight: (T, 1) fp32 or None for 1; multiplies residual.
        out_dtype: bf16 or fp16.

    Returns:
        (T, N) of out_dtype.

    Raises:
        ValueError: a shape, dtype, stride or combination does not fit.
        NotImplementedError: FP8 on a GPU without FP8 units.
    """
    (T, top_k), (E, N, K) = ids.shape, b.shape
    out = torch.empty((T, N), dtype=out_dtype, device=a.device)
    if T == 0:
        return out
    config, early = dict(config), early_start(of(a.device))
    mapped = 0 if expert_map is None else expert_map.shape[0]
    product = (
        a.stride(0), *strides_of_ones(scale_a, 0, 1), b.stride(0), b.stride(1), *strides_of_ones(scale_b, 0, 1, 2),
        *strides_of_ones(bias, 0), ids.stride(0), ids.stride(1),
    )  # fmt: skip
    summing = (
        *weights.stride(), *((0, 0) if residual is None else residual.stride()), *strides_of_ones(residual_weight, 0)
    )  # fmt: skip
    options = dict(GROUP=group, ROWS=block_rows, EVEN=K % config["BLOCK_K"] == 0)
    slots, programs = triton.next_power_of_2(top_k), triton.cdiv(N, config["BLOCK_N"])
    kernel = config.pop("kernel")
    rows = torch.empty((T * top_k, N), dtype=out_dtype, device=a.device)
    if kernel == "vector":
        granularity = (group, block_rows, group) if group > 0 else (
            0 if scale_a is None else -1, block_rows, 0 if scale_b is None else -1
        )  # fmt: skip
        launch_vector(
            config, a, b, None, scale_a, scale_b, bias, None, top_k, rows, granularity,
            [*strides_of_ones(scale_a, 0, 1), *strides_of_ones(scale_b, 0, 1, 2)], 1, ids, expert_map,
        )  # fmt: skip
    else:
        _rows_kernel[(programs, T * top_k)](
            a, scale_a, b, scale_b, bias, ids, expert_map, rows, N, K, E, top_k, mapped, *product,
            **options, **early, **config,
        )  # fmt: skip
    _reduce_kernel[(triton.cdiv(N, 1024), T)](
        rows, weights, ids, expert_map, residual, residual_weight, out,
        N, E, top_k, mapped, ids.stride(0), ids.stride(1), *summing, SLOTS=slots, BLOCK=1024, num_warps=4, **early,
    )  # fmt: skip
    return out
