"""Holders: modules that carry a layer's parameters, whatever engine the layer belongs to."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fpk.check import expect_one_of
from fpk.methods.parameter import attributes_of, register


class Holder(nn.Module):
    """A module whose parameters keep their attributes in a deepcopy, and codes and scales their dtype in `.to`."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Holder":
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        group = self.__dict__.get("tp_group")
        memo[id(group)] = group  # a process group is no part of the layer
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for name, parameter in self._parameters.items():
            if parameter is not None:
                new._parameters[name].__dict__.update(copy.deepcopy(attributes_of(parameter), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        # torch cannot pickle 1-byte floats: they travel as bytes with their dtype
        state = dict(self.__dict__)
        state["_parameters"] = {
            n: (p.data.view(torch.uint8), p.dtype, attributes_of(p)) if p is not None and p.dtype.itemsize == 1 else p
            for n, p in self._parameters.items()
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters = state.pop("_parameters")
        super().__setstate__(state | {"_parameters": {}})
        for name, value in parameters.items():
            if isinstance(value, tuple):
                register(self, name, value[0].view(value[1]), **value[2])
            else:
                self.register_parameter(name, value)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """A state of a processed layer, loaded into one that is not, makes it processed."""
        method = self.__dict__.get("quant_method")
        state = {n.removeprefix(prefix): v for n, v in state_dict.items() if n.startswith(prefix)}
        if hasattr(method, "is_processed") and method.is_processed(self, state):  # type: ignore[union-attr]
            method.adopt(self, state)  # type: ignore[union-attr]
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Holder":
        attributes = {n: attributes_of(p) for n, p in self._parameters.items() if p is not None}
        fixed_buffers = [n for n, b in self._buffers.items() if getattr(b, "fixed_dtype", False)]
        loading = self.__dict__.get("loading")

        def keep(tensor: Tensor) -> Tensor:
            if tensor.is_meta and loading is not None:  # it has no data yet; it will be made where it would be now
                loading.moved(fn(torch.empty(0, dtype=tensor.dtype, device=loading.device)).device)
                return tensor
            result = fn(tensor)
            fixed = getattr(tensor, "fixed_dtype", False) and result.dtype != tensor.dtype
            return tensor.detach().to(result.device) if fixed else result

        super()._apply(keep, recurse)  # type: ignore[arg-type]
        for name in fixed_buffers:
            self._buffers[name].fixed_dtype = True  # type: ignore[union-attr]
        for name, values in attributes.items():
            parameter = self._parameters[name]
            if parameter is not None:
                parameter.__dict__.update(values)
                if loading is not None and not parameter.is_meta:
                    loading.moved(parameter.device)
        moved = getattr(self.__dict__.get("quant_method"), "moved", None)
        if moved is not None:
            moved(self)
        return self


class RoutedExperts(Holder):
    """The experts of a mixture-of-experts layer: fields of the engine's layer that methods read, by keyword."""

    def __init__(self, moe_config: Any, *, prefix: str = "", quant_method: Any = None, **fields: Any) -> None:
        super().__init__()
        self.moe_config = moe_config
        self.prefix = prefix
        self.quant_method = quant_method
        known = dict(
            activation="silu", global_num_experts=moe_config.num_experts, local_num_experts=moe_config.num_experts,
            expert_map=None, intermediate_size_per_partition=moe_config.intermediate_size_per_partition,
            apply_router_weight_on_input=False, num_expert_group=None, topk_group=None, e_score_correction_bias=None,
            routed_scaling_factor=1.0, swiglu_limit=None, swiglu_alpha=None, swiglu_beta=None, top_k=None,
            scoring_func="softmax", renormalize=True,
        )  # fmt: skip
        for name in fields:
            expect_one_of("RoutedExperts: argument", name, known)
        for name, value in (known | fields).items():
            setattr(self, name, value)


def is_attention(layer: Any) -> bool:
    """fpk's holder, or a layer of an engine that has a KV cache."""
    return isinstance(layer, Attention) or (hasattr(layer, "num_kv_heads") and hasattr(layer, "kv_cache_dtype"))


class Attention(Holder):
    """The KV cache side of an attention layer: its sizes, the cache's dtype, and the scales that a method adds."""

    def __init__(
        self, num_kv_heads: int, head_size: int, head_size_v: int | None = None, *, kv_cache_dtype: str = "auto",
        prefix: str = "", quant_method: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_kv_heads, self.head_size = num_kv_heads, head_size
        self.head_size_v = head_size if head_size_v is None else head_size_v
        self.kv_cache_dtype = kv_cache_dtype
        self.prefix = prefix
        self.quant_method = quant_method
