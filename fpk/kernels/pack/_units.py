"""Device functions that read and write units of shuffled weights (`_shuffle` says what those are)."""

import triton
import triton.language as tl


@triton.jit
def _rotate(x, n):
    """32-bit rotation to the left of uint32; n in 0..31, a number or a tensor."""
    return (x << n) | (x >> ((32 - n) & 31))


@triton.jit
def _turn2(index, FORMAT: tl.constexpr):
    """Rotations of the second plane (`_shuffle.PLANE2`) for pairs 0..7 of a word."""
    if FORMAT == "e2m3":
        turn = (4 - 2 * index) & 31
    else:
        turn = index + (index // 4) * 4
    return turn.to(tl.uint32)


@triton.jit
def load_unit_codes(
    planes,
    unit,
    units,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    FP8: tl.constexpr,
    PLACE: tl.constexpr,
    MASK2: tl.constexpr,
):
    """int32 codes [64, 128] of a unit (int64), of as many as there are; planes: uint8 pointer."""
    at = tl.arange(0, 1024)
    word = tl.load((planes + unit * 4096).to(tl.pointer_type(tl.uint32)) + at)
    if FP8:
        i = tl.arange(0, 8)[None, :]
        half, j = (i // 4).to(tl.uint32), (i % 4).to(tl.uint32)
        size = (word[:, None] >> (16 * half + 4 * j)) & 7
        sign = (word[:, None] >> (8 * j + 7 - 4 * half)) & 1
        codes = tl.reshape((size | (sign << 3)).to(tl.int32), (2, 4, 8, 4, 2, 2, 2, 4))
        codes = tl.permute(codes, (1, 5, 2, 6, 0, 4, 3, 7))
    else:
        first, second, third = word & 0x81C081C0, _rotate(word, 3) & 0x81C081C0, _rotate(word, 6) & 0x81C081C0
        fourth = (_rotate(word, 1) & 0x80008000) | (_rotate(word, 29) & 0x01800180) | (_rotate(word, 25) & 0x00400040)
        pair = tl.join(tl.join(first, third), tl.join(second, fourth))
        if BITS == 6:
            second = planes + units * 4096 + unit * 2048
            more = tl.load(second.to(tl.pointer_type(tl.uint32)) + tl.arange(0, 512))
            turn = _turn2(tl.arange(0, 8)[None, :], FORMAT)
            rest = _rotate(more[:, None], turn) & (MASK2 * 0x10001)
            pair = pair | tl.reshape(rest, (1024, 2, 2))
        field = tl.join(pair & 0xFFFF, pair >> 16)
        TOP: tl.constexpr = BITS - 1
        codes = (((field >> 15) << TOP) | ((field >> PLACE) & ((1 << TOP) - 1))).to(tl.int32)
        codes = tl.reshape(codes, (2, 4, 8, 4, 2, 2, 2, 2, 2))
        codes = tl.permute(codes, (1, 7, 2, 6, 0, 4, 5, 3, 8))
    return tl.reshape(codes, (64, 128))


@triton.jit
def _four(x):
    """The columns of [n, 4]; a sum of columns in their place lost rows on an H200 with Triton 3.6."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _eight(x):
    """The columns of [n, 8]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 4, 2)))
    first, third, fifth, seventh = _four(even)
    second, fourth, sixth, eighth = _four(odd)
    return first, second, third, fourth, fifth, sixth, seventh, eighth


@triton.jit
def _selector(code, HALF: tl.constexpr, J: tl.constexpr):
    """A code's bits in a word of target "fp8"."""
    return ((code & 7) << (16 * HALF + 4 * J)) | ((code >> 3) << (8 * J + 7 - 4 * HALF))


@triton.jit
def _second(pair, INDEX: tl.constexpr, FORMAT: tl.constexpr):
    """Bits of a pair in a word of the second plane."""
    TURN: tl.constexpr = (4 - 2 * INDEX) & 31 if FORMAT == "e2m3" else INDEX + INDEX // 4 * 4
    return _rotate(pair, (32 - TURN) & 31)


