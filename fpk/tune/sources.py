"""Which kernels' sources a measurement rests on, and whether they are still what they were.

A run records `tile:0123456789ab warps:123456789abc +reduce_kernel:23456789abcd`: a hash for each kernel of the op, in
the op's order, and behind a + for each jitted function that its launcher runs beside them. A row rests on the kernel
that its config names and on all that run beside: beside which kernels, nothing tells. Old runs recorded one hash of
everything.
"""

import functools
from collections.abc import Callable
from typing import Any

from fpk import db
from fpk.op import Op

BESIDE = "+"


def sources_of(op: Op[..., Any]) -> str:
    """What a run of the op that starts now records."""
    named = {name: kernel.fn for name, kernel in op.kernels.items() if kernel.named}
    own = {id(fn) for fn in named.values()}
    beside: dict[str, list[Any]] = {}
    for fn in (*(k.fn for k in op.kernels.values() if not k.named), *db.launched_by(op.launcher)):
        if id(fn) not in own:
            own.add(id(fn))
            beside.setdefault(BESIDE + fn.fn.__name__, []).append(fn)
    of_named = {name: [fn] for name, fn in named.items()}
    return _spell({name: db.source_hash(fns) for name, fns in (of_named | dict(sorted(beside.items()))).items()})


def whole(op: Op[..., Any]) -> str:
    """What an old run would have recorded: one hash of all kernels of an op and of the device functions they call."""
    return db.source_hash([*(k.fn for k in op.kernels.values()), *db.jitted_by(op.launcher)], by_name=True)


def part(text: str, config: db.Config) -> str:
    """What a trial of this config records: of a run's sources those that it rests on."""
    recorded = parse(text)
    kept = {_kernel(recorded, config), *(name for name in recorded if name.startswith(BESIDE))}
    return _spell({name: value for name, value in recorded.items() if name in kept}) if recorded else text


def parse(text: str) -> dict[str, str]:
    """Hashes by name; {} for the one hash of an old run."""
    return dict(word.split(":", 1) for word in text.split() if ":" in word)


def kernels_in(text: str) -> list[str]:
    """The kernels that a run knew."""
    return [name for name in parse(text) if not name.startswith(BESIDE)]


def covers(now: str, then: str) -> bool:
    """Does everything that a trial rests on stand in `now` as it was?"""
    return then == now or (":" in then and parse(then).items() <= parse(now).items())


def gone(op: Op[..., Any], config: db.Config) -> str:
    """The kernel that a config names if the op no longer has it, else ""."""
    name = str(config.get("kernel", ""))
    return "" if name in op.kernels else name


def _spell(hashes: dict[str, str]) -> str:
    return " ".join(f"{name}:{value}" for name, value in hashes.items())


def _kernel(recorded: dict[str, str], config: db.Config) -> str:
    """The kernel of a config: the one it names, else the first."""
    return str(config.get("kernel", next(iter(recorded), "")))


class Sources:
    """An op's sources as they are now, to judge measurements by."""

    def __init__(self, op: Op[..., Any]) -> None:
        self.op = op
        self.text = sources_of(op)
        self._now = parse(self.text)
        self.stands: Callable[[str], bool] = functools.cache(self._stands)

    @functools.cached_property
    def whole(self) -> str:
        return whole(self.op)

    def _stands(self, then: str) -> bool:
        """Was a trial that recorded `then` made by the kernels as they are?"""
        return covers(self.text, then) or (":" not in then and then == self.whole)

    def changed(self, then: str, config: db.Config) -> str:
        """What a row of this config rests on and is no longer as its run recorded it in `then`; "" if nothing."""
        kernel, now = _kernel(self._now, config), self._now
        if kernel not in now:
            return f"kernel {kernel} is gone"
        recorded = parse(then)
        if not recorded:
            return "" if then == self.whole else f"kernel source {then}, now {self.whole}"
        if _kernel(recorded, config) not in recorded:
            return f"its run knew no kernel {kernel}"
        found = []
        for name, value in parse(part(then, config)).items():
            mine = now.get(name if name.startswith(BESIDE) else kernel)
            if mine is None:
                found.append(f"{name[1:]}, which ran beside kernels, is gone")
            elif mine != value:
                what = f"{name[1:]}, which runs beside kernels," if name.startswith(BESIDE) else f"kernel {name}"
                found.append(f"{what} {value}, now {mine}")
        return "; ".join(found)

    def untried(self, then: str, arch: str) -> list[str]:
        """Kernels for `arch` that a run could not try: they came after it."""
        known = kernels_in(then)
        of_arch = [n for n, k in self.op.kernels.items() if k.named and (not k.targets or arch in k.targets)]
        return [name for name in of_arch if known and name not in known]
