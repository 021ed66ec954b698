"""Mutation testing of fpk's kernels: wrong versions made by rule, and whether the laws notice.

    PYTHONPATH=tests python -m trust.mutate --out results/mutants.csv

Each mutant lives in a process of its own, forked from one that has imported everything: it may crash or never end. It
is *killed* if a law of an op that uses the function says so (`by` names the law, or how the process died); *invalid* if
it raises an error instead, as a wrong shape does, which nobody could ship; *open* while only the quickest law has seen
it (`--thorough 0`; `--survivors` goes on); else it has *survived*, and a person writes the reason into the table's last
column, where later runs keep it; and *equivalent* for the verdict, if the change cannot be seen from outside.
"""

import argparse
import csv
import functools
import json
import linecache
import os
import random
import resource
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest  # noqa: F401  the interpreter's fixes, every op
import guarded
import pytest
from op_laws import (
    ample,
    check_config,
    check_corners,
    check_far_apart,
    check_many_tiles,
    check_reference,
    check_strides,
    check_without_fp8_units,
    middle,
)
from planted import first_violation
from triton.runtime.interpreter import FunctionRewriter, InterpretedFunction

from fpk.op import OPS, Op
from trust.mutations import Mutation, mutated, mutations

COLUMNS = ("module", "function", "rule", "old", "new", "number", "verdict", "by", "reason")
EXAMPLES = 25
USERS = 6  # ops whose laws a shared function has to pass
SECONDS = 90  # of processor time for one op's laws
TESTS = Path(__file__).parents[1]
FAMILIES = {
    "quant": ("test_quant.py", "test_microscale.py"), "pack": ("test_pack.py", "test_packed.py"),
    "gemm": ("test_gemm.py", "test_packed.py"), "moe": ("test_moe.py", "test_activation.py"),
    "attention": ("test_attention.py", "test_prefill.py"),
}  # fmt: skip


# ---- which function belongs to which op ----------------------------------------------------------------------------
def jitted() -> dict[tuple[str, str], InterpretedFunction]:
    """Every jitted function of fpk.kernels, by module and name."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("fpk.kernels"):
            for value in vars(module).values():
                if isinstance(value, InterpretedFunction) and value.fn.__module__ == name:
                    found[name, value.fn.__name__] = value
    return found


def reached(op: Op) -> dict[tuple[str, str], int]:
    """Jitted functions that the op's launcher can come to where the interpreter runs it, and over how many others."""
    elsewhere = [k.fn for k in op.kernels.values() if not k.interpretable]
    seen = {id(fn) for fn in elsewhere} | {id(getattr(fn, "fn", None)) for fn in elsewhere}
    found: dict[tuple[str, str], int] = {}
    waiting: list = [(value, 0) for value in (op.launcher, *(k.fn for k in op.kernels.values()))]
    while waiting:
        value, steps = waiting.pop(0)
        if id(value) in seen:
            continue
        if isinstance(value, InterpretedFunction):
            found.setdefault((value.fn.__module__, value.fn.__name__), steps)
            value = value.fn
        function = getattr(value, "__wrapped__", value)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if not function.__module__.startswith(("fpk.kernels", "fpk.op")):
            continue
        codes = [function.__code__]
        for code in codes:
            codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        names = {n for code in codes for n in code.co_names}
        for value in (function.__globals__.get(n) for n in names):
            waiting += [(v, steps + 1) for v in (value.values() if isinstance(value, dict) else [value])]
    return found


def users() -> dict[tuple[str, str], list[Op]]:
    """Up to USERS ops that use each function: its own first, then those whose kernels call it themselves."""
    found: dict[tuple[str, str], list[Op]] = {key: [] for key in jitted()}
    steps: dict[tuple[str, tuple[str, str]], int] = {}
    for op in OPS.values():
        for key, distance in reached(op).items():
            found[key].append(op)
            steps[op.name, key] = distance
    for (module, function), ops in found.items():
        taken: dict[str, int] = {}  # families take turns
        for op in sorted(ops, key=lambda op: op.name):
            family = op.launcher.__module__.split(".")[2]
            taken[op.name] = sum(o.launcher.__module__.split(".")[2] == family for o in ops if o.name in taken)
        key = module, function
        ops.sort(key=lambda op: (op.launcher.__module__ != module, steps[op.name, key], taken[op.name], op.name))
        del ops[USERS:]
    return found


# ---- one mutant ----------------------------------------------------------------------------------------------------
def put(mutation: Mutation, folder: Path) -> None:
    """Make this process's kernels use the mutated function."""
    function = jitted()[mutation.module, mutation.function]
    path = folder / f"{mutation.function}.py"
    source = mutated(mutation, function.fn)
    path.write_text(source)
    linecache.checkcache(str(path))
    scope: dict[str, Callable] = {}
    exec(compile(source, str(path), "exec"), function.fn.__globals__, scope)
    function.fn = scope[mutation.function]
    function.rewriter = FunctionRewriter(function.fn, **function.kwargs)


