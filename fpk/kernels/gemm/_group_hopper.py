"""The kernels of scaled_mm_group that are written for sm90: which there are, what they can run, their candidates.

`warps` and `turns` are described in _gluon_group and _gluon_turns, `joint`, clusters of programs that share a tile's K
for few tokens, in _gluon_joint.
"""

import itertools
from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from fpk.db import Config
from fpk.device import Device
from fpk.formats import FP8
from fpk.kernels.gemm._cluster import available
from fpk.kernels.gemm._gluon import consumer_tile, right_parts
from fpk.kernels.gemm._gluon_group import group_warps_kernel, launch
from fpk.kernels.gemm._gluon_joint import group_joint_kernel, launch_joint
from fpk.kernels.gemm._gluon_turns import group_turns_kernel, launch_turns
from fpk.kernels.gemm._mm import fits_descriptors, parts_buffer, reduce_parts, turns_fit, warps_fit
from fpk.kernels.gemm._warps_space import cheapest, narrow_space, split_for, turns, turns_space, warps, warps_space
from fpk.op import Kernel

KERNELS = {
    name: Kernel(fn, targets=("sm90",), interpretable=False, matrix=True)
    for name, fn in dict(warps=group_warps_kernel, turns=group_turns_kernel, joint=group_joint_kernel).items()
}


def joint(m: int, n: int, stages: int, split: int, swap: bool = False, per_sm: int = 1, share: int = 1) -> Config:
    """A config of `joint`: `split` programs share a tile's K, `share` tiles the weights they load."""
    return Config(
        kernel="joint", SWAP=swap, SPLIT_K=split, CLUSTER=split * share, BLOCK_M=m, BLOCK_N=n, BLOCK_K=128,
        STAGES=stages, num_warps=4, PER_SM=per_sm,
    )  # fmt: skip


def _joint_fit(config: Config, device: Device) -> bool:
    m, n, stages, per_sm = config["BLOCK_M"], config["BLOCK_N"], config["STAGES"], config["PER_SM"]
    left, right = (n, m) if config["SWAP"] else (m, n)
    split, cluster = config["SPLIT_K"], config["CLUSTER"]
    if left not in (64, 128) or 2 * split > m or right > (128 if per_sm == 1 else 64):
        return False
    if cluster > 8 or cluster % split or right % (8 * (cluster // split)):
        return False
    by_turns = left == 64
    ring = stages * (m + n) * 128
    sums = (2 if by_turns else 1) * m * (n + 8) * 4
    return stages % (1 + by_turns) == 0 and sums <= ring and (ring + 2048) * per_sm <= device.shared_limit


def _seen_right(config: Config) -> bool:
    """Is this among what has been compared with the reference on a GPU?"""
    return not config["SWAP"] and config["CLUSTER"] == config["SPLIT_K"] and config["BLOCK_M"] == 64


def legal_on_hopper(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, block_rows: int,
    offset_n: int, out_dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Can the config's kernel run this? The weight rows of a product must share their scales."""
    kernel, n = config["kernel"], config["BLOCK_N"]
    if kernel == "turns":
        rows, fits = n, turns_fit(config, device, a, b, out_dtype)
    elif kernel == "warps":
        rows, more = right_parts(consumer_tile(config)[0 if config["SWAP"] else 1])
        fits = warps_fit(config, device, a, b, out_dtype, 2 if more else 3)
    else:
        few = a.shape[0] <= (64 if config["SWAP"] else 512)
        fits = available() and a.dtype in FP8 and fits_descriptors(a, b) and few and _seen_right(config)
        rows, fits = 64 if config["SWAP"] else n, fits and _joint_fit(config, device)
    floats = a.dtype is not torch.int8 and scale_a.dtype == scale_b.dtype == torch.float32
    return fits and floats and (block_rows < 0 or (block_rows % rows == 0 and offset_n % rows == 0))


def launch_on_hopper(
    device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor,
    offset_n: int, offset_k: int, config: Config, GROUP: int, ROWS: int, COLS: int,
) -> None:  # fmt: skip
    config = dict(config)
    kernel = config.pop("kernel")
    operands = (device, a, b, scale_a, scale_b, bias, out)
    if kernel == "joint":
        launch_joint(*operands, offset_n, offset_k, config, GROUP=GROUP, ROWS=ROWS, COLS=COLS)
    else:
        split = config["SPLIT_K"]
        parts = parts_buffer(out, split, torch.float32)
        start = launch if kernel == "warps" else launch_turns
        start(*operands, parts, offset_n, offset_k, config, GROUP=GROUP, ROWS=ROWS, COLS=COLS)
        if split > 1:
            reduce_parts(parts, out, (None, None, bias, None, None), [0, 0, 0])


def joint_space(M: int) -> Iterator[Config]:
    """Candidates of `joint` for M tokens."""
    if 16 < M <= 64:
        for (n, stages, per_sm), split in itertools.product(((128, 8, 1), (64, 10, 1), (64, 6, 2)), (2, 4, 1)):
            yield joint(64, n, stages, split, per_sm=per_sm)


def group_configs(M: int, N: int, K: int, sms: int) -> Iterator[Config]:
    """scaled_mm_group on sm90: by measured times at real layers' sizes, then candidates."""
    if M <= 16:
        yield warps(16, 256, 6, 1, split_for(triton.cdiv(N, 256), 56, 4), swap=True)
        yield turns(32, 14)
        yield turns(64, 10)
    else:
        group = 1 if M <= 64 else 4
        if 32 < M <= 64 and 60 <= 2 * triton.cdiv(N, 128) <= sms and K >= N:
            yield joint(64, 128, 8, 2)
        options = [turns(32, 14, 1, group), turns(64, 10, 1, group), turns(64, 10, 2, group), turns(128, 6, 1, group)]
        options += [warps(64, 128, 8, group, split) for split in (1, 2)]
        if M > 64:
            options += [warps(128, 128, 6, 4, 2), warps(128, 128, 6, 4), warps(128, 192, 5, 4)]
        if M > 256:
            options = [warps(128, 128, 6, 8), warps(128, 192, 5, 8)]
        yield from cheapest(options, M, N, K, sms, 1.25)  # its second product is scaled while the unit waits
    yield from joint_space(M)
    yield from warps_space(M)
    yield from turns_space(M)
    yield from narrow_space(M, (128,))
