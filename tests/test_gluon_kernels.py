"""Gluon kernels, run by their ops' launchers on an emulated machine, against the references; and broken ones."""

import guarded
import op_laws
import pytest
import torch
from gluon_language import Fault, emulated

from fpk.check import assert_close
from fpk.device import Device, pretend, pretend_triton
from fpk.kernels.gemm import _gluon
from fpk.kernels.gemm._group_space import joint, ordered
from fpk.kernels.gemm._scaled_space import late
from fpk.kernels.gemm._warps_space import turns, warps, weight_warps
from fpk.kernels.gemm._weight_shares import shares
from fpk.op import OPS

DEVICE = Device(arch="sm90", name="pretended", vendor="nv", sm_count=3)  # so that programs take several tiles each
SIZE = dict(M=150, N=328, K=1168)  # no multiples of a tile, and more steps than a ring has slots
FEW = SIZE | dict(M=45)
COLUMNS = SIZE | dict(M=152, scale_layout="column", bias=True)  # rows' scales that TMA reads
ODD = SIZE | dict(K=1040)  # of steps
SHORT = SIZE | dict(K=272)  # of fewer steps than a ring has slots


def launch(name, config, case, seed=0, **changes):
    """(result, reference, tolerance) of an op's kernel by its own launcher."""
    op = OPS[name]
    args = op_laws.make(op, case)
    bound = op.bind(**args)
    with pretend_triton("3.6"), pretend(DEVICE):
        assert op.is_legal(config, bound, DEVICE) or not _gluon.AVAILABLE
        with emulated(seed, **changes) as ran:
            out = op.launcher(**bound, config=config)
    assert ran
    return out, op.reference(**args), op.tolerance(bound)


def grouped(columns, stages, kernel="gluon", **more):
    return dict(kernel=kernel, GROUP_M=2, STAGES=stages, num_warps=4) | columns | more


