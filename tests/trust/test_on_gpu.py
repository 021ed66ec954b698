"""What is asked of a GPU by hand asks about every kernel that runs there."""

import fpk.kernels  # noqa: F401  declares every op
from fpk.device import pretend, pretend_triton
from fpk.op import OPS
from fpk.tune.lint import device_of
from trust.on_gpu import kernel_of, of_every_kernel


def test_every_kernel_of_an_h200_is_launched_under_the_sanitizers():
    with pretend(device_of("nv-h200-sm90-132")), pretend_triton("3.6.0"):
        for op in OPS.values():
            met = {kernel_of(op, config) for _, config in of_every_kernel(op)}
            wanted = {n for n, k in op.kernels.items() if k.named and (not k.targets or "sm90" in k.targets)}
            assert wanted <= met, op.name
