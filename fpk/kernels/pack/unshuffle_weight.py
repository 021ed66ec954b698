"""unshuffle_weight: the inverse of shuffle_weight.

Codes come back as they were, but for NVFP4 blocks whose scale is 0, which become codes 0. Scales come back as they
were, but for those of blocks of zeros, which the layout need not hold.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_one_of, expect_rank, expect_shape
from fpk.db import Config
from fpk.kernels._microscale import store_packed
from fpk.kernels._packed import pack_codes
from fpk.kernels.pack._shuffle import (
    ELEMENTS,
    LINE,
    REBIAS,
    STEPS,
    TARGETS,
    constants,
    group_of,
    unit_lines,
    units_of,
    unshuffled,
)
from fpk.kernels.pack._units import load_unit_codes, load_unit_scales
from fpk.op import Cost, Kernel, op
from fpk.samples import generator
from fpk.shapes import LINEAR_LAYERS


def reference(
    packed: Tensor, row_scale: Tensor, K: int, format: str, target: str = "bf16"
) -> tuple[Tensor, Tensor]:  # fmt: skip
    element = ELEMENTS[format]
    codes, stored = unshuffled(packed, format, target, row_scale.shape[0], K)
    byte = stored.to(torch.int32)
    if format == "nvfp4":
        exponent, mantissa = (byte >> 3) - 16, byte & 7
        down = (-6 - exponent).clamp(min=0)
        scale = torch.where(down > 0, (8 | mantissa) >> down, (exponent + 7) << 3 | mantissa)
        scale = torch.where(byte == 0, 0, scale)
    else:
        base = STEPS - 6 - 127 if target == "fp8" else REBIAS[element.name]
        scale = (byte - base + torch.frexp(row_scale.double())[1] - 1).clamp(0, 254)
    return pack_codes(codes, element.bits), scale.to(torch.uint8).contiguous()


def check(packed: Tensor, row_scale: Tensor, K: int, format: str, target: str, **_: Any) -> None:
    expect_one_of("unshuffle_weight.format", format, ELEMENTS)
    expect_one_of("unshuffle_weight.target", target, TARGETS)
    if K < 4 or K % 4:
        raise ValueError(f"unshuffle_weight.K: expected a positive multiple of 4, got {K}")
    expect_dtype("unshuffle_weight.row_scale", row_scale, torch.float32)
    expect_rank("unshuffle_weight.row_scale", row_scale, 2)
    expect_shape("unshuffle_weight.row_scale", row_scale, (row_scale.shape[0], 1))
    units_n, units_k = units_of(row_scale.shape[0], K)
    expect_dtype("unshuffle_weight.packed", packed, torch.uint8)
    expect_shape("unshuffle_weight.packed", packed, (units_n * units_k * unit_lines(format), LINE))
    for name, tensor in (("packed", packed), ("row_scale", row_scale)):
        if not tensor.is_contiguous():
            raise ValueError(f"unshuffle_weight.{name}: expected a contiguous tensor, got strides {tensor.stride()}")


@triton.jit
def _unit_kernel(
    packed_ptr, row_scale_ptr, codes_ptr, scale_ptr, N, K, units_k, width, groups,
    BASE: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr,
    PLACE: tl.constexpr, MASK2: tl.constexpr,
):  # fmt: skip
    """One unit a program."""
    unit, units = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    offs = (tl.program_id(0) // units_k).to(tl.int64) * 64 + tl.arange(0, 64)
    k = tl.program_id(0) % units_k
    mask = offs < N
    codes = load_unit_codes(packed_ptr, unit, units, FORMAT, BITS, FP8, PLACE, MASK2)
    first = k * (128 * BITS // 8) + tl.arange(0, 1)
    store_packed(codes_ptr + offs * width, tl.reshape(codes, (64, 1, 128)), first, mask, width, BITS, False, False)
    byte = load_unit_scales(packed_ptr, unit, units, BITS, GROUP)
    if GROUP == 16:
        exponent, mantissa = (byte >> 3) - 16, byte & 7
        down = tl.maximum(-6 - exponent, 0)
        scale = tl.where(down > 0, (8 | mantissa) >> tl.minimum(down, 31), ((exponent + 7) << 3) | mantissa)
        scale = tl.where(byte == 0, 0, scale)
    else:
        bits = tl.load(row_scale_ptr + offs, mask=mask, other=1.0).to(tl.int32, bitcast=True)
        power = (bits >> 23) - 127
        for i in tl.static_range(23):  # subnormal powers of two
            power = tl.where(bits == (1 << i), i - 149, power)
        scale = tl.minimum(tl.maximum(byte - BASE + power[:, None], 0), 254)
    at = k * (128 // GROUP) + tl.arange(0, 128 // GROUP)[None, :]
    ptrs = scale_ptr + offs[:, None] * groups + at
    tl.store(ptrs, scale.to(tl.uint8), mask=mask[:, None] & (at < groups))


def configs(**_: Any):
    yield Config(num_warps=4)
    yield Config(num_warps=8)


def key(row_scale: Tensor, K: int, format: str, target: str, **_: Any) -> dict[str, int | str]:
    return dict(N=row_scale.shape[0], K=K, format=format, target=target)


def cost(packed: Tensor, **_: Any) -> Cost:
    return Cost(flops=0, bytes=2 * packed.numel())


def inputs(*, N, K, weight="mxfp4/bf16", power=0, device="cuda", seed=0):
    format, target = weight.split("/")
    K, (units_n, units_k) = -(-K // 4) * 4, units_of(N, K)
    g, lines = generator(seed, device), units_n * units_k * unit_lines(format)
    packed = torch.randint(0, 256, (lines, LINE), generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    if format == "nvfp4":  # normalised e4m3 scales
        first = units_n * units_k * (unit_lines(format) - 2)
        shape = (lines - first, LINE)
        packed[first:] = torch.randint(64, 199, shape, generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    powers = torch.randint(power - 3, power + 4, (N, 1), generator=g, device=device, dtype=torch.int32)
    row_scale = torch.ldexp(torch.ones((N, 1), dtype=torch.float64, device=device), powers).float()
    return dict(packed=packed, row_scale=row_scale, K=K, format=format, target=target)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        N=(1, 64, 80), K=(4, 128, 272),
        weight=("mxfp4/bf16", "nvfp4/bf16", "mxfp6_e2m3/bf16", "mxfp6_e3m2/bf16", "mxfp4/fp8"), power=(0, -130),
    ),
    kernels=dict(unit=Kernel(_unit_kernel)), configs=configs, key=key, cost=cost,
    cases={name: dict(N=n, K=k) for name, (n, k) in LINEAR_LAYERS.items()},
)  # fmt: skip
def unshuffle_weight(
    packed: Tensor, row_scale: Tensor, K: int, format: str, target: str = "bf16", *, config: Config
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Bring a shuffled weight back into rows.

    Args:
        packed: uint8 (lines, 256), contiguous, from `shuffle_weight`.
        row_scale: (N, 1) fp32 powers of two, contiguous, from `shuffle_weight`, without a global scale.
        K: columns of the weight, a multiple of 4.
        format, target: as of `shuffle_weight`.

    Returns:
        codes uint8, (N, K / 2) or (N, 3 K / 4), and scale bytes uint8 (N, cdiv(K, 32)); (N, cdiv(K, 16)) for "nvfp4",
        to be viewed as float8_e4m3fn.

    Raises:
        ValueError: a format, dtype or shape does not fit.
    """
    made, N, device = constants(format, target), row_scale.shape[0], packed.device
    (units_n, units_k), groups = units_of(N, K), triton.cdiv(K, group_of(format))
    codes = torch.empty((N, K * made["BITS"] // 8), dtype=torch.uint8, device=device)
    scale = torch.empty((N, groups), dtype=torch.uint8, device=device)
    base = STEPS - 6 - 127 if target == "fp8" else REBIAS[made["FORMAT"]]
    _unit_kernel[(units_n * units_k,)](
        packed, row_scale, codes, scale, N, K, units_k, codes.shape[1], groups, BASE=base, **made, **config
    )
    return codes, scale
