"""The launch and the configs of mm_weight_only's `shares` kernel (sm90)."""

import itertools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from fpk.db import Config
from fpk.device import Device, triton_is
from fpk.kernels._tile import after_previous, cdiv
from fpk.kernels.gemm._gluon import AVAILABLE, TYPES, descriptor
from fpk.kernels.gemm._gluon_weight_shares import weight_shares_kernel
from fpk.kernels.gemm._launch import ahead, dependent
from fpk.kernels.gemm._mm import fits_descriptors
from fpk.kernels.gemm._tickets import AXIS, LIMIT, pieces, tickets

_FIELDS = ("BLOCK_M", "ROWS", "TURNS", "STAGES", "PER_SM", "HELD", "COLUMNS", "RENAMED", "CLUSTER")
LAUNCHER_FIELDS = ("PER_SM", "HELD", "COLUMNS")
_SHARED = 233_472  # bytes of an SM
_LARGE, _SMALL = ((1, 1), (0, 1)), ((1, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 3), (4, 4))  # (PER_SM, HELD)
GROUPS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2))  # (ROWS, TURNS) that the kernel has


def shares(*fields: int) -> Config:
    """A config: BLOCK_M tokens, ROWS times 64 weights, TURNS times 128 columns a step; PER_SM programs an SM divide the
    work of COLUMNS tiles of tokens evenly, or each has a whole tile (PER_SM = 0); or CLUSTER programs divide each. An
    SM can hold HELD programs: with more than PER_SM, those of the next launch get ready beside those of this one."""
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
    K, N, m, held = a.shape[1], b.shape[0], config["BLOCK_M"], config["HELD"]
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
    if (held > 2 and m > (64 if held == 3 else 16)) or (turns > 1 and m > 64):
        return False
    cluster, steps = config["CLUSTER"], cdiv(K, 128 * turns)
    if cluster not in (1, 2, 4):
        return False
    if cluster > 1:
        small = 16 * m < 128 * cluster or m > 64 or rows * turns > 2
        if small or (cluster - 1) * cdiv(steps, cluster) >= steps or not triton_is("3.6"):  # seen to work there
            return False
        if cdiv(a.shape[0], m) > AXIS:
            return False
    ring = stages * turns * (rows * 64 * 128 + m * 256 + 16)
    sums = rows * (turns - 1) * (64 * m * 4 + 16) if cluster == 1 else 0
    leaving = rows * 2 * 64 * 64 * out_dtype.itemsize if m >= 128 else 0
    fits = (ring + sums + leaving + 1024) * held <= device.shared_limit
    return fits and cdiv(N, 64 * rows) * rows * _keeps(config) <= LIMIT


