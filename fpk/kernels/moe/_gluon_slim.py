"""A grouped product for experts with few rows each, for Hopper, in Gluon: weights stream through a ring of buffers.

Tiles are 128 rows of weights by BLOCK_M rows of one expert, and the matrix unit takes the weights as its tall side. One
warpgroup fetches by TMA, across the ends of tiles; one multiplies. Programs stay, several share a multiprocessor, so
that one stores while another one multiplies. Rows must lie in order (no gather).
"""

import itertools
from collections.abc import Iterator
from typing import Any

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fpk.db import Config
from fpk.device import Device, of
from fpk.formats import FP8
from fpk.kernels._tile import early_start
from fpk.kernels.moe._gluon_parts import tma_load
from fpk.kernels.moe._grouped import fits_row_descriptor, fits_weight_descriptor


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _row_tiles(offs_ptr, R, E, BINS: gl.constexpr, BLOCK_M: gl.constexpr):
    """Row tiles of the experts up to each, those of rows of no expert last; every warp holds all sums."""
    V: gl.constexpr = gl.BlockedLayout([BINS // 32], [32], [4], [0])
    e = gl.arange(0, BINS, layout=V)
    end = gl.where(e < E, gl.minimum(gl.load(offs_ptr + e, mask=e < E, other=0), R), R)
    begin = gl.minimum(gl.load(offs_ptr + e - 1, mask=(e > 0) & (e <= E), other=0), R)
    tiles = gl.where(e <= E, gl.cdiv(gl.maximum(end - begin, 0), BLOCK_M), 0)
    return gl.associative_scan(tiles, 0, _add)


@gluon.jit
def _tile(sums, offs_ptr, tile, tiles_n, R, E, BLOCK_M: gl.constexpr):
    """(column, expert, first row, row after the expert's last) of a tile; expert E has the rows of none."""
    m = tile // tiles_n
    e = gl.arange(0, sums.shape[0], layout=sums.type.layout)
    expert = gl.minimum(gl.sum((sums <= m).to(gl.int32), axis=0), E)
    before = gl.sum(gl.where(e == expert - 1, sums, 0), axis=0)
    begin = gl.minimum(gl.load(offs_ptr + expert - 1, mask=expert > 0, other=0), R)
    end = gl.minimum(gl.load(offs_ptr + expert, mask=expert < E, other=2147483647), R)
    return tile % tiles_n, expert, begin + (m - before) * BLOCK_M, end


@gluon.jit
def _fetch(
    a_desc, b_desc, a_bufs, b_bufs, full, empty, offs_ptr, R, E, N, K,
    BINS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    sums = _row_tiles(offs_ptr, R, E, BINS, BLOCK_M)
    tiles_n = gl.cdiv(N, 128)
    tiles = gl.max(sums, axis=0) * tiles_n
    turn = 0
    n, expert, first, _ = _tile(sums, offs_ptr, gl.program_id(0), tiles_n, R, E, BLOCK_M)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        next_n, next_expert, next_first, _ = _tile(sums, offs_ptr, tile + gl.num_programs(0), tiles_n, R, E, BLOCK_M)
        if expert < E:
            for k in range(gl.cdiv(K, 128)):
                s = turn % STAGES
                mbarrier.wait(empty.index(s), ((turn // STAGES) & 1) ^ 1)
                bar = full.index(s)
                mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
                tma_load(b_desc, [expert * N + n * 128, k * 128], bar, b_bufs.index(s))
                tma_load(a_desc, [first, k * 128], bar, a_bufs.index(s))
                turn += 1
        n = next_n
        expert = next_expert
        first = next_first


@gluon.jit
def _multiply(
    a_bufs, b_bufs, full, empty, offs_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, R, E, N, K,
    stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    MODE: gl.constexpr, ROWS: gl.constexpr, BINS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """MODE as in _gluon_grouped: scaled, promoted, block."""
    L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 32])
    LM: gl.constexpr = gl.SliceLayout(0, L)  # rows of `a` are columns here
    LN: gl.constexpr = gl.SliceLayout(1, L)
    O: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    sums = _row_tiles(offs_ptr, R, E, BINS, BLOCK_M)
    tiles_n = gl.cdiv(N, 128)
    tiles = gl.max(sums, axis=0) * tiles_n
    steps = gl.cdiv(K, 128)
    turn = 0
    next_n, next_expert, next_first, next_end = _tile(sums, offs_ptr, gl.program_id(0), tiles_n, R, E, BLOCK_M)
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        n = next_n
        expert = next_expert
        first = next_first
        end = next_end
        next_n, next_expert, next_first, next_end = _tile(
            sums, offs_ptr, tile + gl.num_programs(0), tiles_n, R, E, BLOCK_M
        )
        e = min(expert, E - 1).to(gl.int64)
        offs_m = first + gl.arange(0, BLOCK_M, layout=LM)
        offs_n = n * 128 + gl.arange(0, 128, layout=LN)
        acc = gl.zeros((128, BLOCK_M), gl.float32, L)
        if expert < E:
            if MODE == "block":
                sap = sa_ptr + gl.where(offs_m < end, offs_m, first).to(gl.int64) * stride_sam
                sbp = sb_ptr + e * stride_sbe + n * 128 // ROWS * stride_sbn
                sa = gl.load(sap)
                sb = gl.load(sbp)
                for k in range(steps):
                    s = turn % STAGES
                    mbarrier.wait(full.index(s), (turn // STAGES) & 1)
                    product = warpgroup_mma(
                        b_bufs.index(s), a_bufs.index(s).permute((1, 0)), gl.zeros((128, BLOCK_M), gl.float32, L),
                        use_acc=False, is_async=True,
                    )  # fmt: skip
                    factor = sa * sb
                    after = min(k + 1, steps - 1)
                    sa = gl.load(sap + after * stride_sak)
                    sb = gl.load(sbp + after * stride_sbk)
                    product = warpgroup_mma_wait(0, deps=[product])
                    mbarrier.arrive(empty.index(s), count=1)
                    acc += product * factor[None, :]
                    turn += 1
            elif MODE == "promoted":
                for _ in range(steps):
                    s = turn % STAGES
                    mbarrier.wait(full.index(s), (turn // STAGES) & 1)
                    product = warpgroup_mma(
                        b_bufs.index(s), a_bufs.index(s).permute((1, 0)), gl.zeros((128, BLOCK_M), gl.float32, L),
                        use_acc=False, is_async=True,
                    )  # fmt: skip
                    product = warpgroup_mma_wait(0, deps=[product])
                    mbarrier.arrive(empty.index(s), count=1)
                    acc += product
                    turn += 1
            else:
                for k in range(steps):
                    s = turn % STAGES
                    mbarrier.wait(full.index(s), (turn // STAGES) & 1)
                    token = warpgroup_mma(b_bufs.index(s), a_bufs.index(s).permute((1, 0)), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[token])  # the product before this one is done
                    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k != 0)
                    turn += 1
                acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
            if MODE != "block":
                acc = acc * gl.load(sb_ptr + e * stride_sbe + offs_n * stride_sbn, mask=offs_n < N, other=0.0)[:, None]
                sap = sa_ptr + offs_m.to(gl.int64) * stride_sam
                acc = acc * gl.load(sap, mask=offs_m < end, other=0.0)[None, :]
            if bias_ptr is not None:
                bias = gl.load(bias_ptr + e * stride_bias + offs_n, mask=offs_n < N, other=0.0)
                acc = acc + bias.to(gl.float32)[:, None]
        out = gl.convert_layout(acc.to(out_ptr.dtype.element_ty).permute((1, 0)), O)
        row = first + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, O))
        column = n * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, O))
        ptrs = out_ptr + row.to(gl.int64)[:, None] * stride_om + column[None, :]
        gl.store(ptrs, out, mask=(row < end)[:, None] & (column < N)[None, :])


@gluon.jit(do_not_specialize=["R", "E"])
def slim_kernel(
    a_desc, b_desc, offs_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, R, E, N, K,
    stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
    PDL: gl.constexpr, MODE: gl.constexpr, ROWS: gl.constexpr, BINS: gl.constexpr, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    a_bufs = gl.allocate_shared_memory(a_desc.dtype, [STAGES, BLOCK_M, 128], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 128, 128], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize([
            (_multiply, (
                a_bufs, b_bufs, full, empty, offs_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr, R, E, N, K,
                stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk, stride_bias,
                MODE, ROWS, BINS, BLOCK_M, STAGES,
            )),
            (_fetch, (a_desc, b_desc, a_bufs, b_bufs, full, empty, offs_ptr, R, E, N, K, BINS, BLOCK_M, STAGES)),
        ], [4], [40 if BINS <= 256 else 56])  # fmt: skip


def slim_legal(config: Config, device: Device, a: Tensor, b: Tensor, gather: Tensor | None) -> bool:
    """Whatever the scales: those that change along K are one fp32 each 128 columns, and 128 rows of `b` share them."""
    held = ((config["BLOCK_M"] + 128) * 128 * config["STAGES"] + 4096) * config["PER_SM"]
    fits = held <= device.shared_limit and a.dtype in FP8 and a.shape[0] > 0
    return fits and gather is None and fits_weight_descriptor(b) and fits_row_descriptor(a)


def slim_configs() -> Iterator[Config]:
    """Candidates, among those of _gluon_grouped."""
    for m, (stages, per_sm) in itertools.product((16, 32, 64), ((5, 2), (4, 2), (3, 3), (9, 1))):
        yield Config(
            kernel="gluon", BLOCK_M=m, BLOCK_N=128, GROUP_M=1, STAGES=stages, PER_SM=per_sm, num_warps=4
        )  # fmt: skip


def _descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(x, [rows, 128], layout)


def launch_slim(
    config: Config, mode: str, a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor | None,
    scale_b: Tensor | None, bias: Tensor | None, out: Tensor, rows_per_scale: int, strides: list[int], bins: int,
) -> None:  # fmt: skip
    """As launch_gluon of _gluon_grouped."""
    (R, K), (E, N), block_m = a.shape, b.shape[:2], config["BLOCK_M"]
    device = of(a.device)
    most = (R + min(E + 1, R) * (block_m - 1)) // block_m
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    programs = min(device.sm_count * config["PER_SM"], most * triton.cdiv(N, 128))
    registers: dict[str, Any] = dict(maxnreg={1: 168, 2: 128, 3: 80}[config["PER_SM"]])
    slim_kernel[(programs,)](
        _descriptor(a, block_m), _descriptor(matrix, 128), offs, scale_a, scale_b, bias, out, R, E, N, K, out.stride(0),
        *strides, 0 if bias is None else bias.stride(0), MODE=mode, ROWS=rows_per_scale, BINS=max(32, bins),
        BLOCK_M=block_m, STAGES=config["STAGES"], num_warps=4, **registers, **early_start(device),
    )  # fmt: skip
