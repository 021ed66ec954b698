"""Processes as ranks: one start of the world serves many checks, as starting costs more than all of them."""

import contextlib
import os
import queue
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

TIMEOUT_S = 20.0 if torch.cuda.is_available() else 60.0  # a loaded machine is slow, not dead
Check = Callable[..., Any]


def _main(rank: int, size: int, path: str, checks: list[tuple[str, Check, tuple[Any, ...]]], answers: Any) -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # ops run their references: the kernels have their own laws
    torch.set_num_threads(1)
    from fpk.parallel import join

    device = torch.device("cuda", rank) if torch.cuda.device_count() >= size else torch.device("cpu")
    with torch.no_grad(), torch.device(device):
        group = join(rank, size, torch.distributed.FileStore(path, size), device=device, timeout_s=TIMEOUT_S)
        parts = {2: group.part([0, 1]) if size > 2 else group, size: group}
        with group.use():
            for name, check, arguments in checks:
                try:
                    answers.put((name, rank, check(parts, *arguments)))
                except Exception:
                    answers.put((name, rank, RuntimeError(traceback.format_exc())))
                    return  # the others hear of it when they wait for this rank
        if device.type == "cuda":  # NCCL waits for the ranks that died on purpose
            answers.close()
            answers.join_thread()
            os._exit(0)
        group.close()


def run(size: int, checks: list[tuple[str, Check, tuple[Any, ...]]], path: str) -> dict[str, list[Any]]:
    """What each check returned on every rank: plain values, or a RuntimeError with the traceback."""
    with processes(size, _main, path, checks) as (started, answers):
        results: dict[str, list[Any]] = {name: [RuntimeError("no answer")] * size for name, *_ in checks}
        missing = size * len(checks)
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
