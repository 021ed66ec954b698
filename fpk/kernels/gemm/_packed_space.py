"""Candidates and inputs of the products of packed weights."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor

from fpk.db import Config
from fpk.device import Device, triton_is
from fpk.formats import MX, MX_BLOCK, NVFP4_BLOCK
from fpk.kernels.gemm._mm import scale_step, stages_held
from fpk.kernels.gemm._operands import COMPUTE, Operand, constants, exact_in, promoted_groups
from fpk.samples import generator, sample, scales, strided

# format and group of the activations and of the weights: every format on each side, and the pairs that models use
PAIRS = (
    ("none", "mxfp4", -1, -1),
    ("none", "nvfp4", -1, -1),
    ("none", "mxfp6_e3m2", -1, -1),
    ("none", "mxfp6_e2m3", -1, -1),
    ("none", "int4", -1, 128),
    ("fp8", "mxfp4", -1, -1),
    ("fp8", "int4", 128, 48),
    ("fp8", "mxfp8_e5m2", 48, -1),
    ("int8", "int4", -1, 64),
    ("int8", "mxfp4", -1, -1),
    ("int8", "nvfp4", -1, -1),
    ("mxint8", "mxint8", -1, -1),
    ("mxfp8_e4m3", "mxfp8_e4m3", -1, -1),
    ("mxfp6_e2m3", "mxfp6_e3m2", -1, -1),
    ("mxfp4", "mxfp4", -1, -1),
    ("nvfp4", "nvfp4", -1, -1),
    ("mxfp8_e5m2", "int4", -1, -1),
)


def step_of(K: int, groups: list[int]) -> int:
    """A multiple of every step of columns that lies inside one group of each."""
    return scale_step(K, *groups) if any(n < K for n in groups) else 256


def compute_types(a: Operand, b: Operand, device: Device) -> list[str]:
    """The types that a pair can be multiplied in, the preferred one first.

    With groups of 32, 16 bits and scales inside the values beat FP8 and sums scaled every 32 columns, unless both
    operands are FP8 already (measured on an H200).
    """
    found = [compute for compute in COMPUTE if exact_in(compute, a, b, device)]
    decoded = min(a.bits, b.bits) < 8 and b.group == MX_BLOCK
    return found[::-1] if decoded else found


def halves_steps(config: Config, device: Device, a: Operand, b: Operand) -> bool:
    """Would the compiler read one half of every step's columns, and that twice?

    Triton 3.6 and 3.7 let a thread of mma.sync hold eight neighbours of codes that lie two to a byte, and four threads
    32 columns, even if a step has 16, as it has where groups are odd multiples of 16. Warp groups read whole steps.
    """
    rows = config["BLOCK_N" if config["SWAP"] else "BLOCK_M"]
    by_threads = rows < 64 or device.arch not in ("sm90", "sm100", "sm103")
    narrow = config["BLOCK_K"] < 32 and min(a.bits, b.bits) < 8
    return narrow and by_threads and device.vendor == "nv" and triton_is("3.6", "3.7")


def fits(config: Config, device: Device, a: Operand, b: Operand, a_dtype: torch.dtype, columns: int) -> bool:
    """Is the pair exact in the config's type, does a step lie inside one group, does the device hold the tiles?"""
    compute, width = config["COMPUTE"], config["BLOCK_K"]
    if not exact_in(compute, a, b, device) or width < (16 if compute == "half" else 32):
        return False
    if halves_steps(config, device, a, b):
        return False
    if step_of(columns, promoted_groups(constants(compute, a, b, a_dtype))) % width:
        return False
    stages, size = stages_held(config, device), 2 if compute == "half" else 1
    # packed tiles wait in every stage, decoded ones pass through once
    buffers = sum(
        config[rows] * width * (this.bits * stages + 8 * size * (this.bits < 16)) // 8
        for rows, this in (("BLOCK_M", a), ("BLOCK_N", b))
    )
    return buffers + 2048 <= device.shared_limit


def allowed_error(a: Tensor, format_a: str, out_dtype: torch.dtype) -> float:
    """Tolerance of a product: the rounding of the output, and what FP8 sums lose inside a step on sm90."""
    rounding = {torch.bfloat16: 1.8e-3, torch.float16: 3e-4, torch.float32: 2e-6}[out_dtype]
    lost = 0.0 if a.device.type == "cpu" or format_a in ("none", "int8") else 3e-4
    return (rounding**2 + lost**2) ** 0.5 * 1.1


