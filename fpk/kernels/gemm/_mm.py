"""Device functions and the split-K reduction that the matrix product ops share."""

import itertools
import math
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.db import Config
from fpk.device import Device, of
from fpk.kernels._tile import after_previous, decode_e8m0
from fpk.kernels.gemm._gluon import AVAILABLE, consumer_tile, piece_columns, right_parts
from fpk.kernels.gemm._launch import dependent

TMA_TARGETS = ("sm90", "sm100", "sm103", "sm120", "sm121")
OUT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def share_of(K, part, BLOCK_K: tl.constexpr, SPLIT_K: tl.constexpr):
    """(first column, column after the last) of a part of K, in whole steps."""
    width = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    return part * width, tl.minimum(part * width + width, K)


@triton.jit
def load_k(rows, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """BLOCK_K columns of a tile of row pointers [rows, 1] from column k on; zeros from column K on."""
    offs_k = k + tl.arange(0, BLOCK_K)[None, :]
    if EVEN_K:
        tile = tl.load(rows + offs_k)
    else:
        tile = tl.load(rows + offs_k, mask=offs_k < K, other=0.0)
    return tile


@triton.jit
def accumulate(a, b, acc, SWAP: tl.constexpr, PROMOTE: tl.constexpr):
    """acc += a @ b.T for a [BLOCK_M, BLOCK_K], b [BLOCK_N, BLOCK_K]; acc is transposed when SWAP.

    FP8 tensor cores of sm90 keep about 14 bits while they accumulate. PROMOTE > 0 moves the sum to fp32 registers every
    PROMOTE products.
    """
    if SWAP:
        left, right = b, tl.trans(a)
    else:
        left, right = a, tl.trans(b)
    if PROMOTE > 0:
        acc = tl.dot(left, right, acc, max_num_imprecise_acc=PROMOTE)
    else:
        acc = tl.dot(left, right, acc, out_dtype=acc.dtype)
    return acc


@triton.jit
def load_scale(ptrs, mask, E8M0: tl.constexpr):
    """fp32 scales, or e8m0 bytes as such; 0 or 2^-127 off the mask (None: no mask)."""
    if mask is None:
        scale = tl.load(ptrs)
    else:
        scale = tl.load(ptrs, mask=mask, other=0)
    if E8M0:
        scale = decode_e8m0(scale)
    return scale


@triton.jit
def add_scaled(
    acc, a, b, sa_ptrs, sb_ptrs, mask_m, mask_n,
    E8M0_A: tl.constexpr, E8M0_B: tl.constexpr, INT8: tl.constexpr, ONE_B: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """acc += (a @ b.T) * scale_a * scale_b for operands inside one group and block; ONE_B: one weight scale a tile."""
    zero = tl.zeros(acc.shape, dtype=tl.int32 if INT8 else tl.float32)
    part = accumulate(a, b, zero, SWAP, 0).to(tl.float32)
    scale_a = load_scale(sa_ptrs, mask_m, E8M0_A)
    if ONE_B:
        scale_a *= load_scale(sb_ptrs, None, E8M0_B)
        acc += part * (scale_a[None, :] if SWAP else scale_a[:, None])
    else:
        scale_b = load_scale(sb_ptrs, mask_n, E8M0_B)
        both = scale_b[:, None] * scale_a[None, :] if SWAP else scale_a[:, None] * scale_b[None, :]
        acc += part * both
    return acc


@triton.jit
def finish(
    acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
    offs_m, offs_n, M, N, stride_sa, stride_sb, stride_za,
):  # fmt: skip
    """Zero point, scales and bias, whichever there are, on an accumulated tile [BLOCK_M, BLOCK_N]; fp32."""
    mask_m, mask_n = offs_m < M, offs_n < N
    if zero_ptr is not None:
        zero = tl.load(zero_ptr + offs_m * stride_za, mask=mask_m, other=0)
        acc -= zero[:, None] * tl.load(colsum_ptr + offs_n, mask=mask_n, other=0)[None, :]
    out = acc.to(tl.float32)
    if scale_a_ptr is not None:
        out *= tl.load(scale_a_ptr + offs_m * stride_sa, mask=mask_m, other=0.0)[:, None]
    if scale_b_ptr is not None:
        out *= tl.load(scale_b_ptr + offs_n * stride_sb, mask=mask_n, other=0.0)[None, :]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    return out


@triton.jit
def store_tile(out_ptr, tile, offs_m, offs_n, M, N, stride_om):
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(out_ptr + offs_m[:, None] * stride_om + offs_n[None, :], tile.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def reduce_kernel(
    part_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, out_ptr,
    M, N, stride_om, stride_sa, stride_sb, stride_za,
    PDL: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a split product in their order, so that the result does not depend on timing."""
    after_previous(PDL)
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    ptrs = part_ptr + offs_m[:, None] * N + offs_n[None, :]
    acc = tl.load(ptrs, mask=mask, other=0)
    step = M.to(tl.int64) * N
    for _ in range(1, SPLIT_K):
        ptrs += step
        acc += tl.load(ptrs, mask=mask, other=0)
    out = finish(
        acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
        offs_m, offs_n, M, N, stride_sa, stride_sb, stride_za,
    )  # fmt: skip
    store_tile(out_ptr, out, offs_m, offs_n, M, N, stride_om)


def few_tokens(M: int, *rows: tuple[int, ...]) -> Iterator[Config]:
    """Defaults for few tokens: `rows` are (largest M, BLOCK_M, BLOCK_N, BLOCK_K, SPLIT_K, num_stages), measured on an
    H200 at N x K of 4096 x 7168 and 10240 x 8192. Splitting K keeps all SMs reading weights."""
    for limit, m, n, k, split, stages in rows:
        if limit >= M:
            yield Config(
                kernel="split", SWAP=True, GROUP_M=1, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=4,
                num_stages=stages,
            )  # fmt: skip
            return


def tile_space(M: int, widths: tuple[int, ...]) -> Iterator[Config]:
    """Candidates of `tile` and `split` kernels for M tokens (on the key grid), K in steps of `widths`."""
    heights = [m for m in (16, 32, 64, 128) if m <= max(16, M)]  # a taller tile would only hold padding
    for m, n, k, warps, stages, group in itertools.product(
        heights, (32, 64, 128, 256), widths, (4, 8), (2, 3, 4, 5, 6), (1, 8)
    ):
        if m * n <= 128 * 256 and (m >= 64 or M <= 64) and not (warps == 8 and m * n < 64 * 64):
            swap = m <= 64 and n >= 64 and M <= 256
            yield Config(
                kernel="tile", SWAP=swap, GROUP_M=group, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
    if M <= 256:
        for m, n, k, stages, split in itertools.product(
            [m for m in heights if m <= 64], (64, 128), widths[-2:], (3, 4, 6), (2, 4, 8)
        ):
            yield Config(
                kernel="split", SWAP=True, GROUP_M=1, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=4,
                num_stages=stages,
            )  # fmt: skip


def persistent_space(M: int, tiles: tuple[tuple[int, int, int, int], ...], stages: tuple[int, ...]) -> Iterator[Config]:
    """Candidates of `persistent` kernels: `tiles` are (BLOCK_M, BLOCK_N, num_warps, programs an SM)."""
    if M < 128:
        return
    for (m, n, warps, per_sm), k, depth, group, flatten in itertools.product(
        tiles, (64, 128), stages, (4, 8, 16), (False, True)
    ):
        yield Config(
            kernel="persistent", GROUP_M=group, FLATTEN=flatten, PER_SM=per_sm, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
            num_warps=warps, num_stages=depth,
        )  # fmt: skip


def scale_step(K: int, *periods: int) -> int:
    """The widest step of columns, counted from 0, that no change of scale divides; `periods`: theirs, and the first."""
    changes = [n for n in periods if 0 < n < K]
    return math.gcd(*changes) if changes else triton.next_power_of_2(max(K, 1))


def stages_held(config: Config, device: Device) -> float:
    """Tiles of each operand in shared memory at a time.

    The pipeline of gfx942 keeps the last one in registers. gfx950 copies all of them there, and pads them by a 32nd.
    """
    stages: int = config["num_stages"]
    return {"gfx942": max(1, stages - 1), "gfx950": stages * 33 / 32}.get(device.arch, stages)


def fits_descriptors(*tensors: Tensor) -> bool:
    """Can tensor descriptors read these? They want 16-byte aligned bases and rows, and at least one element."""
    return all(t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.numel() > 0 for t in tensors)


def warps_fit(config: Config, device: Device, a: Tensor, b: Tensor, out_dtype: torch.dtype, sums: int) -> bool:
    """Can the `warps` kernels run this? `sums` accumulators a tile must stay in registers, and buffers must fit."""
    m, n = config["BLOCK_M"], config["BLOCK_N"]
    if not AVAILABLE or m * n * sums > 256 * 192 or not fits_descriptors(a, b):
        return False
    ring = config["STAGES"] * ((m + n) * config["BLOCK_K"] + 16)
    rows_l, rows_r = consumer_tile(config)
    whole = not config["SWAP"] and config["SPLIT_K"] == 1  # written through shared memory
    if whole and b.shape[0] * out_dtype.itemsize % 16 != 0:
        return False
    if right_parts(rows_r)[1] and not (whole and m >= 128):
        return False
    pieces = 4 * rows_l * piece_columns(rows_r) * out_dtype.itemsize
    return ring + whole * pieces + 8 * max(m, n) + 256 <= device.shared_limit


def turns_fit(config: Config, device: Device, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Can the `turns` kernel run this?"""
    m, n, split = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT_K"]
    if not AVAILABLE or not fits_descriptors(a, b) or m != 64 or (split == 1 and b.shape[0] * out_dtype.itemsize % 16):
        return False
    if (config["PER_SM"] > 1 and n > 64) or config["STAGES"] % 2:  # registers; a ring for each consumer
        return False
    pieces = (split == 1) * 2 * m * piece_columns(n) * out_dtype.itemsize
    ring = config["STAGES"] * ((m + n) * config["BLOCK_K"] + 16)
    return (ring + pieces + 4 * m * n + 1024) * config["PER_SM"] <= device.shared_limit


def parts_buffer(out: Tensor, split: int, dtype: torch.dtype) -> Tensor:
    """Where a product split `split` ways along K puts its raw sums; the output itself if it is not split."""
    return out if split == 1 else torch.empty((split, *out.shape), dtype=dtype, device=out.device)


def reduce_parts(parts: Tensor, out: Tensor, epilogue: tuple[Tensor | None, ...], strides: list[int]) -> None:
    """Launch the reduction of a split product."""
    M, N = out.shape
    reduce_kernel[(triton.cdiv(M, 8), triton.cdiv(N, 128))](
        parts, *epilogue, out, M, N, out.stride(0), *strides,
        SPLIT_K=parts.shape[0], BLOCK_M=8, BLOCK_N=128, num_warps=4, enable_fp_fusion=False,
        **dependent(of(out.device), M),
    )  # fmt: skip


def broadcast_strides(*tensors: Tensor | None) -> list[int]:
    """Row strides of (rows, 1) tensors: 0 where one element serves all rows, or there is none."""
    return [0 if t is None or t.shape[0] == 1 else t.stride(0) for t in tensors]
