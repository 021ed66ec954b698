"""Winner tables of the autotune database as text: one CSV per GPU and op, and the runs they were measured in.

A table's columns are the key (sizes first), `rank`, every launch field of the config, then the measurement. Rank 1 is
the fastest. A row of rank 0 says that nothing beat the op's default by more than the noise; its config is that default.
"""

import csv
import functools
import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

Value = int | float | bool | str

# key fields that are sizes, in the order of their columns; every other key field is a flag that must match exactly
SIZES = ("M", "N", "K", "T", "R", "E", "H", "I", "top_k")
MEASURED = ("us", "default_us", "noise_percent", "shared_bytes", "case", "run")


@dataclass(frozen=True)
class Row:
    """A measured config. Times in microseconds; `case` rebuilds the arguments it was timed with (`parse_case`)."""

    key: dict[str, int | str]
    rank: int
    config: dict[str, Any]
    us: float
    default_us: float
    noise_percent: float
    shared_bytes: int
    case: str
    run: str

    @functools.cached_property
    def order(self) -> tuple[Any, ...]:
        return (*_sortable(self.key), self.rank)


@dataclass(frozen=True)
class Run:
    """Where and how rows were measured; `run` is a hash of all the rest, so equal runs are one."""

    op: str
    gpu: str
    date: str
    fpk: str
    torch: str
    triton: str
    cuda: str
    driver: str
    source: str  # hashes of the op's kernels by name (`fpk.tune.sources`)
    timer: str
    sm_clock_mhz: str
    memory_clock_mhz: str
    power_limit_w: str

    @property
    def run(self) -> str:
        text = "\n".join(str(getattr(self, f.name)) for f in fields(self))
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _sortable(key: dict[str, int | str]) -> tuple[Any, ...]:
    names = sorted(key, key=_column_order)
    return tuple((n, isinstance(key[n], str), key[n]) for n in names)


def _column_order(name: str) -> tuple[int, str]:
    return (SIZES.index(name) if name in SIZES else len(SIZES), name)


def parse_value(text: str) -> Value:
    """The value a cell stands for: int, float, bool, else the text."""
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    if text in ("True", "False"):
        return text == "True"
    if re.fullmatch(r"-?\d+\.\d*(e[+-]?\d+)?|-?\d+e[+-]?\d+", text):
        return float(text)
    return text


def spell_value(value: Value) -> str:
    """A cell's text, or ValueError if reading it back would give something else."""
    text = repr(value) if isinstance(value, float) else str(value)
    if parse_value(text) != value or (isinstance(value, str) and not isinstance(parse_value(text), str)) or not text:
        raise ValueError(f"autotune_db: expected a value that survives as text, got {value!r}")
    return text


def spell_case(case: dict[str, Any]) -> str:
    """`inputs` arguments as one word each: `M=64 N=4096 dtype=torch.float8_e4m3fn`."""
    for value in case.values():
        if " " in str(value):
            raise ValueError(f"autotune_db.case: expected values without blanks, got {value!r}")
    return " ".join(f"{n}={v}" for n, v in sorted(case.items(), key=lambda item: _column_order(item[0])))


def parse_case(text: str) -> dict[str, Any]:
    """The `inputs` arguments that `spell_case` wrote."""
    pairs = (word.split("=", 1) for word in text.split())
    return {name: _case_value(value) for name, value in pairs}


def _case_value(text: str) -> Any:
    if text == "None":
        return None
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    return parse_value(text)


def round_us(us: float) -> float:
    """Four significant digits: more would be noise, and a re-export must give the same bytes."""
    return float(f"{us:.4g}")


