"""The autotune database as ops see it: a look-up that never fails and never measures.

Winners lie in `autotune_db/<gpu id>/<op>.csv`, one row per key and rank, in git and in the wheel. A key is answered by
its own rows, else by the nearest recorded shape of the op on this GPU, else by a sibling GPU, else by the op's default;
what is not legal for the arguments is passed over. Overlays, first wins: `with use(...)`, the directories that
FPK_AUTOTUNE_DB names, the user's directory, the packaged tables.
"""

import contextlib
import datetime
import os
from bisect import bisect_left
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from fpk._db_hash import jitted_by, launched_by, source_hash
from fpk._db_lookup import Answer, Snapshot, Table, Tables, gpu_id, siblings
from fpk._db_sources import DirectorySource, MemorySource, Source
from fpk._db_table import (
    MEASURED,
    SIZES,
    Row,
    Run,
    dump_runs,
    dump_table,
    merge_rows,
    parse_case,
    parse_runs,
    parse_table,
    round_us,
    spell_case,
)
from fpk.device import Device, scope, within

__all__ = [
    "MEASURED",
    "M_GRID",
    "SIZES",
    "Answer",
    "BatchInvariant",
    "Config",
    "Database",
    "DirectorySource",
    "Empty",
    "MemorySource",
    "Row",
    "Run",
    "Snapshot",
    "Source",
    "Table",
    "Tables",
    "active",
    "batch_invariant",
    "bucket",
    "default",
    "default_sources",
    "dump_runs",
    "dump_table",
    "explain",
    "gpu_id",
    "jitted_by",
    "launched_by",
    "merge_rows",
    "opened",
    "packaged_directory",
    "parse_case",
    "parse_runs",
    "parse_table",
    "round_us",
    "share",
    "siblings",
    "snapshot",
    "source_hash",
    "spell_case",
    "use",
    "user_directory",
]  # fmt: skip

Config = dict[str, Any]

# M is rounded up onto this grid in keys: it changes from call to call, and neighbours want the same tiles
M_GRID = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def bucket(m: int) -> int:
    """M rounded up onto the key grid; beyond the grid, its last value."""
    return M_GRID[min(bisect_left(M_GRID, m), len(M_GRID) - 1)]


class Database(Protocol):
    def candidates(self, op: str, key: dict[str, Any], device: Device) -> list[Config]:
        """Configs in falling order of trust for this key; the op takes the first legal one, else its default."""
        ...


class Empty:
    """No records: every look-up answers with the op's default."""

    def candidates(self, op: str, key: dict[str, Any], device: Device) -> list[Config]:
        return []


def packaged_directory() -> Path:
    """The tables that come with fpk: inside the package of a wheel, at the root of a checkout."""
    package = Path(__file__).resolve().parent
    inside = package / "autotune_db"
    return inside if inside.is_dir() else package.parent / "autotune_db"


def user_directory() -> Path | None:
    """Where `fpk tune finish` writes the user's own tables; None where no home directory can be told."""
    try:
        from platformdirs import user_data_path

        path = Path(user_data_path("fpk"))
    except ImportError:
        data = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
        path = Path(data) / "fpk"
    except (OSError, RuntimeError, KeyError):
        return None
    return path / "autotune_db" if path.is_absolute() else None


def default_sources() -> list[DirectorySource]:
    """FPK_AUTOTUNE_DB (directories, separated as in PATH), the user's directory, the packaged tables."""
    named = [p for p in os.environ.get("FPK_AUTOTUNE_DB", "").split(os.pathsep) if p]
    sources = [DirectorySource(p, f"FPK_AUTOTUNE_DB:{p}") for p in named]
    user = user_directory()
    if user is not None:
        sources.append(DirectorySource(user, "user"))
    return [*sources, DirectorySource(packaged_directory(), "packaged")]


_default: list[Tables] = []


def default() -> Tables:
    """The database that answers outside `use`; made at the first look-up, it reads a table when an op asks."""
    if not _default:
        _default.append(Tables(*default_sources()))
    return _default[0]


