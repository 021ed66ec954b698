"""What is shipped: the metadata, the pins, and the content of the wheel."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fpk

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = {
    name.lower().replace("_", "-"): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
}


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement)[0].lower().replace("_", "-")


def _at_least(requirement: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", requirement.split(">=")[1]))


def test_version_is_one():
    assert fpk.__version__ == PROJECT["version"]


def test_metadata():
    assert PROJECT["name"] == "fpk"
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["scripts"]["fpk"] == "fpk.cli:app"
    required = {_name(r): r for r in PROJECT["dependencies"]}
    assert required.keys() >= {"torch", "triton", "safetensors", "typer"}
    assert required["triton"] == "triton>=3.6" and required["torch"] == "torch>=2.11"
    assert "numpy" not in required  # kernels and references are plain torch
    assert PROJECT["optional-dependencies"].keys() >= {"dev", "study", "tune", "notebook", "ray"}


def test_every_direct_dependency_is_pinned_in_its_range():
    installed = PROJECT["dependencies"] + [r for e in ("dev", "study") for r in PROJECT["optional-dependencies"][e]]
    for requirement in installed:
        version = PINNED.get(_name(requirement))
        assert version is not None, f"constraints.txt: {requirement} is not pinned"
        pinned = tuple(int(n) for n in re.findall(r"\d+", version))
        assert pinned >= _at_least(requirement), f"constraints.txt: {version} is not {requirement}"


def test_console_script_starts():
    done = subprocess.run([Path(sys.executable).parent / "fpk", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "study" in done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("wheel")
    (path,) = WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    return zipfile.ZipFile(path)


def test_wheel_holds_the_package_and_the_database(wheel):
    names = set(wheel.namelist())
    for path in (ROOT / "fpk").rglob("*.py"):
        assert str(path.relative_to(ROOT)) in names
    for path in (ROOT / "autotune_db").rglob("*.csv"):
        assert f"fpk/{path.relative_to(ROOT)}" in names
    assert any(n.startswith("fpk/autotune_db/") for n in names)


def test_wheel_holds_nothing_else(wheel):
    outside = {n.split("/")[0] for n in wheel.namelist()} - {"fpk", f"fpk-{PROJECT['version']}.dist-info"}
    assert not outside
    assert not [n for n in wheel.namelist() if "test" in n or n.endswith(".pyc")]
