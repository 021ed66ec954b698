"""Layers on several ranks give what they give on one; a fault on one rank ends with an error on all."""

import threading
import time

import pytest
import torch
from shared_run import once
from table import EP, FAULTS, cells, results, verdict

from fpk.db import Empty, MemorySource, Tables
from fpk.parallel import Placement, join
from fpk.parallel.balance import arranged, source_of
from fpk.parallel.watch import Watch

CELLS = cells()


@pytest.fixture(scope="session")
def answers():
    return once("parallel", results)


@pytest.mark.parametrize("number", range(len(CELLS)), ids=lambda i: "-".join(CELLS[i][:4]).replace(" ", "_"))
def test_ranks_give_what_one_gives(number, answers):
    *_, bound, _check, _arguments = CELLS[number]
    found = verdict(answers[str(number)])
    assert found.equal or found.rest <= bound


def test_most_layers_with_experts_on_ranks_are_equal_in_every_bit(answers):
    placed = [i for i, cell in enumerate(CELLS) if cell[4] == EP]
    equal = [verdict(answers[str(i)])[0] for i in placed]
    assert sum(equal) >= 0.7 * len(placed)


def test_experts_move_while_their_layer_serves(answers):
    """The second plan sees the same loads and moves nothing."""
    for found in answers["balanced"]:
        assert max(found["errors"]) <= EP and found["stayed"]
        first, again = found["slots"]
        assert first == again and sorted(set(first)) == list(range(10)) and first.count(7) == 3
    before, _, after = answers["balanced"][0]["loads"]
    assert sum(before) == sum(after)

    def busiest(loads):
        return max(sum(loads[r * 3 : r * 3 + 3]) for r in range(4))

    assert busiest(after) < busiest(before)


def test_an_expert_that_no_rank_has(answers):
    assert answers["uncovered"][:2] == ["placement: no rank has expert 3 of 4"] * 2


def test_ranks_with_different_placements(answers):
    for message in answers["disagreeing"][:2]:
        assert message.startswith("placement of experts: expected the same on every rank, but rank 0 has ((0, 1,")


def test_a_rank_that_dies(answers):
    size = FAULTS["dying"]
    for message, seconds in answers["dying"][: size - 1]:
        # gloo tells at once; under NCCL the watch does
        assert "lost the others" in message or "gave no sign of life" in message
        assert seconds < 30


# ---- what needs no processes: ranks are threads that share a store -------------------------------------------------
def together(count, work):
    """work(rank) in `count` threads: what each raised, and how long it took."""
    ends: list[tuple[Exception | None, float]] = [(None, 0.0)] * count
    all_run = threading.Barrier(count)

    def main(rank):
        all_run.wait()
        begun = time.monotonic()
        try:
            work(rank)
        except Exception as error:
            ends[rank] = error, time.monotonic() - begun

    threads = [threading.Thread(target=main, args=(r,)) for r in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    return ends


def test_a_rank_with_another_database():
    store = torch.distributed.HashStore()
    databases = [Tables(MemorySource({"nv-x-sm90-1/amax.csv": f"rank {rank}"})) for rank in (0, 0, 1)]
    ends = together(3, lambda r: join(r, 3, store, device="cpu", database=databases[r], timeout_s=120))
    for error, _ in ends:
        assert isinstance(error, RuntimeError)
        assert str(error).startswith("autotune database: expected the same on every rank, but rank 0 has ")
        assert "rank 2 has" in str(error)


def test_a_rank_that_does_not_come():
    store = torch.distributed.HashStore()
    ends = together(2, lambda r: join(r, 3, store, device="cpu", database=Empty(), timeout_s=3))
    for error, seconds in ends:
        assert str(error) == "number of ranks: rank 2 did not answer within 3 s"
        assert seconds < 60


def test_a_rank_of_another_world():
    store = torch.distributed.HashStore()
    # the third rank of rank 1's world never comes
    limits = (120, 1)
    ends = together(2, lambda r: join(r, 2 + r, store, device="cpu", database=Empty(), timeout_s=limits[r]))
    assert str(ends[0][0]) == "number of ranks: expected the same on every rank, but rank 0 has 2, rank 1 has 3"


class Reached:
    """A store that a rank reaches as long as it lives, and whose counts come late while it is `slow`."""

    def __init__(self, store):
        self.store, self.dead, self.slow = store, False, threading.Event()
        self.slow.set()  # it is not

    def set(self, name, value):
        if value != "left":
            self.slow.wait(60)
        if not self.dead:
            self.store.set(name, value)

    def get(self, name):
        return self.store.get(name)

    def check(self, names):
        return self.store.check(names)


def test_a_silent_rank_is_noticed():
    store = torch.distributed.HashStore()
    reached = [Reached(store) for _ in range(3)]
    watches = [Watch(reached[r], r, 3, patience_s=1.0, beat_s=0.1) for r in range(3)]
    time.sleep(0.5)
    reached[2].dead = True
    watches[1].stop()  # it leaves
    until = time.monotonic() + 120
    while not watches[0].lost and time.monotonic() < until:
        time.sleep(0.05)
    with pytest.raises(RuntimeError, match="rank 0 of 3: rank 2 gave no sign of life for 1 s"):
        watches[0].check()
    for watch in watches:
        watch.stop()
    watches[1].check()


def test_nobody_is_lost_when_time_goes_on_without_the_ranks(monkeypatch):
    """As for processes that were stopped, on a host that had no processor for them."""
    store, clock, ahead = torch.distributed.HashStore(), time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock() + ahead[0])
    watches = [Watch(store, r, 2, patience_s=2.0, beat_s=(0.02, 0.2)[r]) for r in range(2)]
    for _ in range(10):
        time.sleep(0.1)
        ahead[0] += 5.0
    time.sleep(0.1)
    for watch in watches:
        watch.check()
        watch.stop()


