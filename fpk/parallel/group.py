"""The ranks of a job: how they meet, agree and exchange tensors.

Whatever goes wrong on one rank ends with an error on all of them within the time limit: ranks that died or hang are
named, and so are ranks that came with other tables of the autotune database or another idea of the layers.
"""

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fpk import db
from fpk.device import of
from fpk.parallel.watch import Watch

TIMEOUT_S = 20.0
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Group:
    """Ranks that exchange tensors. `join` makes the group of all ranks, `part` smaller ones.

    Attributes:
        rank, size: this rank's number in the group, and how many there are.
        device: where this rank's tensors are.
        process_group: of torch.distributed; what layers take as `tp_group`.
        database: the frozen autotune database of the job.
        timeout_s: after which a rank that does not answer is given up.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, process_group: Any, store: Any, database: db.Snapshot,
        timeout_s: float = TIMEOUT_S, name: str = "fpk", watch: Watch | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.device = rank, size, device
        self.process_group = process_group
        self.database = database
        self.timeout_s = timeout_s
        self._store, self._name, self._watch = store, name, watch
        self._agreements = self._parts = 0

    def __repr__(self) -> str:
        return f"<Group {self._name}: rank {self.rank} of {self.size}, {self.device}>"

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Inside the block ops choose their configs from the job's database, so that all ranks choose the same."""
        with db.use(self.database):
            yield

    def agree(self, what: str, value: str) -> None:
        """Raise RuntimeError on every rank unless all ranks came here with the same value.

        Every rank calls it the same number of times. `what` is named in errors.
        """
        self._agreements += 1
        told = exchange(
            self._store, self.rank, self.size, f"{self._name}/agree/{self._agreements}", value, self.timeout_s, what
        )
        expect_equal(what, told)

    def part(self, ranks: Sequence[int]) -> "Group | None":
        """The group of some ranks, None on others; all ranks of this group call it with the same lists in turn."""
        self._parts += 1
        self.agree("part", str(list(ranks)))  # backends take minutes to notice that a rank does not come
        members = [dist.get_global_rank(self.process_group, r) for r in ranks]
        limit = datetime.timedelta(seconds=self.timeout_s)
        made = self._run("part", lambda: dist.new_group(members, timeout=limit))
        if self.rank not in ranks:
            return None
        return Group(
            list(ranks).index(self.rank), len(ranks), self.device, made, self._store, self.database, self.timeout_s,
            f"{self._name}/{self._parts}.{'.'.join(map(str, ranks))}", self._watch,
        )  # fmt: skip

    def check(self) -> None:
        """Raise RuntimeError if a rank has been lost."""
        if self._watch is not None:
            self._watch.check()

    def close(self) -> None:
        """Leave the job; the group cannot be used afterwards."""
        if self._watch is not None:
            self._watch.stop()
        if dist.is_initialized():
            dist.destroy_process_group()

    # ---- tensors; each of these is called by all ranks of the group ---------
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """Element-wise sum or maximum over the ranks, in place; returns x."""
        if self.size > 1:
            self._run("all_reduce", lambda: dist.all_reduce(x, op=_OPS[op], group=self.process_group))
        return x

    def all_gather(self, x: Tensor, sizes: Sequence[int] | None = None) -> Tensor:
        """The ranks' tensors behind each other along the first dimension.

        Args:
            x: any dtype of at least a byte, contiguous; equal shapes but for the first dimension.
            sizes: of the first dimension on each rank; None where all have x's.
        """
        if self.size == 1:
            return x
        raw = _bytes(x)
        if sizes is None or len(set(sizes)) == 1:
            out = raw.new_empty((self.size * raw.shape[0], *raw.shape[1:]))
            self._run("all_gather", lambda: dist.all_gather_into_tensor(out, raw, group=self.process_group))
            return out.view(x.dtype)
        return self.all_to_all(x, [x.shape[0]] * self.size, list(sizes), repeat=True)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum over the ranks of the first dimension's equal parts, each rank its own."""
        if self.size == 1:
            return x
        if x.shape[0] % self.size:
            raise ValueError(f"reduce_scatter.x: expected a multiple of {self.size} rows, got {tuple(x.shape)}")
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        self._run("reduce_scatter", lambda: dist.reduce_scatter_tensor(out, x, group=self.process_group))
        return out

    def all_to_all(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int], out: Tensor | None = None, repeat: bool = False
    ) -> Tensor:
        """Rows to other ranks: the first `send[0]` to rank 0, the next to rank 1, and so on.

        Args:
            x: (sum of send, ...) contiguous; with `repeat` all of x goes to every rank.
            receive: how many rows come from each rank.
            out: for the received rows, in the order of ranks; made if None.
        """
        if repeat:
            x = x.repeat(self.size, *[1] * (x.dim() - 1)) if x.dtype.itemsize > 1 else _repeated(x, self.size)
        if out is None:
            out = torch.empty((sum(receive), *x.shape[1:]), dtype=x.dtype, device=x.device)
        raw, raw_out = _bytes(x), _bytes(out)
        self._run(
            "all_to_all",
            lambda: dist.all_to_all_single(raw_out, raw, list(receive), list(send), group=self.process_group),
        )
        return out

    def barrier(self) -> None:
        """Wait for all ranks."""
        self._run("barrier", lambda: dist.barrier(group=self.process_group))

    def _run(self, what: str, call: Callable[[], Any]) -> Any:
        self.check()
        try:
            return call()
        except (RuntimeError, ValueError) as error:
            self.check()  # names the rank where it can
            raise RuntimeError(
                f"{what}: rank {self.rank} of {self.size} lost the others (one of them died, or did not come within "
                f"{self.timeout_s:.0f} s): {str(error).splitlines()[0]}"
            ) from error