class BatchInvariant:
    """The same records; ops that ask it choose for a batch of fixed size, whatever size theirs has."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def candidates(self, op: str, key: dict[str, Any], device: Device) -> list[Config]:
        return self.database.candidates(op, key, device)


_invariant_of: dict[int, BatchInvariant] = {}  # one for each database, so that memos know it again


def active() -> Database:
    """What look-ups ask now."""
    asked = scope.get()
    database: Database = asked.database if asked.database is not None else default()
    if not asked.invariant:
        return database
    found = _invariant_of.get(id(database))
    if found is None or found.database is not database:
        found = _invariant_of[id(database)] = BatchInvariant(database)
    return found


@contextlib.contextmanager
def batch_invariant(enabled: bool = True) -> Iterator[None]:
    """Inside the block, what an op computes for a row does not depend on how many rows there are, bit for bit.

    Ops choose their configs as for a batch of one fixed size: slower for others. Scales that the rows of a tensor
    share ("fp8_tensor" taken from the data) depend on the batch by their definition.
    """
    with within(invariant=enabled):
        yield


def _recorded(database: Database | None) -> Database:
    """The active database itself, whatever mode it is asked in."""
    database = database or active()
    return database.database if isinstance(database, BatchInvariant) else database


def opened(database: Database | str | Path) -> Database:
    """A database as given; a directory's tables laid over the default ones; the snapshot a file holds."""
    if not isinstance(database, (str, Path)):
        return database
    path = Path(database)
    if path.is_file():
        return Snapshot(path.read_bytes())
    if not path.is_dir():
        raise ValueError(f"use: expected a database, a directory of tables or a snapshot file, got {path}")
    return Tables(DirectorySource(path), *default_sources())


@contextlib.contextmanager
def use(database: Database | str | Path) -> Iterator[Database]:
    """Answer look-ups from `database` inside the block: a Database, a directory laid over the others, or a snapshot."""
    opened_database = opened(database)
    with within(database=opened_database):
        yield opened_database


def explain(op: str, key: dict[str, Any], device: Device, database: Database | None = None) -> list[Answer]:
    """Every row that a look-up would offer, in its order, with level, source and distance; [] means the default."""
    database = _recorded(database)
    return list(database.answers(op, key, device)) if isinstance(database, Tables) else []


def snapshot(database: Database | None = None) -> Snapshot:
    """The active database, frozen; its `hash` names the content, `content` is what a file or a broadcast carries."""
    database = _recorded(database)
    if isinstance(database, Snapshot):
        return database
    return Snapshot.of(database) if isinstance(database, Tables) else Snapshot(b"[]")


def share(
    store: Any, rank: int, world_size: int, device: Device, timeout_s: float = 10.0, name: str = "fpk/db"
) -> Snapshot:
    """Give every rank of a job rank 0's snapshot, so that all choose the same configs.

    Args:
        store: a torch.distributed store (TCPStore, FileStore, HashStore).
        device: this rank's GPU; ranks on another kind of GPU than rank 0's would choose differently.

    Raises:
        RuntimeError: some rank sits on another kind of GPU, or did not come within `timeout_s`.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    mine = gpu_id(device)
    if rank == 0:
        store.set(f"{name}/content", snapshot().content)
    store.set(f"{name}/gpu/{rank}", mine)
    gpus = []
    for other in range(world_size):
        try:
            store.wait([f"{name}/gpu/{other}"], limit)
        except Exception as error:  # stores raise their own types on time-out
            raise RuntimeError(f"share: rank {other} did not answer within {timeout_s} s") from error
        gpus.append(store.get(f"{name}/gpu/{other}").decode())
    if len(set(gpus)) > 1:
        raise RuntimeError(f"share: expected one kind of GPU in the job, got {', '.join(sorted(set(gpus)))}")
    try:
        store.wait([f"{name}/content"], limit)
    except Exception as error:
        raise RuntimeError(f"share: rank 0 gave no snapshot within {timeout_s} s") from error
    return Snapshot(store.get(f"{name}/content"))
