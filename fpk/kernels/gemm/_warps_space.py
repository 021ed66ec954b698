"""Configs of the kernels that are written for sm90: `warps`, and `split` and `tile` for few tokens."""

import itertools
from collections.abc import Iterator

from triton import cdiv

from fpk.db import Config


def warps(m: int, n: int, stages: int, group: int = 8, split: int = 1, swap: bool = False, k: int = 128) -> Config:
    """A config of the `warps` kernels of scaled_mm and scaled_mm_group."""
    return Config(
        kernel="warps", SWAP=swap, GROUP_M=group, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, STAGES=stages,
        num_warps=4,
    )  # fmt: skip


def weight_warps(m: int, n: int, stages: int, group: int = 1, split: int = 1, k: int = 128) -> Config:
    """A config of the `warps` kernel of mm_weight_only."""
    return Config(
        kernel="warps", GROUP_M=group, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, STAGES=stages, num_warps=4
    )


def narrow(m: int, n: int, k: int, stages: int, split: int, swap: bool = True) -> Config:
    """A config of `split` (`tile`, if K is whole) for few tokens; programs share an SM if their buffers let them."""
    return Config(
        kernel="split" if split > 1 else "tile", SWAP=swap, GROUP_M=1, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
        num_warps=4, num_stages=stages,
    )  # fmt: skip


def split_for(tiles: int, programs: int, most: int = 8) -> int:
    """The smallest power of two that makes at least `programs` of so many tiles, at most `most`."""
    split = 1
    while split < most and tiles * split < programs:
        split *= 2
    return split


def warps_space(M: int) -> Iterator[Config]:
    """Candidates of `warps` for M tokens; what does not fit is not legal."""
    if M >= 128:
        for (m, n), stages, group in itertools.product(
            ((256, 128), (128, 256), (128, 128), (64, 256), (64, 128)), (4, 5, 6), (2, 4, 8, 16)
        ):
            yield warps(m, n, stages, group)
    if M <= 256:
        for n, stages, split in itertools.product((128, 256), (4, 5, 6, 8), (1, 2, 4, 8)):
            yield warps(min(max(16, M), 128), n, stages, 1, split, swap=True)
            if M >= 32:
                yield warps(64, n, stages, 1, split)
            if M >= 128:
                yield warps(128, n, stages, 4, split)


def weight_warps_space(M: int) -> Iterator[Config]:
    """Candidates of mm_weight_only's `warps` for M tokens."""
    for m in sorted({min(max(16, M), 128), min(max(16, M), 64)}):
        for n, stages, split in itertools.product((128, 256), (3, 4, 5, 6), (1, 2, 4, 8)):
            if split == 1 or M <= 256:
                yield weight_warps(m, n, stages, 8 if M > 128 else 1, split)


def narrow_space(M: int, widths: tuple[int, ...], swap: bool = True) -> Iterator[Config]:
    """Candidates of `split` and `tile` for few tokens."""
    if M <= 64:
        for n, k, stages, split in itertools.product((64, 128), widths, (3, 4, 6), (1, 2, 4, 8)):
            yield narrow(max(16, M), n, k, stages, split, swap)


def scaled_mm_configs(M: int, N: int, promoted: bool, int8: bool, sms: int) -> Iterator[Config]:
    """scaled_mm on sm90: what an H200 ran fastest at real layers' sizes, then candidates."""
    wide = cdiv(N, 128) * cdiv(M, 64)  # tiles of 64 x 128
    if M <= 64:
        narrow_tiles = cdiv(N, 64)
        if M > 16 and narrow_tiles > 2 * sms:
            yield warps(M, 128, 8, 1, swap=True)
        stages = 3 if M > 16 and narrow_tiles > sms else 4  # two programs an SM
        yield narrow(max(16, M), 64, 256, stages, split_for(narrow_tiles, 100, 4))
    elif M <= 256 and (promoted or int8 or wide <= 2 * sms):
        yield warps(64 if wide <= sms else 128, 128, 6, 4)
    elif M <= 256:
        yield warps(128, 256, 4, 4)
    elif promoted:
        yield warps(128, 128, 5, 8)
    else:
        yield warps(256, 128, 4, 16) if int8 else warps(128, 256, 4, 16)
    yield from warps_space(M)
    yield from narrow_space(M, (128, 256))


def group_configs(M: int, N: int) -> Iterator[Config]:
    """scaled_mm_group on sm90, likewise."""
    if M <= 16:
        yield warps(16, 256, 6, 1, split_for(cdiv(N, 256), 56, 4), swap=True)
    elif M <= 64:
        yield warps(64, 128, 8, 1, split_for(cdiv(N, 128), 56, 4))
    elif M <= 256:
        yield warps(128, 128, 6, 4, split_for(cdiv(N, 128) * cdiv(M, 128), 100, 2))
    else:
        yield warps(128, 128, 6, 8)
    yield from warps_space(M)
    yield from narrow_space(M, (128,))


def weight_only_configs(M: int, N: int, sms: int) -> Iterator[Config]:
    """mm_weight_only on sm90, likewise."""
    if M <= 16 and N < 16384:
        yield narrow(16, 128, 128, 4, split_for(cdiv(N, 128), 100, 4), swap=False)
    elif M <= 16:
        yield weight_warps(16, 256, 4)
    elif M <= 64 and N < 8448:
        yield weight_warps(M, 128, 4, 1, split_for(cdiv(N, 128), 100, 4))
    elif M <= 64:
        yield weight_warps(M, 256, 4, 1, split_for(cdiv(N, 256), 80, 4))
    elif M <= 256 and cdiv(N, 256) * cdiv(M, 64) <= sms:
        yield weight_warps(64, 256, 4, 8, split_for(cdiv(N, 256) * cdiv(M, 64), 100, 2))
    elif M <= 256:
        yield weight_warps(128, 256, 3, 8)
    else:
        yield weight_warps(128, 256, 6, 8, k=64)
    yield from weight_warps_space(M)
    yield from narrow_space(min(M, 16), (128,), swap=False)
