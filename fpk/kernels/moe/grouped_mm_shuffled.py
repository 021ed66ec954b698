"""grouped_mm_shuffled: one product per expert of bf16 rows and weights in the layout of shuffle_weight.

    out[r, n] = row_scale[e, n] * sum_k a[r, k] * value(packed[e])[n, k]  (+ bias[e, n])
                                                                           e: offs[e - 1] <= r < offs[e]

For one expert this is mm_shuffled. Rows from offs[-1] on have no expert and become zeros, whatever they hold.

Kernels: `units`, Gluon for sm90 (_gluon_shuffled); `plain`, anywhere: a unit at a time, in bf16.

Source: own; the MXFP4 experts of gpt-oss.
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
from fpk.formats import decode
from fpk.kernels._tile import after_previous, early_start
from fpk.kernels.gemm._gluon import AVAILABLE, descriptor
from fpk.kernels.gemm._gluon_units import flat_descriptor
from fpk.kernels.gemm._operands import decode_codes
from fpk.kernels.gemm._tickets import LIMIT, tickets
from fpk.kernels.gemm._unit_assembly import assembly
from fpk.kernels.moe._gluon_grouped import schedule_kernel
from fpk.kernels.moe._gluon_shuffled import grouped_units_kernel
from fpk.kernels.moe._grouped import (
    expert_bins,
    expert_of_rows,
    expert_tile,
    fits_row_descriptor,
    grid,
    store_zeros,
)
from fpk.kernels.moe._rows import row_ends
from fpk.kernels.pack._shuffle import (
    COLUMNS,
    ELEMENTS,
    LINE,
    REBIAS,
    ROWS,
    constants,
    group_of,
    unit_lines,
    units_of,
    unshuffled,
)
from fpk.kernels.pack._units import load_unit_codes, load_unit_scales
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, sample, scales, strided
from fpk.shapes import grouped_cases

FORMATS = ("mxfp4", "nvfp4")
WHAT = "grouped_mm_shuffled"


def reference(
    a: Tensor, packed: Tensor, row_scale: Tensor, offs: Tensor, format: str = "mxfp4", bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    (R, K), (E, N) = a.shape, row_scale.shape[:2]
    expert = expert_of_rows(offs, R)[:, None]
    out = torch.zeros((R, N), dtype=torch.float32, device=a.device)
    for e in range(E):
        codes, stored = unshuffled(packed[e], format, "bf16", N, K)
        byte = stored.int()
        if format == "nvfp4":
            factor = torch.where(byte == 0, 0.0, (8 + (byte & 7)) * torch.exp2((byte >> 3).float() - 27))
        else:
            factor = torch.ldexp(torch.ones_like(byte, dtype=torch.float64), byte - 127 - REBIAS["e2m1"]).float()
        value = decode(codes, ELEMENTS[format]) * factor.repeat_interleave(group_of(format), 1)[:, :K]
        product = (a.float() @ value.T) * row_scale[e].T
        out = torch.where(expert == e, product if bias is None else product + bias[e].float(), out)
    return out.to(out_dtype)


def check(
    a: Tensor, packed: Tensor, row_scale: Tensor, offs: Tensor, format: str, bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:  # fmt: skip
    expect_one_of(f"{WHAT}.format", format, FORMATS)
    expect_rank(f"{WHAT}.a", a, 2)
    expect_not_empty(f"{WHAT}.a", a, 1)
    expect_inner_contiguous(f"{WHAT}.a", a)
    expect_dtype(f"{WHAT}.a", a, torch.bfloat16)
    expect_rank(f"{WHAT}.row_scale", row_scale, 3)
    E, N = row_scale.shape[:2]
    expect_shape(f"{WHAT}.row_scale", row_scale, (E, N, 1))
    expect_not_empty(f"{WHAT}.row_scale", row_scale, 0)
    expect_dtype(f"{WHAT}.row_scale", row_scale, torch.float32)
    units_n, units_k = units_of(N, a.shape[1])
    expect_dtype(f"{WHAT}.packed", packed, torch.uint8)
    expect_shape(f"{WHAT}.packed", packed, (E, units_n * units_k * unit_lines(format), LINE))
    for name, tensor in (("packed", packed), ("row_scale", row_scale)):
        if not tensor.is_contiguous():
            raise ValueError(f"{WHAT}.{name}: expected a contiguous tensor, got strides {tensor.stride()}")
    expect_shape(f"{WHAT}.offs", offs, (E,))
    expect_dtype(f"{WHAT}.offs", offs, torch.int32)
    expect_one_of(f"{WHAT}.out_dtype", out_dtype, FLOAT_INPUTS)
    if bias is not None:
        expect_shape(f"{WHAT}.bias", bias, (E, N))
        expect_dtype(f"{WHAT}.bias", bias, *FLOAT_INPUTS)
        expect_inner_contiguous(f"{WHAT}.bias", bias)


@triton.jit(do_not_specialize=["R", "E", "units_k", "lines"])
def _plain_kernel(
    a_ptr, packed_ptr, row_scale_ptr, bias_ptr, offs_ptr, out_ptr,
    R, E, N, K, units_k, lines, stride_am, stride_om, stride_bias,
    PDL: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PLACE: tl.constexpr,
    MASK2: tl.constexpr, REBIAS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A row of units times BLOCK_M rows of its expert."""
    after_previous(PDL)
    expert, end, first, row = expert_tile(offs_ptr, R, E, tl.cdiv(N, 64), BLOCK_E, BLOCK_M)
    if expert < E:
        e = expert.to(tl.int64)
        units = tl.cdiv(N, 64).to(tl.int64) * units_k
        planes = packed_ptr + e * lines * 256
        offs_m = first.to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = row.to(tl.int64) * 64 + tl.arange(0, 64)
        rows_m = tl.where(offs_m < end, offs_m, first)[:, None]
        acc = tl.zeros((64, BLOCK_M), dtype=tl.float32)
        for k in range(0, units_k):
            unit = row.to(tl.int64) * units_k + k
            codes = load_unit_codes(planes, unit, units, FORMAT, BITS, False, PLACE, MASK2)
            byte = load_unit_scales(planes, unit, units, BITS, GROUP)
            value = tl.reshape(decode_codes(codes, FORMAT), (64, 128 // GROUP, GROUP))
            if GROUP == 16:
                bits = tl.where(byte == 0, 0, (byte << 20) + (103 << 23))
            else:  # in two factors: the product of both may lie outside fp32
                value *= 2.0**-REBIAS
                bits = byte << 23
            value *= bits.to(tl.float32, bitcast=True)[:, :, None]
            weights = tl.reshape(value, (64, 128)).to(tl.bfloat16)
            offs_k = k * 128 + tl.arange(0, 128)[None, :]
            a = tl.load(a_ptr + rows_m * stride_am + offs_k, mask=offs_k < K, other=0)
            acc = tl.dot(weights, tl.trans(a), acc)
        mask_n, mask_m = offs_n < N, offs_m < end
        acc *= tl.load(row_scale_ptr + e * N + offs_n, mask=mask_n, other=0.0)[:, None]
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + e * stride_bias + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
        ptrs = out_ptr + offs_m[None, :] * stride_om + offs_n[:, None]
        tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])
    elif expert == E:
        store_zeros(out_ptr, first, R, row, N, stride_om, BLOCK_M, 64)


