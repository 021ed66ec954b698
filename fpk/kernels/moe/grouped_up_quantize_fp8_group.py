"""grouped_up_quantize_fp8_group: first product of experts, activated and quantized before it leaves.

    gate, up = a[r] @ b[e].T + bias[e]        e: offs[e - 1] <= r < offs[e]; scales as in grouped_scaled_mm_group
    act      = silu(gate) * up                as in act_and_mul, with alpha, beta and limit
    codes, scale = act by groups of 128 columns, as in quantize_fp8_group

The same as those three ops give: gate, up and act are rounded to hidden_dtype. Rows from offs[-1] on have no expert and
become zeros. What is saved is writing and reading 2I columns of 16 bits a row.

Kernels: `wide`, for Hopper (_gluon_wide); `tile`, anywhere.

Source: the FP8 experts of DeepSeek-V3.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_fp8_matmul, expect_one_of, expect_shape
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import FP8, encode, expand_groups
from fpk.kernels._activation import activate, activated, activation_parameters, expect_activation
from fpk.kernels._groups import group_amax
from fpk.kernels._tile import after_previous, amax_along, early_start, fp8_constants, quantize_fp8
from fpk.kernels.gemm._gluon import TYPES
from fpk.kernels.gemm._mm import load_k
from fpk.kernels.moe._gluon_wide import WIDE_KERNEL, launch_wide, wide_configs, wide_legal
from fpk.kernels.moe._grouped import (
    expect_grouped,
    expert_bins,
    expert_of_rows,
    expert_tile,
    grid,
    rows_per_expert,
)
from fpk.kernels.moe._rows import row_ends
from fpk.op import Cost, Kernel, op
from fpk.samples import sample, scales, strided
from fpk.shapes import MOE_LAYERS, MOE_TOKENS

WHAT = "grouped_up_quantize_fp8_group"


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: Tensor | None = None,
    alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    hidden_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (R, _), (E, N, K) = a.shape, b.shape
    expert = expert_of_rows(offs, R)[:, None]
    rows = a.float() * expand_groups(scale_a, tuple(a.shape), 1, 128)
    hidden = torch.zeros((R, N), dtype=torch.float32, device=a.device)
    for e in range(E):
        product = rows @ (b[e].float() * expand_groups(scale_b[e], (N, K), 128, 128)).T
        hidden = torch.where(expert == e, product if bias is None else product + bias[e].float(), hidden)
    act = activated(hidden.to(hidden_dtype), "silu", True, False, alpha, beta, limit)
    act = torch.where(expert < E, act, 0.0)
    fmt, amax = FP8[a.dtype], group_amax(act, 1, 128)
    scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(fmt.qmax)
    codes = encode(act.float() / expand_groups(scale, tuple(act.shape), 1, 128), fmt)
    return codes.view(a.dtype).contiguous(), scale


def check(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: Tensor | None, alpha: float | None,
    beta: float | None, limit: float | None, hidden_dtype: torch.dtype,
) -> None:  # fmt: skip
    expect_dtype(f"{WHAT}.a", a, *FP8)
    expect_dtype(f"{WHAT}.b", b, a.dtype)
    expect_grouped(WHAT, a, b, offs, bias, hidden_dtype)
    expect_one_of(f"{WHAT}.hidden_dtype", hidden_dtype, (torch.bfloat16, torch.float16))
    (R, K), (E, N) = a.shape, b.shape[:2]
    if N % 256:
        raise ValueError(f"{WHAT}.b: expected a multiple of 256 rows (gates and ups of whole groups), got {N}")
    expect_shape(f"{WHAT}.scale_a", scale_a, (R, triton.cdiv(K, 128)))
    expect_shape(f"{WHAT}.scale_b", scale_b, (E, N // 128, triton.cdiv(K, 128)))
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        expect_dtype(f"{WHAT}.{name}", tensor, torch.float32)
    expect_activation(
        WHAT, torch.empty((1, N), dtype=hidden_dtype, device="meta"), activation="silu", gated=True, interleaved=False,
        alpha=alpha, beta=beta, limit=limit,
    )  # fmt: skip
    expect_fp8_matmul(WHAT, a)


@triton.jit(do_not_specialize=["R", "E"])
def _tile_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, bias_ptr, offs_ptr, codes_ptr, scale_ptr,
    R, E, N, K,
    stride_am, stride_be, stride_bn, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    PDL: tl.constexpr, KIND: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of an expert, one group of columns."""
    after_previous(PDL)
    I = N // 2
    expert, end, first, n = expert_tile(offs_ptr, R, E, I // 128, BLOCK_E, BLOCK_M)
    if expert <= E:
        e = tl.minimum(expert, E - 1).to(tl.int64)
        offs_m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = n.to(tl.int64) * 128 + tl.arange(0, 128)
        rows_m = tl.where(offs_m < end, offs_m, first)
        a_rows = a_ptr + rows_m[:, None] * stride_am
        b_rows = b_ptr + e * stride_be + offs_n[:, None] * stride_bn
        up_rows = b_rows + I.to(tl.int64) * stride_bn
        sa_rows = sa_ptr + rows_m * stride_sam
        sb_row = sb_ptr + e * stride_sbe + n.to(tl.int64) * stride_sbn
        gate = tl.zeros((BLOCK_M, 128), dtype=tl.float32)
        up = tl.zeros((BLOCK_M, 128), dtype=tl.float32)
        for k in range(0, tl.where(expert < E, K, 0), 128):
            a = load_k(a_rows, k, K, 128, EVEN_K)
            sa = tl.load(sa_rows + k // 128 * stride_sak)[:, None]
            sb_ptrs = sb_row + k // 128 * stride_sbk
            part = tl.dot(a, tl.trans(load_k(b_rows, k, K, 128, EVEN_K)), out_dtype=tl.float32)
            gate += part * (sa * tl.load(sb_ptrs))
            part = tl.dot(a, tl.trans(load_k(up_rows, k, K, 128, EVEN_K)), out_dtype=tl.float32)
            up += part * (sa * tl.load(sb_ptrs + I // 128 * stride_sbn))
        if bias_ptr is not None:
            bias_row = bias_ptr + e * stride_bias + offs_n
            gate += tl.load(bias_row).to(tl.float32)[None, :]
            up += tl.load(bias_row + I).to(tl.float32)[None, :]
        g, u = gate.to(KIND).to(tl.float32), up.to(KIND).to(tl.float32)
        act = activate(g, u, "silu", True, ALPHA, BETA, LIMIT, False).to(KIND).to(tl.float32)
        act = tl.where(expert < E, act, 0.0)  # whatever a factor beta makes of zeros
        mask = (offs_m < end)[:, None]
        scale = tl.math.div_rn(tl.maximum(amax_along(act, act == act, 1), 1e-10), QMAX)
        codes = quantize_fp8(act, scale[:, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        tl.store(codes_ptr + offs_m[:, None] * I + offs_n[None, :], codes, mask=mask)
        tl.store(scale_ptr + offs_m * (I // 128) + n, scale, mask=offs_m < end)


def configs(a: Tensor, b: Tensor, **_: Any):
    rows = rows_per_expert(a, b)
    if of(a.device).arch == "cpu":  # the interpreter wants few programs
        yield Config(kernel="tile", BLOCK_M=32, num_warps=4, num_stages=2)
    if rows >= 32:
        yield Config(kernel="wide", GROUP_M=8, STAGES=4, num_warps=4)
    for m, warps in ((64, 8), (32, 4), (16, 4), (64, 4), (128, 8)):
        for stages in (3, 2, 4):
            if m <= max(16, 2 * rows):
                yield Config(kernel="tile", BLOCK_M=m, num_warps=warps, num_stages=stages)
    yield from wide_configs()


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, hidden_dtype: torch.dtype,
    **_: Any,
) -> bool:  # fmt: skip
    if config["kernel"] == "wide":
        fits = a.shape[0] > 0 and a.dtype is torch.float8_e4m3fn  # whose conversion saturates and keeps NaN to itself
        return fits and wide_legal(config, device, a, b, scale_a, scale_b, 128, 128, 128, None)
    held = config["num_stages"] if device.capability >= 80 else 1
    return (config["BLOCK_M"] + 256) * 128 * held + 4096 <= device.shared_limit


def key(a: Tensor, b: Tensor, bias: Tensor | None, **_: Any) -> dict[str, int | str]:
    E, N, K = b.shape
    return dict(M=bucket(a.shape[0]), N=N, K=K, E=E, dtype=str(a.dtype), bias=int(bias is not None))


def cost(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **_: Any) -> Cost:
    (R, K), (E, N) = a.shape, b.shape[:2]
    moved = R * K + min(E, R) * N * K + 4 * (scale_a.numel() + scale_b.numel()) + R * N // 2 + R * N // 64
    return Cost(flops=2 * R * N * K, bytes=moved)


def inputs(
    *, M, I, K, E, dropped=0.0, spread="even", bias=False, parameters=(None, None, None), dtype=torch.float8_e4m3fn,
    hidden_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    """I: groups of columns of the activation."""
    N, groups = 256 * I, triton.cdiv(K, 128)
    return dict(
        a=strided(sample((M, K), dtype, kind, device, seed), layout),
        b=strided(sample((E, N, K), dtype, "normal", device, seed + 1), layout),
        scale_a=scales((M, groups), device, seed + 2) * K**-0.5,
        scale_b=scales((E, 2 * I, groups), device, seed + 3) / 32,
        offs=row_ends(M, E, dropped, spread, device, seed),
        bias=sample((E, N), torch.float32, "normal", device, seed + 4) if bias else None,
        **dict(zip(("alpha", "beta", "limit"), parameters, strict=True)), hidden_dtype=hidden_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.02,
    domain=dict(
        M=(0, 1, 33, 70), I=(1, 3), K=(1, 128, 272), E=(1, 3), dropped=(0.0, 0.5, 1.0), spread=("even", "skewed"),
        bias=(False, True), parameters=((None, None, None), (1.25, 0.5, 3.0), (1.702, 1.0, 7.0)),
        dtype=(torch.float8_e4m3fn, torch.float8_e5m2), hidden_dtype=(torch.bfloat16, torch.float16),
        kind=("normal", "zeros"), layout=("contiguous", "rows"),
    ),
    kernels=dict(tile=Kernel(_tile_kernel, matrix=True), wide=WIDE_KERNEL),
    configs=configs, legal=legal, key=key, cost=cost,
    cases={
        f"{model}/T={t}": dict(M=t * top_k, I=inner // 128, K=hidden, E=experts, dropped=dropped)
        for model, (experts, top_k, hidden, inner, dropped) in MOE_LAYERS.items() if inner % 128 == 0
        for t in MOE_TOKENS
    },
)  # fmt: skip
def grouped_up_quantize_fp8_group(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: Tensor | None = None,
    alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    hidden_dtype: torch.dtype = torch.bfloat16, *, config: Config,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Multiply the rows of each expert by its gates and ups, activate and quantize.

    Args:
        a: (R, K) FP8 codes sorted by expert, elements of a row contiguous.
        b: (E, 2I, K) codes of gates, then ups, of a's dtype; I a multiple of 128; elements of a row contiguous.
        scale_a: (R, cdiv(K, 128)) fp32, any strides.
        scale_b: (E, 2I / 128, cdiv(K, 128)) fp32, any strides.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
        bias: (E, 2I) fp32, bf16 or fp16, or None.
        alpha, beta, limit: of the activation "silu", as in act_and_mul.
        hidden_dtype: bf16 or fp16, what gate, up and activation are rounded to.

    Returns:
        codes (R, I) of a's dtype and scale (R, I / 128) fp32, contiguous; rows from offs[-1] on are zeros.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
        NotImplementedError: FP8 on a GPU without FP8 matrix units.
    """
    (R, K), (E, N) = a.shape, b.shape[:2]
    codes = torch.empty((R, N // 2), dtype=a.dtype, device=a.device)
    scale = torch.empty((R, N // 256), dtype=torch.float32, device=a.device)
    if R == 0:
        return codes, scale
    fmt, device = FP8[a.dtype], of(a.device)
    _, alpha, beta, limit = activation_parameters("silu", alpha, beta, limit)
    if config["kernel"] == "wide":
        launch_wide(
            config, a, b, offs, scale_a, scale_b, bias, codes, expert_bins(E), scale, KIND=TYPES[hidden_dtype],
            ALPHA=alpha, BETA=beta, LIMIT=limit, QMAX=fmt.qmax,
        )  # fmt: skip
        return codes, scale
    options = {n: v for n, v in config.items() if n != "kernel"}
    _tile_kernel[grid(R, N // 2, E, Config(**options, BLOCK_N=128))](
        a, b, scale_a, scale_b, bias, offs, codes.view(torch.uint8), scale,
        R, E, N, K, a.stride(0), b.stride(0), b.stride(1), *scale_a.stride(), *scale_b.stride(),
        0 if bias is None else bias.stride(0),
        KIND=tl.bfloat16 if hidden_dtype is torch.bfloat16 else tl.float16, ALPHA=alpha, BETA=beta, LIMIT=limit,
        QMAX=fmt.qmax, **fp8_constants(fmt, device), EVEN_K=K % 128 == 0, BLOCK_E=expert_bins(E),
        **early_start(device), **options,
    )  # fmt: skip
    return codes, scale
