"""The products that linear methods are made of: quantize the activations, multiply; which ops in which order.

x is (M, K) bf16 or fp16, weights are codes (N, K), results (M, N) in x's dtype. `weight_only` leaves x as it is, for
GPUs without FP8 units.
"""

from typing import Any

import torch
from torch import Tensor

from fpk.check import has_fp8_units
from fpk.kernels.gemm.mm_weight_only import mm_weight_only
from fpk.kernels.gemm.scaled_mm import scaled_mm
from fpk.kernels.gemm.scaled_mm_group import scaled_mm_group
from fpk.kernels.quant.dequantize import dequantize
from fpk.kernels.quant.quantize_fp8_group import quantize_fp8_group
from fpk.kernels.quant.quantize_fp8_static import quantize_fp8_static
from fpk.kernels.quant.quantize_fp8_token import quantize_fp8_token
from fpk.kernels.quant.quantize_int8_token import quantize_int8_token
from fpk.methods.parameter import Blocks


def fp8_product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, input_scale: Tensor | None = None,
    scale_ub: Tensor | None = None, fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """FP8 weights with scale (1, 1) or (N, 1) times activations quantized per token, or by the static `input_scale`.

    Args:
        input_scale: (1,) fp32 or None.
        scale_ub: (1,) fp32 or None, bounds the dynamic amax.
    """
    if input_scale is None:
        codes, scale_a = quantize_fp8_token(x, scale_ub, weight.dtype)
    else:
        scale_a = input_scale.view(1, 1)
        codes = quantize_fp8_static(x, scale_a, dtype=weight.dtype)
    return scaled_mm(codes, weight, scale_a, scale, bias, out_dtype=x.dtype, fast_accum=fast_accum)


def int8_product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """INT8 weights with scale (N, 1) times activations quantized per token."""
    codes, scale_a = quantize_int8_token(x)
    return scaled_mm(codes, weight, scale_a, scale, bias, out_dtype=x.dtype)


def weight_only_product(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, rows: int = -1, cols: int = -1
) -> Tensor:
    """Codes with a scale per (rows, cols), -1 for the full extent, times x as it is."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return mm_weight_only(x, weight, scale, rows=rows, cols=cols, bias=bias)


def fp8_block_product(
    x: Tensor, weight: Tensor, scale: Tensor, blocks: Blocks, bias: Tensor | None = None, weight_only: bool = False,
    fast_accum: bool = False, scale_format: str = "fp32",
) -> Tensor:  # fmt: skip
    """FP8 weights with block scales times activations quantized per group of the block's columns; `scale_format` of
    the activations' scales: "fp32", or "e8m0" for powers of two."""
    if weight_only:
        rows, cols = blocks.rows, blocks.cols
        if blocks.begins_inside:
            scale, rows, cols = blocks.whole(scale)
        return weight_only_product(x, weight, scale, bias, rows, cols)
    codes, scale_a = quantize_fp8_group(x, blocks.cols, scale_format, layout="tma", dtype=weight.dtype)
    return scaled_mm_group(
        codes, weight, scale_a, scale, group=blocks.cols, block_rows=blocks.rows, block_cols=blocks.cols, bias=bias,
        offset_n=blocks.offset_n, offset_k=blocks.offset_k, out_dtype=x.dtype, fast_accum=fast_accum,
    )  # fmt: skip


def dequantize_blocks(weight: Tensor, scale: Tensor, blocks: Blocks, dtype: torch.dtype) -> Tensor:
    """Values (N, K) of codes with block scales."""
    scale, rows, cols = blocks.whole(scale)
    return dequantize(weight, scale, rows=rows, cols=cols, out_dtype=dtype)


def note_units(layer: Any) -> None:
    """Keep on the layer whether its device lacks FP8 units: `apply` is traced, and may not ask."""
    layer.weight_only = not has_fp8_units(layer.weight.device)
