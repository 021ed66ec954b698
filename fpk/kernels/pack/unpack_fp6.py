"""unpack_fp6: the four 6-bit codes of every three bytes.

    codes[m, 4j + i] = word[m, j] >> 6i & 63,   word = three bytes, little-endian          order "low_first"

The inverse of pack_fp6, which says where the orders occur.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_multiple, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.formats import CODE_ORDERS
from fpk.kernels._microscale import load_packed
from fpk.kernels._packed import unpack_codes
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, strided
from fpk.shapes import activation_cases


def reference(packed: Tensor, order: str = "low_first") -> Tensor:
    return unpack_codes(packed, 6, order)


def check(packed: Tensor, order: str, **_: Any) -> None:
    expect_dtype("unpack_fp6.packed", packed, torch.uint8)
    expect_rank("unpack_fp6.packed", packed, 2, 3)
    expect_multiple("unpack_fp6.packed", packed, 3)
    expect_one_of("unpack_fp6.order", order, CODE_ORDERS)


@triton.jit(do_not_specialize=["M"])
def _unpack_kernel(
    packed_ptr, codes_ptr,
    M, K, width,
    stride_pe, stride_pm, stride_pk,
    HIGH_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(K, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    first = tile_k * (BLOCK_K * 6 // 8) + tl.arange(0, 1)
    mask_m = offs_m < M
    rows = packed_ptr + e * stride_pe + offs_m * stride_pm
    codes = load_packed(rows, first, mask_m, width, stride_pk, BLOCK_K, 6, HIGH_FIRST)
    cols = (tile_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, None, :]
    ptrs = codes_ptr + (e * M + offs_m)[:, None, None] * K + cols
    tl.store(ptrs, codes.to(tl.uint8), mask=mask_m[:, None, None] & (cols < K))


def configs(**_: Any):
    yield Config(BLOCK_M=4, BLOCK_K=1024, num_warps=4)
    for rows, cols in ((1, 2048), (1, 4096), (2, 2048), (8, 512), (8, 1024)):
        for warps in (4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps)


def key(packed: Tensor, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(packed.shape[:-1].numel()), K=packed.shape[-1] // 3 * 4)


def cost(packed: Tensor, **_: Any) -> Cost:
    return Cost(flops=0, bytes=packed.numel() // 3 * 7)


def inputs(*, M, K, E=0, order="low_first", layout="contiguous", device="cuda", seed=0):
    shape = (E, M, K // 4 * 3) if E else (M, K // 4 * 3)
    packed = torch.randint(0, 256, shape, generator=generator(seed, device), device=device, dtype=torch.int16)
    return dict(packed=strided(packed.to(torch.uint8), layout), order=order)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(4, 16, 36, 100, 260), E=(0, 1, 2), order=CODE_ORDERS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(unpack=Kernel(_unpack_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def unpack_fp6(packed: Tensor, order: str = "low_first", *, config: Config) -> Tensor:
    """Unpack 6-bit codes.

    Args:
        packed: (M, 3 K / 4) or (E, M, 3 K / 4) uint8, any strides.
        order: as of `pack_fp6`.

    Returns:
        (M, K) or (E, M, K) uint8 codes 0 to 63, contiguous.

    Raises:
        ValueError: dtype, rank or order does not fit, or the width is no multiple of 3.
    """
    *lead, M, width = packed.shape
    K = width // 3 * 4
    codes = torch.empty((*lead, M, K), dtype=torch.uint8, device=packed.device)
    if codes.numel() == 0:
        return codes
    E, stride_pe = (packed.shape[0], packed.stride(0)) if packed.dim() == 3 else (1, 0)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"])
    _unpack_kernel[(tiles, E)](
        packed, codes, M, K, packed.shape[-1], stride_pe, packed.stride(-2), packed.stride(-1),
        HIGH_FIRST=order == "high_first", **config,
    )  # fmt: skip
    return codes
