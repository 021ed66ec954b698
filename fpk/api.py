"""Schemes by name on top of ops: `quantize` a tensor, `mm` two of them.

Nothing here computes: every number comes from an op, every scheme is an entry of `fpk.formats.SCHEMES`. Scales that a
caller brings are checked by value here, once; ops check metadata only.
"""

from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

import fpk.kernels  # noqa: F401  declares every op
from fpk._pairs import no_product, packed_arguments, reads_packed
from fpk._shuffled import Shuffled, shuffled_arguments
from fpk.check import FLOAT_INPUTS, expect_dtype, expect_rank, expect_shape, expect_valid_scale, fp8_dtype
from fpk.formats import E4M3FN, E8M0, FP8, INT8, SCHEMES, Format, Granularity, Scheme, decode, scheme_of
from fpk.op import OPS, Op

__all__ = ["LayerScheme", "Quantized", "mm", "parse_layer_scheme", "quantize"]

STATIC = "_static"
"""What the name of static activations ends with."""

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NOT_OPTIONS = ("x", "scale", "zero_point", "format", "packed")
_STATIC = {"int": "quantize_int8_static"}  # by the format's kind; every other kind is an FP8


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """A tensor in low precision: value = (code - zero_point) * scale, times global_scale where there is one.

    Args:
        codes: (M, K), or (E, M, K) for a stack of matrices, in the dtype of the scheme's format. FP4 and FP6 are packed
            into uint8: (..., K / 2) and (..., 3 K / 4).
        scale: the codes' rank, one element per group of the scheme's granularity; fp32 (bf16 and fp16 are converted by
            value), uint8 holding e8m0 exponents, or for nvfp4 float8_e4m3fn. Finite and positive (e4m3: or 0).
        scheme: a name of `fpk.list_schemes()`.
        zero_point: int32 of scale's shape, or None; int8 and int4 only.
        global_scale: fp32, a second multiplier of schemes that have two levels: (1, 1), (E, 1, 1) or one for each row.
        shape: of the values; None for that of the codes.
        check: whether to check the parts, the scales' values too, which waits for the device. False where the parts
            come from a Quantized or an op.

    Raises:
        ValueError: unknown scheme, or a part whose shape, dtype or value does not fit it.
    """

    codes: Tensor
    scale: Tensor
    scheme: str
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None
    shape: torch.Size | None = None
    check: InitVar[bool] = True

    def __post_init__(self, check: bool) -> None:
        if self.shape is None:
            object.__setattr__(self, "shape", _unpacked(self.codes.shape, scheme_of(self.scheme)))
        if check:
            self._check()

    def _check(self) -> None:
        scheme = scheme_of(self.scheme)
        expect_rank("Quantized.codes", self.codes, 2, 3)
        exact = scheme.packed or scheme.format is INT8 or scheme.dequantizer != "dequantize"
        expect_dtype("Quantized.codes", self.codes, *((scheme.format.dtype,) if exact else tuple(FP8)))
        expect_dtype("Quantized.scale", self.scale, *_scale_dtypes(scheme))
        values = tuple(_unpacked(self.codes.shape, scheme))
        if _shape(self) != values:
            raise ValueError(
                f"Quantized.shape: expected {values} for codes of {tuple(self.codes.shape)}, got {_shape(self)}"
            )
        expect_shape("Quantized.scale", self.scale, scheme.granularity.scale_shape(values))
        if self.scale.dtype in (torch.bfloat16, torch.float16):
            object.__setattr__(self, "scale", self.scale.float())
        if self.zero_point is not None:
            if scheme.format.kind != "int" or scheme.scale_format != "fp32":
                raise ValueError(f"Quantized.zero_point: expected None for {scheme}, got a tensor")
            expect_dtype("Quantized.zero_point", self.zero_point, torch.int32)
            expect_shape("Quantized.zero_point", self.zero_point, tuple(self.scale.shape))
        elif "zero_point" in scheme.outputs:
            raise ValueError(f"Quantized.zero_point: expected a tensor for {scheme}, got None")
        expect_valid_scale("Quantized.scale", _scale_values(self.scale))
        if ("global_scale" in scheme.outputs) != (self.global_scale is not None):
            wanted, got = ("a tensor", "None") if self.global_scale is None else ("None", "a tensor")
            raise ValueError(f"Quantized.global_scale: expected {wanted} for {scheme}, got {got}")
        if self.global_scale is not None:
            lead = tuple(self.codes.shape[:-2])
            expect_dtype("Quantized.global_scale", self.global_scale, torch.float32)
            expect_shape("Quantized.global_scale", self.global_scale, (*lead, 1, 1), (*lead, self.codes.shape[-2], 1))
            expect_valid_scale("Quantized.global_scale", self.global_scale)

    def __reduce__(self) -> tuple[Any, ...]:
        dtypes = (self.codes.dtype, self.scale.dtype)
        rest = (self.scheme, self.zero_point, self.global_scale, self.shape)
        return _rebuild, (plain_bytes(self.codes), plain_bytes(self.scale), dtypes, rest)

    @property
    def granularity(self) -> Granularity:
        return scheme_of(self.scheme).granularity

    @property
    def format(self) -> Format:
        """The element format: that of the scheme, or the FP8 type that its codes really have."""
        return FP8.get(self.codes.dtype, scheme_of(self.scheme).format)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points together."""
        parts = (self.codes, self.scale, self.zero_point, self.global_scale)
        return sum(part.nbytes for part in parts if part is not None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, of `shape`; computed in fp32 and rounded once to `dtype`."""
        scheme = scheme_of(self.scheme)
        op = _op(scheme.dequantizer)
        rows, cols = self.granularity.rows, self.granularity.cols
        if scheme.dequantizer == "dequantize":
            return op(self.codes, self.scale, self.zero_point, rows=rows, cols=cols, out_dtype=dtype)
        if scheme.dequantizer == "dequantize_int4":
            return op(self.codes, self.scale, self.zero_point, group=cols, out_dtype=dtype)
        second = () if self.global_scale is None else (self.global_scale,)
        return op(self.codes, self.scale, *second, out_dtype=dtype, **dict(scheme.options))

    def __repr__(self) -> str:
        extra = "".join(f", {n}" for n in ("zero_point", "global_scale") if getattr(self, n) is not None)
        return (
            f"Quantized({self.scheme}, shape={_shape(self)}, codes={self.format}, "
            f"scale={tuple(self.scale.shape)} {str(self.scale.dtype).removeprefix('torch.')}{extra}, "
            f"{self.nbytes} bytes, {self.codes.device})"
        )


