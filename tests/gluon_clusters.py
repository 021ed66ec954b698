"""What functions of inline assembly do, by module, for `gluon_language`."""

from typing import Any

import torch
from gluon_emulator import Barrier, Buffer, Fault, Program, pause, task
from gluon_language import Pointer, change, method_to, store, tile_of, wait_at
from gluon_language import load as fetch
from gluon_streams import STREAMS, copy_rows
from torch import Tensor

RANK = 24  # an address of the cluster's memory is rank << RANK and a byte
WARPS = 4


def partitions() -> int:
    """Partitions of the cluster's programs that have begun or will: all programs have as many."""
    machine = task().machine
    mine = sum(t.program is task().program for t in machine.tasks) - 1
    return mine * len(machine.programs)


def sync(size: int = 1) -> None:
    if size > 1 and size != len(task().machine.programs):
        raise Fault(f"a barrier of {size} programs in a cluster of {len(task().machine.programs)}")
    task().machine.everybody.meet(partitions(), "the cluster's barrier")


def groups() -> None:
    task().program.groups.meet(2, "the other group")


def init_ring(AT: int, STAGES: int, FULL: int, EMPTY: int) -> None:
    program = task().program
    for region in program.regions:
        program.address(region)
    for i in range(2 * STAGES):
        name = f"full[{i}]" if i < STAGES else f"empty[{i - STAGES}]"
        program.barriers[AT + 8 * i] = Barrier(name, FULL if i < STAGES else EMPTY)


def arrive_everywhere(at: int, size: int, first: int = 0) -> None:
    for rank in range(first, first + size):
        change(at, WARPS, program=task().machine.programs[rank])


def load(
    KERNEL: str, PARAMETER: int, to: int, row: int, column: int, at: int, MANY: Any = False, mask: int = 0
) -> None:
    pause()
    program = task().program
    place, desc = 0, None
    for argument in task().machine.arguments:
        if place == PARAMETER:
            desc = argument
            break
        place += 0 if argument is None else 1 + 2 * len(getattr(argument, "block_shape", ()))
    if not hasattr(desc, "block_shape"):
        raise Fault(f"no descriptor at place {PARAMETER}")
    data = tile_of(desc, [row, column])
    for other in task().machine.programs if MANY else [program]:
        if not MANY or mask >> other.rank & 1:
            other.land((to, to + data.numel()), data, at)


def load_to_all(KERNEL: str, to: int, row: int, column: int, at: int) -> None:
    load(KERNEL, 0, to, row, column, at, True, -1)


def release(at: int, CLUSTER: int) -> None:
    for program in task().machine.programs[:CLUSTER]:
        change(at, 1, program=program)


def rounded(tile: Tensor, OUT: Any) -> Tensor:
    return method_to(tile, OUT).contiguous().view(torch.int32)


def quantize_rows(
    x: Pointer, codes: Buffer, scales: Pointer, first: int, count: int, width: int, SLOTS: int, SEGS: int, GROUP: int,
    QMAX: float, MANTISSA: int, BIAS: int, MAX: float, *_: Any,
) -> None:  # fmt: skip
    """Plain Triton of `_tile` is called inside: rows as codes in shared memory, scales of segments in memory."""
    slots = torch.arange(SLOTS)[:, None] + first
    at, inside = torch.arange(SEGS * 128)[None, :], slots < count
    rows = fetch(x + slots * width + at, inside & (at < width), 0.0).float().reshape(SLOTS, SEGS, 128)
    amax = rows.abs().amax(-1) if GROUP > 0 else rows.abs().amax((1, 2))[:, None].expand(SLOTS, SEGS)
    scale = (amax.clamp(min=1e-10) / QMAX) if GROUP > 0 else (amax / QMAX).clamp(min=1 / (512 * QMAX))
    codes.store((rows / scale[..., None]).clamp(-MAX, MAX).to(codes.dtype).reshape(-1, 128))
    store(scales + torch.arange(SLOTS * SEGS), scale.flatten())


def silu(g: Tensor, up: Tensor, FORMULA: str, *_: Any) -> Tensor:
    assert FORMULA == "silu"
    return torch.nn.functional.silu(g) * up


def _words(program: Program) -> Tensor:
    return program.memory.view(torch.float32)


def put(at: Tensor, values: Tensor) -> None:
    pause()
    program = task().program
    at, values = torch.broadcast_tensors(at, values)
    begin, end = int(at.min()), int(at.max()) + 4
    program.check_writable((begin, end), "a sum")
    _words(program)[at.flatten() // 4] = values.flatten().view(torch.float32)  # or int32, as it is
    program.filled.view(-1, 4)[at.flatten() // 4] = True


def take_fours(at: Tensor) -> Tensor:
    pause()
    program = task().machine.programs[int(at.flatten()[0]) >> RANK]
    words = (at & ((1 << RANK) - 1)) // 4
    if not bool(program.filled.view(-1, 4)[words].all()):
        raise Fault(f"a sum of program {program.rank} read before somebody put it")
    return _words(program)[words].clone()


CLUSTER = dict(
    cluster_rank=lambda: task().program.rank, cluster_sync=sync, cluster_meet=sync, meet=groups, init_ring=init_ring,
    wait=wait_at, arrive_everywhere=arrive_everywhere, expect=lambda at, bytes: change(at, 1, bytes), load=load,
    put_pairs=put, put_ones=put, memory_of=lambda rank: rank << RANK, take_fours=take_fours,
)  # fmt: skip
ASSEMBLY: dict[str, dict[str, Any]] = dict(
    _cluster=CLUSTER,
    _gluon_weight_cluster=dict(everybody=sync, both_groups=groups, put_fours=put),
    _gluon_weight_sums=dict(_opaque=lambda x: x),
    _gluon_wide=dict(_opaque=lambda x: x),
    _token_parts=dict(quantize_rows=quantize_rows),
    _activation=dict(activate=silu),
    _multicast=dict(meet=lambda x: sync(), wait_alone=wait_at, release=release, _load_to_both=load_to_all),
    _gluon_late=dict(_rounded=rounded),
    _streams=STREAMS,
    _gluon_expert_streams=dict(_copy_rows=copy_rows),
)
