"""Worker processes that may be killed: one call at a time, each with a time limit, replaced after crash or hang.

A worker is a fresh interpreter that loads an executor ("module:factory") and answers calls of its methods over pipes.
The parent alone decides what a dead or silent worker means.
"""

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

STARTUP_S = 120.0


class WorkerDied(Exception):
    """The worker's process ended during a call (abort, segmentation fault, poisoned GPU context)."""


class WorkerHung(Exception):
    """A call took longer than its limit; the worker has been killed."""


@dataclass(frozen=True)
class Reply:
    """What became of a call. status: "ok", or one of the verdicts of fpk.tune.trials; value: the method's result."""

    status: str
    value: Any = None
    detail: str = ""
    seconds: float = 0.0


class Worker:
    """One process. `env` overrides its environment; a value of None removes the variable."""

    def __init__(self, executor: str, options: dict[str, Any] | None = None, env: dict[str, str | None] | None = None):
        self._command = (executor, json.dumps(options or {}))
        self._env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False
        self.restarts = -1
        self.started = 0.0
        self.deadline = 0.0

    def launch(self) -> None:
        """Begin to start the process, if it does not run; `submit` waits until it is ready."""
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self._kill()
        environment = dict(os.environ)
        for name, value in self._env.items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        here, there = _pipe_pair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as the process
        numbers = [str(c.fileno()) for c in there]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fpk.tune.worker", *numbers, *self._command, str(os.getpid())],
            pass_fds=[c.fileno() for c in there], env=environment, stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log, start_new_session=True,
        )  # fmt: skip
        for end in there:
            end.close()
        self.reader, self._writer = here
        self.restarts += 1
        self._ready = False

    def _await_ready(self) -> None:
        if self._ready:
            return
        if not self.reader.poll(STARTUP_S):
            raise RuntimeError(f"tune: worker did not start within {STARTUP_S:.0f} s: {self._kill()}")
        try:
            hello = self.reader.recv()
        except (EOFError, OSError) as error:
            raise RuntimeError(f"tune: worker could not start: {self._kill()}") from error
        if hello != "ready":
            self._kill()
            raise RuntimeError(f"tune: worker could not start: {hello}")
        self._ready = True

    def submit(self, method: str, *args: Any, limit_s: float) -> None:
        """Begin a call; `result` waits for it."""
        self.launch()
        self._await_ready()
        self.started = time.monotonic()
        self.deadline = self.started + limit_s
        with contextlib.suppress(BrokenPipeError):  # `result` will see that it is dead
            self._writer.send((method, args))

    def result(self) -> Reply:
        """The reply to the submitted call: waits until its deadline at most, then kills the worker."""
        try:
            if not self.reader.poll(max(0.0, self.deadline - time.monotonic())):
                limit = self.deadline - self.started
                self._kill()
                return Reply("timeout", detail=f"no answer within {limit:.0f} s", seconds=limit)
            status, value, detail = self.reader.recv()
        except (EOFError, OSError):
            code = self._process.wait() if self._process else 0
            return Reply("crash", detail=f"exit code {code}: {self._kill()}"[:500], seconds=self._elapsed())
        if status == "crash":  # the GPU context is poisoned: whatever comes next would fail too
            self._kill()
        return Reply(status, value, detail[:500], self._elapsed())

    def call(self, method: str, *args: Any, limit_s: float) -> Reply:
        self.submit(method, *args, limit_s=limit_s)
        return self.result()

    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    def _kill(self) -> str:
        """End the process; returns the end of what it printed."""
        if self._process is None:
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self.reader.close()
        self._writer.close()
        self._process = None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 400))
        text = self._log.read().decode(errors="replace").strip()
        self._log.close()
        return text

    def close(self) -> None:
        self._kill()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def run_all(
    workers: list[Worker], calls: Iterable[tuple[str, tuple[Any, ...]]], limit_s: float, until: float = float("inf")
) -> Iterator[tuple[int, Reply]]:
    """Spread calls over workers; yields (position of the call, reply) as they finish.

    until: `time.monotonic()` after which no further call is begun.
    """
    for worker in workers:  # all at once: importing torch takes seconds
        worker.launch()
    waiting = enumerate(calls)
    busy: dict[int, int] = {}  # worker -> position
    while True:
        for w, worker in enumerate(workers):
            if w not in busy and time.monotonic() < until:
                following = next(waiting, None)
                if following is None:
                    break
                position, (method, args) = following
                worker.submit(method, *args, limit_s=limit_s)
                busy[w] = position
        if not busy:
            return
        first = min(workers[w].deadline for w in busy)
        ready = wait([workers[w].reader for w in busy], max(0.0, first - time.monotonic()))
        for w in list(busy):
            if workers[w].reader in ready or workers[w].deadline <= time.monotonic():
                yield busy.pop(w), workers[w].result()


def _pipe_pair() -> tuple[tuple[Connection, Connection], tuple[Connection, Connection]]:
    to_child, from_parent = os.pipe()[::-1], os.pipe()[::-1]
    here = (Connection(from_parent[1], writable=False), Connection(to_child[0], readable=False))
    there = (Connection(to_child[1], writable=False), Connection(from_parent[0], readable=False))
    return here, there


def _serve(reader: Connection, writer: Connection, executor: str, options: str, parent: int) -> None:
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    try:
        module, _, factory = executor.partition(":")
        target = getattr(importlib.import_module(module), factory)(**json.loads(options))
    except BaseException as error:
        writer.send(f"{type(error).__name__}: {error}")
        raise
    writer.send("ready")
    while True:
        try:
            method, args = reader.recv()
        except EOFError:
            return
        try:
            reply = ("ok", getattr(target, method)(*args), "")
        except Exception as error:
            reply = (target.verdict(error), None, f"{type(error).__name__}: {error}")
        writer.send(reply)


def _leave_with(parent: int) -> None:
    """End when the parent is gone, also in the midst of an endless kernel."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    _reader, _writer = (Connection(int(sys.argv[1]), writable=False), Connection(int(sys.argv[2]), readable=False))
    _serve(_reader, _writer, sys.argv[3], sys.argv[4], int(sys.argv[5]))
