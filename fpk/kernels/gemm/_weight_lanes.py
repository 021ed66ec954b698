"""The `lanes` kernel of mm_weight_only: a few rows of weights a program, whose warps divide K among themselves.

Each warp multiplies its own columns by small matrix instructions, and sums meet in shared memory once, at the end: no
sum leaves the program, and rows come in portions small enough to give every multiprocessor as much as the others.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from fpk.db import Config
from fpk.device import Device
from fpk.kernels._tile import after_previous, decode_fp8
from fpk.kernels.gemm._launch import dependent
from fpk.kernels.gemm._mm import load_scale


@triton.jit(do_not_specialize=["M", "stride_sn"])
def weight_lanes_kernel(
    a_ptr, b_ptr, scale_ptr, bias_ptr, out_ptr, M, N, K, stride_am, stride_bn, stride_om, stride_sn,
    ROWS: tl.constexpr, E8M0: tl.constexpr, INTEGERS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
    NAN_CODE: tl.constexpr, IEEE: tl.constexpr, EVEN_K: tl.constexpr, PDL: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LANES: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_N weights times BLOCK_M tokens, LANES times BLOCK_K columns a step."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_n, mask_m = offs_n < N, offs_m < M
    inner = tl.arange(0, LANES)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    # rows beyond the edge read row 0: no mask in the loop, and the store drops them
    b_rows = b_ptr + tl.where(mask_n, offs_n, 0).to(tl.int64)[None, :, None] * stride_bn
    a_rows = a_ptr + tl.where(mask_m, offs_m, 0).to(tl.int64)[None, :, None] * stride_am
    after_previous(PDL)
    acc = tl.zeros((LANES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in range(0, K, LANES * BLOCK_K):
        columns = k + inner
        if EVEN_K:
            b = tl.load(b_rows + columns)
            a = tl.load(a_rows + columns)
        else:
            b = tl.load(b_rows + columns, mask=columns < K, other=0.0)
            a = tl.load(a_rows + columns, mask=columns < K, other=0.0)
        if INTEGERS:
            b = decode_fp8(b, MANTISSA, BIAS, NAN_CODE, IEEE)
        elif a.dtype == tl.bfloat16 and b.dtype.is_fp8():
            b = b.to(tl.float16).to(tl.float32)  # exact, and faster than the direct conversion on sm90
        acc = tl.dot(b.to(a.dtype), tl.permute(a, (0, 2, 1)), acc)
    out = tl.sum(acc, axis=0)
    scale_rows = scale_ptr + (offs_n // ROWS if ROWS > 0 else offs_n * 0) * stride_sn
    out *= load_scale(scale_rows, mask_n, E8M0)[:, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[:, None]
    ptrs = out_ptr + offs_m.to(tl.int64)[None, :] * stride_om + offs_n[:, None]
    tl.store(ptrs, out.to(out_ptr.dtype.element_ty), mask=mask_n[:, None] & mask_m[None, :])


def lanes(m: int, n: int, warps: int, k: int, stages: int) -> Config:
    """A config of `lanes`: n weights times m tokens, `warps` times k columns a step."""
    return Config(kernel="lanes", BLOCK_M=m, BLOCK_N=n, LANES=warps, BLOCK_K=k, num_warps=warps, num_stages=stages)


def lanes_fit(config: Config, device: Device, a: Tensor, cols: int) -> bool:
    """Can the kernel run this?"""
    m, n, many, stages = config["BLOCK_M"], config["BLOCK_N"], config["LANES"], config["num_stages"]
    ring = stages * many * config["BLOCK_K"] * (n + 2 * m)
    return not 0 < cols < a.shape[1] and max(ring, 4 * many * n * m) + 1024 <= device.shared_limit


def launch_lanes(
    device: Device, a: Tensor, b: Tensor, scale_b: Tensor, rows: int, bias: Tensor | None, out: Tensor, config: Config,
    **decoding: int | bool,
) -> None:  # fmt: skip
    (M, K), N = a.shape, b.shape[0]
    config = {n: v for n, v in config.items() if n != "kernel"}
    weight_lanes_kernel[(cdiv(N, config["BLOCK_N"]), cdiv(M, config["BLOCK_M"]))](
        a, b, scale_b, bias, out, M, N, K, a.stride(0), b.stride(0), out.stride(0), scale_b.stride(0),
        ROWS=rows, EVEN_K=K % (config["LANES"] * config["BLOCK_K"]) == 0, **decoding, **config, **dependent(device, M),
    )  # fmt: skip


def lanes_space(M: int) -> Iterator[Config]:
    """Candidates for M tokens; what does not fit is not legal."""
    if M > 64:
        return
    for m in (16, 32, 64):
        if m == max(16, M):
            for n in (16, 32, 64):
                for warps, k in ((4, 64), (4, 128), (8, 64), (8, 128)):
                    for stages in (2, 3, 4, 5, 6):
                        if m * n <= 64 * 32:
                            yield lanes(m, n, warps, k, stages)
