"""scaled_mm's `shares` kernel: on an emulated GPU against the reference, broken, and what it takes and refuses."""

import ast
import itertools
import re
import threading
import types
from pathlib import Path

import gluon_language
import guarded
import pytest
import torch

import fpk.kernels
from fpk import db
from fpk.check import assert_close
from fpk.device import Device, pretend, pretend_triton
from fpk.kernels.gemm import _launch, _shares, _tickets
from fpk.kernels.gemm._shares import most_stages, shared_out, shares, shares_default, shares_space, tokens_held
from fpk.op import OPS
from fpk.tune.arguments import legal_candidates, outline

OP = OPS["scaled_mm"]
H200 = Device("sm90", "NVIDIA H200", "nv", 132)
FAST = dict(fast_accum=True)
INT8 = dict(dtype=torch.int8)
TENSOR = dict(a_granularity="tensor", b_granularity="tensor")
LAYERS = [
    (4096, 7168), (7168, 2048), (6144, 4096), (2112, 7168), (24576, 1536), (4096, 14336), (10240, 8192), (4096, 4096),
    (7168, 16384), (28672, 4096), (8192, 28672), (57344, 8192),
]  # fmt: skip


def legal(config, case=None, device=H200, **more):
    with pretend(device), pretend_triton("3.6"):
        return OP.is_legal(config, outline(OP, dict(M=64, N=512, K=1024) | FAST | (case or {}) | more), device)


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
    """The kernel's result on an emulated GPU, twice with the same tickets, and the reference's."""
    counters = torch.zeros(_tickets.LIMIT, dtype=torch.int32)
    monkeypatch.setattr(_shares, "tickets", lambda count, device: counters[:count])
    guarded.install(monkeypatch)
    written: list[int] = []

    def store(pointer, values, mask=None, **more):
        if pointer.tensor.dim() == 2:  # the result
            written.append(int(mask.sum()))
        gluon_language.store(pointer, values, mask, **more)

    monkeypatch.setattr(gluon_language.Language, "store", staticmethod(store))

    def run(launch, sms, seed=0, times=2, launches=1, M=16, N=328, K=1168, **case):
        changes = {n: case.pop(n) for n in list(case) if n.startswith("_") or n.endswith("_kernel")}
        inputs = OP.inputs(**dict(M=M, N=N, K=K) | case, device="cpu", seed=5)
        bound = OP.bind(**inputs)
        expected = OP.reference(**bound)
        gpu = Device(arch="sm90", name="pretended", vendor="nv", sm_count=sms)
        with monkeypatch.context() as patch, pretend(gpu), pretend_triton("3.6"):
            assert OP.is_legal(launch, bound, gpu)
            Front(patch, inputs)
            with gluon_language.emulated(seed, **changes) as ran:
                found = [OP.launcher(**bound, config=launch) for _ in range(times)]
        assert ran == ["shares_kernel"] * times * launches and not counters.any()
        assert sum(written) == times * expected.numel(), "results are written once"
        written.clear()
        assert_close(found[0], expected, OP.tolerance(bound))
        assert all(torch.equal(found[0], again) for again in found)
        guarded.check()

    return run


def of(m, stages=0, **fields):
    config = shares(m, **fields)
    return config | dict(STAGES=stages) if stages else config


CASES = [
    # shares that cross ends of tiles, and tiles of three parts and more
    (of(8, 4), 5, dict(M=1) | FAST),
    (of(8, 3), 13, dict(M=5, bias=True, out_dtype=torch.float16)),
    (of(32, 2), 33, dict(M=17, K=1040) | INT8),
    (of(64, 2, wide=2), 4, dict(M=33, bias=True) | FAST),
    (of(64, wide=2, per_sm=2), 3, dict(M=64, N=327, K=784) | TENSOR),
    (of(16, per_sm=3, held=3), 4, dict(M=16, N=72, K=1168) | FAST),
    (of(64, 2, rows=2), 5, dict(M=64, N=200) | FAST),
    (of(64, rows=2, wide=2, held=1), 7, dict(M=33, bias=True)),
    # whole tiles: one a program, several, one step each
    (of(32, wide=2, split=1), 2, dict(M=17, N=256, K=1024) | FAST),
    (of(8, 3), 2, dict(M=5, N=512, K=512) | INT8 | TENSOR),
    (of(64), 1, dict(M=64, N=200, K=16, bias=True)),
    (of(16, 2, rows=2, early=True), 1, dict(M=16, N=392) | FAST),
    # clusters
    (of(64, 2, split=2), 3, dict(M=64) | FAST),
    (of(16, split=4), 3, dict(M=16, N=200, bias=True) | INT8),
    (of(8, wide=2, split=2, early=True), 3, dict(M=1, N=72) | TENSOR),
    (of(64, 3, rows=2, held=1, split=2), 3, dict(M=33, N=200, K=784)),
    (of(8, rows=2, held=1, split=4), 3, dict(M=5, N=200, dtype=torch.float8_e5m2, bias=True) | FAST),
    # more tokens than a tile has, rows apart, and columns that no 16 bytes end at
    (of(8, 3), 5, dict(M=19, N=200, bias=True) | FAST),
    (of(16, rows=2, split=1), 3, dict(M=33, N=200, K=272) | INT8),
    (of(8, split=2), 3, dict(M=17, N=136, layout="rows")),
    (of(32), 3, dict(M=33, N=136, K=400, layout="rows", b_granularity="tensor") | FAST),
]


