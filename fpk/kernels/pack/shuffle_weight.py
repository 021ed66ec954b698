"""shuffle_weight: a packed weight in the order in which the tensor cores of sm90 take it.

The layout has nothing to do with a tile size; `_shuffle` describes it. Target "bf16" serves bf16 activations, target
"fp8" FP8 ones: its weights are e4m3 values under one scale a row, which holds the scales of blocks exactly where those
of a row lie within 2^11 (blocks of zeros do not count).

    value(codes, scale)[n, k] = value(packed)[n, k] * row_scale[n]

`unshuffle_weight` is the inverse; a block of zeros may come back with another scale.

Source: own; the layouts of Marlin and triton_kernels serve the same purpose.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_inner_contiguous, expect_one_of, expect_rank, expect_shape
from fpk.db import Config
from fpk.kernels._packed import unpack_codes
from fpk.kernels.gemm._operands import load_codes
from fpk.kernels.pack._shuffle import (
    ELEMENTS,
    LINE,
    REBIAS,
    STEPS,
    TARGETS,
    constants,
    group_of,
    shuffled,
    unit_lines,
    units_of,
)
from fpk.kernels.pack._units import store_unit_codes, store_unit_scales
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, scales, strided
from fpk.shapes import LINEAR_LAYERS


def reference(codes: Tensor, scale: Tensor, format: str, target: str = "bf16") -> tuple[Tensor, Tensor, Tensor]:
    element, group = ELEMENTS[format], group_of(format)
    code = unpack_codes(codes, element.bits)
    N, K = code.shape
    byte = scale.view(torch.uint8).to(torch.int32)
    one = torch.ones((N, 1), dtype=torch.float64, device=codes.device)
    if format == "nvfp4":
        dead = (byte & 0x7F) == 0
        field, mantissa = (byte >> 3) & 15, byte & 7
        # subnormals of e4m3 as if it had exponents for them
        low = (mantissa >= 2).int() + (mantissa >= 4).int()
        exponent = torch.where(field > 0, field - 7, low - 9)
        mantissa = torch.where(field > 0, mantissa, (mantissa << (3 - low)) & 7)
        stored = torch.where(dead, 0, (exponent + 16) << 3 | mantissa)
        code = torch.where(dead.repeat_interleave(group, 1)[:, :K], 0, code)
        return shuffled(code, stored, format, target), (one * 256).float(), _count(one < 0)
    size = torch.nn.functional.pad(code & ((1 << (element.bits - 1)) - 1), (0, -K % group))
    alive = size.reshape(N, -1, group).amax(-1) > 0
    top = torch.where(alive, byte, -1).amax(1, keepdim=True)
    if target == "fp8":
        add, base, least, most = torch.where(top < 0, 5 - 127, STEPS - top), STEPS - 6 - 127, 0, STEPS
    else:
        rebias = REBIAS[element.name]
        add, base, least, most = (254 - top.amax().expand(N, 1)).clamp(max=rebias), rebias, 1, 254
    moved = byte + add
    outside = alive & ((moved < least) | (moved > most))
    stored = moved.clamp(least, most)
    return shuffled(code, stored, format, target), torch.ldexp(one, base - add).float(), _count(outside)


def _count(outside: Tensor) -> Tensor:
    return outside.sum().to(torch.int32).reshape(1)


def check(codes: Tensor, scale: Tensor, format: str, target: str, **_: Any) -> None:
    expect_one_of("shuffle_weight.format", format, ELEMENTS)
    expect_one_of("shuffle_weight.target", target, TARGETS)
    if target == "fp8" and format != "mxfp4":
        raise ValueError(f"shuffle_weight.format: expected mxfp4 with target 'fp8', got {format!r}")
    expect_rank("shuffle_weight.codes", codes, 2)
    expect_dtype("shuffle_weight.codes", codes, torch.uint8)
    expect_inner_contiguous("shuffle_weight.codes", codes)
    bits = ELEMENTS[format].bits
    if bits == 6 and codes.shape[1] % 3:
        raise ValueError(f"shuffle_weight.codes: expected whole groups of 3 bytes, got {tuple(codes.shape)}")
    expect_dtype("shuffle_weight.scale", scale, torch.uint8, *([torch.float8_e4m3fn] if format == "nvfp4" else []))
    K = codes.shape[1] * 8 // bits
    expect_shape("shuffle_weight.scale", scale, (codes.shape[0], triton.cdiv(K, group_of(format))))


@triton.jit
def _top_kernel(
    codes_ptr, scale_ptr, top_ptr, N, K, stride_cn, stride_sn, stride_sk,
    FORMAT: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The largest scale byte of each row among blocks that are not zero, or -1."""
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows = tl.where(offs < N, offs, 0)[:, None]
    top = tl.full((ROWS,), -1, tl.int32)
    for k in range(0, K, 128):
        codes = load_codes(codes_ptr + rows * stride_cn, k, K, FORMAT, 128, False)
        size = tl.reshape(codes & ((1 << (BITS - 1)) - 1), (ROWS, 4, 32))
        at = k // 32 + tl.arange(0, 4)[None, :]
        byte = tl.load(scale_ptr + rows * stride_sn + at * stride_sk, mask=at * 32 < K, other=0).to(tl.int32)
        top = tl.maximum(top, tl.max(tl.where(tl.max(size, axis=2) > 0, byte, -1), axis=1))
    tl.store(top_ptr + offs, top, mask=offs < N)


