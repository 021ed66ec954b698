"""The launch and the configs of grouped_scaled_mm_group's `streams` kernel (sm90)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fpk.db import Config
from fpk.device import Device, of
from fpk.formats import FP8
from fpk.kernels._tile import cdiv, early_start
from fpk.kernels.gemm._cluster import available
from fpk.kernels.gemm._gluon import TYPES, descriptor
from fpk.kernels.moe._gluon_expert_streams import expert_streams_kernel
from fpk.kernels.moe._gluon_parts import schedule_kernel
from fpk.kernels.moe._grouped import expert_bins, fits_row_descriptor, fits_weight_descriptor
from fpk.op import Kernel

STREAMS_KERNEL = Kernel(expert_streams_kernel, targets=("sm90",), interpretable=False, matrix=True)
LIMIT = 2**31  # offsets in elements are int32


def streams(ahead: bool = True, deep: bool = False, group: int = 8, cluster: int = 1, order: bool = False) -> Config:
    """A config. deep: a slot more, of room that results have otherwise."""
    stages, boxes = (4, 1) if deep else (3, 4)
    return Config(
        kernel="streams", AHEAD=ahead, ORDER=order, STAGES=stages, BOXES=boxes, GROUP_M=group, CLUSTER=cluster,
        num_warps=4,
    )  # fmt: skip


def streams_default(rows: int, K: int, gather: bool) -> Iterator[Config]:
    """The default for experts of about `rows` rows where this kernel was timed to be the fastest, else nothing.

    An H200 timed ten layers, of 64 to 1024 rows an expert: 1.03 to 1.18 times as fast as what was the default at nine,
    0.92 times at 1024 rows of K = 14336. What else reads many gathered rows is not of 128 x 256.
    """
    if rows >= 64 and (gather or rows < 512 or K <= 8192):
        yield streams()


def streams_space() -> Iterator[Config]:
    """Candidates; what does not fit is not legal."""
    yield from (streams(group=group) for group in (8, 4, 16))
    yield from (streams(deep=True), streams(ahead=False), streams(cluster=2), streams(order=True))
    yield from (streams(deep=True, order=True), streams(deep=True, ahead=False), streams(deep=True, group=16))
    yield from (streams(cluster=2, deep=True), streams(cluster=2, order=True), streams(order=True, group=4))


def places(stages: int, boxes: int) -> dict[str, int]:
    """Where in shared memory what lies: results of two consumers, scales of rows and of weights, barriers."""
    out = stages * 384 * 128
    sa = out + 2 * boxes * 8192
    sb = sa + stages * 512
    return dict(OUT_AT=out, SA_AT=sa, SB_AT=sb, BARS_AT=cdiv(sb + stages * 256, 1024) * 1024)


def reads_like(b: Tensor, scale_b: Tensor) -> bool:
    """Can the kernel read such weights, with a scale for each block of 128 x 128, wherever they lie?"""
    (_, N, K), (E, blocks, steps) = b.shape, scale_b.shape
    near = E * N < LIMIT and E * scale_b.stride(0) + blocks * scale_b.stride(1) + steps < LIMIT
    plain = b.dtype in FP8 and scale_b.dtype is torch.float32 and scale_b.stride(2) == 1
    return plain and near and N % 8 == 0 and K % 16 == 0


def streams_run(device: torch.device) -> bool:
    """Is this a GPU that the kernel is for?"""
    return of(device).arch == "sm90" and available()


streams_run._dynamo_marked_constant = True  # type: ignore[attr-defined]  # of a traced graph: torch.compile looks nothing up


def streams_legal(
    config: Config, device: Device, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor,
    blocks: tuple[int, int, int], bias: Tensor | None, out_dtype: torch.dtype, gather: Tensor | None,
) -> bool:  # fmt: skip
    """Can the kernel run this? blocks: group, block_rows, block_cols."""
    if not available() or blocks != (128, 128, 128) or bias is not None or out_dtype.itemsize != 2:
        return False
    if places(config["STAGES"], config["BOXES"])["BARS_AT"] + 1024 > device.shared_limit:
        return False
    if config["CLUSTER"] > 1 and gather is not None:  # copies come to the program that asks for them
        return False
    far = max(scale_a.stride(0), 0 if gather is None else a.stride(0))
    near = a.shape[0] * far + scale_a.shape[1] * scale_a.stride(1) < LIMIT
    plain = near and scale_a.dtype is torch.float32 and reads_like(b, scale_b)
    return plain and fits_row_descriptor(a) and fits_weight_descriptor(b)


def launch_streams(
    config: Config, a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor, scale_b: Tensor, gather: Tensor | None,
    top_k: int, out: Tensor,
) -> None:  # fmt: skip
    """out (R, N) = grouped product of a (R, K), or (T, K) with gather, and b (E, N, K)."""
    (E, N, K), R, device = b.shape, out.shape[0], of(a.device)
    config = {n: v for n, v in config.items() if n != "kernel"}
    cluster, early = config["CLUSTER"], early_start(device)
    most = (R + min(E + 1, R) * 127) // 128
    table = torch.empty(1 + 3 * most, dtype=torch.int32, device=a.device)
    schedule_kernel[(cdiv(most, 32),)](
        offs, table, R, E, BLOCK_E=expert_bins(E), BLOCK_M=128, BLOCK=32, num_warps=4, **early
    )
    matrix = b.as_strided((E * N, K), (b.stride(1), 1))
    expert_streams_kernel[(min(device.sm_count // cluster, most * cdiv(N, 256 * cluster)),)](
        descriptor(matrix, 128, 128), descriptor(out, 64, 64), descriptor(a, 128 // cluster, 128), offs, table,
        a, scale_a, scale_b, gather, out, R, E, N, K, top_k, a.stride(0), *scale_a.stride(), *scale_b.stride()[:2],
        out.stride(0), CODES=TYPES[a.dtype], OUT=TYPES[out.dtype], REGISTERS=232,
        **places(config["STAGES"], config["BOXES"]), **config, **early,
    )  # fmt: skip
