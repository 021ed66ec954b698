"""Laws of expert products with shuffled weights: nothing leaks from neighbours, and every width of a tile is right."""

import pytest
import torch

from fpk.check import assert_close, rel_error
from fpk.op import OPS

OP = OPS["grouped_mm_shuffled"]
FIELDS = ("BLOCK_M", "BOX", "ROWS", "UNITS", "STAGES", "PER_SM", "SPLIT")
WARPS = (  # of every number of rows of units and of boxes
    (8, 8, 1, 1, 4, 4, True), (16, 8, 2, 2, 3, 1, True), (48, 8, 2, 1, 4, 2, False), (64, 16, 4, 1, 6, 1, False),
    (160, 32, 3, 1, 3, 1, False),
)  # fmt: skip


def representatives(args):
    """The default and the configs above, as far as they are legal."""
    bound = OP.bind(**args)
    yield OP.config_for(**args)
    for fields in WARPS:
        config = dict(kernel="warps", **dict(zip(FIELDS, fields, strict=True)), num_warps=4)
        if OP.is_legal(config, bound, OP._device(bound)):
            yield config


def ends(counts, device):
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp6_e3m2"])  # NVFP4 has no NaN in this layout
def test_nan_stays_where_it_is(format, device):
    """NaN scales in every other row of units, in rows of no expert and in a token: three units of K, five rows."""
    args = OP.inputs(M=24, N=320, K=320, E=3, format=format, out_dtype=torch.float32, device=device)
    args["offs"] = ends((7, 9, 4), device)
    expected = OP.reference(**args)
    per_row = 3 * 64 * 128 // 32
    scales = args["packed"].view(3, -1)[:, -5 * per_row :].view(3, 5, per_row)
    scales[0, 1::2], scales[1, 0::2], scales[2, :] = 255, 255, 255
    args["a"][3], args["a"][20:] = float("nan"), float("nan")
    row = torch.arange(320, device=device) // 64 % 2
    good = torch.zeros(24, 320, dtype=torch.bool, device=device)
    good[:7], good[7:16], good[20:] = row == 0, row == 1, True
    good[3] = False
    for config in representatives(args):
        out = OP.launch(**args, config=config)
        assert torch.equal(out.isfinite(), good), config
        assert_close(out[good], expected[good], OP.tolerance(OP.bind(**args)), f"{config}")
        assert not out[20:].any()


@pytest.mark.parametrize("act", ["none", "swigluoai"])
def test_experts_of_every_size(act, device):
    """Experts with 0 to 11 rows, and with 13 times as many: every number of boxes; twice the same bits."""
    for times in (1, 13) if device == "cuda" else (1,):
        args = OP.inputs(M=70 * times, N=192, K=400, E=12, bias=True, act=act, device=device)
        args["offs"] = ends([e * times for e in range(12)], device)
        expected = OP.reference(**args)
        for config in representatives(args):
            out = OP.launch(**args, config=config)
            assert_close(out, expected, OP.tolerance(OP.bind(**args)), f"{config}")
            assert torch.equal(out, OP.launch(**args, config=config))


def test_one_expert_is_the_dense_product(device):
    args = OP.inputs(M=21, N=160, K=272, E=1, bias=True, device=device)
    args["offs"] = ends((21,), device)
    dense = OPS["mm_shuffled"](args["a"], args["packed"][0], args["row_scale"][0], bias=args["bias"][0])
    for config in representatives(args):
        assert rel_error(OP.launch(**args, config=config), dense) < 1e-3


@pytest.mark.parametrize("act", ["swigluoai", "silu", "gelu_tanh"])
def test_activated_is_the_product_activated(act, device):
    args = OP.inputs(M=30, N=160, K=272, E=3, bias=True, act=act, device=device)
    plain = args | dict(activation="none", alpha=None, beta=None, limit=None)
    own = {n: args[n] for n in ("activation", "alpha", "beta", "limit")}
    for config in representatives(args):
        apart = OPS["act_and_mul"](OP.launch(**plain, config=config), interleaved=True, **own)
        assert rel_error(OP.launch(**args, config=config), apart) < 1e-3


@pytest.mark.parametrize("E", [1, 40, 128, 300])
def test_any_number_of_experts(E, device):
    """Few that every program lists by itself, and more than it can."""
    args = OP.inputs(M=24, N=64, K=128, E=E, spread="skewed", dropped=0.2, device=device)
    expected = OP.reference(**args)
    for config in representatives(args):
        assert_close(OP.launch(**args, config=config), expected, OP.tolerance(OP.bind(**args)), f"{config}")
