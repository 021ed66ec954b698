"""scaled_mm: product of two quantized matrices whose scales are constant along K.

    out[m, n] = scale_a[m] * scale_b[n] * (sum_k a[m, k] * b[n, k] - zero_point_a[m] * colsum_b[n]) + bias[n]

A scale of shape (rows, 1) is per token for `a` and per channel for `b`; (1, 1) is per tensor; any mix. Scales that
change along K: scaled_mm_group. FP8 products accumulate in fp32, INT8 products exactly in int32; the bias is added in
fp32 before the single rounding to the output.

Kernels: `tile`, pointers, one tile a program, runs everywhere (SWAP puts the weights on the matrix instruction's 64-row
side, for few tokens); `split`, the same with K divided over programs and a second, ordered reduction; `persistent`,
tensor descriptors (TMA), PER_SM programs an SM; `warps` (sm90, Gluon), persistent, some warps load and others multiply;
`late` (sm90, Gluon), likewise, for many tokens; `shares` (sm90, Gluon), for few tokens, whose programs divide all steps
of K evenly in one launch.

Source: the W8A8 recipes of torch.nn.functional.scaled_mm (TensorWise, RowWise).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fpk.check import (
    FLOAT_INPUTS,
    expect_bias,
    expect_dtype,
    expect_fp8_matmul,
    expect_inner_contiguous,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import FP8
from fpk.kernels._tile import after_previous, tile_of
from fpk.kernels.gemm._baselines import torch_scaled_mm
from fpk.kernels.gemm._gluon import TYPES, consumer_tile, descriptor, piece_columns, right_parts
from fpk.kernels.gemm._gluon_late import late_fits, late_kernel, launch_late
from fpk.kernels.gemm._gluon_mm import warps_kernel
from fpk.kernels.gemm._gluon_shares import shares_kernel
from fpk.kernels.gemm._mm import (
    OUT_TYPES,
    TMA_TARGETS,
    accumulate,
    broadcast_strides,
    dependent,
    few_tokens,
    finish,
    load_k,
    parts_buffer,
    persistent_space,
    reduce_parts,
    share_of,
    stages_held,
    store_tile,
    tile_space,
    warps_fit,
)
from fpk.kernels.gemm._scaled_space import scaled_mm_configs
from fpk.kernels.gemm._shares import LAUNCHER_FIELDS, launch_shares, shares_fit
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, sample, scales, strided
from fpk.shapes import linear_cases


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    zero_point_a: Tensor | None = None, colsum_b: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    if a.dtype is torch.int8:
        K = a.shape[1]  # 1024 products of at most 2^14 sum exactly in fp32
        pieces = [(a[:, k : k + 1024].float() @ b[:, k : k + 1024].float().T).long() for k in range(0, max(K, 1), 1024)]
        total = sum(pieces[1:], pieces[0])
        if zero_point_a is not None and colsum_b is not None:
            total = total - zero_point_a.long() * colsum_b.long()
        acc = total.float()
    else:
        acc = a.float() @ b.float().T
    out = acc * scale_a * scale_b.T
    return (out if bias is None else out + bias.float()).to(out_dtype)


def check(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, zero_point_a: Tensor | None,
    colsum_b: Tensor | None, out_dtype: torch.dtype, **_: Any,
) -> None:  # fmt: skip
    expect_rank("scaled_mm.a", a, 2)
    expect_rank("scaled_mm.b", b, 2)
    (M, K), N = a.shape, b.shape[0]
    expect_dtype("scaled_mm.a", a, *FP8, torch.int8)
    expect_dtype("scaled_mm.b", b, a.dtype)
    expect_shape("scaled_mm.b", b, (N, K))
    for name, tensor in (("a", a), ("b", b)):
        expect_inner_contiguous(f"scaled_mm.{name}", tensor)
    expect_shape("scaled_mm.scale_a", scale_a, (M, 1), (1, 1))
    expect_shape("scaled_mm.scale_b", scale_b, (N, 1), (1, 1))
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        expect_dtype(f"scaled_mm.{name}", tensor, torch.float32)
    expect_one_of("scaled_mm.out_dtype", out_dtype, FLOAT_INPUTS)
    expect_bias("scaled_mm.bias", bias, N)
    if (zero_point_a is None) != (colsum_b is None):
        given, absent = ("colsum_b", "zero_point_a") if zero_point_a is None else ("zero_point_a", "colsum_b")
        raise ValueError(f"scaled_mm.{absent}: expected together with {given}, got None")
    if zero_point_a is not None and colsum_b is not None:
        expect_dtype("scaled_mm.a (with a zero point)", a, torch.int8)
        expect_shape("scaled_mm.zero_point_a", zero_point_a, (M, 1), (1, 1))
        expect_shape("scaled_mm.colsum_b", colsum_b, (N,))
        for name, tensor in (("zero_point_a", zero_point_a), ("colsum_b", colsum_b)):
            expect_dtype(f"scaled_mm.{name}", tensor, torch.int32)
    if a.dtype is torch.int8 and K > 65536:
        raise NotImplementedError(f"scaled_mm.a: int8 sums are exact in int32 up to K = 65536, got K = {K}")
    expect_fp8_matmul("scaled_mm", a)


@triton.jit(do_not_specialize=["M"])
def _tile_kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr, out_ptr,
    M, N, K,
    stride_am, stride_bn, stride_om, stride_sa, stride_sb, stride_za,
    PDL: tl.constexpr, INT8: tl.constexpr, PROMOTE: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One output tile a program. With SPLIT_K > 1, program_id(1) sums its share of K and stores the raw sum."""
    m, n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    part = tl.program_id(1)
    begin, end = share_of(K, part, BLOCK_K, SPLIT_K)
    offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows beyond the edge read row 0: no mask in the loop, and the store drops them
    a_rows = a_ptr + tl.where(offs_m < M, offs_m, 0)[:, None] * stride_am
    b_rows = b_ptr + tl.where(offs_n < N, offs_n, 0)[:, None] * stride_bn
    after_previous(PDL)

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.int32 if INT8 else tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if INT8 else tl.float32)
    for k in range(begin, end, BLOCK_K):
        a = load_k(a_rows, k, K, BLOCK_K, EVEN_K)
        b = load_k(b_rows, k, K, BLOCK_K, EVEN_K)
        acc = accumulate(a, b, acc, SWAP, PROMOTE)
    if SWAP:
        acc = tl.trans(acc)

    if SPLIT_K == 1:
        out = finish(
            acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
            offs_m, offs_n, M, N, stride_sa, stride_sb, stride_za,
        )  # fmt: skip
        store_tile(out_ptr, out, offs_m, offs_n, M, N, stride_om)
    else:
        store_tile(out_ptr + part.to(tl.int64) * M * N, acc, offs_m, offs_n, M, N, N)


