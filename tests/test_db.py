"""The database as text, its look-up levels, its overlays, and what it costs."""

import dataclasses
import itertools
import os
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpk
from fpk import db
from fpk.device import Device

H200 = Device("sm90", "NVIDIA H200", "nv", 132)
H100 = Device("sm90", "NVIDIA H100 PCIe", "nv", 114)
A100 = Device("sm80", "NVIDIA A100", "nv", 108)
RUN = db.Run("some_op", H200.id, "2026-01-01", "0.1", "2.11", "3.6", "13", "1", "abc", "graph", "1980", "3201", "700")


def row(m, n, k, rank=1, us=10.0, shared=1000, flag="x", **config):
    key = dict(M=m, N=n, K=k, dtype=flag)
    config = dict(BLOCK_M=16, num_warps=4, num_stages=2) | config
    return db.Row(key, rank, config, us, 20.0, 1.0, shared, f"M={m} N={n} K={k}", RUN.run)


def source(*rows, gpu=H200.id, name="memory"):
    texts = {f"{gpu}/some_op.csv": db.dump_table(rows), f"{gpu}/runs.csv": db.dump_runs([RUN])}
    return db.MemorySource(texts, name)


def ask(tables, m, n, k, device=H200, flag="x"):
    return list(tables.answers("some_op", dict(M=m, N=n, K=k, dtype=flag), device))


rows = st.builds(
    row,
    m=st.sampled_from(db.M_GRID), n=st.sampled_from((64, 128, 4096)), k=st.sampled_from((64, 7168)),
    us=st.floats(0.5, 1e5), flag=st.sampled_from(("a", "b")), BLOCK_M=st.sampled_from((16, 32)),
)  # fmt: skip
tables_of_rows = st.lists(rows, max_size=6, unique_by=lambda r: frozenset(r.key.items()))


@given(tables_of_rows)
def test_export_is_byte_identical(table):
    text = db.dump_table(table)
    assert db.dump_table(db.parse_table(text)) == text
    assert db.dump_table(reversed(db.parse_table(text))) == text


@given(tables_of_rows, tables_of_rows, tables_of_rows)
def test_merge_laws(a, b, c):
    def merge(*tables):
        return db.dump_table(db.merge_rows(tables))

    assert merge(a, b) == merge(b, a)
    assert merge(a, a) == db.dump_table(db.parse_table(db.dump_table(a)))
    assert merge(db.merge_rows([a, b]), c) == merge(a, db.merge_rows([b, c]))


def test_merge_keeps_the_faster_block():
    slow, fast = row(16, 64, 64, us=9.0, BLOCK_M=16), row(16, 64, 64, us=5.0, BLOCK_M=32)
    assert [r.config["BLOCK_M"] for r in db.merge_rows([[slow], [fast]])] == [32]


def test_adding_a_shape_changes_only_its_lines():
    old = db.dump_table([row(16, 64, 64), row(64, 64, 64)]).splitlines()
    new = db.dump_table([row(16, 64, 64), row(32, 64, 64), row(64, 64, 64)]).splitlines()
    assert len(new) == len(old) + 1 and set(old) < set(new)


def test_values_keep_their_types():
    table = [row(16, 64, 64, kernel="loop", FLAG=True, SPLIT_K=1, EVEN=False)]
    (back,) = db.parse_table(db.dump_table(table))
    assert back.config == table[0].config and type(back.config["FLAG"]) is bool and type(back.config["SPLIT_K"]) is int
    for bad in ("12", "True", "1e5", ""):
        with pytest.raises(ValueError, match="survives"):
            db.dump_table([row(16, 64, 64, kernel=bad)])


def test_cases_survive_as_text():
    case = dict(M=3, dtype=torch.float8_e4m3fn, bias=True, granularity="token", ub=0.5, layout=None)
    assert db.parse_case(db.spell_case(case)) == case


