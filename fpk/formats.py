"""Element formats, granularities and schemes: the one place that says what a bit pattern means.

`encode` and `decode` are plain torch and serve references and tests; kernels take only the constants.
Sources: OCP 8-bit Floating Point Specification 1.0; OCP Microscaling Formats 1.0; for the fnuz types, their
definition in LLVM's APFloat.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """An element format of at most 8 bits. Codes are uint8 (int8 for `int8`), one per element.

    `max` is the largest finite value; `qmax` the bound that quantizers scale to (224 for e4m3fnuz, whose top binade
    costs accuracy with dynamic scales; 127 for int8). `kind` says what the special codes are: "fn" has NaN only at
    all-ones, "ieee" has Inf and NaN, "fnuz" has one NaN at the code of -0, "none" has neither.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    qmax: float
    kind: Literal["fn", "ieee", "fnuz", "none", "e8m0", "int"]
    dtype: torch.dtype

    @property
    def is_float(self) -> bool:
        return self.kind not in ("int", "e8m0")

    @property
    def has_nan(self) -> bool:
        return self.kind in ("fn", "ieee", "fnuz", "e8m0")

    @property
    def nan_code(self) -> int:
        """The code fpk writes for NaN: +0x7F, 0x80 for fnuz, 0xFF for e8m0; 0 where the format has none."""
        return {"fn": 0x7F, "ieee": 0x7F, "fnuz": 0x80, "e8m0": 0xFF}.get(self.kind, 0)

    @property
    def emax(self) -> int:
        """Exponent of the largest finite value, as the microscaling rules need it."""
        return {"e4m3fn": 8, "e4m3fnuz": 7, "e5m2": 15, "e5m2fnuz": 15, "e3m2": 4, "e2m3": 2, "e2m1": 2, "int8": 0}[
            self.name
        ]

    def __repr__(self) -> str:
        return self.name


E4M3FN = Format("e4m3fn", 8, 4, 3, 7, 448.0, 448.0, "fn", torch.float8_e4m3fn)
E5M2 = Format("e5m2", 8, 5, 2, 15, 57344.0, 57344.0, "ieee", torch.float8_e5m2)
E4M3FNUZ = Format("e4m3fnuz", 8, 4, 3, 8, 240.0, 224.0, "fnuz", torch.float8_e4m3fnuz)
E5M2FNUZ = Format("e5m2fnuz", 8, 5, 2, 16, 57344.0, 57344.0, "fnuz", torch.float8_e5m2fnuz)
E2M1 = Format("e2m1", 4, 2, 1, 1, 6.0, 6.0, "none", torch.uint8)
E2M3 = Format("e2m3", 6, 2, 3, 1, 7.5, 7.5, "none", torch.uint8)
E3M2 = Format("e3m2", 6, 3, 2, 3, 28.0, 28.0, "none", torch.uint8)
E8M0 = Format("e8m0", 8, 8, 0, 127, 2.0**127, 2.0**127, "e8m0", torch.uint8)
INT8 = Format("int8", 8, 0, 7, 0, 127.0, 127.0, "int", torch.int8)
INT4 = Format("int4", 4, 0, 3, 0, 7.0, 7.0, "int", torch.uint8)  # two's complement

FORMATS = {f.name: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ, E2M1, E2M3, E3M2, E8M0, INT8, INT4)}
FP8 = {f.dtype: f for f in (E4M3FN, E5M2, E4M3FNUZ, E5M2FNUZ)}
"""The formats a torch dtype identifies. FP4, FP6 and e8m0 all live in uint8, so a dtype does not name them."""


@dataclass(frozen=True)
class Microscaling:
    """An MX format: 32 elements share a power of two, stored as e8m0; value = code * 2^shift * scale.

    `rule` is the scale rule that the format's ecosystem uses: "even" for FP4 and FP6 (Quark, vLLM), "rceil" for FP8
    (cuBLAS, vLLM), "floor" for INT8 (OCP). MXINT8 has codes of 7 bits and a sign, of which 6 are a fraction.
    """

    name: str
    element: Format
    rule: str
    shift: int = 0

    @property
    def max(self) -> float:
        """The largest element."""
        return self.element.max * 2.0**self.shift