def join(
    rank: int,
    world_size: int,
    store: Any,
    *,
    device: torch.device | str | None = None,
    backend: str | None = None,
    database: db.Database | None = None,
    timeout_s: float = TIMEOUT_S,
    watched: bool | None = None,
) -> Group:
    """Meet the other ranks of a job.

    All take rank 0's snapshot of the autotune database; or each brings its own, which must have the same content.

    Args:
        store: a torch.distributed store that all ranks reach (TCPStore, FileStore).
        device: this rank's; by default GPU `rank` modulo their number, or the CPU where there are none.
        backend: of torch.distributed; by default "nccl" on GPUs, "gloo" on CPUs.
        database: None, or what this rank believes the job's database to be.
        timeout_s: of every step and of every collective.
        watched: whether a thread watches for ranks that die, which NCCL does not notice; by default with NCCL.

    Raises:
        RuntimeError: a rank did not come, sits on another kind of GPU, or brought another database; on every rank.
    """
    if device is None:
        gpus = torch.cuda.device_count()
        device = torch.device("cuda", rank % gpus) if gpus else torch.device("cpu")
    device = torch.device(device)
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    limit = datetime.timedelta(seconds=timeout_s)
    met = exchange(store, rank, world_size, "fpk/world", str(world_size), timeout_s, "number of ranks")
    expect_equal("number of ranks", met)
    if database is None:
        snapshot = db.share(store, rank, world_size, of(device), timeout_s)
    else:
        snapshot = db.snapshot(database)
        told = exchange(store, rank, world_size, "fpk/database", snapshot.hash, timeout_s, "database")
        expect_equal("autotune database", told)
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    if not dist.is_initialized():
        dist.init_process_group(
            backend, store=dist.PrefixStore("fpk/ranks", store), rank=rank, world_size=world_size, timeout=limit,
            **options,
        )  # fmt: skip
    watch = None
    if backend == "nccl" if watched is None else watched:
        watch = Watch(store, rank, world_size, patience_s=timeout_s / 2)
    return Group(rank, world_size, device, dist.group.WORLD, store, snapshot, timeout_s, watch=watch)


def exchange(
    store: Any, rank: int, size: int, name: str, value: str, timeout_s: float, what: str
) -> list[str]:  # fmt: skip
    """What every rank said under `name`.

    Raises:
        RuntimeError: a rank said nothing within the time limit; names it.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    told = []
    try:
        store.set(f"{name}/{rank}", value)
    except Exception as error:  # stores raise types of their own
        raise RuntimeError(f"{what}: rank {rank} cannot reach the store (did rank 0 die?): {error}") from error
    for other in range(size):
        try:
            store.wait([f"{name}/{other}"], limit)
            told.append(store.get(f"{name}/{other}").decode())
        except Exception as error:
            raise RuntimeError(f"{what}: rank {other} did not answer within {timeout_s:.0f} s") from error
    return told


def expect_equal(what: str, told: list[str]) -> None:
    """Raise RuntimeError unless all ranks said the same; says who said what."""
    if len(set(told)) > 1:
        said = ", ".join(f"rank {r} has {_short(v)}" for r, v in enumerate(told))
        raise RuntimeError(f"{what}: expected the same on every rank, but {said}")


def _short(text: str) -> str:
    return text if len(text) <= 64 else text[:60] + "..."


def _bytes(x: Tensor) -> Tensor:
    """What backends can carry: they do not know FP8."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _repeated(x: Tensor, times: int) -> Tensor:
    return x.view(torch.uint8).repeat(times, *[1] * (x.dim() - 1)).view(x.dtype)
