"""scaled_mm_group: product of two quantized matrices whose scales change along K.

    out[m, n] = sum_k a[m, k] * scale_a[m, k // group]
                    * b[n, k] * scale_b[(n + offset_n) // block_rows, (k + offset_k) // block_cols]  (+ bias[n])

Activations have a scale per `group` columns, weights one per block_rows x block_cols block; block_cols = -1 is a scale
per channel (block_rows = 1) or per tensor (block_rows = -1). The offsets say where in its first block a weight shard
begins, so that a tensor-parallel cut need not meet a block's edge. Every product of codes within one group and block is
summed by the matrix unit and scaled in fp32. Scales that do not change along K: scaled_mm.

Kernels: `tile`, K in steps that lie inside one group and block; `split`, K also divided over programs, with an ordered
reduction; `persistent`, tensor descriptors (TMA), PER_SM programs an SM; `segment`, steps of any length; `warps`,
`turns`, `joint` and `ordered` (sm90, Gluon; _group_hopper), some warps load and others multiply and scale.

Source: the block-scaled FP8 recipe of DeepSeek-V3 (1 x 128 activations, 128 x 128 weights).
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
    expect_granularity,
    expect_inner_contiguous,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import E8M0, FP8, decode
from fpk.kernels._tile import after_previous, tile_of
from fpk.kernels.gemm._baselines import torch_scaled_mm_group
from fpk.kernels.gemm._group_hopper import KERNELS, launch_on_hopper, legal_on_hopper
from fpk.kernels.gemm._group_space import group_configs
from fpk.kernels.gemm._mm import (
    TMA_TARGETS,
    add_scaled,
    dependent,
    few_tokens,
    finish,
    fits_descriptors,
    load_k,
    parts_buffer,
    persistent_space,
    reduce_parts,
    scale_step,
    share_of,
    stages_held,
    store_tile,
    tile_space,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import sample, scales, strided
from fpk.shapes import linear_cases


def reference(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int = 128, block_rows: int = 128,
    block_cols: int = 128, bias: Tensor | None = None, offset_n: int = 0, offset_k: int = 0,
    out_dtype: torch.dtype = torch.bfloat16, fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    factor_a = decode(scale_a, E8M0) if scale_a.dtype is torch.uint8 else scale_a
    factor_b = decode(scale_b, E8M0) if scale_b.dtype is torch.uint8 else scale_b
    K, N = a.shape[1], b.shape[0]
    factor_a = factor_a.repeat_interleave(group, 1)[:, :K]
    if block_rows > 0:
        factor_b = factor_b.repeat_interleave(block_rows, 0)[offset_n : offset_n + N]
    if block_cols > 0:
        factor_b = factor_b.repeat_interleave(block_cols, 1)[:, offset_k : offset_k + K]
    out = (a.float() * factor_a) @ (b.float() * factor_b).T
    return (out if bias is None else out + bias.float()).to(out_dtype)


def check(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int, block_rows: int, block_cols: int,
    bias: Tensor | None, offset_n: int, offset_k: int, out_dtype: torch.dtype, **_: Any,
) -> None:  # fmt: skip
    expect_rank("scaled_mm_group.a", a, 2)
    expect_rank("scaled_mm_group.b", b, 2)
    expect_not_empty("scaled_mm_group.a", a, 1)
    (M, K), N = a.shape, b.shape[0]
    expect_dtype("scaled_mm_group.a", a, *FP8, torch.int8)
    expect_dtype("scaled_mm_group.b", b, a.dtype)
    expect_shape("scaled_mm_group.b", b, (N, K))
    for name, tensor in (("a", a), ("b", b)):
        expect_inner_contiguous(f"scaled_mm_group.{name}", tensor)
    if group < 1:
        raise ValueError(f"scaled_mm_group.group: expected a positive number, got {group}")
    expect_granularity("scaled_mm_group", block_rows=block_rows, block_cols=block_cols)
    for name, offset, extent in (("offset_n", offset_n, block_rows), ("offset_k", offset_k, block_cols)):
        if not 0 <= offset < max(extent, 1):
            raise ValueError(
                f"scaled_mm_group.{name}: expected 0 to {max(extent, 1) - 1} (inside a block), got {offset}"
            )
    blocks_n = 1 if block_rows < 0 else triton.cdiv(N + offset_n, block_rows)
    blocks_k = 1 if block_cols < 0 else triton.cdiv(K + offset_k, block_cols)
    expect_shape("scaled_mm_group.scale_a", scale_a, (M, triton.cdiv(K, group)))
    expect_shape("scaled_mm_group.scale_b", scale_b, (blocks_n, blocks_k))
    for name, tensor in (("scale_a", scale_a), ("scale_b", scale_b)):
        expect_dtype(f"scaled_mm_group.{name}", tensor, torch.float32, torch.uint8)
    expect_one_of("scaled_mm_group.out_dtype", out_dtype, FLOAT_INPUTS)
    expect_bias("scaled_mm_group.bias", bias, N)
    expect_fp8_matmul("scaled_mm_group", a)


@triton.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n", "offset_k"])
def _group_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, bias_ptr, out_ptr,
    M, N, K, offset_n, offset_k,
    stride_am, stride_bn, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E8M0_A: tl.constexpr, E8M0_B: tl.constexpr,
    PDL: tl.constexpr, INT8: tl.constexpr, ONE_B: tl.constexpr, EVEN_K: tl.constexpr,
    SEGMENTS: tl.constexpr, SWAP: tl.constexpr, SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One output tile a program. With SPLIT_K > 1, program_id(1) sums its share of K and stores the raw sum."""
    stride_sak, stride_sbn, stride_sbk = stride_sak.to(tl.int64), stride_sbn.to(tl.int64), stride_sbk.to(tl.int64)
    m, n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    part = tl.program_id(1)
    begin, end = share_of(K, part, BLOCK_K, SPLIT_K)
    offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m, mask_n = offs_m < M, offs_n < N
    # rows beyond the edge read row 0: no mask in the loop, and the store drops them
    a_rows = a_ptr + tl.where(mask_m, offs_m, 0)[:, None] * stride_am
    b_rows = b_ptr + tl.where(mask_n, offs_n, 0)[:, None] * stride_bn
    after_previous(PDL)
    sa_rows = sa_ptr + offs_m * stride_sam
    if ONE_B:
        block_n = (n * BLOCK_N + offset_n) // ROWS if ROWS > 0 else n * 0
    else:
        block_n = (offs_n + offset_n) // ROWS if ROWS > 0 else offs_n * 0
    sb_rows = sb_ptr + block_n * stride_sbn

    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if SEGMENTS:
        k = 0
        while k < K:
            stop = tl.minimum((k // GROUP + 1) * GROUP, k + BLOCK_K)
            block_k = 0
            if COLS > 0:
                block_k = (k + offset_k) // COLS
                stop = tl.minimum(stop, (block_k + 1) * COLS - offset_k)
            stop = tl.minimum(stop, K)
            a = load_k(a_rows, k, stop, BLOCK_K, False)
            b = load_k(b_rows, k, stop, BLOCK_K, False)
            acc = add_scaled(
                acc, a, b, sa_rows + k // GROUP * stride_sak, sb_rows + block_k * stride_sbk, mask_m, mask_n,
                E8M0_A, E8M0_B, INT8, ONE_B, SWAP,
            )  # fmt: skip
            k = stop
    else:
        for k in range(begin, end, BLOCK_K):
            a = load_k(a_rows, k, K, BLOCK_K, EVEN_K)
            b = load_k(b_rows, k, K, BLOCK_K, EVEN_K)
            block_k = (k + offset_k) // COLS if COLS > 0 else 0
            acc = add_scaled(
                acc, a, b, sa_rows + k // GROUP * stride_sak, sb_rows + block_k * stride_sbk, mask_m, mask_n,
                E8M0_A, E8M0_B, INT8, ONE_B, SWAP,
            )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    if SPLIT_K == 1:
        acc = finish(acc, None, None, bias_ptr, None, None, offs_m, offs_n, M, N, 0, 0, 0)
        store_tile(out_ptr, acc, offs_m, offs_n, M, N, stride_om)
    else:
        store_tile(out_ptr + part.to(tl.int64) * M * N, acc, offs_m, offs_n, M, N, N)


@triton.jit(do_not_specialize=["M", "stride_sam", "stride_sak", "stride_sbn", "stride_sbk", "offset_n", "offset_k"])
def _persistent_kernel(
    a_desc, b_desc, sa_ptr, sb_ptr, bias_ptr, out_ptr,
    M, N, K, offset_n, offset_k,
    stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk,
    GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, E8M0_A: tl.constexpr, E8M0_B: tl.constexpr,
    INT8: tl.constexpr, ONE_B: tl.constexpr, GROUP_M: tl.constexpr, FLATTEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program walks over output tiles; descriptors read zeros beyond the edges."""
    stride_sak, stride_sbn, stride_sbk = stride_sak.to(tl.int64), stride_sbn.to(tl.int64), stride_sbk.to(tl.int64)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=FLATTEN):
        m, n = tile_of(tile, tiles_m, tiles_n, GROUP_M)
        offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        if ONE_B:
            block_n = (n * BLOCK_N + offset_n) // ROWS if ROWS > 0 else n * 0
        else:
            block_n = (offs_n + offset_n) // ROWS if ROWS > 0 else offs_n * 0
        sa_rows, sb_rows = sa_ptr + offs_m * stride_sam, sb_ptr + block_n * stride_sbn
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([m * BLOCK_M, k])
            b = b_desc.load([n * BLOCK_N, k])
            block_k = (k + offset_k) // COLS if COLS > 0 else 0
            acc = add_scaled(
                acc, a, b, sa_rows + k // GROUP * stride_sak, sb_rows + block_k * stride_sbk, offs_m < M, offs_n < N,
                E8M0_A, E8M0_B, INT8, ONE_B, False,
            )  # fmt: skip
        acc = finish(acc, None, None, bias_ptr, None, None, offs_m, offs_n, M, N, 0, 0, 0)
        store_tile(out_ptr, acc, offs_m, offs_n, M, N, stride_om)


def configs(a: Tensor, b: Tensor, group: int, block_cols: int, offset_k: int, **_: Any):
    M, step = bucket(a.shape[0]), scale_step(a.shape[1], group, block_cols, block_cols - offset_k)
    wide = min(128, step & -step)  # its largest power of two
    if of(a.device).arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(
            kernel="tile", SWAP=False, GROUP_M=8, BLOCK_M=64, BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=2
        )
    if wide == 128 and of(a.device).arch == "sm90":
        yield from group_configs(M, b.shape[0], b.shape[1], of(a.device).sm_count)
    if wide == 128:
        yield from few_tokens(M, (16, 16, 64, 128, 4, 4), (64, 64, 128, 128, 4, 6))
    if M <= 64:
        yield Config(
            kernel="tile", SWAP=True, GROUP_M=1, BLOCK_M=max(16, M), BLOCK_N=64, BLOCK_K=wide, num_warps=4,
            num_stages=4,
        )  # fmt: skip
    # two programs an SM: one's products cover the other's scaling; without wgmma or tcgen05 four warps would spill
    tile = dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=wide, num_warps=4 if of(a.device).capability in (90, 100, 103) else 8)
    if M >= 256:
        yield Config(kernel="persistent", GROUP_M=8, FLATTEN=False, PER_SM=2, num_stages=3, **tile)
    yield Config(kernel="tile", SWAP=False, GROUP_M=8, num_stages=3, **tile)
    segment = dict(kernel="segment", SWAP=False, GROUP_M=8, BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    yield from (Config(**segment, BLOCK_K=k) for k in (128, 64, 32))
    yield from tile_space(M, (32, 64, 128))
    yield from persistent_space(
        M, ((64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 3), (128, 128, 8, 1), (128, 64, 4, 2), (64, 256, 8, 1)),
        (2, 3, 4),
    )  # fmt: skip


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int,
    block_rows: int, block_cols: int, offset_n: int, offset_k: int, out_dtype: torch.dtype, **_: Any,
) -> bool:  # fmt: skip
    # a matrix instruction wants 32 columns of FP8 or INT8, and a step must not straddle a change of scale
    step, width = scale_step(a.shape[1], group, block_cols, block_cols - offset_k), config["BLOCK_K"]
    if config["kernel"] != "segment" and (width < 32 or step % width != 0):
        return False
    if config["kernel"] in KERNELS:
        return legal_on_hopper(
            config, device, a, b, scale_a, scale_b, group, block_rows, block_cols, offset_n, offset_k, out_dtype
        )
    if config["kernel"] == "persistent" and not fits_descriptors(a, b):
        return False
    buffers = (config["BLOCK_M"] + config["BLOCK_N"]) * width * stages_held(config, device) + 2048
    return buffers * config.get("PER_SM", 1) <= device.shared_limit


def key(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int, block_rows: int, block_cols: int,
    bias: Tensor | None, offset_n: int, offset_k: int, out_dtype: torch.dtype, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    return dict(
        M=bucket(a.shape[0]), N=b.shape[0], K=b.shape[1], dtype=str(a.dtype), out_dtype=str(out_dtype), group=group,
        block_rows=block_rows, block_cols=block_cols, column_scales=int(scale_a.stride(0) == 1),
        scale_a=str(scale_a.dtype), scale_b=str(scale_b.dtype), bias=int(bias is not None),
        offset=int(offset_n != 0 or offset_k != 0),
    )  # fmt: skip


def cost(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype, **_: Any) -> Cost:
    (M, K), N = a.shape, b.shape[0]
    scale_bytes = scale_a.numel() * scale_a.element_size() + scale_b.numel() * scale_b.element_size()
    return Cost(flops=2 * M * N * K, bytes=M * K + N * K + M * N * out_dtype.itemsize + scale_bytes)


def tolerance(a: Tensor, out_dtype: torch.dtype, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 1e-6}[out_dtype]
    # what the tensor cores of sm90 lose inside the products of one step
    lost = 0.0 if a.device.type == "cpu" or a.dtype is torch.int8 else 3e-4
    return (rounding**2 + lost**2) ** 0.5 * 1.1


def inputs(
    *, M, N, K, blocks=(128, 128, 128), offsets=(0, 0), scale_format="fp32", scale_layout="row", bias=False,
    dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    group, rows, cols = blocks
    offset_n, offset_k = offsets[0] % max(rows, 1), offsets[1] % max(cols, 1)
    a = strided(sample((M, K), dtype, kind, device, seed), layout)
    b = strided(sample((N, K), dtype, "normal", device, seed + 1), layout)
    shape_a = (M, triton.cdiv(K, group))
    shape_b = (
        1 if rows < 0 else triton.cdiv(N + offset_n, rows), 1 if cols < 0 else triton.cdiv(K + offset_k, cols)
    )  # fmt: skip
    e8m0 = scale_format == "e8m0"
    scale_a, scale_b = scales(shape_a, device, seed + 2, e8m0), scales(shape_b, device, seed + 3, e8m0)
    if scale_layout == "column":
        scale_a = scale_a.T.contiguous().T
    return dict(
        a=a, b=b, scale_a=scale_a, scale_b=scale_b, group=group, block_rows=rows, block_cols=cols,
        bias=sample((N,), out_dtype, "normal", device, seed + 5) if bias else None, offset_n=offset_n,
        offset_k=offset_k, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(1, 64, 100, 128, 272),
        blocks=((128, 128, 128), (64, 32, 64), (32, 1, -1), (128, -1, -1), (48, 16, 48), (64, 20, 96)),
        offsets=((0, 0), (0, 32), (13, 0), (7, 11), (1, 101)), scale_format=("fp32", "e8m0"),
        scale_layout=("row", "column"), bias=(False, True), dtype=(torch.float8_e4m3fn, torch.int8, torch.float8_e5m2),
        out_dtype=FLOAT_INPUTS, kind=("normal", "zeros", "zero_rows"), layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        **{name: Kernel(_group_kernel, matrix=True) for name in ("tile", "split", "segment")},
        persistent=Kernel(_persistent_kernel, targets=TMA_TARGETS, matrix=True),
        **KERNELS,
    ),
    configs=configs, launcher_fields=("PER_SM",), legal=legal, key=key,
    cost=cost, cases=linear_cases(), baselines=dict(torch=torch_scaled_mm_group),
)  # fmt: skip
def scaled_mm_group(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int = 128, block_rows: int = 128,
    block_cols: int = 128, bias: Tensor | None = None, offset_n: int = 0, offset_k: int = 0,
    out_dtype: torch.dtype = torch.bfloat16, fast_accum: bool = False, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply activations with a scale per group by weights with a scale per block.

    Args:
        a: (M, K) activations, an fp8 type or int8, rows contiguous.
        b: (N, K) weights, same dtype as `a`, rows contiguous.
        scale_a: (M, cdiv(K, group)), fp32 or uint8 (e8m0), any strides; column-major loads fastest.
        scale_b: (cdiv(N + offset_n, block_rows), cdiv(K + offset_k, block_cols)), fp32 or uint8 (e8m0); a -1 makes
            that dimension 1.
        group: columns of `a` that share a scale; the last group may be short.
        block_rows, block_cols: rows and columns of `b` that share a scale, -1 for all.
        bias: (N,) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        offset_n, offset_k: rows and columns of the first block that lie before this shard of the weight.
        out_dtype: bf16, fp16 or fp32.
        fast_accum: accepted like in every FP8 product, without effect: groups and blocks are summed in fp32 anyway.

    Returns:
        (M, N) of `out_dtype`.

    Raises:
        ValueError: a shape, dtype, stride, group or offset does not fit, or K is 0.
        NotImplementedError: FP8 on a GPU without FP8 matrix units.
    """
    (M, K), N = a.shape, b.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if config["kernel"] in KERNELS:
        launch_on_hopper(
            of(a.device), a, b, scale_a, scale_b, bias, out, offset_n, offset_k, config, GROUP=group,
            ROWS=block_rows, COLS=block_cols,
        )  # fmt: skip
        return out
    config = dict(config)
    kernel, split = config.pop("kernel"), config.pop("SPLIT_K", 1)
    block_m, block_n, block_k = (config[f"BLOCK_{d}"] for d in "MNK")
    one_b = block_rows < 0 or (block_rows % block_n == 0 and offset_n % block_n == 0)
    scaling = dict(
        GROUP=group, ROWS=block_rows, COLS=block_cols, E8M0_A=scale_a.dtype is torch.uint8,
        E8M0_B=scale_b.dtype is torch.uint8, INT8=a.dtype is torch.int8, ONE_B=one_b,
    )  # fmt: skip
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    if kernel == "persistent":
        _persistent_kernel[(min(config.pop("PER_SM") * of(a.device).sm_count, tiles),)](
            TensorDescriptor.from_tensor(a, [block_m, block_k]), TensorDescriptor.from_tensor(b, [block_n, block_k]),
            scale_a, scale_b, bias, out,
            M, N, K, offset_n, offset_k, out.stride(0), *scale_a.stride(), *scale_b.stride(), **scaling, **config,
        )  # fmt: skip
        return out
    parts = parts_buffer(out, split, torch.float32)
    _group_kernel[(tiles, split)](
        a, b, scale_a, scale_b, bias, parts,
        M, N, K, offset_n, offset_k,
        a.stride(0), b.stride(0), out.stride(0), *scale_a.stride(), *scale_b.stride(),
        EVEN_K=K % block_k == 0, SEGMENTS=kernel == "segment", SPLIT_K=split, **scaling, **config,
        **dependent(of(a.device), M),
    )  # fmt: skip
    if split > 1:
        reduce_parts(parts, out, (None, None, bias, None, None), [0, 0, 0])
    return out
