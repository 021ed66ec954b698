"""Where winner tables come from, as text."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Source(Protocol):
    """Where tables come from. Reading never raises: what is absent or unreadable is None."""

    name: str

    def gpus(self) -> list[str]: ...
    def files(self, gpu: str) -> list[str]: ...
    def read(self, gpu: str, file: str) -> str | None: ...


class DirectorySource:
    """`<root>/<gpu id>/<op>.csv` on disk."""

    def __init__(self, root: str | Path, name: str = "") -> None:
        self.root = Path(root)
        self.name = name or str(root)

    def gpus(self) -> list[str]:
        try:
            return sorted(p.name for p in self.root.iterdir() if p.is_dir())
        except OSError:
            return []

    def files(self, gpu: str) -> list[str]:
        try:
            return sorted(p.name for p in (self.root / gpu).glob("*.csv"))
        except OSError:
            return []

    def read(self, gpu: str, file: str) -> str | None:
        try:
            return (self.root / gpu / file).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            warnings.warn(f"fpk: cannot read {self.root / gpu / file}: {error}", RuntimeWarning, stacklevel=2)
            return None


class MemorySource:
    """Tables as a mapping from "<gpu id>/<file>" to text: snapshots and tests."""

    def __init__(self, texts: Mapping[str, str], name: str = "memory") -> None:
        self.texts = dict(texts)
        self.name = name

    def gpus(self) -> list[str]:
        return sorted({path.split("/")[0] for path in self.texts})

    def files(self, gpu: str) -> list[str]:
        return sorted(path.split("/")[1] for path in self.texts if path.startswith(gpu + "/"))

    def read(self, gpu: str, file: str) -> str | None:
        return self.texts.get(f"{gpu}/{file}")
