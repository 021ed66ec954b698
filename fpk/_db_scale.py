"""What rows measured at some shapes say about another: their time, scaled by the work a multiprocessor does.

A product's time at a shape is mostly waves x steps: how often the tiles fill all multiprocessors, times the steps along
K that each tile takes. Between two shapes the same config changes by the ratio of these; what a launch costs, and the
partial sums of a split K, stay outside the ratio, and nothing runs faster than the table's fastest row moves its
operands. So of the neighbours' configs that one is taken whose tiles fit the new shape, instead of the one whose shape
is closest. The constants were fitted to trials of an H200; docs/database.md says how well, and how much they matter.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fpk._db_table import Row

LAUNCH_US = 4.0  # launch, filling and draining of the pipeline
SPLIT_US_PER_OUTPUT = 16 / 4.2e6  # fp32 partial sums of a split K, written and read, per output and part
SHARING_US = 2.0  # the same where programs take even shares: who comes last adds up
SHARING_US_PER_OUTPUT = 4 / 16384  # of a tile: every program leaves one or two partial sums
STARTING_US = 2.5  # of a further wave, where every tile is a program of its own that fills its pipeline anew
ALONE = 1.3  # waves that a single one counts as where one program leaves a multiprocessor half idle
FULL_RATE = 1.0  # share of the fastest row's elements per microsecond that other shapes reach too
DOUBT = 0.08  # an estimate from a shape twice as large in one size counts as so much slower
LEFT_OVER = 1.1  # multiprocessors that a program of a cluster of four takes
M_LIMIT = 2.0  # rows of a fourth of the tokens, and of four times as many, say nothing of less than 1024
BEATS = 1.02  # a row answers for other shapes if the default took so many times as long at its own
TALL = 4  # tiles of so many times as many rows as there are tokens are passed over

_MANY = 10.0  # logarithm of token counts whose products are bound by arithmetic alone
_MS_HELD = 64  # token counts whose neighbours are kept at hand
_OTHER = ("T", "R", "E", "H", "I", "top_k")


class Tile(NamedTuple):
    """A product's row taken apart; `moving` is microseconds a wave and step, `name` tells equal configs.

    split: parts of K; 0 where programs take even shares of all tiles' steps, whatever the waves. wide: multiprocessors
    that a tile takes. least: waves that there are at least. starting: microseconds of every further wave. fixed: of a
    launch, whatever its size.
    """

    name: frozenset[tuple[str, Any]]
    block_m: int
    block_n: int
    block_k: int
    split: int
    wide: float
    least: float
    moving: float
    starting: float
    fixed: float
    row: Row


def tile(row: Row, sm_count: int) -> Tile | None:
    """None for a row whose work cannot be told: not a product of M, N and K, or damaged (tables are untrusted text)."""
    key, config = row.key, row.config
    m, n, k = _count(key.get("M")), _count(key.get("N")), _count(key.get("K"))
    block_m, block_n = _count(config.get("BLOCK_M")), _count(config.get("BLOCK_N"))
    block_k, parts = _count(config.get("BLOCK_K", 1)), config.get("SPLIT_K", 1)
    rows, turns = _count(config.get("ROWS")), _count(config.get("TURNS"))
    if rows and turns and "BLOCK_N" not in config:  # weight-only products that share their steps: units of 64 x 128
        block_n, block_k, clusters = 64 * rows, 128 * turns, _count(config.get("CLUSTER", 1))
        parts = clusters if clusters != 1 else 0 if config.get("PER_SM") else 1
    elif config.get("kernel") == "joint":  # the programs of a cluster share a tile's K
        parts = config.get("CLUSTER", 1)
    split = _count(parts)
    known = split or (type(parts) is int and parts == 0)
    if not (m and n and k and block_m and block_n and block_k and known and sm_count > 0 and 1e-3 < row.us < 1e9):
        return None
    if any(name in key for name in _OTHER):
        return None
    kernel, wide, least = config.get("kernel"), 1.0, 1.0
    if kernel == "persistent" or (split == 1 and "format" in key):  # several programs a multiprocessor
        least = min(float(_count(config.get("PER_SM")) or 1), ALONE)
    elif kernel in ("ordered", "late"):  # the programs of a cluster have neighbouring tiles of tokens
        wide = _count(config.get("CLUSTER")) or 1
    starting = STARTING_US if kernel in ("joint", "shares") and split else 0.0
    if starting and split >= 4:  # clusters: groups of multiprocessors do not divide by four
        wide = LEFT_OVER
    name = frozenset(of_tokens(config, 1).items())
    fixed = LAUNCH_US if split else LAUNCH_US + SHARING_US + block_m * block_n * SHARING_US_PER_OUTPUT
    one = Tile(name, block_m * max(int(wide), 1), block_n, block_k, split, wide, least, 1.0, starting, fixed, row)
    waves = _waves(one, m, n, sm_count)
    apart = fixed + split_us(split, m * n) + max(waves - 1, 0) * starting
    return one._replace(moving=max(row.us - apart, row.us / 4) / (waves * _steps(one, k)))


def of_tokens(config: dict[str, Any], m: int) -> dict[str, Any]:
    """A weight-only product's config that was measured with another number of tokens, for this one: COLUMNS is how many
    tiles of tokens there are, by which programs divide the steps."""
    if "COLUMNS" not in config or "ROWS" not in config or not (block_m := _count(config.get("BLOCK_M"))):
        return config
    return config | {"COLUMNS": -(-m // block_m)}


def split_us(split: int, outputs: int) -> float:
    return split * outputs * SPLIT_US_PER_OUTPUT if split > 1 else 0.0


def elements(m: int, n: int, k: int) -> int:
    """Elements that a product reads and writes, the 16-bit output as two."""
    return m * k + n * k + 2 * m * n


def full_rate(tiles: Iterable[Tile]) -> float:
    """Elements per microsecond that no row of a table exceeds."""
    rates = []
    for *_, fixed, row in tiles:
        m, n, k = (_count(row.key.get(size)) for size in ("M", "N", "K"))
        rates.append(elements(m, n, k) / max(row.us - fixed, 0.3 * row.us))
    return max(rates, default=0.0)


Near = tuple[float, int, list[Tile], bool]
"""A recorded shape: distance, position, tiles, and whether one of them beat the default there."""


class Products:
    """The recorded shapes of products with equal flags, laid out for being asked about others.

    shapes: (log2 of N, log2 of K, log2 of each M, tiles of each M), M rising.
    """

    def __init__(self, rate: float, shapes: Sequence[tuple[float, float, list[float], list[list[Tile]]]]) -> None:
        self.rate = rate
        self._shapes = shapes
        self._by_m: dict[float, list[tuple[float, float, list[Near]]]] = {}

    def near(self, m: float, n: float, k: float, limit: float, count: int) -> list[Near]:
        """The `count` recorded shapes closest to these logarithms, none beyond `limit`.

        Of each (N, K) the recorded M that is equal or the next larger one, and those on both sides of it, count.
        """
        shapes = self._by_m.get(m)
        if shapes is None:
            shapes = self._around(m)
        found = [
            (base + gap, position, tiles, gains)
            for log_n, log_k, around in shapes
            if (base := abs(log_n - n) + abs(log_k - k)) <= limit
            for gap, position, tiles, gains in around
            if base + gap <= limit
        ]
        found.sort()  # positions are unique: tiles are never compared
        return found[:count]

    def _around(self, m: float) -> list[tuple[float, float, list[Near]]]:
        shapes, position = [], 0
        for log_n, log_k, ms, tiles in self._shapes:
            at, around = bisect_left(ms, m), []
            for i in (at - 1, at, at + 1):
                if 0 <= i < len(ms) and (abs(ms[i] - m) < M_LIMIT or min(ms[i], m) >= _MANY):
                    around.append((abs(ms[i] - m), position, tiles[i], any(beats(t[-1]) for t in tiles[i])))
                    position += 1
            shapes.append((log_n, log_k, around))
        if len(self._by_m) >= _MS_HELD:
            self._by_m.clear()
        self._by_m[m] = shapes
        return shapes


def expected(
    near: Iterable[Near], m: int, n: int, k: int, sm_count: int, rate: float
) -> list[tuple[float, int, float, Row]]:
    """(microseconds at M, N, K, position, distance, row) of each config, the fastest expected first.

    near: recorded shapes, the closest first; a config counts where it is met first.
    """
    floor = FULL_RATE * elements(m, n, k) / rate if rate else 0.0
    per_split = m * n * SPLIT_US_PER_OUTPUT
    too_tall = max(TALL * m, 17)
    seen: set[Any] = set()
    found: list[tuple[float, int, float, Row]] = []
    for distance, _, tiles, _ in near:
        doubt = 1 + DOUBT * distance
        for name, block_m, block_n, block_k, split, wide, least, moving, starting, fixed, row in tiles:
            if block_m >= too_tall or name in seen:
                continue
            seen.add(name)
            # waves times steps; x // -y rounds away from zero
            steps: float = -(k // -block_k)
            if split == 0:
                us = moving * (m // -block_m) * (n // -block_n) * steps / sm_count
                us = (us if us > floor else floor) + fixed
            else:
                waves: float = -((m // -block_m) * (n // -block_n) * split * wide // -sm_count)
                if waves < least:
                    waves = least
                if split > 1:
                    fixed += split * per_split
                    steps = steps / split if steps > split else 1.0
                us = moving * waves * steps
                us = (us if us > floor else floor) + fixed + (waves - 1) * starting
            found.append((us * doubt, len(found), distance, row))
    found.sort()
    return found


def worth(found: Sequence[tuple[float, int, float, Row]], count: int) -> int:
    """How many of the first `count` answers are worth more than the op's default, which fits itself to a shape: the
    first ones up to one that did not beat it where it was measured."""
    for number, (_, _, distance, row) in enumerate(found[:count]):
        if distance and not beats(row):
            return number
    return min(count, len(found))


def beats(row: Row) -> bool:
    """Did it beat the default at its own shape? True where nobody knows."""
    return not row.default_us or row.us * BEATS < row.default_us


def _waves(one: Tile, m: int, n: int, sm_count: int) -> float:
    """How often its tiles fill all multiprocessors; a fraction where programs take even shares."""
    tiles = -(-m // one.block_m) * -(-n // one.block_n)
    return tiles / sm_count if one.split == 0 else max(-(-tiles * one.split * one.wide // sm_count), one.least)


def _steps(one: Tile, k: int) -> float:
    return max(-(-k // one.block_k) / max(one.split, 1), 1.0)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < 1 << 40 else 0