@triton.jit
def _unit_kernel(
    codes_ptr, scale_ptr, add_ptr, packed_ptr, outside_ptr, N, K, units_k, stride_cn, stride_sn, stride_sk,
    LEAST: tl.constexpr, MOST: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    FP8: tl.constexpr, PLACE: tl.constexpr, MASK2: tl.constexpr,
):  # fmt: skip
    """One unit a program."""
    unit, units = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    offs = (tl.program_id(0) // units_k).to(tl.int64) * 64 + tl.arange(0, 64)
    k = tl.program_id(0) % units_k * 128
    mask = (offs < N)[:, None]
    rows = tl.where(offs < N, offs, 0)[:, None]
    codes = load_codes(codes_ptr + rows * stride_cn, k, K, FORMAT, 128, False)
    codes = tl.where(mask, codes, 0)
    GROUPS: tl.constexpr = 128 // GROUP
    at = k // GROUP + tl.arange(0, GROUPS)[None, :]
    inside = mask & (at * GROUP < K)
    byte = tl.load(scale_ptr + rows * stride_sn + at * stride_sk, mask=inside, other=0).to(tl.int32)
    grouped = tl.reshape(codes, (64, GROUPS, GROUP))
    if GROUP == 16:
        field, mantissa = (byte >> 3) & 15, byte & 7
        low = tl.where(mantissa >= 4, 2, tl.where(mantissa >= 2, 1, 0))
        exponent = tl.where(field > 0, field - 7, low - 9)
        mantissa = tl.where(field > 0, mantissa, (mantissa << (3 - low)) & 7)
        dead = (byte & 0x7F) == 0
        stored = tl.where(dead, 0, ((exponent + 16) << 3) | mantissa)
        codes = tl.reshape(tl.where(dead[:, :, None], 0, grouped), (64, 128))
    else:
        alive = tl.max(grouped & ((1 << (BITS - 1)) - 1), axis=2) > 0
        moved = byte + tl.load(add_ptr + rows)
        outside = tl.sum(tl.sum((alive & ((moved < LEAST) | (moved > MOST))).to(tl.int32), axis=1), axis=0)
        if outside > 0:
            tl.atomic_add(outside_ptr, outside)
        stored = tl.where(inside, tl.minimum(tl.maximum(moved, LEAST), MOST), 0)
    store_unit_codes(packed_ptr, unit, units, codes, FORMAT, BITS, FP8, PLACE, MASK2)
    store_unit_scales(packed_ptr, unit, units, stored, BITS, GROUP)


def configs(**_: Any):
    yield Config(num_warps=4)
    yield Config(num_warps=8)


def key(codes: Tensor, format: str, target: str, **_: Any) -> dict[str, int | str]:
    return dict(N=codes.shape[0], K=codes.shape[1] * 8 // ELEMENTS[format].bits, format=format, target=target)


def cost(codes: Tensor, scale: Tensor, **_: Any) -> Cost:
    return Cost(flops=0, bytes=2 * (codes.numel() + scale.numel()))


def inputs(*, N, K, weight="mxfp4/bf16", spread=6, layout="contiguous", device="cuda", seed=0):
    format, target = weight.split("/")
    K, g = -(-K // 4) * 4, generator(seed, device)
    width = K * ELEMENTS[format].bits // 8
    codes = torch.randint(0, 256, (N, width), generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    shape = (N, triton.cdiv(K, group_of(format)))
    if format == "nvfp4":
        scale = (scales(shape, device, seed + 1) * 4).to(torch.float8_e4m3fn)
    else:
        scale = torch.randint(120 - spread, 121, shape, generator=g, device=device, dtype=torch.int32).to(torch.uint8)
    return dict(codes=strided(codes, layout), scale=scale, format=format, target=target)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        N=(1, 64, 80), K=(4, 128, 272),
        weight=("mxfp4/bf16", "nvfp4/bf16", "mxfp6_e2m3/bf16", "mxfp6_e3m2/bf16", "mxfp4/fp8"), spread=(6, 100),
        layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(unit=Kernel(_unit_kernel)), configs=configs, key=key, cost=cost,
    cases={name: dict(N=n, K=k) for name, (n, k) in LINEAR_LAYERS.items()},
)  # fmt: skip
def shuffle_weight(
    codes: Tensor, scale: Tensor, format: str, target: str = "bf16", *, config: Config
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Reorder a packed weight for `mm_shuffled`.

    Args:
        codes: (N, K / 2) or (N, 3 K / 4) packed codes, rows contiguous, as of the quantizers.
        scale: (N, cdiv(K, 32)) uint8 e8m0, not the NaN byte; (N, cdiv(K, 16)) float8_e4m3fn or its bytes for "nvfp4".
        format: "mxfp4", "nvfp4", "mxfp6_e2m3" or "mxfp6_e3m2".
        target: "bf16", or "fp8" for "mxfp4".

    Returns:
        packed uint8 (lines, 256), row_scale (N, 1) fp32, and the number of blocks, (1,) int32, that the
        layout does not hold exactly: 0, or the weight must stay as it was.

    Raises:
        ValueError: a format, dtype, shape or stride does not fit.
    """
    made, (N, width) = constants(format, target), codes.shape
    K, device = width * 8 // made["BITS"], codes.device
    units_n, units_k = units_of(N, K)
    units = units_n * units_k
    packed = torch.empty((units * unit_lines(format), LINE), dtype=torch.uint8, device=device)
    outside = torch.zeros(1, dtype=torch.int32, device=device)
    base, least, most = 8, 0, 0
    stored = scale.view(torch.uint8)
    add = torch.zeros((N, 1), dtype=torch.int32, device=device)
    if made["GROUP"] == 32:
        top = torch.empty((N, 1), dtype=torch.int32, device=device)
        _top_kernel[(triton.cdiv(N, 16),)](
            codes, stored, top, N, K, codes.stride(0), *stored.stride(),
            FORMAT=made["FORMAT"], BITS=made["BITS"], ROWS=16, **config,
        )  # fmt: skip
        if target == "fp8":
            base, least, most = STEPS - 6 - 127, 0, STEPS
            add = torch.where(top < 0, 5 - 127, STEPS - top)
        else:
            base, least, most = REBIAS[made["FORMAT"]], 1, 254
            add = (254 - top.amax()).clamp(max=base).expand(N, 1).contiguous()
    one = torch.ones((N, 1), dtype=torch.float64, device=device)
    _unit_kernel[(units,)](
        codes, stored, add, packed, outside, N, K, units_k, codes.stride(0), *stored.stride(),
        LEAST=least, MOST=most, **made, **config,
    )  # fmt: skip
    return packed, torch.ldexp(one, base - add).float(), outside
