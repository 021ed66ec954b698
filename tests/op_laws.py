"""What must be true of every op, as functions of an Op.

`test_ops.py` runs them over OPS, `test_planted.py` over wrong kernels.
"""

import itertools
from collections.abc import Callable

import guarded
import torch
from hypothesis import strategies as st

from fpk.check import assert_close
from fpk.device import of, pretend
from fpk.op import Op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = ("M", "N", "K")
GROWTH = (1, 1, 5, 32) if torch.cuda.is_available() else (1,)  # larger domains where kernels are compiled


@st.composite
def any_case(draw, op: Op):
    """Arguments for `op.inputs`, each drawn from the op's domain."""
    case = {name: draw(st.sampled_from(tuple(values))) for name, values in op.domain.items()}
    growth = draw(st.sampled_from(GROWTH))
    return {n: v * growth if n in SIZES else v for n, v in case.items()}


def pairwise(op: Op) -> list[dict]:
    """Cases in which every two values of every two entries of the domain occur together: few, and the same each time.

    Sizes of 0 come once each, apart: they would empty the cases that they share.
    """
    domain = {n: [v for v in values if not (n in SIZES and v == 0)] for n, values in op.domain.items()}
    names = list(domain)
    waiting = {
        (i, a, j, b)
        for i, j in itertools.combinations(range(len(names)), 2)
        for a in range(len(domain[names[i]]))
        for b in range(len(domain[names[j]]))
    }
    cases = []
    while waiting:
        i, a, j, b = min(waiting)
        chosen = {i: a, j: b}
        for k in range(len(names)):
            if k not in chosen:
                news = [
                    sum(((p, q, k, v) if p < k else (k, v, p, q)) in waiting for p, q in chosen.items())
                    for v in range(len(domain[names[k]]))
                ]
                # among equals, another one for every case
                most = [v for v, n in enumerate(news) if n == max(news)]
                chosen[k] = most[len(cases) % len(most)]
        waiting -= {(p, chosen[p], q, chosen[q]) for p, q in itertools.combinations(sorted(chosen), 2)}
        cases.append({names[k]: domain[names[k]][v] for k, v in sorted(chosen.items())})
    empty = [middle(op) | {n: 0} for n in SIZES if 0 in op.domain.get(n, ())]
    return cases + empty


def middle(op: Op) -> dict:
    return {name: tuple(values)[len(values) // 2] for name, values in op.domain.items()}


def make(op: Op, case: dict) -> dict:
    return op.inputs(**case, device=DEVICE)


def legal_configs(op: Op, args: dict) -> list[dict]:
    bound = op.bind(**args)
    device = of(torch.device(DEVICE))
    return [c for c in op.configs(**bound) if op.is_legal(c, bound, device)]


def results(op: Op, call: Callable, args: dict) -> object:
    """What a call gives back: its output, and for an op that writes in place the tensors that it wrote as well."""
    out = call(**args)
    if not op.mutates:
        return out
    outputs = () if out is None else out if isinstance(out, tuple) else (out,)
    return (*outputs, *(args[n] for n in op.mutates if args[n] is not None))


def check_reference(op: Op, case: dict) -> None:
    # each side has arguments of its own: some ops write into them
    args, theirs = make(op, case), make(op, case)
    assert_close(results(op, op, args), results(op, op.reference, theirs), op.tolerance(op.bind(**args)))
    guarded.check()


def check_config(op: Op, case: dict, pick: int) -> None:
    args = make(op, case)
    by_kernel: dict[str, list[dict]] = {}
    for config in legal_configs(op, args):
        by_kernel.setdefault(config.get("kernel", ""), []).append(config)
    configs = list(by_kernel.values())[pick % len(by_kernel)]  # as often the kernel with few candidates
    config = configs[pick // len(by_kernel) % len(configs)]
    theirs = make(op, case)
    out = results(op, lambda **given: op.launch(**given, config=config), args)
    assert_close(out, results(op, op.reference, theirs), op.tolerance(op.bind(**args)), f"out of {config}")
    guarded.check()


def check_deterministic(op: Op, case: dict) -> None:
    assert_close(results(op, op, make(op, case)), results(op, op, make(op, case)), 0.0)


def check_without_fp8_units(op: Op, case: dict) -> None:
    """On a GPU without FP8 conversion the op gives the same bits, or says that it cannot run."""
    args = make(op, case)
    with pretend("sm80"):
        try:
            config = op.config_for(**args)
        except NotImplementedError as error:
            assert "FP8" in str(error), error
            return
        out = results(op, lambda **given: op.launch(**given, config=config), args)
    assert_close(out, results(op, lambda **given: op.launch(**given, config=config), make(op, case)), 0.0)
