"""Expert layers under test, and the formulas of a layer in plain torch, expert by expert."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from linear_kit import default_device, group_rounded, token_rounded
from torch import Tensor

from fpk.methods import MoEConfig, RoutedExperts

E, H, I, TOP_K = 4, 160, 96, 2

ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x.float(),
    "fp8_token": token_rounded,
    "int8_token": lambda x: token_rounded(x, torch.int8),
    "fp8_group128": lambda x: group_rounded(x, 128),
    "fp8_group64": lambda x: group_rounded(x, 64),
}


def config(**fields: Any) -> MoEConfig:
    return MoEConfig(**dict(num_experts=E, experts_per_token=TOP_K, hidden_size=H, intermediate_size_per_partition=I)
                     | fields)  # fmt: skip


def layer_of(
    make: Callable[[RoutedExperts], Any], *, moe: MoEConfig | None = None, dtype: torch.dtype = torch.bfloat16,
    prefix: str = "p.experts", **fields: Any,
) -> RoutedExperts:  # fmt: skip
    """A layer with the method that `make(layer)` gives, its parameters created."""
    moe = moe or config()
    layer = RoutedExperts(moe, prefix=prefix, **fields)
    layer.quant_method = make(layer)
    local = moe.num_experts if layer.expert_map is None else int((layer.expert_map >= 0).sum())
    sizes = (local, moe.hidden_size, moe.intermediate_size_per_partition)
    layer.quant_method.create_weights(layer, *sizes, dtype)
    return layer


def put(layer: RoutedExperts, name: str, value: Tensor, shard: str | None = None, expert: int | None = None) -> Any:
    """One tensor through the loader that the parameter has now, as an engine calls it."""
    parameter = dict(layer.named_parameters())[name]
    where = dict(shard_id=shard, expert_id=expert)
    return parameter.weight_loader(parameter, value.to(default_device()), f"{name}.{shard}", **where)


def done(layer: RoutedExperts) -> RoutedExperts:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return values.to(dtype).to(default_device())


def matrices(seed: int = 0, experts: int = E, hidden: int = H, inter: int = I) -> dict[str, Tensor]:
    """w1, w3 (E, I, H) and w2 (E, H, I) in fp32; experts differ in size."""
    shapes = dict(w1=(inter, hidden), w3=(inter, hidden), w2=(hidden, inter))
    size = torch.arange(1, experts + 1, device=default_device()).view(-1, 1, 1) / 16
    return {n: randn(experts, *s, seed=seed + i) * size for i, (n, s) in enumerate(shapes.items())}


def routed(T: int, experts: int = E, top_k: int = TOP_K, seed: int = 5) -> tuple[Tensor, Tensor]:
    weights, ids = randn(T, experts, seed=seed).softmax(-1).topk(top_k)
    return weights.contiguous(), ids.to(torch.int32).contiguous()


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def expected(
    x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, act: Any = "none", act2: Any = None,
    bias13: Tensor | None = None, bias2: Tensor | None = None, local: list[int] | None = None,
    activate: Callable[[Tensor, Tensor], Tensor] = swiglu,
) -> Tensor:  # fmt: skip
    """The layer: w13 (E, 2I, H) in halves and w2 are fp32 values; `act` rounds rows as activations are rounded."""
    fake = ACTS[act] if isinstance(act, str) else act
    fake2 = fake if act2 is None else act2
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for t in range(x.shape[0]):
        for j in range(ids.shape[1]):
            expert = int(ids[t, j])
            expert = expert if local is None else local[expert]
            if expert < 0:
                continue
            hidden = w13[expert] @ fake(x[t : t + 1])[0] + (0 if bias13 is None else bias13[expert].float())
            hidden = hidden.to(x.dtype).float()
            half = hidden.shape[0] // 2
            hidden = activate(hidden[:half], hidden[half:]).to(x.dtype)
            y = w2[expert] @ fake2(hidden[None])[0] + (0 if bias2 is None else bias2[expert].float())
            out[t] += weights[t, j] * y.to(x.dtype).float()
    return out.to(x.dtype)
