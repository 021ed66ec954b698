"""A row rests on its own kernel: staleness, the tuner's resume and tables, when kernels change, come and go."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fpk
from fpk import _db_hash, db
from fpk.cli import app
from fpk.device import Device, pretend
from fpk.op import OPS, Kernel
from fpk.tune.arguments import key_of, outline
from fpk.tune.explain import explain_case
from fpk.tune.lint import lint, stale
from fpk.tune.records import texts_of
from fpk.tune.sources import Sources, covers, kernels_in, parse, part, sources_of, whole
from fpk.tune.sweep import Options
from fpk.tune.trials import Trial, TrialStore, canonical

TESTS = Path(__file__).parent
H200 = Device("sm90", "NVIDIA H200", "nv", 132)
NOW = {"torch": "2.11.0", "triton": "3.6.0"}

MODULE = '''
import triton
import triton.language as tl

@triton.jit
def shared(x):
    return x * 2

@triton.jit
def own(x):
    return x + 1

@triton.jit
def one_kernel(p):
    tl.store(p, shared(own(tl.load(p))))

@triton.jit
def two_kernel(p):
    tl.store(p, shared(tl.load(p)))

@triton.jit
def three_kernel(p):
    tl.store(p, tl.load(p))

@triton.jit
def sum_kernel(p):
    tl.store(p, tl.load(p) + 3)

@triton.jit
def later_kernel(p):
    tl.store(p, tl.load(p) + 4)

def reduce(p):
    """Launches beside the launcher's own choice."""
    sum_kernel[(1,)](p)

def launcher(p, *, config):
    shared = None  # no kernel, whatever the module calls so
    {"one": one_kernel, "two": two_kernel, "three": three_kernel}[config["kernel"]][(1,)](p)
    reduce(p)
