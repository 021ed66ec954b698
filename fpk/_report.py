"""What `quantize_` tells its caller: a report that prints in a terminal and in a notebook."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_COLUMNS = ("layer", "status", "scheme", "shape", "bytes_before", "bytes_after", "reason")


@dataclass(frozen=True)
class LayerReport:
    """One layer: what became of it. `reason` says why it was left alone, and is empty if it was not."""

    name: str
    shape: tuple[int, ...]
    scheme: str
    bytes_before: int
    bytes_after: int
    reason: str = ""


@dataclass
class QuantizeReport:
    """What `quantize_` did. Prints as a table; `to_frame()` gives a DataFrame.

    `bytes_before` and `bytes_after` count all parameters and buffers of the model; `unmatched` holds the ignore
    patterns that matched no module.
    """

    scheme: str
    changed: list[LayerReport] = field(default_factory=list)
    skipped: list[LayerReport] = field(default_factory=list)
    unmatched: list[str] = field(default_factory=list)
    bytes_before: int = 0
    bytes_after: int = 0

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row per layer: layer, status, scheme, shape, bytes_before, bytes_after, reason."""
        import pandas

        return pandas.DataFrame(self._rows(), columns=list(_COLUMNS))

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.scheme}: layers quantized {len(self.changed)}, left alone {len(self.skipped)}; "
            f"{_bytes(self.bytes_before)} before, {_bytes(self.bytes_after)} after"
        )

    def __str__(self) -> str:
        rows = [tuple(map(str, row)) for row in self._rows()]
        widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [_COLUMNS, *rows]]
        return "\n".join([self.summary(), *lines, *self._complaints()])

    def _repr_html_(self) -> str:
        def row(cells: Sequence[object], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

        body = "".join(row(r, "td") for r in self._rows())
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._complaints())
        return f"<p>{html.escape(self.summary())}</p><table>{row(_COLUMNS, 'th')}{body}</table>{notes}"

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            (r.name, status, r.scheme, "x".join(map(str, r.shape)), r.bytes_before, r.bytes_after, r.reason)
            for status, rows in (("quantized", self.changed), ("skipped", self.skipped))
            for r in rows
        ]

    def _complaints(self) -> list[str]:
        return [f"ignore pattern {p!r} matches no module" for p in self.unmatched]


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
