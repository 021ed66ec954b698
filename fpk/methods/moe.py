"""Methods of expert layers: how they hold stacked weights, and what `apply` hands to `fpk.moe_experts`.

Nothing here computes: a method turns its parameters into `ExpertWeights` and the ops do the rest.
"""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fpk._moe import moe_experts
from fpk._shuffled import Shuffled
from fpk.api import Quantized
from fpk.check import FLOAT_INPUTS, expect_dtype, expect_one_of
from fpk.methods.base import ACTIVATIONS
from fpk.methods.expert_weights import ExpertLayout, ExpertMatrix, Sizes, Unit, WriteExpert
from fpk.methods.loading import Loader, Loading, Staging, are_pre_processed
from fpk.methods.moe_config import activation_of, is_gated, is_interleaved, ranks_of
from fpk.methods.parameter import name_of, register, set_parameter
from fpk.op import OPS

_made: "weakref.WeakKeyDictionary[nn.Module, tuple[Any, ExpertWeights]]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class ExpertWeights:
    """What a layer's two products run with: `get_fused_moe_quant_config` gives it, `fpk.moe_experts` takes it.

    Attributes:
        w13, w2: (E, 2I, H) and (E, H, I), quantized, shuffled or plain.
        act: scheme of the activations of both products, or "none".
        bias13, bias2: or None.
        input_scale13, input_scale2: of static activations, or None.
        options: further arguments of `moe_experts`.
    """

    w13: Tensor | Quantized | Shuffled
    w2: Tensor | Quantized | Shuffled
    act: str = "none"
    bias13: Tensor | None = None
    bias2: Tensor | None = None
    input_scale13: Tensor | None = None
    input_scale2: Tensor | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def w1_scale(self) -> Tensor | None:
        return self.w13.scale if isinstance(self.w13, Quantized) else None

    @property
    def w2_scale(self) -> Tensor | None:
        return self.w2.scale if isinstance(self.w2, Quantized) else None

    def __str__(self) -> str:
        w13, w2 = ("unquantized" if isinstance(w, Tensor) else w.scheme for w in (self.w13, self.w2))
        act = f"{self.act}_static" if self.input_scale13 is not None else self.act
        return f"{w13 if w13 == w2 else f'{w13}/{w2}'}:{act}"


