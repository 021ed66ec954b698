"""Which configs of a table can be candidates of an op: tables are files, and what is damaged there is passed over."""

from collections.abc import Callable, Iterable
from typing import Any

Config = dict[str, Any]

_VERDICTS_HELD = 4096


class Space:
    """What an op's candidates look like, as far as they were asked for: fields and types, and values of each.

    A config is one of them if some candidate for the same kernel has its fields and types, sizes of blocks and numbers
    of warps are powers of two or a candidate's own, and no number is far from those of the candidates. (A split or a
    grid of 0 would write nothing, and a ring of one buffer waits for itself.) Candidates are taken one by one until the
    config is found to be like them, and kept: with more of them nothing else becomes less like them.
    """

    def __init__(self) -> None:
        self._known: dict[Any, dict[str, set[Any]]] = {}  # by kernel, names and types
        self._passed: dict[int, Config] = {}  # by identity; holding them keeps it theirs

    def has(self, config: Config, candidates: Callable[..., Iterable[Config]], bound: dict[str, Any]) -> bool:
        if id(config) in self._passed:
            return True
        form = _form(config)
        if not (form in self._known and _near(config, self._known[form])):
            for candidate in candidates(**bound):
                if self._add(candidate) == form and _near(config, self._known[form]):
                    break
            else:
                return False
        if len(self._passed) >= _VERDICTS_HELD:
            self._passed.clear()
        self._passed[id(config)] = config
        return True

    def _add(self, candidate: Config) -> Any:
        form = _form(candidate)
        known = self._known.get(form)
        if known is None:
            known = self._known[form] = {name: set() for name in candidate}
        for name, value in candidate.items():
            known[name].add(value)
        return form


def _form(config: Config) -> Any:
    return config.get("kernel"), frozenset([(n, type(v)) for n, v in config.items()])


def _near(config: Config, known: dict[str, set[Any]]) -> bool:
    for name, value in config.items():
        values = known[name]
        if type(value) is not int or value in values:
            continue
        least = min(16, *values) if name.startswith("BLOCK") else min(2, *values) if name == "STAGES" else 1
        if not least <= value <= 16 * max(values):
            return False
        if name.startswith(("BLOCK", "num_warps")) and value & (value - 1):
            return False
    return True
