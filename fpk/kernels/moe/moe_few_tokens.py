"""moe_few_tokens: experts of a few tokens behind their router, in two kernels, without sorting them.

    hidden[t, j] = act(a[t] @ w13[e].T + bias13[e])                                e: the expert of ids[t, j]
    out[t]       = sum_j weights[t, j] * (q(hidden[t, j]) @ w2[e].T + bias2[e])
                   (+ residual_weight[t] * residual[t])

The same as sort_by_expert, grouped products, act_and_mul and moe_unpermute give: both products and the activation are
rounded to out_dtype, q quantizes rows of hidden as `a` is quantized. Weights are read once for each slot that uses
them: made for so few tokens that hardly two of them share an expert.

Kernels: both run always, `up` with the fields of a config, `down` with those that end in 2; see _few.

Source: the decode step of mixture-of-experts models.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import (
    FLOAT_INPUTS,
    expect_dtype,
    expect_fp8_matmul,
    expect_inner_contiguous,
    expect_near,
    expect_not_empty,
    expect_one_of,
    expect_rank,
    expect_shape,
    expect_slots,
)
from fpk.db import Config, bucket
from fpk.device import Device, of
from fpk.formats import FP8, Granularity, encode, expand_groups, finite_amax
from fpk.kernels._activation import activated, activation_parameters, expect_activation
from fpk.kernels._groups import group_amax
from fpk.kernels._tile import early_start
from fpk.kernels.moe._few import down_kernel, up_kernel
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, sample, scales, strided
from fpk.shapes import MOE_LAYERS

_TYPES = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.float8_e4m3fnuz: tl.float8e4b8,
    torch.float8_e5m2fnuz: tl.float8e5b16,
}


def reference(
    a: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, scale_a: Tensor | None = None,
    scale13: Tensor | None = None, scale2: Tensor | None = None, group: int = -1, block_rows: int = 1,
    bias13: Tensor | None = None, bias2: Tensor | None = None, activation: str = "silu", gated: bool = True,
    interleaved: bool = False, alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    expert_map: Tensor | None = None, residual: Tensor | None = None, residual_weight: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:  # fmt: skip
    E, H = w2.shape[:2]
    local = ids.long()
    if expert_map is not None:
        known = (local >= 0) & (local < expert_map.shape[0])
        local = torch.where(known, expert_map.long()[local.clamp(0, expert_map.shape[0] - 1)], -1)
    here = (local >= 0) & (local < E)
    local = torch.where(here, local, 0)

    def product(rows: Tensor, e: Tensor, w: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
        value = w.float() if scale is None else w.float() * expand_groups(scale, tuple(w.shape), block_rows, group)
        out = (value[e] @ rows[:, :, None])[:, :, 0]
        return (out if bias is None else out + bias[e].float()).to(out_dtype)

    rows = a.float()
    if scale_a is not None:
        rows = rows * expand_groups(scale_a, tuple(a.shape), 1, group)
    total = torch.zeros((a.shape[0], H), dtype=torch.float32, device=a.device)
    for j in range(ids.shape[1]):
        hidden = product(rows, local[:, j], w13, scale13, bias13)
        hidden = activated(hidden, activation, gated, interleaved, alpha, beta, limit)
        out = product(_requantized(hidden, a.dtype, scale_a, group), local[:, j], w2, scale2, bias2)
        total = total + torch.where(here[:, j, None], out.float() * weights[:, j, None], 0.0)
    if residual is not None:
        total = total + (residual.float() if residual_weight is None else residual.float() * residual_weight)
    return total.to(out_dtype)


def _requantized(x: Tensor, dtype: torch.dtype, scale_a: Tensor | None, group: int) -> Tensor:
    """The values of rows after they are quantized as quantize_fp8_token and quantize_fp8_group do it; fp32."""
    if scale_a is None:
        return x.float()
    fmt = FP8[dtype]
    if group < 0:
        amax = finite_amax(x, (-1,))
        scale = torch.maximum(amax / amax.new_tensor(fmt.qmax), amax.new_tensor(1 / (512 * fmt.qmax)))
    else:
        amax = group_amax(x, 1, group)
        scale = torch.maximum(amax, amax.new_tensor(1e-10)) / amax.new_tensor(fmt.qmax)
    scale = expand_groups(scale, tuple(x.shape), 1, group)
    return encode(x.float() / scale, fmt).view(dtype).float() * scale


def check(
    a: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, scale_a: Tensor | None, scale13: Tensor | None,
    scale2: Tensor | None, group: int, block_rows: int, bias13: Tensor | None, bias2: Tensor | None, gated: bool,
    expert_map: Tensor | None, residual: Tensor | None, residual_weight: Tensor | None, out_dtype: torch.dtype,
    **activation: Any,
) -> None:  # fmt: skip
    what = "moe_few_tokens"
    expect_rank(f"{what}.a", a, 2)
    expect_rank(f"{what}.ids", ids, 2)
    expect_rank(f"{what}.w2", w2, 3)
    expect_one_of(f"{what}.out_dtype", out_dtype, (torch.bfloat16, torch.float16))
    (T, H), top_k, (E, _, I) = a.shape, ids.shape[1], w2.shape
    expect_shape(f"{what}.w2", w2, (E, H, I))
    expect_shape(f"{what}.w13", w13, (E, 2 * I if gated else I, H))
    for dim in range(3):
        expect_not_empty(f"{what}.w2", w2, dim)
    expect_shape(f"{what}.ids", ids, (T, top_k))
    expect_not_empty(f"{what}.ids", ids, 1)
    expect_dtype(f"{what}.ids", ids, torch.int32, torch.int64)
    expect_slots(f"{what}.ids", ids, T * top_k)
    expect_shape(f"{what}.weights", weights, (T, top_k))
    expect_dtype(f"{what}.weights", weights, torch.float32)
    for name, tensor in (("ids", ids), ("weights", weights)):
        expect_near(f"{what}.{name}", tensor)
    for name, tensor in (("a", a), ("w13", w13), ("w2", w2)):
        expect_inner_contiguous(f"{what}.{name}", tensor)
    _expect_scales(a, w13, w2, scale_a, scale13, scale2, group, block_rows)
    for name, bias, n in (("bias13", bias13, w13.shape[1]), ("bias2", bias2, H)):
        if bias is not None:
            expect_shape(f"{what}.{name}", bias, (E, n))
            expect_dtype(f"{what}.{name}", bias, *FLOAT_INPUTS)
            expect_inner_contiguous(f"{what}.{name}", bias)
    hidden = torch.empty((T, w13.shape[1]), dtype=out_dtype, device="meta")
    expect_activation(what, hidden, gated=gated, **activation)
    if expert_map is not None:
        expect_rank(f"{what}.expert_map", expert_map, 1)
        expect_not_empty(f"{what}.expert_map", expert_map, 0)
        expect_dtype(f"{what}.expert_map", expert_map, torch.int32, torch.int64)
    if residual is not None:
        expect_shape(f"{what}.residual", residual, (T, H))
        expect_dtype(f"{what}.residual", residual, *FLOAT_INPUTS)
    if residual_weight is not None:
        if residual is None:
            raise ValueError(f"{what}.residual_weight: expected None without residual, got a tensor")
        expect_shape(f"{what}.residual_weight", residual_weight, (T, 1))
        expect_dtype(f"{what}.residual_weight", residual_weight, torch.float32)


def _expect_scales(
    a: Tensor, w13: Tensor, w2: Tensor, scale_a: Tensor | None, scale13: Tensor | None, scale2: Tensor | None,
    group: int, block_rows: int,
) -> None:  # fmt: skip
    what = "moe_few_tokens"
    if group not in (-1, 128):
        raise ValueError(f"{what}.group: expected -1 or 128, got {group}")
    expect_one_of(f"{what}.block_rows", block_rows, (-1, 1) if group < 0 else (128,))
    if scale_a is None:
        expect_dtype(f"{what}.a", a, torch.bfloat16, torch.float16)
        if group > 0:
            raise ValueError(f"{what}.group: expected -1 for activations without scales, got {group}")
    else:
        expect_dtype(f"{what}.a", a, *FP8)
        expect_dtype(f"{what}.scale_a", scale_a, torch.float32)
        expect_shape(f"{what}.scale_a", scale_a, (a.shape[0], triton.cdiv(a.shape[1], group) if group > 0 else 1))
        expect_fp8_matmul(what, a)
    quantized = scale13 is not None or scale_a is not None
    for name, w, scale in (("13", w13, scale13), ("2", w2, scale2)):
        expect_dtype(f"{what}.w{name}", w, *((a.dtype,) if scale_a is not None or not quantized else FP8))
        if (scale is not None) != quantized:
            raise ValueError(
                f"{what}.scale{name}: expected {'a tensor' if quantized else 'None'} beside the other scales"
            )
        if scale is not None:
            expect_dtype(f"{what}.scale{name}", scale, torch.float32)
            expect_shape(f"{what}.scale{name}", scale, Granularity("", block_rows, group).scale_shape(tuple(w.shape)))
    if quantized and scale_a is None:
        expect_fp8_matmul(what, w13)


def configs(a: Tensor, ids: Tensor, w2: Tensor, group: int, **_: Any):
    I, top_k = w2.shape[2], triton.next_power_of_2(ids.shape[1])
    if of(a.device).arch == "cpu":  # the interpreter wants few programs
        yield _config((128, 256, 4, 1), (128, 256, 4, 1))
    wide = min(512, max(128, triton.next_power_of_2(I)))
    rows = max(1, 8192 // (top_k * wide))
    yield _config((4, 512, 1, 3), (rows, wide, 4, 1))
    for bn, bk, warps, depth in (
        (4, 512, 1, 4), (8, 512, 1, 3), (8, 512, 2, 3), (8, 512, 4, 3), (8, 512, 4, 4), (4, 512, 2, 4), (4, 1024, 2, 3),
    ):  # fmt: skip
        yield _config((bn, bk, warps, depth), (rows, wide, 4, 1))
    for bn in (1, 2, 4, 8):
        for bk in (128, 256, 512, 1024):
            for warps in (2, 4, 8):
                if 16 <= top_k * bn * bk // (32 * warps) <= 128 and bk <= max(128, triton.next_power_of_2(I)):
                    yield _config((4, 512, 1, 3), (bn, bk, warps, 1))


def _config(up: tuple[int, int, int, int], down: tuple[int, int, int, int]) -> Config:
    """Fields of both kernels: rows of weights, columns, warps and depth."""
    names = ("BLOCK_N", "BLOCK_K", "num_warps", "DEPTH")
    second = {f"{n}2": v for n, v in zip(("BLOCK_N", "BLOCK_K", "WARPS", "DEPTH"), down, strict=True)}
    return Config(**dict(zip(names, up, strict=True)), **second)


def legal(config: Config, device: Device, ids: Tensor, group: int, **_: Any) -> bool:
    top_k = triton.next_power_of_2(ids.shape[1])
    tile = top_k * config["BLOCK_N2"] * config["BLOCK_K2"]
    if (
        (device.arch != "cpu" and tile > 128 * 32 * config["WARPS2"])
        or config["BLOCK_K2"] % 16
        or config["BLOCK_K"] % 16
    ):
        return False
    return group < 0 or (config["BLOCK_N2"] <= group and config["BLOCK_K"] >= 16 and config["BLOCK_K2"] % group == 0)


def key(
    a: Tensor, ids: Tensor, w2: Tensor, scale_a: Tensor | None, scale13: Tensor | None, group: int, gated: bool,
    **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    E, H, I = w2.shape
    return dict(
        M=bucket(a.shape[0]), top_k=ids.shape[1], E=E, H=H, I=I, a=str(a.dtype), w=str(w2.dtype), group=group,
        scales=int(scale_a is not None) + int(scale13 is not None), gated=int(gated),
    )  # fmt: skip


def cost(a: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, **_: Any) -> Cost:
    slots, E = ids.numel(), w2.shape[0]
    weights = (w13.shape[1] * w13.shape[2] + w2.shape[1] * w2.shape[2]) * min(slots, E)
    return Cost(flops=2 * slots * weights // min(slots, E) if slots else 0, bytes=weights * w2.element_size())


# a code of the second product's rows may fall to the other side of a tie where the activation's last place differs
def tolerance(a: Tensor, scale_a: Tensor | None, out_dtype: torch.dtype, **_: Any) -> float:
    rounding = {torch.bfloat16: 5e-3, torch.float16: 7e-4}[out_dtype]
    return rounding if scale_a is None else 0.02


def inputs(
    *, M, H, I, E=4, top_k=2, scheme="channel", gated=True, interleaved=False, bias=False, mapped=False, residual="no",
    dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    """scheme: plain, weights (their channels quantized alone), tensor, channel, or block."""
    g = generator(seed, device)
    interleaved = interleaved and gated
    quantized = scheme not in ("plain", "weights")
    group, rows = (128, 128) if scheme == "block" else (-1, -1 if scheme == "tensor" else 1)
    shapes = dict(w13=(E, 2 * I if gated else I, H), w2=(E, H, I))
    made: dict[str, Any] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        w = sample(shape, out_dtype if scheme == "plain" else dtype, "normal", device, seed + 1 + i)
        made[name] = w if scheme != "plain" else (w.float() * shape[2] ** -0.5).to(out_dtype)
        size = Granularity("", rows, group).scale_shape(shape)
        made[name.replace("w", "scale")] = (
            None if scheme == "plain" else scales(size, device, seed + 3 + i) * shape[2] ** -0.5 / 32
        )
        made[name.replace("w", "bias")] = (
            sample((E, shape[1]), torch.float32, "normal", device, seed + 5) if bias else None
        )
    a = sample((M, H), dtype if quantized else out_dtype, kind, device, seed)
    if layout == "rows":
        a = strided(a, layout)
    ids = torch.randint(-1 if mapped else 0, E + (2 if mapped else 0), (M, top_k), generator=g, device=device)
    return dict(
        a=a, weights=torch.rand((M, top_k), generator=g, device=device), ids=ids.to(torch.int32), **made,
        scale_a=scales((M, triton.cdiv(H, group) if group > 0 else 1), device, seed + 7) if quantized else None,
        group=group, block_rows=rows, gated=gated, activation="silu" if gated else "gelu_tanh", interleaved=interleaved,
        expert_map=torch.tensor([(e + 1) % E for e in range(E - 1)] + [-1], device=device) if mapped else None,
        residual=None if residual == "no" else sample((M, H), out_dtype, "normal", device, seed + 8),
        residual_weight=scales((M, 1), device, seed + 9) if residual == "weighted" else None, out_dtype=out_dtype,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=tolerance,
    domain=dict(
        M=(0, 1, 3), H=(16, 128, 300), I=(16, 100, 256), E=(2, 3), top_k=(1, 3),
        scheme=("channel", "block", "tensor", "weights", "plain"), gated=(True, False), interleaved=(False, True),
        bias=(False, True), mapped=(False, True), residual=("no", "plain", "weighted"),
        dtype=(torch.float8_e4m3fn, torch.float8_e5m2), out_dtype=(torch.bfloat16, torch.float16),
        kind=("normal", "zeros"), layout=("contiguous", "rows"),
    ),
    kernels=dict(up=Kernel(up_kernel), down=Kernel(down_kernel)),
    configs=configs, legal=legal, key=key, cost=cost, launcher_fields=("BLOCK_N2", "BLOCK_K2", "WARPS2", "DEPTH2"),
    cases={
        f"{model}/T={t}": dict(M=t, H=hidden, I=inner, E=experts, top_k=top_k)
        for model, (experts, top_k, hidden, inner, _) in MOE_LAYERS.items() for t in (1, 4)
    },
)  # fmt: skip
def moe_few_tokens(
    a: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, scale_a: Tensor | None = None,
    scale13: Tensor | None = None, scale2: Tensor | None = None, group: int = -1, block_rows: int = 1,
    bias13: Tensor | None = None, bias2: Tensor | None = None, activation: str = "silu", gated: bool = True,
    interleaved: bool = False, alpha: float | None = None, beta: float | None = None, limit: float | None = None,
    expert_map: Tensor | None = None, residual: Tensor | None = None, residual_weight: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, *, config: Config,
) -> Tensor:  # fmt: skip
    """Run the experts of a few tokens.

    Args:
        a: (T, H) FP8 codes with scale_a, else bf16 or fp16; elements of a row contiguous.
        weights: (T, top_k) fp32, any strides.
        ids: (T, top_k) int32 or int64, any strides; a slot whose id or mapped id is out of range is skipped.
        w13: (E, 2I, H) gates and ups, halves or interleaved rows; (E, I, H) if not gated; a's dtype if `a` has scales,
            else FP8 codes with scales, or a's dtype without. Elements of a row contiguous.
        w2: (E, H, I), likewise.
        scale_a: (T, 1), or (T, cdiv(H, 128)) with group 128, fp32, or None.
        scale13, scale2: fp32, (E, rows of w, 1), (E, 1, 1) with block_rows -1, or (E, cdiv(rows, 128), cdiv(columns,
            128)) with group 128; None for weights that are no codes.
        group: columns that share a scale, in activations and weights: -1 for all, or 128.
        block_rows: rows of weights that share a scale: 1 or -1, 128 with group 128.
        bias13, bias2: (E, 2I) or (E, I), and (E, H), fp32, bf16 or fp16, or None.
        activation, gated, interleaved, alpha, beta, limit: as in act_and_mul.
        expert_map: (experts of all ranks,) int32 or int64 or None, as in sort_by_expert.
        residual: (T, H) fp32, bf16 or fp16, any strides, or None; added in fp32 before the last rounding.
        residual_weight: (T, 1) fp32 or None for 1; multiplies residual.
        out_dtype: bf16 or fp16; also what rows are rounded to between the two products.

    Returns:
        (T, H) of out_dtype.

    Raises:
        ValueError: a shape, dtype, stride or combination does not fit.
        NotImplementedError: FP8 on a GPU without FP8 units.
    """
    (T, H), top_k, (E, _, I) = a.shape, ids.shape[1], w2.shape
    out = torch.empty((T, H), dtype=out_dtype, device=a.device)
    if T == 0:
        return out
    hidden = torch.empty((T * top_k, I), dtype=out_dtype, device=a.device)
    formula, alpha, beta, limit = activation_parameters(activation, alpha, beta, limit)
    options = early_start(of(a.device))
    step = 2 if interleaved else 1
    mapped = 0 if expert_map is None else expert_map.shape[0]

    def strides(tensor: Tensor | None, *dims: int) -> tuple[int, ...]:
        return tuple(0 if tensor is None or tensor.shape[d] == 1 else tensor.stride(d) for d in dims)

    up_kernel[(triton.cdiv(I, config["BLOCK_N"]), T * top_k)](
        a, scale_a, w13, scale13, bias13, ids, expert_map, hidden,
        H, I, E, top_k, mapped,
        a.stride(0), *strides(scale_a, 0, 1), w13.stride(0), w13.stride(1), *strides(scale13, 0, 1, 2),
        *strides(bias13, 0), ids.stride(0), ids.stride(1),
        GROUP=group, ROWS=block_rows, FORMULA=formula, GATED=gated, INTERLEAVED=interleaved, ALPHA=alpha, BETA=beta,
        LIMIT=limit, EVEN=H % config["BLOCK_K"] == 0, BLOCK_N=config["BLOCK_N"], BLOCK_K=config["BLOCK_K"],
        ONE=group > 0 and group % (config["BLOCK_N"] * step) == 0 and (interleaved or I % config["BLOCK_N"] == 0),
        DEPTH=config["DEPTH"], num_warps=config["num_warps"], **options,
    )  # fmt: skip
    fmt = None if scale_a is None else FP8[a.dtype]
    down_kernel[(triton.cdiv(H, config["BLOCK_N2"]), T)](
        hidden, w2, scale2, bias2, ids, expert_map, weights, residual, residual_weight, out,
        H, I, E, top_k, mapped,
        w2.stride(0), w2.stride(1), *strides(scale2, 0, 1, 2), *strides(bias2, 0), ids.stride(0), ids.stride(1),
        weights.stride(0), weights.stride(1), *((0, 0) if residual is None else residual.stride()),
        *strides(residual_weight, 0),
        GROUP=group, ROWS=block_rows, QMAX=0.0 if fmt is None else fmt.qmax, MAX=0.0 if fmt is None else fmt.max,
        CODE=None if fmt is None else _TYPES[a.dtype], EVEN=I % config["BLOCK_K2"] == 0,
        SLOTS=triton.next_power_of_2(top_k), BLOCK_N=config["BLOCK_N2"], BLOCK_K=config["BLOCK_K2"],
        DEPTH=config["DEPTH2"], num_warps=config["WARPS2"], **options,
    )  # fmt: skip
    return out
