"""Quantizers against their references on a GPU, bit for bit, over 10^8 values and more each.

    python tests/bench/exactness.py [--values 1.2e8] [--ops NAME ...] [--csv FILE]

Inputs: every kind of fpk.samples in every dtype, all 2^16 bf16 and fp16 bit patterns under many scales, strided and
offset views, M = 0 and M = 1. The reference runs on the GPU and, for a part, on the CPU as well.
"""

import argparse
import csv
import math
import sys
import time

import torch

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close
from fpk.op import OPS
from fpk.samples import KINDS


def patterns(dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """Every bit pattern of a 16-bit dtype, shuffled per row group and scaled over binades, as (rows, width)."""
    bits = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16)
    pieces = []
    g = torch.Generator("cuda").manual_seed(rows)
    while sum(p.numel() for p in pieces) < rows * width:
        pieces.append(bits[torch.randperm(1 << 16, generator=g, device="cuda")])
    return torch.cat(pieces)[: rows * width].view(dtype).view(rows, width)


def cases(op, values: float):
    """(name, arguments) of one op until about `values` input elements have passed."""
    domain = {n: tuple(v) for n, v in op.domain.items()}
    fixed = {n: v[0] for n, v in domain.items() if n not in ("M", "K", "kind", "x_dtype", "layout", "E")}
    variants = [fixed]
    for name, choices in domain.items():
        if name in fixed:
            variants += [fixed | {name: c} for c in choices[1:]]
    kinds = domain.get("kind", KINDS)
    dtypes = domain.get("x_dtype", (None,))
    layouts = domain.get("layout", ("contiguous",))
    step = math.gcd(*domain.get("K", (1,)))  # packed codes want whole bytes, or whole blocks
    done, seed = 0, 0
    shapes = [(3001, 1024), (517, 7168), (64, 16384), (1, 5000), (0, 256), (1, 1), (4099, 257), (2048, 2048)]
    while done < values:
        for kind in kinds:
            for dtype in dtypes:
                m, k = shapes[seed % len(shapes)]
                case = variants[seed % len(variants)] | dict(M=m, K=-(-k // step) * step)
                case |= {n: v for n, v in (("kind", kind), ("layout", layouts[seed % len(layouts)])) if n in domain}
                if dtype is not None:
                    case["x_dtype"] = dtype
                if "E" in domain:
                    case["E"] = (0, 0, 3)[seed % 3]
                yield str(case), op.inputs(**case, device="cuda", seed=seed)
                done += m * k * max(1, case.get("E", 0))
                seed += 1
                if done >= values:
                    return


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=float, default=1.2e8)
    parser.add_argument("--ops", nargs="*")
    parser.add_argument("--csv")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th op from the i-th on, for processes side by side")
    options = parser.parse_args()
    names = options.ops or [n for n in OPS if "quantize" in n or n == "amax"]
    part, parts = map(int, options.part.split("/"))
    names = names[part::parts]
    rows, failed = [], 0
    for name in names:
        op = OPS[name]
        begun, count, checked, wrong = time.time(), 0, 0, ""
        try:
            for what, args in cases(op, options.values):
                first = next(v for v in args.values() if isinstance(v, torch.Tensor))
                expected = op.reference(**args)
                assert_close(op(**args), expected, op.tolerance(op.bind(**args)), what)
                if first.numel() < 2_000_000 and checked % 7 == 0:
                    cpu = {n: v.cpu() if isinstance(v, torch.Tensor) else v for n, v in args.items()}
                    host = op.reference(**cpu)
                    host = host if isinstance(host, tuple) else (host,)
                    device = expected if isinstance(expected, tuple) else (expected,)
                    for d, h in zip(device, host, strict=True):
                        assert_close(
                            d.cpu(), h, op.tolerance(op.bind(**args)), f"reference on CUDA against CPU, {what}"
                        )
                count += first.numel()
                checked += 1
            if "x" in args:
                for dtype in (torch.bfloat16, torch.float16):
                    x = patterns(dtype, 512, 4096)
                    for scaled in (x, x * 2.0**-8, x * 3.0):
                        more = op.inputs(M=512, K=4096, device="cuda") | dict(x=scaled)
                        assert_close(
                            op(**more), op.reference(**more), op.tolerance(op.bind(**more)), f"patterns {dtype}"
                        )
                        count += x.numel()
        except AssertionError as error:
            wrong, failed = str(error)[:600], failed + 1
        except Exception as error:
            wrong, failed = f"{type(error).__name__}: {error}"[:600], failed + 1
        seconds = time.time() - begun
        print(
            f"{name:34s} {count:.3g} values, {checked} cases, {seconds:.1f} s  {wrong or 'equal'}",
            flush=True,
        )
        rows.append(dict(op=name, values=count, cases=checked, differences="" if wrong else 0, error=wrong))
        if options.csv:  # whole after every op
            with open(options.csv, "w", newline="") as f:
                writer = csv.DictWriter(f, list(rows[0]), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
