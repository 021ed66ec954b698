"""Operands of the products of packed weights: what a format's name says, plain-torch values, and decoding in kernels.

A format of weights is a microscaling format, "nvfp4" or "int4"; one of activations is a microscaling format, "nvfp4",
"fp8", "int8", or "none" for bf16 and fp16. Every code is decoded to a type of the matrix unit that holds it exactly;
scales that are powers of two, or e4m3, go into the decoded values where these stay exact, all others onto sums in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import expect_dtype, expect_inner_contiguous, expect_one_of, expect_shape
from fpk.device import Device
from fpk.formats import E2M1, E4M3FN, E8M0, FP8, INT4, INT8, MX, MX_BLOCK, NVFP4_BLOCK, Format, decode, expand_groups
from fpk.kernels._microscale import decode_narrow
from fpk.kernels._packed import unpack_codes
from fpk.kernels._tile import decode_e8m0, decode_fp8

WEIGHTS = (*MX, "nvfp4", "int4")
ACTIVATIONS = ("none", "fp8", "int8", *MX, "nvfp4")
COMPUTE = ("fp8", "int8", "half")
"""Types that the matrix unit multiplies: FP8, INT8, or the 16-bit type of the activations (bf16 for codes)."""

_FP8_EXACT = ("e4m3fn", "e3m2", "e2m3", "e2m1", "int4", "e5m2")
_INT8_EXACT = {"int8": 0, "int4": 0, "e2m1": 1, "e2m3": 3}  # value * 2^n is an integer of 8 bits


def operands(
    a: Tensor, scale_a: Tensor | None, format_a: str, group_a: int, b: Tensor, scale_b: Tensor, format_b: str,
    group_b: int,
) -> tuple["Operand", "Operand"]:  # fmt: skip
    """Both operands of a product."""
    left = operand(format_a, a.dtype, None if scale_a is None else scale_a.dtype, group_a)
    return left, operand(format_b, b.dtype, scale_b.dtype, group_b)


@dataclass(frozen=True)
class Operand:
    """element: format of the codes, None for bf16 and fp16. group: columns that share a scale, -1 for all of them.
    scale: its type ("fp32", "e8m0", "e4m3"). shift: value = code * 2^shift * scale."""

    element: Format | None
    group: int = -1
    scale: str = "fp32"
    shift: int = 0

    @property
    def bits(self) -> int:
        return 16 if self.element is None else self.element.bits

    def columns(self, codes: Tensor) -> int:
        """Values that a row of codes holds."""
        return codes.shape[-1] * 8 // self.bits if self.bits < 8 else codes.shape[-1]


def operand(format: str, dtype: torch.dtype, scale: torch.dtype | None, group: int) -> Operand:
    """The operand of a format whose codes and scales have these dtypes."""
    if format == "none":
        return Operand(None)
    if format in MX:
        return Operand(MX[format].element, MX_BLOCK, "e8m0", MX[format].shift)
    if format == "nvfp4":
        return Operand(E2M1, NVFP4_BLOCK, "e4m3")
    element = {"int4": INT4, "int8": INT8}.get(format) or FP8[dtype]
    return Operand(element, group, "e8m0" if scale is torch.uint8 else "fp32")


def values(
    codes: Tensor, scale: Tensor | None, format: str, global_scale: Tensor | None, zero_point: Tensor | None, group: int
) -> Tensor:
    """fp32 values of an operand (..., K)."""
    this = operand(format, codes.dtype, None if scale is None else scale.dtype, group)
    if this.element is None or scale is None:
        return codes.float()
    element = this.element
    code = decode(unpack_codes(codes, this.bits) if this.bits < 8 else codes, element)
    if zero_point is not None:
        code = code - expand_groups(zero_point, code.shape, -1, this.group)
    kind = {"e8m0": E8M0, "e4m3": E4M3FN}.get(this.scale)
    factor = decode(scale.view(torch.uint8), kind) if kind else scale
    value = code * 2.0**this.shift * expand_groups(factor, code.shape, -1, this.group)
    return value if global_scale is None else value * global_scale


def expect_operand(
    what: str, side: str, codes: Tensor, scale: Tensor | None, format: str, global_scale: Tensor | None,
    zero_point: Tensor | None, group: int,
) -> None:  # fmt: skip
    """Raise ValueError unless the parts of one operand fit its format; `side` is "a" or "b"."""
    expect_one_of(f"{what}.format_{side}", format, ACTIVATIONS if side == "a" else WEIGHTS)
    dtypes = {"none": (torch.bfloat16, torch.float16), "fp8": tuple(FP8), "int8": (torch.int8,)}.get(format)
    dtypes = dtypes or (MX[format].element.dtype if format in MX else torch.uint8,)
    expect_dtype(f"{what}.{side}", codes, *dtypes)
    expect_inner_contiguous(f"{what}.{side}", codes)
    optional = dict(scale=(scale, format != "none"), global_scale=(global_scale, format == "nvfp4"))
    for name, (tensor, wanted) in optional.items():
        if (tensor is not None) != wanted:
            needs, got = ("a tensor", "None") if wanted else ("None", "a tensor")
            raise ValueError(f"{what}.{name}_{side}: expected {needs} for format {format!r}, got {got}")
    if scale is None:
        return
    if format in ("int4", "fp8", "int8") and group != -1 and (group < 16 or group % 16):
        raise ValueError(f"{what}.group_{side}: expected -1 or a multiple of 16, got {group}")
    this = operand(format, codes.dtype, scale.dtype, group)
    if this.bits == 6 and codes.shape[-1] % 3:
        raise ValueError(f"{what}.{side}: expected whole groups of 3 bytes, got shape {tuple(codes.shape)}")
    lead, rows, K = tuple(codes.shape[:-2]), codes.shape[-2], this.columns(codes)
    types = {"e8m0": (torch.uint8,), "e4m3": (torch.float8_e4m3fn, torch.uint8)}.get(this.scale, (torch.float32,))
    if this.group < 0:  # goes onto sums, as it is
        types = (torch.float32,)
    elif format == "fp8":
        types = (torch.float32, torch.uint8)
    expect_dtype(f"{what}.scale_{side}", scale, *types)
    if this.group < 0:
        expect_shape(f"{what}.scale_{side}", scale, (*lead, rows, 1), (*lead, 1, 1))
    else:
        expect_shape(f"{what}.scale_{side}", scale, (*lead, rows, triton.cdiv(K, this.group)))
    if global_scale is not None:
        expect_dtype(f"{what}.global_scale_{side}", global_scale, torch.float32)
        expect_shape(f"{what}.global_scale_{side}", global_scale, (*lead, rows, 1), (*lead, 1, 1))
    if zero_point is not None:
        if format != "int4":
            raise ValueError(f"{what}.zero_point_{side}: expected None for format {format!r}, got a tensor")
        expect_dtype(f"{what}.zero_point_{side}", zero_point, torch.int32)
        expect_shape(f"{what}.zero_point_{side}", zero_point, tuple(scale.shape))


def expect_as_wide(what: str, a: Tensor, left: Operand, b: Tensor, right: Operand) -> None:
    """Raise ValueError unless rows of both operands hold as many values: bytes may be equal where values are not."""
    K, width = left.columns(a), right.columns(b)
    if width != K:
        raise ValueError(f"{what}.b: expected rows of {K} values, as a has them, got {width} by shape {tuple(b.shape)}")


def exact_in(compute: str, a: Operand, b: Operand, device: Device) -> bool:
    """Does the matrix unit's type hold every code of both operands, and does the device have it?"""
    if compute == "half":
        return True
    if a.element is None or b.element is None or "e4m3" in (a.scale, b.scale):
        return False  # 16 columns to a scale are no step of FP8 and INT8 products
    if any(o.group > 0 and o.group % 32 for o in (a, b)):
        return False
    if compute == "int8":
        return a.element.name in _INT8_EXACT and b.element.name in _INT8_EXACT
    return device.has_fp8 and not device.fnuz and all(o.element.name in _FP8_EXACT for o in (a, b))  # type: ignore[union-attr]


