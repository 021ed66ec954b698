"""What of the drafts can be seen without a GPU, in a moment."""

import csv
import inspect
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dry
import few_candidates
import few_shares
import few_timing
import gluon_language
import guarded
import pytest
import run_few
import torch
import trial
from few_shares import config, few, few_shares_kernel, shared_out
from launches import recording

from fpk.check import assert_close
from fpk.device import Device, pretend

OP, PLAN = few_candidates.OP, run_few.PLAN
FAST = dict(fast_accum=True)
INT8 = dict(dtype=torch.int8)
TENSOR = dict(a_granularity="tensor", b_granularity="tensor")


@pytest.mark.parametrize("name", few_candidates.ALL)
def test_launchers_give_their_kernel_what_it_takes(name):
    """Of two timed sizes and two checks; a dry run makes all arguments."""
    calls = list(PLAN.calls(name))
    for case, call in (*calls[:2], *calls[-2:]):
        with recording() as seen:
            call()
        ((kernel, args, options),) = seen
        assert kernel is few_shares_kernel
        own = {n: v for n, v in options.items() if n not in ("num_warps", "launch_pdl", "maxnreg", "enable_fp_fusion")}
        inspect.signature(kernel.fn).bind(*args, **own)
        assert args[0].base.shape == (case["N"], case["K"]) and args[1].base.shape == (case["M"], case["K"])
        assert own["PDL"] and own["STAGES"] >= 2
    assert len(calls) >= 8


def test_everything_planned_has_candidates_and_checks():
    for _, m, n, k in few_candidates.SHAPES:
        for full in (False, True):
            assert sum(few_shares.fits(m, n, k, PLAN.draft(name)[1], full) for name in few_candidates.FIRST) >= 6
    assert {c["M"] for c in few_candidates.CHECKS} >= {1, 5, 16, 17, 33, 64}
    assert len(few_candidates.LAYERS) == 12


