"""Experts of few tokens, without a matrix unit, which would mostly multiply padding: what moe_up and moe_down share.

A lane reads 16 neighbouring weights at a time and sums their products before they meet a scale; columns of activations
lie in the same lanes, so that nothing moves between threads but the last sums.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    GRID_Y,
    expect_dtype,
    expect_fp8_matmul,
    expect_inner_contiguous,
    expect_near,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
    expect_slots,
)
from fpk.formats import FP8, Granularity, expand_groups
from fpk.samples import generator, sample, scales, strided

LANE = tl.constexpr(16)
"""Columns that a lane reads at a time: scales change only between them."""


@triton.jit
def local_expert(ids_ptr, map_ptr, offs, mask, num_mapped, E):
    """Local experts at these places of ids; -1 for slots that are dropped."""
    expert = tl.load(ids_ptr + offs, mask=mask, other=-1).to(tl.int64)
    if map_ptr is not None:
        known = (expert >= 0) & (expert < num_mapped)
        expert = tl.load(map_ptr + tl.where(known, expert, 0), mask=known, other=-1).to(tl.int64)
    return tl.where((expert >= 0) & (expert < E), expert, -1)


@triton.jit
def load_lanes(ptrs, k, cols, K, EVEN: tl.constexpr):
    """[..., LANES, 16] from column k on, zeros from column K on; fp32."""
    if EVEN:
        value = tl.load(ptrs + k)
    else:
        value = tl.load(ptrs + k, mask=cols < K - k, other=0.0)
    return value.to(tl.float32)


@triton.jit
def scaled_row(value, scale_ptr, bias_ptr, rows, mask, stride, ROWS: tl.constexpr):
    """Sums times the scales of their channels, plus their biases."""
    if scale_ptr is not None:
        channel = rows // ROWS if ROWS > 0 else rows * 0
        value *= tl.load(scale_ptr + channel.to(tl.int64) * stride, mask=mask, other=0.0)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    return value


def experts_of(ids: Tensor, expert_map: Tensor | None, E: int) -> tuple[Tensor, Tensor]:
    """(local experts, 0 for dropped slots; which are not dropped), both of ids' shape."""
    local = ids.long()
    if expert_map is not None:
        known = (local >= 0) & (local < expert_map.shape[0])
        local = torch.where(known, expert_map.long()[local.clamp(0, expert_map.shape[0] - 1)], -1)
    here = (local >= 0) & (local < E)
    return torch.where(here, local, 0), here


def products(
    a: Tensor, scale_a: Tensor | None, w: Tensor, scale: Tensor | None, bias: Tensor | None, e: Tensor, group: int,
    block_rows: int,
) -> Tensor:  # fmt: skip
    """Each row of `a` times the weights of its expert e, in plain torch; fp32."""
    rows = a.float() if scale_a is None else a.float() * expand_groups(scale_a, tuple(a.shape), 1, group)
    value = w.float() if scale is None else w.float() * expand_groups(scale, tuple(w.shape), block_rows, group)
    out = (value[e] @ rows[:, :, None])[:, :, 0]
    return out if bias is None else out + bias[e].float()


