"""Quantized layers under autocast take and give what the layers that they stand for do."""

import pytest
import torch
from torch import nn

import fpk
from fpk._experts import QuantizedExperts
from fpk.nn import QuantizedLinear

SCHEMES = ("fp8_channel", "int8_channel", "mxfp4:none", "fp8_channel:none", "nvfp4:nvfp4")


pytestmark = pytest.mark.usefixtures("on_references")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_linear(scheme):
    torch._dynamo.reset()
    plain = nn.Linear(64, 32)
    layer, x = QuantizedLinear.from_linear(plain, scheme), torch.randn(3, 64)
    for dtype in (torch.bfloat16, torch.float16):
        wanted = layer(x.to(dtype))
        for compiled in (False, True) if scheme == "fp8_channel" else (False,):
            run = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
            with torch.autocast("cpu", dtype=dtype):
                out = run(x)
                assert out.dtype is plain(x).dtype is dtype and torch.equal(out, wanted)
        with torch.autocast("cpu", dtype=dtype, enabled=False):
            assert layer(x.to(dtype)).dtype is dtype
    if layer.activation_scheme is None:
        with pytest.raises(ValueError, match=r"QuantizedLinear.input: expected bfloat16 or float16, got float32"):
            layer(x)
    else:
        assert layer(x).dtype is torch.float32


@pytest.mark.parametrize("scheme", SCHEMES)
def test_experts(scheme):
    gate_up, down = (fpk.quantize(torch.randn(s), scheme.split(":")[0]) for s in ((4, 64, 64), (4, 64, 32)))
    act = None if scheme.endswith(":none") else str(fpk.parse_layer_scheme(scheme)).split(":")[1]
    layer = QuantizedExperts(gate_up, down, act)
    x, ids, weights = torch.randn(3, 64), torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.rand(3, 2)
    wanted = layer(x.bfloat16(), ids, weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, ids, weights)
    assert out.dtype is torch.float32 and torch.equal(out, wanted.float())
    if act is None:
        with pytest.raises(
            ValueError, match=r"QuantizedExperts.hidden_states: expected bfloat16 or float16, got float"
        ):
            layer(x, ids, weights)
