"""What rows of products say about other shapes: their times scaled by the work (`fpk._db_scale`)."""

import dataclasses

import pytest
from test_db import H100, H200, ask, product_row, source

from fpk import db
from fpk._db_scale import _waves, tile
from fpk.device import Device


def test_products_answer_by_work_and_not_by_distance_alone():
    """132 SMs: 4224 columns are one wave of 33 x 4 tiles, 4352 are two; narrower tiles then win from farther away."""
    wide = product_row(512, 4224, 4096, 20.0)
    small = product_row(512, 2112, 4096, 13.0, BLOCK_N=64)
    tables = db.Tables(source(wide, small))
    first, second = ask(tables, 512, 4352, 4096)
    assert (first.level, first.row.config["BLOCK_N"], second.row.config["BLOCK_N"]) == ("nearest", 64, 128)
    assert first.distance > second.distance
    assert [a.row.us for a in ask(tables, 512, 4096, 4096)] == [20.0, 13.0], "as wide as recorded: the closest answers"


def test_expected_times_of_products():
    table = db.Table([product_row(512, 4224, 4096, 22.0)], 132)

    def us(m, n, k, sm_count=132):
        ((expected, distance, _),) = table.scaled(dict(M=m, N=n, K=k, dtype="x"), sm_count)
        return expected / (1 + 0.08 * distance)

    assert us(512, 4224, 4096) == pytest.approx(22.0)
    assert us(512, 4224, 8192) == pytest.approx(4 + 18 * 2), "twice the steps, one launch"
    assert us(512, 4352, 4096) == pytest.approx(4 + 18 * 2), "a tile more than fits: two waves"
    assert us(512, 4224, 4096, 66) == pytest.approx(4 + 18 * 2), "half the multiprocessors"
    assert table.scaled(dict(M=64, N=4224 * 8, K=4096 * 64, dtype="x"), 132) == [], "too far to be told"


def test_no_product_is_expected_to_move_more_than_the_fastest():
    """One wave of few steps would take no time at all; its operands still have to be read."""
    narrow = product_row(16, 4096, 32768, 34.0, BLOCK_M=16, BLOCK_N=64)
    table = db.Table([narrow], 132)
    ((expected, distance, _),) = table.scaled(dict(M=16, N=8192, K=32768, dtype="x"), 132)
    rate = (16 * 32768 + 4096 * 32768 + 2 * 16 * 4096) / 30.0
    assert expected / (1 + 0.08 * distance) == pytest.approx(4 + (16 * 32768 + 8192 * 32768 + 2 * 16 * 8192) / rate)


