"""What ranks do in the tests: each function runs on every rank of a world and returns plain values."""

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import fpk
import fpk._moe
from fpk.api import Quantized, quantize
from fpk.check import bits, rel_error
from fpk.op import OPS
from fpk.parallel import Balancer, ExpertParallel, Group, Placement, row_parallel, shard_experts

WIDE = 512  # input of linear layers
Parts = dict[int, Group | None]  # the first ranks by their number
H, INNER, EXPERTS, TOP_K, TOKENS = 128, 512, 10, 3, 12  # INNER / 4 is a block of scales


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The same numbers on every rank, on its device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(dtype).to(here())


def here() -> torch.device:
    return torch.get_default_device()


def layer_of(scheme: str, experts: int = EXPERTS) -> tuple[Tensor | Quantized, Tensor | Quantized]:
    """w13 and w2 of all experts, small numbers, in a scheme or plain."""
    w13 = normal(experts, 2 * INNER, H, seed=1) / 16
    w2 = normal(experts, H, INNER, seed=2) / 16
    return (w13, w2) if scheme == "bf16" else (quantize(w13, scheme), quantize(w2, scheme))


def tokens(count: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """x, weights and ids of tokens; an id of -1 among them, and one token without any expert."""
    x = normal(count, H, seed=3)
    weights = torch.rand(count, TOP_K, generator=torch.Generator().manual_seed(4), device="cpu").to(here())
    ids = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(5 + t), device="cpu")[:TOP_K]
                       for t in range(count)]).int().to(here())  # fmt: skip
    ids[1, 2], ids[4] = -1, -1
    return x, weights, ids


def held(weight: Tensor | Quantized, experts: tuple[int, ...]) -> Tensor | Quantized:
    """The matrices of some experts."""
    chosen = torch.tensor(experts, dtype=torch.long)

    def pick(t: Tensor) -> Tensor:
        return (t.view(torch.uint8)[chosen].view(t.dtype)) if t.dtype.itemsize == 1 else t[chosen]

    if not isinstance(weight, Quantized):
        return pick(weight)
    return Quantized(
        pick(weight.codes), pick(weight.scale), weight.scheme,
        global_scale=None if weight.global_scale is None else pick(weight.global_scale), check=False,
    )  # fmt: skip


def slices(ranks: int, count: int = TOKENS) -> list[slice]:
    """Uneven parts of the tokens, a rank without any among four."""
    cuts = {2: [0, 7, count], 4: [0, 5, 5, 8, count]}.get(ranks, [0, count])
    return [slice(a, b) for a, b in itertools.pairwise(cuts)]


def expert_parallel(
    parts: Parts, ranks: int, scheme: str, act: str, exchange: str, placement: Placement, payload: str | None
) -> dict[str, Any]:
    """The layer on some ranks against the same layer on one: equal bits, and the relative difference.

    Sums of ranks ("gather") also tell what of the difference comes from operands of the second product that differ.
    """
    part = parts[ranks]
    if part is None:
        return {}
    w13, w2 = layer_of(scheme)
    x, weights, ids = tokens()
    with watched() as seen:
        whole = fpk.moe_experts(x, weights, ids, w13, w2, act=act)
    mine = placement.ranks[part.rank]
    held13, held2 = held(w13, mine), held(w2, mine)

    def experts(rows, weights, ids):
        return fpk.moe_experts(rows, weights, ids, held13, held2, act=act, expert_map=layer.expert_map)

    layer = ExpertParallel(part, placement, exchange, payload)
    even = TOKENS // part.size
    at = slices(part.size)[part.rank] if exchange == "all_to_all" else slice(part.rank * even, (part.rank + 1) * even)
    with watched() as seen_here:
        out = layer(x[at], weights[at], ids[at], experts)
    found = compare(out, whole[at])
    if exchange == "all_to_all":
        return found
    order = OPS["sort_by_expert"](ids, EXPERTS)[1], OPS["sort_by_expert"](ids, len(mine), layer.expert_map)[1]
    moved, there = moved_operands(seen[1], seen_here[1], *order)
    effect = torch.zeros(TOKENS, H, dtype=torch.float64)
    for t, j in there.nonzero().tolist():
        matrix = plain(w2)[ids[t, j]].double()
        effect[t] += weights[t, j].double() * (matrix @ moved[t, j])
    effect = part.all_reduce(effect)[at]
    first, first_here = (codes_in_order(s[0], o) for s, o in zip((seen, seen_here), order, strict=True))
    assert torch.equal(first[there], first_here[there]), "ranks multiply other tokens"
    return found | dict(
        rest=float(rel_error(out.double() - effect, whole[at])),
        effect=float(effect.norm() / whole[at].double().norm()),
        moved=int((moved != 0).sum()), operands=int(there.sum()) * INNER,
    )  # fmt: skip


