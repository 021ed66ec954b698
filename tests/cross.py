"""Compile what ops would launch on GPUs that are not there, and check what came out.

    python tests/cross.py                 the default config of every op on every target
    python tests/cross.py --sample 3      and as many candidates, drawn by seed, on one target that changes daily
    python tests/cross.py --shipped       default configs of both cases, and every row of the database, on every target
    python tests/cross.py --hungry        candidates nearest to a target's limit of shared memory, by the op's account
    python tests/cross.py --all           every legal candidate on every target (hours)

For each launch: it compiles; its shared memory fits; a kernel meant for the matrix unit uses the instruction that its
target has for it; the default config spills no register; no register of an address or a descriptor is read before it
is written; what compilers were seen to get wrong (`compilers.py`) is not there. Prints a table; exits 1 if something is
wrong. Run with TRITON_INTERPRET unset.
"""

import argparse
import csv
import importlib
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import compilers
import triton
import unwritten
from capture import TARGETS, Launch, arguments, launches_of, representative

import fpk.kernels  # noqa: F401  declares every op
from fpk import db
from fpk.device import SHARED_LIMIT, Device, pretend
from fpk.op import OPS, Op
from fpk.tune.arguments import legal_candidates

MATRIX = re.compile(r"wgmma\.mma_async|tcgen05\.mma|mma\.sync|v_mfma|v_smfmac")
# the warp-group instructions want 64 rows of the output; below that Triton takes mma.sync
BEST = {"sm90": "wgmma.mma_async", "sm100": "tcgen05.mma"}
ROWS = Path(__file__).parents[1] / "autotune_db"
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass
class Record:
    """One kernel of one op, compiled for one target."""

    op: str
    kernel: str
    target: str
    config: dict[str, Any]
    default: bool
    shared: int = 0
    registers: int | None = None
    spills: int | None = None
    instructions: int = 0
    matrix: str = ""
    note: str = ""  # why there is nothing to compile
    wrong: list[str] = field(default_factory=list)

    def row(self) -> str:
        config = " ".join(f"{k}={v}" for k, v in self.config.items())
        verdict = "; ".join(self.wrong) or self.note or "ok"
        numbers = f"{self.shared:>7} {self.registers or '-':>4} {'-' if self.spills is None else self.spills:>4}"
        return f"{self.op:28} {self.kernel:26} {self.target:7} {numbers} {self.matrix or '-':16} {verdict}  [{config}]"