EXPERTS = dict(M=300, N=328, K=656, E=3)
HALF = EXPERTS | dict(M=470)  # tiles of at most 64 rows too, which one of the consumers passes
GLUON = dict(BLOCK_N=128)
SLIM = dict(BLOCK_M=32, BLOCK_N=128, PER_SM=1, GROUP_M=1)
MANY = dict(M=600, N=392, K=1040)
TOKEN = dict(K=1152, I=384, E=3, top_k=3)
STREAM = dict(kernel="stream", BOX13=32, BOX2=32, STAGES=3, num_warps=8, maxnreg=128)
CASES = [
    ("moe_token", STREAM, TOKEN | dict(scheme="block", residual="weighted")),
    ("moe_token", STREAM | dict(BOX13=16, BOX2=64, STAGES=2), TOKEN | dict(mapped=True)),
    ("scaled_mm", late(128, 256, 4), MANY | dict(fast_accum=True)),
    ("scaled_mm", late(128, 128, 3, cluster=1), MANY | dict(dtype=torch.int8, K=512)),
    ("grouped_scaled_mm", grouped(GLUON, 4), EXPERTS | dict(bias=True, dropped=0.3)),
    ("grouped_scaled_mm", grouped(dict(BLOCK_N=256), 3), HALF | dict(fast_accum=True, spread="one")),
    ("grouped_scaled_mm", grouped(SLIM, 3), EXPERTS | dict(dropped=0.3, fast_accum=True, bias=True)),
    ("grouped_scaled_mm_group", grouped(GLUON, 4), HALF | dict(dropped=0.1, bias=True)),
    ("grouped_scaled_mm_group", grouped(SLIM, 5), EXPERTS),
    ("grouped_scaled_mm_group", grouped({}, 3, "wide"), HALF | dict(dropped=0.1, bias=True)),
    ("scaled_mm", warps(128, 128, 4), SIZE | dict(bias=True)),
    ("scaled_mm", warps(128, 192, 5), SIZE | dict(fast_accum=True, layout="rows", K=1200)),
    ("scaled_mm", warps(256, 128, 3), SIZE | dict(M=300, fast_accum=True)),
    ("scaled_mm", warps(128, 256, 4), SHORT | dict(fast_accum=True)),
    ("scaled_mm", warps(64, 128, 2), SIZE | dict(dtype=torch.int8, zero_point=True, bias=True)),
    ("scaled_mm", warps(64, 128, 3, split=2), SIZE | dict(out_dtype=torch.float16)),
    ("scaled_mm", warps(16, 128, 4, swap=True), FEW | dict(N=327, bias=True)),
    ("scaled_mm_group", warps(128, 128, 4), SIZE | dict(bias=True)),
    ("scaled_mm_group", warps(128, 192, 3), SIZE | dict(scale_layout="column", layout="rows", K=1200)),
    ("scaled_mm_group", warps(16, 256, 3, swap=True, split=2), FEW | dict(N=327)),
    ("scaled_mm_group", warps(32, 128, 4, swap=True), FEW | dict(bias=True, offsets=(64, 0))),
    ("scaled_mm_group", turns(64, 4), SIZE | dict(bias=True)),
    ("scaled_mm_group", warps(64, 128, 3), ODD),
    ("scaled_mm_group", turns(64, 8), SHORT),
    ("scaled_mm_group", turns(32, 6, split=2, per_sm=2), SIZE),
    ("scaled_mm_group", joint(64, 1, 6), FEW | dict(scale_layout="column")),
    ("scaled_mm_group", joint(128, 2, 4), FEW | dict(bias=True)),
    ("scaled_mm_group", joint(64, 2, 6), COLUMNS),
    ("scaled_mm_group", joint(64, 1, 8), SIZE | dict(N=327)),
    ("scaled_mm_group", joint(64, 4, 6), SHORT),  # one of the programs has no step
    ("scaled_mm_group", ordered(256, 2), COLUMNS),
    ("scaled_mm_group", ordered(192, 2), COLUMNS | dict(out_dtype=torch.float16)),
    ("scaled_mm_group", ordered(256, 1), SIZE | dict(bias=True)),
    ("scaled_mm_group", ordered(192, 1), ODD | dict(M=300, scale_layout="column")),
    ("mm_weight_only", weight_warps(64, 128, 3), SIZE | dict(bias=True)),
    ("mm_weight_only", weight_warps(32, 256, 2, k=64), FEW | dict(dtype=torch.int8, a_dtype=torch.float16, N=327)),
    ("mm_weight_only", weight_warps(64, 128, 3, kernel="direct"), SIZE | dict(granularity=(1, 128))),
    ("mm_weight_only", weight_warps(16, 128, 4, split=2, kernel="direct"), FEW | dict(bias=True)),
    ("mm_weight_only", weight_warps(64, 128, 4), SHORT),
    ("mm_weight_only", shares(64, 1, 1, 3, 1, 2, 1, 0, 1), FEW | dict(bias=True)),
    ("mm_weight_only", shares(64, 1, 1, 4, 1, 2, 1, 0, 1), SHORT | dict(M=45)),
    ("mm_weight_only", shares(64, 2, 1, 2, 1, 1, 1, 0, 1), FEW | dict(dtype=torch.int8)),
    ("mm_weight_only", shares(16, 1, 2, 2, 1, 2, 1, 0, 1), FEW),
    ("mm_weight_only", shares(64, 1, 2, 2, 1, 1, 1, 0, 1), FEW | dict(N=327)),
    ("mm_weight_only", shares(64, 2, 2, 2, 1, 1, 1, 0, 1), FEW | dict(bias=True, granularity=(64, -1))),
    ("mm_weight_only", shares(128, 2, 1, 3, 1, 1, 2, 1, 1), SIZE | dict(bias=True)),
    ("mm_weight_only", shares(64, 1, 1, 3, 1, 1, 1, 0, 2), FEW | dict(bias=True)),
    ("mm_weight_only", shares(64, 1, 2, 2, 1, 1, 1, 0, 4), FEW | dict(N=327, K=2000)),
]


def spell(value):
    return value if isinstance(value, str) else "-".join(str(v) for v in value.values())


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "config", "case"), CASES, ids=spell)
def test_like_the_reference(name, config, case, seed):
    out, expected, tolerance = launch(name, config, case, seed)
    assert_close(out, expected, tolerance)
    guarded.check()


