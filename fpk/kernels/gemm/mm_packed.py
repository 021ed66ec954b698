"""mm_packed: product of activations and packed weights whose scales change along K.

    out[m, n] = sum_k value_a[m, k] * value_b[n, k]  (+ bias[n])
    value     = (code - zero_point) * 2^shift * scale[., k // group] * global_scale

Weights: MX formats, NVFP4, INT4. Activations: bf16 and fp16 as they are (weight-only), FP8 and INT8 with a scale per
tensor, token or group, MX formats, NVFP4. Packed bytes are all that is read of a weight: codes are decoded in registers
to a type of the matrix unit that holds them exactly (COMPUTE of a config, `_operands.exact_in`), scales join the values
where that is exact, and the sums of their groups in fp32 elsewhere.

Kernels: `tile`, one output tile a program (SWAP puts the weights on the matrix instruction's 64-row side, for few
tokens); `split`, the same with K divided over programs and an ordered reduction; `warps`, Gluon for sm90 and MXFP8
weights with MXFP8 or bf16 activations: warps that load, warps that decode to bf16 and multiply; `native`, by the block
scales of the matrix unit, where it has them (sm100, sm120, gfx950) for the pair.

Source: OCP Microscaling Formats 1.0; NVFP4 and W4A16 inference (vLLM serves them through Marlin and triton_kernels).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_bias, expect_not_empty, expect_one_of, expect_rank
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.kernels._tile import tile_of
from fpk.kernels.gemm._gluon import AVAILABLE
from fpk.kernels.gemm._gluon_mx import launch as launch_warps
from fpk.kernels.gemm._gluon_mx import mx_warps_configs, mx_warps_kernel, shared_bytes, words_of_scales
from fpk.kernels.gemm._mm import broadcast_strides, finish, fits_descriptors, parts_buffer, reduce_parts, store_tile
from fpk.kernels.gemm._native import INTERPRETABLE, TARGETS, native_kernel, native_kinds
from fpk.kernels.gemm._operands import (
    as_bytes,
    columns_of,
    constants,
    expect_as_wide,
    expect_operand,
    operands,
    packed_sum,
    pointer,
    promoted_groups,
    row_strides,
    values,
)
from fpk.kernels.gemm._packed_space import (
    PAIRS,
    allowed_error,
    compute_types,
    fits,
    packed_space,
    sample_operand,
    step_of,
)
from fpk.op import Cost, Kernel, op
from fpk.samples import sample
from fpk.shapes import linear_cases


def reference(
    a: Tensor, b: Tensor, scale_b: Tensor, format_b: str = "mxfp4", global_scale_b: Tensor | None = None,
    zero_point_b: Tensor | None = None, group_b: int = -1, scale_a: Tensor | None = None, format_a: str = "none",
    global_scale_a: Tensor | None = None, group_a: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    left = values(a, scale_a, format_a, global_scale_a, None, group_a)
    out = left @ values(b, scale_b, format_b, global_scale_b, zero_point_b, group_b).T
    return (out if bias is None else out + bias.float()).to(out_dtype)


def check(
    a: Tensor, b: Tensor, scale_b: Tensor, format_b: str, global_scale_b: Tensor | None, zero_point_b: Tensor | None,
    group_b: int, scale_a: Tensor | None, format_a: str, global_scale_a: Tensor | None, group_a: int,
    bias: Tensor | None, out_dtype: torch.dtype, **_: Any,
) -> None:  # fmt: skip
    expect_rank("mm_packed.a", a, 2)
    expect_rank("mm_packed.b", b, 2)
    expect_not_empty("mm_packed.a", a, 1)
    expect_operand("mm_packed", "a", a, scale_a, format_a, global_scale_a, None, group_a)
    expect_operand("mm_packed", "b", b, scale_b, format_b, global_scale_b, zero_point_b, group_b)
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    expect_as_wide("mm_packed", a, left, b, right)
    expect_one_of("mm_packed.out_dtype", out_dtype, FLOAT_INPUTS)
    expect_bias("mm_packed.bias", bias, b.shape[0])


@triton.jit(do_not_specialize=["M", "stride_sam", "stride_sak"])
def _packed_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, zb_ptr, over_a_ptr, over_b_ptr, bias_ptr, out_ptr,
    M, N, K,
    stride_am, stride_bn, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk, stride_zbn, stride_zbk,
    stride_oam, stride_obn,
    FORMAT_A: tl.constexpr, TYPE_A: tl.constexpr, SCALE_A: tl.constexpr, GROUP_A: tl.constexpr, FOLD_A: tl.constexpr,
    UP_A: tl.constexpr, FORMAT_B: tl.constexpr, TYPE_B: tl.constexpr, SCALE_B: tl.constexpr, GROUP_B: tl.constexpr,
    FOLD_B: tl.constexpr, UP_B: tl.constexpr, POST: tl.constexpr, PROMOTE: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One output tile a program. With SPLIT_K > 1, program_id(1) sums its share of K and stores the raw sum."""
    m, n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    part = tl.program_id(1)
    offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows beyond the edge read row 0: no mask in the loop, and the store drops them
    rows_m = tl.where(offs_m < M, offs_m, 0)[:, None]
    rows_n = tl.where(offs_n < N, offs_n, 0)[:, None]
    sa_rows, zb_rows = sa_ptr, zb_ptr
    if SCALE_A != "":
        sa_rows = sa_ptr + rows_m * stride_sam
    if zb_ptr is not None:
        zb_rows = zb_ptr + rows_n * stride_zbn
    if SWAP:
        acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    else:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    acc = packed_sum(
        acc, a_ptr + rows_m * stride_am, b_ptr + rows_n * stride_bn, sa_rows, sb_ptr + rows_n * stride_sbn, zb_rows,
        part * BLOCK_K, SPLIT_K * BLOCK_K, K, stride_sak, stride_sbk, stride_zbk,
        FORMAT_A, TYPE_A, SCALE_A, GROUP_A, FOLD_A, UP_A, FORMAT_B, TYPE_B, SCALE_B, GROUP_B, FOLD_B, UP_B, POST,
        PROMOTE, SWAP, BLOCK_K, EVEN_K,
    )  # fmt: skip
    if SWAP:
        acc = tl.trans(acc)
    if SPLIT_K == 1:
        acc = finish(acc, over_a_ptr, over_b_ptr, bias_ptr, None, None, offs_m, offs_n, M, N, stride_oam, stride_obn, 0)
        store_tile(out_ptr, acc, offs_m, offs_n, M, N, stride_om)
    else:
        store_tile(out_ptr + part.to(tl.int64) * M * N, acc, offs_m, offs_n, M, N, N)


