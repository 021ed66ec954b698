"""The autotune database as ops see it: a look-up that never fails and never measures."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from fpk.device import Device

Config = dict[str, Any]

# M is rounded up onto this grid in keys: it changes from call to call, and neighbours want the same tiles
M_GRID = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)


def bucket(m: int) -> int:
    """M rounded up onto the key grid; beyond the grid, its last value."""
    return next((g for g in M_GRID if m <= g), M_GRID[-1])


class Database(Protocol):
    def candidates(self, op: str, key: dict[str, Any], device: Device) -> list[Config]:
        """Configs in falling order of trust for this key; the op takes the first legal one, else its default."""
        ...


class Empty:
    """No records: every look-up answers with the op's default."""

    def candidates(self, op: str, key: dict[str, Any], device: Device) -> list[Config]:
        return []


_active: ContextVar[Database] = ContextVar("fpk_active_database", default=Empty())  # noqa: B039  stateless


def active() -> Database:
    return _active.get()


@contextlib.contextmanager
def use(database: Database) -> Iterator[Database]:
    """Answer look-ups from `database` inside the block."""
    token = _active.set(database)
    try:
        yield database
    finally:
        _active.reset(token)
