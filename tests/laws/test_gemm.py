"""Laws of products whose scales change along K."""

import pytest
import torch
from op_laws import DEVICE, legal_configs, make

from fpk.check import assert_close
from fpk.op import OPS

OP = OPS["scaled_mm_group"]
# (group, block_cols, offset_k): cuts of a weight begin inside a block, at its edge, and further into it than K is long
CUTS = [(128, 128, 0), (128, 128, 32), (128, 128, 96), (128, 128, 127), (64, 128, 96), (32, 96, 64), (48, 48, 16)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("K", [32, 48, 64, 96, 160, 256])
def test_no_step_meets_a_change_of_scale(K, cut):
    group, cols, offset = cut
    args = make(OP, dict(M=3, N=5, K=K, blocks=(group, 1, cols), offsets=(0, offset)))
    scale_of = [(k // group, (k + offset) // cols) for k in range(K)]
    for config in legal_configs(OP, args):
        if config["kernel"] != "segment":
            steps = [scale_of[k : k + config["BLOCK_K"]] for k in range(0, K, config["BLOCK_K"])]
            assert all(len(set(step)) == 1 for step in steps), config


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_cuts_sum_to_the_whole(cut, launches):
    """The product of a weight is the sum of those of its parts, wherever along K it is cut."""
    group, cols, offset = cut
    K = offset + 96
    g = torch.Generator(DEVICE).manual_seed(0)
    a = torch.randint(-127, 128, (7, K), generator=g, device=DEVICE, dtype=torch.int32).to(torch.int8)
    b = torch.randint(-127, 128, (9, K), generator=g, device=DEVICE, dtype=torch.int32).to(torch.int8)
    scale_a = torch.rand((7, 1), generator=g, device=DEVICE) + 0.5  # per token: a part's groups begin with the part
    scale_b = torch.rand((9, -(-K // cols)), generator=g, device=DEVICE) + 0.5
    common = dict(group=group, block_rows=1, block_cols=cols, out_dtype=torch.float32)

    def product(start, stop):
        blocks = scale_b[:, start // cols : -(-stop // cols)]
        groups = scale_a.expand(7, -(-(stop - start) // group))
        return OP(a[:, start:stop], b[:, start:stop], groups, blocks, offset_k=start % cols, **common)

    parts = product(offset, K) + (product(0, offset) if offset else 0.0)
    assert_close(parts, product(0, K), 1e-6)
    assert launches() > 0


@pytest.mark.parametrize("name", ["scaled_mm_group", "mm_weight_only"])
def test_no_column_is_refused(name):
    """There would be no scale to read; `scaled_mm`, whose scales do not change along K, gives zeros."""
    args = make(OPS[name], dict(M=3, N=5, K=0))
    with pytest.raises(ValueError, match=f"{name}.a: expected at least one element along dimension 1, got \\(3, 0\\)"):
        OPS[name](**args)


@pytest.mark.parametrize("M", [1, 16, 64, 130])
def test_only_the_scales_of_the_matrices_count(M, launches):
    """Where a tile reaches over the edge of the weights, what lies behind the last scales is not taken for one."""
    args = make(OP, dict(M=M, N=576, K=384))
    for name in ("scale_a", "scale_b"):
        scale = args[name]
        around = torch.full((scale.shape[0] + 2, scale.shape[1]), float("nan"), device=scale.device)
        around[1:-1] = scale
        args[name] = around[1:-1]
    assert_close(OP(**args), OP.reference(**args), OP.tolerance(OP.bind(**args)))
    assert launches() > 0
