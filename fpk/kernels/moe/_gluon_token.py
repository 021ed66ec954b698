"""A whole expert layer of one token for Hopper, in two Gluon kernels: weights never stop coming.

`up_kernel` quantizes the token, multiplies it by its experts' gates and ups and activates; `down_kernel` quantizes the
activated rows, multiplies them and sums over the experts. One warpgroup fetches by TMA what its program will need, as
far ahead as its buffers go, whatever the others do: `down_kernel` starts beside `up_kernel`, two programs share a
multiprocessor, and its buffers are full when the first one ends.

Products are those of the tensor core, with weights as the matrix of 128 rows: fetched boxes are R rows by 128 columns
(segments), several segments below each other. The other matrix has 8 columns, which are 8 segments of the token: of a
product of a segment of weights only the column of the same segment means something. So the token needs no padding in
shared memory, and every product is picked, scaled and summed in fp32.
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
from fpk.kernels.moe._gluon_parts import barrier, tma_load
from fpk.kernels.moe._token_parts import (
    ROWS,
    columns,
    experts_of_slots,
    next_slot,
    of_slot,
    own_columns,
    quantize_rows,
    ring,
    seen_as,
)


@gluon.jit
def _fetch_up(
    desc, bufs, full, empty, ids_ptr, map_ptr, tiles, per_slot, slots, K, stride_ik, num_mapped, E,
    BOX: gl.constexpr, STAGES: gl.constexpr, MAX_SLOTS: gl.constexpr,
):  # fmt: skip
    SEGS: gl.constexpr = ROWS // (2 * BOX)
    experts = experts_of_slots(ids_ptr, map_ptr, slots, stride_ik, num_mapped, E, MAX_SLOTS, 4)
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        e = of_slot(experts, tile // per_slot)
        if e >= 0:
            for k in range(0, K // 128, SEGS):
                s = turn % STAGES
                mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
                bar = full.index(s)
                mbarrier.expect(bar, desc.block_type.nbytes)
                box = seen_as(bufs.index(s), [2, 1, SEGS, BOX, 128], 5)
                tma_load(desc, [2 * e, tile % per_slot, k, 0, 0], bar, box)
                turn += 1


@gluon.jit
def _fetch_down(
    desc, bufs, full, empty, ids_ptr, map_ptr, tiles, slots, I, stride_ik, num_mapped, E,
    BOX: gl.constexpr, STAGES: gl.constexpr, MAX_SLOTS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    SEGS: gl.constexpr = HELD // BOX
    experts = experts_of_slots(ids_ptr, map_ptr, slots, stride_ik, num_mapped, E, MAX_SLOTS, 4)
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        for slot in range(slots):
            e = of_slot(experts, slot)
            if e >= 0:
                for k in range(0, I // 128, SEGS):
                    s = turn % STAGES
                    mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
                    bar = full.index(s)
                    mbarrier.expect(bar, desc.block_type.nbytes)
                    box = seen_as(bufs.index(s), [1, SEGS, BOX, 128], 4)
                    tma_load(desc, [e * tiles + tile, k, 0, 0], bar, box)
                    turn += 1


@gluon.jit
def _factors_up(
    sb_ptr, scales_ptr, e, rows, I, seg, segs, stride_sbe, stride_sbn, stride_sbk, BLOCK_ROWS: gl.constexpr
):
    """Scales of gates and ups in these rows and segments, times those of the token."""
    seg = gl.minimum(seg, segs - 1)
    ptrs = sb_ptr + gl.maximum(e, 0).to(gl.int64) * stride_sbe + seg * stride_sbk
    own = gl.load(scales_ptr + seg)
    gate = gl.load(ptrs + (rows // BLOCK_ROWS) * stride_sbn)
    up = gl.load(ptrs + ((rows + I) // BLOCK_ROWS) * stride_sbn)
    return gate * own, up * own


@gluon.jit
def _multiply_up(
    bufs, codes, full, empty, x_ptr, scratch_ptr, sb_ptr, ids_ptr, map_ptr, out_ptr, tiles, per_slot, slots, rows, I, K,
    stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk,
    SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr, BLOCK_ROWS: gl.constexpr, FORMULA: gl.constexpr,
    ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr,
    BIAS: gl.constexpr, MAX: gl.constexpr, NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr, STAGES: gl.constexpr,
    MAX_SLOTS: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 8, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    O: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    SEGS: gl.constexpr = ROWS // (2 * BOX)
    kind: gl.constexpr = out_ptr.dtype.element_ty
    scales_ptr = scratch_ptr + gl.program_id(0) * SEGS_X
    experts = experts_of_slots(ids_ptr, map_ptr, slots, stride_ik, num_mapped, E, MAX_SLOTS, 8)
    quantize_rows(
        x_ptr, seen_as(codes, [SEGS_X, 128], 2), scales_ptr, 0, 1, K, 1, SEGS_X, GROUP,
        QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE,
    )  # fmt: skip
    fence_async_shared()
    barrier()
    segs = K // 128
    place = gl.arange(0, 128, layout=LM)
    in_box = place % BOX
    in_box = gl.where(in_box < rows, in_box, 0)
    own = gl.arange(0, BOX, layout=O)
    here = own < rows
    begin = gl.program_id(0)
    ones = gl.full((128,), 1.0, gl.float32, LM)
    gate_factor = ones
    up_factor = ones
    if GROUP > 0:
        gate_factor, up_factor = _factors_up(
            sb_ptr, scales_ptr, of_slot(experts, begin // per_slot), begin % per_slot * rows + in_box, I,
            place // BOX, segs, stride_sbe, stride_sbn, stride_sbk, BLOCK_ROWS,
        )  # fmt: skip
    turn = 0
    for tile in range(begin, tiles, gl.num_programs(0)):
        slot = tile // per_slot
        first = tile % per_slot * rows
        e = of_slot(experts, slot)
        after = gl.minimum(tile + gl.num_programs(0), tiles - 1)
        if GROUP < 0:
            token_scale = gl.load(scales_ptr)
            channel = first + gl.where(here, own, 0)
            sb_row = sb_ptr + gl.maximum(e, 0).to(gl.int64) * stride_sbe
            if BLOCK_ROWS < 0:
                channel = channel * 0
            gate_scale = token_scale * gl.load(sb_row + channel * stride_sbn)
            if BLOCK_ROWS > 0:
                channel = channel + I
            up_scale = token_scale * gl.load(sb_row + channel * stride_sbn)
        if e >= 0:
            gate = gl.zeros((128, 8), gl.float32, L)
            up = gl.zeros((128, 8), gl.float32, L)
            for k in range(0, segs, SEGS):
                s = turn % STAGES
                mbarrier.wait(full.index(s), (turn // STAGES) & 1)
                b = codes.index(k // 8).permute((1, 0))
                zero = gl.zeros((128, 8), gl.float32, L)
                g = warpgroup_mma(bufs.index(s).slice(0, 128), b, zero, use_acc=False, is_async=True)
                u = warpgroup_mma(bufs.index(s).slice(128, 128), b, zero, use_acc=False, is_async=True)
                next_gate = gate_factor
                next_up = up_factor
                if GROUP > 0:  # what the step after this one needs, on its way meanwhile
                    last = k + SEGS >= segs
                    next_tile = gl.where(last, after, tile)
                    next_gate, next_up = _factors_up(
                        sb_ptr, scales_ptr, of_slot(experts, next_tile // per_slot),
                        next_tile % per_slot * rows + in_box, I, gl.where(last, 0, k + SEGS) + place // BOX, segs,
                        stride_sbe, stride_sbn, stride_sbk, BLOCK_ROWS,
                    )  # fmt: skip
                g, u = warpgroup_mma_wait(0, deps=[g, u])
                mbarrier.arrive(empty.index(s), count=1)
                gate += own_columns(g, gate_factor, k, segs, BOX)
                up += own_columns(u, up_factor, k, segs, BOX)
                gate_factor = next_gate
                up_factor = next_up
                turn += 1
            gates = columns(gate, BOX, O)
            ups = columns(up, BOX, O)
            if GROUP < 0:
                gates = gates * gate_scale
                ups = ups * up_scale
            gates = gates.to(kind).to(gl.float32)
            ups = ups.to(kind).to(gl.float32)
            out = activate(gates, ups, FORMULA, True, ALPHA, BETA, LIMIT, False)
            gl.store(out_ptr + slot * I + first + own, out.to(kind), mask=here)
        elif GROUP > 0:
            gate_factor, up_factor = _factors_up(
                sb_ptr, scales_ptr, of_slot(experts, after // per_slot), after % per_slot * rows + in_box, I,
                place // BOX, segs, stride_sbe, stride_sbn, stride_sbk, BLOCK_ROWS,
            )  # fmt: skip


@gluon.jit
def _factor_down(
    sb_ptr, scales_ptr, experts, weights, slot, slots, at, seg, segs, in_batch, stride_sbe, stride_sbn, stride_sbk,
    GROUP: gl.constexpr, BLOCK_ROWS: gl.constexpr, SEGS_X: gl.constexpr,
):  # fmt: skip
    """Scales of these columns and segments, times those of the row, times the router's weight."""
    slot = gl.minimum(slot, slots - 1)
    seg = gl.minimum(seg, segs - 1)
    ptrs = sb_ptr + gl.maximum(of_slot(experts, slot), 0).to(gl.int64) * stride_sbe
    if BLOCK_ROWS > 0:
        ptrs = ptrs + (at // BLOCK_ROWS) * stride_sbn
    if GROUP > 0:
        ptrs = ptrs + seg * stride_sbk
    else:
        ptrs = ptrs + seg * 0
    return gl.load(ptrs) * gl.load(scales_ptr + gl.maximum(slot - in_batch, 0) * SEGS_X + seg) * of_slot(weights, slot)


@gluon.jit
def _multiply_down(
    bufs, codes, full, empty, x_ptr, scratch_ptr, sb_ptr, weights_ptr, residual_ptr, residual_weight_ptr, ids_ptr,
    map_ptr, out_ptr, tiles, slots, rows, I, stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk, stride_wk,
    stride_xk,
    PDL: gl.constexpr, SLOTS: gl.constexpr, SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr, BIAS: gl.constexpr, MAX: gl.constexpr,
    NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr, STAGES: gl.constexpr, MAX_SLOTS: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[8, 1], instr_shape=[16, 8, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    O: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    SEGS: gl.constexpr = HELD // BOX
    HALF: gl.constexpr = 128 // BOX
    TWO: gl.constexpr = HELD > 128  # products a turn
    LAST: gl.constexpr = SLOTS * SEGS_X // 8 - 1
    kind: gl.constexpr = out_ptr.dtype.element_ty
    scales_ptr = scratch_ptr + gl.program_id(0) * SLOTS * SEGS_X
    experts = experts_of_slots(ids_ptr, map_ptr, slots, stride_ik, num_mapped, E, MAX_SLOTS, 8)
    if PDL:
        gdc_wait()
    j = gl.arange(0, MAX_SLOTS, layout=O)
    weights = gl.load(weights_ptr + j * stride_wk, mask=j < slots, other=0.0)
    segs = I // 128
    place = gl.arange(0, 128, layout=LM)
    in_box = place % BOX
    in_box = gl.where(in_box < rows, in_box, 0)
    own = gl.arange(0, BOX, layout=O)
    here = own < rows
    turn = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first = tile * rows
        at = first + in_box
        acc = gl.zeros((128, 8), gl.float32, L)
        for batch in range(0, slots, SLOTS):
            if tile == gl.program_id(0) or slots > SLOTS:
                barrier()  # what the batch before left has been read
                quantize_rows(
                    x_ptr, seen_as(codes, [SLOTS * SEGS_X, 128], 2), scales_ptr, batch,
                    slots, I, SLOTS, SEGS_X, GROUP, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE,
                )  # fmt: skip
                fence_async_shared()
                barrier()
            end = gl.minimum(batch + SLOTS, slots)
            slot = next_slot(experts, batch)
            seg = place // BOX
            factor_0 = _factor_down(
                sb_ptr, scales_ptr, experts, weights, slot, end, at, seg, segs, batch, stride_sbe, stride_sbn,
                stride_sbk, GROUP, BLOCK_ROWS, SEGS_X,
            )  # fmt: skip
            factor_1 = factor_0
            if GROUP > 0 and TWO:
                factor_1 = _factor_down(
                    sb_ptr, scales_ptr, experts, weights, slot, end, at, seg + HALF, segs, batch, stride_sbe,
                    stride_sbn, stride_sbk, GROUP, BLOCK_ROWS, SEGS_X,
                )  # fmt: skip
            while slot < end:
                after = next_slot(experts, slot + 1)
                base = (slot - batch) * SEGS_X
                for k in range(0, segs, SEGS):
                    s = turn % STAGES
                    mbarrier.wait(full.index(s), (turn // STAGES) & 1)
                    zero = gl.zeros((128, 8), gl.float32, L)
                    b_0 = codes.index((base + k) // 8).permute((1, 0))
                    p_0 = warpgroup_mma(bufs.index(s).slice(0, 128), b_0, zero, use_acc=False, is_async=True)
                    p_1 = p_0
                    if TWO:
                        b_1 = codes.index(gl.minimum((base + k + HALF) // 8, LAST)).permute((1, 0))
                        p_1 = warpgroup_mma(bufs.index(s).slice(128, 128), b_1, zero, use_acc=False, is_async=True)
                    last = k + SEGS >= segs
                    next_0 = factor_0
                    next_1 = factor_1
                    if GROUP > 0:  # what the step after this one needs, on its way meanwhile
                        coming = gl.where(last, after, slot)
                        next_seg = seg + gl.where(last, 0, k + SEGS)
                        next_0 = _factor_down(
                            sb_ptr, scales_ptr, experts, weights, coming, end, at, next_seg, segs, batch,
                            stride_sbe, stride_sbn, stride_sbk, GROUP, BLOCK_ROWS, SEGS_X,
                        )  # fmt: skip
                        if TWO:
                            next_1 = _factor_down(
                                sb_ptr, scales_ptr, experts, weights, coming, end, at, next_seg + HALF, segs, batch,
                                stride_sbe, stride_sbn, stride_sbk, GROUP, BLOCK_ROWS, SEGS_X,
                            )  # fmt: skip
                    elif last:
                        next_0 = _factor_down(
                            sb_ptr, scales_ptr, experts, weights, after, end, at, seg, segs, batch, stride_sbe,
                            stride_sbn, stride_sbk, GROUP, BLOCK_ROWS, SEGS_X,
                        )  # fmt: skip
                        next_1 = next_0
                    if TWO:
                        p_0, p_1 = warpgroup_mma_wait(0, deps=[p_0, p_1])
                    else:
                        p_0 = warpgroup_mma_wait(0, deps=[p_0])
                    mbarrier.arrive(empty.index(s), count=1)
                    acc += own_columns(p_0, factor_0, base + k, base + segs, BOX)
                    if TWO:
                        acc += own_columns(p_1, factor_1, base + k + HALF, base + segs, BOX)
                    factor_0 = next_0
                    factor_1 = next_1
                    turn += 1
                slot = after
        total = columns(acc, BOX, O)
        if residual_ptr is not None:
            added = gl.load(residual_ptr + (first + own).to(gl.int64) * stride_xk, mask=here, other=0.0).to(gl.float32)
            if residual_weight_ptr is not None:
                added = added * gl.load(residual_weight_ptr)
            total += added
        gl.store(out_ptr + first + own, total.to(kind), mask=here)


@gluon.jit(do_not_specialize=["E", "num_mapped", "per_slot", "tiles", "slots", "stride_ik"])
def up_kernel(
    desc, x_ptr, scratch_ptr, sb_ptr, ids_ptr, map_ptr, out_ptr, tiles, per_slot, slots, rows, I, K, stride_ik,
    num_mapped, E, stride_sbe, stride_sbn, stride_sbk,
    PDL: gl.constexpr, SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr, BLOCK_ROWS: gl.constexpr,
    FORMULA: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr, QMAX: gl.constexpr,
    MANTISSA: gl.constexpr, BIAS: gl.constexpr, MAX: gl.constexpr, NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr,
    STAGES: gl.constexpr, MAX_SLOTS: gl.constexpr,
):  # fmt: skip
    """Tiles are `rows` gates and ups of a slot. The next kernel may start once this one knows its ids: it reads them
    before this one ends."""
    P: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    bufs, full, empty = ring(desc.dtype, P, STAGES, ROWS)
    codes = gl.allocate_shared_memory(desc.dtype, [SEGS_X // 8, 8, 128], P)
    fence_async_shared()
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    gl.warp_specialize([
            (_multiply_up, (
                bufs, codes, full, empty, x_ptr, scratch_ptr, sb_ptr, ids_ptr, map_ptr, out_ptr, tiles, per_slot, slots,
                rows, I, K, stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk,
                SEGS_X, BOX, GROUP, BLOCK_ROWS, FORMULA, ALPHA, BETA, LIMIT, QMAX, MANTISSA, BIAS, MAX, NAN_CODE,
                HARDWARE, STAGES, MAX_SLOTS,
            )),
            (_fetch_up, (
                desc, bufs, full, empty, ids_ptr, map_ptr, tiles, per_slot, slots, K, stride_ik, num_mapped, E, BOX,
                STAGES, MAX_SLOTS,
            )),
        ], [4], [24])  # fmt: skip


@gluon.jit(do_not_specialize=["E", "num_mapped", "slots", "tiles", "stride_ik", "stride_wk"])
def down_kernel(
    desc, x_ptr, scratch_ptr, sb_ptr, weights_ptr, residual_ptr, residual_weight_ptr, ids_ptr, map_ptr, out_ptr, tiles,
    slots, rows, I, stride_ik, num_mapped, E, stride_sbe, stride_sbn, stride_sbk, stride_wk, stride_xk,
    PDL: gl.constexpr, SLOTS: gl.constexpr, SEGS_X: gl.constexpr, BOX: gl.constexpr, GROUP: gl.constexpr,
    BLOCK_ROWS: gl.constexpr, QMAX: gl.constexpr, MANTISSA: gl.constexpr, BIAS: gl.constexpr, MAX: gl.constexpr,
    NAN_CODE: gl.constexpr, HARDWARE: gl.constexpr, STAGES: gl.constexpr, MAX_SLOTS: gl.constexpr,
    HELD: gl.constexpr,
):  # fmt: skip
    """Tiles are `rows` columns of the result. The rows in x_ptr are the work of the kernel before; ids are older."""
    P: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    bufs, full, empty = ring(desc.dtype, P, STAGES, HELD)
    codes = gl.allocate_shared_memory(desc.dtype, [SLOTS * SEGS_X // 8, 8, 128], P)
    fence_async_shared()
    if PDL:
        gdc_launch_dependents()
    gl.warp_specialize([
            (_multiply_down, (
                bufs, codes, full, empty, x_ptr, scratch_ptr, sb_ptr, weights_ptr, residual_ptr, residual_weight_ptr,
                ids_ptr, map_ptr, out_ptr, tiles, slots, rows, I, stride_ik, num_mapped, E, stride_sbe, stride_sbn,
                stride_sbk, stride_wk, stride_xk,
                PDL, SLOTS, SEGS_X, BOX, GROUP, BLOCK_ROWS, QMAX, MANTISSA, BIAS, MAX, NAN_CODE, HARDWARE, STAGES,
                MAX_SLOTS, HELD,
            )),
            (_fetch_down, (
                desc, bufs, full, empty, ids_ptr, map_ptr, tiles, slots, I, stride_ik, num_mapped, E, BOX, STAGES,
                MAX_SLOTS, HELD,
            )),
        ], [4], [24])  # fmt: skip