WIDE, PROMOTED, PARTS = (
    (config, SIZE | case)
    for config, case in (
        (warps(128, 128, 4), dict(fast_accum=True)), (warps(128, 128, 3), {}), (warps(128, 192, 3), {}),
    )
)  # fmt: skip
WIDEST = (grouped({}, 3, "wide"), HALF | dict(dropped=0.1))
LATE = (late(128, 256, 4), MANY | dict(fast_accum=True))
WAIT = "mbarrier.wait(full.index(slot), (turn // STAGES) & 1)"
TAKEN = "mbarrier.wait(taken.index(which), (given & 1) ^ 1)"
BROKEN = [
    ("scaled_mm", *WIDE, "_consume", WAIT, "pass"),
    ("scaled_mm", *PROMOTED, "_consume", WAIT, WAIT[:-1] + " ^ 1)"),
    ("scaled_mm", *WIDE, "produce", "((turn // STAGES) & 1) ^ 1", "(turn // STAGES) & 1"),
    ("scaled_mm", *WIDE, "produce", "mbarrier.wait(empty.index(slot), ((turn // STAGES) & 1) ^ 1)", "pass"),
    ("scaled_mm", *PARTS, "produce", "+ MORE) * BLOCK_K)", ") * BLOCK_K)"),
    ("scaled_mm", *WIDE, "produce", "RIGHT * ROWS_R + MORE) *", "2 * RIGHT * ROWS_R + MORE) *"),
    ("scaled_mm", *WIDE, "_consume", "warpgroup_mma_wait(1, deps=[token])", "warpgroup_mma_wait(2, deps=[token])"),
    ("scaled_mm", *PROMOTED, "_consume", "(0, deps=[token])", "(1, deps=[token])"),
    ("scaled_mm", *WIDE, "_consume", "(turn + STAGES - 1) % STAGES), count=1, pred=k", "slot), count=1, pred=k"),
    ("scaled_mm", *WIDE, "_consume", "pred=k != begin", "pred=True"),
    ("scaled_mm", *WIDE, "_consume", "pred=begin < end", "pred=False"),
    ("scaled_mm", *WIDE, "_consume", "turn = 0", "turn = 1"),
    ("scaled_mm", *WIDE, "_consume", "for k in range(begin, end):", "for k in range(begin, end - 1):"),
    ("scaled_mm", *WIDE, "_put_piece", "tma.store_wait(1)", "tma.store_wait(2)"),
    ("scaled_mm", *WIDE, "_put_piece", "fence_async_shared()", "pass"),
    ("scaled_mm", *WIDE, "_consume", "tma.store_wait(0)", "pass"),
    ("scaled_mm", *WIDE, "_consume", "2 * WHICH, tile.to(OUT)", "WHICH, tile.to(OUT)"),
    ("scaled_mm", *PARTS, "columns_of", "(0 if late else WIDE)", "WIDE"),
    ("scaled_mm", *WIDE, "warps_kernel", "mbarrier.init(empty.index(i), count=2)", "mbarrier.init(empty.index(i), 1)"),
    ("scaled_mm", warps(16, 128, 4, swap=True), FEW, "put_pointers", "offs_1 < limit_1", "offs_1 <= limit_1"),
    ("scaled_mm_group", *PROMOTED, "scales_a", "mask_m & (k < end)", "mask_m"),
    (
        "scaled_mm_group",
        warps(128, 128, 3),
        ODD,
        "_consume",
        "range(begin, end, 1 if MORE > 0 else 2)",
        "range(begin, end - 1, 2)",
    ),
    ("scaled_mm_group", *PROMOTED, "_consume", "(1, deps=[token_0])", "(2, deps=[token_0])"),
    ("scaled_mm_group", turns(64, 4), SIZE, "_consume_by_turns", "WHICH * (STAGES // 2) + ", ""),
    ("scaled_mm_group", turns(64, 8), SHORT, "_consume_by_turns", "mbarrier.wait(taken, phase ^ 1)", "pass"),
    ("scaled_mm_group", turns(64, 4), SIZE, "_consume_by_turns", "phase ^= 1", "pass"),
    ("scaled_mm_group", turns(64, 4), SIZE, "_produce_by_turns", "begun_other += max(end - begin, 0) // 2", "pass"),
    ("scaled_mm_group", joint(64, 2, 4), FEW, "_multiply", "    meet()", "    pass"),
    ("scaled_mm_group", joint(64, 2, 4), FEW, "_fetch", "cluster_sync(CLUSTER)", "pass"),
    ("scaled_mm_group", joint(64, 2, 4), FEW, "_fetch", "expect(full, SLOT +", "expect(full, 8192 +"),
    ("scaled_mm_group", joint(64, 2, 4), FEW, "_fetch", "tell(full)", "pass"),
    (
        "scaled_mm_group",
        joint(64, 2, 4),
        FEW,
        "_multiply",
        "slot * 8, phase, mine)\n        sa",
        "slot * 8, phase, 0)\n        sa",
    ),
    ("scaled_mm_group", ordered(256), COLUMNS, "multiply_256", "wait(BARS_AT, 0)", "pass"),
    ("scaled_mm_group", ordered(256), COLUMNS, "multiply_256", "phase, remain)", "phase, 0)"),
    ("scaled_mm_group", ordered(256), COLUMNS, "multiply_256", "pass_turn(1)", "pass"),
    ("scaled_mm_group", ordered(256), COLUMNS, "_fetch", "SLOT + (512", "SLOT + 128 + (512"),
    ("scaled_mm_group", ordered(192), COLUMNS, "multiply_192", "(2, deps=[t_0])", "(3, deps=[t_0])"),
    ("scaled_mm_group", ordered(192), COLUMNS, "multiply_192", "(empty, CLUSTER)", "(empty, 1)"),
    ("scaled_mm_group", ordered(192), COLUMNS, "_fetch", "wait(BARS_AT + (STAGES + slot) * 8, phase)", "pass"),
    ("scaled_mm_group", ordered(192), COLUMNS | dict(K=128, N=1200), "multiply_192", "tma.store_wait(0)", "pass"),
    ("moe_token", STREAM, TOKEN, "_multiply_up", "mbarrier.wait(full.index(s), (turn // STAGES) & 1)", "pass"),
    ("moe_token", STREAM, TOKEN, "_fetch_down", "((turn // STAGES) & 1) ^ 1", "(turn // STAGES) & 1"),
    ("mm_weight_only", weight_warps(64, 128, 3), SIZE, "_consume", "mbarrier.wait(full.index(slot), (", "max(0, ("),
    ("mm_weight_only", weight_warps(64, 128, 3), SIZE, "_rename", "fence_async_shared()", "pass"),
    ("mm_weight_only", weight_warps(64, 128, 3), SIZE, "put", "tma.store_wait(0)", "pass"),
    ("mm_weight_only", shares(64, 1, 2, 2, 1, 1, 1, 0, 1), FEW, "give", "(given & 1) ^ 1", "given & 1"),
    (
        "mm_weight_only",
        shares(64, 1, 2, 4, 1, 1, 1, 0, 1),
        SHORT | dict(M=45),
        "give",
        "mbarrier.wait(taken.index(which), (given & 1) ^ 1)",
        "pass",
    ),
    ("mm_weight_only", shares(64, 1, 2, 2, 1, 1, 1, 0, 1), FEW, "_produce", "phase ^ 1, phase)", "phase, phase)"),
    ("scaled_mm", *LATE, "_consume", "CLUSTER)\n            turn += 1", "1)\n            turn += 1"),
    ("scaled_mm", *LATE, "_consume", "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
    ("scaled_mm", *LATE, "_consume", "wait_alone(FULL + slot * 8, (turn // STAGES) & 1)", "pass"),
    ("scaled_mm", *LATE, "_put", "tma.store_wait(1)", "tma.store_wait(2)"),
    ("scaled_mm", *LATE, "fill", "wait(barriers.index(STAGES + slot)", "wait(barriers.index(slot)"),
    ("scaled_mm", *LATE, "fill", "+ rank * SHARE", ""),
    ("grouped_scaled_mm_group", *WIDEST, "_fetch", "mbarrier.arrive(bar, count=1)", "pass"),
    ("grouped_scaled_mm_group", *WIDEST, "_fetch", "nbytes * 2)", "nbytes)"),
    ("grouped_scaled_mm_group", *WIDEST, "_put", "tma.store_wait(0)", "pass"),
    (
        "grouped_scaled_mm_group",
        *WIDEST,
        "_multiply",
        "else:\n            for _ in range(steps)",
        "else:\n            for _ in ()",
    ),
    ("grouped_scaled_mm_group", *WIDEST, "_finish", "row + 64 <= end", "row <= end"),
    ("mm_weight_only", shares(64, 2, 1, 3, 1, 1, 1, 0, 2), FEW, "finish_in_cluster", "both_groups()", "pass"),
]


@pytest.mark.parametrize(("name", "config", "case", "function", "old", "new"), BROKEN, ids=str)
def test_broken_kernels_are_found(name, config, case, function, old, new):
    for seed in range(4):
        try:
            out, expected, tolerance = launch(name, config, case, seed, **{function: (old, new)})
            assert_close(out, expected, tolerance)
            guarded.check()
        except AssertionError:  # a Fault is one
            return
    pytest.fail(f"{function} with {new} for {old} was not found")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ((WAIT, "pass"), "read (before|while)"),
        (("pred=begin < end", "pred=False"), r"nobody can go on: .*produce 2 .* parity 0 of barrier empty\[\d\]"),
        (("count=1, pred=k", "count=3, pred=k"), "too many arrivals"),
        (("warpgroup_mma_wait(1, deps=[token])", "warpgroup_mma_wait(2, deps=[token])"), "while a product"),
    ],
    ids=str,
)
def test_faults_are_named(change, message):
    with pytest.raises(Fault, match=message):
        for seed in range(4):
            launch("scaled_mm", *WIDE, seed, _consume=change)
