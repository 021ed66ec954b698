"""mm_weight_only's kernels for few tokens and for Hopper, at sizes and values that the general laws do not draw."""

import pytest
import torch

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close, bits
from fpk.device import Device, of, pretend
from fpk.kernels.gemm._weight_shares import renamed, shares
from fpk.op import OPS
from fpk.tune.arguments import outline

MM = OPS["mm_weight_only"]
# BLOCK_M, ROWS, TURNS, STAGES, PER_SM, HELD, COLUMNS, RENAMED, CLUSTER
SHARES = [
    shares(8, 1, 1, 3, 3, 4, 1, 0, 1), shares(16, 1, 2, 4, 1, 2, 1, 1, 1), shares(16, 2, 2, 5, 1, 1, 1, 0, 1),
    shares(16, 2, 1, 5, 1, 2, 1, 0, 2), shares(32, 1, 1, 5, 2, 2, 1, 0, 1), shares(32, 1, 2, 3, 1, 2, 1, 0, 2),
    shares(64, 1, 2, 4, 1, 1, 1, 0, 1), shares(64, 2, 2, 3, 1, 1, 2, 0, 1), shares(64, 1, 1, 4, 1, 2, 1, 0, 4),
    shares(64, 4, 1, 4, 1, 1, 1, 0, 1), shares(128, 2, 1, 4, 1, 1, 1, 1, 1), shares(256, 2, 1, 2, 0, 1, 1, 0, 1),
    shares(256, 2, 1, 2, 1, 1, 2, 0, 1),
]  # fmt: skip
NAMES = [f"{c['kernel']}-{i}" for i, c in enumerate(SHARES)]
GPU = pytest.mark.skipif(
    not torch.cuda.is_available() or of(torch.device("cuda")).arch != "sm90", reason="Gluon kernels want an sm90 GPU"
)


def check(config, **case):
    args = MM.inputs(**case, device="cuda")
    bound = MM.bind(**args)
    if MM.is_legal(config, bound, of(args["a"].device)):
        out = MM.launch(**args, config=config)
        assert_close(out, MM.reference(**args), MM.tolerance(bound), f"out of {config} for {case}")
        return 1
    return 0


@GPU
@pytest.mark.parametrize("config", SHARES, ids=NAMES)
def test_every_type_and_edge(config):
    codes = (torch.float8_e4m3fn, torch.int8, torch.float8_e5m2)
    sizes = [(1, 64, 128), (3, 2112, 1536), (65, 1008, 1296), (300, 336, 272), (5, 6144, 4096)]
    done = 0
    for i, (m, n, k) in enumerate(sizes):
        done += check(
            config, M=m, N=n, K=k, dtype=codes[i % 3], bias=i % 2 == 1, seed=i,
            a_dtype=(torch.bfloat16, torch.float16)[i == 2], granularity=((1, -1), (-1, -1), (32, -1))[2 * i % 3],
            out_dtype=(None, torch.float32, None, torch.float16)[i % 4],
        )  # fmt: skip
    assert done >= 2


@GPU
@pytest.mark.parametrize("config", SHARES, ids=NAMES)
def test_codes_are_decoded_exactly(config):
    """All columns of the activations but one are 0: what comes out is codes, NaN and Inf included."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        args = MM.inputs(M=5, N=256, K=512, dtype=dtype, out_dtype=torch.bfloat16, device="cuda")  # holds every code
        codes = torch.arange(256, device="cuda", dtype=torch.uint8)
        at = 300  # a column like any other
        args["b"].view(torch.uint8).zero_()
        args["b"].view(torch.uint8)[:, at] = codes
        args["a"].zero_()
        args["a"][:, at] = 2.0**-40
        args["scale_b"] = torch.full((256, 1), 2.0**40, device="cuda")
        out = MM.launch(**args, config=config)
        expected = args["b"][:, at].float().to(torch.bfloat16).expand(5, 256)
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@GPU
@pytest.mark.parametrize("config", SHARES, ids=NAMES)
def test_a_row_has_the_bits_it_has_in_a_batch_and_again(config):
    args = MM.inputs(M=300, N=2112, K=7168, device="cuda")
    whole = MM.launch(**args, config=config)
    for first, last in ((0, 1), (5, 22), (100, 300)):
        part = MM.launch(**args | dict(a=args["a"][first:last]), config=config)
        assert torch.equal(bits(part), bits(whole[first:last].contiguous()))
    for _ in range(20):
        assert torch.equal(bits(MM.launch(**args, config=config)), bits(whole))


def test_columns_are_renamed(device):
    """To where the kernel's threads hold the codes: 32 q + 16 s + 4 j + 2 h + e to 64 s + 16 j + 8 h + 2 q + e."""
    for columns in (128, 272, 1288):
        x = torch.randn(3, columns + 8, device=device).bfloat16()[:, :columns]
        padded = torch.nn.functional.pad(x, (0, -columns % 128))
        expected = padded.view(3, -1, 4, 2, 4, 2, 2).permute(0, 1, 3, 4, 5, 2, 6).reshape(3, -1)
        assert torch.equal(renamed(x, of(x.device)), expected)


def test_what_shares_refuses():
    def legal(config, arch="sm90", **case):
        with pretend(Device(arch, "", "nv", 132)) as gpu:
            return MM.is_legal(config, outline(MM, dict(M=64, N=512, K=1024) | case), gpu)

    usual = shares(64, 1, 2, 2, 1, 2, 1, 0, 1)
    assert legal(usual) and legal(usual, granularity=(-1, -1)) and legal(usual, dtype=torch.int8)
    assert not legal(usual, arch="sm89") and not legal(usual, arch="sm100")
    assert not legal(usual, granularity=(1, 128)) and not legal(usual, scale_format="e8m0")
    assert not legal(usual, layout="offset")
    for changed in (
        dict(TURNS=3), dict(STAGES=1), dict(STAGES=6), dict(HELD=4), dict(PER_SM=3), dict(BLOCK_M=128), dict(COLUMNS=0),
        dict(BLOCK_M=24), dict(CLUSTER=4, BLOCK_M=16),
    ):  # fmt: skip
        assert not legal(usual | changed), changed