@contextlib.contextmanager
def watched() -> Iterator[list[tuple[Tensor | Quantized, Tensor | None]]]:
    """Left operands of the products inside, and the order of tokens that a product which gathers them itself takes."""
    product, seen = fpk._moe._product, []

    def watching(rows, *arguments, gather=None, **options):
        seen.append((rows, gather))
        return product(rows, *arguments, gather=gather, **options)

    fpk._moe._product = watching
    try:
        yield seen
    finally:
        fpk._moe._product = product


def plain(value: Tensor | Quantized) -> Tensor:
    return value.dequantize(torch.float32) if isinstance(value, Quantized) else value.float()


def codes_in_order(seen: tuple[Tensor | Quantized, Tensor | None], position: Tensor) -> Tensor:
    """Bits of a product's left operand for each slot (T, top_k, columns); any for dropped ones."""
    rows, gather = seen
    codes = bits(rows.codes if isinstance(rows, Quantized) else rows)
    if gather is not None:  # rows are tokens
        return codes[:, None].expand(-1, position.shape[1], -1)
    return codes[position.long().clamp(min=0)]


def moved_operands(whole: Any, mine: Any, order: Tensor, mine_order: Tensor) -> tuple[Tensor, Tensor]:
    """(this rank's operand less the whole layer's, (T, top_k, columns) fp64; slots that this rank has, (T, top_k))."""
    there = mine_order >= 0
    theirs, own = (plain(s[0])[o.long().clamp(min=0)].double() for s, o in ((whole, order), (mine, mine_order)))
    return torch.where(there[..., None], own - theirs, 0.0), there


def tensor_parallel_experts(parts: Parts, ranks: int, scheme: str, act: str) -> dict[str, float | bool]:
    part = parts[ranks]
    if part is None:
        return {}
    w13, w2 = layer_of(scheme)
    x, weights, ids = tokens()
    whole = fpk.moe_experts(x, weights, ids, w13, w2, act=act)
    out = fpk.moe_experts(x, weights, ids, *shard_experts(w13, w2, part.rank, part.size), act=act)
    return compare(part.all_reduce(out.float()).to(out.dtype), whole)


