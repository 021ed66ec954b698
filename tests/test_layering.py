"""Who imports whom, read from the source: the layer table of the package, and the rules of an op file."""

import ast
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fpk
from fpk.op import OPS

PACKAGE = Path(fpk.__file__).parent
ROOT = PACKAGE.parent
STDLIB = sys.stdlib_module_names
BASE = {"db", "check", "formats", "shapes", "samples", "device", "_parsing"}


@dataclass(frozen=True)
class Layer:
    """What modules of one layer may import: others of fpk, and beside the standard library."""

    own: frozenset[str]
    other: frozenset[str] | None  # None: anything


def _layer(own: str, other: str | None) -> Layer:
    return Layer(frozenset(own.split()), None if other is None else frozenset(other.split()))


ALL_BELOW_NN = "kernels op api methods nn " + " ".join(BASE)
LAYERS = {
    "cli": _layer("cli study tune " + ALL_BELOW_NN, None),
    "study": _layer("study tune " + ALL_BELOW_NN, None),
    "nn": _layer(
        "nn report methods api kernels op check formats shapes samples device", "torch transformers safetensors"
    ),
    "report": _layer("", "pandas"),
    "parallel": _layer("parallel api kernels op formats check device db", "torch"),
    "methods": _layer("methods api kernels op formats check device", "torch safetensors"),
    "api": _layer("api kernels op formats check device", "torch"),
    "tune": _layer("tune kernels op " + " ".join(BASE), None),
    "kernels": _layer("kernels op " + " ".join(BASE), "torch triton"),
    "op": _layer("op " + " ".join(BASE), "torch"),
    **{name: _layer(" ".join(BASE), "torch") for name in BASE},
    "db": _layer(" ".join(BASE), "torch platformdirs"),
}
# private modules that serve one layer only
PRIVATE = {
    "_db_": "db", "_dispatch": "op", "_space": "op",
    "cli_": "cli", "__main__": "cli", "_moe": "api", "_pairs": "api", "_shuffled": "api",
    "_report": "report", "_linear": "nn",
    "_calibration": "nn", "_saving": "nn", "checkpoint": "nn", "_experts": "nn", "hf": "nn",
}  # fmt: skip

FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = [f for f in FILES if f != PACKAGE / "__init__.py"]
OP_FILES = [f for f in FILES if f.parent.parent.name == "kernels" and not f.name.startswith("_")]


def spell(path: Path) -> str:
    return str(path.relative_to(ROOT))


def layer_of(parts: tuple[str, ...]) -> str:
    """The layer of a module inside fpk, from its dotted parts without `fpk`."""
    name = parts[0].removesuffix(".py")
    for prefix, layer in PRIVATE.items():
        if name.startswith(prefix):
            return layer
    return name


def _public(name: str) -> str:
    """The module that `fpk.name` comes from."""
    return "fpk.kernels" if name == "OPS" else fpk._NAMES.get(name, f"fpk.{name}")


def imports(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names) of every import, also those inside functions, and of `import_module` with a literal."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names if alias.name != "fpk")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fpk":
            yield _public(node.attr), ()
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{spell(path)}:{node.lineno}: relative import"
            names = tuple(alias.name for alias in node.names)
            if node.module == "fpk":
                yield from ((_public(name), ()) for name in names)
            else:
                yield node.module or "", names
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            yield from ((a.value, ()) for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))


@pytest.mark.parametrize("path", MODULES, ids=spell)
def test_imports_only_what_its_layer_may(path):
    layer = LAYERS[layer_of(path.relative_to(PACKAGE).parts)]
    for module, _ in imports(path):
        top, *rest = module.split(".")
        if top == "fpk":
            assert rest == ["__version__"] or layer_of(tuple(rest)) in layer.own, (
                f"{spell(path)}: may not import {module}"
            )
        elif layer.other is not None:
            assert top in STDLIB or top in layer.other, f"{spell(path)}: may not import {module}"


@pytest.mark.parametrize("path", [f for f in FILES if "kernels" in f.parts], ids=spell)
def test_kernel_files_share_only_private_helpers(path):
    for module, names in imports(path):
        if module.startswith("fpk.kernels"):
            assert module.split(".")[-1].startswith("_"), f"{spell(path)}: imports {module}; share by a _helper module"
        if module.startswith("fpk.db"):
            assert set(names) <= {"Config", "bucket"}, f"{spell(path)}: imports {names} from the database"


