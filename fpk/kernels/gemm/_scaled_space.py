"""Configs of scaled_mm on sm90: the default by an estimate of its time, then candidates."""

import itertools
from collections.abc import Iterator

from fpk.db import Config
from fpk.kernels._tile import cdiv
from fpk.kernels.gemm._shares import shares_default, shares_space
from fpk.kernels.gemm._warps_space import cheapest, narrow, narrow_space, split_for, warps, warps_space


def late(m: int, n: int, stages: int, group: int = 4, cluster: int = 2) -> Config:
    """A config of the `late` kernel; steps of K have 128 columns."""
    return Config(kernel="late", GROUP_M=group, CLUSTER=cluster, BLOCK_M=m, BLOCK_N=n, STAGES=stages, num_warps=4)


def late_space(M: int) -> Iterator[Config]:
    """Candidates of `late` for M tokens; what does not fit is not legal."""
    if M > 128:
        for (m, n, stages), group, cluster in itertools.product(
            ((128, 256, 4), (256, 128, 4), (128, 128, 6)), (4, 8, 16), (1, 2)
        ):
            yield late(m, n, stages, group, cluster)


def scaled_mm_configs(M: int, N: int, K: int, promoted: bool, int8: bool, sms: int) -> Iterator[Config]:
    """By measured times at real layers' sizes, then candidates."""
    if M <= 64:
        yield from shares_default(M, N, K, sms)
        narrow_tiles = cdiv(N, 64)
        if M > 16 and narrow_tiles > 2 * sms:
            yield warps(M, 128, 8, 1, swap=True)
        stages = 3 if M > 16 and narrow_tiles > sms else 4  # two programs an SM
        yield narrow(max(16, M), 64, 256, stages, split_for(narrow_tiles, 100, 4))
    else:
        group = 4 if M <= 256 else 16
        options = [warps(128, 128, 6, group if M <= 256 else 8), warps(128, 192, 5, group if M <= 256 else 8)]
        if M <= 512:
            options += [warps(64, 128, 6, group), warps(64, 256, 5, group)]
        if int8:
            options.append(warps(256, 128, 4, group))
        elif not promoted:
            options.append(warps(128, 256, 4, group))
        if M <= 256:
            options += [narrow(64, 64, 128, 6, split) for split in (1, 2)] + [warps(64, 128, 6, 1, 2)]
        wide = 1.1 if promoted else 1.03
        found = cheapest(options, M, N, K, sms, wide)
        if M > 256 and not promoted:
            alone = late(128, 256, 4, 8, 1)
            # timed: 1 to 7 % faster with FP8, 4096 tokens and K of 2048 and 4096; as fast or slower elsewhere
            faster = M >= 2048 and K <= 8192 and not int8 and found[0]["BLOCK_N"] == 256
            found = [alone, *found[:2]] if faster else [found[0], alone, found[1]]
        yield from found
    yield from shares_space(M)
    if not promoted:
        yield from late_space(M)
    yield from warps_space(M)
    yield from narrow_space(M, (128, 256))
