"""A grouped product for very few rows: each program multiplies one row by some of its expert's weights.

Without a matrix unit, which would mostly multiply padding. Weights are read once per row.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.db import Config
from fpk.device import of
from fpk.kernels._tile import after_previous, decode_e8m0, early_start
from fpk.kernels.moe._few import local_expert
from fpk.op import Kernel


@triton.jit
def _scale(ptrs, mask, E8M0: tl.constexpr):
    scale = tl.load(ptrs, mask=mask, other=0)
    if E8M0:
        scale = decode_e8m0(scale)
    return scale


@triton.jit
def _factor(ptr, k, mask, stride, COLS: tl.constexpr, E8M0: tl.constexpr):
    """Scales of columns k, whose groups are COLS wide; off the mask any."""
    return _scale(ptr + k // COLS * stride, mask, E8M0)


@triton.jit(do_not_specialize=["R", "E", "top_k", "num_mapped", "stride_im", "stride_ik", "stride_sam", "stride_sak"])
def vector_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, bias_ptr, offs_ptr, gather_ptr, ids_ptr, map_ptr, out_ptr,
    R, E, N, K, top_k, num_mapped, stride_im, stride_ik,
    stride_am, stride_be, stride_bn, stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    PDL: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E8M0_A: tl.constexpr,
    E8M0_B: tl.constexpr, INT8: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """GROUP, COLS: columns that share a scale, -1 for all; with COLS > 0 a program's weight rows share it too.

    Rows lie in the order of their experts (offs), or in that of slots, whose experts ids and a map tell.
    """
    after_previous(PDL)
    row = tl.program_id(1)
    if offs_ptr is None:
        place = (row // top_k).to(tl.int64) * stride_im + row % top_k * stride_ik
        local = local_expert(ids_ptr, map_ptr, place, row >= 0, num_mapped, E)
        expert = tl.where(local < 0, E, local).to(tl.int32)
    else:
        experts = tl.arange(0, BLOCK_E)
        ends = tl.load(offs_ptr + experts, mask=experts < E, other=2147483647)
        expert = tl.sum((ends <= row).to(tl.int32), axis=0)
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    out_ptrs = out_ptr + row.to(tl.int64) * stride_om + offs_n
    if expert < E:
        e = expert.to(tl.int64)
        source = row.to(tl.int64)
        if gather_ptr is not None:
            source = (tl.maximum(tl.load(gather_ptr + row), 0) // top_k).to(tl.int64)
        a_row = a_ptr + source * stride_am
        b_rows = b_ptr + e * stride_be + tl.where(mask_n, offs_n, 0)[:, None] * stride_bn
        acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.int32 if INT8 else tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=DEPTH):
            offs_k = k + tl.arange(0, BLOCK_K)
            if EVEN_K:
                a = tl.load(a_row + offs_k)
                b = tl.load(b_rows + offs_k[None, :])
            else:
                a = tl.load(a_row + offs_k, mask=offs_k < K, other=0.0)
                b = tl.load(b_rows + offs_k[None, :], mask=(offs_k < K)[None, :], other=0.0)
            x = a.to(acc.dtype)
            if (
                GROUP > 0 and GROUP == COLS and BLOCK_K % GROUP == 0 and (GROUP & (GROUP - 1)) == 0
            ):  # one of each a group
                groups = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
                inside = groups < tl.cdiv(K, GROUP)
                sb_row = sb_ptr + e * stride_sbe + (tl.program_id(0) * BLOCK_N // ROWS if ROWS > 0 else 0) * stride_sbn
                factor = _scale(sa_ptr + source * stride_sam + groups * stride_sak, inside, E8M0_A)
                factor *= _scale(sb_row + groups * stride_sbk, inside, E8M0_B)
                x = tl.reshape(tl.reshape(x, (BLOCK_K // GROUP, GROUP)) * factor[:, None], (BLOCK_K,))
            elif GROUP > 0:
                x *= _factor(sa_ptr + source * stride_sam, offs_k, offs_k < K, stride_sak, GROUP, E8M0_A)
            if COLS > 0 and not (GROUP == COLS and BLOCK_K % GROUP == 0 and (GROUP & (GROUP - 1)) == 0):
                sb_row = sb_ptr + e * stride_sbe + (tl.program_id(0) * BLOCK_N // ROWS if ROWS > 0 else 0) * stride_sbn
                x *= _factor(sb_row, offs_k, offs_k < K, stride_sbk, COLS, E8M0_B)
            acc += b.to(acc.dtype) * x[None, :]
        out = tl.sum(acc, axis=1).to(tl.float32)
        if GROUP == -1:
            out *= tl.load(sa_ptr + source * stride_sam)
        if COLS == -1:
            scale_row = offs_n // ROWS if ROWS > 0 else offs_n * 0
            scale = tl.load(sb_ptr + e * stride_sbe + scale_row * stride_sbn, mask=mask_n, other=0)
            if E8M0_B:
                scale = decode_e8m0(scale)
            out *= scale
        if bias_ptr is not None:
            out += tl.load(bias_ptr + e * stride_bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)
        tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_n)
    else:
        tl.store(out_ptrs, tl.zeros((BLOCK_N,), dtype=out_ptr.dtype.element_ty), mask=mask_n)


VECTOR_KERNEL = Kernel(vector_kernel)


def vector_configs(rows: int) -> Iterator[Config]:
    """Candidates for products of about `rows` rows in all."""
    if rows <= 64:
        for n, k, warps, depth in itertools.product((4, 8, 16), (256, 512, 1024), (1, 2, 4), (1, 3, 4)):
            if 16 <= n * k // (32 * warps) <= 64:
                yield Config(kernel="vector", BLOCK_N=n, BLOCK_K=k, DEPTH=depth, num_warps=warps)


def launch_vector(
    config: Config, a: Tensor, b: Tensor, offs: Tensor | None, scale_a: Tensor | None, scale_b: Tensor | None,
    bias: Tensor | None, gather: Tensor | None, top_k: int, out: Tensor, granularity: tuple[int, int, int],
    strides: list[int], bins: int, ids: Tensor | None = None, expert_map: Tensor | None = None,
) -> None:  # fmt: skip
    """offs, or ids with top_k slots a token. granularity: group of `a`, rows and columns of `b` that share a scale (-1:
    all, 0: no scale); strides: of scale_a (rows, columns) and scale_b."""
    K, (E, N) = a.shape[1], b.shape[:2]
    options: dict[str, Any] = {n: v for n, v in config.items() if n != "kernel"}
    group, rows, cols = granularity
    vector_kernel[(triton.cdiv(N, config["BLOCK_N"]), out.shape[0])](
        a, b, scale_a, scale_b, bias, offs, gather, ids, expert_map, out,
        out.shape[0], E, N, K, top_k, 0 if expert_map is None else expert_map.shape[0],
        *((0, 0) if ids is None else ids.stride()), a.stride(0), b.stride(0), b.stride(1), out.stride(0), *strides,
        0 if bias is None else bias.stride(0),
        GROUP=group, ROWS=rows, COLS=cols, E8M0_A=scale_a is not None and scale_a.dtype is torch.uint8,
        E8M0_B=scale_b is not None and scale_b.dtype is torch.uint8, INT8=b.dtype is torch.int8 and a.dtype is b.dtype,
        EVEN_K=K % config["BLOCK_K"] == 0, BLOCK_E=bins, enable_fp_fusion=False,
        **early_start(of(a.device)), **options,
    )  # fmt: skip
