"""swizzle_scales: block scales in the order that block-scaled matrix units read them.

    "128x4": tile (m // 128, g // 4), tiles along g first; inside it  (m % 32) * 16 + (m % 128) // 32 * 4 + g % 4
    "8x4":   tile (m // 8, g // 4), tiles along g first; inside it    (m % 8) * 4 + g % 4

Rows are padded to whole tiles, and columns to 4, with bytes of 0, which no product can scale up.

Source: the scale factor layouts of cuBLAS for 1-D block scaling (PTX `tcgen05.mma`), and the small-batch one of
TensorRT-LLM.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.formats import SCALE_TILES
from fpk.kernels._packed import swizzled_offsets
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, strided


def reference(scale: Tensor, layout: str = "128x4") -> Tensor:
    tile, _ = SCALE_TILES[layout]
    *lead, M, G = scale.shape
    padded = (*lead, -(-M // tile) * tile, -(-G // 4) * 4)
    out = torch.zeros(padded, dtype=torch.uint8, device=scale.device).flatten(-2)
    out[..., swizzled_offsets(M, G, layout, scale.device)] = scale.view(torch.uint8)
    return out.reshape(padded).view(scale.dtype)


def check(scale: Tensor, layout: str, **_: Any) -> None:
    expect_dtype("swizzle_scales.scale", scale, torch.uint8, torch.float8_e4m3fn)
    expect_rank("swizzle_scales.scale", scale, 2, 3)
    expect_one_of("swizzle_scales.layout", layout, SCALE_TILES)


@triton.jit(do_not_specialize=["M", "size"])
def _swizzle_kernel(
    scale_ptr, out_ptr,
    M, G, size,
    stride_se, stride_sm, stride_sg,
    ROWS: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK bytes of the output in order; each finds its scale."""
    e = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tile, inside = offs // (ROWS * 4), offs % (ROWS * 4)
    tiles_g = tl.cdiv(G, 4)
    APART: tl.constexpr = ROWS // STRIP * 4  # bytes between the rows of a strip
    m = tile // tiles_g * ROWS + inside % APART // 4 * STRIP + inside // APART
    g = tile % tiles_g * 4 + inside % 4
    value = tl.load(
        scale_ptr + e * stride_se + m * stride_sm + g * stride_sg, mask=(offs < size) & (m < M) & (g < G), other=0
    )
    tl.store(out_ptr + e * size + offs, value, mask=offs < size)


def configs(**_: Any):
    for block in (2048, 512, 1024, 4096):
        for warps in (4, 8):
            yield Config(BLOCK=block, num_warps=warps)


def key(scale: Tensor, layout: str, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(scale.shape[-2]), K=scale.shape[-1], layout=layout)


def cost(scale: Tensor, **_: Any) -> Cost:
    return Cost(flops=0, bytes=2 * scale.numel())


def inputs(*, M, K, E=0, scale_layout="128x4", dtype=torch.uint8, layout="contiguous", device="cuda", seed=0):
    shape = (E, M, K) if E else (M, K)
    scale = torch.randint(0, 256, shape, generator=generator(seed, device), device=device, dtype=torch.int16)
    return dict(scale=strided(scale.to(torch.uint8), layout).view(dtype), layout=scale_layout)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 8, 33, 130), K=(1, 4, 5, 14), E=(0, 1, 2), scale_layout=tuple(SCALE_TILES),
        dtype=(torch.uint8, torch.float8_e4m3fn), layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(swizzle=Kernel(_swizzle_kernel)),
    configs=configs, key=key, cost=cost,
    cases=dict(prefill_8192=dict(M=16384, K=256), weight_7168=dict(M=7168, K=448), one_4096=dict(M=1, K=256)),
)  # fmt: skip
def swizzle_scales(scale: Tensor, layout: str = "128x4", *, config: Config) -> Tensor:
    """Reorder block scales for a matrix unit.

    Args:
        scale: (M, G) or (E, M, G), uint8 (e8m0) or float8_e4m3fn, any strides.
        layout: "128x4", or "8x4" for few rows.

    Returns:
        (..., M rounded up to 128 or 8, G rounded up to 4), contiguous, of scale's dtype: the bytes of each matrix in
        tile order, those of the matrices one after the other. `unswizzle_scales` inverts it.

    Raises:
        ValueError: dtype, rank or layout does not fit.
    """
    rows, strip = SCALE_TILES[layout]
    *lead, M, G = scale.shape
    padded = (triton.cdiv(M, rows) * rows, triton.cdiv(G, 4) * 4)
    out = torch.empty((*lead, *padded), dtype=scale.dtype, device=scale.device)
    if out.numel() == 0:
        return out
    E, stride_se = (scale.shape[0], scale.stride(0)) if scale.dim() == 3 else (1, 0)
    size = padded[0] * padded[1]
    _swizzle_kernel[(triton.cdiv(size, config["BLOCK"]), E)](
        scale.view(torch.uint8), out.view(torch.uint8), M, G, size, stride_se, scale.stride(-2), scale.stride(-1),
        ROWS=rows, STRIP=strip, **config,
    )  # fmt: skip
    return out
