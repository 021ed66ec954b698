"""mm_weight_only: product of bf16 or fp16 activations and quantized weights.

    out[m, n] = sum_k a[m, k] * b[n, k] * scale_b[n // rows, k // cols]  (+ bias[n])

Codes are decoded to the activations' type, which holds every FP8 and INT8 value exactly, and multiplied by the matrix
unit; scales are applied in fp32 to sums, never to weights that would be rounded again. Needs no FP8 unit.

Kernels: `tile`, K in steps that lie inside one group of columns (SWAP puts the weights on the matrix instruction's
64-row side, for few tokens); `split`, the same with K divided over programs and an ordered reduction; `segment`, steps
of any length, for groups that no tile divides; `warps` and `direct` (sm90, Gluon), persistent, some warps load, others
decode and multiply from registers, with and without columns renamed; `shares` (sm90, Gluon), the same with equal shares
of K for every program and 64 rows of weights for four warps.

Source: W8A16 inference (what vLLM serves through Marlin).
"""

import itertools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    expect_bias,
    expect_dtype,
    expect_granularity,
    expect_inner_contiguous,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import E8M0, FP8, Granularity, decode, expand_groups
from fpk.kernels._tile import after_previous, decode_fp8, tile_of
from fpk.kernels.gemm._gluon import AVAILABLE, TYPES, descriptor
from fpk.kernels.gemm._gluon_weight import weight_warps_kernel
from fpk.kernels.gemm._gluon_weight_shares import weight_shares_kernel
from fpk.kernels.gemm._mm import (
    accumulate,
    dependent,
    few_tokens,
    finish,
    fits_descriptors,
    load_k,
    load_scale,
    parts_buffer,
    reduce_parts,
    share_of,
    stages_held,
    store_tile,
    tile_space,
)
from fpk.kernels.gemm._warps_space import weight_only_configs
from fpk.kernels.gemm._weight_shares import LAUNCHER_FIELDS, launch_shares, shares_configs, shares_fit, shares_space
from fpk.op import Cost, Kernel, op
from fpk.samples import sample, scales, strided
from fpk.shapes import linear_cases


