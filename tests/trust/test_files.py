"""Checkpoints that somebody damaged or forged: an error or a whole model, whatever the files say.

Every round takes a good checkpoint, changes bytes or JSON values at random, and loads it. Allowed are ValueError and
NotImplementedError, with the model as it was. Never: another exception, memory beyond what the files hold, a file
opened elsewhere, code run. FPK_FUZZ_SECONDS makes the rounds longer.
"""

import copy
import importlib
import json
import os
import pkgutil
import random
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fpk
import fpk.methods
import fpk.op
from fpk.check import bits

for _module in pkgutil.iter_modules(fpk.methods.__path__, "fpk.methods."):
    importlib.import_module(_module.name)  # so that no load has a reason to compile anything

SECONDS = float(os.environ.get("FPK_FUZZ_SECONDS", "0"))
ROUNDS = 150
SCHEMES = {
    "fp8": "fp8_tensor", "compressed-tensors": "int8_token", "modelopt": "fp8_channel", "quark": "fp8_channel",
}  # fmt: skip
FORBIDDEN = ("exec", "compile", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class",
             "socket.connect", "os.remove", "os.rename", "os.mkdir", "shutil.rmtree", "ctypes.dlopen")  # fmt: skip
NASTY = [
    None, True, False, 0, -1, 1, 2**31, 2**62, 2**63, 2**64 + 1, 10**400, 0.5, 1e308, float("nan"), float("inf"), "",
    ".", "..", "../model.safetensors", "/etc/passwd", "model.safetensors\0", "re:(a*)*b", "re:(", "[", "F64", "fp8",
    "a" * 5000, "\ud800", [], {}, [[]], [0], [-1, -1], [2**40, 2**40], {"a": 1}, {"__class__": "os.system"},
]  # fmt: skip

watched: dict = {"directory": None, "events": []}


def _hook(event: str, arguments: tuple) -> None:
    if watched["directory"] is None:
        return
    if event in FORBIDDEN:
        watched["events"].append((event, repr(arguments)[:200]))
    elif event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        path = os.path.abspath(os.fsdecode(arguments[0]))
        if not path.startswith(watched["directory"] + os.sep) and not path.endswith((".py", ".pyc")):
            watched["events"].append((event, path))


sys.addaudithook(_hook)  # stays for good, and is silent while no directory is watched


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"up": nn.Linear(32, 48, bias=True), "down": nn.Linear(48, 32, bias=False)})
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 16, bias=False)


def model() -> Model:
    torch.manual_seed(0)
    return Model().bfloat16().eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """Ops on CPU tensors run their references: kernels have laws of their own."""
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    for op in fpk.op.OPS.values():
        op._memo.clear()
    with torch.no_grad(), torch.device("cpu"):
        yield
    for op in fpk.op.OPS.values():
        op._memo.clear()


def good_checkpoint(family: str, directory: Path) -> Path:
    """What fpk writes for the family; the first in shards with an index."""
    made = model()
    fpk.quantize_(made, SCHEMES[family], ignore=["lm_head"])
    shards = {"max_shard_bytes": 2048} if family == "fp8" else {}
    fpk.save_quantized(made, directory, family=family, config={"model_type": "m", "num_hidden_layers": 1}, **shards)
    return directory


# ---- damage ----------------------------------------------------------------------------------------------------------
def split(raw: bytes) -> tuple[dict, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def nodes(tree: object, path: tuple = ()) -> list[tuple]:
    """Paths of everything inside a JSON value."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [p for key, value in inside for p in ((*path, key), *nodes(value, (*path, key)))]


def changed(tree: object, rng: random.Random) -> object:
    """A JSON value with one to three nodes replaced, dropped, renamed or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.randint(1, 3)):
        found = nodes(tree)
        if not found:
            return rng.choice(NASTY)
        path = rng.choice(found)
        parent = tree
        for key in path[:-1]:
            parent = parent[key]
        match rng.randrange(6):
            case 0:
                del parent[path[-1]]
            case 1 if isinstance(parent, dict):
                parent[rng.choice(["", "weight", "block.up.weight", "lm_head.weight", "x" * 300])] = parent.pop(
                    path[-1]
                )
            case 2:
                other = rng.choice(found)
                value = tree
                for key in other:
                    value = (
                        value[key]
                        if isinstance(value, dict) or (isinstance(value, list) and key < len(value))
                        else None
                    )
                    if value is None:
                        break
                parent[path[-1]] = copy.deepcopy(value)
            case 3 if isinstance(parent[path[-1]], int):
                parent[path[-1]] += rng.choice([-1, 1, 8, -8, 1 << 32])
            case _:
                parent[path[-1]] = rng.choice(NASTY)
    return tree


