"""What looking up costs and touches: imports, files, measurements, staleness hashes; read in fresh processes."""

import ast
import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import fpk
from fpk import db
from fpk.device import Device, pretend

H200 = Device("sm90", "NVIDIA H200", "nv", 132)
H100 = Device("sm90", "NVIDIA H100 PCIe", "nv", 114)
RUN = db.Run("some_op", H200.id, "2026-01-01", "0.1", "2.11", "3.6", "13", "1", "abc", "graph", "1980", "3201", "700")


def row(m, n, k, rank=1, us=10.0, shared=1000, flag="x", **config):
    key = dict(M=m, N=n, K=k, dtype=flag)
    config = dict(BLOCK_M=16, num_warps=4, num_stages=2) | config
    return db.Row(key, rank, config, us, 20.0, 1.0, shared, f"M={m} N={n} K={k}", RUN.run)


def source(*rows, gpu=H200.id, name="memory"):
    texts = {f"{gpu}/some_op.csv": db.dump_table(rows), f"{gpu}/runs.csv": db.dump_runs([RUN])}
    return db.MemorySource(texts, name)


KERNELS = '''
import triton
import triton.language as tl

LIMIT = tl.constexpr(448.0)

@triton.jit
def helper(x):
    """A docstring."""
    return x * LIMIT  # why

@triton.jit
def kernel(p, BLOCK: tl.constexpr):
    x = tl.load(p + tl.arange(0, BLOCK))
    tl.store(p + tl.arange(0, BLOCK), helper(x))
'''


