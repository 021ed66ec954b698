"""The trial store: every candidate that was ever tried, in one SQLite file. Standard library only.

Many processes may write at once and any of them may be killed: the file is in WAL mode, a trial is one transaction, and
a lock file makes writers queue up instead of polling (and covers the first open, whose switch to WAL does not wait).
"""

import contextlib
import datetime
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not POSIX: SQLite's own locks remain
    fcntl = None  # type: ignore[assignment]

STATUSES = ("ok", "compile_error", "out_of_resources", "timeout", "crash", "incorrect", "noisy")
STAGES = ("screen", "final")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS trials (
    trial_id TEXT PRIMARY KEY, op TEXT NOT NULL, gpu TEXT NOT NULL, source TEXT NOT NULL, key TEXT NOT NULL,
    "case" TEXT NOT NULL, config TEXT NOT NULL, stage TEXT NOT NULL, status TEXT NOT NULL, us REAL, p20_us REAL,
    p80_us REAL, samples INTEGER, noise_percent REAL, error REAL, shared_bytes INTEGER, registers INTEGER,
    spills INTEGER, compile_s REAL, seconds REAL, clock_mhz REAL, detail TEXT NOT NULL, run TEXT NOT NULL,
    created TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS trials_by_shape ON trials (op, gpu, key, stage);
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY, sweep TEXT NOT NULL, op TEXT NOT NULL, "case" TEXT NOT NULL, state TEXT NOT NULL,
    position INTEGER NOT NULL, seconds REAL, options TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS runs (run TEXT PRIMARY KEY, fields TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Trial:
    """One candidate at one key in one stage. `key` and `config` are canonical JSON; times in microseconds.

    error: relative error against the reference. seconds: what the trial cost. source: hashes of the kernels that
    it rests on (`fpk.tune.sources`).
    """

    op: str
    gpu: str
    source: str
    key: str
    case: str
    config: str
    stage: str
    status: str
    us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int | None = None
    noise_percent: float | None = None
    error: float | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spills: int | None = None
    compile_s: float | None = None
    seconds: float | None = None
    clock_mhz: float | None = None
    detail: str = ""
    run: str = ""
    created: str = ""

    @property
    def trial_id(self) -> str:
        """The same candidate at the same key, by the same kernel source, on the same kind of GPU, in the same run."""
        text = "\n".join((self.op, self.gpu, self.source, self.key, self.config, self.stage, self.run))
        return hashlib.sha256(text.encode()).hexdigest()[:20]


COLUMNS = tuple(f.name for f in fields(Trial))


def canonical(values: dict[str, Any]) -> str:
    """JSON with sorted names and no blanks: equal dicts give equal text."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


class TrialStore:
    """Trials in a SQLite file. Open it once per process."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock_path = self.path.with_name(self.path.name + ".lock")
        with self._locked():
            self._db = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time. The kernel releases the lock when its holder dies."""
        if fcntl is None:
            yield
            return
        handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _write(self, statement: str, rows: Iterable[tuple[Any, ...]]) -> None:
        with self._locked():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.executemany(statement, rows)
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise

    def record(self, *trials: Trial) -> None:
        """Store trials; when this returns they survive the death of the process. A repeated trial replaces itself."""
        for trial in trials:
            if trial.status not in STATUSES or trial.stage not in STAGES:
                raise ValueError(f"Trial: expected a known status and stage, got {trial.status!r}, {trial.stage!r}")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        names = ", ".join(f'"{n}"' for n in ("trial_id", *COLUMNS))
        marks = ", ".join("?" * (len(COLUMNS) + 1))
        rows = [(t.trial_id, *(getattr(t, n) for n in COLUMNS[:-1]), t.created or now) for t in trials]
        self._write(f"INSERT OR REPLACE INTO trials ({names}) VALUES ({marks})", rows)

    def trials(self, **equal: Any) -> list[Trial]:
        """Trials whose columns equal the given values, in order of creation."""
        names = ", ".join(f'"{n}"' for n in COLUMNS)
        where = " AND ".join(f'"{n}" = ?' for n in equal) or "1"
        found = self._db.execute(f"SELECT {names} FROM trials WHERE {where} ORDER BY rowid", tuple(equal.values()))
        return [Trial(*row) for row in found]

    def count(self) -> int:
        return int(self._db.execute("SELECT count(*) FROM trials").fetchone()[0])

    def integrity(self) -> str:
        """ "ok", or what SQLite found to be damaged."""
        return str(self._db.execute("PRAGMA integrity_check").fetchone()[0])

    def plan(self, sweep: str, jobs: Iterable[tuple[str, str]], options: dict[str, Any]) -> None:
        """Add (op, case) pairs to a sweep; those it has already stay as they are."""
        text = canonical(options)
        rows = []
        for position, (op, case) in enumerate(jobs):
            job_id = hashlib.sha256(f"{sweep}\n{op}\n{case}".encode()).hexdigest()[:20]
            rows.append((job_id, sweep, op, case, "open", position, None, text))
        self._write("INSERT OR IGNORE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)

    def jobs(self, sweep: str | None = None) -> list[dict[str, Any]]:
        names = ("job_id", "sweep", "op", "case", "state", "position", "seconds", "options")
        where, values = ("WHERE sweep = ?", (sweep,)) if sweep else ("", ())
        found = self._db.execute(
            f"SELECT {', '.join(chr(34) + n + chr(34) for n in names)} FROM jobs {where} ORDER BY sweep, position",
            values,
        )
        return [dict(zip(names, row, strict=True)) for row in found]

    def finish_job(self, job_id: str, state: str, seconds: float) -> None:
        self._write("UPDATE jobs SET state = ?, seconds = ? WHERE job_id = ?", [(state, seconds, job_id)])

    def add_run(self, run: str, values: dict[str, str]) -> None:
        self._write("INSERT OR IGNORE INTO runs VALUES (?, ?)", [(run, canonical(values))])

    def runs(self) -> dict[str, dict[str, str]]:
        return {run: json.loads(text) for run, text in self._db.execute("SELECT run, fields FROM runs")}

    def absorb(self, other: "TrialStore") -> None:
        """Take over the trials and runs of another store."""
        for run, values in other.runs().items():
            self.add_run(run, values)
        self.record(*other.trials())
