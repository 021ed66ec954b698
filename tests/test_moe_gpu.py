"""Expert ops at sizes that only a GPU can hold."""

import pytest
import torch

from fpk import db
from fpk.check import assert_close, rel_error
from fpk.device import of
from fpk.kernels.moe._expert_streams import streams
from fpk.kernels.moe._grouped import gathered
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


GROUP = OPS["grouped_scaled_mm_group"]
STREAMS = {
    "plain": streams(), "deep": streams(deep=True), "same-step": streams(ahead=False), "order": streams(order=True),
    "deep-order": streams(deep=True, order=True), "pairs": streams(cluster=2),
    "pairs-order": streams(cluster=2, order=True), "deep-pairs": streams(cluster=2, deep=True),
}  # fmt: skip
ROWS_AND_GATHER = [(name, gather) for name in STREAMS for gather in (0, 4) if not (gather and "pairs" in name)]
# whole tiles; tails of rows and columns and odd steps; a tail of K; experts without rows; rows of none; one expert;
# many tiles a program, many experts
EDGES = [
    dict(M=1024, N=1024, K=1024, E=4), dict(M=600, N=1096, K=1152, E=5), dict(M=777, N=328, K=1168, E=3),
    dict(M=900, N=512, K=384, E=40, spread="skewed"), dict(M=1500, N=776, K=128, E=7, dropped=0.5),
    dict(M=700, N=768, K=640, E=5, spread="one"), dict(M=4096, N=6144, K=512, E=8), dict(M=8192, N=1536, K=768, E=128),
]  # fmt: skip
KINDS = (
    {}, dict(dtype=torch.float8_e5m2), dict(scale_layout="column"), dict(out_dtype=torch.float16, layout="rows"),
    dict(scale_layout="token"),
)  # fmt: skip


def check_streams(config, args):
    """A launch beside the reference."""
    bound = GROUP.bind(**args)
    assert GROUP.is_legal(config, bound, of(args["a"].device))
    out = GROUP.launch(**args, config=config)
    assert_close(out, GROUP.reference(**bound), GROUP.tolerance(bound), f"{config}")
    return out


@pytest.mark.parametrize(("name", "gather"), ROWS_AND_GATHER)
def test_streams_at_every_type_and_edge(name, gather):
    """And the same bits again; and those of rows that were put in order before."""
    for i, case in enumerate(EDGES):
        kind = KINDS[i % len(KINDS)] if name in ("plain", "order") else {}
        args = GROUP.inputs(**case, **kind, gather=gather, device="cuda", seed=i)
        if not gather and args["scale_a"].stride(1):
            args["scale_a"][args["offs"][-1].item() :] = float("nan")  # rows of no expert hold anything
        out = check_streams(STREAMS[name], args)
        for _ in range(20):
            assert torch.equal(GROUP.launch(**args, config=STREAMS[name]), out)
        if gather:
            rows = {n: gathered(args[n], args["gather"], gather) for n in ("a", "scale_a")}
            assert torch.equal(GROUP.launch(**args | rows | dict(gather=None, top_k=1), config=STREAMS[name]), out)


@pytest.mark.parametrize(("name", "gather"), ROWS_AND_GATHER)
def test_streams_waits_for_what_is_in_front_of_it(name, gather):
    """Rows from a kernel that lets this one start early, in memory that is the same again and again; and weights."""
    args = GROUP.inputs(M=2048, N=1536, K=768, E=8, gather=gather, device="cuda")
    xs = [torch.randn(args["a"].shape, device="cuda").bfloat16() * 3.0**i for i in range(8)]
    ws = [torch.randn(args["b"].shape, device="cuda").bfloat16() * 3.0**i for i in range(4)]

    def made(i):
        a, scale_a = OPS["quantize_fp8_group"](xs[i % 8])
        return dict(a=a, scale_a=scale_a)

    torch.cuda.synchronize()
    found = []
    for i in range(32):
        if i % 8 == 0:
            b, scale_b = OPS["quantize_fp8_block"](ws[i // 8])
        found.append(GROUP.launch(**args | made(i) | dict(b=b, scale_b=scale_b), config=STREAMS[name]))
    torch.cuda.synchronize()
    for i, out in enumerate(found):
        b, scale_b = OPS["quantize_fp8_block"](ws[i // 8])
        again = args | made(i) | dict(b=b, scale_b=scale_b)
        torch.cuda.synchronize()
        assert_close(out, GROUP.reference(**again), GROUP.tolerance(GROUP.bind(**again)))


def test_many_rows_an_expert_stream_by_default():
    args = GROUP.inputs(M=2048, N=1536, K=768, E=8, device="cuda")
    with db.use(db.Empty()):
        assert GROUP.config_for(**GROUP.bind(**args)) == streams()
        assert torch.equal(GROUP(**args), check_streams(streams(), args))
