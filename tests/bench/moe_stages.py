"""The stages of expert layers of real models, for moe.py: weights, tokens, calls, and how far a layer is off."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import fpk.kernels  # noqa: F401  declares every op
from fpk._moe import moe
from fpk._shuffled import Shuffled
from fpk.api import Quantized
from fpk.check import rel_error
from fpk.op import OPS

# experts, experts per token, hidden size, intermediate size
MODELS = {
    "mixtral_8x7b": (8, 2, 4096, 14336), "deepseek_v3_tp8": (256, 8, 7168, 256), "deepseek_v3": (256, 8, 7168, 2048),
    "qwen3_30b_a3b": (128, 8, 2048, 768), "gpt_oss_120b": (128, 4, 2880, 2880),
}  # fmt: skip
# weights, activations, and TFLOP/s that a matrix product of 8192^3 reached on an H200
SCHEMES = {
    "fp8_channel:fp8_token": 1561.0, "fp8_block128:fp8_group128": 1561.0, "int8_channel:int8_token": 1561.0,
    "mxfp4": 781.0, "bf16": 781.0,
}  # fmt: skip
WEIGHT_BYTES = {"mxfp4": 0.53125, "bf16": 2.0}  # an element, with its share of a scale; one byte in other schemes


@dataclass
class Case:
    """A layer with some tokens: T tokens under `len(self.logits)` routings."""

    model: str
    scheme: str
    T: int
    routing: str
    w13: Any
    w2: Any
    x: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)  # further arguments of the layer: biases, activation

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return MODELS[self.model]

    @property
    def act(self) -> str:
        return self.scheme.split(":")[1] if ":" in self.scheme else "none"


def random_weights(E: int, N: int, K: int, scheme: str, codes: torch.Tensor | None = None) -> Any:
    """codes: of an earlier call for another scheme of FP8, which differs in its scales."""
    if scheme == "mxfp4":
        codes = torch.randint(0, 256, (E, N, K // 2), device="cuda", dtype=torch.uint8)
        scale = torch.randint(118, 124, (E, N, K // 32), device="cuda", dtype=torch.uint8)
        return Quantized(codes, scale, scheme, check=False)
    made = []
    for first in range(0, E, 16) if codes is None else ():
        w = torch.randn((min(16, E - first), N, K), device="cuda", dtype=torch.bfloat16)
        if scheme.startswith("fp8"):
            w = (w * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        elif scheme.startswith("int8"):
            w = (w * 40).clamp(-127, 127).to(torch.int8)
        made.append(w)
    if codes is None:
        codes = torch.cat([w.view(torch.uint8) if w.element_size() == 1 else w for w in made]).view(made[0].dtype)
    if ":" not in scheme:
        return codes
    rows, cols = (-(-N // 128), -(-K // 128)) if "block" in scheme else (N, 1)
    scale = torch.rand((E, rows, cols), device="cuda") * 1e-4 + 5e-5
    return Quantized(codes, scale, scheme.split(":")[0], check=False)


def outlined_weights(E: int, N: int, K: int, scheme: str, codes: torch.Tensor | None = None) -> Any:
    """`random_weights` without values, for what only looks at shapes."""
    if scheme == "mxfp4":
        scale = torch.full((E, N, K // 32), 120, device="cuda", dtype=torch.uint8)
        return Quantized(torch.empty((E, N, K // 2), device="cuda", dtype=torch.uint8), scale, scheme, check=False)
    dtype = {"f": torch.float8_e4m3fn, "i": torch.int8, "b": torch.bfloat16}[scheme[0]]
    codes = torch.empty((E, N, K), device="cuda", dtype=dtype)
    if ":" not in scheme:
        return codes
    shape = (E, -(-N // 128), -(-K // 128)) if "block" in scheme else (E, N, 1)
    return Quantized(codes, torch.ones(shape, device="cuda"), scheme.split(":")[0], check=False)


def with_tokens(case: Case) -> Case:
    E, _, H, _ = case.sizes
    for seed in range(4 if case.T <= 64 else 1):
        g = torch.Generator("cuda").manual_seed(1000 * seed + case.T)
        case.x.append(torch.randn((case.T, H), device="cuda", generator=g).to(torch.bfloat16))
        if case.routing == "zipf":  # experts of probability 1 / rank: Gumbel noise over its logarithm
            rank = torch.arange(1, E + 1, device="cuda").float()
            noise = -torch.log(-torch.log(torch.rand((case.T, E), device="cuda", generator=g)))
            case.logits.append(noise - torch.log(rank))
        else:
            case.logits.append(torch.randn((case.T, E), device="cuda", generator=g))
    return case


def stages(case: Case) -> dict[str, tuple[Callable[[int], Any], int, int]]:
    """name: (call with the number of a routing, bytes that must move, flops)."""
    (E, top_k, H, I), T = case.sizes, case.T
    R, size = T * top_k, 2 if case.act == "none" else 1
    stored = WEIGHT_BYTES.get(case.scheme, 1.0)
    routed = [OPS["route"](z, top_k) for z in case.logits]
    ordered = [OPS["sort_by_expert"](ids, E) for _, ids in routed]
    active = torch.stack([(torch.bincount(ids.flatten(), minlength=E) > 0).sum() for _, ids in routed]).float().mean()
    held = float(active)
    quantizer = {"fp8_token": "quantize_fp8_token", "fp8_group128": "quantize_fp8_group"}.get(
        case.act, "quantize_int8_token"
    )
    groups = -(-H // 128) if "group" in case.act else 1
    tokens = case.x if case.act == "none" else [OPS[quantizer](x) for x in case.x]
    made: dict[str, tuple[Callable[[int], Any], int, int]] = {
        "route": (lambda i: OPS["route"](case.logits[i], top_k), 4 * T * E + 8 * R, 0),
        "sort": (lambda i: OPS["sort_by_expert"](routed[i][1], E), 12 * R, 0),
    }
    made["routing"] = (
        lambda i: OPS["sort_by_expert"](OPS["route"](case.logits[i], top_k)[1], E), 4 * T * E + 20 * R, 0
    )  # fmt: skip
    if case.act != "none":
        made["quantize"] = (lambda i: OPS[quantizer](case.x[i]), T * (3 * H + 4 * groups), 0)

    def moved(i: int) -> Any:
        if case.act == "none":
            return OPS["moe_permute"](case.x[i], ordered[i][0], top_k)
        return OPS["moe_permute"](tokens[i][0], ordered[i][0], top_k, tokens[i][1])

    made["permute"] = (moved, 2 * R * (size * H + (4 * groups if size == 1 else 0)), 0)
    rows = [moved(i) for i in range(len(case.x))]

    act = {n: v for n, v in case.more.items() if not n.startswith("bias")}

    def product(weight: Any, a: Any, i: int, **activated: Any) -> Any:
        offs = ordered[i][2]
        if case.scheme == "mxfp4":
            a = a[0] if isinstance(a, tuple) else a
            bias = case.more["bias13" if weight is case.w13 else "bias2"]
            return OPS["grouped_mm_shuffled"](a, weight.packed, weight.row_scale, offs, "mxfp4", bias, **activated)
        if case.act == "none":
            return OPS["grouped_mm"](a[0] if isinstance(a, tuple) else a, weight, offs)
        name = "grouped_scaled_mm_group" if "group" in case.act else "grouped_scaled_mm"
        return OPS[name](a[0], weight.codes, a[1], weight.scale, offs, fast_accum=True)

    made["w13"] = (
        lambda i: product(case.w13, rows[i], i),
        int(held * 2 * I * H * stored) + R * H * size + 2 * R * 2 * I, 4 * R * I * H,
    )  # fmt: skip
    hidden = torch.randn((R, 2 * I), device="cuda", dtype=torch.bfloat16)
    activation = "act_and_mul" if case.act == "none" else f"act_and_mul_{quantizer}"
    made["activation"] = (lambda i: OPS[activation](hidden, **act), R * I * (4 + size), 0)
    second = OPS[activation](hidden, **act)
    if case.scheme == "mxfp4":
        bytes_13, flops_13 = int(held * 2 * I * H * stored) + 2 * R * (H + I), 4 * R * I * H
        own = {n: v for n, v in act.items() if n != "interleaved"}
        made["w13 activated"] = (lambda i: product(case.w13, rows[i], i, **own), bytes_13, flops_13)
    made["w2"] = (
        lambda i: product(case.w2, second, i),
        int(held * I * H * stored) + R * I * size + 2 * R * H, 2 * R * I * H,
    )  # fmt: skip
    out = torch.randn((R, H), device="cuda", dtype=torch.bfloat16)
    made["unpermute"] = (lambda i: OPS["moe_unpermute"](out, ordered[i][1], routed[i][0]), 2 * (R + T) * H, 0)
    if case.act != "none":
        made |= shortcuts(case, tokens, routed, second)
    weights = int(held * 3 * I * H * stored)
    made["layer"] = (
        lambda i: moe(
            case.x[i], case.logits[i], case.w13, case.w2, top_k=top_k, act=case.act, fast_accum=True, **case.more
        ),
        weights, 6 * R * I * H,
    )  # fmt: skip
    return made


def shortcuts(case: Case, tokens: Any, routed: Any, second: Any) -> dict[str, Any]:
    """Stages that take the place of several for few tokens."""
    top_k, H, I = case.sizes[1:]
    R, block = case.T * top_k, "group" in case.act
    scaling = dict(group=128 if block else -1, block_rows=128 if block else 1)
    made: dict[str, tuple[Callable[[int], Any], int, int]] = {}
    if case.scheme.startswith("fp8") and case.T == 1:

        def up(i: int) -> Any:
            (codes, scale), ids = tokens[i], routed[i][1]
            return OPS["moe_up"](codes, ids, case.w13.codes, scale, case.w13.scale, **scaling)

        def down(i: int) -> Any:
            weights, ids = routed[i]
            return OPS["moe_down"](second[0], weights, ids, case.w2.codes, second[1], case.w2.scale, **scaling)

        def whole(i: int) -> Any:
            (weights, ids), more = routed[i], dict(group=scaling["group"], block_rows=scaling["block_rows"])
            return OPS["moe_token"](
                case.x[i], weights, ids, case.w13.codes, case.w2.codes, case.w13.scale, case.w2.scale, **more
            )

        made["up"] = (up, R * 2 * I * H, 4 * R * I * H)
        made["down"] = (down, R * I * H, 2 * R * I * H)
        made["token"] = (whole, R * 3 * I * H, 6 * R * I * H)
    return made


def layer_error(case: Case) -> float:
    """Of three tokens, against the references of the ops."""
    (E, top_k, _, _), few = case.sizes, sorted({0, case.T // 2, case.T - 1})
    x, logits = case.x[0][few], case.logits[0][few]
    weights, ids = OPS["route"].reference(logits, top_k)
    used = ids.unique()
    local = torch.full((E,), -1, device="cuda", dtype=torch.int32)
    local[used.long()] = torch.arange(len(used), device="cuda", dtype=torch.int32)

    def kept(weight: Any) -> Any:
        if not isinstance(weight, Quantized):
            if not isinstance(weight, Shuffled):
                return weight[used.long()].float()
            packed, factor = weight.packed[used.long()], weight.row_scale[used.long()]
            shape = torch.Size((len(used), *weight.shape[1:]))
            return replace(weight, packed=packed, row_scale=factor, shape=shape).dequantize()
        codes = weight.codes.view(torch.uint8)[used.long()].view(weight.codes.dtype)
        return Quantized(codes, weight.scale[used.long()], weight.scheme, check=False).dequantize(torch.float32)

    w13, w2 = kept(case.w13), kept(case.w2)
    name = {
        "fp8_token": "quantize_fp8_token",
        "fp8_group128": "quantize_fp8_group",
        "int8_token": "quantize_int8_token",
    }

    def fake(v: torch.Tensor) -> torch.Tensor:
        if case.act == "none":
            return v.float()
        codes, scale = OPS[name[case.act]].reference(v)
        return codes.float() * (scale.repeat_interleave(128, 1)[:, : v.shape[1]] if "group" in case.act else scale)

    act = {n: v for n, v in case.more.items() if not n.startswith("bias")}

    def bias_of(name: str, expert: Any) -> Any:
        return case.more[name][expert.long()] if name in case.more else 0.0

    total = torch.zeros(x.shape, device="cuda")
    for t in range(len(few)):
        for j in range(top_k):
            e = int(local[ids[t, j].long()])
            hidden = (fake(x[t : t + 1]) @ w13[e].T + bias_of("bias13", ids[t, j])).to(x.dtype)
            hidden = OPS["act_and_mul"].reference(hidden, **act)
            total[t] += weights[t, j] * (fake(hidden) @ w2[e].T + bias_of("bias2", ids[t, j]))[0]
    out = moe(case.x[0], case.logits[0], case.w13, case.w2, top_k=top_k, act=case.act, fast_accum=True, **case.more)
    return rel_error(out[few], total.to(x.dtype))