@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("wide", (1, 2))
@pytest.mark.parametrize(("n", "k"), few_candidates.LAYERS)
def test_every_step_is_somebodys_and_shares_are_even(n, k, rows, wide):
    """The busiest program of an SM has at most 15 % more than its part: so much do few steps of wide tiles cost."""
    tiles, steps, mine = shared_out(n, k, config(rows, wide), 132)
    programs = -(-tiles * steps // mine)
    assert tiles * rows * 64 >= n > (tiles - 1) * rows * 64 and steps * wide * 128 >= k > (steps - 1) * wide * 128
    assert programs <= 132 and (programs - 1) * mine < tiles * steps <= 1.15 * programs * mine
    assert mine * 132 <= 1.15 * tiles * steps + 132


class Front:
    """The kernel in front: until a program has waited for it, nothing that it makes is there."""

    def __init__(self, monkeypatch, inputs):
        self.makes = [inputs["a"], inputs["scale_a"]]
        self.made = [t.clone() for t in self.makes]
        self.waits = self.lets = 0
        run = gluon_language.Machine.run

        def hidden(machine, kernel):
            for t in self.makes:
                t.view(torch.uint8).fill_(0x7F)
            before = self.waits, self.lets
            run(machine, kernel)
            count = len(machine.programs)
            assert (self.waits, self.lets) == (before[0] + count, before[1] + count), "who waits and lets others begin"

        monkeypatch.setattr(gluon_language.Machine, "run", hidden)
        monkeypatch.setitem(gluon_language.HOPPER, "gdc_wait", self.ends)
        monkeypatch.setitem(gluon_language.HOPPER, "gdc_launch_dependents", self.let)

    def ends(self):
        self.waits += 1
        for t, made in zip(self.makes, self.made, strict=True):
            t.copy_(made)

    def let(self):
        self.lets += 1


@pytest.fixture
def emulate(monkeypatch):
    """A draft's result on an emulated GPU, twice with the same tickets, and the reference's."""
    counters = torch.zeros(few_shares.LIMIT, dtype=torch.int32)
    monkeypatch.setattr(few_shares, "tickets", lambda count, device: counters[:count])
    guarded.install(monkeypatch)
    written: list[int] = []

    def store(pointer, values, mask=None, **more):
        if pointer.tensor.dim() == 2:  # the result
            written.append(int(mask.sum()))
        gluon_language.store(pointer, values, mask, **more)

    monkeypatch.setattr(gluon_language.Language, "store", staticmethod(store))

    def run(launch, sms, seed=0, times=2, M=16, N=328, K=1168, **case):
        changes = {n: case.pop(n) for n in list(case) if n.startswith("_") or n.endswith("_kernel")}
        inputs = OP.inputs(**dict(M=M, N=N, K=K) | case, device="cpu", seed=5)
        bound = OP.bind(**inputs)
        expected = OP.reference(**bound)
        gpu = Device(arch="sm90", name="pretended", vendor="nv", sm_count=sms)
        with monkeypatch.context() as patch, pretend(gpu):
            Front(patch, inputs)
            with gluon_language.emulated(seed, **changes) as ran:
                found = [few(**inputs, config=launch) for _ in range(times)]
        assert ran == ["few_shares_kernel"] * times and not counters.any()
        assert sum(written) == times * expected.numel(), "results are written once"
        written.clear()
        assert_close(found[0], expected, OP.tolerance(bound))
        assert all(torch.equal(found[0], again) for again in found)
        guarded.check()

    return run


CASES = [
    # shares that cross ends of tiles, and tiles of three parts and more
    (config(wide=1, stages=4), 5, dict(M=1) | FAST),
    (config(wide=1, stages=3), 13, dict(M=5, bias=True, out_dtype=torch.float16)),
    (config(wide=1, stages=2), 33, dict(M=17, K=1040) | INT8),
    (config(wide=2, stages=2), 4, dict(M=33, bias=True) | FAST),
    (config(wide=2, per_sm=2), 3, dict(M=64, N=327, K=784) | TENSOR),
    (config(wide=1, per_sm=3, held=3), 4, dict(M=16, N=72, K=1168) | FAST),
    (config(rows=2, wide=1, stages=2), 5, dict(M=64, N=200) | FAST),
    (config(rows=2, wide=1, held=1), 7, dict(M=33, bias=True)),
    # whole tiles: one a program, several, one step each
    (config(per_sm=0), 2, dict(M=17, N=256, K=1024) | FAST),
    (config(wide=1, stages=3), 2, dict(M=5, N=512, K=512) | INT8 | TENSOR),
    (config(wide=1), 1, dict(M=64, N=200, K=16, bias=True)),
    (config(rows=2, wide=1, early=True, stages=2), 1, dict(M=16, N=392) | FAST),
    # clusters
    (config(wide=1, cluster=2, stages=2), 3, dict(M=64) | FAST),
    (config(wide=1, cluster=4), 3, dict(M=16, N=200, bias=True) | INT8),
    (config(wide=2, cluster=2, early=True), 3, dict(M=1, N=72) | TENSOR),
    (config(rows=2, wide=1, held=1, cluster=2, stages=3), 3, dict(M=33, N=200, K=784)),
    (config(rows=2, wide=1, held=1, cluster=4), 3, dict(M=5, N=200, dtype=torch.float8_e5m2, bias=True) | FAST),
]


@pytest.mark.parametrize(("launch", "sms", "case"), CASES)
def test_like_the_reference(launch, sms, case, emulate):
    emulate(launch, sms, seed=len(str(case)), **case)


WAIT = "mbarrier.wait(full.index(slot), phase)"
ARRIVE = "mbarrier.arrive(empty.index(slot), count=1)"
MULTIPLY = "acc = _multiply(acc, weights, tokens, slot, R, ROWS, WIDE, PROMOTE)"
SHARES = (config(wide=1, stages=3), 4, dict(M=16) | FAST)
DEEP = (config(wide=1), 4, dict(M=16) | FAST)
PARTS = (config(wide=1, stages=2), 17, dict(M=64, N=200))
TALL = (config(rows=2, wide=1, stages=2), 2, dict(M=33, N=200, K=784) | FAST)
WHOLE = (config(wide=2, stages=2), 2, dict(M=5, N=256, K=1024, bias=True))
PAIR = (config(rows=2, wide=1, cluster=2, stages=3), 3, dict(M=64, N=200) | FAST)
BROKEN = {
    "multiplied before it has landed": (SHARES, "_consume", f"            {WAIT}", "            pass"),
    "landed in the other phase": (SHARES, "_consume", "mbarrier.wait(full.index(slot), phase)",
                                  "mbarrier.wait(full.index(slot), phase ^ 1)"),
    "filled before it is released": (SHARES, "_produce", "mbarrier.wait(empty.index(slot), phase)", "pass"),
    "never released": (SHARES, "_consume", ARRIVE, "pass"),
    "released before it is multiplied": (SHARES, "_consume", f"{MULTIPLY}\n            {ARRIVE}",
                                         f"{ARRIVE}\n            {MULTIPLY}"),
    "another slot is released": (SHARES, "_consume", ARRIVE, ARRIVE.replace("slot)", "(slot + 1) % STAGES)")),
    "released while it is multiplied": (WHOLE, "_multiply", "warpgroup_mma_wait(0,", "warpgroup_mma_wait(1,"),
    "one of two releases": (TALL, "few_shares_kernel", "mbarrier.init(empty.index(i), count=ROWS)",
                            "mbarrier.init(empty.index(i), count=1)"),
    "phases do not turn": (SHARES, "_consume", "phase ^ 1, phase)", "phase, phase)"),
    "too few bytes": (SHARES, "_produce", "(ROWS * 64 + BLOCK_M)", "(ROWS * 64)"),
    "rows of the other group": (TALL, "_multiply", "* ROWS + R)", "* ROWS)"),
    "weights of the same tile again": (SHARES, "_produce", "tile = gl.where(k == steps, tile + 1, tile)", "pass"),
    "tokens go on behind a tile's end": (DEEP, "_produce", "gl.where(a_k + 1 == steps, 0, a_k + 1)", "a_k + 1"),
    "a part too early": (PARTS, "_add_up", "ready = ticket == last - first", "ready = ticket == last - first - 1"),
    "the first adds up": (PARTS, "_add_up", "ready = ticket == last - first", "ready = ticket == 0"),
    "everybody adds up": (PARTS, "_add_up", "ready = ticket == last - first", "ready = True"),
    "a ticket of the next tile": (PARTS, "_add_up", "gl.atomic_add(tickets_ptr + tile",
                                  "gl.atomic_add(tickets_ptr + tile // 2"),
    "tickets are not set back": (PARTS, "_add_up", "gl.store(tickets_ptr + tile * ROWS + R, 0)", "pass"),
    "a part over another": (PARTS, "_add_up", "(2 * program + (program == first).to(gl.int32))", "(2 * program)"),
    "a part twice": (PARTS, "_add_up", "part += 2 * AT_ONCE * STEP", "part += 0"),
    "not the last part": (PARTS, "_add_up", "range(first + 1, last + 1, AT_ONCE)", "range(first + 1, last, AT_ONCE)"),
    "one part too many": (SHARES, "_add_up", "k + i <= last", "k + i <= last + 1"),
    "not added up": (PARTS, "_consume", "elif not ready:", "elif False:"),
    "tokens before the kernel in front ends": (SHARES, "_produce", "        gdc_wait()\n", "        pass\n"),
    "scales before the kernel in front ends": (WHOLE, "_consume", "    mbarrier.wait(full.index(0), 0)", "    pass"),
    "the next kernel never begins": (SHARES, "_produce", "if not EARLY:", "if False:"),
    "a row of tokens too many": (WHOLE, "_consume", "(at_m < M)[None", "(at_m <= M)[None"),
    "a weight too many": (SHARES, "_consume", "(at_n < N)[:", "(at_n <= N)[:"),
    "sums of the cluster too early": (PAIR, "_add_up_in_cluster", "    everybody()", "    pass"),
    "over what the other group multiplies": (PAIR, "_add_up_in_cluster", "both_groups()", "pass"),
    "all of the cluster have the first tokens": (PAIR, "_add_up_in_cluster", "first * 64 +", ""),
    "gone while others read": (PAIR, "_consume", "        everybody()", "        pass"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_ones_are_found(what, emulate):
    (launch, sms, case), function, old, new = BROKEN[what]
    with pytest.raises(AssertionError):  # a Fault is one
        for seed in range(6):
            emulate(launch, sms, seed, **case, **{function: (old, new)})


@pytest.mark.parametrize("which", (SHARES, DEEP, PARTS, TALL, WHOLE, PAIR))
def test_what_is_broken_was_right(which, emulate):
    launch, sms, case = which
    emulate(launch, sms, **case)


@pytest.fixture
def there(monkeypatch):
    """A GPU that seems to be there, on which candidates give what the op's reference gives."""
    monkeypatch.setattr(few_timing, "BLOCK_MS", 0.1)
    monkeypatch.setattr(few_timing, "draft", lambda name: (reference, {}))
    monkeypatch.setattr(few_timing.tables, "limits", lambda: (1e6, 1.0))
    monkeypatch.setattr(PLAN, "draft", lambda name: (reference, {}))
    monkeypatch.setattr(PLAN, "checks", lambda name: [dict(M=3, N=8, K=128), dict(M=2, N=8, K=256, bias=True)])
    with dry.seeming_gpu():
        yield


def reference(config=None, **s):
    return OP.reference(**OP.bind(**s))


def test_what_is_timed_gets_to_its_rows(there, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(few_timing, "SHAPES", [("fp8_token", 16, 128, 256), ("int8_token", 1, 64, 128)])
    monkeypatch.setattr(few_timing.peers, "calls", lambda product, *size: dict(cutlass=lambda s: 1.01 * OP(**s)))
    few_timing.time_all(("one", "pair"), (0, 1), str(tmp_path / "few.csv"))
    with (tmp_path / "few.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(r["product"], r["kernel"]) for r in rows} >= {
        ("fp8_token", "today"), ("fp8_token", "cutlass"), ("fp8_token", "one"), ("int8_token", "cutlass"),
    }  # fmt: skip
    assert all(float(r["floor_over_it"]) > 0 for r in rows)
    said = capsys.readouterr().out
    assert "fp8_token, 16 tokens, 1 layers" in said and "best" in said


def test_what_is_wrong_is_told(there, monkeypatch, capsys):
    monkeypatch.setattr(PLAN, "fits", lambda name, case: True)
    monkeypatch.setattr(few_candidates, "fits", lambda *_: True)
    monkeypatch.setattr(few_candidates, "BEHIND", (64, 128))
    monkeypatch.setattr(few_candidates, "draft", lambda name: (reference, {}))
    trial.check(PLAN, "one")
    assert "one OK" in capsys.readouterr().out
    monkeypatch.setattr(few_candidates, "draft", lambda name: (lambda **s: 1.1 * reference(**s), {}))
    with pytest.raises(SystemExit, match="one WRONG behind a kernel that makes 1 tokens"):
        trial.check(PLAN, "one")
