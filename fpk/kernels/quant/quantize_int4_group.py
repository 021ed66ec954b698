"""quantize_int4_group: packed INT4 codes with one scale per row and group of columns.

    scale[m, j] = max(amax[m, j], 1e-10) / 7           amax over the finite elements of group j
    codes[m, k] = clamp(round_half_even(x[m, k] / scale[m, k // group]), -7, 7)

Codes are two's complement, two to a byte, the first in the low half; -8 has no positive partner and does not occur. NaN
becomes code 0 and does not touch the scale; +-Inf saturates; a group of nothing but Inf gets scale Inf and codes 0. The
last group may be short.

Source: weight-only INT4 of inference engines; GPTQ, AWQ and compressed-tensors files hold the same codes, plus 8.
"""

from typing import Any

from torch import Tensor

from fpk.check import FLOAT_INPUTS
from fpk.db import Config
from fpk.kernels.quant._int4 import configs, cost, expect_int4, inputs, int4_kernel, key, launch, legal, symmetric
from fpk.op import Kernel, op
from fpk.samples import KINDS
from fpk.shapes import activation_cases


def reference(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    return symmetric(x, group)


def check(x: Tensor, group: int, **_: Any) -> None:
    expect_int4("quantize_int4_group", x, group)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 8, 13), K=(2, 34, 100, 258), E=(0, 3), group=(16, 64, 128),
        x_dtype=FLOAT_INPUTS, kind=KINDS, layout=("contiguous", "offset", "transposed"),
    ),
    kernels=dict(group=Kernel(int4_kernel)),
    configs=configs, legal=legal, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_int4_group(x: Tensor, group: int = 128, *, config: Config) -> tuple[Tensor, Tensor]:
    """Quantize rows to packed INT4, one scale per `group` columns.

    Args:
        x: (M, K) or (E, M, K), K even, fp32, bf16 or fp16, any strides.
        group: columns that share a scale, a power of two from 16 to 4096.

    Returns:
        codes uint8 (..., M, K / 2), contiguous, and scale fp32 (..., M, cdiv(K, group)); value = code * scale.

    Raises:
        ValueError: dtype, rank or group does not fit, or K is 0 or odd.
    """
    codes, scale, _ = launch(x, group, False, config)
    return codes, scale
