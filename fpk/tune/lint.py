"""What must hold for every shipped row, checked without a GPU."""

import contextlib
import functools
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fpk import db
from fpk.device import Device, pretend, pretend_triton
from fpk.op import OPS, Op
from fpk.tune.arguments import outline
from fpk.tune.sources import Sources, gone
from fpk.tune.worker import Worker

_ID = re.compile(r"(?P<vendor>[a-z]+)-(?P<name>.+)-(?P<arch>sm\d+|gfx\w+)-(?P<sm>\d+)(?:-(?P<mig>mig.+))?")


def device_of(gpu: str) -> Device:
    """The device that a database directory stands for."""
    parts = _ID.fullmatch(gpu)
    if parts is None:
        raise ValueError(f"autotune_db: expected a directory like nv-h200-sm90-132, got {gpu!r}")
    return Device(
        arch=parts["arch"],
        name=parts["name"],
        vendor=parts["vendor"],
        sm_count=int(parts["sm"]),
        mig=parts["mig"] or "",
    )


def lint(source: db.Source) -> list[str]:
    """Problems of all tables of a source, one line each; [] if it is clean."""
    problems = []
    for gpu in source.gpus():
        try:
            device = device_of(gpu)
        except ValueError as error:
            problems.append(str(error))
            continue
        try:
            runs = db.parse_runs(source.read(gpu, "runs.csv") or "")
        except ValueError as error:
            problems.append(f"{gpu}/{error}")
            runs = {}
        for file in source.files(gpu):
            if file == "runs.csv":
                continue
            text = source.read(gpu, file) or ""
            try:
                problems += [f"{gpu}/{file}: {p}" for p in _lint_table(file.removesuffix(".csv"), text, device, runs)]
            except ValueError as error:
                problems.append(f"{gpu}/{file}: {error}")
    return problems


def _lint_table(name: str, text: str, device: Device, runs: dict[str, db.Run]) -> Iterator[str]:
    rows = db.parse_table(text)
    if db.dump_table(rows) != text:
        yield "expected rows sorted and spelled as `fpk db export` writes them"
    if name not in OPS:
        yield f"expected a table of an op, got {name!r}"
        return
    op = OPS[name]
    blocks: dict[Any, list[db.Row]] = defaultdict(list)
    for row in rows:
        blocks[frozenset(row.key.items())].append(row)
    times: dict[float, set[Any]] = defaultdict(set)
    for key, block in blocks.items():
        yield from (f"{_spell(block[0])}: {p}" for p in _lint_block(op, block, device, runs))
        times[tuple(row.us for row in block)].add(key)  # type: ignore[index]
    for us, keys in times.items():
        if len(keys) > 1 and len(us) > 2:  # type: ignore[arg-type]
            yield f"{len(keys)} keys have the same times {us}: copied rows?"


def _lint_block(op: Op[..., Any], block: list[db.Row], device: Device, runs: dict[str, db.Run]) -> Iterator[str]:
    known: dict[str, Any] = {}
    ranks = [row.rank for row in block]
    if ranks[0] not in (0, 1) or ranks[1:] != list(range(2, len(block) + 1)):
        yield f"expected ranks 1, 2, ... (or 0, 2, ...: the default stands), got {ranks}"
    if [row.us for row in block] != sorted(row.us for row in block):
        yield "expected times in order of rank"
    for row in block:
        run = runs.get(row.run)
        if run is None:
            yield f"run {row.run} is not in runs.csv"
        elif (run.op, run.gpu) != (op.name, device.id):
            yield f"run {row.run} measured {run.op} on {run.gpu}"
        margin = row.default_us * (1 - row.noise_percent / 100)
        if row.rank == 1 and not 0 < row.us < margin:
            yield f"expected less than the default's {row.default_us} us by more than the noise, got {row.us} us"
        if row.shared_bytes > device.shared_limit:
            yield f"needs {row.shared_bytes} bytes of shared memory, {device.arch} has {device.shared_limit}"
        yield from lint_config(op, row, device, known, run.triton if run else "")


