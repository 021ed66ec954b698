"""Expert ops at sizes that only a GPU can hold."""

import pytest
import torch

from fpk.check import rel_error
from fpk.device import of
from fpk.op import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on the H200")

ROWS, TOP_K, N, K, E = 100_000, 6, 4096, 512, 16  # 600 000 rows: 2.5e9 outputs


@pytest.mark.parametrize("name", ["grouped_scaled_mm", "grouped_scaled_mm_group", "grouped_mm"])
@pytest.mark.parametrize("gather", [0, TOP_K])
def test_rows_beyond_int32(name, gather):
    op = OPS[name]
    args = op.inputs(M=ROWS * TOP_K, N=N, K=K, E=E, gather=gather, device="cuda")
    out = op(**args)
    pick = torch.tensor([0, 1, 77_777, 300_001, ROWS * TOP_K - 2], device="cuda")
    expert = torch.searchsorted(args["offs"], pick.to(torch.int32), right=True)
    source = args["gather"].long()[pick].clamp(min=0) // gather if gather else pick
    few = {n: v for n, v in args.items() if n not in ("offs", "gather", "top_k")}
    for place, e, row in zip(pick.tolist(), expert.tolist(), source.tolist(), strict=True):
        one = few | dict(a=args["a"][row : row + 1], b=args["b"][e : e + 1])
        if "scale_a" in one:
            one |= dict(scale_a=args["scale_a"][row : row + 1], scale_b=args["scale_b"][e : e + 1])
        expected = op.reference(**one, offs=torch.ones(1, dtype=torch.int32, device="cuda"))
        assert rel_error(out[place : place + 1], expected) < 4e-3


def test_permute_and_unpermute_beyond_int32():
    T, hidden = ROWS, 4096
    ids = torch.randint(0, E, (T, TOP_K), device="cuda", dtype=torch.int32)
    index, position, offs = OPS["sort_by_expert"](ids, E)
    assert offs[-1].item() == T * TOP_K and torch.equal(
        index.long().sort().values, torch.arange(T * TOP_K, device="cuda")
    )
    x = torch.randn(T, hidden, device="cuda", dtype=torch.bfloat16)
    rows, _ = OPS["moe_permute"](x, index, TOP_K)
    weights = torch.full((T, TOP_K), 1 / 8, device="cuda")
    back = OPS["moe_unpermute"](rows, position, weights)
    assert torch.equal(back[-5:], (x[-5:].float() * 0.75).to(torch.bfloat16))
    assert torch.equal(back[:5], (x[:5].float() * 0.75).to(torch.bfloat16))


@pytest.mark.parametrize("name", ["grouped_scaled_mm", "grouped_scaled_mm_group"])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize(
    "case",
    [
        dict(M=70, N=256, K=384, E=9), dict(M=300, N=200, K=272, E=5, dropped=0.5, bias=True),
        dict(M=1000, N=384, K=1024, E=33, spread="skewed"), dict(M=100, N=128, K=128, E=257, dropped=1.0),
        dict(M=2000, N=1024, K=256, E=256, spread="even"), dict(M=1, N=128, K=7168, E=3),
    ],
)  # fmt: skip
def test_few_rows_an_expert(name, rows, case):
    """The kernel that streams weights (_gluon_slim), which random candidates seldom are."""
    op = OPS[name]
    args = op.inputs(**case, device="cuda")
    expected = op.reference(**args)
    for stages, per_sm in ((5, 2), (4, 2), (3, 3), (9, 1)):
        config = dict(
            kernel="gluon", BLOCK_M=rows, BLOCK_N=128, GROUP_M=1, STAGES=stages, PER_SM=per_sm, num_warps=4
        )  # fmt: skip
        bound = op.bind(**args)
        if op.is_legal(config, bound, of(torch.device("cuda"))):
            out = op.launch(**args, config=config)
            assert rel_error(out, expected) < 4e-3
            assert torch.equal(out, op.launch(**args, config=config))
