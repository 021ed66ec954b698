"""Check the drafts of this folder against scaled_mm_group's reference, then time them beside today's and DeepGEMM.

    python tests/drafts/block/run_block.py

Options and what they do: tests/drafts/trial.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import candidates
import timing
import trial

PLAN = trial.Plan(
    script=__file__, op=candidates.OP, names=candidates.ALL, first=candidates.FIRST, shapes=len(candidates.SHAPES),
    draft=candidates.draft, checks=candidates.checks, fits=candidates.fits, sizes=candidates.sizes,
    time_all=timing.time_all, warm=timing.warm,
)  # fmt: skip


def main() -> int:
    return trial.main(PLAN)


if __name__ == "__main__":
    sys.exit(main())
