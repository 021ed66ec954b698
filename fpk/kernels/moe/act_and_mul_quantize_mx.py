"""act_and_mul_quantize_mx: an MLP's activation, quantized to a microscaling format, 32 columns under one power of two.

    act         = act_and_mul(x), rounded to x's type
    amax[m, j]  = max_{k in block j} |act[m, k]| over finite elements
    scale[m, j] = e8m0 byte of 2^e, e by `rule` (formats.mx_scale)
    codes[m, k] = element(clamp(act[m, k] * 2^-e, -max, max))        round half to even

Bit-equal to act_and_mul followed by quantize_mx: the activation is rounded to x's type before it is quantized. Short
blocks, NaN and Inf are treated as there.

Source: the fused activation and quantization of microscaled MoE layers.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, MX, MX_BLOCK, MX_RULES
from fpk.kernels._activation import (
    SOME_CASES,
    activated,
    activation_constexprs,
    activation_inputs,
    activation_width,
    expect_activation,
    load_activation,
)
from fpk.kernels._microscale import element_constants, scale_byte, scale_constants
from fpk.kernels._mx import expect_mx, expect_packable, mx_blocks, mx_buffers, packs, quantized_mx, store_mx
from fpk.kernels._pairs import TARGETS as PAIRS
from fpk.kernels._pairs import fp4_times_power, largest_of_pairs, store_pairs, words_of
from fpk.kernels._tile import after_previous, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS
from fpk.shapes import activation_cases

# the activation may differ by its last place, and then a code by one; see act_and_mul
TOLERANCE = 0.02


def reference(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    format: str = "mxfp4", rule: str | None = None, packed: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return quantized_mx(activated(x, activation, gated, interleaved, alpha, beta, limit), format, rule, packed)


def check(x: Tensor, format: str, rule: str | None, packed: bool, gated: bool, **arguments: Any) -> None:
    expect_activation("act_and_mul_quantize_mx", x, gated=gated, **arguments)
    expect_mx("act_and_mul_quantize_mx", format, rule)
    expect_packable("act_and_mul_quantize_mx.x", activation_width(x, gated), format, packed)


@triton.jit(do_not_specialize=["M"])
def _mx_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, I, width,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK: tl.constexpr, ADDEND: tl.constexpr, EMAX: tl.constexpr, CLAMP: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS blocks: one read, one write."""
    after_previous(PDL)
    tiles = tl.cdiv(tl.cdiv(I, BLOCK), GROUPS)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    act, mask, _ = load_activation(
        x_ptr + e * stride_xe + offs_m * stride_xm, offs_m < M, offs_g * BLOCK, I, stride_xk,
        FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, GROUPS, BLOCK, BLOCK,
    )  # fmt: skip
    codes, byte = mx_blocks(act, mask, ADDEND, EMAX, CLAMP, BITS, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
    rows = e * M + offs_m
    store_mx(codes_ptr, scale_ptr, codes, byte, rows, offs_g, offs_m < M, I, width, BLOCK, BITS, PACKED, WORDS)


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, I, width,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK: tl.constexpr, ADDEND: tl.constexpr, EMAX: tl.constexpr, CLAMP: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Packed FP4 of bf16 in pairs."""
    FEW: tl.constexpr = min(GROUPS, 8)
    after_previous(PDL)
    groups = tl.cdiv(I, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    first_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M
    first_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS
    offs_m, offs_g = first_m + tl.arange(0, BLOCK_M), first_g + tl.arange(0, GROUPS)
    x_ptr += e * stride_xe
    act, _mask, _cols = load_activation(
        x_ptr + offs_m * stride_xm, offs_m < M, offs_g * BLOCK, I, stride_xk,
        FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, GROUPS, BLOCK, BLOCK,
    )  # fmt: skip
    words = words_of(act)
    largest = largest_of_pairs(words)
    byte = scale_byte(largest.to(tl.float32, bitcast=True), ADDEND, EMAX)
    rare = (largest >= 0x7F800000) | ((largest > 0) & (byte == 0))
    if tl.max(tl.where(rare, 1, 0), axis=None) > 0:
        for piece in range(0, BLOCK_M * GROUPS, FEW):  # little at a time, so that it costs no registers
            row = first_m + piece // GROUPS + tl.arange(0, 1)
            some = first_g + piece % GROUPS + tl.arange(0, FEW)
            its_act, mask, _its_cols = load_activation(
                x_ptr + row * stride_xm, row < M, some * BLOCK, I, stride_xk,
                FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, 1, FEW, BLOCK, BLOCK,
            )  # fmt: skip
            codes, bytes = mx_blocks(
                its_act, mask, ADDEND, EMAX, CLAMP, BITS, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE
            )  # fmt: skip
            store_mx(
                codes_ptr, scale_ptr, codes, bytes, e * M + row, some, row < M, I, width, BLOCK, BITS, PACKED, WORDS
            )  # fmt: skip
    else:
        rows = e * M + offs_m
        pairs = fp4_times_power(words, tl.maximum(byte, 1), largest > 0)
        store_pairs(codes_ptr + rows * width, pairs, offs_g, offs_m < M, width)
        scale_ptrs = scale_ptr + rows[:, None] * groups + offs_g[None, :]
        tl.store(scale_ptrs, byte.to(tl.uint8), mask=(offs_m < M)[:, None] & (offs_g < groups)[None, :])


def configs(x: Tensor, gated: bool, **_: Any):
    groups = min(32, triton.next_power_of_2(triton.cdiv(activation_width(x, gated), MX_BLOCK)))
    for kernel in ("pairs", "mx"):  # long pieces of few rows, 16 activations a thread
        yield Config(kernel=kernel, BLOCK_M=32 // groups if x.shape[-2] > 4 else 1, GROUPS=groups, num_warps=2)
    for (rows, groups), warps in itertools.product(
        ((1, 16), (1, 32), (1, 64), (2, 16), (2, 32), (4, 8), (4, 16), (8, 4), (8, 8), (16, 2), (16, 4)), (2, 4, 8)
    ):
        for kernel in ("pairs", "mx"):
            yield Config(kernel=kernel, BLOCK_M=rows, GROUPS=groups, num_warps=warps)


def legal(config: Config, x: Tensor, format: str, packed: bool, **_: Any) -> bool:
    if config["kernel"] == "pairs" and (format != "mxfp4" or not packed or x.dtype is not torch.bfloat16):
        return False
    # at most 64 activations a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * MX_BLOCK <= 2048 * config["num_warps"]


def key(
    x: Tensor, activation: str, gated: bool, interleaved: bool, format: str, rule: str | None, packed: bool, **_: Any
) -> dict[str, int | str]:
    return dict(
        M=bucket(x.shape[:-1].numel()), K=activation_width(x, gated), activation=activation, gated=int(gated),
        interleaved=int(interleaved), format=format, rule=rule or MX[format].rule, packed=int(packed), x=str(x.dtype),
    )  # fmt: skip


def cost(x: Tensor, gated: bool, format: str, packed: bool, **_: Any) -> Cost:
    rows, width = x.shape[:-1].numel(), activation_width(x, gated)
    bits = MX[format].element.bits if packed else 8
    written = rows * (width * bits // 8 + triton.cdiv(width, MX_BLOCK))
    return Cost(flops=11 * rows * width, bytes=x.numel() * x.element_size() + written)


def inputs(
    *, M, K, E=0, case="silu", format="mxfp4", rule=None, packed=True, x_dtype=torch.bfloat16, kind="normal",
    layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    K = -(-K // 4) * 4 if packs(format, packed) else K  # what cannot be packed is refused
    arguments = activation_inputs(M, K, E, case, x_dtype, kind, layout, device, seed)
    return arguments | dict(format=format, rule=rule, packed=packed)


@op(
    reference=reference, check=check, inputs=inputs, tol=TOLERANCE,
    domain=dict(
        M=(0, 1, 13), K=(1, 33, 272), E=(0, 3), case=SOME_CASES, format=tuple(MX),
        rule=(None, *MX_RULES), packed=(False, True), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(mx=Kernel(_mx_kernel), pairs=Kernel(_pairs_kernel, targets=PAIRS, interpretable=False)),
    configs=configs, key=key, legal=legal, cost=cost, cases={
        f"{name}/{format}": case
        for format in ("mxfp4", "mxfp8_e4m3")
        for name, case in activation_cases(format=format).items()
    },
)  # fmt: skip
def act_and_mul_quantize_mx(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    format: str = "mxfp4", rule: str | None = None, packed: bool = True, *, config: Config,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Activate, multiply, and quantize rows to a microscaling format, one power of two for every 32 columns.

    Args:
        x: (M, 2I) or (E, M, 2I), (M, I) or (E, M, I) if not gated; fp32, bf16 or fp16, any strides.
        activation: silu, swigluoai, swiglustep, gelu, gelu_tanh or relu2; formulas in act_and_mul.
        gated: False for activations of a whole row (relu2: always; swigluoai, swiglustep: never).
        interleaved: gate and up columns alternate instead of lying in halves.
        alpha, beta, limit: parameters of silu and swigluoai (limit also of swiglustep), None for their own.
        format, rule, packed: as in quantize_mx.

    Returns:
        codes, contiguous: fp8 or int8 (..., I); or uint8, (..., I / 2) for packed FP4, (..., 3 I / 4) for packed FP6,
        (..., I) for those unpacked. And scale, (..., cdiv(I, 32)) uint8 e8m0; value = element * 2^(scale - 127).

    Raises:
        ValueError: a dtype, rank, format, rule or number of columns does not fit, or the activation does not take an
            argument given.
    """
    mx = MX[format]
    rule = rule or mx.rule
    I = activation_width(x, gated)
    M = x.shape[-2]
    codes, scale = mx_buffers((*x.shape[:-1], I), format, packed, x.device)
    if codes.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(scale.shape[-1], config["GROUPS"])
    config = dict(config)
    kernel = {"mx": _mx_kernel, "pairs": _pairs_kernel}[config.pop("kernel")]
    kernel[(tiles, E)](
        x, codes.view(torch.uint8) if codes.dtype in FP8 else codes, scale,
        M, I, codes.shape[-1], stride_xe, x.stride(-2), x.stride(-1),
        **activation_constexprs(x, activation, gated, interleaved, alpha, beta, limit),
        BLOCK=MX_BLOCK, CLAMP=rule in ("floor", "even"), PACKED=packs(format, packed), WORDS=I % 16 == 0,
        **scale_constants(mx, rule), **element_constants(mx.element, of(x.device)),
        **early_start(of(x.device)), enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes, scale