def dump_table(rows: Iterable[Row]) -> str:
    """CSV text of rows, sorted by key and rank."""
    ordered = sorted(rows, key=lambda row: row.order)
    keys = sorted({n for row in ordered for n in row.key}, key=_column_order)
    launch = sorted({n for row in ordered for n in row.config}, key=lambda n: (n != "kernel", n.startswith("num_"), n))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*keys, "rank", *launch, *MEASURED])
    for row in ordered:
        writer.writerow(
            [
                *(spell_value(row.key[n]) if n in row.key else "" for n in keys),
                row.rank,
                *(spell_value(row.config[n]) if n in row.config else "" for n in launch),
                *(f"{round_us(v):g}" for v in (row.us, row.default_us)),
                f"{row.noise_percent:.2f}",
                row.shared_bytes,
                row.case,
                row.run,
            ]
        )
    return out.getvalue()


def parse_table(text: str) -> list[Row]:
    """Rows of CSV text; ValueError says which line is wrong."""
    try:
        lines = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"autotune_db: expected CSV text ({error})") from error
    if not lines:
        return []
    header = lines[0]
    if "rank" not in header or tuple(header[-len(MEASURED) :]) != MEASURED:
        raise ValueError(f"autotune_db: expected columns key, rank, config, {', '.join(MEASURED)}, got {header}")
    rank_at, end = header.index("rank"), len(header) - len(MEASURED)
    read = functools.cache(parse_value)  # a table has few distinct cells
    rows = []
    for number, cells in enumerate(lines[1:], 2):
        if len(cells) != len(header):
            raise ValueError(f"autotune_db: line {number}: expected {len(header)} cells, got {len(cells)}")
        us, default_us, noise, shared, case, run = cells[end:]
        key: dict[str, Any] = {n: read(c) for n, c in zip(header[:rank_at], cells, strict=False) if c}
        config = {n: read(c) for n, c in zip(header[rank_at + 1 : end], cells[rank_at + 1 : end], strict=True) if c}
        strange = [n for n in SIZES if n in key and not (type(key[n]) is int and 0 <= key[n] < 1 << 40)]
        if strange:
            raise ValueError(
                f"autotune_db: line {number}: {strange[0]}: expected a number, got {key[strange[0]]!r:.80}"
            )
        try:
            rows.append(
                Row(
                    key, int(cells[rank_at]), config, float(us), float(default_us), float(noise), int(shared), case, run
                )
            )
        except ValueError as error:
            raise ValueError(f"autotune_db: line {number}: {error}") from error
    return rows


def dump_runs(runs: Iterable[Run]) -> str:
    """CSV text of runs, sorted, each once."""
    names = [f.name for f in fields(Run)]
    unique = {run.run: run for run in runs}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["run", *names])
    for run in sorted(unique.values(), key=lambda r: (r.op, r.date, r.run)):
        writer.writerow([run.run, *(getattr(run, n) for n in names)])
    return out.getvalue()


def parse_runs(text: str) -> dict[str, Run]:
    """Runs by their id, which must be the hash of what the line says."""
    names = [f.name for f in fields(Run)]
    runs = {}
    for number, cells in enumerate(csv.DictReader(io.StringIO(text)), 2):
        try:
            run = Run(**{n: cells[n] for n in names})
        except KeyError as error:
            raise ValueError(f"runs.csv: expected columns run, {', '.join(names)}, missing {error}") from error
        if run.run != cells["run"]:
            raise ValueError(f"runs.csv: line {number}: expected run {run.run} for these fields, got {cells['run']}")
        runs[run.run] = run
    return runs


def merge_rows(tables: Sequence[Iterable[Row]]) -> list[Row]:
    """Union of tables: for each key the block (all its ranks) whose best row is fastest; ties go to the smaller text.

    Commutative, associative and idempotent, so contributions may arrive in any order.
    """
    blocks: dict[tuple[Any, ...], list[Row]] = {}
    for table in tables:
        mine: dict[tuple[Any, ...], list[Row]] = {}
        for row in table:
            mine.setdefault(_sortable(row.key), []).append(row)
        for key, block in mine.items():
            if key not in blocks or _merge_order(block) < _merge_order(blocks[key]):
                blocks[key] = block
    return sorted((row for block in blocks.values() for row in block), key=lambda row: row.order)


def _merge_order(block: list[Row]) -> tuple[float, str]:
    return (min(round_us(row.us) for row in block), dump_table(block))
