"""How matrix products are launched."""

from fpk.device import Device
from fpk.kernels._tile import early_start

DEPENDENT_TOKENS = 256  # products of more last too long for their start to matter


def dependent(device: Device, M: int) -> dict[str, bool]:
    """Options of an early start for products short enough to gain by it."""
    return early_start(device) if M <= DEPENDENT_TOKENS else dict(PDL=False)
