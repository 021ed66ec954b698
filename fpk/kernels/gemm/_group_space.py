"""Configs of scaled_mm_group on sm90: candidates and, by fitted estimates, defaults."""

import itertools
from collections.abc import Iterator

from fpk.db import Config
from fpk.kernels._tile import cdiv
from fpk.kernels.gemm._warps_space import estimate, narrow_space, split_for, turns, turns_space, warps, warps_space


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
        for n, group in itertools.product((256, 192), (8, 4, 16, 2, 1)):
            if min(M / 2048, 8) <= group <= max(1, M // 256):
                yield ordered(n, 2, group)
        if M <= 128:
            yield from (ordered(n, 1, 1) for n in (256, 192))


def group_estimate(config: Config, M: int, N: int, K: int, sms: int) -> float:
    """Microseconds that a product of more than 16 tokens would take, fitted to what an H200 measured: waves of
    programs, times steps of K and what begins and ends a tile, or the weights from memory."""
    kernel, m, n, steps = config["kernel"], config["BLOCK_M"], config["BLOCK_N"], cdiv(K, 128)
    if kernel in ("joint", "ordered"):
        cluster = config["CLUSTER"]
        tiles = cdiv(M, m) * cdiv(N, n) if kernel == "joint" else cdiv(M, m * cluster) * cdiv(N, n)
        waves = cdiv(tiles, sms // cluster)
    if kernel == "ordered":
        step, rest = (0.862, 2.7) if n == 256 else (0.669, 1.6)
        return 3 + waves * (steps * step + rest)
    if kernel == "joint":  # a program that ends leaves its place to one that begins anew
        time = waves * cdiv(steps, cluster) * (0.135 + 0.00063 * n) + (waves - 1) * (2 + 0.0375 * n)
        return max(4.2 + 2.6 * (cluster - 1) + time, 3 + (N + M) * K / 3.75e6)
    if kernel == "warps" and m == 128 and n in (128, 192):
        (step, rest), split = (0.451, 1.6) if n == 128 else (0.68, 2.4), config["SPLIT_K"]
        sums = 4e-6 * M * N * split if split > 1 else 0.0
        return 3 + cdiv(cdiv(M, m) * cdiv(N, n) * split, sms) * (cdiv(steps, split) * step + rest) + sums
    return 1.2 * estimate(config, M, N, K, sms)


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
        streamed = [joint(128, 2), joint(64, 1), joint(64, 2)]
        if M > 64:
            streamed = [ordered(n, 2, min(8, max(1, M // 256))) for n in (256, 192)]
        found, others = (
            sorted(some, key=lambda c: group_estimate(c, M, N, K, sms))[:3] for some in (streamed + options, options)
        )
        yield found[0]
        yield from others  # what is it where triton has no streams comes second
    yield from joint_space(M)
    yield from ordered_space(M)
    yield from warps_space(M)
    yield from turns_space(M)
    yield from narrow_space(M, (128,))
