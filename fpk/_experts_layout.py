"""How a module of a transformers model holds its experts, and what it computes with them.

The second is asked of the module itself: a copy of it with small weights runs beside the activations that fpk has. A
class may clamp, scale, normalize or interleave in code of its own, and names and shapes do not tell.
"""

import copy
import inspect
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from fpk.op import OPS

MATRICES = ("gate_up_proj", "down_proj")
BIASES = tuple(f"{name}_bias" for name in MATRICES)
_HIDDEN, _INTER, _TOP_K = 8, 4, 2
_SCALES = (0.3, 1.0, 3.0)  # of tokens: where activations differ from each other
_CLOSE = 2e-5  # fp32; gelu and its approximation by tanh differ by 1e-4


def holds_experts(module: nn.Module) -> bool:
    """Does it have two stacks of matrices by the names that transformers has for experts?"""
    stacks = [module._parameters.get(name) for name in MATRICES]
    return all(s is not None and s.dim() == 3 for s in stacks)


def expert_layout(module: nn.Module) -> dict[str, Any] | None:
    """How a transformers module holds its experts; None if it holds none, or computes something else than fpk can.

    Returns:
        "transposed": whether weights are (E, K, N); "options": what `moe_experts` is called with.
    """
    if not holds_experts(module):
        return None
    gate_up, down = (cast(Tensor, module._parameters[name]) for name in MATRICES)
    transposed = gate_up.shape[2] == 2 * down.shape[1] and gate_up.shape[1] == down.shape[2]
    is_plain = gate_up.shape[1] == 2 * down.shape[2] and gate_up.shape[2] == down.shape[1]
    known = {*MATRICES, *BIASES}
    others = [n for n, p in module.named_parameters() if n not in known and p is not None]
    if gate_up.shape[0] != down.shape[0] or transposed == is_plain or others:
        return None
    options = _options_of(module, gate_up.shape[0], transposed)
    return None if options is None else {"transposed": transposed, "options": options}


def matrices_of(module: nn.Module, name: str, layout: dict[str, Any]) -> Tensor:
    """A stack of weights (E, N, K), detached."""
    weight = cast(Tensor, module._parameters[name]).detach()
    return weight.transpose(1, 2).contiguous() if layout["transposed"] else weight


def _options_of(module: nn.Module, experts: int, transposed: bool) -> dict[str, Any] | None:
    """The arguments of `moe_experts` that give what the module gives, None if none do."""
    limit, alpha = _number(module, "limit", "swiglu_limit"), _number(module, "alpha", "swiglu_alpha")
    random = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")

    shapes = {"gate_up_proj": (experts, 2 * _INTER, _HIDDEN), "down_proj": (experts, _HIDDEN, _INTER)}
    weights = {n: normal(*shape) / math.sqrt(shape[2]) for n, shape in shapes.items()}
    biases = {f"{n}_bias": normal(*s[:2]) for n, s in shapes.items() if module._parameters.get(f"{n}_bias") is not None}
    scales = torch.tensor([*_SCALES, 4 * limit] if limit else _SCALES, device="cpu").unsqueeze(1)  # beyond the limit
    x, top_k = normal(len(scales), _HIDDEN) * scales, min(_TOP_K, experts)
    routed, ids = normal(len(scales), experts).softmax(-1).topk(top_k)
    small = copy.copy(module)
    stored = {n: w.mT.contiguous() if transposed else w for n, w in weights.items()} | biases
    small.__dict__["_parameters"] = {n: nn.Parameter(t, requires_grad=False) for n, t in stored.items()}
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:  # the class' own loop: what is wrapped around it hands tokens to other kernels
            wanted = inspect.unwrap(type(module).forward)(small, x, ids, routed)
        except Exception:  # whatever a class raises for small weights: it is another one than those that fpk knows
            return None
        if not isinstance(wanted, Tensor) or wanted.shape != x.shape:
            return None
        rows = torch.einsum("tk,tjnk->tjn", x, weights["gate_up_proj"][ids])
        rows = rows + biases["gate_up_proj_bias"][ids] if biases else rows
        for options in _candidates(limit, alpha):
            hidden = OPS["act_and_mul"].reference(rows.flatten(0, 1), **options).unflatten(0, (-1, top_k))
            out = torch.einsum("tjk,tjnk->tjn", hidden, weights["down_proj"][ids])
            out = out + biases["down_proj_bias"][ids] if biases else out
            error = ((out * routed.unsqueeze(-1)).sum(1) - wanted).abs().amax(1)
            if bool((error <= _CLOSE * wanted.abs().amax(1)).all()):
                return options
    return None


def _candidates(limit: float | None, alpha: float | None) -> Iterator[dict[str, Any]]:
    for interleaved in (False, True):
        order: dict[str, Any] = {"interleaved": True} if interleaved else {}
        if limit is not None:
            given = {} if alpha is None else {"alpha": alpha}
            yield {"activation": "silu", **order, "limit": limit}
            yield {"activation": "swigluoai", **order, **given, "limit": limit}
            yield {"activation": "swiglustep", **order, "limit": limit}
        elif alpha is not None:
            yield {"activation": "silu", **order, "alpha": alpha}
            yield {"activation": "silu", **order, "alpha": alpha, "beta": 1.0}
        for name in ("silu", "gelu", "gelu_tanh"):
            yield {"activation": name, **order}


def _number(module: nn.Module, *names: str) -> float | None:
    """The first of these attributes that is a finite positive number."""
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
    return None
