"""map_experts: from the experts that a router chose to those that hold weights.

    id < 0, or id >= num_experts + num_zero_experts: no expert; weight 0, id -1
    id >= num_experts: an expert that passes its token on as it is (a zero-expert)
        passed[t] += weight; weight 0, id -1
    otherwise, where an expert has several copies
        id = table[id, h mod copies[id]]      h = (t * 2654435769) mod 2^32, so that tokens spread over the copies

-1 in the table, or a copy beyond its end, is no expert. What is passed on is added by moe_unpermute (residual).

Source: expert load balancing of DeepSeek-V3 (EPLB), the zero-computation experts of LongCat.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_inner_contiguous, expect_near, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.kernels._tile import after_previous, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, scales
from fpk.shapes import MOE_LAYERS, MOE_TOKENS

HASH = 2654435769


def reference(
    weights: Tensor, ids: Tensor, num_experts: int, num_zero_experts: int = 0, table: Tensor | None = None,
    copies: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    expert = ids.long()
    held = (expert >= 0) & (expert < num_experts)
    zero = (expert >= num_experts) & (expert < num_experts + num_zero_experts)
    passed = torch.zeros((ids.shape[0], 1), dtype=torch.float32, device=ids.device)
    for j in range(ids.shape[1]):
        passed = passed + torch.where(zero[:, j, None], weights[:, j, None], 0.0)
    out = torch.where(held, expert, -1)
    if table is not None and copies is not None:
        token = torch.arange(ids.shape[0], device=ids.device)[:, None]
        among = copies.long()[out.clamp(min=0)]
        copy = (token * HASH % 2**32) % among.clamp(min=1)
        there = held & (copy < among) & (copy < table.shape[1])
        found = table.long()[out.clamp(min=0), copy.clamp(max=table.shape[1] - 1)]
        out = torch.where(there, found.clamp(min=-1), -1)
    return torch.where(out >= 0, weights, 0.0).contiguous(), out.to(torch.int32).contiguous(), passed


def check(
    weights: Tensor, ids: Tensor, num_experts: int, num_zero_experts: int, table: Tensor | None,
    copies: Tensor | None, **_: Any,
) -> None:  # fmt: skip
    expect_rank("map_experts.ids", ids, 2)
    expect_dtype("map_experts.ids", ids, torch.int32, torch.int64)
    expect_shape("map_experts.weights", weights, tuple(ids.shape))
    expect_dtype("map_experts.weights", weights, torch.float32)
    expect_near("map_experts.ids", ids)
    expect_near("map_experts.weights", weights)
    for name, value, least in (("num_experts", num_experts, 1), ("num_zero_experts", num_zero_experts, 0)):
        if value < least:
            raise ValueError(f"map_experts.{name}: expected at least {least}, got {value}")
    if (table is None) != (copies is None):
        raise ValueError("map_experts.copies: expected together with table, got one of them")
    if table is not None and copies is not None:
        expect_rank("map_experts.table", table, 2)
        expect_shape("map_experts.table", table, (num_experts, max(table.shape[1], 1)))
        expect_shape("map_experts.copies", copies, (num_experts,))
        for name, tensor in (("table", table), ("copies", copies)):
            expect_dtype(f"map_experts.{name}", tensor, torch.int32, torch.int64)
        expect_inner_contiguous("map_experts.table", table)


@triton.jit(do_not_specialize=["M"])
def _map_kernel(
    weights_ptr, ids_ptr, table_ptr, copies_ptr, out_weights_ptr, out_ids_ptr, passed_ptr,
    M, num_experts, num_known, width, stride_wm, stride_wk, stride_im, stride_ik, stride_t,
    PDL: tl.constexpr, TOP_K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    token = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    pick = tl.arange(0, BLOCK_P)[None, :]
    mask = (token < M)[:, None] & (pick < TOP_K)
    expert = tl.load(ids_ptr + token[:, None] * stride_im + pick * stride_ik, mask=mask, other=-1).to(tl.int64)
    weight = tl.load(weights_ptr + token[:, None] * stride_wm + pick * stride_wk, mask=mask, other=0.0)
    held = (expert >= 0) & (expert < num_experts)
    zero = (expert >= num_experts) & (expert < num_known)
    passed = tl.zeros((BLOCK_M,), dtype=tl.float32)
    for j in range(TOP_K):  # in the order of the slots
        passed += tl.sum(tl.where(zero & (pick == j), weight, 0.0), axis=1)
    out = tl.where(held, expert, -1)
    if table_ptr is not None:
        safe = tl.where(held, expert, 0)
        among = tl.load(copies_ptr + safe, mask=mask, other=0).to(tl.int64)
        spread = (token * 2654435769) & 0xFFFFFFFF
        copy = spread[:, None] % tl.maximum(among, 1)
        there = held & (copy < among) & (copy < width)
        found = tl.load(table_ptr + safe * stride_t + copy, mask=mask & there, other=-1).to(tl.int64)
        out = tl.where(there, tl.maximum(found, -1), -1)
    offs = token[:, None] * TOP_K + pick
    tl.store(out_weights_ptr + offs, tl.where(out >= 0, weight, 0.0), mask=mask)
    tl.store(out_ids_ptr + offs, out.to(tl.int32), mask=mask)
    tl.store(passed_ptr + token, passed, mask=token < M)


def configs(ids: Tensor, **_: Any):
    yield Config(BLOCK_M=64 if ids.shape[0] > 1024 else 16, num_warps=4)
    for rows in (8, 32, 128):
        yield Config(BLOCK_M=rows, num_warps=4)


def key(ids: Tensor, table: Tensor | None, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(ids.shape[0]), top_k=ids.shape[1], ids=str(ids.dtype), table=int(table is not None))


def cost(ids: Tensor, table: Tensor | None, **_: Any) -> Cost:
    per_slot = ids.element_size() + 12 + (0 if table is None else table.element_size() + 4)
    return Cost(flops=0, bytes=per_slot * ids.numel() + 4 * ids.shape[0])


def inputs(
    *, M, E, top_k=2, zero_experts=0, copies=0, dtype=torch.int32, kind="normal", layout="contiguous", device="cuda",
    seed=0,
):  # fmt: skip
    """copies: the most that an expert can have, 0 for no table."""
    g = generator(seed, device)
    low, high = (-2, E + zero_experts + 3) if kind == "invalid" else (0, E + zero_experts)
    ids = torch.randint(low, high, (M, top_k), generator=g, device=device, dtype=dtype)
    table = many = None
    if copies:
        table = torch.randint(0, 2 * E, (E, copies), generator=g, device=device, dtype=torch.int32)
        many = torch.randint(1, copies + 1, (E,), generator=g, device=device, dtype=torch.int32)
        table = torch.where(torch.arange(copies, device=device) < many[:, None], table, -1)
        if kind == "invalid":
            many = many - 1  # an expert without a copy, too
    weights = scales((M, top_k), device, seed + 1)
    if layout == "transposed":
        ids, weights = ids.T.contiguous().T, weights.T.contiguous().T
    return dict(
        weights=weights, ids=ids, num_experts=E, num_zero_experts=zero_experts, table=table, copies=many
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 17, 90), E=(1, 9, 257), top_k=(1, 2, 6), zero_experts=(0, 3), copies=(0, 1, 4),
        dtype=(torch.int32, torch.int64), kind=("normal", "invalid"), layout=("contiguous", "transposed"),
    ),
    kernels=dict(map=Kernel(_map_kernel)),
    configs=configs, key=key, cost=cost,
    cases={
        f"{n}/T={t}": dict(M=t, E=experts, top_k=top_k, copies=2)
        for n, (experts, top_k, *_) in MOE_LAYERS.items() for t in MOE_TOKENS
    },
)  # fmt: skip
def map_experts(
    weights: Tensor, ids: Tensor, num_experts: int, num_zero_experts: int = 0, table: Tensor | None = None,
    copies: Tensor | None = None, *, config: Config,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Replace experts by their copies, and take those out that pass tokens on.

    Args:
        weights: (M, top_k) fp32, any strides.
        ids: (M, top_k) int32 or int64, any strides, any values.
        num_experts: experts with weights; ids from there on are zero-experts.
        num_zero_experts: how many of those there are.
        table: (num_experts, most copies) int32 or int64 or None: the physical experts of each logical one, -1 behind
            the last.
        copies: (num_experts,) int32 or int64, how many copies an expert has; with table.

    Returns:
        weights (M, top_k) fp32, ids (M, top_k) int32, and passed (M, 1) fp32, what zero-experts add of a token itself.

    Raises:
        ValueError: a shape, dtype or number does not fit.
    """
    M, top_k = ids.shape
    out_weights = torch.empty((M, top_k), dtype=torch.float32, device=ids.device)
    out_ids = torch.empty((M, top_k), dtype=torch.int32, device=ids.device)
    passed = torch.zeros((M, 1), dtype=torch.float32, device=ids.device)
    if out_ids.numel() == 0:
        return out_weights, out_ids, passed
    width, stride_t = (0, 0) if table is None else (table.shape[1], table.stride(0))
    _map_kernel[(triton.cdiv(M, config["BLOCK_M"]),)](
        weights, ids, table, copies, out_weights, out_ids, passed,
        M, num_experts, num_experts + num_zero_experts, width, weights.stride(0), weights.stride(1),
        ids.stride(0), ids.stride(1), stride_t,
        TOP_K=top_k, BLOCK_P=triton.next_power_of_2(top_k), **early_start(of(ids.device)), **config,
    )  # fmt: skip
    return out_weights, out_ids, passed