def tensor_parallel_linear(parts: Parts, ranks: int, method: str, split: str) -> dict[str, float | bool]:
    """A layer cut between ranks, its amaxes reduced over them, against the whole layer."""
    from fpk import methods

    part = parts[ranks]
    if part is None:
        return {}
    widths = (192, 64, 64)
    shards = [normal(n, WIDE, seed=n + i) for i, n in enumerate(widths)]
    shards[2][-1, -1] = 9.0  # only one rank sees the largest element
    made = getattr(methods, method)
    whole = filled(methods.Linear(WIDE, widths, quant_method=made()), shards)
    layer = methods.Linear(
        WIDE,
        widths,
        quant_method=made(),
        split=split,
        tp_size=part.size,
        tp_rank=part.rank,
        tp_group=part.process_group,
    )
    filled(layer, shards)
    x = normal(TOKENS, WIDE, seed=8)
    expected = whole(x)
    if split == "column":
        ends = [sum(widths[:i]) for i in range(3)]
        rows = [r for e, n in zip(ends, widths, strict=True)
                for r in range(e + part.rank * n // part.size, e + (part.rank + 1) * n // part.size)]  # fmt: skip
        return compare(layer(x), expected[:, rows])
    width = WIDE // part.size
    mine = x[:, part.rank * width : (part.rank + 1) * width].contiguous()
    out = row_parallel(part, layer, mine, fp32=True)
    scattered = row_parallel(part, layer, mine, fp32=True, scatter=True)
    even = TOKENS // part.size
    same = torch.equal(scattered, out[part.rank * even : (part.rank + 1) * even])
    return compare(out, expected) | dict(scattered=same)


def filled(layer, shards):
    for i, w in enumerate(shards):
        layer.weight.weight_loader(layer.weight, w, i)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def compare(out: Tensor, expected: Tensor) -> dict[str, float | bool]:
    if out.shape != expected.shape or out.dtype != expected.dtype:
        raise AssertionError(f"{tuple(out.shape)} {out.dtype}, expected {tuple(expected.shape)} {expected.dtype}")
    return dict(equal=bool(torch.equal(bits(out), bits(expected))), error=float(rel_error(out, expected)))


def method_layer(method: str, expert_map: Tensor | None, part: Group | None) -> Any:
    """An expert layer of an engine with this method, loaded; this rank's part of I where `part` shares it."""
    from fpk import methods

    ranks = 1 if part is None else part.size
    moe = methods.MoEConfig(
        EXPERTS, TOP_K, H, INNER // ranks, tp_size=ranks, tp_rank=0 if part is None else part.rank,
        tp_group=None if part is None else part.process_group,
    )  # fmt: skip
    layer = methods.RoutedExperts(moe, prefix="p.experts", expert_map=expert_map)
    layer.quant_method = getattr(methods, method)(layer=layer)
    local = EXPERTS if expert_map is None else int((expert_map >= 0).sum())
    layer.quant_method.create_weights(layer, local, H, INNER // ranks, torch.bfloat16)
    w13, w2 = layer_of("bf16")
    for name, shard, values in (("w13", "w1", w13[:, :INNER]), ("w13", "w3", w13[:, INNER:]), ("w2", "w2", w2)):
        for e in range(EXPERTS):
            parameter = dict(layer.named_parameters())[f"{name}_weight"]
            parameter.weight_loader(parameter, values[e], f"{name}.{shard}", shard_id=shard, expert_id=e)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def expert_method(parts: Parts, ranks: int, method: str, placement: Placement | None) -> dict[str, float | bool]:
    """A method's layer with its experts, or without a placement its I, on some ranks, against the whole layer."""
    part = parts[ranks]
    if part is None:
        return {}
    x, weights, ids = tokens()
    whole_layer = method_layer(method, None, None)
    whole = whole_layer.quant_method.apply(whole_layer, x, weights, ids)
    if placement is None:
        layer = method_layer(method, None, part)
        out = layer.quant_method.apply(layer, x, weights, ids)
        return compare(part.all_reduce(out.float()).to(out.dtype), whole)
    layer = method_layer(method, placement.expert_map(part.rank, here()), None)
    at = slices(part.size)[part.rank]
    run = ExpertParallel(part, placement)
    return compare(run(x[at], weights[at], ids[at], functools.partial(layer.quant_method.apply, layer)), whole[at])


def uncovered(parts: Parts, ranks: int) -> str:
    """Expert maps that leave expert 3 out: what every rank is told."""
    part = parts[ranks]
    if part is None:
        return ""
    expert_map = torch.tensor([[0, 1, -1, -1], [-1, -1, 0, -1]][part.rank], dtype=torch.int32)
    try:
        Placement.gathered(part, expert_map)
    except ValueError as error:
        return str(error)
    return "nothing"


def disagreeing(parts: Parts, ranks: int) -> str:
    """Ranks that were built with different placements: what every rank is told."""
    part = parts[ranks]
    if part is None:
        return ""
    try:
        ExpertParallel(part, Placement.linear(10 + part.rank, part.size))
    except RuntimeError as error:
        return str(error)
    return "nothing"


def dying(parts: Parts, ranks: int) -> tuple[str, float]:
    """The last rank dies in the middle of a layer: what the others are told, and after how many seconds."""
    part = parts[ranks]
    assert part is not None
    layer = ExpertParallel(part, Placement.linear(EXPERTS, part.size))
    part.barrier()
    if part.rank == part.size - 1:
        os._exit(1)
    x, weights, ids = tokens()
    begun = time.monotonic()
    try:
        layer(x, weights, ids, lambda rows, *_: rows)
    except RuntimeError as error:
        return str(error), time.monotonic() - begun
    return "nothing", 0.0


def balanced(parts: Parts, ranks: int) -> dict[str, Any]:
    """A layer whose experts get copies and move while it serves: its outputs all the while, and the ranks' loads."""
    part = parts[ranks]
    if part is None:
        return {}
    w13, w2 = layer_of("fp8_block128")
    x, weights, ids = tokens()
    ids[:, 0] = 7  # one expert has most of the load
    whole = fpk.moe_experts(x, weights, ids, w13, w2, act="fp8_group128")
    slots = [s % EXPERTS for s in range(EXPERTS + 2)]
    mine = tuple(slots[part.rank * 3 : part.rank * 3 + 3])
    w13, w2 = held(w13, mine), held(w2, mine)
    parts_of = dict(w13=w13.codes, w13_scale=w13.scale, w2=w2.codes, w2_scale=w2.scale)
    where = [t.data_ptr() for t in parts_of.values()]
    balancer = Balancer(part, EXPERTS, parts_of, redundant=2)
    layer = ExpertParallel(part, balancer.placement, payload="fp8_group128")
    at = slices(part.size)[part.rank]
    found: dict[str, Any] = dict(errors=[], loads=[], slots=[])

    def experts(rows, weights, ids):
        return fpk.moe_experts(rows, weights, ids, w13, w2, act="fp8_group128", expert_map=layer.expert_map)

    def serve() -> None:
        given = balancer.route(weights[at], ids[at])
        found["errors"].append(compare(layer(x[at], *given, experts), whole[at])["error"])

    serve()
    for _ in range(2):
        found["loads"].append(part.all_reduce(balancer.loads.clone()).tolist())
        plan = balancer.plan()
        balancer.move(plan)
        serve()  # by the old slots
        balancer.commit()
        found["slots"].append(list(balancer.slots))
        balancer.loads.zero_()
        serve()
    found["loads"].append(part.all_reduce(balancer.loads.clone()).tolist())
    found["stayed"] = where == [t.data_ptr() for t in parts_of.values()]
    return found
