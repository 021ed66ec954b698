"""A whole expert layer of one token for Hopper, in two Gluon kernels: weights never stop coming.

`up_kernel` quantizes the token, multiplies it by its experts' gates and ups and activates; `down_kernel` quantizes the
activated rows, multiplies them and sums over the experts. One warpgroup fetches by TMA what its program will need, as
far ahead as its buffers go, whatever the others do: `down_kernel` starts beside `up_kernel`, two programs share a
multiprocessor, and its buffers are full when the first one ends.

Products are those of the tensor core, with weights as the matrix of 64 or 128 rows: fetched boxes are R rows by 128
columns (segments), several segments below each other. The other matrix has 8 columns, which are 8 segments of the
token: of a product of a segment of weights only the column of the same segment means something. So the token needs no
padding in shared memory, and every product is picked, scaled and summed in fp32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.kernels._activation import activate
from fpk.kernels._tile import amax_key, amax_of_key, cast_fp8, clamp_to, unusual
from fpk.kernels.moe._gluon_grouped import barrier, tma_load

ROWS = gl.constexpr(256)
"""Rows of 128 bytes in a buffer."""


@gluon.jit
def _expert(ids_ptr, map_ptr, slot, stride, num_mapped, E):
    """The local expert of a slot, -1 if it is dropped."""
    expert = gl.load(ids_ptr + slot * stride, cache_modifier=".cg").to(gl.int64)
    if map_ptr is not None:
        known = (expert >= 0) & (expert < num_mapped)
        local = gl.load(map_ptr + gl.where(known, expert, 0)).to(gl.int64)
        expert = gl.where(known, local, -1)
    return gl.where((expert >= 0) & (expert < E), expert, -1).to(gl.int32)


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
def _quantize(
    x_ptr, codes, scales, first, count, width,
    SLOTS: gl.constexpr, SEGS: gl.constexpr, GROUP: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr,
    BIAS: gl.constexpr, MAX: gl.constexpr, NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """SLOTS rows of `width` elements, from row `first` on, as codes [SLOTS * SEGS, 128] and a scale for each segment.

    GROUP: 128 for a scale of each segment's own, -1 for one of a whole row. Rows from `count` on are zeros.
    """
    B: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    BM: gl.constexpr = gl.SliceLayout(1, B)
    F: gl.constexpr = SLOTS * SEGS
    f = gl.arange(0, F, layout=BM)
    slot = first + f // SEGS
    begin = f % SEGS * 128
    ptrs = (
        x_ptr + (slot.to(gl.int64) * width + begin)[:, None] + gl.arange(0, 128, layout=gl.SliceLayout(0, B))[None, :]
    )
    mask = ((slot < count) & (begin < width))[:, None]
    x = gl.load(ptrs, mask=mask, other=0.0).to(gl.float32)
    key = gl.max(gl.where(mask, amax_key(x), 0), axis=1)
    if GROUP < 0:
        square = gl.max(key.reshape((SLOTS, SEGS)), axis=1)
        square = gl.convert_layout(square, gl.SliceLayout(1, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])))
        shared = square[:, None] + gl.zeros(
            (SLOTS, SEGS), gl.uint32, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
        )
        key = gl.convert_layout(shared.reshape((F,)), BM)
    amax = amax_of_key(key)
    if GROUP < 0:  # as quantize_fp8_token and quantize_fp8_group
        scale = gl.maximum(gl.div_rn(amax, QMAX), 1 / (512 * QMAX))
    else:
        scale = gl.div_rn(gl.maximum(amax, 1e-10), QMAX)
    code = cast_fp8(_quotient(x, scale[:, None], MAX), MANTISSA, BIAS, NAN_CODE, HARDWARE)
    codes.store(code.to(codes.dtype, bitcast=True))
    scales.store(scale)


@gluon.jit
def _fetch_up(
    desc, bufs, full, empty, ids_ptr, map_ptr, tiles, per_slot, K, stride_ik, num_mapped, E,
    BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SEGS: gl.constexpr = ROWS // (2 * BOX)
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e = _expert(ids_ptr, map_ptr, tile // per_slot, stride_ik, num_mapped, E)
        if e >= 0:
            for k in range(0, K // 128, SEGS):
                s = turn % STAGES
                mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
                bar = full.index(s)
                mbarrier.expect(bar, desc.block_type.nbytes)
                box = bufs.index(s)._reinterpret(desc.dtype, [2, 1, SEGS, BOX, 128], desc.layout)
                tma_load(desc, [2 * e, tile % per_slot, k, 0, 0], bar, box)
                turn += 1


@gluon.jit
def _fetch_down(
    desc, bufs, full, empty, ids_ptr, map_ptr, tiles, slots, I, stride_ik, num_mapped, E,
    BOX: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SEGS: gl.constexpr = ROWS // BOX
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for slot in range(slots):
            e = _expert(ids_ptr, map_ptr, slot, stride_ik, num_mapped, E)
            if e >= 0:
                for k in range(0, I // 128, SEGS):
                    s = turn % STAGES
                    mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
                    bar = full.index(s)
                    mbarrier.expect(bar, desc.block_type.nbytes)
                    box = bufs.index(s)._reinterpret(desc.dtype, [1, SEGS, BOX, 128], desc.layout)
                    tma_load(desc, [e * tiles + tile, k, 0, 0], bar, box)
                    turn += 1


@gluon.jit
def _picked(acc, product, factor, tile_scales, first, segs, M: gl.constexpr, BOX: gl.constexpr, L: gl.constexpr):
    """acc plus of each row of a product the column of its own segment, times its scales. first: the first segment."""
    rows = gl.arange(0, M, layout=gl.SliceLayout(1, L))
    seg = first + rows // BOX
    cols = gl.arange(0, 8, layout=gl.SliceLayout(0, L))
    scaled = product * tile_scales[None, :]
    if factor is not None:
        scaled = scaled * factor[:, None]
    own = ((seg % 8)[:, None] == cols[None, :]) & (seg < segs)[:, None]
    return acc + gl.where(own, scaled, 0.0)


@gluon.jit
def _multiply_up(
    bufs, codes, scales, full, empty, x_ptr, sb_ptr, ids_ptr, map_ptr, out_ptr, tiles, per_slot, rows, I, K,
    stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk,
    SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr, BLOCK_ROWS: gl.constexpr, FORMULA: gl.constexpr,
    ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr,
    BIAS: gl.constexpr, MAX: gl.constexpr, NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr, STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = 16 * WARPS
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    LN: gl.constexpr = gl.SliceLayout(0, L)
    SEGS: gl.constexpr = ROWS // (2 * BOX)
    PARTS: gl.constexpr = 128 // M
    kind: gl.constexpr = out_ptr.dtype.element_ty
    _quantize(
        x_ptr, codes._reinterpret(codes.dtype, [SEGS_X, 128], codes.layout),
        scales._reinterpret(gl.float32, [SEGS_X], scales.layout), 0, 1, K,
        1, SEGS_X, GROUP, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, WARPS,
    )  # fmt: skip
    fence_async_shared()
    barrier()
    segs = K // 128
    in_box = gl.arange(0, M, layout=LM) % BOX
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        slot = tile // per_slot
        first = tile % per_slot * rows
        e = _expert(ids_ptr, map_ptr, slot, stride_ik, num_mapped, E)
        if e >= 0:
            gate = gl.zeros((M, 8), gl.float32, L)
            up = gl.zeros((M, 8), gl.float32, L)
            at = gl.where(in_box < rows, first + in_box, first)
            sb_row = sb_ptr + e.to(gl.int64) * stride_sbe
            seg_row = gl.arange(0, M, layout=LM) // BOX
            for k in range(0, segs, SEGS):
                s = turn % STAGES
                for i in gl.static_range(PARTS):
                    seg = k + i * (M // BOX)
                    tile_scales = scales.index(seg // 8).load(LN)
                    gate_factor = None
                    up_factor = None
                    if GROUP > 0:
                        column = gl.minimum(seg + seg_row, segs - 1).to(gl.int64) * stride_sbk
                        gate_factor = gl.load(sb_row + (at // BLOCK_ROWS).to(gl.int64) * stride_sbn + column)
                        up_factor = gl.load(sb_row + ((at + I) // BLOCK_ROWS).to(gl.int64) * stride_sbn + column)
                    if i == 0:
                        mbarrier.wait(full.index(s), (turn // STAGES) & 1)
                    b = codes.index(seg // 8).permute((1, 0))
                    zero = gl.zeros((M, 8), gl.float32, L)
                    g = warpgroup_mma(bufs.index(s).slice(i * M, M), b, zero, use_acc=False, is_async=True)
                    u = warpgroup_mma(bufs.index(s).slice(128 + i * M, M), b, zero, use_acc=False, is_async=True)
                    g, u = warpgroup_mma_wait(0, deps=[g, u])
                    gate = _picked(gate, g, gate_factor, tile_scales, seg, segs, M, BOX, L)
                    up = _picked(up, u, up_factor, tile_scales, seg, segs, M, BOX, L)
                mbarrier.arrive(empty.index(s), count=1)
                turn += 1
            gates = gl.sum(gl.sum(gate, axis=1).reshape((M // BOX, BOX)), axis=0)
            ups = gl.sum(gl.sum(up, axis=1).reshape((M // BOX, BOX)), axis=0)
            O: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
            gates = gl.convert_layout(gates, O)
            ups = gl.convert_layout(ups, O)
            own = gl.arange(0, BOX, layout=O)
            here = own < rows
            if GROUP < 0:
                channel = first + gl.where(here, own, 0)
                if BLOCK_ROWS < 0:
                    channel = channel * 0
                gates = gates * gl.load(sb_row + channel.to(gl.int64) * stride_sbn)
                if BLOCK_ROWS > 0:
                    channel = channel + I
                ups = ups * gl.load(sb_row + channel.to(gl.int64) * stride_sbn)
            gates = gates.to(kind).to(gl.float32)
            ups = ups.to(kind).to(gl.float32)
            out = activate(gates, ups, FORMULA, True, ALPHA, BETA, LIMIT, False)
            gl.store(out_ptr + slot.to(gl.int64) * I + first + own, out.to(kind), mask=here)


@gluon.jit
def _multiply_down(
    bufs, codes, scales, full, empty, x_ptr, sb_ptr, weights_ptr, residual_ptr, residual_weight_ptr, ids_ptr, map_ptr,
    out_ptr, tiles, slots, rows, I, stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk, stride_wk, stride_xk,
    PDL: gl.constexpr, SLOTS: gl.constexpr, SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr, BIAS: gl.constexpr, MAX: gl.constexpr,
    NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = 16 * WARPS
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    LN: gl.constexpr = gl.SliceLayout(0, L)
    SEGS: gl.constexpr = ROWS // BOX
    kind: gl.constexpr = out_ptr.dtype.element_ty
    O: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    if PDL:
        gdc_wait()
    segs = I // 128
    in_box = gl.arange(0, M, layout=LM) % BOX
    seg_row = gl.arange(0, M, layout=LM) // BOX
    own = gl.arange(0, BOX, layout=O)
    here = own < rows
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = tile * rows
        total = gl.zeros((BOX,), gl.float32, O)
        at = gl.where(in_box < rows, first + in_box, first)
        for batch in range(0, slots, SLOTS):
            if tile == gl.program_id(0) or slots > SLOTS:
                barrier()  # the products of the batch before have been read
                _quantize(
                    x_ptr, codes._reinterpret(codes.dtype, [SLOTS * SEGS_X, 128], codes.layout),
                    scales._reinterpret(gl.float32, [SLOTS * SEGS_X], scales.layout), batch, slots, I,
                    SLOTS, SEGS_X, GROUP, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, WARPS,
                )  # fmt: skip
                fence_async_shared()
                barrier()
            for slot in range(batch, min(batch + SLOTS, slots)):
                e = _expert(ids_ptr, map_ptr, slot, stride_ik, num_mapped, E)
                if e >= 0:
                    acc = gl.zeros((M, 8), gl.float32, L)
                    sb_row = sb_ptr + e.to(gl.int64) * stride_sbe
                    base = (slot - batch) * SEGS_X
                    for k in range(0, segs, SEGS):
                        s = turn % STAGES
                        for i in gl.static_range(ROWS // M):
                            seg = k + i * (M // BOX)
                            place = gl.minimum((base + seg) // 8, SLOTS * SEGS_X // 8 - 1)
                            tile_scales = scales.index(place).load(LN)
                            factor = None
                            if GROUP > 0:
                                column = gl.minimum(seg + seg_row, segs - 1).to(gl.int64) * stride_sbk
                                factor = gl.load(sb_row + (at // BLOCK_ROWS).to(gl.int64) * stride_sbn + column)
                            if i == 0:
                                mbarrier.wait(full.index(s), (turn // STAGES) & 1)
                            product = warpgroup_mma(
                                bufs.index(s).slice(i * M, M), codes.index(place).permute((1, 0)),
                                gl.zeros((M, 8), gl.float32, L), use_acc=False, is_async=True,
                            )  # fmt: skip
                            product = warpgroup_mma_wait(0, deps=[product])
                            acc = _picked(acc, product, factor, tile_scales, base + seg, base + segs, M, BOX, L)
                        mbarrier.arrive(empty.index(s), count=1)
                        turn += 1
                    value = gl.convert_layout(gl.sum(gl.sum(acc, axis=1).reshape((M // BOX, BOX)), axis=0), O)
                    if GROUP < 0:
                        channel = first + gl.where(here, own, 0)
                        if BLOCK_ROWS < 0:
                            channel = channel * 0
                        value = value * gl.load(sb_row + channel.to(gl.int64) * stride_sbn)
                    total += value.to(kind).to(gl.float32) * gl.load(weights_ptr + slot * stride_wk)
        if residual_ptr is not None:
            added = gl.load(residual_ptr + (first + own).to(gl.int64) * stride_xk, mask=here, other=0.0).to(gl.float32)
            if residual_weight_ptr is not None:
                added = added * gl.load(residual_weight_ptr)
            total += added
        gl.store(out_ptr + first + own, total.to(kind), mask=here)


@gluon.jit
def _ring(dtype: gl.constexpr, layout: gl.constexpr, STAGES: gl.constexpr):
    bufs = gl.allocate_shared_memory(dtype, [STAGES, ROWS, 128], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return bufs, full, empty


@gluon.jit(do_not_specialize=["E", "num_mapped", "per_slot", "tiles", "stride_ik"])
def up_kernel(
    desc, x_ptr, sb_ptr, ids_ptr, map_ptr, out_ptr, tiles, per_slot, rows, I, K, stride_ik, num_mapped, E, stride_sbe,
    stride_sbn, stride_sbk,
    PDL: gl.constexpr, SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    FORMULA: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr, QMAX: gl.constexpr,
    MANTISSA: gl.constexpr, BIAS: gl.constexpr, MAX: gl.constexpr, NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles are `rows` gates and ups of a slot. The next kernel may start once this one knows its ids: it reads them
    before this one ends."""
    P: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    bufs, full, empty = _ring(desc.dtype, P, STAGES)
    codes = gl.allocate_shared_memory(desc.dtype, [SEGS_X // 8, 8, 128], P)
    scales = gl.allocate_shared_memory(gl.float32, [SEGS_X // 8, 8], S)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    gl.warp_specialize([
            (_multiply_up, (
                bufs, codes, scales, full, empty, x_ptr, sb_ptr, ids_ptr, map_ptr, out_ptr, tiles, per_slot, rows, I, K,
                stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk,
                SEGS_X, BOX, GROUP, BLOCK_ROWS, FORMULA, ALPHA, BETA, LIMIT, QMAX, MANTISSA, BIAS, MAX, NAN_CODE,
                HARDWARE, STAGES, WARPS,
            )),
            (_fetch_up, (
                desc, bufs, full, empty, ids_ptr, map_ptr, tiles, per_slot, K, stride_ik, num_mapped, E, BOX, STAGES,
            )),
        ], [4], [24])  # fmt: skip


@gluon.jit(do_not_specialize=["E", "num_mapped", "slots", "tiles", "stride_ik", "stride_wk"])
def down_kernel(
    desc, x_ptr, sb_ptr, weights_ptr, residual_ptr, residual_weight_ptr, ids_ptr, map_ptr, out_ptr, tiles, slots, rows,
    I, stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk, stride_wk, stride_xk,
    PDL: gl.constexpr, SLOTS: gl.constexpr, SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr, BIAS: gl.constexpr, MAX: gl.constexpr,
    NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Tiles are `rows` columns of the result. The rows in x_ptr are the work of the kernel before; ids are older."""
    P: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    bufs, full, empty = _ring(desc.dtype, P, STAGES)
    codes = gl.allocate_shared_memory(desc.dtype, [SLOTS * SEGS_X // 8, 8, 128], P)
    scales = gl.allocate_shared_memory(gl.float32, [SLOTS * SEGS_X // 8, 8], S)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    gl.warp_specialize([
            (_multiply_down, (
                bufs, codes, scales, full, empty, x_ptr, sb_ptr, weights_ptr, residual_ptr, residual_weight_ptr,
                ids_ptr, map_ptr, out_ptr, tiles, slots, rows, I, stride_ik, num_mapped, E, stride_sbe, stride_sbn,
                stride_sbk, stride_wk, stride_xk,
                PDL, SLOTS, SEGS_X, BOX, GROUP, BLOCK_ROWS, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, STAGES,
                WARPS,
            )),
            (_fetch_down, (
                desc, bufs, full, empty, ids_ptr, map_ptr, tiles, slots, I, stride_ik, num_mapped, E, BOX, STAGES,
            )),
        ], [4], [24])  # fmt: skip
