"""quantize_int8_tensor: symmetric INT8 codes with one scale per matrix, taken from the data.

    amax[e]  = max_{m < valid, k} |x[e, m, k]| over finite elements
    scale[e] = max(amax[e], 1e-10) / 127
    codes[e, m, k] = clamp(round_half_even(x[e, m, k] / scale[e]), qmin, 127)

qmin is -128 for activations, -127 for weights. NaN becomes 0 and does not touch the scale; +-Inf saturates; a matrix of
nothing but Inf gets scale Inf and zero codes. Two launches: partial maxima, then a pass in which every program finishes
the maximum for itself. A given scale (static quantization) is quantize_int8_static. Source: the INT8 schemes of W8A8
inference (vLLM `scaled_int8_quant`), with true division and round half to even.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import encode_int8 as encode_codes
from fpk.formats import finite_amax
from fpk.kernels._amax import any_odd_part, flat_amax_kernel, partial_amax, partial_amax_kernel, total_amax
from fpk.kernels._pairs import as_words, has_flat_pairs, int8_of_pairs
from fpk.kernels._tile import after_previous, early_start, quantize_int8
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(x: Tensor, num_valid_tokens: Tensor | None = None, qmin: int = -128) -> tuple[Tensor, Tensor]:
    amax = finite_amax(x, (-2, -1), num_valid_tokens)
    scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(127.0)
    return encode_codes(x.float() / scale, qmin).contiguous(), scale


def check(x: Tensor, num_valid_tokens: Tensor | None, qmin: int, **_: Any) -> None:
    expect_dtype("quantize_int8_tensor.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_int8_tensor.x", x, 2, 3)
    expect_not_empty("quantize_int8_tensor.x", x, -1)
    expect_one_of("quantize_int8_tensor.qmin", qmin, (-128, -127))
    if num_valid_tokens is not None:
        expect_shape("quantize_int8_tensor.num_valid_tokens", num_valid_tokens, (1,))
        expect_dtype("quantize_int8_tensor.num_valid_tokens", num_valid_tokens, torch.int32)


@triton.jit(do_not_specialize=["M", "parts"])
def _quantize_kernel(
    x_ptr, key_ptr, codes_ptr, scale_ptr,
    M, K, parts,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    QMIN: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    # last tiles first: the first pass read them last, so they are still in L2
    tiles_k = tl.cdiv(K, BLOCK_K)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    offs_m = (tile // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = (tile % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
    mask = (offs_m < M)[:, None] & (offs_k < K)[None, :]
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(
        tl.float32
    )  # [BLOCK_M, BLOCK_K]; in flight while the maximum is formed
    scale = tl.math.div_rn(tl.maximum(total_amax(key_ptr, e, parts, BLOCK_P), 1e-10), 127.0)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + e, scale)
    codes = quantize_int8(x, scale, QMIN)
    tl.store(codes_ptr + (e * M + offs_m)[:, None] * K + offs_k[None, :], codes, mask=mask)


@triton.jit(do_not_specialize=["M", "parts"])
def _pairs_kernel(
    words_ptr, valid_ptr, key_ptr, codes_ptr, scale_ptr,
    M, K, parts,
    stride_we, PDL: tl.constexpr,
    QMIN: tl.constexpr, NATIVE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bf16 rows without gaps, two values to a register."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    # last tiles first: the first pass read them last, so they are still in L2
    offs = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = M.to(tl.int64) * (K // 2)
    words_ptr += e * stride_we
    words = tl.load(words_ptr + offs, mask=offs < total, other=0)  # in flight while the maximum is formed
    scale = tl.math.div_rn(tl.maximum(total_amax(key_ptr, e, parts, BLOCK_P), 1e-10), 127.0)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + e, scale)
    scale = tl.full((1,), 1.0, tl.float32) * scale
    codes_ptr += e * total
    rare = any_odd_part(key_ptr, e, tl.num_programs(1), parts, BLOCK_P)
    if valid_ptr is not None:  # rows that do not count may lie beyond the range
        rare = True
    if rare:
        PIECE: tl.constexpr = BLOCK // 8
        for piece in range(0, BLOCK, PIECE):
            at = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK + piece + tl.arange(0, PIECE)
            some = tl.load(words_ptr + at, mask=at < total, other=0)
            codes = int8_of_pairs(some, scale, True, QMIN, NATIVE)
            tl.store(codes_ptr + at, codes, mask=at < total)
    else:
        codes = int8_of_pairs(words, scale, False, QMIN, NATIVE)
        tl.store(codes_ptr + offs, codes, mask=offs < total)


def configs(**_: Any):
    yield Config(kernel="pairs", BLOCK_M=1, BLOCK_K=4096, PROGRAMS=528, TILE=2048, num_warps=8, num_stages=1)
    for programs, part, tile, warps in itertools.product((264, 528, 1056), (4096, 8192), (2048, 4096), (4, 8)):
        yield Config(
            kernel="pairs", BLOCK_M=1, BLOCK_K=part, PROGRAMS=programs, TILE=tile, num_warps=warps, num_stages=1
        )  # fmt: skip
    yield Config(kernel="quantize", BLOCK_M=1, BLOCK_K=8192, PROGRAMS=1024, num_warps=4, num_stages=3)
    for programs in (1024, 512, 256, 128):
        for rows, cols in ((1, 8192), (2, 4096), (1, 4096), (4, 2048), (4, 1024), (8, 1024)):
            for warps in (4, 8):
                yield Config(
                    kernel="quantize", BLOCK_M=rows, BLOCK_K=cols, PROGRAMS=programs, num_warps=warps, num_stages=3
                )  # fmt: skip


def legal(config: Config, x: Tensor, **_: Any) -> bool:
    return config["kernel"] != "pairs" or has_flat_pairs(x)


def key(x: Tensor, **_: Any) -> dict[str, int | str]:
    E = x.shape[0] if x.dim() == 3 else 0
    return dict(M=bucket(x.shape[-2]), K=x.shape[-1], E=E, x=str(x.dtype))


def cost(x: Tensor, **_: Any) -> Cost:
    # two reads: the scale must be known before the first code can be written
    return Cost(flops=3 * x.numel(), bytes=2 * x.numel() * x.element_size() + x.numel() + 4)


def inputs(
    *, M, K, E=0, x_dtype=torch.bfloat16, qmin=-128, kind="normal", layout="contiguous", valid=None,
    device="cuda", seed=0,
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    count = None if valid is None else torch.tensor([int(valid * M)], dtype=torch.int32, device=device)
    return dict(x=x, num_valid_tokens=count, qmin=qmin)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(1, 16, 33, 100, 257), E=(0, 1, 2), x_dtype=FLOAT_INPUTS, qmin=(-128, -127), kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"), valid=(None, 0.0, 0.5, 1.0),
    ),
    kernels=dict(
        quantize=Kernel(_quantize_kernel), pairs=Kernel(_pairs_kernel),
        partial=Kernel(partial_amax_kernel, named=False), flat=Kernel(flat_amax_kernel, named=False),
    ),
    configs=configs, legal=legal, launcher_fields=("PROGRAMS", "TILE", "BLOCK_M", "BLOCK_K"), key=key, cost=cost,
    cases=activation_cases(),
)  # fmt: skip
def quantize_int8_tensor(
    x: Tensor, num_valid_tokens: Tensor | None = None, qmin: int = -128, *, config: Config
) -> tuple[Tensor, Tensor]:
    """Quantize a matrix, or each matrix of a stack, to INT8 with one scale.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        num_valid_tokens: (1,) int32 on x's device or None; rows from it on are padding: quantized, but not part of the
            amax.
        qmin: smallest code, -128 or -127.

    Returns:
        codes int8 of x's shape, contiguous, and scale (1, 1) or (E, 1, 1), fp32; value = code * scale.

    Raises:
        ValueError: dtype, rank, qmin or num_valid_tokens does not fit, or K is 0.
    """
    *_, M, K = x.shape
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty((*x.shape[:-2], 1, 1), dtype=torch.float32, device=x.device)
    if scale.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    keys = partial_amax(x, num_valid_tokens, config)
    config, device = dict(config), of(x.device)
    programs = config.pop("PROGRAMS")
    constants = dict(
        QMIN=qmin, BLOCK_P=triton.next_power_of_2(programs), **early_start(device), enable_fp_fusion=False
    )  # fmt: skip
    if config.pop("kernel") == "pairs":
        _pairs_kernel[(max(1, triton.cdiv(M * K // 2, config["TILE"])), E)](
            as_words(x), num_valid_tokens, keys, codes.view(torch.int16), scale, M, K, keys.shape[1], stride_xe // 2,
            BLOCK=config["TILE"], NATIVE=device.vendor == "nv", num_warps=4, **constants,
        )  # fmt: skip
        return codes, scale
    tiles = max(1, triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"]))
    _quantize_kernel[(tiles, E)](
        x, keys, codes, scale,
        M, K, keys.shape[1],
        stride_xe, x.stride(-2), x.stride(-1),
        **constants, **config,
    )  # fmt: skip
    return codes, scale