MX_BLOCK = 32
NVFP4_BLOCK = 16
MX_RULES = ("floor", "ceil", "even", "rceil")
CODE_ORDERS = ("low_first", "high_first")
SCALE_TILES = {"128x4": (128, 32), "8x4": (8, 8)}
"""Block scales as matrix units read them, in tiles of 4 columns: rows of a tile, and of the strips that it is cut into
(the rows of a strip are 4 bytes apart times the number of strips)."""


MX = {
    m.name: m
    for m in (
        Microscaling("mxfp8_e4m3", E4M3FN, "rceil"),
        Microscaling("mxfp8_e5m2", E5M2, "rceil"),
        Microscaling("mxfp6_e3m2", E3M2, "even"),
        Microscaling("mxfp6_e2m3", E2M3, "even"),
        Microscaling("mxfp4", E2M1, "even"),
        Microscaling("mxint8", INT8, "floor", shift=-6),
    )
}


def mx_scale(amax: Tensor, mx: Microscaling, rule: str) -> Tensor:
    """e8m0 bytes of the scales of blocks with these finite amax: 2^e with e by `rule`, kept inside -127..127.

    With amax = c * 2^t, 1 <= c < 2, and emax the exponent of the largest element p: "floor" e = t - emax (OCP); "ceil"
    one more unless c = 1; "even" one more if c, rounded to the element's mantissa, is 2 (Quark); "rceil" one more if
    amax > p * 2^(t - emax), so that nothing saturates (cuBLAS). amax 0 gives byte 0, Inf the NaN byte 255.
    """
    half, exponent = torch.frexp(amax.double())
    c, t = half * 2, exponent - 1
    more = {
        "floor": torch.zeros_like(c, dtype=torch.bool),
        "ceil": c > 1,
        "even": c >= 2 - 2.0 ** -((mx.element.mantissa_bits if mx.element.is_float else 6) + 1),
        "rceil": c > mx.max * 2.0**-mx.element.emax,
    }[rule]
    byte = (t + more.int() - mx.element.emax + 127).clamp(0, 254)
    byte = torch.where(amax == 0, 0, byte)
    return torch.where(amax.isinf(), 255, byte).to(torch.uint8)


