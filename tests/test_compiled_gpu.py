"""What torch.compile does beside calling an op: it captures graphs by itself, in memory that it keeps account of."""

import pytest
import torch
from op_laws import make

import fpk.kernels  # noqa: F401  declares every op
from fpk import db
from fpk.kernels.gemm._shares import shares
from fpk.kernels.gemm._tickets import _pools, _streams
from fpk.op import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on the H200")


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Not here: zones that are kept behind tensors would be what torch finds in the memory of its graphs."""


class One(db.Empty):
    """A database that knows one config."""

    def __init__(self, config):
        self.config = config

    def candidates(self, op, key, device):
        return [self.config]


def test_compiled_graphs_know_nothing_of_tickets():
    """Their first run has a stream and a pool of memory of its own, in which nothing but its results may stay."""
    op, config = OPS["scaled_mm"], shares(16)
    args = make(op, dict(M=16, N=2112, K=7168, bias=False, zero_point=False, kind="normal", layout="contiguous"))
    expected = op.launch(**args, config=config)
    _streams.clear(), _pools.clear()  # so that a process begins with a compiled model
    torch._dynamo.reset()
    with db.use(One(config)):
        assert op.config_for(**args) == config
        compiled = torch.compile(lambda kwargs: op(**kwargs) * 1, fullgraph=True, mode="reduce-overhead")
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(args), expected)
