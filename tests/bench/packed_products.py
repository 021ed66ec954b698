"""Products of packed weights beside their peers, with the configs that a call gets: results/<gpu>/packed.csv.

    python tests/bench/packed_products.py --csv FILE [--products NAME ...] [--layers N] [--peers FILE] [--warm N]

`--peers` names a Python file with `calls(product, M, N, K) -> {marlin | triton_kernels: [call, ...]}`, a call for each
of several weights; by default `packed.py` in the folder FPK_PEERS. A CSV file that is there is continued.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gate
import peers
import torch
from moe import others_of
from tables import provenance
from turns import copies_needed, time_in_turns
from warm import warm

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import rel_error
from fpk.op import OPS

LAYERS = ((28672, 4096), (4096, 14336), (10240, 8192), (8192, 28672))
FEW, MANY = (1, 16, 64), (1024, 4096)
# op, arguments of its inputs, token counts, peers that have it
PRODUCTS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "bf16 x mxfp4": ("mm_shuffled", dict(weight="mxfp4/bf16"), FEW + MANY),
    "fp8_token x mxfp4": ("mm_shuffled", dict(weight="mxfp4/fp8"), (16, *MANY)),
    "bf16 x nvfp4": ("mm_shuffled", dict(weight="nvfp4/bf16"), (*FEW, 1024)),
    "bf16 x mxfp6_e2m3": ("mm_shuffled", dict(weight="mxfp6_e2m3/bf16"), FEW),
    "bf16 x mxfp6_e3m2": ("mm_shuffled", dict(weight="mxfp6_e3m2/bf16"), FEW),
    "mxfp8_e4m3 x mxfp8_e4m3": ("mm_packed", dict(pair="mxfp8_e4m3/mxfp8_e4m3"), MANY),
    "bf16 x mxfp8_e4m3": ("mm_packed", dict(pair="none/mxfp8_e4m3"), (1024,)),
}
FIELDS = (
    "product", "op", "M", "N", "K", "us", "tb_per_s", "tflops", "marlin_us", "triton_kernels_us", "cublas_bf16_us",
    "ratio", "error", "config", "gpu", "torch", "triton", "date",
)  # fmt: skip
Cell = tuple[str, int, int, int]


def cells(options: argparse.Namespace) -> list[Cell]:
    """What the file lacks: the first layer with everything, then the next."""
    done = set()
    if options.csv.exists():
        with options.csv.open(newline="") as file:
            done = {(r["product"], int(r["M"]), int(r["N"]), int(r["K"])) for r in csv.DictReader(file)}
    wanted = [(p, m, n, k) for n, k in LAYERS[: options.layers] for p in options.products for m in PRODUCTS[p][2]]
    return [cell for cell in wanted if cell not in done]


def case_of(cell: Cell) -> tuple[str, dict[str, Any]]:
    product, m, n, k = cell
    name, more, _ = PRODUCTS[product]
    return name, dict(M=m, N=n, K=k) | more


def calls_of(cell: Cell, sets: list[dict[str, Any]], other: Any) -> dict[str, Callable[[int], Any]]:
    """By who: a call of the number of a weight."""
    (product, m, n, k), (name, _) = cell, case_of(cell)
    made: dict[str, Callable[[int], Any]] = {"fpk": lambda i: OPS[name](**sets[i % len(sets)])}
    if product.startswith("bf16"):
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        plain = [
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(min(6, copies_needed(2 * n * k)))
        ]
        made["cublas_bf16"] = lambda i: torch.nn.functional.linear(x, plain[i % len(plain)])
    for who, calls in (other.calls(product, m, n, k) if other is not None else {}).items():
        made[who] = lambda i, calls=calls: calls[i % len(calls)]()
    return made


def row(cell: Cell, other: Any, options: argparse.Namespace) -> dict[str, Any]:
    name, case = case_of(cell)
    op = OPS[name]
    first = op.inputs(**case, device="cuda")
    weight = first["packed"].nbytes if "packed" in first else first["b"].nbytes + first["scale_b"].nbytes
    sets = [first, *(op.inputs(**case, device="cuda", seed=i) for i in range(1, min(6, copies_needed(weight))))]
    some = dict(case, M=min(case["M"], 16), N=min(case["N"], 512))
    small = op.inputs(**some, device="cuda")
    calls = calls_of(cell, sets, other)
    for who in list(calls):
        try:
            calls[who](0)
            torch.cuda.synchronize()
        except Exception as problem:
            print(f"{cell} {who}: {type(problem).__name__}: {problem}"[:300], flush=True)
            del calls[who]
    timed = time_in_turns(calls, range(6), options.block_ms, options.rounds)
    us = {who: t.us for who, t in timed.items()}
    rivals = [us[w] for w in us if w not in ("fpk", "cublas_bf16")] or [us[w] for w in us if w != "fpk"]
    product, m, n, k = cell
    found = dict.fromkeys(FIELDS, "") | dict(product=product, op=name, M=m, N=n, K=k)
    found |= {f"{who}_us": f"{t:.2f}" for who, t in us.items() if f"{who}_us" in FIELDS}
    own = us["fpk"]
    return found | dict(
        us=f"{own:.2f}", tb_per_s=f"{weight / own / 1e6:.2f}", tflops=f"{2 * m * n * k / own / 1e6:.0f}",
        ratio=f"{min(rivals) / own:.3f}" if rivals else "", config=op.config_for(**first),
        error=f"{float(rel_error(op(**small), op.reference(**small))):.1e}", **provenance(),
    )  # fmt: skip


def rows(waiting: list[Cell], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    other = others_of(options.peers)
    for cell in waiting:
        begun = time.monotonic()
        try:
            yield row(cell, other, options)
        except Exception as problem:  # costs its row alone
            if "illegal" in str(problem):
                raise
            print(f"{cell}: {type(problem).__name__}: {problem}"[:400], flush=True)
        torch.cuda.empty_cache()
        if gate.left() < 1.5 * (time.monotonic() - begun):
            print("no time for more", flush=True)
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", required=True, type=Path)
    parser.add_argument("--products", nargs="*", default=list(PRODUCTS), choices=list(PRODUCTS))
    parser.add_argument("--layers", type=int, default=len(LAYERS))
    parser.add_argument("--peers", default=peers.file("packed.py"))
    parser.add_argument("--block-ms", type=float, default=15)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=0, metavar="PROCESSES", help="compile everything first")
    options = parser.parse_args()
    waiting = cells(options)
    print(f"{len(waiting)} cells", flush=True)
    if options.warm:
        warm(map(case_of, waiting), options.warm)
    gate.turn()
    is_new, count = not options.csv.exists(), 0
    with options.csv.open("a", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if is_new:
            table.writeheader()
        for found in rows(waiting, options):
            count += 1
            table.writerow(found)
            file.flush()
            print(*(f"{n}={v}" for n, v in found.items() if v != "" and n != "config"), flush=True)
    return 0 if count or not waiting else 1


if __name__ == "__main__":
    sys.exit(main())
