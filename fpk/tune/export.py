"""Trials and tables in the formats others read: Parquet, CSV, T4 JSON, JSON lines."""

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from fpk import db
from fpk.tune.run import frame
from fpk.tune.trials import COLUMNS, Trial, TrialStore

# fpk's verdicts in the words of the T4 results schema 1.0.0
_INVALIDITY = {
    "ok": "correct", "noisy": "correct", "compile_error": "compile", "out_of_resources": "runtime",
    "timeout": "timeout", "crash": "runtime", "incorrect": "correctness",
}  # fmt: skip


def read_trials(path: Path) -> list[Trial]:
    """Trials of a SQLite store, of JSON lines (also gzipped), or of Parquet."""
    if path.suffix == ".parquet":
        return trials_of_frame(pd.read_parquet(path))
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            return [Trial(**json.loads(line)) for line in file]
    store = TrialStore(path)
    try:
        return store.trials()
    finally:
        store.close()


def trials_of_frame(table: pd.DataFrame) -> list[Trial]:
    """The inverse of `frame`."""
    plain = table.astype(object).where(table.notna(), None)
    integers = ("samples", "shared_bytes", "registers", "spills")
    records = plain.to_dict("records")
    for record in records:
        record.update({n: int(record[n]) for n in integers if record[n] is not None})
    return [Trial(**{n: record[n] for n in COLUMNS}) for record in records]


def write_parquet(trials: Iterable[Trial], path: Path) -> int:
    """One row per trial, compressed; needs pyarrow. Returns the number of rows."""
    table = frame(trials)
    for name in ("samples", "shared_bytes", "registers", "spills"):
        table[name] = table[name].astype("Int64")
    for name in ("us", "p20_us", "p80_us", "noise_percent", "error", "compile_s", "seconds", "clock_mhz"):
        table[name] = table[name].astype("float64")
    table.to_parquet(path, index=False, compression="zstd")
    return len(table)


def t4(trials: Iterable[Trial]) -> dict[str, Any]:
    """Results as the autotuning community's T4 schema wants them; times in milliseconds, as its readers assume."""
    results = []
    for trial in trials:
        valid = trial.status in ("ok", "noisy")
        measurements = [{"name": "time", "value": trial.us / 1e3, "unit": "ms"}] if valid and trial.us else []
        for name, unit in (("shared_bytes", "bytes"), ("registers", ""), ("clock_mhz", "MHz")):
            if getattr(trial, name) is not None:
                measurements.append({"name": name, "value": getattr(trial, name), "unit": unit})
        results.append(
            {
                "timestamp": trial.created,
                "configuration": json.loads(trial.config) | {"problem": f"{trial.op} {trial.case}", "gpu": trial.gpu},
                "objectives": ["time"],
                "times": {
                    "compilation_time": 1e3 * (trial.compile_s or 0.0),
                    "runtimes": [trial.us / 1e3] if valid and trial.us else [],
                    "framework": 1e3 * (trial.seconds or 0.0),
                    "search_algorithm": 0,
                    "validation": 0,
                },
                "invalidity": _INVALIDITY[trial.status],
                "correctness": int(valid),
                "measurements": measurements,
            }
        )
    return {"schema_version": "1.0.0", "results": results}


def export(trials: list[Trial], path: Path) -> None:
    """Write trials as the file's name says: .parquet, .csv, .t4.json, .jsonl or .jsonl.gz.

    Raises:
        ValueError: another ending.
    """
    if path.suffix == ".parquet":
        write_parquet(trials, path)
    elif path.suffix == ".csv":
        frame(trials).to_csv(path, index=False, lineterminator="\n")
    elif path.name.endswith(".t4.json"):
        path.write_text(json.dumps(t4(trials), indent=1) + "\n", encoding="utf-8")
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(vars(t)) + "\n" for t in trials)
    else:
        raise ValueError(f"export: expected .parquet, .csv, .t4.json, .jsonl or .jsonl.gz, got {path.name}")


def frame_of_tables(tables: db.Tables) -> pd.DataFrame:
    """All winner rows that look-ups use, one line each: gpu, op, source, key and config fields, times, gain."""
    lines = []
    for gpu in tables.gpus():
        for op in tables.ops(gpu):
            for i, source in enumerate(tables.sources):
                table = tables.table(i, gpu, op)
                for row in table.rows if table else []:
                    config = {f"config.{n}": v for n, v in row.config.items()}
                    key = {f"key.{n}": v for n, v in row.key.items()}
                    measured = {n: getattr(row, n) for n in ("rank", *db.MEASURED)}
                    gain = {"gain": row.default_us / row.us}
                    lines.append({"gpu": gpu, "op": op, "source": source.name} | key | config | measured | gain)
    return pd.DataFrame(lines)
