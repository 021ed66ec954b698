"""INT4 quantizers: groups of a row to packed two's complement codes, with or without zero points."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_multiple, expect_not_empty, expect_rank
from fpk.db import Config, bucket
from fpk.formats import expand_groups
from fpk.kernels._asymmetric import range_along
from fpk.kernels._groups import group_amax
from fpk.kernels._microscale import store_packed
from fpk.kernels._packed import pack_codes
from fpk.kernels._tile import amax_along, quotient_within, round_half_even
from fpk.op import Cost
from fpk.samples import sample, strided


def symmetric(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    amax = group_amax(x, 1, group)
    scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(7.0)
    quotient = x.float() / expand_groups(scale, x.shape, 1, group)
    return _packed(torch.where(quotient.isnan(), 0.0, quotient.round().clamp(-7, 7))), scale


def asymmetric(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    *lead, m, k = x.shape
    groups = -(-k // group)
    filled = x.new_full((*lead, m, groups * group), float("inf"))
    filled[..., :k] = x
    value = filled.reshape(*lead, m, groups, group).float()
    finite = torch.where(value.isfinite(), value, 0.0)
    low, high = finite.amin(-1).clamp(max=0.0), finite.amax(-1).clamp(min=0.0)
    scale = torch.maximum(high * 0.5 - low * 0.5, high.new_tensor(0.5e-10)) / high.new_tensor(7.5)
    scale = torch.where(value.isinf().all(-1), float("inf"), scale)
    zero = (-8 - low / scale).round()
    quotient = x.float() / expand_groups(scale, x.shape, 1, group)
    around = expand_groups(zero, x.shape, 1, group)
    code = (quotient.round() + around).clamp(-8, 7)
    return _packed(torch.where(quotient.isnan(), around, code)), scale, zero.to(torch.int32)


def _packed(code: Tensor) -> Tensor:
    return pack_codes(code.to(torch.int8).view(torch.uint8) & 15, 4)


def expect_int4(what: str, x: Tensor, group: int) -> None:
    expect_dtype(f"{what}.x", x, *FLOAT_INPUTS)
    expect_rank(f"{what}.x", x, 2, 3)
    expect_not_empty(f"{what}.x", x, -1)
    expect_multiple(f"{what}.x", x, 2)
    if not 16 <= group <= 4096 or group & (group - 1):
        raise ValueError(f"{what}.group: expected a power of two from 16 to 4096, got {group}")


@triton.jit(do_not_specialize=["M"])
def int4_kernel(
    x_ptr, packed_ptr, scale_ptr, zero_ptr,
    M, K,
    stride_xe, stride_xm, stride_xk,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of GROUPS groups; symmetric where there is no zero_ptr."""
    groups = tl.cdiv(K, GROUP)
    tiles = tl.cdiv(groups, GROUPS)
    e = tl.program_id(1).to(tl.int64)
    offs_m = (tl.program_id(0) // tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_g = (tl.program_id(0) % tiles).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    cols = (offs_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :])[None, :, :]
    mask_m = offs_m < M
    mask = mask_m[:, None, None] & (cols < K)
    x_ptrs = x_ptr + e * stride_xe + offs_m[:, None, None] * stride_xm + cols * stride_xk
    x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    at = (e * M + offs_m)[:, None] * groups + offs_g[None, :]
    mask_g = mask_m[:, None] & (offs_g < groups)[None, :]
    if zero_ptr is None:
        scale = tl.math.div_rn(tl.maximum(amax_along(x, mask, 2), 1e-10), 7.0)
        quotient = quotient_within(x, scale[:, :, None], -7.0, 7.0)
        code = round_half_even(tl.where(quotient != quotient, 0.0, quotient))
    else:
        high, low = range_along(x, mask, 2)
        scale = tl.math.div_rn(tl.maximum(high * 0.5 - low * 0.5, 0.5e-10), 7.5)
        zero = round_half_even(-8.0 - tl.math.div_rn(low, scale))
        quotient = quotient_within(x, scale[:, :, None], -32.0, 32.0)
        around = tl.broadcast_to(zero[:, :, None], x.shape)
        code = tl.where(quotient != quotient, around, round_half_even(quotient) + around)
        code = tl.minimum(tl.maximum(code, -8.0), 7.0)
        tl.store(zero_ptr + at, zero.to(tl.int32), mask=mask_g)
    tl.store(scale_ptr + at, scale, mask=mask_g)
    width = K // 2
    codes = code.to(tl.int32) & 15
    store_packed(packed_ptr + (e * M + offs_m) * width, codes, offs_g * (GROUP // 2), mask_m, width, 4, False, False)


def configs(x: Tensor, group: int, **_: Any):
    rows = 8 if x.shape[-2] > 4 else 1
    yield Config(BLOCK_M=rows, GROUPS=max(1, 2048 // rows // group), num_warps=4)
    for rows, cols in ((1, 1024), (1, 2048), (2, 1024), (4, 512), (4, 1024), (8, 512), (16, 128)):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, GROUPS=max(1, cols // group), num_warps=warps)


def legal(config: Config, group: int, **_: Any) -> bool:
    # at most 128 elements a thread, or registers spill
    return config["BLOCK_M"] * config["GROUPS"] * group <= 8192 * config["num_warps"]


def key(x: Tensor, group: int, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(x.shape[:-1].numel()), K=x.shape[-1], group=group, x=str(x.dtype))


def cost(x: Tensor, group: int, **_: Any) -> Cost:
    groups = x.shape[:-1].numel() * triton.cdiv(x.shape[-1], group)
    return Cost(flops=3 * x.numel(), bytes=x.numel() * x.element_size() + x.numel() // 2 + 4 * groups)


def inputs(
    *, M, K, E=0, group=128, x_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0
):  # fmt: skip
    x = strided(sample((E, M, K) if E else (M, K), x_dtype, kind, device, seed), layout)
    return dict(x=x, group=group)


def launch(x: Tensor, group: int, with_zero: bool, config: Config) -> tuple[Tensor, Tensor, Tensor | None]:
    *lead, M, K = x.shape
    groups = triton.cdiv(K, group)
    packed = torch.empty((*lead, M, K // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*lead, M, groups), dtype=torch.float32, device=x.device)
    zero = torch.empty(scale.shape, dtype=torch.int32, device=x.device) if with_zero else None
    if x.numel() == 0:
        return packed, scale, zero
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(groups, config["GROUPS"])
    int4_kernel[(tiles, E)](
        x, packed, scale, zero, M, K, stride_xe, x.stride(-2), x.stride(-1),
        GROUP=group, enable_fp_fusion=False, **config,
    )  # fmt: skip
    return packed, scale, zero