@pytest.mark.parametrize(("launch", "sms", "case"), CASES)
def test_like_the_reference(launch, sms, case, emulate):
    emulate(launch, sms, seed=len(str(case)), **case)


WAIT = "mbarrier.wait(full.index(slot), phase)"
ARRIVE = "mbarrier.arrive(empty.index(slot), count=1)"
MULTIPLY = "acc = _multiply(acc, weights, tokens, slot, R, ROWS, WIDE, PROMOTE)"
SHARES = (of(16, 3), 4, dict(M=16) | FAST)
DEEP = (of(16), 4, dict(M=16) | FAST)
PARTS = (of(64, 2), 17, dict(M=64, N=200))
TALL = (of(64, 2, rows=2), 2, dict(M=33, N=200, K=784) | FAST)
WHOLE = (of(8, 2, wide=2), 2, dict(M=5, N=256, K=1024, bias=True))
PAIR = (of(64, 3, rows=2, split=2), 3, dict(M=64, N=200) | FAST)
TILES = (of(8, 3), 5, dict(M=19, N=200) | FAST)
PAIRS = (of(8, split=2), 3, dict(M=17, N=136) | FAST)
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
    "one of two releases": (TALL, "shares_kernel", "mbarrier.init(empty.index(i), count=ROWS)",
                            "mbarrier.init(empty.index(i), count=1)"),
    "phases do not turn": (SHARES, "_consume", "phase ^ 1, phase)", "phase, phase)"),
    "too few bytes": (SHARES, "_produce", "(ROWS * 64 + BLOCK_M)", "(ROWS * 64)"),
    "rows of the other group": (TALL, "_multiply", "* ROWS + R)", "* ROWS)"),
    "weights of the same tile again": (SHARES, "_produce", "tile = gl.where(k == steps, tile + 1, tile)", "pass"),
    "tokens go on behind a tile's end": (DEEP, "_produce", "gl.where(a_k + 1 == steps, 0, a_k + 1)", "a_k + 1"),
    "a part too early": (PARTS, "_add_up", "ready = ticket == last - first", "ready = ticket == last - first - 1"),
    "the first adds up": (PARTS, "_add_up", "ready = ticket == last - first", "ready = ticket == 0"),
    "everybody adds up": (PARTS, "_add_up", "ready = ticket == last - first", "ready = True"),
    "a ticket of the next tile": (PARTS, "_consume", "m * tiles_n + tile)", "m * tiles_n + tile // 2)"),
    "a ticket of other tokens": (TILES, "_consume", "m * tiles_n + tile)", "tile)"),
    "a part of other tokens": (TILES, "_consume", "2 * m * gl", "0 * m * gl"),
    "tokens of the first tile": (TILES, "_fetch_tokens", "[token,", "[0,"),
    "tokens of the first tile, later": (PAIRS, "_produce", "full, at - begin, m * BLOCK_M", "full, at - begin, 0"),
    "results of the first tile": (PAIRS, "_consume", "m * BLOCK_M + first_token", "first_token"),
    "tickets are not set back": (PARTS, "_add_up", "gl.store(ticket_ptr, 0)", "pass"),
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


@pytest.mark.parametrize("which", (SHARES, DEEP, PARTS, TALL, WHOLE, PAIR, TILES, PAIRS))
def test_what_is_broken_was_right(which, emulate):
    launch, sms, case = which
    emulate(launch, sms, **case)


