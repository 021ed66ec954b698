"""Tables of an op for this GPU, inside a campaign: `fpk.tune.h200_job` that compiles on the CPU and waits for its turn.

    python tests/bench/tune.py --ops OP --cases "M=16 N=4096 K=7168;..." --out DIR --state SCRATCH [--all-of KERNEL,...]
        [--list]

Compete: the op's first DEFAULTS choices, what look-ups answer for the case, all configs of kernels that `--all-of`
names, then configs of the op's tables, the most frequent first, and a fixed choice of others. Cases that trials in DIR
(trials*.jsonl.gz, of earlier calls) have finals of are not tuned anew.
DIR gets `trials-N.jsonl.gz` and `runs-N.json`; fold.py makes tables of them.
"""

import argparse
import hashlib
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gate

from fpk import db
from fpk.device import pretend
from fpk.op import OPS, Op
from fpk.tune import h200_job
from fpk.tune.arguments import legal_candidates, outline
from fpk.tune.export import read_trials
from fpk.tune.trials import canonical

FLUSH_S = 6.0  # of a turn, left for writing
DEFAULTS = 2  # the default, and the next one, which is it on other versions of triton


def frequent(op: str, gpu: str) -> list[str]:
    """Configs of an op's table, best ranks first, then by how many rows have them."""
    table = db.Tables(db.DirectorySource(db.packaged_directory())).table(0, gpu, op)
    counts: Counter[str] = Counter()
    for row in table.rows if table is not None else ():
        counts[canonical(row.config)] += 1000 if row.rank <= 1 else 1
    return [config for config, _ in counts.most_common()]


def tuned(folder: Path) -> set[tuple[str, str]]:
    """(op, case) that earlier calls finished."""
    trials = [t for path in sorted(folder.glob("trials*.jsonl.gz")) for t in read_trials(path)]
    return {(t.op, t.case) for t in trials if t.stage == "final"}


class Job(h200_job.Job):
    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.env = {}  # triton's cache is everybody's
        self.common: dict[str, list[str]] = {}
        if self.executor.endswith(":cuda"):
            self.compiling = ("fpk.tune.executor:static_filter", asdict(self.device))

    def candidates(self, op: Op[..., Any], case: dict[str, Any], limit: int) -> list[dict[str, Any]]:
        bound, gpu = outline(op, case), db.gpu_id(self.device)
        found = legal_candidates(op, bound, self.device)
        with pretend(self.device):
            answers = [canonical(a.row.config) for a in db.explain(op.name, op.key(**bound), self.device)]
        common = self.common.setdefault(op.name, frequent(op.name, gpu))
        first = {config: place for place, config in reversed(list(enumerate([*answers, *common])))}
        wanted = self.arguments.all_of.split(",")

        def rank(i: int) -> tuple[Any, ...]:
            text = canonical(found[i])
            place = first.get(text, len(first))
            known = place < len(answers) or found[i].get("kernel") in wanted
            return 0 if i < DEFAULTS else 1 if known else 2, place, hashlib.sha256(text.encode()).digest()

        ranks = {i: rank(i) for i in range(len(found))}
        return [found[i] for i in sorted(sorted(ranks, key=ranks.__getitem__)[: limit or None])]

    def tune(self, *arguments: Any) -> None:
        self.until = min(self.until, gate.turn() - FLUSH_S)
        super().tune(*arguments)


def arguments_of() -> argparse.ArgumentParser:
    parser = h200_job.arguments_of(__doc__)
    parser.add_argument("--all-of", default="", help="kernels whose configs all compete")
    parser.add_argument("--list", action="store_true", help="cases and their numbers of candidates; nothing is run")
    return parser


def main() -> int:
    options = arguments_of().parse_args()
    out, name = Path(options.out), options.ops
    out.mkdir(parents=True, exist_ok=True)
    cases = [db.parse_case(c) for c in options.cases.split(";") if c.strip()]
    cases = cases or h200_job.grid(OPS[name], h200_job.LAYERS, h200_job.TOKENS)
    done = tuned(out)
    cases = [case for case in cases if (name, db.spell_case(case)) not in done]
    options.cases, options.out = "; ".join(db.spell_case(case) for case in cases), options.state
    if options.list:
        job = Job(options)
        for case in cases:
            print(name, db.spell_case(case), len(job.candidates(OPS[name], case, options.max_candidates)))
        return 0
    if not cases:
        print("nothing is left")
        return 0
    number = len(list(out.glob("trials*.jsonl.gz")))
    job = Job(options)
    write, begun = job.write_trials, time.monotonic()

    def write_trials() -> None:
        write()
        for made, kept in (("trials.jsonl.gz", f"trials-{number}.jsonl.gz"), ("runs.json", f"runs-{number}.json")):
            (out / kept).write_bytes((job.out / made).read_bytes())

    job.write_trials = write_trials  # type: ignore[method-assign]
    job.run()
    print(f"{time.monotonic() - begun:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
