"""Launching the two kernels of a token (_gluon_token): shapes of boxes, descriptors, shared memory."""

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fpk.db import Config
from fpk.device import of
from fpk.formats import FP8
from fpk.kernels._tile import early_start, fp8_constants
from fpk.kernels.moe._gluon_grouped import AVAILABLE
from fpk.kernels.moe._gluon_token import down_kernel, up_kernel
from fpk.op import Kernel

TARGETS = ("sm90",) if AVAILABLE else ("none",)
STREAM_KERNEL = Kernel(up_kernel, targets=TARGETS, interpretable=False, matrix=True)


def rows_for(width: int, count: int, most: int, programs: int) -> int:
    """Rows of a tile: a divisor of `width` from most / 2 to `most` with which the busiest of the programs has least.

    0 if there is none.
    """
    sizes = [r for r in range(most // 2 + 1 if most > 16 else 1, most + 1) if width % r == 0]
    return min(sizes, key=lambda r: (-(-count * width // r // programs) * r, -r), default=0)


def held(config: Config, top_k: int, H: int, I: int) -> int:
    """Bytes of shared memory of the larger kernel."""
    segs = triton.next_power_of_2(I // 128)
    codes = max(slots_at_once(top_k, segs) * segs, triton.next_power_of_2(H // 128))
    return config["STAGES"] * 256 * 128 + codes * 132 + 4096


def slots_at_once(top_k: int, segs: int) -> int:
    """Slots whose rows `down_kernel` quantizes together: 16384 elements, and whole tiles of 8 segments."""
    return max(min(triton.next_power_of_2(top_k), 128 // segs), -(-8 // segs))


def launch_stream(
    config: Config, x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, scale13: Tensor, scale2: Tensor,
    group: int, block_rows: int, formula: dict[str, Any], expert_map: Tensor | None, residual: Tensor | None,
    residual_weight: Tensor | None, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    top_k, (E, _, K), I = ids.shape[1], w13.shape, w2.shape[2]
    device = of(x.device)
    programs, early = device.sm_count, early_start(device)
    fmt = FP8[w13.dtype]
    constants = dict(QMAX=fmt.qmax, **fp8_constants(fmt, device))
    mapped = 0 if expert_map is None else expert_map.shape[0]
    box = config["BOX13"]
    rows = rows_for(I, top_k, box, programs)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=5)
    row, half = w13.stride(1), I * w13.stride(1)
    desc = TensorDescriptor(
        w13,
        [2 * E, I // rows, K // 128, rows, 128],
        [half, rows * row, 128, row, 1],
        [2, 1, 128 // box, box, 128],
        layout,
    )
    tiles = top_k * (I // rows)
    hidden = torch.empty((top_k, I), dtype=out_dtype, device=x.device)
    ones = [0 if scale13.shape[d] == 1 else scale13.stride(d) for d in range(3)]
    options = dict(maxnreg=config["maxnreg"], num_warps=config["num_warps"])
    up_kernel[(min(programs, tiles),)](
        desc, x, scale13, ids, expert_map, hidden, tiles, I // rows, rows, I, K, ids.stride(1), mapped, E, *ones,
        SEGS_X=max(8, triton.next_power_of_2(K // 128)), BOX=box, GROUP=group, BLOCK_ROWS=block_rows, **formula,
        **constants, STAGES=config["STAGES"], **options, **early,
    )  # fmt: skip
    box, H = config["BOX2"], w2.shape[1]
    rows = rows_for(H, 1, box, programs)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
    row = w2.stride(1)
    desc = TensorDescriptor(
        w2, [E * (H // rows), I // 128, rows, 128], [rows * row, 128, row, 1], [1, 256 // box, box, 128], layout
    )
    out = torch.empty((1, H), dtype=out_dtype, device=x.device)
    ones = [0 if scale2.shape[d] == 1 else scale2.stride(d) for d in range(3)]
    segs = triton.next_power_of_2(I // 128)
    slots = slots_at_once(top_k, segs)
    down_kernel[(min(programs, H // rows),)](
        desc, hidden, scale2, weights, residual, residual_weight, ids, expert_map, out, H // rows, top_k, rows, I,
        ids.stride(1), mapped, E, *ones, weights.stride(1), 0 if residual is None else residual.stride(1),
        SLOTS=slots, SEGS_X=segs, BOX=box, GROUP=group, BLOCK_ROWS=block_rows, **constants, STAGES=config["STAGES"],
        **options, **early,
    )  # fmt: skip
    return out
