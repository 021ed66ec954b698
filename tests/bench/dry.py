"""A bench walked through on a machine without a GPU: its own code at tiny sizes, over a GPU that seems to be there.

    python tests/bench/dry.py MODULE ARGUMENTS        MODULE's main() with these arguments

Tensors "on the GPU" are on the CPU and ops run their references, also where a bench launches a config; events tell the
wall clock, a graph replays nothing. So every name, argument and column is met here first. No time that comes out means
anything.
"""

import ast
import contextlib
import importlib
import inspect
import io
import os
import queue
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "parallel"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import seeming
import torch
from seeming import CPU

import fpk.device
import fpk.kernels
import fpk.parallel
from fpk import shapes
from fpk.op import Op

HERE = Path(__file__).resolve().parent
ROOT = str(HERE.parents[1])


def _once(call: Any) -> float:
    begun = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begun)


@contextlib.contextmanager
def _alone(size: int, main: Callable[..., None], *arguments: Any) -> Iterator[tuple[list[int], Any]]:
    """For world.processes: one rank, in this process."""
    answers: queue.Queue[Any] = queue.Queue()
    main(0, 1, *arguments, answers)
    yield [0], answers


def _one_answer(size: int, jobs: int, columns: Any, note: Callable[..., None]) -> dict[str, list[Any]]:
    """For the table of parallel layers: its first cell, as ranks would answer."""
    note("0", [dict(equal=True, error=0.0)])
    return {"0": [dict(equal=True, error=0.0)]}


class _Tiny(torch.nn.Module):
    """As much of a language model as a study asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(64, 64)
        self.mlp = torch.nn.Module()
        for name, out, into in (("gate", 256, 64), ("up", 256, 64), ("down", 64, 256)):
            self.mlp.add_module(f"{name}_proj", torch.nn.Linear(into, out, bias=False))
        self.mlp.forward = self.product
        self.lm_head = torch.nn.Linear(64, 64, bias=False)

    def product(self, x: Any) -> Any:
        m = self.mlp
        return m.down_proj(torch.nn.functional.silu(m.gate_proj(x)) * m.up_proj(x))

    def forward(self, input_ids: Any, **_: Any) -> Any:
        return types.SimpleNamespace(logits=self.lm_head(self.mlp(self.embed(input_ids))))


def _tiny_model() -> Any:
    from fpk.study import measure, model, online, text

    tiny, tokens = _Tiny().bfloat16().requires_grad_(False), torch.arange(16).view(1, 16)
    subject = model.Subject("tiny", tiny, lambda words: [0], "")
    found = measure.perplexity(tiny, tokens)
    return online.Baseline(subject, text.Text("", tokens, ""), found, tiny(tokens).logits)


def _first_cases() -> list[Any]:
    from fpk.study import experts, online

    return [online.Case("experts", make) for make in experts.METHODS[1:3]]


# constants of modules that say how large things are
SMALL: dict[str, dict[str, Any]] = {
    "tables": dict(SIZES=((16, 256),), limits=lambda: (1e6, 1.0)),
    "turns": dict(L2_BYTES=1 << 10),
    "moe_stages": dict(MODELS=dict.fromkeys(("mixtral_8x7b", "deepseek_v3", "gpt_oss_120b"), (4, 2, 128, 128))),
    "attention": dict(
        DECODE=[("small", dict(H=1, group=2, D=32), 2, 64)], PREFILL=[("small", dict(H=1, group=2, D=32), 1, 32)],
        WRITE=[4], read_ceiling=lambda: 1e12,
    ),
    "ep": dict(E=4, TOP_K=2, H=128, I=128, T=4, CALLS=1, ROUNDS=1,
               join=lambda *a, device, **k: fpk.parallel.join(*a, device=CPU, **k),
               bits=lambda t: torch.zeros(1)),  # a graph that replays nothing does not follow the routing
    "dispatch": dict(RUNS=2, SHORT=2,
        fastest=lambda call, *_: _once(call), COLD=("quantize_fp8_token",), TOKENS=(1, 24), COLUMNS=(1536,),
        DEPTHS=(2304,), HITS={"quantize_fp8_token": dict(M=4, K=64)},
    ),
    "moe_method": dict(CALLS=1),
    "world": dict(processes=lambda *a: _alone(*a)),
    "loading": dict(NAMES=["Fp8PtpcOnlineMoEMethod"], SIZES=(4, 128, 128)),
    "trust.on_gpu": dict(CASES=1, TIMES=2, NOISE=16),
    "table": dict(results=lambda *a: _one_answer(*a), LINEAR={}, EXPERTS={}),
    "fpk.study.online": dict(baseline=lambda *a: _tiny_model(), cases=lambda: _first_cases()),
    "packed_products": dict(LAYERS=((64, 128),), FEW=(1,), MANY=(2,)),
}  # fmt: skip


def _reference(op: Any, bound: dict[str, Any], config: Any, device: Any = None) -> Any:
    return op.reference(**bound)


@contextlib.contextmanager
def seeming_gpu() -> Iterator[None]:
    """torch.cuda as if a GPU were there, and sizes of layers that a CPU multiplies in a moment."""
    real = fpk.device.of
    layers = {name: (128, 256) for name in shapes.LINEAR_LAYERS}
    with seeming.gpu(), contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(fpk.device, "of", lambda device: real(seeming.there(device))))
        stack.enter_context(mock.patch.dict(shapes.LINEAR_LAYERS, layers))
        stack.enter_context(mock.patch.object(torch, "set_num_threads", lambda n: None))
        stack.enter_context(mock.patch.object(Op, "_launch_on_device", _reference))
        yield


def small(module: types.ModuleType) -> None:
    for name, value in SMALL.get(module.__name__, {}).items():
        if not hasattr(module, name):
            raise AttributeError(f"{module.__name__} has no {name} any more: mend SMALL in dry.py")
        setattr(module, name, value)


def call(name: str, arguments: Sequence[str]) -> int:
    """A module's `main`, or `module:function`, as its command line calls it."""
    name, _, function = name.partition(":")
    with seeming_gpu(), mock.patch.object(sys, "argv", [name, *arguments]):
        for other in ("turns", "tables", "moe_stages", "world"):
            small(importlib.import_module(other))
        module = importlib.import_module(name)
        small(module)
        main = getattr(module, function or "main")
        return main(*arguments if inspect.signature(main).parameters else ()) or 0


