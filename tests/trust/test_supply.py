"""What the package never does: unpickle, evaluate, trust remote code, or run a shell."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2] / "fpk"
IMPORTS = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "yaml", "ctypes"}
CALLS = {"eval", "exec", "__import__"}
METHODS = {"os.system", "os.popen", "torch.load", "numpy.load", "np.load", "torch.hub.load"}
ALLOWED = {  # (file, what): why
    ("_dispatch.py", "exec"): "the dispatcher of an op, written from its own signature as dataclasses write theirs",
}


def found() -> set[tuple[str, str]]:
    """(file, what) of everything in fpk that is on the lists."""
    hits = set()
    for path in ROOT.rglob("*.py"):
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                hits |= {(name, a.name) for a in node.names if a.name.split(".")[0] in IMPORTS}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in IMPORTS:
                hits.add((name, str(node.module)))
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called in CALLS or called in METHODS:
                    hits.add((name, called))
                for keyword in node.keywords:
                    value = getattr(keyword.value, "value", None)
                    if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and value is True:
                        hits.add((name, f"{keyword.arg}=True"))
    return hits


def test_no_pickles_no_evaluation_no_shell():
    assert found() == set(ALLOWED)


def test_the_scan_sees_what_it_looks_for(tmp_path, monkeypatch):
    (tmp_path / "bad.py").write_text(
        "import pickle\nimport os\neval('1')\nos.system('x')\nrun(shell=True)\ntorch.load(f)\n"
    )
    monkeypatch.setattr("trust.test_supply.ROOT", tmp_path)
    assert {what for _, what in found()} == {"pickle", "eval", "os.system", "shell=True", "torch.load"}