def _launch_native(
    a: Tensor, b: Tensor, scale_a: Any, scale_b: Tensor, over_a: Tensor | None, over_b: Tensor | None,
    bias: Tensor | None, out: Tensor, K: int, group: int, kinds: Any, config: Config,
) -> Tensor:  # fmt: skip
    (M, N), config = out.shape, {n: v for n, v in config.items() if n not in ("kernel", "COMPUTE")}
    e4m3 = torch.float8_e4m3fn if group == 16 else torch.uint8  # the type says how a scale is to be read
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])
    native_kernel[(tiles,)](
        a.view(torch.uint8), b.view(torch.uint8), scale_a.view(e4m3), scale_b.view(e4m3), over_a, over_b, bias, out,
        M, N, K, a.stride(0), b.stride(0), out.stride(0), *scale_a.stride(), *scale_b.stride(),
        *broadcast_strides(over_a, over_b),
        KIND_A=kinds[0], KIND_B=kinds[1], GROUP=group, EVEN_K=K % config["BLOCK_K"] == 0, **config,
    )  # fmt: skip
    return out


def configs(
    a: Tensor, b: Tensor, scale_b: Tensor, format_b: str, group_b: int, scale_a: Tensor | None, format_a: str,
    group_a: int, **_: Any,
):  # fmt: skip
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    M, arch = bucket(a.shape[0]), of(a.device).arch
    if native_kinds(format_a, format_b, arch):
        for m, n, k, warps, stages in ((128, 128, 128, 4, 3), (128, 128, 128, 8, 2), (128, 256, 128, 8, 3)):
            yield Config(
                kernel="native", COMPUTE="fp8", GROUP_M=8, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
    if M >= 256 and arch == "sm90":
        yield from mx_warps_configs(M, b.shape[0], of(a.device).sm_count)
    for compute in compute_types(left, right, of(a.device)):
        step = step_of(left.columns(a), promoted_groups(constants(compute, left, right, a.dtype)))
        yield from packed_space(M, compute, step, of(a.device))


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_b: Tensor, format_b: str, group_b: int,
    scale_a: Tensor | None, format_a: str, group_a: int, out_dtype: torch.dtype, **_: Any,
) -> bool:  # fmt: skip
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    if config["kernel"] == "native":
        held = config["num_stages"] * (config["BLOCK_M"] + config["BLOCK_N"]) * config["BLOCK_K"]
        return native_kinds(format_a, format_b, device.arch) is not None and held + 8192 <= device.shared_limit
    if config["kernel"] == "warps":
        if scale_a is None:
            whole = a.dtype is torch.bfloat16
        else:
            whole = format_a.startswith("mxfp8") and scale_a.stride(1) == 1
        if not AVAILABLE or not whole or not format_b.startswith("mxfp8") or not words_of_scales(scale_b):
            return False
        if a.shape[1] % 128:
            return False
        # rows of the output leave by descriptors
        even = b.shape[0] * out_dtype.itemsize % 16 == 0
        return fits_descriptors(b) and even and shared_bytes(config, out_dtype.itemsize) <= device.shared_limit
    return fits(config, device, left, right, a.dtype, left.columns(a))


