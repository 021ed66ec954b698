"""What quantizers with a scale per group or block share: short groups at the edges, scale layouts, powers of two."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_one_of
from fpk.formats import E8M0, decode, encode, finite_amax

LAYOUTS = ("row", "column", "tma")
SCALE_FORMATS = ("fp32", "e8m0")
MAX_GROUP = 16_384
"""Widest group that one program holds in registers."""


def group_amax(x: Tensor, rows: int, cols: int) -> Tensor:
    """finite_amax of every `rows` x `cols` block of the last two dimensions: (..., cdiv(M, rows), cdiv(K, cols)), fp32.

    Short blocks at the edges are filled up with Inf, which never counts as a finite magnitude and leaves "all are Inf"
    as it was.
    """
    *lead, m, k = x.shape
    blocks_m, blocks_k = -(-m // rows), -(-k // cols)
    filled = x.new_full((*lead, blocks_m * rows, blocks_k * cols), float("inf"))
    filled[..., :m, :k] = x
    blocks = filled.reshape(*lead, blocks_m, rows, blocks_k, cols)
    return finite_amax(blocks, (-3, -1)).reshape(*lead, blocks_m, blocks_k)


def stored_scale(scale: Tensor, scale_format: str) -> tuple[Tensor, Tensor]:
    """fp32 scales as they are stored, and the fp32 value that stored scale has.

    e8m0: the exponent rounded up, so that nothing saturates; an infinite scale becomes the NaN byte.
    """
    if scale_format == "fp32":
        return scale, scale
    stored = encode(scale, E8M0, saturate=False)
    return stored, decode(stored, E8M0)


def scale_buffer(
    shape: tuple[int, ...], layout: str, scale_format: str, device: torch.device | str
) -> tuple[Tensor, int]:
    """An empty scale (..., M, G) of a layout, and the distance between its columns (M for "row").

    "row": rows contiguous. "column": columns contiguous. "tma": columns contiguous and each starting at a multiple of
    16 bytes, as the tensor memory accelerator wants; what lies between M and that multiple is never written.
    """
    *lead, m, groups = shape
    dtype = torch.float32 if scale_format == "fp32" else torch.uint8
    if layout == "row":
        return torch.empty(shape, dtype=dtype, device=device), m
    aligned = 16 // dtype.itemsize
    ld = m if layout == "column" else -(-m // aligned) * aligned
    return torch.empty((*lead, groups, ld), dtype=dtype, device=device)[..., :m].transpose(-1, -2), ld


def in_layout(scale: Tensor, layout: str, scale_format: str) -> Tensor:
    """The same scales with the strides of `layout`; the reference's own way to them."""
    if layout == "row":
        return scale.contiguous()
    columns = scale.transpose(-1, -2)
    m = scale.shape[-2]
    line = {"column": 1, "tma": 4 if scale_format == "fp32" else 16}[layout]  # elements in 16 bytes
    padded = torch.nn.functional.pad(columns, (0, -m % line)).contiguous()
    return padded[..., :m].transpose(-1, -2)


def expect_group(what: str, group: int) -> None:
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"{what}: expected 1 to {MAX_GROUP} columns (wider: one scale per token), got {group}")


def expect_scale_layout(what: str, scale_format: str, layout: str) -> None:
    expect_one_of(f"{what}.scale_format", scale_format, SCALE_FORMATS)
    expect_one_of(f"{what}.layout", layout, LAYOUTS)


@triton.jit
def power_of_two_above(scale):
    """Exponent byte of positive normal fp32 rounded up to a power of two, and that power; Inf gives 255 and Inf."""
    byte = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
    return byte, (byte << 23).to(tl.float32, bitcast=True)
