"""grouped_mm: one matrix product per expert over rows sorted by expert, unquantized.

    out[r, n] = sum_k a[r, k] * b[e(r), n, k]  (+ bias[e(r), n])        e(r): offs[e - 1] <= r < offs[e]

Rows from offs[-1] on have no expert and become zeros, whatever they hold. fp32 accumulation, IEEE products for fp32
operands, the bias added in fp32 before the single rounding. Quantized: grouped_scaled_mm, grouped_scaled_mm_group,
grouped_mm_weight_only.

With gather, row r of all this is row gather[r] // top_k of `a`: rows need not be moved before.

Kernels: `tile`, pointers; `descriptor`, weights (and rows, unless gathered) by tensor descriptors (TMA);
`vector`, few rows (_vector); `gluon`, for Hopper (_gluon_grouped).

Source: torch.nn.functional.grouped_mm, with weights (E, N, K) as in nn.Linear.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.kernels._tile import after_previous, early_start
from fpk.kernels.gemm._mm import TMA_TARGETS, accumulate, finish, stages_held, store_tile
from fpk.kernels.moe._gluon_grouped import GLUON_KERNEL, gluon_configs, gluon_legal, launch_gluon
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
    measured_tiles,
    rows_per_expert,
    source_rows,
    store_zeros,
)
from fpk.kernels.moe._rows import gather_rows, row_ends
from fpk.kernels.moe._vector import VECTOR_KERNEL, launch_vector, vector_configs
from fpk.op import Cost, Kernel, op
from fpk.samples import sample, strided
from fpk.shapes import grouped_cases


def reference(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    gather: Tensor | None = None, top_k: int = 1,
) -> Tensor:  # fmt: skip
    a = gathered(a, gather, top_k)
    expert = expert_of_rows(offs, a.shape[0])[:, None]
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
    for e in range(b.shape[0]):
        product = a.float() @ b[e].float().T
        out = torch.where(expert == e, product if bias is None else product + bias[e].float(), out)
    return out.to(out_dtype or a.dtype)


def check(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, gather: Tensor | None,
    top_k: int, **_: Any,
) -> None:  # fmt: skip
    expect_dtype("grouped_mm.a", a, *FLOAT_INPUTS)
    expect_dtype("grouped_mm.b", b, a.dtype)
    expect_grouped("grouped_mm", a, b, offs, bias, out_dtype or a.dtype)
    expect_gather("grouped_mm", a, gather, top_k)


@triton.jit(do_not_specialize=["R", "E", "top_k"])
def _grouped_kernel(
    a_ptr, b_ptr, a_desc, b_desc, bias_ptr, offs_ptr, gather_ptr, out_ptr,
    R, E, N, K, top_k,
    stride_am, stride_be, stride_bn, stride_om, stride_bias,
    PDL: tl.constexpr, IEEE: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    expert, end, first, n = expert_tile(offs_ptr, R, E, tl.cdiv(N, BLOCK_N), BLOCK_E, BLOCK_M)
    if expert < E:
        e = expert.to(tl.int64)
        offs_m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        a_rows = a_ptr + source_rows(gather_ptr, offs_m, end, first, top_k)[:, None] * stride_am
        b_rows = b_ptr + e * stride_be + tl.where(offs_n < N, offs_n, 0)[:, None] * stride_bn
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a = load_tile(a_desc, first, a_rows, k, K, BLOCK_K, EVEN_K)
            b = load_tile(b_desc, expert * N + n * BLOCK_N, b_rows, k, K, BLOCK_K, EVEN_K)
            if IEEE:
                if SWAP:
                    acc = tl.dot(b, tl.trans(a), acc, input_precision="ieee")
                else:
                    acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
            else:
                acc = accumulate(a, b, acc, SWAP, 0)
        if SWAP:
            acc = tl.trans(acc)
        bias_row = bias_ptr
        if bias_ptr is not None:
            bias_row = bias_ptr + e * stride_bias
        acc = finish(acc, None, None, bias_row, None, None, offs_m, offs_n, end, N, 0, 0, 0)
        store_tile(out_ptr, acc, offs_m, offs_n, end, N, stride_om)
    elif expert == E:
        store_zeros(out_ptr, first, R, n, N, stride_om, BLOCK_M, BLOCK_N)


def torch_grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    gather: Tensor | None = None, top_k: int = 1,
) -> Tensor:  # fmt: skip
    """torch's own (CUTLASS on sm90): bf16, no bias, rows in order; rows of no expert are left unwritten."""
    if (
        bias is not None
        or gather is not None
        or a.dtype is not torch.bfloat16
        or out_dtype not in (None, torch.bfloat16)
    ):
        raise NotImplementedError("torch grouped_mm: expected bf16 without a bias")
    return torch.nn.functional.grouped_mm(a, b.transpose(1, 2), offs=offs)


