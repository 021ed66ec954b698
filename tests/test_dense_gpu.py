"""Laws of the dense products' Gluon kernels, with configs and sizes that the laws of small inputs do not reach."""

import pytest
import torch
from op_laws import make

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close, bits
from fpk.device import of
from fpk.kernels.gemm._gluon_late import late_fits
from fpk.kernels.gemm._scaled_space import late, late_space
from fpk.kernels.gemm._shares import shares
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
        assert_close(OP.launcher(**bound, config=config), OP.reference(**args), OP.tolerance(bound), f"{config} {case}")
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
    [late(128, 256, 4), late(128, 256, 2, 8, 1), late(256, 128, 3, 2), late(128, 128, 6, 16)],
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


SHARES = {
    "one": shares(8), "one-wide": shares(16, wide=2), "one-early": shares(64, early=True),
    "whole": shares(16, split=1), "whole-early": shares(64, split=1, early=True), "pair": shares(64, split=2),
    "four": shares(32, split=4), "tall": shares(16, 2), "tall-alone": shares(64, 2, held=1),
    "tall-whole": shares(32, 2, split=1), "tall-pair": shares(16, 2, split=2), "two": shares(32, per_sm=2),
    "three": shares(64, per_sm=3, held=3), "four-of-four": shares(8, per_sm=4, held=4),
    "tall-wide": shares(32, 2, wide=2, held=1), "pair-early": shares(8, split=2, early=True),
}  # fmt: skip
FAST = dict(fast_accum=True)


def run_shares(config, **case):
    """(inputs, result) of a launch, compared with the reference."""
    args = make(OP, PLAIN | case)
    bound = OP.bind(**args)
    assert OP.is_legal(config, bound, of(args["a"].device))
    out = OP.launch(**args, config=config)
    assert_close(out, OP.reference(**args), OP.tolerance(bound), f"{config} {case}")
    return args, out


@pytest.mark.parametrize("name", SHARES)
def test_shares_at_every_type_and_edge(name):
    """Tails of rows and steps, odd rows of results, more tokens than a tile has; and the same bits again."""
    config = SHARES[name]
    m = config["BLOCK_M"]
    run_shares(config, M=m, N=1096, K=1200)
    run_shares(config, M=m + 5, N=327, K=1568, bias=True, fast_accum=False)
    run_shares(config, M=1, N=776, K=1168, dtype=torch.int8, bias=True, out_dtype=torch.float16)
    run_shares(config, M=m - 3, N=24576, K=1536, dtype=torch.int8, layout="rows")
    run_shares(config, M=m, N=7168, K=2048, dtype=torch.float8_e5m2, a_granularity="tensor", b_granularity="tensor",
               out_dtype=torch.float32)  # fmt: skip
    for n, k in ((4096, 4096), (2112, 7168)):
        args, out = run_shares(config, M=m, N=n, K=k)
        for _ in range(20):
            assert torch.equal(OP.launch(**args, config=config), out)


@pytest.mark.parametrize("name", SHARES)
def test_a_token_of_shares_has_the_bits_it_has_in_a_batch(name):
    args, whole = run_shares(SHARES[name], M=100, N=2112, K=7168)
    for first, last in ((0, 1), (5, 22), (64, 100)):
        part = dict(a=args["a"][first:last], scale_a=args["scale_a"][first:last])
        assert torch.equal(bits(OP.launch(**args | part, config=SHARES[name])), bits(whole[first:last].contiguous()))


@pytest.mark.parametrize("name", SHARES)
def test_shares_waits_for_what_is_in_front_of_it(name):
    """Tokens from a kernel that lets this one start early, in memory that is the same again and again; and weights."""
    quantize, (n, k) = OPS["quantize_fp8_token"], (4096, 4096)
    for m in (1, SHARES[name]["BLOCK_M"]):
        xs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) * 3.0**i for i in range(8)]
        ws = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 3.0**i for i in range(4)]
        torch.cuda.synchronize()
        found = []
        for i in range(32):
            if i % 8 == 0:
                b, scale_b = quantize(ws[i // 8])
            a, scale_a = quantize(xs[i % 8])
            found.append(OP.launch(a, b, scale_a, scale_b, **FAST, config=SHARES[name]))
            del a, scale_a
        torch.cuda.synchronize()
        for i, out in enumerate(found):
            (a, scale_a), (b, scale_b) = quantize(xs[i % 8]), quantize(ws[i // 8])
            torch.cuda.synchronize()
            assert_close(
                out, OP.reference(a, b, scale_a, scale_b), OP.tolerance(OP.bind(a, b, scale_a, scale_b, **FAST))
            )


@pytest.mark.parametrize("m", [1, 16, 64])
def test_codes_just_quantized_are_waited_for(m):
    """mm_weight_only behind the quantizer of its weight, which lets it start early."""
    op, quantize, x = OPS["mm_weight_only"], OPS["quantize_fp8_token"], torch.randn(m, 4096, device="cuda").bfloat16()
    ws = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) * 3.0**i for i in range(8)]
    for w in ws:
        out = op(x, *quantize(w))
        torch.cuda.synchronize()
        codes, scale = quantize(w)
        torch.cuda.synchronize()
        assert torch.equal(bits(out), bits(op(x, codes, scale)))


@pytest.mark.parametrize("name", ["one", "tall", "three", "pair"])
def test_graphs_of_shares_run_side_by_side(name):
    """Each has tickets of its own."""
    made = [run_shares(SHARES[name], M=8, N=n, K=7168) for n in (2112, 4096)]
    graphs, outs, streams = [], [], [torch.cuda.Stream() for _ in made]
    for args, _ in made:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append([OP.launch(**args, config=SHARES[name]) for _ in range(5)])
        graphs.append(graph)
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for found, (_, expected) in zip(outs, made, strict=True):
        assert all(torch.equal(out, expected) for out in found)
