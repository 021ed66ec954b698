"""First pass of every per-tensor quantizer: maxima of parts of a tensor, as keys that the second pass reduces."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.db import Config
from fpk.device import of
from fpk.kernels._pairs import amax_key_of_pairs, as_words, has_flat_pairs, larger_magnitude
from fpk.kernels._tile import after_previous, amax_key, amax_of_key, early_start


@triton.jit(do_not_specialize=["M", "parts"])
def partial_amax_kernel(
    x_ptr, valid_ptr, key_ptr,
    M, K, parts,
    stride_xe, stride_xm, stride_xk, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    rows = M
    if valid_ptr is not None:
        rows = tl.minimum(M, tl.load(valid_ptr))
    tiles_k = tl.cdiv(K, BLOCK_K)
    keys = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.uint32)
    for tile in range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * tiles_k, parts):
        offs_m = (tile // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_k = (tile % tiles_k).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = (offs_m < rows)[:, None] & (offs_k < K)[None, :]
        x_ptrs = x_ptr + e * stride_xe + offs_m[:, None] * stride_xm + offs_k[None, :] * stride_xk
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_K]
        keys = tl.maximum(keys, tl.where(mask, amax_key(x), 0))
    key = tl.max(tl.max(keys, axis=1), axis=0)
    # with no row that counts the maximum is 0, not the "all Inf" that the key of nothing stands for
    key = tl.where(rows > 0, key, tl.full((), 0x80800000, tl.uint32))
    tl.store(key_ptr + e * parts + tl.program_id(0), key)


@triton.jit(do_not_specialize=["M", "parts"])
def flat_amax_kernel(
    words_ptr, valid_ptr, key_ptr,
    M, K, parts,
    stride_we, PDL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bf16 rows without gaps, two values to a register. Key `parts * E + i` of part i says if it has an Inf or NaN."""
    after_previous(PDL)
    e = tl.program_id(1).to(tl.int64)
    rows = M
    if valid_ptr is not None:
        rows = tl.maximum(tl.minimum(M, tl.load(valid_ptr)), 0)
    total = rows.to(tl.int64) * (K // 2)
    words_ptr += e * stride_we
    start = tl.full((), 0, tl.int64)
    largest = tl.zeros((BLOCK,), dtype=tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK), parts):
        offs = (tile + start) * BLOCK + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, larger_magnitude(tl.load(words_ptr + offs, mask=offs < total, other=0)))
    top = tl.max(largest, axis=0)
    odd = top >= 0x7F800000
    # the key of nothing is 0, which would also stand for "all Inf"
    key = tl.where(tl.program_id(0).to(tl.int64) * BLOCK < total, (top - 0x7F800000).to(tl.uint32, bitcast=True), 0)
    if odd:  # rare, and so in pieces that cost no registers
        PIECE: tl.constexpr = BLOCK // 16
        keys = tl.zeros((PIECE,), dtype=tl.uint32)
        for tile in range(tl.program_id(0), tl.cdiv(total, BLOCK), parts):
            for piece in range(0, BLOCK, PIECE):
                at = (tile + start) * BLOCK + piece + tl.arange(0, PIECE)
                some = tl.load(words_ptr + at, mask=at < total, other=0)
                keys = tl.maximum(keys, tl.where(at < total, amax_key_of_pairs(some), 0))
        key = tl.max(keys, axis=0)
    key = tl.where(total > 0, key, tl.full((), 0x80800000, tl.uint32))  # with no row that counts the maximum is 0
    tl.store(key_ptr + e * parts + tl.program_id(0), key)
    tl.store(key_ptr + (tl.num_programs(1) + e) * parts + tl.program_id(0), odd.to(tl.uint32))


@triton.jit
def any_odd_part(key_ptr, e, matrices, parts, BLOCK_P: tl.constexpr):
    """Did flat_amax_kernel see an Inf or a NaN in matrix `e`?"""
    offs = tl.arange(0, BLOCK_P)
    odd = tl.load(key_ptr + (matrices + e) * parts + offs, mask=offs < parts, other=0)
    return tl.max(odd, axis=0) > 0


@triton.jit
def total_amax(key_ptr, e, parts, BLOCK_P: tl.constexpr):
    """The amax of matrix `e` from the keys of its parts."""
    offs = tl.arange(0, BLOCK_P)
    keys = tl.load(key_ptr + e * parts + offs, mask=offs < parts, other=0)
    return amax_of_key(tl.max(keys, axis=0))


def partial_amax(x: Tensor, valid: Tensor | None, config: Config) -> Tensor:
    """Launch the first pass on at most config["PROGRAMS"] programs a matrix; returns their keys, (E, parts) uint32.

    Of bf16 rows without gaps the keys are (2E, parts): those of the second half say where Inf or NaN is.
    """
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    *_, M, K = x.shape
    block_m, block_k = config["BLOCK_M"], config["BLOCK_K"]
    flat = has_flat_pairs(x)
    tiles = triton.cdiv(M * K // 2, block_m * block_k) if flat else triton.cdiv(M, block_m) * triton.cdiv(K, block_k)
    parts = max(1, min(config["PROGRAMS"], tiles))
    keys = torch.empty((2 * E if flat else E, parts), dtype=torch.uint32, device=x.device)
    options: dict[str, Any] = dict(num_warps=config["num_warps"], num_stages=config["num_stages"])
    options |= early_start(of(x.device))
    if flat:
        flat_amax_kernel[(parts, E)](
            as_words(x), valid, keys, M, K, parts, stride_xe // 2, BLOCK=block_m * block_k, **options
        )  # fmt: skip
    else:
        partial_amax_kernel[(parts, E)](
            x, valid, keys, M, K, parts, stride_xe, x.stride(-2), x.stride(-1),
            BLOCK_M=block_m, BLOCK_K=block_k, **options,
        )  # fmt: skip
    return keys
