"""What a row measured at one shape says about another: its time, scaled by the work a multiprocessor does.

A product's time at a shape is mostly waves x steps: how often the tiles fill all multiprocessors, times the steps along
K that each tile takes. Between two shapes the same config changes by the ratio of these; what a launch costs, and the
partial sums of a split K, stay outside the ratio. So of several neighbours' winners that one is taken whose tiles fit
the new shape, instead of the one whose shape is closest.
"""

from typing import Any

from fpk._db_table import Row

# microseconds that do not grow with the work: launch, fill of the pipeline
LAUNCH_US = 2.0
# a split K writes and reads fp32 partial sums, 8 bytes per output and part, at a few TB/s
SPLIT_US_PER_OUTPUT = 8 / 4.2e6
# of rows from farther shapes the estimate is worse: so many percent a factor of two (see `Table.nearest` for distances)
DOUBT = 0.02

_OTHER = ("T", "R", "E", "H", "I", "top_k")


class Scaled:
    """A product's row taken apart: what stays of its time at another shape, and what grows with the work.

    `Scaled.of` gives None for a row whose work cannot be told: not a product of M, N and K, or a damaged one (tables
    are text from anywhere).
    """

    __slots__ = ("block_k", "block_m", "block_n", "moving", "name", "row", "split")

    def __init__(self, row: Row, tile: tuple[int, int, int, int], shape: tuple[int, int, int], sm_count: int) -> None:
        self.row, self.name = row, frozenset(row.config.items())
        self.block_m, self.block_n, self.block_k, self.split = tile
        self.moving = 0.0
        fixed = self.expected_us(*shape, sm_count)
        self.moving = 1.0
        self.moving = max(row.us - fixed, row.us / 4) / max(self.expected_us(*shape, sm_count) - fixed, 1.0)

    @classmethod
    def of(cls, row: Row, sm_count: int) -> "Scaled | None":
        key, config = row.key, row.config
        block_m, block_n = _count(config.get("BLOCK_M")), _count(config.get("BLOCK_N"))
        block_k, split = _count(config.get("BLOCK_K", 1)), _count(config.get("SPLIT_K", 1))
        m, n, k = _count(key.get("M")), _count(key.get("N")), _count(key.get("K"))
        if not (block_m and block_n and block_k and split and m and n and k and sm_count > 0 and row.us > 0):
            return None
        if any(name in key for name in _OTHER):
            return None
        return cls(row, (block_m, block_n, block_k, split), (m, n, k), sm_count)

    def expected_us(self, m: int, n: int, k: int, sm_count: int) -> float:
        """Expected microseconds at M, N, K on so many multiprocessors."""
        split = self.split
        tiles = -(-m // self.block_m) * -(-n // self.block_n) * split
        us = LAUNCH_US + self.moving * -(-tiles // sm_count) * max(-(-k // self.block_k) / split, 1.0)
        return us + split * m * n * SPLIT_US_PER_OUTPUT if split > 1 else us


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 0
