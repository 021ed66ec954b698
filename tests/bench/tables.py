"""The result tables of a GPU: quantizers against a device copy, matrix products against torch's own.

    python tests/bench/tables.py quantizers|mm --csv FILE [--block-ms 40] [--rounds 5] [--search N]

Run it on a quiet GPU. README's numbers are generated from the CSV files it writes.
"""

import argparse
import csv
import datetime
import functools
import importlib.util
import itertools
import random
import sys
from collections.abc import Iterator

import gate
import torch
import triton
from turns import copies_needed, time_in_turns

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import assert_close, rel_error
from fpk.device import of
from fpk.op import OPS
from fpk.shapes import LINEAR_LAYERS

SIZES = ((16384, 8192), (4096, 7168))
# what a quantizer is timed with, by a name for the table; others once, as they come
VARIANTS = {
    "quantize_fp8_group": {"": {}, "column": dict(scale_layout="column"), "tma": dict(scale_layout="tma")},
    "quantize_mx": {f: dict(format=f) for f in ("mxfp8_e4m3", "mxfp6_e2m3", "mxfp4")},
    "quantize_nvfp4": {"": {}, "static": dict(given=True)},
    "act_and_mul_quantize_mx": {f: dict(format=f) for f in ("mxfp8_e4m3", "mxfp4")},
    "act_and_mul_quantize_nvfp4": {"": {}, "static": dict(given=True)},
}
CALLS = 12  # at least so many a graph, or the start of a graph counts


def provenance() -> dict:
    device = of(torch.device("cuda"))
    return dict(
        gpu=device.id, torch=torch.__version__, triton=triton.__version__,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
    )  # fmt: skip


def legal_configs(op, args, limit: int, seed: int = 0) -> list[dict]:
    bound = op.bind(**args)
    device = of(torch.device("cuda"))
    found = [c for c in op.configs(**bound) if op.is_legal(c, bound, device)]
    head, tail = found[:3], found[3:]
    random.Random(seed).shuffle(tail)
    return head + tail[: max(0, limit - len(head))]


def best_config(op, sets: list[dict], limit: int) -> tuple[dict, int]:
    """The fastest of `limit` legal candidates by a short graph timing; candidates that do not run are dropped."""
    calls = {}
    for config in legal_configs(op, sets[0], limit):
        try:
            op.launch(**sets[0], config=config)
            torch.cuda.synchronize()
        except Exception as error:
            if "illegal" in str(error):
                raise
            continue
        calls[str(config)] = (config, lambda s, config=config: op.launch(**s, config=config))
    timed = time_in_turns({n: c for n, (_, c) in calls.items()}, sets, block_ms=4, rounds=2)
    best = min(timed, key=lambda n: timed[n].us)
    return calls[best][0], len(calls)


def quantizers(options) -> Iterator[dict]:
    names = options.ops or [n for n in OPS if "quantize" in n or n == "amax"]
    for name in names:
        op = OPS[name]
        variants = VARIANTS.get(name, {"": {}})
        for (m, k), variant in itertools.product(SIZES, variants):
            case = dict(M=m, K=k) | variants[variant]
            try:
                first = op.inputs(**case, device="cuda")
                bound = op.bind(**first)
                moved = op.cost(**bound).bytes
                sets = [op.inputs(**case, device="cuda", seed=s) for s in range(copies_needed(moved))]
                x = next(v for v in first.values() if isinstance(v, torch.Tensor))
                yield against_copy(op, case, variant, moved, sets, x, options)
            except Exception as error:
                print(f"{name} {case}: {type(error).__name__}: {error}"[:400], flush=True)


