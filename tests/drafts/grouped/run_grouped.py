"""Check the grouped drafts against grouped_scaled_mm_group's reference, then time them beside today's and DeepGEMM.

    python tests/drafts/grouped/run_grouped.py

Options and what they do: tests/drafts/trial.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import grouped_candidates
import grouped_timing
import trial

PLAN = trial.Plan(
    script=__file__, op=grouped_candidates.OP, names=tuple(grouped_candidates.ALL),
    first=tuple(grouped_candidates.CANDIDATES), shapes=len(grouped_candidates.SHAPES), draft=grouped_candidates.draft,
    checks=grouped_candidates.checks, fits=lambda name, case: True, sizes=grouped_candidates.sizes,
    time_all=grouped_timing.time_all, warm=grouped_timing.warm, launches=2,
)  # fmt: skip


def main() -> int:
    return trial.main(PLAN)


if __name__ == "__main__":
    sys.exit(main())