'''
CONFIGS = {name: dict(kernel=name) for name in ("one", "two", "three")}


@dataclasses.dataclass
class Fake:
    """As much of an op as sources are taken from."""

    kernels: dict
    launcher: object


@pytest.fixture
def module(tmp_path):
    """Loads the module above, changed, as an op with the kernels asked for."""
    count = [0]

    def load(*changes, kernels=("one", "two", "three")):
        text = MODULE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        count[0] += 1
        path = tmp_path / f"v{count[0]}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("changing", path)
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return Fake({n: Kernel(getattr(loaded, f"{n}_kernel")) for n in kernels}, loaded.launcher)

    return load


def changed(then, now):
    """Which of the three configs' rows an op that has become `now` makes stale."""
    sources = Sources(now)
    return {name for name, config in CONFIGS.items() if sources.changed(sources_of(then), config)}


def test_a_run_records_each_kernel_and_what_runs_beside(module):
    text = sources_of(module())
    assert list(parse(text)) == ["one", "two", "three", "+sum_kernel"] and len(set(parse(text).values())) == 4
    assert all(len(value) == 12 for value in parse(text).values()) and "," not in text


@pytest.mark.parametrize(
    "change,stales",
    [
        (("return x + 1", "return x + 5"), {"one"}),
        (("shared(tl.load(p))", "shared(tl.load(p) + 1)"), {"two"}),
        (("return x * 2", "return x * 3"), {"one", "two"}),
        (("tl.load(p) + 3", "tl.load(p) + 7"), {"one", "two", "three"}),
        (("def sum_kernel", "def sum_kernel_of"), {"one", "two", "three"}),
        (("tl.load(p) + 4", "tl.load(p) + 7"), set()),
        (("return x * 2", '"""Why."""\n    return x * 2  # because'), set()),
        (("@triton.jit\ndef one", "\n\n# moved\n\n@triton.jit\ndef one"), set()),
    ],
    ids=lambda value: value[1].split("\n")[0] if isinstance(value, tuple) else ",".join(sorted(value)),
)
def test_a_change_stales_the_rows_that_rest_on_it(module, change, stales):
    changes = [change, ("sum_kernel[(1,)]", "sum_kernel_of[(1,)]")] if change[1].endswith("_of") else [change]
    then, now = module(), module(*changes)
    assert changed(then, now) == stales
    for name, config in CONFIGS.items():  # trials are judged as rows are
        assert Sources(now).stands(part(sources_of(then), config)) is (name not in stales)


def test_kernels_come_and_go(module):
    then = module()
    assert changed(then, module(kernels=("one", "two", "three", "later"))) == set()
    more = Sources(module(kernels=("one", "two", "three", "later")))
    assert more.untried(sources_of(then), "sm90") == ["later"] and more.untried("0123456789ab", "sm90") == []
    more.op.kernels["later"] = Kernel(more.op.kernels["later"].fn, targets=("gfx950",))
    assert more.untried(sources_of(then), "sm90") == []
    fewer = Sources(module(kernels=("one", "two")))
    # a launcher may still name it: it then counts as running beside, which rows of its time did not have
    assert fewer.changed(sources_of(then), CONFIGS["three"]) == "kernel three is gone"
    assert not fewer.changed(sources_of(then), CONFIGS["one"])
    assert more.changed(sources_of(then), dict(kernel="later")) == "its run knew no kernel later"
    beside = module(("    reduce(p)\n", "    reduce(p)\n    later_kernel[(1,)](p)\n"))
    assert changed(then, beside) == set() and "+later_kernel" in parse(sources_of(beside))
    assert changed(beside, then) == {"one", "two", "three"}


def test_a_config_without_a_kernel_means_the_first(module):
    then = module()
    assert kernels_in(part(sources_of(then), {})) == ["one"]
    assert Sources(module(("return x + 1", "return x + 5"))).changed(sources_of(then), {})
    assert not Sources(module(("shared(tl.load(p))", "tl.load(p)"))).changed(sources_of(then), {})
    assert Sources(module(kernels=("two", "one", "three"))).changed(sources_of(then), {}), "another one is first now"
    renamed = module(("def one_kernel", "def first_kernel"), ("one_kernel,", "first_kernel,"), kernels=("first", "two"))
    assert Sources(renamed).changed(sources_of(then), {}), "its name is part of a kernel"


def test_old_runs_stand_while_nothing_of_the_op_has_changed(module):
    then = module()
    old = whole(then)
    assert len(old) == 12 and not Sources(then).changed(old, CONFIGS["two"]) and Sources(then).stands(old)
    later = Sources(module(("return x + 1", "return x + 5")))
    assert f"kernel source {old}, now {later.whole}" == later.changed(old, CONFIGS["two"])
    assert not later.stands(old) and not later.stands("") and later.changed("", CONFIGS["two"])
    assert Sources(module(kernels=("one",))).changed(old, CONFIGS["two"]) == "kernel two is gone"
    assert part(old, CONFIGS["two"]) == old and covers(old, old) and not covers(old, "0123456789ab")


def test_functions_of_one_name_all_count(tmp_path):
    """Modules call their helpers alike (`_consume`, `_fetch`): each is part of what calls it."""

    def hashed(body):
        for name, text in (("a_part", "x + 1"), ("b_part", body)):
            (tmp_path / f"{name}.py").write_text(f"import triton\n\n@triton.jit\ndef _part(x):\n    return {text}\n")
            sys.modules.pop(name, None)
        (tmp_path / "both.py").write_text(
            "import triton\nimport a_part\nimport b_part\n\n@triton.jit\ndef kernel(x):\n"
            "    return a_part._part(b_part._part(x))\n"
        )
        sys.path.insert(0, str(tmp_path))
        importlib.invalidate_caches()
        try:
            spec = importlib.util.spec_from_file_location("both", tmp_path / "both.py")
            both = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(both)
        finally:
            sys.path.remove(str(tmp_path))
        for fn in (both.a_part._part, both.b_part._part, both.kernel):
            fn.fn.__module__ = "both.part"  # one package
        return db.source_hash([both.kernel])

    assert hashed("x + 2") != hashed("x + 30")


def test_no_hash_depends_on_the_version_of_triton():
    """What says which triton this is stands in OF_TRITON of the module that reads it, also of one that imports it."""
    of_triton = {
        id(value): name
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("fpk.")
        for name in getattr(module, "OF_TRITON", ())
        if not isinstance(value := getattr(module, name), bool)  # a constexpr is one object wherever it is imported
    }
    assert of_triton
    seen = {}
    for op in OPS.values():
        for kernel in (*(k.fn for k in op.kernels.values()), *db.launched_by(op.launcher)):
            _db_hash._visit(_db_hash._function(kernel), seen, False)
    for function in seen:
        named = {name for name in function.__code__.co_names if id(function.__globals__.get(name)) in of_triton}
        assert named <= set(function.__globals__.get("OF_TRITON", ())), f"{function.__module__}.{function.__name__}"


LAUNCHES = """
import sys
sys.path.insert(0, sys.argv[1])
from capture import arguments, launches_of, representative
import fpk.kernels
from fpk import db
from fpk.device import pretend, pretend_triton
from fpk.op import OPS
from fpk.tune.arguments import legal_candidates
from fpk.tune.sources import parse, sources_of

ran = set()
for op in OPS.values():
    recorded = parse(sources_of(op))
    for case in representative(op):
        bound = arguments(op, case, "sm90")
        configs = {}
        with pretend("sm90") as device, pretend_triton("3.6.0"):
            for config in legal_candidates(op, bound, device):
                configs.setdefault((config.get("kernel"), config.get("SPLIT_K", 1) > 1), config)
            for (name, _), config in configs.items():
                for launch in launches_of(op, bound, config, "sm90"):
                    allowed = recorded[name or next(iter(op.kernels))], recorded.get("+" + launch.name)
                    assert db.source_hash([launch.fn]) in allowed, (op.name, config, launch.name)
                    ran.add((op.name, name))
print(len({op for op, _ in ran}), len(ran))
"""


def test_what_a_config_launches_is_what_its_row_rests_on():
    """Every op, every kernel that is legal at one case of many tokens and one of few."""
    env = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", LAUNCHES, str(TESTS)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ops, kernels = map(int, done.stdout.split())
    assert ops == len(OPS) and kernels >= 90


OP = "quantize_fp8_token"
CASE = dict(M=16, K=512)
LOOPS = [dict(kernel="loop", BLOCK_M=m, BLOCK_K=256, num_warps=4, num_stages=1) for m in (4, 2, 8)]
ROWS = [dict(kernel="row", BLOCK_M=m, BLOCK_K=512, num_warps=4, num_stages=1) for m in (1, 2)]


def run(op=OP, **changes):
    fields = dict(
        op=op, gpu=H200.id, date="2026-01-01", fpk="0.1", torch="2.11.0", triton="3.6.0", cuda="13.0", driver="580",
        source=sources_of(OPS[OP]), timer="graph", sm_clock_mhz="1980", memory_clock_mhz="3201", power_limit_w="700",
    )  # fmt: skip
    return db.Run(**fields | changes)


def tables(made, *configs):
    """A table of these configs for one key, measured in that run."""
    key = key_of(OPS[OP], CASE, H200)
    rows = [
        db.Row(key, rank, config, 2.0 + rank, 9.0, 1.0, 32, db.spell_case(CASE), made.run)
        for rank, config in enumerate(configs, 1)
    ]
    return db.MemorySource({f"{H200.id}/{OP}.csv": db.dump_table(rows), f"{H200.id}/runs.csv": db.dump_runs([made])})


def edited(**hashes):
    """What today's run records, but for these kernels' hashes; None: without the kernel."""
    found = parse(sources_of(OPS[OP])) | hashes
    return " ".join(f"{name}:{value}" for name, value in found.items() if value is not None)


def test_rows_of_a_table_are_stale_by_their_kernel():
    other = run(source=edited(loop="000000000000"))
    (found,) = stale(tables(other, LOOPS[0], ROWS[0]), NOW)
    assert found[2].config == LOOPS[0] and "kernel loop 000000000000, now" in found[3]
    assert stale(tables(run(), LOOPS[0], ROWS[0]), NOW) == []
    assert stale(tables(run(source=whole(OPS[OP])), LOOPS[0], ROWS[0]), NOW) == [], "a table of an older fpk"
    assert len(stale(tables(run(source="0123456789ab"), LOOPS[0], ROWS[0]), NOW)) == 2
    assert db.parse_runs(db.dump_runs([run()])) == {run().run: run()}


def test_a_row_of_a_kernel_that_is_gone_answers_nothing():
    gone = dict(LOOPS[0], kernel="swept")
    source = tables(run(source=edited(swept="000000000000")), gone, ROWS[0])
    assert [p for p in lint(source) if "swept" in p and "kernel that is gone" in p] and len(lint(source)) == 1
    (found,) = stale(source, NOW)
    assert found[3] == "kernel swept is gone"
    told = explain_case(OPS[OP], CASE, H200, db.Tables(source))
    assert told.config == ROWS[0] and "kernel swept is gone" in told.lines[0]
    with fpk.use(db.Tables(source)), pretend(H200):
        assert OPS[OP]._choose(outline(OPS[OP], CASE)) == ROWS[0]


def test_verify_says_what_a_run_did_not_try(tmp_path):
    source = tables(run(source=edited(pairs=None), torch=NOW["torch"]), ROWS[0])
    for path, text in source.texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    out = CliRunner().invoke(app, ["db", "verify", "--stale", "--db", str(tmp_path)]).output
    assert "did not try pairs, which came later" in out and "kernel" not in out.split("did not try")[0]


def test_a_resumed_sweep_keeps_trials_of_unchanged_kernels(tmp_path):
    path, log = tmp_path / "t.sqlite", tmp_path / "log"
    candidates = [*LOOPS, *ROWS]
    options = Options(
        "tune_stubs:make", H200, {"log": str(log)}, {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)},
        candidates=lambda op, case: [dict(c) for c in candidates], trial_limit_s=8.0,
    )  # fmt: skip

    def timed():
        before = len(log.read_text().splitlines()) if log.exists() else 0
        fpk.tune(OP, {"a": CASE}, options=options, store=path, verbose=False)
        return len(log.read_text().splitlines()) - before - len(candidates)  # the finals are always timed

    def spoil(old, new):
        store = TrialStore(path)
        store._write("UPDATE trials SET source = replace(source, ?, ?)", [(old, new)])
        sources = {t.source for t in store.trials()}
        store.close()
        return sources

    assert timed() == 5
    now = sources_of(OPS[OP])
    assert spoil("", "") == {part(now, LOOPS[0]), part(now, ROWS[0])}
    spoil(f"loop:{parse(now)['loop']}", "loop:000000000000")
    spoil(f"row:{parse(now)['row']}", whole(OPS[OP]))  # as an older fpk wrote it
    assert timed() == 3
    spoil(whole(OPS[OP]), "0123456789ab")
    assert timed() == 2


def test_tables_take_the_trials_that_a_resumed_sweep_kept():
    """A kernel came, so that there is a new run; what the old one tried of the others stands in the table."""

    def trial(config, us, made, stage="screen", detail=""):
        return Trial(
            OP, H200.id, part(made.source, config), '{"K":512,"M":16}', "M=16 K=512", canonical(config), stage, "ok",
            us=us, noise_percent=0.1, run=made.run, detail=detail, created=made.date,
        )  # fmt: skip

    def tile(kernel, m, n):
        return dict(kernel=kernel, BLOCK_M=m, BLOCK_N=n, num_warps=4, num_stages=2)

    def told(first):
        last = run(date="2026-02-01")
        runs = {r.run: vars(r) for r in (first, last)}
        trials = [trial(tile("loop", 64, n), us, first) for n, us in ((64, 9.0), (128, 6.0), (256, 7.0))]
        trials += [trial(tile("row", 64, 64), 6.5, last)]
        trials += [trial(tile("loop", 64, 64), 9.0, last, "final", "default")]
        trials += [trial(tile("loop", 64, 128), 6.0, last, "final"), trial(tile("row", 64, 64), 6.5, last, "final")]
        texts = texts_of(trials, runs)
        rows = db.parse_table(texts[f"{H200.id}/{OP}.csv"])
        assert {row.run for row in rows} == set(db.parse_runs(texts[f"{H200.id}/runs.csv"]))
        return [(row.config["kernel"], row.config["BLOCK_N"]) for row in rows]

    assert told(run(source=edited(row=None))) == [("loop", 128), ("row", 64), ("loop", 256), ("loop", 64)]
    assert told(run(source=edited(loop="000000000000"))) == [("loop", 128)]