def launch_shares(
    device: Device, a: Tensor, b: Tensor, scale_b: Tensor, rows: int, bias: Tensor | None, out: Tensor, config: Config
) -> None:
    """Multiply. How K is divided does not depend on the number of tokens, nor does what a token's row comes to."""
    (M, K), N = a.shape, b.shape[0]
    by_tma, keeps, made = _leaves_by_tma(config, out), _keeps(config), registers(config)
    whole, config = config, {n: v for n, v in config.items() if n != "kernel"}
    block, per_sm, columns = config["BLOCK_M"], config.pop("PER_SM"), config.pop("COLUMNS")
    del config["HELD"]
    tiles, steps = cdiv(N, 64 * config["ROWS"]), cdiv(K, 128 * config["TURNS"])
    per_program, cluster = steps, config["CLUSTER"]
    if cluster > 1:
        per_program = cdiv(steps, cluster)
    elif per_sm:
        per_program = cdiv(tiles * steps, min(max(1, per_sm * device.sm_count // columns), tiles * steps))
        per_program = _snapped(per_program, steps)
    columns, programs = cdiv(M, block), cdiv(tiles * steps, per_program)
    parts, counters = scale_b, scale_b.view(torch.int32)  # unused where every program has whole tiles
    if per_program % steps and cluster == 1:
        sums = programs * 2 * config["ROWS"] * 64 * block  # of a tile of tokens
        several = pieces(M, block, tiles * config["ROWS"] * keeps, sums)
        if len(several) > 1:
            for some in several:
                launch_shares(device, a[some], b, scale_b, rows, bias, out[some], whole)
            return
        parts = torch.empty(columns * sums, device=a.device)
        counters = tickets(columns * tiles * config["ROWS"] * keeps, a.device)
    x = renamed(a, device) if config["RENAMED"] else a
    weight_shares_kernel[(tiles, columns) if cluster > 1 else (columns, programs)](
        descriptor(b, 64, 128), descriptor(x, block, 64), descriptor(out, 64, 64) if by_tma else None,
        out, parts, counters, scale_b, bias, M, N, tiles, steps, per_program, out.stride(0), scale_b.stride(0),
        CODES=TYPES[b.dtype], FP8=b.dtype is not torch.int8, DTYPE=TYPES[a.dtype], ROWS_S=rows, KEEPS=keeps,
        PRODUCERS=4 if cluster > 1 else 1, **config, **made, **ahead(device, M, b),
    )  # fmt: skip


def _snapped(per_program: int, steps: int) -> int:
    """Steps a program, or a few more if programs then have whole tiles, or even parts of them."""
    best = cdiv(per_program, steps) * steps if per_program > steps else cdiv(steps, steps // per_program)
    return best if best <= 1.06 * per_program else per_program


def _is_even(config: Config, N: int, K: int, sms: int) -> bool:
    """Do programs have whole tiles of few tokens, or even parts of them, and almost all SMs as much as the others?"""
    tiles, steps = cdiv(N, 64 * config["ROWS"]), cdiv(K, 128 * config["TURNS"])
    per_program = _snapped(cdiv(tiles * steps, config["PER_SM"] * sms), steps)
    even = steps % per_program == 0 or per_program % steps == 0
    return even and tiles * steps >= 0.9 * per_program * config["PER_SM"] * sms


def shares_configs(M: int, N: int, K: int, sms: int) -> Iterator[Config]:
    """The defaults for M tokens, by what an H200 ran fastest at real layers' sizes; next ones follow the first."""
    m = next(m for m in (8, 16, 32, 64, 128, 256) if m >= min(M, 256))
    if m <= 16:
        one, two = shares(m, 1, 2, 4, 1, 2, 1, 0, 1), shares(m, 1, 2, 4, 2, 2, 1, 0, 1)
        three = shares(m, 1, 1, 5, 3, 3, 1, 0, 1)
        if N * K <= 17 << 20 and _is_even(one, N, K, sms):
            yield one
        if _is_even(three, N, K, sms):
            yield three
        yield from (two, one, three)
        yield shares(m, 2, 2, 5, 1, 1, 1, 0, 1)
        if m == 16:
            yield from (shares(m, 1, 2, 4, 1, 2, 1, 0, 2), shares(m, 2, 1, 5, 1, 2, 1, 0, 2))
    elif m == 32:
        yield from (
            shares(m, 1, 1, 5, 2, 2, 1, 0, 1),
            shares(m, 1, 2, 3, 1, 2, 1, 0, 2),
            shares(m, 2, 2, 4, 1, 1, 1, 0, 1),
        )
    elif m == 64:
        tall, wide = shares(m, 1, 2, 4, 1, 1, 1, 0, 1), shares(m, 2, 2, 3, 1, 1, 1, 0, 1)
        pair = shares(m, 1, 1, 4, 1, 2, 1, 0, 2)
        if N * K > 60_000_000:
            yield wide
        elif N * K <= 26_000_000 and not _is_even(tall, N, K, sms):
            yield pair
        yield from (tall, wide, pair, shares(m, 1, 1, 4, 2, 2, 1, 0, 1), shares(m, 2, 1, 6, 1, 1, 1, 0, 4))
    elif M <= 256:
        if N * K <= 30_000_000 if M <= 128 else 6 * cdiv(N, 128) <= sms:
            yield shares(64, 1, 2, 3, 1, 1, cdiv(M, 64), 0, 1)
        elif K <= 2048 and N < 16384:  # parts would take too much of short products
            yield shares(128, 2, 1, 4, 0, 1, cdiv(M, 128), 0, 1)
        if N * K > 70_000_000 and M > 128:
            yield shares(128, 2, 1, 4, 1, 1, cdiv(M, 128), 1, 1)
        yield shares(128, 2, 1, 4, 1, 1, cdiv(M, 128), 0, 1)
        yield shares(64, 2, 2, 3, 1, 1, cdiv(M, 64), 0, 1)
        yield shares(128, 2, 1, 4, 1, 1, cdiv(M, 128), 1, 1)
    else:
        yield shares(256, 2, 1, 2, 1, 1, cdiv(M, 256), 0, 1)
        yield shares(256, 2, 1, 2, 0, 1, cdiv(M, 256), 0, 1)


def shares_space(M: int) -> Iterator[Config]:
    """Candidates for M tokens; what does not fit is not legal."""
    for m in (8, 16, 32, 64, 128, 256):
        if m > max(8, 2 * M) or m * 4 < min(M, 256):
            continue
        columns = cdiv(M, m)
        for rows, turns in GROUPS:
            slot, leaving = turns * (rows * 8192 + m * 256 + 16), rows * 16384 * (m >= 128)
            for per_sm, held in _LARGE if m >= 128 else _SMALL:
                most = min(8, (_SHARED // held - 2048 - leaving - rows * (turns - 1) * m * 256) // slot)
                for stages in range(most, max(1, most - 3), -1):
                    yield shares(m, rows, turns, stages, per_sm, held, columns, 0, 1)
            if rows * turns <= 2 and 16 <= m <= 64:
                # two groups of 64 tokens spill where registers are for two programs
                for cluster, held in itertools.product((2, 4), (1, 2) if m < 64 or rows * turns == 1 else (1,)):
                    most = min(8, (_SHARED // held - 2048) // slot)
                    for stages in range(most, max(1, most - 2), -1):
                        yield shares(m, rows, turns, stages, 1, held, columns, 0, cluster)
        if M <= 256 and m == 128:
            yield shares(m, 2, 1, 4, 1, 1, columns, 1, 1)
