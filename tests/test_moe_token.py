"""A layer of one token goes through one op where its fast kernel runs, and comes out as through the others."""

import pytest
import torch

import fpk
from fpk import _moe
from fpk._moe_checks import Static
from fpk._moe_shortcuts import fits_token
from fpk.check import assert_close, rel_error
from fpk.device import pretend
from fpk.formats import expand_groups, scheme_of
from fpk.kernels._activation import activated
from fpk.kernels.moe.moe_token import coded
from fpk.op import OPS

ON_GPU = torch.cuda.is_available()
SCHEMES = {"fp8_token": "fp8_channel", "fp8_group128": "fp8_block128"}


def layer(act: str, E: int, H: int, I: int, device: str = "cpu"):
    g = torch.Generator().manual_seed(7)
    w13, w2 = (torch.randn(E, *s, generator=g).bfloat16() / s[1] ** 0.5 for s in ((2 * I, H), (H, I)))
    made = [fpk.quantize(w.to(device), SCHEMES[act]) for w in (w13, w2)]
    x, logits = torch.randn(1, H, generator=g).bfloat16(), torch.randn(1, E, generator=g)
    return x.to(device), logits.to(device), *made


def fits(x, w13, w2, act="fp8_token", tokens=1, dtype=torch.bfloat16, scale=None, **more):
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    options = dict(bias=False, gated=True, interleaved=False) | more
    return fits_token(x, ids, w13, w2, act and scheme_of(act), [Static(scale, None)] * 2, dtype, **options)


@pytest.mark.parametrize("act", SCHEMES)
def test_which_layers_fit(act):
    x, _, w13, w2 = layer(act, 4, 256, 128)
    narrow, codes = layer(act, 4, 256, 96), fpk.quantize(x, act)
    with pretend("sm90"):
        assert fits(x, w13, w2, act)
        assert not fits(x, w13, w2, act, tokens=2)
        assert not fits(x, w13, w2, act, bias=True)
        assert not fits(x, w13, w2, act, interleaved=True)
        assert not fits(x, w13, w2, act, gated=False)
        assert not fits(x, w13, w2, act, dtype=torch.float32)
        assert not fits(x, w13, w2, act, scale=torch.ones(1, 1))
        assert not fits(x, w13, w2, None)
        assert not fits(codes, w13, w2, act)
        with fpk.batch_invariant():
            assert not fits(x, w13, w2, act)
        assert not fits(narrow[0], narrow[2], narrow[3], act)
    with pretend("sm80"):
        assert not fits(x, w13, w2, act)


@pytest.mark.parametrize("act", SCHEMES)
@pytest.mark.parametrize(
    "size", [(4, 384, 128), (8, 7168, 256), (4, 4096, 14336), (8, 2048, 768)] if ON_GPU else [(4, 384, 128)]
)
def test_the_layer_is_the_same(act, size, monkeypatch):
    x, logits, w13, w2 = layer(act, *size, device="cuda" if ON_GPU else "cpu")
    experts = torch.tensor([2, 0, -1, *range(3, size[0])], dtype=torch.int32, device=x.device)
    options = dict(top_k=3, act=act, expert_map=experts, residual=x)
    calls = []
    run = OPS["moe_token"]
    monkeypatch.setitem(OPS, "moe_token", lambda *a, **k: calls.append(1) or run(*a, **k))
    monkeypatch.setattr(_moe, "fits_token", lambda *_: False)
    expected = fpk.moe(x, logits, w13, w2, **options)
    assert not calls
    monkeypatch.setattr(_moe, "fits_token", fits_token if ON_GPU else lambda *_: True)
    # codes of rows that a rounding moved, as in the op's tolerance
    assert_close(fpk.moe(x, logits, w13, w2, **options), expected, 2e-2 if ON_GPU else 1e-2)
    assert calls


@pytest.mark.parametrize("group", [-1, 128])
@pytest.mark.parametrize("dtype, least, most", [(torch.float8_e4m3fn, 2e-3, 2e-2), (torch.float8_e5m2, 4e-3, 4e-2)])
def test_what_inexact_sums_may_move(dtype, group, least, most):
    """Sums of the first product that are 7e-4 off (full accuracy: 1.8e-3 with the 1.66e-3 of bf16) move codes of the
    second one's operand: that much of the result, which is the op's tolerance where tensor cores multiply. Sums exact
    to fp32 move next to nothing."""
    g = torch.Generator().manual_seed(3)
    slots, inner, hidden = 8, 1024, 256
    products = torch.randn(slots, 2 * inner, generator=g)
    weights = torch.randn(slots, hidden, inner, generator=g) / inner**0.5

    def layer(products):
        rows = activated(products.bfloat16(), "silu", True, False, None, None, None)
        codes, scale = coded(rows, group, dtype)
        wide = expand_groups(scale, tuple(codes.shape), 1, group) if group > 0 else scale
        return torch.einsum("sik,sk->i", weights, codes.float() * wide)

    noise = torch.randn(products.shape, generator=g) * products.square().mean().sqrt()
    assert least < rel_error(layer(products + 7e-4 * noise), layer(products)) < most
    assert rel_error(layer(products + 1e-7 * noise), layer(products)) < least / 2