@pytest.mark.parametrize("rows", (1, 2))
@pytest.mark.parametrize("wide", (1, 2))
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_every_step_is_somebodys_and_shares_are_even(n, k, rows, wide):
    """The busiest program of an SM has at most 15 % more than its part: so much do few steps of wide tiles cost."""
    tiles, steps, mine = shared_out(n, k, shares(16, rows, wide), 132)
    programs = -(-tiles * steps // mine)
    assert tiles * rows * 64 >= n > (tiles - 1) * rows * 64 and steps * wide * 128 >= k > (steps - 1) * wide * 128
    assert programs <= 132 and (programs - 1) * mine < tiles * steps <= 1.15 * programs * mine
    assert mine * 132 <= 1.15 * tiles * steps + 132


def test_what_shares_refuses():
    usual = shares(64)
    assert legal(usual) and legal(usual, INT8) and legal(usual, TENSOR) and legal(usual, N=327, bias=True)
    assert legal(usual, M=4096, N=65536) and legal(usual, K=1040) and legal(usual, out_dtype=torch.float32)
    for arch in ("sm89", "sm100", "sm120", "gfx950", "cpu"):
        assert not legal(usual, device=Device(arch, "", "nv", 132))
    assert not legal(usual, INT8, zero_point=True)
    assert not legal(usual, layout="offset") and not legal(usual, K=1032) and not legal(usual, M=0)
    assert not legal(usual, K=0) and not legal(usual, N=0)
    for changed in (
        dict(STAGES=1), dict(STAGES=7), dict(BLOCK_M=24), dict(BLOCK_M=128), dict(BLOCK_N=96), dict(BLOCK_N=256),
        dict(BLOCK_K=64), dict(SPLIT_K=3), dict(SPLIT_K=8), dict(PER_SM=0), dict(PER_SM=3), dict(HELD=4, STAGES=2),
        dict(BLOCK_N=128, HELD=4, STAGES=2),
    ):  # fmt: skip
        assert not legal(usual | changed), changed
    assert legal(shares(64, 2)) and not legal(shares(64, 2), fast_accum=False)  # registers
    assert legal(shares(16, split=4)) and not legal(shares(16, split=4), K=768)  # one program would have no step
    with pretend(H200), pretend_triton("3.9"):
        assert not OP.is_legal(usual, outline(OP, dict(M=64, N=512, K=1024)), H200)


@pytest.mark.parametrize("product", [FAST, dict(fast_accum=False), INT8], ids=str)
@pytest.mark.parametrize("M", [1, 4, 16, 32, 64])
def test_candidates_for_few_tokens(M, product):
    """A moderate number, all of them told apart by look-ups, and none for more tokens."""
    with pretend(H200), pretend_triton("3.6"):
        bound = outline(OP, dict(M=M, N=6144, K=4096) | product)
        found = [c for c in legal_candidates(OP, bound, H200) if c["kernel"] == "shares"]
        assert 15 <= len(found) <= 24 and all(OP.is_sound(c, bound) and c["BLOCK_M"] >= M for c in found)
        for config in found:
            OP.validate_config(config)
    assert not list(shares_space(65))


def test_stages_fill_what_a_program_has_of_an_sm():
    for m, rows, wide, held in itertools.product((8, 16, 32, 64), (1, 2), (1, 2), (1, 2, 3, 4)):
        config = shares(m, rows, wide, held=held)
        slot = 128 * wide * (64 * rows + m) + 16
        assert config["STAGES"] == most_stages(config) and (config["STAGES"] * slot + 2048) * held <= 233_472
        assert config["STAGES"] == 16 or ((config["STAGES"] + 1) * slot + 2048) * held > 233_472


@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (8, 8), (9, 16), (33, 64), (64, 64), (4096, 64)])
def test_tokens_that_the_unit_gets(tokens, width):
    assert tokens_held(tokens) == width


@pytest.mark.parametrize("M", [1, 16, 32, 64])
@pytest.mark.parametrize(("n", "k"), LAYERS)
def test_defaults_are_candidates_and_one_at_most(M, n, k):
    found = list(shares_default(M, n, k, 132))
    assert len(found) <= 1 and all(c in list(shares_space(M)) and legal(c, M=M, N=n, K=k) for c in found)
    assert found or M > 1


def test_where_the_default_is_this_kernel():
    """Where it was timed to be faster than what there was; elsewhere, and in other tritons, that remains."""

    def first(M, N, K, triton="3.6", **more):
        with pretend(H200), pretend_triton(triton), db.use(db.Empty()):
            return OP.config_for(**outline(OP, dict(M=M, N=N, K=K) | FAST | more))["kernel"]

    assert first(1, 4096, 7168) == first(16, 7168, 2048) == first(16, 6144, 4096) == first(64, 24576, 1536) == "shares"
    assert first(16, 4096, 7168) == first(64, 4096, 7168) == "split" and first(64, 7168, 2048) == "tile"
    assert first(1, 4096, 7168, "3.9") == "split" and first(16, 7168, 2048, "3.9") == "tile"
    assert first(16, 6144, 4096, dtype=torch.int8, zero_point=True) == "split"


