"""moe_permute: rows of tokens in the order of their experts.

    rows[i]       = x[index[i] // top_k]                                    0 where index[i] is -1
                    (weights: round(x[...] * weights[index[i] // top_k, index[i] % top_k]))
    scale_rows[i] = scale[index[i] // top_k]                                0 where index[i] is -1

A copy: codes and their scales move together, in one launch, and no bit changes. Quantizing the tokens first and then
moving codes costs less than quantizing the rows, and gives the same codes; per-tensor scales are the exception, as rows
that were dropped must not count (quantize_fp8_tensor with num_valid_tokens = offs[-1:]). index: sort_by_expert.

Source: the permutation step of vLLM's fused MoE.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.formats import FP8
from fpk.kernels._tile import after_previous, early_start
from fpk.kernels.moe._rows import sorted_slots
from fpk.op import Cost, Kernel, op
from fpk.samples import KINDS, sample, scales, strided
from fpk.shapes import routing_cases


def reference(
    x: Tensor, index: Tensor, top_k: int, scale: Tensor | None = None, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    dropped = (index < 0)[:, None]
    slot = index.long().clamp(min=0)
    values = x.view(torch.uint8) if x.dtype in FP8 else x
    rows = values[slot // top_k]
    if weights is not None:
        rows = (rows.float() * weights.reshape(-1)[slot][:, None]).to(x.dtype)
    rows = torch.where(dropped, torch.zeros((), dtype=rows.dtype, device=x.device), rows).contiguous()
    if scale is None:
        return rows.view(x.dtype), torch.empty((index.shape[0], 0), dtype=torch.float32, device=x.device)
    scale_rows = torch.where(dropped, torch.zeros((), dtype=scale.dtype, device=x.device), scale[slot // top_k])
    return rows.view(x.dtype), scale_rows.contiguous()


def check(x: Tensor, index: Tensor, top_k: int, scale: Tensor | None, weights: Tensor | None, **_: Any) -> None:
    expect_rank("moe_permute.x", x, 2)
    expect_dtype("moe_permute.x", x, *FLOAT_INPUTS, *FP8, torch.int8, torch.uint8)
    expect_not_empty("moe_permute.x", x, 1)
    if top_k < 1:
        raise ValueError(f"moe_permute.top_k: expected a positive number, got {top_k}")
    T = x.shape[0]
    expect_shape("moe_permute.index", index, (T * top_k,))
    expect_dtype("moe_permute.index", index, torch.int32)
    if scale is not None:
        expect_rank("moe_permute.scale", scale, 2)
        expect_not_empty("moe_permute.scale", scale, 1)
        expect_shape("moe_permute.scale", scale, (T, scale.shape[1]))
        expect_dtype("moe_permute.scale", scale, torch.float32, torch.uint8)
    if weights is not None:
        expect_dtype("moe_permute.x (with weights)", x, *FLOAT_INPUTS)
        expect_shape("moe_permute.weights", weights, (T, top_k))
        expect_dtype("moe_permute.weights", weights, torch.float32)


@triton.jit(do_not_specialize=["R", "stride_sm", "stride_sk"])
def _permute_kernel(
    x_ptr, index_ptr, scale_ptr, weights_ptr, rows_ptr, scale_rows_ptr,
    R, H, G, top_k,
    stride_xm, stride_xk, stride_sm, stride_sk, stride_wm, stride_wk,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Programs of the first column of tiles move the scales too."""
    after_previous(PDL)
    tiles_k = tl.cdiv(H, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_k = tl.program_id(0) % tiles_k
    offs_k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    slot = tl.load(index_ptr + offs_m, mask=offs_m < R, other=-1)
    kept = (slot >= 0) & (slot < R)
    slot = tl.where(kept, slot, 0)
    token = (slot // top_k).to(tl.int64)
    mask_k = (offs_k < H)[None, :]
    x_ptrs = x_ptr + token[:, None] * stride_xm + offs_k[None, :].to(tl.int64) * stride_xk
    x = tl.load(x_ptrs, mask=kept[:, None] & mask_k, other=0)  # [BLOCK_M, BLOCK_K]
    if weights_ptr is not None:
        w = tl.load(weights_ptr + token * stride_wm + slot % top_k * stride_wk, mask=kept, other=0.0)
        x = (x.to(tl.float32) * w[:, None]).to(x_ptr.dtype.element_ty)
    mask = (offs_m < R)[:, None] & mask_k
    tl.store(rows_ptr + offs_m[:, None] * H + offs_k[None, :], x, mask=mask)
    if scale_ptr is not None:  # noqa: SIM102  a compile-time condition around one of the run
        if tile_k == 0:
            offs_g = tl.arange(0, BLOCK_G)
            mask_g = (offs_g < G)[None, :]
            s_ptrs = scale_ptr + token[:, None] * stride_sm + offs_g[None, :].to(tl.int64) * stride_sk
            scale = tl.load(s_ptrs, mask=kept[:, None] & mask_g, other=0)
            s_out = scale_rows_ptr + offs_m[:, None] * G + offs_g[None, :]
            tl.store(s_out, scale, mask=(offs_m < R)[:, None] & mask_g)


def configs(x: Tensor, **_: Any):
    if of(x.device).arch == "cpu":  # the interpreter wants few programs
        yield Config(BLOCK_M=32, BLOCK_K=256, num_warps=4)
    yield Config(BLOCK_M=4, BLOCK_K=1024, num_warps=4)
    for rows, cols in (
        (1, 1024),
        (1, 2048),
        (1, 4096),
        (1, 8192),
        (2, 1024),
        (2, 2048),
        (8, 512),
        (8, 1024),
        (16, 256),
    ):
        for warps in (2, 4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps)


def key(
    x: Tensor, index: Tensor, top_k: int, scale: Tensor | None, weights: Tensor | None, **_: Any
) -> dict[str, int | str]:
    return dict(
        M=bucket(index.shape[0]), K=x.shape[1], top_k=top_k, x=str(x.dtype), weights=int(weights is not None),
        scale=0 if scale is None else scale.shape[1] * scale.element_size(),
    )  # fmt: skip


def cost(x: Tensor, index: Tensor, scale: Tensor | None, **_: Any) -> Cost:
    per_row = x.shape[1] * x.element_size() + (0 if scale is None else scale.shape[1] * scale.element_size())
    return Cost(flops=0, bytes=(x.shape[0] + index.shape[0]) * per_row + 4 * index.shape[0])


def inputs(
    *, T, H, E=4, top_k=2, dropped=0.0, groups=0, scale_format="fp32", weighted=False, x_dtype=torch.bfloat16,
    kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    x = strided(sample((T, H), x_dtype, kind, device, seed), layout)
    index, _ = sorted_slots(T, E, top_k, dropped, device, seed)
    scale = scales((T, groups), device, seed + 1, scale_format == "e8m0") if groups else None
    weighted = weighted and x_dtype in FLOAT_INPUTS
    weights = scales((T, top_k), device, seed + 2) if weighted else None
    return dict(x=x, index=index, top_k=top_k, scale=scale, weights=weights)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        T=(0, 1, 3, 8, 13), H=(1, 16, 33, 100, 257), E=(1, 3, 8), top_k=(1, 2, 5), dropped=(0.0, 0.5, 1.0),
        groups=(0, 1, 3), scale_format=("fp32", "e8m0"), weighted=(False, True),
        x_dtype=(*FLOAT_INPUTS, torch.float8_e4m3fn, torch.int8), kind=KINDS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(permute=Kernel(_permute_kernel)),
    configs=configs, key=key, cost=cost, cases=routing_cases(),
)  # fmt: skip
def moe_permute(
    x: Tensor, index: Tensor, top_k: int, scale: Tensor | None = None, weights: Tensor | None = None, *, config: Config
) -> tuple[Tensor, Tensor]:
    """Gather the rows of T tokens for their experts.

    Args:
        x: (T, H) values (fp32, bf16, fp16) or codes (fp8, int8, packed uint8), any strides.
        index: (T * top_k,) int32, slots in the order of their experts, -1 for rows that were dropped.
        top_k: slots of a token.
        scale: (T, G) scales of codes, fp32 or uint8 (e8m0), any strides, or None. One scale for all of x needs no
            moving.
        weights: (T, top_k) fp32 or None; multiplied in fp32, rounded once (a router weight on the input).

    Returns:
        rows (T * top_k, H) of x's dtype, and the scales' rows (T * top_k, G), (T * top_k, 0) without scale; contiguous.
        Dropped rows are zeros.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    R, (_, H) = index.shape[0], x.shape
    rows = torch.empty((R, H), dtype=x.dtype, device=x.device)
    groups, scale_dtype = (0, torch.float32) if scale is None else (scale.shape[1], scale.dtype)
    scale_rows = torch.empty((R, groups), dtype=scale_dtype, device=x.device)
    if R == 0:
        return rows, scale_rows
    codes = x.dtype in FP8
    _permute_kernel[(triton.cdiv(R, config["BLOCK_M"]) * triton.cdiv(H, config["BLOCK_K"]),)](
        x.view(torch.uint8) if codes else x, index, scale, weights, rows.view(torch.uint8) if codes else rows,
        scale_rows,
        R, H, groups, top_k,
        x.stride(0), x.stride(1), *((0, 0) if scale is None else scale.stride()),
        *((0, 0) if weights is None else weights.stride()),
        BLOCK_G=triton.next_power_of_2(max(groups, 1)), **early_start(of(x.device)), **config,
    )  # fmt: skip
    return rows, scale_rows
