"""Look-up in winner tables: an index per op, and the order of levels."""

import functools
import hashlib
import json
import math
import operator
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fpk._db_gpus import gpu_id, siblings, sm_count_of
from fpk._db_scale import Products, expected, full_rate, of_tokens, tile, worth
from fpk._db_sources import MemorySource, Source
from fpk._db_table import SIZES, Row, Run, parse_runs, parse_table
from fpk.device import Device

# A step in M changes the tile height, a step in N or K mostly the number of tiles: of two recorded shapes, that with
# the same M answers better than that with the same N and K
WEIGHT_M = 2.0
# Beyond this distance (a factor of two in N or K is 1) a recorded shape answers worse than the op's own default. On an
# H200, over 24 and 16 shapes of two products: cost over the best, median 3 to 10 % without a limit, 1 to 7 % with it
NEAR_LIMIT = 1.1
# Flags of the epilogue: a call that differs from every recorded one in these alone takes their rows as near ones. All
# others (formats, granularities, accumulation) change the loop, and a row says nothing across them.
SOFT_FLAGS = frozenset({"bias", "zero_point", "out_dtype"})
# Products' rows are scaled by their work (`fpk._db_scale`) before they are compared, so they reach farther: a factor of
# 16 in one size
SCALED_LIMIT = 4.1
_NEAREST = 3  # shapes offered by the level "nearest": the closest may be illegal here
_SCALED = 3  # shapes whose rows are scaled and compared
_OFFERED = 4  # rows of them that are offered
_MEMO_LIMIT = 16_384


THE_DEFAULT: list[dict[str, Any]] = []
"""What a table offers where the op's own choice is as good as its neighbours' rows."""


class Answer(NamedTuple):
    """One row that a look-up would offer: from which level ("exact", "nearest", "sibling"), source and GPU."""

    level: str
    row: Row
    gpu: str
    source: str
    distance: float


_Offer = tuple[str, Row, str, str, float]  # an Answer's fields
_Shape = tuple[tuple[float, ...], list[float], list[list[Row]]]  # sizes but M, each M, its rows; sizes as logarithms


