"""grouped_scaled_mm: one product of quantized matrices per expert, scales constant along K.

    out[r, n] = scale_a[r] * scale_b[e(r), n] * sum_k a[r, k] * b[e(r), n, k]  (+ bias[e(r), n])

e(r) is the expert of row r: offs[e - 1] <= r < offs[e]. Rows from offs[-1] on have no expert and become zeros, whatever
they hold. Each operand's scale is per row or one for all by itself: per token or tensor for `a`, per channel or matrix
for `b`. For one expert this is scaled_mm. FP8 products accumulate in fp32, INT8 products exactly in int32. A static
activation scale per expert is a factor of scale_b. Asymmetric INT8: sum_k (a[r, k] - zero_point_a[r]) * (b[e, n, k] -
zero_point_b[e, n]), exactly too, by way of the sums colsum_b[e, n] = sum_k b[e, n, k].

With gather, row r of all this is row gather[r] // top_k of `a`, and of its scale and zero point: rows need not be
moved before.

Kernels: `tile`, pointers; `descriptor`, weights (and rows, unless gathered) by tensor descriptors (TMA); `vector`,
few rows (_vector); `gluon`, for Hopper (_gluon_grouped).

Source: the W8A8 experts of vLLM (`fused_moe_kernel`), whose scales follow from each operand alone here.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_fp8_matmul, expect_inner_contiguous, expect_shape
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import FP8
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
    wide_tiles,
)
from fpk.kernels.moe._rows import gather_rows, row_ends
from fpk.kernels.moe._vector import VECTOR_KERNEL, launch_vector, vector_configs
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, sample, scales, strided
from fpk.shapes import grouped_cases


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, fast_accum: bool = False, zero_point_a: Tensor | None = None,
    colsum_b: Tensor | None = None, gather: Tensor | None = None, top_k: int = 1, zero_point_b: Tensor | None = None,
) -> Tensor:  # fmt: skip
    a = gathered(a, gather, top_k)
    if scale_a.shape[0] > 1:
        scale_a = gathered(scale_a, gather, top_k)
    if zero_point_a is not None and zero_point_a.shape[0] > 1:
        zero_point_a = gathered(zero_point_a, gather, top_k)
    (R, K), (E, N) = a.shape, b.shape[:2]
    expert = expert_of_rows(offs, R)[:, None]
    out = torch.zeros((R, N), dtype=torch.float32, device=a.device)
    for e in range(E):
        if a.dtype is torch.int8:  # 1024 products of at most 2^14 sum exactly in fp32
            starts = range(0, max(K, 1), 1024)
            pieces = [(a[:, k : k + 1024].float() @ b[e, :, k : k + 1024].float().T).long() for k in starts]
            exact = sum(pieces[1:], pieces[0])
            if zero_point_a is not None and colsum_b is not None:
                exact = exact - zero_point_a.long() * colsum_b[e].long()
            if zero_point_b is not None:
                shift = 0 if zero_point_a is None else K * zero_point_a.long()
                exact = exact - (a.long().sum(1, keepdim=True) - shift) * zero_point_b[e].long().T
            acc = exact.float()
        else:
            acc = a.float() @ b[e].float().T
        product = acc * scale_a * scale_b[e].T
        out = torch.where(expert == e, product if bias is None else product + bias[e].float(), out)
    return out.to(out_dtype)


def check(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype, zero_point_a: Tensor | None, colsum_b: Tensor | None, gather: Tensor | None, top_k: int,
    zero_point_b: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    expect_dtype("grouped_scaled_mm.a", a, *FP8, torch.int8)
    expect_dtype("grouped_scaled_mm.b", b, a.dtype)
    expect_grouped("grouped_scaled_mm", a, b, offs, bias, out_dtype)
    (R, K), (E, N) = a.shape, b.shape[:2]
    expect_shape("grouped_scaled_mm.scale_a", scale_a, (R, 1), (1, 1))
    expect_shape("grouped_scaled_mm.scale_b", scale_b, (E, N, 1), (E, 1, 1))
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        expect_dtype(f"grouped_scaled_mm.{name}", tensor, torch.float32)
    if a.dtype is torch.int8 and K > 65536:
        raise NotImplementedError(f"grouped_scaled_mm.a: int8 sums are exact in int32 up to K = 65536, got K = {K}")
    expect_gather("grouped_scaled_mm", a, gather, top_k)
    if (zero_point_a is None) != (colsum_b is None):
        raise ValueError("grouped_scaled_mm.colsum_b: expected together with zero_point_a, got one of them")
    if zero_point_a is not None and colsum_b is not None:
        expect_dtype("grouped_scaled_mm.a (with zero_point_a)", a, torch.int8)
        expect_shape("grouped_scaled_mm.zero_point_a", zero_point_a, (R, 1), (1, 1))
        expect_shape("grouped_scaled_mm.colsum_b", colsum_b, (E, N))
        for name, tensor in (("zero_point_a", zero_point_a), ("colsum_b", colsum_b)):
            expect_dtype(f"grouped_scaled_mm.{name}", tensor, torch.int32)
        expect_inner_contiguous("grouped_scaled_mm.colsum_b", colsum_b)
    if zero_point_b is not None:
        expect_dtype("grouped_scaled_mm.a (with zero_point_b)", a, torch.int8)
        expect_shape("grouped_scaled_mm.zero_point_b", zero_point_b, (E, N, 1), (E, 1, 1))
        expect_dtype("grouped_scaled_mm.zero_point_b", zero_point_b, torch.int32)
        if K > 32768:
            raise NotImplementedError(f"grouped_scaled_mm.a: expected K up to 32768 with zero_point_b, got K = {K}")
    expect_fp8_matmul("grouped_scaled_mm", a)


@triton.jit
def _tile(
    expert, end, first, n, a_ptr, b_ptr, a_desc, b_desc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
    zero_b_ptr, gather_ptr, out_ptr, N, K, top_k, stride_am, stride_be, stride_bn, stride_om, stride_sa, stride_sbe,
    stride_sbn, stride_bias, stride_za, stride_ce, stride_zbe, stride_zbn, INT8: tl.constexpr, PROMOTE: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of the output."""
    e = expert.to(tl.int64)
    offs_m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = source_rows(gather_ptr, offs_m, end, first, top_k)
    a_rows = a_ptr + source[:, None] * stride_am
    b_rows = b_ptr + e * stride_be + tl.where(offs_n < N, offs_n, 0)[:, None] * stride_bn
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32 if INT8 else tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if INT8 else tl.float32)
    rowsum = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        a = load_tile(a_desc, first, a_rows, k, K, BLOCK_K, EVEN_K)
        b = load_tile(b_desc, expert * N + n * BLOCK_N, b_rows, k, K, BLOCK_K, EVEN_K)
        acc = accumulate(a, b, acc, SWAP, PROMOTE)
        if zero_b_ptr is not None:
            rowsum += tl.sum(a.to(tl.int32), axis=1)
    if SWAP:
        acc = tl.trans(acc)
    if zero_ptr is not None:
        colsum = tl.load(colsum_ptr + e * stride_ce + offs_n, mask=offs_n < N, other=0)
        zero_a = tl.load(zero_ptr + source * stride_za)
        acc -= zero_a[:, None] * colsum[None, :]
        rowsum -= zero_a * K
    if zero_b_ptr is not None:
        zero_b = tl.load(zero_b_ptr + e * stride_zbe + offs_n * stride_zbn, mask=offs_n < N, other=0)
        acc -= rowsum[:, None] * zero_b[None, :]
    out = acc.to(tl.float32) * tl.load(scale_a_ptr + source * stride_sa)[:, None]
    bias_row = bias_ptr
    if bias_ptr is not None:
        bias_row = bias_ptr + e * stride_bias
    out = finish(
        out, None, scale_b_ptr + e * stride_sbe, bias_row, None, None, offs_m, offs_n, end, N, 0, stride_sbn, 0
    )
    store_tile(out_ptr, out, offs_m, offs_n, end, N, stride_om)


