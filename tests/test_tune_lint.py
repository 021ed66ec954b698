"""Shipped tables are clean, and the lint would say so if they were not."""

import dataclasses
import os
from pathlib import Path

import pytest

import fpk
from fpk import db
from fpk.device import Device, pretend, pretend_triton
from fpk.op import OPS
from fpk.tune.arguments import key_of, outline
from fpk.tune.lint import compile_shipped, device_of, lint, stale, staleness
from fpk.tune.sources import Sources, sources_of
from fpk.tune.worker import Worker

H200 = Device("sm90", "NVIDIA H200", "nv", 132)
OP = "quantize_fp8_token"
CASE = dict(M=64, K=4096)
CONFIG = dict(kernel="row", BLOCK_M=1, BLOCK_K=4096, num_warps=8, num_stages=1)
SHIPPED = db.DirectorySource(db.packaged_directory())


def run(**changes):
    fields = dict(
        op=OP, gpu=H200.id, date="2026-01-01", fpk="0.1", torch="2.11.0", triton="3.6.0", cuda="13.0", driver="580",
        source=sources_of(fpk.OPS[OP]), timer="graph", sm_clock_mhz="1980", memory_clock_mhz="3201",
        power_limit_w="700",
    )  # fmt: skip
    return db.Run(**fields | changes)


def row(**changes):
    key = key_of(fpk.OPS[OP], CASE, H200)
    return dataclasses.replace(
        db.Row(key, 1, dict(CONFIG), 2.4, 5.2, 1.0, 32, db.spell_case(CASE), run().run), **changes
    )


def source(*rows, file=OP, runs=None, gpu=H200.id):
    texts = {f"{gpu}/{file}.csv": db.dump_table(rows), f"{gpu}/runs.csv": db.dump_runs(runs or [run()])}
    return db.MemorySource(texts)


def test_shipped_tables_are_clean():
    assert lint(SHIPPED) == []


def test_look_ups_answer_with_shipped_rows():
    """Every row is what a call of its key gets if it stands alone and first: none is passed over in silence."""
    tables = db.Tables(SHIPPED)
    for gpu in tables.gpus():
        device = device_of(gpu)
        runs = db.parse_runs(SHIPPED.read(gpu, "runs.csv"))
        for name in tables.ops(gpu):
            for row in tables.table(0, gpu, name).rows:
                bound = outline(OPS[name], db.parse_case(row.case))
                alone = db.Tables(
                    db.MemorySource({f"{gpu}/{name}.csv": db.dump_table([dataclasses.replace(row, rank=1)])})
                )
                with db.use(alone), pretend(device), pretend_triton(runs[row.run].triton):
                    assert OPS[name]._choose(bound) == row.config, f"{name} {row.case} rank {row.rank}"


def test_shipped_configs_compile_for_their_gpu():
    """A seeded few; `compile_shipped(source)` is all of them."""
    assert compile_shipped(SHIPPED, sample=6) == []


def test_a_clean_row_passes():
    assert lint(source(row())) == []
    assert device_of(H200.id).id == H200.id


@pytest.mark.parametrize(
    "changes,complaint",
    [
        (dict(config=CONFIG | {"BLOCK_TYPO": 1}), "BLOCK_TYPO"),
        (dict(config={n: v for n, v in CONFIG.items() if n != "num_warps"}), "missing num_warps"),
        (dict(config={n: v for n, v in CONFIG.items() if n != "kernel"}), "missing kernel"),
        (dict(config=CONFIG | {"BLOCK_K": 2048}), "not legal for its own case"),
        (dict(config=CONFIG | {"kernel": "other"}), "expected kernel in"),
        (dict(case="M=128 K=4096"), "unreachable"),
        (dict(key=dict(M=64, K=4096)), "unreachable"),
        (dict(us=5.2), "less than the default"),
        (dict(us=5.19), "less than the default"),
        (dict(shared_bytes=240_000), "shared memory"),
        (dict(run="0123456789ab"), "not in runs.csv"),
        (dict(rank=2), "expected ranks"),
    ],
)
def test_a_planted_fault_is_found(changes, complaint):
    problems = lint(source(row(**changes)))
    assert any(complaint in p for p in problems), problems


