"""What a plan takes, and what results/ and autotune_db/ lack of it or have from before a change."""

import csv
import importlib.metadata
import subprocess
from collections.abc import Sequence

from campaign_job import ROOT, Measurement

from fpk import db


def show(plan: Sequence[Measurement]) -> int:
    total = 0.0
    for number, m in enumerate(plan, 1):
        total += m.seconds * m.quiet
        kind = "quiet host" if m.host else "quiet" if m.quiet else "others"
        needs = ", ".join([*([f"{m.gpus} GPUs"] if m.gpus > 1 else []), *m.needs])
        print(f"{number:3} {m.name:20} {kind:10} {m.seconds:4.0f} s, at most {m.most:4.0f} s  {m.fills}")
        print(f"{'':24} {'; '.join(filter(None, [state(m), needs and f'needs {needs}']))}")
    print(f"{total:.0f} s of a quiet GPU in all, and what is not quiet beside it")
    return 0


def state(m: Measurement) -> str:
    return rows_of_table(m) if m.table else rows_of_csv(m)


def rows_of_csv(m: Measurement) -> str:
    path = ROOT / "results" / m.csv
    if not m.csv:
        return "no file of results"
    if not path.exists():
        return f"missing: results/{m.csv}"
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    dates, versions = ({r.get(n, "") for r in rows} - {""} for n in ("date", "triton"))
    said = f"results/{m.csv}: {len(rows)} rows"
    said += f" of {min(dates)}" if dates else ""
    said += f", triton {', '.join(sorted(versions))}" if versions else ""
    changed = last_change(m.inputs)
    return said + (
        f", STALE: {changed} is the last change of {' '.join(m.inputs)}" if dates and changed > min(dates) else ""
    )


def last_change(paths: Sequence[str]) -> str:
    """Date of the last commit that touched them; "" where that cannot be known."""
    if not paths:
        return ""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%cs", "--", *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


def rows_of_table(m: Measurement) -> str:
    """Of the cases that are wanted: how many the tables lack, and how many they have from older kernels."""
    import fpk.kernels  # noqa: F401  declares every op
    from fpk.tune.lint import stale

    source = db.DirectorySource(db.packaged_directory())
    wanted = {db.spell_case(db.parse_case(c)) for c in m.wanted.split(";")}
    held = {
        row.case
        for gpu in source.gpus()
        for row in db.parse_table(source.read(gpu, f"{m.table}.csv") or "")
        if row.case in wanted
    }
    versions = {"torch": "", "triton": ""} | {n: importlib.metadata.version(n) for n in ("torch", "triton")}
    old = {
        row.case
        for _, op, row, why in stale(source, versions)
        if op == m.table and "kernel" in why and row.case in wanted
    }
    return f"{len(wanted)} cases, {len(wanted - held)} not in autotune_db, {len(old)} older than their kernels"
