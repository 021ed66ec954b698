"""Configs of the kernels that are written for sm90: `warps`, and `split` and `tile` that ask for weights early."""

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


def early(m: int, n: int, k: int, stages: int, split: int, prefetch: int, swap: bool = True) -> Config:
    """A config of `split` (`tile`, if K is whole) whose programs ask L2 for `prefetch` bytes of each weight row."""
    return Config(
        kernel="split" if split > 1 else "tile", SWAP=swap, GROUP_M=1, SPLIT_K=split, PREFETCH=prefetch, BLOCK_M=m,
        BLOCK_N=n, BLOCK_K=k, num_warps=4, num_stages=stages,
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


def early_space(M: int, widths: tuple[int, ...], swap: bool = True) -> Iterator[Config]:
    """Candidates of `split` and `tile` that ask for weights early."""
    if M <= 64:
        for n, k, stages, split, prefetch in itertools.product(
            (64, 128), widths, (3, 4, 6), (1, 2, 4, 8), (1024, 2048, 4096)
        ):
            yield early(max(16, M), n, k, stages, split, prefetch, swap)


def scaled_mm_configs(M: int, N: int, promoted: bool, int8: bool, sms: int) -> Iterator[Config]:
    """scaled_mm on sm90: what an H200 runs fastest at real layers' sizes, then candidates."""
    if M <= 64:
        yield early(max(16, M), 64, 256, 4, split_for(cdiv(N, 64), 120, 4), 1024)
    elif M <= 256:
        if cdiv(N, 128) * (M // 64) <= sms:
            yield warps(64, 128, 6, 1, swap=True)
        elif not promoted:
            yield warps(256, 128, 4, 4)
        yield warps(128, 128, 6, 4)
    elif promoted:
        yield warps(128, 128, 5, 8)
    else:
        yield warps(256, 128, 4, 8) if int8 else warps(128, 256, 4, 8)
    yield from warps_space(M)
    yield from early_space(M, (128, 256))


def group_configs(M: int, N: int, sms: int) -> Iterator[Config]:
    """scaled_mm_group on sm90, likewise."""
    if M <= 16:
        yield warps(16, 256, 6, 1, split_for(cdiv(N, 256), sms // 2), swap=True)
    elif M <= 64:
        yield warps(64, 256, 5, 1, split_for(cdiv(N, 256), sms // 2))
    elif M <= 256:
        yield warps(64 if cdiv(N, 128) * (M // 64) <= sms else 128, 128, 6, 4)
    else:
        yield warps(128, 128, 6, 4)
    yield from warps_space(M)
    yield from early_space(M, (128,))


def weight_only_configs(M: int, N: int, sms: int) -> Iterator[Config]:
    """mm_weight_only on sm90, likewise."""
    if M <= 256:
        yield weight_warps(
            min(max(16, M), 128), 128 if M <= 64 else 256, 4 if M <= 64 else 3, 1, split_for(cdiv(N, 128), sms * 3 // 4)
        )
    else:
        yield weight_warps(128, 256, 3, 8)
    yield from weight_warps_space(M)
    yield from early_space(min(M, 16), (128,), swap=False)
