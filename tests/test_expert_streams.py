"""grouped_scaled_mm_group's `streams` kernel: on an emulated GPU against the reference, broken, what it takes, when it
is the default."""

import gluon_language
import guarded
import pytest
import torch

import fpk
from fpk import db
from fpk._moe import gathers
from fpk._moe_checks import Static
from fpk.api import Quantized
from fpk.check import assert_close
from fpk.device import Device, pretend, pretend_triton
from fpk.formats import scheme_of
from fpk.kernels.moe._expert_streams import places, streams, streams_default, streams_legal, streams_space
from fpk.op import OPS
from fpk.tune.arguments import legal_candidates, outline

OP = OPS["grouped_scaled_mm_group"]
H200 = Device("sm90", "NVIDIA H200", "nv", 132)
ORDER, DEEP, PAIRS = streams(order=True), streams(deep=True), streams(cluster=2)
LATE = streams(ahead=False)
GATHER = dict(gather=4)


@pytest.fixture
def emulate(monkeypatch):
    """The kernel's result on an emulated GPU and the reference's, for experts with so many rows."""
    guarded.install(monkeypatch)
    run_machine = gluon_language.Machine.run

    def balanced(machine, kernel):
        run_machine(machine, kernel)
        left = [vars(program).get("turns", [0, 0]) for program in machine.programs]
        assert all(turns == [0, 0] for turns in left), "turns that nobody has taken"

    monkeypatch.setattr(gluon_language.Machine, "run", balanced)

    def run(config, rows, lost=0, seed=0, N=328, K=400, **case):
        changes = {n: case.pop(n) for n in list(case) if isinstance(case[n], tuple)}
        inputs = OP.inputs(M=sum(rows) + lost, N=N, K=K, E=len(rows), **case, device="cpu", seed=5)
        inputs["offs"] = torch.tensor(rows).cumsum(0).to(torch.int32)
        if inputs["gather"] is None and inputs["scale_a"].stride(1):
            inputs["scale_a"][sum(rows) :] = float("nan")  # rows of no expert hold anything
        bound = OP.bind(**inputs)
        gpu = Device(arch="sm90", name="pretended", vendor="nv", sm_count=2 * config["CLUSTER"])
        with pretend(gpu), pretend_triton("3.6"), gluon_language.emulated(seed, **changes) as ran:
            assert OP.is_legal(config, bound, gpu)
            out = OP.launcher(**bound, config=config)
        assert ran == ["expert_streams_kernel"]
        assert_close(out, OP.reference(**bound), OP.tolerance(bound))
        guarded.check()

    return run


@pytest.mark.parametrize("case", ({}, GATHER), ids=("rows", "gather"))
@pytest.mark.parametrize("config", (streams(), ORDER, PAIRS), ids=("plain", "order", "pairs"))
def test_like_the_reference(config, case, emulate):
    """Whole tiles, tails, no rows at all, a single row, and rows of no expert."""
    if case and config["CLUSTER"] > 1:
        config = streams(deep=True, order=True)
    emulate(config, (130, 0, 70, 0, 1, 63), lost=8, **case)


@pytest.mark.parametrize(
    ("config", "rows", "lost", "case"),
    [
        (DEEP, (256,), 0, dict(N=512, K=384, dtype=torch.float8_e5m2)),
        (streams(deep=True, ahead=False), (0, 0, 129), 0, GATHER | dict(N=264, K=128, scale_layout="column")),
        (streams(), (0, 0), 5, dict(N=264, K=128)),
        (LATE, (1,), 3, GATHER | dict(N=8, K=16, out_dtype=torch.float16)),
        (streams(cluster=2, order=True), (120, 180), 0, dict(N=264, K=640, scale_layout="token")),
        (streams(deep=True, order=True, group=4), (90, 2), 68, GATHER | dict(N=264, K=912, layout="rows")),
        (streams(cluster=2, deep=True), (65, 64), 3, dict(N=520, K=256, out_dtype=torch.float16)),
        (LATE | dict(ORDER=True), (64, 1, 65), 2, dict(N=520, K=272, scale_layout="column")),
    ],
)
def test_one_expert_few_steps_odd_steps_and_nothing(config, rows, lost, case, emulate):
    emulate(config, rows, lost, seed=3, **case)


