"""Laws of the dense products' Gluon kernels, with configs and sizes that the laws of small inputs do not reach."""

import pytest
import torch
from op_laws import make

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close
from fpk.device import of
from fpk.kernels.gemm._gluon_late import late_fits
from fpk.kernels.gemm._scaled_space import late, late_space
from fpk.op import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on the H200")

OP = OPS["scaled_mm"]


def short(config):
    return "-".join(str(config[name]) for name in ("BLOCK_M", "BLOCK_N", "STAGES", "GROUP_M", "CLUSTER"))


def check_launch(config, case):
    """What the kernel can do, also where no config of it is legal yet (biases, zero points, other output types)."""
    args = make(OP, PLAIN | case)
    bound = OP.bind(**args)
    if late_fits(config, of(args["a"].device), args["a"], args["b"], bound["out_dtype"]):
        assert_close(OP.launch(**args, config=config), OP.reference(**args), OP.tolerance(bound), f"{config} {case}")
        return 1
    return 0


PLAIN = dict(fast_accum=True, bias=False, zero_point=False, kind="normal", layout="contiguous")
CASES = [
    dict(M=1, N=16, K=16, out_dtype=torch.float32),
    dict(M=70, N=136, K=128, bias=True, out_dtype=torch.float16, a_granularity="tensor"),
    dict(M=300, N=264, K=272, kind="zero_rows", b_granularity="tensor", layout="rows"),
    dict(M=512, N=1536, K=1040, bias=True, dtype=torch.float8_e5m2),
    dict(M=4100, N=4096, K=512, out_dtype=torch.bfloat16),  # several tiles a program
    dict(M=2000, N=2112, K=400, bias=True, out_dtype=torch.float16),
    dict(M=300, N=264, K=1152, dtype=torch.int8),
    dict(M=1000, N=1536, K=2000, dtype=torch.int8, zero_point=True, bias=True, out_dtype=torch.float32),
    dict(M=4100, N=2112, K=640, dtype=torch.int8, zero_point=True, a_granularity="tensor", out_dtype=torch.float16),
]


@pytest.mark.parametrize(
    "config",
    [late(128, 256, 4), late(128, 256, 2, 8, 1), late(256, 128, 3, 2), late(128, 128, 6, 16), late(128, 64, 3, 4, 1)],
    ids=short,
)  # fmt: skip
def test_results_that_leave_late(config):
    assert sum(check_launch(config, case) for case in CASES) >= 5


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_programs_in_pairs_agree_with_themselves(dtype):
    """A tile that were overwritten too early, or read too early, would now and then give other sums."""
    args = make(OP, PLAIN | dict(M=2000, N=4096, K=1024, dtype=dtype))
    device = of(args["a"].device)
    configs = [c for c in late_space(2000) if OP.is_legal(c, OP.bind(**args), device)]
    first = OP.launch(**args, config=configs[0])
    for config in configs:
        for _ in range(20):
            assert torch.equal(OP.launch(**args, config=config), first)
