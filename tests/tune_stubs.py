"""Executors that misbehave on demand, for the tests of the tuner: run in real worker processes."""

import os
import time

import interpreter_fixes  # noqa: F401

from fpk.tune.executor import OpExecutor
from fpk.tune.timing import FakeTimer

HANG, ABORT, SEGFAULT, BIG, BROKEN, WRONG, UNWRITTEN, NOISY, ILLEGAL, SHORT = range(900, 910)


def us_of(config):
    """A smooth landscape with one valley."""
    return 10.0 + abs(config["BLOCK_M"] - 8) + abs(config["num_warps"] - 8) / 4


class Misbehaving(OpExecutor):
    """The real executor on the CPU; a config whose num_stages is one of the numbers above goes wrong in that way."""

    def compile(self, name, case, config):
        kind = config["num_stages"]
        if kind == BIG:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(400_000, 232_448, "shared memory")
        if kind == BROKEN:
            raise RuntimeError("PassManager::run failed")
        return dict(shared_bytes=1000 * config["BLOCK_M"], registers=32, spills=0, compile_s=0.0)

    def _check(self, op, config):
        kind = config["num_stages"]
        if kind == HANG:
            while True:
                time.sleep(0.1)
        if kind == ABORT:
            os.abort()
        if kind == SEGFAULT:
            os.kill(os.getpid(), 11)
        if kind == SHORT and os.environ.get("FPK_TEST_MEMORY_IS_TAKEN"):
            import torch

            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if kind == ILLEGAL:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        launcher = op.launcher
        if kind in (WRONG, UNWRITTEN):
            op.launcher = lambda config, **bound: spoil(launcher(config=config | {"num_stages": 1}, **bound), kind)
        try:
            super()._check(op, config | {"num_stages": 1})
        finally:
            op.launcher = launcher


def spoil(out, kind):
    import torch

    codes = out[0].view(torch.uint8)
    if kind == WRONG:
        codes[0, 0] ^= 1
        return out
    fresh = torch.empty(out[0].shape, dtype=out[0].dtype)
    fresh.view(torch.uint8)[:-1] = codes[:-1]
    return (fresh, out[1])


def make(log="", kill_parent_once="", **options):
    """log: a file that gets a line per measurement. kill_parent_once: a file; who first creates it kills its parent."""

    def us(config):
        if kill_parent_once:
            try:
                os.close(os.open(kill_parent_once, os.O_CREAT | os.O_EXCL))
                os.kill(os.getppid(), 9)
            except FileExistsError:
                pass
        if log:
            with open(log, "a") as file:
                file.write(f"{sorted(config.items())}\n")
        return us_of(config)

    return Misbehaving("cpu", FakeTimer(us), **options)
