"""How kernels of expert layers are launched: in a chain of many, each as early as can be."""

import torch

from fpk.device import of
from fpk.kernels.gemm._launch import dependent


def early(device: torch.device) -> dict[str, bool]:
    """Options of programmatic dependent launch, whatever the number of tokens: a layer has seven kernels or more."""
    return dependent(of(device), 0)
