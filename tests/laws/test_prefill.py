"""What attention of several new tokens must obey: torch's numbers, those of one at a time, and only what is seen."""

import math

import pytest
import torch
from planted import Plant, change, first_violation, load, source_of
from torch.nn import functional as F

import fpk.kernels  # noqa: F401
from fpk.check import assert_close, bits
from fpk.op import OPS
from fpk.samples import generator, sample
from laws.test_attention import FORMATS, GRANULARITIES, case, dequantized

prefill, attend = OPS["attention_prefill"], OPS["attention_decode"]
COUNTS = (20, 0, 1, 45)  # new tokens of sequences of 33, 0, 1 and 130


def prefill_case(counts=COUNTS, padding=3, **options):
    args = case(**options)
    device = args["q"].device
    starts = torch.tensor([sum(counts[:b]) for b in range(len(counts) + 1)], dtype=torch.int32, device=device)
    q = sample((sum(counts) + padding, *args["q"].shape[1:]), args["q"].dtype, "normal", device, 11)
    return args | dict(q=q, query_starts=starts)


def by_torch(args):
    """torch's attention under a causal mask, sequence by sequence, in fp32; rows of nothing are 0."""
    out = torch.zeros(*args["q"].shape[:2], args["value_cache"].shape[-1], device=args["q"].device)
    group = args["q"].shape[1] // args["key_cache"].shape[2]
    starts = args["query_starts"].tolist()
    for b, length in enumerate(args["seq_lens"].tolist()):
        new = starts[b + 1] - starts[b]
        if not length or not new:
            continue
        k, v = (dequantized(args, w, b).repeat_interleave(group, 1).transpose(0, 1) for w in ("key", "value"))
        q = args["q"][starts[b] : starts[b + 1]].transpose(0, 1).float()
        at = torch.arange(length - new, length, device=q.device)[:, None]
        seen = torch.arange(length, device=q.device) <= at
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=args["softmax_scale"])
        out[starts[b] : starts[b + 1]] = torch.where(at[..., None] >= 0, made.transpose(0, 1), 0.0)
    return out.to(args["q"].dtype)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "dtype, granularity",
    [(FORMATS["e4m3"], "tensor"), (FORMATS["e4m3"], "token_head"), (FORMATS["e5m2"], "head"),
     (FORMATS["int8"], "token_head"), (None, "none")],
)  # fmt: skip
def test_prefill_is_torchs_on_dequantized_caches(dtype, granularity, q_dtype, device):
    args = prefill_case(dtype=dtype or q_dtype, granularity=granularity, q_dtype=q_dtype, device=device)
    expected = by_torch(args)
    assert bool(expected.any(-1).any(-1)[:66].all()) and not bool(expected[66:].any())
    tolerance = 1e-3 if q_dtype is torch.float16 else 4e-3
    assert_close(prefill.reference(**args), expected, tolerance)
    assert_close(prefill(**args), expected, tolerance)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_tokens_together_are_tokens_one_at_a_time(granularity, device):
    args = prefill_case(granularity=granularity, padding=0, device=device)
    out = prefill(**args)
    starts, lens = args["query_starts"].tolist(), args["seq_lens"].tolist()
    owner = torch.tensor([b for b in range(4) for _ in range(starts[b + 1] - starts[b])], device=device)
    seen = [lens[b] - starts[b + 1] + t + 1 for t, b in enumerate(owner.tolist())]
    each = dict(block_table=args["block_table"][owner], seq_lens=torch.tensor(seen, dtype=torch.int32, device=device))
    alone = {n: v for n, v in args.items() if n != "query_starts"}
    assert_close(out, attend(**alone | each), 4e-3)


def test_rows_that_see_nothing_are_zero(device):
    """More new tokens than the sequence has, and rows behind the last sequence."""
    args = prefill_case(counts=(40, 2, 1, 0), padding=70, device=device)
    out = prefill(**args)
    assert not bool(out[:7].any()) and bool(out[7:40].any(-1).all())
    assert not bool(out[40:42].any()) and bool(out[42].any()) and not bool(out[43:].any())
    assert_close(out, prefill.reference(**args), 4e-3)


