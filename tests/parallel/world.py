"""Processes as ranks: one start of the world serves many checks, as starting costs more than all of them."""

import contextlib
import datetime
import os
import queue
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

ONE_GPU = "FPK_RANKS_SHARE_ONE_GPU"  # set: processes on one GPU that exchange under gloo
TIMEOUT_S = 20.0 if torch.cuda.is_available() else 60.0  # a loaded machine is slow, not dead
if ONE_GPU in os.environ:
    TIMEOUT_S = 900.0  # ranks that are not asked run ahead of those that compile
Check = Callable[..., Any]


def _main(rank: int, size: int, path: str, checks: list[tuple[str, Check, tuple[Any, ...]]], answers: Any) -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # ops run their references: the kernels have their own laws
    torch.set_num_threads(1)
    from fpk.parallel import join

    sharing = ONE_GPU in os.environ
    enough = torch.cuda.device_count() >= (1 if sharing else size)
    device = torch.device("cuda", 0 if sharing else rank) if enough else torch.device("cpu")
    with torch.no_grad(), torch.device(device):
        store = torch.distributed.FileStore(path, size)
        if sharing:
            exchange_by_cpu(store, rank, size)
        backend = "gloo" if sharing else None
        group = join(rank, size, store, device=device, timeout_s=TIMEOUT_S, backend=backend)
        parts = {2: group.part([0, 1]) if size > 2 else group, size: group}
        with group.use():
            for name, check, arguments in checks:
                try:
                    answers.put((name, rank, check(parts, *arguments)))
                except Exception:
                    answers.put((name, rank, RuntimeError(traceback.format_exc())))
                    return  # the others hear of it when they wait for this rank
        if device.type == "cuda" and not sharing:  # NCCL waits for the ranks that died on purpose
            answers.close()
            answers.join_thread()
            os._exit(0)
        group.close()


def exchange_by_cpu(store: Any, rank: int, size: int) -> None:
    """Ranks on one GPU: NCCL wants one for each, and gloo does not carry all that is on a GPU."""
    dist = torch.distributed
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    prefixed = dist.PrefixStore("one_gpu", store)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=limit)

    def staged(collective: Check) -> Check:
        def moved(*arguments: Any, **options: Any) -> Any:
            there = [a.cpu() if isinstance(a, torch.Tensor) else a for a in arguments]
            done = collective(*there, **options)
            arguments[0].copy_(there[0])  # all of them write their first
            return done

        return moved

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        setattr(dist, name, staged(getattr(dist, name)))


def run(
    size: int, checks: list[tuple[str, Check, tuple[Any, ...]]], path: str,
    note: Callable[[str, list[Any]], None] | None = None,
) -> dict[str, list[Any]]:  # fmt: skip
    """What each check returned on every rank: plain values, or a RuntimeError with the traceback.

    note: called with the name and the answers of a check when all ranks have answered.
    """
    with processes(size, _main, path, checks) as (started, answers):
        results: dict[str, list[Any]] = {name: [RuntimeError("no answer")] * size for name, *_ in checks}
        missing, open_ranks = size * len(checks), dict.fromkeys(results, size)
        while missing:
            alive = any(process.is_alive() for process in started)
            try:
                name, rank, value = answers.get(timeout=1)
            except queue.Empty:
                if not alive:
                    break
                continue
            results[name][rank] = value
            missing -= 1
            open_ranks[name] -= 1
            if note is not None and not open_ranks[name]:
                note(name, results[name])
        for process in started:
            process.join(60)
    return results


@contextlib.contextmanager
def processes(size: int, main: Callable[..., None], path: str, *arguments: Any) -> Iterator[tuple[list[Any], Any]]:
    """`main(rank, size, path, *arguments, answers)` in `size` processes; none outlives the block."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    interpret = os.environ.pop("TRITON_INTERPRET", None)  # read at import, before main begins
    try:
        started = [context.Process(target=main, args=(r, size, path, *arguments, answers)) for r in range(size)]
        for process in started:
            process.start()
    finally:
        if interpret is not None:
            os.environ["TRITON_INTERPRET"] = interpret
    try:
        yield started, answers
    finally:
        for process in started:
            if process.is_alive():
                process.kill()
            process.join(10)


def value(results: dict[str, list[Any]], name: str) -> list[Any]:
    """The answers of all ranks, or the first rank's error."""
    for answer in results[name]:
        if isinstance(answer, Exception):
            raise answer
    return results[name]
