"""Measure a model under quantization schemes: perplexity, errors of weights and layer outputs, bytes, latency.

Every number comes from the layers that users run: `fpk.nn.quantized` swaps them in and out again. Layer errors are
taken one layer at a time, each fed with the activations that it sees in the unquantized model.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fpk.api import STATIC, parse_layer_scheme, static_schemes
from fpk.formats import SCHEMES, Scheme
from fpk.nn import Calibration, QuantizedLinear, calibrate, quantized
from fpk.study.caches import PREFIX, quantized_cache
from fpk.study.model import StudyError, Subject
from fpk.study.text import Text
from fpk.study.timing import LayerTimer

BASELINE = "none"
"""The scheme column of the unquantized model."""

PERPLEXITY_COLUMNS = ("scheme", "text", "sequences", "length", "tokens_hash", "perplexity", "delta_pct", "seconds")
LAYER_COLUMNS = ("scheme", "layer", "kind", "M", "N", "K", "sqnr_db", "rel_err", "output_sqnr_db", "bytes", "ms")
SCHEME_COLUMNS = ("scheme", "layers", "bytes", "bytes_pct", "sqnr_db", "rel_err", "worst_rel_err", "ms", "note")

_LOGITS_AT_ONCE = 80_000_000  # elements: 3 sequences of 512 tokens with a vocabulary of 49,152

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, sequences done, and sequences in all."""


def layer_schemes() -> list[str]:
    """Every layer scheme worth a row: each scheme that weights may have, with its activations and weight-only.

    Weights whose scales are constant along K also go with static activations. What only activations have (a scheme that
    names no activations to go with it) stands beside channel weights. Left out are scales per token, which are, for
    weights, those of the channel scheme.
    """
    names: list[str] = []
    seen = set()
    for scheme in SCHEMES.values():
        if scheme.granularity.name == "token" or not scheme.activation:
            continue
        for activation in (scheme.activation, *_further_activations(scheme), BASELINE):
            same = (scheme.format, scheme.granularity.rows, scheme.granularity.cols, scheme.scale_format)
            key = (*same, scheme.quantizer, scheme.options, activation)
            if key not in seen:
                seen.add(key)
                names.append(f"{scheme.name}:{activation}")
    return names


