"""Arguments by chance, beyond what the domains of the laws draw: an op and its reference must agree on all of them.

    PYTHONPATH=tests python -m trust.fuzz --seconds 20 [op ...]      long form
    PYTHONPATH=tests python -m trust.fuzz --seed 17 scaled_mm        one case again

Sizes are any numbers, not those of the domain; values come from every bit pattern of their dtype where the op is exact;
scales reach over the range of fp32; rows lie anywhere in poisoned memory, at any offset, apart, transposed or all the
same one; routing sends everything to one expert, or nowhere. The op must not write to its arguments and must not give
them back.
"""

import argparse
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import conftest  # noqa: F401  the interpreter's fixes, every op
import guarded
from op_laws import DEVICE, INTEGERS, legal_configs, results

from fpk.check import assert_close, bits
from fpk.op import OPS, Op

SIZES = ("M", "N", "K", "T", "H", "I")
HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
# what a value may be without being wrong: a domain says so by itself, these are indices into other arguments
INDICES = ("index", "position", "gather", "slots", "block_table", "seq_lens", "table", "copies", "expert_map")


class Refused(Exception):
    """The op does not take these arguments, and says so."""


def draw(op: Op, rng: random.Random) -> dict[str, Any]:
    """A case: any sizes up to half as much again as the domain's, the rest from the domain."""
    case = {name: rng.choice(tuple(values)) for name, values in op.domain.items()}
    if not op.name.startswith("attention_"):
        for name in SIZES:
            if name in case and op.domain[name] and rng.random() < 0.7:
                case[name] = int(2 ** rng.uniform(0, torch.tensor(1.5 * max(op.domain[name])).log2().item()))
    return op.inputs(**case, device=DEVICE, seed=rng.randrange(1 << 30))


def patterns(like: Tensor, g: torch.Generator) -> Tensor:
    """Every bit pattern of a dtype is as likely: NaN, Inf, subnormal numbers."""
    raw = torch.randint(0, 256, (*like.shape, like.element_size()), generator=g, dtype=torch.int16).to(torch.uint8)
    value = raw.to(like.device).view(like.dtype)[..., 0] if like.numel() else like
    if DEVICE == "cpu" and like.element_size() > 1 and like.dtype.is_floating_point:
        # numpy's maxima forget what came before a signalling NaN; hardware does not
        value = torch.where(value.isnan(), float("nan"), value)
    return value


def powers(like: Tensor, g: torch.Generator, low: int, high: int) -> Tensor:
    return torch.exp2(torch.randint(low, high + 1, like.shape, generator=g).float()).to(like.device)


def revalue(op: Op, name: str, value: Tensor, exact: bool, rng: random.Random, g: torch.Generator) -> Tensor:
    """Other values for one argument, or the same."""
    kind = rng.randrange(4)
    if name in INDICES or name in op.mutates or not value.numel():
        return value
    if name == "offs":  # rows of experts in order, from none at all to all of them for one
        rows = int(value.max())
        cuts = torch.randint(0, rows + 1, value.shape, generator=g).sort().values
        return [value, cuts.to(value), torch.zeros_like(value), torch.full_like(value, rows)][kind]
    if name == "ids" and kind == 0:
        odd = torch.tensor([-1, -(2**31), 2**31 - 1, 0, 1, 2, 3, 10**6], device=value.device).to(value.dtype)
        return odd[torch.randint(0, len(odd), value.shape, generator=g).to(value.device)]
    if name == "num_valid_tokens":
        return torch.randint(0, 20, value.shape, generator=g).to(value)
    if "scale" in name and value.dtype is torch.float32:
        wide = (-140, 126) if exact else (-20, 20)
        return [value, value * powers(value, g, *wide), powers(value, g, *wide), value][kind]
    if "scale" in name and value.dtype is torch.uint8:
        low, high = (0, 256) if exact else (110, 140)
        return torch.randint(low, high, value.shape, generator=g).to(value) if kind else value
    if value.dtype is torch.int8 or (value.dtype.is_floating_point and (exact or value.element_size() == 1)):
        if kind == 0:
            return patterns(value, g)
        if kind == 1 and value.dim() > 1 and not exact:  # one row of anything
            row = patterns(value[..., :1, :], g)
            at = (torch.arange(value.shape[-2], device=value.device) == rng.randrange(value.shape[-2]))[:, None]
            integers = INTEGERS[value.element_size()]
            return torch.where(at, row.view(integers), value.view(integers)).view(value.dtype)
    elif value.dtype in HALVES and kind == 0 and not op.name.startswith(("attention", "act_and_mul_quantize")):
        # (far out in an activation's tail the kernel is nearer to the truth than fp32 references, and a group of one
        # column shows that)
        return (value.float() * powers(value[..., :1], g, -8, 8)).to(value.dtype)
    return value


