"""Memory that shows what a kernel did wrong with it.

While installed, `torch.empty`, `empty_like`, `empty_strided` and `Tensor.new_empty` return bytes that are NaN in the
tensor's type: all ones, or 0x80 for the fnuz ones. So an element nobody wrote is seen. A zone of the same bytes lies
behind every tensor, and `check` looks whether somebody wrote there, as a store without a mask does after the last row.

`fenced` puts an argument between two such zones. In the interpreter nobody may even read in a zone: there `watch` looks
at the addresses of every load, as a memory checker does on a GPU.
"""

import torch
from torch import Tensor

ZONE = 16384  # bytes
KEPT = 256  # allocations that `check` looks at
FAR = 1 << 26  # bytes: larger spans are not copied

POISON = {torch.float8_e4m3fnuz: 0x80, torch.float8_e5m2fnuz: 0x80}  # others: all ones

_zones: list[tuple[Tensor, int]] = []  # with the byte that fills them
_fences: list[Tensor] = []
_outside: list[str] = []
_empty = torch.empty


def install(monkeypatch) -> None:
    forget()
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
        if not hasattr(getattr(owner, name), "guards"):  # a test inside of somebody's own installation
            monkeypatch.setattr(owner, name, _guarding(getattr(owner, name)))


def forget() -> None:
    """Drop what `check` would look at."""
    _zones.clear()
    _fences.clear()
    _outside.clear()


def check() -> None:
    """Assert that no byte behind a tensor allocated since the last check was written, or read where that is seen."""
    zones, outside = list(_zones), list(_outside)
    forget()
    assert not outside, f"a kernel is outside its tensors: {outside[0]}"
    for zone in zones:
        _expect_poison(*zone)


def _expect_poison(zone: Tensor, byte: int) -> None:
    written = (zone != byte).nonzero()
    assert not len(written), f"a kernel wrote {len(written)} bytes behind its tensor, first at +{written[0].item()}"


def fenced(tensor: Tensor) -> Tensor:
    """The same elements and strides in memory that ends with them on both sides."""
    extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    size = tensor.element_size()
    if tensor.device.type != "cpu" or not tensor.numel() or extent * size > FAR:
        return tensor
    first = ZONE + tensor.data_ptr() % 16
    raw = _empty(first + extent * size + ZONE, dtype=torch.uint8).fill_(POISON.get(tensor.dtype, 0xFF))
    end = first + extent * size
    memory = _empty(0, dtype=torch.uint8)
    memory.set_(tensor.untyped_storage(), tensor.storage_offset() * size, (extent * size,))
    inside = raw[first:end].copy_(memory)
    _fences.extend((raw[:first], raw[end:]))
    del _fences[:-KEPT]
    return inside.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def watch(builder: type) -> None:
    """Make the interpreter's builder look where loads, stores and atomics of a kernel go."""
    for name, pointers_at, mask_at in (
        ("create_masked_load", 0, 1), ("create_masked_store", 0, 2), ("create_atomic_rmw", 1, 3),
        ("create_atomic_cas", 0, None), ("create_atomic_poll", 0, None),
    ):  # fmt: skip
        if hasattr(builder, name):
            setattr(builder, name, _watching(getattr(builder, name), name, pointers_at, mask_at))


def _watching(original, name: str, pointers_at: int, mask_at: int | None):
    def watched(self, *args, **kwargs):
        pointers = args[pointers_at].data
        _look(name.removeprefix("create_"), pointers, pointers == pointers if mask_at is None else args[mask_at].data)
        return original(self, *args, **kwargs)

    return watched


def _look(what: str, pointers, mask) -> None:
    """Is an address in a zone? The addresses' ends first: few zones lie between them."""
    if _outside or not (_fences or _zones):
        return
    used = pointers[mask] if mask.shape == pointers.shape else pointers
    if not used.size:
        return
    low, high = int(used.min()), int(used.max())
    for zone in (*_fences, *(z for z, _ in _zones)):
        start = zone.data_ptr()
        end = start + zone.numel()
        if low < end and high >= start and bool(((used >= start) & (used < end)).any()):
            inside = used[(used >= start) & (used < end)]
            _outside.append(f"{what} of {inside.size} elements, {int(inside[0]) - start} bytes into a zone")
            return


def _guarding(allocate):
    def guarded(*args, **kwargs):
        out = allocate(*args, **kwargs)
        plain = type(out) is Tensor and out.layout is torch.strided and out.device.type in ("cpu", "cuda")
        if not plain or not out.numel() or kwargs.get("out") is not None or kwargs.get("pin_memory"):
            return out
        size = out.untyped_storage().nbytes()
        byte = POISON.get(out.dtype, 0xFF)
        raw = _empty(size + ZONE, dtype=torch.uint8, device=out.device).fill_(byte)
        _zones.append((raw[size:], byte))
        for zone in _zones[:-KEPT]:
            _expect_poison(*zone)
        del _zones[:-KEPT]
        return raw[:size].view(out.dtype).as_strided(out.shape, out.stride()).requires_grad_(out.requires_grad)

    guarded.guards = allocate
    return guarded