DONE, RELEASE = "p_1 = warpgroup_mma_wait(0, deps=[t_1])", "arrive_everywhere(empty, CLUSTER)"
NEXT = "wait_if(BARS_AT + slot * 8, phase, remain)"
TURN = f"{' ' * 24}wait_turn(WHICH)\n{' ' * 24}pass_turn(WHICH)\n"
BROKEN = {
    "no wait for the first step": (streams(), "_multiply", "wait_if(BARS_AT, 0, remain)", "pass"),
    "no wait for the next step": (streams(), "_multiply", NEXT, "pass"),
    "waits for a step that does not come": (streams(), "_multiply", NEXT, NEXT.replace("remain", "1")),
    "no wait for a step of its own": (LATE, "_multiply", "wait(BARS_AT + slot * 8, phase)", "pass"),
    "used before the product is done": (streams(), "_multiply", "mma_wait(0, deps=[t_1])", "mma_wait(1, deps=[t_1])"),
    "released before the product is done": (GATHER, "_multiply", f"{DONE}\n{' ' * 16}{RELEASE}",
                                            f"{RELEASE}\n{' ' * 16}{DONE}"),
    "released only here": (PAIRS, "_multiply", RELEASE, "arrive_everywhere(empty, 1)"),
    "passing steps are not released": (streams(), "_multiply",
                                       "arrive_everywhere(BARS_AT + (STAGES + slot) * 8, CLUSTER)", "pass"),
    "scales of another slot": (streams(), "_multiply", "take(sa_at + slot * 512)",
                               "take(sa_at + (slot + 1) % STAGES * 512)"),
    "rows of another slot": (streams(), "_multiply", "words_of(pool, slot,", "words_of(pool, (slot + 1) % STAGES,"),
    "the neighbour's weights": (GATHER, "_multiply", "rows_of(pool, slot, 256,", "rows_of(pool, slot, 128,"),
    "nobody begins": (ORDER, "_multiply", "    pass_turn(1)", "    pass"),
    "turns are not passed on": (ORDER, "_multiply", TURN, TURN.replace("pass_turn", "wait_turn")),
    "passing steps take no turns": (ORDER, "_multiply", TURN, f"{' ' * 24}pass\n"),
    "the last turn is nobody's": (ORDER, "_multiply", "wait_turn(0)", "pass"),
    "filled before it is released": (streams(), "_fetch", "wait(BARS_AT + (STAGES + slot) * 8, phase)", "pass"),
    "a weight's scale of the next step": (streams(), "_fetch", "sb_1 + k,", "sb_1 + min(k + 1, steps - 1),"),
    "a row's scale of the next step": (streams(), "_fetch", "sa_ptrs + k * stride_sak",
                                       "sa_ptrs + min(k + 1, 3) * stride_sak"),
    "copies are told of elsewhere": (streams(), "_fetch", "tell(full)", "tell(BARS_AT + (slot + 1) % STAGES * 8)"),
    "too few bytes": (streams(), "_fetch", "256 * 128 +", "256 * 127 +"),
    "columns behind the last one": (GATHER, "_fetch", "chunks * 16 < K", "chunks * 16 < K + 128"),
    "half of the shared rows": (PAIRS, "_fetch", "k * 128, full, CLUSTER)", "k * 128, full, 1)"),
    "the first row of another expert": (streams(), "_fetch", "expert * N + block", "next_expert * N + block"),
    "whole boxes over the next expert's rows": (streams(), "_leave", "row + 64 <= end", "row < end"),
    "rows of the next expert": (GATHER, "_store_rows", "(rows < end)", "(rows < end + 8)"),
    "boxes are not waited for": (DEEP, "_leave", "tma.store_wait(0)", "pass"),
    "rows of no expert are left": (streams(), "_clear", "max(R - begin, 0)", "0"),
    "rows of no expert are multiplied": (streams(), "expert_streams_kernel", "- gl.cdiv(R - begin_lost, 128)", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_broken_ones_are_found(what, emulate):
    config, function, old, new = BROKEN[what]
    config, case = (streams(), GATHER) if config is GATHER else (config, {})
    with pytest.raises(AssertionError):  # a Fault is one
        for seed in range(6):
            emulate(config, (70, 0, 150, 3), 9, seed, **case, **{function: (old, new)})


@pytest.mark.parametrize(
    ("config", "case"), [(streams(), GATHER), *((c, {}) for c in (streams(), ORDER, PAIRS, DEEP, LATE))]
)
def test_what_is_broken_was_right(config, case, emulate):
    emulate(config, (70, 0, 150, 3), 9, **case)


def legal(config, device=H200, triton="3.6", **case):
    with pretend(device), pretend_triton(triton):
        bound = outline(OP, dict(M=2048, N=1536, K=768, E=8) | case)
        return OP.is_legal(config, bound, device)


def test_what_streams_refuses():
    usual = streams()
    assert (
        legal(usual) and legal(usual, gather=4) and legal(usual, dtype=torch.float8_e5m2) and legal(usual, M=1, E=300)
    )
    assert legal(usual, out_dtype=torch.float16) and legal(usual, scale_layout="column") and legal(usual, N=8, K=16)
    for arch in ("sm89", "sm100", "sm120", "gfx950", "cpu"):
        assert not legal(usual, Device(arch, "", "nv", 132))
    assert not legal(usual, triton="3.9")
    for case in (
        dict(bias=True), dict(out_dtype=torch.float32), dict(scale_format="e8m0"), dict(dtype=torch.int8), dict(M=0),
        dict(N=1540), dict(K=776), dict(layout="offset"), dict(blocks=(64, 128, 128)), dict(blocks=(128, 256, 128)),
        dict(blocks=(128, 128, 64)), dict(blocks=(128, -1, -1)), dict(blocks=(128, 1, -1)),
    ):  # fmt: skip
        assert not legal(usual, **case), case
    assert legal(PAIRS) and not legal(PAIRS, gather=4)
    assert not legal(usual | dict(STAGES=4)) and not legal(DEEP | dict(BOXES=2))  # shared memory


def test_offsets_are_int32():
    """Of rows that are gathered, and of scales and weights; rows in order come by descriptor."""

    def fits(T, E, N, K, gather=None):
        shapes = dict(a=(T, K), b=(E, N, K), scale_a=(T, -(-K // 128)), scale_b=(E, -(-N // 128), -(-K // 128)))
        codes = dict(a=torch.float8_e4m3fn, b=torch.float8_e4m3fn)
        held = {n: torch.empty(s, dtype=codes.get(n), device="meta") for n, s in shapes.items()}
        with pretend_triton("3.6"):
            return streams_legal(
                streams(), H200, **held, blocks=(128, 128, 128), bias=None, out_dtype=torch.bfloat16, gather=gather
            )

    order = torch.empty(1, dtype=torch.int32)
    assert fits(2**20, 8, 512, 4096) and fits(2**18, 8, 512, 4096, order) and not fits(2**20, 8, 512, 4096, order)
    assert not fits(2**26, 1, 128, 4096)  # 32 scales a row
    assert fits(128, 2**10, 2**20, 128) and not fits(128, 2**11, 2**20, 128)  # rows of all weights


@pytest.mark.parametrize("gather", (0, 4))
def test_candidates(gather):
    """A moderate number, all told apart by look-ups, and none for few rows."""
    with pretend(H200), pretend_triton("3.6"):
        for rows, found in ((8, 0), (64, 13)):
            bound = outline(OP, dict(M=8 * rows, N=1536, K=768, E=8, gather=gather))
            of = [c for c in legal_candidates(OP, bound, H200) if c["kernel"] == "streams"]
            assert len(of) == found - (3 if gather and found else 0) and all(OP.is_sound(c, bound) for c in of)
            for config in of:
                OP.validate_config(config)
    for config in streams_space():
        at = places(config["STAGES"], config["BOXES"])
        assert at["BARS_AT"] % 1024 == at["OUT_AT"] % 1024 == 0 and at["BARS_AT"] + 1024 <= H200.shared_limit


def test_where_a_layer_gathers():
    """Where tiles are few beside the copy that is saved and this kernel runs; in batch-invariant mode for any batch."""

    def found(tokens, E, top_k, N, K=512, act="fp8_group128", triton="3.6", bias=False, dtype=torch.bfloat16):
        codes, scale = torch.empty((E, N, K), dtype=torch.float8_e4m3fn), torch.empty((E, -(-N // 128), -(-K // 128)))
        weight = Quantized(codes, scale, "fp8_block128", check=False)
        x = torch.empty((tokens, K), dtype=dtype, device="meta")
        with pretend(H200), pretend_triton(triton):
            return gathers(x, scheme_of(act), weight, Static(None, None), top_k, bias)

    assert found(4096, 256, 8, 4096, 128) and found(1024, 128, 8, 1536) and found(4096, 128, 8, 1536)
    assert found(4096, 256, 8, 512) and found(4096, 8, 2, 512) and found(128, 1, 1, 1536, act="fp8_token")
    assert not found(4096, 8, 2, 3584) and not found(1024, 8, 2, 28672, 128)  # many rows, many columns
    assert not found(256, 128, 8, 1536)  # few rows: other tiles
    for other in (
        dict(triton="3.9"), dict(bias=True), dict(K=520), dict(act="fp8_group128_e8m0"), dict(act="fp8_group64"),
        dict(dtype=torch.float32), dict(N=1540),
    ):  # fmt: skip
        assert not found(**dict(tokens=1024, E=128, top_k=8, N=1536) | other), other
    for invariant, answers in ((False, 2), (True, 1)):
        with fpk.batch_invariant(invariant):
            assert len({found(tokens, 2, 2, 1536) for tokens in (1, 16, 128, 4096)}) == answers


def test_where_the_default_is_this_kernel():
    """Where it was timed to be faster than what there was; elsewhere, and in other tritons, that remains."""

    def first(M, E, N, K, triton="3.6", **more):
        with pretend(H200), pretend_triton(triton), db.use(db.Empty()):
            return OP.config_for(**outline(OP, dict(M=M, N=N, K=K, E=E) | more))

    assert first(8192, 8, 28672, 4096) == first(32768, 256, 512, 7168) == first(8192, 128, 1536, 2048) == streams()
    assert first(32768, 256, 7168, 256, gather=8) == first(8192, 8, 4096, 14336, gather=2) == streams()
    assert first(8192, 8, 4096, 14336)["kernel"] == "wide" and first(2048, 128, 1536, 2048)["kernel"] != "streams"
    assert first(8192, 8, 28672, 4096, "3.9")["kernel"] == "wide"
    assert first(8192, 8, 28672, 4096, bias=True)["kernel"] == "wide"
    for rows, K, gather in ((64, 256, False), (4096, 4096, False), (256, 16384, False), (1024, 16384, True)):
        (config,) = streams_default(rows, K, gather)
        assert config in list(streams_space())
