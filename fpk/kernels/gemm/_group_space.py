"""Configs of scaled_mm_group on sm90: candidates and, by fitted estimates, defaults."""

import itertools
from collections.abc import Iterator

from triton import cdiv

from fpk.db import Config
from fpk.kernels.gemm._warps_space import cheapest, narrow_space, split_for, turns, turns_space, warps, warps_space


def joint(n: int, cluster: int, stages: int | None = None) -> Config:
    """A config of `joint`: `cluster` programs share the K of a tile of 64 tokens and n columns."""
    return Config(
        kernel="joint", BLOCK_M=64, BLOCK_N=n, BLOCK_K=128, STAGES=stages or {64: 12, 128: 8}[n], CLUSTER=cluster,
        num_warps=4,
    )  # fmt: skip


def ordered(n: int, cluster: int = 2, group: int = 8, stages: int | None = None) -> Config:
    """A config of `ordered`: `cluster` tiles of 128 tokens share the n rows of weights that they load."""
    return Config(
        kernel="ordered", GROUP_M=group, BLOCK_M=128, BLOCK_N=n, BLOCK_K=128, STAGES=stages or {192: 4, 256: 3}[n],
        CLUSTER=cluster, num_warps=4,
    )  # fmt: skip


def joint_space(M: int) -> Iterator[Config]:
    """Candidates of `joint` for M tokens."""
    if 16 < M <= 64:
        for n, cluster in itertools.product((64, 128), (1, 2, 4)):
            yield joint(n, cluster)


def ordered_space(M: int) -> Iterator[Config]:
    """Candidates of `ordered` for M tokens."""
    if M > 64:
        for n, cluster, group in itertools.product((256, 192), (2, 1), (8, 4, 16, 2, 1)):
            if group * cluster * 64 <= M and (cluster == 2 or M <= 128):
                yield ordered(n, cluster, group)


def group_configs(M: int, N: int, K: int, sms: int) -> Iterator[Config]:
    """scaled_mm_group on sm90: by measured times at real layers' sizes, then candidates."""
    if M <= 16:
        yield warps(16, 256, 6, 1, split_for(cdiv(N, 256), 56, 4), swap=True)
        yield turns(32, 14)
        yield turns(64, 10)
    else:
        group = 1 if M <= 64 else 4
        options = [turns(32, 14, 1, group), turns(64, 10, 1, group), turns(64, 10, 2, group), turns(128, 6, 1, group)]
        options += [warps(64, 128, 8, group, split) for split in (1, 2)]
        if M > 64:
            options += [warps(128, 128, 6, 4, 2), warps(128, 128, 6, 4), warps(128, 192, 5, 4)]
        if M > 256:
            options = [warps(128, 128, 6, 8), warps(128, 192, 5, 8)]
        yield from cheapest(options, M, N, K, sms, 1.25)  # its second product is scaled while the unit waits
    yield from joint_space(M)
    yield from ordered_space(M)
    yield from warps_space(M)
    yield from turns_space(M)
    yield from narrow_space(M, (128,))