def key(
    a: Tensor, b: Tensor, format_b: str, zero_point_b: Tensor | None, group_b: int, format_a: str, group_a: int,
    bias: Tensor | None, out_dtype: torch.dtype, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    return dict(
        M=bucket(a.shape[0]), N=b.shape[0], K=columns_of(a, format_a), a=str(a.dtype),
        format_a=format_a, group_a=group_a, format_b=format_b, group_b=group_b,
        zero_point=int(zero_point_b is not None), out_dtype=str(out_dtype), bias=int(bias is not None),
    )  # fmt: skip


def cost(
    a: Tensor, b: Tensor, scale_b: Tensor, scale_a: Tensor | None, format_a: str, group_a: int,
    zero_point_b: Tensor | None, out_dtype: torch.dtype, **_: Any,
) -> Cost:  # fmt: skip
    M, N, K = a.shape[0], b.shape[0], columns_of(a, format_a)
    moved = sum(t.numel() * t.element_size() for t in (a, b, scale_a, scale_b, zero_point_b) if t is not None)
    return Cost(flops=2 * M * N * K, bytes=moved + M * N * out_dtype.itemsize)


def tolerance(a: Tensor, format_a: str, out_dtype: torch.dtype, **_: Any) -> float:
    return allowed_error(a, format_a, out_dtype)


def inputs(
    *, M, N, K, pair=("none", "mxfp4", -1, -1), per_row=False, zero_point=False, bias=False, a_dtype=torch.bfloat16,
    out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    if isinstance(pair, str):  # as tables spell it: "fp8/mxfp4", or with both groups
        formats, groups = pair.split("/")[:2], [int(n) for n in pair.split("/")[2:]]
        pair = (*formats, *(groups or (-1, -1)))
    format_a, format_b, group_a, group_b = pair
    K = -(-K // 4) * 4  # whole bytes in every format
    a = sample_operand((M, K), format_a, group_a, per_row, False, a_dtype, kind, layout, device, seed)
    b = sample_operand((N, K), format_b, group_b, per_row, zero_point, a_dtype, "normal", layout, device, seed + 1)
    del a["zero_point"]
    return dict(
        a=a.pop("codes"), b=b.pop("codes"), **{f"{n}_a": v for n, v in a.items()},
        **{f"{n}_b": v for n, v in b.items()}, format_a=format_a, format_b=format_b, group_a=group_a, group_b=group_b,
        bias=sample((N,), torch.float32, "normal", device, seed + 3) if bias else None, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(4, 64, 100, 128, 272), pair=PAIRS, per_row=(False, True),
        zero_point=(False, True), bias=(False, True), a_dtype=(torch.bfloat16, torch.float16), out_dtype=FLOAT_INPUTS,
        kind=("normal", "zeros", "zero_rows"), layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        tile=Kernel(_packed_kernel, matrix=True), split=Kernel(_packed_kernel, matrix=True),
        native=Kernel(native_kernel, targets=TARGETS, interpretable=INTERPRETABLE, matrix=True),
        warps=Kernel(mx_warps_kernel, targets=("sm90",), interpretable=False, matrix=True),
    ),
    configs=configs, launcher_fields=("COMPUTE", "BLOCK_N"), legal=legal, key=key, cost=cost, cases=linear_cases(),
)  # fmt: skip
def mm_packed(
    a: Tensor, b: Tensor, scale_b: Tensor, format_b: str = "mxfp4", global_scale_b: Tensor | None = None,
    zero_point_b: Tensor | None = None, group_b: int = -1, scale_a: Tensor | None = None, format_a: str = "none",
    global_scale_a: Tensor | None = None, group_a: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply activations by packed weights.

    Args:
        a: (M, K) activations, rows contiguous: bf16 or fp16 (format "none"), an fp8 type ("fp8"), int8 ("int8"), or
            codes of an MX format or "nvfp4", packed (M, K / 2) or (M, 3 K / 4) where they have 4 or 6 bits.
        b: (N, K), (N, 3 K / 4) or (N, K / 2) weight codes, rows contiguous.
        scale_b: (N, cdiv(K, group)): uint8 e8m0 for MX (groups of 32), float8_e4m3fn or its bytes for "nvfp4" (16),
            fp32 for "int4"; (N, 1) or (1, 1) if group_b is -1. value = code * scale.
        format_b: "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8", "nvfp4" or "int4".
        global_scale_b: fp32 (1, 1) or (N, 1), with "nvfp4" only: a multiplier.
        zero_point_b: int32 of scale_b's shape, or None, with "int4" only: value = (code - zero_point) * scale.
        group_b: columns that share a scale of "int4", a multiple of 16, or -1 for all; other formats have their own.
        scale_a: like scale_b; None for "none"; of "fp8" fp32, or uint8 with a group_a; (M, 1) or (1, 1) for group_a -1.
        format_a: "none", "fp8", "int8", an MX format or "nvfp4".
        global_scale_a: fp32 (1, 1) or (M, 1), with "nvfp4" only.
        group_a: columns that share a scale of "fp8" or "int8", a multiple of 16, or -1 for all.
        bias: (N,) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        (M, N) of `out_dtype`, accumulated in fp32 (int32 inside a group of integer codes).

    Raises:
        ValueError: a format, shape, dtype or stride does not fit, or K is 0.
        NotImplementedError: groups of an odd multiple of 16 and codes of 4 or 6 bits, with triton 3.6 or 3.7 on a GPU
            without warp-group products (sm80, sm89, sm120).
    """
    M, N = a.shape[0], b.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    K, config = left.columns(a), dict(config)
    if config["kernel"] == "warps":
        del config["kernel"], config["COMPUTE"], config["BLOCK_N"]
        launch_warps(of(a.device), a, b, scale_a, scale_b, bias, out, config)
        return out
    if config["kernel"] == "native":
        return _launch_native(
            a, b, scale_a, scale_b, global_scale_a, global_scale_b, bias, out, K, left.group,
            native_kinds(format_a, format_b, of(a.device).arch), config,
        )  # fmt: skip
    split, made = config.pop("SPLIT_K", 1), constants(config.pop("COMPUTE"), left, right, a.dtype)
    over_a = global_scale_a if scale_a is None or left.group > 0 else scale_a
    over_b = global_scale_b if right.group > 0 else scale_b
    del config["kernel"]
    parts = parts_buffer(out, split, torch.float32)
    stored_a, stored_b = as_bytes(scale_a), as_bytes(scale_b)
    tiles = triton.cdiv(M, config["BLOCK_M"]) * triton.cdiv(N, config["BLOCK_N"])
    over_strides = broadcast_strides(over_a, over_b)
    _packed_kernel[(tiles, split)](
        pointer(a, made, "A"), pointer(b, made, "B"), stored_a, stored_b, zero_point_b, over_a, over_b, bias, parts,
        M, N, K, a.stride(0), b.stride(0), out.stride(0),
        *row_strides(stored_a), *row_strides(stored_b), *row_strides(zero_point_b), *over_strides,
        EVEN_K=K % config["BLOCK_K"] == 0, SPLIT_K=split, **made, **config,
    )  # fmt: skip
    if split > 1:
        reduce_parts(parts, out, (over_a, over_b, bias, None, None), [*over_strides, 0])
    return out
