"""Time rows again whose kernels or versions changed: the stored candidates only, far less than a sweep."""

from pathlib import Path
from typing import Any

from fpk import db
from fpk.op import OPS
from fpk.tune.arguments import legal_candidates, outline
from fpk.tune.records import texts_of_store
from fpk.tune.run import default_options, state_directory, write_tables
from fpk.tune.sweep import sweep
from fpk.tune.trials import TrialStore, canonical


def retime(stale: list[tuple[str, str, db.Row, str]], directory: Path, options: Any = None) -> list[Path]:
    """Measure the default and the stored configs of every stale key of this GPU; rewrite those blocks.

    stale: rows as `lint.stale` lists them. Returns the files that changed.
    """
    options = options or default_options()
    here = db.gpu_id(options.device)
    stored: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for gpu, name, row, _ in stale:
        if gpu == here:
            stored.setdefault((name, row.case), []).append(row.config)

    def candidates(op: Any, case: dict[str, Any]) -> list[dict[str, Any]]:
        legal = legal_candidates(op, outline(op, case), options.device)
        wanted = {canonical(c) for c in stored[op.name, db.spell_case(case)]}
        return legal[:1] + [c for c in legal[1:] if canonical(c) in wanted]

    options.candidates, options.budget, options.seeds = candidates, 0, False
    store = TrialStore(state_directory() / "verify.sqlite")
    hashes = "-".join(sorted({why for *_, why in stale}))[:200]
    name = f"verify {here} {hashes}"
    store.plan(name, [(op, case) for op, case in stored if op in OPS], {})
    sweep(store, name, options, print)
    changed = write_tables(texts_of_store(store), directory)
    store.close()
    return changed
