"""What was tried to break fpk, as tables: the measured part of docs/trust.md, from results/*.csv.

PYTHONPATH=tests python -m trust.summary              rewrite docs/trust.md
PYTHONPATH=tests python -m trust.summary --check      exit 1 if it is not what this would write
PYTHONPATH=tests python -m trust.summary collect DIRECTORY ... --versions "..."
                                                      verdicts.csv of trust.sanitize into the table of the H200
"""

import argparse
import csv
import datetime
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "trust.md"
ON_GPU = RESULTS / "nv-h200-sm90-132" / "trust.csv"
COLUMNS = ("op", "tool", "launches", "verdict", "note", "versions", "date")
GOOD = ("right", "same bits", "clean", "found")


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(header), ["---"] * len(list(header)), *rows]
    return "\n".join("| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines)


def on_the_gpu() -> str:
    """One line a tool; ops that it did not pass by name."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for row in read(ON_GPU):
        groups[row["tool"]].append(row)
    rows = []
    for tool, found in groups.items():
        ops = [r for r in found if not r["op"].startswith("a planted")]
        planted = next((r["verdict"] for r in found if r["op"].startswith("a planted")), "")
        bad = [f"{r['op']}: {r['verdict']}" for r in ops if r["verdict"] not in GOOD]
        dates = sorted({r["date"] for r in ops})
        rows.append([
            tool, len(ops) - len(bad), f"{sum(int(r['launches']) for r in ops):,}", "; ".join(bad) or "none", planted,
            dates[-1],
        ])  # fmt: skip
    return table(("what", "ops that pass", "launches", "the others", "a planted fault", "last run"), rows)


def mutants() -> str:
    families: dict[str, Counter] = defaultdict(Counter)
    for row in read(RESULTS / "mutants.csv"):
        parts = row["module"].split(".")
        families[parts[2] if len(parts) > 3 else "shared"][row["verdict"]] += 1
    families["all"] = sum(families.values(), Counter())
    rows = []
    for family, found in sorted(families.items(), key=lambda item: (item[0] == "all", item[0])):
        valid = found["killed"] + found["survived"] + found["open"]
        rows.append([family, valid, found["killed"], found["survived"] + found["open"],
                     f"{found['killed'] / max(valid, 1):.1%}", found["equivalent"], found["invalid"]])  # fmt: skip
    return table(("kernels of", "mutants", "killed", "alive", "share", "equivalent", "cannot run"), rows)


def short(text: str) -> str:
    """Both ends of it: what changes is often at the right."""
    return text if len(text) <= 70 else f"{text[:32]} … {text[-32:]}"


def survivors() -> str:
    """Those that live, and those that cannot be told from the kernel, with reasons."""
    rows = [
        [f"`{r['module'].removeprefix('fpk.kernels.')}.{r['function']}`", f"`{short(r['old'])}` → `{short(r['new'])}`",
         r["verdict"], r["reason"]]
        for r in read(RESULTS / "mutants.csv") if r["verdict"] in ("survived", "open", "equivalent")
    ]  # fmt: skip
    return table(("function", "change", "verdict", "why"), rows) if rows else "None."


def reports() -> str:
    found = Counter(r["verdict"] for r in read(RESULTS / "bug-reports.csv"))
    return table(("verdict", "reports"), found.most_common())


def compiled() -> str:
    groups: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in read(RESULTS / "cross.csv"):
        groups[row["target"], row["triton"]].append(row)

    def most(found: list[dict[str, str]], what: str) -> str:
        row = max(found, key=lambda r: int(r[what]))
        return f"{int(row[what]):,} ({row['op']})"

    rows = [
        [
            target, triton, len({r["op"] for r in found}), sum(int(r["configs"]) for r in found),
            sum(int(r["spills"]) for r in found), max(int(r["spills_of_rows"]) for r in found),
            *(most(found, w) for w in ("registers", "shared", "instructions")), sum(int(r["wrong"]) for r in found),
        ]
        for (target, triton), found in sorted(groups.items())
    ]  # fmt: skip
    header = (
        "target", "Triton", "ops", "kernels compiled", "spills of defaults", "most of a row", "most registers",
        "most shared memory, bytes", "most instructions", "wrong",
    )  # fmt: skip
    return table(header, rows)


PARTS = dict(gpu=on_the_gpu, mutants=mutants, survivors=survivors, reports=reports, compiled=compiled)


def written(text: str) -> str:
    for name, make in PARTS.items():
        found = re.search(rf"<!-- {name} -->\n.*?<!-- end {name} -->", text, re.S)
        assert found, f"{PAGE.name} has no part {name}"
        before, after = found.span()
        text = f"{text[:before]}<!-- {name} -->\n{make()}\n<!-- end {name} -->{text[after:]}"
    return text


def collect(directories: Iterable[Path], versions: str, date: str) -> None:
    """Later verdicts of an op and tool take the place of earlier ones; what was not reached takes nothing's."""
    rows = {(r["tool"], r["op"]): r for r in read(ON_GPU)} if ON_GPU.exists() else {}
    for directory in directories:
        for row in read(directory / "verdicts.csv"):
            if row["verdict"] not in ("not reached", "did not start"):
                taken = {n: row[n] for n in ("op", "tool", "launches", "verdict", "note")}
                rows[row["tool"], row["op"]] = taken | {"versions": versions, "date": date}
    with ON_GPU.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for _, row in sorted(rows.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="`collect` and directories")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--versions", default="")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_intermixed_args()
    if args.words:
        assert args.words[0] == "collect", args.words
        collect(map(Path, args.words[1:]), args.versions, args.date)
        return 0
    text = PAGE.read_text()
    made = written(text)
    if args.check:
        return int(made != text)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