_FIELDS = ("BLOCK_M", "ROWS", "UNITS", "STAGES", "PER_SM")


def configs(a: Tensor, row_scale: Tensor, **_: Any):
    rows = bucket(-(-bucket(a.shape[0]) // row_scale.shape[0]))
    plain = Config(kernel="plain", BLOCK_M=max(16, min(64, rows)), num_warps=4, num_stages=1)
    yield plain  # the default until `units` has been compared with the reference on a GPU
    if of(a.device).arch == "cpu":
        return
    for limit, *fields in (
        (8, 8, 1, 2, 3, 5), (8, 8, 1, 1, 4, 5), (16, 16, 1, 2, 3, 4), (16, 16, 1, 1, 4, 4), (32, 32, 1, 2, 3, 3),
        (32, 32, 1, 1, 4, 3), (64, 64, 1, 1, 4, 2), (1 << 30, 128, 1, 1, 3, 2),
    ):  # fmt: skip
        if rows <= limit:
            yield Config(kernel="units", **dict(zip(_FIELDS, fields, strict=True)), num_warps=4)
    for block, height, units, stages, per_sm in (
        (m, r, u, s, p)
        for m in (8, 16, 32, 64, 128) for r in (1, 2) for u in (1, 2) for s in (2, 3, 4) for p in (1, 2, 3, 4, 5)
        if m <= max(8, 2 * rows)
    ):  # fmt: skip
        yield Config(kernel="units", BLOCK_M=block, ROWS=height, UNITS=units, STAGES=stages, PER_SM=per_sm, num_warps=4)


def legal(config: Config, device: Device, a: Tensor, packed: Tensor, row_scale: Tensor, format: str, **_: Any) -> bool:
    if config["kernel"] == "plain":
        return True
    if not AVAILABLE or not fits_row_descriptor(a) or packed.data_ptr() % 16:
        return False
    whole = units_of(row_scale.shape[1], a.shape[1])[1] % config["UNITS"] == 0  # no scales of what lies behind a row
    codes = config["ROWS"] * config["UNITS"] * unit_lines(format) * LINE
    held = (codes + config["BLOCK_M"] * config["UNITS"] * COLUMNS * 2) * config["STAGES"] + 2048
    counters = config["PER_SM"] * device.sm_count * config["ROWS"]
    return whole and held * config["PER_SM"] <= device.shared_limit and counters <= LIMIT


def key(
    a: Tensor, row_scale: Tensor, format: str, bias: Tensor | None, out_dtype: torch.dtype, **_: Any
) -> dict[str, int | str]:  # fmt: skip
    E, N = row_scale.shape[:2]
    return dict(
        M=bucket(a.shape[0]), N=N, K=a.shape[1], E=E, format=format, out_dtype=str(out_dtype),
        bias=int(bias is not None),
    )  # fmt: skip


def cost(a: Tensor, packed: Tensor, row_scale: Tensor, out_dtype: torch.dtype, **_: Any) -> Cost:
    (R, K), (E, N) = a.shape, row_scale.shape[:2]
    moved = a.nbytes + packed.nbytes // E * min(E, R) + R * N * out_dtype.itemsize
    return Cost(flops=2 * R * N * K, bytes=moved)


def tolerance(a: Tensor, out_dtype: torch.dtype, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 2e-6}[out_dtype] * 1.1
    # what the tensor cores of sm90 cut off; see grouped_mm
    return rounding + (0.0 if a.device.type == "cpu" else a.shape[1] / 16 * 2.0**-25)


def inputs(
    *, M, N, K, E, dropped=0.0, spread="even", format="mxfp4", bias=False, out_dtype=torch.bfloat16, kind="normal",
    layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    units_n, units_k = units_of(N, K)
    g, lines = generator(seed + 1, device), units_n * units_k * unit_lines(format)
    packed = torch.randint(0, 256, (E, lines, LINE), generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    # the plane of scales: some binades of the format's own bytes
    first = units_n * units_k * (unit_lines(format) - 32 // group_of(format))
    low, high = (80, 130) if format == "nvfp4" else (240, 248)
    shape = (E, lines - first, LINE)
    packed[:, first:] = torch.randint(low, high, shape, generator=g, device=device, dtype=torch.int16).to(torch.uint8)
    return dict(
        a=strided(sample((M, K), torch.bfloat16, kind, device, seed), layout), packed=packed,
        row_scale=scales((E, N, 1), device, seed + 2), offs=row_ends(M, E, dropped, spread, device, seed),
        format=format, bias=sample((E, N), torch.float32, "normal", device, seed + 4) if bias else None,
        out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 33, 70), N=(1, 64, 80), K=(1, 128, 272), E=(1, 3), dropped=(0.0, 0.5, 1.0), spread=("even", "skewed"),
        format=FORMATS, bias=(False, True), out_dtype=FLOAT_INPUTS, kind=("normal", "zeros"),
        layout=("contiguous", "rows"),
    ),
    kernels=dict(
        plain=Kernel(_plain_kernel, matrix=True),
        units=Kernel(grouped_units_kernel, targets=("sm90",), interpretable=False, matrix=True),
    ),
    configs=configs, launcher_fields=("PER_SM",), legal=legal, key=key, cost=cost, cases=grouped_cases(),
)  # fmt: skip
def grouped_mm_shuffled(
    a: Tensor, packed: Tensor, row_scale: Tensor, offs: Tensor, format: str = "mxfp4", bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert by its shuffled weight.

    Args:
        a: (R, K) bf16, sorted by expert, elements of a row contiguous.
        packed: uint8 (E, lines, 256), of each expert as `shuffle_weight` gives it for (N, K) and target "bf16".
        row_scale: (E, N, 1) fp32, contiguous: shuffle_weight's, times the weight's global scale where there is one.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
        format: "mxfp4" or "nvfp4".
        bias: (E, N) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        (R, N) of `out_dtype`, accumulated in fp32; rows from offs[-1] on are zeros.

    Raises:
        ValueError: a format, shape, dtype or stride does not fit, or K is 0.
    """
    (R, K), (E, N) = a.shape, row_scale.shape[:2]
    out = torch.empty((R, N), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    config, (units_n, units_k), device = dict(config), units_of(N, K), of(a.device)
    made, lines, early = constants(format, "bf16"), packed.shape[1], early_start(device)
    stride_bias, bins = 0 if bias is None else bias.stride(0), expert_bins(E)
    if config.pop("kernel") == "plain":
        made.pop("FP8")
        _plain_kernel[grid(R, N, E, Config(**config, BLOCK_N=64))](
            a, packed, row_scale, bias, offs, out, R, E, N, K, units_k, lines, a.stride(0), out.stride(0), stride_bias,
            REBIAS=REBIAS["e2m1"], BLOCK_E=bins, **made, **early, **config,
        )  # fmt: skip
        return out
    block, rows, units, programs = (config[n] for n in ("BLOCK_M", "ROWS", "UNITS", "PER_SM"))
    most = (R + min(E + 1, R) * (block - 1)) // block
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=a.device)
    schedule_kernel[(triton.cdiv(most, 32),)](
        offs, table, R, E, BLOCK_E=bins, BLOCK_M=block, BLOCK=32, num_warps=4, **early
    )
    programs *= device.sm_count
    parts = torch.empty(2 * programs * rows * ROWS * block, device=a.device)
    flat, group = packed.view(torch.int32).reshape(E * lines, 64), made["GROUP"]
    del config["PER_SM"]
    grouped_units_kernel[(programs,)](
        flat_descriptor(flat, 16 * units), flat_descriptor(flat, 32 // group * units), descriptor(a, block, 64),
        out, parts, tickets(programs * rows, a.device), row_scale, bias, table,
        E, N, units_n, units_k, lines, out.stride(0), stride_bias,
        GROUP=group, **assembly(made["FORMAT"], False), **config, **early,
    )  # fmt: skip
    return out
