"""A grouped product of FP8 with 1 x 128 by 128 x 128 scales for Hopper: tiles of 128 rows by two blocks of 128 columns.

Wide tiles, since what reaches the multiprocessors from L2 bounds these products: a tile of 128 x 256 reads three
quarters of what two of 128 x 128 do. Each multiplying warpgroup has 64 rows and the sums of both blocks in registers; a
product of one block is scaled into its sum while the tensor core works for the other warpgroup. The fetching warps also
multiply the scales of a step, and leave the factors of its rows in shared memory, which leaves registers for sums.
"""

from collections.abc import Iterator

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.db import Config
from fpk.device import Device, of
from fpk.formats import FP8
from fpk.kernels._tile import early_start
from fpk.kernels.moe._gluon_grouped import (
    AVAILABLE,
    _descriptor,
    _halves,
    _tile,
    barrier,
    gluon_legal,
    schedule_kernel,
    tma_load,
    tma_store,
)
from fpk.op import Kernel


@gluon.jit
def _opaque(x):
    """Keeps LLVM from moving the arithmetic on this in front of the main loop, where it would hold registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _fetch(
    a_desc, b_desc, a_bufs, b_bufs, factors, full, empty, table_ptr, sa_ptr, sb_ptr, E, N, K,
    stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, 256)
    blocks = gl.cdiv(N, 128)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        n, expert, first, end = _tile(table_ptr, tile, tiles_m, tiles_n, GROUP_M)
        steps = gl.where(expert == E, 0, gl.cdiv(K, 128))
        block = n * 2
        row = expert * N + block * 128
        at = first + gl.arange(0, 128, layout=LINE)
        rows = gl.where(at < end, at, first) * stride_sam
        sb_row = sb_ptr + min(expert, E - 1).to(gl.int64) * stride_sbe
        sb_0 = sb_row + block * stride_sbn
        sb_1 = sb_row + min(block + 1, blocks - 1) * stride_sbn
        for k in range(steps):
            s = turn % STAGES
            sa = gl.load(sa_ptr + k * stride_sak + rows)
            factor_0 = sa * gl.load(sb_0 + k * stride_sbk)
            factor_1 = sa * gl.load(sb_1 + k * stride_sbk)
            mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, a_desc.block_type.nbytes * 2 + b_desc.block_type.nbytes * 2)
            tma_load(b_desc, [row, k * 128], bar, b_bufs.index(2 * s))
            tma_load(a_desc, [first, k * 128], bar, a_bufs.index(2 * s))
            tma_load(a_desc, [first + 64, k * 128], bar, a_bufs.index(2 * s + 1))
            tma_load(b_desc, [row + 128, k * 128], bar, b_bufs.index(2 * s + 1))
            factors.index(2 * s).store(factor_0)
            factors.index(2 * s + 1).store(factor_1)
            mbarrier.arrive(bar, count=1)
            turn += 1


@gluon.jit
def _put(out_desc, buf, piece, row, column):
    """Write a piece of a tile through shared memory, once the one before it has left that."""
    tma.store_wait(0)
    barrier()
    buf.store(piece)
    fence_async_shared()
    barrier()
    tma_store(out_desc, [row, column], buf)


@gluon.jit
def _put_rows(out_ptr, tile, row, end, column, columns, stride, LM: gl.constexpr, LN: gl.constexpr):
    """Write the rows of a tile that are an expert's last ones."""
    offs_m = row + _opaque(gl.arange(0, 64, layout=LM))
    offs_n = column + _opaque(gl.arange(0, 128, layout=LN))
    ptrs = out_ptr + offs_m.to(gl.int64)[:, None] * stride + offs_n[None, :]
    gl.store(ptrs, tile, mask=(offs_m < end)[:, None] & (offs_n < columns)[None, :])


@gluon.jit
def _finish(
    acc, out_desc, buf, bias_ptr, out_ptr, row, end, column, N, stride_om, here, LM: gl.constexpr, LN: gl.constexpr
):  # fmt: skip
    """Write the sums of a block, without the bias unless `here`."""
    if bias_ptr is not None:
        offs_n = column + _opaque(gl.arange(0, 128, layout=LN))
        acc += gl.load(bias_ptr + offs_n, mask=(offs_n < N) & here, other=0.0).to(gl.float32)[None, :]
    tile = acc.to(out_ptr.dtype.element_ty)
    if row + 64 <= end:
        first, second = _halves(tile)
        _put(out_desc, buf, first, row, column)
        _put(out_desc, buf, second, row, column + 64)
    else:
        _put_rows(out_ptr, tile, row, end, column, N, stride_om, LM, LN)


