"""act_and_mul_quantize_nvfp4: an MLP's activation, quantized to FP4 with an e4m3 scale for every 16 columns.

    act         = act_and_mul(x), rounded to x's type
    g           = 2688 / max(amax, 1e-30)     amax of act, or of each row; or 1 / global_scale where one is given
    scale[m, j] = e4m3(min(g * (amax[m, j] / 6), 448))
    codes[m, k] = e2m1(clamp(act[m, k] * (g / scale[m, j]), -6, 6)), 0 where the scale is 0
    value       = codes * scale * global_scale,   global_scale = 1 / g

Bit-equal to act_and_mul followed by quantize_nvfp4, which says what NaN, Inf, short blocks and `four_over_six` are
about. Without a given global scale the activation is formed twice: once for its maximum, once for its codes.

Source: the fused activation and quantization of NVFP4 MoE layers.
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
from fpk.formats import NVFP4_BLOCK
from fpk.kernels._activation import (
    SOME_CASES,
    activated,
    activation_constexprs,
    activation_inputs,
    activation_width,
    expect_activation,
    load_activation,
)
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
from fpk.kernels._pairs import fp4_times, largest_of_pairs, nvfp4_scales, store_pairs, words_of
from fpk.kernels._tile import after_previous, amax_key, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, scales
from fpk.shapes import activation_cases

# the activation may differ by its last place, and then a code by one; see act_and_mul
TOLERANCE = 0.02


def reference(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    global_scale: Tensor | None = None, per_token: bool = False, four_over_six: bool = False, packed: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    act = activated(x, activation, gated, interleaved, alpha, beta, limit)
    return quantized_nvfp4(act, global_scale, per_token, four_over_six, packed)


def check(
    x: Tensor, global_scale: Tensor | None, per_token: bool, four_over_six: bool, packed: bool, gated: bool,
    **arguments: Any,
) -> None:  # fmt: skip
    expect_activation("act_and_mul_quantize_nvfp4", x, gated=gated, **arguments)
    width = activation_width(x, gated)
    if packed and width % 2:
        raise ValueError(f"act_and_mul_quantize_nvfp4.x (packed): expected a multiple of 2 activations, got {width}")
    expect_global_scale("act_and_mul_quantize_nvfp4", global_scale, (*x.shape[:-1], width), per_token)


@triton.jit(do_not_specialize=["M", "parts"])
def _amax_kernel(
    x_ptr, key_ptr,
    M, I, parts,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    PER_TOKEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The key of each row's amax; or, if not PER_TOKEN, of that of the tiles that are this program's."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(I, BLOCK_K)
    if PER_TOKEN:
        first = tl.program_id(0) * tiles_k
        last = first + tiles_k
        step = 1
    else:
        first = tl.program_id(0)
        last = tl.cdiv(M, BLOCK_M) * tiles_k
        step = parts
    keys = tl.zeros((BLOCK_M, 1, BLOCK_K), dtype=tl.uint32)
    for tile in range(first, last, step):
        offs_m = (tile // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        act, mask, _ = load_activation(
            x_ptr + e * stride_xe + offs_m * stride_xm, offs_m < M,
            tl.zeros((1,), tl.int64) + tile % tiles_k * BLOCK_K, I, stride_xk,
            FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, 1, BLOCK_K, BLOCK_K,
        )  # fmt: skip
        keys = tl.maximum(keys, tl.where(mask, amax_key(act), 0))
    row_keys = tl.max(tl.max(keys, axis=2), axis=1)
    if PER_TOKEN:
        offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(key_ptr + e * M + offs_m, row_keys, mask=offs_m < M)
    else:
        tl.store(key_ptr + e * parts + tl.program_id(0), tl.max(row_keys, axis=0))


@triton.jit(do_not_specialize=["M", "parts"])
def _nvfp4_kernel(
    x_ptr, key_ptr, given_ptr, codes_ptr, scale_ptr, global_ptr,
    M, I, width, parts,
    stride_xe, stride_xm, stride_xk, stride_ge, stride_gm, PDL: tl.constexpr,
    FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, PACKED: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, HUGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS blocks; the programs of the first columns also store the global scale."""
    after_previous(PDL)
    tiles = tl.cdiv(tl.cdiv(I, BLOCK), GROUPS)
    e = tl.program_id(1).to(tl.int64)
    tile_m, tile_g = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    offs_m = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = tile_g.to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    act, mask, _ = load_activation(
        x_ptr + e * stride_xe + offs_m * stride_xm, mask_m, offs_g * BLOCK, I, stride_xk,
        FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, GROUPS, BLOCK, BLOCK,
    )  # fmt: skip
    given, g = global_of(
        given_ptr, key_ptr, e, M, offs_m, mask_m, parts, stride_ge, stride_gm, PER_TOKEN, BLOCK_P
    )  # fmt: skip
    store_global(global_ptr, given, e, M, offs_m, mask_m, tile_g == 0, PER_TOKEN)
    codes, stored = nvfp4_blocks(act, mask, g, FOUR_OVER_SIX, HUGE, MANTISSA, BIAS, NAN_CODE)
    rows = e * M + offs_m
    store_nvfp4(codes_ptr, scale_ptr, codes, stored, rows, offs_g, mask_m, I, width, BLOCK, PACKED)


