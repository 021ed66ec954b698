"""What a paged KV cache must obey: exact codes, padding that never counts, attention as torch computes it."""

import math

import guarded
import pytest
import torch
from planted import Plant, change, first_violation, load, source_of
from torch import Tensor
from torch.nn import functional as F

import fpk.kernels  # noqa: F401
from fpk.check import assert_close, bits, rel_error
from fpk.formats import FP8, INT8, decode, encode
from fpk.kernels.attention._paged import make_cache, make_scales
from fpk.op import OPS
from fpk.samples import generator, sample

write, attend = OPS["kv_cache_write"], OPS["attention_decode"]
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
GRANULARITIES = ("tensor", "head", "token_head")
SCALES = ("k_scale", "v_scale", "key_scales", "value_scales")


def values(codes: Tensor) -> Tensor:
    return decode(codes, INT8 if codes.dtype is torch.int8 else FP8[codes.dtype])


# ---- kv_cache_write --------------------------------------------------------
def empty_cache(pages, page, heads, size, dtype, device):
    return torch.full((pages, page, heads, size), 0x55, dtype=torch.uint8, device=device).view(dtype)


@pytest.mark.parametrize("tokens, heads, size", [(1, 1, 64), (7, 4, 128), (42, 8, 64), (7, 3, 80)])
@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
def test_scales_by_token_and_head(dtype, tokens, heads, size, device):
    """By its formula, written out: and only the slots that were named change."""
    key, value = (sample((tokens, heads, n), torch.bfloat16, "normal", device, n) for n in (size, size // 2))
    pages, page = 6, 16
    caches = [empty_cache(pages, page, heads, n, dtype, device) for n in (size, size // 2)]
    stored = [torch.full((pages, page, heads), 7.0, device=device) for _ in range(2)]
    slots = torch.randperm(pages * page, generator=generator(3, device), device=device)[:tokens]
    slots[1::4] = -1
    write(key, value, *caches, slots, key_scales=stored[0], value_scales=stored[1])
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    for x, cache, scales in zip((key, value), caches, stored, strict=True):
        flat, scale = cache.flatten(0, 1), scales.flatten(0, 1)
        untouched = torch.ones(pages * page, dtype=torch.bool, device=device)
        for m, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            untouched[slot] = False
            s = torch.clamp(x[m].float().abs().amax(-1) / torch.tensor(largest, device=device), min=1e-6)
            assert torch.equal(scale[slot], s)
            expected = encode(x[m].float() / s[:, None], INT8 if dtype is torch.int8 else FP8[dtype])
            assert torch.equal(bits(flat[slot]), bits(expected))
            assert rel_error(values(flat[slot]) * s[:, None], x[m].float()) < 0.1
        assert bool((bits(flat)[untouched] == 0x55).all()) and bool((scale[untouched] == 7.0).all())


@pytest.mark.parametrize("dtype", FORMATS.values(), ids=FORMATS)
def test_odd_values_keep_to_themselves(dtype, device):
    key = torch.ones(2, 2, 6, device=device)
    key[0, 0, 1], key[0, 0, 2], key[0, 1] = float("nan"), float("-inf"), 0.0
    caches = [empty_cache(1, 4, 2, 6, dtype, device) for _ in range(2)]
    stored = [torch.zeros(1, 4, 2, device=device) for _ in range(2)]
    write(key, key, *caches, torch.tensor([2, 0], device=device), key_scales=stored[0], value_scales=stored[1])
    largest = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    out = values(caches[0])[0, 2]
    assert stored[0][0, 2].tolist() == pytest.approx([1 / largest, 1e-6])
    assert bool(out[0, 1].isnan()) != (dtype is torch.int8)  # which has code 0 for it
    assert out[0, 2] == (-128.0 if dtype is torch.int8 else -largest)
    assert out[0, [0, 3, 4, 5]].tolist() == [largest] * 4 and not bool(out[1].any())


def test_int8_rounds_half_to_even(device):
    key = torch.tensor([[[0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0]]], device=device)
    caches = [empty_cache(1, 1, 1, 7, torch.int8, device) for _ in range(2)]
    write(key, key, *caches, torch.zeros(1, dtype=torch.int32, device=device))
    assert caches[0].flatten().tolist() == [0, 2, 2, 0, -2, 127, -128]


def test_nothing_is_written_around_the_slots(device):
    """A cache inside a larger buffer, heads before tokens: every other byte of the buffer stays."""
    buffer = torch.full((3, 2, 5, 96), 0x55, dtype=torch.uint8, device=device)
    view = buffer[:, :, :4, 8:88].transpose(1, 2).view(torch.float8_e4m3fn)  # (3 pages, 4 tokens, 2 heads, 80)
    key = sample((2, 2, 80), torch.float16, "normal", device)
    other = empty_cache(3, 4, 2, 80, torch.float8_e4m3fn, device)
    write(key, key, view, other, torch.tensor([6, -1], device=device))
    assert torch.equal(bits(view[1, 2]), encode(key[0].float(), FP8[torch.float8_e4m3fn]))
    assert torch.equal(bits(view), bits(other))
    assert int((buffer != 0x55).sum()) == int((bits(view) != 0x55).sum())


def far_apart(heads, size, device):
    """Three pages of one token, 1.2 GB between them: offsets beyond 2^31. Pages that nobody touches cost no memory."""
    stride = 1_200_000_000
    buffer = guarded._empty(2 * stride + heads * size, dtype=torch.uint8, device=device)
    return buffer.as_strided((3, 1, heads, size), (stride, heads * size, size, 1))


def test_offsets_beyond_int32(device):
    key, value, q = (sample((1, 2, 64), torch.bfloat16, "normal", device, i) for i in range(3))
    caches = [far_apart(2, 64, device).view(torch.float8_e4m3fn) for _ in range(2)]
    write(key, value, *caches, torch.tensor([2], device=device))
    table, lens = (torch.tensor(v, dtype=torch.int32, device=device) for v in ([[2]], [1]))
    assert torch.equal(bits(caches[0][2, 0]), encode(key[0].float(), FP8[torch.float8_e4m3fn]))
    assert_close(attend(q, *caches, table, lens)[0], values(caches[1][2, 0]).to(torch.bfloat16), 0.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(key_cache=torch.zeros(2, 4, 2, 32, dtype=torch.int8)), r"key_cache: expected \(2, 4, 2, 64\), got"),
        (dict(value_cache=torch.zeros(2, 4, 2, 64)), "value_cache: expected int8, got float32"),
        (dict(key_cache=torch.zeros(2, 4, 2, 64)), "key_cache: expected float8_e4m3fn or .* got float32"),
        (dict(slots=torch.zeros(2, dtype=torch.int64)), r"slots: expected \(3,\), got \(2,\)"),
        (dict(slots=torch.zeros(3)), "slots: expected int64 or int32, got float32"),
        (dict(k_scale=torch.ones(3)), r"k_scale: expected \(1,\) or \(2,\), got \(3,\)"),
        (dict(key_scales=torch.ones(2, 4, 2)), "value_scales: expected .* got None"),
        (
            dict(k_scale=torch.ones(1), key_scales=torch.ones(2, 4, 2), value_scales=torch.ones(2, 4, 2)),
            "k_scale: expected None where scales are stored by token",
        ),
        (dict(value=torch.zeros(3, 1, 64, dtype=torch.bfloat16)), r"value: expected \(3, 2, 64\), got \(3, 1, 64\)"),
        (dict(key=torch.zeros(3, 64, 2, dtype=torch.bfloat16).mT), "key: expected stride 1 along the last dimension"),
    ],
)
def test_errors_of_writes_name_the_tensor(changes, message, device):
    args = dict(
        key=torch.zeros(3, 2, 64, dtype=torch.bfloat16), value=torch.zeros(3, 2, 64, dtype=torch.bfloat16),
        key_cache=torch.zeros(2, 4, 2, 64, dtype=torch.int8), value_cache=torch.zeros(2, 4, 2, 64, dtype=torch.int8),
        slots=torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    with pytest.raises(ValueError, match=f"kv_cache_write.{message}"):
        write(**{n: t.to(device) for n, t in (args | changes).items()})


# ---- attention_decode ------------------------------------------------------
def case(
    dtype=torch.float8_e4m3fn, granularity="tensor", q_dtype=torch.bfloat16, lens=(33, 0, 1, 130), group=4, page=16,
    device="cpu",
):  # fmt: skip
    """Arguments with sequences of `lens`, 2 KV heads of 80 and 48 and pages of its own for every sequence."""
    width = -(-max(lens) // page)
    pages = len(lens) * width + 2
    caches = [make_cache((pages, page, 2, n), dtype, "contiguous", device, n) for n in (80, 48)]
    table = torch.randperm(pages, generator=generator(5, device), device=device)[: len(lens) * width]
    return dict(
        q=sample((len(lens), 2 * group, 80), q_dtype, "normal", device), key_cache=caches[0], value_cache=caches[1],
        block_table=table.view(len(lens), width).int(), seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        softmax_scale=None, **make_scales(granularity, caches[0], device, 9, 1 / 16), q_scale=None, p_scale=None,
        out_dtype=None,
    )  # fmt: skip


def dequantized(args, which, b):
    """Keys or values (tokens, heads, size) of sequence b, by plain indexing."""
    cache, length = args[f"{which}_cache"], int(args["seq_lens"][b])
    scale, stored = args[f"{which[0]}_scale"], args[f"{which}_scales"]
    rows = []
    for n in range(length):
        at = int(args["block_table"][b, n // cache.shape[1]]), n % cache.shape[1]
        row = cache[at].float() if cache.dtype.itemsize == 2 else values(cache[at])
        if stored is not None:
            row = row * stored[at][:, None]
        rows.append(row if scale is None else row * scale[:, None])
    return torch.stack(rows)


def by_torch(args):
    """torch's attention, sequence by sequence, in fp32."""
    out = torch.zeros(*args["q"].shape[:2], args["value_cache"].shape[-1], device=args["q"].device)
    group = args["q"].shape[1] // args["key_cache"].shape[2]
    for b in range(len(out)):
        if int(args["seq_lens"][b]):
            k, v = (dequantized(args, w, b).repeat_interleave(group, 1).transpose(0, 1) for w in ("key", "value"))
            q = args["q"][b][:, None].float()
            out[b] = F.scaled_dot_product_attention(q, k, v, scale=args["softmax_scale"])[:, 0]
    return out.to(args["q"].dtype)


def splits(args, number):
    config = attend.config_for(**args) | dict(SPLITS=number)
    return attend.launch(**args, config=config)


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [*FORMATS.values(), None], ids=[*FORMATS, "16-bit"])
def test_attention_is_torchs_on_dequantized_caches(dtype, granularity, q_dtype, device):
    args = case(dtype or q_dtype, granularity, q_dtype, device=device)
    expected = by_torch(args)
    assert_close(attend.reference(**args), expected, 1e-3 if q_dtype is torch.float16 else 4e-3)
    for number in (1, 3):
        assert_close(splits(args, number), expected, 1e-3 if q_dtype is torch.float16 else 4e-3)


def test_the_scale_of_scores(device):
    args = case(device=device) | dict(softmax_scale=0.02)
    assert_close(attend(**args), by_torch(args), 4e-3)
    assert not torch.equal(attend(**args), attend(**args | dict(softmax_scale=None)))
    assert torch.equal(
        attend(**args | dict(softmax_scale=1 / math.sqrt(80))), attend(**args | dict(softmax_scale=None))
    )


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    "dtype, granularity",
    [
        (torch.float8_e4m3fn, "tensor"), (torch.float8_e4m3fn, "token_head"), (torch.float8_e5m2, "head"),
        (torch.int8, "token_head"), (torch.bfloat16, "none"),
    ],
)  # fmt: skip
def test_what_lies_beyond_a_sequence_does_not_count(dtype, granularity, number, device):
    """NaN in every slot and scale that no sequence has, and any number in the rest of the block table."""
    args = case(dtype, granularity, device=device)
    clean = splits(args, number)
    page = args["key_cache"].shape[1]
    used = torch.zeros(args["key_cache"].shape[:2], dtype=torch.bool)
    table = args["block_table"].clone()
    for b, length in enumerate(args["seq_lens"].tolist()):
        for n in range(length):
            used[int(table[b, n // page]), n % page] = True
        table[b, -(-length // page) :] = torch.tensor([2**31 - 1, -1, -(2**31), 10**6]).int()[b]
    unused = ~used.to(device)
    for name in ("key_cache", "value_cache"):
        raw = bits(args[name]).clone()
        raw[unused] = {torch.int8: 0x80, torch.bfloat16: 0x7FFF}.get(dtype, 0x7F)
        args[name] = raw.view(dtype)
    for name in SCALES[2:]:
        if args[name] is not None:
            args[name] = torch.where(unused[..., None], float("nan"), args[name])
    assert torch.equal(splits(args | dict(block_table=table), number), clean)


@pytest.mark.parametrize("number", [1, 3])
def test_lengths_of_zero_and_one(number, device):
    args = case(lens=(0, 1, 0, 20), device=device)
    out = splits(args, number)
    assert not bool(out[[0, 2]].any())
    token = dequantized(args, "value", 1)[0].repeat_interleave(4, 0)
    assert_close(out[1], token.to(out.dtype), 0.0 if number == 1 else 4e-3)


@pytest.mark.parametrize("number", [1, 3])
def test_shared_heads_are_repeated_heads(number, device):
    args = case(granularity="head", group=8, device=device)
    many = dict(args)
    for name in ("key_cache", "value_cache"):
        many[name] = bits(args[name]).repeat_interleave(8, 2).view(args[name].dtype)
    for name in ("k_scale", "v_scale"):
        many[name] = args[name].repeat_interleave(8)
    assert_close(splits(many, number), splits(args, number), 0.0)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_pages_may_lie_anywhere_and_be_of_any_size(granularity, device):
    """Shuffled pages, other page sizes, one page for all, heads before tokens: the same bits."""
    args = case(granularity=granularity, device=device)
    expected = splits(args, 2)
    order = torch.randperm(len(args["key_cache"]), generator=generator(8, device), device=device)
    names = [n for n in ("key_cache", "value_cache", *SCALES[2:]) if args[n] is not None]

    def each(change):
        return {n: change(bits(args[n])).view(args[n].dtype) for n in names}

    shuffled = each(lambda t: torch.empty_like(t).index_copy_(0, order, t))
    table = order[args["block_table"].long()].int()
    assert torch.equal(splits(args | shuffled | dict(block_table=table), 2), expected)
    for page in (1, 8, 48):
        width = args["block_table"].shape[1]
        lined_up = each(lambda t: t[args["block_table"].long().flatten()].flatten(0, 1))
        per = -(-width * 16 // page)
        padded = {
            n: F.pad(bits(t).view(4, width * 16, -1), (0, 0, 0, per * page - width * 16)).view(t.dtype)
            for n, t in lined_up.items()
        }
        repaged = {n: t.view(4 * per, page, *args[n].shape[2:]) for n, t in padded.items()}
        table = torch.arange(4 * per, device=device, dtype=torch.int32).view(4, per)
        assert torch.equal(splits(args | repaged | dict(block_table=table), 2), expected)
    turned = {
        n: bits(args[n]).transpose(1, 2).contiguous().transpose(1, 2).view(args[n].dtype) for n in names[:2]
    }  # fmt: skip
    assert torch.equal(splits(args | turned, 2), expected)


def test_a_sequence_does_not_depend_on_its_batch(device):
    args = case(device=device)
    whole = splits(args, 3)
    for b in (0, 2, 3):
        alone = {n: args[n][b : b + 1] for n in ("q", "block_table", "seq_lens")}
        assert torch.equal(splits(args | alone, 3)[0], whole[b])


def test_nan_in_a_sequence_stays_in_it(device):
    args = case(device=device)
    raw = bits(args["value_cache"]).clone()
    raw[int(args["block_table"][0, 1]), 3, 1, 5] = 0x7F
    out = splits(args | dict(value_cache=raw.view(torch.float8_e4m3fn)), 2)
    assert [tuple(i) for i in out.isnan().nonzero().tolist()] == [(0, h, 5) for h in range(4, 8)]


def with_fp8_queries(args, dtype, scale):
    codes = encode(args["q"].float() / 4, FP8[dtype]).view(dtype)
    return args | dict(q=codes, q_scale=scale, out_dtype=args["q"].dtype)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_queries_are_their_values(dtype, heads, device):
    scale = torch.tensor([0.5, 3.0] if heads else [0.5], device=device)
    args = with_fp8_queries(case(dtype, device=device), dtype, scale)
    plain = (values(args["q"]) * scale.repeat_interleave(8 // len(scale))[:, None]).to(torch.bfloat16)
    exact = dict(args, q=plain, q_scale=None, out_dtype=None)
    for number in (1, 3):
        assert_close(splits(args, number), by_torch(exact), 4e-3)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_probabilities(dtype, granularity, device):
    """Rounded in steps below the power of two above a row's largest, however the sequence is divided."""
    args = case(dtype, granularity, device=device) | dict(p_scale=torch.full((1,), 1 / 256, device=device))
    expected = torch.zeros(4, 8, 48, device=device)
    for b in (0, 2, 3):
        k, v = (dequantized(args, w, b).repeat_interleave(4, 1) for w in ("key", "value"))  # (tokens, heads, size)
        s = torch.einsum("hd,nhd->nh", args["q"][b].float(), k) / math.sqrt(80) * math.log2(math.e)
        p = torch.exp2(s - s.amax(0).ceil()) * 256
        assert float(p.amax()) > 128
        p = decode(encode(p, FP8[dtype]), FP8[dtype])
        expected[b] = torch.einsum("nh,nhd->hd", p, v) / p.sum(0)[:, None]
    for number in (1, 3):
        assert_close(splits(args, number), expected.to(torch.bfloat16), 4e-3)
    assert rel_error(splits(args | dict(p_scale=None), 1), expected) > 1.5 * rel_error(splits(args, 1), expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(q=torch.zeros(4, 7, 80, dtype=torch.bfloat16)), r"q: expected a multiple of 2 heads .* got 7"),
        (dict(q=torch.zeros(4, 8, 64, dtype=torch.bfloat16)), r"key_cache: expected .*64\), got .*80\)"),
        (dict(q=torch.zeros(4, 8, 80)), "q: expected bfloat16 or float16 or float8_e4m3fn, got float32"),
        (dict(seq_lens=torch.zeros(3, dtype=torch.int32)), r"seq_lens: expected \(4,\), got \(3,\)"),
        (dict(block_table=torch.zeros(4, 2, dtype=torch.int64)), "block_table: expected int32, got int64"),
        (dict(softmax_scale=float("nan")), "softmax_scale: expected a finite number"),
        (dict(v_scale=torch.ones(8)), r"v_scale: expected \(1,\) or \(2,\), got \(8,\)"),
        (dict(q_scale=torch.ones(1)), r"q_scale: expected None with 16-bit queries, got \(1,\)"),
        (
            dict(q=torch.zeros(4, 8, 80, dtype=torch.uint8).view(torch.float8_e4m3fn)),
            r"q_scale: expected \(1,\) or \(2,\) for FP8 queries, got None",
        ),
        (dict(p_scale=torch.ones(2)), r"p_scale: expected \(1,\), got \(2,\)"),
        (dict(out_dtype=torch.float16), "out_dtype: expected one of .* got torch.float16"),
    ],
)
def test_errors_of_attention_name_the_argument(changes, message, device):
    moved = {n: t.to(device) if isinstance(t, Tensor) else t for n, t in changes.items()}
    with pytest.raises(ValueError, match=f"attention_decode.{message}"):
        attend(**case(device=device) | moved)


# ---- the laws see faults ---------------------------------------------------
PLANTS = [
    Plant("kv_cache_write", "padding goes to slot 0", "used = (slot >= 0) & (slot < SLOTS)",
          "used = slot < SLOTS"),
    Plant("kv_cache_write", "another floor", "QMAX), FLOOR)", "QMAX), FLOOR * 2)"),
    Plant("kv_cache_write", "one scale for all heads", "scale_ptr + h * stride_s,", "scale_ptr + h * 0,"),
    Plant("kv_cache_write", "scale of the neighbouring slot", "+ inside * stride_st", ""),
    Plant("attention_decode", "padding scores 0", "present[None, :], scores, float(\"-inf\")",
          "present[None, :], scores, 0.0"),
    Plant("attention_decode", "parts added as they are",
          "tl.math.exp2(tl.load(top_ptr + at, mask=parts < splits, other=float(\"-inf\")) - top)",
          "(parts < splits).to(tl.float32)"),
    Plant("attention_decode", "heads dealt out in turn", "heads = h * GROUP + offs_h", "heads = offs_h * H + h"),
    Plant("attention_decode", "the scale of other queries", "q_scale_ptr + h * stride_qs", "q_scale_ptr"),
    Plant("attention_decode", "steps of another scale", "quantize_fp8(p, p_scale,", "quantize_fp8(p, p_scale * 1.5,"),
    Plant("attention_decode", "the last part is dropped", "mask=offs_s < splits", "mask=offs_s < splits - 1", 2),
    Plant("attention_decode", "steps of whole blocks alone", "if whole < end:", "if whole < begin:"),
    Plant("attention_decode", "places of pages of one size", "(offs_n if BLOCK_N % PAGE == 0 else position)", "offs_n"),
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_wrong_kernel_is_caught(plant, tmp_path, monkeypatch):
    source = change(source_of(OPS[plant.op]), plant)
    if plant.fault.startswith("padding goes"):
        source = source.replace("slot = tl.where(used, slot, 0)", "slot = tl.maximum(slot, 0)")
    assert first_violation(load(plant.op, source, tmp_path, monkeypatch), 30) is not None
