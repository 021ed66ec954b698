"""unswizzle_scales: block scales back from the order of a matrix unit.

The inverse of swizzle_scales, which defines the layouts; what was padding is dropped.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.formats import SCALE_TILES
from fpk.kernels._packed import swizzled_offsets
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, strided


def reference(swizzled: Tensor, rows: int, cols: int, layout: str = "128x4") -> Tensor:
    flat = swizzled.view(torch.uint8).flatten(-2)
    return flat[..., swizzled_offsets(rows, cols, layout, flat.device)].contiguous().view(swizzled.dtype)


def check(swizzled: Tensor, rows: int, cols: int, layout: str, **_: Any) -> None:
    expect_dtype("unswizzle_scales.swizzled", swizzled, torch.uint8, torch.float8_e4m3fn)
    expect_rank("unswizzle_scales.swizzled", swizzled, 2, 3)
    expect_one_of("unswizzle_scales.layout", layout, SCALE_TILES)
    tile = SCALE_TILES[layout][0]
    padded = (triton.cdiv(rows, tile) * tile, triton.cdiv(cols, 4) * 4)
    expect_shape("unswizzle_scales.swizzled", swizzled, (*swizzled.shape[:-2], *padded))


@triton.jit(do_not_specialize=["M"])
def _unswizzle_kernel(
    swizzled_ptr, out_ptr,
    M, G,
    stride_se, stride_sm, stride_sg,
    ROWS: tl.constexpr, STRIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK bytes of the output in order; each finds its place in the tiles."""
    e = tl.program_id(1).to(tl.int64)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < M.to(tl.int64) * G
    m, g = offs // G, offs % G
    tiles_g = tl.cdiv(G, 4)
    inside = m % STRIP * (ROWS // STRIP * 4) + m % ROWS // STRIP * 4 + g % 4
    place = (m // ROWS * tiles_g + g // 4) * (ROWS * 4) + inside
    width = tiles_g * 4
    ptrs = swizzled_ptr + e * stride_se + place // width * stride_sm + place % width * stride_sg
    tl.store(out_ptr + e * M * G + offs, tl.load(ptrs, mask=mask, other=0), mask=mask)


def configs(**_: Any):
    for block in (2048, 512, 1024, 4096):
        for warps in (4, 8):
            yield Config(BLOCK=block, num_warps=warps)


def key(rows: int, cols: int, layout: str, **_: Any) -> dict[str, int | str]:
    return dict(M=bucket(rows), K=cols, layout=layout)


def cost(swizzled: Tensor, rows: int, cols: int, **_: Any) -> Cost:
    return Cost(flops=0, bytes=2 * rows * cols * swizzled.shape[:-2].numel())


def inputs(*, rows, cols, E=0, scale_layout="128x4", dtype=torch.uint8, layout="contiguous", device="cuda", seed=0):
    tile, _ = SCALE_TILES[scale_layout]
    padded = (triton.cdiv(rows, tile) * tile, triton.cdiv(cols, 4) * 4)
    shape = (E, *padded) if E else padded
    swizzled = torch.randint(0, 256, shape, generator=generator(seed, device), device=device, dtype=torch.int16)
    return dict(
        swizzled=strided(swizzled.to(torch.uint8), layout).view(dtype), rows=rows, cols=cols, layout=scale_layout
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        rows=(0, 1, 8, 33, 130), cols=(1, 4, 5, 14), E=(0, 1, 2), scale_layout=tuple(SCALE_TILES),
        dtype=(torch.uint8, torch.float8_e4m3fn), layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(unswizzle=Kernel(_unswizzle_kernel)),
    configs=configs, key=key, cost=cost,
    cases=dict(
        prefill_8192=dict(rows=16384, cols=256), weight_7168=dict(rows=7168, cols=448), one_4096=dict(rows=1, cols=256)
    ),
)  # fmt: skip
def unswizzle_scales(swizzled: Tensor, rows: int, cols: int, layout: str = "128x4", *, config: Config) -> Tensor:
    """Undo `swizzle_scales`.

    Args:
        swizzled: (M, G) or (E, M, G) whole tiles, uint8 or float8_e4m3fn, any strides: M and G are `rows` and `cols`
            rounded up to tiles.
        rows, cols: size of the scale that was swizzled.
        layout: the one it was swizzled to.

    Returns:
        (rows, cols) or (E, rows, cols), contiguous, of swizzled's dtype.

    Raises:
        ValueError: dtype, shape or layout does not fit.
    """
    tile, strip = SCALE_TILES[layout]
    out = torch.empty((*swizzled.shape[:-2], rows, cols), dtype=swizzled.dtype, device=swizzled.device)
    if out.numel() == 0:
        return out
    E, stride_se = (swizzled.shape[0], swizzled.stride(0)) if swizzled.dim() == 3 else (1, 0)
    _unswizzle_kernel[(triton.cdiv(rows * cols, config["BLOCK"]), E)](
        swizzled.view(torch.uint8), out.view(torch.uint8), rows, cols,
        stride_se, swizzled.stride(-2), swizzled.stride(-1),
        ROWS=tile, STRIP=strip, **config,
    )  # fmt: skip
    return out
