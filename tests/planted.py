"""Wrong kernels made from right ones: one textual change in an op's source, loaded beside the original."""

import importlib.util
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import guarded
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from op_laws import any_case, check_config, check_reference, pairwise

import fpk.kernels.attention._step
import fpk.kernels.gemm._mm
import fpk.op
from fpk.op import OPS, Op


@dataclass(frozen=True)
class Plant:
    """A change of `op`'s source: `old` stands there `times` times and becomes `new`."""

    op: str
    fault: str
    old: str
    new: str
    times: int = 1

    def __str__(self) -> str:
        return f"{self.op}-{self.fault.replace(' ', '_')}"


def source_of(op: Op) -> str:
    """The op's file, with the helpers of products and of attention in place of their import: plants may change both."""
    source = Path(inspect.getfile(op.launcher)).read_text()
    for module in (fpk.kernels.gemm._mm, fpk.kernels.attention._step):
        helpers = Path(inspect.getfile(module)).read_text()
        name = re.escape(module.__name__)
        source = re.sub(rf"from {name} import (\([^)]*\)|[^\n]*)\n", lambda _, text=helpers: text, source)
    return source


def change(source: str, plant: Plant) -> str:
    found = source.count(plant.old)
    assert found == plant.times, f"{plant}: expected {plant.times} of {plant.old!r} in the source, found {found}"
    return source.replace(plant.old, plant.new)


def load(name: str, source: str, folder: Path, monkeypatch) -> Op:
    """The op that `source` declares, registered apart: the real OPS and torch.ops.fpk do not see it."""
    module_name = f"planted_{name}_{folder.name}".replace("-", "_")
    path = folder / f"{module_name}.py"
    path.write_text(source)
    monkeypatch.setattr(fpk.op, "OPS", {n: o for n, o in OPS.items() if n != name})
    # a namespace of its own, alive as long as the op that it is registered in
    library = torch.library.Library(module_name, "FRAGMENT")
    monkeypatch.setattr(fpk.op, "LIBRARY", library)
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    op = fpk.op.OPS[name]
    op.planted_library = library
    assert op is not OPS[name] and op is getattr(module, name)
    return op


def first_violation(op: Op, examples: int) -> str | None:
    """What the laws say against `op` over its pairwise cases and a fixed sequence of examples; None if nothing."""
    found: list[str] = []

    def check(case, pick):
        try:
            check_reference(op, case)
            check_config(op, case, pick)
        except AssertionError as error:
            guarded.forget()
            found.append(f"{case}: {error}")

    for pick, case in enumerate(pairwise(op)):
        check(case, 7919 * pick)
        if found:
            return found[0]

    @settings(
        max_examples=examples, phases=[Phase.generate], derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=any_case(op), pick=st.integers(0, 10_000))
    def laws(case, pick):
        if not found:
            check(case, pick)

    laws()
    return found[0] if found else None
