"""A grouped product for Hopper, written in Gluon: one warpgroup fetches, two multiply.

Tiles are 128 rows of one expert by BLOCK_N columns; programs stay, and take tiles in turn. Each multiplying warpgroup
has 64 of the rows, and only passes where an expert has none for it. Rows must lie in order (no gather), since the
tensor memory accelerator of Hopper reads boxes.

A small kernel before it writes which rows of which expert every row tile has; only this op's launch knows that table.
"""

import itertools
from collections.abc import Iterator
from typing import Any

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.db import Config
from fpk.device import Device, of
from fpk.kernels._tile import early_start
from fpk.kernels.moe._gluon_parts import AVAILABLE, barrier, schedule_kernel, tma_load, tma_store
from fpk.kernels.moe._gluon_slim import launch_slim, slim_configs, slim_legal
from fpk.kernels.moe._grouped import fits_row_descriptor, fits_weight_descriptor
from fpk.op import Kernel


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Row and column of a tile, walking columns inside bands of GROUP_M rows so that weights stay in L2."""
    per_band = GROUP_M * tiles_n
    first = tile // per_band * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    inside = tile % per_band
    return first + inside % rows, inside // rows


@gluon.jit
def _tile(table_ptr, tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(column, expert, first row, row after the expert's last) of a tile; the last one's for tiles behind it."""
    m, n = _place(min(tile, tiles_m * tiles_n - 1), tiles_m, tiles_n, GROUP_M)
    entry = table_ptr + 3 * m
    return n, gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3)


@gluon.jit
def _steps(expert, E, K, BLOCK_K: gl.constexpr, MULTIPLE: gl.constexpr):
    """Steps along K of a tile, none for rows of no expert."""
    return gl.where(expert == E, 0, gl.cdiv(gl.cdiv(K, BLOCK_K), MULTIPLE) * MULTIPLE)


@gluon.jit
def _fetch(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, table_ptr, E, N, K,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, MULTIPLE: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, BLOCK_N)
    turn = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        n, expert, first, _ = _tile(table_ptr, tile, tiles_m, tiles_n, GROUP_M)
        for k in range(_steps(expert, E, K, BLOCK_K, MULTIPLE)):
            s = turn % STAGES
            mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, a_desc.block_type.nbytes * 2 + b_desc.block_type.nbytes)
            tma_load(b_desc, [expert * N + n * BLOCK_N, k * BLOCK_K], bar, b_bufs.index(s))
            tma_load(a_desc, [first, k * BLOCK_K], bar, a_bufs.index(2 * s))
            tma_load(a_desc, [first + 64, k * BLOCK_K], bar, a_bufs.index(2 * s + 1))
            turn += 1


@gluon.jit
def _put(out_desc, buf, piece, row, column):
    """Write 64 columns of a tile through shared memory, while the piece before it may still be on its way."""
    tma.store_wait(1)
    barrier()
    buf.store(piece)
    fence_async_shared()
    barrier()
    tma_store(out_desc, [row, column], buf)