def resources(compiled: Any) -> tuple[int | None, int | None]:
    """(registers, bytes or registers spilled) as the assembler tells."""
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        numbers = {n: int(v) for n, v in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", text)}
        return numbers.get("vgpr_count"), numbers.get("vgpr_spill_count", 0) + numbers.get("sgpr_spill_count", 0)
    told = _tool("cuobjdump", "-res-usage", given=compiled.asm["cubin"])
    found = re.search(r"REG:(\d+) STACK:(\d+)", told)
    if not found:
        return None, None
    registers, stack = int(found[1]), int(found[2])
    if not stack:
        return registers, 0
    # a stack serves calls too, such as those of the exact division: only the assembler tells spills apart
    ptx = compiled.asm["ptx"]
    arch = re.search(r"\.target (sm_\w+)", ptx)
    assert arch is not None
    for assembler in ("ptxas-blackwell", "ptxas"):  # the first is the newer one, and may be absent
        told = _tool(assembler, "-v", f"-arch={arch[1]}", "-o", os.devnull, given=ptx.encode())
        stored = re.search(r"(\d+) bytes spill stores", told)
        if stored:
            return registers, int(stored[1])
    return registers, None


def count_instructions(text: str, amd: bool) -> int:
    """Machine instructions of the kernel, in the assembler's text or the disassembler's."""
    if amd:
        return len(re.findall(r"^\t(?:[vs]_|ds_|buffer_|global_|flat_|scratch_)\w+", text, re.M))
    return len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", text, re.M))


def _tool(name: str, *options: str, given: bytes) -> str:
    """What one of the tools inside triton's wheel says about a file; nothing if the wheel lacks it."""
    if not (NVIDIA_TOOLS / name).exists():
        return ""
    with tempfile.NamedTemporaryFile() as file:
        file.write(given)
        file.flush()
        done = subprocess.run([NVIDIA_TOOLS / name, *options, file.name], capture_output=True, text=True)
    return done.stdout + done.stderr


def _brief(error: Exception) -> str:
    """Kind and last words: a compiler quotes the whole kernel first."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}"


def inspect_launch(op: Op, launch: Launch, record: Record) -> None:
    source, options = launch.source(TARGETS[record.target])
    try:
        compiled = triton.compile(source, target=TARGETS[record.target], options=options)
    except Exception as error:  # whatever a compiler throws is this record's verdict
        record.wrong.append(f"does not compile: {_brief(error)}")
        return
    record.shared = compiled.metadata.shared
    record.registers, record.spills = resources(compiled)
    amd = "amdgcn" in compiled.asm
    text = compiled.asm["amdgcn"] if amd else _tool("cuobjdump", "-sass", given=compiled.asm["cubin"])
    record.instructions = count_instructions(text, amd)
    if not amd:
        record.wrong += [f"reads {found}" for found in unwritten.of_code(text)[:1]]
        record.wrong += [f"half a step: {found}" for found in compilers.halved(compiled.asm.get("ttgir", ""))[:1]]
        record.wrong += [f"decodes what it encoded: {found}" for found in compilers.undone(compiled.asm["ptx"])[:1]]
    found = sorted(set(MATRIX.findall(compiled.asm.get("ptx") or compiled.asm.get("amdgcn") or "")))
    record.matrix = " ".join(found)
    limit = SHARED_LIMIT[record.target]
    if record.shared > limit:
        record.wrong.append(f"shared memory {record.shared} > {limit}")
    if record.default and record.spills:
        record.wrong.append(f"spills {record.spills}")
    if any(k.fn is launch.fn and k.matrix for k in op.kernels.values()):
        if not found:
            record.wrong.append("no matrix instruction")
        best = BEST.get(record.target)
        tall = max(launch.kwargs.get("BLOCK_M", 0), launch.kwargs.get("BLOCK_N", 0) if launch.kwargs.get("SWAP") else 0)
        if best and record.default and tall >= 64 and best not in found:
            record.wrong.append(f"expected {best}")


def compile_config(op: Op, bound: dict, config: dict, target: str, default: bool, seen: set[str]) -> list[Record]:
    records = []
    for launch in launches_of(op, bound, config, target):
        variant = launch.variant(TARGETS[target])
        if variant in seen:
            continue
        seen.add(variant)
        record = Record(op.name, launch.name, target, config, default)
        inspect_launch(op, launch, record)
        records.append(record)
    return records


def check_op(name: str, target: str, candidates: int | None, seed: int = 0) -> list[Record]:
    """The default config of the op's representative cases on `target`, and some (None: all) candidates.

    Both cases, prefill and decode, for sm90 and where every candidate is asked for; elsewhere prefill.
    """
    op, seen, records = OPS[name], set[str](), []
    cases = representative(op)
    for case in cases if target == "sm90" or candidates is None else cases[:1]:
        try:
            bound = arguments(op, case, target)
            with pretend(target) as device, db.use(db.Empty()):  # its own: rows were measured as they are
                default = op.config_for(**bound)
        except NotImplementedError as error:
            records.append(Record(name, "-", target, {}, True, note=f"not here: {error}"))
            continue
        records += compile_config(op, bound, default, target, True, seen)
        others = chosen(op, bound, device, candidates, seed) if candidates != 0 else []
        for config in others:
            records += compile_config(op, bound, config, target, False, seen)
    return records


def check_shipped(name: str, target: str) -> list[Record]:
    """Default configs of all of the op's cases that differ, and every database row that is legal on `target`."""
    op, seen = OPS[name], set[str]()
    records = check_op(name, target, 0)
    for path in sorted(ROWS.glob(f"*/{name}.csv")):
        for row in db.parse_table(path.read_text()):
            try:
                bound = arguments(op, db.parse_case(row.case), target)
                with pretend(target) as device:
                    legal = op.is_legal(row.config, bound, device)
                if legal:
                    records += compile_config(op, bound, row.config, target, False, seen)
            except NotImplementedError:  # the default has said so
                continue
    return records


def summary(records: list[Record]) -> list[dict[str, Any]]:
    """One line for each kernel of an op on a target: the most that any of its configs takes.

    Spills apart for defaults, which may not, and for rows of the database, which were measured as they are, or tuned
    for another family.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if not record.note:
            groups.setdefault((record.op, record.kernel, record.target), []).append(record)
    return [
        dict(
            op=op, kernel=kernel, target=target, configs=len(found), registers=max(r.registers or 0 for r in found),
            spills=max((r.spills or 0 for r in found if r.default), default=0),
            spills_of_rows=max((r.spills or 0 for r in found if not r.default), default=0),
            shared=max(r.shared for r in found),
            instructions=max(r.instructions for r in found),
            matrix=" ".join(sorted({w for r in found for w in r.matrix.split()})),
            wrong=sum(bool(r.wrong) for r in found), triton=triton.__version__,
        )
        for (op, kernel, target), found in sorted(groups.items())
    ]  # fmt: skip


def check_hungry(name: str, target: str) -> list[Record]:
    """Of each kernel the legal candidate that is the first to go where there is less shared memory, if by a third."""
    op, seen, records = OPS[name], set[str](), []
    for case in representative(op):
        try:
            bound = arguments(op, case, target)
            with pretend(target) as device:
                legal, limit = legal_candidates(op, bound, device), device.shared_limit
        except NotImplementedError:
            continue
        found: dict[str, dict] = {}
        for share in (97, 90, 80, 67):
            with mock.patch.dict(SHARED_LIMIT, {target: limit * share // 100}):
                left = [c for c in legal if not op.is_legal(c, bound, device)]
            for config in left:
                found.setdefault(config.get("kernel", ""), config)
        for config in found.values():
            records += compile_config(op, bound, config, target, False, seen)
    return records


def chosen(op: Op, bound: dict, device: Device, candidates: int | None, seed: int) -> list[dict]:
    legal = legal_candidates(op, bound, device)[1:]
    if candidates is None or len(legal) <= candidates:
        return legal
    return random.Random(f"{op.name} {seed}").sample(legal, candidates)


def _task(task: tuple) -> list[Record]:
    try:
        named = {"shipped": check_shipped, "hungry": check_hungry}
        return named[task[2]](*task[:2]) if task[2] in named else check_op(*task)
    except Exception as error:  # one broken op must not hide the others
        return [Record(task[0], "-", task[1], {}, True, wrong=[_brief(error)])]


def tasks(ops: list[str], targets: list[str], everything: bool, sample: int, day: int, what: str = "") -> list[tuple]:
    if what:
        return [(op, target, what, day) for op in ops for target in targets]
    plan: list[tuple] = [(op, target, None if everything else 0, day) for op in ops for target in targets]
    if sample and not everything:
        rotating = {op: targets[(zlib.crc32(op.encode()) + day) % len(targets)] for op in ops}
        plan = [(op, t, sample if t == rotating[op] else c, day) for op, t, c, day in plan]
    return plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="names, comma separated; all")
    parser.add_argument("--targets", default=",".join(TARGETS), help="names, comma separated")
    parser.add_argument("--sample", type=int, default=0, help="candidates per op on its target of the day")
    parser.add_argument("--all", action="store_true", help="every legal candidate on every target")
    parser.add_argument("--shipped", action="store_true", help="default configs and the database's rows")
    parser.add_argument("--hungry", action="store_true", help="what asks for most shared memory")
    parser.add_argument("--csv", help="also write what each kernel takes at most here")
    parser.add_argument("--day", type=int, default=int(time.time() // 86400), help="repeats the draw of a day")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", help="also write the records here")
    parser.add_argument("--extra", help="a module that declares other ops: compile those alone")
    args = parser.parse_args()
    if args.extra:
        known = set(OPS)
        importlib.import_module(args.extra)
        args.ops = ",".join(n for n in OPS if n not in known)
    ops = args.ops.split(",") if args.ops else list(OPS)
    what = "shipped" if args.shipped else "hungry" if args.hungry else ""
    plan = tasks(ops, args.targets.split(","), args.all, args.sample, args.day, what)
    records: list[Record] = []
    print(f"day {args.day}: {len(plan)} pairs of op and target", flush=True)
    context = multiprocessing.get_context("fork")  # the modules are imported already
    with ProcessPoolExecutor(args.jobs, mp_context=context) as pool:
        for found in pool.map(_task, plan):
            records += found
            print(*(r.row() for r in found), sep="\n", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(r) for r in records], default=str))
    if args.csv:
        lines = summary(records)
        with open(args.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(lines)
    wrong = [r for r in records if r.wrong]
    print(f"{len(records)} kernels, {len(wrong)} wrong", *(r.row() for r in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
