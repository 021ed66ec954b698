"""Laws of the kernels of block-scaled products whose scales stream through the ring, at sizes that reach all."""

import itertools

import pytest
import torch
from op_laws import check_launch, make

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close
from fpk.device import of
from fpk.kernels.gemm._group_space import joint, joint_space, ordered, ordered_space
from fpk.op import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on the H200")

OP, COLUMN, E5M2 = OPS["scaled_mm_group"], dict(scale_layout="column"), dict(dtype=torch.float8_e5m2)
ODD = [  # of few tokens: what `joint` can and `ordered` cannot are results in fp32 and odd rows of them
    dict(M=1, N=16, K=128, bias=True, out_dtype=torch.float16),
    dict(M=3, N=576, K=1600, kind="zero_rows", layout="rows", **E5M2),
    dict(M=17, N=200, K=7168, out_dtype=torch.float32, **COLUMN),
    dict(M=64, N=2112, K=896, offsets=(64, 0), bias=True),
    dict(M=250, N=1000, K=384, blocks=(128, -1, 128), **COLUMN),
    dict(M=64, N=327, K=1568, blocks=(128, 128, -1), **COLUMN),
]
FEW = [  # whole tiles; tails of rows, columns and K; rows' scales by TMA and by copies; many steps
    dict(M=64, N=1024, K=1024, **COLUMN), dict(M=33, N=1096, K=1152, **COLUMN), dict(M=130, N=328, K=1568, **COLUMN),
    dict(M=64, N=2112, K=1536), dict(M=20, N=4096, K=512, bias=True, **COLUMN), dict(M=64, N=6144, K=256, **COLUMN),
    dict(M=5, N=776, K=128, out_dtype=torch.float16, **COLUMN), dict(M=64, N=4096, K=7168, **E5M2, **COLUMN),
]  # fmt: skip
MANY = [  # and of several tiles a program
    dict(M=512, N=1024, K=1024, **COLUMN), dict(M=300, N=1096, K=1152, **COLUMN), dict(M=129, N=328, K=1568, **COLUMN),
    dict(M=700, N=2112, K=1536), dict(M=1024, N=4096, K=512, bias=True, **COLUMN),
    dict(M=257, N=776, K=128, out_dtype=torch.float16, **COLUMN), dict(M=2500, N=6144, K=256, **COLUMN),
    dict(M=4096, N=2112, K=7168, **E5M2, **COLUMN), dict(M=1, N=16, K=128, bias=True), dict(M=2501, N=24576, K=1536),
    dict(M=900, N=1000, K=1168, blocks=(128, -1, 128), bias=True, out_dtype=torch.float16, **COLUMN),
    dict(M=514, N=1320, K=1040, blocks=(128, 256, -1), offsets=(128, 0), layout="rows", kind="zero_rows", **COLUMN),
]  # fmt: skip
# the first two meet every case, the others some, which take less time to compile
JOINT = [joint(64, 2), joint(128, 1), joint(64, 1), joint(128, 2), joint(64, 4), joint(128, 4), joint(64, 8)]
ORDERED = [ordered(256), ordered(192), ordered(256, 1), ordered(192, 1), ordered(256, group=1, stages=2)]


@pytest.mark.parametrize("config", JOINT, ids=str)
def test_programs_that_share_a_tile(config):
    number, cases = JOINT.index(config), FEW + ODD
    for case in cases if number < 2 else cases[number % 3 :: 3]:
        check_launch(OP, config, case)


@pytest.mark.parametrize("config", ORDERED, ids=str)
def test_consumers_that_issue_by_turns(config):
    number = ORDERED.index(config)
    for case in MANY if number < 2 else MANY[number % 2 :: 2]:
        check_launch(OP, config, case)


def test_they_agree_with_themselves():
    """A slot that were overwritten too early, or read too early, would now and then give other sums."""
    cases = [([*joint_space(64)], dict(M=64, N=2112, K=2048)), ([*ordered_space(512)], dict(M=512, N=2112, K=2048))]
    for (space, case), more in itertools.product(cases, (COLUMN, {})):
        args = make(OP, case | more)
        bound, device = OP.bind(**args), of(args["a"].device)
        found = [config for config in space if OP.is_legal(config, bound, device)]
        assert found
        for config in found:
            first = OP.launch(**args, config=config)
            for _ in range(20):
                assert torch.equal(OP.launch(**args, config=config), first), config


@pytest.mark.parametrize("config", [joint(64, 2), joint(128, 1), ordered(192), ordered(256, 1)], ids=str)
@pytest.mark.parametrize("layout", ["row", "column", "tma"])
def test_they_wait_for_what_is_in_front_of_them(config, layout):
    """Tokens and scales from a kernel that lets this one start early, in memory that is the same again and again."""
    quantize, (n, k) = OPS["quantize_fp8_group"], (4096, 4096)
    b, scale_b = OPS["quantize_fp8_block"](torch.randn(n, k, device="cuda", dtype=torch.bfloat16))
    for m in (1, 63, 200):
        xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 3.0**i for i in range(8)]
        torch.cuda.synchronize()
        found = []
        for x in xs * 4:
            a, scale_a = quantize(x, layout=layout)
            found.append(OP.launch(a, b, scale_a, scale_b, config=config))
            del a, scale_a
        torch.cuda.synchronize()
        for x, out in zip(xs * 4, found, strict=True):
            a, scale_a = quantize(x, layout=layout)
            torch.cuda.synchronize()
            assert_close(out, OP.reference(a, b, scale_a, scale_b), OP.tolerance(OP.bind(a, b, scale_a, scale_b)))


@pytest.mark.parametrize("config", [joint(64, 2), ordered(192), ordered(256)], ids=str)
def test_scales_that_begin_anywhere(config):
    """Tokens in the middle of a batch: their scales are neighbours, but TMA cannot read from where they begin."""
    args = make(OP, dict(M=408, N=1096, K=1152, **COLUMN))
    whole = OP.launch(**args, config=config)
    for first, last in ((1, 70), (3, 300), (4, 400)):
        part = dict(a=args["a"][first:last], scale_a=args["scale_a"][first:last])
        assert torch.equal(OP.launch(**args | part, config=config), whole[first:last])
