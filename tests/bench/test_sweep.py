"""Every op beside what else does the same, under pytest-benchmark: `make bench`, or `pytest -m bench -k scaled_mm`.

What is timed is a call and the wait for it, as a caller sees it; `fpk bench run` times kernels alone.
"""

import pytest
import torch

import fpk
from fpk.study.bench import small_cases

ON_GPU = torch.cuda.is_available()
CASES = 3


def _cases(op):
    """A few of an op's cases, spread over their order; on a CPU cut to small sizes."""
    cases = op.cases if ON_GPU else small_cases(op)
    return dict(list(cases.items())[:: max(1, len(cases) // CASES)][:CASES])


PARAMETERS = [
    pytest.param(name, case, impl, id=f"{name}-{label}-{impl}".replace(" ", ","))
    for name, op in sorted(fpk.OPS.items())
    for label, case in _cases(op).items()
    for impl in ("fpk", *op.baselines)
]


@pytest.mark.bench
@pytest.mark.parametrize("name, case, impl", PARAMETERS)
def test_bench(name, case, impl, benchmark):
    op = fpk.OPS[name]
    arguments = op.bind(**op.inputs(**case, device="cuda" if ON_GPU else "cpu"))
    call = op if impl == "fpk" else op.baselines[impl]

    def wait():
        call(**arguments)
        if ON_GPU:
            torch.cuda.synchronize()

    if impl != "fpk":
        try:
            wait()
        except Exception as error:  # another project's limits, in whatever words
            pytest.skip(f"{impl} does not take it: {error}"[:200])
    cost = op.cost(**arguments)
    benchmark.extra_info.update(flops=cost.flops, bytes=cost.bytes)
    benchmark.group = f"{name} {case}"
    benchmark(wait)


def test_every_op_is_there():
    assert {p.values[0] for p in PARAMETERS} == set(fpk.OPS)
    assert len({p.id for p in PARAMETERS}) == len(PARAMETERS)
