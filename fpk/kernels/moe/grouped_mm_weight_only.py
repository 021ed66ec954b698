"""grouped_mm_weight_only: one product per expert of bf16 or fp16 rows and quantized weights.

    out[r, n] = sum_k a[r, k] * b[e, n, k] * scale_b[e, n // rows, k // cols]  (+ bias[e, n])

e is the expert of row r: offs[e - 1] <= r < offs[e]. Rows from offs[-1] on have no expert and become zeros, whatever
they hold. For one expert this is mm_weight_only: codes are decoded exactly to the activations' type, scales are applied
in fp32 to sums. Needs no FP8 unit.

With gather, row r of all this is row gather[r] // top_k of `a`: rows need not be moved before.

Kernels: `tile`, K in steps that lie inside one group of columns; `descriptor`, the same with weights (and rows, unless
gathered) by tensor descriptors (TMA); `segment`, steps of any length.

Source: W8A16 experts (vLLM's fused MoE through Marlin).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_granularity, expect_shape
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import E8M0, FP8, Granularity, decode, expand_groups
from fpk.kernels._tile import after_previous, decode_fp8, early_start
from fpk.kernels.gemm._mm import TMA_TARGETS, accumulate, finish, load_k, load_scale, stages_held, store_tile
from fpk.kernels.moe._grouped import (
    descriptor_tiles,
    descriptors,
    expect_gather,
    expect_grouped,
    expert_bins,
    expert_of_rows,
    expert_tile,
    fits_row_descriptor,
    fits_weight_descriptor,
    gathered,
    grid,
    grouped_tiles,
    load_tile,
    rows_per_expert,
    source_rows,
    store_zeros,
)
from fpk.kernels.moe._rows import gather_rows, row_ends
from fpk.op import Cost, Kernel, op
from fpk.samples import sample, scales, strided
from fpk.shapes import grouped_cases


def reference(
    a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, rows: int = 1, cols: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, gather: Tensor | None = None, top_k: int = 1,
) -> Tensor:  # fmt: skip
    a = gathered(a, gather, top_k)
    factor = decode(scale_b, E8M0) if scale_b.dtype is torch.uint8 else scale_b
    E, N, K = b.shape
    expert = expert_of_rows(offs, a.shape[0])[:, None]
    out = torch.zeros((a.shape[0], N), dtype=torch.float32, device=a.device)
    for e in range(E):
        value = b[e].float() if b.dtype is torch.int8 else decode(b[e], FP8[b.dtype])
        product = a.float() @ (value * expand_groups(factor[e], (N, K), rows, cols)).T
        out = torch.where(expert == e, product if bias is None else product + bias[e].float(), out)
    return out.to(out_dtype or a.dtype)


def check(
    a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, rows: int, cols: int, bias: Tensor | None,
    out_dtype: torch.dtype | None, gather: Tensor | None, top_k: int, **_: Any,
) -> None:  # fmt: skip
    expect_dtype("grouped_mm_weight_only.a", a, torch.bfloat16, torch.float16)
    expect_dtype("grouped_mm_weight_only.b", b, *FP8, torch.int8)
    expect_grouped("grouped_mm_weight_only", a, b, offs, bias, out_dtype or a.dtype)
    expect_gather("grouped_mm_weight_only", a, gather, top_k)
    expect_granularity("grouped_mm_weight_only", rows=rows, cols=cols)
    shape = Granularity("", rows, cols).scale_shape(tuple(b.shape))
    expect_shape("grouped_mm_weight_only.scale_b", scale_b, shape)
    expect_dtype("grouped_mm_weight_only.scale_b", scale_b, torch.float32, torch.uint8)


@triton.jit
def _decoded(
    b_desc, row, b_rows, k, stop,
    DTYPE: tl.constexpr, INTEGERS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr,
    IEEE: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A tile of weight codes as DTYPE, exactly; INTEGERS decodes fp8 bytes where the ISA does not convert them."""
    b = load_tile(b_desc, row, b_rows, k, stop, BLOCK_K, EVEN_K)
    if INTEGERS:
        b = decode_fp8(b, MANTISSA, BIAS, NAN_CODE, IEEE)
    return b.to(DTYPE)


