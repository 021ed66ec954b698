"""Check the drafts of this folder against scaled_mm's reference, then time them beside today's kernels and peers.

    python tests/drafts/few/run_few.py

Options and what they do: tests/drafts/trial.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import few_candidates
import few_timing
import trial

PLAN = trial.Plan(
    script=__file__, op=few_candidates.OP, names=few_candidates.ALL, first=few_candidates.FIRST,
    shapes=len(few_candidates.SHAPES), draft=few_candidates.draft, checks=few_candidates.checks,
    fits=few_candidates.runs, sizes=few_candidates.sizes, time_all=few_timing.time_all,
    more=few_candidates.behind_another,
)  # fmt: skip


def main() -> int:
    return trial.main(PLAN)


if __name__ == "__main__":
    sys.exit(main())
