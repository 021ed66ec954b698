"""The process that gives turns on a GPU, with jobs that sleep, hang, die, write too much or do not let go."""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import campaign
from campaign_job import Measurement, members

NOTE = """
import os, sys, time
def note(what):
    with open({log!r}, "a") as file:
        file.write(f"{{time.monotonic():.3f}} {{os.environ['NAME'] if 'NAME' in os.environ else name}} {{what}}\\n")
def noted(*words):
    with open({log!r}) as file:
        events = [tuple(line.split()[1:]) for line in file]
    return all(tuple(word.split()) in events for word in words)
def until(*words):
    end = time.monotonic() + 60
    while not noted(*words) and time.monotonic() < end:
        time.sleep(0.02)
name = {name!r}
import gate
"""


@pytest.fixture
def world(tmp_path):
    """job(name, code, ...) declares a measurement; run(...) runs them; events() is what they noted, in order."""
    return World(tmp_path)


class World:
    def __init__(self, folder):
        self.folder, self.log, self.plan = folder, folder / "log", []
        self.log.touch()

    def job(self, name, code, **more):
        text = NOTE.format(log=str(self.log), name=name) + code
        more = dict(seconds=1.0, most=60.0, floor=0.5) | more
        self.plan.append(Measurement(name, "", ("{python}", "-c", text, "{out}"), (), **more))

    def run(self, seconds=120.0, **more):
        options = argparse.Namespace(
            out=str(self.folder / "out"), seconds=seconds, gpus="0", resume=None, model=None, ahead=2, background=2,
            compilers=1, prepare=60.0,
        )  # fmt: skip
        for name, value in more.items():
            setattr(options, name, value)
        (self.folder / "scratch").mkdir(exist_ok=True)
        self.begin = time.monotonic()
        self.code = campaign.Campaign(self.plan, options, self.folder / "scratch").run()
        self.took = time.monotonic() - self.begin
        return json.loads((self.folder / "out" / "summary.json").read_text())

    def events(self):
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [(name, what, float(at)) for at, name, what in lines]


MEASURE = """
note("prepared")
gate.turn()
note("begins")
time.sleep({seconds})
open(sys.argv[1] + "/{name}.csv", "w").write("a,b\\n1,2\\n")
note("ends")
"""
STEPS = """
while not noted({until!r}):
    note("works")
    time.sleep(0.05)
for i in range(10):
    note("works")
    time.sleep(0.05)
"""


def test_one_at_a_time_in_order_and_the_next_prepares_meanwhile(world):
    for name in ("one", "two", "three"):
        world.job(name, MEASURE.format(name=name, seconds=0.6))
    found = world.run()
    assert world.code == 0 and {r["status"] for r in found.values()} == {"done"}
    turns = [(n, w) for n, w, _ in world.events() if w != "prepared"]
    assert sorted(turns[:2]) == [(turns[0][0], "begins"), (turns[0][0], "ends")]
    assert [w for _, w in turns] == ["begins", "ends"] * 3
    at = {(n, w): t for n, w, t in world.events()}
    assert at["three", "prepared"] > at[turns[0][0], "begins"]  # two prepare ahead at most
    assert at["two", "begins"] > at["two", "prepared"]
    out = world.folder / "out"
    assert (out / "two" / "two.csv").read_text() == "a,b\n1,2\n" and "gate: " in (
        out / "two" / "stdout.txt"
    ).read_text()
    assert max(len(p.relative_to(out).parts) for p in out.rglob("*")) <= 2
    assert "done" in (out / "summary.txt").read_text()
    assert all(0.5 < r["quiet_s"] < r["wall_s"] for r in found.values())


def test_the_most_important_that_is_ready_goes_first(world):
    waits = "until('slow prepared', 'quick prepared')\ntime.sleep(0.5)\n"  # until they have asked, too
    world.job("first", MEASURE.format(name="first", seconds=0.1).replace("time.sleep", waits + "time.sleep"))
    world.job("slow", "until('first begins')\ntime.sleep(0.5)\n" + MEASURE.format(name="slow", seconds=0.1))
    world.job("quick", "until('first begins')\n" + MEASURE.format(name="quick", seconds=0.1))
    world.run(ahead=3)
    assert [n for n, w, _ in world.events() if w == "begins"] == ["first", "slow", "quick"]


OVERLAPS = """
def overlap():
    spans = {}
    for line in open(log):
        at, who, what = line.split()
        if who != "both" and what in ("begins", "ends"):
            spans.setdefault(who, []).append(float(at))
    spans = [(s[0], s[1] if len(s) > 1 else float("inf")) for s in spans.values()]
    return any(b1 < e2 and b2 < e1 for i, (b1, e1) in enumerate(spans) for b2, e2 in spans[:i])
limit = time.monotonic() + 20
while not overlap() and time.monotonic() < limit:
    time.sleep(0.02)
"""


ASKS = """
def asks():
    while gate.VARIABLE in os.environ:  # asking takes it out
        time.sleep(0.02)
    time.sleep(0.2)
    note("asked")
import threading
threading.Thread(target=asks).start()
gate.turn"""