class Table:
    """Rows of one op on one GPU, indexed by exact key and, for the nearest shape, by flags and sizes."""

    def __init__(self, rows: Iterable[Row], sm_count: int = 0) -> None:
        self.rows = list(rows)
        self._sm_count = sm_count
        self._products: dict[tuple[Any, ...], Products | None] = {}
        self._exact: dict[frozenset[Any], list[Row]] = {}
        for row in self.rows:
            self._exact.setdefault(frozenset(row.key.items()), []).append(row)
        # flags -> [(sizes but M, as logarithms; log2 of each M; rows of each M)]
        shapes: dict[frozenset[Any], dict[tuple[float, ...], list[tuple[float, list[Row]]]]] = {}
        for block in self._exact.values():
            block.sort(key=lambda row: row.rank)
            flags, log_m, logs = _split(block[0].key)
            shapes.setdefault(flags, {}).setdefault(logs, []).append((log_m, block))
        self._shapes: dict[frozenset[Any], list[_Shape]] = {}
        self._likes: dict[tuple[Any, ...], list[_Shape]] = {}  # by the flags of a key as it was spelled
        for flags, groups in shapes.items():
            ordered = [(logs, sorted(ms, key=lambda m: m[0])) for logs, ms in sorted(groups.items())]
            self._shapes[flags] = [(logs, [m for m, _ in ms], [block for _, block in ms]) for logs, ms in ordered]
        self._kin: dict[frozenset[Any], list[frozenset[Any]]] = {}
        for flags in sorted(self._shapes, key=lambda f: sorted(map(str, f))):
            self._kin.setdefault(_hard(flags), []).append(flags)

    def scaled(self, key: Mapping[str, Any], sm_count: int, count: int = _OFFERED) -> list[tuple[float, float, Row]]:
        """(expected microseconds, distance, row) of configs measured nearby, the fastest expected first.

        A config stands once, with the row of the shape closest to `key`. [] if the op's times cannot be scaled.
        """
        products = self._products_like(key, sm_count)
        if products is None:
            return []
        m, n, k = key["M"], key["N"], key["K"]
        near = products.near(_log2(m), _log2(n), _log2(k), SCALED_LIMIT, _SCALED)
        found = expected(near, m, n, k, sm_count, products.rate)
        return [
            (us, distance, replace(row, config=of_tokens(row.config, m)))
            for us, _, distance, row in found[: worth(found, count)]
        ]

    def prefers_default(self, key: Mapping[str, Any], sm_count: int) -> bool:
        """Is it expected to be as fast as what was measured nearby?"""
        return self.configs(key, sm_count, 1 << 62) is THE_DEFAULT

    def configs(self, key: Mapping[str, Any], sm_count: int, shared_limit: int) -> list[dict[str, Any]] | None:
        """What `Tables` offers from a single table whose times can be scaled, in its order; None if they cannot."""
        products = self._products_like(key, sm_count)
        if products is None:
            return None
        m, n, k = key["M"], key["N"], key["K"]
        near = products.near(_log2(m), _log2(n), _log2(k), SCALED_LIMIT, _SCALED)
        if not near:
            return []  # what is too far to be scaled is too far for the level "nearest"
        if near[0][0] and not any([gains for _, _, _, gains in near]):
            return THE_DEFAULT
        found = expected(near, m, n, k, sm_count, products.rate)
        if not found:
            return None
        exact = self.exact(key) if near[0][0] == 0 else []
        kept = [row for row in exact if _answers_itself(row)]
        kept += [row for _, _, distance, row in found[: worth(found, _OFFERED)] if distance or not exact]
        if not kept:
            return THE_DEFAULT
        return [of_tokens(row.config, m) for row in kept if row.shared_bytes <= shared_limit]

    def _products_like(self, key: Mapping[str, Any], sm_count: int) -> Products | None:
        if "M" not in key or "N" not in key or "K" not in key:
            return None
        flags = _flags(key)
        try:
            return self._products[flags]
        except KeyError:
            products = self._products[flags] = self._made_ready(_split(key)[0], sm_count)
            return products

    def _made_ready(self, flags: frozenset[Any], sm_count: int) -> Products | None:
        """The recorded shapes with these flags (SOFT_FLAGS apart), and the rate that none of them exceeds."""
        shapes = self._shapes_like(flags)
        ready: list[Any] = []
        names: dict[Any, int] = {}  # numbers and plain tuples are what is cheapest to compare and to take apart
        for logs, ms, blocks in shapes:
            tiles = [[tile(row, self._sm_count or sm_count) for row in block] for block in blocks]
            whole = [[(names.setdefault(t[0], len(names)), *t[1:]) for t in block if t is not None] for block in tiles]
            if list(map(len, whole)) != list(map(len, tiles)):
                return None
            ready.append((*logs, ms, whole))
        rate = full_rate(t for *_, blocks in ready for block in blocks for t in block)
        return Products(rate, ready) if rate else None  # sizes but M are N and K; plain Tiles

    def _shapes_like(self, flags: frozenset[Any]) -> list[_Shape]:
        """Recorded shapes with these flags, or with their like."""
        found = self._shapes.get(flags)
        return found if found is not None else [s for kin in self._kin.get(_hard(flags), ()) for s in self._shapes[kin]]

    def exact(self, key: Mapping[str, Any]) -> list[Row]:
        return self._exact.get(frozenset(key.items()), [])

    def nearest(self, key: Mapping[str, Any], count: int = _NEAREST) -> list[tuple[float, list[Row]]]:
        """Distance and rows of the recorded shapes closest to `key`, SOFT_FLAGS apart of equal flags."""
        flags = _flags(key)
        shapes = self._likes.get(flags)
        if shapes is None:
            shapes = self._likes[flags] = self._shapes_like(_split(key)[0])
        log_m, logs = _log2(key.get("M", 1)), [_log2(key[n]) for n in _OTHER_SIZES if n in key]
        found = []
        position = 0  # unique in `found`: ties go to the smaller shape, and rows are never compared
        for other, ms, blocks in shapes:
            base = sum([abs(a - b) for a, b in zip(other, logs, strict=False)])
            at = bisect_left(ms, log_m)
            # the next larger M first: on a tie a tile that is too tall beats one that is too short
            for i in (at, at + 1, at - 1) if at < len(ms) and ms[at] == log_m else (at, at - 1):
                if 0 <= i < len(ms):
                    found.append((base + WEIGHT_M * abs(ms[i] - log_m), position, blocks[i]))
                    position += 1
        found.sort()
        return [(distance, block) for distance, _, block in found[:count]]


def _answers_itself(row: Row) -> bool:
    """Slower rows are there for their neighbours."""
    return row.rank <= 1 or row.us < row.default_us


def _split(key: Mapping[str, Any]) -> tuple[frozenset[Any], float, tuple[float, ...]]:
    """Flags, log2 of M, and log2 of the other sizes in a fixed order."""
    flags = frozenset([item for item in key.items() if item[0] not in _SIZE_SET])
    logs = tuple([_log2(key[n]) for n in _OTHER_SIZES if n in key])
    return flags, _log2(key.get("M", 1)), logs


