"""What of the grouped drafts can be seen without a GPU, in a moment."""

import csv
import inspect
import re
import sys
from types import SimpleNamespace
from unittest import mock

import gluon_clusters
import gluon_language
import grouped_counterparts
import pytest
import run_grouped
import torch
from lean_grouped import fetch_grouped, grouped_lean_kernel
from run_grouped import grouped_candidates, grouped_timing, trial

from fpk.check import assert_close
from fpk.device import Device, pretend

OP, PLAN = grouped_candidates.OP, run_grouped.PLAN


@pytest.mark.parametrize("name", grouped_candidates.ALL)
def test_launchers_give_their_kernels_what_these_take(name):
    """All parameters, and descriptors where the loads' assembly reads them."""
    case, call = next(PLAN.calls(name))
    with grouped_candidates.recorded() as seen:
        call()
    ((kernel, args, options),) = seen
    assert kernel is grouped_lean_kernel
    own = {n: v for n, v in options.items() if n not in ("num_warps", "launch_pdl")}
    inspect.signature(kernel.fn).bind(*args, **own)
    assert args[0].base.shape == (case["E"] * case["N"], case["K"]) and args[2].base.shape == args[5].shape
    # a descriptor is itself, then its sizes and its strides
    given = [a for a in args if hasattr(a, "block_shape")]
    at = {sum(1 + 2 * len(a.base.shape) for a in given[:i]): len(a.base.shape) for i, a in enumerate(given)}
    code = inspect.getsource(fetch_grouped.fn)
    loads = re.findall(r"load\(NAME, (\d+), ", code)
    assert len(loads) == code.count("load(NAME") == 2 and all(at[int(n)] == 2 for n in loads)


def test_everything_planned_is_of_a_candidate_and_has_checks():
    for name in grouped_candidates.ALL:
        cases = [case for case, _ in PLAN.calls(name)]
        assert len(cases) == 9 and any(case.get("dropped") for case in cases) and any(c["K"] % 128 for c in cases)
    assert any(map(grouped_candidates.gathers, grouped_candidates.CANDIDATES))


@pytest.fixture
def there(monkeypatch):
    """A GPU that seems to be there, on which candidates give what the op's reference gives."""
    import dry

    def draft(name):
        return lambda config, **s: OP.reference(**OP.bind(**s)), {}

    few = [dict(M=9, N=8, K=128, E=2), dict(M=20, N=24, K=256, E=3, dropped=0.5)]
    monkeypatch.setattr(grouped_timing, "draft", draft)
    monkeypatch.setattr(PLAN, "draft", draft)
    monkeypatch.setattr(PLAN, "checks", lambda name: [grouped_candidates.case_of(name, c) for c in few])
    monkeypatch.setattr(grouped_timing, "BLOCK_MS", 0.1)
    with dry.seeming_gpu():
        yield


def padded_product(left, right, out, experts, disable_ue8m0_cast):
    """As DeepGEMM takes it: rows of each expert padded to 128."""
    counts = torch.bincount(experts, minlength=len(right[0]))
    assert bool((counts % 128 == 0).all()) and disable_ue8m0_cast and left[1].stride(0) == 1
    offs = counts.cumsum(0).to(torch.int32)
    out.copy_(OP.reference(**OP.bind(left[0], right[0], left[1], right[1], offs)))


