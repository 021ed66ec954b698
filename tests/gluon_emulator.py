"""A machine that runs the partitions of Gluon kernels for sm90 on a CPU: see `gluon_language` for how they get there.

One partition runs at a time, and chance, by a seed, says which goes on wherever one could wait, and when copies land;
some are far slower than others. So a run can be repeated, and when nobody can go on this is seen at once.

It sees: waits that nobody ends, too many arrivals, other bytes than expected, barriers left half way; copies into
memory that a product, a store or another copy still uses; reads of bytes that nobody filled or that are on their way;
products used before they were waited for; what threads wrote, read by a copy or product without a fence; places outside
of tensors and buffers; and wrong results. A race shows only in an order of events that chance has drawn.

What it does not see: layouts and swizzles (memory is row-major), registers, barriers among the warps of one partition,
inline assembly (a counterpart runs in its place), how matrix units round, and the order of memory operations in
hardware beyond the above. Programs run one after the other, clusters together: none may wait for a later one.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

SIZE = 1 << 18  # bytes of a program's shared memory, some more than there are
SLOW = 0.02  # how often a slow one has its turn
Range = tuple[int, int]


class Fault(AssertionError):
    """What a kernel did wrong."""


class Stopped(BaseException):
    """Ends a partition when another one has failed."""


def overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have landed."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count, self.pending, self.bytes, self.phases = name, count, count, 0, 0

    def change(self, arrivals: int = 0, bytes: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += bytes
        if self.pending < 0:
            raise Fault(f"{self}: too many arrivals")
        if self.pending == 0 and self.bytes < 0:
            raise Fault(f"{self}: {-self.bytes} bytes more than expected have landed")
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phases = self.count, self.phases + 1

    def passed(self, parity: int) -> bool:
        return (self.phases & 1) != parity

    def __str__(self) -> str:
        waits = f"{self.pending} of {self.count} arrivals and {self.bytes} bytes to come"
        return f"barrier {self.name} in phase {self.phases}, {waits}"


class Meeting:
    """A barrier of so many partitions."""

    def __init__(self) -> None:
        self.here, self.rounds = 0, 0

    def meet(self, size: int, what: str) -> None:
        self.here, mine = self.here + 1, self.rounds
        if self.here == size:
            self.here, self.rounds = 0, mine + 1
        pause(lambda: self.rounds != mine, f"{what} of {size}")


class Product:
    """A product in flight, computed when it is waited for, as late as can be."""

    def __init__(self, left: Any, right: Any, acc: Any) -> None:
        self.left, self.right, self.acc, self.done = left, right, acc, False
        self.ranges = [x.range for x in (left, right) if isinstance(x, Buffer)]
        for x in (left, right):
            if isinstance(x, Buffer):
                x.check_visible("a product")
        if left.shape[1] != right.shape[0]:
            raise Fault(f"product of {tuple(left.shape)} and {tuple(right.shape)}")

    def finish(self) -> None:
        values = [x.values() if isinstance(x, Buffer) else x for x in (self.left, self.right)]
        result = values[0].float() @ values[1].float()
        acc = self.acc.result if isinstance(self.acc, Product) else self.acc
        self.result: Tensor = result if acc is None else acc + result.to(acc.dtype)
        self.done = True


def _early(*_: Any) -> Any:
    raise Fault("a product is used before it was waited for")


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "neg", "getitem"):
    setattr(Product, f"__{_name}__", _early)


class Task:
    """A partition of a program."""

    def __init__(self, program: "Program", name: str, fn: Callable[[], Any]) -> None:
        self.program, self.name, self.fn = program, name, fn
        self.machine = program.machine
        self.weight = self.machine.weight()
        self.go, self.over = threading.Semaphore(0), False
        self.ready: Callable[[], bool] = lambda: True
        self.what = "its begin"
        self.products: list[Product] = []
        self.stores: list[list[Range]] = []  # shared memory that each store still reads, in their order
        self.machine.tasks.append(self)
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        local.task = self
        try:
            self.go.acquire()
            self.machine.stop_if_failed()
            self.fn()
            if any(not p.done for p in self.products) or any(self.stores):
                raise Fault("ends while products or stores are in flight")
        except Stopped:
            pass
        except BaseException as error:
            self.machine.fail(error, self)
        self.over = True
        self.machine.go_on(None)


local = threading.local()


def task() -> Task:
    return local.task


def pause(ready: Callable[[], bool] = lambda: True, what: str = "") -> None:
    """Let others run, until `ready`."""
    me = task()
    me.ready, me.what = ready, what
    me.machine.go_on(me)


class Machine:
    """The programs of one cluster, and what chance does with them."""

    def __init__(self, seed: int, size: int) -> None:
        self.random = random.Random(seed)
        self.tasks: list[Task] = []
        self.copies: list[tuple[float, Callable[[], None]]] = []
        self.error: BaseException | None = None
        self.grid: tuple[int, ...] = ()
        self.first: tuple[int, ...] = ()  # of the cluster's programs
        self.arguments: list[Any] = []
        self.end = threading.Event()
        self.everybody = Meeting()
        self.programs = [Program(self, rank) for rank in range(size)]

    def weight(self) -> float:
        return self.random.choice((1.0, 1.0, SLOW))

    def run(self, kernel: Callable[[], Any]) -> None:
        for program in self.programs:
            Task(program, f"program {program.rank}", kernel)
        self.copy_weight = self.weight()
        self.go_on(None)
        self.end.wait()
        if self.error is not None:
            raise self.error
        for program in self.programs:
            for barrier in program.barriers.values():
                if barrier.pending != barrier.count or barrier.bytes:
                    raise Fault(f"{barrier}: left half way")

    def stop_if_failed(self) -> None:
        if self.error is not None:
            raise Stopped

    def fail(self, error: BaseException, who: Task | None) -> None:
        if self.error is None:
            self.error = Fault(f"{who.name}: {error}") if who and isinstance(error, Fault) else error

    def copy(self, land: Callable[[], None]) -> None:
        self.copies.append((self.copy_weight * self.random.choice((1.0, SLOW)), land))

    def go_on(self, me: Task | None) -> None:
        """Land copies and give the turn to somebody who can go on; come back when `me` has it."""
        while self.error is None:
            able = [t for t in self.tasks if not t.over and t.ready()]
            if not able and not self.copies:
                break
            weights = [t.weight for t in able] + [w for w, _ in self.copies]
            at = self.random.choices(range(len(weights)), weights)[0]
            if at >= len(able):
                try:
                    self.copies.pop(at - len(able))[1]()
                except BaseException as error:
                    self.fail(error, None)
                continue
            if able[at] is me:
                return
            able[at].go.release()
            if me is not None:
                me.go.acquire()
                self.stop_if_failed()
            return
        waiting = [t for t in self.tasks if not t.over]
        if self.error is None and waiting:
            self.fail(Fault("nobody can go on: " + "; ".join(f"{t.name} waits for {t.what}" for t in waiting)), None)
        if self.error is not None:
            for t in waiting:
                t.go.release()
        self.end.set()
        if me is not None:
            self.stop_if_failed()


class Region:
    """A kernel's allocation of shared memory."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size, self.at = name, size, -1


