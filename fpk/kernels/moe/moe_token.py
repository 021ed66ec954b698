"""moe_token: the FP8 experts of one token, from the router's choice to the sum over experts.

    codes, s  = quantize(x)                                       by token, or by groups of 128 columns
    rows[j]   = silu(gate) * up,    (gate, up) = codes @ w13[e].T     e: the expert of ids[0, j]
    codes, s  = quantize(rows)
    out       = sum_j weights[0, j] * (codes[j] @ w2[e].T)  (+ residual_weight * residual)

What the quantizers, moe_up and moe_down give; gates, ups, rows and products are rounded to out_dtype. Weights are read
once, as fast as memory gives them.

Kernels: `stream`, for Hopper (_gluon_token), which does not round products before it sums them over experts; `plain`,
for any GPU, in which every program quantizes what it multiplies. Both are two launches.

Source: the decode step of mixture-of-experts models.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    expect_dtype,
    expect_fp8_matmul,
    expect_inner_contiguous,
    expect_near,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from fpk.db import Config
from fpk.device import Device, of
from fpk.formats import FP8, Granularity, encode, expand_groups, finite_amax
from fpk.kernels._activation import activate, activated, activation_parameters, expect_activation
from fpk.kernels._groups import group_amax
from fpk.kernels._tile import after_previous, amax_key, amax_of_key, early_start, fp8_constants, quantize_fp8
from fpk.kernels.moe._few import experts_of, few_inputs, local_expert, products, strides_of_ones
from fpk.kernels.moe._token_launch import STREAM_KERNEL, fits_stream, launch_stream, stream_configs
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, sample, scales
from fpk.shapes import MOE_LAYERS


def coded(x: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows, as quantize_fp8_token and quantize_fp8_group give them."""
    fmt = FP8[dtype]
    if group > 0:
        amax = group_amax(x, 1, group)
        scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(fmt.qmax)
        wide = expand_groups(scale, tuple(x.shape), 1, group)
    else:
        amax = finite_amax(x, (-1,))
        scale = wide = torch.maximum(amax / amax.new_tensor(fmt.qmax), amax.new_tensor(1 / (512 * fmt.qmax)))
    return encode(x.float() / wide, fmt).view(dtype), scale


