"""Pieces of kernels for sm90 whose scales stream through the ring, beside the operands that they belong to.

Loads, copies, barriers and turns in assembly, views of a slot, boxes of outputs, descriptors of lines. Shared memory is
named by bytes from its start, as in _cluster. Other than there, one warp loads, by the thread that `elect.sync` picks,
and loads know lines (tensors of one dimension) as well.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fpk.kernels.gemm._gluon import tma_store
from fpk.kernels.gemm._gluon_group import bias_of


@gluon.constexpr_function
def box_rows(share: int) -> int:
    """Rows of the boxes in which so many rows come: a power of two, at most 128."""
    return min(share & -share, 128)


@gluon.jit
def expect(at, bytes):
    """One thread of the calling warp announces so many bytes and arrives."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 a;
        elect.sync _|p, 0xffffffff;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], $2;
        mov.u32 $0, 0;
        }
        """, "=r,r,r,~{memory}", [at, bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _load_asm(kernel: str, parameter: int, many: int, line: bool) -> str:
    rank, where = (1, "{$3}") if line else (2, "{$3, $2}")
    cast = ".multicast::cluster" * (many > 1)
    return f"""
        {{
        .reg .pred p;
        .reg .b32 a, b;
        .reg .b64 d;
        .reg .b16 m;
        elect.sync _|p, 0xffffffff;
        mov.u32 a, global_smem;
        add.u32 b, a, $4;
        add.u32 a, a, $1;
        mov.b64 d, {kernel}_param_{parameter};
        cvta.param.u64 d, d;
        mov.b16 m, {(1 << many) - 1};
        @p cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{cast}
            [a], [d, {where}], [b]{", m" * (many > 1)};
        mov.u32 $0, 0;
        }}
        """


@gluon.jit
def load(
    KERNEL: gl.constexpr, PARAMETER: gl.constexpr, to, row, column, at, MANY: gl.constexpr = 1,
    LINE: gl.constexpr = False,
):  # fmt: skip
    """One thread of the calling warp loads a box of the kernel's parameter to byte `to`, told by the barrier at byte
    `at`; to that place in all MANY programs of the cluster. LINE: of a tensor of one dimension. (elect.sync: of a lane
    that the program picks by its number ptxas does not know that it is one, and makes a loop over lanes.)"""
    gl.inline_asm_elementwise(
        _load_asm(KERNEL, PARAMETER, MANY, LINE), "=r,r,r,r,r,~{memory}", [to, row, column, at],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def copy_two(to, first, second, at):
    """One thread of the calling warp copies an fp32 value to byte `to`, another one 128 bytes behind it, and arrives at
    the barrier at byte `at` once both have landed. (TMA wants places at multiples of 16 bytes, in memory as well.)"""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 a, b;
        mov.u32 a, %laneid;
        setp.eq.u32 p, a, 0;
        mov.u32 a, global_smem;
        add.u32 b, a, $4;
        add.u32 a, a, $1;
        @p cp.async.ca.shared.global [a], [$2], 4;
        @p cp.async.ca.shared.global [a + 128], [$3], 4;
        @p cp.async.mbarrier.arrive.noinc.shared::cta.b64 [b];
        mov.u32 $0, 0;
        }
        """, "=r,r,l,l,r,~{memory}", [to, first, second, at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def copy_line(at, pointers):
    """Every calling thread copies an fp32 value to bytes `at`; `tell` follows. Through L1: the values of the next steps
    lie in the same line."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        cp.async.ca.shared.global [a], [$2], 4;
        mov.u32 $0, 0;
        }
        """, "=r,r,l,~{memory}", [at, pointers], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def tell(at):
    """Every thread arrives at the barrier at byte `at` once its copies so far have landed."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [a];
        mov.u32 $0, 0;
        }
        """, "=r,r,~{memory}", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def take(at):
    """fp32 at bytes `at` of shared memory."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        ld.shared.b32 $0, [a];
        }
        """, "=r,r,~{memory}", [at], dtype=gl.int32, is_pure=False, pack=1,
    ).to(gl.float32, bitcast=True)  # fmt: skip