def lint_config(
    op: Op[..., Any], row: db.Row, device: Device, known: dict[str, Any], triton: str = ""
) -> Iterator[str]:
    """Can a call look this row up, and would it run? `case` gives the arguments, the op's own functions the answer.

    known: arguments by case, filled here: rows of a key share theirs. triton: the version it was measured with; some
    kernels are legal on one version only, and look-ups elsewhere pass their rows over.
    """
    if row.case not in known:
        bound = outline(op, db.parse_case(row.case))
        with pretend(device):
            known[row.case] = bound, op.key(**bound)
    bound, key = known[row.case]
    if key != row.key:
        yield f"unreachable: its case has key {key}"
        return
    try:
        op.validate_config(row.config)
    except ValueError as error:
        yield f"{error}: a kernel that is gone, no look-up can use the row" if gone(op, row.config) else str(error)
        return
    gluon = getattr(op.kernel_of(row.config).fn, "is_gluon", None)
    launch = {"num_warps"} if gluon and gluon() else {"num_warps", "num_stages"}  # Gluon kernels pipeline by hand
    with pretend(device), pretend_triton(triton) if triton else contextlib.nullcontext():
        named = [c for c in op.configs(**bound) if c.get("kernel") == row.config.get("kernel")]
    missing = launch.intersection(*named) - row.config.keys()  # nor do kernels whose candidates do not name it
    if sum(kernel.named for kernel in op.kernels.values()) > 1 and "kernel" not in row.config:
        missing.add("kernel")
    if missing:
        yield f"expected every launch field, missing {', '.join(sorted(missing))}"
        return
    kernel = op.kernel_of(row.config)
    if kernel.targets and device.arch not in kernel.targets:
        yield f"kernel {row.config.get('kernel')} is not for {device.arch}"
        return
    try:
        with pretend(device), pretend_triton(triton) if triton else contextlib.nullcontext():
            legal, sound = op.is_legal(row.config, bound, device), op.is_sound(row.config, bound)
    except KeyError as error:
        yield f"expected every launch field, missing {error}"
        return
    if not legal:
        yield f"not legal for its own case: {row.config}"
    elif not sound:
        yield f"passed over by look-ups, no candidate has these fields: {row.config}"


def compile_shipped(source: db.Source, sample: int = 0, seed: int = 0) -> list[str]:
    """Cross-compile the distinct configs of a source for their GPUs (a seeded `sample` of them, 0: all); problems.

    Those that are legal with another version of triton only are left out. Each runs in a worker of its own kind: the
    caller may have imported triton for interpreting.
    """
    jobs: dict[tuple[str, str, str], db.Row] = {}
    runs = {gpu: db.parse_runs(source.read(gpu, "runs.csv") or "") for gpu in source.gpus()}
    for gpu in source.gpus():
        for file in source.files(gpu):
            if file != "runs.csv":
                for row in db.parse_table(source.read(gpu, file) or ""):
                    jobs.setdefault((gpu, file.removesuffix(".csv"), repr(sorted(row.config.items()))), row)
    chosen = sorted(jobs)
    if sample and len(chosen) > sample:
        chosen = sorted(random.Random(seed).sample(chosen, sample))
    problems = []
    for gpu in sorted({gpu for gpu, *_ in chosen}):
        options = asdict(device_of(gpu))
        with Worker("fpk.tune.executor:static_filter", options, {"TRITON_INTERPRET": None}) as worker:
            for where in (w for w in chosen if w[0] == gpu):
                row = jobs[where]
                if _of_another_triton(OPS[where[1]], row, device_of(gpu), runs[gpu]):
                    continue
                reply = worker.call("compile", where[1], db.parse_case(row.case), row.config, limit_s=120)
                if reply.status != "ok":
                    problems.append(f"{gpu}/{where[1]}: {_spell(row)}: {reply.status}: {reply.detail}")
    return problems


def _of_another_triton(op: Op[..., Any], row: db.Row, device: Device, runs: dict[str, db.Run]) -> bool:
    """Does the version of triton that measured this row run it, and this one not?"""
    if row.run not in runs:
        return False
    if gone(op, row.config):
        return False
    bound = outline(op, db.parse_case(row.case))
    with pretend(device):
        here = op.is_legal(row.config, bound, device)
        with pretend_triton(runs[row.run].triton):
            return not here and op.is_legal(row.config, bound, device)


def _spell(row: db.Row) -> str:
    return " ".join(f"{n}={v}" for n, v in row.key.items())


def stale(source: db.Source, versions: dict[str, str]) -> list[tuple[str, str, db.Row, str]]:
    """(gpu, op, row, why) of rows whose own kernel was another one, or the minor version of torch or triton.

    versions: "triton" and "torch" of this process.
    """
    found = []
    sources = functools.cache(lambda name: Sources(OPS[name]))
    for gpu in source.gpus():
        runs = db.parse_runs(source.read(gpu, "runs.csv") or "")
        for file in source.files(gpu):
            name = file.removesuffix(".csv")
            if name not in OPS:
                continue
            for row in db.parse_table(source.read(gpu, file) or ""):
                why = staleness(runs.get(row.run), row.config, sources(name), versions)
                if why:
                    found.append((gpu, name, row, why))
    return found


def staleness(run: db.Run | None, config: db.Config, sources: Sources, versions: dict[str, str]) -> str:
    """Why a row of this run and config may be out of date; "" if it is not."""
    if run is None:
        return "its run is unknown"
    changed = sources.changed(run.source, config)
    reasons = [changed] if changed else []
    for package in ("triton", "torch"):
        then, now = getattr(run, package), versions[package]
        if _minor(then) != _minor(now):
            reasons.append(f"{package} {then}, now {now}")
    return "; ".join(reasons)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def untried(source: db.Source) -> list[tuple[str, str, str, list[str]]]:
    """(gpu, op, run, kernels) of runs that kernels came after: rows stand, but those were never tried there."""
    found = []
    for gpu in source.gpus():
        for run in db.parse_runs(source.read(gpu, "runs.csv") or "").values():
            if run.op in OPS and (names := Sources(OPS[run.op]).untried(run.source, device_of(gpu).arch)):
                found.append((gpu, run.op, run.run, names))
    return found