def quantize(
    x: Tensor,
    scheme: str | Scheme,
    *,
    scale: Tensor | float | None = None,
    zero_point: Tensor | None = None,
    check: bool = True,
    **options: Any,
) -> Quantized:
    """Quantize a matrix, or a stack of matrices, by a scheme's name.

    Args:
        x: (M, K) or (E, M, K), fp32, bf16 or fp16, any strides. Matrices of a stack share no scale.
        scheme: a name of `fpk.list_schemes()`.
        scale: None to take it from the data; else the static scale, one element per group of the scheme's granularity,
            fp32, bf16 or fp16. For a single matrix, schemes with one scale also take a float or any one element.
        zero_point: int32 of scale's shape, with a static int8 scale only.
        check: whether to check the values of a static scale or of `scale_ub`, which waits for the device. False where
            that was done before.
        options: passed to the op that quantizes, for example `scale_ub`, `num_valid_tokens`, `qmin`, or `dtype` for
            another FP8 type than the device's e4m3.

    Returns:
        Quantized, on x's device.

    Raises:
        ValueError: unknown scheme or option, shape or dtype of an argument, a scale or scale_ub that is not finite and
            positive.
    """
    scheme = scheme_of(str(scheme))
    expect_rank("quantize.x", x, 2, 3)
    expect_dtype("quantize.x", x, *FLOAT_INPUTS)
    if scale is not None and scheme.dequantizer != "dequantize":
        raise ValueError(f"quantize.scale: expected None for {scheme}, whose scales come from the data, got a scale")
    if scale is not None:
        given = _static_scale(scale, scheme, x)
        if check:
            expect_valid_scale("quantize.scale", given)
        return _quantize_static(x, scheme, given, zero_point, options)
    if zero_point is not None:
        raise ValueError("quantize.zero_point: expected None without a static scale, got a tensor")
    op = _op(scheme.quantizer)
    arguments = _arguments(op, scheme, x, options)
    if check and isinstance(options.get("scale_ub"), Tensor):
        expect_valid_scale("quantize.scale_ub", options["scale_ub"])
    outputs = dict(zip(scheme.outputs, op(x, **arguments), strict=True))
    return Quantized(scheme=scheme.name, check=False, **outputs)


