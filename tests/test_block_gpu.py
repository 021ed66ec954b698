"""Laws of the Gluon kernels of block-scaled products that are clusters of programs, at sizes that reach all of them."""

import pytest
import torch
from op_laws import check_launch, make

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import of
from fpk.kernels.gemm._group_hopper import joint, joint_space
from fpk.op import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on the H200")

OP = OPS["scaled_mm_group"]
FEW = [
    dict(M=1, N=16, K=128, bias=True, out_dtype=torch.float16),
    dict(M=3, N=576, K=1600, kind="zero_rows", layout="rows", dtype=torch.float8_e5m2),
    dict(M=17, N=200, K=7168, scale_layout="column", out_dtype=torch.float32),
    dict(M=64, N=2112, K=896, offsets=(64, 0), bias=True),
    dict(M=250, N=1000, K=384, blocks=(128, -1, 128), scale_layout="column"),
]
JOINT = [joint(64, 32, 8, 2, per_sm=2), joint(64, 64, 10, 1), joint(64, 128, 8, 4)]


@pytest.mark.parametrize("config", JOINT, ids=str)
def test_programs_that_share_a_tile(config):
    for case in FEW:
        check_launch(OP, config, case)


def test_clusters_agree_with_themselves():
    """A tile that were overwritten too early, or read too early, would now and then give other sums."""
    args = make(OP, dict(M=64, N=2112, K=2048))
    bound, device = OP.bind(**args), of(args["a"].device)
    for config in [*joint_space(64)][::3]:
        if OP.is_legal(config, bound, device):
            first = OP.launch(**args, config=config)
            for _ in range(20):
                assert torch.equal(OP.launch(**args, config=config), first), config