def configs(a: Tensor, b: Tensor, top_k: int, **_: Any):
    rows = rows_per_expert(a, b, top_k)
    if of(a.device).arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(kernel="tile", SWAP=False, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2)
    if a.dtype is not torch.float32:
        yield from measured_tiles(a.shape[0] * top_k, b.shape[0], b.shape[2], 2, 1, False)
    if rows <= 32:
        yield Config(kernel="tile", SWAP=True, BLOCK_M=max(16, rows), BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=4)
    yield Config(kernel="tile", SWAP=False, BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=3)
    yield Config(kernel="tile", SWAP=False, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=2)
    yield from grouped_tiles(rows, (32, 64, 128))
    yield from descriptor_tiles(rows, (64, 128))
    yield from vector_configs(bucket(a.shape[0]) * top_k)
    if rows >= 32:
        yield from gluon_configs(((256, 4), (128, 6)))


def legal(config: Config, device: Device, a: Tensor, b: Tensor, gather: Tensor | None, **_: Any) -> bool:
    if config["kernel"] == "gluon":
        return gluon_legal(config, device, a, b, gather)
    if config["kernel"] == "vector":
        return config["BLOCK_N"] * config["BLOCK_K"] <= 64 * 32 * config["num_warps"]
    if config["kernel"] == "descriptor" and not (
        fits_weight_descriptor(b) and (gather is not None or fits_row_descriptor(a))
    ):
        return False
    buffers = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * a.element_size()
    return buffers * stages_held(config, device) + 2048 <= device.shared_limit


def key(
    a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, gather: Tensor | None, top_k: int,
    **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    E, N, K = b.shape
    return dict(
        M=bucket(a.shape[0]) * top_k, N=N, K=K, E=E, dtype=str(a.dtype), out_dtype=str(out_dtype or a.dtype),
        bias=int(bias is not None), gather=int(gather is not None),
    )  # fmt: skip


def cost(a: Tensor, b: Tensor, out_dtype: torch.dtype | None, top_k: int, **_: Any) -> Cost:
    (T, K), (E, N) = a.shape, b.shape[:2]
    R = T * top_k
    moved = (T * K + min(E, R) * N * K) * a.element_size() + R * N * (out_dtype or a.dtype).itemsize
    return Cost(flops=2 * R * N * K, bytes=moved)


def tolerance(a: Tensor, out_dtype: torch.dtype | None, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 2e-6}[out_dtype or a.dtype] * 1.1
    # the tensor cores of sm90 cut fp32 sums toward zero every 16 columns: half of a last place on average, of sums
    # that grow with the root of K; together 2^-25 of the result a step (measured: 0.63 of that, K from 272 to 8704)
    return rounding + (0.0 if a.device.type == "cpu" else a.shape[1] / 16 * 2.0**-25)


def inputs(
    *, M, N, K, E, dropped=0.0, spread="even", bias=False, gather=0, dtype=torch.bfloat16, out_dtype=None,
    kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    """gather: rows for each row of `a`, 0 for rows that lie in order."""
    tokens = triton.cdiv(M, max(gather, 1))
    M = tokens * max(gather, 1)
    return dict(
        a=strided(sample((tokens, K), dtype, kind, device, seed), layout),
        b=strided(sample((E, N, K), dtype, "normal", device, seed + 1), layout),
        offs=row_ends(M, E, dropped, spread, device, seed),
        bias=sample((E, N), dtype, "normal", device, seed + 2) if bias else None, out_dtype=out_dtype,
        gather=gather_rows(M, device, seed) if gather else None, top_k=max(gather, 1),
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(1, 64, 100, 128), E=(1, 3, 9), dropped=(0.0, 0.5, 1.0),
        spread=("even", "skewed", "one"), bias=(False, True), gather=(0, 1, 3), dtype=FLOAT_INPUTS,
        out_dtype=(None, torch.float32), kind=("normal", "zeros", "zero_rows"), layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        tile=Kernel(_grouped_kernel, matrix=True),
        descriptor=Kernel(_grouped_kernel, targets=TMA_TARGETS, matrix=True),
        vector=VECTOR_KERNEL,
        gluon=GLUON_KERNEL,
    ),
    configs=configs, legal=legal, key=key, cost=cost, cases=grouped_cases(), baselines=dict(torch=torch_grouped_mm),
)  # fmt: skip
def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    gather: Tensor | None = None, top_k: int = 1, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert by its weights.

    Args:
        a: (R, K) rows sorted by expert, bf16, fp16 or fp32, elements of a row contiguous; (T, K) with gather.
        b: (E, N, K) weights, same dtype as `a`, elements of a row contiguous.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
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
    if config["kernel"] == "gluon":
        launch_gluon(config, "plain", a, b, offs, None, None, bias, out, 1, [0] * 5, expert_bins(E))
        return out
    if config["kernel"] == "vector":
        launch_vector(
            config, a, b, offs, None, None, bias, gather, top_k, out, (0, 1, 0), [0] * 5, expert_bins(E)
        )  # fmt: skip
        return out
    config = dict(config)
    a_desc, b_desc = descriptors(config, a, b, gather)
    config.pop("kernel")
    _grouped_kernel[grid(R, N, E, config)](
        a, b, a_desc, b_desc, bias, offs, gather, out,
        R, E, N, K, top_k, a.stride(0), b.stride(0), b.stride(1), out.stride(0), 0 if bias is None else bias.stride(0),
        IEEE=a.dtype is torch.float32, EVEN_K=K % config["BLOCK_K"] == 0, BLOCK_E=expert_bins(E),
        **early_start(of(a.device)), **config,
    )  # fmt: skip
    return out