def exponent_of(magnitude: Tensor) -> Tensor:
    """floor(log2) of positive normal fp32 values, from their bits, int32; subnormals and zero give -127."""
    return ((magnitude.view(torch.int32) >> 23) & 0xFF) - 127


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp32 for int32 exponents in -127..127, exactly; -127 is the subnormal."""
    normal = ((exponent + 127) << 23).view(torch.float32)
    return torch.where(exponent <= -127, 2.0**-127, normal)


def encode(x: Tensor, fmt: Format, saturate: bool = True) -> Tensor:
    """Round fp32/bf16/fp16 values to codes of `fmt`: nearest, ties to even.

    With `saturate`, values beyond the range (Inf too) become the largest finite code; without it they become Inf where
    the format has it, NaN where it has only that, and saturate in formats with neither. NaN becomes `fmt.nan_code`.

    Returns uint8 codes of x's shape; int8 for INT8. E8M0 takes the exponent of |x| rounded up, for powers of two.
    """
    x = x.float()
    if fmt is INT8:
        return encode_int8(x)
    if fmt is INT4:
        return encode_int8(x.clamp(-8, 7), -8).view(torch.uint8) & 15
    if fmt is E8M0:
        magnitude = x.abs()
        up = (magnitude.view(torch.int32) & 0x7FFFFF) != 0
        code = exponent_of(magnitude) + 127 + up.to(torch.int32)
        # fp32 subnormals: 2^-127 is code 0, what lies above it rounds up to 2^-126
        code = torch.where(magnitude < 2.0**-126, (magnitude > 2.0**-127).to(torch.int32), code)
        code = torch.where(magnitude.isfinite(), code.clamp(max=254), 254 if saturate else 255)
        return torch.where(x.isnan(), 255, code).to(torch.uint8)
    if saturate and fmt.dtype is not torch.uint8:
        # torch casts in-range values to nearest even on every backend; beyond the range they differ, so clamp first
        code = x.clamp(-fmt.max, fmt.max).to(fmt.dtype).view(torch.uint8)
        return torch.where(x.isnan(), fmt.nan_code, code)
    return _encode_by_bits(x, fmt, saturate)


def encode_int8(x: Tensor, qmin: int = -128) -> Tensor:
    """Round to int8 in qmin..127: nearest, ties to even; beyond the range saturates, NaN becomes 0."""
    return torch.where(x.isnan(), 0.0, x.round().clamp(qmin, 127)).to(torch.int8)


def _encode_by_bits(x: Tensor, fmt: Format, saturate: bool) -> Tensor:
    m, min_exponent = fmt.mantissa_bits, 1 - fmt.bias
    sign = torch.signbit(x)
    magnitude = torch.where(x.isfinite(), x.abs(), 0.0)
    # the step between neighbours is 2^(e - m), constant below the smallest normal value
    exponent = exponent_of(magnitude).clamp(min=min_exponent)
    steps = (magnitude * power_of_two(m - exponent)).round()  # exact product; round is half to even
    code = ((exponent - min_exponent) << m) + steps.to(torch.int32)  # a carry moves into the exponent by itself
    top = _top_code(fmt)
    over = (code > top) | x.isinf()
    if saturate or fmt.kind == "none":
        code = torch.where(over, top, code)
    elif fmt.kind == "ieee":
        code = torch.where(over, top + 1, code)
    negative = 1 << (fmt.exponent_bits + m)
    if fmt.kind == "fnuz":
        code = torch.where(sign & (code != 0), code + negative, code)
    else:
        code = torch.where(sign, code + negative, code)
    nan = x.isnan()
    if not saturate and fmt.kind in ("fn", "fnuz"):
        nan = nan | over
    return torch.where(nan, fmt.nan_code, code).to(torch.uint8)


def _top_code(fmt: Format) -> int:
    """Code of the largest finite value."""
    codes = 1 << (fmt.exponent_bits + fmt.mantissa_bits)
    return codes - {"fn": 2, "ieee": (1 << fmt.mantissa_bits) + 1, "fnuz": 1, "none": 1}[fmt.kind]


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """Values of codes as fp32, exactly. Takes uint8 codes or tensors of the format's own dtype."""
    if fmt is INT8:
        return codes.float()
    if fmt is INT4:
        return ((codes & 15) ^ 8).float() - 8.0
    if fmt.dtype in FP8:
        return as_codes(codes, fmt).float()  # torch's widening cast is exact, NaN and Inf included, and one pass
    code = (codes.view(torch.uint8) if codes.dtype != torch.uint8 else codes).to(torch.int32)
    if fmt is E8M0:
        return torch.where(code == 255, float("nan"), power_of_two(code - 127))
    m, e = fmt.mantissa_bits, fmt.exponent_bits
    field = (code >> m) & ((1 << e) - 1)
    mantissa = code & ((1 << m) - 1)
    # subnormals have no hidden one and the exponent of field 1
    significand = (mantissa + torch.where(field > 0, 1 << m, 0)).float()
    value = significand * power_of_two(field.clamp(min=1) - fmt.bias - m)
    return torch.where((code >> (e + m)) & 1 == 1, -value, value)


def as_codes(codes: Tensor, fmt: Format) -> Tensor:
    """uint8 codes as a tensor of the format's torch dtype (a view)."""
    return codes.view(fmt.dtype) if codes.dtype != fmt.dtype else codes


