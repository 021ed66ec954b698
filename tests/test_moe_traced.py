"""torch.compile sees an expert layer as one graph, however many rows its experts have: what a GPU can do is a constant.

Only traced: an H200 is pretended, where the most is asked.
"""

import pytest
import torch
from test_moe import PAIRS, E, H, parts, randn

import fpk
from fpk.device import Device, pretend, pretend_triton

H200 = Device("sm90", "NVIDIA H200", "nv", 132)


class Traced(Exception):
    """Instead of the graph's first run."""


def stop(graph, inputs):
    def run(*_):
        raise Traced

    return run


@pytest.mark.parametrize(("weight", "act"), [(w, a) for w, a in PAIRS if w.startswith("fp8") and a != "none"])
def test_one_graph_of_many_rows(weight, act):
    given = parts(weight)[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, z: fpk.moe(x, z, **given, act=act), fullgraph=True, backend=stop, dynamic=False)
    tokens = 65 * E // 2  # two rows each
    with pretend(H200), pretend_triton("3.6"), pytest.raises(Traced):
        compiled(randn(tokens, H), randn(tokens, E))


@pytest.mark.parametrize(("scheme", "act"), [("fp8_block128", "fp8_group128"), ("fp8_channel", "fp8_token")])
def test_one_graph_of_one_token(scheme, act):
    """Of wide experts, which have kernels that sort nothing."""
    wide = 512
    w13, w2 = (fpk.quantize(randn(E, n, wide, seed=n), scheme) for n in (2 * wide, wide))
    torch._dynamo.reset()
    ran = []

    def look(graph, inputs):
        ran.extend(str(node.target) for node in graph.graph.nodes)
        return stop(graph, inputs)

    compiled = torch.compile(lambda x, z: fpk.moe(x, z, w13, w2, act=act), fullgraph=True, backend=look, dynamic=False)
    with pretend(H200), pretend_triton("3.6"), pytest.raises(Traced):
        compiled(randn(1, wide), randn(1, E))
    assert any("moe_token" in name for name in ran)