def constants(compute: str, a: Operand, b: Operand, a_dtype: torch.dtype) -> dict[str, Any]:
    """The constexpr arguments of `packed_sum` for a pair of operands and the type that they are multiplied in."""
    made: dict[str, Any] = {}
    post = 0
    for side, this in (("A", a), ("B", b)):
        element = this.element
        if element is None:
            kind, shift = ("fp16" if a_dtype is torch.float16 else "bf16"), 0
        elif compute == "int8":
            kind, shift = "int8", _INT8_EXACT[element.name]
        elif compute == "fp8":
            kind, shift = ("e5m2" if element.name == "e5m2" else "e4m3fn"), 0
        else:  # bf16 holds an MX or NVFP4 code times its scale, fp16 only the latter
            kind, shift = ("fp16" if a.element is None and a_dtype is torch.float16 else "bf16"), this.shift
        folded = this.scale in {"bf16": ("e8m0", "e4m3"), "fp16": ("e4m3",)}.get(kind, ())
        folded = folded and this.group > 0 and this.group & (this.group - 1) == 0
        raw = element is None or kind == element.name
        post += this.shift - shift if element is not None else 0
        made |= {
            f"FORMAT_{side}": "raw" if raw else element.name,  # type: ignore[union-attr]
            f"TYPE_{side}": _TYPES[kind],
            f"SCALE_{side}": "" if this.group < 0 or element is None else this.scale,
            f"GROUP_{side}": this.group,
            f"FOLD_{side}": folded,
            f"UP_{side}": 1.0 if raw else 2.0**shift,
        }
    made["POST"] = 2.0**post
    made["PROMOTE"] = any(made[f"SCALE_{s}"] and not made[f"FOLD_{s}"] for s in "AB")
    return made


_TYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "int8": tl.int8, "e4m3fn": tl.float8e4nv, "e5m2": tl.float8e5}


def promoted_groups(made: dict[str, Any]) -> list[int]:
    """Columns between changes of the scales that are applied to sums."""
    return [made[f"GROUP_{s}"] for s in "AB" if made[f"SCALE_{s}"] and not made[f"FOLD_{s}"]]


def pointer(codes: Tensor, made: dict[str, Any], side: str) -> Tensor:
    """Codes as a kernel takes them: FP8 as bytes where it decodes them itself. FP6 that lies right is read in words."""
    if made[f"FORMAT_{side}"] in ("e2m3", "e3m2"):
        aligned = all(s % 4 == 0 for s in codes.stride()[:-1]) and codes.data_ptr() % 4 == 0
        if aligned and codes.shape[-1] % 12 == 0:
            made[f"FORMAT_{side}"] += "_words"
    return codes.view(torch.uint8) if codes.dtype in FP8 and made[f"FORMAT_{side}"] != "raw" else codes


def columns_of(codes: Tensor, format: str) -> int:
    """Values that a row of codes holds."""
    return operand(format, codes.dtype, None, -1).columns(codes)


def as_bytes(scale: Tensor | None) -> Tensor | None:
    """Scales as a kernel takes them: e4m3 as bytes."""
    return scale if scale is None or scale.dtype is torch.float32 else scale.view(torch.uint8)


def row_strides(tensor: Tensor | None) -> tuple[int, int]:
    """Strides of rows and columns; 0 along rows that share an element, and where there is no tensor."""
    if tensor is None:
        return 0, 0
    return 0 if tensor.shape[-2] == 1 else tensor.stride(-2), tensor.stride(-1)


@triton.jit
def interleave(low, high):
    """[R, N] and [R, N] to [R, 2 N], one of each in turn."""
    return tl.reshape(tl.join(low, high), (low.shape[0], low.shape[1] * 2))


