"""The shuffled layout of packed weights: what a thread of wgmma wants to find in 16 neighbouring bytes.

A weight is cut into units of 64 rows x 128 columns, padded with zeros, in the order (row of units, column of units).
Its codes are one plane, or two, its scales another: planes lie one behind the other, units of a plane likewise, and
each unit takes whole lines of 256 bytes of every plane.

Target "bf16" (MXFP4, MXFP6, NVFP4). A 32-bit word holds eight codes: rows r, r + 8, columns k, k + 1, k + 64, k + 65.
Two codes with neighbouring columns are a pair: as 16-bit fields they have their sign in bit 15, their exponent from bit
7 on and their mantissa below, which is a bf16 times a power of two. PLANE4 says where the four leading bits of the four
pairs of a word lie: pair |= rotate_left(word, n) & mask, so that a shift and a mask decode two codes. FP6 has its two
other bits in a second plane of words, each for eight pairs. Scales are bytes that, times a constant, are the bits of a
bf16: the block's scale and the power of two that is missing.

Target "fp8" (MXFP4). A word holds eight codes of one row: columns k..k+3 and k + 64..k + 67, as selectors of a table of
the eight magnitudes in e4m3. The scales of a row become steps above the row's own scale, which the table absorbs: exact
where those of a row lie within 2^11.
"""

from typing import Any

import torch
from torch import Tensor

from fpk.formats import E2M1, E2M3, E3M2, Format

ROWS, COLUMNS = 64, 128
LINE = 256
TARGETS = ("bf16", "fp8")
STEPS = 11
"""Powers of two between the scales of a row that target "fp8" holds."""

ELEMENTS: dict[str, Format] = {"mxfp4": E2M1, "nvfp4": E2M1, "mxfp6_e2m3": E2M3, "mxfp6_e3m2": E3M2}
PLACE = {"e2m1": 6, "e2m3": 4, "e3m2": 5}
"""How far a code's magnitude is shifted to become a bf16 times a power of two."""
REBIAS = {"e2m1": 126, "e2m3": 126, "e3m2": 124}
"""The exponent of that power, with its sign turned."""

FIELD = 0x81C0
PLANE4 = (((0, FIELD),), ((3, FIELD),), ((6, FIELD),), ((1, 0x8000), (-3, 0x0180), (-7, 0x0040)))
PLANE2 = {"e2m3": (0x0030, (4, 2, 0, -2, -4, -6, -8, -10)), "e3m2": (0x0220, (0, 1, 2, 3, 8, 9, 10, 11))}


def group_of(format: str) -> int:
    return 16 if format == "nvfp4" else 32


