"""Between preparing and timing: a bench that has imported and compiled all it can asks here for its turn on the GPU.

`campaign.py` gives turns, one at a time on each GPU; outside a campaign a turn begins at once and has no end. Nothing
before `turn()` may use the GPU, as somebody else may be measuring on it.
"""

import os
import threading
import time

VARIABLE = "FPK_GATE"  # "file descriptor of answers, file descriptor of requests"

_until = float("inf")


def turn() -> float:
    """Wait for the GPU. Returns the `time.monotonic()` by which the bench has to be done with it."""
    global _until
    numbers = os.environ.pop(VARIABLE, "")
    if numbers:
        answers, requests = map(int, numbers.split(","))
        os.write(requests, b"ready\n")
        word = b""
        while not word.endswith(b"\n"):
            part = os.read(answers, 64)
            if not part:
                raise SystemExit("gate: nobody gives turns any more")
            word += part
        _until = time.monotonic() + float(word.split()[1])
        print(f"gate: {float(word.split()[1]):.0f} s", flush=True)
    return _until


def left() -> float:
    """Seconds of the turn that are left."""
    return _until - time.monotonic()


class RunningClock:
    """Seconds in which this process ran: a process that is stopped for a while (SIGSTOP) does not age by it."""

    def __init__(self, tick: float = 0.2) -> None:
        self.seconds, self.tick = 0.0, tick
        threading.Thread(target=self._run, daemon=True).start()

    def __call__(self) -> float:
        return self.seconds

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self.tick)
            now = time.monotonic()
            self.seconds += min(now - last, 2 * self.tick)
            last = now