def test_two_gpus_measure_side_by_side_and_one_for_both_is_not_starved(world):
    """All others ask while the first measures, and the one for both before those for one."""
    others = ("both", "b", "c", "d")
    asked = ", ".join(f"'{n} asked'" for n in others)
    first = MEASURE.format(name="a", seconds=0.3).replace("time.sleep", f"until({asked})\ntime.sleep")
    world.job("a", first)
    for name in others:
        behind = "a begins" if name == "both" else "both asked"
        code = MEASURE.format(name=name, seconds=0.3).replace("gate.turn", f"until({behind!r})\n{ASKS}")
        if name != "both":
            code = code.replace("time.sleep(0.3)", f"log = {str(world.log)!r}\n{OVERLAPS}time.sleep(0.3)")
        world.job(name, code, gpus=1 + (name == "both"))
    found = world.run(gpus="0,1", ahead=5)
    assert {r["status"] for r in found.values()} == {"done"}
    spans = {n: [t for m, w, t in world.events() if m == n and w in ("begins", "ends")] for n in ("a", *others)}
    begin, end = spans.pop("both")
    assert spans["a"][1] <= begin and all(spans[n][0] >= end for n in "bcd")
    overlaps = [b1 < e2 and b2 < e1 for n, (b1, e1) in spans.items() for m, (b2, e2) in spans.items() if n < m]
    assert any(overlaps)


def test_what_takes_too_long_is_killed_with_all_it_started_and_the_next_goes_on(world):
    hang = (
        "import signal, subprocess\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "open(sys.argv[1] + '/rows.csv', 'w').write('a\\n1\\n')\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        "gate.turn()\ntime.sleep(60)\n"
    )
    world.job("hangs", hang, most=1.0)
    world.job("next", MEASURE.format(name="next", seconds=0.1))
    found = world.run()
    assert found["hangs"]["status"] == "cut" and found["hangs"]["why"] == "more than 1 s" and world.took < 50
    assert found["next"]["status"] == "done" and world.code == 1
    assert (world.folder / "out" / "hangs" / "rows.csv").read_text() == "a\n1\n"  # what there was is kept
    assert not members(f"FPK_MEASUREMENT={world.folder}/scratch/work/hangs", -1)


def test_what_dies_costs_itself_alone(world):
    world.job("name_error", "gate.turn()\nundefined\n")
    world.job("killed", "gate.turn()\nos.kill(os.getpid(), 9)\n")
    world.job("early", "sys.exit(3)\n")
    world.job("well", MEASURE.format(name="well", seconds=0.1))
    found = world.run()
    assert [found[n]["status"] for n in ("name_error", "killed", "early", "well")] == ["failed"] * 3 + ["done"]
    assert found["early"]["why"] == "exit code 3"
    assert "NameError" in (world.folder / "out" / "name_error" / "stdout.txt").read_text()


def test_who_never_asks_for_a_turn_is_cut(world):
    world.job("lost", "time.sleep(60)")
    world.job("well", MEASURE.format(name="well", seconds=0.1))
    found = world.run(prepare=1.0, ahead=1)
    assert found["lost"]["status"] == "cut" and "not ready" in found["lost"]["why"]
    assert found["well"]["status"] == "done"


def test_everything_ends_before_the_deadline(world):
    rows = "file = open(sys.argv[1] + '/rows.csv', 'w')\nfile.write('a\\n')\n"
    world.job(
        "long", rows + "gate.turn()\nwhile True:\n    file.write('1\\n'); file.flush(); time.sleep(0.1)\n", most=60
    )
    world.job("laws", STEPS.format(until="the end"), quiet=False, most=60)
    world.job("never", MEASURE.format(name="never", seconds=0.1), floor=6.0)
    found = world.run(seconds=12.0)
    assert world.took < 12.0
    assert found["long"]["status"] == "cut" and found["long"]["why"] == "the time was over"
    assert found["laws"]["status"] == "cut" and found["never"]["status"] in ("not reached", "cut")
    assert len((world.folder / "out" / "long" / "rows.csv").read_text().splitlines()) > 5
    assert not members(f"FPK_MEASUREMENT={world.folder}/scratch/work/laws", -1)


CHILD = "note('starts')\nimport subprocess\nos.environ['NAME'] = 'child'\n"


def test_others_are_stopped_with_their_children_while_somebody_measures(world):
    steps = STEPS.format(until="again ends")
    child = NOTE.format(log=str(world.log), name="child") + steps
    laws = f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)\n" + steps
    both_work = "until('laws works', 'child works')\n"
    world.job("laws", laws, quiet=False, least=0.5)
    world.job("measured", both_work + MEASURE.format(name="measured", seconds=1.0))
    world.job("again", "until('measured begins')\n" + MEASURE.format(name="again", seconds=0.5))
    found = world.run()
    events = world.events()
    for name in ("measured", "again"):
        begin, end = (next(t for n, w, t in events if (n, w) == (name, what)) for what in ("begins", "ends"))
        between = [n for n, w, t in events if w == "works" and begin + 0.05 < t < end]
        assert not between, name
    end = max(t for n, w, t in events if w == "ends")
    for name in ("laws", "child"):
        assert any(t > end + 0.3 for n, w, t in events if n == name), name  # and go on behind
        first = next(t for n, w, t in events if w == "begins")
        assert any(t < first for n, w, t in events if n == name), name
    assert {r["status"] for r in found.values()} == {"done"}


