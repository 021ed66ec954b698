"""quantize_nvfp4: FP4 codes with an e4m3 scale for every 16 columns and an fp32 scale above those.

    g           = 2688 / max(amax, 1e-30)     amax of the matrix, or of each row; or 1 / global_scale where one is given
    scale[m, j] = e4m3(min(g * (amax[m, j] / 6), 448))
    codes[m, k] = e2m1(clamp(x[m, k] * (g / scale[m, j]), -6, 6)), 0 where the scale is 0
    value       = codes * scale * global_scale,   global_scale = 1 / g

2688 = 6 * 448. Maxima are taken over finite elements. NaN gives code 0; +-Inf is quantized as the largest finite fp32,
which saturates. A block of nothing but Inf has scale 448; a matrix of nothing but Inf has global scale Inf and decodes
to NaN. A short last block is allowed.

`four_over_six` also tries 4 instead of 6 as the code of a block's maximum and keeps it where the sum of squared errors
(x * g - code * scale)^2 is smaller, the 16 squares summed as a binary tree: the steps between 4 and 6 are wide.

Source: NVIDIA's NVFP4 as ModelOpt stores it (compressed-tensors writes g instead of 1 / g); "Four Over Six" for the
choice of 4 or 6.
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_multiple, expect_not_empty, expect_rank
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import NVFP4_BLOCK
from fpk.kernels._amax import partial_amax
from fpk.kernels._nvfp4 import (
    E4M3,
    LARGEST,
    ZEROS_GLOBAL,
    expect_global_scale,
    global_of,
    global_shape,
    global_strides,
    nvfp4_blocks,
    nvfp4_buffers,
    quantized_nvfp4,
    store_global,
    store_nvfp4,
)
from fpk.kernels._pairs import TARGETS as PAIRS
from fpk.kernels._pairs import as_words, fp4_times, has_pairs, largest_of_pairs, load_pairs, nvfp4_scales, store_pairs
from fpk.kernels._tile import after_previous, amax_key, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, scales, strided
from fpk.shapes import activation_cases


def reference(
    x: Tensor, global_scale: Tensor | None = None, per_token: bool = False, four_over_six: bool = False,
    packed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return quantized_nvfp4(x, global_scale, per_token, four_over_six, packed)


def check(x: Tensor, global_scale: Tensor | None, per_token: bool, packed: bool, **_: Any) -> None:
    expect_dtype("quantize_nvfp4.x", x, *FLOAT_INPUTS)
    expect_rank("quantize_nvfp4.x", x, 2, 3)
    expect_not_empty("quantize_nvfp4.x", x, -1)
    if packed:
        expect_multiple("quantize_nvfp4.x (packed)", x, 2)
    expect_global_scale("quantize_nvfp4", global_scale, x.shape, per_token)


@triton.jit(do_not_specialize=["M"])
def _row_amax_kernel(
    x_ptr, key_ptr, M, K, stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The key of each row's amax."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    x_rows = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm
    keys = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.uint32)
    for k in range(0, K, BLOCK_K):
        offs_k = k + tl.arange(0, BLOCK_K)
        mask = mask_m[:, None] & (offs_k < K)[None, :]
        x = tl.load(x_rows + offs_k[None, :].to(tl.int64) * stride_xk, mask=mask, other=0.0).to(tl.float32)
        keys = tl.maximum(keys, tl.where(mask, amax_key(x), 0))
    tl.store(key_ptr + e * M + offs_m, tl.max(keys, axis=1), mask=mask_m)


@triton.jit(do_not_specialize=["M", "parts"])
def _nvfp4_kernel(
    x_ptr, key_ptr, given_ptr, codes_ptr, scale_ptr, global_ptr,
    M, K, width, parts,
    stride_xe, stride_xm, stride_xk, stride_ge, stride_gm, PDL: tl.constexpr,
    BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, PACKED: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, HUGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS blocks; the programs of the first columns also store the global scale."""
    after_previous(PDL)
    groups = tl.cdiv(K, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    tile_m, tile_g = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = tile_g.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    cols = (offs_g[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
    mask = mask_m[:, None, None] & (cols < K)
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None, None] * stride_xm + cols * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)

    given, g = global_of(
        given_ptr, key_ptr, e, M, offs_m, mask_m, parts, stride_ge, stride_gm, PER_TOKEN, BLOCK_P
    )  # fmt: skip
    store_global(global_ptr, given, e, M, offs_m, mask_m, tile_g == 0, PER_TOKEN)
    codes, stored = nvfp4_blocks(x, mask, g, FOUR_OVER_SIX, HUGE, MANTISSA, BIAS, NAN_CODE)
    rows = e * M + offs_m
    store_nvfp4(codes_ptr, scale_ptr, codes, stored, rows, offs_g, mask_m, K, width, BLOCK, PACKED)


@triton.jit(do_not_specialize=["M", "parts"])
def _pairs_kernel(
    x_ptr, words_ptr, key_ptr, given_ptr, codes_ptr, scale_ptr, global_ptr,
    M, K, width, parts,
    stride_xe, stride_xm, stride_xk, stride_ge, stride_gm, PDL: tl.constexpr,
    BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, PACKED: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, HUGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Packed codes of bf16 in pairs."""
    FEW: tl.constexpr = min(GROUPS, 8)
    after_previous(PDL)
    groups = tl.cdiv(K, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    tile_m, tile_g = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = tile_g * GROUPS + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    rows = e * M + offs_m
    word_rows = words_ptr + e * (stride_xe // 2) + offs_m * (stride_xm // 2)
    words = load_pairs(word_rows, offs_g, mask_m, K, BLOCK)
    given, g = global_of(
        given_ptr, key_ptr, e, M, offs_m, mask_m, parts, stride_ge, stride_gm, PER_TOKEN, BLOCK_P
    )  # fmt: skip
    store_global(global_ptr, given, e, M, offs_m, mask_m, tile_g == 0, PER_TOKEN)
    largest = largest_of_pairs(words)
    strange = (mask_m & ((g < 2.0**-40) | (g > 2.0**40) | (g != g)))[:, None]
    if tl.max(tl.where((largest >= 0x7F800000) | strange, 1, 0), axis=None) > 0:
        for piece in range(0, BLOCK_M * GROUPS, FEW):  # little at a time, so that it costs no registers
            row = tile_m * BLOCK_M + piece // GROUPS + tl.arange(0, 1).to(tl.int64)
            some = tile_g * GROUPS + piece % GROUPS + tl.arange(0, FEW)
            cols = (some[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :])[None, :, :]
            mask = (row < M)[:, None, None] & (cols < K)
            x_ptrs = x_ptr + e * stride_xe + row[:, None, None] * stride_xm + cols
            x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
            _, its_g = global_of(
                given_ptr, key_ptr, e, M, row, row < M, parts, stride_ge, stride_gm, PER_TOKEN, BLOCK_P
            )  # fmt: skip
            codes, stored = nvfp4_blocks(x, mask, its_g, FOUR_OVER_SIX, HUGE, MANTISSA, BIAS, NAN_CODE)
            store_nvfp4(codes_ptr, scale_ptr, codes, stored, e * M + row, some, row < M, K, width, BLOCK, PACKED)
    else:
        amax = largest.to(tl.float32, bitcast=True)
        stored, scale, factor = nvfp4_scales(amax, tl.broadcast_to(g[:, None], amax.shape))
        store_pairs(codes_ptr + rows * width, fp4_times(words, factor, scale > 0), offs_g, mask_m, width)
        scale_ptrs = scale_ptr + rows[:, None] * groups + offs_g[None, :]
        tl.store(scale_ptrs, stored, mask=mask_m[:, None] & (offs_g < groups)[None, :])


def configs(x: Tensor, **_: Any):
    blocks = triton.next_power_of_2(triton.cdiv(x.shape[-1], NVFP4_BLOCK))
    for kernel, each in (("pairs", 256), ("nvfp4", 128)):  # long pieces of few rows, 64 or 32 elements a thread
        groups = min(blocks, each)
        rows = each // groups if x.shape[-2] > 4 else 1
        yield Config(kernel=kernel, BLOCK_M=rows, GROUPS=groups, PROGRAMS=528, BLOCK_K=2048, num_warps=2)
    for (rows, groups), warps in itertools.product(
        ((1, 64), (1, 128), (1, 256), (2, 64), (4, 16), (4, 32), (4, 64), (8, 16), (16, 8)), (2, 4, 8)
    ):
        for kernel in ("pairs", "nvfp4"):
            yield Config(
                kernel=kernel, BLOCK_M=rows, GROUPS=groups, PROGRAMS=528, BLOCK_K=2048, num_warps=warps
            )  # fmt: skip


def legal(config: Config, x: Tensor, packed: bool, four_over_six: bool, **_: Any) -> bool:
    if config["kernel"] == "pairs" and (not packed or four_over_six or not has_pairs(x)):
        return False
    # at most 64 elements a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * NVFP4_BLOCK <= 2048 * config["num_warps"]


def key(
    x: Tensor, global_scale: Tensor | None, per_token: bool, four_over_six: bool, packed: bool, **_: Any
) -> dict[str, int | str]:  # fmt: skip
    scope = "given" if global_scale is not None else "token" if per_token else "tensor"
    return dict(
        M=bucket(x.shape[:-1].numel()), K=x.shape[-1], scope=scope, four_over_six=int(four_over_six),
        packed=int(packed), x=str(x.dtype),
    )  # fmt: skip


def cost(x: Tensor, global_scale: Tensor | None, packed: bool, **_: Any) -> Cost:
    # two reads, unless the global scale is known before
    read = x.numel() * x.element_size() * (1 if global_scale is not None else 2)
    written = x.numel() // (2 if packed else 1) + x.shape[:-1].numel() * triton.cdiv(x.shape[-1], NVFP4_BLOCK)
    return Cost(flops=4 * x.numel(), bytes=read + written)


def inputs(
    *, M, K, E=0, per_token=False, given=False, four_over_six=False, packed=True, x_dtype=torch.bfloat16,
    kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    K = -(-K // 2) * 2 if packed else K  # what cannot be packed is refused
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    # from far too small, where blocks saturate, to far too large, where scales become 0
    global_scale = scales(global_shape(x.shape, per_token), device, seed + 1) * 0.01 if given else None
    return dict(x=x, global_scale=global_scale, per_token=per_token, four_over_six=four_over_six, packed=packed)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 13), K=(1, 16, 33, 100, 272), E=(0, 1, 3), per_token=(False, True), given=(False, True),
        four_over_six=(False, True), packed=(False, True), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(nvfp4=Kernel(_nvfp4_kernel), pairs=Kernel(_pairs_kernel, targets=PAIRS, interpretable=False)),
    configs=configs, legal=legal, launcher_fields=("PROGRAMS", "BLOCK_K"), key=key, cost=cost,
    cases=activation_cases() | {f"{name}/static": case for name, case in activation_cases(given=True).items()},
)  # fmt: skip
def quantize_nvfp4(
    x: Tensor, global_scale: Tensor | None = None, per_token: bool = False, four_over_six: bool = False,
    packed: bool = True, *, config: Config,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantize rows to NVFP4.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides.
        global_scale: None to take it from the data, else fp32, a multiplier: (1, 1), (E, 1, 1), or with per_token
            (M, 1), (E, M, 1).
        per_token: a global scale for every row, instead of one for every matrix (of a stack: every expert).
        four_over_six: let a block's maximum be 4 instead of 6 where that errs less.
        packed: two codes to a byte, the first in the low half; False: one.

    Returns:
        codes uint8, (..., K / 2) or (..., K), contiguous; scale (..., cdiv(K, 16)) float8_e4m3fn; and the global scale,
        fp32: (1, 1), (E, 1, 1), (M, 1) or (E, M, 1). value = code * scale * global_scale.

    Raises:
        ValueError: a dtype or shape does not fit, K is 0, or odd and packed.
    """
    *_, M, K = x.shape
    codes, scale, stored = nvfp4_buffers(x.shape, per_token, packed, x.device)
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    if x.numel() == 0:
        # without rows a matrix still has a global scale: that of zeros
        return codes, scale, stored.fill_(ZEROS_GLOBAL) if global_scale is None else global_scale.clone()
    keys = None
    if global_scale is None and per_token:
        keys = torch.empty((E, M), dtype=torch.uint32, device=x.device)
        _row_amax_kernel[(M, E)](
            x, keys, M, K, stride_xe, x.stride(-2), x.stride(-1), BLOCK_M=1, BLOCK_K=config["BLOCK_K"], num_warps=4,
            **early_start(of(x.device)),
        )  # fmt: skip
    elif global_scale is None:
        keys = partial_amax(
            x, None, Config(BLOCK_M=1, BLOCK_K=8192, PROGRAMS=config["PROGRAMS"], num_warps=8, num_stages=1)
        )
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(scale.shape[-1], config["GROUPS"])
    kernel = {"nvfp4": _nvfp4_kernel, "pairs": _pairs_kernel}[config["kernel"]]
    words = (as_words(x),) if kernel is _pairs_kernel else ()
    kernel[(tiles, E)](
        x, *words, keys, global_scale, codes, scale.view(torch.uint8), stored,
        M, K, codes.shape[-1], keys.shape[1] if keys is not None and not per_token else 1,
        stride_xe, x.stride(-2), x.stride(-1), *global_strides(global_scale, per_token),
        BLOCK=NVFP4_BLOCK, PER_TOKEN=per_token, FOUR_OVER_SIX=four_over_six, PACKED=packed,
        BLOCK_P=triton.next_power_of_2(config["PROGRAMS"]), HUGE=LARGEST, **E4M3,
        BLOCK_M=config["BLOCK_M"], GROUPS=config["GROUPS"], num_warps=config["num_warps"], enable_fp_fusion=False,
        **early_start(of(x.device)),
    )  # fmt: skip
    return codes, scale, stored