def default_sequences(schemes: Sequence[str] | None = None) -> int:
    """How many sequences a text has by default: two cores do all of it in less than five minutes.

    The default model takes 5 s of CPU time a scheme, and 2 s for each sequence of 512 tokens.
    """
    return min(4, max(2, 80 // len(schemes or layer_schemes())))


def _further_activations(weight: Scheme) -> list[str]:
    """Activations beside the usual ones that a weight scheme is shown with."""
    if weight.granularity.cols > 0:
        return []
    names = [s for s in static_schemes() if SCHEMES[s.removesuffix(STATIC)].format is weight.format]
    if weight.granularity.name == "channel":
        others = (s for s in SCHEMES.values() if not s.activation and s.granularity.cols < 0)
        names += [s.name for s in others if s.format is weight.format]
    return names


@dataclass
class Study:
    """Results so far, as three tables. Interrupting `run_study` leaves what was measured until then."""

    model: str
    fingerprint: str
    device: str
    dtype: str
    captured_tokens: int = 0
    calibration_tokens: int = 0
    complete: bool = False
    perplexity_rows: list[dict[str, Any]] = field(default_factory=list)
    layer_rows: list[dict[str, Any]] = field(default_factory=list)
    scheme_rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def perplexity(self) -> pd.DataFrame:
        """A row per scheme and text; `delta_pct` is relative to the unquantized model on the same tokens."""
        return pd.DataFrame(self.perplexity_rows, columns=list(PERPLEXITY_COLUMNS))

    @property
    def layers(self) -> pd.DataFrame:
        """A row per scheme and layer: signal-to-noise ratio of the weights (dB), relative error of the output on M real
        tokens, bytes of codes and scales, and median milliseconds of a call (NaN on a CPU)."""
        return pd.DataFrame(self.layer_rows, columns=list(LAYER_COLUMNS))

    @property
    def schemes(self) -> pd.DataFrame:
        """A row per scheme: medians over layers of `sqnr_db` and `rel_err`, sums of `bytes` and `ms`. `note` says why
        a scheme could not be measured."""
        return pd.DataFrame(self.scheme_rows, columns=list(SCHEME_COLUMNS))

    def summary(self) -> pd.DataFrame:
        """`schemes` with columns `perplexity[text]` and `delta_pct[text]` for each text: what the terminal shows."""
        table = self.schemes
        for text in dict.fromkeys(row["text"] for row in self.perplexity_rows):
            rows = self.perplexity[self.perplexity["text"] == text].set_index("scheme")
            for column in ("perplexity", "delta_pct"):
                table[f"{column}[{text}]"] = table["scheme"].map(rows[column])
        return table


def run_study(
    subject: Subject,
    texts: Sequence[Text],
    schemes: Iterable[str] | None = None,
    *,
    ignore: Sequence[str] = (),
    capture_tokens: int = 256,
    progress: Progress | None = None,
    into: Study | None = None,
    caches: Iterable[str] = (),
) -> Study:
    """Measure the unquantized model and then every scheme, and with it unquantized every format of the KV cache.

    Args:
        subject: the model; it is left as it was.
        texts: what perplexity is measured on; the first tokens of the first also give the layers' activations. Static
            activations are calibrated on their `rest`; without any, such schemes get a row that says so.
        schemes: layer schemes, "w:a"; None for all of `layer_schemes()`.
        ignore: names of layers to leave unquantized, as `fpk.quantize_` takes them.
        capture_tokens: how many tokens the layer errors are measured on.
        progress: called before each piece of work.
        into: a Study to add to, so that a caller keeps it when the run is interrupted; default: a new one.
        caches: KV-cache formats of `fpk.study.caches.CACHES`; rows "kv:<format>" with perplexities only.

    Raises:
        ValueError: an unknown scheme, no text, or a model without linear layers to quantize.
    """
    kinds = list(dict.fromkeys(caches))
    names = list(dict.fromkeys(str(parse_layer_scheme(s)) for s in (layer_schemes() if schemes is None else schemes)))
    if not texts:
        raise StudyError("texts: expected at least one, got none")
    study = into if into is not None else new_study(subject)
    per_scheme = sum(len(t.tokens) for t in texts)
    steps = _Steps(progress, per_scheme * (len(names) + len(kinds) + 1))
    with torch.inference_mode():
        linears = _linears_to_quantize(subject.model, ignore)
        inputs = capture_inputs(subject.model, texts[0].tokens.flatten()[:capture_tokens][None], linears)
        study.captured_tokens = next(iter(inputs.values())).shape[0]
        ranges = _calibrate(study, subject.model, texts, ignore, steps) if _any_static(names) else None
        timer = LayerTimer()
        baseline = {t.name: _measure_text(study, subject, BASELINE, t, None, steps) for t in texts}
        _add_baseline(study, linears, inputs, timer)
        for index, name in enumerate(names, 2):
            static = parse_layer_scheme(name).static
            try:
                if static and ranges is None:
                    raise NotImplementedError("no text is left to calibrate on: shorter sequences, or a longer text")
                with quantized(subject.model, name, ignore=ignore, calibration=ranges if static else None):
                    for text in texts:
                        _measure_text(study, subject, name, text, baseline[text.name], steps)
                    _measure_layers(study, subject.model, name, linears, inputs, timer)
            except NotImplementedError as error:  # this device or this version has no such product: the table says so
                study.perplexity_rows = [r for r in study.perplexity_rows if r["scheme"] != name]
                study.scheme_rows.append({"scheme": name, "layers": 0, "note": str(error)})
            steps.jump(per_scheme * index)
        for kind in kinds:
            with quantized_cache(subject.model, kind):
                for text in texts:
                    _measure_text(study, subject, PREFIX + kind, text, baseline[text.name], steps)
            study.scheme_rows.append({"scheme": PREFIX + kind, "layers": 0, "note": ""})
    study.complete = True
    return study


def _any_static(schemes: Iterable[str]) -> bool:
    return any(parse_layer_scheme(scheme).static for scheme in schemes)


def _calibrate(
    study: Study, model: nn.Module, texts: Sequence[Text], ignore: Sequence[str], steps: "_Steps"
) -> Calibration | None:
    """Ranges of the activations on tokens that nothing is measured on; None if the texts have no more of them."""
    rests = [row[None] for text in texts if text.rest is not None for row in text.rest]
    if not rests:
        return None
    steps.show("calibrating static activations")
    study.calibration_tokens = sum(row.numel() for row in rests)
    return calibrate(model, ({"input_ids": row, "use_cache": False} for row in rests), ignore=ignore)


def new_study(subject: Subject) -> Study:
    device = torch.cuda.get_device_name(subject.device) if subject.device.type == "cuda" else subject.device.type
    return Study(subject.name, subject.fingerprint, device, str(subject.dtype).removeprefix("torch."))


class _Steps:
    """Counts sequences for the progress bar."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def show(self, what: str) -> None:
        if self._progress:
            self._progress(what, self._done, self._total)

    def advance(self, count: int, what: str) -> None:
        self._done += count
        self.show(what)

    def jump(self, done: int) -> None:
        """A scheme that failed half way still ends where it should."""
        self._done = done


# ---- perplexity


def perplexity(model: nn.Module, tokens: Tensor, on_batch: Callable[[int], None] | None = None) -> float:
    """exp of the mean negative log-likelihood, in nats, of every token but the first of each sequence.

    Args:
        model: a causal language model of transformers.
        tokens: (sequences, length) int64.
        on_batch: called with the number of sequences done since the last call.
    """
    count, length = tokens.shape
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", 1 << 16))
    at_once = max(1, _LOGITS_AT_ONCE // (length * vocabulary))
    total = torch.zeros((), dtype=torch.float64)
    with torch.inference_mode():
        for batch in tokens.split(at_once):
            logits = model(input_ids=batch, use_cache=False).logits
            for row, ids in zip(logits, batch, strict=True):  # one by one: fp32 logits of a batch take gigabytes
                total += F.cross_entropy(row[:-1].float(), ids[1:], reduction="sum").double().cpu()
            if on_batch:
                on_batch(len(batch))
    return float(torch.exp(total / (count * (length - 1))))


def _measure_text(
    study: Study, subject: Subject, scheme: str, text: Text, baseline: float | None, steps: _Steps
) -> float:
    start = time.perf_counter()
    label = "unquantized" if scheme == BASELINE else scheme
    steps.show(f"{label} on {text.name}")
    value = perplexity(subject.model, text.tokens, lambda done: steps.advance(done, f"{label} on {text.name}"))
    study.perplexity_rows.append(
        dict(
            scheme=scheme,
            text=text.name,
            sequences=text.tokens.shape[0],
            length=text.tokens.shape[1],
            tokens_hash=text.hash,
            perplexity=value,
            delta_pct=0.0 if baseline is None else 100 * (value / baseline - 1),
            seconds=time.perf_counter() - start,
        )
    )
    return value


# ---- layers


def _linears_to_quantize(model: nn.Module, ignore: Sequence[str]) -> dict[str, nn.Linear]:
    """The layers that `quantized` replaces: asked of itself, with the scheme that costs least."""
    with quantized(model, "fp8_tensor:none", ignore=ignore) as report:
        names = [layer.name for layer in report.changed]
    if not names:
        raise StudyError("model: expected linear layers to quantize, found none")
    return {name: cast(nn.Linear, model.get_submodule(name)) for name in names}


def capture_inputs(model: nn.Module, tokens: Tensor, layers: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """(M, K) activations that each layer sees in one forward pass over `tokens`; layers fed the same share a tensor."""
    seen: dict[str, Tensor] = {}
    originals: dict[int, tuple[Tensor, Tensor]] = {}  # keeps the originals alive, so that an id stays theirs

    def keep(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            x = arguments[0]
            if id(x) not in originals:
                originals[id(x)] = (x, x.detach().reshape(-1, x.shape[-1]))
            seen[name] = originals[id(x)][1]

        return hook

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    try:
        with torch.inference_mode():
            model(input_ids=tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    idle = [name for name in layers if name not in seen]
    if idle:
        raise StudyError(f"{idle[0]}: the model's forward pass does not use it; name it in `ignore`")
    return seen


def relative_error(out: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`, summed in fp64."""
    expected = expected.float()
    noise = torch.linalg.vector_norm(out.float() - expected, dtype=torch.float64)
    signal = torch.linalg.vector_norm(expected, dtype=torch.float64)
    return float(noise / signal.clamp(min=torch.finfo(torch.float64).tiny))


def decibels(rel_err: float) -> float:
    """Signal-to-quantization-noise ratio of a relative error, in dB; inf if there is no error."""
    return -20 * math.log10(rel_err) if rel_err > 0 else math.inf


def _measure_layers(
    study: Study,
    model: nn.Module,
    scheme: str,
    linears: dict[str, nn.Linear],
    inputs: dict[str, Tensor],
    timer: "LayerTimer",
) -> None:
    rows = []
    for name, linear in linears.items():
        layer = cast(QuantizedLinear, model.get_submodule(name))
        x = inputs[name]
        weight = linear.weight.float()
        bias = None if linear.bias is None else linear.bias.float()
        sqnr_db = decibels(relative_error(layer.dequantize(torch.float32), weight))
        rel_err = relative_error(layer(x), F.linear(x.float(), weight, bias))
        ms = timer.ms(scheme, layer, x)
        rows.append(_layer_row(scheme, name, linear, x, layer, sqnr_db, rel_err, ms))
    _add_layers(study, scheme, rows)


def _add_baseline(study: Study, linears: dict[str, nn.Linear], inputs: dict[str, Tensor], timer: "LayerTimer") -> None:
    rows = []
    for name, linear in linears.items():
        ms = timer.ms(BASELINE, linear, inputs[name])
        rows.append(_layer_row(BASELINE, name, linear, inputs[name], linear, math.inf, 0.0, ms))
    _add_layers(study, BASELINE, rows)


def _layer_row(
    scheme: str, name: str, linear: nn.Linear, x: Tensor, module: nn.Module, sqnr_db: float, rel_err: float, ms: float
) -> dict[str, Any]:
    return dict(
        scheme=scheme,
        layer=name,
        kind=name.rsplit(".", 1)[-1],
        M=x.shape[0],
        N=linear.out_features,
        K=linear.in_features,
        sqnr_db=sqnr_db,
        rel_err=rel_err,
        output_sqnr_db=decibels(rel_err),
        bytes=sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
        ms=ms,
    )


def _add_layers(study: Study, scheme: str, rows: list[dict[str, Any]]) -> None:
    study.layer_rows.extend(rows)
    frame = pd.DataFrame(rows)
    total = int(frame["bytes"].sum())
    baseline = next((r["bytes"] for r in study.scheme_rows if r["scheme"] == BASELINE), total)
    study.scheme_rows.append(
        dict(
            scheme=scheme,
            layers=len(rows),
            bytes=total,
            bytes_pct=100 * total / baseline,
            sqnr_db=frame["sqnr_db"].median(),
            rel_err=frame["rel_err"].median(),
            worst_rel_err=frame["rel_err"].max(),
            ms=frame["ms"].sum(skipna=False),
            note="",
        )
    )
