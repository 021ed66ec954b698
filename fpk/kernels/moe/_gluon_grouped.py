"""A grouped product for Hopper, written in Gluon: one warpgroup fetches, NC warpgroups multiply.

Tiles are 64 NC rows of one expert by BLOCK_N columns; programs stay, and take tiles in turn. Each multiplying warpgroup
has 64 of the rows, and waits where an expert has none for it: a tile that holds all rows of an expert reads its weights
once. Rows must lie in order (no gather), since the tensor memory accelerator of Hopper reads boxes.

A small kernel before it writes which rows of which expert every row tile has; only this op's launch knows that table.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
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

from fpk.db import Config
from fpk.device import Device, of
from fpk.kernels.moe._grouped import fits_row_descriptor, fits_weight_descriptor
from fpk.op import Kernel

# Gluon's interface moves between versions of triton; on one that this was not built with there are no candidates
AVAILABLE = triton.__version__.split(".")[:2] in (["3", "6"], ["3", "7"], ["3", "8"], ["3", "9"])
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@triton.jit(do_not_specialize=["R", "E"])
def schedule_kernel(offs_ptr, table_ptr, R, E, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """table: the number of row tiles, then of each its expert (E: rows of none), first row, and row after the last."""
    e = tl.arange(0, BLOCK_E)
    end = tl.where(e < E, tl.minimum(tl.load(offs_ptr + e, mask=e < E, other=0), R), R)
    begin = tl.minimum(tl.load(offs_ptr + e - 1, mask=(e > 0) & (e <= E), other=0), R)
    tiles = tl.where(e <= E, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M), 0)
    done = tl.cumsum(tiles, axis=0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    earlier = done[None, :] <= i[:, None]
    expert = tl.sum(earlier.to(tl.int32), axis=1)
    here = e[None, :] == expert[:, None]
    first = tl.sum(tl.where(here, begin[None, :], 0), axis=1)
    before = tl.sum(tl.where(earlier, tiles[None, :], 0), axis=1)
    total = tl.sum(tiles, axis=0)
    mask = i < total
    tl.store(table_ptr + 1 + 3 * i, expert, mask=mask)
    tl.store(table_ptr + 2 + 3 * i, first + (i - before) * BLOCK_M, mask=mask)
    tl.store(table_ptr + 3 + 3 * i, tl.sum(tl.where(here, end[None, :], 0), axis=1), mask=mask)
    tl.store(table_ptr, total)


@gluon.jit
def _place(tile, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """Row and column of a tile, walking columns inside bands of GROUP_M rows so that weights stay in L2."""
    per_band = GROUP_M * tiles_n
    first = tile // per_band * GROUP_M
    rows = min(tiles_m - first, GROUP_M)
    inside = tile % per_band
    return first + inside % rows, inside // rows


@gluon.jit
def _fetch(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, table_ptr, E, N, K,
    NC: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP_M)
        expert = gl.load(table_ptr + 1 + 3 * m)
        first = gl.load(table_ptr + 2 + 3 * m)
        steps = gl.cdiv(K, BLOCK_K)
        if expert == E:
            steps = 0
        for k in range(steps):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            bar = full.index(s)
            mbarrier.expect(bar, a_desc.block_type.nbytes * NC + b_desc.block_type.nbytes)
            tma_load(b_desc, [expert * N + n * BLOCK_N, k * BLOCK_K], bar, b_bufs.index(s))
            for i in gl.static_range(NC):
                tma_load(a_desc, [first + i * 64, k * BLOCK_K], bar, a_bufs.index(s * NC + i))
            step += 1


@gluon.jit
def _multiply(
    a_bufs, b_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
    stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    W: gl.constexpr, MODE: gl.constexpr, ROWS: gl.constexpr, NC: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, ACC: gl.constexpr, INSTR_N: gl.constexpr,
    INSTR_K: gl.constexpr,
):  # fmt: skip
    """MODE: plain (no scales), scaled (constant along K), promoted (scaled, summed in registers), block (changing)."""
    L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, INSTR_N, INSTR_K]
    )
    LM: gl.constexpr = gl.SliceLayout(1, L)
    LN: gl.constexpr = gl.SliceLayout(0, L)
    tiles_m = gl.load(table_ptr)
    tiles_n = gl.cdiv(N, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(tile, tiles_m, tiles_n, GROUP_M)
        expert = gl.load(table_ptr + 1 + 3 * m)
        row = gl.load(table_ptr + 2 + 3 * m) + W * 64
        end = gl.load(table_ptr + 3 + 3 * m)
        steps = gl.cdiv(K, BLOCK_K)
        if expert == E:
            steps = 0
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
                last = gl.maximum(steps - 1, 0)
                sa0 = gl.load(sap)
                sb0 = gl.load(sbp)
                sa1 = gl.load(sap + min(1, last) * stride_sak)
                sb1 = gl.load(sbp + min(1, last) * stride_sbk)
                for pair in range(steps // 2):
                    s0 = step % STAGES
                    s1 = (step + 1) % STAGES
                    mbarrier.wait(full.index(s0), (step // STAGES) & 1)
                    p0 = warpgroup_mma(
                        a_bufs.index(s0 * NC + W), b_bufs.index(s0).permute((1, 0)), gl.zeros((64, BLOCK_N), ACC, L),
                        use_acc=False, is_async=True,
                    )  # fmt: skip
                    mbarrier.wait(full.index(s1), ((step + 1) // STAGES) & 1)
                    p1 = warpgroup_mma(
                        a_bufs.index(s1 * NC + W), b_bufs.index(s1).permute((1, 0)), gl.zeros((64, BLOCK_N), ACC, L),
                        use_acc=False, is_async=True,
                    )  # fmt: skip
                    f0 = sa0 * sb0
                    f1 = sa1 * sb1
                    k0 = min(2 * pair + 2, last)
                    k1 = min(2 * pair + 3, last)
                    sa0 = gl.load(sap + k0 * stride_sak)
                    sb0 = gl.load(sbp + k0 * stride_sbk)
                    sa1 = gl.load(sap + k1 * stride_sak)
                    sb1 = gl.load(sbp + k1 * stride_sbk)
                    d0 = warpgroup_mma_wait(1, deps=[p0])
                    mbarrier.arrive(empty.index(s0), count=1)
                    acc += d0.to(ACC) * f0[:, None]
                    d1 = warpgroup_mma_wait(0, deps=[p1])
                    mbarrier.arrive(empty.index(s1), count=1)
                    acc += d1.to(ACC) * f1[:, None]
                    step += 2
                if steps % 2 == 1:
                    s0 = step % STAGES
                    mbarrier.wait(full.index(s0), (step // STAGES) & 1)
                    p0 = warpgroup_mma(
                        a_bufs.index(s0 * NC + W), b_bufs.index(s0).permute((1, 0)), gl.zeros((64, BLOCK_N), ACC, L),
                        use_acc=False, is_async=True,
                    )  # fmt: skip
                    d0 = warpgroup_mma_wait(0, deps=[p0])
                    mbarrier.arrive(empty.index(s0), count=1)
                    acc += d0 * (sa0 * sb0)[:, None]
                    step += 1
            elif MODE == "promoted":
                for _ in range(steps):
                    s = step % STAGES
                    mbarrier.wait(full.index(s), (step // STAGES) & 1)
                    p = warpgroup_mma(
                        a_bufs.index(s * NC + W), b_bufs.index(s).permute((1, 0)), gl.zeros((64, BLOCK_N), ACC, L),
                        use_acc=False, is_async=True,
                    )  # fmt: skip
                    d = warpgroup_mma_wait(0, deps=[p])
                    mbarrier.arrive(empty.index(s), count=1)
                    acc += d
                    step += 1
            else:
                for _ in range(steps):
                    s = step % STAGES
                    mbarrier.wait(full.index(s), (step // STAGES) & 1)
                    p = warpgroup_mma(
                        a_bufs.index(s * NC + W), b_bufs.index(s).permute((1, 0)), acc, is_async=True
                    )  # fmt: skip
                    acc = warpgroup_mma_wait(0, deps=[p])
                    mbarrier.arrive(empty.index(s), count=1)
                    step += 1
            out = acc.to(gl.float32)
            if MODE == "scaled" or MODE == "promoted":
                out = out * gl.load(sa_ptr + offs_m.to(gl.int64) * stride_sam, mask=mask_m, other=0.0)[:, None]
                out = out * gl.load(sb_ptr + e * stride_sbe + offs_n * stride_sbn, mask=mask_n, other=0.0)[None, :]
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + e * stride_bias + offs_n, mask=mask_n, other=0.0)
                out = out + bias.to(gl.float32)[None, :]
            if expert == E:  # whatever its rows and their scales hold
                out = gl.zeros((64, BLOCK_N), gl.float32, L)
            out_ptrs = out_ptr + offs_m.to(gl.int64)[:, None] * stride_om + offs_n[None, :]
            gl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])
        else:
            for _ in range(steps):
                s = step % STAGES
                mbarrier.wait(full.index(s), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(s), count=1)
                step += 1


@gluon.jit(do_not_specialize=["E"])
def grouped_kernel(
    a_desc, b_desc, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
    stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    MODE: gl.constexpr, ROWS: gl.constexpr, NC: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr, ACC: gl.constexpr, INSTR_N: gl.constexpr, INSTR_K: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES * NC, 64, BLOCK_K], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, BLOCK_N, BLOCK_K], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=NC)
    fence_async_shared()
    if NC == 2:
        gl.warp_specialize([
            (_fetch, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, table_ptr, E, N, K, NC, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
            (_multiply, (
                a_bufs, b_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
                stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                0, MODE, ROWS, NC, BLOCK_N, BLOCK_K, STAGES, GROUP_M, ACC, INSTR_N, INSTR_K,
            )),
            (_multiply, (
                a_bufs, b_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
                stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                1, MODE, ROWS, NC, BLOCK_N, BLOCK_K, STAGES, GROUP_M, ACC, INSTR_N, INSTR_K,
            )),
        ], [4, 4], [REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_fetch, (
                a_desc, b_desc, a_bufs, b_bufs, full, empty, table_ptr, E, N, K, NC, BLOCK_N, BLOCK_K, STAGES, GROUP_M,
            )),
            (_multiply, (
                a_bufs, b_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
                stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                0, MODE, ROWS, NC, BLOCK_N, BLOCK_K, STAGES, GROUP_M, ACC, INSTR_N, INSTR_K,
            )),
            (_multiply, (
                a_bufs, b_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
                stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                1, MODE, ROWS, NC, BLOCK_N, BLOCK_K, STAGES, GROUP_M, ACC, INSTR_N, INSTR_K,
            )),
            (_multiply, (
                a_bufs, b_bufs, full, empty, table_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, E, N, K,
                stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                2, MODE, ROWS, NC, BLOCK_N, BLOCK_K, STAGES, GROUP_M, ACC, INSTR_N, INSTR_K,
            )),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip


GLUON_KERNEL = Kernel(grouped_kernel, targets=("sm90",) if AVAILABLE else ("none",), interpretable=False, matrix=True)


def gluon_legal(config: Config, device: Device, a: Tensor, b: Tensor, gather: Tensor | None) -> bool:
    buffers = (64 * config["NC"] + config["BLOCK_N"]) * 128 * config["num_stages"]
    fits = buffers + 1024 <= device.shared_limit and a.dtype is not torch.float32
    return fits and gather is None and fits_weight_descriptor(b) and fits_row_descriptor(a)


def gluon_configs(widths: tuple[tuple[int, int], ...]) -> Iterator[Config]:
    """Candidates; `widths` are pairs of BLOCK_N and num_stages."""
    for (n, stages), group in itertools.product(widths, (4, 8, 16)):
        yield Config(
            kernel="gluon", NC=2, BLOCK_N=n, GROUP_M=group, REGISTERS=240, num_warps=4, num_stages=stages
        )  # fmt: skip


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Boxes of `rows` rows by 128 bytes, laid out in shared memory as wgmma reads them."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2)
    return TensorDescriptor.from_tensor(x, [rows, 128 // x.element_size()], layout)


def launch_gluon(
    config: Config, mode: str, a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor | None, scale_b: Tensor | None,
    bias: Tensor | None, out: Tensor, rows_per_scale: int, strides: list[int], bins: int,
) -> None:  # fmt: skip
    """out (R, N) = grouped product of a (R, K) and b (E, N, K); strides: of scale_a (rows, columns) and scale_b."""
    (R, K), (E, N) = a.shape, b.shape[:2]
    size = a.element_size()
    height, block_n, block_k = 64 * config["NC"], config["BLOCK_N"], 128 // size
    most = (R + min(E + 1, R) * (height - 1)) // height
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=a.device)
    schedule_kernel[(triton.cdiv(most, 32),)](
        offs, table, R, E, BLOCK_E=bins, BLOCK_M=height, BLOCK=32, num_warps=4
    )  # fmt: skip
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    programs = min(of(a.device).sm_count, most * triton.cdiv(N, block_n))
    options: dict[str, Any] = {n: v for n, v in config.items() if n not in ("kernel", "num_warps", "num_stages")}
    grouped_kernel[(programs,)](
        _descriptor(a, 64), _descriptor(matrix, block_n),
        table, scale_a, scale_b, bias, out, E, N, K, out.stride(0), *strides, 0 if bias is None else bias.stride(0),
        MODE=mode, ROWS=rows_per_scale, BLOCK_K=block_k, ACC=gl.int32 if a.dtype is torch.int8 else gl.float32,
        INSTR_N=min(block_n, 128) if a.dtype is torch.int8 else block_n, INSTR_K=32 // size,
        STAGES=config["num_stages"], num_warps=4, **options,
    )  # fmt: skip