@triton.jit(do_not_specialize=["R", "E", "top_k"])
def _grouped_kernel(
    a_ptr, b_ptr, a_desc, b_desc, scale_ptr, bias_ptr, offs_ptr, gather_ptr, out_ptr,
    R, E, N, K, top_k,
    stride_am, stride_be, stride_bn, stride_om, stride_se, stride_sn, stride_sk, stride_bias,
    PDL: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E8M0: tl.constexpr, INTEGERS: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, IEEE: tl.constexpr, EVEN_K: tl.constexpr,
    SEGMENTS: tl.constexpr, SWAP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    expert, end, first, n = expert_tile(offs_ptr, R, E, tl.cdiv(N, BLOCK_N), BLOCK_E, BLOCK_M)
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty
    if expert < E:
        e = expert.to(tl.int64)
        offs_m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        a_rows = a_ptr + source_rows(gather_ptr, offs_m, end, first, top_k)[:, None] * stride_am
        b_rows = b_ptr + e * stride_be + tl.where(mask_n, offs_n, 0)[:, None] * stride_bn
        scale_rows = scale_ptr + e * stride_se + (offs_n // ROWS if ROWS > 0 else offs_n * 0) * stride_sn
        row = expert * N + n * BLOCK_N
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if COLS == -1:  # one scale a row or fewer: it waits until the end
            for k in range(0, K, BLOCK_K):
                a = load_tile(a_desc, first, a_rows, k, K, BLOCK_K, EVEN_K)
                b = _decoded(
                    b_desc, row, b_rows, k, K, DTYPE, INTEGERS, MANTISSA, BIAS, NAN_CODE, IEEE, BLOCK_K, EVEN_K
                )
                acc = accumulate(a, b, acc, SWAP, 0)
            scale = load_scale(scale_rows, mask_n, E8M0)
            acc *= scale[:, None] if SWAP else scale[None, :]
        elif SEGMENTS:
            k = 0
            while k < K:
                stop = tl.minimum(tl.minimum((k // COLS + 1) * COLS, k + BLOCK_K), K)
                a = load_k(a_rows, k, stop, BLOCK_K, False)
                b = _decoded(
                    None, row, b_rows, k, stop, DTYPE, INTEGERS, MANTISSA, BIAS, NAN_CODE, IEEE, BLOCK_K, False
                )
                scale = load_scale(scale_rows + k // COLS * stride_sk, mask_n, E8M0)
                part = accumulate(a, b, tl.zeros(acc.shape, dtype=tl.float32), SWAP, 0)
                acc += part * (scale[:, None] if SWAP else scale[None, :])
                k = stop
        else:
            for k in range(0, K, BLOCK_K):
                a = load_tile(a_desc, first, a_rows, k, K, BLOCK_K, EVEN_K)
                b = _decoded(
                    b_desc, row, b_rows, k, K, DTYPE, INTEGERS, MANTISSA, BIAS, NAN_CODE, IEEE, BLOCK_K, EVEN_K
                )
                scale = load_scale(scale_rows + k // COLS * stride_sk, mask_n, E8M0)
                part = accumulate(a, b, tl.zeros(acc.shape, dtype=tl.float32), SWAP, 0)
                acc += part * (scale[:, None] if SWAP else scale[None, :])
        if SWAP:
            acc = tl.trans(acc)
        bias_row = bias_ptr
        if bias_ptr is not None:
            bias_row = bias_ptr + e * stride_bias
        acc = finish(acc, None, None, bias_row, None, None, offs_m, offs_n, end, N, 0, 0, 0)
        store_tile(out_ptr, acc, offs_m, offs_n, end, N, stride_om)
    elif expert == E:
        store_zeros(out_ptr, first, R, n, N, stride_om, BLOCK_M, BLOCK_N)


def configs(a: Tensor, b: Tensor, cols: int, top_k: int, **_: Any):
    rows = rows_per_expert(a, b, top_k)
    wide = 64 if cols < 0 else max(16, min(64, cols & -cols))
    if of(a.device).arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(kernel="tile", SWAP=False, BLOCK_M=32, BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=2)
    if rows <= 32:
        yield Config(
            kernel="tile", SWAP=True, BLOCK_M=max(16, rows), BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=4
        )
    yield Config(kernel="tile", SWAP=False, BLOCK_M=64, BLOCK_N=128, BLOCK_K=wide, num_warps=4, num_stages=3)
    for k in (64, 32, 16):
        yield Config(kernel="segment", SWAP=False, BLOCK_M=64, BLOCK_N=64, BLOCK_K=k, num_warps=4, num_stages=2)
    yield from grouped_tiles(rows, (32, 64, 128))
    yield from descriptor_tiles(rows, (64, 128))


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, cols: int, gather: Tensor | None, **_: Any
) -> bool:  # fmt: skip
    if config["kernel"] == "descriptor" and not (
        fits_weight_descriptor(b) and (gather is not None or fits_row_descriptor(a))
    ):
        return False
    # a step must lie inside one group of columns
    if config["kernel"] != "segment" and 0 < cols < a.shape[1] and cols % config["BLOCK_K"] != 0:
        return False
    buffers = (2 * config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * stages_held(config, device)
    # decoded weights pass through shared memory where the matrix unit does not take them from registers
    return buffers + 2 * config["BLOCK_N"] * config["BLOCK_K"] + 2048 <= device.shared_limit


def key(
    a: Tensor, b: Tensor, scale_b: Tensor, rows: int, cols: int, bias: Tensor | None, out_dtype: torch.dtype | None,
    gather: Tensor | None, top_k: int, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    E, N, K = b.shape
    return dict(
        M=bucket(a.shape[0]) * top_k, N=N, K=K, E=E, a=str(a.dtype), b=str(b.dtype), scale=str(scale_b.dtype),
        rows=rows, cols=cols, out_dtype=str(out_dtype or a.dtype), bias=int(bias is not None),
        gather=int(gather is not None),
    )  # fmt: skip


def cost(a: Tensor, b: Tensor, scale_b: Tensor, out_dtype: torch.dtype | None, top_k: int, **_: Any) -> Cost:
    (T, K), (E, N) = a.shape, b.shape[:2]
    R = T * top_k
    scale_bytes = scale_b.numel() * scale_b.element_size()
    moved = 2 * T * K + min(E, R) * N * K + R * N * (out_dtype or a.dtype).itemsize + scale_bytes
    return Cost(flops=2 * R * N * K, bytes=moved)


def tolerance(a: Tensor, out_dtype: torch.dtype | None, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 2e-6}[out_dtype or a.dtype] * 1.1
    # the tensor cores of sm90 cut fp32 sums toward zero every 16 columns: half of a last place on average, of sums
    # that grow with the root of K; together 2^-25 of the result a step (measured: 0.63 of that, K from 272 to 8704)
    return rounding + (0.0 if a.device.type == "cpu" else a.shape[1] / 16 * 2.0**-25)


def inputs(
    *, M, N, K, E, dropped=0.0, spread="even", granularity=(1, -1), scale_format="fp32", bias=False,
    gather=0, a_dtype=torch.bfloat16, dtype=torch.float8_e4m3fn, out_dtype=None, kind="normal", layout="contiguous",
    device="cuda", seed=0,
):  # fmt: skip
    """gather: rows for each row of `a`, 0 for rows that lie in order."""
    tokens = triton.cdiv(M, max(gather, 1))
    M = tokens * max(gather, 1)
    rows, cols = granularity
    shape = Granularity("", rows, cols).scale_shape((E, N, K))
    return dict(
        a=strided(sample((tokens, K), a_dtype, kind, device, seed), layout),
        b=strided(sample((E, N, K), dtype, "normal", device, seed + 1), layout),
        scale_b=scales(shape, device, seed + 2, scale_format == "e8m0"),
        offs=row_ends(M, E, dropped, spread, device, seed), rows=rows, cols=cols,
        bias=sample((E, N), a_dtype, "normal", device, seed + 3) if bias else None, out_dtype=out_dtype,
        gather=gather_rows(M, device, seed) if gather else None, top_k=max(gather, 1),
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(1, 64, 100, 128, 272), E=(1, 3, 9), dropped=(0.0, 0.5, 1.0),
        spread=("even", "skewed", "one"),
        granularity=((1, -1), (-1, -1), (1, 32), (128, 128), (32, 64), (1, 48), (20, 100)),
        scale_format=("fp32", "e8m0"), bias=(False, True), gather=(0, 1, 3), a_dtype=(torch.bfloat16, torch.float16),
        dtype=(*FP8, torch.int8), out_dtype=(None, torch.float32), kind=("normal", "zeros", "zero_rows"),
        layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        tile=Kernel(_grouped_kernel, matrix=True), segment=Kernel(_grouped_kernel, matrix=True),
        descriptor=Kernel(_grouped_kernel, targets=TMA_TARGETS, matrix=True),
    ),
    configs=configs, legal=legal, key=key, cost=cost, cases=grouped_cases(),
)  # fmt: skip
def grouped_mm_weight_only(
    a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, rows: int = 1, cols: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, gather: Tensor | None = None, top_k: int = 1, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply the 16-bit rows of each expert by its quantized weights.

    Args:
        a: (R, K) rows sorted by expert, bf16 or fp16, elements of a row contiguous; (T, K) with gather.
        b: (E, N, K) weight codes, an fp8 type or int8, elements of a row contiguous.
        scale_b: one element per group of each matrix: (E, N, 1) per channel, (E, 1, 1) per matrix, (E, cdiv(N, rows),
            cdiv(K, cols)) in general; fp32 or uint8 (e8m0). value = code * scale.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
        rows, cols: elements of a matrix that share a scale, -1 for the full extent.
        bias: (E, N) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32; None is a's type.
        gather: (T * top_k,) int32 or None; row r is row gather[r] // top_k of `a` (`index` of sort_by_expert).
        top_k: rows for each row of `a`, with gather.

    Returns:
        (R, N) of out_dtype, accumulated in fp32; rows from offs[-1] on are zeros.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
    """
    (T, K), (E, N) = a.shape, b.shape[:2]
    R = T * top_k
    out = torch.empty((R, N), dtype=out_dtype or a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    fmt = FP8.get(b.dtype)
    integers = fmt is not None and not of(a.device).has_fp8_conversion(fmt.name)
    config = dict(config)
    codes = b.view(torch.uint8) if integers else b
    a_desc, b_desc = descriptors(config, a, codes, gather)
    segments = config.pop("kernel") == "segment"
    _grouped_kernel[grid(R, N, E, config)](
        a, codes, a_desc, b_desc, scale_b, bias, offs, gather, out,
        R, E, N, K, top_k, a.stride(0), b.stride(0), b.stride(1), out.stride(0), *scale_b.stride(),
        0 if bias is None else bias.stride(0),
        ROWS=rows, COLS=cols if cols < K else -1, E8M0=scale_b.dtype is torch.uint8, INTEGERS=integers,
        MANTISSA=fmt.mantissa_bits if fmt else 0, BIAS=fmt.bias if fmt else 0, NAN_CODE=fmt.nan_code if fmt else 0,
        IEEE=fmt is not None and fmt.kind == "ieee", EVEN_K=K % config["BLOCK_K"] == 0, SEGMENTS=segments,
        BLOCK_E=expert_bins(E), **early_start(of(a.device)), **config,
    )  # fmt: skip
    return out
