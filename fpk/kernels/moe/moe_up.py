"""moe_up: first product and activation of a few tokens' experts, without sorting the tokens.

    gate, up  = a[t] @ b[e].T + bias[e]       e: the expert of ids[t, j]; halves, or interleaved rows of b
    out[t, j] = activation(gate) * up

What sort_by_expert, a grouped product and act_and_mul give, in the order of slots: gate, up and their activation are
rounded to out_dtype. Weights are read once for each slot that uses them: made for so few tokens that hardly two of them
share an expert. Rows of dropped slots are zeros.

Source: the decode step of mixture-of-experts models.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.kernels._activation import activate, activated, activation_parameters, expect_activation
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
from fpk.op import Cost, Kernel, op
from fpk.samples import sample
from fpk.shapes import MOE_LAYERS

AHEAD = 24 << 20
"""Bytes of the next product's weights that are asked for at most: half of what the L2 of an H200 holds."""


def reference(
    a: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None, group: int = -1,
    block_rows: int = 1, bias: Tensor | None = None, activation: str = "silu", gated: bool = True,
    interleaved: bool = False, alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    expert_map: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, upcoming: Tensor | None = None,
) -> Tensor:  # fmt: skip
    top_k = ids.shape[1]
    local, here = experts_of(ids, expert_map, b.shape[0])
    rows, scale = (None if x is None else x.float().repeat_interleave(top_k, 0) for x in (a, scale_a))
    assert rows is not None
    hidden = products(rows, scale, b, scale_b, bias, local.flatten(), group, block_rows).to(out_dtype)
    out = activated(hidden, activation, gated, interleaved, alpha, beta, limit)
    return torch.where(here.flatten()[:, None], out, 0.0)


def check(
    a: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, group: int, block_rows: int,
    bias: Tensor | None, expert_map: Tensor | None, out_dtype: torch.dtype, upcoming: Tensor | None, **activation: Any,
) -> None:  # fmt: skip
    expect_few("moe_up", a, ids, b, scale_a, scale_b, group, block_rows, bias, expert_map, out_dtype)
    expect_shape("moe_up.ids", ids, (a.shape[0], ids.shape[1]))
    if upcoming is not None:
        expect_rank("moe_up.upcoming", upcoming, 3)
        expect_shape("moe_up.upcoming", upcoming, (b.shape[0], *upcoming.shape[1:]))
    expect_activation("moe_up", torch.empty((1, b.shape[1]), dtype=out_dtype, device="meta"), **activation)