@triton.jit(do_not_specialize=["R", "E", "stride_sa", "top_k"])
def _grouped_kernel(
    a_ptr, b_ptr, a_desc, b_desc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, zero_b_ptr, offs_ptr,
    gather_ptr, out_ptr,
    R, E, N, K, top_k,
    stride_am, stride_be, stride_bn, stride_om, stride_sa, stride_sbe, stride_sbn, stride_bias, stride_za, stride_ce,
    stride_zbe, stride_zbn,
    PDL: tl.constexpr, INT8: tl.constexpr, PROMOTE: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr = 1, FLATTEN: tl.constexpr = False,
):  # fmt: skip
    """COLUMNS: tiles that a program takes, side by side; FLATTEN: fetch the next one while one is finished."""
    after_previous(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert, end, first, n = expert_tile(offs_ptr, R, E, tl.cdiv(tiles_n, COLUMNS), BLOCK_E, BLOCK_M)
    if expert < E:
        if COLUMNS == 1:
            _tile(
                expert, end, first, n, a_ptr, b_ptr, a_desc, b_desc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr,
                colsum_ptr, zero_b_ptr, gather_ptr, out_ptr, N, K, top_k, stride_am, stride_be, stride_bn, stride_om,
                stride_sa, stride_sbe, stride_sbn, stride_bias, stride_za, stride_ce, stride_zbe, stride_zbn, INT8,
                PROMOTE, EVEN_K, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            for i in tl.range(0, tl.minimum(COLUMNS, tiles_n - n * COLUMNS), flatten=FLATTEN):
                column = n * COLUMNS + i
                _tile(
                    expert, end, first, column, a_ptr, b_ptr, a_desc, b_desc, scale_a_ptr, scale_b_ptr, bias_ptr,
                    zero_ptr, colsum_ptr, zero_b_ptr, gather_ptr, out_ptr, N, K, top_k, stride_am, stride_be, stride_bn,
                    stride_om, stride_sa, stride_sbe, stride_sbn, stride_bias, stride_za, stride_ce, stride_zbe,
                    stride_zbn, INT8, PROMOTE, EVEN_K, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
    elif expert == E:
        for i in range(0, tl.minimum(COLUMNS, tiles_n - n * COLUMNS)):
            store_zeros(out_ptr, first, R, n * COLUMNS + i, N, stride_om, BLOCK_M, BLOCK_N)


def configs(a: Tensor, b: Tensor, fast_accum: bool, top_k: int, **_: Any):
    rows = rows_per_expert(a, b, top_k)
    if of(a.device).arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(kernel="tile", SWAP=False, BLOCK_M=32, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2)
    sums = 1 if fast_accum or a.dtype is torch.int8 else 2
    yield from measured_tiles(a.shape[0] * top_k, b.shape[0], b.shape[2], 1, sums, False)
    if rows <= 32:
        yield Config(
            kernel="tile", SWAP=True, BLOCK_M=max(16, rows), BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=4
        )
    yield Config(kernel="tile", SWAP=False, BLOCK_M=64, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3)
    yield Config(kernel="tile", SWAP=False, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2)
    yield from grouped_tiles(rows, (64, 128, 256))
    yield from descriptor_tiles(rows, (128, 256))
    yield from wide_tiles(rows)
    yield from vector_configs(bucket(a.shape[0]) * top_k)
    yield from gluon_configs(((256, 4), (128, 6)) if rows >= 32 else ())


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, fast_accum: bool, zero_point_a: Tensor | None,
    zero_point_b: Tensor | None, gather: Tensor | None, **_: Any,
) -> bool:  # fmt: skip
    if config["kernel"] in ("gluon", "vector") and (zero_point_a is not None or zero_point_b is not None):
        return False
    if config["kernel"] == "gluon":
        # two sums of a wide tile do not fit in the registers
        fits = fast_accum or a.dtype is torch.int8 or config["BLOCK_N"] <= 128
        return fits and gluon_legal(config, device, a, b, gather)
    if config["kernel"] == "vector":
        return config["BLOCK_N"] * config["BLOCK_K"] <= 64 * 32 * config["num_warps"]
    if config["kernel"] == "descriptor" and not (
        fits_weight_descriptor(b) and (gather is not None or fits_row_descriptor(a))
    ):
        return False
    buffers = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * stages_held(config, device)
    return buffers + 2048 <= device.shared_limit


def key(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype,
    fast_accum: bool, zero_point_a: Tensor | None, gather: Tensor | None, top_k: int, zero_point_b: Tensor | None,
    **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    E, N, K = b.shape
    return dict(
        M=bucket(a.shape[0]) * top_k, N=N, K=K, E=E, dtype=str(a.dtype), out_dtype=str(out_dtype),
        a="tensor" if scale_a.shape[0] == 1 else "token", b="tensor" if scale_b.shape[1] == 1 else "channel",
        bias=int(bias is not None), fast_accum=int(fast_accum), 
        zero_point=int(zero_point_a is not None) + 2 * int(zero_point_b is not None),
        gather=int(gather is not None),
    )  # fmt: skip


def cost(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, top_k: int, **_: Any) -> Cost:
    (T, K), (E, N) = a.shape, b.shape[:2]
    R = T * top_k
    moved = T * K + min(E, R) * N * K + R * N * out_dtype.itemsize + 4 * (scale_a.numel() + scale_b.numel())
    return Cost(flops=2 * R * N * K, bytes=moved)


def tolerance(a: Tensor, out_dtype: torch.dtype, fast_accum: bool, **_: Any) -> float:
    if a.dtype is torch.int8:
        return 0.0  # exact sums, and the same fp32 operations in the same order
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 1e-6}[out_dtype]
    # what the tensor cores of sm90 lose inside 128 products, and without promotion over all of K
    lost = 0.0 if a.device.type == "cpu" else (3.5e-3 if fast_accum else 3e-4)
    return (rounding**2 + lost**2) ** 0.5 * 1.1


def inputs(
    *, M, N, K, E, dropped=0.0, spread="even", a_granularity="token", b_granularity="channel", bias=False,
    fast_accum=False, zero_point="", gather=0, dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, kind="normal",
    layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    """gather: rows for each row of `a`, 0 for rows that lie in order; zero_point: operands that have one."""
    tokens = triton.cdiv(M, max(gather, 1))
    M = tokens * max(gather, 1)
    b = strided(sample((E, N, K), dtype, "normal", device, seed + 1), layout)
    zero_point = zero_point if dtype is torch.int8 else ""
    scale_rows = tokens if a_granularity == "token" else 1
    zeros = torch.randint(-128, 128, (scale_rows, 1), generator=generator(seed + 5, device), device=device)
    shape = (E, N if b_granularity == "channel" else 1, 1)
    shifts = torch.randint(-128, 128, shape, generator=generator(seed + 6, device), device=device)
    return dict(
        a=strided(sample((tokens, K), dtype, kind, device, seed), layout), b=b,
        scale_a=scales((scale_rows, 1), device, seed + 2),
        scale_b=scales(shape, device, seed + 3),
        offs=row_ends(M, E, dropped, spread, device, seed),
        bias=sample((E, N), out_dtype, "normal", device, seed + 4) if bias else None,
        out_dtype=out_dtype, fast_accum=fast_accum, zero_point_a=zeros.to(torch.int32) if "a" in zero_point else None,
        colsum_b=b.sum(2, dtype=torch.int32) if "a" in zero_point else None,
        zero_point_b=shifts.to(torch.int32) if "b" in zero_point else None,
        gather=gather_rows(M, device, seed) if gather else None, top_k=max(gather, 1),
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(0, 1, 64, 100, 128), E=(1, 3, 9), dropped=(0.0, 0.5, 1.0),
        spread=("even", "skewed", "one"), a_granularity=("token", "tensor"), b_granularity=("channel", "tensor"),
        bias=(False, True), fast_accum=(False, True), zero_point=("", "a", "b", "ab"), gather=(0, 1, 3),
        dtype=(torch.float8_e4m3fn, torch.int8, torch.float8_e5m2),
        out_dtype=(torch.bfloat16, torch.float16, torch.float32), kind=("normal", "zeros", "zero_rows"),
        layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        tile=Kernel(_grouped_kernel, matrix=True), descriptor=Kernel(_grouped_kernel, targets=TMA_TARGETS, matrix=True),
        vector=VECTOR_KERNEL,
        gluon=GLUON_KERNEL,
    ),
    configs=configs, legal=legal, key=key, cost=cost, cases=grouped_cases(),
)  # fmt: skip
def grouped_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, fast_accum: bool = False, zero_point_a: Tensor | None = None,
    colsum_b: Tensor | None = None, gather: Tensor | None = None, top_k: int = 1, zero_point_b: Tensor | None = None,
    *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply the quantized rows of each expert by its quantized weights, scales constant along K.

    Args:
        a: (R, K) codes sorted by expert, an fp8 type or int8, elements of a row contiguous; (T, K) with gather.
        b: (E, N, K) weight codes, same dtype as `a`, elements of a row contiguous.
        scale_a: (R, 1) per token ((T, 1) with gather) or (1, 1) per tensor, fp32; value = code * scale.
        scale_b: (E, N, 1) per channel or (E, 1, 1) per matrix, fp32.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
        bias: (E, N) fp32, bf16 or fp16, or None; added in fp32 after scaling.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: let FP8 tensor cores accumulate by themselves (about 14 bits on sm90), as in scaled_mm.
        zero_point_a: int32 of scale_a's shape or None, int8 only; value = (code - zero_point) * scale.
        colsum_b: (E, N) int32, sums of b's rows; needed with zero_point_a.
        zero_point_b: int32 of scale_b's shape or None, int8 only, K up to 32768.
        gather: (T * top_k,) int32 or None; row r is row gather[r] // top_k of `a` (`index` of sort_by_expert).
        top_k: rows for each row of `a`, with gather.

    Returns:
        (R, N) of out_dtype; rows from offs[-1] on are zeros.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
        NotImplementedError: FP8 on a GPU without FP8 matrix units, or int8 with K > 65536.
    """
    (T, K), (E, N) = a.shape, b.shape[:2]
    R = T * top_k
    out = torch.empty((R, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    is_int8 = a.dtype is torch.int8
    stride_sa = scale_a.stride(0) if scale_a.shape[0] > 1 else 0
    stride_sbn = scale_b.stride(1) if scale_b.shape[1] > 1 else 0
    if config["kernel"] == "gluon":
        launch_gluon(
            config, "scaled" if is_int8 or fast_accum else "promoted", a, b, offs, scale_a, scale_b, bias, out, 1,
            [stride_sa, 0, scale_b.stride(0), stride_sbn, 0], expert_bins(E),
        )  # fmt: skip
        return out
    if config["kernel"] == "vector":
        launch_vector(
            config, a, b, offs, scale_a, scale_b, bias, gather, top_k, out, (-1, 1, -1),
            [stride_sa, 0, scale_b.stride(0), stride_sbn, 0], expert_bins(E),
        )  # fmt: skip
        return out
    config = dict(config)
    a_desc, b_desc = descriptors(config, a, b, gather)
    config.pop("kernel")
    _grouped_kernel[grid(R, N, E, config)](
        a, b, a_desc, b_desc, scale_a, scale_b, bias, zero_point_a, colsum_b, zero_point_b, offs, gather, out,
        R, E, N, K, top_k, a.stride(0), b.stride(0), b.stride(1), out.stride(0),
        stride_sa, scale_b.stride(0), stride_sbn, 0 if bias is None else bias.stride(0),
        zero_point_a.stride(0) if zero_point_a is not None and zero_point_a.shape[0] > 1 else 0,
        0 if colsum_b is None else colsum_b.stride(0),
        0 if zero_point_b is None else zero_point_b.stride(0),
        zero_point_b.stride(1) if zero_point_b is not None and zero_point_b.shape[1] > 1 else 0,
        INT8=is_int8, PROMOTE=0 if is_int8 or fast_accum else min(128, config["BLOCK_K"]),
        EVEN_K=K % config["BLOCK_K"] == 0, BLOCK_E=expert_bins(E), enable_fp_fusion=False,
        **early_start(of(a.device)), **config,
    )  # fmt: skip
    return out