def packed_space(M: int, compute: str, step: int, device: Device) -> Iterator[Config]:
    """Candidates for M tokens (on the key grid) and steps that divide `step`; the first is a safe default."""
    least = 16 if compute == "half" else 32
    widest = step & -step  # its largest power of two
    if widest < least:
        return
    wide = min(64 if compute == "half" else 128, widest)
    common = dict(kernel="tile", COMPUTE=compute)
    if device.arch == "cpu":  # the interpreter wants few programs, cheap ones
        yield Config(**common, SWAP=False, GROUP_M=8, BLOCK_M=64, BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=2)
    elif M <= 64:
        yield Config(
            kernel="split", COMPUTE=compute, SWAP=True, GROUP_M=1, SPLIT_K=8, BLOCK_M=max(16, M), BLOCK_N=64,
            BLOCK_K=min(128, widest), num_warps=4, num_stages=3,
        )  # fmt: skip
    elif M >= 128:
        m, warps, stages = (64, 4, 4) if widest == 32 else (128, 8, 3)
        yield Config(
            **common, SWAP=False, GROUP_M=8, BLOCK_M=m, BLOCK_N=128, BLOCK_K=min(wide, 64), num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    if M <= 64:
        yield Config(
            **common, SWAP=True, GROUP_M=1, BLOCK_M=max(16, M), BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=3
        )
    yield Config(**common, SWAP=False, GROUP_M=8, BLOCK_M=64, BLOCK_N=64, BLOCK_K=wide, num_warps=4, num_stages=3)
    heights = [m for m in (16, 32, 64, 128) if m <= max(16, M)]
    widths = [k for k in (32, 64, 128, 256) if least <= k <= widest] or [widest]
    for m, n, k, warps, stages in itertools.product(heights, (32, 64, 128, 256), widths, (4, 8), (2, 3, 4)):
        if m * n <= 128 * 256 and (m >= 64 or M <= 64) and not (warps == 8 and m * n < 64 * 64):
            swap = m <= 64 and n >= 64 and M <= 256
            yield Config(
                **common, SWAP=swap, GROUP_M=1 if M <= 64 else 8, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
    if M <= 256:
        for m, n, k, stages, split in itertools.product(
            [m for m in heights if m <= 64], (64, 128), widths[-2:], (2, 3, 4), (2, 4, 8)
        ):
            yield Config(
                kernel="split", COMPUTE=compute, SWAP=True, GROUP_M=1, SPLIT_K=split, BLOCK_M=m, BLOCK_N=n, BLOCK_K=k,
                num_warps=4, num_stages=stages,
            )  # fmt: skip


def sample_operand(
    shape: tuple[int, ...], format: str, group: int, per_row: bool, zero_point: bool, a_dtype: torch.dtype, kind: str,
    layout: str, device: Any, seed: int,
) -> dict[str, Tensor | None]:  # fmt: skip
    """codes, scale, global_scale and zero_point of a random operand of `shape`; None where the format has none."""
    *lead, rows, K = shape
    made: dict[str, Tensor | None] = dict(scale=None, global_scale=None, zero_point=None)
    one_per = (*lead, rows if per_row else 1, 1)
    bits = MX[format].element.bits if format in MX else {"nvfp4": 4, "int4": 4}.get(format, 8)
    if bits < 8:
        g = generator(seed, device)
        codes = torch.randint(0, 256, (*lead, rows, K * bits // 8), generator=g, device=device, dtype=torch.int16)
        if kind != "normal":
            codes[..., :: 2 if kind == "zero_rows" else 1, :] = 0
        codes = codes.to(torch.uint8)
    else:
        dtype = MX[format].element.dtype if format in MX else {"none": a_dtype, "int8": torch.int8}.get(format)
        codes = sample(shape, dtype or torch.float8_e4m3fn, kind, device, seed)
    made["codes"] = strided(codes, layout)
    if format in MX:
        made["scale"] = scales((*lead, rows, triton.cdiv(K, MX_BLOCK)), device, seed + 10, e8m0=True)
    elif format == "nvfp4":
        scale = scales((*lead, rows, triton.cdiv(K, NVFP4_BLOCK)), device, seed + 10) * 64
        made["scale"] = scale.to(torch.float8_e4m3fn)
        made["global_scale"] = scales(one_per, device, seed + 11)
    elif format != "none":
        columns = one_per if group < 0 else (*lead, rows, triton.cdiv(K, group))
        made["scale"] = scales(columns, device, seed + 10)
    if format == "int4" and zero_point:
        g, like = generator(seed + 12, device), made["scale"]
        assert like is not None
        made["zero_point"] = torch.randint(-8, 8, like.shape, generator=g, device=device, dtype=torch.int32)
    return made
