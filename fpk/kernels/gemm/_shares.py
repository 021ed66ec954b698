"""The launch and the configs of scaled_mm's `shares` kernel (sm90)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fpk.db import Config
from fpk.device import Device
from fpk.kernels._tile import cdiv
from fpk.kernels.gemm._cluster import available
from fpk.kernels.gemm._gluon import TYPES, descriptor
from fpk.kernels.gemm._gluon_shares import shares_kernel
from fpk.kernels.gemm._launch import ahead
from fpk.kernels.gemm._mm import fits_descriptors
from fpk.kernels.gemm._tickets import AXIS, LIMIT, pieces, tickets
from fpk.kernels.gemm._weight_shares import _snapped

MOST_TOKENS = 64  # of a tile; more are not worth a candidate
LAUNCHER_FIELDS = ("PER_SM", "HELD", "SPLIT_K")
_SHARED = 233_472  # bytes of an SM, of which a program takes 1 KiB more than it asks for


def shares(
    m: int, rows: int = 1, wide: int = 1, per_sm: int = 1, held: int = 2, split: int = 0, early: bool = False
) -> Config:
    """A config: m tokens, ROWS * 64 weights by WIDE * 128 columns a step, as many steps as there is room for.

    SPLIT_K = 0: PER_SM programs an SM divide the steps evenly; 1: each has a whole tile; else so many divide each. An
    SM can hold HELD: with more than PER_SM, those of the next launch get ready beside those of this one.
    """
    config = Config(
        kernel="shares", BLOCK_M=m, BLOCK_N=64 * rows, BLOCK_K=128 * wide, SPLIT_K=split, STAGES=2, PER_SM=per_sm,
        HELD=held, EARLY=early, num_warps=4,
    )  # fmt: skip
    return config | dict(STAGES=most_stages(config))


def tokens_held(M: int) -> int:
    """Tokens that the matrix unit gets: the smallest width that holds all."""
    return next(m for m in (8, 16, 32, 64) if m >= min(M, MOST_TOKENS))


def most_stages(config: Config) -> int:
    """Steps that fit into a program's part of an SM."""
    slot = config["BLOCK_K"] * (config["BLOCK_N"] + config["BLOCK_M"]) + 16
    return min(16, (_SHARED // config["HELD"] - 2048) // slot)


def shared_out(N: int, K: int, config: Config, sms: int) -> tuple[int, int, int]:
    """(tiles, steps of each, steps of a program): the same for any number of tokens."""
    tiles, steps = cdiv(N, config["BLOCK_N"]), cdiv(K, config["BLOCK_K"])
    if config["SPLIT_K"]:
        return tiles, steps, cdiv(steps, config["SPLIT_K"])
    return tiles, steps, _snapped(cdiv(tiles * steps, config["PER_SM"] * sms), steps)


def shares_fit(config: Config, device: Device, a: Tensor, b: Tensor, full: bool) -> bool:
    """Can the kernel run this? full: full accuracy of fp8."""
    (M, K), N, m, split, held = a.shape, b.shape[0], config["BLOCK_M"], config["SPLIT_K"], config["HELD"]
    rows, wide = config["BLOCK_N"] // 64, config["BLOCK_K"] // 128
    if not available() or not fits_descriptors(a, b) or m not in (8, 16, 32, 64):  # seen to work there
        return False
    if (64 * rows, 128 * wide) != (config["BLOCK_N"], config["BLOCK_K"]) or {rows, wide} - {1, 2}:
        return False
    if split not in (0, 1, 2, 4) or not 1 <= config["PER_SM"] <= held <= 4 // rows:
        return False
    if m > 32 and (held > 3 or (full and rows * held == 4)):  # registers
        return False
    if not 2 <= config["STAGES"] <= most_stages(config):
        return False
    tiles, steps, per_program = shared_out(N, K, config, device.sm_count)
    if split > 1:
        return (split - 1) * per_program < steps and cdiv(M, m) <= AXIS
    return cdiv(tiles * steps, per_program) <= AXIS and tiles * rows <= LIMIT


def launch_shares(
    device: Device, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], bias: Tensor | None, strides: list[int],
    out: Tensor, promote: bool, config: Config,
) -> None:  # fmt: skip
    """Multiply; `scales`: of a and b, `strides`: of their rows."""
    (M, K), N, is_int8 = a.shape, b.shape[0], a.dtype is torch.int8
    whole, config = config, {n: v for n, v in config.items() if n != "kernel"}
    tiles, steps, per_program = shared_out(N, K, config, device.sm_count)
    block, rows, held, cluster = config["BLOCK_M"], config["BLOCK_N"] // 64, config.pop("HELD"), config.pop("SPLIT_K")
    cluster = max(1, cluster)
    del config["PER_SM"]
    columns, programs = cdiv(M, block), cdiv(tiles * steps, per_program)
    kind = torch.int32 if is_int8 else torch.float32
    parts, counters = scales[1].view(kind), scales[1].view(torch.int32)  # unused where programs have whole tiles
    if per_program % steps and cluster == 1:
        sums = programs * 2 * rows * 64 * block  # of a tile of tokens
        several = pieces(M, block, tiles * rows, sums)
        if len(several) > 1:
            for some in several:
                of_some = scales[0] if strides[0] == 0 else scales[0][some]
                launch_shares(device, a[some], b, (of_some, scales[1]), bias, strides, out[some], promote, whole)
            return
        parts = torch.empty(columns * sums, dtype=kind, device=a.device)
        counters = tickets(columns * tiles * rows, a.device)
    if rows == 1:
        registers = dict(CONSUMER=0, maxnreg={3: 80, 4: 64}.get(held, 120))
    else:
        registers = dict(CONSUMER=104, maxnreg=80) if held == 2 else dict(CONSUMER=232)
    shares_kernel[(tiles, columns) if cluster > 1 else (columns, programs)](
        descriptor(b, 64, 128), descriptor(a, block, 128), out, *scales, bias, parts, counters,
        M, N, tiles, steps, per_program, out.stride(0), *strides[:2],
        CODES=TYPES[a.dtype], INT8=is_int8, PROMOTE=promote, CLUSTER=cluster, PRODUCERS=4 if cluster > 1 else 1,
        enable_fp_fusion=False, **config, **registers, **ahead(device, M, b),
    )  # fmt: skip


def shares_default(M: int, N: int, K: int, sms: int) -> Iterator[Config]:
    """The default for M tokens (on the key grid) where this kernel was timed to be the fastest, else nothing.

    An H200 timed 12 layers at 1, 16 and 64 tokens. With 1 it is always faster than the older kernels: 1.1 to 1.7 times.
    With 16 it loses 1 to 4 % where tiles leave half of the SMs empty and splitting K fills them; with 64 also where
    whole tiles of `tile` fill a wave or two, which leaves many waves, and more than half a wave but less than 0.8.
    """
    m, filled = tokens_held(M), cdiv(N, 64) / sms
    if M > 16:
        if filled > 2:
            yield shares(m, per_sm=3, held=3) if K <= 2048 else shares(m, split=1)
        elif 0.5 < filled <= 0.8:
            yield shares(m, split=2)
    elif M == 1 or 0.5 < filled <= 4:
        if filled > 4 or filled <= 0.3 or 0.95 < filled <= 1:
            yield shares(m, wide=2)
        elif filled > 2:
            yield shares(m, per_sm=3, held=3) if K <= 2048 else shares(m, rows=2, split=1)
        elif filled > 1:
            yield shares(m, split=1, early=True)
        else:
            yield shares(m, split=1) if filled > 0.8 and K <= 2048 else shares(m, split=2)


def shares_space(M: int) -> Iterator[Config]:
    """Candidates for M tokens; what does not fit is not legal."""
    if M > MOST_TOKENS:
        return
    m = tokens_held(M)
    for early in (False, True):
        yield shares(m, early=early)
        yield shares(m, split=1, early=early)
        yield shares(m, split=2, early=early)
        yield shares(m, per_sm=2, early=early)
        yield shares(m, rows=2, early=early)
    yield from (shares(m, wide=2), shares(m, wide=2, held=1), shares(m, held=3), shares(m, split=4))
    yield from (shares(m, per_sm=3, held=3), shares(m, per_sm=4, held=4))
    yield from (shares(m, 2, held=1), shares(m, 2, wide=2, held=1), shares(m, 2, split=1), shares(m, 2, split=2))
