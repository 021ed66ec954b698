"""Memory while experts load: a model of several layers through every online method, expert by expert from the host.

    python tests/bench/loading.py --csv FILE [--layers N]

`over` is what the GPU held at most beyond the quantized model, in unquantized layers: one, and what quantizing takes.
"""

import argparse
import csv
from typing import Any

import gate
import torch
from tables import provenance

from fpk import methods

FIELDS = ("method", "scheme", "layers", "layer_mb", "quantized_mb", "peak_mb", "over", "gpu", "torch", "triton", "date")
SIZES = (32, 2048, 768)  # experts, hidden, intermediate
NAMES = sorted(n for n in methods.__all__ if n.endswith("OnlineMoEMethod"))


def load(name: str, count: int, source: dict[str, torch.Tensor], E: int, H: int, I: int) -> list[Any]:
    layers = []
    for number in range(count):
        layer = methods.RoutedExperts(methods.MoEConfig(E, 2, H, I), prefix=f"layers.{number}.experts")
        layer.quant_method = getattr(methods, name)(layer=layer)
        layer.quant_method.create_weights(layer, E, H, I, torch.bfloat16)
        layers.append(layer)
    for layer in layers:
        for e in range(E):
            for shard, w in source.items():
                parameter = layer.w2_weight if shard == "w2" else layer.w13_weight
                parameter.weight_loader(parameter, w, shard, shard, e)
        layer.quant_method.process_weights_after_loading(layer)
    return layers


def row(name: str, count: int, E: int, H: int, I: int) -> dict[str, Any]:
    shapes = dict(w1=(I, H), w3=(I, H), w2=(H, I))
    source = {n: torch.randn(s, device="cpu").bfloat16() for n, s in shapes.items()}
    load(name, 1, source, E, H, I)  # compiles
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layers = load(name, count, source, E, H, I)
    torch.cuda.synchronize()
    peak, held = (m() - before for m in (torch.cuda.max_memory_allocated, torch.cuda.memory_allocated))
    plain = E * 3 * H * I * 2
    return dict(
        method=name, scheme=layers[0].quant_method.scheme(layers[0]), layers=count, layer_mb=f"{plain / 1e6:.0f}",
        quantized_mb=f"{held / 1e6:.0f}", peak_mb=f"{peak / 1e6:.0f}", over=f"{(peak - held) / plain:.2f}",
        **provenance(),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--csv", required=True)
    parser.add_argument("--layers", type=int, default=6)
    options = parser.parse_args()
    gate.turn()
    with torch.inference_mode(), torch.device("cuda"), open(options.csv, "w", newline="") as file:
        table = csv.DictWriter(file, FIELDS, lineterminator="\n")
        table.writeheader()
        for name in NAMES:
            made = row(name, options.layers, *SIZES)
            table.writerow(made)
            file.flush()
            print(*(f"{n}={made[n]}" for n in FIELDS[:7]), flush=True)


if __name__ == "__main__":
    main()
