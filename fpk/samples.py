"""Inputs for laws, tuner and benchmarks: seeded, of kinds that ordinary random data never contain."""

import torch
from torch import Tensor

from fpk.formats import FP8, decode

KINDS = ("normal", "zeros", "zero_rows", "wide", "ties", "subnormal", "special", "outliers", "huge")
FINITE_KINDS = tuple(k for k in KINDS if k not in ("special", "huge"))


def generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def sample(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "normal",
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Tensor:
    """A tensor of `shape` and `dtype` (fp32/bf16/fp16, an fp8 type, or int8).

    Kinds: `normal`; `zeros`; `zero_rows` (every other row zero); `wide` (exponents over the whole range of the dtype's
    middle); `ties` (midpoints of FP8 codes, exact in bf16); `subnormal` (tiny magnitudes); `special` (NaN, +-Inf, -0
    among normal values, and one row of Inf); `outliers` (a few large elements); `huge` (up to the dtype's largest
    finite value, and +-Inf). FP8 and INT8 tensors are random codes without NaN and Inf (but for `special`), with zero
    rows for the kinds that have them.
    """
    g = generator(seed, device)
    if dtype in FP8 or dtype is torch.int8:
        if dtype is torch.int8:
            codes = torch.randint(-127, 128, shape, generator=g, device=device, dtype=torch.int16).to(torch.int8)
        else:
            raw = torch.randint(0, 256, shape, generator=g, device=device, dtype=torch.int16).to(torch.uint8)
            if kind != "special":
                value = decode(raw, FP8[dtype])
                raw = torch.where(value.isfinite() & (value.abs() <= 240), raw, 0x38)
            codes = raw.view(dtype)
        if kind == "zeros":
            codes = torch.zeros_like(codes.view(torch.uint8)).view(dtype)
        if kind == "zero_rows" and codes.dim() > 1:
            codes = codes.clone()
            codes.view(torch.uint8)[..., ::2, :] = 0
        return codes
    x = torch.randn(shape, generator=g, device=device)
    if kind == "zeros":
        x = torch.zeros_like(x)
    elif kind == "zero_rows":
        x = x.clone()
        x[..., ::2, :] = 0
    elif kind == "wide":
        x = x * torch.exp2(torch.randint(-14, 12, shape, generator=g, device=device).float())
    elif kind == "ties":
        # (2n+1)/16 of a power of two lies between two e4m3 codes once a row's maximum is 448 * 2^k
        n = torch.randint(8, 16, shape, generator=g, device=device).float()
        x = (2 * n + 1) * torch.exp2(torch.randint(-12, 4, shape, generator=g, device=device).float())
        if x.numel():
            x[..., 0] = 448.0
    elif kind == "subnormal":
        x = x * (2.0**-16 if dtype is torch.float16 else 2.0**-130)
    elif kind == "outliers":
        x = torch.where(torch.rand(shape, generator=g, device=device) < 0.02, x * 200, x)
    elif kind == "special" and x.numel():
        pick = torch.randint(0, 24, shape, generator=g, device=device)
        for which, odd in enumerate((float("nan"), float("inf"), -float("inf"), -0.0)):
            x = torch.where(pick == which, odd, x)
        if x.dim() > 1:
            x = x.clone()
            x[..., -1, :] = float("inf")
    elif kind == "huge" and x.numel():
        largest = torch.finfo(dtype).max
        x = (x / 4 * largest).clamp(-largest, largest)
        pick = torch.randint(0, 24, shape, generator=g, device=device)
        for which, extreme in enumerate((largest, float("inf"), -float("inf"))):
            x = torch.where(pick == which, extreme, x)
    elif kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    return x.to(dtype)


def strided(x: Tensor, layout: str) -> Tensor:
    """The same values with other strides: `rows` in a wider buffer, `offset` one element into it, `transposed`."""
    if layout == "contiguous":
        return x
    *lead, m, k = x.shape
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    pad = 3 if layout == "offset" else 16
    buffer = torch.full((*lead, m, k + pad), 77, device=x.device).to(x.dtype)
    start = 1 if layout == "offset" else 0
    view = buffer[..., start : start + k]
    view.copy_(x)
    return view


def scales(shape: tuple[int, ...], device: torch.device | str = "cpu", seed: int = 1, e8m0: bool = False) -> Tensor:
    """Positive scales over a few binades: fp32, or e8m0 bytes."""
    g = generator(seed, device)
    if e8m0:
        return torch.randint(118, 126, shape, generator=g, device=device, dtype=torch.int32).to(torch.uint8)
    return torch.exp2(torch.rand(shape, generator=g, device=device) * 6 - 8)