def test_faults_of_whole_tables_are_found():
    assert any("table of an op" in p for p in lint(source(row(), file="no_such_op")))
    assert any("directory like" in p for p in lint(source(row(), gpu="H200")))
    clean = source(row(), row(rank=2, us=2.5))
    text = clean.texts[f"{H200.id}/{OP}.csv"]
    lines = text.splitlines(keepends=True)
    clean.texts[f"{H200.id}/{OP}.csv"] = "".join([lines[0], lines[2], lines[1]])
    assert any("sorted" in p for p in lint(clean))
    assert any("order of rank" in p for p in lint(source(row(us=2.6), row(rank=2, us=2.5))))
    other = run(op="quantize_int8")
    assert any("measured quantize_int8" in p for p in lint(source(row(run=other.run), runs=[other])))
    same = [row(us=u, rank=r) for r, u in enumerate((2.1, 2.2, 2.3), 1)]
    key = key_of(fpk.OPS[OP], CASE | {"M": 128}, H200)
    copied = [dataclasses.replace(r, key=key, case="M=128 K=4096") for r in same]
    assert any("copied rows" in p for p in lint(source(*same, *copied)))


def test_what_does_not_compile_or_fit_is_found():
    assert compile_shipped(source(row())) == []
    (problem,) = compile_shipped(source(row(config=CONFIG | {"BLOCK_K": 3000})))
    assert "compile_error" in problem


def test_the_static_filter_reads_the_binary():
    options = dataclasses.asdict(H200)
    tile = dict(kernel="tile", SWAP=False, GROUP_M=8, BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=8)
    with Worker("fpk.tune.executor:static_filter", options, {"TRITON_INTERPRET": None}) as worker:
        case = dict(M=1024, N=4096, K=4096)
        fits = worker.call("compile", "scaled_mm", case, tile | dict(num_stages=3), limit_s=120)
        assert fits.status == "ok" and fits.value["shared_bytes"] == 3 * 2 * 128 * 128
        assert 32 <= fits.value["registers"] <= 255 and fits.value["spills"] >= 0
        much = worker.call("compile", "scaled_mm", case, tile | dict(num_stages=8), limit_s=120)
        assert much.status == "out_of_resources" and "shared memory" in much.detail


def test_staleness_is_told():
    now = {"torch": "2.11.0", "triton": "3.6.0"}
    assert stale(source(row()), now) == []
    (found,) = stale(source(row()), now | {"triton": "3.7.1"})
    assert found[:2] == (H200.id, OP) and "triton 3.6.0, now 3.7.1" in found[3]
    changed = run(source="000000000000")
    (found,) = stale(source(row(run=changed.run), runs=[changed]), now)
    assert "kernel source 000000000000" in found[3]
    sources = Sources(fpk.OPS[OP])
    assert staleness(None, CONFIG, sources, now) == "its run is unknown"
    assert staleness(run(triton="3.6.5"), CONFIG, sources, now) == "", "a patch release is no reason"


def test_a_call_gets_what_explain_says():
    """What a call takes from a single table is put together in a shorter way than answers with their words."""
    tables, asked = db.Tables(SHIPPED), 0
    for gpu in tables.gpus():
        for name in tables.ops(gpu):
            keys = {tuple(sorted(row.key.items(), key=str)): row.key for row in tables.table(0, gpu, name).rows}
            for key in keys.values():
                for m, n, k in ((1, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 0.5), (0.25, 1, 2), (40, 40, 40)):
                    other = key | {s: max(int(key[s] * f), 1) for s, f in zip("MNK", (m, n, k), strict=True)}
                    expected = [answer.row.config for answer in tables.answers(name, other, device_of(gpu))]
                    assert tables.candidates(name, other, device_of(gpu)) == expected, (name, other)
                    asked += bool(expected)
    assert asked > 500


def test_outlines_take_no_memory():
    """Of 4 GB of weights; tests fill what is allocated, and so may whoever asks torch to be deterministic."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    case = dict(M=16, N=65536, K=65536)
    outline(OPS["scaled_mm"], dict(M=16, N=64, K=64))  # imports what it needs
    before = resident()
    bound = outline(OPS["scaled_mm"], case)
    assert bound["b"].shape == (65536, 65536) and bound["b"].stride() == (65536, 1)
    assert resident() - before < 100e6
