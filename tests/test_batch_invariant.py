"""Batch-invariant mode: what an op computes for a row is the same whatever else is in the batch, bit for bit."""

import contextvars
import threading

import pytest
import torch

import fpk
from fpk import check, db
from fpk._moe import gathers
from fpk._moe_checks import Static
from fpk.check import bits
from fpk.device import pretend, pretend_triton
from fpk.formats import scheme_of
from fpk.kernels.moe._expert_streams import streams_run
from fpk.kernels.moe._token_launch import _first, _room
from fpk.op import _BATCHED, FIXED_BATCH, OPS, batch_must_not_matter
from fpk.tune.arguments import legal_candidates, outline

CHOOSY = [
    op
    for op in OPS.values()
    if op.tol != 0.0 and not op.name.startswith("act_and_mul") and op.name != "moe_token"  # takes one token, never more
]
SIZES = (1, 16, 100, 4096)


def wide(op):
    """A benchmark case of the op, and its number of tokens' name."""
    case = list(op.cases.values())[len(op.cases) // 2]
    return case, next(n for n in ("M", "T") if n in case)


def test_every_op_whose_config_matters_has_a_batch():
    for op in CHOOSY:
        assert _BATCHED & set(op.__signature__.parameters), op.name


@pytest.mark.parametrize("op", CHOOSY, ids=lambda op: op.name)
@pytest.mark.parametrize("recorded", [True, False], ids=["packaged", "empty"])
def test_one_config_for_every_batch(op, recorded):
    case, tokens = wide(op)
    chosen, free = [], []
    h200 = fpk.device.Device("sm90", "NVIDIA H200", "nv", 132)
    with pretend(h200), fpk.use(db.default() if recorded else db.Empty()):
        for size in SIZES:
            args = outline(op, dict(case) | {tokens: size})
            free.append(str(op.config_for(**args)))
            with fpk.batch_invariant():
                chosen.append(str(op.config_for(**args)))
    assert len(set(chosen)) == 1


@pytest.mark.parametrize("op", CHOOSY, ids=lambda op: op.name)
@pytest.mark.parametrize("triton", ["3.6", "3.9"])
def test_a_candidate_for_the_fixed_batch_is_legal_in_any(op, triton):
    """Else another one would take its place in batches of some sizes."""
    case, tokens = wide(op)
    h200 = fpk.device.Device("sm90", "NVIDIA H200", "nv", 132)
    with pretend(h200), pretend_triton(triton), fpk.batch_invariant():
        found = legal_candidates(op, outline(op, dict(case) | {tokens: FIXED_BATCH}), h200)
        for size in (1, 700, 4096, 65536):
            bound = outline(op, dict(case) | {tokens: size})
            assert found and all(op.is_legal(config, bound, h200) for config in found)


def test_without_it_the_batch_counts():
    args = [OPS["scaled_mm"].inputs(M=m, N=256, K=4096, device="cpu") for m in (1, 4096)]
    with pretend("sm90"), fpk.use(db.Empty()):
        assert len({str(OPS["scaled_mm"].config_for(**a)) for a in args}) == 2


ROWS = {
    "scaled_mm": ("a", "scale_a"), "scaled_mm_group": ("a", "scale_a"), "mm_weight_only": ("a",), "route": ("logits",),
    "attention_decode": ("q", "block_table", "seq_lens"),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_row_alone_has_the_bits_it_has_in_a_batch(name, device):
    op = OPS[name]
    case = {n: tuple(v)[len(tuple(v)) // 2] for n, v in op.domain.items()} | dict(M=70)
    case |= dict(N=40, K=300) if "K" in op.domain else {}
    args = op.inputs(**case, device=device)
    with fpk.batch_invariant():
        whole = op(**args)
        whole = whole if isinstance(whole, tuple) else (whole,)
        for first, last in ((0, 1), (5, 22), (69, 70)):
            part = {n: t[first:last] if n in ROWS[name] and t.shape[0] == 70 else t for n, t in args.items()
                    if isinstance(t, torch.Tensor)}  # fmt: skip
            out = op(**args | part)
            for o, w in zip(out if isinstance(out, tuple) else (out,), whole, strict=True):
                assert torch.equal(bits(o), bits(w[first:last].contiguous()))


@pytest.mark.parametrize("act", ["none", "fp8_token", "fp8_group128"])
def test_a_token_of_a_layer_of_experts(act, device):
    w13, w2 = (torch.randn(4, *s, device=device).bfloat16() / 8 for s in ((64, 128), (128, 32)))
    if act != "none":
        weights = "fp8_channel" if act == "fp8_token" else "fp8_block128"
        w13, w2 = fpk.quantize(w13, weights), fpk.quantize(w2, weights)
    x, logits = torch.randn(33, 128, device=device).bfloat16(), torch.randn(33, 4, device=device)
    with fpk.batch_invariant():
        whole = fpk.moe(x, logits, w13, w2, top_k=2, act=act)
        for rows in (slice(0, 1), slice(4, 21)):
            assert torch.equal(fpk.moe(x[rows], logits[rows], w13, w2, top_k=2, act=act), whole[rows])


@pytest.mark.parametrize(
    "shape, act", [((2, 4104, 16), "none"), ((2, 4104, 16), "fp8_token"), ((4, 256, 128), "fp8_group128")]
)
def test_the_steps_of_a_layer_are_the_same_for_every_batch(shape, act):
    """Whether the first product gathers its tokens depends on their number; configs follow it, and so do bits."""
    weight = torch.zeros(shape).bfloat16()
    if act != "none":
        weight = fpk.quantize(weight, "fp8_channel" if act == "fp8_token" else "fp8_block128")
    scheme, seen = None if act == "none" else scheme_of(act), {False: set(), True: set()}
    for invariant in seen:
        with fpk.batch_invariant(invariant):
            for tokens in (1, 16, 4096):
                x = torch.empty((tokens, shape[2]), dtype=torch.bfloat16, device="meta")
                seen[invariant].add(gathers(x, scheme, weight, Static(None, None), 2))
    assert len(seen[True]) == 1 and len(seen[False]) == 2


def test_it_is_of_a_context_and_keeps_the_database():
    with fpk.batch_invariant():
        assert isinstance(db.active(), db.BatchInvariant)
        assert db.active() is db.active()
        assert db.snapshot().content
        with fpk.batch_invariant(False):
            assert not isinstance(db.active(), db.BatchInvariant)
        with fpk.use(db.Empty()) as inner:
            assert db.active().database is inner
        seen = []
        thread = threading.Thread(target=lambda: seen.append(db.active()))
        thread.start()
        thread.join()
        assert not isinstance(seen[0], db.BatchInvariant)
        thread = threading.Thread(target=contextvars.copy_context().run, args=(lambda: seen.append(db.active()),))
        thread.start()
        thread.join()
        assert isinstance(seen[1], db.BatchInvariant)
    assert not isinstance(db.active(), db.BatchInvariant)


@pytest.mark.parametrize(
    "asks",
    [batch_must_not_matter, check.has_fp8_units, check.fp8_dtype, streams_run, _room, _first],
    ids=lambda f: f.__name__,
)
def test_constants_of_traced_graphs_are_marked_as_torch_marks_them(asks):
    """By the attribute alone: torch's decorator imports dynamo, which takes every process seconds."""
    marked = torch.compiler.assume_constant_result(lambda: 0)
    assert vars(asks) == vars(marked) != {}