@triton.jit(do_not_specialize=["M", "parts"])
def _pairs_kernel(
    x_ptr, key_ptr, given_ptr, codes_ptr, scale_ptr, global_ptr,
    M, I, width, parts,
    stride_xe, stride_xm, stride_xk, stride_ge, stride_gm, PDL: tl.constexpr,
    FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK: tl.constexpr, PER_TOKEN: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, PACKED: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN_CODE: tl.constexpr, HUGE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Packed codes of bf16 in pairs."""
    FEW: tl.constexpr = min(GROUPS, 8)
    after_previous(PDL)
    groups = tl.cdiv(I, BLOCK)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    tile_g = tl.program_id(0) % tiles
    first_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M
    first_g = tile_g.to(tl.int64) * GROUPS
    offs_m, offs_g = first_m + tl.arange(0, BLOCK_M), first_g + tl.arange(0, GROUPS)
    mask_m = offs_m < M
    x_ptr += e * stride_xe
    act, _mask, _cols = load_activation(
        x_ptr + offs_m * stride_xm, mask_m, offs_g * BLOCK, I, stride_xk,
        FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, BLOCK_M, GROUPS, BLOCK, BLOCK,
    )  # fmt: skip
    given, g = global_of(
        given_ptr, key_ptr, e, M, offs_m, mask_m, parts, stride_ge, stride_gm, PER_TOKEN, BLOCK_P
    )  # fmt: skip
    store_global(global_ptr, given, e, M, offs_m, mask_m, tile_g == 0, PER_TOKEN)
    words = words_of(act)
    largest = largest_of_pairs(words)
    strange = (mask_m & ((g < 2.0**-40) | (g > 2.0**40) | (g != g)))[:, None]
    if tl.max(tl.where((largest >= 0x7F800000) | strange, 1, 0), axis=None) > 0:
        for piece in range(0, BLOCK_M * GROUPS, FEW):  # little at a time, so that it costs no registers
            row = first_m + piece // GROUPS + tl.arange(0, 1)
            some = first_g + piece % GROUPS + tl.arange(0, FEW)
            its_act, mask, _its_cols = load_activation(
                x_ptr + row * stride_xm, row < M, some * BLOCK, I, stride_xk,
                FORMULA, GATED, INTERLEAVED, ALPHA, BETA, LIMIT, PRECISE, 1, FEW, BLOCK, BLOCK,
            )  # fmt: skip
            _its_given, its_g = global_of(
                given_ptr, key_ptr, e, M, row, row < M, parts, stride_ge, stride_gm, PER_TOKEN, BLOCK_P
            )  # fmt: skip
            codes, its_scale = nvfp4_blocks(
                its_act, mask, its_g, FOUR_OVER_SIX, HUGE, MANTISSA, BIAS, NAN_CODE
            )  # fmt: skip
            store_nvfp4(codes_ptr, scale_ptr, codes, its_scale, e * M + row, some, row < M, I, width, BLOCK, PACKED)
    else:
        rows = e * M + offs_m
        amax = largest.to(tl.float32, bitcast=True)
        stored, scale, factor = nvfp4_scales(amax, tl.broadcast_to(g[:, None], amax.shape))
        store_pairs(codes_ptr + rows * width, fp4_times(words, factor, scale > 0), offs_g, mask_m, width)
        scale_ptrs = scale_ptr + rows[:, None] * groups + offs_g[None, :]
        tl.store(scale_ptrs, stored, mask=mask_m[:, None] & (offs_g < groups)[None, :])


def configs(x: Tensor, gated: bool, **_: Any):
    groups = min(64, triton.next_power_of_2(triton.cdiv(activation_width(x, gated), NVFP4_BLOCK)))
    rows = 64 // groups if x.shape[-2] > 4 else 1
    for kernel in ("pairs", "nvfp4"):  # long pieces of few rows, 16 activations a thread
        yield Config(kernel=kernel, BLOCK_M=rows, GROUPS=groups, PROGRAMS=1024, num_warps=2)
    for (rows, groups), warps in itertools.product(
        ((1, 32), (1, 64), (1, 128), (2, 32), (4, 8), (4, 16), (8, 8), (8, 16), (16, 4)), (2, 4, 8)
    ):
        for kernel in ("pairs", "nvfp4"):
            yield Config(kernel=kernel, BLOCK_M=rows, GROUPS=groups, PROGRAMS=1024, num_warps=warps)


def legal(config: Config, x: Tensor, packed: bool, four_over_six: bool, **_: Any) -> bool:
    if config["kernel"] == "pairs" and (not packed or four_over_six or x.dtype is not torch.bfloat16):
        return False
    # at most 32 activations a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * NVFP4_BLOCK <= 1024 * config["num_warps"]


def key(
    x: Tensor, activation: str, gated: bool, interleaved: bool, global_scale: Tensor | None, per_token: bool,
    four_over_six: bool, packed: bool, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    return dict(
        M=bucket(x.shape[:-1].numel()), K=activation_width(x, gated), activation=activation, gated=int(gated),
        interleaved=int(interleaved),
        scope="given" if global_scale is not None else "token" if per_token else "tensor",
        four_over_six=int(four_over_six), packed=int(packed), x=str(x.dtype),
    )  # fmt: skip


def cost(x: Tensor, gated: bool, global_scale: Tensor | None, packed: bool, **_: Any) -> Cost:
    rows, width = x.shape[:-1].numel(), activation_width(x, gated)
    # two reads, unless the global scale is known before
    read = x.numel() * x.element_size() * (1 if global_scale is not None else 2)
    written = rows * (width // (2 if packed else 1) + triton.cdiv(width, NVFP4_BLOCK))
    return Cost(flops=12 * rows * width, bytes=read + written)


def inputs(
    *, M, K, E=0, case="silu", per_token=False, given=False, four_over_six=False, packed=True,
    x_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    K = -(-K // 2) * 2 if packed else K  # what cannot be packed is refused
    arguments = activation_inputs(M, K, E, case, x_dtype, kind, layout, device, seed)
    shape = global_shape((*arguments["x"].shape[:-1], K), per_token)
    # from far too small, where blocks saturate, to far too large, where scales become 0
    global_scale = scales(shape, device, seed + 1) * 0.01 if given else None
    return arguments | dict(
        global_scale=global_scale, per_token=per_token, four_over_six=four_over_six, packed=packed
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=TOLERANCE,
    domain=dict(
        M=(0, 1, 13), K=(1, 33, 80), E=(0, 3), case=SOME_CASES, per_token=(False, True),
        given=(False, True), four_over_six=(False, True), packed=(False, True), x_dtype=FLOAT_INPUTS, kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(
        nvfp4=Kernel(_nvfp4_kernel), pairs=Kernel(_pairs_kernel, targets=PAIRS, interpretable=False),
        amax=Kernel(_amax_kernel, named=False),
    ),
    configs=configs, legal=legal, launcher_fields=("PROGRAMS",), key=key, cost=cost,
    cases=activation_cases() | {f"{name}/static": case for name, case in activation_cases(given=True).items()},
)  # fmt: skip
def act_and_mul_quantize_nvfp4(
    x: Tensor, activation: str = "silu", gated: bool = True, interleaved: bool = False, alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
    global_scale: Tensor | None = None, per_token: bool = False, four_over_six: bool = False, packed: bool = True, *,
    config: Config,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Activate, multiply, and quantize rows to NVFP4.

    Args:
        x: (M, 2I) or (E, M, 2I), (M, I) or (E, M, I) if not gated; fp32, bf16 or fp16, any strides.
        activation: silu, swigluoai, swiglustep, gelu, gelu_tanh or relu2; formulas in act_and_mul.
        gated: False for activations of a whole row (relu2: always; swigluoai, swiglustep: never).
        interleaved: gate and up columns alternate instead of lying in halves.
        alpha, beta, limit: parameters of silu and swigluoai (limit also of swiglustep), None for their own.
        global_scale: None to take it from the activation, else fp32, a multiplier: (1, 1), (E, 1, 1), or with per_token
            (M, 1), (E, M, 1).
        per_token, four_over_six, packed: as in quantize_nvfp4.

    Returns:
        codes uint8, (..., I / 2) or (..., I), contiguous; scale (..., cdiv(I, 16)) float8_e4m3fn; and the global scale,
        fp32: (1, 1), (E, 1, 1), (M, 1) or (E, M, 1). value = code * scale * global_scale.

    Raises:
        ValueError: a dtype, shape or number of columns does not fit, or the activation does not take an argument given.
    """
    I = activation_width(x, gated)
    M = x.shape[-2]
    codes, scale, stored = nvfp4_buffers((*x.shape[:-1], I), per_token, packed, x.device)
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    if codes.numel() == 0:
        # without rows a matrix still has a global scale: that of zeros
        return codes, scale, stored.fill_(ZEROS_GLOBAL) if global_scale is None else global_scale.clone()
    constants = activation_constexprs(x, activation, gated, interleaved, alpha, beta, limit)
    strides = (stride_xe, x.stride(-2), x.stride(-1))
    keys = None
    if global_scale is None:
        parts = M if per_token else min(config["PROGRAMS"], M * triton.cdiv(I, 1024))
        keys = torch.empty((E, parts), dtype=torch.uint32, device=x.device)
        _amax_kernel[(parts, E)](
            x, keys, M, I, parts, *strides, **constants, PER_TOKEN=per_token, BLOCK_M=1, BLOCK_K=1024, num_warps=4,
            enable_fp_fusion=False, **early_start(of(x.device)),
        )  # fmt: skip
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(scale.shape[-1], config["GROUPS"])
    kernel = {"nvfp4": _nvfp4_kernel, "pairs": _pairs_kernel}[config["kernel"]]
    kernel[(tiles, E)](
        x, keys, global_scale, codes, scale.view(torch.uint8), stored,
        M, I, codes.shape[-1], 1 if keys is None else keys.shape[1],
        *strides, *global_strides(global_scale, per_token),
        **constants,
        BLOCK=NVFP4_BLOCK, PER_TOKEN=per_token, FOUR_OVER_SIX=four_over_six, PACKED=packed,
        BLOCK_P=triton.next_power_of_2(config["PROGRAMS"]), HUGE=LARGEST, **E4M3,
        BLOCK_M=config["BLOCK_M"], GROUPS=config["GROUPS"], num_warps=config["num_warps"], enable_fp_fusion=False,
        **early_start(of(x.device)),
    )  # fmt: skip
    return codes, scale, stored
