"""What calibration found: the range of each layer's activations, to print, keep in a file and check against a model."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fpk._report import frame, html_table, text_table

_COLUMNS = ("layer", "input_amax", "tokens", "shape")
_KEY, _AMAX = "fpk.calibration", ".input_amax"


@dataclass(frozen=True)
class LayerRange:
    """A layer's activations: the largest finite magnitude, over so many tokens, of a layer of weights (N, K)."""

    amax: float
    tokens: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Calibration:
    """Ranges of activations by the full name of their layer, from `batches` batches. Prints as a table.

    Ranges, not scales: the same calibration serves FP8 and INT8, on every device.
    """

    layers: Mapping[str, LayerRange]
    batches: int

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file: a tensor `<layer>.input_amax` (1,) for each, and the rest as JSON beside them."""
        tensors = {f"{n}{_AMAX}": torch.tensor([r.amax], dtype=torch.float32) for n, r in self.layers.items()}
        rest = {name: {"tokens": r.tokens, "shape": r.shape} for name, r in self.layers.items()}
        save_file(tensors, path, {"format": "pt", _KEY: json.dumps({"batches": self.batches, "layers": rest})})

    @classmethod
    def load(cls, path: str | PathLike[str]) -> "Calibration":
        """Read what `save` wrote.

        Raises:
            ValueError: the file is no calibration, or was damaged.
            OSError: it cannot be read.
        """
        try:
            with safe_open(path, "pt") as file:
                rest = json.loads((file.metadata() or {})[_KEY])
                ranges = {
                    name: LayerRange(float(file.get_tensor(f"{name}{_AMAX}")), layer["tokens"], tuple(layer["shape"]))
                    for name, layer in rest["layers"].items()
                }
                made = cls(ranges, rest["batches"])
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path}: expected a calibration that fpk saved, got another file ({error})") from error
        for name, layer in made.layers.items():
            if not 0 <= layer.amax < math.inf:
                raise ValueError(f"{path}: expected a finite range for {name}, got {layer.amax}")
        return made

    def expect_fits(self, wanted: Iterable[str], present: Mapping[str, tuple[int, ...]]) -> None:
        """Raise ValueError unless this is a calibration of a model.

        Args:
            wanted: names of the layers to quantize: each needs a range.
            present: all linear layers of the model, with the shapes of their weights: ranges may name no other.
        """
        missing = [name for name in wanted if name not in self.layers]
        if missing:
            raise ValueError(f"quantize_.calibration: expected a range for each layer, found none for {few(missing)}")
        unknown = [name for name in self.layers if name not in present]
        if unknown:
            raise ValueError(f"quantize_.calibration: expected layers of this model, got {few(unknown)}")
        for name, layer in self.layers.items():
            if layer.shape != tuple(present[name]):
                raise ValueError(
                    f"quantize_.calibration: expected {name} of weights {tuple(present[name])}, got {layer.shape}"
                )

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row per layer: layer, input_amax, tokens, shape."""
        return frame(_COLUMNS, self._rows())

    def summary(self) -> str:
        """One line."""
        tokens = max((r.tokens for r in self.layers.values()), default=0)
        return f"calibration: {len(self.layers)} layers, batches {self.batches}, up to {tokens} tokens a layer"

    def __str__(self) -> str:
        return "\n".join([self.summary(), *text_table(_COLUMNS, self._rows())])

    def _repr_html_(self) -> str:
        return html_table(self.summary(), _COLUMNS, self._rows())

    def _rows(self) -> list[tuple[object, ...]]:
        return [(name, r.amax, r.tokens, "x".join(map(str, r.shape))) for name, r in self.layers.items()]


def few(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