def test_seconds_of_important_work_come_before_less_important_turns(world):
    world.job("laws", STEPS.format(until="later ends"), quiet=False, least=1.5)
    world.job("later", MEASURE.format(name="later", seconds=0.1))
    world.run()
    at = {(n, w): t for n, w, t in reversed(world.events())}
    assert at["later", "begins"] - world.begin > 1.5
    assert at["laws", "works"] < at["later", "begins"]


def test_for_a_quiet_host_everything_else_stops(world):
    world.job("laws", STEPS.format(until="host ends"), quiet=False)
    world.job("other", MEASURE.format(name="other", seconds=0.5))
    world.job("host", MEASURE.format(name="host", seconds=0.8), host=True)
    world.job("prepares", STEPS.format(until="host begins") + MEASURE.format(name="prepares", seconds=0.1))
    world.run(gpus="0,1", ahead=3)
    events = world.events()
    begin, end = (next(t for n, w, t in events if (n, w) == ("host", what)) for what in ("begins", "ends"))
    assert not [n for n, w, t in events if n != "host" and begin + 0.05 < t < end]
    assert {n for n, w, t in events if t > end} >= {"laws", "prepares"}


def test_a_flood_of_files_is_left_out_and_named(world):
    flood = (
        "out = sys.argv[1]\nos.makedirs(out + '/cache/deep')\nopen(out + '/cache/deep/x.csv', 'w').write('a')\n"
        "open(out + '/big.csv', 'w').write('1' * 5_000_000)\nopen(out + '/trials.sqlite', 'w').write('x')\n"
        "open(out + '/small.csv', 'w').write('a\\n')\nprint('x' * 2_000_000)\nprint('the end')\n"
        "os.symlink('/etc/hostname', out + '/link.txt')\n"
    )
    world.job("flood", "gate.turn()\n" + flood)
    found = world.run()
    out = world.folder / "out" / "flood"
    assert sorted(p.name for p in out.iterdir()) == ["small.csv", "stdout.txt"]
    assert sorted(found["flood"]["left_out"]) == ["big.csv", "cache", "link.txt", "trials.sqlite"]
    assert (out / "stdout.txt").read_text().endswith("the end\n")
    assert sum(p.stat().st_size for p in out.iterdir()) <= 2_000_000


def test_an_earlier_call_is_gone_on_with(world):
    more = "path = sys.argv[1] + '/rows.csv'\ngate.turn()\nopen(path, 'a').write('row\\n')\n"
    world.job("rows", more)
    world.run()
    os.rename(world.folder / "out", world.folder / "old")
    (world.folder / "scratch" / "work").rename(world.folder / "gone")
    world.run(resume=str(world.folder / "old"))
    assert (world.folder / "out" / "rows" / "rows.csv").read_text() == "row\nrow\n"


def test_what_cannot_be_measured_here_is_left_out(world, monkeypatch):
    monkeypatch.delenv("FPK_PEERS", raising=False)
    world.job("peers", MEASURE.format(name="peers", seconds=0.1), needs=("peers",))
    world.job("two", MEASURE.format(name="two", seconds=0.1), gpus=2)
    world.job("tool", MEASURE.format(name="tool", seconds=0.1), needs=("compute-no-such",))
    world.job("well", MEASURE.format(name="well", seconds=0.1))
    found = world.run()
    assert [found[n]["status"] for n in ("peers", "two", "tool", "well")] == ["left out"] * 3 + ["done"]
    assert found["peers"]["why"] == "needs peers" and "2 GPUs" in found["two"]["why"]


def test_not_gated_ones_start_with_their_turn(world):
    world.job("first", MEASURE.format(name="first", seconds=0.6))
    world.job("book", "note('begins')\ntime.sleep(0.3)\nnote('ends')\n", gated=False)
    world.run()
    turns = [(n, w) for n, w, _ in world.events() if w != "prepared"]
    assert turns[::2] == [(n, "begins") for n, _ in turns[::2]] and [w for _, w in turns] == ["begins", "ends"] * 2


def test_outside_a_campaign_a_turn_has_no_end(monkeypatch):
    monkeypatch.delenv("FPK_GATE", raising=False)
    import gate

    assert gate.turn() == float("inf") and gate.left() == float("inf")


def test_a_stopped_process_does_not_age(monkeypatch):
    import gate

    now, steps, over = [100.0], [0.02] * 10 + [5.0] + [0.02] * 5, threading.Event()

    def sleep(seconds):
        if not steps:
            over.set()
            threading.Event().wait()
        now[0] += steps.pop(0)

    monkeypatch.setattr(gate, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    clock = gate.RunningClock(0.02)
    assert over.wait(60)
    assert clock() == pytest.approx(15 * 0.02 + 2 * 0.02)