class FusedMoEMethod(ABC):
    """How an expert layer holds its weights and multiplies by them.

    Args:
        moe: the layer's `moe_config`.

    Attributes:
        fast_accum: let FP8 products stay in the tensor core's own accumulator; set it on the method.
        per_expert_input_scale: where the checkpoint has a static scale of activations for each expert, keep them
            instead of the largest; set it on the method before weights are processed. Second scales of NVFP4 are always
            an expert's own.
    """

    uses_meta_device = False
    supports_pre_processed_weights = True
    supports_eplb = True
    is_monolithic = False  # `apply_monolithic` works all the same
    topk_indices_dtype: torch.dtype | None = None
    skip_forward_padding = False
    granule = 1
    """Neighbours of I that ranks do not part."""
    slack = 1
    """H and I are allocated in multiples of this."""
    bias_dtype: torch.dtype | None = None
    fast_accum = False
    per_expert_input_scale = False

    def __init__(self, moe: Any) -> None:
        self.moe = moe

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any = None,
        moe_parallel_config: Any = None,
    ) -> tuple[int, int]:  # fmt: skip
        """H and I as the method wants them allocated."""
        return _up(hidden_size, self.slack), _up(intermediate_size_per_partition, self.slack)

    def create_weights(
        self, layer: Any, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Register the layer's parameters, each with a `weight_loader`, in the form that checkpoints have.

        Args:
            layer: the holder.
            num_experts: on this rank.
            hidden_size, intermediate_size_per_partition: H, and I on this rank.
            params_dtype: of the weights before quantization, and the model's.
            extra_weight_attrs: attributes of every parameter; `weight_loader(param, loaded_weight, weight_name,
                shard_id, expert_id)` among them, else fpk's own is used.

        Raises:
            ValueError: sizes that the format cannot have.
        """
        what = name_of(layer)
        expect_one_of(f"{what}.params_dtype", params_dtype, FLOAT_INPUTS)
        H, I = self.maybe_roundup_sizes(hidden_size, intermediate_size_per_partition)
        for name, value in (("num_experts", num_experts), ("hidden_size", H), ("intermediate_size_per_partition", I)):
            if value < 1:
                raise ValueError(f"{what}.{name}: expected at least 1, got {value}")
        gated = is_gated(layer, self.moe)
        layer.experts = Sizes(
            num_experts, H, I, gated, gated and is_interleaved(layer), ranks_of(layer, self.moe), self.granule,
            self.slack,
        )  # fmt: skip
        layer.num_experts, layer.orig_dtype, layer.weight_block_size = num_experts, params_dtype, None
        layer.hidden_size_unpadded = hidden_size
        layer.loading = self.make_loading(layer)
        self.add_weights(layer, layer.experts, params_dtype, extra_weight_attrs)
        self.add_biases(layer, layer.experts, self.bias_dtype or params_dtype, extra_weight_attrs)
        self.moved(layer)

    def make_loading(self, layer: Any) -> Loading:
        return Loading()

    @abstractmethod
    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        """Register w13 and w2 and what belongs to them."""

    def add_biases(self, layer: Any, sizes: Sizes, dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        for matrix in ("w13", "w2"):
            if not getattr(self.moe, "has_bias", False):
                layer.register_parameter(f"{matrix}_bias", None)
                continue
            data = torch.zeros(sizes.experts, sizes.rows(matrix), dtype=dtype)
            layout = ExpertMatrix(sizes, matrix, unit=None, once=matrix == "w2")
            add_expert_parameter(layer, f"{matrix}_bias", data, layout, **attributes)

    def is_processed(self, layer: Any, state: dict[str, Tensor]) -> bool:
        """Are these parameters processed, and the layer's are not?"""
        return False

    def adopt(self, layer: Any, state: dict[str, Tensor]) -> None:  # noqa: B027  as is_processed
        """Make room for processed parameters of these shapes and dtypes, and take the layer for processed."""

    @abstractmethod
    def process_weights_after_loading(self, layer: Any) -> None:
        """Bring loaded parameters into the form that `apply` runs with; a second call does nothing.

        Raises:
            ValueError: a parameter is missing or its values are not valid; names it.
        """

    @abstractmethod
    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        """The layer's weights, scales and schemes, as `apply` runs with them."""

    def apply(
        self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor,
        shared_experts: Callable[[Tensor], Tensor] | None = None, shared_experts_input: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The layer's output, the shared experts' added if there are any.

        Args:
            x: (T, H) bf16 or fp16.
            topk_weights: (T, top_k) fp32.
            topk_ids: (T, top_k) int32 or int64, of all ranks; out of range: skipped.
            shared_experts: a module that every token goes through.
            shared_experts_input: its input, if that is not x.

        Returns:
            (T, H) in x's dtype; this rank's part of a sum if ranks share I or the experts.

        Raises:
            ValueError: dtype or shape of an argument, an unknown activation, or router weights on the input with
                top_k > 1.
        """
        H = layer.hidden_size_unpadded
        if x.dtype not in ACTIVATIONS or x.dim() != 2 or x.shape[1] not in (H, layer.experts.hidden):
            expect_dtype(f"{name_of(layer)}.x", x, *ACTIVATIONS)
            raise ValueError(f"{name_of(layer)}.x: expected (T, {H}), got {tuple(x.shape)}")
        weights = self.weights_for(layer, x)
        padding = layer.experts.hidden - x.shape[1]
        shared = None
        if shared_experts is not None:  # added in fp32, before the sum over the experts is rounded
            shared = shared_experts(x if shared_experts_input is None else shared_experts_input)
        out = moe_experts(
            F.pad(x, (0, padding)) if padding else x, topk_weights, topk_ids, weights.w13, weights.w2, act=weights.act,
            bias13=weights.bias13, bias2=weights.bias2, expert_map=getattr(layer, "expert_map", None),
            apply_router_weight_on_input=getattr(layer, "apply_router_weight_on_input", False),
            input_scale13=weights.input_scale13, input_scale2=weights.input_scale2, fast_accum=self.fast_accum,
            residual=F.pad(shared, (0, padding)) if padding and shared is not None else shared,
            **activation_of(layer, layer.experts.gated), **dict(weights.options),
        )  # fmt: skip
        return out[:, : x.shape[1]] if padding else out

    def apply_monolithic(self, layer: Any, x: Tensor, router_logits: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Route as the layer says, then `apply`.

        Args:
            x: as in `apply`.
            router_logits: (T, experts of all ranks).
            input_ids: accepted; no routing of fpk reads tokens.

        Raises:
            ValueError: as `apply` and the op `route`.
        """
        scoring = getattr(layer, "scoring_func", "softmax")
        scale = getattr(layer, "routed_scaling_factor", None)
        weights, ids = OPS["route"](
            router_logits, getattr(layer, "top_k", None) or self.moe.experts_per_token, scoring=scoring,
            renormalize=getattr(layer, "renormalize", True),
            correction_bias=getattr(layer, "e_score_correction_bias", None),
            num_expert_group=getattr(layer, "num_expert_group", None) or 1,
            topk_group=getattr(layer, "topk_group", None) or 1, routed_scaling_factor=1.0 if scale is None else scale,
        )  # fmt: skip
        return self.apply(layer, x, weights, ids)

    def weights_of(self, layer: Any) -> ExpertWeights:
        """`get_fused_moe_quant_config`, made once as long as the layer's tensors stay where they are."""
        if torch.compiler.is_compiling():
            return self.get_fused_moe_quant_config(layer)
        tensors = (*layer._parameters.values(), *layer._buffers.values())
        key = (self, layer.weight_only, *[t.data_ptr() for t in tensors if t is not None])
        found = _made.get(layer)
        if found is None or found[0] != key:
            found = _made[layer] = key, self.get_fused_moe_quant_config(layer)
        return found[1]

    def weights_for(self, layer: Any, x: Tensor) -> ExpertWeights:
        """What these tokens are multiplied by."""
        return self.weights_of(layer)

    def moved(self, layer: Any) -> None:
        """The layer's parameters may be on another device now."""
        layer.weight_only = False

    def scheme(self, layer: Any) -> str:
        """Schemes as "weights:activations"."""
        return str(self.get_fused_moe_quant_config(layer))

    def dequantize(self, layer: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """w13 and w2 of this rank, as the layer multiplies by them."""
        weights = self.get_fused_moe_quant_config(layer)
        w13, w2 = (w.to(dtype) if isinstance(w, Tensor) else w.dequantize(dtype) for w in (weights.w13, weights.w2))
        return w13, w2

    def biases(self, layer: Any) -> dict[str, Any]:
        return dict(bias13=layer.w13_bias, bias2=layer.w2_bias)

    def finish_biases(self, layer: Any) -> None:
        """The bias of the second product is added before ranks are summed: only the first has it."""
        if layer.w2_bias is not None and layer.experts.ranks.rank > 0:
            layer.w2_bias.data.zero_()

    def leave_pre_processed(self, layer: nn.Module) -> bool:
        """Are weights to be left as they are? Raises RuntimeError for a method that cannot."""
        if are_pre_processed() and not self.supports_pre_processed_weights:
            raise RuntimeError(f"{type(self).__name__} ({name_of(layer)}): does not take pre-processed weights")
        return are_pre_processed()


class UnquantizedFusedMoEMethod(FusedMoEMethod):
    """Weights as they are, in params_dtype."""

    def add_weights(self, layer: Any, sizes: Sizes, params_dtype: torch.dtype, attributes: dict[str, Any]) -> None:
        for matrix in ("w13", "w2"):
            data = torch.empty(sizes.experts, sizes.rows(matrix), sizes.cols(matrix), dtype=params_dtype)
            add_expert_parameter(layer, f"{matrix}_weight", data, ExpertMatrix(sizes, matrix), **attributes)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing to do but the bias of a rank."""
        self.finish_biases(layer)

    def get_fused_moe_quant_config(self, layer: Any) -> ExpertWeights:
        return ExpertWeights(layer.w13_weight, layer.w2_weight, **self.biases(layer))


class SerializedMoEMethod(FusedMoEMethod):
    """What methods of quantized checkpoints share: parameters in the checkpoint's form, checked and converted once."""

    def make_loading(self, layer: Any) -> Loading:
        layer.register_load_state_dict_post_hook(self._state_loaded)
        return Staging()

    def _state_loaded(self, layer: Any, *_: Any) -> None:
        if layer.loading.processed:
            self.derive(layer, layer._parameters)
            self.moved(layer)

    def is_processed(self, layer: Any, state: dict[str, Tensor]) -> bool:
        return bool(layer.loading.is_processed(state))

    def adopt(self, layer: Any, state: dict[str, Tensor]) -> None:
        layer.loading.adopt(layer, state)

    def derive(self, layer: Any, parameters: Mapping[str, Tensor | None]) -> None:
        """Set what `apply` reads and no state dict holds, from the processed parameters that it follows from."""

    def expect(
        self, layer: Any, name: str, data: Tensor, layout: ExpertLayout, attributes: dict[str, Any],
        fill: float | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Register a parameter. `fill` is what it holds until it is loaded, None for codes."""
        parameter = add_expert_parameter(layer, name, data, layout, **dict(fixed_dtype=True) | more | attributes)
        parts = parts_of(layout.sizes, layout.matrix) if fill is None else None
        layer.loading.expect(name, parameter, fill, parts)

    def process_weights_after_loading(self, layer: Any) -> None:
        staging: Staging = layer.loading
        if not self.leave_pre_processed(layer):
            loaded = staging.loaded(layer)
            if loaded:
                self.expect_together(layer, loaded)
                staging.expect_whole(layer)
                made = self.convert(layer, loaded)
                loaded.clear()
                self.derive(layer, made)
                for name, tensor in self.stored(layer, made):
                    set_parameter(layer, name, tensor)
            self.finish_biases(layer)
        else:
            self.derive(layer, layer._parameters)
        staging.done()
        self.moved(layer)

    def expect_together(self, layer: Any, loaded: dict[str, Tensor]) -> None:
        """A second load brings all that the first one did."""
        missing = [n for n in layer.loading.forms if n not in loaded and not self.may_stay(n)]
        if missing:
            names = ", ".join(sorted(loaded))
            raise ValueError(f"{name_of(layer)}.{missing[0]}: missing, expected it to be loaded again with {names}")

    def may_stay(self, name: str) -> bool:
        """May a second load do without this parameter?"""
        return False

    @abstractmethod
    def convert(self, layer: Any, loaded: dict[str, Tensor]) -> dict[str, Tensor | None]:
        """Parameters by name in the form that `apply` runs with, None for those that go; all checks come first."""

    def stored(self, layer: Any, made: dict[str, Tensor | None]) -> Iterator[tuple[str, Tensor | None]]:
        """What `convert` gave, in the order in which it is stored; a last change of layout costs one tensor at a
        time."""
        yield from made.items()


def parts_of(sizes: Sizes, matrix: str) -> dict[str, range]:
    """What checkpoints have as tensors of their own, and the rows of a stacked matrix that they fill."""
    rows = sizes.rows(matrix)
    if matrix == "w2":
        return {f"expert {e} w2": range(e * rows, (e + 1) * rows) for e in range(sizes.experts)}
    made = {}
    for e in range(sizes.experts):
        for i, name in enumerate(("w1", "w3")[: sizes.shards]):
            start = e * rows + (i if sizes.interleaved else i * sizes.inter)
            made[f"expert {e} {name}"] = (
                range(start, (e + 1) * rows, 2) if sizes.interleaved else range(start, start + sizes.inter)
            )
    return made


def add_expert_parameter(layer: Any, name: str, data: Tensor, layout: ExpertLayout, **attributes: Any) -> nn.Parameter:
    """Register a parameter that is loaded by the engine's `weight_loader` if there is one, else by `layout`."""
    load = attributes.pop("weight_loader", None) or WriteExpert(f"{name_of(layer)}.{name}", layout)
    return register(layer, name, data, weight_loader=Loader(layer, name, load), **attributes)


def add_codes(
    method: SerializedMoEMethod, layer: Any, sizes: Sizes, attributes: dict[str, Any], dtype: torch.dtype,
    unit: Unit | None = None, code: int = 0, fill: float = 0, name: str = "weight",
) -> None:  # fmt: skip
    """Register `w13_weight` and `w2_weight` (or another name) of codes, which hold `code` until they are loaded."""
    for matrix in ("w13", "w2"):
        shape = (sizes.experts, sizes.rows(matrix), (unit or Unit()).of(sizes.cols(matrix)))
        raw = torch.uint8 if dtype.itemsize == 1 else dtype
        data = torch.full(shape, code, dtype=raw).view(dtype)
        layout = ExpertMatrix(sizes, matrix, unit or Unit(), fill)
        method.expect(layer, f"{matrix}_{name}", data, layout, attributes)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
