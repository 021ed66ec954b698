"""The table of paged attention on a GPU: decoding against the read ceiling, prefill beside torch, writes beside copies.

    python tests/bench/attention.py --csv FILE [--jobs N]

Configs are those that a call gets. A decoding row's share is its bytes a second over those of the best of some kernels
that only read. `--jobs` processes compile first. Run it on a quiet GPU.
"""

import argparse
import csv
import multiprocessing
import sys
from typing import Any

import gate
import torch
import triton
import triton.language as tl
from tables import provenance
from torch.nn.functional import scaled_dot_product_attention
from turns import copies_needed, time_in_turns

import fpk.kernels  # noqa: F401  declares every op
from fpk.check import rel_error
from fpk.op import OPS

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
LLAMA, PHI = dict(H=8, group=8, D=128), dict(H=32, group=1, D=96)
FORMATS = {
    "e4m3": dict(dtype=E4M3, granularity="tensor"),
    "int8 per token and head": dict(dtype=INT8, granularity="token_head"),
    "bf16": dict(dtype=None, granularity="none"),
}  # fmt: skip
DECODE = [
    ("llama3_70b", LLAMA, 64, 8192), ("llama3_70b", LLAMA, 16, 2048), ("llama3_70b", LLAMA, 1, 32768),
    ("phi3_mini", PHI, 64, 2048),
]  # fmt: skip
PREFILL = [("llama3_70b", LLAMA, 1, 4096), ("llama3_70b", LLAMA, 4, 4096)]
WRITE = [64, 4096]
FIELDS = ("op", "model", "cache", "size", "us", "tb_per_s", "share", "tflops", "other", "other_us", "ratio", "error",
          "gpu", "torch", "triton", "date")  # fmt: skip


@triton.jit
def _read_kernel(x_ptr, out_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    pid = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    seen = tl.zeros((BLOCK,), tl.int32)
    for i in tl.range(0, STEPS, num_stages=STAGES):
        seen ^= tl.load(x_ptr + (pid * STEPS + i) * BLOCK + offs)
    tl.store(out_ptr + pid, tl.xor_sum(seen, axis=0))


def read(x: torch.Tensor, block: int, warps: int, stages: int, steps: int = 16) -> torch.Tensor:
    out = torch.empty(x.numel() // (block * steps), dtype=torch.int32, device=x.device)
    _read_kernel[(out.numel(),)](x, out, steps, block, stages, num_warps=warps)
    return out


def read_ceiling() -> float:
    """Bytes a second of the best kernel that only reads, from 1 GiB."""
    x = torch.randint(0, 9, (1 << 28,), dtype=torch.int32, device="cuda")
    calls = {
        str(shape): lambda _, shape=shape: read(x, *shape)
        for shape in ((2048, 4, 4), (4096, 8, 4), (2048, 4, 1), (1024, 4, 4))
    }
    return 4 * x.numel() / min(t.us for t in time_in_turns(calls, [0] * 4, block_ms=10, rounds=3).values()) * 1e6


def cases() -> list[tuple[str, str, str, str, dict[str, Any]]]:
    """(op, model, cache, size, case)."""
    found: list[tuple[str, str, str, str, dict[str, Any]]] = []
    for cache, kind in FORMATS.items():
        for model, heads, m, tokens in DECODE:
            if cache != "bf16" or m < 64 or tokens < 8192:
                case = dict(**heads, **kind, M=m, tokens=tokens)
                found.append(("attention_decode", model, cache, f"{m} x {tokens}", case))
        for model, heads, b, rows in PREFILL:
            case = dict(**heads, **kind, B=b, T=rows, tokens=rows // b)
            found.append(("attention_prefill", model, cache, f"{b} x {rows // b}", case))
        if cache != "bf16":
            for m in WRITE:
                case = dict(**kind, M=m, H=8, D=128)
                found.append(("kv_cache_write", "llama3_70b", cache, str(m), case))
    return found


def small(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """A case of the same kernels and configs with little memory."""
    return case | (dict(pages=64) if name != "kv_cache_write" else {})


def compile_one(numbers: list[int]) -> None:
    for n in numbers:
        name, _, _, _, case = cases()[n]
        OPS[name](**OPS[name].inputs(**small(name, case), device="cuda"))
        torch.cuda.synchronize()


def measured(name: str, case: dict[str, Any], ceiling: float) -> dict[str, Any]:
    op = OPS[name]
    first = op.inputs(**case, device="cuda")
    cost = op.cost(**op.bind(**first))
    writes = name == "kv_cache_write"
    sets = [first] + [op.inputs(**case, device="cuda", seed=i) for i in range(1, copies_needed(int(cost.bytes)))]
    calls: dict[str, Any] = {"fpk": lambda args: op(**args)}
    row: dict[str, Any] = dict(other="", other_us="", ratio="", share="", tflops="", error="")
    if writes:
        pairs = {id(s): torch.empty(2, int(cost.bytes) // 2, dtype=torch.uint8, device="cuda") for s in sets}
        calls["copy"] = lambda args: pairs[id(args)][0].copy_(pairs[id(args)][1])
    elif name == "attention_prefill":
        B, T, H, D = case["B"], case["T"] // case["B"], case["H"], case["D"]
        q = torch.randn(B, H * case["group"], T, D, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(B, H, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        calls["torch, bf16, no pages"] = lambda _: scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
    times = time_in_turns(calls, sets, block_ms=15, rounds=3)
    us = times["fpk"].us
    row |= dict(us=f"{us:.2f}", tb_per_s=f"{cost.bytes / us / 1e6:.3f}")
    if name == "attention_decode":
        row["share"] = f"{cost.bytes / us * 1e6 / ceiling:.3f}"
        few = op.inputs(**case | dict(M=2, tokens=min(2048, case["tokens"])), device="cuda")
        row["error"] = f"{float(rel_error(op(**few), op.reference(**few))):.1e}"
    elif name == "attention_prefill":
        row["tflops"] = f"{cost.flops / us / 1e6:.0f}"
        few = op.inputs(**case | dict(B=2, T=256, tokens=512), device="cuda")
        row["error"] = f"{float(rel_error(op(**few), op.reference(**few))):.1e}"
    for other in list(calls)[1:]:
        row |= dict(other=other, other_us=f"{times[other].us:.2f}", ratio=f"{times[other].us / us:.3f}")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.jobs > 1:
        numbers = [list(range(i, len(cases()), options.jobs)) for i in range(options.jobs)]
        with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
            pool.map(compile_one, numbers)
    gate.turn()
    ceiling = read_ceiling()
    print(f"read ceiling {ceiling / 1e12:.3f} TB/s", flush=True)
    where = provenance()
    with open(options.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        only = dict(op="read", model="", cache="", size="1 GiB", us="", tb_per_s=f"{ceiling / 1e12:.3f}", share="1.000")
        writer.writerow(dict.fromkeys(FIELDS, "") | only | where)
        for name, model, cache, size, case in cases():
            try:
                row = measured(name, case, ceiling)
            except Exception as error:  # one that fails costs its row alone
                print(name, model, cache, size, type(error).__name__, str(error)[:300], flush=True)
                continue
            writer.writerow(dict(op=name, model=model, cache=cache, size=size) | row | where)
            file.flush()
            print(name, model, cache, size, {n: v for n, v in row.items() if v}, flush=True)
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
