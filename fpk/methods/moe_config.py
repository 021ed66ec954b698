"""What expert layers have in common: their sizes, the part of a rank, and their activation."""

from dataclasses import dataclass
from typing import Any

from fpk.methods.parameter import name_of

# what engines call activations, and what the op `act_and_mul` does for them
_ALIASES = {"gelu_pytorch_tanh": "gelu_tanh", "swigluoai_uninterleave": "silu"}
_PLAIN = "_no_mul"


@dataclass
class MoEConfig:
    """An expert layer in numbers, by the names that engines have for them; any object with these fields will do.

    Attributes:
        num_experts: of all ranks.
        experts_per_token: top_k.
        hidden_size: H.
        intermediate_size_per_partition: I of this rank.
        has_bias: do the products have biases?
        is_act_and_mul: is the first product gate and up (two shards), or one?
        tp_size, tp_rank, tp_group: ranks that share I, this one, and their torch.distributed group.
        ep_size: ranks that share the experts.
        moe_parallel_config: where an engine keeps tp_size and tp_rank instead.
        disable_inplace: accepted, fpk never writes into its input.
    """

    num_experts: int
    experts_per_token: int
    hidden_size: int
    intermediate_size_per_partition: int
    has_bias: bool = False
    is_act_and_mul: bool = True
    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    moe_parallel_config: Any = None
    disable_inplace: bool = False
    tp_group: Any = None

    @property
    def w13_num_shards(self) -> int:
        return 2 if self.is_act_and_mul else 1


@dataclass(frozen=True)
class Ranks:
    """The ranks that share an expert layer's I: how many, this one, and their group."""

    size: int = 1
    rank: int = 0
    group: Any = None


def ranks_of(layer: Any, moe: Any) -> Ranks:
    """From the layer, its `moe_config` or that one's `moe_parallel_config`, whichever knows them."""
    places = [layer, moe, getattr(moe, "moe_parallel_config", None)]

    def first(name: str, default: Any) -> Any:
        found = (getattr(place, name, None) for place in places if place is not None)
        return next((value for value in found if value is not None), default)

    size, rank = first("tp_size", 1), first("tp_rank", 0)
    if not 0 <= rank < size:
        raise ValueError(f"{name_of(layer)}.tp_rank: expected 0..{size - 1}, got {rank}")
    return Ranks(size, rank, first("tp_group", None))


def is_gated(layer: Any, moe: Any) -> bool:
    """Does the first product give gate and up?"""
    return bool(getattr(moe, "is_act_and_mul", True)) and not activation_name(layer).endswith(_PLAIN)


def activation_name(layer: Any) -> str:
    name = getattr(layer, "activation", "silu")
    return str(getattr(name, "value", name))  # engines have an enum


def is_interleaved(layer: Any) -> bool:
    """Do gate and up alternate in the rows of w13, as gpt-oss has them?"""
    return activation_name(layer) == "swigluoai"


def activation_of(layer: Any, gated: bool) -> dict[str, Any]:
    """The arguments of `act_and_mul` for a layer: its activation and swiglu_alpha, swiglu_beta, swiglu_limit.

    Raises:
        ValueError: no limit with "swigluoai_uninterleave", which has none of its own.
    """
    name = activation_name(layer)
    limit = getattr(layer, "swiglu_limit", None)
    if name == "swigluoai_uninterleave" and limit is None:
        raise ValueError(f"{name_of(layer)}.swiglu_limit: expected a limit with activation {name!r}, got None")
    plain = name.removesuffix(_PLAIN)
    return dict(
        activation=_ALIASES.get(plain, plain), gated=gated, interleaved=gated and is_interleaved(layer), limit=limit,
        alpha=getattr(layer, "swiglu_alpha", None), beta=getattr(layer, "swiglu_beta", None),
    )  # fmt: skip
