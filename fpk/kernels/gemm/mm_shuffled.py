"""mm_shuffled: product of activations and a weight in the layout of shuffle_weight.

    out[m, n] = scale_a[m] * row_scale[n] * sum_k a[m, k] * value(packed)[n, k]  (+ bias[n])

bf16 activations take a weight of target "bf16" (MXFP4, MXFP6, NVFP4; every value is exact in bf16), FP8 activations one
of target "fp8" (MXFP4; exact in e4m3 under the scale of its row).

Kernels: `warps`, Gluon for sm90: codes go from shared memory straight into the registers of the tensor core; FP8 sums
leave it every 128 columns; with SPLIT_K 0, programs take even shares of all tiles' K. `plain`, anywhere: a unit at a
time, in bf16.

Source: own; weight-only FP4 as Marlin and triton_kernels serve it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    expect_bias,
    expect_dtype,
    expect_inner_contiguous,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
)
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import decode
from fpk.kernels._tile import decode_fp8, tile_of
from fpk.kernels.gemm._gluon import AVAILABLE, descriptor
from fpk.kernels.gemm._gluon_unit_warps import unit_warps_kernel
from fpk.kernels.gemm._gluon_units import rows_descriptor
from fpk.kernels.gemm._launch import ahead
from fpk.kernels.gemm._mm import fits_descriptors
from fpk.kernels.gemm._operands import decode_codes
from fpk.kernels.gemm._tickets import LIMIT, pieces, tickets
from fpk.kernels.gemm._unit_assembly import assembly
from fpk.kernels.gemm._unit_space import registers, unit_warps_configs, unit_warps_space
from fpk.kernels.pack._shuffle import (
    COLUMNS,
    ELEMENTS,
    LINE,
    ROWS,
    constants,
    group_of,
    unit_lines,
    units_of,
    unshuffled,
)
from fpk.kernels.pack._units import load_unit_codes, load_unit_scales
from fpk.op import Cost, Kernel, batch_must_not_matter, op
from fpk.samples import generator, sample, scales, strided
from fpk.shapes import linear_cases


def reference(
    a: Tensor, packed: Tensor, row_scale: Tensor, format: str = "mxfp4", scale_a: Tensor | None = None,
    bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    (_, K), N = a.shape, row_scale.shape[0]
    target = "bf16" if scale_a is None else "fp8"
    codes, stored = unshuffled(packed, format, target, N, K)
    byte = stored.int()
    if format == "nvfp4":
        factor = torch.where(byte == 0, 0.0, (8 + (byte & 7)) * torch.exp2((byte >> 3).float() - 27))
    elif target == "fp8":
        factor = torch.exp2(byte.float() - 5)
    else:
        rebias = {"mxfp6_e3m2": 124}.get(format, 126)
        factor = torch.ldexp(torch.ones_like(byte, dtype=torch.float64), byte - 127 - rebias).float()
    value = decode(codes, ELEMENTS[format]) * factor.repeat_interleave(group_of(format), 1)[:, :K]
    out = (a.float() @ value.T) * row_scale.T
    out = out if scale_a is None else out * scale_a
    return (out if bias is None else out + bias.float()).to(out_dtype)


def check(
    a: Tensor, packed: Tensor, row_scale: Tensor, format: str, scale_a: Tensor | None, bias: Tensor | None,
    out_dtype: torch.dtype, **_: Any,
) -> None:  # fmt: skip
    expect_one_of("mm_shuffled.format", format, ELEMENTS)
    expect_rank("mm_shuffled.a", a, 2)
    expect_not_empty("mm_shuffled.a", a, 1)
    expect_inner_contiguous("mm_shuffled.a", a)
    if scale_a is None:
        expect_dtype("mm_shuffled.a", a, torch.bfloat16)
    else:
        expect_dtype("mm_shuffled.a", a, torch.float8_e4m3fn)
        expect_dtype("mm_shuffled.scale_a", scale_a, torch.float32)
        expect_shape("mm_shuffled.scale_a", scale_a, (a.shape[0], 1), (1, 1))
        if format != "mxfp4":
            raise ValueError(f"mm_shuffled.format: expected mxfp4 with FP8 activations, got {format!r}")
    expect_rank("mm_shuffled.row_scale", row_scale, 2)
    N = row_scale.shape[0]
    expect_shape("mm_shuffled.row_scale", row_scale, (N, 1))
    expect_dtype("mm_shuffled.row_scale", row_scale, torch.float32)
    units_n, units_k = units_of(N, a.shape[1])
    expect_dtype("mm_shuffled.packed", packed, torch.uint8)
    expect_shape("mm_shuffled.packed", packed, (units_n * units_k * unit_lines(format), LINE))
    for name, tensor in (("packed", packed), ("row_scale", row_scale)):
        if not tensor.is_contiguous():
            raise ValueError(f"mm_shuffled.{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    expect_one_of("mm_shuffled.out_dtype", out_dtype, FLOAT_INPUTS)
    expect_bias("mm_shuffled.bias", bias, N)


@triton.jit(do_not_specialize=["M", "stride_sa"])
def _plain_kernel(
    a_ptr, packed_ptr, row_scale_ptr, scale_a_ptr, bias_ptr, out_ptr, M, N, K, units_k, stride_am, stride_om, stride_sa,
    FORMAT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, FP8: tl.constexpr, PLACE: tl.constexpr,
    MASK2: tl.constexpr, REBIAS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A row of units times BLOCK_M tokens."""
    m, row = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, 64), 1)
    units = tl.cdiv(N, 64).to(tl.int64) * units_k
    offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = row.to(tl.int64) * 64 + tl.arange(0, 64)
    rows_m = tl.where(offs_m < M, offs_m, 0)[:, None]
    acc = tl.zeros((64, BLOCK_M), dtype=tl.float32)
    for k in range(0, units_k):
        unit = row.to(tl.int64) * units_k + k
        codes = load_unit_codes(packed_ptr, unit, units, FORMAT, BITS, FP8, PLACE, MASK2)
        byte = load_unit_scales(packed_ptr, unit, units, BITS, GROUP)
        value = tl.reshape(decode_codes(codes, FORMAT), (64, 128 // GROUP, GROUP))
        if GROUP == 16:
            bits = tl.where(byte == 0, 0, (byte << 20) + (103 << 23))
        elif FP8:
            bits = (byte + 122) << 23
        else:  # in two factors: the product of both may lie outside fp32
            value *= 2.0**-REBIAS
            bits = byte << 23
        value *= bits.to(tl.float32, bitcast=True)[:, :, None]
        weights = tl.reshape(value, (64, 128)).to(tl.bfloat16)
        offs_k = k * 128 + tl.arange(0, 128)[None, :]
        a = tl.load(a_ptr + rows_m * stride_am + offs_k, mask=offs_k < K, other=0)
        if FP8:
            a = decode_fp8(a, 3, 7, 0x7F, False)
        acc = tl.dot(weights, tl.trans(a.to(tl.bfloat16)), acc)
    mask_n, mask_m = offs_n < N, offs_m < M
    acc *= tl.load(row_scale_ptr + offs_n, mask=mask_n, other=0.0)[:, None]
    if scale_a_ptr is not None:
        acc *= tl.load(scale_a_ptr + offs_m * stride_sa, mask=mask_m, other=0.0)[None, :]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    ptrs = out_ptr + offs_m[None, :] * stride_om + offs_n[:, None]
    tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


def configs(a: Tensor, packed: Tensor, row_scale: Tensor, format: str, scale_a: Tensor | None, **_: Any):
    M, device = bucket(a.shape[0]), of(a.device)
    if device.arch != "cpu":
        wide = ELEMENTS[format].bits == 6
        yield from unit_warps_configs(M, row_scale.shape[0], wide, scale_a is not None, device.sm_count)
    yield Config(kernel="plain", BLOCK_M=max(16, min(64, M)), BLOCK_N=ROWS, BLOCK_K=COLUMNS, num_warps=4, num_stages=1)
    if device.arch != "cpu":
        yield from unit_warps_space(M)


def _stage_bytes(config: Config, a: Tensor, format: str) -> int:
    units = config["BLOCK_N"] // ROWS * config["BLOCK_K"] // COLUMNS
    return units * unit_lines(format) * LINE + config["BLOCK_M"] * config["BLOCK_K"] * a.element_size()


def legal(config: Config, device: Device, a: Tensor, packed: Tensor, row_scale: Tensor, format: str, **_: Any) -> bool:
    if config["kernel"] == "plain":
        return True
    if not AVAILABLE or not fits_descriptors(a) or packed.data_ptr() % 16:
        return False
    if a.element_size() == 1 and config["BLOCK_M"] > 128:
        return False  # FP8 sums leave the tensor core: twice the registers
    rows = units_of(row_scale.shape[0], a.shape[1])[0] + 2
    held = _stage_bytes(config, a, format) * config["STAGES"] + 2048
    return rows <= LIMIT and held * config["PER_SM"] <= device.shared_limit


def key(
    a: Tensor, row_scale: Tensor, format: str, bias: Tensor | None, out_dtype: torch.dtype, **_: Any
) -> dict[str, int | str]:  # fmt: skip
    return dict(
        M=bucket(a.shape[0]), N=row_scale.shape[0], K=a.shape[1], a=str(a.dtype), format=format,
        out_dtype=str(out_dtype), bias=int(bias is not None),
    )  # fmt: skip


def cost(a: Tensor, packed: Tensor, row_scale: Tensor, out_dtype: torch.dtype, **_: Any) -> Cost:
    (M, K), N = a.shape, row_scale.shape[0]
    return Cost(flops=2 * M * N * K, bytes=a.nbytes + packed.nbytes + M * N * out_dtype.itemsize)


def tolerance(a: Tensor, out_dtype: torch.dtype, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 2e-6}[out_dtype]
    # what the tensor cores of sm90 lose inside the FP8 products of 128 columns
    lost = 0.0 if a.device.type == "cpu" or a.dtype is torch.bfloat16 else 3e-4
    # the tensor cores of sm90 cut fp32 sums toward zero every 16 columns: half of a last place on average, of sums
    # that grow with the root of K; together 2^-25 of the result a step (measured: 0.63 of that, K from 272 to 8704)
    cut = 0.0 if a.device.type == "cpu" else a.shape[1] / 16 * 2.0**-25
    return (rounding**2 + lost**2) ** 0.5 * 1.1 + cut


def inputs(
    *, M, N, K, weight="mxfp4/bf16", per_token=True, bias=False, out_dtype=torch.bfloat16, kind="normal",
    layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    format, target = weight.split("/")
    dtype = torch.bfloat16 if target == "bf16" else torch.float8_e4m3fn
    units_n, units_k = units_of(N, K)
    g, lines = generator(seed + 1, device), units_n * units_k * unit_lines(format)
    packed = torch.randint(0, 256, (lines, LINE), generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    # the plane of scales: some binades of the format's own bytes; FP4 of target fp8 has steps 0 to 11
    first = units_n * units_k * (unit_lines(format) - 32 // group_of(format))
    low, high = {"mxfp4/fp8": (0, 12), "nvfp4/bf16": (80, 130)}.get(weight, (240, 248))
    shape = (lines - first, LINE)
    packed[first:] = torch.randint(low, high, shape, generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    return dict(
        a=strided(sample((M, K), dtype, kind, device, seed), layout), packed=packed,
        row_scale=scales((N, 1), device, seed + 2), format=format,
        scale_a=scales((M if per_token else 1, 1), device, seed + 3) if target == "fp8" else None,
        bias=sample((N,), torch.float32, "normal", device, seed + 4) if bias else None, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 5, 33, 70), N=(1, 64, 80), K=(1, 64, 128, 272),
        weight=("mxfp4/bf16", "nvfp4/bf16", "mxfp6_e2m3/bf16", "mxfp6_e3m2/bf16", "mxfp4/fp8"),
        per_token=(True, False), bias=(False, True), out_dtype=FLOAT_INPUTS, kind=("normal", "zeros", "zero_rows"),
        layout=("contiguous", "rows", "offset"),
    ),
    kernels=dict(
        plain=Kernel(_plain_kernel, matrix=True),
        warps=Kernel(unit_warps_kernel, targets=("sm90",), interpretable=False, matrix=True),
    ),
    configs=configs, launcher_fields=("PER_SM", "SPLIT_K", "BLOCK_N", "BLOCK_K"), legal=legal, key=key, cost=cost,
    cases=linear_cases(),
)  # fmt: skip
def mm_shuffled(
    a: Tensor, packed: Tensor, row_scale: Tensor, format: str = "mxfp4", scale_a: Tensor | None = None,
    bias: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply activations by a shuffled weight.

    Args:
        a: (M, K), rows contiguous: bf16, or float8_e4m3fn for a weight of target "fp8".
        packed: uint8 (lines, 256), as `shuffle_weight` gives it for (N, K).
        row_scale: (N, 1) fp32, contiguous: shuffle_weight's, times the weight's global scale where there is one.
        format: "mxfp4", "nvfp4", "mxfp6_e2m3" or "mxfp6_e3m2".
        scale_a: (M, 1) or (1, 1) fp32 with FP8 activations, else None.
        bias: (N,) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        (M, N) of `out_dtype`, accumulated in fp32.

    Raises:
        ValueError: a format, shape, dtype or stride does not fit, or K is 0.
    """
    (M, K), N = a.shape, row_scale.shape[0]
    out = torch.empty((M, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    whole, config, (units_n, units_k) = config, dict(config), units_of(N, K)
    stride_sa = 0 if scale_a is None or scale_a.shape[0] == 1 else scale_a.stride(0)
    made = constants(format, "bf16" if scale_a is None else "fp8")
    if config.pop("kernel") == "plain":
        wide = out
        if N == 1:  # triton makes a constant of a 1, which the kernel cannot take: a second row that nobody asked for
            row_scale, bias = torch.cat([row_scale] * 2), bias if bias is None else torch.cat([bias] * 2)
            wide = torch.empty((M, 2), dtype=out_dtype, device=a.device)
        tiles = triton.cdiv(M, config["BLOCK_M"]) * units_n
        del config["BLOCK_N"], config["BLOCK_K"]
        _plain_kernel[(tiles,)](
            a if scale_a is None else a.view(torch.uint8), packed, row_scale, scale_a, bias, wide,
            M, wide.shape[1], K, units_k, a.stride(0), wide.stride(0), stride_sa,
            REBIAS={"e3m2": 124}.get(made["FORMAT"], 126), **made, **config,
        )  # fmt: skip
        return out if wide is out else wide[:, :1].contiguous()
    device, per_sm, even = of(a.device), config.pop("PER_SM"), config.pop("SPLIT_K") == 0
    block, rows, units = config["BLOCK_M"], config.pop("BLOCK_N") // ROWS, config.pop("BLOCK_K") // COLUMNS
    columns, tiles, steps = triton.cdiv(M, block), triton.cdiv(units_n, rows), triton.cdiv(units_k, units)
    per_program = steps
    if even:
        shared = 1 if batch_must_not_matter() else columns  # what K is divided into is the same for any batch
        per_program = triton.cdiv(tiles * steps, min(max(1, per_sm * device.sm_count // shared), tiles * steps))
    programs = triton.cdiv(tiles * steps, per_program)
    lines = packed.view(torch.int32)
    parts, counters = row_scale, lines  # unused where every program has whole rows of units: the same types, one binary
    if per_program % steps:
        sums = programs * 2 * rows * ROWS * block  # of a tile of tokens
        several = pieces(M, block, tiles * rows, sums)
        if len(several) > 1:
            scales = [scale_a if scale_a is None or stride_sa == 0 else scale_a[some] for some in several]
            return torch.cat([
                mm_shuffled.launcher(a[some], packed, row_scale, format, scale, bias, out_dtype, config=whole)
                for some, scale in zip(several, scales, strict=True)
            ])  # fmt: skip
        counters = tickets(-(-columns * tiles * rows // 32) * 32, a.device)
        parts = torch.empty(columns * sums, device=a.device)
    first, second = units_n * units_k * 16, units_n * units_k * (8 if made["BITS"] == 6 else 0)
    scale_lines = 32 // made["GROUP"]
    codes = rows_descriptor(lines[:first], units_n, 16 * units)
    unit_warps_kernel[(columns, programs)](
        codes, rows_descriptor(lines[first : first + second], units_n, 8 * units) if second else codes,
        rows_descriptor(lines[first + second :], units_n, scale_lines * units), descriptor(a, block, 64),
        out, parts, counters, row_scale, scale_a, bias,
        M, N, units_n, units_k, per_program, out.stride(0), stride_sa,
        FP8=made["FP8"], GROUP=made["GROUP"], SIX=made["BITS"] == 6, **assembly(made["FORMAT"], made["FP8"]),
        ROWS=rows, UNITS=units, **config, **registers(rows // config["HELD"], per_sm), **ahead(device, M, packed),
    )  # fmt: skip
    return out
