"""Configs of mm_shuffled's `warps` kernel."""

from collections.abc import Iterator

from fpk.db import Config
from fpk.kernels._tile import cdiv
from fpk.kernels.pack._shuffle import COLUMNS, ROWS

# tokens, rows of units, units along K, stages, programs an SM (negative: of whole tiles, else of even shares of the
# work), and rows that a group holds where it is not 1.
# What an H200 ran fastest at real layers' sizes: most tokens; codes of 4 bits, of 6, FP8 activations
_FEW = (
    (8, (8, 1, 2, 3, 4), (8, 1, 2, 3, 4), (8, 1, 2, 3, 4)),
    (16, (16, 1, 2, 2, 4), (16, 1, 2, 2, 4), (16, 1, 2, 3, 4)),
    (32, (32, 2, 2, 4, 1), (32, 2, 2, 4, 1), (32, 2, 2, 4, 1)),
    (64, (64, 2, 4, 2, 1), (64, 2, 2, 3, 1), (64, 2, 4, 2, 1)),
    (256, (128, 2, 2, 2, 1), (128, 2, 2, 2, 1), (128, 2, 2, 3, 1)),
)
# the same but for the tokens
_SPACE = (
    (1, 2, 2, 2), (1, 2, 2, 3), (1, 2, 3, 3), (1, 2, 2, 4), (1, 2, 3, 4), (2, 1, 4, 2), (2, 2, 3, 2), (2, 2, 4, 2),
    (2, 1, 2, 1), (2, 1, 3, 1), (2, 1, 4, 1), (2, 2, 2, 1), (2, 2, 3, 1), (2, 2, 4, 1), (2, 4, 2, 1), (3, 2, 3, 1),
    (3, 1, 4, 1),
    (2, 1, 2, -1), (2, 1, 3, -1), (2, 1, 4, -1), (2, 2, 2, -1), (2, 2, 3, -1), (1, 2, 2, -4), (1, 2, 3, -4),
    (2, 1, 3, 4, 2), (2, 1, 3, 3, 2), (2, 1, 4, 3, 2), (4, 1, 3, 2, 2), (4, 1, 4, 1, 2), (4, 1, 5, 1, 2),
    (4, 1, 3, -1, 2), (4, 1, 4, -1, 2), (4, 2, 2, 1, 2), (4, 2, 3, 1, 2),
)  # fmt: skip


def registers(groups: int, per_sm: int) -> dict[str, int]:
    """Registers of a thread, by what it does: those of a program that shares its SM are capped at the launch."""
    if groups == 3:
        return dict(CONSUMER=152, PRODUCER=32)
    if groups == 2:
        return dict(CONSUMER=104, PRODUCER=24, maxnreg=80) if per_sm == 2 else dict(CONSUMER=232, PRODUCER=24)
    return dict(CONSUMER=0, PRODUCER=24, maxnreg={4: 64, 3: 80}.get(per_sm, 120))


def _warps(tokens: int, rows: int, units: int, stages: int, per_sm: int, held: int = 1) -> Config:
    return Config(
        kernel="warps", SPLIT_K=int(per_sm < 0), BLOCK_M=tokens, BLOCK_N=ROWS * rows, BLOCK_K=COLUMNS * units,
        HELD=held, STAGES=stages, PER_SM=abs(per_sm), num_warps=4,
    )  # fmt: skip


def unit_warps_configs(M: int, N: int, six: bool, fp8: bool, sms: int) -> Iterator[Config]:
    """The defaults for M tokens."""
    for most, *found in _FEW:
        if most >= M:
            fields = found[2 if fp8 else six]
            per_sm = fields[-1]
            if most <= 16 and not six and 0.8 * per_sm * sms <= cdiv(N, ROWS) <= per_sm * sms:
                fields = (*fields[:-1], -per_sm)  # nearly one row of units for every program: no parts
            yield _warps(*fields)
            return
    if not fp8:  # the wider tile reads less, and is the first unless it leaves more of a wave idle
        narrow, wide = (cdiv(cdiv(M, m) * cdiv(N, 2 * ROWS), sms) * m for m in (128, 256))
        if cdiv(M, 256) * cdiv(N, 2 * ROWS) <= 0.6 * sms < cdiv(M, 128) * cdiv(N, 2 * ROWS):
            yield _warps(128, 2, 2, 2, 1)  # even shares fill what either tile leaves idle
        if wide <= 1.12 * narrow:
            yield _warps(256, 2, 1, 2 if six else 3, -1)
    yield _warps(128, 2, 2, 3, 1) if fp8 else _warps(128, 2, 2, 2, -1)


def unit_warps_space(M: int) -> Iterator[Config]:
    """Candidates for M tokens; what does not fit is not legal."""
    for m in (8, 16, 32, 64, 128, 256):
        for fields in _SPACE:
            rows, per_sm = fields[0], fields[3]
            if m >= 128:
                fit = abs(per_sm) == 1 and (rows == 2 or (rows == 4 and m == 128))
            else:
                fit = per_sm != -1
            if fit and m <= max(8, 2 * M) and (m >= 64 or M <= 256):
                yield _warps(m, *fields)
