"""Products of two MX or NVFP4 operands by the matrix unit's own block scales (sm100, sm120, gfx950)."""

import triton
import triton.language as tl

from fpk.kernels._tile import tile_of
from fpk.kernels.gemm._mm import finish, store_tile

TARGETS = ("sm100", "sm103", "sm120", "sm121", "gfx950")
INTERPRETABLE = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
KINDS = {"mxfp8_e4m3": "e4m3", "mxfp8_e5m2": "e5m2", "mxfp4": "e2m1"}


def native_kinds(format_a: str, format_b: str, arch: str) -> tuple[str, str] | None:
    """Names of both formats in `tl.dot_scaled`; None for a pair that the unit does not multiply."""
    if format_a in KINDS and format_b in KINDS:
        a, b = KINDS[format_a], KINDS[format_b]
        return None if arch.startswith("sm12") and a != b and "e2m1" in (a, b) else (a, b)
    if format_a == format_b == "nvfp4" and arch.startswith("sm1"):
        return "e2m1", "e2m1"
    return None


@triton.jit
def _codes(rows, k, K, KIND: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    PER: tl.constexpr = 2 if KIND == "e2m1" else 1  # codes in a byte
    at = k // PER + tl.arange(0, BLOCK_K // PER)[None, :]
    if EVEN_K:
        codes = tl.load(rows + at)
    else:
        codes = tl.load(rows + at, mask=at < K // PER, other=0)
    return codes


@triton.jit
def _scales(rows, k, K, stride_k, GROUP: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    at = k // GROUP + tl.arange(0, BLOCK_K // GROUP)[None, :]
    if EVEN_K:
        scale = tl.load(rows + at * stride_k)
    else:
        scale = tl.load(rows + at * stride_k, mask=at * GROUP < K, other=0.0)
    return scale


@triton.jit(do_not_specialize=["M", "stride_sam", "stride_sak"])
def native_kernel(
    a_ptr, b_ptr, sa_ptr, sb_ptr, over_a_ptr, over_b_ptr, bias_ptr, out_ptr,
    M, N, K,
    stride_am, stride_bn, stride_om, stride_sam, stride_sak, stride_sbn, stride_sbk, stride_oam, stride_obn,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m, n = tile_of(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    # rows beyond the edge read row 0: no mask in the loop, and the store drops them
    rows_m = tl.where(offs_m < M, offs_m, 0)[:, None]
    rows_n = tl.where(offs_n < N, offs_n, 0)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = _codes(a_ptr + rows_m * stride_am, k, K, KIND_A, BLOCK_K, EVEN_K)
        b = _codes(b_ptr + rows_n * stride_bn, k, K, KIND_B, BLOCK_K, EVEN_K)
        scale_a = _scales(sa_ptr + rows_m * stride_sam, k, K, stride_sak, GROUP, BLOCK_K, EVEN_K)
        scale_b = _scales(sb_ptr + rows_n * stride_sbn, k, K, stride_sbk, GROUP, BLOCK_K, EVEN_K)
        acc = tl.dot_scaled(a, scale_a, KIND_A, tl.trans(b), scale_b, KIND_B, acc)
    acc = finish(acc, over_a_ptr, over_b_ptr, bias_ptr, None, None, offs_m, offs_n, M, N, stride_oam, stride_obn, 0)
    store_tile(out_ptr, acc, offs_m, offs_n, M, N, stride_om)
