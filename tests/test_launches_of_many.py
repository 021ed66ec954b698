"""Launches whose programs leave sums in memory: as many tokens at a time as there is room for. Looked at, not run."""

import sys

import pytest

import fpk.kernels  # noqa: F401  declares every op
from fpk import db
from fpk.device import Device, pretend, pretend_triton
from fpk.kernels.gemm import _shares, _tickets, _weight_shares
from fpk.op import OPS
from fpk.tune.arguments import legal_candidates, outline

H200 = Device("sm90", "NVIDIA H200", "nv", 132)
LAUNCHERS = {
    "scaled_mm": (_shares, "shares_kernel", "shares"),
    "mm_weight_only": (_weight_shares, "weight_shares_kernel", "shares"),
    "mm_shuffled": (sys.modules[OPS["mm_shuffled"].launcher.__module__], "unit_warps_kernel", "warps"),
}


class Looked:
    """In a kernel's place."""

    def __init__(self, kernel):
        self.names, self.launches = [p.name for p in kernel.params], []

    def __getitem__(self, grid):
        return lambda *args, **_: self.launches.append(dict(zip(self.names, args, strict=False)))


@pytest.mark.parametrize("name", LAUNCHERS)
def test_sums_fit_into_memory_whatever_the_batch(name, monkeypatch):
    op, (module, kernel, kind) = OPS[name], LAUNCHERS[name]
    case, tokens = dict(N=512, K=2048, kind="normal", layout="contiguous"), 300
    bound = op.bind(**op.inputs(**case, M=tokens, device="cpu"))
    looked, several = Looked(getattr(module, kernel)), 0
    monkeypatch.setattr(module, kernel, looked)
    with pretend(H200), pretend_triton("3.6"), db.batch_invariant():
        found = legal_candidates(op, outline(op, case | dict(M=64)), H200)
        found = [c for c in found if c["kernel"] == kind and not c.get("RENAMED")]  # which takes a kernel more
        configs = {(c["BLOCK_M"], c["PER_SM"], c.get("SPLIT_K"), c.get("CLUSTER")): c for c in found}.values()
        for config in configs:
            looked.launches.clear()
            monkeypatch.setattr(_tickets, "ROOM", 1 << 26)
            op.launcher(**bound, config=config)
            sums = max(launch["parts_ptr"].numel() for launch in looked.launches)
            room = max(sums // 2, -(-sums * config["BLOCK_M"] // tokens))  # a tile of tokens is not divided
            monkeypatch.setattr(_tickets, "ROOM", room)
            looked.launches.clear()
            op.launcher(**bound, config=config)
            assert sum(launch["M"] for launch in looked.launches) == tokens
            if len(looked.launches) > 1:
                several += 1
                assert max(launch["parts_ptr"].numel() for launch in looked.launches) <= room
    assert several > 0
