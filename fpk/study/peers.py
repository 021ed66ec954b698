"""Implementations of the same operations in other projects, where they are installed: for comparison only.

Each takes an op's arguments by name and returns what the op returns; it raises NotImplementedError for arguments that
the other side does not know. Nothing here is imported unless a sweep asks for it.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Peer:
    """An implementation, and what it needs beside the op's arguments, made from them once (not timed)."""

    call: Callable[..., Any]
    extra: Callable[..., dict[str, Any]] | None = None


def peers_of(op: str) -> dict[str, Peer]:
    """Peers of an op that can be imported here, by the project's name."""
    found: dict[str, Peer] = {}
    if torch.cuda.is_available():
        if op in _VLLM and _vllm():
            found["vllm"] = _VLLM[op]
        if op in _DEEP_GEMM and importlib.util.find_spec("deep_gemm"):
            found["deep_gemm"] = _DEEP_GEMM[op]
    if op in _PLAIN:
        found["torch plain"] = _PLAIN[op]
    return found


def _vllm() -> bool:
    """Are vLLM's compiled operators there? They register themselves with torch when its extension is imported."""
    if not hasattr(torch.ops._C, "cutlass_scaled_mm") and importlib.util.find_spec("vllm"):
        for module in ("vllm._C_stable_libtorch", "vllm._C"):
            try:
                importlib.import_module(module)
            except ImportError:
                continue
    return hasattr(torch.ops._C, "cutlass_scaled_mm")


def _cutlass(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    torch.ops._C.cutlass_scaled_mm(out, a, b.T, scale_a, scale_b, bias)
    return out


def _vllm_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, zero_point_a: Tensor | None,
    out_dtype: torch.dtype, **_: Any,
) -> Tensor:  # fmt: skip
    if zero_point_a is not None:
        raise NotImplementedError("scaled_mm: symmetric codes only")
    return _cutlass(a, b, scale_a, scale_b, bias, out_dtype)


def _only_128(name: str, b: Tensor, group: int, block_rows: int, block_cols: int, offset_n: int, offset_k: int) -> None:
    got = dict(group=group, block_rows=block_rows, block_cols=block_cols, offset_n=offset_n, offset_k=offset_k)
    if got != dict(group=128, block_rows=128, block_cols=128, offset_n=0, offset_k=0) or b.shape[0] % 128:
        raise NotImplementedError(f"{name}: whole blocks of 128 x 128 only, got {got} and {b.shape[0]} rows")


def _vllm_scaled_mm_group(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int, block_rows: int, block_cols: int,
    bias: Tensor | None, offset_n: int, offset_k: int, out_dtype: torch.dtype, **_: Any,
) -> Tensor:  # fmt: skip
    _only_128("vllm", b, group, block_rows, block_cols, offset_n, offset_k)
    if scale_a.stride(0) != 1:
        raise NotImplementedError("vllm: column-major scales only")
    return _cutlass(a, b, scale_a, scale_b.T, bias, out_dtype)


def _deep_gemm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int, block_rows: int, block_cols: int,
    bias: Tensor | None, offset_n: int, offset_k: int, out_dtype: torch.dtype, **_: Any,
) -> Tensor:  # fmt: skip
    _only_128("deep_gemm", b, group, block_rows, block_cols, offset_n, offset_k)
    if bias is not None or out_dtype is not torch.bfloat16 or scale_a.dtype is not torch.float32:
        raise NotImplementedError("deep_gemm: fp32 scales and bf16 outputs without a bias only")
    module = importlib.import_module("deep_gemm")
    out = torch.empty(a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    module.fp8_gemm_nt((a, scale_a), (b, scale_b), out, disable_ue8m0_cast=True)
    return out


def _bf16_product(
    a: Tensor, plain_weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, **_: Any
) -> Tensor:
    """What weight-only replaces: the same activations by plain weights, two bytes an element."""
    if out_dtype not in (None, a.dtype):
        raise NotImplementedError(f"torch plain: out_dtype {a.dtype} only, got {out_dtype}")
    return torch.nn.functional.linear(a, plain_weight, None if bias is None else bias.to(a.dtype))


def _plain_weight(a: Tensor, b: Tensor, scale_b: Tensor, rows: int, cols: int, **_: Any) -> dict[str, Tensor]:
    from fpk.op import OPS

    return {"plain_weight": OPS["dequantize"].reference(b, scale_b, None, rows, cols, a.dtype)}


_VLLM = {"scaled_mm": Peer(_vllm_scaled_mm), "scaled_mm_group": Peer(_vllm_scaled_mm_group)}
_DEEP_GEMM = {"scaled_mm_group": Peer(_deep_gemm)}
_PLAIN = {"mm_weight_only": Peer(_bf16_product, _plain_weight)}
