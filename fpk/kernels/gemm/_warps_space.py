"""Configs of the kernels that are written for sm90: `warps`, `turns`, `direct`; `split` and `tile` for few tokens."""

import itertools
from collections.abc import Iterator

from fpk.db import Config
from fpk.kernels._tile import cdiv


def warps(m: int, n: int, stages: int, group: int = 8, split: int = 1, swap: bool = False, k: int = 128) -> Config:
    """A config of the `warps` kernels of scaled_mm and scaled_mm_group."""
    return Config(
        kernel="warps", SWAP=swap, GROUP_M=group, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, STAGES=stages,
        num_warps=4,
    )  # fmt: skip


def turns(n: int, stages: int, split: int = 1, group: int = 1, per_sm: int = 1) -> Config:
    """A config of the `turns` kernel of scaled_mm_group; its tiles have 64 tokens."""
    return Config(
        kernel="turns", GROUP_M=group, SPLIT_K=split, BLOCK_M=64, BLOCK_N=n, BLOCK_K=128, STAGES=stages, num_warps=4,
        PER_SM=per_sm,
    )  # fmt: skip


def weight_warps(
    m: int, n: int, stages: int, group: int = 1, split: int = 1, k: int = 128, kernel: str = "warps"
) -> Config:
    """A config of the `warps` and `direct` kernels of mm_weight_only."""
    return Config(
        kernel=kernel, GROUP_M=group, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, STAGES=stages, num_warps=4
    )


def estimate(config: Config, M: int, N: int, K: int, sms: int) -> float:
    """Microseconds that an FP8 or INT8 product of more than 16 tokens would take: waves of programs times steps of K,
    and what every launch and a split add. Fitted to what an H200 measured."""
    m, n, split = config["BLOCK_M"], config["BLOCK_N"], config["SPLIT_K"]
    if config["kernel"] == "turns":
        step = 0.185 + 0.0007 * n
    else:
        step = max(0.085 + 2.04e-5 * m * n, 0.0017 * (m + min(n, 128)))  # products, loads
    waves = cdiv(cdiv(M, m) * cdiv(N, n) * split, sms)
    time = waves * (cdiv(cdiv(K, config["BLOCK_K"]), split) * step + 1.5e-5 * m * n)
    return 3 + max(time, (N + M) * K / 4.2e6) + (1.5 + split * M * N * 2e-6 if split > 1 else 0)


def cheapest(configs: list[Config], M: int, N: int, K: int, sms: int, wide: float = 1.0) -> list[Config]:
    """The three configs of the smallest estimate, that first; `wide`: what 192 columns cost more than the estimate."""
    return sorted(configs, key=lambda c: estimate(c, M, N, K, sms) * (wide if c["BLOCK_N"] == 192 else 1))[:3]


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
            ((256, 128), (128, 256), (128, 192), (128, 128), (128, 96), (64, 256), (64, 128)), (4, 5, 6), (2, 4, 8, 16)
        ):
            yield warps(m, n, stages, group)
    if M <= 256:
        for n, stages, split in itertools.product((128, 256), (4, 5, 6, 8), (1, 2, 4, 8)):
            yield warps(min(max(16, M), 128), n, stages, 1, split, swap=True)
            if M >= 32:
                yield warps(64, n, stages, 1, split)
                yield warps(64, n // 2, 2 * stages, 1, split)
            if M >= 128:
                yield warps(128, n, stages, 4, split)


def turns_space(M: int) -> Iterator[Config]:
    """Candidates of `turns` for M tokens."""
    if M <= 256:
        for n, split, per_sm in itertools.product((32, 64, 128), (1, 2, 4), (1, 2)):
            most = {32: 14, 64: 10, 128: 6}[n] // per_sm // 2 * 2
            for stages in (most, most - 2) if per_sm == 1 else (most,) * (n <= 64):
                yield turns(n, stages, split, 1 if M <= 64 else 4, per_sm)


def weight_warps_space(M: int) -> Iterator[Config]:
    """Candidates of mm_weight_only's `warps` and `direct` for M tokens."""
    for m in sorted({min(max(16, M), 128), min(max(16, M), 64)}):
        for n, stages, split in itertools.product((128, 256), (3, 4, 5, 6), (1, 2, 4, 8)):
            if split == 1 or M <= 256:
                for kernel in ("warps", "direct"):
                    yield weight_warps(m, n, stages, 8 if M > 128 else 1, split, kernel=kernel)


def narrow_space(M: int, widths: tuple[int, ...], swap: bool = True) -> Iterator[Config]:
    """Candidates of `split` and `tile` for few tokens."""
    if M <= 64:
        for n, k, stages, split in itertools.product((64, 128), widths, (3, 4, 6), (1, 2, 4, 8)):
            yield narrow(max(16, M), n, k, stages, split, swap)


def weight_only_configs(M: int, N: int, sms: int) -> Iterator[Config]:
    """mm_weight_only on sm90, likewise."""
    if M <= 16:
        if N < 16384:
            yield narrow(16, 128, 128, 4, split_for(cdiv(N, 128), 100, 4), swap=False)
        else:
            yield weight_warps(16, 256, 4)
        for n, stages in ((128, 8), (256, 5)):
            yield weight_warps(16, n, stages, 1, split_for(cdiv(N, n), 100, 4), kernel="direct")
    elif M <= 64:
        few = weight_warps(M, 128, 5, 1, split_for(cdiv(N, 128), 100, 4), kernel="direct")
        many = weight_warps(M, 256, 4, 1, split_for(cdiv(N, 256), 80, 4), kernel="direct")
        yield from (few, many) if N < 8448 else (many, few)
        yield (few if N < 8448 else many) | dict(kernel="warps", STAGES=4)
    else:
        for kernel in ("direct", "warps"):
            if M <= 256 and cdiv(N, 256) * cdiv(M, 64) <= sms:
                split = split_for(cdiv(N, 256) * cdiv(M, 64), 100, 2)
                yield weight_warps(64, 256, 4, 8, split, kernel=kernel)
            elif M <= 256:
                yield weight_warps(128, 256, 3, 8, kernel=kernel)
            else:
                yield weight_warps(128, 256, 6, 8, k=64, kernel=kernel)
    yield from weight_warps_space(M)
    yield from narrow_space(min(M, 16), (128,), swap=False)