def _flags(key: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells apart keys that differ in more than their sizes; cheaper than the set, and as long as names keep
    their order as good."""
    names = tuple(key)
    return names, _getter(names)(key)


@functools.lru_cache(256)
def _getter(names: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Any]:
    flags = [n for n in names if n not in _SIZE_SET]
    return operator.itemgetter(*flags) if flags else lambda key: ()


def _hard(flags: frozenset[Any]) -> frozenset[Any]:
    return frozenset([item for item in flags if item[0] not in SOFT_FLAGS])


_SIZE_SET = frozenset(SIZES)
_OTHER_SIZES = tuple(n for n in SIZES if n != "M")


@functools.lru_cache(4096)
def _log2(size: int) -> float:
    return math.log2(max(size, 1))


class Tables:
    """A database over sources in falling priority. Reads one op's file when it is first asked for, once."""

    def __init__(self, *sources: Source) -> None:
        self.sources: Sequence[Source] = sources
        self._tables: dict[tuple[int, str, str], Table | None] = {}
        self._present: dict[tuple[str, str], list[tuple[str, Table]]] = {}  # of a GPU and op, with their sources' names
        self._gpus: list[list[str]] | None = None
        self._siblings: dict[str, list[str]] = {}
        self._memo: dict[Any, list[dict[str, Any]]] = {}
        self._missed: set[tuple[str, str]] = set()

    def candidates(self, op: str, key: dict[str, Any], device: Device) -> list[dict[str, Any]]:
        """Configs in falling order of trust for this key; the op takes the first legal one, else its default."""
        memo_key = (op, device, *key, *key.values())
        configs = self._memo.get(memo_key)
        if configs is None:
            tables = self._present.get((gpu_id(device), op), ())
            if len(tables) == 1:  # the usual case, without the words that `answers` adds
                configs = tables[0][1].configs(key, device.sm_count, device.shared_limit)
            if configs is THE_DEFAULT:
                configs = []
            elif not configs:
                offers = self._offers if configs is None else self._of_siblings
                configs = [row.config for _, row, _, _, _ in offers(op, key, device)]
                if not configs and not self._knows_its_like(op, key, device):
                    self._say_missing(op, key, device)
            if len(self._memo) >= _MEMO_LIMIT:
                self._memo.clear()
            self._memo[memo_key] = configs
        return configs

    def _say_missing(self, op: str, key: Mapping[str, Any], device: Device) -> None:
        """Warn once an op and GPU that nothing is recorded; the interpreter on a CPU is not tuned."""
        at = (op, gpu_id(device))
        if device.arch == "cpu" or device.name == "pretended" or at in self._missed:
            return
        self._missed.add(at)
        sizes = ", ".join(f"{n}={v}" for n, v in key.items())
        warnings.warn(
            f"fpk: no tuned config of {op} for {at[1]}, nor for a GPU like it (looked for {sizes}): using defaults",
            RuntimeWarning,
            stacklevel=2,
        )

    def answers(self, op: str, key: Mapping[str, Any], device: Device) -> list[Answer]:
        """Every row a look-up would offer, in its order, that fits the device's shared memory."""
        return [Answer(*offer) for offer in self._offers(op, key, device)]

    def _offers(self, op: str, key: Mapping[str, Any], device: Device) -> list[_Offer]:
        gpu = gpu_id(device)
        limit, sm_count = device.shared_limit, device.sm_count
        found = [offer for offer in self._of_gpu(op, key, gpu, sm_count) if offer[1].shared_bytes <= limit]
        if found or self._gpu_prefers_default(op, key, gpu, sm_count):
            return found
        return self._of_siblings(op, key, device)

    def _knows_its_like(self, op: str, key: Mapping[str, Any], device: Device) -> bool:
        """Have this GPU's tables, or its siblings', products with these flags, if only far from these sizes?"""
        gpus = gpu_id(device), *self._siblings.get(gpu_id(device), ())
        tables = [table for gpu in gpus for _, table in self._present.get((gpu, op), ())]
        return any(table.configs(key, device.sm_count, 1 << 62) is not None for table in tables)

    def _gpu_prefers_default(self, op: str, key: Mapping[str, Any], gpu: str, sm_count: int) -> bool:
        return any(table.prefers_default(key, sm_count) for _, table in self._present.get((gpu, op), ()))

    def _of_siblings(self, op: str, key: Mapping[str, Any], device: Device) -> list[_Offer]:
        gpu, limit, sm_count = gpu_id(device), device.shared_limit, device.sm_count
        others = self._siblings.get(gpu)
        if others is None:
            if self._gpus is None:
                self._gpus = [source.gpus() for source in self.sources]
            others = self._siblings[gpu] = siblings(gpu, {g for gpus in self._gpus for g in gpus})
        found: list[_Offer] = []
        for other in others:
            offers = self._of_gpu(op, key, other, sm_count)
            if not found and not offers and self._gpu_prefers_default(op, key, other, sm_count):
                break  # the nearest one that knows says so
            found += [("sibling", row, other, name, d) for _, row, _, name, d in offers if row.shared_bytes <= limit]
        return found

    def _of_gpu(self, op: str, key: Mapping[str, Any], gpu: str, sm_count: int) -> list[_Offer]:
        tables = self._present.get((gpu, op))
        if tables is None:
            tables = [(s.name, t) for i, s in enumerate(self.sources) if (t := self.table(i, gpu, op))]
            self._present[gpu, op] = tables
        offers: list[_Offer] = []
        exact: list[Row] = []
        for name, table in tables:
            exact = table.exact(key)
            if exact:
                offers = [("exact", row, gpu, name, 0.0) for row in exact if _answers_itself(row)]
                break
        scaled = [(us, i, d, row) for i, (_, table) in enumerate(tables) for us, d, row in table.scaled(key, sm_count)]
        if len(tables) > 1:
            scaled.sort(key=lambda s: s[:2])
        for _, i, distance, row in scaled:
            if distance or not exact:  # at distance 0 these are the exact rows again
                offers.append(("nearest", row, gpu, tables[i][0], distance))
        if scaled or self._gpu_prefers_default(op, key, gpu, sm_count):
            return offers
        others = [(i, t) for i, (_, t) in enumerate(tables) if t.configs(key, sm_count, 1 << 62) is None]
        near = [(d, i, block) for i, table in others for d, block in table.nearest(key)]
        if len(tables) > 1:
            near.sort(key=lambda n: n[:2])
        for distance, i, block in near:
            if block is not exact and distance <= NEAR_LIMIT:
                offers += [("nearest", row, gpu, tables[i][0], distance) for row in block]
        return offers

    def table(self, source: int, gpu: str, op: str) -> Table | None:
        """The parsed table of one source, None if it has none. A file that cannot be parsed is a miss, said once."""
        at = (source, gpu, op)
        if at not in self._tables:
            text = self.sources[source].read(gpu, f"{op}.csv")
            try:
                self._tables[at] = Table(parse_table(text), sm_count_of(gpu)) if text else None
            except ValueError as error:
                where = f"{self.sources[source].name}/{gpu}/{op}.csv"
                warnings.warn(f"fpk: ignoring {where}: {error}", RuntimeWarning, stacklevel=2)
                self._tables[at] = None
        return self._tables[at]

    def runs(self, gpu: str) -> dict[str, Run]:
        """The runs behind a GPU's rows, by id."""
        runs: dict[str, Run] = {}
        for source in self.sources:
            text = source.read(gpu, "runs.csv")
            try:
                runs = (parse_runs(text) if text else {}) | runs
            except ValueError as error:
                warnings.warn(f"fpk: ignoring {source.name}/{gpu}/runs.csv: {error}", RuntimeWarning, stacklevel=2)
        return runs

    def ops(self, gpu: str) -> list[str]:
        """Ops that have a table for this GPU."""
        files = {file for source in self.sources for file in source.files(gpu)} - {"runs.csv"}
        return sorted(file.removesuffix(".csv") for file in files)

    def gpus(self) -> list[str]:
        return sorted({gpu for source in self.sources for gpu in source.gpus()})


class Snapshot(Tables):
    """Tables frozen at one moment, named by the hash of their content: all ranks of a job take the same one."""

    def __init__(self, content: bytes) -> None:
        layers = json.loads(content)
        super().__init__(*(MemorySource(layer["texts"], layer["name"]) for layer in layers))
        self.content = content
        self.hash = hashlib.sha256(content).hexdigest()

    @classmethod
    def of(cls, tables: Tables) -> "Snapshot":
        """Everything the sources of `tables` hold now."""
        layers = []
        for i, source in enumerate(tables.sources):
            paths = [(gpu, file) for gpu in source.gpus() for file in source.files(gpu)]
            texts = {f"{gpu}/{file}": text for gpu, file in paths if (text := source.read(gpu, file))}
            layers.append({"name": f"snapshot[{i}]", "texts": texts})
        layers = [layer for layer in layers if layer["texts"]]
        return cls(json.dumps(layers, sort_keys=True, separators=(",", ":")).encode())
