"""What torch itself offers for these products, to be timed beside them."""

from typing import Any

import torch
from torch import Tensor


def torch_scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, fast_accum: bool = False, **_: Any,
) -> Tensor:  # fmt: skip
    """torch's own product (cuBLASLt on NVIDIA): FP8 with tensor x tensor or token x channel scales."""
    whole = scale_a.numel() == scale_b.numel() == 1
    sizes = (a.shape[0], 1), (b.shape[0], 1)
    factors = (scale_a.view(()), scale_b.view(())) if whole else (scale_a.expand(sizes[0]), scale_b.expand(sizes[1]).T)
    return torch._scaled_mm(a, b.T, *factors, bias=bias, out_dtype=out_dtype, use_fast_accum=fast_accum)


def torch_scaled_mm_group(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype: torch.dtype = torch.bfloat16, **other: Any
) -> Tensor:
    """torch's own product (cuBLASLt on sm90): 1 x 128 by 128 x 128, scale_a column-major, no bias, no offsets."""
    only = dict(group=128, block_rows=128, block_cols=128, bias=None, offset_n=0, offset_k=0)
    if any(other.get(n, v) != v for n, v in only.items()):
        raise NotImplementedError(f"torch._scaled_mm with block scales: expected {only}, got {other}")
    return torch._scaled_mm(a, b.T, scale_a, scale_b.T, out_dtype=out_dtype)
