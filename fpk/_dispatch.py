"""What stands between a call of an op and its launch: written per signature, as dataclasses write theirs.

A call's config is memoised by everything that its checks and its choice read: metadata of every tensor, the other
arguments, the database. Two entries find it. The full one is a flat tuple of all of that; building it takes some 0.4 us
a tensor. The quick one is filed under a number made of an address and a size, and torch's own guard (which
`torch.compile` runs before every call, in C++) tells in one call whether all tensors are again what they were. It does
not see addresses, so that alignment is asked by itself, of those tensors alone that it may matter for.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fpk import db
from fpk.device import pretended, scope

try:
    from torch._C._dynamo import guards as _guards

    TensorGuards: Any = _guards.TensorGuards
except (ImportError, AttributeError):  # no public name: without it only the full entry answers
    TensorGuards = None

if TYPE_CHECKING:
    from fpk.op import Op

__all__ = ["dispatcher", "refuse_grad"]

# Arguments of whose addresses choices read at most whether they are multiples of four bytes: of words they always are
_NATURAL = ("scale", "zero_point", "global_scale")


def dispatcher(op: "Op[..., Any]") -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(look_up, run, call) of an op.

    `look_up` takes its arguments and gives the config, `run` also launches: it is what torch's dispatcher calls. `call`
    goes to that dispatcher, or past it where the quick entry answers and nobody listens there.
    """
    parameters = op.__signature__.parameters
    tensors = [n for n, p in parameters.items() if "Tensor" in str(p.annotation)]
    required = [n for n in tensors if parameters[n].annotation is Tensor]
    optional = [n for n in tensors if n not in required]
    others = [n for n in parameters if n not in tensors]
    parts = ["pretended()", "active()"]
    for name in parameters:
        text = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device, {name}.data_ptr() & 15"
        parts.append(
            text if name in required else f"None if {name} is None else ({text})" if name in optional else name
        )
    grad = " or ".join([f"{n}.requires_grad" for n in required]
                       + [f"({n} is not None and {n}.requires_grad)" for n in optional]) or "False"  # fmt: skip
    signature = ", ".join(n if n not in op._defaults else f"{n}=defaults[{n!r}]" for n in parameters)
    named = ", ".join(f"{n}={n}" for n in parameters)
    first = required[0] if required else None
    quick, remember, passed = "", "", ""
    if TensorGuards is not None and first:
        quick, remember = _quick_entry(required, optional, others, grad)
        passed = quick.format(found="found = config", more=_NOBODY_LISTENS).replace("\n", "\n    ")
        passed = f"""
    found = None
    try:{passed.rstrip(" ")}
    except (AttributeError, TypeError):  # not tensors: torch's dispatcher says what it expected
        pass
    if found is not None:
        return op._execute(dict({named}), found, {first}.device)"""
        quick = "\n    here = None" + quick.format(found="return config", more="")
    source = f"""
def look_up({signature}):{quick}
    if grad_enabled() and ({grad}):
        refuse_grad(op.name, dict({named}))
    memo_key = ({", ".join(parts)})
    config = memo.get(memo_key)
    if config is None:
        config = op._miss(memo_key, dict({named})){remember}
    return config

def run({signature}):
    try:
        config = look_up({", ".join(parameters)})
    except AttributeError:  # None passes for a tensor as far as here
        refuse_none(op.name, dict({", ".join(f"{n}={n}" for n in required)}))
        raise
    return op._execute(dict({named}), config, {f"{first}.device" if first else "None"})

def call({signature}):{passed if not op.mutates else ""}
    return op.torch_op({", ".join(parameters)})
"""
    names: dict[str, Any] = {
        "op": op, "memo": op._memo, "defaults": op._defaults, "pretended": pretended, "active": db.active,
        "scope": scope.get, "grad_enabled": torch.is_grad_enabled, "refuse_grad": refuse_grad,
        "refuse_none": refuse_none, "guard": _guard, "dispatch_modes": torch._C._len_torch_dispatch_stack,
        "function_modes": torch._C._len_torch_function_stack, "profiled": torch.autograd._profiler_enabled,
        "traced": torch._C._get_tracing_state,
    }  # fmt: skip
    exec(compile(source, f"<dispatch of {op.name}>", "exec"), names)
    names["call"].__name__ = names["call"].__qualname__ = op.name  # what a TypeError shows
    return names["look_up"], names["run"], names["call"]


# modes that see every op, the profiler, torch.jit.trace: they want to be told of a call
_NOBODY_LISTENS = " and not dispatch_modes() and not function_modes() and not profiled() and traced() is None"


def _quick_entry(required: list[str], optional: list[str], others: list[str], grad: str) -> tuple[str, str]:
    """Source of asking for the quick entry, where {found} stands for what to do then, and of filing it."""
    first = required[0]
    # a weight's address tells layers apart, and the first tensor's size how many tokens came; the guard tells the rest
    weight = required[1] if len(required) > 1 else None
    here = f"{weight}.data_ptr() ^ {first}.numel()" if weight else f"({', '.join([f'{first}.numel()', *others])},)"
    plain = " and ".join(f"{n} is None" for n in optional) or "True"
    compared = others if weight else []
    equal = "".join(f" and (was_{n} is {n} or was_{n} == {n})" for n in compared)
    read = [n for n in required if n != weight and not n.startswith(_NATURAL)]
    rest = [n for n in required if n != weight and n.startswith(_NATURAL)]
    aligned = f"({' | '.join(f'{n}.data_ptr()' for n in read) or '0'})"  # `&` binds tighter than `|`
    if rest:
        aligned = f"({aligned} if natural else {' | '.join(f'{n}.data_ptr()' for n in read + rest)})"
    quick = f"""
    if {plain}:
        here = {here}
        try:
            {"".join(f"was_{n}, " for n in compared)}same, natural, within, config = memo[here]
        except KeyError:
            pass
        else:
            if same({", ".join(required)}){equal} and not {aligned} & 15 and within is scope(){{more}}:
                {{found}}  # the guard has seen requires_grad, too
"""
    remember = f"""
    if here is not None and not ({grad}):
        natural = {" and ".join(f"{n}.itemsize >= 4" for n in rest) or "True"}
        if not {aligned} & 15:
            same = guard(({", ".join(required)},))
            op._remember(here, ({"".join(f"{n}, " for n in compared)}same, natural, scope(), config))
"""
    return quick, remember


def _guard(tensors: tuple[Tensor, ...]) -> Callable[..., bool]:
    """A check that as many tensors have these types, dtypes, devices, shapes, strides and requires_grad."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]  # None would mean: any
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def refuse_none(name: str, required: dict[str, Any]) -> None:
    """Raise ValueError for an argument that has to be a tensor and is None."""
    for argument, value in required.items():
        if value is None:
            raise ValueError(f"{name}.{argument}: expected a tensor, got None")


def refuse_grad(name: str, bound: dict[str, Any]) -> None:
    """Raise ValueError if a tensor needs a gradient while gradients are recorded."""
    if torch.is_grad_enabled():
        needing = next(n for n, v in bound.items() if isinstance(v, Tensor) and v.requires_grad)
        raise ValueError(
            f"{name}.{needing}: expected a tensor that needs no gradient (fpk is forward only: torch.no_grad() or "
            f"detach()), got requires_grad=True"
        )