def test_what_is_timed_gets_to_its_rows(there, tmp_path, monkeypatch, capsys):
    shapes = [("some w13", 20, 4, 2, 256, 128, True), ("some w2", 20, 4, 2, 128, 128, False)]
    monkeypatch.setattr(grouped_timing, "SHAPES", shapes)
    peer = SimpleNamespace(m_grouped_fp8_gemm_nt_contiguous=padded_product)
    monkeypatch.setitem(sys.modules, "deep_gemm", peer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    grouped_timing.warm((0, 1))
    grouped_timing.time_all(("rows", "gather", "rows-deep"), (0, 1), str(tmp_path / "grouped.csv"))
    with (tmp_path / "grouped.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(grouped_timing.FIELDS) and all(float(r["error_to_today"]) < 0.01 for r in rows)
    ran = [{r["kernel"] for r in rows if r["layer"] == layer} for layer, *_ in shapes]
    assert ran[1] == {"today", "DeepGEMM", "rows", "rows-deep"} and ran[0] == ran[1] | {"permute + today", "gather"}
    said = capsys.readouterr().out
    assert "DeepGEMM / rows:" in said and "over 1 of 2" in said and "DeepGEMM / best" in said


def test_what_is_wrong_is_told(there, monkeypatch, capsys):
    trial.check(PLAN, "gather")
    assert "gather OK" in capsys.readouterr().out
    fn, config = PLAN.draft("gather")
    monkeypatch.setattr(PLAN, "draft", lambda name: (lambda **s: 1.1 * fn(**s), config))
    with pytest.raises(SystemExit, match="gather WRONG"):
        trial.check(PLAN, "gather")


def poisoned(*args, **options):
    x = EMPTY(*args, **options)
    return x.fill_(float("nan") if x.dtype.is_floating_point else 1 << 30)


EMPTY = torch.empty


@pytest.fixture
def emulate(monkeypatch):
    """A candidate's result on an emulated GPU and the reference's, for experts with so many rows."""
    import counterparts

    monkeypatch.setitem(gluon_clusters.ASSEMBLY, "pieces", counterparts.ASSEMBLY)
    monkeypatch.setitem(gluon_clusters.ASSEMBLY, "row_copies", grouped_counterparts.ASSEMBLY)
    monkeypatch.setattr(
        gluon_language.Language, "join", staticmethod(lambda a, b: torch.stack((a, b), -1)), raising=False
    )

    def run(name, rows, lost=0, seed=0, N=328, K=400, **changes):
        fn, config = grouped_candidates.draft(name)
        case = grouped_candidates.case_of(name, dict(M=sum(rows) + lost, N=N, K=K, E=len(rows)))
        inputs = OP.inputs(**case, device="cpu", seed=5)
        inputs["offs"] = torch.tensor(rows).cumsum(0).to(torch.int32)
        if not grouped_candidates.gathers(name):
            inputs["scale_a"][sum(rows) :] = float("nan")  # rows of no expert hold anything
        gpu = Device(arch="sm90", name="pretended", vendor="nv", sm_count=2 * config["CLUSTER"])
        patched = mock.patch.object(torch, "empty", poisoned)
        with pretend(gpu), patched, gluon_language.emulated(seed, **changes) as ran:
            out = fn(**inputs, config=config)
        assert ran == ["grouped_lean_kernel"]
        assert_close(out, OP.reference(**OP.bind(**inputs)), OP.tolerance(OP.bind(**inputs)))

    return run


@pytest.mark.parametrize("name", grouped_candidates.CANDIDATES)
def test_like_the_reference(name, emulate):
    """Whole tiles, tails, no rows at all, a single row, and rows of no expert."""
    emulate(name, (130, 0, 70, 0, 1, 63), lost=8)


@pytest.mark.parametrize(
    ("name", "rows", "lost", "N", "K"),
    [
        ("rows", (256,), 0, 512, 384), ("gather", (0, 0, 129), 0, 264, 128), ("rows", (0, 0), 5, 264, 128),
        ("gather-pairs", (1,), 0, 8, 16), ("rows-pairs", (120, 300), 0, 264, 640),
        ("gather-deep", (90, 2), 66, 264, 912), ("columns-pairs", (65, 64), 3, 520, 256),
    ],
)  # fmt: skip
def test_one_expert_few_steps_odd_steps_and_nothing(name, rows, lost, N, K, emulate):
    emulate(name, rows, lost, seed=3, N=N, K=K)


DONE, RELEASE = "p_1 = warpgroup_mma_wait(0, deps=[t_1])", "arrive_everywhere(empty, CLUSTER)"
MULTIPLY, FETCH = "multiply_grouped", "fetch_grouped"
BROKEN = {
    "no wait for the first step": ("rows", MULTIPLY, "wait_if(BARS_AT, 0, remain)", "pass"),
    "no wait for the next step": ("rows", MULTIPLY, "wait_if(BARS_AT + slot * 8, phase, remain)", "pass"),
    "waits for a step that does not come": ("rows", MULTIPLY, "wait_if(BARS_AT + slot * 8, phase, remain)",
                                            "wait_if(BARS_AT + slot * 8, phase, 1)"),
    "used before the product is done": ("rows", MULTIPLY, "warpgroup_mma_wait(0, deps=[t_1])",
                                        "warpgroup_mma_wait(1, deps=[t_1])"),
    "released before the product is done": ("gather", MULTIPLY, f"{DONE}\n{' ' * 16}{RELEASE}",
                                            f"{RELEASE}\n{' ' * 16}{DONE}"),
    "released only here": ("rows-pairs", MULTIPLY, "arrive_everywhere(empty, CLUSTER)", "arrive_everywhere(empty, 1)"),
    "passing steps are not released": ("rows", MULTIPLY, "arrive_everywhere(BARS_AT + (STAGES + slot) * 8, CLUSTER)",
                                       "pass"),
    "scales of another slot": ("rows", MULTIPLY, "take(sa_at + slot * 512)", "take(sa_at + (slot + 1) % STAGES * 512)"),
    "rows of another slot": ("rows", MULTIPLY, "words_of(pool, slot,", "words_of(pool, (slot + 1) % STAGES,"),
    "the neighbour's weights": ("gather", MULTIPLY, "rows_of(pool, slot, 256,", "rows_of(pool, slot, 128,"),
    "filled before it is released": ("rows", FETCH, "wait(BARS_AT + (STAGES + slot) * 8, phase)", "pass"),
    "a weight's scale of the next step": ("rows", FETCH, "sb_1 + k,", "sb_1 + min(k + 1, steps - 1),"),
    "a row's scale of the next step": ("rows", FETCH, "sa_ptrs + k * stride_sak",
                                       "sa_ptrs + min(k + 1, 3) * stride_sak"),
    "copies are told of elsewhere": ("rows", FETCH, "tell(full)", "tell(BARS_AT + (slot + 1) % STAGES * 8)"),
    "too few bytes": ("rows", FETCH, "256 * 128 +", "256 * 127 +"),
    "columns behind the last one": ("gather", FETCH, "chunks * 16 < K", "chunks * 16 < K + 128"),
    "half of the shared rows": ("columns-pairs", FETCH, "full, 128 // SHARE_A)", "full, 1)"),
    "the first row of another expert": ("rows", FETCH, "expert * N + block", "next_expert * N + block"),
    "whole boxes over the next expert's rows": ("rows", "_leave", "row + 64 <= end", "row < end"),
    "rows of the next expert": ("gather", "_store_rows", "(rows < end)", "(rows < end + 8)"),
    "boxes are not waited for": ("rows-deep", "_leave", "tma.store_wait(0)", "pass"),
    "rows of no expert are left": ("rows", "_clear", "max(R - begin, 0)", "0"),
    "rows of no expert are multiplied": ("rows", "grouped_lean_kernel", "- gl.cdiv(R - begin_lost, TALL)", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_ones_are_found(what, emulate):
    name, function, old, new = BROKEN[what]
    with pytest.raises(AssertionError):  # a Fault is one
        for seed in range(6):
            emulate(name, (70, 0, 150, 3), 8, seed, **{function: (old, new)})