def reference(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, scale13: Tensor, scale2: Tensor, group: int = -1,
    block_rows: int = 1, activation: str = "silu", alpha: float | None = None, beta: float | None = None,
    limit: float | None = None, expert_map: Tensor | None = None, residual: Tensor | None = None,
    residual_weight: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    local, here = experts_of(ids, expert_map, w13.shape[0])
    local, here = local[0], here[0]
    codes, scale = (v.expand(ids.shape[1], -1) for v in coded(x, group, w13.dtype))
    hidden = products(codes, scale, w13, scale13, None, local, group, block_rows).to(out_dtype)
    rows = activated(hidden, activation, True, False, alpha, beta, limit)
    codes, scale = coded(rows, group, w2.dtype)
    out = products(codes, scale, w2, scale2, None, local, group, block_rows).to(out_dtype).float()
    total = torch.zeros((1, w2.shape[1]), dtype=torch.float32, device=x.device)
    for j in range(ids.shape[1]):
        total = total + torch.where(here[j], out[j : j + 1] * weights[:, j : j + 1], 0.0)
    if residual is not None:
        total = total + (residual.float() if residual_weight is None else residual.float() * residual_weight)
    return total.to(out_dtype)


def check(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, scale13: Tensor, scale2: Tensor, group: int,
    block_rows: int, activation: str, alpha: float | None, beta: float | None, limit: float | None,
    expert_map: Tensor | None, residual: Tensor | None, residual_weight: Tensor | None, out_dtype: torch.dtype,
) -> None:  # fmt: skip
    for name, tensor, rank in (("x", x, 2), ("weights", weights, 2), ("ids", ids, 2), ("w13", w13, 3), ("w2", w2, 3)):
        expect_rank(f"moe_token.{name}", tensor, rank)
    E, H, I = w2.shape
    expect_shape("moe_token.x", x, (1, H))
    expect_dtype("moe_token.x", x, *FLOAT_INPUTS)
    expect_shape("moe_token.ids", ids, (1, ids.shape[1]))
    expect_not_empty("moe_token.ids", ids, 1)
    expect_dtype("moe_token.ids", ids, torch.int32, torch.int64)
    expect_shape("moe_token.weights", weights, tuple(ids.shape))
    expect_dtype("moe_token.weights", weights, torch.float32)
    expect_shape("moe_token.w13", w13, (E, 2 * I, H))
    for dim in range(3):
        expect_not_empty("moe_token.w2", w2, dim)
    if group not in (-1, 128):
        raise ValueError(f"moe_token.group: expected -1 or 128, got {group}")
    expect_one_of("moe_token.block_rows", block_rows, (-1, 1) if group < 0 else (128,))
    for name, w, scale in (("13", w13, scale13), ("2", w2, scale2)):
        expect_dtype(f"moe_token.w{name}", w, *FP8)
        expect_dtype(f"moe_token.w{name}", w, w13.dtype)
        expect_inner_contiguous(f"moe_token.w{name}", w)
        expect_dtype(f"moe_token.scale{name}", scale, torch.float32)
        expect_shape(
            f"moe_token.scale{name}", scale, Granularity("", block_rows, group).scale_shape(tuple(w.shape))
        )  # fmt: skip
        expect_fp8_matmul("moe_token", w)
    for name, tensor in (("ids", ids), ("weights", weights)):
        expect_near(f"moe_token.{name}", tensor)
    expect_one_of("moe_token.out_dtype", out_dtype, (torch.bfloat16, torch.float16))
    hidden = torch.empty((1, 2 * I), dtype=out_dtype, device="meta")
    expect_activation("moe_token", hidden, activation, True, False, alpha, beta, limit)
    if expert_map is not None:
        expect_rank("moe_token.expert_map", expert_map, 1)
        expect_not_empty("moe_token.expert_map", expert_map, 0)
        expect_dtype("moe_token.expert_map", expert_map, torch.int32, torch.int64)
    if residual is not None:
        expect_shape("moe_token.residual", residual, (1, H))
        expect_dtype("moe_token.residual", residual, *FLOAT_INPUTS)
    if residual_weight is not None:
        if residual is None:
            raise ValueError("moe_token.residual_weight: expected None without residual, got a tensor")
        expect_shape("moe_token.residual_weight", residual_weight, (1, 1))
        expect_dtype("moe_token.residual_weight", residual_weight, torch.float32)


@triton.jit
def _row_scale(key, GROUP: tl.constexpr, QMAX: tl.constexpr):
    amax = amax_of_key(key)
    if GROUP > 0:
        return tl.math.div_rn(tl.maximum(amax, 1e-10), QMAX)
    return tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))