@pytest.mark.parametrize("path", FILES + sorted((ROOT / "tests").rglob("*.py")), ids=spell)
def test_files_are_short(path):
    if path.parent.name == "cases":
        pytest.skip("test data")
    assert len(path.read_text().splitlines()) < 400


@functools.cache
def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def _decorators(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list}


@pytest.mark.parametrize("path", OP_FILES, ids=spell)
def test_one_op_per_file(path):
    declared = [name for name, f in _functions(path).items() if "op" in _decorators(f)]
    assert declared == [path.stem]
    assert Path(inspect.getfile(OPS[path.stem].launcher)) == path


def test_every_op_has_a_file():
    assert sorted(OPS) == sorted(f.stem for f in OP_FILES)


@functools.cache
def _origins(path: Path) -> dict[str, tuple[str, str]]:
    """Where the names come from that a file imports at its top: (module, name there)."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: (node.module or "", a.name) for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {(a.asname or a.name).split(".")[0]: (a.name, "") for a in node.names}
    return found


def _reach(path: Path, start: str) -> tuple[set[tuple[Path, str]], set[str]]:
    """Functions that `start` of a kernel file uses, itself and those of private helpers included; modules they read."""
    reached: set[tuple[Path, str]] = set()
    modules: set[str] = set()
    queue = [(path, start)]
    while queue:
        file, name = queue.pop()
        functions, origins = _functions(file), _origins(file)
        if (file, name) in reached or name not in functions:
            continue
        reached.add((file, name))
        function = functions[name]
        local = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        local |= {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)}
        body = ast.Module(function.body, [])
        for used in {n.id for n in ast.walk(body) if isinstance(n, ast.Name)} - local:
            module, there = origins.get(used, ("", ""))
            if module.startswith("fpk.kernels.") and module.split(".")[-1].startswith("_"):
                queue.append((PACKAGE.parent / (module.replace(".", "/") + ".py"), there))
            elif module:
                modules.add(module)
            else:
                queue.append((file, used))
    return reached, modules


def _handles_tensors(place: tuple[Path, str]) -> bool:
    function = _functions(place[0])[place[1]]
    hints = [a.annotation for a in ast.walk(function.args) if isinstance(a, ast.arg)] + [function.returns]
    return any(h is None or "Tensor" in ast.unparse(h) for h in hints)


@pytest.mark.parametrize("path", OP_FILES, ids=spell)
def test_reference_stands_alone(path):
    """It stands before the kernels, reads only torch and fpk.formats, and shares no tensor code with the kernel's side:
    shared code is shared mistakes."""
    functions = _functions(path)
    reference = OPS[path.stem].reference.__name__
    reached, modules = _reach(path, reference)
    for module in modules:
        known = module.split(".")[0] in ("torch", "math", "typing", "collections") or module == "fpk.formats"
        assert known, f"{spell(path)}: the reference uses {module}"
    kernel_side = [path.stem] + [n for n, f in functions.items() if "triton.jit" in _decorators(f)]
    for start in kernel_side:
        shared = [place for place in reached & _reach(path, start)[0] if _handles_tensors(place)]
        assert not shared, f"{spell(path)}: {start} and the reference both use {[name for _, name in shared]}"
    for file, name in reached:
        assert "triton.jit" not in _decorators(_functions(file)[name]), f"{spell(path)}: the reference uses {name}"
    assert functions[reference].lineno < min(functions[n].lineno for n in kernel_side)


@pytest.mark.parametrize("path", [f for f in FILES if "kernels" in f.parts], ids=spell)
def test_every_masked_load_says_what_lies_outside(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.load":
            keywords = {k.arg for k in node.keywords}
            masked = "mask" in keywords or len(node.args) > 1
            assert not masked or "other" in keywords or len(node.args) > 2, f"{spell(path)}:{node.lineno}: no other="


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("what", ("import fpk", "import fpk; fpk.OPS; fpk.list_schemes()"))
def test_importing_is_light(what):
    loaded = _python(
        "import torch, sys\n"
        "def refuse(*_): raise RuntimeError('CUDA was initialised')\n"
        "torch.cuda._lazy_init = torch._C._cuda_init = refuse\n"
        f"{what}\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(*sys.modules)"
    ).split()
    heavy = {"pandas", "matplotlib", "transformers", "tokenizers", "gguf", "pyarrow", "sklearn", "ray", "torch._dynamo"}
    assert not heavy & set(loaded)


def test_import_reads_no_triton():
    assert "triton" not in _python("import fpk, sys; print(*sys.modules)").split()
