"""quantize_int4_group_asymmetric: packed INT4 codes with a scale and a zero point per row and group of columns.

    high, low        = max(max x, 0), min(min x, 0) over the finite elements of group j of row m
    scale[m, j]      = max(high - low, 1e-10) / 15
    zero_point[m, j] = round_half_even(-8 - low / scale)
    codes[m, k]      = clamp(round_half_even(x / scale) + zero_point, -8, 7)

value = (code - zero_point) * scale. Codes are two's complement, two to a byte, the first in the low half. The range
always includes 0, so 0 is exact and a constant group needs no special case. NaN becomes the zero point; +-Inf
saturates; a group of nothing but Inf gets scale Inf. The last group may be short.

Source: the asymmetric INT4 weights of AWQ and GPTQ, whose codes and zero points are larger by 8.
"""

from typing import Any

from torch import Tensor

from fpk.check import FLOAT_INPUTS
from fpk.db import Config
from fpk.kernels.quant._int4 import asymmetric, configs, cost, expect_int4, inputs, int4_kernel, key, launch, legal
from fpk.op import Kernel, op
from fpk.samples import KINDS
from fpk.shapes import activation_cases


def reference(x: Tensor, group: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    return asymmetric(x, group)


def check(x: Tensor, group: int, **_: Any) -> None:
    expect_int4("quantize_int4_group_asymmetric", x, group)


@op(
    reference=reference, check=check, inputs=inputs, tol=0.0,
    domain=dict(
        M=(0, 1, 8, 13), K=(2, 34, 100, 258), E=(0, 3), group=(16, 64, 128),
        x_dtype=FLOAT_INPUTS, kind=KINDS, layout=("contiguous", "offset", "transposed"),
    ),
    kernels=dict(group=Kernel(int4_kernel)),
    configs=configs, legal=legal, key=key, cost=cost, cases=activation_cases(),
)  # fmt: skip
def quantize_int4_group_asymmetric(
    x: Tensor, group: int = 128, *, config: Config
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Quantize rows to packed INT4, one scale and one zero point per `group` columns.

    Args:
        x: (M, K) or (E, M, K), K even, fp32, bf16 or fp16, any strides.
        group: columns that share a scale, a power of two from 16 to 4096.

    Returns:
        codes uint8 (..., M, K / 2), contiguous; scale fp32 and zero_point int32, both (..., M, cdiv(K, group));
        value = (code - zero_point) * scale.

    Raises:
        ValueError: dtype, rank or group does not fit, or K is 0 or odd.
    """
    codes, scale, zero = launch(x, group, True, config)
    assert zero is not None
    return codes, scale, zero
