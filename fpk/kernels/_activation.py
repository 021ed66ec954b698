"""Activations of gated and plain MLPs, as act_and_mul defines them: what it shares with the ops that also quantize."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_not_empty, expect_one_of, expect_rank
from fpk.kernels._tile import clamp_to
from fpk.samples import sample, strided

# what each activation takes, and the values that None stands for
DEFAULTS: dict[str, dict[str, float | None]] = {
    "silu": dict(alpha=1.0, beta=0.0, limit=None),
    "swigluoai": dict(alpha=1.702, beta=1.0, limit=7.0),
    "swiglustep": dict(limit=7.0),
    "gelu": {},
    "gelu_tanh": {},
    "relu2": {},
}
GATED_ONLY, PLAIN_ONLY = ("swigluoai", "swiglustep"), ("relu2",)

# arguments by name, for the domains of the ops below
CASES: dict[str, dict[str, Any]] = {
    "silu": {},
    "silu_limit": dict(limit=1.5),
    "silu_alpha_beta": dict(alpha=1.25, beta=0.5, limit=3.0),
    "swigluoai": dict(activation="swigluoai", interleaved=True),
    "swigluoai_halves": dict(activation="swigluoai", limit=2.0),
    "swiglustep": dict(activation="swiglustep", limit=1.0),
    "gelu": dict(activation="gelu"),
    "gelu_tanh": dict(activation="gelu_tanh", interleaved=True),
    "silu_plain": dict(gated=False),
    "gelu_plain": dict(activation="gelu", gated=False),
    "gelu_tanh_plain": dict(activation="gelu_tanh", gated=False),
    "relu2_plain": dict(activation="relu2", gated=False),
}

# a few that reach every branch of load_activation but the formulas, for ops with many options of their own
SOME_CASES = ("silu_alpha_beta", "swigluoai", "swiglustep", "gelu", "gelu_tanh", "relu2_plain")


def expect_activation(
    what: str, x: Tensor, activation: str, gated: bool, interleaved: bool, alpha: float | None, beta: float | None,
    limit: float | None, **_: Any,
) -> None:  # fmt: skip
    """Raise ValueError unless x and the arguments fit the activation: nothing given is silently dropped."""
    expect_dtype(f"{what}.x", x, *FLOAT_INPUTS)
    expect_rank(f"{what}.x", x, 2, 3)
    expect_not_empty(f"{what}.x", x, -1)
    expect_one_of(f"{what}.activation", activation, DEFAULTS)
    if activation in (PLAIN_ONLY if gated else GATED_ONLY):
        raise ValueError(f"{what}.gated: expected {not gated} with activation {activation!r}, got {gated}")
    if gated and x.shape[-1] % 2:
        raise ValueError(f"{what}.x: expected an even number of columns (gate and up), got {x.shape[-1]}")
    if interleaved and not gated:
        raise ValueError(f"{what}.interleaved: expected False where gated is False, got True")
    for name, value in (("alpha", alpha), ("beta", beta), ("limit", limit)):
        takes = name in DEFAULTS[activation] and (gated or name == "alpha")
        if value is not None and not takes:
            kind = "gated" if gated else "plain"
            raise ValueError(f"{what}.{name}: expected None with {kind} activation {activation!r}, got {value}")
    if limit is not None and not limit > 0:
        raise ValueError(f"{what}.limit: expected a positive number, got {limit}")


def activation_parameters(
    activation: str, alpha: float | None, beta: float | None, limit: float | None
) -> tuple[str, float, float, float | None]:
    """The formula to use, alpha, beta and limit, with the activation's own values for None."""
    own = DEFAULTS[activation]
    formula = "silu" if activation == "swigluoai" else activation
    return (
        formula,
        float(own.get("alpha") or 1.0) if alpha is None else alpha,
        float(own.get("beta") or 0.0) if beta is None else beta,
        own.get("limit") if limit is None else limit,
    )


def activation_constexprs(
    x: Tensor, activation: str, gated: bool, interleaved: bool, alpha: float | None, beta: float | None,
    limit: float | None,
) -> dict[str, Any]:  # fmt: skip
    """The constexpr arguments of `load_activation`."""
    formula, alpha, beta, limit = activation_parameters(activation, alpha, beta, limit)
    return dict(
        FORMULA=formula, GATED=gated, INTERLEAVED=interleaved, ALPHA=alpha, BETA=beta, LIMIT=limit,
        PRECISE=x.dtype is torch.float32,
    )  # fmt: skip


def activated(
    x: Tensor, activation: str, gated: bool, interleaved: bool, alpha: float | None, beta: float | None,
    limit: float | None,
) -> Tensor:  # fmt: skip
    """The activation in plain torch, rounded to x's type: (..., I) of (..., 2I), of (..., I) if not gated."""
    formula, alpha, beta, limit = activation_parameters(activation, alpha, beta, limit)
    value = x.float()
    if not gated:
        gate, up = value, None
    elif interleaved:
        gate, up = value[..., 0::2], value[..., 1::2]
    else:
        gate, up = value.chunk(2, -1)
    if limit is not None and up is not None:
        up = up.clamp(-limit, limit)
        if formula == "silu":
            gate = gate.clamp(max=limit)
    if formula == "relu2":
        out = gate.clamp(min=0.0).square()
    elif formula == "gelu":
        out = 0.5 * gate * (1 + torch.erf(gate * 0.5**0.5))
    elif formula == "gelu_tanh":
        out = gate / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate * gate * gate)))
    else:
        out = gate / (1 + torch.exp(-alpha * gate))
    if formula == "swiglustep" and limit is not None:
        out = out.clamp(max=limit)
    if up is not None:
        out = out * (up + beta) if beta else out * up
    return out.to(x.dtype).contiguous()


