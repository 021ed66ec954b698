"""What a call costs in Python beside the launch: pytest-benchmark with -m bench, and a guard as a ratio in CI."""

import time

import pytest
import torch

import fpk
from fpk import db
from fpk.device import Device, pretend
from fpk.tune.arguments import outline

H200 = Device("sm90", "NVIDIA H200", "nv", 132)
# Units are a keyword-passing, dictionary-merging Python call: 1.1 us on the two-core machine where these were counted
# (results/nv-h200-sm90-132/dispatch.csv has the microseconds of an H200's host). Each limit is about twice
# what was counted: a call of four tensors past its launcher 3.0, a look-up's database part 11
MOST_UNITS, MOST_UNITS_COLD = 7, 24
# arguments to config of a product, with rows that must be sound and legal: 23
MOST_UNITS_PRODUCT = 46
# a memo hit, its key included, with four tensors: 0.6
MOST_UNITS_HIT = 1.2


def silent(name, case):
    """The op's arguments, with a launcher that does nothing: what is left is dispatch."""
    op = fpk.OPS[name]
    args = op.inputs(**case, device="cuda" if torch.cuda.is_available() else "cpu")
    out = op.reference(**args)
    return op, args, lambda config, **bound: out


@pytest.fixture(
    params=[("scaled_mm", dict(M=64, N=64, K=64)), ("quantize_fp8_token", dict(M=16, K=64))], ids=lambda p: p[0]
)
def call(request, monkeypatch):
    op, args, launcher = silent(*request.param)
    monkeypatch.setattr(op, "launcher", launcher)
    op(**args)
    return lambda: op(**args)


def seconds(call, calls=100, repeats=60):
    """Fastest mean of many short runs, in CPU time: other processes do not count."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time()
        for _ in range(calls):
            call()
        best = min(best, (time.thread_time() - start) / calls)
    return best


def unit():
    def launcher(config, **bound):
        return bound

    a, b = dict.fromkeys("abcdefgh", 1), dict.fromkeys("ijkl", 2)
    return seconds(lambda: launcher(config={}, **(a | b)))


def test_dispatch_is_cheap(call):
    ratio = seconds(call) / unit()
    print(f"dispatch costs {ratio:.1f} plain calls")
    assert ratio <= MOST_UNITS


def hits(name, case):
    """Calls of the op's look-up that its memo answers."""
    op, args, _ = silent(name, case)
    op.look_up(**args)
    args = [args.get(n, op._defaults.get(n)) for n in op._parameters]
    return lambda: op.look_up(*args)


@pytest.mark.parametrize(
    "name,case",
    [("scaled_mm", dict(M=64, N=64, K=64)), ("quantize_fp8_token", dict(M=16, K=64))],
    ids=lambda p: str(p)[:9],
)
def test_a_memo_hit_is_cheap(name, case):
    """Arguments to config: tensors' metadata, database and modes included."""
    us = seconds(hits(name, case)) / unit()
    print(f"a memo hit of {name} costs {us:.2f} plain calls")
    assert us <= MOST_UNITS_HIT


def test_a_cold_lookup_is_cheap():
    """Key to configs with a table of 24 shapes, nothing memoised: some 20 us, here as a ratio."""
    rows = [
        db.Row(dict(M=m, N=n, K=k, dtype="x"), 1, dict(BLOCK_M=16), 1.0, 2.0, 1.0, 0, "", "r")
        for m in (16, 128, 1024, 4096) for n in (2112, 4096, 28672) for k in (2048, 7168)
    ]  # fmt: skip
    tables = db.Tables(db.MemorySource({f"{H200.id}/op.csv": db.dump_table(rows)}))
    keys = [dict(M=64, N=n, K=4096, dtype="x") for n in range(512, 2112, 16)]
    tables.candidates("op", keys[0], H200)

    def cold():
        tables._memo.clear()
        for key in keys:
            tables.candidates("op", key, H200)

    per_lookup = seconds(cold, calls=1) / len(keys)
    print(f"a cold look-up costs {per_lookup * 1e6:.1f} us, {per_lookup / unit():.1f} plain calls")
    assert per_lookup / unit() <= MOST_UNITS_COLD


def test_a_cold_lookup_of_a_product_is_cheap():
    """Arguments to config with the shipped table, nothing memoised, rows' soundness and legality included."""
    op = fpk.OPS["scaled_mm"]
    tables = db.Tables(db.DirectorySource(db.packaged_directory()))
    with pretend(H200), db.use(tables):
        bounds = [outline(op, dict(M=m, N=n, K=k)) for m in (24, 300) for n in (3072, 5120) for k in (2304, 3584, 6144)]
        configs = [op._choose(bound) for bound in bounds]
        answered = [bool(tables.candidates("scaled_mm", op.key(**bound), H200)) for bound in bounds]
        assert any(answered) and not all(answered), "rows answer some of them, the default others"

        def cold():
            tables._memo.clear()
            for bound in bounds:
                op._choose(bound)

        per_lookup = seconds(cold, calls=1) / len(bounds)
        assert [op._choose(bound) for bound in bounds] == configs
    print(f"a cold look-up of a product costs {per_lookup * 1e6:.1f} us, {per_lookup / unit():.1f} plain calls")
    assert per_lookup / unit() <= MOST_UNITS_PRODUCT


@pytest.mark.bench
def test_bench_dispatch(call, benchmark):
    benchmark(call)


@pytest.mark.bench
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the limit is for the host of a GPU")
def test_bench_a_memo_hit_on_the_host_of_a_gpu():
    empty = seconds(lambda: None)
    for name, case in (("scaled_mm", dict(M=64, N=4096, K=4096)), ("quantize_fp8_token", dict(M=16, K=4096))):
        us = 1e6 * (seconds(hits(name, case)) - empty)
        print(f"a memo hit of {name} costs {us:.2f} us")
        assert us <= 1.0


@pytest.mark.bench
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times Triton's own launch")
def test_bench_over_a_bare_launch(benchmark):
    """On a GPU: the op's call minus its launcher's own call must stay below 15 us."""
    op = fpk.OPS["quantize_fp8_token"]
    args = op.inputs(M=1, K=512)
    config, bound = op.config_for(**args), op.bind(**args)
    bare = seconds(lambda: op.launcher(**bound, config=config))
    whole = seconds(lambda: op(**args))
    print(f"bare launch {bare * 1e6:.1f} us, op {whole * 1e6:.1f} us, dispatch {(whole - bare) * 1e6:.1f} us")
    benchmark(lambda: op(**args))
    assert whole - bare <= 15e-6