def finite_amax(x: Tensor, dims: tuple[int, ...], num_valid_rows: Tensor | None = None) -> Tensor:
    """Largest finite magnitude over `dims`, kept as size 1, fp32. NaN and Inf do not count; of Inf alone: Inf.

    Every quantizer takes its scale from this: a NaN or Inf must not spoil its neighbours. Rows (dimension -2) from
    `num_valid_rows` on are padding and do not count; where nothing counts the result is 0.
    """
    magnitude = x.float().abs()
    if magnitude.numel() == 0:
        shape = [1 if d - x.dim() in dims else n for d, n in enumerate(x.shape)]
        return magnitude.new_zeros(shape)
    finite, infinite = magnitude.isfinite(), magnitude.isinf()
    if num_valid_rows is not None:
        counts = torch.arange(x.shape[-2], device=x.device)[:, None] < num_valid_rows
        finite, infinite = finite & counts, (infinite | ~counts) & (num_valid_rows > 0)
    amax = torch.where(finite, magnitude, 0.0).amax(dims, keepdim=True)
    return torch.where(infinite.all(dims, keepdim=True), float("inf"), amax)


def expand_groups(scale: Tensor, shape: tuple[int, ...], rows: int, cols: int) -> Tensor:
    """Per-group values (rank of `shape`) as something that broadcasts to `shape`, short edge groups included."""
    if rows > 0:
        scale = scale.repeat_interleave(rows, -2)[..., : shape[-2], :]
    if cols > 0:
        scale = scale.repeat_interleave(cols, -1)[..., : shape[-1]]
    return scale