@triton.jit(do_not_specialize=["M"])
def _persistent_kernel(
    a_desc, b_desc, out_desc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
    M, N, K,
    stride_sa, stride_sb, stride_za,
    INT8: tl.constexpr, PROMOTE: tl.constexpr, OUT: tl.constexpr, GROUP_M: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program walks over output tiles; descriptors read zeros beyond the edges and drop stores there."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32 if INT8 else tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([m * BLOCK_M, k])
            b = b_desc.load([n * BLOCK_N, k])
            acc = accumulate(a, b, acc, False, PROMOTE)
        out = finish(
            acc, scale_a_ptr, scale_b_ptr, bias_ptr, zero_ptr, colsum_ptr,
            m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N), M, N,
            stride_sa, stride_sb, stride_za,
        )  # fmt: skip
        out_desc.store([m * BLOCK_M, n * BLOCK_N], out.to(OUT))


def configs(a: Tensor, b: Tensor, fast_accum: bool, **_: Any):
    tile = dict(kernel="tile", SWAP=False, GROUP_M=8)
    if of(a.device).arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(**tile, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2)
    M = bucket(a.shape[0])
    if of(a.device).arch == "sm90":
        is_int8 = a.dtype is torch.int8
        N, K = b.shape
        yield from scaled_mm_configs(M, N, K, not fast_accum and not is_int8, is_int8, of(a.device).sm_count)
    yield from few_tokens(M, (16, 16, 64, 256, 4, 3))
    if M <= 64:
        yield Config(
            kernel="tile", SWAP=True, GROUP_M=1, BLOCK_M=max(16, M), BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=4
        )
    if M >= 1024 and (fast_accum or a.dtype is torch.int8):
        yield Config(
            kernel="persistent", GROUP_M=8, FLATTEN=False, PER_SM=1, BLOCK_M=128, BLOCK_N=256, BLOCK_K=128,
            num_warps=8, num_stages=3,
        )  # fmt: skip
    elif M >= 1024:
        # promoting to fp32 needs registers for two sums; one program's products cover another's promotion
        yield Config(
            kernel="persistent", GROUP_M=8, FLATTEN=False, PER_SM=2, BLOCK_M=64, BLOCK_N=128, BLOCK_K=128,
            num_warps=4, num_stages=3,
        )  # fmt: skip
    yield Config(**tile, BLOCK_M=64, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=3)
    yield Config(**tile, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=2)

    yield from tile_space(M, (64, 128, 256))
    yield from persistent_space(
        M,
        ((128, 256, 8, 1), (128, 128, 8, 1), (128, 128, 8, 2), (128, 128, 4, 1), (64, 256, 4, 1), (64, 256, 4, 2),
         (64, 128, 4, 2), (64, 128, 4, 3), (256, 128, 8, 1)),
        (3, 4, 5),
    )  # fmt: skip


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, bias: Tensor | None, zero_point_a: Tensor | None,
    out_dtype: torch.dtype, fast_accum: bool, **_: Any,
) -> bool:  # fmt: skip
    if config["kernel"] == "late":
        if not (fast_accum or a.dtype is torch.int8) or out_dtype is not torch.bfloat16:
            return False
        if bias is not None or zero_point_a is not None:  # not seen on a GPU yet
            return False
        return late_fits(config, device, a, b, out_dtype)
    if config["kernel"] == "shares":
        return zero_point_a is None and shares_fit(config, device, a, b, a.dtype is not torch.int8 and not fast_accum)
    if config["kernel"] == "warps":
        is_int8 = a.dtype is torch.int8
        if is_int8 and right_parts(consumer_tile(config)[1])[0] > 128:  # triton knows no such instruction
            return False
        promoted = not is_int8 and not fast_accum
        return warps_fit(config, device, a, b, out_dtype, 2 if promoted else 1)
    stages = stages_held(config, device)
    buffers = (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"] * stages
    if config["kernel"] == "persistent":
        # a descriptor wants 16-byte aligned bases and rows, and at least one element
        aligned = all(t.data_ptr() % 16 == 0 and t.stride(0) % 16 == 0 for t in (a, b))
        if not aligned or (b.shape[0] * out_dtype.itemsize) % 16 != 0 or 0 in (*a.shape, *b.shape):
            return False
        buffers += config["BLOCK_M"] * config["BLOCK_N"] * out_dtype.itemsize
        buffers *= config["PER_SM"]
    return buffers + 1024 <= device.shared_limit


def key(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, zero_point_a: Tensor | None,
    out_dtype: torch.dtype, fast_accum: bool, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    return dict(
        M=bucket(a.shape[0]), N=b.shape[0], K=b.shape[1], dtype=str(a.dtype), out_dtype=str(out_dtype),
        a="tensor" if scale_a.stride(0) == 0 or scale_a.shape[0] == 1 else "token",
        b="tensor" if scale_b.stride(0) == 0 or scale_b.shape[0] == 1 else "channel",
        bias=int(bias is not None), zero_point=int(zero_point_a is not None), fast_accum=int(fast_accum),
    )  # fmt: skip


def cost(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: Any) -> Cost:
    (M, K), N = a.shape, b.shape[0]
    moved = M * K + N * K + M * N * out_dtype.itemsize + 4 * (scale_a.numel() + scale_b.numel())
    return Cost(flops=2 * M * N * K, bytes=moved)


def tolerance(a: Tensor, out_dtype: torch.dtype, fast_accum: bool, **_: Any) -> float:
    if a.dtype is torch.int8:
        return 0.0  # exact sums, and the same fp32 operations in the same order
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 1e-6}[out_dtype]
    # what the tensor cores of sm90 lose inside 128 products, and without promotion over all of K (up to 16384)
    lost = 0.0 if a.device.type == "cpu" else (3.5e-3 if fast_accum else 3e-4)
    return (rounding**2 + lost**2) ** 0.5 * 1.1


def inputs(
    *, M, N, K, a_granularity="token", b_granularity="channel", bias=False, zero_point=False, fast_accum=False,
    dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    a = strided(sample((M, K), dtype, kind, device, seed), layout)
    b = strided(sample((N, K), dtype, "normal", device, seed + 1), layout)
    asymmetric = zero_point and dtype is torch.int8
    rows_a = M if a_granularity == "token" else 1
    g = generator(seed + 4, device)
    return dict(
        a=a, b=b,
        scale_a=scales((rows_a, 1), device, seed + 2),
        scale_b=scales((N if b_granularity == "channel" else 1, 1), device, seed + 3),
        bias=sample((N,), out_dtype, "normal", device, seed + 5) if bias else None,
        zero_point_a=torch.randint(-128, 128, (rows_a, 1), generator=g, device=device, dtype=torch.int32)
        if asymmetric else None,
        colsum_b=b.sum(1, dtype=torch.int32) if asymmetric else None,
        out_dtype=out_dtype, fast_accum=fast_accum,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 16, 33, 70), N=(1, 16, 33, 80), K=(0, 1, 16, 100, 128, 272),
        a_granularity=("token", "tensor"), b_granularity=("channel", "tensor"), bias=(False, True),
        zero_point=(False, True), fast_accum=(False, True), dtype=(torch.float8_e4m3fn, torch.int8, torch.float8_e5m2),
        out_dtype=FLOAT_INPUTS, kind=("normal", "zeros", "zero_rows"), layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        tile=Kernel(_tile_kernel, matrix=True),
        split=Kernel(_tile_kernel, matrix=True),
        persistent=Kernel(_persistent_kernel, targets=TMA_TARGETS, matrix=True),
        warps=Kernel(warps_kernel, targets=("sm90",), interpretable=False, matrix=True),
        late=Kernel(late_kernel, targets=("sm90",), interpretable=False, matrix=True),
        shares=Kernel(shares_kernel, targets=("sm90",), interpretable=False, matrix=True),
    ),
    configs=configs, launcher_fields=LAUNCHER_FIELDS, legal=legal, key=key,
    cost=cost, cases=linear_cases(), baselines=dict(torch=torch_scaled_mm),
)  # fmt: skip
def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    zero_point_a: Tensor | None = None, colsum_b: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply quantized activations by quantized weights, scales constant along K. K = 0 gives zeros, or the bias.

    Args:
        a: (M, K) activations, an fp8 type or int8, rows contiguous.
        b: (N, K) weights, same dtype as `a`, rows contiguous.
        scale_a: (M, 1) per token or (1, 1) per tensor, fp32; value = code * scale.
        scale_b: (N, 1) per channel or (1, 1) per tensor, fp32.
        bias: (N,) fp32, bf16 or fp16, or None; added in fp32 after scaling.
        zero_point_a: (M, 1) or (1, 1) int32 or None, int8 only; value = (code - zero_point) * scale.
        colsum_b: (N,) int32, sums of b's rows; needed with zero_point_a.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: let FP8 tensor cores accumulate by themselves (about 14 bits on sm90); False keeps the relative
            error of a bf16 result below 1.8e-3 at K = 16384.

    Returns:
        (M, N) of `out_dtype`.

    Raises:
        ValueError: a shape, dtype or stride does not fit.
        NotImplementedError: FP8 on a GPU without FP8 matrix units, or int8 with K > 65536.
    """
    (M, K), N = a.shape, b.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    is_int8, strides = a.dtype is torch.int8, broadcast_strides(scale_a, scale_b, zero_point_a)
    if config["kernel"] == "shares":
        promoted = not is_int8 and not fast_accum
        launch_shares(of(a.device), a, b, (scale_a, scale_b), bias, strides, out, promoted, config)
        return out
    config = dict(config)
    kernel, split = config.pop("kernel"), config.pop("SPLIT_K", 1)
    epilogue = (scale_a, scale_b, bias, zero_point_a, colsum_b)
    if kernel == "late":
        launch_late(of(a.device), a, b, epilogue, strides, out, config)
        return out
    promote = 0 if is_int8 or fast_accum else min(128, config["BLOCK_K"])
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    if kernel == "persistent":
        programs = min(config.pop("PER_SM") * of(a.device).sm_count, triton.cdiv(M, block_m) * triton.cdiv(N, block_n))
        _persistent_kernel[(programs,)](
            TensorDescriptor.from_tensor(a, [block_m, block_k]), TensorDescriptor.from_tensor(b, [block_n, block_k]),
            TensorDescriptor.from_tensor(out, [block_m, block_n]), *epilogue,
            M, N, K, *strides,
            INT8=is_int8, PROMOTE=promote, OUT=OUT_TYPES[out_dtype], enable_fp_fusion=False, **config,
        )  # fmt: skip
        return out
    parts = parts_buffer(out, split, torch.int32 if is_int8 else torch.float32)
    if kernel == "warps":
        swap, splits = config["SWAP"], split > 1
        rows_l, rows_r = consumer_tile(config)
        wide, narrow = right_parts(rows_r)
        left, right = (b, a) if swap else (a, b)
        items = triton.cdiv(M, block_m) * triton.cdiv(N, block_n) * split
        warps_kernel[(min(of(a.device).sm_count, items),)](
            descriptor(left, rows_l, block_k), descriptor(right, wide, block_k),
            descriptor(right, narrow, block_k) if narrow else None,
            None if swap or splits else descriptor(out, rows_l, piece_columns(rows_r)),
            parts if splits or swap else None, *epilogue, M, N, K, out.stride(0), *strides,
            CODES=TYPES[a.dtype], INT8=is_int8, PROMOTE=4 if promote else 0, OUT=OUT_TYPES[out_dtype],
            SPLIT_K=split, enable_fp_fusion=False, **config, **dependent(of(a.device), M),
        )  # fmt: skip
        if splits:
            reduce_parts(parts, out, epilogue, strides)
        return out
    _tile_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n), split)](
        a, b, *epilogue, parts,
        M, N, K, a.stride(0), b.stride(0), out.stride(0), *strides,
        INT8=is_int8, PROMOTE=promote, EVEN_K=K % block_k == 0, SPLIT_K=split, enable_fp_fusion=False,
        **config, **dependent(of(a.device), M),
    )  # fmt: skip
    if split > 1:
        reduce_parts(parts, out, epilogue, strides)
    return out