@triton.jit
def load_codes(rows, k, K, FORMAT: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Codes of BLOCK_K columns from column k on (a multiple of 16) of row pointers [R, 1]; 0 from column K on."""
    if FORMAT == "e2m1" or FORMAT == "int4":
        at = k // 2 + tl.arange(0, BLOCK_K // 2)[None, :]
        if EVEN_K:
            pair = tl.load(rows + at)
        else:
            pair = tl.load(rows + at, mask=at < K // 2, other=0)
        codes = interleave(pair & 15, pair >> 4).to(tl.int32)
    elif FORMAT == "e2m3_words" or FORMAT == "e3m2_words":  # 16 codes in three words
        at = k // 16 * 3 + tl.arange(0, BLOCK_K // 16)[None, :] * 3
        words = rows.to(tl.pointer_type(tl.uint32)) + at
        if EVEN_K:
            w0, w1, w2 = tl.load(words), tl.load(words + 1), tl.load(words + 2)
        else:
            mask = at < K // 16 * 3
            w0 = tl.load(words, mask=mask, other=0)
            w1 = tl.load(words + 1, mask=mask, other=0)
            w2 = tl.load(words + 2, mask=mask, other=0)
        even = interleave(w0, (w1 >> 16) | (w2 << 16))
        odd = interleave((w0 >> 24) | (w1 << 8), w2 >> 8)
        quads = interleave(even, odd)  # in the lowest 24 bits
        codes = interleave(interleave(quads, quads >> 12), interleave(quads >> 6, quads >> 18)).to(tl.int32) & 63
    elif FORMAT == "e2m3" or FORMAT == "e3m2":
        at = k // 4 * 3 + tl.arange(0, BLOCK_K // 4)[None, :] * 3
        if EVEN_K:
            b0, b1, b2 = tl.load(rows + at), tl.load(rows + at + 1), tl.load(rows + at + 2)
        else:
            mask = at < K // 4 * 3
            b0 = tl.load(rows + at, mask=mask, other=0)
            b1 = tl.load(rows + at + 1, mask=mask, other=0)
            b2 = tl.load(rows + at + 2, mask=mask, other=0)
        first, second = b0 & 63, (b0 >> 6) | ((b1 & 15) << 2)
        third, fourth = (b1 >> 4) | ((b2 & 3) << 4), b2 >> 2
        codes = interleave(interleave(first, third), interleave(second, fourth)).to(tl.int32)
    else:
        offs_k = k + tl.arange(0, BLOCK_K)[None, :]
        if EVEN_K:
            codes = tl.load(rows + offs_k)
        else:
            codes = tl.load(rows + offs_k, mask=offs_k < K, other=0.0)
    return codes


@triton.jit
def decode_codes(codes, FORMAT: tl.constexpr):
    """Codes to fp32, exactly."""
    if FORMAT == "e2m1":
        value = decode_narrow(codes, 1, 1, 4)
    elif FORMAT == "e2m3" or FORMAT == "e2m3_words":
        value = decode_narrow(codes, 3, 1, 6)
    elif FORMAT == "e3m2" or FORMAT == "e3m2_words":
        value = decode_narrow(codes, 2, 3, 6)
    elif FORMAT == "int4":
        value = ((codes << 28) >> 28).to(tl.float32)
    elif FORMAT == "int8":
        value = codes.to(tl.float32)
    elif FORMAT == "e5m2":
        value = decode_fp8(codes, 2, 15, 0x7F, True)
    elif FORMAT == "e4m3fnuz":
        value = decode_fp8(codes, 3, 8, 0x80, False)
    elif FORMAT == "e5m2fnuz":
        value = decode_fp8(codes, 2, 16, 0x80, False)
    else:
        tl.static_assert(FORMAT == "e4m3fn")
        value = decode_fp8(codes, 3, 7, 0x7F, False)
    return value


@triton.jit
def decode_scale(stored, SCALE: tl.constexpr):
    if SCALE == "e8m0":
        scale = decode_e8m0(stored)
    elif SCALE == "e4m3":
        scale = decode_fp8(stored, 3, 7, 0x7F, False)
    else:
        scale = stored
    return scale


@triton.jit
def load_values(
    rows, scale_rows, zero_rows, k, K, stride_sk, stride_zk,
    FORMAT: tl.constexpr, TYPE: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, FOLD: tl.constexpr,
    UP: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """A tile of an operand in the type of the matrix unit: exact, with its scales if FOLD; [R, BLOCK_K]."""
    codes = load_codes(rows, k, K, FORMAT, BLOCK_K, EVEN_K)
    if FORMAT == "raw" and not FOLD:
        tile = codes
    else:
        value = codes.to(tl.float32) if FORMAT == "raw" else decode_codes(codes, FORMAT)
        if zero_rows is not None:
            value -= tl.load(zero_rows + (k // GROUP * stride_zk if GROUP > 0 else 0)).to(tl.float32)
        if UP != 1.0:
            value *= UP
        if FOLD:
            R: tl.constexpr = value.shape[0]
            GROUPS: tl.constexpr = (BLOCK_K + GROUP - 1) // GROUP
            at = k // GROUP + tl.arange(0, GROUPS)[None, :]
            if EVEN_K:
                stored = tl.load(scale_rows + at * stride_sk)
            else:
                stored = tl.load(scale_rows + at * stride_sk, mask=at * GROUP < K, other=0)
            scale = decode_scale(stored, SCALE)
            grouped = tl.reshape(value, (R, GROUPS, BLOCK_K // GROUPS)) * scale[:, :, None]
            value = tl.reshape(grouped, (R, BLOCK_K))
        tile = value.to(TYPE)
    return tile


@triton.jit
def packed_sum(
    acc, a_rows, b_rows, sa_rows, sb_rows, zb_rows, first, step, K, stride_sak, stride_sbk, stride_zbk,
    FORMAT_A: tl.constexpr, TYPE_A: tl.constexpr, SCALE_A: tl.constexpr, GROUP_A: tl.constexpr, FOLD_A: tl.constexpr,
    UP_A: tl.constexpr, FORMAT_B: tl.constexpr, TYPE_B: tl.constexpr, SCALE_B: tl.constexpr, GROUP_B: tl.constexpr,
    FOLD_B: tl.constexpr, UP_B: tl.constexpr, POST: tl.constexpr, PROMOTE: tl.constexpr, SWAP: tl.constexpr,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """acc, fp32, plus the products of columns first, first + step, ..., BLOCK_K of them each; all rows are [R, 1].

    acc is [BLOCK_N, BLOCK_M] if SWAP. Steps lie inside one group of every scale that is applied to sums.
    """
    for k in range(first, K, step):
        a = load_values(
            a_rows, sa_rows, None, k, K, stride_sak, 0,
            FORMAT_A, TYPE_A, SCALE_A, GROUP_A, FOLD_A, UP_A, BLOCK_K, EVEN_K,
        )  # fmt: skip
        b = load_values(
            b_rows, sb_rows, zb_rows, k, K, stride_sbk, stride_zbk,
            FORMAT_B, TYPE_B, SCALE_B, GROUP_B, FOLD_B, UP_B, BLOCK_K, EVEN_K,
        )  # fmt: skip
        if SWAP:
            left, right = b, tl.trans(a)
        else:
            left, right = a, tl.trans(b)
        if PROMOTE:
            if a.dtype == tl.int8:
                part = tl.dot(left, right, out_dtype=tl.int32).to(tl.float32)
            else:
                part = tl.dot(left, right, out_dtype=tl.float32)
            if SCALE_A != "" and not FOLD_A:
                scale_a = decode_scale(tl.load(sa_rows + k // GROUP_A * stride_sak), SCALE_A)
                part *= tl.trans(scale_a) if SWAP else scale_a
            if SCALE_B != "" and not FOLD_B:
                scale_b = decode_scale(tl.load(sb_rows + k // GROUP_B * stride_sbk), SCALE_B)
                part *= scale_b if SWAP else tl.trans(scale_b)
            acc += part
        else:
            acc = tl.dot(left, right, acc)
    if POST != 1.0:
        acc *= POST
    return acc
