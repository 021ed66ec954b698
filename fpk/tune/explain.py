"""Why a call runs with the config it runs with."""

from dataclasses import dataclass, field
from typing import Any

from fpk import db
from fpk.device import Device, pretend
from fpk.op import Op
from fpk.tune.arguments import outline
from fpk.tune.sources import gone


@dataclass
class Explanation:
    """level: exact, nearest, sibling or default. lines: what each offered row said."""

    key: dict[str, int | str]
    level: str
    config: dict[str, Any]
    lines: list[str] = field(default_factory=list)


def explain_case(op: Op[..., Any], case: dict[str, Any], device: Device, tables: db.Tables) -> Explanation:
    """Replay the look-up for `op.inputs(**case)` on `device`, with the reason for every row that is passed over."""
    with pretend(device):
        bound = outline(op, case)
        key = op.key(**bound)
        chosen = None
        lines = []
        for answer in tables.answers(op.name, key, device):
            row = answer.row
            without = gone(op, row.config)
            legal = not without and op.is_legal(row.config, bound, device)
            shape = " ".join(f"{n}={row.key[n]}" for n in db.SIZES if n in row.key)
            why = f"kernel {without} is gone" if without else "not legal for these arguments"
            verdict = "" if legal else f", {why}"
            lines.append(
                f"{answer.level} ({answer.source}, {answer.gpu}, {shape}, distance {answer.distance:.2f}) "
                f"rank {row.rank}: {row.us:g} us, default {row.default_us:g} us{verdict}"
            )
            if legal and chosen is None:
                chosen = answer
        if chosen is not None:
            return Explanation(key, chosen.level, chosen.row.config, lines)
        default = next((c for c in op.configs(**bound) if op.is_legal(c, bound, device)), None)
        if default is None:
            lines.append("no config of the op is legal here")
        return Explanation(key, "default", default or {}, lines)
