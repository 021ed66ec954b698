"""Device code of mm_shuffled for sm90: units of packed codes go from shared memory to the registers that wgmma wants.

What a thread reads in 16 neighbouring bytes are the codes of its own places in the left operand, so that decoding moves
no value to another thread. Every program takes the same number of consecutive steps (rows of units times 128 to 512
columns); where it holds only part of a row's K it leaves a partial sum, and the last of those that share the row adds
them up, in order, so that the result does not depend on timing. Its ticket counter is zero before and after.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from fpk.kernels.gemm._gluon import TensorDescriptor, barrier

RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
OF_TRITON = ("RENAMED",)  # no part of a kernel's hash


def flat_descriptor(lines: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (lines, 64) int32 that lie in shared memory as they do outside, by tiles of `rows` lines."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor.from_tensor(lines, [rows, 64], layout)


def rows_descriptor(lines: Tensor, units_n: int, rows: int) -> TensorDescriptor:
    """The same of a plane as (rows of units, lines, 64), by tiles of `rows` lines of one row of units.

    Behind a row's last unit it gives zeros: the next row's scales may be NaN, which activations of zero do not remove.
    """
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)
    return TensorDescriptor.from_tensor(lines.view(units_n, -1, 64), [1, rows, 64], layout)


@gluon.constexpr_function
def _flat_layout():
    """16 neighbouring bytes a thread."""
    return gl.BlockedLayout([16], [32], [4], [0])


@gluon.constexpr_function
def _half_layout(GROUP, FP8):
    """A decoded half of a unit, (64, 64 / GROUP, GROUP), as the registers of wgmma's left operand."""
    group = [[0, 0, 16], [0, 1, 0]] if GROUP == 32 else [[0, 1, 0], [0, 2, 0]]
    if FP8:
        registers, lanes = [[0, 0, 1], [0, 0, 2], [8, 0, 0], *group], [[0, 0, 4], [0, 0, 8]]
    else:
        registers, lanes = [[0, 0, 1], [8, 0, 0], [0, 0, 8], *group], [[0, 0, 2], [0, 0, 4]]
    rows = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes + rows, [[16, 0, 0], [32, 0, 0]], [], [64, 64 // GROUP, GROUP])


@gluon.constexpr_function
def _apart_layout():
    """The same for bf16, dimensions taken apart: rows 16, 8, 1; columns 32, 16, 8, 2, 1."""
    e = lambda d, v=1: [v if i == d else 0 for i in range(8)]  # noqa: E731
    registers, lanes = [e(7), e(1), e(5), e(4), e(3)], [e(6), e(6, 2), e(2), e(2, 2), e(2, 4)]
    return gl.DistributedLinearLayout(registers, lanes, [e(0), e(0, 2)], [], [4, 2, 8, 2, 2, 2, 4, 2])


@gluon.constexpr_function
def _scale_layout(GROUPS):
    """Bytes of a unit's scales: rows 16, 1; half, group, row 8."""
    n = 4 * GROUPS
    registers = [[1 << i] for i in range(n.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[0], [0], [n], [2 * n], [4 * n]], [[8 * n], [16 * n]], [], [64 * 2 * GROUPS]
    )  # fmt: skip


@gluon.constexpr_function
def _second_layout():
    """Words of a unit's second plane: columns 32; rows 16, 1; columns 2, 16."""
    return gl.DistributedLinearLayout([[1], [256]], [[2], [4], [8], [16], [32]], [[64], [128]], [], [512])


@gluon.jit
def _flat(buffer, DTYPE: gl.constexpr, SIZE: gl.constexpr):
    """A buffer as SIZE elements in a row."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if RENAMED:
        view = buffer.reinterpret(DTYPE, [SIZE], LAYOUT)
    else:
        view = buffer._reinterpret(DTYPE, [SIZE], LAYOUT)
    return view


@gluon.jit
def _unit(buffer, i, UNITS: gl.constexpr, LINES: gl.constexpr):
    """The lines of one of UNITS units in a buffer."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if RENAMED:
        view = buffer.reinterpret(gl.int32, [UNITS, LINES, 64], LAYOUT)
    else:
        view = buffer._reinterpret(gl.int32, [UNITS, LINES, 64], LAYOUT)
    return view.index(i)


@gluon.jit
def _decode(
    codes, second, stored, FP8: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The two halves of a unit in shared memory as left operands; every conversion below renames registers."""
    GROUPS: gl.constexpr = 64 // GROUP
    HALF: gl.constexpr = _half_layout(GROUP, FP8)
    w = _flat(codes, gl.int8, 4096).load(_flat_layout())
    m = _flat(stored, gl.uint8, 128 * GROUPS).load(_scale_layout(GROUPS)).to(gl.int32)
    m = m.reshape([4, 8, 2, GROUPS, 2]).permute([0, 4, 1, 3, 2]).reshape([64, GROUPS, 2])
    low, high = gl.split(m)
    low = gl.convert_layout(low, gl.SliceLayout(2, HALF), assert_trivial=True).expand_dims(2)
    high = gl.convert_layout(high, gl.SliceLayout(2, HALF), assert_trivial=True).expand_dims(2)
    if FP8:
        w = w.reshape([2, 4, 8, 4, 2, 2, 4]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([64, GROUPS, GROUP])
        w = gl.convert_layout(w, HALF, assert_trivial=True)
        low_0, _ = gl.broadcast(low * 0x08080800 + 0x14100800, w)
        low_4, _ = gl.broadcast(low * 0x08080808 + 0x24201C18, w)
        high_0, _ = gl.broadcast(high * 0x08080800 + 0x14100800, w)
        high_4, _ = gl.broadcast(high * 0x08080808 + 0x24201C18, w)
        first, last = gl.inline_asm_elementwise(
            ASM, CONSTRAINTS, [w, low_0, low_4, high_0, high_4], dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True,
            pack=PACK,
        )  # fmt: skip
    else:
        APART: gl.constexpr = _apart_layout()
        if GROUP == 16:  # e4m3 with an exponent of five bits
            low, high = low * 0x00100010 + 0x72807280, high * 0x00100010 + 0x72807280
        else:
            low, high = low * 0x00800080, high * 0x00800080
        apart = w.reshape([2, 4, 8, 4, 2, 2, 2, 2]).permute([1, 6, 2, 0, 4, 5, 3, 7])
        apart = gl.convert_layout(apart, APART, assert_trivial=True)
        w = gl.convert_layout(apart.reshape([64, GROUPS, GROUP]), HALF, assert_trivial=True)
        low, _ = gl.broadcast(low, w)
        high, _ = gl.broadcast(high, w)
        if SIX:
            v = _flat(second, gl.int32, 512).load(_second_layout())
            v = v.reshape([2, 4, 8, 4, 2]).permute([1, 2, 0, 4, 3])
            LESS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(5, gl.SliceLayout(7, APART)))
            v = gl.convert_layout(v, LESS, assert_trivial=True).expand_dims(1).expand_dims(5).expand_dims(7)
            v, _ = gl.broadcast(v, apart)
            v = gl.convert_layout(v.reshape([64, GROUPS, GROUP]), HALF, assert_trivial=True)
            first, last = gl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [w, v, low, high], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=PACK
            )
        else:
            first, last = gl.inline_asm_elementwise(
                ASM, CONSTRAINTS, [w, low, high], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=PACK
            )
    first = gl.convert_layout(first.reshape([64, 64]), LAYOUT, assert_trivial=True)
    return first, gl.convert_layout(last.reshape([64, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply_unit(
    acc, codes, seconds, stored, tiles, at, slot, i, FP8: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, UNITS: gl.constexpr, LINES: gl.constexpr,
    BLOCK_M: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """acc plus the product of unit i of a step. FP8 sums of 128 columns leave the tensor core; bf16 products are on
    their way when this returns."""
    SUMS: gl.constexpr = LEFT.parent
    unit = _unit(codes.index(at), i, UNITS, 16)
    scale = _unit(stored.index(at), i, UNITS, LINES)
    second = unit
    if SIX:
        second = _unit(seconds.index(at), i, UNITS, 8)
    first, last = _decode(unit, second, scale, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, LEFT)
    right = slot * 2 * UNITS + 2 * i
    if FP8:
        zero = gl.zeros((64, BLOCK_M), gl.float32, SUMS)
        part = warpgroup_mma(first, tiles.index(right).permute((1, 0)), zero, use_acc=False, is_async=True)
        part = warpgroup_mma(last, tiles.index(right + 1).permute((1, 0)), part, is_async=True)
        acc += warpgroup_mma_wait(0, deps=[part])
    else:
        acc = warpgroup_mma(first, tiles.index(right).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(last, tiles.index(right + 1).permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def _multiply(
    acc, codes, seconds, stored, tiles, at, slot, FP8: gl.constexpr, GROUP: gl.constexpr, SIX: gl.constexpr,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, PACK: gl.constexpr, UNITS: gl.constexpr, LINES: gl.constexpr,
    BLOCK_M: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """acc plus the products of all units of a step."""
    for i in gl.static_range(UNITS):
        acc = _multiply_unit(
            acc, codes, seconds, stored, tiles, at, slot, i, FP8, GROUP, SIX, ASM, CONSTRAINTS, PACK, UNITS, LINES,
            BLOCK_M, LEFT,
        )  # fmt: skip
    return acc


@gluon.jit
def _opaque(x):
    """Keeps LLVM from moving the arithmetic on this in front of the main loop, where it would hold registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pieces(acc, COLUMNS: gl.constexpr):
    """A tile in pieces of COLUMNS columns."""
    HALF: gl.constexpr = acc.shape[1] // 2
    if acc.shape[1] == COLUMNS:
        pieces = (acc,)
    else:
        few, more = acc.reshape((64, 2, HALF)).permute((0, 2, 1)).split()
        pieces = _pieces(few, COLUMNS) + _pieces(more, COLUMNS)
    return pieces


@gluon.jit
def _in_a_row(x):
    """A tile of sums as elements in a row, of which a thread has four neighbours: registers are renamed."""
    COLUMNS: gl.constexpr = x.shape[1]
    row = x.reshape((4, 2, 8, COLUMNS // 8, 4, 2)).permute((3, 0, 2, 4, 1, 5)).reshape((64 * COLUMNS,))
    return gl.convert_layout(row, gl.BlockedLayout([4], [32], [4], [0]), assert_trivial=True)


@gluon.jit
def _as_tile(row, LAYOUT: gl.constexpr):
    """The inverse of _in_a_row."""
    COLUMNS: gl.constexpr = row.shape[0] // 64
    x = row.reshape((COLUMNS // 8, 4, 8, 4, 2, 2)).permute((1, 4, 2, 0, 3, 5)).reshape((64, COLUMNS))
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _finish(
    acc, out_ptr, parts_ptr, tickets_ptr, row_scale_ptr, scale_a_ptr, bias_ptr, M, N, stride_om, stride_sa,
    whole, m, tile, tiles_n, program, first, last, programs, ROWS: gl.constexpr, R: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    """Store the tile of a row of units, or this program's part of it; the last of `first`..`last` adds the parts up."""
    PIECE: gl.constexpr = BLOCK_M if BLOCK_M <= 64 else 32
    STEP: gl.constexpr = ROWS * (64 * BLOCK_M)
    pieces = _pieces(acc, PIECE)
    sums = pieces[0]
    layout: gl.constexpr = sums.type.layout
    offs_n = _opaque(gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))
    offs_m = _opaque(gl.arange(0, PIECE, layout=gl.SliceLayout(0, layout)))
    inside = gl.arange(0, 64 * PIECE, layout=gl.BlockedLayout([4], [32], [4], [0])) + (_opaque(program) - program) * 4
    at_n = (tile * ROWS + R) * 64 + offs_n
    mask_n = at_n < N
    row_scale = gl.load(row_scale_ptr + at_n, mask=mask_n, other=0.0)
    ready = whole
    parts_ptr += (m * programs).to(gl.int64) * (2 * STEP) + R * (64 * BLOCK_M)
    if not whole:
        # a program leaves at most two parts: one of a tile that it does not begin (0), one of one that it does (1)
        mine = parts_ptr + (2 * program + (program == first).to(gl.int32)).to(gl.int64) * STEP
        for i in gl.static_range(BLOCK_M // PIECE):
            gl.store(mine + i * PIECE * 64 + inside, _in_a_row(pieces[i]))
        barrier()
        ticket = gl.atomic_add(tickets_ptr + (m * tiles_n + tile) * ROWS + R, 1, sem="acq_rel")
        ready = ticket == last - first
    if ready:
        for i in gl.static_range(BLOCK_M // PIECE):
            sums = pieces[i]
            if not whole:
                part = parts_ptr + (2 * first + 1).to(gl.int64) * STEP + i * PIECE * 64
                row = gl.load(part + inside, cache_modifier=".cg")
                part += STEP
                if BLOCK_M == 64:  # as many as fit are on their way; a barrier keeps LLVM from unrolling further
                    AHEAD: gl.constexpr = 4 if ROWS > 1 else 2
                    for k in range(first + 1, last + 1, AHEAD):
                        barrier()
                        more = gl.load(part + inside, cache_modifier=".cg")
                        for j in gl.static_range(1, AHEAD):
                            there = (inside >= 0) & (k + j <= last)
                            at = part + 2 * j * STEP + inside
                            more += gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
                        row += more
                        part += 2 * AHEAD * STEP
                else:  # LLVM unrolls by itself, so that four of few tokens are on their way
                    for _ in range(first, last):
                        if BLOCK_M > 64:
                            barrier()
                        row += gl.load(part + inside, cache_modifier=".cg")
                        part += 2 * STEP
                sums = _as_tile(row, layout)
            at_m = m * BLOCK_M + i * PIECE + offs_m
            mask_m = at_m < M
            sums *= row_scale[:, None]
            if scale_a_ptr is not None:
                sums *= gl.load(scale_a_ptr + at_m * stride_sa, mask=mask_m, other=0.0)[None, :]
            if bias_ptr is not None:
                sums += gl.load(bias_ptr + at_n, mask=mask_n, other=0.0).to(gl.float32)[:, None]
            ptrs = out_ptr + at_m.to(gl.int64)[None, :] * stride_om + at_n[:, None]
            gl.store(ptrs, sums.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
            if BLOCK_M > PIECE:
                barrier()  # one piece after the other, or their addresses would spill
        if not whole:
            gl.atomic_xchg(tickets_ptr + (m * tiles_n + tile) * ROWS + R, 0, sem="release")