def _hash_of(tmp_path, text, name):
    path = tmp_path / f"{name}.py"
    path.write_text(text)
    import importlib.util

    spec = importlib.util.spec_from_file_location("hashed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return db.source_hash([module.kernel])


def test_source_hash_sees_code_only(tmp_path):
    base = _hash_of(tmp_path, KERNELS, "base")
    same = (
        KERNELS.replace("  # why", "")
        .replace('    """A docstring."""\n', "")
        .replace("\n@triton", "\n\n\n# moved\n@triton")
    )
    assert same != KERNELS and _hash_of(tmp_path, same, "same") == base
    for old, new in (
        ("x * LIMIT", "x + LIMIT"),
        ("448.0", "240.0"),
        ("helper(x))", "x)"),
        ("arange(0, BLOCK))\n", "arange(1, BLOCK))\n"),
    ):
        changed = KERNELS.replace(old, new, 1)
        assert changed != KERNELS and _hash_of(tmp_path, changed, f"c{abs(hash(old))}") != base, old


def _python(code, *arguments, **env):
    kept = {k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_DATA_HOME", "FPK_AUTOTUNE_DB")}
    root = Path(fpk.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | dict(TRITON_INTERPRET="1", PYTHONDONTWRITEBYTECODE="1") | env,
        cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


AUDIT = """
import sys
opened, written = [], []
def hook(event, args):
    if event == "open" and isinstance(args[0], str):
        if args[0].endswith(".csv"):
            opened.append(args[0])
        if isinstance(args[1], str) and set(args[1]) & set("wax+"):
            written.append(args[0])
sys.addaudithook(hook)
"""


def test_importing_reads_no_table_and_calling_reads_one_once(tmp_path):
    device = Device("cpu", "cpu").id
    (tmp_path / device).mkdir()
    (tmp_path / device / "quantize_fp8_token.csv").write_text(db.dump_table([]))
    out = _python(
        AUDIT
        + """
import fpk, torch
op = fpk.OPS["quantize_fp8_token"]
assert not opened, opened
args = op.inputs(M=16, K=64, device="cpu")
for m in (16, 32):
    op.config_for(**op.inputs(M=m, K=64, device="cpu"))
mine = [p for p in opened if "quantize_fp8_token" in p and "packaged" not in p]
print(len([p for p in mine if p.startswith(sys.argv[1])]), len([w for w in written if "/dev/null" not in w]))
""",
        str(tmp_path),
        FPK_AUTOTUNE_DB=str(tmp_path),
        HOME="/nonexistent",
    )
    assert out.split() == ["1", "0"]


def test_without_home_and_on_a_read_only_disk():
    out = _python(
        AUDIT
        + """
from fpk import db
from fpk.device import Device
print(db.active().candidates("nothing", dict(M=1), Device("sm90", "x", "nv", 1)), len(written))
"""
    )
    assert out.split() == ["[]", "0"]


def test_cold_start_measures_nothing_and_writes_nothing():
    """A call answered from a table: no timing function of any kind runs, no file is opened for writing."""
    out = _python(
        AUDIT
        + """
import fpk, torch, triton.testing
from fpk import db
from fpk.device import Device
sys.path.insert(0, "tests")
import interpreter_fixes
measured = []
for name in ("do_bench", "do_bench_cudagraph"):
    setattr(triton.testing, name, lambda *a, **k: measured.append(1))
torch.cuda.Event = torch.cuda.CUDAGraph = lambda *a, **k: measured.append(1)
op = fpk.OPS["quantize_fp8_token"]
args = op.inputs(M=16, K=64, device="cpu")
config = dict(kernel="loop", BLOCK_M=8, BLOCK_K=512, num_warps=8, num_stages=3)
text = db.dump_table([db.Row(op.key(**op.bind(**args)), 1, config, 1.0, 2.0, 1.0, 0, "M=16 K=64", "r")])
written.clear()
with fpk.use(db.Tables(db.MemorySource({f"{Device('cpu', 'cpu').id}/{op.name}.csv": text}))):
    op(**args)
    assert op.config_for(**args) == config
print(len(measured), len(written), "fpk.tune" in sys.modules)
""",
        HOME="/nonexistent",
    )
    assert out.split() == ["0", "0", "False"]


def test_database_layer_imports_only_torch_and_the_standard_library():
    package = Path(db.__file__).parent
    allowed = {"torch", "fpk", "platformdirs", *sys.stdlib_module_names}
    for path in (package / "db.py", *sorted(package.glob("_db_*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"
                if name.startswith("fpk."):
                    assert name in (
                        "fpk.device",
                        "fpk._parsing",
                        "fpk._db_gpus",
                        "fpk._db_hash",
                        "fpk._db_lookup",
                        "fpk._db_scale",
                        "fpk._db_sources",
                        "fpk._db_table",
                    ), name


def test_lookup_is_cheap():
    """Targets: 20 us cold. Ten times that here, where spelling a key, the bare measure, takes one."""
    shapes = itertools.product(db.M_GRID, (512, 2048, 4096, 7168, 12288), (512, 2048, 7168))
    tables = db.Tables(source(*(row(m, n, k) for m, n, k in shapes)))
    tables.candidates("some_op", dict(M=1, N=1, K=1, dtype="x"), H200)
    keys = [dict(M=m, N=n, K=4096, dtype="x") for m in db.M_GRID for n in range(64, 2064, 64)]

    def seconds(work):
        start = time.thread_time()
        for key in keys:
            work(key)
        return (time.thread_time() - start) / len(keys)

    cold = bare = float("inf")
    for _ in range(10):
        tables._memo.clear()
        cold = min(cold, seconds(lambda key: tables.candidates("some_op", key, H200)))
        bare = min(bare, seconds(lambda key: sorted(f"{name}={value}" for name, value in key.items())))
    print(f"cold look-up {cold * 1e6:.1f} us, {cold / bare:.0f} times the bare measure")
    assert cold < 200 * bare


def test_pretended_gpu_gets_its_siblings_rows():
    op = fpk.OPS["quantize_fp8_token"]
    args = op.inputs(M=16, K=64, device="cpu")
    config = dict(kernel="loop", BLOCK_M=8, BLOCK_K=512, num_warps=8, num_stages=3)
    text = db.dump_table([db.Row(op.key(**op.bind(**args)), 1, config, 1.0, 2.0, 1.0, 0, "M=16 K=64", "r")])
    with fpk.use(db.Tables(db.MemorySource({f"{H200.id}/{op.name}.csv": text}))), pretend(H100):
        assert op.config_for(**args) == config


def test_source_hash_does_not_depend_on_the_version_of_python(tmp_path):
    """Rows measured under one Python are fresh under another: its syntax trees have fields that others lack."""
    text = "def kernel(x, *, y=None):\n    return x if y else [i for i in range(x)]\n"
    assert _hash_of(tmp_path, text, "versions") == "4b94c69faa67"  # by 3.11, 3.12 and 3.13