def test_a_count_that_comes_late_does_not_take_back_that_a_rank_left():
    store = torch.distributed.HashStore()
    reached = Reached(store)
    watch = Watch(reached, 0, 1, patience_s=1.0, beat_s=0.02)
    time.sleep(0.1)
    reached.slow.clear()
    time.sleep(0.1)  # now a count is under way
    watch.stop()
    reached.slow.set()
    watch._thread.join(60)
    assert store.get("fpk/beat/0") == b"left"


# ---- balance -------------------------------------------------------------------------------------------------------
def test_copies_go_to_the_loaded_and_little_moves():
    before = [0, 1, 2, 3, 0, 1]
    assert arranged([1, 1, 1, 1], before, 2) == before
    after = arranged([10, 1, 1, 1], before, 2)
    assert sorted(after) == [0, 0, 0, 1, 2, 3] and sum(a != b for a, b in zip(after, before, strict=True)) == 1
    loads = [0, 5, 90, 3, 2, 0, 0, 1]
    after = arranged(loads, [s % 8 for s in range(12)], 4)
    assert after.count(2) == 5 and set(after) == set(range(8))
    assert {e for e in after[:3]} & {e for e in after[3:6]} & {e for e in after[6:9]} == {2}


def test_weights_come_from_the_own_rank_if_they_can():
    assert source_of(2, 0, [0, 1, 2, 0, 1, 2], 3) == 0
    assert source_of(5, 0, [0, 1, 2, 0, 1, 2], 3) == 3
    assert {source_of(s, 0, [0, 0, 1, 1, 2, 2, 2, 2], 2) for s in (4, 5, 6, 7)} == {0, 1}


# ---- placements ----------------------------------------------------------------------------------------------------
def test_placements():
    assert Placement.linear(10, 4).ranks == ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
    assert Placement.round_robin(5, 2).ranks == ((0, 2, 4), (1, 3))
    assert Placement.linear(10, 4).expert_map(1).tolist() == [-1, -1, -1, 0, 1, 2, -1, -1, -1, -1]
    assert Placement.linear(10, 4).owners().tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    maps = [Placement.round_robin(5, 2).expert_map(r).tolist() for r in range(2)]
    assert Placement.of_maps(maps) == Placement.round_robin(5, 2)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((0, 1), (1, 2)), "expert 1 is on rank 0 and on rank 1"),
        (((0, 1), (2, 3)), r"expected experts 0\.\.2, got 3 on rank 1"),
        (((0,), (2,)), "no rank has expert 1 of 3"),
    ],
)
def test_placements_that_do_not_hold(ranks, message):
    with pytest.raises(ValueError, match=f"placement: {message}"):
        Placement(ranks, 3)


def test_expert_maps_that_do_not_count():
    with pytest.raises(ValueError, match=r"placement: expected local numbers 0\.\.1 on rank 0, got \[0, 2\]"):
        Placement.of_maps([[0, 2, -1], [-1, -1, 0]])