@dataclass(frozen=True)
class Granularity:
    """What shares a scale: `rows` x `cols` elements of a matrix, -1 meaning the full extent.

    Activations are (M, K), weights (N, K) as in nn.Linear, so "token" and "channel" are one thing: one scale a row.
    """

    name: str
    rows: int
    cols: int

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scale of a tensor: same rank, one element per group, short groups at the edges."""
        *lead, m, k = shape
        return (*lead, 1 if self.rows < 0 else -(-m // self.rows), 1 if self.cols < 0 else -(-k // self.cols))


PER_TENSOR = Granularity("tensor", -1, -1)
PER_TOKEN = Granularity("token", 1, -1)
PER_CHANNEL = Granularity("channel", 1, -1)


def per_group(width: int) -> Granularity:
    return Granularity(f"group{width}", 1, width)


def per_block(rows: int, cols: int | None = None) -> Granularity:
    cols = rows if cols is None else cols
    return Granularity(f"block{rows}" if rows == cols else f"block{rows}x{cols}", rows, cols)


@dataclass(frozen=True)
class Scheme:
    """A format with a granularity and a scale format: what `fpk.quantize` takes by name.

    `quantizer` names the op that quantizes dynamically, `outputs` says what it returns, in order. Its arguments
    `group`, `block_rows`, `block_cols` come from the granularity, `dtype` from format and device, others of the scheme
    from `options`. `activation` is the scheme of the activations that a layer with such weights has unless told
    otherwise ("none": none); empty where weights cannot have the scheme. `dequantizer` names the op that gives values
    back, `product` the format in `mm_packed`, empty where the FP8 and INT8 products serve.
    """

    name: str
    format: Format
    granularity: Granularity
    scale_format: Literal["fp32", "e8m0", "e4m3fn"] = "fp32"
    quantizer: str = ""
    options: tuple[tuple[str, int | str], ...] = ()
    outputs: tuple[str, ...] = ("codes", "scale")
    activation: str = ""
    dequantizer: str = "dequantize"
    product: str = ""

    def __str__(self) -> str:
        return self.name

    @property
    def packed(self) -> bool:
        """Are several codes packed together, so that a row of codes is shorter than a row of values?"""
        return self.format.bits < 8


_WEIGHT_INT8 = (("qmin", -127),)  # symmetric weights: -128 has no positive partner
_ASYMMETRIC = ("codes", "scale", "zero_point")


def _mx(name: str, activation: str = "none") -> "Scheme":
    return Scheme(
        name, MX[name].element, per_group(MX_BLOCK), "e8m0", "quantize_mx", (("format", name),),
        activation=activation, dequantizer="dequantize_mx", product=name,
    )  # fmt: skip


SCHEMES = {
    s.name: s
    for s in (
        Scheme("fp8_tensor", E4M3FN, PER_TENSOR, quantizer="quantize_fp8_tensor", activation="fp8_token"),
        Scheme("fp8_token", E4M3FN, PER_TOKEN, quantizer="quantize_fp8_token", activation="fp8_token"),
        Scheme("fp8_channel", E4M3FN, PER_CHANNEL, quantizer="quantize_fp8_token", activation="fp8_token"),
        Scheme("fp8_group128", E4M3FN, per_group(128), quantizer="quantize_fp8_group", activation="fp8_group128"),
        Scheme("fp8_block128", E4M3FN, per_block(128), quantizer="quantize_fp8_block", activation="fp8_group128"),
        Scheme("int8_tensor", INT8, PER_TENSOR, quantizer="quantize_int8_tensor", activation="int8_token"),
        Scheme("int8_token", INT8, PER_TOKEN, quantizer="quantize_int8_token", activation="int8_token"),
        Scheme(
            "int8_channel", INT8, PER_CHANNEL,
            quantizer="quantize_int8_token", options=_WEIGHT_INT8, activation="int8_token",
        ),
        Scheme("int8_group128", INT8, per_group(128), quantizer="quantize_int8_group", activation="int8_group128"),
        Scheme(
            "int8_tensor_asymmetric", INT8, PER_TENSOR,
            quantizer="quantize_int8_tensor_asymmetric", outputs=_ASYMMETRIC,
        ),
        Scheme(
            "int8_token_asymmetric", INT8, PER_TOKEN,
            quantizer="quantize_int8_token_asymmetric", outputs=_ASYMMETRIC,
        ),
        _mx("mxfp8_e4m3", activation="mxfp8_e4m3"),
        _mx("mxfp8_e5m2", activation="mxfp8_e5m2"),
        *(_mx(name) for name in ("mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")),
        Scheme(
            "nvfp4", E2M1, per_group(NVFP4_BLOCK), "e4m3fn", "quantize_nvfp4", (), ("codes", "scale", "global_scale"),
            activation="none", dequantizer="dequantize_nvfp4", product="nvfp4",
        ),
        Scheme(
            "int4_group128", INT4, per_group(128), "fp32", "quantize_int4_group",
            activation="none", dequantizer="dequantize_int4", product="int4",
        ),
        Scheme(
            "int4_group128_asymmetric", INT4, per_group(128), "fp32", "quantize_int4_group_asymmetric", (), _ASYMMETRIC,
            activation="none", dequantizer="dequantize_int4", product="int4",
        ),
    )
}  # fmt: skip


def list_schemes() -> list[str]:
    """Names that `fpk.quantize` and `fpk.quantize_` take."""
    return list(SCHEMES)


_sized: dict[str, Scheme] = {}  # schemes that no list has, by name, as they were asked for


def scheme_of(name: str) -> Scheme:
    """A scheme by its name; groups and blocks of any size have one: "fp8_block64x128", "fp8_group128_e8m0"."""
    if name not in SCHEMES and name not in _sized:
        match = re.fullmatch(r"(fp8_group|fp8_block|int[48]_group)([1-9]\d*)(?:x([1-9]\d*))?(_e8m0)?", str(name))
        kind, rows, cols, powers = match.groups() if match else [""] * 4
        if not match or (cols and kind != "fp8_block") or (powers and kind[:3] == "int") or cols == rows:
            raise ValueError(f"scheme: expected one of {', '.join(SCHEMES)}, got {name!r}")
        size = per_block(int(rows), int(cols or rows)) if kind == "fp8_block" else per_group(int(rows))
        act = "none" if kind == "int4_group" else f"{kind.split('_')[0]}_group{size.cols}{powers or ''}"
        made = replace(SCHEMES[f"{kind}128"], name=name, granularity=size, activation=act)
        _sized[name] = replace(made, scale_format="e8m0") if powers else made
    return SCHEMES.get(name) or _sized[name]
