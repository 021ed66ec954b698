"""Other projects' products for `--peers` of dense.py and tables.py: `calls(product, M, N, K, fast_accum)`.

FPK_PEERS names a folder: `lib/*.so` are vLLM's operators as torch loads them, `py/` has packages such as deep_gemm.
What is installed is found without it.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from tables import PRODUCTS

from fpk.op import OPS, Op
from fpk.study.peers import Peer, peers_of


def file(name: str) -> str | None:
    """A file of the peers' folder, if there is one."""
    path = Path(os.environ.get("FPK_PEERS", "/nowhere"), name)
    return str(path) if path.is_file() else None


def load() -> None:
    folder = Path(os.environ.get("FPK_PEERS", ""))
    if not os.environ.get("FPK_PEERS") or hasattr(torch.ops._C, "cutlass_scaled_mm"):
        return
    for library in sorted((folder / "lib").glob("*.so"), key=lambda f: "stable" not in f.name):
        with contextlib.suppress(OSError):  # some need others that are not here
            torch.ops.load_library(str(library))
    if (folder / "py").is_dir() and str(folder / "py") not in sys.path:
        sys.path.insert(0, str(folder / "py"))


class Call:
    """A peer's call of one argument set; `prepare` makes what it needs beside the arguments, once for each set."""

    def __init__(self, op: Op[..., Any], peer: Peer) -> None:
        self.op, self.peer, self.extra = op, peer, {}

    def prepare(self, s: dict[str, Any]) -> None:
        if self.peer.extra is not None:
            self.extra[id(s)] = self.peer.extra(**self.op.bind(**s))

    def __call__(self, s: dict[str, Any]) -> Any:
        return self.peer.call(**self.op.bind(**s), **self.extra.get(id(s), {}))


def calls(product: str, M: int, N: int, K: int, fast_accum: bool) -> dict[str, Call]:
    load()
    op = OPS[PRODUCTS[product][0]]
    return {{"vllm": "cutlass"}.get(name, name): Call(op, peer) for name, peer in peers_of(op.name).items()}
