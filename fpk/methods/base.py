"""Holders (layers that carry parameters) and the three verbs of a linear method.

An inference engine asks its quantization config for a method per layer, lets it create the layer's parameters, fills
them through each parameter's `weight_loader`, lets the method process them, and calls `apply`. Methods know nothing of
the engine: any `nn.Module` with the fields of `Linear` will do as a layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fpk.check import FLOAT_INPUTS, expect_dtype, expect_one_of
from fpk.methods.holders import Attention, Holder, RoutedExperts
from fpk.methods.loading import Loader, Loading, WriteLayout, are_pre_processed
from fpk.methods.parallel import is_row_sharded
from fpk.methods.parameter import Cut, Layout, Weight, cut_of, name_of, register

__all__ = [
    "Attention",
    "Holder",
    "Linear",
    "LinearMethod",
    "QuantizedLinearMethod",
    "RoutedExperts",
    "UnquantizedLinearMethod",
]

ACTIVATIONS = (torch.bfloat16, torch.float16)


class Linear(Holder):
    """A linear layer, or this rank's part of one.

    Args:
        input_size: K of the whole layer.
        output_size: N of the whole layer; a list for fused layers, one entry per logical shard (q, k, v; gate, up).
        bias: whether it has one.
        quant_config: asked for the method; or
        quant_method: the method itself. Neither: unquantized.
        split: what the ranks share: None, "column" (the output, each shard by itself) or "row" (the input; the caller
            sums the ranks' outputs).
        tp_size, tp_rank, tp_group: number of ranks, this one, and the torch.distributed group (None: the default one).
        num_kv_head_replicas: ranks that hold the same key and value heads; for shards 1 and 2 of 3.
        params_dtype: of the unquantized weight and the bias.
        weight_loader: instead of fpk's own `(param, loaded_weight, shard_id=None)`.
        prefix: the layer's name in its model.

    Raises:
        ValueError: a size that the ranks do not divide, or an argument out of its set.
    """

    bias: nn.Parameter | None
    cut: Cut

    def __init__(
        self,
        input_size: int,
        output_size: int | Sequence[int],
        bias: bool = False,
        *,
        quant_config: Any = None,
        quant_method: "LinearMethod | None" = None,
        split: str | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        tp_group: Any = None,
        num_kv_head_replicas: int = 1,
        params_dtype: torch.dtype = torch.bfloat16,
        weight_loader: Callable[..., Any] | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        what = prefix or "Linear"
        expect_one_of(f"{what}.split", split, (None, "column", "row"))
        if not 0 <= tp_rank < tp_size:
            raise ValueError(f"{what}.tp_rank: expected 0..{tp_size - 1}, got {tp_rank}")
        full = [output_size] if isinstance(output_size, int) else list(output_size)
        parts = [1] * len(full)
        if split == "column":
            shared = [num_kv_head_replicas if len(full) == 3 and i > 0 else 1 for i in range(len(full))]
            parts = [_divide(f"{what}.num_kv_head_replicas", tp_size, s) for s in shared]
        self.input_size, self.output_size = input_size, sum(full)
        self.input_size_per_partition = _divide(f"{what}.input_size", input_size, tp_size if split == "row" else 1)
        self.output_partition_sizes = [_divide(f"{what}.output_size", w, p) for w, p in zip(full, parts, strict=True)]
        self.tp_size, self.tp_rank, self.tp_group = tp_size, tp_rank, tp_group
        self.num_kv_head_replicas = num_kv_head_replicas
        self.prefix = prefix
        self.params_dtype = params_dtype
        if quant_method is None and quant_config is not None:
            quant_method = quant_config.get_quant_method(self, prefix)
        self.quant_method: LinearMethod = quant_method or UnquantizedLinearMethod()
        attributes = {} if weight_loader is None else {"weight_loader": weight_loader}
        self.quant_method.create_weights(
            self, self.input_size_per_partition, self.output_partition_sizes, input_size, self.output_size,
            params_dtype, **attributes,
        )  # fmt: skip
        self.register_parameter("bias", None)
        if bias:
            data = torch.zeros(sum(self.output_partition_sizes), dtype=params_dtype)
            add_parameter(self, "bias", data, Weight(self.cut), output_dim=0, **attributes)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., K) bf16 or fp16 to (..., N) of the same dtype; a partial sum if the ranks share the input."""
        first = self.tp_rank == 0 or not is_row_sharded(self)  # a sum of ranks has the bias once
        return self.quant_method.apply(self, x, self.bias if first else None)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """This rank's weight (N, K) as the layer multiplies by it."""
        return self.quant_method.dequantize(self, dtype)

    def extra_repr(self) -> str:
        shapes = [
            f"{n}={str(p.dtype).removeprefix('torch.')}{list(p.shape)}"
            for n, p in self._parameters.items()
            if p is not None
        ]
        rank = [f"rank={self.tp_rank}/{self.tp_size}"] if self.tp_size > 1 else []
        return ", ".join([f"K={self.input_size}, N={self.output_size}", self.quant_method.scheme(self), *shapes, *rank])


class LinearMethod(ABC):
    """How a linear layer holds its weights and multiplies by them."""

    uses_meta_device = False
    supports_pre_processed_weights = True

    @abstractmethod
    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the layer's parameters, each with a `weight_loader`, in the form that checkpoints have.

        Args:
            layer: the holder.
            input_size_per_partition: K of this rank.
            output_partition_sizes: rows of each logical shard on this rank; their sum is N.
            input_size, output_size: of the whole layer.
            params_dtype: of the weight before quantization, and the model's.
            extra_weight_attrs: attributes of every parameter; `weight_loader(param, loaded_weight, ...)` among them,
                else fpk's own is used.

        Raises:
            ValueError: sizes, dtype or device that the method cannot serve.
        """

    @abstractmethod
    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Bring loaded parameters into the form that `apply` runs with; a second call does nothing.

        Raises:
            ValueError: a parameter is missing or its values are not valid; names it.
        """

    @abstractmethod
    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply: x (..., K) bf16 or fp16 to (..., N) in x's dtype.

        Raises:
            ValueError: x has another dtype or K.
        """

    @abstractmethod
    def dequantize(self, layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K) of this rank, as `apply` multiplies by it."""

    def scheme(self, layer: nn.Module) -> str:
        """Formats and granularities as "weights:activations"."""
        return "unquantized"

    def moved(self, layer: nn.Module) -> None:  # noqa: B027  most methods need not know
        """The layer's parameters may be on another device now."""

    def is_processed(self, layer: nn.Module, state: dict[str, Tensor]) -> bool:
        """Are these parameters processed, and the layer's are not?"""
        return False

    def adopt(self, layer: nn.Module, state: dict[str, Tensor]) -> None:  # noqa: B027  as is_processed
        """Make room for processed parameters of these shapes and dtypes, and take the layer for processed."""

    def leave_pre_processed(self, layer: nn.Module) -> bool:
        """Are weights to be left as they are? Raises RuntimeError for a method that cannot."""
        if are_pre_processed() and not self.supports_pre_processed_weights:
            raise RuntimeError(f"{type(self).__name__} ({name_of(layer)}): does not take pre-processed weights")
        return are_pre_processed()


class UnquantizedLinearMethod(LinearMethod):
    """Weights as they are, in params_dtype."""

    def create_weights(
        self, layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
        **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        cut = store_sizes(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype
        )
        layer.loading = Loading()
        data = torch.empty(cut.N, cut.K, dtype=params_dtype)
        add_parameter(layer, "weight", data, Weight(cut), input_dim=1, output_dim=0, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Nothing to do."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight, bias)  # type: ignore[arg-type]

    def dequantize(self, layer: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
        return layer.weight.to(dtype)  # type: ignore[operator, union-attr, return-value]


class QuantizedLinearMethod(LinearMethod):
    """What quantized methods share: `apply` checks and flattens x, `multiply` does the rest.

    Attributes:
        fast_accum: let FP8 products stay in the tensor core's own accumulator, see `scaled_mm`; set it on the method.
    """

    fast_accum = False

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if x.dtype not in ACTIVATIONS or x.dim() == 0 or x.shape[-1] != layer.input_size_per_partition:
            self._refuse(layer, x)
        out = self.multiply(layer, x.reshape(-1, x.shape[-1]), bias)
        return out.view(*x.shape[:-1], out.shape[-1])

    @abstractmethod
    def multiply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x (M, K) times the layer's weight, (M, N) in x's dtype."""

    def _refuse(self, layer: Any, x: Tensor) -> None:
        expect_dtype(f"{name_of(layer)}.x", x, *ACTIVATIONS)
        raise ValueError(f"{name_of(layer)}.x: expected (..., {layer.input_size_per_partition}), got {tuple(x.shape)}")


def store_sizes(
    layer: Any, K: int, widths: list[int], input_size: int, output_size: int, params_dtype: torch.dtype
) -> Cut:
    """Check and keep on the layer what `create_weights` was told; the cut of its weight."""
    what = name_of(layer)
    expect_one_of(f"{what}.params_dtype", params_dtype, FLOAT_INPUTS)
    if not widths or min(widths) < 0:
        raise ValueError(f"{what}.output_partition_sizes: expected widths of logical shards, got {widths}")
    if K <= 0:
        raise ValueError(f"{what}.input_size_per_partition: expected at least 1, got {K}")
    for name, value in dict(
        tp_size=1, tp_rank=0, prefix="", input_size=input_size, output_size=output_size,
        output_partition_sizes=list(widths),
    ).items():  # fmt: skip
        if not hasattr(layer, name):
            setattr(layer, name, value)
    layer.logical_widths = list(widths)
    layer.input_size_per_partition = K
    layer.output_size_per_partition = sum(widths)
    layer.orig_dtype = params_dtype
    layer.weight_block_size = None
    layer.cut = cut_of(layer, list(widths), K, output_size, input_size)
    return layer.cut


def add_parameter(layer: Any, name: str, data: Tensor, layout: Layout, **attributes: Any) -> nn.Parameter:
    """Register a parameter that is loaded by the engine's `weight_loader` if there is one, else by `layout`."""
    load = attributes.pop("weight_loader", None) or WriteLayout(f"{name_of(layer)}.{name}", layout)
    return register(layer, name, data, weight_loader=Loader(layer, name, load), **attributes)


def _divide(what: str, size: int, parts: int) -> int:
    if size % parts:
        raise ValueError(f"{what}: expected a multiple of {parts} ranks, got {size}")
    return size // parts