@triton.jit
def store_unit_codes(
    planes,
    unit,
    units,
    codes,
    FORMAT: tl.constexpr,
    BITS: tl.constexpr,
    FP8: tl.constexpr,
    PLACE: tl.constexpr,
    MASK2: tl.constexpr,
):
    """The inverse of load_unit_codes."""
    if FP8:
        codes = tl.reshape(codes, (4, 2, 8, 2, 2, 2, 4, 4))
        codes = tl.reshape(tl.permute(codes, (4, 0, 2, 6, 5, 1, 3, 7)), (1024, 8)).to(tl.uint32)
        a, b, c, d, e, f, g, h = _eight(codes)
        word = _selector(a, 0, 0) | _selector(b, 0, 1) | _selector(c, 0, 2) | _selector(d, 0, 3)
        word |= _selector(e, 1, 0) | _selector(f, 1, 1) | _selector(g, 1, 2) | _selector(h, 1, 3)
    else:
        TOP: tl.constexpr = BITS - 1
        field = ((codes >> TOP) << 15) | ((codes & ((1 << TOP) - 1)) << PLACE)
        field = tl.permute(tl.reshape(field, (4, 2, 8, 2, 2, 2, 2, 4, 2)), (4, 0, 2, 7, 5, 6, 3, 1, 8))
        low, high = tl.split(tl.reshape(field, (4096, 2)))
        pair = (low | (high << 16)).to(tl.uint32, bitcast=True)
        first, second, third, fourth = _four(tl.reshape(pair, (1024, 4)))
        word = (first & 0x81C081C0) | _rotate(second & 0x81C081C0, 29) | _rotate(third & 0x81C081C0, 26)
        word |= _rotate(fourth & 0x80008000, 31) | _rotate(fourth & 0x01800180, 3) | _rotate(fourth & 0x00400040, 7)
        if BITS == 6:
            a, b, c, d, e, f, g, h = _eight(tl.reshape(pair & (MASK2 * 0x10001), (512, 8)))
            more = _second(a, 0, FORMAT) | _second(b, 1, FORMAT) | _second(c, 2, FORMAT) | _second(d, 3, FORMAT)
            more |= _second(e, 4, FORMAT) | _second(f, 5, FORMAT) | _second(g, 6, FORMAT) | _second(h, 7, FORMAT)
            plane = (planes + units * 4096 + unit * 2048).to(tl.pointer_type(tl.int32))
            tl.store(plane + tl.arange(0, 512), more.to(tl.int32, bitcast=True))
    plane = (planes + unit * 4096).to(tl.pointer_type(tl.int32))
    tl.store(plane + tl.arange(0, 1024), word.to(tl.int32, bitcast=True))


@triton.jit
def load_unit_scales(planes, unit, units, BITS: tl.constexpr, GROUP: tl.constexpr):
    """int32 scale bytes [64, 128 / GROUP] of a unit."""
    N: tl.constexpr = 128 // GROUP
    stored = tl.load(planes + units * (1024 * BITS) + unit * (64 * N) + tl.arange(0, 64 * N)).to(tl.int32)
    stored = tl.permute(tl.reshape(stored, (4, 8, 2, N // 2, 2)), (0, 4, 1, 2, 3))
    return tl.reshape(stored, (64, N))


@triton.jit
def store_unit_scales(planes, unit, units, stored, BITS: tl.constexpr, GROUP: tl.constexpr):
    N: tl.constexpr = 128 // GROUP
    stored = tl.permute(tl.reshape(stored, (4, 2, 8, 2, N // 2)), (0, 2, 3, 4, 1))
    at = planes + units * (1024 * BITS) + unit * (64 * N) + tl.arange(0, 64 * N)
    tl.store(at, tl.reshape(stored, (64 * N,)).to(tl.uint8))
