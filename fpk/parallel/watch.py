"""A thread that notices when other ranks die. NCCL itself does not: its kernels wait for a dead rank for ever."""

import threading
from typing import Any

import torch.distributed as dist

BEAT_S = 1.0


class Watch:
    """Every rank counts up under its name in the store; a count that stands still for `patience_s` is a lost rank.

    Seconds are those in which this rank counted itself: after a standstill of the whole machine nobody is lost.
    On a loss the communicators of this process are aborted, so that whoever waits for them returns, and `check` raises
    from then on.
    """

    def __init__(self, store: Any, rank: int, size: int, patience_s: float, beat_s: float = BEAT_S) -> None:
        # a connection of its own where the store can: a call that waits would block the others of its connection
        self._store = store.clone() if hasattr(store, "clone") else store
        self.rank, self.size, self.patience_s, self.beat_s = rank, size, patience_s, beat_s
        self.lost = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="fpk-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self.lost:
            raise RuntimeError(f"rank {self.rank} of {self.size}: {self.lost}")

    def stop(self) -> None:
        """End the thread; the other ranks are told that this one leaves on purpose."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join(2 * self.beat_s)
            self._leave()

    def _leave(self) -> None:
        try:
            self._store.set(f"fpk/beat/{self.rank}", "left")
        except Exception:  # rank 0, which has the store, may be gone already
            return

    def _watch(self) -> None:
        beat = 0
        seen = {r: ("", 0) for r in range(self.size) if r != self.rank}
        while not self._ended.wait(self.beat_s):
            beat += 1
            try:
                self._store.set(f"fpk/beat/{self.rank}", str(beat))
                for other, (last, when) in list(seen.items()):
                    name = f"fpk/beat/{other}"
                    now = self._store.get(name).decode() if self._store.check([name]) else ""
                    if now == "left":
                        del seen[other]
                    elif now != last:
                        seen[other] = (now, beat)
                    elif (beat - when) * self.beat_s > self.patience_s:
                        return self._give_up(f"rank {other} gave no sign of life for {self.patience_s:.0f} s")
            except Exception as error:  # stores raise types of their own
                if self._ended.is_set():
                    return
                return self._give_up(f"the store is gone (did rank 0 die?): {str(error).splitlines()[0]}")
        self._leave()  # once more: the last count may have come after the word of `stop`

    def _give_up(self, why: str) -> None:
        self.lost = why
        for group in [g for g in dist.distributed_c10d._world.pg_map if g is not None]:
            try:
                group.abort()
            except Exception:  # gloo has nothing to abort: its collectives end by themselves
                continue
