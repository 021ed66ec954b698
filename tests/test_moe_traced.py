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


@pytest.mark.parametrize(("weight", "act"), [pair for pair in PAIRS if pair[1] != "none"])
def test_one_graph(weight, act):
    given = parts(weight)[0]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, z: fpk.moe(x, z, **given, act=act), fullgraph=True, backend=stop, dynamic=False)
    with pretend(H200), pretend_triton("3.6"):
        for tokens in (4, 65 * E):  # two rows a token
            with pytest.raises(Traced):
                compiled(randn(tokens, H), randn(tokens, E))
