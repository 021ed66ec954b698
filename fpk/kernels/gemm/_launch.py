"""How matrix products are launched."""

from fpk.device import Device

DEPENDENT_TOKENS = 256  # products of more last too long for their start to matter


def dependent(device: Device, M: int) -> dict[str, bool]:
    """Options of programmatic dependent launch (sm90 and newer), which hides the start of short kernels."""
    if device.vendor == "nv" and device.capability >= 90 and M <= DEPENDENT_TOKENS:
        return dict(PDL=True, launch_pdl=True)
    return dict(PDL=False)
