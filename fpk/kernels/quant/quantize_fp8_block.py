"""quantize_fp8_block: FP8 codes with one scale per block of rows and columns.

    amax[i, j]  = max_{(m, k) in block i, j} |x[m, k]| over finite elements
    scale[i, j] = max(amax[i, j], 1e-4) / F                  e8m0: rounded up to a power of two, from its bits
    codes[m, k] = fp8(clamp(x[m, k] / scale[m // block_rows, k // block_cols], -max, max))

F is the format's `qmax`. Blocks at the lower and right edges may be short; in a stack they never cross matrices. NaN
stays NaN and does not touch the scale; +-Inf saturates; a block of nothing but Inf gets scale Inf (e8m0: the NaN byte
255) and NaN codes. Single rows: quantize_fp8_group.

Source: the 128 x 128 weights of DeepSeek-V3; semantics of vLLM's `per_block_cast_to_fp8`, with true division.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import FP8, encode, expand_groups
from fpk.kernels._groups import SCALE_FORMATS, group_amax, power_of_two_above, stored_scale
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
    x: Tensor, block_rows: int = 128, block_cols: int = 128, scale_format: str = "fp32",
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    fmt = FP8[dtype]
    amax = group_amax(x, block_rows, block_cols)
    scale = torch.maximum(amax, amax.new_tensor(1e-4)) / amax.new_tensor(fmt.qmax)
    stored, scale = stored_scale(scale, scale_format)
    codes = encode(x.float() / expand_groups(scale, x.shape, block_rows, block_cols), fmt)
    return codes.view(dtype).contiguous(), stored


def check(x: Tensor, block_rows: int, block_cols: int, scale_format: str, dtype: torch.dtype, **_: Any) -> None:
    expect_dtype("quantize_fp8_block.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_fp8_block.x", x, 2, 3)
    expect_not_empty("quantize_fp8_block.x", x, -1)
    for name, size in (("block_rows", block_rows), ("block_cols", block_cols)):
        if size < 1:
            raise ValueError(f"quantize_fp8_block.{name}: expected a positive number, got {size}")
    expect_one_of("quantize_fp8_block.scale_format", scale_format, SCALE_FORMATS)
    expect_one_of("quantize_fp8_block.dtype", dtype, FP8)


@triton.jit(do_not_specialize=["M"])
def _tile_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, E8M0: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """BLOCKS neighbouring blocks in registers, each padded to powers of two: one read, one write."""
    after_previous(PDL)
    blocks_m, blocks_k = tl.cdiv(M, ROWS), tl.cdiv(K, COLS)
    tiles = tl.cdiv(blocks_k, BLOCKS)
    e = tl.program_id(1).to(tl.int64)
    block_m = (tl.program_id(0) // tiles).to(tl.int64)
    offs_b = (tl.program_id(0) % tiles).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside_m = tl.arange(0, HEIGHT)
    inside_k = tl.arange(0, WIDTH)[None, :]
    rows = (block_m * ROWS + inside_m)[:, None, None]
    offs_k = offs_b[:, None] * COLS + inside_k  # [BLOCKS, WIDTH]
    mask = ((inside_m < ROWS)[:, None, None] & (rows < M)) & ((inside_k < COLS) & (offs_k < K))[None, :, :]
    cols = offs_k[None, :, :]
    x = tl.load(x_ptr + e * stride_xe + rows * stride_xm + cols * stride_xk, mask=mask, other=0.0).to(tl.float32)

    if BLOCKS == 1:  # one number: the reduction may take the elements in any order
        amax = tl.zeros((1,), tl.float32) + tl.max(tl.abs(x), axis=None)
    else:
        amax = tl.max(tl.max(tl.abs(x), axis=0), axis=1)
    infinite = any_infinite(amax)
    if infinite:
        keys = tl.max(tl.where(mask, amax_key(x), 0), axis=0)
        amax = amax_of_key(tl.max(keys, axis=1))  # [BLOCKS]
    scale = tl.math.div_rn(tl.maximum(amax, 1e-4), QMAX)
    stored = scale
    if E8M0:
        stored, scale = power_of_two_above(scale)
    codes_ptrs = codes_ptr + (e * M + rows) * K + cols
    if infinite:
        codes = quantize_fp8(x, scale[None, :, None], MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
        tl.store(codes_ptrs, codes, mask=mask)
    else:  # nothing lies beyond the range; stored here, since codes that leave the branch cost registers
        tl.store(codes_ptrs, cast_fp8(divide(x, scale[None, :, None]), MANTISSA, BIAS, NAN_CODE, HARDWARE), mask=mask)
    scale_ptrs = scale_ptr + (e * blocks_m + block_m) * blocks_k + offs_b
    tl.store(scale_ptrs, stored.to(scale_ptr.dtype.element_ty), mask=offs_b < blocks_k)


@triton.jit(do_not_specialize=["M"])
def _loop_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, E8M0: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A block of any size in pieces: one loop for the maximum, one to quantize (the second read comes from cache)."""
    after_previous(PDL)
    blocks_m, blocks_k = tl.cdiv(M, ROWS), tl.cdiv(K, COLS)
    e = tl.program_id(1).to(tl.int64)
    block_m = (tl.program_id(0) // blocks_k).to(tl.int64)
    block_k = (tl.program_id(0) % blocks_k).to(tl.int64)
    first_m, first_k = block_m * ROWS, block_k * COLS
    last_m, last_k = tl.minimum(first_m + ROWS, M), tl.minimum(first_k + COLS, K)
    pieces_k = tl.cdiv(last_k - first_k, BLOCK_K)
    pieces = tl.cdiv(last_m - first_m, BLOCK_M) * pieces_k
    x_ptr += e * stride_xe

    largest = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for piece in range(0, pieces):
        rows = (first_m + piece // pieces_k * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        cols = (first_k + piece % pieces_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        mask = (rows < last_m) & (cols < last_k)
        x = tl.load(x_ptr + rows * stride_xm + cols * stride_xk, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    amax = tl.max(largest, axis=None)
    infinite = amax == float("inf")
    if infinite:  # rare: an Inf, which only counts if there is nothing else
        keys = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.uint32)
        for piece in range(0, pieces):
            rows = (first_m + piece // pieces_k * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
            cols = (first_k + piece % pieces_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
            mask = (rows < last_m) & (cols < last_k)
            x = tl.load(x_ptr + rows * stride_xm + cols * stride_xk, mask=mask, other=0.0).to(tl.float32)
            keys = tl.maximum(keys, tl.where(mask, amax_key(x), 0))
        amax = amax_of_key(tl.max(tl.max(keys, axis=1), axis=0))
    scale = tl.math.div_rn(tl.maximum(amax, 1e-4), QMAX)
    stored = scale
    if E8M0:
        stored, scale = power_of_two_above(scale)
    tl.store(scale_ptr + (e * blocks_m + block_m) * blocks_k + block_k, stored.to(scale_ptr.dtype.element_ty))

    for piece in range(0, pieces):
        rows = (first_m + piece // pieces_k * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
        cols = (first_k + piece % pieces_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
        mask = (rows < last_m) & (cols < last_k)
        x = tl.load(x_ptr + rows * stride_xm + cols * stride_xk, mask=mask, other=0.0).to(tl.float32)
        codes_ptrs = codes_ptr + (e * M + rows) * K + cols
        if infinite:
            codes = quantize_fp8(x, scale, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
            tl.store(codes_ptrs, codes, mask=mask)
        else:
            tl.store(codes_ptrs, cast_fp8(divide(x, scale), MANTISSA, BIAS, NAN_CODE, HARDWARE), mask=mask)


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    words_ptr, codes_ptr, scale_ptr,
    M, K,
    stride_we, stride_wm, PDL: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, E8M0: tl.constexpr,
    QMAX: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN_CODE: tl.constexpr,
    HARDWARE: tl.constexpr, NATIVE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A block of bf16 in registers, two values to each. ROWS and COLS are powers of two."""
    after_previous(PDL)
    blocks_m, blocks_k = tl.cdiv(M, ROWS), tl.cdiv(K, COLS)
    e = tl.program_id(1).to(tl.int64)
    block_m = (tl.program_id(0) // blocks_k).to(tl.int64)
    block_k = tl.program_id(0) % blocks_k
    rows = block_m * ROWS + tl.arange(0, ROWS)[:, None]
    cols = block_k * (COLS // 2) + tl.arange(0, COLS // 2)[None, :]
    mask = (rows < M) & (cols < K // 2)
    words_ptr += e * stride_we
    words = tl.load(words_ptr + rows * stride_wm + cols, mask=mask, other=0)
    amax = tl.max(larger_magnitude(words), axis=None).to(tl.float32, bitcast=True)
    infinite = (amax < float("inf")) == 0
    if infinite:  # rare, and so in pieces that cost no registers
        keys = tl.zeros((PIECE, COLS // 2), dtype=tl.uint32)
        for first in range(0, ROWS, PIECE):
            at = block_m * ROWS + first + tl.arange(0, PIECE)[:, None]
            inside = (at < M) & (cols < K // 2)
            some = tl.load(words_ptr + at * stride_wm + cols, mask=inside, other=0)
            keys = tl.maximum(keys, tl.where(inside, amax_key_of_pairs(some), 0))
        amax = amax_of_key(tl.max(tl.max(keys, axis=1), axis=0))
    scale = tl.math.div_rn(tl.maximum(amax, 1e-4), QMAX)
    stored = scale
    if E8M0:
        stored, scale = power_of_two_above(scale)
    tl.store(scale_ptr + (e * blocks_m + block_m) * blocks_k + block_k, stored.to(scale_ptr.dtype.element_ty))
    scale = tl.full((1, 1), 1.0, tl.float32) * scale
    if infinite:
        for first in range(0, ROWS, PIECE):
            at = block_m * ROWS + first + tl.arange(0, PIECE)[:, None]
            inside = (at < M) & (cols < K // 2)
            some = tl.load(words_ptr + at * stride_wm + cols, mask=inside, other=0)
            codes = fp8_of_pairs(some, scale, True, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, NATIVE)
            tl.store(codes_ptr + (e * M + at) * (K // 2) + cols, codes, mask=inside)
    else:
        codes = fp8_of_pairs(words, scale, False, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, NATIVE)
        tl.store(codes_ptr + (e * M + rows) * (K // 2) + cols, codes, mask=mask)


def configs(block_rows: int, block_cols: int, **_: Any):
    height, width = triton.next_power_of_2(block_rows), triton.next_power_of_2(block_cols)
    neighbours = max(1, 512 // (height * width))
    yield Config(kernel="pairs", num_warps=max(1, min(8, height * width // 4096)))
    yield Config(kernel="tile", BLOCKS=neighbours, num_warps=8)
    yield Config(kernel="loop", BLOCK_M=4, BLOCK_K=1024, num_warps=4, num_stages=2)
    for elements in (4096, 8192, 16384, 32768):
        for warps in (4, 8, 16):
            if elements == height * width:
                yield Config(kernel="pairs", num_warps=warps)
            if elements >= height * width:
                yield Config(kernel="tile", BLOCKS=elements // (height * width), num_warps=warps)
    if height * width <= 16384:  # fewer registers let more programs share a multiprocessor, at the price of spills
        for warps, registers in ((8, 64), (8, 80), (8, 96), (16, 48), (16, 64)):
            yield Config(kernel="tile", BLOCKS=neighbours, num_warps=warps, maxnreg=registers)
        for warps, registers in ((4, 128), (8, 64), (8, 80), (16, 48)):
            yield Config(kernel="pairs", num_warps=warps, maxnreg=registers)
    for rows, cols, warps in ((16, 64, 4), (16, 128, 4), (32, 128, 4), (32, 128, 8), (64, 128, 8), (32, 256, 8)):
        for stages in (1, 2):
            yield Config(kernel="loop", BLOCK_M=rows, BLOCK_K=cols, num_warps=warps, num_stages=stages)


def legal(config: Config, device: Device, x: Tensor, block_rows: int, block_cols: int, **_: Any) -> bool:
    if "maxnreg" in config and device.vendor == "amd":
        return False
    height, width = triton.next_power_of_2(block_rows), triton.next_power_of_2(block_cols)
    if config["kernel"] == "pairs":  # a program a block, of at most 128 elements a thread
        whole = block_rows == height and block_cols == width >= 2
        return whole and 256 <= height * width <= 4096 * config["num_warps"] and has_pairs(x)
    if config["kernel"] == "loop":
        return height * width >= 256  # a program a block: small ones belong several to a program
    # at most 128 elements a thread, or registers spill
    return config["BLOCKS"] * height * width <= 4096 * config["num_warps"]


def key(
    x: Tensor, block_rows: int, block_cols: int, scale_format: str, dtype: torch.dtype, **_: Any
) -> dict[str, int | str]:
    return dict(
        M=bucket(x.shape[:-1].numel()), K=x.shape[-1], block_rows=block_rows, block_cols=block_cols,
        scale=scale_format, x=str(x.dtype), dtype=str(dtype),
    )  # fmt: skip


def cost(x: Tensor, block_rows: int, block_cols: int, scale_format: str, **_: Any) -> Cost:
    *lead, M, K = x.shape
    scales = torch.Size(lead).numel() * triton.cdiv(M, block_rows) * triton.cdiv(K, block_cols)
    scale_bytes = scales * (4 if scale_format == "fp32" else 1)
    return Cost(flops=3 * x.numel(), bytes=x.numel() * (x.element_size() + 1) + scale_bytes)


def inputs(
    *, M, K, E=0, block=(128, 128), scale_format="fp32", x_dtype=torch.bfloat16, dtype=torch.float8_e4m3fn,
    kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    return dict(x=x, block_rows=block[0], block_cols=block[1], scale_format=scale_format, dtype=dtype)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13, 40), K=(1, 16, 33, 100, 128, 257), E=(0, 1, 3),
        block=((128, 128), (1, 128), (4, 256), (16, 16), (12, 48), (1, 1), (300, 200)), scale_format=SCALE_FORMATS,
        x_dtype=FLOAT_INPUTS, dtype=tuple(FP8), kind=KINDS, layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(tile=Kernel(_tile_kernel), loop=Kernel(_loop_kernel), pairs=Kernel(_pairs_kernel)),
    configs=configs, key=key, legal=legal, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_fp8_block(
    x: Tensor, block_rows: int = 128, block_cols: int = 128, scale_format: str = "fp32",
    dtype: torch.dtype = torch.float8_e4m3fn, *, config: Config,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantize a matrix, or each matrix of a stack, to FP8 with one scale per block.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        block_rows, block_cols: size of a block; blocks at the edges may be short.
        scale_format: "fp32", or "e8m0" for powers of two stored as exponent + 127.
        dtype: the fp8 type of the codes.

    Returns:
        codes of x's shape, contiguous, and scale (cdiv(M, block_rows), cdiv(K, block_cols)), with E in front for a
        stack, contiguous, fp32 or uint8; value = code * scale.

    Raises:
        ValueError: dtype, rank, block size or scale_format does not fit, or K is 0.
    """
    fmt = FP8[dtype]
    *lead, M, K = x.shape
    blocks_m, blocks_k = triton.cdiv(M, block_rows), triton.cdiv(K, block_cols)
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scale_dtype = torch.float32 if scale_format == "fp32" else torch.uint8
    scale = torch.empty((*lead, blocks_m, blocks_k), dtype=scale_dtype, device=x.device)
    if x.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    config, device = dict(config), of(x.device)
    constants = dict(
        ROWS=block_rows, COLS=block_cols, E8M0=scale_format == "e8m0", QMAX=fmt.qmax, **fp8_constants(fmt, device),
        **early_start(device), enable_fp_fusion=False,
    )  # fmt: skip
    padded: dict[str, Any] = {}
    name = config.pop("kernel")
    if name == "pairs":
        _pairs_kernel[(blocks_m * blocks_k, E)](
            as_words(x), codes.view(torch.int16), scale, M, K, stride_xe // 2, x.stride(-2) // 2,
            NATIVE=converts_pairs(fmt, device), PIECE=max(1, block_rows // 16), **constants, **config,
        )  # fmt: skip
        return codes, scale
    if name == "tile":
        kernel, tiles = _tile_kernel, triton.cdiv(blocks_k, config["BLOCKS"])
        padded = dict(HEIGHT=triton.next_power_of_2(block_rows), WIDTH=triton.next_power_of_2(block_cols))
    else:
        kernel, tiles = _loop_kernel, blocks_k
    kernel[(blocks_m * tiles, E)](
        x, codes.view(torch.uint8), scale,
        M, K,
        stride_xe, x.stride(-2), x.stride(-1),
        **padded, **constants, **config,
    )  # fmt: skip
    return codes, scale