def test_a_run_is_named_by_its_content():
    text = db.dump_runs([RUN, RUN])
    assert db.parse_runs(text) == {RUN.run: RUN} and text.count("\n") == 2
    with pytest.raises(ValueError, match="line 2: expected run"):
        db.parse_runs(text.replace("3.6", "3.7"))


def test_levels_in_order():
    tables = db.Tables(
        source(row(16, 4096, 4096, BLOCK_M=16), row(64, 4096, 4096, BLOCK_M=64), row(64, 256, 256, BLOCK_M=32))
    )
    assert [(a.level, a.row.config["BLOCK_M"]) for a in ask(tables, 64, 4096, 4096)[:1]] == [("exact", 64)]
    near = ask(tables, 64, 5120, 4096)
    assert (near[0].level, near[0].row.config["BLOCK_M"]) == ("nearest", 64)
    assert {a.level for a in near} == {"nearest"}
    assert ask(tables, 16, 4000, 4096)[0].row.config["BLOCK_M"] == 16
    sibling = ask(tables, 64, 4096, 4096, H100)
    assert (sibling[0].level, sibling[0].gpu) == ("sibling", H200.id)
    assert ask(tables, 64, 4096, 4096, A100) == [], "another architecture is no sibling"
    assert ask(tables, 64, 4096, 4096, flag="y") == [], "other flags are another problem"


def test_flags_of_the_epilogue_borrow_rows():
    """A product with a bias takes the rows of one without: the loop is the same. Its own rows, if any, come alone."""

    def with_flags(m, us, **flags):
        plain = row(m, 64, 64, us=us)
        return dataclasses.replace(plain, key=plain.key | flags)

    tables = db.Tables(source(with_flags(16, 5.0, bias=0, fast=0), with_flags(16, 7.0, bias=0, fast=1)))
    answers = [list(tables.answers("some_op", dict(M=16, N=64, K=64, dtype="x", **f), H200))
               for f in (dict(bias=1, fast=0), dict(bias=1, fast=1), dict(bias=1, fast=2), dict(bias=0))]  # fmt: skip
    found = [[(a.level, a.row.us) for a in rows_of] for rows_of in answers]
    assert found == [[("nearest", 5.0)], [("nearest", 7.0)], [], []]
    own = db.Tables(source(with_flags(16, 5.0, bias=0), with_flags(16, 9.0, bias=1)))
    assert [a.row.us for a in own.answers("some_op", dict(M=16, N=64, K=64, dtype="x", bias=1), H200)] == [9.0]


def test_ranks_come_in_order():
    tables = db.Tables(source(row(16, 64, 64, rank=2, us=6.0, BLOCK_M=32), row(16, 64, 64, rank=1, us=5.0)))
    assert [a.row.rank for a in ask(tables, 16, 64, 64)] == [1, 2]


def test_what_does_not_fit_is_not_offered():
    tables = db.Tables(source(row(16, 64, 64, shared=200_000), row(16, 128, 64, shared=10)))
    assert [a.row.shared_bytes for a in ask(tables, 16, 64, 64)] == [200_000, 10]
    small = Device("sm90", "NVIDIA H200", "nv", 132)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Device, "shared_limit", property(lambda self: 101_376))
        assert [a.row.shared_bytes for a in ask(tables, 16, 64, 64, small)] == [10]


def test_nearest_by_scan_equals_brute_force():
    shapes = list(itertools.product((1, 64, 4096), (512, 2048, 12288), (512, 7168)))
    tables = db.Tables(source(*(row(m, n, k, BLOCK_M=16) for m, n, k in shapes)))
    for m, n, k in itertools.product((16, 256, 8192), (640, 4096), (1024, 4096)):
        gap, block = tables.table(0, H200.id, "some_op").nearest(dict(M=m, N=n, K=k, dtype="x"))[0]

        def distance(shape, at=(m, n, k)):
            logs = [abs(torch.tensor(a / b).log2().item()) for a, b in zip(shape, at, strict=True)]
            return 2.0 * logs[0] + logs[1] + logs[2]

        got = tuple(block[0].key[name] for name in "MNK")
        assert distance(got) == pytest.approx(min(map(distance, shapes)), abs=1e-4)
        assert gap == pytest.approx(distance(got), abs=1e-4)