@gluon.jit
def _halves(tile):
    return tile.reshape((tile.shape[0], 2, tile.shape[1] // 2)).permute((0, 2, 1)).split()


@gluon.jit
def _multiply(
    out_desc, a_bufs, b_bufs, out_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
    stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    W: gl.constexpr, MODE: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, MULTIPLE: gl.constexpr, ACC: gl.constexpr, INSTR_N: gl.constexpr,
    INSTR_K: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile. MODE: plain (no scales), scaled (constant along K), promoted (scaled, summed in registers
    every step), block (scales that change every step; two steps a turn, so that the unit works on the second product
    while the first one is scaled)."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, INSTR_N, INSTR_K]
    )
    LM: gl.constexpr = gl.SliceLayout(1, L)
    LN: gl.constexpr = gl.SliceLayout(0, L)
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, BLOCK_N)
    turn = 0
    next_n, next_expert, next_first, next_end = _tile(table_ptr, gl.program_id(0), tiles_m, tiles_n, GROUP_M)
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        n = next_n
        expert = next_expert
        row = next_first + W * 64
        end = next_end
        next_n, next_expert, next_first, next_end = _tile(
            table_ptr, tile + gl.num_programs(0), tiles_m, tiles_n, GROUP_M
        )
        steps = _steps(expert, E, K, BLOCK_K, MULTIPLE)
        e = min(expert, E - 1).to(gl.int64)
        offs_m = row + gl.arange(0, 64, layout=LM)
        mask_m = offs_m < end
        offs_n = n * BLOCK_N + gl.arange(0, BLOCK_N, layout=LN)
        mask_n = offs_n < N
        if row < end:
            acc = gl.zeros((64, BLOCK_N), ACC, L)
            if MODE == "block":
                sap = sa_ptr + gl.where(mask_m, offs_m, row).to(gl.int64) * stride_sam
                sbp = sb_ptr + e * stride_sbe + n * BLOCK_N // ROWS * stride_sbn
                last = gl.cdiv(K, BLOCK_K) - 1
                sa_0 = gl.load(sap)
                sb_0 = gl.load(sbp)
                sa_1 = gl.load(sap + min(1, last) * stride_sak)
                sb_1 = gl.load(sbp + min(1, last) * stride_sbk)
                for pair in range(steps // 2):
                    slot_0 = turn % STAGES
                    slot_1 = (turn + 1) % STAGES
                    mbarrier.wait(full.index(slot_0), (turn // STAGES) & 1)
                    token_0 = warpgroup_mma(
                        a_bufs.index(2 * slot_0 + W), b_bufs.index(slot_0).permute((1, 0)),
                        gl.zeros((64, BLOCK_N), ACC, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    mbarrier.wait(full.index(slot_1), ((turn + 1) // STAGES) & 1)
                    token_1 = warpgroup_mma(
                        a_bufs.index(2 * slot_1 + W), b_bufs.index(slot_1).permute((1, 0)),
                        gl.zeros((64, BLOCK_N), ACC, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    factor_0 = sa_0 * sb_0
                    factor_1 = sa_1 * sb_1
                    k_0 = min(2 * pair + 2, last)
                    k_1 = min(2 * pair + 3, last)
                    sa_0 = gl.load(sap + k_0 * stride_sak)
                    sb_0 = gl.load(sbp + k_0 * stride_sbk)
                    sa_1 = gl.load(sap + k_1 * stride_sak)
                    sb_1 = gl.load(sbp + k_1 * stride_sbk)
                    product_0 = warpgroup_mma_wait(1, deps=[token_0])
                    mbarrier.arrive(empty.index(slot_0), count=1)
                    acc += product_0 * factor_0[:, None]
                    product_1 = warpgroup_mma_wait(0, deps=[token_1])
                    mbarrier.arrive(empty.index(slot_1), count=1)
                    acc += product_1 * factor_1[:, None]
                    turn += 2
            elif MODE == "promoted":
                for _ in range(steps):
                    slot = turn % STAGES
                    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
                    token = warpgroup_mma(
                        a_bufs.index(2 * slot + W), b_bufs.index(slot).permute((1, 0)),
                        gl.zeros((64, BLOCK_N), ACC, L), use_acc=False, is_async=True,
                    )  # fmt: skip
                    product = warpgroup_mma_wait(0, deps=[token])
                    mbarrier.arrive(empty.index(slot), count=1)
                    acc += product
                    turn += 1
            else:
                for k in range(steps):
                    slot = turn % STAGES
                    mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
                    token = warpgroup_mma(
                        a_bufs.index(2 * slot + W), b_bufs.index(slot).permute((1, 0)), acc, is_async=True
                    )
                    acc = warpgroup_mma_wait(1, deps=[token])  # the product before this one is done
                    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k != 0)
                    turn += 1
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=steps > 0)
            out = acc.to(gl.float32)
            if MODE == "scaled" or MODE == "promoted":
                out = out * gl.load(sa_ptr + offs_m.to(gl.int64) * stride_sam, mask=mask_m, other=0.0)[:, None]
                out = out * gl.load(sb_ptr + e * stride_sbe + offs_n * stride_sbn, mask=mask_n, other=0.0)[None, :]
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + e * stride_bias + offs_n, mask=mask_n, other=0.0)
                out = out + bias.to(gl.float32)[None, :]
            if expert == E:  # whatever its rows and their scales hold
                out = gl.zeros((64, BLOCK_N), gl.float32, L)
            if out_desc is not None and row + 64 <= end:
                tile_out = out.to(out_ptr.dtype.element_ty)
                column = n * BLOCK_N
                if BLOCK_N == 256:
                    left, right = _halves(tile_out)
                    first, second = _halves(left)
                    _put(out_desc, out_bufs.index(2 * W), first, row, column)
                    _put(out_desc, out_bufs.index(2 * W + 1), second, row, column + 64)
                    first, second = _halves(right)
                    _put(out_desc, out_bufs.index(2 * W), first, row, column + 128)
                    _put(out_desc, out_bufs.index(2 * W + 1), second, row, column + 192)
                else:
                    first, second = _halves(tile_out)
                    _put(out_desc, out_bufs.index(2 * W), first, row, column)
                    _put(out_desc, out_bufs.index(2 * W + 1), second, row, column + 64)
            else:
                out_ptrs = out_ptr + offs_m.to(gl.int64)[:, None] * stride_om + offs_n[None, :]
                gl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
        else:
            for _ in range(steps):
                slot = turn % STAGES
                mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
                mbarrier.arrive(empty.index(slot), count=1)
                turn += 1
    if out_desc is not None:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["E"])
def grouped_kernel(
    a_desc, b_desc, out_desc, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
    stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    PDL: gl.constexpr, MODE: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, ACC: gl.constexpr, INSTR_N: gl.constexpr, INSTR_K: gl.constexpr,
    BLOCK_M: gl.constexpr = 128, PER_SM: gl.constexpr = 1,
):  # fmt: skip
    """BLOCK_M, PER_SM: other than this only in configs for _gluon_slim, which runs in this kernel's place."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * 2, 64, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    if out_desc is None:
        out_bufs = a_bufs  # unused
    else:
        out_bufs = gl.allocate_shared_memory(out_desc.dtype, [4, 64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    MULTIPLE: gl.constexpr = 2 if MODE == "block" else 1
    gl.warp_specialize([
            (_multiply, (
                out_desc, a_bufs, b_bufs, out_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr,
                E, N, K, stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                0, MODE, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP_M, MULTIPLE, ACC, INSTR_N, INSTR_K,
            )),
            (_multiply, (
                out_desc, a_bufs, b_bufs, out_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr,
                E, N, K, stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                1, MODE, ROWS, BLOCK_N, BLOCK_K, STAGES, GROUP_M, MULTIPLE, ACC, INSTR_N, INSTR_K,
            )),
            (_fetch, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, table_ptr, E, N, K,
                BLOCK_N, BLOCK_K, STAGES, GROUP_M, MULTIPLE,
            )),
        ], [4, 4], [240, 24])  # fmt: skip


GLUON_KERNEL = Kernel(grouped_kernel, targets=("sm90",) if AVAILABLE else ("none",), interpretable=False, matrix=True)


def gluon_legal(config: Config, device: Device, a: Tensor, b: Tensor, gather: Tensor | None) -> bool:
    if "PER_SM" in config:
        return slim_legal(config, device, a, b, gather)
    buffers = (128 + config["BLOCK_N"]) * 128 * config["STAGES"] + 4 * 64 * 64 * 2
    fits = buffers + 1024 <= device.shared_limit and a.dtype is not torch.float32
    return fits and gather is None and fits_weight_descriptor(b) and fits_row_descriptor(a)


def gluon_configs(widths: tuple[tuple[int, int], ...]) -> Iterator[Config]:
    """Candidates; `widths` are pairs of BLOCK_N and STAGES."""
    yield from slim_configs()
    for (n, stages), group in itertools.product(widths, (4, 8, 16)):
        yield Config(kernel="gluon", BLOCK_N=n, GROUP_M=group, STAGES=stages, num_warps=4)


def _descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Boxes of a matrix, laid out in shared memory as wgmma reads them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, [rows, cols], layout)


def launch_gluon(
    config: Config, mode: str, a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor | None, scale_b: Tensor | None,
    bias: Tensor | None, out: Tensor, rows_per_scale: int, strides: list[int], bins: int,
) -> None:  # fmt: skip
    """out (R, N) = grouped product of a (R, K) and b (E, N, K); strides: of scale_a (rows, columns) and scale_b."""
    if "PER_SM" in config:
        launch_slim(config, mode, a, b, offs, scale_a, scale_b, bias, out, rows_per_scale, strides, bins)
        return
    (R, K), (E, N) = a.shape, b.shape[:2]
    size, block_n = a.element_size(), config["BLOCK_N"]
    line = 128 // size
    most = (R + min(E + 1, R) * 127) // 128
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=a.device)
    schedule_kernel[(triton.cdiv(most, 32),)](
        offs, table, R, E, BLOCK_E=bins, BLOCK_M=128, BLOCK=32, num_warps=4, **early_start(of(a.device))
    )
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    programs = min(of(a.device).sm_count, most * triton.cdiv(N, block_n))
    store = _descriptor(out, 64, 64) if out.element_size() == 2 and N % 8 == 0 else None
    options: dict[str, Any] = {n: v for n, v in config.items() if n not in ("kernel", "num_warps")}
    grouped_kernel[(programs,)](
        _descriptor(a, 64, line), _descriptor(matrix, block_n, line), store,
        table, scale_a, scale_b, bias, out, E, N, K, out.stride(0), *strides, 0 if bias is None else bias.stride(0),
        MODE=mode, ROWS=rows_per_scale, BLOCK_K=line, ACC=gl.int32 if a.dtype is torch.int8 else gl.float32,
        INSTR_N=min(block_n, 128) if a.dtype is torch.int8 else block_n, INSTR_K=32 // size, num_warps=4,
        **early_start(of(a.device)), **options,
    )  # fmt: skip