@gluon.jit
def _multiply(
    out_desc, a_bufs, b_bufs, out_bufs, factors, full, empty, table_ptr, bias_ptr, out_ptr, E, N, K,
    stride_bias, stride_om, W: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    LM: gl.constexpr = gl.SliceLayout(1, L)
    LN: gl.constexpr = gl.SliceLayout(0, L)
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, 256)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        n, expert, first, end = _tile(table_ptr, tile, tiles_m, tiles_n, GROUP_M)
        steps = gl.where(expert == E, 0, gl.cdiv(K, 128))
        row = first + W * 64
        if row < end:
            acc_0 = gl.zeros((64, 128), gl.float32, L)
            acc_1 = gl.zeros((64, 128), gl.float32, L)
            for _ in range(steps):
                slot = turn % STAGES
                mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
                token = warpgroup_mma(
                    a_bufs.index(2 * slot + W), b_bufs.index(2 * slot).permute((1, 0)),
                    gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
                )  # fmt: skip
                factor = factors.index(2 * slot).slice(W * 64, 64, dim=0).load(LM)
                product = warpgroup_mma_wait(0, deps=[token])
                acc_0 += product * factor[:, None]
                token = warpgroup_mma(
                    a_bufs.index(2 * slot + W), b_bufs.index(2 * slot + 1).permute((1, 0)),
                    gl.zeros((64, 128), gl.float32, L), use_acc=False, is_async=True,
                )  # fmt: skip
                factor = factors.index(2 * slot + 1).slice(W * 64, 64, dim=0).load(LM)
                product = warpgroup_mma_wait(0, deps=[token])
                mbarrier.arrive(empty.index(slot), count=1)
                acc_1 += product * factor[:, None]
                turn += 1
            bias_row = bias_ptr
            if bias_ptr is not None:
                bias_row = bias_ptr + min(expert, E - 1).to(gl.int64) * stride_bias
            buf, here = out_bufs.index(W), expert < E
            _finish(acc_0, out_desc, buf, bias_row, out_ptr, row, end, n * 256, N, stride_om, here, LM, LN)
            _finish(acc_1, out_desc, buf, bias_row, out_ptr, row, end, n * 256 + 128, N, stride_om, here, LM, LN)
        else:
            for _ in range(steps):
                slot = turn % STAGES
                mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
                mbarrier.arrive(empty.index(slot), count=1)
                turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["E"])
def wide_kernel(
    a_desc, b_desc, out_desc, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
    stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias, stride_om,
    PDL: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES * 2, 128, 128], b_desc.layout)
    out_bufs = gl.allocate_shared_memory(out_desc.dtype, [2, 64, out_desc.block_shape[1]], out_desc.layout)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * 2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=2)  # what was fetched, and the factors
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize([
            (_multiply, (
                out_desc, a_bufs, b_bufs, out_bufs, factors, full, empty, table_ptr, bias_ptr, out_ptr, E, N, K,
                stride_bias, stride_om, 0, STAGES, GROUP_M,
            )),
            (_multiply, (
                out_desc, a_bufs, b_bufs, out_bufs, factors, full, empty, table_ptr, bias_ptr, out_ptr, E, N, K,
                stride_bias, stride_om, 1, STAGES, GROUP_M,
            )),
            (_fetch, (
                a_desc, b_desc, a_bufs, b_bufs, factors, full, empty, table_ptr, sa_ptr, sb_ptr, E, N, K,
                stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, STAGES, GROUP_M,
            )),
        ], [4, 4], [232, 40])  # fmt: skip


WIDE_KERNEL = Kernel(wide_kernel, targets=("sm90",) if AVAILABLE else ("none",), interpretable=False, matrix=True)


def wide_legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int,
    block_rows: int, block_cols: int, gather: Tensor | None,
) -> bool:  # fmt: skip
    plain = a.dtype in FP8 and scale_a.dtype is torch.float32 and scale_b.dtype is torch.float32
    blocks = (group, block_rows, block_cols) == (128, 128, 128) and b.shape[1] % 8 == 0
    near = a.shape[0] * scale_a.stride(0) < 2**31  # offsets of their rows are int32
    return plain and blocks and near and gluon_legal(dict(config) | dict(BLOCK_N=256), device, a, b, gather)


def wide_configs() -> Iterator[Config]:
    for group in (2, 4, 8, 16):
        yield Config(kernel="wide", GROUP_M=group, STAGES=4, num_warps=4)


def launch_wide(
    config: Config, a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None,
    out: Tensor, bins: int,
) -> None:  # fmt: skip
    """out (R, N) = grouped product of a (R, K) and b (E, N, K)."""
    (R, K), (E, N) = a.shape, b.shape[:2]
    most = (R + min(E + 1, R) * 127) // 128
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=a.device)
    early = early_start(of(a.device))
    schedule_kernel[(triton.cdiv(most, 32),)](
        offs, table, R, E, BLOCK_E=bins, BLOCK_M=128, BLOCK=32, num_warps=4, **early
    )
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    wide_kernel[(min(of(a.device).sm_count, most * triton.cdiv(N, 256)),)](
        _descriptor(a, 64, 128), _descriptor(matrix, 128, 128), _descriptor(out, 64, 64),
        table, scale_a, scale_b, bias, out, E, N, K,
        *scale_a.stride(), *scale_b.stride(), 0 if bias is None else bias.stride(0), out.stride(0),
        STAGES=config["STAGES"], GROUP_M=config["GROUP_M"], num_warps=config["num_warps"], **early,
    )  # fmt: skip