def against_copy(op, case: dict, variant: str, moved: int, sets: list[dict], x: torch.Tensor, options) -> dict:
    """Rate of a quantizer's bytes as a share of a device copy's, in turns; `default_us` is what a plain call takes."""
    config, tried = best_config(op, sets, options.search)
    assert_close(op.launch(**sets[0], config=config), op.reference(**sets[0]), op.tolerance(op.bind(**sets[0])))
    x = x[..., : case["K"]].contiguous()  # activations are twice as wide
    copies = [(x.clone(), torch.empty_like(x)) for _ in sets]
    calls = {
        "fpk": lambda s: op.launch(**s[0], config=config),
        "default": lambda s: op(**s[0]),
        "copy": lambda s: s[1][1].copy_(s[1][0]),
    }
    pairs = list(zip(sets, copies, strict=True))
    timed = time_in_turns(calls, pairs * -(-CALLS // len(pairs)), options.block_ms, options.rounds)
    copy_rate = 2 * x.numel() * x.element_size() / timed["copy"].us
    us = timed["fpk"].us
    return dict(
        op=op.name, M=case["M"], K=case["K"], variant=variant, us=round(us, 2),
        default_us=round(timed["default"].us, 2), copy_us=round(timed["copy"].us, 2),
        gb_per_s=round(moved / us / 1e3), copy_gb_per_s=round(copy_rate / 1e3),
        share_of_copy=round(moved / us / copy_rate, 3), spread=round(timed["fpk"].spread, 3), tried=tried,
        config=config,
    )  # fmt: skip


# what each product is timed with; "peer" is an op's baseline or a function of the same arguments
PRODUCTS = {
    "fp8_token": ("scaled_mm", dict()),
    "fp8_tensor": ("scaled_mm", dict(a_granularity="tensor", b_granularity="tensor")),
    "int8_token": ("scaled_mm", dict(dtype=torch.int8)),
    "fp8_block": ("scaled_mm_group", dict(scale_layout="column")),
    "fp8_weight_only": ("mm_weight_only", dict()),
    "int8_weight_only": ("mm_weight_only", dict(dtype=torch.int8)),
}


def bf16_product(a, b, scale_b, rows, cols, bias, out_dtype, dequantized):
    """What weight-only replaces: the same activations by bf16 weights (twice the bytes of the codes)."""
    return a @ dequantized.T


def mm(options) -> Iterator[dict]:
    """Products at the sizes of real layers, against torch's own where it has one."""
    for product in options.products:
        name, arguments = PRODUCTS[product]
        op = OPS[name]
        for layer in options.layers or LINEAR_LAYERS:
            n, k = LINEAR_LAYERS[layer]
            for m in options.tokens:
                for fast in options.fast if product in ("fp8_token", "fp8_tensor") else [0]:
                    try:
                        row = one_product(op, product, arguments, dict(M=m, N=n, K=k), bool(fast), options)
                    except Exception as error:
                        if "illegal" in str(error):
                            raise
                        print(f"{product} {layer} M={m}: {type(error).__name__}: {error}"[:300], flush=True)
                        continue
                    yield dict(product=product, layer=layer) | row


def more_peers(options, product: str, size: dict, fast: bool) -> dict:
    """{name: call of one argument set} of the file that `--peers` names: `calls(product, M, N, K, fast_accum)`."""
    if not options.peers:
        return {}
    spec = importlib.util.spec_from_file_location("peers_of_products", options.peers)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.calls(product, size["M"], size["N"], size["K"], fast)


@functools.cache
def limits() -> tuple[float, float]:
    """(bytes a microsecond that a large reading reduction reaches, microseconds of an empty kernel in a graph)."""
    large, small = torch.empty(1 << 29, device="cuda"), torch.zeros(1, device="cuda")
    us = time_in_turns({"read": lambda _: large.sum()}, [0], 20, 3)["read"].us
    empty = time_in_turns({"empty": lambda _: _nothing[(1,)](small)}, [0] * 50, 10, 3)["empty"].us
    return large.numel() * 4 / us, empty


@triton.jit
def _nothing(x_ptr):
    pass


def one_product(op, product, arguments, size, fast, options) -> dict:
    m, n, k = size["M"], size["N"], size["K"]
    more = arguments | (dict(fast_accum=fast) if op.name == "scaled_mm" else {})
    sets = [op.inputs(**size, **more, device="cuda", seed=7 * s) for s in range(min(24, copies_needed(m * k + n * k)))]
    bound = op.bind(**sets[0])
    config, tried = best_config(op, sets, options.search)
    expected = op.reference(**sets[0])
    error = rel_error(op.launch(**sets[0], config=config), expected)
    calls = {"fpk": lambda s: op.launch(**s, config=config), "default": lambda s: op(**s)}
    peer, peer_error = op.baselines.get("torch"), ""
    if op.name == "mm_weight_only":
        for s in sets:
            s["dequantized"] = (s["b"].float() * s["scale_b"]).bfloat16()
        calls = {
            "fpk": lambda s: op.launch(**{a: v for a, v in s.items() if a != "dequantized"}, config=config),
            "default": lambda s: op(**{a: v for a, v in s.items() if a != "dequantized"}),
        }
        peer = bf16_product
    if product == "int8_token":
        peer = None
    if peer is not None:
        try:
            peer_error = rel_error(peer(**sets[0]), expected)
            calls["peer"] = lambda s: peer(**s)
        except Exception as problem:
            peer, peer_error = None, f"{type(problem).__name__}: {problem}"[:80]
    others = more_peers(options, product, size, fast)
    for name, call in list(others.items()):
        try:
            others[name] = rel_error(call(sets[0]), expected)
            calls[name] = call
        except Exception as problem:
            print(f"{product} {size} {name}: {type(problem).__name__}: {problem}"[:200], flush=True)
    del expected
    timed = time_in_turns(calls, sets, options.block_ms, options.rounds)
    us = timed["fpk"].us
    cost = op.cost(**bound)
    rivals = {name.replace("peer", "torch"): t.us for name, t in timed.items() if name not in ("fpk", "default")}
    best = min(rivals, key=rivals.get, default="")
    return dict(
        M=m, N=n, K=k, fast_accum=int(fast), us=round(us, 2), default_us=round(timed["default"].us, 2),
        peer_us=round(rivals[best], 2) if best else "", ratio=round(rivals[best] / us, 3) if best else "",
        tflops=round(cost.flops / us / 1e6, 1), gb_per_s=round(cost.bytes / us / 1e3), error=f"{error:.2e}",
        peer_error=f"{others.get(best, peer_error):.2e}" if best else peer_error, tried=tried, config=config,
        peer=best, peers=" ".join(f"{n}={us:.2f}" for n, us in rivals.items()),
        floor_us=round(cost.bytes / limits()[0] + limits()[1], 2),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("quantizers", "mm"))
    parser.add_argument("--csv", required=True)
    parser.add_argument("--block-ms", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--search", type=int, default=12)
    parser.add_argument("--ops", nargs="*")
    parser.add_argument("--layers", nargs="*")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64, 1024, 4096])
    parser.add_argument("--products", nargs="*", default=["fp8_token"], choices=list(PRODUCTS))
    parser.add_argument("--peers", help="a Python file with calls(product, M, N, K, fast_accum) -> {name: call}")
    parser.add_argument("--fast", type=int, nargs="*", default=[1, 0])
    options = parser.parse_args()
    gate.turn()
    count = 0
    with open(options.csv, "w", newline="") as f:
        for row in {"quantizers": quantizers, "mm": mm}[options.what](options):
            if not count:
                writer = csv.DictWriter(f, [*row, *provenance()])
                writer.writeheader()
            writer.writerow(row | provenance())
            f.flush()
            count += 1
            print(*(f"{k}={v}" for k, v in row.items()), flush=True)
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
