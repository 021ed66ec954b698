"""Packing and scale layouts: inverses of each other, bit orders written out by hand, sizes that cannot be packed."""

import pytest
import torch

from fpk.formats import CODE_ORDERS, SCALE_TILES
from fpk.op import OPS
from fpk.samples import generator


def random_codes(shape: tuple[int, ...], bits: int, device: str) -> torch.Tensor:
    g = generator(3, device)
    return torch.randint(0, 1 << bits, shape, generator=g, device=device, dtype=torch.int16).to(torch.uint8)


@pytest.mark.parametrize("order", CODE_ORDERS)
@pytest.mark.parametrize("bits, per_word", [(4, 2), (6, 4)])
def test_unpack_inverts_pack_for_every_legal_length(bits, per_word, order, device):
    for words in (*range(1, 20), 64, 129):
        codes = random_codes((3, words * per_word), bits, device)
        packed = OPS[f"pack_fp{bits}"](codes, order)
        assert packed.shape == (3, words * per_word * bits // 8)
        assert OPS[f"unpack_fp{bits}"](packed, order).equal(codes)


@pytest.mark.parametrize("order", CODE_ORDERS)
@pytest.mark.parametrize("bits, count", [(4, 1), (6, 3)])
def test_pack_inverts_unpack_for_every_byte(bits, count, order, device):
    every = torch.arange(256, dtype=torch.int32, device=device).to(torch.uint8)
    packed = torch.stack([every.roll(i) for i in range(count)], -1).reshape(4, -1)
    assert OPS[f"pack_fp{bits}"](OPS[f"unpack_fp{bits}"](packed, order), order).equal(packed)


@pytest.mark.parametrize("order", CODE_ORDERS)
@pytest.mark.parametrize("bits", [4, 6])
def test_bits_stand_where_the_order_says(bits, order, device):
    """As one string of binary digits: the lowest bits of the first byte first, or the highest."""
    codes = random_codes((1, 24), bits, device)
    packed = OPS[f"pack_fp{bits}"](codes, order)[0].tolist()
    if order == "high_first":
        assert "".join(f"{b:08b}" for b in packed) == "".join(f"{c:0{bits}b}" for c in codes[0].tolist())
    else:
        digits = "".join(f"{b:08b}"[::-1] for b in packed)
        assert digits == "".join(f"{c:0{bits}b}"[::-1] for c in codes[0].tolist())


def test_packing_by_hand(device):
    nibbles = torch.tensor([[0x2, 0xA, 0x7, 0x1]], dtype=torch.uint8, device=device)
    assert OPS["pack_fp4"](nibbles).tolist() == [[0xA2, 0x17]]
    assert OPS["pack_fp4"](nibbles, "high_first").tolist() == [[0x2A, 0x71]]
    sixes = torch.tensor([[0b000001, 0b100000, 0b111111, 0b010101]], dtype=torch.uint8, device=device)
    assert OPS["pack_fp6"](sixes).tolist() == [[0b00000001, 0b11111000, 0b01010111]]
    assert OPS["pack_fp6"](sixes, "high_first").tolist() == [[0b00000110, 0b00001111, 0b11010101]]


@pytest.mark.parametrize("name, width, message", [
    ("pack_fp4", 3, "pack_fp4.codes: expected a multiple of 2 columns"),
    ("pack_fp6", 6, "pack_fp6.codes: expected a multiple of 4 columns"),
    ("unpack_fp6", 4, "unpack_fp6.packed: expected a multiple of 3 columns"),
])  # fmt: skip
def test_what_cannot_be_packed_is_refused(name, width, message, device):
    with pytest.raises(ValueError, match=message):
        OPS[name](torch.zeros(2, width, dtype=torch.uint8, device=device))
    with pytest.raises(ValueError, match=f"{name}.order: expected one of 'low_first'"):
        OPS[name](torch.zeros(2, 12, dtype=torch.uint8, device=device), "low")


@pytest.mark.parametrize("layout", SCALE_TILES)
@pytest.mark.parametrize("shape", [(1, 1), (8, 4), (9, 5), (31, 3), (128, 4), (129, 9), (2, 130, 5)])
def test_unswizzle_inverts_swizzle_and_padding_is_zero(layout, shape, device):
    scale = random_codes(shape, 8, device) | 1
    out = OPS["swizzle_scales"](scale, layout)
    *lead, m, g = shape
    tile = SCALE_TILES[layout][0]
    assert out.shape == (*lead, -(-m // tile) * tile, -(-g // 4) * 4)
    assert int(out.count_nonzero()) == scale.numel()
    assert OPS["unswizzle_scales"](out, m, g, layout).equal(scale)


def test_128x4_as_the_views_that_define_it(device):
    scale = random_codes((256, 8), 8, device)
    views = scale.reshape(2, 4, 32, 2, 4).permute(0, 3, 2, 1, 4).flatten()
    assert OPS["swizzle_scales"](scale).flatten().equal(views)
    views = scale.reshape(32, 8, 2, 4).permute(0, 2, 1, 3).flatten()
    assert OPS["swizzle_scales"](scale, "8x4").flatten().equal(views)


def test_more_rows_than_a_grid_dimension_other_than_x_has(device):
    """65,536 rows and more lie on x; in the interpreter one tall program stands for many."""
    rows = 70_000
    codes = random_codes((rows, 4), 4, device)
    packed = OPS["pack_fp4"].launch(codes, config=dict(BLOCK_M=16384, BLOCK_K=4, num_warps=8))
    assert OPS["unpack_fp4"].launch(packed, config=dict(BLOCK_M=16384, BLOCK_K=4, num_warps=8)).equal(codes)
