"""fpk: Triton kernels with PyTorch references for low-precision inference.

    q = fpk.quantize(x, "fp8_token")                  # a tensor, by a scheme's name
    y = fpk.mm(q, fpk.quantize(w, "fp8_channel"))     # (M, K) x (N, K) -> (M, N)
    report = fpk.quantize_(model, "fp8_channel")      # the linear layers of a model, in place
    ranges = fpk.calibrate(model, batches)            # for static activations: "fp8_channel:fp8_tensor_static"
    fpk.OPS["scaled_mm"]                              # every op by name

Public names are imported when they are first touched: `import fpk` reads no table, touches no GPU, imports no triton.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpk._moe import moe, moe_experts
    from fpk._shuffled import shuffle
    from fpk.api import LayerScheme, Quantized, mm, parse_layer_scheme, quantize
    from fpk.checkpoint import load_quantized, save_quantized
    from fpk.db import batch_invariant, use
    from fpk.formats import list_schemes
    from fpk.nn import Calibration, QuantizedLinear, calibrate, quantize_, quantized
    from fpk.op import OPS
    from fpk.study.bench import sweep

__version__ = "0.1.0"

_NAMES = {
    "OPS": "fpk.op",
    "LayerScheme": "fpk.api",
    "Quantized": "fpk.api",
    "mm": "fpk.api",
    "parse_layer_scheme": "fpk.api",
    "quantize": "fpk.api",
    "list_schemes": "fpk.formats",
    "moe": "fpk._moe",
    "moe_experts": "fpk._moe",
    "load_quantized": "fpk.checkpoint",
    "save_quantized": "fpk.checkpoint",
    "shuffle": "fpk._shuffled",
    "Calibration": "fpk.nn",
    "QuantizedLinear": "fpk.nn",
    "calibrate": "fpk.nn",
    "quantize_": "fpk.nn",
    "quantized": "fpk.nn",
    "batch_invariant": "fpk.db",
    "use": "fpk.db",
    "sweep": "fpk.study.bench",
}
_MODULES = (
    "api", "check", "checkpoint", "db", "device", "formats", "kernels", "methods", "nn", "op", "parallel", "samples",
    "shapes", "tune",
)  # fmt: skip

__all__ = [
    "OPS", "Calibration", "LayerScheme", "Quantized", "QuantizedLinear", "batch_invariant", "calibrate",
    "list_schemes",
    "load_quantized", "mm", "moe", "moe_experts", "parse_layer_scheme", "quantize", "quantize_", "quantized",
    "save_quantized", "shuffle", "sweep", "use",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        if name == "OPS":
            importlib.import_module("fpk.kernels")  # declares every op
        value = getattr(importlib.import_module(_NAMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"fpk.{name}")
    else:
        raise AttributeError(f"module 'fpk' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
