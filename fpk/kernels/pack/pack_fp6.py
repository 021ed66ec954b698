"""pack_fp6: four 6-bit codes into every three bytes.

    word[m, j] = sum_i codes[m, 4j + i] << 6i            24 bits, stored little-endian        order "low_first"
    word[m, j] = sum_i codes[m, 4j + i] << 6(3 - i)      24 bits, stored big-endian           order "high_first"

"low_first" is what FP6 checkpoints have (AMD Quark, both e3m2 and e2m3; a code is sign << 5 | exponent | mantissa).
"high_first" is the same read as one string of bits, highest first.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_multiple, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.formats import CODE_ORDERS
from fpk.kernels._microscale import store_packed
from fpk.kernels._packed import pack_codes
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, strided
from fpk.shapes import activation_cases


def reference(codes: Tensor, order: str = "low_first") -> Tensor:
    return pack_codes(codes, 6, order)


def check(codes: Tensor, order: str, **_: Any) -> None:
    expect_dtype("pack_fp6.codes", codes, torch.uint8)
    expect_rank("pack_fp6.codes", codes, 2, 3)
    expect_multiple("pack_fp6.codes", codes, 4)
    expect_one_of("pack_fp6.order", order, CODE_ORDERS)


@triton.jit(do_not_specialize=["M"])
def _pack_kernel(
    codes_ptr, packed_ptr,
    M, K, width,
    stride_ce, stride_cm, stride_ck,
    HIGH_FIRST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(1).to(tl.int64)
    tiles_k = tl.cdiv(K, BLOCK_K)
    offs_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    cols = (tile_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, None, :]
    mask_m = offs_m < M
    ptrs = codes_ptr + e * stride_ce + offs_m[:, None, None] * stride_cm + cols * stride_ck
    codes = tl.load(ptrs, mask=mask_m[:, None, None] & (cols < K), other=0).to(tl.int32) & 63
    first = tile_k * (BLOCK_K * 6 // 8) + tl.arange(0, 1)
    store_packed(packed_ptr + (e * M + offs_m) * width, codes, first, mask_m, width, 6, False, HIGH_FIRST)


def configs(**_: Any):
    yield Config(BLOCK_M=4, BLOCK_K=1024, num_warps=4)
    for rows, cols in ((1, 2048), (1, 4096), (2, 2048), (8, 512), (8, 1024)):
        for warps in (4, 8):
            yield Config(BLOCK_M=rows, BLOCK_K=cols, num_warps=warps)


def key(codes: Tensor, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(codes.shape[:-1].numel()), K=codes.shape[-1])


def cost(codes: Tensor, **_: Any) -> Cost:
    return Cost(flops=0, bytes=codes.numel() + codes.numel() // 4 * 3)


def inputs(*, M, K, E=0, order="low_first", layout="contiguous", device="cuda", seed=0):
    shape = (E, M, K) if E else (M, K)
    # bits above the code are dropped
    codes = torch.randint(0, 256, shape, generator=generator(seed, device), device=device, dtype=torch.int16)
    return dict(codes=strided(codes.to(torch.uint8), layout), order=order)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 3, 8, 13), K=(4, 16, 36, 100, 260), E=(0, 1, 2), order=CODE_ORDERS,
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(pack=Kernel(_pack_kernel)),
    configs=configs, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def pack_fp6(codes: Tensor, order: str = "low_first", *, config: Config) -> Tensor:
    """Pack 6-bit codes, four to three bytes.

    Args:
        codes: (M, K) or (E, M, K) uint8, K a multiple of 4, any strides; only the low six bits count.
        order: "low_first": the first code lies in the lowest bits of the first byte; "high_first": in the highest.

    Returns:
        (M, 3 K / 4) or (E, M, 3 K / 4) uint8, contiguous; `unpack_fp6` inverts it.

    Raises:
        ValueError: dtype, rank or order does not fit, or K is no multiple of 4.
    """
    *lead, M, K = codes.shape
    packed = torch.empty((*lead, M, K // 4 * 3), dtype=torch.uint8, device=codes.device)
    if packed.numel() == 0:
        return packed
    E, stride_ce = (codes.shape[0], codes.stride(0)) if codes.dim() == 3 else (1, 0)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(K, config["BLOCK_K"])
    _pack_kernel[(tiles, E)](
        codes, packed, M, K, packed.shape[-1], stride_ce, codes.stride(-2), codes.stride(-1),
        HIGH_FIRST=order == "high_first", **config,
    )  # fmt: skip
    return packed
