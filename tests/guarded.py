"""Memory that shows what a kernel did wrong with it.

While installed, `torch.empty`, `empty_like`, `empty_strided` and `Tensor.new_empty` return all-ones bytes: NaN in every
float type here, so an element nobody wrote is seen. A zone of the same bytes lies behind every tensor, and `check`
looks whether somebody wrote there, as a store without a mask does after the last row.
"""

import torch
from torch import Tensor

ZONE = 16384  # bytes
KEPT = 256  # allocations that `check` looks at

_zones: list[Tensor] = []
_empty = torch.empty


def install(monkeypatch) -> None:
    _zones.clear()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, _guarding(getattr(owner, name)))


def forget() -> None:
    """Drop what `check` would look at."""
    _zones.clear()


def check() -> None:
    """Assert that no byte behind a tensor allocated since the last check was written."""
    zones = list(_zones)
    _zones.clear()
    for zone in zones:
        written = (zone != 0xFF).nonzero()
        assert not len(written), f"a kernel wrote {len(written)} bytes behind its tensor, first at +{written[0].item()}"


def _guarding(allocate):
    def guarded(*args, **kwargs):
        out = allocate(*args, **kwargs)
        plain = type(out) is Tensor and out.layout is torch.strided and out.device.type in ("cpu", "cuda")
        if not plain or not out.numel() or kwargs.get("out") is not None or kwargs.get("pin_memory"):
            return out
        size = out.untyped_storage().nbytes()
        raw = _empty(size + ZONE, dtype=torch.uint8, device=out.device).fill_(0xFF)
        _zones.append(raw[size:])
        del _zones[:-KEPT]
        return raw[:size].view(out.dtype).as_strided(out.shape, out.stride()).requires_grad_(out.requires_grad)

    return guarded