@triton.jit
def _ask(ptrs):
    """Ask for lines of memory to come to L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [ptrs.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_mapped", "E", "top_k", "next_bytes"])
def _up_kernel(
    a_ptr, sa_ptr, b_ptr, sb_ptr, bias_ptr, ids_ptr, map_ptr, next_ptr, out_ptr,
    K, I, E, top_k, num_mapped, next_bytes,
    stride_am, stride_sam, stride_sak, stride_be, stride_bn, stride_sbe, stride_sbn, stride_sbk, stride_bias, stride_im,
    stride_ik,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, FORMULA: tl.constexpr, GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, ONE: tl.constexpr,
    EVEN: tl.constexpr, LINES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of a slot. GROUP: columns that share a scale in `a` and `b`, -1 for all; ROWS: rows of `b` that
    share one; ONE: so do all gates of a program, and all its ups."""
    after_previous(PDL)
    slot = tl.program_id(1)
    token = (slot // top_k).to(tl.int64)
    e = local_expert(ids_ptr, map_ptr, token * stride_im + slot % top_k * stride_ik, slot >= 0, num_mapped, E)
    first = tl.program_id(0) * BLOCK_N
    offs_n = first + tl.arange(0, BLOCK_N)
    mask_n = offs_n < I
    out_ptrs = out_ptr + slot.to(tl.int64) * I + offs_n
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if e >= 0:
        LANES: tl.constexpr = BLOCK_K // LANE
        lane = tl.arange(0, LANES)
        cols = lane[None, :, None] * LANE + tl.arange(0, LANE)[None, None, :]
        step: tl.constexpr = 2 if INTERLEAVED else 1
        up_at = first * 0 + (1 if INTERLEAVED else I)
        g_rows = tl.where(mask_n, offs_n, first) * step
        b_ptrs = b_ptr + e * stride_be + g_rows.to(tl.int64)[:, None, None] * stride_bn + cols
        a_ptrs = a_ptr + token * stride_am + cols
        if ONE:
            blocks = (first * step // ROWS).to(tl.int64)
            up_blocks = ((first * step + up_at) // ROWS).to(tl.int64)
        else:
            blocks = (g_rows // ROWS).to(tl.int64)[:, None]
            up_blocks = ((g_rows + up_at) // ROWS).to(tl.int64)[:, None]
        gate = tl.zeros((BLOCK_N, LANES), dtype=tl.float32)
        up = gate
        for k in tl.range(0, K, BLOCK_K, num_stages=DEPTH):
            a = load_lanes(a_ptrs, k, cols, K, EVEN)
            part = tl.sum(load_lanes(b_ptrs, k, cols, K, EVEN) * a, axis=2)
            if GROUP > 0:
                group = (k + lane * LANE) // GROUP
                there = (k + lane * LANE < K)[None, :]
                sa = tl.load(sa_ptr + token * stride_sam + group[None, :] * stride_sak, mask=there, other=0.0)
                sb_ptrs = sb_ptr + e * stride_sbe + group[None, :] * stride_sbk
                gate += part * (sa * tl.load(sb_ptrs + blocks * stride_sbn, mask=there, other=0.0))
            else:
                gate += part
            if GATED:
                part = tl.sum(load_lanes(b_ptrs + up_at.to(tl.int64) * stride_bn, k, cols, K, EVEN) * a, axis=2)
                if GROUP > 0:
                    up += part * (sa * tl.load(sb_ptrs + up_blocks * stride_sbn, mask=there, other=0.0))
                else:
                    up += part
        if LINES > 0:  # a share of what comes next, while the last sums are on their way
            line = (tl.program_id(0) * LINES + tl.arange(0, LINES)).to(tl.int64) * 128
            _ask(next_ptr + e * next_bytes + tl.where(line < next_bytes, line, 0))
        g, u = tl.sum(gate, axis=1), tl.sum(up, axis=1)
        scale_row = None
        bias_row = bias_ptr
        if GROUP < 0 and sb_ptr is not None:
            scale_row = sb_ptr + e * stride_sbe
        if bias_ptr is not None:
            bias_row = bias_ptr + e * stride_bias
        if GROUP < 0 and sa_ptr is not None:
            scale = tl.load(sa_ptr + token * stride_sam)
            g *= scale
            u *= scale
        g = scaled_row(g, scale_row, bias_row, g_rows, mask_n, stride_sbn, ROWS).to(kind).to(tl.float32)
        if GATED:
            u = scaled_row(u, scale_row, bias_row, g_rows + up_at, mask_n, stride_sbn, ROWS).to(kind).to(tl.float32)
        out = activate(g, u, FORMULA, GATED, ALPHA, BETA, LIMIT, False)
        tl.store(out_ptrs, out.to(kind), mask=mask_n)
    else:
        tl.store(out_ptrs, tl.zeros((BLOCK_N,), dtype=kind), mask=mask_n)


def configs(a: Tensor, **_: Any):
    if of(a.device).arch == "cpu":  # the interpreter wants few programs
        for rows, cols in ((128, 256), (64, 512), (128, 128)):
            yield Config(BLOCK_N=rows, BLOCK_K=cols, DEPTH=1, num_warps=4)
        return
    yield Config(BLOCK_N=2, BLOCK_K=1024, DEPTH=3, num_warps=1)
    for rows, cols, warps in (
        (1, 1024, 1), (1, 2048, 1), (2, 512, 1), (2, 1024, 2), (4, 512, 1), (4, 1024, 2), (4, 512, 2), (8, 512, 2),
    ):  # fmt: skip
        for depth in (2, 3, 4):
            yield Config(BLOCK_N=rows, BLOCK_K=cols, DEPTH=depth, num_warps=warps)


def key(
    a: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, group: int, gated: bool, **_: Any
) -> dict[str, int | str]:
    E, N, K = b.shape
    return dict(
        M=bucket(ids.shape[0]), top_k=ids.shape[1], E=E, N=N, K=K, a=str(a.dtype), b=str(b.dtype), group=group,
        scales=int(scale_a is not None) + int(scale_b is not None), gated=int(gated),
    )  # fmt: skip


def cost(ids: Tensor, b: Tensor, **_: Any) -> Cost:
    slots, weights = ids.numel(), b.shape[1] * b.shape[2]
    return Cost(flops=2 * slots * weights, bytes=weights * min(slots, b.shape[0]) * b.element_size())


def tolerance(out_dtype: torch.dtype, **_: Any) -> float:
    return {torch.bfloat16: 5e-3, torch.float16: 7e-4}[out_dtype]  # three roundings


def inputs(
    *, M, K, I, E=4, top_k=2, scheme="channel", gated=True, interleaved=False, bias=False, mapped=False,
    ahead=False, dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda",
    seed=0,
):  # fmt: skip
    rows = 2 * I if gated else I
    made = few_inputs(
        M, M, rows, K, E, top_k, scheme, bias, mapped, dtype, out_dtype, kind, layout, device, seed
    )  # fmt: skip
    return made | dict(
        gated=gated, activation="silu" if gated else "gelu_tanh", interleaved=interleaved and gated, alpha=None,
        beta=None, limit=None, upcoming=sample((E, K, I), dtype, "normal", device, seed + 6) if ahead else None,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 3), K=(16, 128, 300), I=(1, 100, 256), E=(2, 3), top_k=(1, 3),
        scheme=("plain", "weights", "tensor", "block", "channel"), gated=(True, False), interleaved=(False, True),
        bias=(False, True), mapped=(False, True), ahead=(False, True), dtype=(torch.float8_e4m3fn, torch.float8_e5m2),
        out_dtype=(torch.bfloat16, torch.float16), kind=("normal", "zeros"), layout=("contiguous", "rows"),
    ),
    kernels=dict(up=Kernel(_up_kernel)),
    configs=configs, key=key, cost=cost,
    cases={
        f"{model}/T={t}": dict(M=t, K=hidden, I=inner, E=experts, top_k=top_k)
        for model, (experts, top_k, hidden, inner, _) in MOE_LAYERS.items() for t in (1, 4)
    },
)  # fmt: skip
def moe_up(
    a: Tensor, ids: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None, group: int = -1,
    block_rows: int = 1, bias: Tensor | None = None, activation: str = "silu", gated: bool = True,
    interleaved: bool = False, alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    expert_map: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, upcoming: Tensor | None = None, *,
    config: Config,
) -> Tensor:  # fmt: skip
    """Multiply a few tokens by their experts' gates and ups, and activate.

    Args:
        a: (T, K) FP8 codes with scale_a, else bf16 or fp16; elements of a row contiguous.
        ids: (T, top_k) int32 or int64, any strides; a slot whose id or mapped id is out of range is dropped.
        b: (E, 2I, K) gates and ups, halves or interleaved rows; (E, I, K) if not gated; a's dtype if `a` has scales,
            else FP8 codes with scales, or a's dtype without. Elements of a row contiguous.
        scale_a: (T, 1), or (T, cdiv(K, 128)) with group 128, fp32, or None.
        scale_b: fp32, (E, rows of b, 1), (E, 1, 1) with block_rows -1, or (E, cdiv(rows, 128), cdiv(K, 128)) with
            group 128; None for weights that are no codes.
        group: columns that share a scale, in `a` and `b`: -1 for all, or 128.
        block_rows: rows of `b` that share a scale: 1 or -1, 128 with group 128.
        bias: (E, rows of b) fp32, bf16 or fp16, or None.
        activation, gated, interleaved, alpha, beta, limit: as in act_and_mul.
        expert_map: (experts of all ranks,) int32 or int64 or None, as in sort_by_expert.
        out_dtype: bf16 or fp16.
        upcoming: (E, rows, columns) weights of the next product, or None; as much of those of the experts used here as
            the L2 holds is asked for. No value depends on it.

    Returns:
        (T * top_k, I) of out_dtype in the order of slots; rows of dropped slots are zeros.

    Raises:
        ValueError: a shape, dtype, stride or combination does not fit.
        NotImplementedError: FP8 on a GPU without FP8 units.
    """
    (T, K), top_k, (E, N, _) = a.shape, ids.shape[1], b.shape
    I = N // 2 if gated else N
    out = torch.empty((T * top_k, I), dtype=out_dtype, device=a.device)
    if T == 0:
        return out
    formula, alpha, beta, limit = activation_parameters(activation, alpha, beta, limit)
    rows = config["BLOCK_N"] * (2 if interleaved else 1)
    aligned = interleaved or not gated or I % config["BLOCK_N"] == 0
    early, programs = early_start(of(a.device)), triton.cdiv(I, config["BLOCK_N"])
    size, lines = 0, 0
    # one token alone: with more, each count of tokens would be another kernel, and there is less to wait for
    if T == 1 and upcoming is not None and upcoming.is_contiguous() and upcoming.numel() and early["PDL"]:
        size = upcoming.nbytes // E
        lines = triton.next_power_of_2(triton.cdiv(min(size, AHEAD // top_k), 128 * programs))
        upcoming = upcoming.view(torch.uint8)
    _up_kernel[(programs, T * top_k)](
        a, scale_a, b, scale_b, bias, ids, expert_map, upcoming if lines else None, out,
        K, I, E, top_k, 0 if expert_map is None else expert_map.shape[0], size,
        a.stride(0), *strides_of_ones(scale_a, 0, 1), b.stride(0), b.stride(1), *strides_of_ones(scale_b, 0, 1, 2),
        *strides_of_ones(bias, 0), ids.stride(0), ids.stride(1),
        GROUP=group, ROWS=block_rows, FORMULA=formula, GATED=gated, INTERLEAVED=interleaved, ALPHA=alpha, BETA=beta,
        LIMIT=limit, ONE=group > 0 and group % rows == 0 and aligned, EVEN=K % config["BLOCK_K"] == 0,
        LINES=lines, **early, **config,
    )  # fmt: skip
    return out