def collect(ids: Sequence[str]) -> int:
    """Tests that exist and can be imported; the modes of `seeming_gpu` would only disturb them."""
    import pytest

    os.chdir(ROOT)
    return int(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *ids]))


def imports(path: str) -> int:
    """What a notebook imports is there; the tests run notebooks at small sizes."""
    tree = ast.parse(Path(path).read_text())
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(found, []), path, "exec"), {})
    return 0 if found else 1


def main(words: Sequence[str]) -> int:
    name, *arguments = words
    if name == "pytest":
        return collect(arguments)
    return imports(*arguments) if name == "imports" else call(name, arguments)


# ---- all of a plan, in processes that share what is imported


def walk(plan: Sequence[Any], out: Path, jobs: int = 2, limit_s: float = 120.0) -> int:
    """Every measurement's `dry` words; OUT/<name>/stdout.txt has what it printed. 1 if one fails."""
    waiting, running, failed = list(plan), {}, []
    while waiting or running:
        while waiting and len(running) < jobs:
            m = waiting.pop(0)
            folder = out / m.name
            folder.mkdir(parents=True, exist_ok=True)
            for old in folder.glob("*.csv"):
                old.unlink()
            sys.stdout.flush()
            pid = os.fork()
            if pid == 0:
                _child(m, folder)
            running[pid] = (m, folder, time.monotonic())
        for pid, (m, folder, begun) in list(running.items()):
            if time.monotonic() - begun > limit_s:
                os.kill(pid, 9)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del running[pid]
                said = "well" if status == 0 else f"status {os.waitstatus_to_exitcode(status)}"
                empty = [f.name for f in folder.glob("*.csv") if len(f.read_text().splitlines()) < 2]
                said = f"no rows in {', '.join(empty)}" if status == 0 and empty else said
                print(f"{m.name}: {said}, {time.monotonic() - begun:.1f} s", flush=True)
                if said != "well":
                    failed.append(m.name)
                    print((folder / "stdout.txt").read_text(errors="replace")[-2000:], flush=True)
        time.sleep(0.02)
    print(
        f"{len(failed)} of {len(plan)} fail: {', '.join(failed)}" if failed else f"all {len(plan)} walked", flush=True
    )
    return 1 if failed else 0


def _child(m: Any, folder: Path) -> None:
    """Does not return."""
    code = 1
    try:
        log = os.open(folder / "stdout.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = io.TextIOWrapper(os.fdopen(1, "wb", 0, closefd=False), write_through=True)
        sys.stderr = sys.stdout
        torch.set_num_threads(1)
        words = [w.replace("{out}", str(folder)).replace("{bench}", str(HERE)).replace("{root}", ROOT) for w in m.dry]
        code = main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc(file=sys.stdout)
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
