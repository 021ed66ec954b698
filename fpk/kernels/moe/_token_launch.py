"""Launching the two kernels of a token (_gluon_token): shapes of boxes, descriptors, shared memory."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fpk.db import Config
from fpk.device import Device, of
from fpk.formats import FP8
from fpk.kernels._tile import early_start, fp8_constants
from fpk.kernels.moe._gluon_parts import AVAILABLE
from fpk.kernels.moe._gluon_token import down_kernel, up_kernel
from fpk.op import Kernel

TARGETS = ("sm90",) if AVAILABLE else ("none",)
STREAM_KERNEL = Kernel(up_kernel, targets=TARGETS, interpretable=False, matrix=True)


def rows_for(width: int, count: int, most: int, programs: int) -> int:
    """Rows of a tile: a divisor of `width` from most / 2 to `most` with which the busiest of the programs has least.

    0 if there is none.
    """
    sizes = [r for r in range(most // 2 + 1, most + 1) if width % r == 0]
    return min(sizes, key=lambda r: (-(-count * width // r // programs) * r, -r), default=0)


def held(config: Config, top_k: int, H: int, I: int) -> int:
    """Bytes of shared memory of the larger kernel."""
    segs = triton.next_power_of_2(I // 128)
    codes = max(slots_at_once(top_k, segs) * segs, triton.next_power_of_2(H // 128))
    return config["STAGES"] * 256 * 128 + codes * 132 + 4096


def slots_at_once(top_k: int, segs: int) -> int:
    """Slots whose rows `down_kernel` quantizes together: 8192 elements if they fit, and whole tiles of 8 segments."""
    return max(min(triton.next_power_of_2(top_k), max(1, 64 // segs)), -(-8 // segs))


def boxes(top_k: int, H: int, I: int) -> tuple[int, int]:
    """Rows of the boxes of w13 and w2 with which the busiest of an H200's multiprocessors has least to read."""

    def best(width: int, count: int, sizes: tuple[int, ...]) -> int:
        loads = {}
        for box in sizes:
            rows = rows_for(width, count, box, 132)
            if rows:
                loads[box] = (-(-count * width // rows // 132) * rows, -box)
        return min(loads, key=lambda box: loads[box], default=sizes[0])

    return best(I, top_k, (16, 32)), best(H, 1, (16, 32, 64))


def streams(x: Tensor, top_k: int, w13: Tensor, w2: Tensor) -> bool:
    """Is `stream` there for such arguments, wherever they lie, and the default?"""
    room = _room(x.device)
    return room > 0 and _streams_like(_first(top_k, *w2.shape[1:]), room, x, top_k, w13, w2)


def fits_stream(config: Config, device: Device, x: Tensor, top_k: int, w13: Tensor, w2: Tensor) -> bool:
    aligned = w13.data_ptr() % 16 == 0 and w2.data_ptr() % 16 == 0
    return aligned and _streams_like(config, device.shared_limit, x, top_k, w13, w2)


def _room(device: torch.device) -> int:
    """Shared memory of a GPU that `stream` is for, else 0."""
    here = of(device)
    return here.shared_limit if here.arch in STREAM_KERNEL.targets else 0


def _first(top_k: int, H: int, I: int) -> Config:
    return next(stream_configs(top_k, H, I))


for _asks in (_room, _first):  # constants of a traced graph: torch.compile looks no device up
    _asks._dynamo_marked_constant = True  # type: ignore[union-attr, attr-defined]


def _streams_like(config: Config, room: int, x: Tensor, top_k: int, w13: Tensor, w2: Tensor) -> bool:
    def whole(w: Tensor) -> bool:
        E, N, K = w.shape
        row = w.stride(1)
        together = E == 1 or w.stride(0) == N * row
        return K % 128 == 0 and K <= 16384 and row % 16 == 0 and together

    _, H, I = w2.shape
    if not (whole(w13) and whole(w2) and x.stride(1) == 1 and top_k <= 128):
        return False
    rows = rows_for(I, top_k, config["BOX13"], 132), rows_for(H, 1, config["BOX2"], 132)
    return min(rows) > 0 and held(config, top_k, H, I) <= room


def stream_configs(top_k: int, H: int, I: int) -> Iterator[Config]:
    first = boxes(top_k, H, I)
    for (box13, box2), (stages, registers) in itertools.chain(
        [(first, (5, 128))],
        itertools.product(itertools.product((16, 32, 64), (16, 32, 64)), ((3, 80), (2, 80), (5, 128), (6, 128))),
    ):
        yield Config(
            kernel="stream", BOX13=box13, BOX2=box2, STAGES=stages, num_warps=8, maxnreg=registers
        )  # fmt: skip


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
    most, segs = max(32, triton.next_power_of_2(top_k)), max(8, triton.next_power_of_2(K // 128))
    scratch = torch.empty((min(programs, tiles), segs), device=x.device)
    ones = [0 if scale13.shape[d] == 1 else scale13.stride(d) for d in range(3)]
    options = dict(maxnreg=config["maxnreg"], num_warps=config["num_warps"])
    up_kernel[(min(programs, tiles),)](
        desc, x, scratch, scale13, ids, expert_map, hidden, tiles, I // rows, top_k, rows, I, K, ids.stride(1), mapped,
        E, *ones, MAX_SLOTS=most, SEGS_X=segs, BOX=box, GROUP=group, BLOCK_ROWS=block_rows, **formula,
        **constants, STAGES=config["STAGES"], **options, **early,
    )  # fmt: skip
    box, H = config["BOX2"], w2.shape[1]
    kept = 128 if box * (I // 128) <= 128 else 256  # a row of one slot fills a buffer
    rows = rows_for(H, 1, box, programs)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
    row = w2.stride(1)
    desc = TensorDescriptor(
        w2, [E * (H // rows), I // 128, rows, 128], [rows * row, 128, row, 1], [1, kept // box, box, 128], layout
    )
    out = torch.empty((1, H), dtype=out_dtype, device=x.device)
    ones = [0 if scale2.shape[d] == 1 else scale2.stride(d) for d in range(3)]
    segs = triton.next_power_of_2(I // 128)
    slots = slots_at_once(top_k, segs)
    scratch = torch.empty((min(programs, H // rows), slots * segs), device=x.device)
    down_kernel[(min(programs, H // rows),)](
        desc, hidden, scratch, scale2, weights, residual, residual_weight, ids, expert_map, out, H // rows, top_k, rows,
        I, ids.stride(1), mapped, E, *ones, weights.stride(1), 0 if residual is None else residual.stride(1),
        MAX_SLOTS=most, SLOTS=slots, SEGS_X=segs, BOX=box, GROUP=group, BLOCK_ROWS=block_rows, **constants,
        STAGES=config["STAGES"] * 256 // kept, HELD=kept, **options, **early,
    )  # fmt: skip
    return out
