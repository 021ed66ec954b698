"""quantize_fp8_group: FP8 codes with one scale per row and group of columns.

    amax[m, j]  = max_{k in group j} |x[m, k]| over finite elements
    scale[m, j] = max(amax[m, j], 1e-10) / F                 e8m0: rounded up to a power of two, from its bits
    codes[m, k] = fp8(clamp(x[m, k] / scale[m, k // group], -max, max))

F is the format's `qmax`. A group width that does not divide K leaves a short last group. NaN stays NaN and does not
touch the scale; +-Inf saturates; a group of nothing but Inf gets scale Inf (e8m0: the NaN byte 255) and NaN codes.
Blocks of rows and columns: quantize_fp8_block.

Source: the 1 x 128 activations of DeepSeek-V3; semantics of vLLM's `per_token_group_quant_fp8`, with true division and
the power of two taken after the floor.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, encode, expand_groups
from fpk.kernels._groups import (
    LAYOUTS,
    SCALE_FORMATS,
    expect_group,
    expect_scale_layout,
    group_amax,
    in_layout,
    power_of_two_above,
    scale_buffer,
    stored_scale,
)
from fpk.kernels._pairs import amax_key_of_pairs, as_words, converts_pairs, fp8_of_pairs, has_pairs, larger_magnitude
from fpk.kernels._tile import (
    after_previous,
    amax_key,
    amax_of_key,
    any_infinite,
    cast_fp8,
    divide,
    early_start,
    fp8_constants,
    quantize_fp8,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(
    x: Tensor, group: int = 128, scale_format: str = "fp32", layout: str = "row",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    fmt = FP8[dtype]
    amax = group_amax(x, 1, group)
    scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(fmt.qmax)
    stored, scale = stored_scale(scale, scale_format)
    codes = encode(x.float() / expand_groups(scale, x.shape, 1, group), fmt).view(dtype).contiguous()
    return codes, in_layout(stored, layout, scale_format)


def check(x: Tensor, group: int, scale_format: str, layout: str, dtype: torch.dtype, **_: Any) -> None:
    expect_dtype("quantize_fp8_group.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_fp8_group.x", x, 2, 3)
    expect_not_empty("quantize_fp8_group.x", x, -1)
    expect_group("quantize_fp8_group.group", group)
    expect_scale_layout("quantize_fp8_group", scale_format, layout)
    expect_one_of("quantize_fp8_group.dtype", dtype, FP8)


@triton.jit(do_not_specialize=["M", "stride_s"])
def _group_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, stride_s, PDL: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, E8M0: tl.constexpr, COLUMNS: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS groups, each group padded to a power of two: one read, one write."""
    after_previous(PDL)
    groups = tl.cdiv(K, GROUP)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    inside = tl.arange(0, WIDTH)[None, :]
    offs_k = offs_g[:, None] * GROUP + inside  # [GROUPS, WIDTH]
    mask_k = offs_k < K
    if WIDTH != GROUP:
        mask_k = mask_k & (inside < GROUP)
    rows, cols = offs_m[:, None, None], offs_k[None, :, :]
    mask = (rows < M) & mask_k[None, :, :]
    x = tl.load(x_ptr + e * stride_xe + rows * stride_xm + cols * stride_xk, mask=mask, other=0.0).to(tl.float32)

    amax = tl.max(tl.abs(x), axis=2)  # [BLOCK_M, GROUPS]
    infinite = any_infinite(amax)
    if infinite:
        amax = amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=2))
    scale = tl.math.div_rn(tl.maximum(amax, 1e-10), QMAX)
    stored = scale
    if E8M0:
        stored, scale = power_of_two_above(scale)
    codes_ptrs = codes_ptr + (e * M + rows) * K + cols
    if infinite:
        codes = quantize_fp8(x, scale[:, :, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        tl.store(codes_ptrs, codes, mask=mask)
    else:  # nothing lies beyond the range; stored here, since codes that leave the branch cost registers
        tl.store(codes_ptrs, cast_fp8(divide(x, scale[:, :, None]), MANTISSA, BIAS, NAN_CODE, HARDWARE), mask=mask)

    scale_ptr += e * groups * stride_s
    if COLUMNS:
        scale_ptrs = scale_ptr + offs_g[None, :] * stride_s + offs_m[:, None]
    else:
        scale_ptrs = scale_ptr + offs_m[:, None] * groups + offs_g[None, :]
    mask_s = (offs_m < M)[:, None] & (offs_g < groups)[None, :]
    tl.store(scale_ptrs, stored.to(scale_ptr.dtype.element_ty), mask=mask_s)


@triton.jit
def _store_groups(
    codes_ptr, scale_ptr, words, amax, e, offs_m, offs_g, cols, mask, M, K, stride_s,
    RARE: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr, COLUMNS: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes and scales of words [M, G, GROUP / 2] with these maxima."""
    groups = tl.cdiv(K, GROUP)
    scale = tl.math.div_rn(tl.maximum(amax, 1e-10), QMAX)
    stored = scale
    if E8M0:
        stored, scale = power_of_two_above(scale)
    codes = fp8_of_pairs(words, scale[:, :, None], RARE, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, NATIVE)
    tl.store(codes_ptr + (e * M + offs_m)[:, None, None] * (K // 2) + cols, codes, mask=mask)
    scale_ptr += e * groups * stride_s
    if COLUMNS:
        scale_ptrs = scale_ptr + offs_g[None, :].to(tl.int64) * stride_s + offs_m[:, None]
    else:
        scale_ptrs = scale_ptr + offs_m[:, None] * groups + offs_g[None, :]
    mask_s = (offs_m < M)[:, None] & (offs_g < groups)[None, :]
    tl.store(scale_ptrs, stored.to(scale_ptr.dtype.element_ty), mask=mask_s)


@triton.jit(do_not_specialize=["M", "stride_s"])
def _pairs_kernel(
    words_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_we, stride_wm, stride_s, PDL: tl.constexpr,
    GROUP: tl.constexpr, E8M0: tl.constexpr, COLUMNS: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS groups of bf16, two values to a register."""
    after_previous(PDL)
    tiles = tl.cdiv(tl.cdiv(K, GROUP), GROUPS)
    e = tl.program_id(1).to(tl.int64)
    first_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M
    offs_m = first_m + tl.arange(0, BLOCK_M)
    offs_g = tl.program_id(0) % tiles * GROUPS + tl.arange(0, GROUPS)
    cols = (offs_g[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :])[None, :, :]
    mask = (offs_m < M)[:, None, None] & (cols < K // 2)
    words_ptr += e * stride_we
    words = tl.load(words_ptr + offs_m[:, None, None] * stride_wm + cols, mask=mask, other=0)
    amax = tl.max(larger_magnitude(words), axis=2).to(tl.float32, bitcast=True)
    if any_infinite(amax):  # rare, and so a row at a time, which costs no registers
        for i in range(0, BLOCK_M):
            row = first_m + i + tl.arange(0, 1)
            inside = (row < M)[:, None, None] & (cols < K // 2)
            some = tl.load(words_ptr + row[:, None, None] * stride_wm + cols, mask=inside, other=0)
            its_amax = amax_of_key(tl.max(tl.where(inside, amax_key_of_pairs(some), 0), axis=2))
            _store_groups(
                codes_ptr, scale_ptr, some, its_amax, e, row, offs_g, cols, inside, M, K, stride_s,
                True, GROUP, E8M0, COLUMNS, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, NATIVE,
            )  # fmt: skip
    else:
        _store_groups(
            codes_ptr, scale_ptr, words, amax, e, offs_m, offs_g, cols, mask, M, K, stride_s,
            False, GROUP, E8M0, COLUMNS, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, NATIVE,
        )  # fmt: skip


def configs(x: Tensor, group: int, **_: Any):
    width = triton.next_power_of_2(group)
    rows = 8 if x.shape[-2] > 4 else 1
    default = max(1, 2048 // rows // width)
    rows = max(1, min(rows, 2048 // width))
    if x.shape[-2] > 64:
        yield Config(kernel="pairs", BLOCK_M=8, GROUPS=max(1, 512 // width), num_warps=2 if width <= 512 else 8)
    for kernel in ("pairs", "group"):
        yield Config(kernel=kernel, BLOCK_M=rows, GROUPS=default, num_warps=2 if width <= 2048 else 8)
    shapes = [(1, 1024), (1, 2048), (1, 4096), (2, 1024), (2, 2048), (4, 512), (4, 1024), (8, 256), (8, 512),
              (8, 1024), (16, 128), (16, 256), (16, 512), (32, 128), (32, 256), (64, 128)]  # fmt: skip
    for (rows, cols), warps in itertools.product(shapes, (2, 4, 8)):
        for kernel in ("pairs", "group"):
            yield Config(kernel=kernel, BLOCK_M=rows, GROUPS=max(1, cols // width), num_warps=warps)


def legal(config: Config, x: Tensor, group: int, **_: Any) -> bool:
    if config["kernel"] == "pairs" and (group < 2 or group != triton.next_power_of_2(group) or not has_pairs(x)):
        return False
    # at most 128 elements a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * triton.next_power_of_2(group) <= 4096 * config["num_warps"]


def key(x: Tensor, group: int, scale_format: str, layout: str, dtype: torch.dtype, **_: Any) -> dict[str, int | str]:
    rows = x.shape[:-1].numel()
    return dict(
        M=bucket(rows), K=x.shape[-1], group=group, scale=scale_format, layout=layout, x=str(x.dtype), dtype=str(dtype)
    )


def cost(x: Tensor, group: int, scale_format: str, **_: Any) -> Cost:
    rows = x.shape[:-1].numel()
    scale_bytes = rows * triton.cdiv(x.shape[-1], group) * (4 if scale_format == "fp32" else 1)
    return Cost(flops=3 * x.numel(), bytes=x.numel() * (x.element_size() + 1) + scale_bytes)


def inputs(
    *, M, K, E=0, group=128, scale_format="fp32", scale_layout="row", x_dtype=torch.bfloat16,
    dtype=torch.float8_e4m3fn, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    return dict(x=x, group=group, scale_format=scale_format, layout=scale_layout, dtype=dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 5, 8, 13), K=(1, 16, 33, 64, 100, 128, 257), E=(0, 1, 3), group=(1, 16, 48, 64, 128, 300),
        scale_format=SCALE_FORMATS, scale_layout=LAYOUTS, x_dtype=FLOAT_INPUTS, dtype=tuple(FP8), kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(group=Kernel(_group_kernel), pairs=Kernel(_pairs_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_fp8_group(
    x: Tensor, group: int = 128, scale_format: str = "fp32", layout: str = "row",
    dtype: torch.dtype = torch.float8_e4m3fn, *, config: Config,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize rows to FP8, one scale per `group` columns.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        group: columns that share a scale, 1 to 16384; the last group of a row may be short.
        scale_format: "fp32", or "e8m0" for powers of two stored as exponent + 127.
        layout: strides of the scale: "row" (G, 1), "column" (1, M), "tma" (1, M rounded up to 16 bytes), where
            G = cdiv(K, group); the columns of one matrix of a stack follow those of the matrix before.
        dtype: the fp8 type of the codes.

    Returns:
        codes of x's shape, contiguous, and scale (M, G) or (E, M, G), fp32 or uint8; value = code * scale.

    Raises:
        ValueError: dtype, rank, group, scale_format or layout does not fit, or K is 0.
    """
    fmt = FP8[dtype]
    *_, M, K = x.shape
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    groups = triton.cdiv(K, group)
    scale, stride_s = scale_buffer((*x.shape[:-1], groups), layout, scale_format, x.device)
    if x.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(groups, config["GROUPS"])
    config, device = dict(config), of(x.device)
    constants = dict(
        GROUP=group, E8M0=scale_format == "e8m0", COLUMNS=layout != "row", QMAX=fmt.qmax, **fp8_constants(fmt, device),
        **early_start(device), enable_fp_fusion=False,
    )  # fmt: skip
    if config.pop("kernel") == "pairs":
        _pairs_kernel[(tiles, E)](
            as_words(x), codes.view(torch.int16), scale, M, K, stride_xe // 2, x.stride(-2) // 2, stride_s,
            NATIVE=converts_pairs(fmt, device), **constants, **config,
        )  # fmt: skip
        return codes, scale
    _group_kernel[(tiles, E)](
        x, codes.view(torch.uint8), scale,
        M, K,
        stride_xe, x.stride(-2), x.stride(-1), stride_s,
        WIDTH=triton.next_power_of_2(group), **constants, **config,
    )  # fmt: skip
    return codes, scale