def mm(
    qx: Quantized | Tensor,
    qw: Quantized | Shuffled,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    colsum: Tensor | None = None,
) -> Tensor:
    """Multiply activations by weights: qx @ qw.T + bias.

    Which op does it follows from the two granularities. A scale per tensor or per row goes with any other: where the
    other operand has a scale per group, it counts for each of the groups.

    Args:
        qx: (M, K) activations; a plain bf16 or fp16 tensor leaves them as they are (weight-only).
        qw: (N, K) weights, or what `fpk.shuffle` made of them.
        bias: (N,) or None; added in fp32 before the single rounding.
        out_dtype: of the result.
        fast_accum: let FP8 products stay in the tensor core's own accumulator over all of K.
        colsum: (N,) int32, sums of the rows of qw's codes, which activations with zero points need; None to sum here.

    Returns:
        (M, N) of out_dtype; accumulated in fp32, or int32 for int8.

    Raises:
        ValueError: shapes that do not fit, or two schemes that have no product.
        NotImplementedError: a product that fpk has no op for on this device.
    """
    if isinstance(qw, Shuffled):
        return _op("mm_shuffled")(**shuffled_arguments(qx, qw), bias=bias, out_dtype=out_dtype)
    if not isinstance(qw, Quantized):
        raise ValueError(f"mm.qw: expected Quantized weights (N, K), got {type(qw).__name__}")
    expect_rank("mm.qw", qw.codes, 2)
    a = qx.codes if isinstance(qx, Quantized) else qx
    expect_rank("mm.qx", a, 2)
    if _shape(qx)[1] != _shape(qw)[1]:
        raise ValueError(f"mm.qx: expected (M, {_shape(qw)[1]}) for weights of {_shape(qw)}, got {_shape(qx)}")
    reason = no_product(scheme_of(qw.scheme), scheme_of(qx.scheme) if isinstance(qx, Quantized) else None)
    if reason:
        raise ValueError(f"mm: {reason}, got {qx!r} and {qw!r}")
    if not isinstance(qx, Quantized):
        expect_dtype("mm.qx", qx, torch.bfloat16, torch.float16)
        if qx.stride(1) != 1:  # rows may lie anywhere, elements of a row may not
            qx = qx.contiguous()
    if reads_packed(qx, qw):
        return _op("mm_packed")(**packed_arguments(qx, qw), bias=bias, out_dtype=out_dtype)
    if qw.zero_point is not None:
        raise NotImplementedError("mm.qw: weights with zero points have no op, use symmetric weights")
    rows, cols = qw.granularity.rows, qw.granularity.cols
    if not isinstance(qx, Quantized):
        return _op("mm_weight_only")(qx, qw.codes, qw.scale, rows=rows, cols=cols, bias=bias, out_dtype=out_dtype)
    common = dict(bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)
    if qx.granularity.cols < 0 and cols < 0:
        zeros: dict[str, Any] = {}
        if qx.zero_point is not None:
            colsum = qw.codes.sum(1, dtype=torch.int32) if colsum is None else colsum
            zeros = dict(zero_point_a=qx.zero_point, colsum_b=colsum)
        return _op("scaled_mm")(qx.codes, qw.codes, qx.scale, qw.scale, **zeros, **common)
    if qx.zero_point is not None:
        raise ValueError(f"mm: {qx.scheme} with zero points has no product with {qw.scheme} weights")
    group, scale_a = qx.granularity.cols, qx.scale
    if group < 0:  # a scale of all of K stands in every group, without being copied
        group = cols
        scale_a = scale_a.expand(qx.codes.shape[0], -(-qx.codes.shape[1] // group))
    return _op("scaled_mm_group")(
        qx.codes, qw.codes, scale_a, qw.scale, group=group, block_rows=rows, block_cols=cols, **common
    )


@dataclass(frozen=True)
class LayerScheme:
    """Schemes of a layer's weights and of its activations (None: left as they are), written "weights:activations".

    `static` says that the activations' scale is fixed beforehand, from a calibration, instead of taken from the data of
    each call. It is no scheme of its own, since codes and scale mean the same; its name is that of the activations with
    "_static" behind it.
    """

    weight: Scheme
    activation: Scheme | None
    static: bool = False

    @property
    def activation_name(self) -> str:
        """What stands behind the colon: "none", "fp8_token", "fp8_tensor_static"."""
        return f"{self.activation}{STATIC}" if self.static else str(self.activation or "none")

    def __str__(self) -> str:
        return f"{self.weight}:{self.activation_name}"


def parse_layer_scheme(text: "str | LayerScheme") -> LayerScheme:
    """Read a layer scheme: "w:a", "w:none" for weight-only, or "w" with the activations that go with it.

    "fp8_channel" alone is "fp8_channel:fp8_token". Activations may be "fp8_tensor_static" or "int8_tensor_static": one
    scale for all, fixed by `fpk.calibrate`.

    Raises:
        ValueError: a part is no scheme, or the pair has no product.
    """
    if isinstance(text, LayerScheme):
        return text
    first, colon, second = str(text).partition(":")
    weight = scheme_of(first.strip())
    if not weight.activation:
        raise ValueError(f"scheme {text!r}: {weight} has no product as weights, it is one of activations")
    second = second.strip() if colon else weight.activation
    static = second.endswith(STATIC)
    if static and second not in static_schemes():
        raise ValueError(f"scheme {text!r}: expected static activations {' or '.join(static_schemes())}, got {second}")
    activation = None if second == "none" else scheme_of(second.removesuffix(STATIC))
    if reason := no_product(weight, activation):
        raise ValueError(f"scheme {text!r}: {reason}")
    return LayerScheme(weight, activation, static)


def static_schemes() -> list[str]:
    """Names of static activations: of each scheme that has one scale for the whole tensor, or a second one above its
    blocks', and no zero point."""
    whole = (s for s in SCHEMES.values() if max(s.granularity.rows, s.granularity.cols) < 0 or len(s.outputs) == 3)
    return [f"{s}{STATIC}" for s in whole if "zero_point" not in s.outputs]


def plain_bytes(codes: Tensor) -> Tensor:
    """Codes as what `pickle` can carry: torch up to 2.13 writes float8 tensors but fails to read them."""
    return codes.view(torch.uint8) if codes.dtype in FP8 else codes


def _rebuild(
    codes: Tensor, scale: Tensor, dtypes: tuple[torch.dtype, torch.dtype], rest: tuple[Any, ...]
) -> Quantized:  # fmt: skip
    scheme, zero_point, global_scale, shape = rest
    return Quantized(
        codes.view(dtypes[0]), scale.view(dtypes[1]), scheme, zero_point, global_scale, shape, check=False
    )  # fmt: skip


def _op(name: str) -> "Op[..., Any]":
    if name not in OPS:
        raise NotImplementedError(f"fpk has no op {name!r}")
    return OPS[name]


def _arguments(op: "Op[..., Any]", scheme: Scheme, x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """What the scheme says to the op, then the caller's options; a scheme's granularity cannot be overridden."""
    known = op.__signature__.parameters
    rows, cols = scheme.granularity.rows, scheme.granularity.cols
    fixed = {"group": cols, "rows": rows, "cols": cols, "block_rows": rows, "block_cols": cols}
    for name in options:
        if name not in known or name in fixed or name in _NOT_OPTIONS:
            free = sorted(set(known) - set(fixed) - set(_NOT_OPTIONS))
            raise ValueError(f"quantize: {scheme} takes {free}, got option {name!r}")
    arguments: dict[str, Any] = {n: v for n, v in fixed.items() if n in known}
    arguments |= {n: v for n, v in scheme.options if n in known}
    if "scale_format" in known:
        arguments["scale_format"] = scheme.scale_format
    if "dtype" in known and "dtype" not in options:
        arguments["dtype"] = fp8_dtype(x.device) if scheme.format is E4M3FN else scheme.format.dtype
    return arguments | options


def _static_scale(scale: Tensor | float, scheme: Scheme, x: Tensor) -> Tensor:
    """The given scale as fp32 of the shape that the scheme demands."""
    shape = scheme.granularity.scale_shape(tuple(x.shape))
    if isinstance(scale, Tensor):
        expect_dtype("quantize.scale", scale, *_SCALE_DTYPES)
        if scale.device != x.device:
            raise ValueError(f"quantize.scale: expected {x.device} (as x), got {scale.device}")
    tensor = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    if tensor.numel() == 1 and shape == (1, 1):
        tensor = tensor.reshape(shape)
    expect_shape("quantize.scale", tensor, shape)
    return tensor


def _quantize_static(
    x: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, options: dict[str, Any]
) -> Quantized:
    op = _op(_STATIC.get(scheme.format.kind, "quantize_fp8_static"))
    arguments = _arguments(op, scheme, x, options)
    if zero_point is not None:
        if scheme.format is not INT8:
            raise ValueError(f"quantize.zero_point: expected None for {scheme}, got a tensor")
        arguments["zero_point"] = zero_point
    elif "zero_point" in scheme.outputs:
        raise ValueError(f"quantize.zero_point: expected the zero points of {scheme} beside its scale, got None")
    return Quantized(op(x, scale, **arguments), scale, scheme.name, zero_point, check=False)


def _shape(x: Quantized | Tensor) -> tuple[int, ...]:
    return tuple(x.shape or ())


def _unpacked(shape: torch.Size, scheme: Scheme) -> torch.Size:
    """Shape of the values of codes of this shape."""
    return torch.Size((*shape[:-1], shape[-1] * 8 // scheme.format.bits)) if scheme.packed else shape


def _scale_values(scale: Tensor) -> Tensor:
    """Scales of any dtype as numbers. The e4m3 scale of a block of zeros is 0, which stands for no number: 1 here."""
    if scale.dtype is E8M0.dtype:
        return decode(scale, E8M0)
    values = scale.float()
    return torch.where(values == 0, 1.0, values) if scale.dtype is E4M3FN.dtype else values


def _scale_dtypes(scheme: Scheme) -> tuple[torch.dtype, ...]:
    if scheme.dequantizer == "dequantize":
        return (*_SCALE_DTYPES, E8M0.dtype)
    if scheme.scale_format == "fp32":
        return _SCALE_DTYPES
    return (E8M0.dtype,) if scheme.scale_format == "e8m0" else (E4M3FN.dtype,)
