"""Tables of the database that somebody damaged: a look-up gives a config that a candidate could be, and never fails."""

import random

import pytest
import torch

import fpk
from fpk import db
from fpk.device import Device, pretend
from fpk.op import OPS
from fpk.tune.arguments import outline

GPU = Device("sm90", "NVIDIA H200", "nv", 132)
RUN = db.Run("any", GPU.id, "2026-01-01", "0.1", "2.11", "3.6.0", "13", "1", "abc", "graph", "1980", "3201", "700")
ROUNDS = 60


def damaged(text: str, rng: random.Random) -> str:
    """A few characters after the header changed, dropped or doubled."""
    letters = list(text)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(text.index("\n"), len(letters))
        letters[at] = rng.choice([rng.choice('0123456789,"=-.xABZ \n'), "", letters[at] * 2])
    return "".join(letters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["quantize_fp8_token", "scaled_mm", "amax", "attention_decode", "grouped_scaled_mm"])
def test_damaged_tables(name):
    op = OPS[name]
    with pretend(GPU):
        bound = outline(op, next(iter(op.cases.values())))
        candidates = list(op.configs(**bound))
        winner = next(c for c in reversed(candidates) if op.is_legal(c, bound, GPU))
        row = db.Row(op.key(**bound), 1, winner, 1.0, 2.0, 0.1, 0, "case", RUN.run)
        good = db.dump_table([row])
        taken = 0
        for seed in range(ROUNDS):
            rng = random.Random(seed)
            text = damaged(good, rng) if seed else good
            texts = {f"{GPU.id}/{name}.csv": text, f"{GPU.id}/runs.csv": db.dump_runs([RUN])}
            with fpk.use(db.Tables(db.MemorySource(texts, "memory"))):
                config = op.config_for(**bound)
            op.validate_config(config)
            assert op.is_legal(config, bound, GPU)
            like = next(c for c in candidates if c.get("kernel") == config.get("kernel"))
            assert {n: type(v) for n, v in config.items()} == {n: type(v) for n, v in like.items()}, text
            blocks = [v for n, v in config.items() if n.startswith(("BLOCK", "num_warps"))]
            assert all(v > 0 and v & (v - 1) == 0 for v in blocks), text
            taken += config == winner
        assert 0 < taken < ROUNDS


def test_a_table_that_is_no_text_is_a_miss(tmp_path):
    path = tmp_path / GPU.id
    path.mkdir()
    (path / "amax.csv").write_bytes(bytes(range(256)) * 40)
    (path / "runs.csv").write_bytes(b"\xff\xfe")
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
    op = OPS["amax"]
    with pretend(GPU), pytest.warns(), fpk.use(tmp_path):
        assert op.config_for(x) == next(iter(op.configs(**op.bind(x))))
