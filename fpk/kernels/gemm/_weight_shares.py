"""The launch and the configs of mm_weight_only's `shares` kernel (sm90)."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fpk.db import Config
from fpk.device import Device
from fpk.kernels._tile import after_previous
from fpk.kernels.gemm._gluon import AVAILABLE, TYPES, descriptor
from fpk.kernels.gemm._gluon_weight_shares import weight_shares_kernel
from fpk.kernels.gemm._launch import dependent
from fpk.kernels.gemm._mm import fits_descriptors
from fpk.kernels.gemm._tickets import LIMIT, tickets

_FIELDS = ("BLOCK_M", "ROWS", "TURNS", "STAGES", "PER_SM", "HELD", "COLUMNS", "RENAMED")
LAUNCHER_FIELDS = ("PER_SM", "HELD", "COLUMNS")
_LARGE, _SMALL = ((1, 1), (0, 1)), ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 3), (4, 4))  # (PER_SM, HELD)
GROUPS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))  # (ROWS, TURNS) that the kernel has


def shares(*fields: int) -> Config:
    """A config: BLOCK_M tokens, ROWS times 64 weights, TURNS times 128 columns a step; PER_SM programs an SM divide the
    work of COLUMNS tiles of tokens evenly, or each has a whole tile (PER_SM = 0). An SM can hold HELD programs: with
    more than PER_SM, those of the next launch get ready, and fetch weights, beside those of this one."""
    config = Config(kernel="shares", **dict(zip(_FIELDS, fields, strict=True)), num_warps=4)
    return config | dict(RENAMED=bool(config["RENAMED"]))


@triton.jit(do_not_specialize=["pairs", "width", "stride"])
def rename_kernel(a_ptr, out_ptr, pairs, width, stride, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """Pairs of columns in the order in which a thread of `shares` comes to hold their weights; zeros beyond the last.

    Of every 128 columns, 32 q + 16 s + 4 j + 2 h + e goes to 64 s + 16 j + 8 h + 2 q + e.
    """
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    to = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = to & 63
    source = (to & -64) + ((place & 3) << 4) + ((place >> 5) << 3) + ((place >> 2) & 7)
    x = tl.load(a_ptr + row * stride + source, mask=source < pairs, other=0)
    tl.store(out_ptr + row * width + to, x, mask=to < width)


def renamed(a: Tensor, device: Device) -> Tensor:
    """Activations with their columns renamed, (M, K rounded up to 128)."""
    (M, K), block = a.shape, 1024
    width = cdiv(K, 128) * 64
    out = torch.empty((M, 2 * width), dtype=a.dtype, device=a.device)
    rename_kernel[(M, cdiv(width, block))](
        a.view(torch.int32), out.view(torch.int32), K // 2, width, a.stride(0) // 2, BLOCK=block, num_warps=4,
        **dependent(device, M),
    )  # fmt: skip
    return out


def _keeps(config: Config) -> int:
    """Groups of warps that end with a sum of their own, of those that share rows."""
    return 2 if config["TURNS"] == 2 and config["BLOCK_M"] >= 32 else 1


def _leaves_by_tma(config: Config, out: Tensor) -> bool:
    """Do output tiles go through shared memory? Few tokens are written as they come."""
    return config["BLOCK_M"] >= 128 and fits_descriptors(out)


def registers(config: Config) -> dict[str, int]:
    """Registers of a thread, by what it does: those of a program that shares its SM are capped at the launch."""
    groups, held = config["ROWS"] * config["TURNS"], config["HELD"]
    if groups == 4:
        return dict(CONSUMER=112, PRODUCER=24)
    if groups == 2:
        return dict(CONSUMER=104, PRODUCER=24, maxnreg=80) if held == 2 else dict(CONSUMER=232, PRODUCER=24)
    return dict(CONSUMER=0, PRODUCER=24, maxnreg={4: 64, 3: 80}.get(held, 120))


def shares_fit(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_b: Tensor, cols: int, out_dtype: torch.dtype
) -> bool:
    """Can the kernel run this?"""
    (M, K), N, m, held = a.shape, b.shape[0], config["BLOCK_M"], config["HELD"]
    rows, turns, stages = config["ROWS"], config["TURNS"], config["STAGES"]
    if not AVAILABLE or (rows, turns) not in GROUPS or stages < 2 or 0 < cols < K or scale_b.dtype is not torch.float32:
        return False
    if b.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8) or not fits_descriptors(b):
        return False
    in_pairs = a.stride(0) % 2 == 0 and a.data_ptr() % 4 == 0 and K % 2 == 0
    if not (in_pairs if config["RENAMED"] else fits_descriptors(a)):
        return False
    if not 0 <= config["PER_SM"] <= held <= (4, 2, 1)[(rows * turns).bit_length() - 1]:
        return False
    most = 64 if rows * turns == 4 or held > 1 else 256
    if m not in (8, 16, 32, 64, 128, 256) or m > most or config["COLUMNS"] < 1:
        return False
    if held > 2 and m > (64 if held == 3 else 16):
        return False
    ring = stages * turns * (rows * 64 * 128 + m * 256 + 16)
    sums = rows * (turns - 1) * (64 * m * 4 + 16)
    leaving = rows * 2 * 64 * 64 * out_dtype.itemsize if m >= 128 else 0
    tickets_used = cdiv(M, m) * cdiv(N, 64 * rows) * rows * _keeps(config)
    return tickets_used <= LIMIT and (ring + sums + leaving + 1024) * held <= device.shared_limit


def launch_shares(
    device: Device, a: Tensor, b: Tensor, scale_b: Tensor, rows: int, bias: Tensor | None, out: Tensor, config: Config
) -> None:
    """Multiply. How K is divided does not depend on the number of tokens, nor does what a token's row comes to."""
    (M, K), N = a.shape, b.shape[0]
    by_tma, keeps, made = _leaves_by_tma(config, out), _keeps(config), registers(config)
    config = {n: v for n, v in config.items() if n != "kernel"}
    block, per_sm, columns = config["BLOCK_M"], config.pop("PER_SM"), config.pop("COLUMNS")
    del config["HELD"]
    tiles, steps = cdiv(N, 64 * config["ROWS"]), cdiv(K, 128 * config["TURNS"])
    per_program = steps
    if per_sm:
        per_program = cdiv(tiles * steps, min(max(1, per_sm * device.sm_count // columns), tiles * steps))
    columns, programs = cdiv(M, block), cdiv(tiles * steps, per_program)
    parts, counters = scale_b, scale_b.view(torch.int32)  # unused where every program has whole tiles
    if per_program % steps:
        parts = torch.empty(columns * programs * 2 * config["ROWS"] * 64 * block, device=a.device)
        counters = tickets(columns * tiles * config["ROWS"] * keeps, a.device)
    x = renamed(a, device) if config["RENAMED"] else a
    weight_shares_kernel[(columns, programs)](
        descriptor(b, 64, 128), descriptor(x, block, 64), descriptor(out, 64, 64) if by_tma else None,
        out, parts, counters, scale_b, bias, M, N, tiles, steps, per_program, out.stride(0), scale_b.stride(0),
        CODES=TYPES[b.dtype], FP8=b.dtype is not torch.int8, DTYPE=TYPES[a.dtype], ROWS_S=rows, KEEPS=keeps,
        **config, **made, **dependent(device, M),
    )  # fmt: skip


def shares_space(M: int) -> Iterator[Config]:
    """Candidates for M tokens; what does not fit is not legal."""
    for m in (8, 16, 32, 64, 128, 256):
        if m > max(8, 2 * M) or (m < 64 and M > 256):
            continue
        for rows, turns in GROUPS:
            for per_sm, held in (
                ((0, 1), (1, 1)) if m >= 128 else ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 3), (4, 4))
            ):
                for stages in (2, 3, 4, 5, 6, 8):
                    for again in (False, True) if M <= 256 else (False,):
                        yield shares(m, rows, turns, stages, per_sm, held, cdiv(M, m), again)
