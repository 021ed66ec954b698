"""What of the drafts can be seen without a GPU, in a moment."""

import csv
import inspect
import re

import candidates
import counterparts
import gluon_clusters
import gluon_language
import pytest
import run_block  # first: where timing and trial are found
import timing
import torch
import trial
from lean import block_lean_kernel, fetch
from share import _fetch_share, block_share_kernel

from fpk.check import assert_close
from fpk.device import Device, pretend

OP, PLAN = candidates.OP, run_block.PLAN


@pytest.mark.parametrize("name", candidates.ALL)
def test_launchers_give_their_kernels_what_these_take(name):
    """Of the first check: all parameters, and descriptors where the loads' assembly reads them."""
    case, call = list(PLAN.calls(name))[1]
    with candidates.recording() as seen:
        call()
    ((kernel, args, options),) = seen
    assert kernel is (block_share_kernel if name in candidates.SHARE else block_lean_kernel)
    own = {n: v for n, v in options.items() if n not in ("num_warps", "launch_pdl")}
    inspect.signature(kernel.fn).bind(*args, **own)
    assert args[0].base.shape == (case["M"], case["K"]) and args[1].base.shape == (case["N"], case["K"])
    # a descriptor is itself, then its sizes and its strides
    descriptors = [len(a.base.shape) for a in args if hasattr(a, "block_shape")]
    at = {sum(1 + 2 * rank for rank in descriptors[:i]): rank for i, rank in enumerate(descriptors)}
    code = inspect.getsource((_fetch_share if name in candidates.SHARE else fetch).fn)
    loads = re.findall(r"load\(NAME, (\d+), [^\n]*?(True)?\)\n", code)
    assert len(loads) == code.count("load(NAME") and all(
        int(n) in at for n, line in loads if not line or case["M"] % 4 == 0
    )
    # scale_a as a line, where TMA can read one
    assert {at.get(int(n), 1) for n, line in loads if line} == {1} and {at[int(n)] for n in ("0", "5")} == {2}


def test_everything_planned_is_of_a_candidate_and_has_checks():
    for name in candidates.ALL:
        cases = [case for case, _ in PLAN.calls(name)]
        assert len(cases) >= 6 and any(case.get("bias") for case in cases) and any(case["K"] % 128 for case in cases)
    for m, _, _ in candidates.SHAPES:
        assert any(candidates.meant_for(name, m) for name in candidates.FIRST)


@pytest.fixture
def there(monkeypatch):
    """A GPU that seems to be there, on which candidates give what the op's reference gives."""
    import dry

    def draft(name):
        return lambda config, **s: OP.reference(**OP.bind(**s)), candidates.lean.config(**candidates.LEAN[name])

    monkeypatch.setattr(timing, "draft", draft)
    few = [dict(M=3, N=8, K=128), dict(M=2, N=8, K=256, bias=True)]
    monkeypatch.setattr(PLAN, "draft", draft)
    monkeypatch.setattr(PLAN, "checks", lambda name: [candidates.case_of(c) for c in few])
    monkeypatch.setattr(timing, "BLOCK_MS", 0.1)
    with dry.seeming_gpu():
        yield


def test_what_is_timed_gets_to_its_rows(there, tmp_path, monkeypatch, capsys):
    def peer(s):
        if s["a"].shape[0] == 300:
            raise RuntimeError("not today")
        return OP(**s)

    monkeypatch.setattr(timing, "SHAPES", [(70, 128, 128), (300, 128, 128)])
    monkeypatch.setattr(timing, "deep_gemm", lambda: peer)
    timing.time_all(("ahead256", "few128-x4"), (0, 1), str(tmp_path / "block.csv"))
    said = capsys.readouterr().out
    with (tmp_path / "block.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["M"], r["kernel"]) for r in rows} == {
        ("70", "today"), ("70", "DeepGEMM"), ("70", "few128-x4"), ("300", "today"), ("300", "ahead256")
    }  # fmt: skip
    assert {r["deep_gemm_over_it"] == "nan" for r in rows if r["M"] == "300"} == {True} and "not today" in said
    assert "M 65..256: DeepGEMM / today" in said and "M 257..1024" not in said


def test_what_is_wrong_is_told(there, monkeypatch, capsys):
    trial.check(PLAN, "ahead256")
    assert "ahead256 OK" in capsys.readouterr().out
    fn, config = PLAN.draft("ahead256")
    monkeypatch.setattr(PLAN, "draft", lambda name: (lambda **s: 1.1 * fn(**s), config))
    with pytest.raises(SystemExit, match="ahead256 WRONG"):
        trial.check(PLAN, "ahead256")


@pytest.fixture
def emulate(monkeypatch):
    """A candidate's result on an emulated GPU and the reference's: an odd last step, and several tiles a program."""
    monkeypatch.setitem(gluon_clusters.ASSEMBLY, "pieces", counterparts.ASSEMBLY)
    monkeypatch.setattr(
        gluon_language.Language, "join", staticmethod(lambda a, b: torch.stack((a, b), -1)), raising=False
    )

    def run(name, seed=0, **changes):
        fn, config = candidates.draft(name)
        layout, K = ("row", 1520) if name == "parts128" else ("column", 1168)  # rows of 16 bytes, for TMA
        inputs = OP.inputs(M=152, N=328, K=K, bias=True, scale_layout=layout, device="cpu", seed=5)
        gpu = Device(arch="sm90", name="pretended", vendor="nv", sm_count=8 if config["CLUSTER"] > 2 else 2)
        with pretend(gpu), gluon_language.emulated(seed, **changes) as ran:
            out = fn(**inputs, config=config)
        assert len(ran) == 1
        assert_close(out, OP.reference(**OP.bind(**inputs)), OP.tolerance(OP.bind(**inputs)))

    return run


@pytest.mark.parametrize(
    "name", ("ahead256-order", "registers256", "shared192", "parts192-order", "parts128", "few128-x4", "share64-x2")
)
def test_like_the_reference(name, emulate):
    emulate(name)


BROKEN = (
    ("ahead256", "multiply_blocks", "wait(BARS_AT, 0)", "pass"),
    ("ahead256", "multiply_blocks", "_if(BARS_AT + slot * 8, phase, remain)", "_if(BARS_AT + slot * 8, phase, 0)"),
    ("ahead256-order", "multiply_blocks", "pass_turn(1)", "pass"),
    ("ahead256", "fetch", "SLOT + (SA", "SLOT + 128 + (SA"),
    ("parts192", "multiply_parts", "(PARTS - 1, deps=[t_0])", "(PARTS, deps=[t_0])"),
    ("parts192", "multiply_parts", "arrive_everywhere(empty, CLUSTER)", "arrive_everywhere(empty, 1)"),
    ("few128-x4", "fetch", "wait(BARS_AT + (STAGES + slot) * 8, phase)", "pass"),
    ("share64-x2", "_multiply_share", "    meet()", "    pass"),
)


@pytest.mark.parametrize(("name", "function", "old", "new"), BROKEN)
def test_broken_ones_are_found(name, function, old, new, emulate):
    with pytest.raises(AssertionError):  # a Fault is one
        for seed in range(4):
            emulate(name, seed, **{function: (old, new)})
