"""quantize_mx: OCP microscaling codes, 32 elements of a row under one power of two.

    amax[m, j]  = max_{k in block j} |x[m, k]| over finite elements
    scale[m, j] = e8m0 byte of 2^e, e by `rule` (formats.mx_scale)
    codes[m, k] = element(clamp(x[m, k] * 2^-e, -max, max))        round half to even

A row whose length is no multiple of 32 has a short last block. NaN does not touch the scale; its code is NaN in FP8 and
0 in the formats without one. +-Inf saturates, its scale comes from the finite elements; a block of nothing but Inf has
the NaN byte 255. A block of zeros has byte 0 and codes +0. MXINT8 codes are in -127..127, 64 to the unit.

Source: OCP Microscaling Formats 1.0; the rules beyond "floor" from AMD Quark and the conversions of cuBLAS.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_rank
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8, MX, MX_BLOCK, MX_RULES
from fpk.kernels._microscale import element_constants, scale_byte, scale_constants
from fpk.kernels._mx import expect_mx, expect_packable, mx_blocks, mx_buffers, packs, quantized_mx, store_mx
from fpk.kernels._pairs import TARGETS as PAIRS
from fpk.kernels._pairs import as_words, fp4_times_power, has_pairs, largest_of_pairs, load_pairs, store_pairs
from fpk.kernels._tile import after_previous, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, strided
from fpk.shapes import activation_cases


def reference(
    x: Tensor, format: str = "mxfp4", rule: str | None = None, packed: bool = True
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return quantized_mx(x, format, rule, packed)


def check(x: Tensor, format: str, rule: str | None, packed: bool, **_: Any) -> None:
    expect_dtype("quantize_mx.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_mx.x", x, 2, 3)
    expect_not_empty("quantize_mx.x", x, -1)
    expect_mx("quantize_mx", format, rule)
    expect_packable("quantize_mx.x", x.shape[-1], format, packed)


@triton.jit(do_not_specialize=["M"])
def _mx_kernel(
    x_ptr, codes_ptr, scale_ptr,
    M, K, width,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    BLOCK: tl.constexpr, ADDEND: tl.constexpr, EMAX: tl.constexpr, CLAMP: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS blocks: one read, one write."""
    after_previous(PDL)
    groups = tl.cdiv(K, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    cols = (offs_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
    mask = mask_m[:, None, None] & (cols < K)
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None, None] * stride_xm + cols * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)

    codes, byte = mx_blocks(x, mask, ADDEND, EMAX, CLAMP, BITS, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
    rows = e * M + offs_m
    store_mx(codes_ptr, scale_ptr, codes, byte, rows, offs_g, mask_m, K, width, BLOCK, BITS, PACKED, WORDS)


@triton.jit(do_not_specialize=["M"])
def _pairs_kernel(
    x_ptr, words_ptr, codes_ptr, scale_ptr,
    M, K, width,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    BLOCK: tl.constexpr, ADDEND: tl.constexpr, EMAX: tl.constexpr, CLAMP: tl.constexpr, PACKED: tl.constexpr,
    WORDS: tl.constexpr, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr,
    NAN_CODE: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Packed FP4 of bf16 in pairs."""
    FEW: tl.constexpr = min(GROUPS, 8)
    after_previous(PDL)
    groups = tl.cdiv(K, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles) * GROUPS + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    rows = e * M + offs_m
    word_rows = words_ptr + e * (stride_xe // 2) + offs_m * (stride_xm // 2)
    words = load_pairs(word_rows, offs_g, mask_m, K, BLOCK)
    largest = largest_of_pairs(words)
    byte = scale_byte(largest.to(tl.float32, bitcast=True), ADDEND, EMAX)
    rare = (largest >= 0x7F800000) | ((largest > 0) & (byte == 0))
    if tl.max(tl.where(rare, 1, 0), axis=None) > 0:
        for piece in range(0, BLOCK_M * GROUPS, FEW):  # little at a time, so that it costs no registers
            row = tl.program_id(0) // tiles * BLOCK_M + piece // GROUPS + tl.arange(0, 1).to(tl.int64)
            some = tl.program_id(0) % tiles * GROUPS + piece % GROUPS + tl.arange(0, FEW)
            cols = (some[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
            mask = (row < M)[:, None, None] & (cols < K)
            x_ptrs = x_ptr + e * stride_xe + row[:, None, None] * stride_xm + cols
            x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
            codes, bytes = mx_blocks(x, mask, ADDEND, EMAX, CLAMP, BITS, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE)
            store_mx(
                codes_ptr, scale_ptr, codes, bytes, e * M + row, some, row < M, K, width, BLOCK, BITS, PACKED, WORDS
            )  # fmt: skip
    else:
        pairs = fp4_times_power(words, tl.maximum(byte, 1), largest > 0)
        store_pairs(codes_ptr + rows * width, pairs, offs_g, mask_m, width)
        scale_ptrs = scale_ptr + rows[:, None] * groups + offs_g[None, :]
        tl.store(scale_ptrs, byte.to(tl.uint8), mask=mask_m[:, None] & (offs_g < groups)[None, :])


def configs(x: Tensor, format: str, **_: Any):
    blocks = triton.next_power_of_2(triton.cdiv(x.shape[-1], MX_BLOCK))
    for kernel, each in (("pairs", 128), ("mx", 64)):  # long pieces of few rows, 64 or 32 elements a thread
        groups = min(blocks, 32 if kernel == "mx" and MX[format].element.bits == 8 else each)
        yield Config(kernel=kernel, BLOCK_M=each // groups if x.shape[-2] > 4 else 1, GROUPS=groups, num_warps=2)
    for (rows, groups), warps in itertools.product(
        ((1, 32), (1, 64), (1, 128), (2, 32), (2, 64), (4, 8), (4, 16), (4, 32), (8, 8), (16, 4), (32, 2)), (2, 4, 8)
    ):
        for kernel in ("pairs", "mx"):
            yield Config(kernel=kernel, BLOCK_M=rows, GROUPS=groups, num_warps=warps)


def legal(config: Config, x: Tensor, format: str, packed: bool, **_: Any) -> bool:
    return config["kernel"] == "mx" or (format == "mxfp4" and packed and has_pairs(x))


def key(x: Tensor, format: str, rule: str | None, packed: bool, **_: Any) -> dict[str, int | str]:
    rows = x.shape[:-1].numel()
    return dict(
        M=bucket(rows), K=x.shape[-1], format=format, rule=rule or MX[format].rule, packed=int(packed), x=str(x.dtype)
    )


def cost(x: Tensor, format: str, packed: bool, **_: Any) -> Cost:
    bits = MX[format].element.bits if packed else 8
    scale_bytes = x.shape[:-1].numel() * triton.cdiv(x.shape[-1], MX_BLOCK)
    return Cost(flops=3 * x.numel(), bytes=x.numel() * x.element_size() + x.numel() * bits // 8 + scale_bytes)


def inputs(
    *, M, K, E=0, format="mxfp4", rule=None, packed=True, x_dtype=torch.bfloat16, kind="normal", layout="contiguous",
    device="cuda", seed=0,
):  # fmt: skip
    K = -(-K // 4) * 4 if packs(format, packed) else K  # what cannot be packed is refused
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    return dict(x=x, format=format, rule=rule, packed=packed)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 5, 13), K=(1, 16, 33, 64, 100, 272), E=(0, 1, 3), format=tuple(MX), rule=(None, *MX_RULES),
        packed=(False, True), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(mx=Kernel(_mx_kernel), pairs=Kernel(_pairs_kernel, targets=PAIRS, interpretable=False)),
    configs=configs, legal=legal, key=key, cost=cost, cases={
        f"{name}/{format}": case
        for format in ("mxfp4", "mxfp8_e4m3", "mxfp6_e2m3")
        for name, case in activation_cases(format=format).items()
    },
)  # fmt: skip
def quantize_mx(
    x: Tensor, format: str = "mxfp4", rule: str | None = None, packed: bool = True, *, config: Config
) -> tuple[Tensor, Tensor]:
    """Quantize rows to a microscaling format, one power of two for every 32 columns.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        format: "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4" or "mxint8".
        rule: how the scale is rounded: "floor", "ceil", "even" or "rceil"; None takes the one that the format's
            ecosystem uses (`formats.MX`).
        packed: FP4 two codes to a byte, FP6 four to three bytes; False: one code to a byte. The other formats have
            one in any case.

    Returns:
        codes, contiguous: fp8 of x's shape; int8 of x's shape; or uint8, (..., K / 2) for packed FP4 and (..., 3 K / 4)
        for packed FP6. And scale, (..., cdiv(K, 32)) uint8 e8m0; value = element * 2^(scale - 127).

    Raises:
        ValueError: dtype, rank, format or rule does not fit, K is 0, or K is no multiple of what is packed together
            (2 for FP4, 4 for FP6).
    """
    mx = MX[format]
    rule = rule or mx.rule
    *_, M, K = x.shape
    codes, scale = mx_buffers(x.shape, format, packed, x.device)
    if x.numel() == 0:
        return codes, scale
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(scale.shape[-1], config["GROUPS"])
    config = dict(config)
    kernel = {"mx": _mx_kernel, "pairs": _pairs_kernel}[config.pop("kernel")]
    words = (as_words(x),) if kernel is _pairs_kernel else ()
    kernel[(tiles, E)](
        x, *words, codes.view(torch.uint8) if codes.dtype in FP8 else codes, scale,
        M, K, codes.shape[-1], stride_xe, x.stride(-2), x.stride(-1),
        BLOCK=MX_BLOCK, CLAMP=rule in ("floor", "even"), PACKED=packs(format, packed), WORDS=K % 16 == 0,
        **scale_constants(mx, rule), **element_constants(mx.element, of(x.device)), **early_start(of(x.device)),
        enable_fp_fusion=False, **config,
    )  # fmt: skip
    return codes, scale
