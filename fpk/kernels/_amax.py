"""First pass of every per-tensor quantizer: maxima of parts of a tensor, as keys that the second pass reduces."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.db import Config
from fpk.kernels._tile import amax_key, amax_of_key


@triton.jit(do_not_specialize=["M", "parts"])
def partial_amax_kernel(
    x_ptr, valid_ptr, key_ptr,
    M, K, parts,
    stride_xe, stride_xm, stride_xk,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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


@triton.jit
def total_amax(key_ptr, e, parts, BLOCK_P: tl.constexpr):
    """The amax of matrix `e` from the keys of its parts."""
    offs = tl.arange(0, BLOCK_P)
    keys = tl.load(key_ptr + e * parts + offs, mask=offs < parts, other=0)
    return amax_of_key(tl.max(keys, axis=0))


def partial_amax(x: Tensor, valid: Tensor | None, config: Config) -> Tensor:
    """Launch the first pass on at most config["PROGRAMS"] programs a matrix; returns their keys, (E, parts) uint32."""
    E, stride_xe = (x.shape[0], x.stride(0)) if x.dim() == 3 else (1, 0)
    *_, M, K = x.shape
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"])
    parts = max(1, min(config["PROGRAMS"], tiles))
    keys = torch.empty((E, parts), dtype=torch.uint32, device=x.device)
    partial_amax_kernel[(parts, E)](
        x, valid, keys, M, K, parts, stride_xe, x.stride(-2), x.stride(-1),
        BLOCK_M=config["BLOCK_M"], BLOCK_K=config["BLOCK_K"],
        num_warps=config["num_warps"], num_stages=config["num_stages"],
    )  # fmt: skip
    return keys
