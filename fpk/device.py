"""What a device is to fpk: its architecture, its limits, its identity in the autotune database.

Importing this module touches no GPU. `pretend` lets a test, a look-up or a cross-compilation ask what would happen on
a GPU that is not there.
"""

import contextlib
import functools
import importlib.metadata
import os
import re
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

INTERPRETING = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""Triton reads TRITON_INTERPRET when it is imported; so does this."""

# bytes of shared memory that one block may have (CUDA programming guide, table of compute capabilities; AMD LDS sizes)
SHARED_LIMIT = {
    "sm75": 65_536,
    "sm80": 166_912,
    "sm86": 101_376,
    "sm87": 166_912,
    "sm89": 101_376,
    "sm90": 232_448,
    "sm100": 232_448,
    "sm103": 232_448,
    "sm120": 101_376,
    "sm121": 101_376,
    "gfx942": 65_536,
    "gfx950": 163_840,
}


@dataclass(frozen=True)
class Device:
    """A device as kernels and the database see it. `arch` is "sm90", "gfx942", ... or "cpu"."""

    arch: str
    name: str = ""
    vendor: str = ""
    sm_count: int = 1
    memory: int = 0
    mig: str = ""

    def __hash__(self) -> int:  # look-ups hash it, and few devices share an architecture
        return hash(self.arch)

    @property
    def id(self) -> str:
        """Name in the autotune database: vendor, product, arch, SM count, MIG slice (`nv-h200-sm90-132`)."""
        product = re.sub(r"nvidia|amd|instinct|geforce|tesla", "", self.name.lower())
        product = re.sub(r"[^a-z0-9]+", "-", product).strip("-") or "unknown"
        parts = [self.vendor or "cpu", product, self.arch, str(self.sm_count), *([self.mig] if self.mig else [])]
        return "-".join(parts)

    @property
    def capability(self) -> int:
        """Compute capability as one number, 90 for sm90; 0 where there is none (AMD, CPU)."""
        return int(self.arch[2:]) if self.arch.startswith("sm") else 0

    @property
    def has_fp8(self) -> bool:
        """Does the matrix unit multiply FP8, and does the ISA convert to it? (The interpreter does everything.)"""
        return self.capability >= 89 or self.arch in ("gfx942", "gfx950", "cpu")

    def has_fp8_conversion(self, fmt: str) -> bool:
        """Does the ISA convert fp32 to this FP8 format? Elsewhere kernels round with integers, to the same bits."""
        if self.arch == "cpu":
            return True
        if fmt.endswith("fnuz"):
            return self.arch == "gfx942"
        return self.capability >= 89 or self.arch == "gfx950"

    @property
    def fnuz(self) -> bool:
        """CDNA3 has the fnuz encodings of FP8, everything else the OCP ones."""
        return self.arch == "gfx942"

    @property
    def shared_limit(self) -> int:
        """Bytes of shared memory a block may use; a CPU has no limit."""
        return 1 << 62 if self.arch == "cpu" else SHARED_LIMIT.get(self.arch, 49_152)


class Scope(NamedTuple):
    """What `pretend`, `fpk.use` and `fpk.batch_invariant` say where a look-up is asked; equal scopes are one object."""

    device: Device | None = None
    database: Any = None
    invariant: bool = False


_SCOPES_HELD = 64
_scopes: dict[Any, Scope] = {}
_AT_PLAIN = (None, id(None), False)
_PLAIN = Scope()
scope: ContextVar[Scope] = ContextVar("fpk_scope", default=_PLAIN)


@contextlib.contextmanager
def within(**changes: Any) -> Iterator[None]:
    """Inside the block, these fields of the scope are other ones."""
    wanted = scope.get()._replace(**changes)
    if len(_scopes) >= _SCOPES_HELD:
        _scopes.clear()
    at = (wanted.device, id(wanted.database), wanted.invariant)
    wanted = _PLAIN if at == _AT_PLAIN else _scopes.setdefault(at, wanted)
    token = scope.set(wanted)
    try:
        yield
    finally:
        scope.reset(token)


@contextlib.contextmanager
def pretend(device: Device | str) -> Iterator[Device]:
    """Answer every question about the device with `device` (or a bare arch such as "sm80") inside the block."""
    if isinstance(device, str):
        vendor = "amd" if device.startswith("gfx") else "nv"
        device = Device(arch=device, name="pretended", vendor=vendor, sm_count=132)
    with within(device=device):
        yield device


_triton: ContextVar[str | None] = ContextVar("fpk_triton", default=None)


@contextlib.contextmanager
def pretend_triton(version: str) -> Iterator[None]:
    """Answer `triton_is` with another version of triton inside the block: what a table's rows were measured with."""
    token = _triton.set(version)
    try:
        yield
    finally:
        _triton.reset(token)


@functools.cache
def _installed(name: str) -> str:
    return importlib.metadata.version(name)


def triton_is(*minors: str) -> bool:
    """Is triton one of these, as "3.6"? For kernels that lean on what one version of its compiler does."""
    version = _triton.get() or _installed("triton")
    return ".".join(version.split(".")[:2]) in minors


class _Thread(threading.local):
    has_context = False


_thread = _Thread()


def enter_thread() -> None:
    """See that the calling thread has a CUDA context, before Triton encodes a tensor map: that asks for the current
    one and makes none ("invalid device context"). A new thread gets its own with the first runtime call that needs it,
    which memory from torch's cache and a stream from its pool do not."""
    if not _thread.has_context:
        torch.cuda.Event().record()
        _thread.has_context = True


def pretended() -> Device | None:
    return scope.get().device


@functools.cache
def _describe(kind: str, index: int) -> Device:
    if kind != "cuda":
        return Device(arch="cpu", name="cpu")
    properties = torch.cuda.get_device_properties(index)
    if getattr(torch.version, "hip", None):
        arch = properties.gcnArchName.split(":")[0]
        vendor = "amd"
    else:
        arch = f"sm{properties.major}{properties.minor}"
        vendor = "nv"
    mig = ""
    found = re.search(r"MIG\s+(\S+)", properties.name)
    if found:
        mig = "mig-" + re.sub(r"[^a-z0-9]+", "", found.group(1).lower())
    name = re.sub(r"MIG\s+\S+", "", properties.name)
    return Device(arch, name, vendor, properties.multi_processor_count, properties.total_memory, mig)


def of(device: torch.device) -> Device:
    """The description of a torch device; cached, and `pretend` wins."""
    override = scope.get().device
    if override is not None:
        return override
    index = device.index if device.index is not None else (torch.cuda.current_device() if device.type == "cuda" else 0)
    return _describe(device.type, index)