def move(value: Tensor, rng: random.Random) -> Tensor:
    """The same values elsewhere: apart, at an offset that is aligned to nothing, or transposed, in poisoned memory."""
    order = list(range(value.dim()))
    if value.dim() > 1 and rng.random() < 0.15:
        order[-1], order[-2] = order[-2], order[-1]
    steps = [1] * value.dim()
    if rng.random() < 0.4 and value.dim():
        steps[rng.choice(order)] = rng.choice([2, 3])
    sizes = [value.shape[d] * steps[d] for d in order]
    if value.dim() > 1 and rng.random() < 0.5:
        sizes[-1] += rng.choice([1, 3, 16])
    offset = rng.choice([0, 0, 1, 3, 8, 16])
    room = offset + 1
    strides = [0] * value.dim()
    for d, n in zip(reversed(order), reversed(sizes), strict=True):
        strides[d] = (room - offset) * steps[d]
        room = offset + (room - offset) * max(n, 1)
    buffer = torch.full((room, value.element_size()), 0x7F, dtype=torch.uint8, device=value.device)
    view = buffer.view(value.dtype)[:, 0].as_strided(value.shape, strides, offset)
    integers = INTEGERS[value.element_size()]
    view.view(integers).copy_(value.view(integers))
    return view


def same_rows(value: Tensor) -> Tensor:
    """All rows are one: a stride of 0."""
    return value[..., :1, :].expand(value.shape)


def arguments(op: Op, rng: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """(for the op, for its reference): the same values, the latter's contiguous."""
    args = draw(op, rng)
    exact = op.tolerance(op.bind(**args)) == 0
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    plain: dict[str, Any] = {}
    for name, value in args.items():
        if not isinstance(value, Tensor):
            plain[name] = value
            continue
        if rng.random() < 0.5:
            value = revalue(op, name, value, exact, rng, g)
        args[name] = value
        written = name in op.mutates
        if not written and value.dim() > 1 and value.shape[-2] > 1 and name not in INDICES and rng.random() < 0.1:
            args[name] = same_rows(value)
        elif rng.random() < 0.5:
            args[name] = move(value, rng)
        plain[name] = args[name].clone(memory_format=torch.contiguous_format)
    return args, plain


def span(value: Tensor) -> tuple[int, int]:
    """First byte and the one after the last that a tensor's elements lie in."""
    extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    return value.data_ptr(), value.data_ptr() + extent * value.element_size()


def check(op: Op, seed: int) -> str:
    """One case; raises AssertionError. Returns the kernel that ran."""
    rng = random.Random(f"{op.name} {seed}")
    args, plain = arguments(op, rng)
    before = {n: bits(v).clone() for n, v in args.items() if isinstance(v, Tensor) and n not in op.mutates}
    try:
        configs = legal_configs(op, args)
        config = rng.choice(configs) if configs and rng.random() < 0.7 else op.config_for(**args)
        out = results(op, lambda **given: op.launch(**given, config=config), args)
    except (ValueError, NotImplementedError) as error:
        raise Refused(str(error)) from error
    expected = results(op, op.reference, plain)
    written = len(op.mutates)
    outs, expecteds = (tuple(v) if isinstance(v, tuple) else (v,) for v in (out, expected))
    for o, e in zip(outs, expecteds, strict=True):
        if isinstance(o, Tensor):  # what was written in place has strides of its own
            tolerance = op.tolerance(op.bind(**args))
            assert_close(o.contiguous(), e.contiguous(), tolerance, f"{op.name} seed {seed} {config}: out")
    for name, value in before.items():
        assert torch.equal(bits(args[name]), value), f"{op.name} seed {seed}: wrote to {name}"
    fresh = outs if not written else ()
    for o in fresh:
        for name, value in args.items():
            if isinstance(value, Tensor) and value.numel() and o.numel():
                (a, b), (c, d) = span(o), span(value)
                assert b <= c or d <= a, f"{op.name} seed {seed}: gives back memory of {name}"
    guarded.check()
    return config.get("kernel", "")


def run(op: Op, seconds: float, least: int = 4) -> Counter:
    """As many seeds as fit into the time, at least so many; counts of kernels and refusals."""
    counts: Counter = Counter()
    end, seed = time.monotonic() + seconds, 0
    while seed < least or time.monotonic() < end:
        try:
            counts["kernel " + check(op, seed)] += 1
        except Refused:
            counts["refused"] += 1
            guarded.forget()
        seed += 1
    return counts


class Installing:
    """What guarded.install asks of pytest's monkeypatch; nothing needs to be undone."""

    setattr = staticmethod(setattr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="names; all")
    parser.add_argument("--seconds", type=float, default=20, help="for each op")
    parser.add_argument("--seed", type=int, help="one case alone")
    parser.add_argument("--most", type=int, default=5, help="failures of an op that are told")
    args = parser.parse_args()
    guarded.install(Installing)
    failures = 0
    for name in args.ops or OPS:
        if args.seed is not None:
            print(check(OPS[name], args.seed))
            continue
        counts, end, seed = Counter(), time.monotonic() + args.seconds, 0
        while time.monotonic() < end and counts["failed"] < args.most:
            try:
                counts["kernel " + check(OPS[name], seed)] += 1
            except Refused:
                counts["refused"] += 1
            except AssertionError as error:
                counts["failed"] += 1
                print(f"  seed {seed}: {str(error)[:400]}", flush=True)
            except Exception as error:
                counts["failed"] += 1
                print(f"  seed {seed}: {type(error).__name__} {str(error)[:400]}", flush=True)
            guarded.forget()
            seed += 1
        failures += counts["failed"]
        print(f"{name}: {seed} cases {dict(counts)}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