def test_what_is_far_does_not_answer():
    tables = db.Tables(source(row(64, 4096, 4096)))
    assert [a.level for a in ask(tables, 64, 8192, 4096)] == ["nearest"]
    assert ask(tables, 64, 16384, 4096) == [] and ask(tables, 256, 4096, 4096) == []


def product_row(m, n, k, us, rank=1, **tile):
    """A row that beat the default."""
    made = row(m, n, k, rank=rank, us=us, **dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128) | tile)
    return dataclasses.replace(made, default_us=2 * us)


def test_overlays_win():
    lower = source(row(16, 64, 64, BLOCK_M=16), name="packaged")
    upper = source(row(16, 64, 64, BLOCK_M=64), name="user")
    assert ask(db.Tables(upper, lower), 16, 64, 64)[0].row.config["BLOCK_M"] == 64
    other = source(row(16, 128, 64, BLOCK_M=64), name="user")
    first = ask(db.Tables(other, lower), 16, 64, 64)[0]
    assert (first.level, first.source) == ("exact", "packaged"), "exact below beats nearest above"


def test_environment_names_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("FPK_AUTOTUNE_DB", f"{tmp_path}/a{os.pathsep}{tmp_path}/b")
    names = [s.name for s in db.default_sources()]
    assert names[:2] == [f"FPK_AUTOTUNE_DB:{tmp_path}/a", f"FPK_AUTOTUNE_DB:{tmp_path}/b"] and names[-1] == "packaged"


def test_use_takes_directory_snapshot_and_database(tmp_path):
    (tmp_path / H200.id).mkdir()
    (tmp_path / H200.id / "some_op.csv").write_text(db.dump_table([row(16, 64, 64, BLOCK_M=64)]))
    key = dict(M=16, N=64, K=64, dtype="x")
    outside = db.active()
    with fpk.use(tmp_path) as overlaid:
        assert db.active() is overlaid and overlaid.candidates("some_op", key, H200)[0]["BLOCK_M"] == 64
        frozen = db.snapshot()
    assert db.active() is outside
    file = tmp_path / "frozen.json"
    file.write_bytes(frozen.content)
    with fpk.use(file) as again:
        assert again.hash == frozen.hash and again.candidates("some_op", key, H200)[0]["BLOCK_M"] == 64
    with fpk.use(db.Empty()) as empty:
        assert empty.candidates("some_op", key, H200) == []
    with pytest.raises(ValueError, match="expected a database"), fpk.use(tmp_path / "nowhere"):
        pass


def test_use_reaches_the_launch():
    op = fpk.OPS["quantize_fp8_token"]
    args = op.inputs(M=16, K=64, device="cpu")
    wanted = dict(kernel="loop", BLOCK_M=8, BLOCK_K=512, num_warps=8, num_stages=3)
    device = Device("cpu", "cpu")
    key = op.key(**op.bind(**args))
    text = db.dump_table([db.Row(key, 1, wanted, 1.0, 2.0, 1.0, 0, "M=16 K=64", "r")])
    with fpk.use(db.Tables(db.MemorySource({f"{device.id}/{op.name}.csv": text}))):
        assert op.config_for(**args) == wanted
    assert op.config_for(**args) != wanted


