"""grouped_scaled_mm_group: one product of quantized matrices per expert, scales that change along K.

    out[r, n] = sum_k a[r, k] * scale_a[r, k // group] * b[e, n, k] * scale_b[e, n // block_rows, k // block_cols]
                (+ bias[e, n])                                          e: offs[e - 1] <= r < offs[e]

For one expert this is scaled_mm_group. A scale per token with weights that have blocks is scale_a expanded along the
groups (stride 0), per-channel weights with groups of activations are block_rows 1, block_cols -1. Rows from offs[-1] on
have no expert and become zeros, whatever they hold.

With gather, row r of all this is row gather[r] // top_k of `a`, and of its scales: rows need not be moved before.

Kernels: `tile`, K in steps that lie inside one group and one block; `descriptor`, the same with weights (and rows,
unless gathered) by tensor descriptors (TMA); `segment`, steps of any length; `vector`, few rows (_vector);
`gluon`, `wide` and `streams`, for Hopper (_gluon_grouped, _gluon_wide, _gluon_expert_streams).

Source: the FP8 experts of DeepSeek-V3 (1 x 128 activations, 128 x 128 weights).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_fp8_matmul, expect_granularity, expect_shape
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import E8M0, FP8, Granularity, decode, expand_groups
from fpk.kernels._tile import after_previous, early_start
from fpk.kernels.gemm._mm import TMA_TARGETS, add_scaled, finish, load_k, stages_held, store_tile
from fpk.kernels.moe._expert_streams import (
    STREAMS_KERNEL,
    launch_streams,
    streams_default,
    streams_legal,
    streams_space,
)
from fpk.kernels.moe._gluon_grouped import GLUON_KERNEL, gluon_configs, gluon_legal, launch_gluon
from fpk.kernels.moe._gluon_wide import WIDE_KERNEL, launch_wide, wide_configs, wide_legal
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
from fpk.samples import sample, scales, strided
from fpk.shapes import grouped_cases


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, group: int = 128, block_rows: int = 128,
    block_cols: int = 128, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False, gather: Tensor | None = None, top_k: int = 1,
) -> Tensor:  # fmt: skip
    a, scale_a = gathered(a, gather, top_k), gathered(scale_a, gather, top_k)
    factor_a = decode(scale_a, E8M0) if scale_a.dtype is torch.uint8 else scale_a
    factor_b = decode(scale_b, E8M0) if scale_b.dtype is torch.uint8 else scale_b
    (R, _), (E, N, K) = a.shape, b.shape
    expert = expert_of_rows(offs, R)[:, None]
    rows = a.float() * factor_a.repeat_interleave(group, 1)[:, :K]
    out = torch.zeros((R, N), dtype=torch.float32, device=a.device)
    for e in range(E):
        product = rows @ (b[e].float() * expand_groups(factor_b[e], (N, K), block_rows, block_cols)).T
        out = torch.where(expert == e, product if bias is None else product + bias[e].float(), out)
    return out.to(out_dtype)


def check(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, group: int, block_rows: int,
    block_cols: int, bias: Tensor | None, out_dtype: torch.dtype, gather: Tensor | None, top_k: int, **_: Any,
) -> None:  # fmt: skip
    expect_dtype("grouped_scaled_mm_group.a", a, *FP8, torch.int8)
    expect_dtype("grouped_scaled_mm_group.b", b, a.dtype)
    expect_grouped("grouped_scaled_mm_group", a, b, offs, bias, out_dtype)
    if group < 1:
        raise ValueError(f"grouped_scaled_mm_group.group: expected a positive number, got {group}")
    expect_granularity("grouped_scaled_mm_group", block_rows=block_rows, block_cols=block_cols)
    (R, K), blocks = a.shape, Granularity("", block_rows, block_cols)
    expect_shape("grouped_scaled_mm_group.scale_a", scale_a, (R, triton.cdiv(K, group)))
    expect_shape("grouped_scaled_mm_group.scale_b", scale_b, blocks.scale_shape(tuple(b.shape)))
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        expect_dtype(f"grouped_scaled_mm_group.{name}", tensor, torch.float32, torch.uint8)
    expect_gather("grouped_scaled_mm_group", a, gather, top_k)
    expect_fp8_matmul("grouped_scaled_mm_group", a)


@triton.jit
def _tile(
    expert, end, first, n, a_ptr, b_ptr, a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, gather_ptr, out_ptr, N, K, top_k,
    stride_am, stride_be, stride_bn, stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk,
    stride_bias, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E8M0_A: tl.constexpr,
    E8M0_B: tl.constexpr, INT8: tl.constexpr, ONE_B: tl.constexpr, EVEN_K: tl.constexpr, SEGMENTS: tl.constexpr,
    SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of the output."""
    e = expert.to(tl.int64)
    offs_m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    source = source_rows(gather_ptr, offs_m, end, first, top_k)
    a_rows = a_ptr + source[:, None] * stride_am
    b_rows = b_ptr + e * stride_be + tl.where(mask_n, offs_n, 0)[:, None] * stride_bn
    sa_rows = sa_ptr + source * stride_sam
    if ONE_B:
        block_n = n.to(tl.int64) * BLOCK_N // ROWS if ROWS > 0 else e * 0
    else:
        block_n = offs_n // ROWS
    sb_rows = sb_ptr + e * stride_sbe + block_n * stride_sbn

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if SEGMENTS:
        k = 0
        while k < K:
            stop = tl.minimum(tl.minimum((k // GROUP + 1) * GROUP, k + BLOCK_K), K)
            block_k = 0
            if COLS > 0:
                block_k = k // COLS
                stop = tl.minimum(stop, (block_k + 1) * COLS)
            a = load_k(a_rows, k, stop, BLOCK_K, False)
            b = load_k(b_rows, k, stop, BLOCK_K, False)
            acc = add_scaled(
                acc, a, b, sa_rows + k // GROUP * stride_sak, sb_rows + block_k * stride_sbk, None, mask_n,
                E8M0_A, E8M0_B, INT8, ONE_B, SWAP,
            )  # fmt: skip
            k = stop
    else:
        for k in range(0, K, BLOCK_K):
            a = load_tile(a_desc, first, a_rows, k, K, BLOCK_K, EVEN_K)
            b = load_tile(b_desc, expert * N + n * BLOCK_N, b_rows, k, K, BLOCK_K, EVEN_K)
            block_k = k // COLS if COLS > 0 else 0
            acc = add_scaled(
                acc, a, b, sa_rows + k // GROUP * stride_sak, sb_rows + block_k * stride_sbk, None, mask_n,
                E8M0_A, E8M0_B, INT8, ONE_B, SWAP,
            )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    bias_row = bias_ptr
    if bias_ptr is not None:
        bias_row = bias_ptr + e * stride_bias
    acc = finish(acc, None, None, bias_row, None, None, offs_m, offs_n, end, N, 0, 0, 0)
    store_tile(out_ptr, acc, offs_m, offs_n, end, N, stride_om)


@triton.jit(do_not_specialize=["R", "E", "stride_sam", "stride_sak", "top_k"])
def _grouped_kernel(
    a_ptr, b_ptr, a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, offs_ptr, gather_ptr, out_ptr,
    R, E, N, K, top_k,
    stride_am, stride_be, stride_bn, stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E8M0_A: tl.constexpr,
    E8M0_B: tl.constexpr, INT8: tl.constexpr, ONE_B: tl.constexpr, EVEN_K: tl.constexpr, SEGMENTS: tl.constexpr,
    SWAP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr = 1, FLATTEN: tl.constexpr = False,
):  # fmt: skip
    """COLUMNS: tiles that a program takes, side by side; FLATTEN: fetch the next one while one is finished."""
    after_previous(PDL)
    tiles_n = tl.cdiv(N, BLOCK_N)
    expert, end, first, n = expert_tile(offs_ptr, R, E, tl.cdiv(tiles_n, COLUMNS), BLOCK_E, BLOCK_M)
    if expert < E:
        if COLUMNS == 1:
            _tile(
                expert, end, first, n, a_ptr, b_ptr, a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, gather_ptr, out_ptr, N,
                K, top_k, stride_am, stride_be, stride_bn, stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn,
                stride_sbk, stride_bias, GROUP, ROWS, COLS, E8M0_A, E8M0_B, INT8, ONE_B, EVEN_K, SEGMENTS, SWAP,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        else:
            for i in tl.range(0, tl.minimum(COLUMNS, tiles_n - n * COLUMNS), flatten=FLATTEN):
                column = n * COLUMNS + i
                _tile(
                    expert, end, first, column, a_ptr, b_ptr, a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr,
                    gather_ptr, out_ptr, N, K, top_k, stride_am, stride_be, stride_bn, stride_om, stride_sam,
                    stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias, GROUP, ROWS, COLS, E8M0_A, E8M0_B,
                    INT8, ONE_B, EVEN_K, SEGMENTS, SWAP, BLOCK_M, BLOCK_N, BLOCK_K,
                )  # fmt: skip
    elif expert == E:
        for i in range(0, tl.minimum(COLUMNS, tiles_n - n * COLUMNS)):
            store_zeros(out_ptr, first, R, n * COLUMNS + i, N, stride_om, BLOCK_M, BLOCK_N)


def _step(group: int, block_cols: int, K: int) -> int:
    """Columns after which a scale may change, counted from every multiple of itself; K if none does."""
    changes = [n for n in (group, block_cols) if 0 < n < K]
    return math.gcd(*changes) if changes else triton.next_power_of_2(max(K, 1))


def configs(a: Tensor, b: Tensor, group: int, block_cols: int, gather: Tensor | None, top_k: int, **_: Any):
    rows, step = rows_per_expert(a, b, top_k), _step(group, block_cols, a.shape[1])
    wide = min(128, step & -step)  # its largest power of two
    if of(a.device).arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(kernel="tile", SWAP=False, BLOCK_M=32, BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=2)
    if wide == 128:
        yield from streams_default(rows, b.shape[2], gather is not None)
        yield from measured_tiles(a.shape[0] * top_k, b.shape[0], b.shape[2], 1, 2, True)
    if rows <= 32:
        yield Config(
            kernel="tile", SWAP=True, BLOCK_M=max(16, rows), BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=4
        )
    # without wgmma or tcgen05 four warps would spill
    warps = 4 if of(a.device).capability in (90, 100, 103) else 8
    yield Config(kernel="tile", SWAP=False, BLOCK_M=64, BLOCK_N=128, BLOCK_K=wide, num_warps=warps, num_stages=3)
    for k in (128, 64, 32):
        yield Config(kernel="segment", SWAP=False, BLOCK_M=64, BLOCK_N=64, BLOCK_K=k, num_warps=4, num_stages=2)
    yield from grouped_tiles(rows, (32, 64, 128))
    yield from descriptor_tiles(rows, (64, 128))
    yield from wide_tiles(rows)
    yield from vector_configs(bucket(a.shape[0]) * top_k)
    if rows >= 32:
        yield from gluon_configs(((128, 6), (128, 5)))
        yield from wide_configs()
        yield from streams_space()


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int,
    block_rows: int, block_cols: int, bias: Tensor | None, out_dtype: torch.dtype, gather: Tensor | None, **_: Any,
) -> bool:  # fmt: skip
    if config["kernel"] == "streams":
        blocks = (group, block_rows, block_cols)
        return streams_legal(config, device, a, b, scale_a, scale_b, blocks, bias, out_dtype, gather)
    if config["kernel"] == "wide":
        fits = a.shape[0] > 0 and out_dtype.itemsize == 2
        return fits and wide_legal(config, device, a, b, scale_a, scale_b, group, block_rows, block_cols, gather)
    if config["kernel"] == "gluon":
        whole = group == 128 and block_cols == 128 and (block_rows < 0 or block_rows % config["BLOCK_N"] == 0)
        plain = a.dtype in FP8 and scale_a.dtype is torch.float32 and scale_b.dtype is torch.float32
        return whole and plain and gluon_legal(config, device, a, b, gather)
    if config["kernel"] == "vector":
        whole = block_cols < 0 or block_rows < 0 or block_rows % config["BLOCK_N"] == 0
        return whole and a.dtype in FP8 and config["BLOCK_N"] * config["BLOCK_K"] <= 64 * 32 * config["num_warps"]
    if config["kernel"] == "descriptor" and not (
        fits_weight_descriptor(b) and (gather is not None or fits_row_descriptor(a))
    ):
        return False
    # a matrix instruction wants 32 columns of FP8 or INT8, and a step must not straddle a change of scale
    step, width = _step(group, block_cols, a.shape[1]), config["BLOCK_K"]
    if config["kernel"] != "segment" and (width < 32 or step % width != 0):
        return False
    return (config["BLOCK_M"] + config["BLOCK_N"]) * width * stages_held(config, device) + 2048 <= device.shared_limit


def key(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int, block_rows: int, block_cols: int,
    bias: Tensor | None, out_dtype: torch.dtype, gather: Tensor | None, top_k: int, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    E, N, K = b.shape
    return dict(
        M=bucket(a.shape[0]) * top_k, N=N, K=K, E=E, dtype=str(a.dtype), out_dtype=str(out_dtype), group=group,
        block_rows=block_rows, block_cols=block_cols, column_scales=int(scale_a.stride(0) == 1),
        scale_a=str(scale_a.dtype), scale_b=str(scale_b.dtype), bias=int(bias is not None),
        gather=int(gather is not None),
    )  # fmt: skip


def cost(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, top_k: int, **_: Any
) -> Cost:  # fmt: skip
    (T, K), (E, N) = a.shape, b.shape[:2]
    R = T * top_k
    scale_bytes = scale_a.numel() * scale_a.element_size() + scale_b.numel() * scale_b.element_size()
    return Cost(flops=2 * R * N * K, bytes=T * K + min(E, R) * N * K + R * N * out_dtype.itemsize + scale_bytes)


def tolerance(a: Tensor, out_dtype: torch.dtype, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 1e-6}[out_dtype]
    # what the tensor cores of sm90 lose inside the products of one step
    lost = 0.0 if a.device.type == "cpu" or a.dtype is torch.int8 else 3e-4
    return (rounding**2 + lost**2) ** 0.5 * 1.1


def inputs(
    *, M, N, K, E, dropped=0.0, spread="even", blocks=(128, 128, 128), scale_format="fp32", scale_layout="row",
    bias=False, gather=0, dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, kind="normal", layout="contiguous",
    device="cuda", seed=0,
):  # fmt: skip
    """gather: rows for each row of `a`, 0 for rows that lie in order."""
    group, rows, cols = blocks
    e8m0 = scale_format == "e8m0"
    tokens = triton.cdiv(M, max(gather, 1))
    M = tokens * max(gather, 1)
    scale_a = scales((tokens, 1 if scale_layout == "token" else triton.cdiv(K, group)), device, seed + 2, e8m0)
    if scale_layout == "column":
        scale_a = scale_a.T.contiguous().T
    return dict(
        a=strided(sample((tokens, K), dtype, kind, device, seed), layout),
        b=strided(sample((E, N, K), dtype, "normal", device, seed + 1), layout),
        scale_a=scale_a.expand(tokens, triton.cdiv(K, group)),
        scale_b=scales(Granularity("", rows, cols).scale_shape((E, N, K)), device, seed + 3, e8m0),
        offs=row_ends(M, E, dropped, spread, device, seed), group=group, block_rows=rows, block_cols=cols,
        bias=sample((E, N), out_dtype, "normal", device, seed + 4) if bias else None, out_dtype=out_dtype,
        gather=gather_rows(M, device, seed) if gather else None, top_k=max(gather, 1),
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(1, 64, 100, 128, 272), E=(1, 3, 9), dropped=(0.0, 0.5, 1.0),
        spread=("even", "skewed", "one"),
        blocks=((128, 128, 128), (64, 32, 64), (32, 1, -1), (128, -1, -1), (48, 16, 48), (64, 20, 96)),
        scale_format=("fp32", "e8m0"), scale_layout=("row", "column", "token"), bias=(False, True), gather=(0, 1, 3),
        dtype=(torch.float8_e4m3fn, torch.int8, torch.float8_e5m2), out_dtype=FLOAT_INPUTS,
        kind=("normal", "zeros", "zero_rows"), layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        tile=Kernel(_grouped_kernel, matrix=True), segment=Kernel(_grouped_kernel, matrix=True),
        descriptor=Kernel(_grouped_kernel, targets=TMA_TARGETS, matrix=True),
        vector=VECTOR_KERNEL,
        gluon=GLUON_KERNEL, wide=WIDE_KERNEL, streams=STREAMS_KERNEL,
    ),
    configs=configs, legal=legal, key=key, cost=cost, cases=grouped_cases(),
)  # fmt: skip
def grouped_scaled_mm_group(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor, group: int = 128, block_rows: int = 128,
    block_cols: int = 128, bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False, gather: Tensor | None = None, top_k: int = 1, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert, with a scale per group, by its weights, with a scale per block.

    Args:
        a: (R, K) codes sorted by expert, an fp8 type or int8, elements of a row contiguous; (T, K) with gather.
        b: (E, N, K) weight codes, same dtype as `a`, elements of a row contiguous.
        scale_a: (R, cdiv(K, group)), with gather (T, cdiv(K, group)); fp32 or uint8 (e8m0), any strides.
        scale_b: (E, cdiv(N, block_rows), cdiv(K, block_cols)), fp32 or uint8 (e8m0); a -1 makes that dimension 1.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
        group: columns of `a` that share a scale; the last group may be short.
        block_rows, block_cols: rows and columns of a matrix of `b` that share a scale, -1 for all.
        bias: (E, N) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: accepted like in every FP8 product, without effect: groups and blocks are summed in fp32 anyway.
        gather: (T * top_k,) int32 or None; row r is row gather[r] // top_k of `a` (`index` of sort_by_expert).
        top_k: rows for each row of `a`, with gather.

    Returns:
        (R, N) of out_dtype; rows from offs[-1] on are zeros.

    Raises:
        ValueError: a shape, dtype, stride or group does not fit.
        NotImplementedError: FP8 on a GPU without FP8 matrix units.
    """
    (T, K), (E, N) = a.shape, b.shape[:2]
    R = T * top_k
    out = torch.empty((R, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if config["kernel"] == "gluon":
        launch_gluon(
            config, "block", a, b, offs, scale_a, scale_b, bias, out, N if block_rows < 0 else block_rows,
            [*scale_a.stride(), *scale_b.stride()], expert_bins(E),
        )  # fmt: skip
        return out
    if config["kernel"] == "wide":
        launch_wide(config, a, b, offs, scale_a, scale_b, bias, out, expert_bins(E))
        return out
    if config["kernel"] == "streams":
        launch_streams(config, a, b, offs, scale_a, scale_b, gather, top_k, out)
        return out
    if config["kernel"] == "vector":
        launch_vector(
            config, a, b, offs, scale_a, scale_b, bias, gather, top_k, out, (group, block_rows, block_cols),
            [*scale_a.stride(), *scale_b.stride()], expert_bins(E),
        )  # fmt: skip
        return out
    config = dict(config)
    a_desc, b_desc = descriptors(config, a, b, gather)
    segments = config.pop("kernel") == "segment"
    _grouped_kernel[grid(R, N, E, config)](
        a, b, a_desc, b_desc, scale_a, scale_b, bias, offs, gather, out,
        R, E, N, K, top_k, a.stride(0), b.stride(0), b.stride(1), out.stride(0), *scale_a.stride(), *scale_b.stride(),
        0 if bias is None else bias.stride(0),
        GROUP=group, ROWS=block_rows, COLS=block_cols, E8M0_A=scale_a.dtype is torch.uint8,
        E8M0_B=scale_b.dtype is torch.uint8, INT8=a.dtype is torch.int8,
        ONE_B=block_rows < 0 or block_rows % config["BLOCK_N"] == 0, EVEN_K=K % config["BLOCK_K"] == 0,
        SEGMENTS=segments, BLOCK_E=expert_bins(E), **early_start(of(a.device)), **config,
    )  # fmt: skip
    return out
