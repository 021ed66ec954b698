"""Experts of a checkpoint into the modules that transformers models have for them."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fpk._experts import QuantizedExperts
from fpk._experts_layout import MATRICES, expert_layout
from fpk.methods._dense import Found
from fpk.methods._families import LayerSpec
from fpk.methods._stored_experts import StoredExperts, renamed, take_experts, take_plain_experts
from fpk.methods.checkpoint import FLOATS, Checkpoint, StoredTensor


class ExpertsPlan:
    """Which stored experts go into which module.

    Args:
        modules: the model's experts, by name.
        found: what the checkpoint holds; loses the tensors of these experts.
        spec: the config's word on a layer.
        source: the checkpoint.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], found: Found, spec: Callable[[str], LayerSpec | None],
        source: Checkpoint,
    ) -> None:  # fmt: skip
        self.modules, self.source = modules, source
        self.quantized: dict[str, StoredExperts] = {
            self._place(n): e for n, e in take_experts(found, spec, self._has).items()
        }
        self.unquantized: dict[str, dict[tuple[int, str], StoredTensor]] = {
            self._place(n): e for n, e in take_plain_experts(found, self._has).items()
        }

    @staticmethod
    def takes(module: nn.Module) -> bool:
        return isinstance(module, QuantizedExperts) or expert_layout(module) is not None

    def _place(self, name: str) -> str:
        return name if name in self.modules else renamed(name)

    def _has(self, name: str) -> bool:
        return self._place(name) in self.modules

    def state(self) -> set[str]:
        """Names in the model's state that these experts fill."""
        parts = ("", "_scale", "_global_scale", "_zero_point", "_input_scale")
        names = {f"{m}.{key}{p}" for m in self.quantized for key in MATRICES for p in parts}
        names |= {f"{m}.{key}" for m in self.unquantized for key in MATRICES}
        return names | {f"{m}.{role}_proj_bias" for m, stored in self.quantized.items() for role in stored.biases}

    def sizes(self, name: str) -> tuple[int, int, int]:
        """E, H, I of a module."""
        module: Any = self.modules[name]
        if isinstance(module, QuantizedExperts):
            experts, hidden, inter = cast(torch.Size, module.weight("down_proj").shape)
            return experts, hidden, inter
        layout, (experts, rows, cols) = expert_layout(module), module.down_proj.shape
        assert layout is not None
        return (experts, cols, rows) if layout["transposed"] else (experts, rows, cols)

    def check(self) -> None:
        """Raise for everything that headers and scales can tell."""
        for name, stored in self.quantized.items():
            experts, hidden, inter = self.sizes(name)
            stored.check(self.source, experts, hidden, inter)
            for role, bias in stored.biases.items():
                wanted = (experts, 2 * inter if role == "gate_up" else hidden)
                if bias.shape != wanted or bias.dtype not in FLOATS:
                    raise ValueError(f"{bias}: expected {wanted} floats, got {bias.dtype} {bias.shape}")
        for name, tensors in self.unquantized.items():
            experts, hidden, inter = self.sizes(name)
            if name in self.quantized or isinstance(self.modules[name], QuantizedExperts):
                first = next(iter(tensors.values()))
                raise ValueError(f"{first}: expected quantized weights as its neighbours, got {first.dtype}")
            shapes = {"gate": (inter, hidden), "up": (inter, hidden), "down": (hidden, inter)}
            missing = [f"expert {e} {r}" for e in range(experts) for r in shapes if (e, r) not in tensors]
            if missing or len(tensors) != 3 * experts:
                raise ValueError(f"{name}: expected {experts} experts, missing {', '.join(missing[:8]) or 'none'}")
            for (_, role), stored_one in tensors.items():
                if stored_one.shape != shapes[role] or stored_one.dtype not in FLOATS:
                    raise ValueError(f"{stored_one}: expected {shapes[role]} floats, got {stored_one.dtype} "
                                     f"{stored_one.shape}")  # fmt: skip

    def build(self, name: str, device: torch.device) -> QuantizedExperts:
        """The layer for a module's place."""
        module, stored = self.modules[name], self.quantized[name]
        options = module.options if isinstance(module, QuantizedExperts) else (expert_layout(module) or {})["options"]
        read = stored.read(self.source, device, bool(options.get("interleaved")))
        bias13, bias2 = (self._bias(module, stored, role, device) for role in ("gate_up", "down"))
        return QuantizedExperts(
            read.gate_up, read.down, read.activation, bias13, bias2, read.input_scale13, read.input_scale2, **options
        ).train(module.training)

    def _bias(self, module: nn.Module, stored: StoredExperts, role: str, device: torch.device) -> Tensor | None:
        own: Any = module._parameters.get(f"{role}_proj_bias", module._buffers.get(f"{role}_proj_bias"))
        if role not in stored.biases:
            return own
        read = self.source.read(stored.biases[role].name)
        return read.to(device, read.dtype if own is None else own.dtype, copy=True)

    def plain(self, places: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """Stacks of unquantized experts, by the name of the parameter that they fill."""
        made: dict[str, Tensor] = {}
        for name, tensors in self.unquantized.items():
            layout = expert_layout(self.modules[name])
            assert layout is not None
            for key, roles in zip(MATRICES, (("gate", "up"), ("down",)), strict=True):
                place = places[f"{name}.{key}"]
                count = place.shape[0]
                stack = torch.stack(
                    [torch.cat([self.source.read(tensors[(e, r)].name) for r in roles]) for e in range(count)]
                )
                made[f"{name}.{key}"] = stack.to(device if place.is_meta else "cpu", place.dtype)
        return made