def reference(
    a: Tensor, b: Tensor, scale_b: Tensor, rows: int = 1, cols: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    factor = decode(scale_b, E8M0) if scale_b.dtype is torch.uint8 else scale_b
    value = b.float() if b.dtype is torch.int8 else decode(b, FP8[b.dtype])
    out = a.float() @ (value * expand_groups(factor, b.shape, rows, cols)).T
    return (out if bias is None else out + bias.float()).to(out_dtype or a.dtype)


def check(
    a: Tensor, b: Tensor, scale_b: Tensor, rows: int, cols: int, bias: Tensor | None, out_dtype: torch.dtype | None,
    **_: Any,
) -> None:  # fmt: skip
    expect_rank("mm_weight_only.a", a, 2)
    expect_rank("mm_weight_only.b", b, 2)
    expect_not_empty("mm_weight_only.a", a, 1)
    expect_dtype("mm_weight_only.a", a, torch.bfloat16, torch.float16)
    expect_dtype("mm_weight_only.b", b, *FP8, torch.int8)
    N = b.shape[0]
    expect_shape("mm_weight_only.b", b, (N, a.shape[1]))
    for name, tensor in (("a", a), ("b", b)):
        expect_inner_contiguous(f"mm_weight_only.{name}", tensor)
    expect_granularity("mm_weight_only", rows=rows, cols=cols)
    expect_shape("mm_weight_only.scale_b", scale_b, Granularity("", rows, cols).scale_shape(b.shape))
    expect_dtype("mm_weight_only.scale_b", scale_b, torch.float32, torch.uint8)
    if out_dtype is not None:
        expect_one_of("mm_weight_only.out_dtype", out_dtype, FLOAT_INPUTS)
    expect_bias("mm_weight_only.bias", bias, N)


@triton.jit
def _decoded(
    b_rows, k, stop, DTYPE: tl.constexpr, INTEGERS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN_CODE: tl.constexpr, IEEE: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A tile of weight codes as DTYPE, exactly; INTEGERS decodes fp8 bytes where the ISA does not convert them."""
    b = load_k(b_rows, k, stop, BLOCK_K, EVEN_K)
    if INTEGERS:
        b = decode_fp8(b, MANTISSA, BIAS, NAN_CODE, IEEE)
    elif tl.bfloat16 == DTYPE and b.dtype.is_fp8():
        b = b.to(tl.float16).to(tl.float32)  # exact, and faster than the direct conversion on sm90
    return b.to(DTYPE)


@triton.jit(do_not_specialize=["M", "stride_sk"])
def _weight_only_kernel(
    a_ptr, b_ptr, scale_ptr, bias_ptr, out_ptr,
    M, N, K,
    stride_am, stride_bn, stride_om, stride_sn, stride_sk,
    ROWS: tl.constexpr, COLS: tl.constexpr, E8M0: tl.constexpr, INTEGERS: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, NAN_CODE: tl.constexpr, IEEE: tl.constexpr, EVEN_K: tl.constexpr, SEGMENTS: tl.constexpr,
    PDL: tl.constexpr, SWAP: tl.constexpr, SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One output tile a program. With SPLIT_K > 1, program_id(1) sums its share of K and stores the raw sum."""
    m, n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    part = tl.program_id(1)
    begin, end = share_of(K, part, BLOCK_K, SPLIT_K)
    offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    # rows beyond the edge read row 0: no mask in the loop, and the store drops them
    a_rows = a_ptr + tl.where(offs_m < M, offs_m, 0)[:, None] * stride_am
    b_rows = b_ptr + tl.where(mask_n, offs_n, 0)[:, None] * stride_bn
    after_previous(PDL)
    scale_rows = scale_ptr + (offs_n // ROWS if ROWS > 0 else offs_n * 0) * stride_sn
    DTYPE: tl.constexpr = a_ptr.dtype.element_ty

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if COLS == -1:  # one scale a row or fewer: it waits until the end
        for k in range(begin, end, BLOCK_K):
            a = load_k(a_rows, k, K, BLOCK_K, EVEN_K)
            b = _decoded(b_rows, k, K, DTYPE, INTEGERS, MANTISSA, BIAS, NAN_CODE, IEEE, BLOCK_K, EVEN_K)
            acc = accumulate(a, b, acc, SWAP, 0)
        scale = load_scale(scale_rows, mask_n, E8M0)
        acc *= scale[:, None] if SWAP else scale[None, :]
    elif SEGMENTS:
        k = 0
        while k < K:
            stop = tl.minimum(tl.minimum((k // COLS + 1) * COLS, k + BLOCK_K), K)
            a = load_k(a_rows, k, stop, BLOCK_K, False)
            b = _decoded(b_rows, k, stop, DTYPE, INTEGERS, MANTISSA, BIAS, NAN_CODE, IEEE, BLOCK_K, False)
            scale = load_scale(scale_rows + k // COLS * stride_sk.to(tl.int64), mask_n, E8M0)
            part_sum = accumulate(a, b, tl.zeros(acc.shape, dtype=tl.float32), SWAP, 0)
            acc += part_sum * (scale[:, None] if SWAP else scale[None, :])
            k = stop
    else:
        for k in range(begin, end, BLOCK_K):
            a = load_k(a_rows, k, K, BLOCK_K, EVEN_K)
            b = _decoded(b_rows, k, K, DTYPE, INTEGERS, MANTISSA, BIAS, NAN_CODE, IEEE, BLOCK_K, EVEN_K)
            scale = load_scale(scale_rows + k // COLS * stride_sk.to(tl.int64), mask_n, E8M0)
            part_sum = accumulate(a, b, tl.zeros(acc.shape, dtype=tl.float32), SWAP, 0)
            acc += part_sum * (scale[:, None] if SWAP else scale[None, :])
    if SWAP:
        acc = tl.trans(acc)
    if SPLIT_K == 1:
        acc = finish(acc, None, None, bias_ptr, None, None, offs_m, offs_n, M, N, 0, 0, 0)
        store_tile(out_ptr, acc, offs_m, offs_n, M, N, stride_om)
    else:
        store_tile(out_ptr + part.to(tl.int64) * M * N, acc, offs_m, offs_n, M, N, N)


def configs(a: Tensor, b: Tensor, cols: int, **_: Any):
    M = bucket(a.shape[0])
    wide = 64 if cols < 0 else max(16, min(64, cols & -cols))
    if of(a.device).arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(
            kernel="tile", SWAP=False, GROUP_M=8, BLOCK_M=64, BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=2
        )
    if of(a.device).arch == "sm90":
        (N, K), sms = b.shape, of(a.device).sm_count
        older = weight_only_configs(M, N, sms)
        if 32 < M <= 64 and 0.7 * sms <= triton.cdiv(N, 256) <= sms:  # whole tiles nearly fill one wave
            yield from itertools.islice(older, 1)
        yield from shares_configs(M, N, K, sms)
        yield from older
    yield from few_tokens(M, (16, 16, 128, 128, 8, 3), (64, 64, 64, 128, 4, 3))
    if M <= 64:
        yield Config(
            kernel="tile", SWAP=True, GROUP_M=1, BLOCK_M=max(16, M), BLOCK_N=64, BLOCK_K=wide, num_warps=4,
            num_stages=4,
        )  # fmt: skip
    yield Config(kernel="tile", SWAP=False, GROUP_M=8, BLOCK_M=64, BLOCK_N=128, BLOCK_K=wide, num_warps=4, num_stages=3)
    for k in (64, 32, 16):
        yield Config(
            kernel="segment", SWAP=False, GROUP_M=8, BLOCK_M=64, BLOCK_N=64, BLOCK_K=k, num_warps=4, num_stages=2
        )

    if of(a.device).arch == "sm90":
        yield from shares_space(M)
    yield from tile_space(M, (32, 64, 128))


def stores_tiles(split: int, block_m: int, out: Tensor) -> bool:
    """Does the `warps` kernel write through shared memory? Few tokens it writes as they come."""
    return split == 1 and block_m >= 64 and fits_descriptors(out)


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_b: Tensor, cols: int, out_dtype: torch.dtype | None,
    **_: Any,
) -> bool:  # fmt: skip
    if config["kernel"] == "shares":
        return shares_fit(config, device, a, b, scale_b, cols, out_dtype or a.dtype)
    # a step must lie inside one group of columns
    if config["kernel"] != "segment" and 0 < cols < a.shape[1] and cols % config["BLOCK_K"] != 0:
        return False
    if config["kernel"] in ("warps", "direct"):
        m, n = config["BLOCK_M"], config["BLOCK_N"]
        sums = 2 if 0 < cols < a.shape[1] else 1
        ring = config["STAGES"] * ((2 * m + n) * config["BLOCK_K"] + 24)
        if config["SPLIT_K"] == 1 and m >= 64:
            ring += m // 2 * n * (out_dtype or a.dtype).itemsize  # tiles on their way out
        usual = b.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8) and scale_b.dtype is torch.float32
        return (
            AVAILABLE and usual and m * n * sums <= 256 * 128 and m <= 128 and fits_descriptors(a, b)
            and ring + 1024 <= device.shared_limit
        )  # fmt: skip
    stages = stages_held(config, device)
    buffers = (2 * config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * stages
    # decoded weights pass through shared memory where the matrix unit does not take them from registers
    decoded = 2 * config["BLOCK_N"] * config["BLOCK_K"]
    return buffers + decoded + 2048 <= device.shared_limit


def key(
    a: Tensor, b: Tensor, scale_b: Tensor, rows: int, cols: int, bias: Tensor | None, out_dtype: torch.dtype | None,
    **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    return dict(
        M=bucket(a.shape[0]), N=b.shape[0], K=b.shape[1], a=str(a.dtype), b=str(b.dtype), scale=str(scale_b.dtype),
        rows=rows, cols=cols, out_dtype=str(out_dtype or a.dtype), bias=int(bias is not None),
    )  # fmt: skip


def cost(a: Tensor, b: Tensor, scale_b: Tensor, out_dtype: torch.dtype | None, **_: Any) -> Cost:
    (M, K), N = a.shape, b.shape[0]
    moved = 2 * M * K + N * K + M * N * (out_dtype or a.dtype).itemsize + scale_b.numel() * scale_b.element_size()
    return Cost(flops=2 * M * N * K, bytes=moved)


def tolerance(a: Tensor, out_dtype: torch.dtype | None, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 2e-6}[out_dtype or a.dtype] * 1.1
    # the tensor cores of sm90 cut fp32 sums toward zero every 16 columns: half of a last place on average, of sums
    # that grow with the root of K; together 2^-25 of the result a step (measured: 0.63 of that, K from 272 to 8704)
    return rounding + (0.0 if a.device.type == "cpu" else a.shape[1] / 16 * 2.0**-25)


def inputs(
    *, M, N, K, granularity=(1, -1), scale_format="fp32", bias=False, a_dtype=torch.bfloat16,
    dtype=torch.float8_e4m3fn, out_dtype=None, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    rows, cols = granularity
    shape = Granularity("", rows, cols).scale_shape((N, K))
    scale = scales(shape, device, seed + 2, scale_format == "e8m0")
    return dict(
        a=strided(sample((M, K), a_dtype, kind, device, seed), layout),
        b=strided(sample((N, K), dtype, "normal", device, seed + 1), layout), scale_b=scale, rows=rows, cols=cols,
        bias=sample((N,), a_dtype, "normal", device, seed + 3) if bias else None, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(1, 64, 100, 128, 272),
        granularity=((1, -1), (-1, -1), (1, 32), (128, 128), (32, 64), (1, 48), (20, 100)),
        scale_format=("fp32", "e8m0"), bias=(False, True), a_dtype=(torch.bfloat16, torch.float16),
        dtype=(*FP8, torch.int8), out_dtype=(None, torch.float32), kind=("normal", "zeros", "zero_rows"),
        layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        tile=Kernel(_weight_only_kernel, matrix=True), split=Kernel(_weight_only_kernel, matrix=True),
        segment=Kernel(_weight_only_kernel, matrix=True),
        **{name: Kernel(weight_warps_kernel, targets=("sm90",), interpretable=False, matrix=True)
           for name in ("warps", "direct")},
        shares=Kernel(weight_shares_kernel, targets=("sm90",), interpretable=False, matrix=True),
    ),
    configs=configs, launcher_fields=LAUNCHER_FIELDS, legal=legal, key=key, cost=cost,
    cases=linear_cases(),
)  # fmt: skip
def mm_weight_only(
    a: Tensor, b: Tensor, scale_b: Tensor, rows: int = 1, cols: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply 16-bit activations by quantized weights.

    Args:
        a: (M, K) activations, bf16 or fp16, rows contiguous.
        b: (N, K) weight codes, an fp8 type or int8, rows contiguous.
        scale_b: one element per group of the weight: (N, 1) per channel, (1, 1) per tensor, (cdiv(N, rows),
            cdiv(K, cols)) in general; fp32 or uint8 (e8m0). value = code * scale.
        rows, cols: elements of `b` that share a scale, -1 for the full extent.
        bias: (N,) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32; None is a's type.

    Returns:
        (M, N) of `out_dtype`, accumulated in fp32.

    Raises:
        ValueError: a shape, dtype or stride does not fit, or K is 0.
    """
    (M, K), N = a.shape, b.shape[0]
    out = torch.empty((M, N), dtype=out_dtype or a.dtype, device=a.device)
    if out.numel() == 0:
        return out
    fmt = FP8.get(b.dtype)
    integers = fmt is not None and not of(a.device).has_fp8_conversion(fmt.name)
    if config["kernel"] == "shares":
        launch_shares(of(a.device), a, b, scale_b, rows, bias, out, config)
        return out
    config = dict(config)
    kernel, split = config.pop("kernel"), config.pop("SPLIT_K", 1)
    parts = parts_buffer(out, split, torch.float32)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])
    if kernel in ("warps", "direct"):
        block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
        weight_warps_kernel[(min(of(a.device).sm_count, tiles * split),)](
            descriptor(b, block_n // 2, config["BLOCK_K"]), descriptor(a, block_m, 64),
            descriptor(out, block_m // 2, block_n // 2) if stores_tiles(split, block_m, out) else None, parts,
            scale_b, bias, M, N, K, out.stride(0), *scale_b.stride(),
            CODES=TYPES[b.dtype], FP8=fmt is not None, DTYPE=TYPES[a.dtype],
            OUT=TYPES[out.dtype], ROWS=rows, COLS=cols if cols < K else -1, SPLIT_K=split,
            RENAME=kernel == "warps", **config, **dependent(of(a.device), M),
        )  # fmt: skip
        if split > 1:
            reduce_parts(parts, out, (None, None, bias, None, None), [0, 0, 0])
        return out
    _weight_only_kernel[(tiles, split)](
        a, b.view(torch.uint8) if integers else b, scale_b, bias, parts,
        M, N, K, a.stride(0), b.stride(0), out.stride(0), *scale_b.stride(),
        ROWS=rows, COLS=cols if cols < K else -1, E8M0=scale_b.dtype is torch.uint8, INTEGERS=integers,
        MANTISSA=fmt.mantissa_bits if fmt else 0, BIAS=fmt.bias if fmt else 0, NAN_CODE=fmt.nan_code if fmt else 0,
        IEEE=fmt is not None and fmt.kind == "ieee", EVEN_K=K % config["BLOCK_K"] == 0, SEGMENTS=kernel == "segment",
        SPLIT_K=split, **config, **dependent(of(a.device), M),
    )  # fmt: skip
    if split > 1:
        reduce_parts(parts, out, (None, None, bias, None, None), [0, 0, 0])
    return out
