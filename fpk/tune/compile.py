"""Compile what a launch would compile, for a GPU that may not be there, and read what it needs.

The op's own launcher runs with launching switched off, so signature, alignment and options are those of the real call.
Needs a process in which triton was imported without TRITON_INTERPRET.
"""

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from fpk.device import INTERPRETING, Device, pretend
from fpk.op import Op


@dataclass(frozen=True)
class Binary:
    """A compiled kernel's needs. registers and spills are -1 where the disassembler is missing."""

    name: str
    shared_bytes: int
    registers: int = -1
    spills: int = -1


class _Driver:
    """What triton's compiler asks of a driver, for a GPU that is not there."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def target_of(arch: str) -> GPUTarget:
    """triton's name of an architecture such as "sm90" or "gfx942"."""
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm")), 32)


@contextlib.contextmanager
def _launching_off(compiled: list[Any]) -> Iterator[None]:
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        compiled.append(kernel)
        return kernel

    JITFunction.run = compile_only
    try:
        yield
    finally:
        JITFunction.run = run


def compile_launch(op: Op[..., Any], bound: dict[str, Any], config: dict[str, Any]) -> list[Any]:
    """triton's compiled kernels of one launch on the GPU that is here; nothing is launched. Fills triton's cache."""
    compiled: list[Any] = []
    with _launching_off(compiled):
        op.launcher(**bound, config=config)
    return compiled


def cross_compile(op: Op[..., Any], bound: dict[str, Any], config: dict[str, Any], device: Device) -> list[Binary]:
    """Compile a launch with CPU tensors (`arguments.outline`) for `device`.

    Raises:
        RuntimeError: triton was imported for interpreting.
        Whatever triton raises for a kernel that does not compile.
    """
    if INTERPRETING:
        raise RuntimeError("cross_compile: triton was imported with TRITON_INTERPRET: use another process")
    previous = triton.runtime.driver._active if hasattr(triton.runtime.driver, "_active") else None
    triton.runtime.driver.set_active(_Driver(target_of(device.arch)))
    try:
        with pretend(device):
            kernels = compile_launch(op, bound, config)
    finally:
        if previous is not None:
            triton.runtime.driver.set_active(previous)
    return [_needs(kernel) for kernel in kernels]


def _needs(kernel: Any) -> Binary:
    registers, spills = _resources(kernel.asm["cubin"]) if "cubin" in kernel.asm else _gcn_resources(kernel.asm)
    return Binary(kernel.metadata.name, int(kernel.metadata.shared), registers, spills)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory per thread of a CUDA binary, by the cuobjdump that triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        return -1, -1
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", done.stdout + done.stderr)
    return (int(found[1]), max(int(found[2]), int(found[3]))) if found else (-1, -1)


def _gcn_resources(asm: dict[str, Any]) -> tuple[int, int]:
    text = asm.get("amdgcn", "")
    registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    return (int(registers[1]) if registers else -1), (int(scratch[1]) if scratch else -1)
