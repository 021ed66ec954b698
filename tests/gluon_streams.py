"""What the inline assembly of fpk.kernels.gemm._streams does, and that of moe._gluon_expert_streams, for
`gluon_clusters`. Turns are counters of a program.

Reads of a step that does not come (nobody has waited for it) give NaN, which no result may get.
"""

import math
from typing import Any

import torch
from gluon_emulator import Barrier, Buffer, Fault, Program, overlap, pause, task
from gluon_language import Pointer, change, tile_of, wait_at
from torch import Tensor


def readable(program: Program, begin: int, end: int) -> bool:
    landing = any(overlap((begin, end), r) for r in program.landing)
    return not landing and bool(program.filled[begin:end].all())


def load(
    KERNEL: str, PARAMETER: int, to: int, row: int, column: int, at: int, MANY: int = 1, LINE: bool = False
) -> None:
    pause()
    machine, place, found = task().machine, 0, {}
    for argument in machine.arguments:
        found[place] = argument
        place += 0 if argument is None else 1 + 2 * len(getattr(argument, "block_shape", ()))
    data = tile_of(found[PARAMETER], [column] if LINE else [row, column])
    if MANY not in (1, len(machine.programs)):
        raise Fault(f"a copy to {MANY} of {len(machine.programs)} programs")
    for program in machine.programs if MANY > 1 else [task().program]:
        program.land((to, to + data.numel()), data, at)


class Copies:
    """What a partition has copied since it told the barrier before; the barrier hears when all has landed."""

    def __init__(self, arrivals: int = 128) -> None:
        self.flying, self.arrivals = 0, arrivals
        self.barrier: Barrier | None = None

    def change(self, by: int, barrier: Barrier | None = None) -> None:
        self.flying, self.barrier = self.flying + by, barrier or self.barrier
        if self.flying == 0 and self.barrier is not None:
            self.barrier.change(arrivals=self.arrivals)


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


def copy_two(to: int, first: Pointer, second: Pointer, at: int) -> None:
    kept, barrier = copies(), task().program.barrier(at)
    vars(task())["row_copies"] = Copies(1)
    for place, pointer in ((to, first), (to + 128, second)):
        flat, where, _ = pointer.places(None)
        copy(place, flat[where.reshape(1)].view(torch.uint8))
    copies().change(0, barrier)
    vars(task())["row_copies"] = kept


def copy_line(at: Tensor, pointers: Pointer) -> None:
    flat, places, _ = pointers.places(None)
    count = len(at.unique())  # lanes behind a short line write the same once more
    assert at.tolist() == [int(at[0]) + 4 * (i % count) for i in range(len(at))]
    copy(int(at[0]), flat[places][:count].view(torch.uint8))


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


def take(at: Any) -> Any:
    pause()
    program, at = task().program, torch.as_tensor(at)
    words = program.memory.view(torch.float32)[at // 4]
    return words.clone() if readable(program, int(at.min()), int(at.max()) + 4) else torch.full_like(words, math.nan)


def words_of(pool: Buffer, slot: int, first: int, desc: Any, SLOT: int, L: Any) -> Tensor:
    pause()
    begin = pool.address + (slot * SLOT + first) * 128
    words = pool.program.memory[begin : begin + 64 * 128].view(torch.int32).view(64, 32)
    return words.clone() if readable(pool.program, begin, begin + 64 * 128) else torch.full_like(words, -1)


def turns() -> list[int]:
    return vars(task().program).setdefault("turns", [0, 0])


def wait_turn(WHICH: int) -> None:
    mine = turns()
    pause(lambda: mine[WHICH] > 0, f"turn {WHICH}")
    mine[WHICH] -= 1


def pass_turn(WHICH: int) -> None:
    pause()
    turns()[1 - WHICH] += 1
    if max(turns()) > 1:
        raise Fault("a turn is passed that has not been taken")


STREAMS = dict(
    expect=lambda at, bytes: change(at, 1, bytes), load=load, copy_two=copy_two, copy_line=copy_line, tell=tell,
    take=take, words_of=words_of,
    wait_if=lambda at, phase, much: wait_at(at, phase) if much else None, wait_turn=wait_turn, pass_turn=pass_turn,
    warp=lambda: 0, here=lambda x: x,
)  # fmt: skip