def activation_width(x: Tensor, gated: bool) -> int:
    """I: columns of the activation."""
    return x.shape[-1] // 2 if gated else x.shape[-1]


def activation_inputs(
    M: int, K: int, E: int, case: str, x_dtype: torch.dtype, kind: str, layout: str, device: Any, seed: int
) -> dict[str, Any]:
    """x with K activated columns and the arguments of the named case."""
    arguments = dict(activation="silu", gated=True, interleaved=False, alpha=None, beta=None, limit=None) | CASES[case]
    columns = 2 * K if arguments["gated"] else K
    x = strided(sample((E, M, columns) if E else (M, columns), x_dtype, kind, device, seed), layout)
    return dict(x=x, **arguments)


@triton.jit
def _gate(g, v, PRECISE: tl.constexpr):
    """g / (1 + exp(v)): within 1 ulp of bf16 or fp16, with PRECISE within a few of fp32."""
    t = v * 1.4426950408889634
    e = tl.exp2(t)
    if PRECISE:
        # t is log2(e) v rounded; what was lost is small, but counts |v| times
        lost = tl.fma(v, tl.where(v == v, 1.4426950408889634, 1.4426950408889634), -t) + v * 1.925963033500607e-08
        e = tl.where(tl.abs(t) < 250.0, e * (1.0 + lost * 0.6931471805599453), e)
        return tl.math.div_rn(g, 1.0 + e)
    # 1 / y as the square of 1 / sqrt(y): two multiplications, where a division takes care of ranges that y >= 1 has not
    root = tl.math.rsqrt(1.0 + e)
    return g * root * root


@triton.jit
def activate(
    g, up, FORMULA: tl.constexpr, GATED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    PRECISE: tl.constexpr,
):  # fmt: skip
    """The activation of fp32 gates and ups, not rounded; up counts only if GATED."""
    if GATED and LIMIT is not None:
        up = clamp_to(up, -LIMIT, LIMIT)
        if FORMULA == "silu":
            g = tl.minimum(g, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if FORMULA == "relu2":
        out = tl.where(g < 0.0, 0.0, g)
        out = out * out
    elif FORMULA == "gelu":
        out = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    elif FORMULA == "gelu_tanh":
        out = _gate(g, -1.5957691216057308 * (g + 0.044715 * g * g * g), PRECISE)  # 2 sqrt(2 / pi)
    else:
        out = _gate(g, -ALPHA * g, PRECISE)
    if FORMULA == "swiglustep" and LIMIT is not None:
        out = tl.minimum(out, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if GATED:
        out = out * (up + BETA) if BETA != 0.0 else out * up
    return out


@triton.jit
def load_activation(
    x_rows, mask_m, first, I, stride_xk,
    FORMULA: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
    LIMIT: tl.constexpr, PRECISE: tl.constexpr,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Activations [BLOCK_M, GROUPS, WIDTH] as fp32, already rounded to x's type, with their columns and mask.

    x_rows: pointers to rows, [BLOCK_M]; first: int64 first columns of the groups, [GROUPS], of which GROUP are valid.
    """
    inside = tl.arange(0, WIDTH)[None, :]
    cols = first[:, None] + inside  # [GROUPS, WIDTH]
    mask_k = cols < I
    if GROUP != WIDTH:
        mask_k = mask_k & (inside < GROUP)
    mask = mask_m[:, None, None] & mask_k[None, :, :]
    x_rows = x_rows[:, None, None]
    if INTERLEAVED:
        # one wide load of gate and up, parted in registers
        both = tl.arange(0, 2 * WIDTH)[None, :]
        offs = first[:, None] * 2 + both
        mask_both = offs < 2 * I
        if GROUP != WIDTH:
            mask_both = mask_both & (both < 2 * GROUP)
        mask_both = mask_m[:, None, None] & mask_both[None, :, :]
        pair = tl.load(x_rows + offs[None, :, :] * stride_xk, mask=mask_both, other=0.0)
        gate, up = tl.split(tl.reshape(pair, (BLOCK_M, GROUPS, WIDTH, 2)))
        up = up.to(tl.float32)
    else:
        gate = tl.load(x_rows + cols[None, :, :] * stride_xk, mask=mask, other=0.0)
        if GATED:
            up = tl.load(x_rows + (cols + I)[None, :, :] * stride_xk, mask=mask, other=0.0).to(tl.float32)
        else:
            up = gate
    out = activate(gate.to(tl.float32), up, FORMULA, GATED, ALPHA, BETA, LIMIT, PRECISE)
    return out.to(gate.dtype).to(tl.float32), mask, cols[None, :, :]