@functools.cache
def in_order(name: str) -> list[dict]:
    return ample(OPS[name])


def pairs(op: Op) -> None:
    """The cheapest law that kills most: cases that are neither small nor large first."""
    for pick, case in enumerate(in_order(op.name)):
        check_reference(op, case)
        check_config(op, case, 7919 * pick)


def at_random(op: Op) -> None:
    violation = first_violation(op, EXAMPLES)
    assert violation is None, violation


def without_fp8_units(op: Op) -> None:
    for case in (middle(op), {n: tuple(v)[-1] for n, v in op.domain.items()}):
        check_without_fp8_units(op, case)


def family(op: Op) -> None:
    """The laws of the op's family, each of them a test."""
    files = [str(TESTS / "laws" / f) for f in FAMILIES[op.launcher.__module__.split(".")[2]]]
    files.append(str(TESTS / "trust" / "test_gaps.py"))
    code = pytest.main(["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *files])
    assert code is not pytest.ExitCode.TESTS_FAILED, "a law of the family fails"
    if code is not pytest.ExitCode.OK:
        raise RuntimeError(f"pytest: {code!r}")


LAWS = dict(
    corners=check_corners,  # quick ones first
    tiles=check_many_tiles,
    pairs=pairs,
    strides=check_strides,
    far_apart=check_far_apart,
    no_fp8_units=without_fp8_units,
    random=at_random,
)


def attack(ops: list[Op], thorough: int) -> tuple[str, str]:
    """(verdict, by) of the laws of these ops, in this process.

    thorough: 0 for the pairs of the first op alone, 1 for all laws of all ops, 2 for those of their families too.
    """
    plan = [(name, law, op) for name, law in LAWS.items() for op in ops] if thorough else [("pairs", pairs, ops[0])]
    if thorough > 1:
        firsts = {op.launcher.__module__.split(".")[2]: op for op in reversed(ops)}
        plan += [("family", family, op) for op in firsts.values()]
    for name, law, op in plan:
        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        limit = spent + SECONDS * (10 if name == "family" else 1)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            law(op)
        except AssertionError as error:
            how = "memory" if "behind its tensor" in str(error) or "outside its" in str(error) else "values"
            return "killed", f"{op.name} {name} {how}"
        except BaseException as error:  # whatever the kernel's body raises
            return "invalid", f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
    return "survived" if thorough else "open", ""


class Installing:
    """What guarded.install asks of pytest's monkeypatch; the process ends before anything must be undone."""

    setattr = staticmethod(setattr)


def judge(mutation: Mutation | None, ops: list[Op], thorough: int, answer: Path) -> None:
    """In the forked child: leave the verdict in `answer`, then end without cleaning up. None: kernels as they are."""
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        guarded.install(Installing)
        if mutation is not None:
            put(mutation, Path(folder))
        answer.write_text(json.dumps(attack(ops, thorough)))
    os._exit(0)


def verdicts(
    plan: Iterable[tuple[Mutation | None, list[Op]]], jobs: int = 1, thorough: int = 2
) -> Iterator[tuple[Any, str, str]]:
    """(mutation, verdict, by) of each, as they come; of kernels as they are (None), the first of the ops."""
    running: dict[int, tuple[Any, Path]] = {}
    waiting = iter(plan)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 << 30):
            following = next(waiting, None) if len(running) < jobs else None
            if following is not None:
                answer = Path(folder, str(number))
                in_order(following[1][0].name)  # once, not in every child
                child = os.fork()
                if child == 0:
                    try:
                        judge(*following, thorough, answer)
                    finally:
                        os._exit(1)
                running[child] = (following[0] or following[1][0], answer)
                continue
            if not running:
                return
            child, status = os.wait()
            mutation, answer = running.pop(child)
            if answer.exists():
                yield mutation, *json.loads(answer.read_text())
            elif os.WIFSIGNALED(status):
                died = signal.Signals(os.WTERMSIG(status)).name
                yield mutation, "killed", "does not end" if died == "SIGXCPU" else f"crash {died}"
            else:
                yield mutation, "invalid", f"exit status {os.waitstatus_to_exitcode(status)}"


def unsound(jobs: int) -> dict[str, str]:
    """Ops whose kernels fail the laws as they are, and why: they would kill every mutant."""
    judged = verdicts(((None, [op]) for op in OPS.values()), jobs, 1)
    return {op.name: by for op, verdict, by in judged if verdict != "survived"}


# ---- choice and table ----------------------------------------------------------------------------------------------
def all_mutations(of: Iterable[tuple[str, ...]] | None = None) -> dict[tuple[str, str], list[Mutation]]:
    """Of every function, or of those that these ids are about."""
    wanted = None if of is None else {id[:2] for id in of}
    return {
        key: mutations(key[0], function.fn) for key, function in jitted().items() if wanted is None or key in wanted
    }


def drawn(per_file: int, per_helper: int, seed: int) -> list[Mutation]:
    """So many mutants of each op's file and each helper function, rules taking turns."""
    rng = random.Random(seed)
    groups: dict[tuple[str, ...], list[Mutation]] = {}
    for (module, function), found in all_mutations().items():
        shared = module.rpartition(".")[2].startswith("_")
        groups.setdefault((module, function) if shared else (module,), []).extend(found)
    chosen = []
    for key, found in groups.items():
        by_rule: dict[str, list[Mutation]] = {}
        for mutation in rng.sample(found, len(found)):
            by_rule.setdefault(mutation.rule, []).append(mutation)
        rules = rng.sample(list(by_rule.values()), len(by_rule))
        turns = [rule[turn] for turn in range(len(found)) for rule in rules if turn < len(rule)]
        chosen += turns[: per_file if len(key) == 1 else per_helper]
    return chosen


def read_table(path: Path) -> dict[tuple[str, ...], dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {tuple(row[c] for c in COLUMNS[:6]): row for row in csv.DictReader(file)}


def write_table(path: Path, rows: Iterable[dict[str, str]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: tuple(row[c] for c in COLUMNS[:6])))


def recheck(
    known: dict[tuple[str, ...], dict[str, str]],
    using: dict[tuple[str, str], list[Op]],
    count: int,
    seed: int,
    jobs: int,
) -> int:
    """Judge some of the table's killed mutants again, of as many modules as there are; 1 if one lives now.

    Those whose text has changed since are passed over; what dies of itself proves nothing and is too.
    """
    values = {key for key, row in known.items() if row["verdict"] == "killed" and row["by"].endswith("values")}
    there = [m for found in all_mutations(values).values() for m in found if m.id in values]
    rng = random.Random(seed)
    by_module: dict[str, list[Mutation]] = {}
    for mutation in rng.sample(there, len(there)):
        by_module.setdefault(mutation.module, []).append(mutation)
    modules = rng.sample(list(by_module.values()), len(by_module))
    chosen = [found[turn] for turn in range(count) for found in modules if turn < len(found)][:count]
    caught = 0
    for mutation, verdict, by in verdicts(((m, using[m.module, m.function]) for m in chosen), jobs, 1):
        caught += verdict == "killed"
        print(f"{verdict} {by}: {mutation}")
    print(f"{caught} of {len(chosen)} caught")
    return 0 if caught == len(chosen) == count else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-file", type=int, default=5, help="mutants of each op's file")
    parser.add_argument("--per-helper", type=int, default=1, help="mutants of each function that ops share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/mutants.csv"))
    parser.add_argument("--only", default="", help="modules that contain this text")
    parser.add_argument("--survivors", action="store_true", help="judge the table's survivors again, nothing else")
    parser.add_argument("--resume", action="store_true", help="keep the table's verdicts, judge what is not in it")
    parser.add_argument("--recheck", type=int, default=0, help="only so many of the killed ones; exit 1 if one lives")
    parser.add_argument("--baseline", action="store_true", help="leave ops out that fail their laws as they are")
    parser.add_argument("--thorough", type=int, default=2, choices=(0, 1, 2), help="which laws, see `attack`")
    args = parser.parse_args()
    known, using = read_table(args.out), users()
    if args.recheck:
        sys.exit(recheck(known, using, args.recheck, args.seed, args.jobs))
    left_out = unsound(args.jobs) if args.baseline else {}
    print(f"without {left_out}", flush=True)
    using = {key: [op for op in ops if op.name not in left_out] for key, ops in using.items()}
    if args.survivors:
        left = {key for key, row in known.items() if row["verdict"] in ("survived", "open")}
        chosen = [m for found in all_mutations(left).values() for m in found if m.id in left]
    else:
        chosen = drawn(args.per_file, args.per_helper, args.seed)
    chosen = [m for m in chosen if args.only in m.module]
    rows = dict(known) if args.survivors or args.only or args.resume else {}
    if args.resume:
        chosen = [m for m in chosen if m.id not in known]
    start = time.monotonic()
    plan = [(m, using[m.module, m.function]) for m in chosen if using[m.module, m.function]]
    for count, (mutation, verdict, by) in enumerate(verdicts(plan, args.jobs, args.thorough), 1):
        old = known.get(mutation.id, {})
        reason = old.get("reason", "") if verdict in ("survived", "open") else ""
        if reason and old["verdict"] == "equivalent":
            verdict = "equivalent"
        rows[mutation.id] = dict(zip(COLUMNS, (*mutation.id, verdict, by, reason), strict=True))
        what = f"{mutation.module}.{mutation.function} {mutation.rule}: {mutation.old} -> {mutation.new}"
        print(f"{count}/{len(plan)} {time.monotonic() - start:.0f}s {verdict} {by}: {what}"[:400], flush=True)
        write_table(args.out, rows.values())
    kinds = ("killed", "survived", "open", "equivalent", "invalid")
    counts = {v: sum(r["verdict"] == v for r in rows.values()) for v in kinds}
    valid = counts["killed"] + counts["survived"]
    print(f"{counts}: {counts['killed'] / max(valid, 1):.1%} of {valid} killed")


if __name__ == "__main__":
    main()
