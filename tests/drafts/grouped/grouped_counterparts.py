"""What the inline assembly of row_copies.py does, for tests/gluon_language.py; the rest is block/counterparts.py."""

from typing import Any

import torch
from gluon_emulator import Barrier, pause, task
from gluon_language import Pointer
from torch import Tensor


class Copies:
    """What a partition has copied since it told the barrier before; the barrier hears when all has landed."""

    def __init__(self) -> None:
        self.flying = 0
        self.barrier: Barrier | None = None

    def change(self, by: int, barrier: Barrier | None = None) -> None:
        self.flying, self.barrier = self.flying + by, barrier or self.barrier
        if self.flying == 0 and self.barrier is not None:
            self.barrier.change(arrivals=128)


def copies() -> Copies:
    return vars(task()).setdefault("row_copies", Copies())


def copy(to: int, data: Tensor) -> None:
    pause()
    program, mine, place = task().program, copies(), (to, to + data.numel())
    program.check_writable(place, "a copy")
    program.landing.append(place)
    mine.change(1)

    def landed() -> None:
        program.landing.remove(place)
        program.memory[place[0] : place[1]] = data
        program.filled[place[0] : place[1]] = True
        mine.change(-1)

    task().machine.copy(landed)


def copy_scales(at: Tensor, pointers: Pointer) -> None:
    flat, places, _ = pointers.places(None)
    assert at.tolist() == list(range(int(at[0]), int(at[0]) + 4 * len(at), 4))
    copy(int(at[0]), flat[places].view(torch.uint8))


def copy_rows(at: int, rows: Tensor, chunks: Tensor, pointers: Pointer, bytes: Tensor) -> None:
    each = Pointer(pointers.tensor.view(torch.uint8), torch.as_tensor(pointers.at)[..., None] + torch.arange(16))
    flat, places, wanted = each.places(torch.arange(16) < bytes[..., None])
    data = torch.where(wanted, flat[places], torch.zeros((), dtype=torch.uint8))
    assert (rows * 8 + chunks).flatten().tolist() == list(range(data.numel() // 16))
    copy(at, data.flatten())


def tell(at: Any) -> None:
    pause()
    mine = copies()
    vars(task())["row_copies"] = Copies()
    mine.change(0, task().program.barrier(at))


ASSEMBLY = dict(copy_scales=copy_scales, copy_rows=copy_rows, tell=tell)
