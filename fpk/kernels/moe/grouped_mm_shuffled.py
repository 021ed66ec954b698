"""grouped_mm_shuffled: one product per expert of bf16 rows and weights in the layout of shuffle_weight.

    out[r, n] = row_scale[e, n] * sum_k a[r, k] * value(packed[e])[n, k]  (+ bias[e, n])
                                                                           e: offs[e - 1] <= r < offs[e]

or, with an activation, out[r, i] = act_and_mul of columns 2i and 2i + 1 of that, rounded before.

For one expert this is mm_shuffled. Rows from offs[-1] on have no expert and become zeros, whatever they hold.

Kernels: `warps`, Gluon for sm90 (_gluon_expert_units); `plain`, anywhere: a unit at a time, in bf16.

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
from fpk.device import Device, of, triton_is
from fpk.formats import decode
from fpk.kernels._activation import activate, activated, activation_parameters, expect_activation
from fpk.kernels._tile import after_previous, early_start
from fpk.kernels.gemm._gluon import AVAILABLE, descriptor
from fpk.kernels.gemm._gluon_units import flat_descriptor
from fpk.kernels.gemm._operands import decode_codes
from fpk.kernels.gemm._tickets import tickets
from fpk.kernels.gemm._unit_assembly import assembly
from fpk.kernels.moe._expert_tiles import expert_schedule_kernel, registers
from fpk.kernels.moe._gluon_expert_units import expert_units_kernel
from fpk.kernels.moe._grouped import expert_bins, expert_of_rows, expert_tile, fits_row_descriptor, grid, store_zeros
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
from fpk.op import Cost, Kernel, batch_must_not_matter, op
from fpk.samples import generator, sample, scales, strided
from fpk.shapes import grouped_cases

ACTIVATIONS: dict[str, dict[str, Any]] = {
    "none": {}, "swigluoai": dict(activation="swigluoai"), "silu": dict(activation="silu", limit=2.0),
    "gelu_tanh": dict(activation="gelu_tanh"),
}  # fmt: skip
"""What laws draw from: the parameters of an activation by name."""
FORMATS = ("mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2")
WHAT = "grouped_mm_shuffled"
LISTED = 256  # experts at most that every program lists by itself, where it has registers left for that
_ACT = ("FORMULA", "ALPHA", "BETA", "LIMIT", "PRECISE")


def reference(
    a: Tensor, packed: Tensor, row_scale: Tensor, offs: Tensor, format: str = "mxfp4", bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, activation: str = "none", alpha: float | None = None,
    beta: float | None = None, limit: float | None = None,
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
            rebias = REBIAS[ELEMENTS[format].name]
            factor = torch.ldexp(torch.ones_like(byte, dtype=torch.float64), byte - 127 - rebias).float()
        value = decode(codes, ELEMENTS[format]) * factor.repeat_interleave(group_of(format), 1)[:, :K]
        product = (a.float() @ value.T) * row_scale[e].T
        out = torch.where(expert == e, product if bias is None else product + bias[e].float(), out)
    out = out.to(out_dtype)
    return out if activation == "none" else activated(out, activation, True, True, alpha, beta, limit)


def check(
    a: Tensor, packed: Tensor, row_scale: Tensor, offs: Tensor, format: str, bias: Tensor | None,
    out_dtype: torch.dtype, activation: str, alpha: float | None, beta: float | None, limit: float | None,
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
    if activation != "none":
        product = torch.empty((0, N), dtype=out_dtype, device="meta")
        expect_activation(WHAT, product, activation, True, True, alpha, beta, limit)
    elif (alpha, beta, limit) != (None, None, None):
        raise ValueError(f"{WHAT}.activation: expected one that takes alpha, beta or limit, got 'none'")


@triton.jit(do_not_specialize=["R", "E", "units_k", "lines"])
def _plain_kernel(
    a_ptr, packed_ptr, row_scale_ptr, bias_ptr, offs_ptr, out_ptr,
    R, E, N, K, units_k, lines, stride_am, stride_om, stride_bias,
    PDL: tl.constexpr, FORMAT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PLACE: tl.constexpr,
    MASK2: tl.constexpr, REBIAS: tl.constexpr, FORMULA: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LIMIT: tl.constexpr, PRECISE: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """A row of units times BLOCK_M rows of its expert."""
    after_previous(PDL)
    expert, end, first, row = expert_tile(offs_ptr, R, E, tl.cdiv(N, 64), BLOCK_E, BLOCK_M)
    if expert < E:
        e = expert.to(tl.int64)
        units = units_k.to(tl.int64) * tl.cdiv(N, 64)  # triton makes a constant of an N of 1, not of units_k
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
        out = acc.to(out_ptr.dtype.element_ty)
        if FORMULA is not None:
            gate, up = tl.split(tl.permute(tl.reshape(out, (32, 2, BLOCK_M)), (0, 2, 1)))
            out = activate(gate.to(tl.float32), up.to(tl.float32), FORMULA, True, ALPHA, BETA, LIMIT, PRECISE)
            out = out.to(out_ptr.dtype.element_ty)
            offs_n = row.to(tl.int64) * 32 + tl.arange(0, 32)
            mask_n = offs_n < N // 2
        ptrs = out_ptr + offs_m[None, :] * stride_om + offs_n[:, None]
        tl.store(ptrs, out, mask=mask_n[:, None] & mask_m[None, :])
    elif expert == E:
        WIDTH: tl.constexpr = 64 if FORMULA is None else 32
        store_zeros(out_ptr, first, R, row, N * WIDTH // 64, stride_om, BLOCK_M, WIDTH)


def configs(a: Tensor, row_scale: Tensor, **_: Any):
    R, (E, N), device = bucket(a.shape[0]), row_scale.shape[:2], of(a.device)
    rows = bucket(-(-R // E))
    if device.arch != "cpu":
        yield from _defaults(R, E, units_of(N, 1)[0], device.sm_count)
    yield Config(kernel="plain", BLOCK_M=max(16, min(64, rows)), num_warps=4, num_stages=1)
    if device.arch != "cpu":
        yield from _space(rows)


_FIELDS = ("BLOCK_M", "BOX", "ROWS", "UNITS", "STAGES", "PER_SM", "SPLIT")


def _warps(*fields: int) -> Config:
    return Config(kernel="warps", **dict(zip(_FIELDS, fields, strict=True)), num_warps=4)


def _defaults(R: int, E: int, units_n: int, sms: int):
    """What an H200 ran fastest over the experts of gpt-oss-120b, by rows an expert."""
    rows = -(-R // E)
    for most, *fields in (
        (4, 16, 8, 1, 1, 4, 4), (12, 32, 8, 1, 1, 4, 4), (40, 48, 8, 2, 1, 4, 2), (72, 96, 16, 2, 1, 6, 1),
        (R, 160, 32, 2, 1, 4, 1),
    ):  # fmt: skip
        if rows <= most:
            few = 2 * R <= E  # then hardly an expert has two rows
            if few:
                fields[0] = 8
            _, _, height, _, _, per_sm = fields
            even = 1 << (fields[0].bit_length() - 1)
            if few or min(E, R) * units_n < 3 * per_sm * sms * height:
                yield _warps(even, *fields[1:], True)
            yield _warps(*fields, False)
            if fields[0] != even:  # for versions of triton whose views cannot begin at any box
                yield _warps(even, *fields[1:], False)
            return


def _space(rows: int):
    for m, box in ((8, 8), (16, 8), (32, 8), (48, 8), (64, 16), (96, 16), (128, 32), (160, 32), (192, 32), (256, 64)):
        for height, units, stages, per_sm in (
            (1, 1, 4, 4), (1, 1, 6, 4), (1, 2, 3, 4), (2, 1, 4, 2), (2, 1, 6, 2), (2, 1, 4, 1), (2, 1, 6, 1),
            (2, 2, 3, 1), (3, 1, 4, 1), (3, 1, 8, 1), (4, 1, 6, 1), (4, 1, 8, 1),
        ):  # fmt: skip
            if rows <= 2 * m <= max(32, 8 * rows) and (per_sm == 1 or m <= 48):
                yield from (_warps(m, box, height, units, stages, per_sm, split) for split in (m <= 16, False))


def legal(
    config: Config, device: Device, a: Tensor, packed: Tensor, row_scale: Tensor, format: str, out_dtype: torch.dtype,
    **_: Any,
) -> bool:  # fmt: skip
    if config["kernel"] == "plain":
        return True
    if not AVAILABLE or not fits_row_descriptor(a) or packed.data_ptr() % 16:
        return False
    boxes = config["BLOCK_M"] // config["BOX"]
    if boxes & (boxes - 1) and (config["SPLIT"] or not triton_is("3.6")):
        return False  # parts, and views of triton 3.9, are of powers of two of boxes
    if config["SPLIT"] and batch_must_not_matter():
        return False
    block, units, stages = config["BLOCK_M"], config["UNITS"], config["STAGES"]
    codes = config["ROWS"] * units * unit_lines(format) * LINE
    turned = config["ROWS"] * ROWS * min(block, 32) * (5 if out_dtype is torch.float32 else 1)  # pieces of results
    held = (codes + block * units * COLUMNS * 2) * stages + turned + 1024
    return held * config["PER_SM"] <= device.shared_limit


def key(
    a: Tensor, row_scale: Tensor, format: str, bias: Tensor | None, out_dtype: torch.dtype, activation: str, **_: Any
) -> dict[str, int | str]:  # fmt: skip
    E, N = row_scale.shape[:2]
    return dict(
        M=bucket(a.shape[0]), N=N, K=a.shape[1], E=E, format=format, out_dtype=str(out_dtype),
        bias=int(bias is not None), activated=int(activation != "none"),
    )  # fmt: skip


def cost(
    a: Tensor, packed: Tensor, row_scale: Tensor, out_dtype: torch.dtype, activation: str, **_: Any
) -> Cost:  # fmt: skip
    (R, K), (E, N) = a.shape, row_scale.shape[:2]
    width = N if activation == "none" else N // 2
    moved = a.nbytes + packed.nbytes // E * min(E, R) + R * width * out_dtype.itemsize
    return Cost(flops=2 * R * N * K, bytes=moved)


def tolerance(a: Tensor, out_dtype: torch.dtype, activation: str, **_: Any) -> float:
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 2e-6}[out_dtype] * 1.1
    if activation != "none":
        rounding *= 3  # of gate, up and the result
    # what the tensor cores of sm90 cut off; see grouped_mm
    return rounding + (0.0 if a.device.type == "cpu" else a.shape[1] / 16 * 2.0**-25)


def inputs(
    *, M, N, K, E, dropped=0.0, spread="even", format="mxfp4", bias=False, out_dtype=torch.bfloat16, act="none",
    kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    arguments = dict(activation="none", alpha=None, beta=None, limit=None) | ACTIVATIONS[act]
    N += N % 2 if act != "none" else 0
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
        out_dtype=out_dtype, **arguments,
    )  # fmt: skip


def _launch_warps(
    config: dict[str, Any], a: Tensor, packed: Tensor, row_scale: Tensor, offs: Tensor, bias: Tensor | None,
    out: Tensor, format: str, act: tuple[Any, ...] | None,
) -> None:  # fmt: skip
    (R, K), (E, N) = a.shape, row_scale.shape[:2]
    made, (units_n, units_k), device = constants(format, "bf16"), units_of(N, K), of(a.device)
    lines, early, block, units = packed.shape[1], early_start(device), config["BLOCK_M"], config["UNITS"]
    rows, split = config["ROWS"], config["SPLIT"]
    most = (R + min(E, R) * (block - 1)) // block
    bins, table = max(128, triton.next_power_of_2(E)), offs  # at least one a thread
    listed = rows == 1 and bins <= LISTED
    if not listed:
        table = torch.empty(2 + 3 * most, dtype=torch.int32, device=a.device)
        expert_schedule_kernel[(triton.cdiv(most, 32),)](
            offs, table, R, E, BLOCK_E=bins, BLOCK_M=block, BLOCK=32, num_warps=4, **early
        )
    programs = config["PER_SM"] * device.sm_count
    if not split:
        programs = min(programs, most * triton.cdiv(units_n, rows))
    parts, counters = row_scale, row_scale
    if split:
        parts = torch.empty(2 * programs * rows * ROWS * block, device=a.device)
        counters = tickets(programs * rows, a.device)
    flat, six, scale_lines = packed.view(torch.int32).reshape(E * lines, 64), made["BITS"] == 6, 32 // made["GROUP"]
    codes, more = flat_descriptor(flat, 16 * units), registers(Config(**config))
    del config["PER_SM"]
    expert_units_kernel[(programs,)](
        codes, flat_descriptor(flat, 8 * units) if six else codes, flat_descriptor(flat, scale_lines * units),
        descriptor(a, config["BOX"], 64), out, parts, counters, row_scale, bias, table,
        R, N, E, units_n, units_k, lines, out.stride(0), 0 if bias is None else bias.stride(0),
        GROUP=made["GROUP"], SIX=six, ACT=act, TAIL=(units_n - 1) % rows + 1,
        BINS=bins if listed else 0, **assembly(made["FORMAT"], False),
        **config, **more, **early,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 33, 70), N=(1, 64, 80), K=(1, 128, 272), E=(1, 3), dropped=(0.0, 0.5, 1.0), spread=("even", "skewed"),
        format=FORMATS, bias=(False, True), out_dtype=FLOAT_INPUTS, act=tuple(ACTIVATIONS), kind=("normal", "zeros"),
        layout=("contiguous", "rows"),
    ),
    kernels=dict(
        plain=Kernel(_plain_kernel, matrix=True),
        warps=Kernel(expert_units_kernel, targets=("sm90",), interpretable=False, matrix=True),
    ),
    configs=configs, launcher_fields=("PER_SM",), legal=legal, key=key, cost=cost, cases=grouped_cases(),
)  # fmt: skip
def grouped_mm_shuffled(
    a: Tensor, packed: Tensor, row_scale: Tensor, offs: Tensor, format: str = "mxfp4", bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, activation: str = "none", alpha: float | None = None,
    beta: float | None = None, limit: float | None = None, *, config: Config,
) -> Tensor:  # fmt: skip
    """Multiply the rows of each expert by its shuffled weight.

    Args:
        a: (R, K) bf16, sorted by expert, elements of a row contiguous.
        packed: uint8 (E, lines, 256), of each expert as `shuffle_weight` gives it for (N, K) and target "bf16".
        row_scale: (E, N, 1) fp32, contiguous: shuffle_weight's, times the weight's global scale where there is one.
        offs: (E,) int32 on the device, not falling: the row after each expert's last. Experts may have no rows.
        format: "mxfp4", "nvfp4", "mxfp6_e2m3" or "mxfp6_e3m2".
        bias: (E, N) fp32, bf16 or fp16, or None; added in fp32 before the single rounding.
        out_dtype: bf16, fp16 or fp32.
        activation: "none", or what `act_and_mul` does with the product's columns, gates and ups by turns.
        alpha, beta, limit: as in `act_and_mul`.

    Returns:
        (R, N) of `out_dtype`, (R, N / 2) with an activation, accumulated in fp32; rows from offs[-1] on are zeros.

    Raises:
        ValueError: a format, shape, dtype or stride does not fit, or K is 0.
    """
    (R, K), (E, N), act = a.shape, row_scale.shape[:2], None
    out = torch.empty((R, N if activation == "none" else N // 2), dtype=out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if activation != "none":
        act = (*activation_parameters(activation, alpha, beta, limit), out_dtype is torch.float32)
    config, early = dict(config), early_start(of(a.device))
    if config.pop("kernel") == "warps":
        _launch_warps(config, a, packed, row_scale, offs, bias, out, format, act)
        return out
    made = constants(format, "bf16")
    made.pop("FP8")
    _plain_kernel[grid(R, N, E, Config(**config, BLOCK_N=64))](
        a, packed, row_scale, bias, offs, out,
        R, E, N, K, units_of(N, K)[1], packed.shape[1], a.stride(0), out.stride(0),
        0 if bias is None else bias.stride(0),
        REBIAS=REBIAS[made["FORMAT"]], BLOCK_E=expert_bins(E), **dict(zip(_ACT, act or [None] * 5, strict=True)),
        **made, **early, **config,
    )  # fmt: skip
    return out
