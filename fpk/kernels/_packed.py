"""Packed codes and swizzled scales in plain torch: what the references of packing and block-scaled ops share."""

import torch
from torch import Tensor

from fpk.formats import SCALE_TILES


def pack_codes(codes: Tensor, bits: int, order: str = "low_first") -> Tensor:
    """Pack uint8 codes of 4 or 6 bits along the last dimension: 2 into a byte, 4 into three bytes.

    The codes form a word, the first in its lowest bits, stored little-endian; "high_first": in its highest bits,
    stored big-endian.
    """
    per_word = 8 // bits if bits == 4 else 4
    count = per_word * bits // 8
    words = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_word, per_word).to(torch.int32) & ((1 << bits) - 1)
    places = range(per_word) if order == "low_first" else range(per_word - 1, -1, -1)
    word = sum((words[..., i] << (bits * place) for i, place in enumerate(places)), torch.zeros_like(words[..., 0]))
    bytes_ = [(word >> (8 * i)) & 255 for i in range(count)]
    if order == "high_first":
        bytes_.reverse()
    return torch.stack(bytes_, -1).flatten(-2).to(torch.uint8)


def unpack_codes(packed: Tensor, bits: int, order: str = "low_first") -> Tensor:
    """The inverse of `pack_codes`."""
    per_word = 8 // bits if bits == 4 else 4
    count = per_word * bits // 8
    bytes_ = packed.reshape(*packed.shape[:-1], packed.shape[-1] // count, count).to(torch.int32)
    if order == "high_first":
        bytes_ = bytes_.flip(-1)
    word = sum((bytes_[..., i] << (8 * i) for i in range(count)), torch.zeros_like(bytes_[..., 0]))
    codes = [(word >> (bits * i)) & ((1 << bits) - 1) for i in range(per_word)]
    if order == "high_first":
        codes.reverse()
    return torch.stack(codes, -1).flatten(-2).to(torch.uint8)


def swizzled_offsets(rows: int, cols: int, layout: str, device: torch.device) -> Tensor:
    """Where the scale of row i and column j lies in a matrix of scales of that layout: int64 (rows, cols)."""
    tile, strip = SCALE_TILES[layout]
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(cols, device=device)[None, :]
    first = (i // tile * -(-cols // 4) + j // 4) * tile * 4
    return first + i % strip * (tile // strip * 4) + i % tile // strip * 4 + j % 4
