"""What an engine asks of a layer on one device: rows that do not depend on the batch, graphs that serve any routing."""

from typing import Any

import torch
from torch import Tensor

import fpk
from fpk import methods
from fpk.check import bits

H, INNER, EXPERTS, TOP_K, TOKENS = 128, 128, 4, 2, 9


def values(*shape: int, seed: int) -> Tensor:
    device = torch.get_default_device()
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").bfloat16().to(device)


def routing(tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    logits = values(tokens, EXPERTS, seed=seed).float()
    weights, ids = logits.softmax(-1).topk(TOP_K)
    return weights.contiguous(), ids.int().contiguous()


def linear(method: str) -> Any:
    layer = methods.Linear(H, [64, 32], quant_method=getattr(methods, method)(), prefix="p.qkv")
    for i, n in enumerate((64, 32)):
        layer.weight.weight_loader(layer.weight, values(n, H, seed=i), i)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def experts(method: str) -> Any:
    moe = methods.MoEConfig(EXPERTS, TOP_K, H, INNER)
    layer = methods.RoutedExperts(moe, prefix="p.experts")
    layer.quant_method = getattr(methods, method)(layer=layer)
    layer.quant_method.create_weights(layer, EXPERTS, H, INNER, torch.bfloat16)
    for name, shard, rows, cols in (("w13", "w1", INNER, H), ("w13", "w3", INNER, H), ("w2", "w2", H, INNER)):
        for e in range(EXPERTS):
            parameter = dict(layer.named_parameters())[f"{name}_weight"]
            loaded = values(rows, cols, seed=e + 7 * len(shard)) / 8
            parameter.weight_loader(parameter, loaded, f"{name}.{shard}", shard_id=shard, expert_id=e)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def call(layer: Any, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    if isinstance(layer, methods.Linear):
        return layer(x)
    return layer.quant_method.apply(layer, x, weights, ids)


def made(method: str) -> Any:
    with torch.no_grad():
        return experts(method) if "MoE" in method else linear(method)


def is_batch_invariant(method: str) -> bool:
    """Do tokens alone, and a few of them, have the bits that they have among all?"""
    layer, x, (weights, ids) = made(method), values(TOKENS, H, seed=3), routing(TOKENS, 5)
    with torch.no_grad(), fpk.batch_invariant():
        whole = call(layer, x, weights, ids)
        parts = (slice(0, 1), slice(2, 7))
        return all(torch.equal(bits(call(layer, x[p], weights[p], ids[p])), bits(whole[p])) for p in parts)


def replays_with_changed_routing(method: str) -> bool:
    """Does a captured graph give what an eager call gives, after tokens and routing have changed in place?"""
    tokens = 33
    layer, x, (weights, ids) = made(method), values(tokens, H, seed=3), routing(tokens, 5)
    with torch.no_grad():
        call(layer, x, weights, ids)  # compiles
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(layer, x, weights, ids)
        for seed in (6, 7):
            for kept, fresh in zip(
                (x, weights, ids), (values(tokens, H, seed=seed), *routing(tokens, seed)), strict=True
            ):
                kept.copy_(fresh)
            if seed == 7:
                ids.zero_()  # all to one expert
            graph.replay()
            torch.cuda.synchronize()
            if not torch.equal(bits(captured), bits(call(layer, x, weights, ids))):
                return False
    return True
