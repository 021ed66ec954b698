"""The products that linear methods are made of: quantize the activations, multiply; which ops in which order.

x is (M, K) bf16 or fp16, weights are codes (N, K), results (M, N) in x's dtype. `weight_only` leaves x as it is, for
GPUs without FP8 units.
"""

from torch import Tensor

from fpk.kernels.gemm.scaled_mm import scaled_mm
from fpk.kernels.quant.quantize_fp8_static import quantize_fp8_static
from fpk.kernels.quant.quantize_fp8_token import quantize_fp8_token
from fpk.kernels.quant.quantize_int8_token import quantize_int8_token


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
