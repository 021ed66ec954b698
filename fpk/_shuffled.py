"""Weights in the layout in which sm90 multiplies packed codes fastest; chosen when a model is loaded, not per call."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpk.device import of
from fpk.formats import E4M3FN, scheme_of
from fpk.op import OPS

__all__ = ["FORMATS", "Shuffled", "shuffle", "shuffle_pays", "shuffled_arguments"]

FORMATS = ("mxfp4", "nvfp4", "mxfp6_e2m3", "mxfp6_e3m2")


@dataclass(frozen=True, eq=False, repr=False)
class Shuffled:
    """A packed weight (N, K), or one for each of E experts, in the order of the op `shuffle_weight`; `fpk.shuffle`
    makes it.

    Args:
        packed: uint8 (lines, 256) or (E, lines, 256).
        row_scale: (N, 1) or (E, N, 1) fp32, the factor of each row; for NVFP4 times the global scale.
        scheme: of the weight.
        target: "bf16" for bf16 activations, "fp8" for FP8 ones with a scale per tensor or token.
        shape: of the values.
        global_scale: of the plain weight, for the way back.
    """

    packed: Tensor
    row_scale: Tensor
    scheme: str
    target: str
    shape: torch.Size
    global_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.row_scale.nbytes

    def parts(self) -> dict[str, Any]:
        """Codes, scale and global scale as `Quantized` takes them: the layout undone."""
        product = scheme_of(self.scheme).product
        pairs = [(self.packed, self.row_scale)]
        if len(self.shape) == 3:
            pairs = list(zip(self.packed, self.row_scale, strict=True))
        made = [OPS["unshuffle_weight"](p, r, self.shape[-1], product, self.target) for p, r in pairs]
        codes, scale = (torch.stack(m) if len(self.shape) == 3 else m[0] for m in zip(*made, strict=True))
        if product == "nvfp4":
            scale = scale.view(E4M3FN.dtype)
        return dict(codes=codes, scale=scale, scheme=self.scheme, global_scale=self.global_scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, by way of the plain layout."""
        from fpk.api import Quantized

        return Quantized(**self.parts(), check=False).dequantize(dtype)

    def __repr__(self) -> str:
        return f"Shuffled({self.scheme} for {self.target}, shape={tuple(self.shape)}, {self.nbytes} bytes)"


def shuffle(weight: Any, activation: str = "none") -> Shuffled:
    """Reorder a packed weight for fast products on sm90; anywhere else they are right, but slow.

    Reads a flag from the device, once.

    Args:
        weight: Quantized (N, K): "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2" or "nvfp4"; or (E, N, K), for the experts of
            `fpk.moe` with bf16 activations.
        activation: "none" for bf16 activations; "fp8_token" or "fp8_tensor" (static or not), for "mxfp4" only.

    Returns:
        What `fpk.mm` or `fpk.moe` takes in the place of the weight.

    Raises:
        ValueError: a weight or activations that the layout does not serve, or with FP8 activations a row whose scales
            lie so far apart that e4m3 does not hold their values.
    """
    scheme = scheme_of(weight.scheme)
    if weight.codes.dim() == 3 and scheme.product in FORMATS and activation == "none":
        return _shuffled_experts(weight, scheme.product)
    if scheme.product not in FORMATS or weight.codes.dim() != 2:
        raise ValueError(f"shuffle.weight: expected an (N, K) matrix of {', '.join(FORMATS)}, got {weight!r}")
    fp8 = activation.removesuffix("_static") in ("fp8_token", "fp8_channel", "fp8_tensor")
    if not fp8 and activation != "none":
        raise ValueError(f"shuffle.activation: expected none, fp8_token or fp8_tensor, got {activation!r}")
    if fp8 and scheme.product != "mxfp4":
        raise ValueError(f"shuffle.activation: expected none for {scheme} weights, got {activation!r}")
    target = "fp8" if fp8 else "bf16"
    packed, row_scale, outside = OPS["shuffle_weight"](weight.codes, weight.scale, scheme.product, target)
    if int(outside):
        raise ValueError(
            f"shuffle.weight: expected scales within 2^11 of each other in every row for {activation} activations, "
            f"{int(outside)} blocks are not; keep the plain layout"
        )
    if weight.global_scale is not None:
        row_scale = row_scale * weight.global_scale
    return Shuffled(packed, row_scale, weight.scheme, target, weight.shape, weight.global_scale)


def shuffle_pays(device: torch.device) -> bool:
    """Has this device kernels for which the layout was made?"""
    from fpk.kernels.gemm._gluon import AVAILABLE

    return AVAILABLE and of(device).arch == "sm90"


def _shuffled_experts(weight: Any, product: str) -> Shuffled:
    """Expert by expert, so that no second copy of all of them is ever held."""
    packed = row_scale = outside = None
    for e, (codes, scale) in enumerate(zip(weight.codes, weight.scale, strict=True)):
        one, factor, count = OPS["shuffle_weight"](codes, scale, product, "bf16")
        if packed is None or row_scale is None or outside is None:
            packed, row_scale = (t.new_empty((weight.codes.shape[0], *t.shape)) for t in (one, factor))
            outside = torch.zeros_like(count)
        packed[e], row_scale[e] = one, factor
        outside += count
    if packed is None or row_scale is None or outside is None:
        raise ValueError(f"shuffle.weight: expected at least one expert, got {weight!r}")
    if int(outside):
        raise ValueError(f"shuffle.weight: expected scales that bf16 holds, {int(outside)} blocks have others")
    if weight.global_scale is not None:
        row_scale *= weight.global_scale
    return Shuffled(packed, row_scale, weight.scheme, "bf16", weight.shape, weight.global_scale)


def shuffled_arguments(qx: Any, weight: Shuffled) -> dict[str, Any]:
    """Arguments of `mm_shuffled`; ValueError for activations that the layout was not made for."""
    plain = isinstance(qx, Tensor)
    fits = qx.dtype is torch.bfloat16 if plain else qx.codes.dtype is E4M3FN.dtype and qx.granularity.cols < 0
    if not fits or plain != (weight.target == "bf16"):
        wanted = "bf16 activations" if weight.target == "bf16" else "e4m3 activations with a scale per token or tensor"
        raise ValueError(f"mm.qx: expected {wanted} for {weight!r}, got {qx.dtype if plain else qx!r}")
    a = qx if plain else qx.codes
    if a.dim() != 2 or a.shape[1] != weight.shape[1]:
        raise ValueError(f"mm.qx: expected (M, {weight.shape[1]}) for {weight!r}, got {tuple(a.shape)}")
    return dict(
        a=a if a.stride(1) == 1 else a.contiguous(), packed=weight.packed, row_scale=weight.row_scale,
        format=scheme_of(weight.scheme).product, scale_a=None if plain else qx.scale,
    )  # fmt: skip
