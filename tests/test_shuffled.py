"""Layers and products with weights in the layout of `fpk.shuffle`."""

import copy
import pickle

import pytest
import torch
from torch import nn

import fpk
from fpk.api import quantize
from fpk.check import assert_close, bits


@pytest.mark.parametrize("scheme", ("mxfp6_e2m3:none", "nvfp4:none", "mxfp4:fp8_token", "mxfp4:fp8_tensor_static"))
def test_a_shuffled_layer_is_the_same_layer(scheme, device):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(160, 70)).bfloat16().to(device)
    x = torch.randn(3, 160).bfloat16().to(device)
    ranges = fpk.calibrate(model, [x]) if scheme.endswith("static") else None
    fpk.quantize_(model, scheme, calibration=ranges)
    plain, saved = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    layer = model[0].shuffle_()
    assert "shuffled" in repr(layer) and layer.weight.shape[1] == 256
    assert_close(model(x), plain, 2e-3)
    again = model.state_dict()
    assert list(again) == list(saved)
    assert all(torch.equal(bits(again[name]), bits(saved[name])) for name in saved)
    shuffled = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), shuffled)
    model.load_state_dict(saved)
    assert layer.shuffled and torch.equal(model(x), shuffled)
    assert torch.equal(bits(layer.dequantize()), bits(layer.unshuffle_().dequantize()))
    assert torch.equal(model(x), plain)


def test_shuffle_refuses_what_the_layout_does_not_serve(device):
    w = torch.randn(16, 64).to(device)
    mxfp4 = quantize(w, "mxfp4")
    with pytest.raises(ValueError, match=r"shuffle.weight: expected an \(N, K\) matrix of mxfp4"):
        fpk.shuffle(quantize(w, "int4_group128"))
    with pytest.raises(ValueError, match=r"shuffle.activation: expected none for nvfp4 weights, got 'fp8_token'"):
        fpk.shuffle(quantize(w, "nvfp4"), "fp8_token")
    with pytest.raises(ValueError, match=r"shuffle.activation: expected none, fp8_token or fp8_tensor, got 'mxfp4'"):
        fpk.shuffle(mxfp4, "mxfp4")
    far = quantize(w * torch.tensor([1.0] * 32 + [2.0**-14] * 32, device=device), "mxfp4")
    with pytest.raises(ValueError, match="16 blocks are not; keep the plain layout"):
        fpk.shuffle(far, "fp8_token")
    x, made = torch.ones(2, 64, dtype=torch.bfloat16, device=device), fpk.shuffle(mxfp4)
    with pytest.raises(ValueError, match=r"mm.qx: expected bf16 activations for Shuffled"):
        fpk.mm(x.half(), made)
    with pytest.raises(ValueError, match=r"mm.qx: expected e4m3 activations"):
        fpk.mm(x, fpk.shuffle(mxfp4, "fp8_token"))
    with pytest.raises(ValueError, match=r"mm.qx: expected \(M, 64\)"):
        fpk.mm(x[:, :32], made)
