"""What must be true of every op, as functions of an Op.

`test_ops.py` runs them over OPS, `test_planted.py` over wrong kernels.
"""

import contextlib
import fcntl
import itertools
import math
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator

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
    args = op.inputs(**case, device=DEVICE)
    return {n: guarded.fenced(v) if isinstance(v, torch.Tensor) else v for n, v in args.items()}


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


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def ample(op: Op) -> list[dict]:
    """The pairwise cases, from the middling to the largest, then the small: whoever takes the first that fits gets one
    that is neither empty nor slow."""

    def elements(case: dict) -> int:
        return sum(v.numel() for v in make(op, case).values() if isinstance(v, torch.Tensor))

    cases = sorted(pairwise(op), key=elements)
    ordered = cases[len(cases) // 2 :] + cases[: len(cases) // 2][::-1]
    return sorted(ordered, key=lambda case: any(case.get(n) == 0 for n in (*SIZES, "T", "B", "I")))


def heavy(tensor: torch.Tensor, at: tuple[int, ...]) -> torch.Tensor:
    """The same but for one element, which is larger than any other: the largest code, or eight times the maximum.

    Values of floats are 2^-6 of what they were: kernels may have a slow way for large ones.
    """
    out = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    out.view(INTEGERS[tensor.element_size()]).copy_(tensor.view(INTEGERS[tensor.element_size()]))
    if tensor.element_size() == 1:
        limits = torch.iinfo(tensor.dtype) if tensor.dtype is torch.int8 else torch.finfo(tensor.dtype)
        out[at] = limits.max
    else:
        out *= 2.0**-6
        finite = torch.nan_to_num(out.float(), nan=0.0, posinf=0.0, neginf=0.0).abs().max()
        out[at] = finite * 8 if 0 < finite < 1000 else 8.0
    return out


def check_corners(op: Op) -> None:
    """The first and the last element of a matrix count: one that outweighs all others is not lost."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    first = ample(op)[0] | ({"kind": "normal"} if "kind" in op.domain else {})
    plain = first | {"layout": "contiguous"} if "contiguous" in op.domain.get("layout", ()) else first
    for case, end in ((plain, 0), (plain, -1), (first, -1))[: 2 if plain == first else 3]:
        for name, value in make(op, case).items():
            if not isinstance(value, torch.Tensor) or value.dtype not in kinds or value.dim() < 2 or value.numel() < 4:
                continue
            if "scale" in name or name in op.mutates:
                continue
            args, theirs = make(op, case), make(op, case)
            at = (end,) * value.dim()
            args[name], theirs[name] = heavy(args[name], at), heavy(theirs[name], at)
            out, expected = results(op, op, args), results(op, op.reference, theirs)
            assert_close(out, expected, op.tolerance(op.bind(**args)), f"out with a heavy {name}{list(at)}")
    guarded.check()


DRAWS = 60  # cases by chance after the pairwise ones
BLOCKS = {"K": "BLOCK_K", "H": "BLOCK_K", "M": "BLOCK_M", "T": "BLOCK_M", "N": "BLOCK_N"}  # of an op's sizes


def smallest_configs(op: Op, case: dict) -> dict[str, dict]:
    """For each kernel, the legal config with the smallest tile."""
    found: dict[str, dict] = {}
    for config in legal_configs(op, make(op, case)):
        old = found.setdefault(config.get("kernel", ""), config)
        if math.prod(config.get(b, 1) for b in BLOCKS.values()) < math.prod(old.get(b, 1) for b in BLOCKS.values()):
            found[config.get("kernel", "")] = config
    return found


def check_many_tiles(op: Op) -> None:
    """Matrices of three tiles and more along every size that a config cuts, the last of them not whole."""
    rng, seen = random.Random(op.name), set[str]()
    drawn = [{name: rng.choice(tuple(values)) for name, values in op.domain.items()} for _ in range(DRAWS)]
    for number, case in enumerate([*ample(op), *drawn]):  # some kernels want three options at once
        if len(seen) == sum(kernel.interpretable for kernel in op.kernels.values()):
            break
        first = case | ({"kind": "normal"} if "kind" in op.domain else {})
        for name in ("N", "K", "H"):
            if name in op.domain:
                even = [v for v in op.domain[name] if v % 2 == 0]
                first[name] = max(even if even and number % 2 else op.domain[name])
        for name, least in (("M", 3), ("T", 3), ("E", 2)):  # few of these: a tile of rows is small
            if name in op.domain and case[name] < least:
                first[name] = min((v for v in op.domain[name] if v >= least), default=max(op.domain[name]))
        for kernel, config in smallest_configs(op, first).items():
            if kernel not in seen:
                seen.add(kernel)
                check_many_tiles_of(op, kernel, config, first)
                check_last_rows_of(op, kernel, first)


def check_last_rows_of(op: Op, kernel: str, case: dict) -> None:
    """The tallest tile, over rows that it does not divide."""
    configs = [c for c in legal_configs(op, make(op, case)) if c.get("kernel", "") == kernel and "BLOCK_M" in c]
    tallest = max(configs, key=lambda c: c["BLOCK_M"], default={"BLOCK_M": 1})
    rows = [n for n in op.domain.get("M", ()) if n % tallest["BLOCK_M"]]
    if rows:
        check_launch(op, tallest, case | {"M": max(rows)})


def check_launch(op: Op, config: dict, case: dict) -> None:
    args, theirs = make(op, case), make(op, case)
    if not op.is_legal(config, op.bind(**args), of(torch.device(DEVICE))):
        return
    out = results(op, lambda **given: op.launch(**given, config=config), args)
    expected = results(op, op.reference, theirs)
    assert_close(out, expected, op.tolerance(op.bind(**args)), f"out of {config} for {case}")
    guarded.check()


def check_many_tiles_of(op: Op, kernel: str, config: dict, case: dict) -> None:
    for _ in range(3):  # which configs are legal may depend on the sizes
        blocks = {"BLOCK_K": config.get("BLOCK", 1)} | config
        larger = {n: case[n] * -(-(2 * blocks.get(b, 1) + 1) // case[n]) for n, b in BLOCKS.items() if case.get(n)}
        grown = smallest_configs(op, case | larger)
        if kernel not in grown:  # it has whole rows in one tile
            break
        case, config = case | larger, grown[kernel]
    exact = op.tolerance(op.bind(**make(op, case))) == 0
    kinds = ("special", "normal") if exact and "special" in op.domain.get("kind", ()) else (case.get("kind"),)
    for kind in kinds:  # NaN and Inf may take a way of their own
        check_launch(op, config, case | {"kind": kind} if kind else case)


def spread(tensor, dims):
    """The same values with every other element of `dims` left out of a poisoned buffer."""
    sizes = [2 * n if d in dims else n for d, n in enumerate(tensor.shape)]
    buffer = torch.full((*sizes, tensor.element_size()), 0x7F, dtype=torch.uint8, device=tensor.device)
    view = buffer.view(tensor.dtype)[..., 0][tuple(slice(None, None, 2 if d in dims else 1) for d in range(len(sizes)))]
    view.view(INTEGERS[tensor.element_size()]).copy_(tensor.view(INTEGERS[tensor.element_size()]))
    return view


def check_strides(op: Op) -> None:
    """Every argument may have strides, biases, offsets and scales too, or is refused by name."""
    seen = set()
    for case in ample(op):
        for name, value in make(op, case).items():
            if not isinstance(value, torch.Tensor) or value.numel() < 2 or name in op.mutates:
                continue
            for dims in (range(value.dim()), range(value.dim() - 1)):
                if not dims or (name, value.dim(), dims) in seen:
                    continue
                seen.add((name, value.dim(), dims))
                args = make(op, case)
                args[name] = spread(args[name], dims)
                try:
                    out = results(op, op, args)
                except ValueError as error:
                    assert name in str(error) and "stride" in str(error), error
                    continue
                expected = results(op, op.reference, make(op, case))
                assert_close(out, expected, op.tolerance(op.bind(**args)), f"out with strided {name}")


def far_apart(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values, the last index along `dim` (of at least 3) more than 2^31 elements behind the first.

    The stride itself fits into 32 bits, so that it is the product that needs more. There is as much memory before the
    view, where offsets that wrapped point to. On a CPU nobody touches what lies between and it costs nothing.
    """
    inner = [n for d, n in enumerate(tensor.shape) if d != dim % tensor.dim()]
    room = 1
    for n in inner:
        room *= n
    step = -(-(2**31 // (tensor.shape[dim] - 1) + room + 16) // 16) * 16
    assert step < 2**31
    size = tensor.element_size()
    before = 2**31
    nbytes = (before + (tensor.shape[dim] - 1) * step + room) * size
    if tensor.device.type == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        pages = -(-nbytes // mmap.PAGESIZE)
        raw = torch.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=flags), dtype=torch.uint8)
    else:
        raw = torch.zeros(nbytes, dtype=torch.uint8, device=tensor.device)
    strides, step_in = [0] * tensor.dim(), 1
    for d in reversed(range(tensor.dim())):
        if d == dim % tensor.dim():
            strides[d] = step
        else:
            strides[d], step_in = step_in, step_in * tensor.shape[d]
    view = raw[:nbytes].view(tensor.dtype).as_strided(tensor.shape, strides, before)
    integers = INTEGERS[size]
    view.view(integers).copy_(tensor.view(integers))
    return view


def far_cases(op: Op) -> Iterator[tuple[dict, str, int, dict]]:
    """(case, argument, dimension, config): each matrix of an op once per dimension and kernel, its rows far apart."""
    seen = set()
    for case in ample(op):
        case = case | ({"E": 3} if case.get("E") else {}) | ({"kind": "normal"} if "kind" in op.domain else {})
        args = make(op, case)
        kernels = {c.get("kernel", ""): c for c in reversed(legal_configs(op, args))}
        for name, value in args.items():
            if not isinstance(value, torch.Tensor) or value.dim() < 2:
                continue
            for dim, n in enumerate(value.shape):
                for kernel, config in kernels.items():
                    if n >= 3 and value.numel() > n and (name, value.dim(), dim, kernel) not in seen:
                        seen.add((name, value.dim(), dim, kernel))
                        yield case, name, dim, config


@contextlib.contextmanager
def much_memory() -> Iterator[None]:
    """One process at a time has gigabytes of a GPU."""
    if DEVICE == "cpu":
        yield
        return
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    with open(f"{tempfile.gettempdir()}/fpk_much_memory_{gpu}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            torch.cuda.empty_cache()


def check_far_apart(op: Op) -> None:
    """Offsets of any argument may need 64 bits."""
    for case, name, dim, config in far_cases(op):
        with much_memory():
            check_one_far_apart(op, case, name, dim, config)


def check_one_far_apart(op: Op, case: dict, name: str, dim: int, config: dict) -> None:
    def plain(outputs: object) -> object:
        """What was written in place has the strides of the argument."""
        return tuple(o.contiguous() for o in outputs) if op.mutates and isinstance(outputs, tuple) else outputs

    args = make(op, case)
    args[name] = far_apart(args[name], dim)
    bound = op.bind(**args)
    try:
        config = config if op.is_legal(config, bound, of(torch.device(DEVICE))) else op.config_for(**args)
        out = results(op, lambda **given: op.launch(**given, config=config), args)
    except ValueError as error:
        assert name in str(error) and "stride" in str(error), error
        return
    expected = results(op, op.reference, make(op, case))
    where = f"out with {name} far apart along {dim}, {config}, {case}"
    assert_close(plain(out), plain(expected), op.tolerance(bound), where)
