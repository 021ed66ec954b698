"""Pieces of the kernels for one token (_gluon_token): slots and their experts, quantizing, columns of products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fpk.kernels._tile import amax_key, amax_of_key, cast_fp8, clamp_to, unusual

ROWS = gl.constexpr(256)
"""Rows of 128 bytes in a buffer, of `down_kernel` also half of them."""


RENAMED = gl.constexpr(not hasattr(gl.shared_memory_descriptor, "_reinterpret"))  # by triton 3.7 or later
OF_TRITON = ("RENAMED",)  # no part of a kernel's hash


@gluon.jit
def seen_as(buffer, SHAPE: gl.constexpr, RANK: gl.constexpr):
    """The same codes in shared memory in another shape."""
    P: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=RANK)
    if RENAMED:
        other = buffer.reinterpret(buffer.dtype, SHAPE, P)
    else:
        other = buffer._reinterpret(buffer.dtype, SHAPE, P)
    return other


@gluon.jit
def experts_of_slots(ids_ptr, map_ptr, slots, stride, num_mapped, E, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """The local experts of slots, -1 for those that are dropped; every warp holds all of them."""
    V: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot = gl.arange(0, SLOTS, layout=V)
    expert = gl.load(ids_ptr + slot * stride, mask=slot < slots, other=-1, cache_modifier=".cg").to(gl.int64)
    if map_ptr is not None:
        known = (expert >= 0) & (expert < num_mapped)
        expert = gl.load(map_ptr + gl.where(known, expert, 0), mask=known, other=-1).to(gl.int64)
    return gl.where((expert >= 0) & (expert < E), expert, -1).to(gl.int32)


@gluon.jit
def of_slot(values, slot):
    """An element of a vector that every warp holds."""
    return gl.sum(gl.where(gl.arange(0, values.shape[0], layout=values.type.layout) == slot, values, 0), axis=0)


@gluon.jit
def next_slot(experts, slot):
    """The first slot from this one on that is not dropped."""
    at = gl.arange(0, experts.shape[0], layout=experts.type.layout)
    return gl.min(gl.where((experts >= 0) & (at >= slot), at, 1 << 30), axis=0)


@gluon.jit
def _quotient(x, scale, MAX: gl.constexpr):
    """_tile.quotient_within, whose constants have no layout."""
    wide = scale + gl.zeros_like(x)
    if unusual(scale):
        quotient = clamp_to(gl.div_rn(x, wide), -MAX, MAX)
    else:
        one = gl.full_like(scale, 1.0)
        reciprocal = gl.div_rn(one, scale)
        below = reciprocal * (1.0 - 2.0**-23)
        rest = gl.fma(scale, -below, one) * reciprocal
        x = clamp_to(x, scale * -MAX, scale * MAX)
        quotient = gl.fma(x, below + gl.zeros_like(x), x * rest)
        excess = gl.fma(quotient, wide, x * -1.0)
        quotient = gl.fma(excess, gl.zeros_like(x) - reciprocal, quotient)
    return quotient


@gluon.jit
def _load_segments(x_ptr, f, first, count, width, SEGS: gl.constexpr, B: gl.constexpr):
    """Segments f as fp32, and which of them are there."""
    slot = first + f // SEGS
    begin = f % SEGS * 128
    inside = gl.arange(0, 128, layout=gl.SliceLayout(0, B))
    ptrs = x_ptr + (slot.to(gl.int64) * width + begin)[:, None] + inside[None, :]
    mask = ((slot < count) & (begin < width))[:, None]
    return gl.load(ptrs, mask=mask, other=0.0).to(gl.float32), mask


@gluon.jit
def quantize_rows(
    x_ptr, codes, scales_ptr, first, count, width,
    SLOTS: gl.constexpr, SEGS: gl.constexpr, GROUP: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr,
    BIAS: gl.constexpr, MAX: gl.constexpr, NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr,
):  # fmt: skip
    """SLOTS rows of `width` elements, from row `first` on, as codes [SLOTS * SEGS, 128]; scales of segments in memory.

    GROUP: 128 for a scale of each segment's own, -1 for one of a whole row. Rows from `count` on are zeros. At most 64
    segments stand in registers; a row of more is read twice.
    """
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    S: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    BM: gl.constexpr = gl.SliceLayout(1, B)
    PART: gl.constexpr = SLOTS * SEGS if SLOTS * SEGS <= 64 or SLOTS > 1 else (32 if GROUP > 0 else 64)
    f = gl.arange(0, PART, layout=BM)
    row_key = gl.zeros((PART,), gl.uint32, BM)
    if PART < SLOTS * SEGS and GROUP < 0:
        for part in gl.static_range(0, SLOTS * SEGS, PART):
            x, mask = _load_segments(x_ptr, f + part, first, count, width, SEGS, B)
            row_key = gl.maximum(row_key, gl.max(gl.where(mask, amax_key(x), 0), axis=1))
        row_key = gl.zeros((PART,), gl.uint32, BM) + gl.max(row_key, axis=0)
    for part in gl.static_range(0, SLOTS * SEGS, PART):
        x, mask = _load_segments(x_ptr, f + part, first, count, width, SEGS, B)
        if PART == SLOTS * SEGS or GROUP > 0:
            row_key = gl.max(gl.where(mask, amax_key(x), 0), axis=1)
        if PART == SLOTS * SEGS and GROUP < 0:
            most = gl.convert_layout(gl.max(row_key.reshape((SLOTS, SEGS)), axis=1), gl.SliceLayout(1, S))
            shared = most[:, None] + gl.zeros((SLOTS, SEGS), gl.uint32, S)
            row_key = gl.convert_layout(shared.reshape((PART,)), BM)
        amax = amax_of_key(row_key)
        if GROUP < 0:  # as quantize_fp8_token and quantize_fp8_group
            scale = gl.maximum(gl.div_rn(amax, QMAX), 1 / (512 * QMAX))
        else:
            scale = gl.div_rn(gl.maximum(amax, 1e-10), QMAX)
        code = cast_fp8(_quotient(x, scale[:, None], MAX), MANTISSA, BIAS, NAN_CODE, HARDWARE)
        codes.slice(part, PART).store(code.to(codes.dtype, bitcast=True))
        gl.store(scales_ptr + part + f, scale)


@gluon.jit
def own_columns(product, factor, first, segs, BOX: gl.constexpr):
    """Of each row of a product the column of its own segment, times a factor; zeros elsewhere. first: first segment."""
    L: gl.constexpr = product.type.layout
    seg = first + gl.arange(0, product.shape[0], layout=gl.SliceLayout(1, L)) // BOX
    cols = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    own = ((seg % 8)[:, None] == cols[None, :]) & (seg < segs)[:, None]
    return gl.where(own, product * factor[:, None], 0.0)


@gluon.jit
def columns(acc, BOX: gl.constexpr, O: gl.constexpr):
    """Sums over the segments of a box's rows."""
    return gl.convert_layout(gl.sum(gl.sum(acc, axis=1).reshape((acc.shape[0] // BOX, BOX)), axis=0), O)


@gluon.jit
def ring(dtype: gl.constexpr, layout: gl.constexpr, STAGES: gl.constexpr, HELD: gl.constexpr):
    bufs = gl.allocate_shared_memory(dtype, [STAGES, HELD, 128], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return bufs, full, empty
