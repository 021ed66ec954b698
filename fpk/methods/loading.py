"""How tensors of a checkpoint reach a layer, the first time and again.

Every parameter has a `weight_loader`, a `Loader`. What it does with a tensor is up to the layer's `loading`:

* `Loading` writes it into the parameter.
* `Streaming` (online methods, whose weights are registered on the meta device) holds it back until the layer has all
  of its elements, then makes the weight, quantizes it and lets it go: a model never needs more memory than it has
  quantized plus one layer.
* `Staging` (serialized methods) writes into the parameter; once that is processed, into a copy of its form on disk.

Loading a second time ends in the storages of the first, so captured CUDA graphs stay valid.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fpk.formats import E8M0
from fpk.methods.parameter import Layout, ShardId, adopt, attributes_of, name_of

_pre_processed: ContextVar[bool] = ContextVar("fpk_pre_processed_weights", default=False)


@contextlib.contextmanager
def pre_processed_weights() -> Iterator[None]:
    """Inside the block, tensors come in the form that layers run with (another process has processed them).

    `process_weights_after_loading` then leaves them as they are and restores only what is not a tensor. A method that
    has no such form raises RuntimeError.
    """
    token = _pre_processed.set(True)
    try:
        yield
    finally:
        _pre_processed.reset(token)


def are_pre_processed() -> bool:
    return _pre_processed.get()


class WriteLayout:
    """The loader of fpk's own layers: `load(param, loaded_weight, shard_id=None)` by the parameter's layout."""

    def __init__(self, what: str, layout: Layout) -> None:
        self.what, self.layout = what, layout

    def __call__(self, param: Tensor, loaded_weight: Tensor, shard_id: ShardId = None) -> None:
        self.layout.write(self.what, param.data, loaded_weight, shard_id)


class Loader:
    """`param.weight_loader`: takes what the engine's loader takes, the parameter and a checkpoint's tensor first.

    It survives processing, and deepcopy and pickling of the layer, which it holds weakly.
    """

    def __init__(self, layer: nn.Module, name: str, load: Callable[..., Any]) -> None:
        self._layer: weakref.ref[nn.Module] | None = weakref.ref(layer)
        self.name, self.load = name, load

    def __call__(self, param: Tensor, loaded_weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        """What the layer's own loader returns: False from one of experts means that the tensor was not taken."""
        layer = self._layer() if self._layer is not None else None
        if layer is None:
            raise RuntimeError(f"{self.name}: the layer this parameter belonged to is gone")
        with torch.no_grad():
            return layer.loading.receive(layer, self, loaded_weight, args, kwargs)  # type: ignore[union-attr, operator]

    def run(self, layer: nn.Module, param: Tensor, loaded: Tensor, args: Any, kwargs: Any) -> Any:
        """Write into `param`, which stands for the layer's parameter."""
        if getattr(self.load, "takes_layer", False):
            return self.load(layer, param, loaded, *args, **kwargs)
        return self.load(param, loaded, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {"layer": self._layer() if self._layer is not None else None, "name": self.name, "load": self.load}

    def __setstate__(self, state: dict[str, Any]) -> None:
        layer = state["layer"]
        self._layer = weakref.ref(layer) if layer is not None else None
        self.name, self.load = state["name"], state["load"]


class Loading:
    """Writes tensors into the layer's parameters as they come."""

    def receive(self, layer: nn.Module, loader: Loader, loaded: Tensor, args: Any, kwargs: Any) -> Any:
        param = layer._parameters[loader.name]
        assert param is not None
        return loader.run(layer, param, loaded, args, kwargs)

    def moved(self, device: torch.device) -> None:
        """The layer's parameters have moved to `device`."""


class StreamingMethod(Protocol):
    def weights_arrived(self, layer: nn.Module, weights: dict[str, Tensor]) -> None: ...


class Streaming(Loading):
    """Holds tensors back until all elements of the layer's meta parameters are there, then hands them to the method.

    What a tensor will fill is found out by letting its loader run on the meta parameter, which also raises the
    loader's errors at once.
    """

    def __init__(self, method: StreamingMethod, device: torch.device) -> None:
        self.method, self.device = method, device
        self.templates: dict[str, nn.Parameter] = {}
        self.pending: list[tuple[Loader, Tensor, Any, Any]] = []
        self.filled: dict[str, dict[Any, int]] = {}

    def expect(self, name: str, template: nn.Parameter) -> None:
        """Stream the parameter `name`; `template` has its shape, dtype and attributes on the meta device."""
        self.templates[name] = template

    def receive(self, layer: nn.Module, loader: Loader, loaded: Tensor, args: Any, kwargs: Any) -> Any:
        if loader.name not in self.templates:
            return super().receive(layer, loader, loaded, args, kwargs)
        with _Writes() as writes:
            taken = loader.run(layer, self.templates[loader.name], loaded, args, kwargs)
        if not writes.regions:
            return taken  # a shard without rows
        self.filled.setdefault(loader.name, {}).update(writes.regions)
        self.pending.append((loader, loaded, args, kwargs))
        if not self.missing():
            self.finish(layer)
        return taken

    def missing(self) -> dict[str, int]:
        """Elements that have not come yet, by parameter."""
        counts = {n: t.numel() - sum(self.filled.get(n, {}).values()) for n, t in self.templates.items()}
        return {n: c for n, c in counts.items() if c > 0}

    def expect_complete(self, layer: nn.Module) -> None:
        """Raise ValueError if some elements came and others did not."""
        for name, count in self.missing().items():
            total = self.templates[name].numel()
            raise ValueError(f"{name_of(layer)}.{name}: expected {total} elements to be loaded, got {total - count}")

    def finish(self, layer: nn.Module) -> None:
        """Make the weights from what has come and quantize them. Nothing else holds them: the method lets each go."""
        weights: dict[str, Tensor] = {}
        self.filled.clear()
        pending, self.pending = self.pending, []
        for name, template in self.templates.items():
            data = torch.empty(template.shape, dtype=template.dtype, device=self.device)
            weight = nn.Parameter(data, requires_grad=False)
            weight.__dict__.update(attributes_of(template))
            for _ in range(len(pending)):
                loader, loaded, args, kwargs = pending.pop(0)  # let each tensor go as soon as it is copied
                if loader.name == name:
                    loader.run(layer, weight, loaded, args, kwargs)
                else:
                    pending.append((loader, loaded, args, kwargs))
                del loaded
            weights[name] = data
            del weight, data
        self.method.weights_arrived(layer, weights)

    def moved(self, device: torch.device) -> None:
        self.device = device


def load_dummy_weights(module: nn.Module, bound: float = 1e-3, seed: int = 0) -> int:
    """Give every online layer of a model random weights, so that it can be timed or traced without a checkpoint.

    Args:
        module: the model; layers that have their weights are left alone.
        bound: weights are uniform in +-bound.
        seed: of the random numbers, the same for every layer.

    Returns:
        the number of layers that were filled.
    """
    count = 0
    for layer in module.modules():
        loading = getattr(layer, "loading", None)
        if not isinstance(loading, Streaming) or not any(getattr(layer, n).is_meta for n in loading.templates):
            continue
        weights = {}
        for name, template in loading.templates.items():
            generator = torch.Generator(loading.device).manual_seed(seed)
            data = torch.empty(template.shape, dtype=template.dtype, device=loading.device)
            weights[name] = data.uniform_(-bound, bound, generator=generator)
        loading.pending.clear()
        loading.filled.clear()
        loading.method.weights_arrived(layer, weights)
        count += 1
    return count


class _Writes(TorchDispatchMode):
    """Records which regions are copied into or filled: of meta tensors, or of the tensor `of`."""

    def __init__(self, of: Tensor | None = None) -> None:
        super().__init__()
        self.of = None if of is None else of.untyped_storage().data_ptr()
        self.regions: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in ("aten::copy_", "aten::fill_") and args[0].numel():
            target = args[0]
            if target.is_meta if self.of is None else target.untyped_storage().data_ptr() == self.of:
                self.regions[(target.storage_offset(), target.shape, target.stride())] = target.numel()
        return func(*args, **(kwargs or {}))


class Staging(Loading):
    """Writes into parameters until they are processed; after that into their form on disk, to be processed again.

    Codes go straight into the live storage where they lie there as on disk, all else into new tensors. Which rows of
    the codes were written is noted: a shard that was left out would keep the codes that it has.
    """

    def __init__(self) -> None:
        self.processed = False
        self.forms: dict[str, tuple[torch.Size, torch.dtype, float | None]] = {}
        self.staged: dict[str, nn.Parameter] = {}
        self.parts: dict[str, dict[str, range]] = {}
        self.touched: dict[str, list[range]] = {}

    def expect(
        self, name: str, parameter: nn.Parameter, fill: float | None, parts: dict[str, range] | None = None
    ) -> None:
        """Parameter `name` has this form on disk; `fill` is what it holds before loading, None for codes.

        Args:
            parts: of codes, what the checkpoint may have as a tensor of its own, and the rows that this fills.
        """
        self.forms[name] = (parameter.shape, parameter.dtype, fill)
        if parts:
            self.parts[name] = parts

    def receive(self, layer: nn.Module, loader: Loader, loaded: Tensor, args: Any, kwargs: Any) -> Any:
        if loader.name not in self.forms:
            return super().receive(layer, loader, loaded, args, kwargs)
        param = self._stage(layer, loader.name) if self.processed else layer._parameters[loader.name]
        assert param is not None
        if loader.name not in self.parts or not param.numel():
            return loader.run(layer, param, loaded, args, kwargs)
        with _Writes(param) as writes:
            taken = loader.run(layer, param, loaded, args, kwargs)
        self.touched.setdefault(loader.name, []).extend(_rows(param, region) for region in writes.regions)
        return taken

    def expect_whole(self, layer: nn.Module) -> None:
        """Raise ValueError if some parts of a parameter's codes were loaded and others were not."""
        for name, touched in self.touched.items():
            parts = {label: rows for label, rows in self.parts[name].items() if rows}
            missing = [label for label, rows in parts.items() if not any(_overlap(rows, t) for t in touched)]
            if missing:
                raise ValueError(
                    f"{name_of(layer)}.{name}: expected one for each of {len(parts)} shards, shards "
                    f"[{', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''}] were never loaded"
                )

    def loaded(self, layer: nn.Module) -> dict[str, Tensor]:
        """What has been loaded since `done`, in its form on disk; empty if nothing."""
        parameters = self.staged if self.processed else layer._parameters
        return {n: p.data for n, p in parameters.items() if n in self.forms and p is not None}

    def is_processed(self, state: dict[str, Tensor]) -> bool:
        """Is this the state of a processed layer, and this one is not? Only where the form on disk is another."""
        if self.processed or not any(n in state for n in self.parts):
            return False
        forms = {n: (s, d) for n, (s, d, _) in self.forms.items()}
        return any(n not in state or (state[n].shape, state[n].dtype) != form for n, form in forms.items())

    def adopt(self, layer: nn.Module, state: dict[str, Tensor]) -> None:
        """Make room for a processed layer's parameters; those that processing has deleted go."""
        device = next(layer._parameters[n].device for n in self.parts)  # type: ignore[union-attr]
        for name in self.forms.keys() - state.keys():
            layer.register_parameter(name, None)
        adopt(layer, {n: v for n, v in state.items() if n in self.forms}, device)
        self.done()

    def done(self) -> None:
        """What has been loaded is processed."""
        self.processed = True
        self.staged.clear()
        self.touched.clear()

    def _stage(self, layer: nn.Module, name: str) -> nn.Parameter:
        if name not in self.staged:
            live = layer._parameters[name]
            assert live is not None
            shape, dtype, fill = self.forms[name]
            if fill is None and live.nbytes == shape.numel() * dtype.itemsize:
                data = live.data.view(dtype)
            elif fill is None:  # the live codes have scales between them
                data = torch.zeros(shape, dtype=torch.uint8, device=live.device).view(dtype)
            elif dtype.itemsize == 1:
                byte = E8M0.nan_code if fill != fill else int(fill)  # NaN of one's own format
                data = torch.full(shape, byte, dtype=torch.uint8, device=live.device).view(dtype)
            else:
                data = torch.full(shape, fill, dtype=dtype, device=live.device)
            self.staged[name] = nn.Parameter(data, requires_grad=False)
            self.staged[name].__dict__.update(attributes_of(live))
        return self.staged[name]


def _rows(param: Tensor, region: tuple[int, torch.Size, tuple[int, ...]]) -> range:
    """Rows of a contiguous parameter, its leading dimensions taken together, that a region of its storage lies in."""
    offset, shape, stride = region
    width = param.shape[-1] if param.dim() > 1 else 1
    first = offset - param.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    step = stride[-2] // width if len(shape) > 1 and shape[-2] > 1 else 1
    return range(first // width, last // width + 1, max(1, step))


def _overlap(a: range, b: range) -> bool:
    if a.start >= b.stop or b.start >= a.stop:
        return False
    return not (a.step == b.step > 1) or (a.start - b.start) % a.step == 0
