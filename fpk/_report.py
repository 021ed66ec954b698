"""What `quantize_` and `calibrate` tell: reports that print as tables, in a terminal and in a notebook."""

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
        return frame(_COLUMNS, self._rows())

    def summary(self) -> str:
        """One line."""
        return (
            f"{self.scheme}: layers quantized {len(self.changed)}, left alone {len(self.skipped)}; "
            f"{_bytes(self.bytes_before)} before, {_bytes(self.bytes_after)} after"
        )

    def __str__(self) -> str:
        return "\n".join([self.summary(), *text_table(_COLUMNS, self._rows()), *self._complaints()])

    def _repr_html_(self) -> str:
        notes = "".join(f"<p>{html.escape(line)}</p>" for line in self._complaints())
        return html_table(self.summary(), _COLUMNS, self._rows()) + notes

    def _rows(self) -> list[tuple[object, ...]]:
        return [
            (r.name, status, r.scheme, "x".join(map(str, r.shape)), r.bytes_before, r.bytes_after, r.reason)
            for status, rows in (("quantized", self.changed), ("skipped", self.skipped))
            for r in rows
        ]

    def _complaints(self) -> list[str]:
        return [f"ignore pattern {p!r} matches no module" for p in self.unmatched]


def frame(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Any:
    """A pandas DataFrame; pandas is needed by nothing else here."""
    import pandas

    return pandas.DataFrame(rows, columns=list(columns))


def text_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Lines of a table, the headings first."""
    cells = [tuple(columns), *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]


def html_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A paragraph and a table below it."""

    def row(cells: Sequence[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(c))}</{tag}>" for c in cells) + "</tr>"

    body = "".join(row(r, "td") for r in rows)
    return f"<p>{html.escape(title)}</p><table>{row(columns, 'th')}{body}</table>"


def _bytes(count: int) -> str:
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
