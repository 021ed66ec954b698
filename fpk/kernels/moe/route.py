"""route: which experts a token goes to, and with what weights, from the router's logits.

    p = softmax(z), sigmoid(z) or sqrt(softplus(z)); where that is not finite, 0
    c = p + correction_bias, or z itself where there is no bias: every scoring is monotone, and z never saturates
    with groups: only experts of the topk_group groups whose score is highest can be chosen; a group's score is its
        largest c, with a bias the sum of its two largest
    ids[t] = the top_k experts of highest c, in that order; equal ones by their number
    weights[t, j] = p[ids[t, j]] (the bias steers the choice only), / sum_j if renormalize, * routed_scaling_factor

`topk_softmax` is the softmax over the chosen logits alone. A NaN or +Inf logit makes a softmax row of zeros; elsewhere
a NaN logit scores 0 and comes last: ids are distinct and in range whatever the logits hold. A sum of weights that is 0
counts as 1. Groups that do not divide the experts, or of one expert each, are no groups; bias and factor stay.

Source: the routers of Mixtral and Qwen3-MoE (softmax), Llama 4 (sigmoid), DeepSeek V3 (sigmoid, bias, groups), DeepSeek
V4 (sqrtsoftplus) and gpt-oss (topk_softmax).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_near, expect_one_of, expect_rank, expect_shape
from fpk.db import Config, bucket
from fpk.device import of
from fpk.kernels._tile import after_previous, early_start
from fpk.op import Cost, Kernel, op
from fpk.samples import generator, strided
from fpk.shapes import MOE_TOKENS

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus", "topk_softmax")
MAX_EXPERTS, MAX_TOP_K = 2048, 32


def reference(
    logits: Tensor, top_k: int, scoring: str = "softmax", renormalize: bool = True,
    correction_bias: Tensor | None = None, num_expert_group: int = 1, topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    z = logits.float().contiguous()
    if scoring == "sigmoid":
        p = torch.sigmoid(z)
    elif scoring == "sqrtsoftplus":
        p = torch.nn.functional.softplus(z).sqrt()
    else:
        p = torch.softmax(z, -1)
    finite = p.isfinite()
    p = torch.where(finite, p, 0.0)
    if correction_bias is None:
        choice = torch.where(finite, z, -torch.inf)
    else:
        choice = p + correction_bias
        choice = torch.where(choice.isfinite(), choice, -torch.inf)
    order = choice.argsort(dim=-1, descending=True, stable=True)
    groups = _groups(logits.shape[-1], num_expert_group)
    if topk_group < groups:
        by_group = choice.unflatten(-1, (groups, -1))
        score = by_group.amax(-1) if correction_bias is None else by_group.topk(2, -1).values.sum(-1)
        best = score.argsort(dim=-1, descending=True, stable=True)[:, :topk_group]
        excluded = torch.ones_like(score).scatter(-1, best, 0.0).repeat_interleave(by_group.shape[-1], -1)
        order = order.gather(-1, excluded.gather(-1, order).argsort(dim=-1, stable=True))
    ids = order[:, :top_k].contiguous()
    weights = p.gather(-1, ids)
    if renormalize or scoring == "topk_softmax":
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    return weights * routed_scaling_factor, ids.to(torch.int32)


def _groups(experts: int, num_expert_group: int) -> int:
    """Groups that really divide the experts: 1 if the wanted number does not, or leaves one expert to each."""
    return 1 if experts <= num_expert_group or experts % num_expert_group else num_expert_group


def check(
    logits: Tensor, top_k: int, scoring: str, correction_bias: Tensor | None, num_expert_group: int, topk_group: int,
    **_: Any,
) -> None:  # fmt: skip
    expect_rank("route.logits", logits, 2)
    expect_dtype("route.logits", logits, *FLOAT_INPUTS)
    expect_near("route.logits", logits)
    E = logits.shape[1]
    if not 1 <= E <= MAX_EXPERTS:
        raise ValueError(f"route.logits: expected 1 to {MAX_EXPERTS} experts (columns), got {E}")
    expect_one_of("route.scoring", scoring, SCORINGS)
    if num_expert_group < 1:
        raise ValueError(f"route.num_expert_group: expected a positive number, got {num_expert_group}")
    if not 1 <= topk_group <= num_expert_group:
        raise ValueError(f"route.topk_group: expected 1 to {num_expert_group} (num_expert_group), got {topk_group}")
    groups = _groups(E, num_expert_group)
    within = E // groups * min(topk_group, groups)
    if not 1 <= top_k <= min(within, MAX_TOP_K):
        raise ValueError(f"route.top_k: expected 1 to {min(within, MAX_TOP_K)} of {within} experts, got {top_k}")
    if scoring == "topk_softmax" and (correction_bias is not None or topk_group < groups):
        raise ValueError("route.scoring: expected another than 'topk_softmax' with a correction bias or groups")
    if correction_bias is not None:
        expect_shape("route.correction_bias", correction_bias, (E,))
        expect_dtype("route.correction_bias", correction_bias, torch.float32)


@triton.jit
def _rank_key(value, index, COUNT: tl.constexpr):
    """int64 whose order is that of value, then of falling index; `_index_of` gives the index back."""
    value = tl.where(value == 0.0, 0.0, value)  # -0 ties with 0
    bits = value.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.to(tl.int64) * 4294967296 + (COUNT - 1 - index).to(tl.int64)


@triton.jit
def _index_of(key, COUNT: tl.constexpr):
    return COUNT - 1 - (key & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _scores(z, top, total, SCORING: tl.constexpr):
    """Scores of logits; top and total: the largest logit of a row, and the sum of exp(z - top) over it."""
    if SCORING == "sigmoid":
        p = 1.0 / (1.0 + tl.exp(-z))
    elif SCORING == "sqrtsoftplus":
        e = tl.exp(-tl.abs(z))
        one = 1.0 + e  # log(1 + e), with what was lost in 1 + e made good
        p = tl.sqrt(
            tl.maximum(z, 0.0) + tl.where(one == 1.0, e, tl.log(one) * (e / tl.where(one == 1.0, 1.0, one - 1.0)))
        )
        p = tl.where(z == z, p, float("nan"))
    else:
        p = tl.exp(z - top) / total  # one NaN or +Inf makes the whole row NaN
    return p


@triton.jit(do_not_specialize=["M"])
def _route_kernel(
    logits_ptr, bias_ptr, weights_ptr, ids_ptr,
    M, E,
    stride_lm, stride_le, factor,
    PDL: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_K: tl.constexpr, TOPK_GROUP: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    """BLOCK_M tokens; experts lie in BLOCK_G groups of BLOCK_S places, SIZE of them taken. A key holds score and place
    of an expert, so that one maximum a pick finds both."""
    after_previous(PDL)
    LAST: tl.constexpr = -9223372036854775807
    PLACES: tl.constexpr = BLOCK_G * BLOCK_S
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < M
    place = tl.arange(0, PLACES)
    expert = (place // BLOCK_S) * SIZE + place % BLOCK_S
    inside = ((place // BLOCK_S < GROUPS) & (place % BLOCK_S < SIZE))[None, :]
    l_ptrs = logits_ptr + offs_m[:, None] * stride_lm + expert[None, :] * stride_le
    z = tl.load(l_ptrs, mask=mask_m[:, None] & inside, other=float("-inf")).to(tl.float32)  # [BLOCK_M, PLACES]

    top = tl.max(z, axis=1)[:, None]
    total = tl.sum(tl.exp(z - top), axis=1)[:, None]
    p = _scores(z, top, total, SCORING)
    finite = tl.abs(p) < float("inf")
    if bias_ptr is None:
        choice = tl.where(finite, z, float("-inf"))
    else:
        choice = (
            tl.where(finite, p, 0.0)
            + tl.load(bias_ptr + expert, mask=(expert < E) & (place % BLOCK_S < SIZE), other=0.0)[None, :]
        )
        choice = tl.where(tl.abs(choice) < float("inf"), choice, float("-inf"))
    choice = tl.where(inside, choice, float("-inf"))
    key = tl.where(inside, _rank_key(choice, place[None, :], PLACES), LAST)

    if TOPK_GROUP < GROUPS:
        by_group = tl.reshape(choice, (BLOCK_M, BLOCK_G, BLOCK_S))
        score = tl.max(by_group, axis=2)
        if bias_ptr is not None:
            first = tl.argmax(by_group, axis=2)
            others = tl.where(tl.arange(0, BLOCK_S)[None, None, :] == first[:, :, None], float("-inf"), by_group)
            score += tl.max(others, axis=2)
        group = tl.arange(0, BLOCK_G)[None, :]
        group_key = tl.where(group < GROUPS, _rank_key(score, group, BLOCK_G), LAST)
        chosen = tl.zeros((BLOCK_M, BLOCK_G), dtype=tl.int32)
        for _ in range(TOPK_GROUP):
            hit = group == _index_of(tl.max(group_key, axis=1), BLOCK_G)[:, None]
            chosen = tl.where(hit, 1, chosen)
            group_key = tl.where(hit, LAST, group_key)
        chosen = tl.broadcast_to(chosen[:, :, None], (BLOCK_M, BLOCK_G, BLOCK_S))
        key = tl.where(tl.reshape(chosen, (BLOCK_M, PLACES)) > 0, key, LAST)

    pick = tl.arange(0, BLOCK_P)[None, :]
    ids = tl.zeros((BLOCK_M, BLOCK_P), dtype=tl.int32)
    for j in range(TOP_K):
        at = _index_of(tl.max(key, axis=1), PLACES)
        hit = place[None, :] == at[:, None]
        ids = tl.where(pick == j, ((at // BLOCK_S) * SIZE + at % BLOCK_S)[:, None], ids)
        key = tl.where(hit, LAST, key)
    # the chosen scores once more, from the cache: cheaper than a sum over all experts in every pick
    mask = mask_m[:, None] & (pick < TOP_K)
    z = tl.load(logits_ptr + offs_m[:, None] * stride_lm + ids * stride_le, mask=mask, other=float("-inf")).to(
        tl.float32
    )
    weights = _scores(z, top, total, SCORING)
    weights = tl.where((tl.abs(weights) < float("inf")) & mask, weights, 0.0)
    if RENORMALIZE:
        sum_of_weights = tl.sum(weights, axis=1)[:, None]
        weights = weights / tl.where(sum_of_weights > 0.0, sum_of_weights, 1.0)
    out = offs_m[:, None] * TOP_K + pick
    tl.store(weights_ptr + out, weights * factor, mask=mask)
    tl.store(ids_ptr + out, ids, mask=mask)


def configs(logits: Tensor, **_: Any):
    M, width = bucket(logits.shape[0]), triton.next_power_of_2(logits.shape[1])
    if of(logits.device).arch == "cpu":  # the interpreter wants few programs
        yield Config(BLOCK_M=8, num_warps=4)
    yield Config(BLOCK_M=4 if width <= 32 and M >= 64 else 1, num_warps=1 if width <= 512 else 4)
    for rows in (1, 2, 4, 8, 16, 32):
        for warps in (1, 2, 4, 8):
            if rows <= max(M, 1) and 32 * warps <= rows * width <= 1024 * warps:
                yield Config(BLOCK_M=rows, num_warps=warps)


def key(
    logits: Tensor, top_k: int, scoring: str, correction_bias: Tensor | None, num_expert_group: int, topk_group: int,
    **_: Any,
) -> dict[str, int | str]:  # fmt: skip
    return dict(
        M=bucket(logits.shape[0]), E=logits.shape[1], top_k=top_k, scoring=scoring,
        bias=int(correction_bias is not None), groups=num_expert_group, topk_group=topk_group, logits=str(logits.dtype),
    )  # fmt: skip


def cost(logits: Tensor, top_k: int, **_: Any) -> Cost:
    rows = logits.shape[0]
    return Cost(flops=(4 + top_k) * logits.numel(), bytes=logits.numel() * logits.element_size() + 8 * rows * top_k)


CASES: dict[str, dict[str, Any]] = {
    "mixtral_8x7b": dict(E=8, top_k=2),
    "qwen3_30b_a3b": dict(E=128, top_k=8),
    "gpt_oss_120b": dict(E=128, top_k=4, scoring="topk_softmax"),
    "deepseek_v3": dict(E=256, top_k=8, scoring="sigmoid", bias=True, grouping=(8, 4), logits_dtype=torch.float32),
}


def inputs(
    *, M, E, top_k=2, scoring="softmax", renormalize=True, bias=False, grouping=(1, 1), factor=1.0,
    logits_dtype=torch.bfloat16, kind="normal", layout="contiguous", device="cuda", seed=0,
):  # fmt: skip
    g = generator(seed, device)
    # steps of 1/8: exact in every dtype, and far enough apart that no rounding of exp changes their order
    logits = (torch.randn((M, E), generator=g, device=device) * 16).round() / 8
    if kind == "zeros":
        logits = torch.zeros_like(logits)
    elif kind == "ties":
        logits = (logits / 2).round()
    elif kind in ("special", "masked"):
        pick = torch.randint(0, 6, (M, E), generator=g, device=device)
        odd = (float("nan"), float("inf"), -float("inf")) if kind == "special" else (-float("inf"), -float("inf"))
        for which, value in enumerate(odd):
            logits = torch.where(pick == which, value, logits)
    if scoring == "topk_softmax":
        bias, grouping = False, (1, 1)
    groups, chosen = grouping
    divides = groups < E and E % groups == 0
    reachable = E // groups * chosen if divides else E
    correction = (torch.randn((E,), generator=g, device=device) * 4).round() / 4
    return dict(
        logits=strided(logits.to(logits_dtype), layout), top_k=min(top_k, reachable), scoring=scoring,
        renormalize=renormalize, correction_bias=correction if bias else None, num_expert_group=groups,
        topk_group=chosen, routed_scaling_factor=factor,
    )  # fmt: skip


@op(
    reference=reference, check=check, inputs=inputs, tol=2e-6,
    domain=dict(
        M=(0, 1, 3, 5, 13), E=(1, 6, 16, 33, 64, 257), top_k=(1, 2, 5, 8, 32), scoring=SCORINGS,
        renormalize=(False, True), bias=(False, True), grouping=((1, 1), (8, 2), (3, 1), (4, 4)), factor=(1.0, 2.5),
        logits_dtype=FLOAT_INPUTS, kind=("normal", "ties", "zeros", "masked", "special"),
        layout=("contiguous", "rows", "offset", "transposed"),
    ),
    kernels=dict(route=Kernel(_route_kernel)),
    configs=configs, key=key, cost=cost,
    cases={f"{n}/T={t}": dict(M=t, **case) for n, case in CASES.items() for t in MOE_TOKENS},
)  # fmt: skip
def route(
    logits: Tensor, top_k: int, scoring: str = "softmax", renormalize: bool = True,
    correction_bias: Tensor | None = None, num_expert_group: int = 1, topk_group: int = 1,
    routed_scaling_factor: float = 1.0, *, config: Config,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose top_k experts for every token, and their weights.

    Args:
        logits: (M, E) of the router for M tokens, fp32, bf16 or fp16, any strides; E at most 2048.
        top_k: experts per token, at most 32, and at most as many as the chosen groups hold.
        scoring: softmax, sigmoid, sqrtsoftplus, or topk_softmax (neither bias nor groups).
        renormalize: divide the weights of a token by their sum.
        correction_bias: (E,) fp32 or None; added to the scores for the choice, not to the weights.
        num_expert_group, topk_group: number of groups of neighbouring experts, and how many of them a token may use.
        routed_scaling_factor: multiplies the weights.

    Returns:
        weights (M, top_k) fp32 and ids (M, top_k) int32, best first.

    Raises:
        ValueError: a shape, dtype, name or number does not fit.
    """
    M, E = logits.shape
    weights = torch.empty((M, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((M, top_k), dtype=torch.int32, device=logits.device)
    if M == 0:
        return weights, ids
    groups = _groups(E, num_expert_group)
    size = E // groups
    _route_kernel[(triton.cdiv(M, config["BLOCK_M"]),)](
        logits, correction_bias, weights, ids,
        M, E,
        logits.stride(0), logits.stride(1), float(routed_scaling_factor),
        SCORING=scoring, RENORMALIZE=renormalize or scoring == "topk_softmax", TOP_K=top_k,
        TOPK_GROUP=min(topk_group, groups), GROUPS=groups, SIZE=size, BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_S=triton.next_power_of_2(size), BLOCK_P=triton.next_power_of_2(top_k),
        **early_start(of(logits.device)), **config,
    )  # fmt: skip
    return weights, ids