@triton.jit
def _times_row(
    x_ptr, w_rows, scale_rows, width, stride_xk, stride_k, like_ptr, GROUP: tl.constexpr, QMAX: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Rows of weights times a row of values that is quantized here. scale_rows: scales of the weights by group."""
    cols = tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)
    key = tl.zeros((1,), dtype=tl.uint32)
    if GROUP < 0:
        for k in range(0, width, BLOCK_K):
            mask = cols < width - k
            x = tl.load(x_ptr + (k + cols).to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
            key = tl.maximum(key, tl.max(tl.where(mask, amax_key(x), 0), axis=1))
    for k in range(0, width, BLOCK_K):
        mask = cols < width - k
        x = tl.load(x_ptr + (k + cols).to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        if GROUP > 0:
            key = tl.max(tl.where(mask, amax_key(x), 0), axis=1)
        scale = _row_scale(key, GROUP, QMAX)
        code = quantize_fp8(x, scale[:, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        value = code.to(like_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
        w = tl.load(w_rows[:, None] + k + cols, mask=mask, other=0.0).to(tl.float32)
        part = tl.sum(w * value, axis=1) * tl.sum(scale, axis=0)
        if GROUP > 0:
            part *= tl.load(scale_rows + k // GROUP * stride_k)
        acc += part
    return acc


@triton.jit(do_not_specialize=["num_mapped", "E", "stride_ik"])
def _up_kernel(
    x_ptr, w_ptr, scale_ptr, ids_ptr, map_ptr, out_ptr, H, I, E, num_mapped, stride_ik, stride_xk, stride_we, stride_wn,
    stride_se, stride_sn, stride_sk,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FORMULA: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    slot = tl.program_id(1)
    e = local_expert(ids_ptr, map_ptr, slot.to(tl.int64) * stride_ik, slot >= 0, num_mapped, E)
    if e >= 0:
        offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < I
        kind: tl.constexpr = out_ptr.dtype.element_ty
        rows = tl.where(mask_n, offs_n, 0).to(tl.int64)
        scale_rows = scale_ptr + e * stride_se
        w_rows = w_ptr + e * stride_we
        gate = _times_row(
            x_ptr, w_rows + rows * stride_wn, scale_rows + rows // ROWS * stride_sn, H, stride_xk, stride_sk, w_ptr,
            GROUP, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        ups = rows + I
        up = _times_row(
            x_ptr, w_rows + ups * stride_wn, scale_rows + ups // ROWS * stride_sn, H, stride_xk, stride_sk, w_ptr,
            GROUP, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if GROUP < 0:
            gate *= tl.load(scale_rows + rows // ROWS * stride_sn)
            up *= tl.load(scale_rows + ups // ROWS * stride_sn)
        gate, up = gate.to(kind).to(tl.float32), up.to(kind).to(tl.float32)
        out = activate(gate, up, FORMULA, True, ALPHA, BETA, LIMIT, False)
        tl.store(out_ptr + slot.to(tl.int64) * I + offs_n, out.to(kind), mask=mask_n)


@triton.jit(do_not_specialize=["num_mapped", "E", "slots", "stride_ik", "stride_wk"])
def _down_kernel(
    x_ptr, w_ptr, scale_ptr, weights_ptr, residual_ptr, residual_weight_ptr, ids_ptr, map_ptr, out_ptr,
    H, I, E, slots, num_mapped, stride_ik, stride_wk, stride_rk, stride_we, stride_wn, stride_se, stride_sn, stride_sk,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, QMAX: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < H
    kind: tl.constexpr = out_ptr.dtype.element_ty
    rows = tl.where(mask_n, offs_n, 0).to(tl.int64)
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for slot in range(slots):
        e = local_expert(ids_ptr, map_ptr, slot * stride_ik, slot >= 0, num_mapped, E)
        if e >= 0:
            scale_rows = scale_ptr + e * stride_se + rows // ROWS * stride_sn
            out = _times_row(
                x_ptr + slot * I, w_ptr + e * stride_we + rows * stride_wn, scale_rows, I, 1, stride_sk,
                w_ptr, GROUP, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            if GROUP < 0:
                out *= tl.load(scale_rows)
            total += out.to(kind).to(tl.float32) * tl.load(weights_ptr + slot * stride_wk)
    if residual_ptr is not None:
        added = tl.load(residual_ptr + rows * stride_rk).to(tl.float32)
        if residual_weight_ptr is not None:
            added *= tl.load(residual_weight_ptr)
        total += added
    tl.store(out_ptr + offs_n, total.to(kind), mask=mask_n)


def configs(ids: Tensor, w2: Tensor, **_: Any):
    yield from stream_configs(ids.shape[1], *w2.shape[1:])
    for rows, warps in ((128, 4), (64, 4), (16, 2)):
        yield Config(kernel="plain", BLOCK_N=rows, BLOCK_K=128, num_warps=warps)


def legal(config: Config, device: Device, x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, **_: Any) -> bool:
    return config["kernel"] == "plain" or fits_stream(config, device, x, ids.shape[1], w13, w2)


def key(ids: Tensor, w2: Tensor, group: int, block_rows: int, out_dtype: torch.dtype, **_: Any) -> dict[str, int | str]:
    E, N, K = w2.shape
    return dict(
        top_k=ids.shape[1], E=E, N=N, K=K, dtype=str(w2.dtype), out_dtype=str(out_dtype), group=group,
        block_rows=block_rows,
    )  # fmt: skip


def cost(ids: Tensor, w13: Tensor, w2: Tensor, **_: Any) -> Cost:
    weights = w13.shape[1] * w13.shape[2] + w2.shape[1] * w2.shape[2]
    return Cost(flops=2 * ids.numel() * weights, bytes=weights * min(ids.numel(), w2.shape[0]))


def tolerance(w2: Tensor, **_: Any) -> float:
    # tensor cores sum 128 FP8 products to about 5e-4 of a row, within what full accuracy promises. That moves gates and
    # ups by a rounding of out_dtype, and with them now and then a code of the second product's operand to its
    # neighbour, up to an eighth of itself (e4m3) away: 1e-2 of the result in layers of real sizes, on an H200 and in
    # test_what_inexact_sums_may_move, which holds this factor of two. Without tensor cores sums are exact to fp32.
    bits = FP8[w2.dtype].mantissa_bits
    return {2: 2e-2, 3: 1e-2}[bits] * (2 if w2.is_cuda else 1)


def inputs(
    *, K, I, E=4, top_k=2, scheme="channel", mapped=False, residual="no", dtype=torch.float8_e4m3fn,
    x_dtype=torch.bfloat16, out_dtype=torch.bfloat16, kind="normal", device="cuda", seed=0,
):  # fmt: skip
    made = few_inputs(
        1, 1, 2 * I, K, E, top_k, scheme, False, mapped, dtype, out_dtype, "normal", "contiguous", device, seed
    )  # fmt: skip
    group, block = made["group"], made["block_rows"]
    shape = Granularity("", block, group).scale_shape((E, K, I))
    return dict(
        x=sample((1, K), x_dtype, kind, device, seed),
        weights=torch.rand((1, top_k), generator=generator(seed + 11, device), device=device), ids=made["ids"],
        w13=made["b"], w2=sample((E, K, I), dtype, "normal", device, seed + 6), scale13=made["scale_b"],
        scale2=scales(shape, device, seed + 4) * (I**-0.5 / 32), group=group, block_rows=block, activation="silu",
        alpha=None, beta=None, limit=None, expert_map=made["expert_map"],
        residual=None if residual == "no" else sample((1, K), out_dtype, "normal", device, seed + 8),
        residual_weight=scales((1, 1), device, seed + 9) if residual == "weighted" else None, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        K=(100, 128, 1152), I=(96, 128, 384), E=(2, 3), top_k=(1, 3), scheme=("tensor", "block", "channel"),
        mapped=(False, True), residual=("no", "plain", "weighted"), dtype=(torch.float8_e4m3fn, torch.float8_e5m2),
        x_dtype=(torch.bfloat16, torch.float32), out_dtype=(torch.bfloat16, torch.float16), kind=("normal", "zeros"),
    ),
    kernels=dict(stream=STREAM_KERNEL, plain=Kernel(_up_kernel)),
    configs=configs, legal=legal, key=key, cost=cost, launcher_fields=("BOX13", "BOX2"),
    cases={
        model: dict(K=hidden, I=inner, E=experts, top_k=top_k)
        for model, (experts, top_k, hidden, inner, _) in MOE_LAYERS.items()
    },
)  # fmt: skip
def moe_token(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, scale13: Tensor, scale2: Tensor, group: int = -1,
    block_rows: int = 1, activation: str = "silu", alpha: float | None = None, beta: float | None = None,
    limit: float | None = None, expert_map: Tensor | None = None, residual: Tensor | None = None,
    residual_weight: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, *, config: Config,
) -> Tensor:  # fmt: skip
    """Send one token through its FP8 experts.

    Args:
        x: (1, H) bf16, fp16 or fp32.
        weights: (1, top_k) fp32, any strides.
        ids: (1, top_k) int32 or int64, any strides; a slot whose id or mapped id is out of range is dropped.
        w13: (E, 2I, H) FP8 codes of gates, then ups; elements of a row contiguous.
        w2: (E, H, I) FP8 codes of the same type, likewise.
        scale13, scale2: fp32, (E, rows, 1), (E, 1, 1) with block_rows -1, or (E, cdiv(rows, 128), cdiv(columns, 128))
            with group 128.
        group: columns that share a scale, in tokens, rows and weights: -1 for all, or 128.
        block_rows: rows of weights that share a scale: 1 or -1, 128 with group 128.
        activation, alpha, beta, limit: as in act_and_mul.
        expert_map: (experts of all ranks,) int32 or int64 or None, as in sort_by_expert.
        residual: (1, H) fp32, bf16 or fp16, any strides, or None; added in fp32 before the last rounding.
        residual_weight: (1, 1) fp32 or None for 1; multiplies residual.
        out_dtype: bf16 or fp16, also of what is rounded on the way.

    Returns:
        (1, H) of out_dtype.

    Raises:
        ValueError: a shape, dtype, stride or combination does not fit.
        NotImplementedError: FP8 on a GPU without FP8 units.
    """
    formula, alpha, beta, limit = activation_parameters(activation, alpha, beta, limit)
    constants = dict(FORMULA=formula, ALPHA=alpha, BETA=beta, LIMIT=limit)
    if config["kernel"] == "stream":
        return launch_stream(
            config, x, weights, ids, w13, w2, scale13, scale2, group, block_rows, constants, expert_map, residual,
            residual_weight, out_dtype,
        )  # fmt: skip
    (E, H, I), slots = w2.shape, ids.shape[1]
    early, fmt = early_start(of(x.device)), FP8[w13.dtype]
    # codes by integers: what one instruction encodes and another decodes, the assembler of CUDA 12.8 may mix up
    by_integers = fp8_constants(fmt, of(x.device)) | dict(HARDWARE=None)
    common: dict[str, Any] = dict(
        GROUP=group, ROWS=block_rows if block_rows > 0 else 2 * max(H, I), QMAX=fmt.qmax, **by_integers, **early,
        **{n: v for n, v in config.items() if n != "kernel"},
    )  # fmt: skip
    mapped = 0 if expert_map is None else expert_map.shape[0]
    hidden = torch.empty((slots, I), dtype=out_dtype, device=x.device)
    _up_kernel[(triton.cdiv(I, config["BLOCK_N"]), slots)](
        x, w13, scale13, ids, expert_map, hidden, H, I, E, mapped, ids.stride(1), x.stride(1), w13.stride(0),
        w13.stride(1), *strides_of_ones(scale13, 0, 1, 2), **constants, **common,
    )  # fmt: skip
    out = torch.empty((1, H), dtype=out_dtype, device=x.device)
    _down_kernel[(triton.cdiv(H, config["BLOCK_N"]),)](
        hidden, w2, scale2, weights, residual, residual_weight, ids, expert_map, out, H, I, E, slots, mapped,
        ids.stride(1), weights.stride(1), 0 if residual is None else residual.stride(1), w2.stride(0), w2.stride(1),
        *strides_of_ones(scale2, 0, 1, 2), **common,
    )  # fmt: skip
    return out
