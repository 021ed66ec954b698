"""GPUs by their ids, and which one's measurements may serve another."""

import functools
import math
import re
from collections.abc import Iterable

from fpk.device import Device

_GPU_ID = re.compile(r"(?P<vendor>[a-z]+)-(?P<product>.+)-(?P<arch>sm\d+|gfx\w+)-(?P<sm_count>\d+)(-(?P<mig>.+))?")


@functools.lru_cache(64)
def gpu_id(device: Device) -> str:
    return device.id


def siblings(gpu: str, others: Iterable[str]) -> list[str]:
    """GPUs whose rows may serve `gpu`: same vendor and architecture family, nearest SM count first."""
    mine = _GPU_ID.fullmatch(gpu)
    if mine is None:
        return []
    found = []
    for other in others:
        theirs = _GPU_ID.fullmatch(other)
        if theirs is None or other == gpu or theirs["vendor"] != mine["vendor"] or int(theirs["sm_count"]) < 1:
            continue
        if _family(theirs["arch"]) == _family(mine["arch"]):
            gap = abs(math.log2(int(theirs["sm_count"])) - math.log2(int(mine["sm_count"])))
            found.append((theirs["arch"] != mine["arch"], gap, other))
    return [other for *_, other in sorted(found)]


def sm_count_of(gpu: str) -> int:
    """Multiprocessors of a GPU by its id; 0 if it is none."""
    parsed = _GPU_ID.fullmatch(gpu)
    return int(parsed["sm_count"]) if parsed else 0


def _family(arch: str) -> str:
    """sm100 and sm103 are one, and so are sm120 and sm121; sm80 and sm89 are not (other memories, other limits)."""
    return arch[:-1] if arch.startswith("sm1") else arch