def test_weights_are_met_once():
    """Other memory at the same address is new again."""
    weights = torch.zeros(64, 64)
    assert _launch.is_new(weights[:8]) and not _launch.is_new(weights) and not _launch.is_new(weights.T)
    for _ in range(4):
        assert _launch.is_new(torch.zeros(64, 64))


def reads_ahead(text):
    """Names of functions in which something is fetched before the kernel in front has ended."""
    for fn in (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)):
        calls = [(n.lineno, ast.unparse(n.func)) for n in ast.walk(fn) if isinstance(n, ast.Call)]
        waits = [line for line, name in calls if name == "gdc_wait"]
        if any(line < min(waits) for line, name in calls if waits and re.search("fetch|load", name)):
            yield fn.name


def test_kernels_that_fetch_weights_early_are_launched_behind_what_makes_them():
    texts = {path.stem: path.read_text() for path in (Path(fpk.__file__).parent / "kernels").rglob("*.py")}
    early = {name for name, text in texts.items() if list(reads_ahead(text))}
    assert early == {"_gluon_shares", "_gluon_weight_shares", "_gluon_unit_warps"}
    for name in early:
        (kernel,) = re.findall(r"^def (\w+_kernel)\(", texts[name], re.M)
        launchers = [text for text in texts.values() if f"{kernel}[" in text]
        assert launchers and all("**ahead(" in text.split(f"{kernel}[")[1] for text in launchers)


def test_many_tokens_are_several_launches(emulate, monkeypatch):
    """Which have tickets enough, and give what one launch gives."""
    assert _tickets.pieces(100, 8, 16) == [slice(0, 100)] and not _tickets.pieces(0, 8, 16)
    assert _tickets.pieces(70_000, 64, 128) == [slice(i, min(i + 8192, 70_000)) for i in range(0, 70_000, 8192)]
    assert _tickets.pieces(130, 64, 128, _tickets.ROOM) == [slice(0, 64), slice(64, 128), slice(128, 130)]
    assert _tickets.pieces(64, 64, 128, 2 * _tickets.ROOM) == [slice(0, 64)], "a tile is not divided"
    with monkeypatch.context() as patch:
        patch.setattr(_tickets, "ROOM", 3 * 5 * 2 * 64 * 8)
        emulate(of(8, 3), 5, launches=2, M=40, N=328, **FAST)
    monkeypatch.setattr(_tickets, "LIMIT", 12)
    for m, case in ((19, FAST), (33, INT8 | dict(bias=True)), (17, TENSOR)):
        emulate(of(8, 3), 5, launches=-(-m // 16), M=m, N=328, **case)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU for `tickets`: which threads made its zeros, and a dict that says what its caller does."""
    state, made, zeros = dict(capturing=False, stream=1), [], torch.zeros
    stream = lambda device=None: types.SimpleNamespace(cuda_stream=state["stream"], synchronize=lambda: None)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", stream)

    def make(count, dtype, device):
        made.append(threading.current_thread())
        return zeros(count, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", make)
    for name in ("_streams", "_pools", "_full"):
        monkeypatch.setattr(_tickets, name, type(getattr(_tickets, name))())
    return state, made


def test_tickets_that_are_kept_come_from_no_pool_of_the_caller(gpu):
    """torch.compile's graphs refuse what stays alive in theirs, and give it to others."""
    (state, made), device = gpu, torch.device("cuda", 0)
    for stream in (1, 2, 1):
        state["stream"] = stream
        assert not _tickets.tickets(8, device).any()
    assert len(made) == 3 and threading.current_thread() not in made  # of graphs, and of two streams
    state["capturing"] = True
    _tickets.tickets(8, device)
    assert len(made) == 3


def test_no_two_captured_launches_share_tickets(gpu, monkeypatch):
    """Nor does one with what runs beside it, when a pool is used up and another one begins."""
    (state, made), device = gpu, torch.device("cuda", 0)
    monkeypatch.setattr(_tickets, "_POOL", 2 * _tickets.LIMIT)
    kept = [_tickets.tickets(1, device)]
    for capturing in (True, True, True, False, True):
        state["capturing"] = capturing
        kept.append(_tickets.tickets(_tickets.LIMIT if capturing else 1, device))
    assert kept[4] is kept[0], "of the stream"
    places = [t.data_ptr() for t in kept[:4] + kept[5:]]
    assert len(set(places)) == 5 and made.count(threading.current_thread()) == 1, "the third has zeros of its own"
