"""Times of the grouped drafts beside today's kernel and DeepGEMM's contiguous layout, at layers of real models.

Weights are larger than L2, so nothing rotates. Candidates that gather stand beside today's two launches, which move the
rows and multiply ("permute + today"); the others, and DeepGEMM, get rows that lie in order, its own padded to 128.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import peers
import torch
from grouped_candidates import OP, SHAPES, draft, gathers
from moe_stages import random_weights
from race import Call, race, save

from fpk.op import OPS

FIELDS = ("layer", "T", "kernel", "us", "deep_gemm_over_it", "error_to_today")
BLOCK_MS, ROUNDS = 10.0, 4
SCHEME = "fp8_block128:fp8_group128"
Shape = tuple[str, int, int, int, int, int, bool]


@dataclass
class Layer:
    """What a product is given: tokens and the order of their rows, or rows alone."""

    tokens: torch.Tensor | None
    token_scales: torch.Tensor | None
    rows: torch.Tensor
    scales: torch.Tensor
    weights: dict[str, torch.Tensor]
    offs: torch.Tensor
    index: torch.Tensor
    top_k: int


def layer_of(shape: Shape, values: bool = True) -> Layer:
    """values: False where only shapes matter, such as for what DeepGEMM compiles."""
    _, count, experts, top_k, n, k, reads_tokens = shape
    g = torch.Generator("cuda").manual_seed(count)
    _, ids = OPS["route"](torch.randn((count, experts), device="cuda", generator=g), top_k)
    index, _, offs = OPS["sort_by_expert"](ids, experts)
    codes = None if values else torch.zeros((experts, n, k), device="cuda", dtype=torch.float8_e4m3fn)
    weights = random_weights(experts, n, k, SCHEME, codes)
    held = dict(b=weights.codes, scale_b=weights.scale)
    x = torch.randn((count if reads_tokens else count * top_k, k), device="cuda", generator=g).to(torch.bfloat16)
    rows, scales = OPS["quantize_fp8_group"](x)
    if not reads_tokens:
        return Layer(None, None, rows, scales, held, offs, index, top_k)
    return Layer(rows, scales, *OPS["moe_permute"](rows, index, top_k, scales), held, offs, index, top_k)


def deep_gemm(layer: Layer) -> Call | None:
    """DeepGEMM's product of rows of which each expert's begin at a multiple of 128; the result in the order of ours."""
    peers.load()
    try:
        from deep_gemm import m_grouped_fp8_gemm_nt_contiguous
    except Exception as problem:
        print(f"no DeepGEMM: {type(problem).__name__}: {problem}"[:200], flush=True)
        return None
    ends, device = layer.offs.long(), layer.rows.device
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded = (counts + 127) // 128 * 128
    before = padded.cumsum(0) - padded - (ends - counts)
    total = int(padded.sum())
    to = torch.arange(len(layer.rows), device=device)
    to = to + before.repeat_interleave(counts)
    rows = torch.zeros((total, layer.rows.shape[1]), dtype=torch.uint8, device=device)
    rows[to] = layer.rows.view(torch.uint8)
    scales = torch.zeros((layer.scales.shape[1], total), device=device)
    scales[:, to] = layer.scales.T
    experts = torch.arange(len(counts), device=device).repeat_interleave(padded).to(torch.int32)
    left = (rows.view(layer.rows.dtype), scales.T)
    right = (layer.weights["b"], layer.weights["scale_b"])
    out = torch.zeros((total, right[0].shape[1]), dtype=torch.bfloat16, device=device)

    def call(_: Any) -> torch.Tensor:
        m_grouped_fp8_gemm_nt_contiguous(left, right, out, experts, disable_ue8m0_cast=True)
        return out if torch.cuda.is_current_stream_capturing() else out[to]  # what is timed is the product

    return call


def warm(indices: Sequence[int]) -> None:
    """Let DeepGEMM compile what these shapes need."""
    for i in indices:
        gemm = deep_gemm(layer_of(SHAPES[i], values=False))
        if gemm is None:
            return
        gemm(None)
        torch.cuda.synchronize()


def calls_of(layer: Layer, names: Sequence[str]) -> dict[str, Call]:
    offs, held = layer.offs, layer.weights
    calls: dict[str, Call] = {"today": lambda _: OP(a=layer.rows, scale_a=layer.scales, offs=offs, **held)}
    gemm = deep_gemm(layer)
    if gemm is not None:
        calls["DeepGEMM"] = gemm
    if layer.tokens is not None:

        def both(_: Any) -> torch.Tensor:
            rows, scales = OPS["moe_permute"](layer.tokens, layer.index, layer.top_k, layer.token_scales)
            return OP(a=rows, scale_a=scales, offs=offs, **held)

        calls["permute + today"] = both
    for name in names:
        fn, config = draft(name)
        given: dict[str, Any] = dict(a=layer.rows, scale_a=layer.scales)
        if gathers(name):
            given = dict(a=layer.tokens, scale_a=layer.token_scales, gather=layer.index, top_k=layer.top_k)
        if given["a"] is not None:
            calls[name] = lambda _, fn=fn, given=given, config=config: fn(**given, offs=offs, **held, config=config)
    return calls


def show(shape: Shape, found: dict[str, tuple[float, float]]) -> list[dict[str, Any]]:
    layer, tokens, _, top_k, n, k, _ = shape
    print(f"\n{layer}, {tokens} tokens", flush=True)
    rows = []
    for who, (us, error) in sorted(found.items(), key=lambda x: x[1]):
        over = found["DeepGEMM"][0] / us if "DeepGEMM" in found else math.nan
        rate = 2e-6 * tokens * top_k * n * k / us
        print(f"  {who:20s} {us:9.2f} us {rate:6.0f} TFLOP/s   DeepGEMM / it {over:5.3f}   error to today {error:.1e}")
        rows.append(dict(zip(FIELDS, (layer, tokens, who, round(us, 2), round(over, 3), f"{error:.1e}"), strict=True)))
    return rows


def means(rows: Sequence[dict[str, Any]]) -> None:
    """Geometric means over the layers, of each kernel that ran in all of them, and of the best for each."""
    known = [r for r in rows if not math.isnan(r["deep_gemm_over_it"]) and r["kernel"] != "DeepGEMM"]
    places = {(r["layer"], r["T"]) for r in known}
    for who in sorted({r["kernel"] for r in known}):
        over = [r["deep_gemm_over_it"] for r in known if r["kernel"] == who]
        print(f"DeepGEMM / {who}: {statistics.geometric_mean(over):.3f} over {len(over)} of {len(places)}", flush=True)
    best = [max(r["deep_gemm_over_it"] for r in known if (r["layer"], r["T"]) == place) for place in places]
    if best:
        print(f"DeepGEMM / best: {statistics.geometric_mean(best):.3f}", flush=True)


def time_all(names: Sequence[str], indices: Sequence[int], path: str) -> None:
    rows = []
    for shape in (SHAPES[i] for i in indices):
        rows += show(shape, race(shape[:2], calls_of(layer_of(shape), names), [{}], BLOCK_MS, ROUNDS))
        torch.cuda.empty_cache()
        save(path, rows)
    means(rows)