def test_an_illegal_row_is_passed_over():
    op = fpk.OPS["quantize_fp8_token"]
    args = op.inputs(M=16, K=700, device="cpu")
    illegal = dict(kernel="row", BLOCK_M=1, BLOCK_K=512, num_warps=4, num_stages=1)
    legal = dict(kernel="loop", BLOCK_M=8, BLOCK_K=512, num_warps=8, num_stages=3)
    key = op.key(**op.bind(**args))
    text = db.dump_table(
        [db.Row(key, r + 1, c, 1.0 + r, 3.0, 1.0, 0, "M=16 K=700", "r") for r, c in enumerate((illegal, legal))]
    )
    with fpk.use(db.Tables(db.MemorySource({f"{Device('cpu', 'cpu').id}/{op.name}.csv": text}))):
        assert op.config_for(**args) == legal


def test_broken_files_are_misses_said_once(tmp_path):
    folder = tmp_path / H200.id
    folder.mkdir()
    (folder / "some_op.csv").write_text("M,rank\n1,2,3\n")
    (folder / "other_op.csv").write_bytes(b"\xff\xfe")
    tables = db.Tables(db.DirectorySource(tmp_path))
    with pytest.warns(RuntimeWarning, match="ignoring"):
        assert tables.candidates("some_op", dict(M=1), H200) == []
    with pytest.warns(RuntimeWarning, match="cannot read"):
        assert tables.candidates("other_op", dict(M=1), H200) == []
    assert tables.candidates("some_op", dict(M=2), H200) == []


def test_snapshot_hash_is_the_content():
    one, two = db.Tables(source(row(16, 64, 64))), db.Tables(source(row(16, 64, 64)))
    assert db.snapshot(one).hash == db.snapshot(two).hash
    assert db.snapshot(one).hash != db.snapshot(db.Tables(source(row(16, 64, 64, us=9.0)))).hash
    frozen = db.snapshot(one)
    assert [a.row for a in ask(frozen, 16, 64, 64)] == [a.row for a in ask(one, 16, 64, 64)]
    assert ask(frozen, 16, 64, 64, H100)[0].level == "sibling"


def _ranks(devices, tables, timeout_s=120.0):
    store, results, all_run = torch.distributed.HashStore(), {}, threading.Barrier(len(devices))

    def work(rank):
        all_run.wait()
        try:
            with fpk.use(tables[rank]):
                results[rank] = db.share(store, rank, len(tables), devices[rank], timeout_s).hash
        except RuntimeError as error:
            results[rank] = str(error)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(len(devices))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return results


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ranks_with_different_tables_get_one_snapshot():
    tables = [db.Tables(source(row(16, 64, 64, us=1.0 + r))) for r in range(4)]
    results = _ranks([H200] * 4, tables)
    assert set(results.values()) == {db.snapshot(tables[0]).hash}
    mixed = _ranks([H200, H200, H200, H100], tables)
    assert all("one kind of GPU" in text for text in mixed.values())
    start = time.monotonic()
    missing = _ranks([H200, H200], tables, timeout_s=3.0)
    assert all("rank 2 did not answer" in text for text in missing.values()) and time.monotonic() - start < 60


def test_damaged_cells_do_not_raise_in_a_call():
    """Text among numbers, sizes beyond any memory, a folder that names a GPU without multiprocessors, other keys."""
    mixed = source(row(16, 64, 64, flag=0), row(16, 64, 64, flag="O"))
    assert db.Tables(mixed).table(0, H200.id, "some_op") is not None
    text = db.dump_table([product_row(64, 4096, 4096, 9.0, SPLIT_K=7)]).replace(",7,", f",{10**300},")
    huge = db.Tables(db.MemorySource({f"{H200.id}/some_op.csv": text}))
    assert isinstance(ask(huge, 64, 4096, 4352), list)
    nobody = db.Tables(source(row(16, 64, 64), gpu="nv-foo-sm90-0"))
    assert ask(nobody, 16, 64, 64) == []
    product = db.Tables(source(product_row(64, 4096, 4096, 9.0)))
    assert isinstance(list(product.answers("some_op", dict(M=64, K=4096, dtype="x"), H200)), list)
