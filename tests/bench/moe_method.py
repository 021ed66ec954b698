"""What a method costs beside the bare function: a DeepSeek-V3-shaped expert layer through `Fp8MoEMethod`, in turns.

    python tests/bench/moe_method.py --csv FILE [--tokens T ...] [--tiny]

`eager` is the wall clock of calls in a row, waiting for the device at the end of each; `graph` is the replay of a
captured call. Both implementations get the same tensors and give the same bits. Run it on a quiet GPU.
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from typing import Any

import gate
import torch
from tables import provenance
from turns import time_in_turns

from fpk import methods
from fpk._moe import moe
from fpk.api import Quantized

FIELDS = (
    "layer", "scheme", "T", "bit_equal", "method_us", "bare_us", "eager_pct", "method_graph_us", "bare_graph_us",
    "graph_pct", "gpu", "torch", "triton", "date",
)  # fmt: skip
CALLS = 25
SCHEME = "fp8_block128:fp8_group128"


def make(E: int, top_k: int, H: int, I: int) -> Any:
    """A layer with random codes and scales, loaded as a checkpoint is."""
    layer = methods.RoutedExperts(methods.MoEConfig(E, top_k, H, I), prefix="layers.0.mlp.experts")
    config = methods.Fp8Config(is_checkpoint_fp8_serialized=True, weight_block_size=[128, 128])
    layer.quant_method = methods.Fp8MoEMethod(config, layer)
    layer.quant_method.create_weights(layer, E, H, I, torch.bfloat16)
    for name, parameter in list(layer.named_parameters()):
        if "scale" in name:
            value = torch.rand(parameter.shape) * 1e-4 + 5e-5
        else:
            value = torch.empty(parameter.shape, dtype=torch.float8_e4m3fn)
            for e in range(E):
                value[e] = (torch.randn(parameter.shape[1:], dtype=torch.bfloat16) * 100).clamp(-448, 448)
        parameter.weight_loader(parameter, value)
    layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.fast_accum = True
    return layer


def calls_of(layer: Any, tokens: list[Any], top_k: int) -> dict[str, Callable[[int], Any]]:
    w13 = Quantized(layer.w13_weight, layer.w13_weight_scale_inv, "fp8_block128", check=False)
    w2 = Quantized(layer.w2_weight, layer.w2_weight_scale_inv, "fp8_block128", check=False)
    method = layer.quant_method
    return {
        "method": lambda i: method.apply_monolithic(layer, *tokens[i]),
        "bare": lambda i: moe(*tokens[i], w13, w2, top_k=top_k, act="fp8_group128", fast_accum=True),
    }


def eager(calls: dict[str, Callable[[int], Any]], sets: int, rounds: int) -> dict[str, float]:
    """Median microseconds of a call, `rounds` alternating blocks of CALLS."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for r in range(rounds + 1):
        for name in list(calls)[:: 1 if r % 2 else -1]:
            for i in range(CALLS):
                torch.cuda.synchronize()
                start = time.perf_counter()
                calls[name](i % sets)
                torch.cuda.synchronize()
                samples[name] += [1e6 * (time.perf_counter() - start)] * (r > 0)
    return {name: statistics.median(values) for name, values in samples.items()}


def rows(E: int, top_k: int, H: int, I: int, tokens: list[int], rounds: int) -> Any:
    layer = make(E, top_k, H, I)
    for T in tokens:
        sets = [
            (torch.randn(T, H, dtype=torch.bfloat16), torch.randn(T, E, dtype=torch.float32))
            for _ in range(4 if T <= 64 else 1)
        ]
        calls = calls_of(layer, sets, top_k)
        same = all(torch.equal(calls["method"](i), calls["bare"](i)) for i in range(len(sets)))
        host = eager(calls, len(sets), rounds)
        graph = {n: t.us for n, t in time_in_turns(calls, list(range(len(sets))), 20.0, rounds).items()}
        yield dict(
            layer=f"deepseek_v3 ({E} experts, H {H}, I {I}, top {top_k})", scheme=SCHEME, T=T,
            bit_equal="yes" if same else "no", method_us=f"{host['method']:.1f}", bare_us=f"{host['bare']:.1f}",
            eager_pct=f"{100 * (host['method'] / host['bare'] - 1):.2f}", method_graph_us=f"{graph['method']:.1f}",
            bare_graph_us=f"{graph['bare']:.1f}", graph_pct=f"{100 * (graph['method'] / graph['bare'] - 1):.2f}",
            **provenance(),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tiny", action="store_true", help="a layer of a few megabytes")
    options = parser.parse_args()
    gate.turn()
    sizes = (8, 2, 256, 128) if options.tiny else (256, 8, 7168, 2048)
    with torch.inference_mode(), torch.device("cuda"), open(options.csv, "w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        for row in rows(*sizes, options.tokens, options.rounds):
            table.writerow(row)
            file.flush()
            print(*(f"{n}={row[n]}" for n in FIELDS[2:10]), flush=True)


if __name__ == "__main__":
    main()
