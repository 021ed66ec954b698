"""grouped_mm_packed: one product per expert of rows of activations and packed weights.

    out[r, n] = sum_k value_a[r, k] * value_b[e, n, k]  (+ bias[e, n])          e: offs[e - 1] <= r < offs[e]
    value     = (code - zero_point) * 2^shift * scale[., k // group] * global_scale

For one expert this is mm_packed, which says what the formats are; each expert has global scales of its own. Rows from
offs[-1] on have no expert and become zeros, whatever they hold.

Source: OCP Microscaling Formats 1.0; the MXFP4 experts of gpt-oss; NVFP4 and W4A16 experts of inference engines.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    expect_dtype,
    expect_inner_contiguous,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.kernels.gemm._mm import finish, store_tile
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
from fpk.kernels.moe._grouped import expert_bins, expert_of_rows, expert_tile, grid, rows_per_expert, store_zeros
from fpk.kernels.moe._rows import row_ends
from fpk.op import Cost, Kernel, op
from fpk.samples import sample
from fpk.shapes import grouped_cases


def reference(
    a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, format_b: str = "mxfp4", global_scale_b: Tensor | None = None,
    zero_point_b: Tensor | None = None, group_b: int = -1, scale_a: Tensor | None = None, format_a: str = "none",
    global_scale_a: Tensor | None = None, group_a: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    rows = values(a, scale_a, format_a, global_scale_a, None, group_a)
    weights = values(b, scale_b, format_b, global_scale_b, zero_point_b, group_b)
    expert = expert_of_rows(offs, a.shape[0])[:, None]
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.float32, device=a.device)
    for e in range(b.shape[0]):
        product = rows @ weights[e].T
        out = torch.where(expert == e, product if bias is None else product + bias[e].float(), out)
    return out.to(out_dtype)


def check(
    a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, format_b: str, global_scale_b: Tensor | None,
    zero_point_b: Tensor | None, group_b: int, scale_a: Tensor | None, format_a: str, global_scale_a: Tensor | None,
    group_a: int, bias: Tensor | None, out_dtype: torch.dtype, **_: Any,
) -> None:  # fmt: skip
    expect_rank("grouped_mm_packed.a", a, 2)
    expect_rank("grouped_mm_packed.b", b, 3)
    expect_not_empty("grouped_mm_packed.b", b, 0)
    expect_operand("grouped_mm_packed", "a", a, scale_a, format_a, global_scale_a, None, group_a)
    expect_operand("grouped_mm_packed", "b", b, scale_b, format_b, global_scale_b, zero_point_b, group_b)
    E, N, _width = b.shape
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    expect_as_wide("grouped_mm_packed", a, left, b, right)
    expect_shape("grouped_mm_packed.offs", offs, (E,))
    expect_dtype("grouped_mm_packed.offs", offs, torch.int32)
    expect_one_of("grouped_mm_packed.out_dtype", out_dtype, FLOAT_INPUTS)
    if bias is not None:
        expect_shape("grouped_mm_packed.bias", bias, (E, N))
        expect_dtype("grouped_mm_packed.bias", bias, *FLOAT_INPUTS)
        expect_inner_contiguous("grouped_mm_packed.bias", bias)


@triton.jit(do_not_specialize=["R", "E", "stride_sam", "stride_sak"])
def _grouped_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, zb_ptr, over_a_ptr, over_b_ptr, bias_ptr, offs_ptr, out_ptr,
    R, E, N, K,
    stride_am, stride_be, stride_bn, stride_om, stride_sam, stride_sak, stride_sbe, stride_sbn, stride_sbk,
    stride_zbe, stride_zbn, stride_zbk, stride_oam, stride_obe, stride_obn, stride_bias,
    FORMAT_A: tl.constexpr, TYPE_A: tl.constexpr, SCALE_A: tl.constexpr, GROUP_A: tl.constexpr, FOLD_A: tl.constexpr,
    UP_A: tl.constexpr, FORMAT_B: tl.constexpr, TYPE_B: tl.constexpr, SCALE_B: tl.constexpr, GROUP_B: tl.constexpr,
    FOLD_B: tl.constexpr, UP_B: tl.constexpr, POST: tl.constexpr, PROMOTE: tl.constexpr, EVEN_K: tl.constexpr,
    SWAP: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    expert, end, first, n = expert_tile(offs_ptr, R, E, tl.cdiv(N, BLOCK_N), BLOCK_E, BLOCK_M)
    if expert < E:
        e = expert.to(tl.int64)
        offs_m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        # rows beyond the edge read the tile's first row: no mask in the loop, and the store drops them
        rows_m = tl.where(offs_m < end, offs_m, first)[:, None]
        rows_n = tl.where(offs_n < N, offs_n, 0)[:, None]
        sa_rows, zb_rows = sa_ptr, zb_ptr
        if SCALE_A != "":
            sa_rows = sa_ptr + rows_m * stride_sam
        if zb_ptr is not None:
            zb_rows = zb_ptr + e * stride_zbe + rows_n * stride_zbn
        if SWAP:
            acc = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
        else:
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = packed_sum(
            acc, a_ptr + rows_m * stride_am, b_ptr + e * stride_be + rows_n * stride_bn, sa_rows,
            sb_ptr + e * stride_sbe + rows_n * stride_sbn, zb_rows,
            0, BLOCK_K, K, stride_sak, stride_sbk, stride_zbk,
            FORMAT_A, TYPE_A, SCALE_A, GROUP_A, FOLD_A, UP_A, FORMAT_B, TYPE_B, SCALE_B, GROUP_B, FOLD_B, UP_B, POST,
            PROMOTE, SWAP, BLOCK_K, EVEN_K,
        )  # fmt: skip
        if SWAP:
            acc = tl.trans(acc)
        over_b, bias_row = over_b_ptr, bias_ptr
        if over_b_ptr is not None:
            over_b = over_b_ptr + e * stride_obe
        if bias_ptr is not None:
            bias_row = bias_ptr + e * stride_bias
        acc = finish(
            acc, over_a_ptr, over_b, bias_row, None, None, offs_m, offs_n, end, N, stride_oam, stride_obn, 0
        )  # fmt: skip
        store_tile(out_ptr, acc, offs_m, offs_n, end, N, stride_om)
    elif expert == E:
        store_zeros(out_ptr, first, R, n, N, stride_om, BLOCK_M, BLOCK_N)


def configs(
    a: Tensor, b: Tensor, scale_b: Tensor, format_b: str, group_b: int, scale_a: Tensor | None, format_a: str,
    group_a: int, **_: Any,
):  # fmt: skip
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    for compute in compute_types(left, right, of(a.device)):
        step = step_of(left.columns(a), promoted_groups(constants(compute, left, right, a.dtype)))
        for config in packed_space(rows_per_expert(a, b), compute, step, of(a.device)):
            if config["kernel"] == "tile":
                yield Config(**{n: v for n, v in config.items() if n not in ("GROUP_M", "kernel")})


def legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_b: Tensor, format_b: str, group_b: int,
    scale_a: Tensor | None, format_a: str, group_a: int, **_: Any,
) -> bool:  # fmt: skip
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    return fits(config, device, left, right, a.dtype, left.columns(a))


def key(
    a: Tensor, b: Tensor, format_b: str, zero_point_b: Tensor | None, group_b: int, format_a: str, group_a: int,
    bias: Tensor | None, out_dtype: torch.dtype, **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    E, N, _width = b.shape
    return dict(
        M=bucket(a.shape[0]), N=N, K=columns_of(a, format_a), E=E, a=str(a.dtype),
        format_a=format_a, group_a=group_a, format_b=format_b, group_b=group_b,
        zero_point=int(zero_point_b is not None), out_dtype=str(out_dtype), bias=int(bias is not None),
    )  # fmt: skip


def cost(
    a: Tensor, b: Tensor, scale_b: Tensor, scale_a: Tensor | None, format_a: str, group_a: int,
    out_dtype: torch.dtype, **_: Any,
) -> Cost:  # fmt: skip
    R, (E, N, _width), K = a.shape[0], b.shape, columns_of(a, format_a)
    weight_bytes = (b.nbytes + scale_b.nbytes) // E * min(E, R)
    moved = a.nbytes + (0 if scale_a is None else scale_a.nbytes) + weight_bytes
    return Cost(flops=2 * R * N * K, bytes=moved + R * N * out_dtype.itemsize)


def tolerance(a: Tensor, format_a: str, out_dtype: torch.dtype, **_: Any) -> float:
    return allowed_error(a, format_a, out_dtype)


def inputs(
    *, M, N, K, E, dropped=0.0, spread="even", pair=("none", "mxfp4", -1, -1), per_row=False, zero_point=False,
    bias=False, a_dtype=torch.bfloat16, out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda",
    seed=0,
):  # fmt: skip
    format_a, format_b, group_a, group_b = pair
    K = -(-K // 4) * 4  # whole bytes in every format
    a = sample_operand((M, K), format_a, group_a, per_row, False, a_dtype, kind, layout, device, seed)
    b = sample_operand((E, N, K), format_b, group_b, per_row, zero_point, a_dtype, "normal", layout, device, seed + 1)
    del a["zero_point"]
    return dict(
        a=a.pop("codes"), b=b.pop("codes"), **{f"{n}_a": v for n, v in a.items()},
        **{f"{n}_b": v for n, v in b.items()}, offs=row_ends(M, E, dropped, spread, device, seed),
        format_a=format_a, format_b=format_b, group_a=group_a, group_b=group_b,
        bias=sample((E, N), torch.float32, "normal", device, seed + 3) if bias else None, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 16, 33, 80), K=(4, 64, 100, 128), E=(1, 3, 9), dropped=(0.0, 0.5, 1.0),
        spread=("even", "skewed", "one"), pair=PAIRS, per_row=(False, True), zero_point=(False, True),
        bias=(False, True), a_dtype=(torch.bfloat16, torch.float16), out_dtype=FLOAT_INPUTS,
        kind=("normal", "zeros", "zero_rows"), layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(tile=Kernel(_grouped_kernel, matrix=True)),
    configs=configs, launcher_fields=("COMPUTE",), legal=legal, key=key, cost=cost, cases=grouped_cases(),
)  # fmt: skip
def grouped_mm_packed(
    a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, format_b: str = "mxfp4", global_scale_b: Tensor | None = None,
    zero_point_b: Tensor | None = None, group_b: int = -1, scale_a: Tensor | None = None, format_a: str = "none",
    global_scale_a: Tensor | None = None, group_a: int = -1, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert by its packed weights.

    Args:
        a: (R, K) rows sorted by expert, elements of a row contiguous: bf16, fp16, or codes, as of `mm_packed`.
        b: (E, N, K), (E, N, 3 K / 4) or (E, N, K / 2) weight codes, elements of a row contiguous.
        scale_b: (E, N, cdiv(K, group)), in the type of the format; (E, N, 1) or (E, 1, 1) if group_b is -1.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
        format_b, group_b: as of `mm_packed`.
        global_scale_b: fp32 (E, 1, 1) or (E, N, 1), with "nvfp4" only.
        zero_point_b: int32 of scale_b's shape, or None, with "int4" only.
        scale_a, format_a, global_scale_a, group_a: as of `mm_packed`, with R rows; (1, 1) serves all experts.
        bias: (E, N) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        (R, N) of out_dtype; rows from offs[-1] on are zeros.

    Raises:
        ValueError: a format, shape, dtype or stride does not fit.
        NotImplementedError: groups of an odd multiple of 16 and codes of 4 or 6 bits, with triton 3.6 or 3.7 on a GPU
            without warp-group products (sm80, sm89, sm120).
    """
    R, (E, N, _) = a.shape[0], b.shape
    out = torch.empty((R, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    left, right = operands(a, scale_a, format_a, group_a, b, scale_b, format_b, group_b)
    K, config = left.columns(a), dict(config)
    made = constants(config.pop("COMPUTE"), left, right, a.dtype)
    over_a = global_scale_a if scale_a is None or left.group > 0 else scale_a
    over_b = global_scale_b if right.group > 0 else scale_b
    stored_a, stored_b = as_bytes(scale_a), as_bytes(scale_b)
    experts = [0 if t is None else t.stride(0) for t in (stored_b, zero_point_b, over_b)]
    config.pop("kernel", None)
    _grouped_kernel[grid(R, N, E, config)](
        pointer(a, made, "A"), pointer(b, made, "B"), stored_a, stored_b, zero_point_b, over_a, over_b, bias, offs, out,
        R, E, N, K, a.stride(0), b.stride(0), b.stride(1), out.stride(0),
        *row_strides(stored_a), experts[0], *row_strides(stored_b), experts[1], *row_strides(zero_point_b),
        row_strides(over_a)[0], experts[2], row_strides(over_b)[0], 0 if bias is None else bias.stride(0),
        EVEN_K=K % config["BLOCK_K"] == 0, BLOCK_E=expert_bins(E), **made, **config,
    )  # fmt: skip
    return out