class Program:
    """Shared memory and barriers of a program. Buffers lie in the order of falling size, as Triton lays them out."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine, self.rank = machine, rank
        self.memory = torch.full((SIZE,), 0xFF, dtype=torch.uint8)
        self.filled = torch.zeros(SIZE, dtype=torch.bool)
        self.landing: list[Range] = []
        self.unseen: list[Range] = []  # written by threads, with no fence yet
        self.regions: list[Region] = []
        self.used = 0
        self.barriers: dict[int, Barrier] = {}
        self.groups = Meeting()

    def address(self, region: Region) -> int:
        for r in sorted((r for r in self.regions if r.at < 0), key=lambda r: -r.size):
            r.at, self.used = self.used, self.used + r.size
        return region.at

    def barrier(self, at: int) -> Barrier:
        if at not in self.barriers:
            raise Fault(f"no barrier at byte {at} of shared memory")
        return self.barriers[at]

    def uses(self) -> list[Range]:
        """What products and stores in flight read."""
        mine = [t for t in self.machine.tasks if t.program is self]
        return [r for t in mine for p in t.products if not p.done for r in p.ranges] + [
            r for t in mine for s in t.stores for r in s
        ]

    def check_writable(self, to: Range, what: str) -> None:
        if any(overlap(to, r) for r in self.uses()):
            raise Fault(f"{what} overwrites bytes {to} of shared memory while a product or a store reads them")
        if any(overlap(to, r) for r in self.landing):
            raise Fault(f"{what} overwrites bytes {to} of shared memory while another copy lands there")

    def land(self, to: Range, data: Tensor, at: int) -> None:
        """Begin a copy to shared memory, told by the barrier at byte `at`."""
        self.check_writable(to, "a copy")
        self.landing.append(to)
        barrier = self.barrier(at)

        def landed() -> None:
            self.landing.remove(to)
            self.memory[to[0] : to[1]] = data
            self.filled[to[0] : to[1]] = True
            barrier.change(bytes=-(to[1] - to[0]))

        self.machine.copy(landed)


class Buffer:
    """A view of shared memory."""

    def __init__(self, program: Program, region: Region, at: int, dtype: torch.dtype, shape: Any, strides: Any) -> None:
        self.program, self.region, self.at, self.dtype = program, region, at, dtype
        self.shape, self.strides = list(shape), list(strides)

    def _like(self, at: int, shape: Any, strides: Any) -> "Buffer":
        return Buffer(self.program, self.region, at, self.dtype, shape, strides)

    def index(self, i: int) -> "Buffer":
        if not 0 <= i < self.shape[0]:
            raise Fault(f"{self.region.name}: index {i} of {self.shape[0]}")
        return self._like(self.at + int(i) * self.strides[0] * self.dtype.itemsize, self.shape[1:], self.strides[1:])

    def slice(self, start: int, length: int, dim: int = 0) -> "Buffer":
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise Fault(f"{self.region.name}: slice of {length} from {start} of {self.shape[dim]}")
        shape = [length if d == dim else n for d, n in enumerate(self.shape)]
        return self._like(self.at + start * self.strides[dim] * self.dtype.itemsize, shape, self.strides)

    def permute(self, order: Any) -> "Buffer":
        return self._like(self.at, [self.shape[d] for d in order], [self.strides[d] for d in order])

    @property
    def address(self) -> int:
        return self.program.address(self.region) + self.at

    @property
    def range(self) -> Range:
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1
        if self.at + span * self.dtype.itemsize > self.region.size:
            raise Fault(f"{self.region.name}: a view reaches behind its end")
        return self.address, self.address + span * self.dtype.itemsize

    @property
    def view(self) -> Tensor:
        begin, end = self.range
        return self.program.memory[begin:end].view(self.dtype).as_strided(self.shape, self.strides)

    def values(self) -> Tensor:
        """What is there, if it may be read."""
        begin, end = mine = self.range
        if any(overlap(mine, r) for r in self.program.landing):
            raise Fault(f"{self.region.name}: read while a copy lands there")
        if not bool(self.program.filled[begin:end].all()):
            raise Fault(f"{self.region.name}: read before somebody filled it")
        return self.view.clone()

    def check_visible(self, who: str) -> None:
        self.values()
        if any(overlap(self.range, r) for r in self.program.unseen):
            raise Fault(f"{self.region.name}: {who} reads what threads wrote, without a fence")

    def load(self, layout: Any = None) -> Tensor:
        pause()
        return self.values()

    def store(self, x: Tensor) -> None:
        pause()
        if list(x.shape) != self.shape or x.dtype != self.dtype:
            raise Fault(f"{self.region.name}: {tuple(x.shape)} {x.dtype} into {self.shape} {self.dtype}")
        begin, end = mine = self.range
        self.program.check_writable(mine, self.region.name)
        self.view.copy_(x)
        self.program.filled[begin:end] = True
        self.program.unseen.append(mine)