def unit_lines(format: str) -> int:
    """Lines of codes and scales of a unit."""
    return (ROWS * COLUMNS * ELEMENTS[format].bits // 8 + ROWS * COLUMNS // group_of(format)) // LINE


def units_of(N: int, K: int) -> tuple[int, int]:
    """Rows and columns of units that a weight takes."""
    return -(-N // ROWS), -(-K // COLUMNS)


def _rotate(x: Tensor, n: int) -> Tensor:
    """32-bit rotation to the left of an int64 tensor."""
    n %= 32
    return ((x << n) | (x >> (32 - n))) & 0xFFFFFFFF


def _both(mask: int) -> int:
    return mask * 0x10001


def _words(x: Tensor) -> Tensor:
    """int64 words of each unit as bytes (units, bytes)."""
    return torch.stack([(x >> (8 * i)) & 255 for i in range(4)], -1).to(torch.uint8).flatten(1)


def _of_words(bytes_: Tensor) -> Tensor:
    b = bytes_.reshape(bytes_.shape[0], -1, 4).to(torch.int64)
    return b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16 | b[..., 3] << 24


# shapes of a unit (rows of units, columns of units) and the orders of its dimensions, for codes and for scales
_BF16 = (4, 2, 8, 2, 2, 2, 2, 4, 2)  # rows: 16, 8, 1; columns: 64, 32, 16, 8, 2, 1
_BF16_ORDER = (4, 0, 2, 7, 5, 6, 3, 1, 8)
_FP8 = (4, 2, 8, 2, 2, 2, 4, 4)  # columns: 64, 32, 16, 4, 1
_FP8_ORDER = (4, 0, 2, 6, 5, 1, 3, 7)
_SCALE_ORDER = (0, 2, 3, 4, 1)  # rows: 16, 8, 1; columns: 64, group


def _into_units(x: Tensor, columns: int, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """A padded matrix as (units, ...) with the dimensions of a unit in `order`."""
    tiles_n, tiles_k = x.shape[0] // ROWS, x.shape[1] // columns
    rows = shape[:3]
    x = x.reshape(tiles_n, *rows, tiles_k, *shape[3:])
    place = [i + 1 if i < 3 else i + 2 for i in order]
    return x.permute(0, 4, *place).flatten(0, 1)


def _out_of_units(x: Tensor, tiles_n: int, columns: int, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """The inverse of _into_units."""
    inverse = [order.index(i) for i in range(len(order))]
    x = x.reshape(tiles_n, -1, *[shape[i] for i in order])
    x = x.permute(0, *[i + 2 for i in inverse[:3]], 1, *[i + 2 for i in inverse[3:]])
    return x.reshape(tiles_n * ROWS, -1)


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def shuffled(codes: Tensor, stored: Tensor, format: str, target: str) -> Tensor:
    """Lines (lines, 256) of unpacked codes (N, K) and of the bytes (N, K / group) that stand for scales."""
    element, (tiles_n, tiles_k) = ELEMENTS[format], units_of(*codes.shape)
    per_unit = COLUMNS // group_of(format)
    codes = _pad(codes, tiles_n * ROWS, tiles_k * COLUMNS).to(torch.int64)
    stored = _pad(stored.to(torch.uint8), tiles_n * ROWS, tiles_k * per_unit)
    scales = _into_units(stored, per_unit, (4, 2, 8, 2, per_unit // 2), _SCALE_ORDER).flatten(1)
    if target == "fp8":
        c = _into_units(codes, COLUMNS, _FP8, _FP8_ORDER)
        j = torch.arange(4, device=codes.device)
        low = ((c & 7) << (4 * j)).sum(-1)
        sign = ((c >> 3) << (8 * j)).sum(-1)
        word = low[..., 0] | low[..., 1] << 16 | sign[..., 0] << 7 | sign[..., 1] << 3
        return torch.cat([_words(word.flatten(1)).flatten(), scales.flatten()]).reshape(-1, LINE)
    top = element.bits - 1
    field = (codes >> top) << 15 | (codes & ((1 << top) - 1)) << PLACE[element.name]
    pair = _into_units(field, COLUMNS, _BF16, _BF16_ORDER)
    pair = (pair[..., 0] | pair[..., 1] << 16).flatten(-2).flatten(1, -2)  # (units, words, 4)
    parts = [_rotate(pair[..., j] & _both(mask), -n) for j, plane in enumerate(PLANE4) for n, mask in plane]
    planes = [_words(sum(parts, torch.zeros_like(parts[0])))]
    if element.bits == 6:
        mask, turns = PLANE2[element.name]
        pair = pair.reshape(pair.shape[0], -1, 8)
        parts = [_rotate(pair[..., i] & _both(mask), -n) for i, n in enumerate(turns)]
        planes.append(_words(sum(parts, torch.zeros_like(parts[0]))))
    return torch.cat([plane.flatten() for plane in (*planes, scales)]).reshape(-1, LINE)


def unshuffled(packed: Tensor, format: str, target: str, N: int, K: int) -> tuple[Tensor, Tensor]:
    """The inverse of `shuffled`."""
    element, (tiles_n, tiles_k) = ELEMENTS[format], units_of(N, K)
    per_unit, units, size = COLUMNS // group_of(format), tiles_n * tiles_k, ROWS * COLUMNS // 2
    first, second, scales = packed.flatten().split(
        [units * size, units * size * (element.bits - 4) // 4, units * ROWS * per_unit]
    )  # fmt: skip
    stored = _out_of_units(scales, tiles_n, per_unit, (4, 2, 8, 2, per_unit // 2), _SCALE_ORDER)
    word = _of_words(first.reshape(units, -1))
    if target == "fp8":
        j = torch.arange(4, device=packed.device)
        low = torch.stack([word & 0xFFFF, word >> 16], -1)[..., None]
        sign = torch.stack([word >> 7, word >> 3], -1)[..., None]
        c = (low >> (4 * j) & 7) | (sign >> (8 * j) & 1) << 3
        codes = _out_of_units(c, tiles_n, COLUMNS, _FP8, _FP8_ORDER)
    else:
        zero = torch.zeros_like(word)
        pair = torch.stack([sum((_rotate(word, n) & _both(m) for n, m in plane), zero) for plane in PLANE4], -1)
        if element.bits == 6:
            mask, turns = PLANE2[element.name]
            more = _of_words(second.reshape(units, -1))
            rest = torch.stack([_rotate(more, n) & _both(mask) for n in turns], -1)
            pair = pair | rest.reshape(pair.shape)
        field = torch.stack([pair & 0xFFFF, pair >> 16], -1)
        top = element.bits - 1
        c = field >> 15 << top | field >> PLACE[element.name] & ((1 << top) - 1)
        codes = _out_of_units(c, tiles_n, COLUMNS, _BF16, _BF16_ORDER)
    groups = -(-K // group_of(format))
    return codes[:N, :K].to(torch.uint8), stored[:N, :groups]


def constants(format: str, target: str) -> dict[str, Any]:
    """constexpr arguments of kernels that read or write units."""
    element = ELEMENTS[format]
    mask2, _ = PLANE2.get(element.name, (0, ()))
    return dict(
        FORMAT=element.name, BITS=element.bits, GROUP=group_of(format), FP8=target == "fp8",
        PLACE=PLACE[element.name], MASK2=mask2,
    )  # fmt: skip
