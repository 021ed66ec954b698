"""The kernels of scaled_mm_group that are written for sm90: which there are, what they can run, their candidates.

`warps` and `turns` are described in _gluon_group and _gluon_turns; `joint`, clusters of programs that share a tile's K
for few tokens, in _gluon_joint; `ordered`, scales that stream with the operands and consumers that issue by turns, for
many tokens, in _gluon_ordered. Their candidates and defaults: _group_space.
"""

import torch
from torch import Tensor

from fpk.db import Config
from fpk.device import Device
from fpk.formats import FP8
from fpk.kernels.gemm._cluster import available
from fpk.kernels.gemm._gluon import consumer_tile, right_parts
from fpk.kernels.gemm._gluon_group import group_warps_kernel, launch
from fpk.kernels.gemm._gluon_joint import group_joint_kernel, joint_fits, launch_joint
from fpk.kernels.gemm._gluon_ordered import group_ordered_kernel, launch_ordered, ordered_fits
from fpk.kernels.gemm._gluon_turns import group_turns_kernel, launch_turns
from fpk.kernels.gemm._mm import fits_descriptors, parts_buffer, reduce_parts, turns_fit, warps_fit
from fpk.op import Kernel, batch_must_not_matter

KERNELS = {
    name: Kernel(fn, targets=("sm90",), interpretable=False, matrix=True)
    for name, fn in dict(
        warps=group_warps_kernel, turns=group_turns_kernel, joint=group_joint_kernel, ordered=group_ordered_kernel
    ).items()
}
STREAMED = ("joint", "ordered")  # kernels whose scales come through the ring


def legal_on_hopper(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, group: int,
    block_rows: int, block_cols: int, offset_n: int, offset_k: int, out_dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Can the config's kernel run this? The weight rows of a product must share their scales."""
    kernel, n = config["kernel"], config["BLOCK_N"]
    if kernel == "turns":
        rows, fits = n, turns_fit(config, device, a, b, out_dtype)
    elif kernel == "warps":
        rows, more = right_parts(consumer_tile(config)[0 if config["SWAP"] else 1])
        fits = warps_fit(config, device, a, b, out_dtype, 2 if more else 3)
    else:
        fits = available() and a.dtype in FP8 and fits_descriptors(a, b)
        fits = fits and group == 128 and block_cols in (128, -1) and offset_k == 0
        if kernel == "joint":
            few = a.shape[0] <= 512 and not batch_must_not_matter()  # whatever the batch, the same config
            rows, fits = n, fits and few and joint_fits(config, device)
        else:
            leaves = out_dtype.itemsize == 2 and b.shape[0] % 8 == 0  # by TMA
            rows, fits = 128, fits and leaves and ordered_fits(config, device)
    floats = a.dtype is not torch.int8 and scale_a.dtype == scale_b.dtype == torch.float32
    return fits and floats and (block_rows < 0 or (block_rows % rows == 0 and offset_n % rows == 0))


def launch_on_hopper(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    offset_n: int, offset_k: int, config: Config, GROUP: int, ROWS: int, COLS: int,
) -> None:  # fmt: skip
    config = dict(config)
    kernel = config.pop("kernel")
    operands = (device, a, b, scale_a, scale_b, bias, out)
    if kernel in STREAMED:
        stream = launch_joint if kernel == "joint" else launch_ordered
        stream(*operands, offset_n, config, ROWS=ROWS, COLS=COLS)
        return
    split = config["SPLIT_K"]
    parts = parts_buffer(out, split, torch.float32)
    start = launch if kernel == "warps" else launch_turns
    start(*operands, parts, offset_n, offset_k, config, GROUP=GROUP, ROWS=ROWS, COLS=COLS)
    if split > 1:
        reduce_parts(parts, out, (None, None, bias, None, None), [0, 0, 0])