def damage(directory: Path, rng: random.Random) -> str:
    """Change one file of a checkpoint; says what was done."""
    path = rng.choice(sorted(directory.iterdir()))
    raw = path.read_bytes()
    tensors = path.suffix == ".safetensors"
    kind = rng.choice(["bits", "cut", "longer", "json", "json", "json", "json", "gone", "link"])
    if kind == "bits":
        bad = bytearray(raw)
        for _ in range(rng.choice([1, 2, 16])):
            at = rng.randrange(len(bad)) if rng.random() < 0.5 else rng.randrange(min(len(bad), 400))
            bad[at] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
    elif kind == "cut":
        path.write_bytes(raw[: rng.randrange(len(raw))])
    elif kind == "longer":
        path.write_bytes(raw + bytes(rng.randrange(1, 100)))
    elif kind == "gone":
        path.unlink()
    elif kind == "link":
        path.unlink()
        path.symlink_to(rng.choice(["nowhere", str(directory), path.name, "/dev/null"]))
    elif tensors:
        header, data = split(raw)
        path.write_bytes(joined(changed(header, rng), data))
    else:
        path.write_text(json.dumps(changed(json.loads(raw), rng)), errors="surrogatepass")
    return f"{path.name}: {kind}"


# ---- laws ------------------------------------------------------------------------------------------------------------
def whole(made: nn.Module) -> dict:
    return {n: (type(m), m) for n, m in made.named_modules()}, {
        n: bits(t.clone()) for n, t in made.state_dict().items()
    }


def load_watched(directory: Path, what: str) -> str:
    """Load; assert all that must hold. Returns the name of the exception, or ''."""
    target = model()
    modules, values = whole(target)
    watched.update(directory=str(directory.resolve()), events=[])
    try:
        fpk.load_quantized(target, directory)
        raised = ""
    except (ValueError, NotImplementedError) as error:
        raised = type(error).__name__
        assert str(error), what
    finally:
        watched["directory"] = None
    assert not watched["events"], f"{what}: {watched['events'][:3]}"
    if raised:
        now, after = whole(target)
        assert now == modules, f"{what}: modules were swapped"
        assert all(torch.equal(values[n], after[n]) for n in values), f"{what}: half loaded"
    else:
        x = torch.ones(2, 32, dtype=torch.bfloat16)
        assert target.block["down"](target.block["up"](x)).shape == (2, 32), what
        assert all(t.device.type == "cpu" for t in target.state_dict().values()), what
    return raised


@pytest.mark.parametrize("family", SCHEMES)
def test_damaged_checkpoints(family, tmp_path):
    good = good_checkpoint(family, tmp_path / "good")
    assert load_watched(good, "undamaged") == ""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end, outcomes, seed = time.monotonic() + SECONDS, [], 0
    while seed < ROUNDS or time.monotonic() < end:
        rng, bad = random.Random(f"{family} {seed}"), tmp_path / f"bad{seed}"
        bad.mkdir()
        for path in good.iterdir():
            (bad / path.name).write_bytes(path.read_bytes())
        what = f"seed {seed}: {damage(bad, rng)}"
        outcomes.append(load_watched(bad, what))
        for path in bad.iterdir():
            path.unlink()
        bad.rmdir()
        seed += 1
    assert outcomes.count("ValueError") > len(outcomes) // 2 and outcomes.count("") > 0
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # kB
    assert grown < 64 << 10, f"{grown >> 10} MiB more"


@pytest.mark.parametrize("key", ["weight_block_size", "group_size"])
def test_sizes_that_a_config_declares_allocate_nothing(key, tmp_path):
    good = good_checkpoint("fp8", tmp_path / "a")
    config = json.loads((good / "config.json").read_text())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for value in ([1 << 62, 1 << 62], [1 << 31, 1], 1 << 62, [0, 0], [-128, 128]):
        config["quantization_config"][key] = value
        (good / "config.json").write_text(json.dumps(config))
        load_watched(good, f"{key} {value}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