def test_even_shares_of_k_know_no_waves():
    """SPLIT_K 0: programs share all tiles' steps evenly, so that a tile more takes little more."""
    table = db.Table([product_row(512, 4096, 4096, 20.0, SPLIT_K=0)], 132)
    for n, k in ((5440, 4096), (4096, 5440), (4160, 4096)):
        ((expected, distance, _),) = table.scaled(dict(M=512, N=n, K=k, dtype="x"), 132)
        work = -(-n // 128) * -(-k // 128) / 32**2
        # a launch, who comes last, and a partial sum of 128 x 128
        assert expected / (1 + 0.08 * distance) == pytest.approx(4 + 2 + 4 + 10 * work)


def scaled_us(row, m, n, k):
    """What is expected of a row's config at another shape."""
    ((expected, distance, _),) = db.Table([row], 132).scaled(dict(M=m, N=n, K=k, dtype="x"), 132)
    return expected / (1 + 0.08 * distance)


def test_a_tile_that_is_a_program_of_its_own_starts_anew_in_every_wave():
    """64 tiles in a wave; 512 are four waves, which begin three times more, and take as long as reading eight times
    as many weights."""
    moved = [64 * 4096 + n * 4096 + 2 * 64 * n for n in (4096, 32768)]
    for config in (dict(kernel="shares", SPLIT_K=1), dict(kernel="joint", CLUSTER=1)):
        row = product_row(64, 4096, 4096, 20.0, BLOCK_M=64, BLOCK_N=64, **config)
        assert scaled_us(row, 64, 32768, 4096) == pytest.approx(4 + 16 * moved[1] / moved[0] + 3 * 2.5)


def waves(m, n, **config):
    return _waves(tile(product_row(256, 8448, 4096, 20.0, **config), 132), m, n, 132)


def test_clusters_of_four_leave_multiprocessors_over():
    """Of 132, 32 of them would take 128: one is left for a second wave, which clusters of two are not."""
    for kernel, field in (("joint", "CLUSTER"), ("shares", "SPLIT_K")):
        some = dict(kernel=kernel, BLOCK_M=64, BLOCK_N=64)
        assert waves(64, 2048, **some, **{field: 4}) == 2 and waves(64, 4096, **some, **{field: 2}) == 1


def test_pairs_have_neighbouring_tiles_of_tokens():
    """128 tokens leave one program of each pair without work: as long as 256."""
    for kernel in ("ordered", "late"):
        assert waves(128, 16896, kernel=kernel, CLUSTER=2) == waves(256, 16896, kernel=kernel, CLUSTER=2) == 2
        assert waves(128, 16896, kernel=kernel, CLUSTER=1) == 1


def test_tiles_of_tokens_follow_the_tokens():
    """COLUMNS of a weight-only config is how many tiles its tokens make: a row of 128 answers 64 with one."""
    units = dict(kernel="shares", ROWS=1, TURNS=2, PER_SM=1, CLUSTER=1, HELD=1, COLUMNS=2)
    made = product_row(128, 4096, 4096, 13.0)
    tables = db.Tables(source(dataclasses.replace(made, config=dict(BLOCK_M=64, num_warps=4) | units)))
    key = dict(M=64, N=4096, K=4096, dtype="x")
    assert [config["COLUMNS"] for config in tables.candidates("some_op", key, H200)] == [1]
    assert [a.row.config["COLUMNS"] for a in ask(tables, 64, 4096, 4096)] == [1]
    assert [a.row.config["COLUMNS"] for a in ask(tables, 128, 4096, 4096)] == [2]


def test_a_fourth_of_the_tokens_says_nothing():
    tables = db.Tables(source(product_row(64, 4096, 4096, 9.0, BLOCK_M=64)))
    assert ask(tables, 32, 4096, 4096) and ask(tables, 128, 4096, 4096)
    assert not ask(tables, 16, 4096, 4096) and not ask(tables, 256, 4096, 4096)


def test_rows_that_did_not_beat_the_default_leave_other_shapes_to_it(recwarn):
    """The default fits itself to a shape. A sibling GPU's rows are not asked then, and nobody is warned."""
    even = dataclasses.replace(product_row(64, 4096, 4096, 9.0), default_us=9.1)
    sibling = product_row(64, 4096, 4096, 8.0, BLOCK_M=64)
    texts = {f"{H200.id}/some_op.csv": db.dump_table([even]), f"{H100.id}/some_op.csv": db.dump_table([sibling])}
    for tables in (db.Tables(db.MemorySource(texts)), db.Tables(db.MemorySource(texts), db.MemorySource(texts))):
        assert not ask(tables, 64, 6144, 4096) and [a.level for a in ask(tables, 64, 4096, 4096)] == ["exact"]
        assert tables.candidates("some_op", dict(M=64, N=6144, K=4096, dtype="x"), H200) == []
    assert not recwarn.list
    gains = dataclasses.replace(even, default_us=9.2)
    assert [a.level for a in ask(db.Tables(source(gains)), 64, 6144, 4096)] == ["nearest"]


@pytest.mark.parametrize(
    ("units", "tile"),
    [
        (dict(ROWS=1, TURNS=2, PER_SM=2, CLUSTER=1), dict(BLOCK_N=64, BLOCK_K=256, SPLIT_K=0)),
        (dict(ROWS=2, TURNS=1, PER_SM=0, CLUSTER=1), dict(BLOCK_N=128, BLOCK_K=128, SPLIT_K=1)),
        (dict(ROWS=4, TURNS=1, PER_SM=0, CLUSTER=4), dict(BLOCK_N=256, BLOCK_K=128, SPLIT_K=4)),
    ],
    ids=str,
)
def test_units_and_clusters_are_scaled_like_the_tiles_that_they_make(units, tile):
    plain = product_row(64, 4096, 4096, 20.0, **tile)
    config = {n: v for n, v in plain.config.items() if n == "kernel" or n == "BLOCK_M"} | units
    answers = [
        db.Table([row], 132).scaled(dict(M=100, N=n, K=k, dtype="x"), 132)
        for row in (plain, dataclasses.replace(plain, config=config))
        for n, k in ((2112, 7168), (6144, 4096))
    ]
    ours, theirs = ([found[:2] for (found,) in some] for some in (answers[:2], answers[2:]))
    assert ours == theirs


def test_slower_tiles_answer_neighbours_and_not_their_own_key():
    """Two waves of wide tiles, or two of narrow ones: unless those were slower than the default."""
    best, other = product_row(512, 4224, 4096, 20.0), product_row(512, 4224, 4096, 25.0, rank=2, BLOCK_N=64)
    slower, faster = (db.Tables(source(best, dataclasses.replace(other, default_us=us))) for us in (22.0, 30.0))
    assert [a.row.rank for a in ask(slower, 512, 4224, 4096)] == [1]
    assert [a.row.rank for a in ask(faster, 512, 4352, 4096)] == [2, 1]
    assert ask(slower, 512, 4352, 4096) == []


@pytest.mark.parametrize("field", [dict(BLOCK_M=0), dict(BLOCK_N="wide"), dict(BLOCK_K=-1), dict(SPLIT_K=0.5)])
def test_rows_that_cannot_be_scaled_answer_by_distance(field):
    tables = db.Tables(source(product_row(64, 4096, 4096, 9.0, **field), product_row(64, 16384, 4096, 9.0)))
    assert [a.row.key["N"] for a in ask(tables, 64, 4096, 4352)] == [4096]
    never = db.Tables(source(product_row(64, 4096, 4096, 0.0)))
    assert [a.level for a in ask(never, 64, 4096, 4352)] == ["nearest"]


def test_a_sibling_that_leaves_a_shape_to_the_default_is_the_last_word(recwarn):
    """No farther sibling is asked, and nobody is told that nothing is recorded."""
    even = dataclasses.replace(product_row(64, 4096, 4096, 9.0), default_us=9.1)
    farther = product_row(64, 4096, 4096, 8.0, BLOCK_M=64)
    texts = {f"{H200.id}/some_op.csv": db.dump_table([even]), f"{H100.id}/some_op.csv": db.dump_table([farther])}
    sxm = Device("sm90", "NVIDIA H100 80GB HBM3", "nv", 132)
    tables, key = db.Tables(db.MemorySource(texts)), dict(M=64, N=6144, K=4096, dtype="x")
    for _ in range(2):
        assert tables.candidates("some_op", key, sxm) == [] == ask(tables, 64, 6144, 4096, sxm)
    assert not recwarn.list
    assert [a.gpu for a in ask(tables, 64, 4096, 4096, sxm)] == [H200.id, H100.id], "the same shape is its own"


def test_shapes_far_from_what_is_recorded_are_the_default_s_business(recwarn):
    """Only where nothing like them is recorded is somebody told. Many tokens are alike, whatever their number."""
    tables = db.Tables(source(product_row(64, 4096, 4096, 9.0), product_row(4096, 4096, 4096, 99.0)))
    assert tables.candidates("some_op", dict(M=1, N=4096, K=4096, dtype="x"), H200) == []
    assert not recwarn.list
    assert ask(tables, 16384, 4096, 4096)
    assert tables.candidates("some_op", dict(M=1, N=4096, K=4096, dtype="y"), H200) == []
    assert len(recwarn.list) == 1


def test_a_table_that_is_far_does_not_silence_another():
    plain = product_row(64, 4096, 4096, 9.0)
    unscaled = dataclasses.replace(plain, config={n: v for n, v in plain.config.items() if n != "BLOCK_N"})
    far = source(product_row(64, 65536, 65536, 900.0), name="packaged")
    assert [a.level for a in ask(db.Tables(source(unscaled), far), 64, 4096, 4352)] == ["nearest"]


def test_what_a_caller_does_to_an_answer_stays_with_its_key():
    even = dataclasses.replace(product_row(64, 4096, 4096, 9.0), default_us=9.1)
    tables = db.Tables(source(even))
    tables.answers("some_op", dict(M=64, N=4096, K=4096, dtype="x"), H200)  # so that the table is at hand
    tables.candidates("some_op", dict(M=64, N=6144, K=4096, dtype="x"), H200).append({"BLOCK_M": 999})
    assert db.Tables(source(even)).candidates("some_op", dict(M=64, N=5120, K=4096, dtype="x"), H200) == []
    assert tables.candidates("some_op", dict(M=64, N=5120, K=4096, dtype="x"), H200) == []


@pytest.mark.parametrize("us", [5e-324, 1e300, float("inf")])
def test_times_that_no_clock_showed_scale_nothing(us):
    tables = db.Tables(source(product_row(64, 4096, 4096, us), product_row(64, 8192, 4096, 9.0)))
    assert isinstance(ask(tables, 64, 4096, 4352), list)
