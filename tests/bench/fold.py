"""Results of a campaign into the repository: autotune_db/, the logs in tests/tune_data/, and results/.

    python tests/bench/fold.py OUT ... [--into ROOT]

A key that `tables_*` of these results measured to its finals takes the place of what was known of it; `verify_*` go to
the logs of shapes that no table has. Rows of CSV files take the place of those of the same cell; tests/trust/summary.py
collects verdicts. Folding nothing changes nothing.
"""

import argparse
import csv
import json
import sys
from pathlib import Path
from typing import Any

from campaign_plan import PLAN

import fpk.kernels  # noqa: F401  declares every op
from fpk import db
from fpk.tune.export import export, read_trials
from fpk.tune.records import texts_of
from fpk.tune.trials import Trial

ROOT = Path(__file__).resolve().parents[2]
DENSE = ("scaled_mm", "scaled_mm_group", "mm_weight_only")
EXPERTS = ("grouped_scaled_mm_group",)  # too few layers for a log that look-ups are judged by
# what tells apart the rows of a file of results; all rows of other files are measured together
CELLS = {
    "products.csv": ("product", "layer", "M", "fast_accum"),
    "packed.csv": ("product", "M", "N", "K"),
    "moe.csv": ("model", "scheme", "routing", "T", "stage"),
    "online.csv": ("layers", "method", "scheme"),
    "exactness.csv": ("op",),
    "quantizers.csv": ("op", "M", "K", "variant"),
}


def complete(trials: list[Trial]) -> list[Trial]:
    """Of keys that have finals: others were cut."""
    done = {(t.op, t.gpu, t.key) for t in trials if t.stage == "final"}
    return [t for t in trials if (t.op, t.gpu, t.key) in done]


def measured(folders: list[Path], kind: str) -> tuple[list[Trial], dict[str, Any]]:
    """Trials and runs of measurements whose names begin with `kind`; of a key in several, the last folder's."""
    trials: dict[tuple[str, str, str], list[Trial]] = {}
    runs: dict[str, Any] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"{kind}_*/trials-*.jsonl.gz")):
            new: dict[tuple[str, str, str], list[Trial]] = {}
            for t in complete(read_trials(path)):
                new.setdefault((t.op, t.gpu, t.key), []).append(t)
            trials |= new
            about = path.with_name(path.name.replace("trials", "runs").replace(".jsonl.gz", ".json"))
            runs |= json.loads(about.read_text())
    return [t for group in trials.values() for t in group], runs


def united(old: list[Trial], new: list[Trial]) -> list[Trial]:
    keys = {(t.op, t.gpu, t.key) for t in new}
    return [t for t in old if (t.op, t.gpu, t.key) not in keys] + new


def replaced(path: Path, text: str) -> None:
    """A table gets the rows of `text` in place of those that it had for their keys."""
    old = path.read_text() if path.exists() else ""
    rows = db.parse_table(text)
    keys = {frozenset(row.key.items()) for row in rows}
    kept = [row for row in (db.parse_table(old) if old else []) if frozenset(row.key.items()) not in keys]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(db.dump_table(kept + rows), encoding="utf-8", newline="\n")


def list_runs(path: Path, text: str) -> None:
    """Runs that rows of the tables beside it name."""
    known = (db.parse_runs(path.read_text()) if path.exists() else {}) | db.parse_runs(text)
    tables = [t for t in path.parent.glob("*.csv") if t != path]
    used = {row.run for table in tables for row in db.parse_table(table.read_text())}
    text = db.dump_runs(run for name, run in known.items() if name in used)
    path.write_text(text, encoding="utf-8", newline="\n")


def read_rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fold_rows(folders: list[Path], root: Path) -> None:
    """CSV files of measurements into those that the plan says they fill."""
    for m in PLAN:
        found = [path for folder in folders for path in sorted((folder / m.name).glob("*.csv"))]
        new = [row for path in found for row in read_rows(path)] if m.csv and not m.csv.endswith("trust.csv") else []
        if not new:
            continue
        path = root / "results" / m.csv
        old, cell = read_rows(path) if path.exists() else [], CELLS.get(path.name)
        kept = {tuple(row.get(n, "") for n in cell): row for row in (*old, *new)} if cell else dict(enumerate(new))
        names = list(dict.fromkeys(n for row in kept.values() for n in row))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept.values())
        print(f"{m.csv}: {len(new)} rows measured by {m.name}")


def fold(folders: list[Path], root: Path) -> None:
    data, base = root / "tests" / "tune_data", root / "autotune_db"
    new, runs = measured(folders, "tables")
    verified, _ = measured(folders, "verify")
    for log, found in (("tuned", new), ("verify", verified)):
        for kind in ("dense", "packed"):
            fresh = [t for t in found if (t.op in DENSE) is (kind == "dense") and t.op not in EXPERTS]
            path = data / f"{log}_{kind}.parquet"
            if fresh:
                export(united(read_trials(path) if path.exists() else [], fresh), path)
    texts = texts_of(new, runs) if new else {}
    for path in sorted(texts, key=lambda path: path.endswith("runs.csv")):
        (list_runs if path.endswith("runs.csv") else replaced)(base / path, texts[path])
    for log, found in (("tables", new), ("logs of other shapes", verified)):
        print(f"{log}: {len({(t.op, t.key) for t in found})} keys, {len(found)} trials")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--into", type=Path, default=ROOT)
    options = parser.parse_args()
    fold(options.folders, options.into)
    fold_rows(options.folders, options.into)
    return 0


if __name__ == "__main__":
    sys.exit(main())