@gluon.jit
def wait_if(at, phase, much):
    """Wait for the barrier at byte `at`, unless `much` is 0."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred done, skip;
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        setp.eq.s32 skip, $3, 0;
        @skip bra.uni over;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [a], $2;
        @!done bra.uni again;
        over:
        mov.u32 $0, 0;
        }
        """, "=r,r,r,r,~{memory}", [at, phase, much], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_turn(WHICH: gl.constexpr):
    """Consumer WHICH of two waits until the other one has passed the turn."""
    gl.inline_asm_elementwise(
        "bar.sync " + ("12" if WHICH == 0 else "13") + ", 256; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pass_turn(WHICH: gl.constexpr):
    """Consumer WHICH of two lets the other one go on. (Barriers 12 and 13, which Triton does not use; both are told of
    once for every time that they are waited for.)"""
    gl.inline_asm_elementwise(
        "bar.arrive " + ("13" if WHICH == 0 else "12") + ", 256; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def warp():
    """Number of the calling warp in its partition."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t;
        mov.u32 t, %tid.x;
        shr.u32 t, t, 5;
        and.b32 t, t, 3;
        shfl.sync.idx.b32 $0, t, 0, 31, -1;
        }
        """, "=r", [], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def rows_of(pool, slot, first, COUNT: gl.constexpr, desc, CODES: gl.constexpr, SLOT: gl.constexpr):
    """COUNT rows from `first` on of a slot of SLOT rows; the pool's elements are 8 rows."""
    return pool.index(slot * (SLOT // 8) + first // 8)._reinterpret(CODES, [COUNT, 128], desc.layout)


@gluon.jit
def words_of(pool, slot, first: gl.constexpr, desc, SLOT: gl.constexpr, L: gl.constexpr):
    """64 rows of a slot's left operand in the registers of a product, as words: four codes each. Codes as such would be
    taken apart where a loop hands them on."""
    WORDS: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L.instr_shape[1], 8]), 1)
    return pool.index(slot * (SLOT // 8) + first // 8)._reinterpret(gl.int32, [64, 32], WORDS).load(LEFT)


@gluon.jit
def codes_of(words, CODES: gl.constexpr, L: gl.constexpr):
    """What `words_of` has fetched, as an operand: no instructions."""
    low = gl.join(words.to(gl.int8), (words >> 8).to(gl.int8))
    high = gl.join((words >> 16).to(gl.int8), (words >> 24).to(gl.int8))
    codes = gl.join(low, high).permute((0, 1, 3, 2)).reshape((64, 128))
    return gl.convert_layout(codes, gl.DotOperandLayout(0, L, 4)).to(CODES, bitcast=True)


@gluon.jit
def here(x):
    """x, computed before what follows: the compiler would leave all scaling for the end of a step, and the products of
    two blocks would need registers at once."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def put_box(out_desc, pool, at: gl.constexpr, tile, bias_ptr, column, N, OUT: gl.constexpr):
    """64 x 64 sums and their bias into a box of shared memory."""
    if bias_ptr is not None:
        lane = gl.arange(0, 64, layout=gl.SliceLayout(0, tile.type.layout))
        tile += bias_of(bias_ptr, column + lane, N)[None, :]
    pool.index(at // 1024)._reinterpret(OUT, [64, 64], out_desc.layout).store(tile.to(OUT))


@gluon.jit
def send_box(out_desc, pool, at: gl.constexpr, row, column, OUT: gl.constexpr):
    """A box that all warps have written to the output; what lies beyond its edges is dropped."""
    tma_store(out_desc, [row, column], pool.index(at // 1024)._reinterpret(OUT, [64, 64], out_desc.layout))


def line(x: torch.Tensor, count: int) -> TensorDescriptor | None:
    """All that lies between the first and the last element of x, as one line, in pieces of `count`, where rows of x are
    neighbours and every group begins at a multiple of 16 bytes, as TMA wants it; else None."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    if x.stride(0) != 1 or x.stride(1) % 4 or x.data_ptr() % 16 or extent >= 1 << 31:
        return None
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return TensorDescriptor.from_tensor(x.as_strided((extent,), (1,)), [count], layout)