@pytest.mark.parametrize("dtype, granularity", [(torch.float8_e4m3fn, "tensor"), (torch.int8, "token_head")])
def test_later_tokens_do_not_count(dtype, granularity, device):
    """Large numbers in every slot but those of the first ten tokens: rows that see only these stay as they are."""
    args = prefill_case(counts=(33, 0, 1, 130), padding=0, dtype=dtype, granularity=granularity, device=device)
    clean = prefill(**args)
    page = args["key_cache"].shape[1]
    used = torch.zeros(args["key_cache"].shape[:2], dtype=torch.bool)
    for b in range(4):
        for n in range(min(10, int(args["seq_lens"][b]))):
            used[int(args["block_table"][b, n // page]), n % page] = True
    for name in ("key_cache", "value_cache"):
        raw = bits(args[name]).clone()
        raw[~used.to(device)] = 0x7E
        args[name] = raw.view(dtype)
    out = prefill(**args)
    same = [*range(10), 33, *range(34, 44)]
    assert torch.equal(out[same], clean[same])
    assert bool((out[10:33] != clean[10:33]).any(-1).all())


def test_a_sequence_does_not_depend_on_its_batch(device):
    args = prefill_case(padding=0, device=device)
    whole, starts = prefill(**args), args["query_starts"].tolist()
    for b in (0, 3):
        rows = slice(starts[b], starts[b + 1])
        alone = {n: args[n][b : b + 1] for n in ("block_table", "seq_lens")}
        ends = torch.tensor([0, rows.stop - rows.start], dtype=torch.int32, device=device)
        assert torch.equal(prefill(**args | alone | dict(q=args["q"][rows], query_starts=ends)), whole[rows])


@pytest.mark.parametrize("D, dv", [(64, 24), (128, 16), (33, 8), (16, 64), (32, 128)])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, None])
def test_keys_and_values_of_different_widths(D, dv, dtype, device):
    """Steps of 64 tokens; decoding with as many heads as fill the matrix unit."""
    shape = dict(D=D, dv=dv, tokens=200, dtype=dtype, granularity="none", kind="zeros", device=device)
    for op, sizes in ((prefill, dict(B=2, T=40, H=2, group=1)), (attend, dict(M=2, H=1, group=40))):
        args = op.inputs(**shape, **sizes)
        assert_close(op(**args), op.reference(**args), op.tolerance(op.bind(**args)))


@pytest.mark.parametrize("group", [1, 3, 20])
def test_any_number_of_heads_shares_keys(group, device):
    args = prefill_case(group=group, device=device)
    assert_close(prefill(**args), by_torch(args), 4e-3)


def test_pages_in_any_order(device):
    args = prefill_case(device=device)
    expected = prefill(**args)
    order = torch.randperm(len(args["key_cache"]), generator=generator(8, device), device=device)
    moved = {n: torch.empty_like(bits(args[n])).index_copy_(0, order, bits(args[n])).view(args[n].dtype)
             for n in ("key_cache", "value_cache")}  # fmt: skip
    assert torch.equal(prefill(**args | moved | dict(block_table=order[args["block_table"].long()].int())), expected)


def test_the_scale_of_scores(device):
    args = prefill_case(device=device) | dict(softmax_scale=0.02)
    assert_close(prefill(**args), by_torch(args), 4e-3)
    default = prefill(**args | dict(softmax_scale=None))
    assert torch.equal(default, prefill(**args | dict(softmax_scale=1 / math.sqrt(80))))


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(query_starts=torch.zeros(4, dtype=torch.int32)), r"query_starts: expected \(5,\), got \(4,\)"),
        (dict(query_starts=torch.zeros(5, dtype=torch.int64)), "query_starts: expected int32, got int64"),
        (dict(seq_lens=torch.zeros(3, dtype=torch.int32)), r"seq_lens: expected \(4,\), got \(3,\)"),
        (dict(q=torch.zeros(4, 7, 80, dtype=torch.bfloat16)), r"q: expected a multiple of 2 heads .* got 7"),
    ],
)
def test_errors_of_prefill_name_the_argument(changes, message, device):
    with pytest.raises(ValueError, match=f"attention_prefill.{message}"):
        prefill(**prefill_case(device=device) | {n: t.to(device) for n, t in changes.items()})


PLANTS = [
    Plant("attention_prefill", "tokens see the next one", "length - count + query + 1", "length - count + query + 2"),
    Plant("attention_prefill", "limits are not looked at", "position[None, :] < limits[:, None]",
          "position[None, :] < end"),
    Plant("attention_prefill", "tiles of the sequence before", "tl.cumsum(tiles, 0) <= tile",
          "tl.cumsum(tiles, 0) < tile"),
    Plant("attention_prefill", "nothing behind the last sequence", "tl.store(out_ptrs, zeros,",
          "tl.store(out_ptrs, zeros + 1,"),
    Plant("attention_prefill", "rows without tokens see the first", "tl.where((limits > 0)[:, None], acc /",
          "tl.where((limits > -9)[:, None], acc /"),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_wrong_kernel_is_caught(plant, tmp_path, monkeypatch):
    source = change(source_of(OPS[plant.op]), plant)
    assert first_violation(load(plant.op, source, tmp_path, monkeypatch), 30) is not None