def expect_few(
    what: str, a: Tensor, ids: Tensor, w: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, group: int,
    block_rows: int, bias: Tensor | None, expert_map: Tensor | None, out_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Raise unless the arguments that both ops have fit, but for the number of rows of `a`."""
    expect_rank(f"{what}.a", a, 2)
    expect_rank(f"{what}.ids", ids, 2)
    expect_rank(f"{what}.b", w, 3)
    expect_one_of(f"{what}.out_dtype", out_dtype, (torch.bfloat16, torch.float16))
    E, N, K = w.shape
    expect_shape(f"{what}.b", w, (E, N, a.shape[1]))
    for dim in range(3):
        expect_not_empty(f"{what}.b", w, dim)
    expect_not_empty(f"{what}.ids", ids, 1)
    expect_dtype(f"{what}.ids", ids, torch.int32, torch.int64)
    expect_slots(f"{what}.ids", ids, ids.shape[0] * ids.shape[1], GRID_Y)
    expect_near(f"{what}.ids", ids)
    for name, tensor in (("a", a), ("b", w)):
        expect_inner_contiguous(f"{what}.{name}", tensor)
    if group not in (-1, 128):
        raise ValueError(f"{what}.group: expected -1 or 128, got {group}")
    expect_one_of(f"{what}.block_rows", block_rows, (-1, 1) if group < 0 else (128,))
    if scale_a is None:
        expect_dtype(f"{what}.a", a, torch.bfloat16, torch.float16)
        if group > 0:
            raise ValueError(f"{what}.group: expected -1 for activations without scales, got {group}")
    else:
        expect_dtype(f"{what}.a", a, *FP8)
        expect_dtype(f"{what}.scale_a", scale_a, torch.float32)
        expect_shape(f"{what}.scale_a", scale_a, (a.shape[0], triton.cdiv(K, group) if group > 0 else 1))
        expect_fp8_matmul(what, a)
    if scale_b is None:
        if scale_a is not None:
            raise ValueError(f"{what}.scale_b: expected a tensor beside scale_a, got None")
        expect_dtype(f"{what}.b", w, a.dtype)
    else:
        expect_dtype(f"{what}.b", w, *(FP8 if scale_a is None else (a.dtype,)))
        expect_dtype(f"{what}.scale_b", scale_b, torch.float32)
        expect_shape(f"{what}.scale_b", scale_b, Granularity("", block_rows, group).scale_shape((E, N, K)))
        expect_fp8_matmul(what, w)
    if bias is not None:
        expect_shape(f"{what}.bias", bias, (E, N))
        expect_dtype(f"{what}.bias", bias, *FLOAT_INPUTS)
        expect_inner_contiguous(f"{what}.bias", bias)
    if expert_map is not None:
        expect_rank(f"{what}.expert_map", expert_map, 1)
        expect_not_empty(f"{what}.expert_map", expert_map, 0)
        expect_dtype(f"{what}.expert_map", expert_map, torch.int32, torch.int64)


def few_inputs(
    rows: int, T: int, N: int, K: int, E: int, top_k: int, scheme: str, bias: bool, mapped: bool, dtype: torch.dtype,
    out_dtype: torch.dtype, kind: str, layout: str, device: Any, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Arguments that both ops have. scheme: plain, weights (their channels quantized alone), tensor, channel, block."""
    g = generator(seed, device)
    quantized = scheme not in ("plain", "weights")
    group, block = (128, 128) if scheme == "block" else (-1, -1 if scheme == "tensor" else 1)
    b = sample((E, N, K), out_dtype if scheme == "plain" else dtype, "normal", device, seed + 1)
    a = strided(sample((rows, K), dtype if quantized else out_dtype, kind, device, seed), layout)
    ids = torch.randint(-1 if mapped else 0, E + (2 if mapped else 0), (T, top_k), generator=g, device=device)
    shrunk = K**-0.5 / 32  # results of about 1
    return dict(
        a=a, ids=ids.to(torch.int32), b=(b.float() * K**-0.5).to(out_dtype) if scheme == "plain" else b,
        scale_a=scales((rows, triton.cdiv(K, group) if group > 0 else 1), device, seed + 7) if quantized else None,
        scale_b=None if scheme == "plain"
        else scales(Granularity("", block, group).scale_shape((E, N, K)), device, seed + 3) * shrunk,
        group=group, block_rows=block,
        bias=sample((E, N), torch.float32, "normal", device, seed + 5) if bias else None,
        expert_map=torch.tensor([(e + 1) % E for e in range(E - 1)] + [-1], device=device) if mapped else None,
        out_dtype=out_dtype,
    )  # fmt: skip


def strides_of_ones(tensor: Tensor | None, *dims: int) -> tuple[int, ...]:
    """Strides; 0 along dimensions of one element, which serves all, and where there is no tensor."""
    return tuple(0 if tensor is None or tensor.shape[d] == 1 else tensor.stride(d) for d in dims)
