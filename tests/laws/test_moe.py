"""What the steps of an expert layer must obey beyond their references."""

import functools

import pytest
import torch
import torch.nn.functional as F

import fpk
from fpk.check import assert_close, bits, rel_error
from fpk.formats import scheme_of
from fpk.op import OPS
from fpk.samples import generator, sample, scales

E4M3 = torch.float8_e4m3fn
BLOCKS = dict(group=32, block_rows=32, block_cols=32)
PRODUCTS = ("grouped_mm", "grouped_scaled_mm", "grouped_scaled_mm_group", "grouped_mm_weight_only")


def random_ids(T, E, top_k, device, seed=0):
    return torch.stack(
        [torch.randperm(E, generator=generator(seed + t, device), device=device)[:top_k] for t in range(T)]
    )


def randn(*shape, device, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=generator(seed, device), device=device).to(dtype)


def ends(counts, device):
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


# ---- routing ---------------------------------------------------------------
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax"])
def test_routing_by_hand(scoring, device):
    z = randn(9, 60, device=device)
    weights, ids = OPS["route"](z, 6, scoring=scoring)
    p = dict(softmax=z.softmax(-1), topk_softmax=z.softmax(-1), sigmoid=z.sigmoid(), sqrtsoftplus=F.softplus(z).sqrt())
    value, expected = p[scoring].topk(6)
    assert ids.equal(expected.int())
    assert torch.allclose(weights, value / value.sum(-1, keepdim=True), rtol=1e-5)
    unscaled, _ = OPS["route"](z, 6, scoring=scoring, renormalize=False, routed_scaling_factor=2.5)
    plain = z.topk(6)[0].softmax(-1) if scoring == "topk_softmax" else value
    assert torch.allclose(unscaled, 2.5 * plain, rtol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_ties_go_to_the_lower_id(bias, device):
    z = torch.zeros(3, 12, device=device)
    z[1, 5:8] = 1.0
    z[2, 3] = -0.0
    correction = torch.full((12,), 0.25, device=device) if bias else None
    _, ids = OPS["route"](z, 4, scoring="sigmoid", correction_bias=correction)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 6, 7, 0], [0, 1, 2, 3]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus", "topk_softmax"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_odd_logits_give_distinct_ids_in_range(odd, scoring, device):
    z = randn(6, 17, device=device)
    z[0] = odd
    z[1, 3] = odd
    z[2, :15] = odd
    clean = z.clone()
    weights, ids = OPS["route"](z, 5, scoring=scoring)
    assert bool((ids >= 0).all() and (ids < 17).all())
    assert all(len(set(row)) == 5 for row in ids.tolist())
    assert bool(weights.isfinite().all() and (weights >= 0).all())
    rest = OPS["route"](clean[3:], 5, scoring=scoring)
    assert weights[3:].equal(rest[0]) and ids[3:].equal(rest[1])


def test_a_masked_logit_is_never_preferred(device):
    z = randn(4, 9, device=device)
    z[:, ::2] = -float("inf")
    _, ids = OPS["route"](z, 4)
    assert bool((ids % 2 == 1).all())


@pytest.mark.parametrize(("E", "groups"), [(6, 4), (4, 4), (3, 8)])
def test_groups_that_do_not_divide_keep_bias_and_factor(E, groups, device):
    z, bias = randn(5, E, device=device), randn(E, device=device, seed=1)
    options = dict(scoring="sigmoid", correction_bias=bias, routed_scaling_factor=2.5)
    grouped = OPS["route"](z, 2, num_expert_group=groups, topk_group=1, **options)
    plain = OPS["route"](z, 2, **options)
    assert grouped[0].equal(plain[0]) and grouped[1].equal(plain[1])
    assert torch.allclose(plain[0].sum(-1), torch.full((5,), 2.5, device=device))


@pytest.mark.parametrize("bias", [False, True])
def test_groups_bound_the_choice(bias, device):
    z = randn(7, 40, device=device)
    correction = randn(40, device=device, seed=1) if bias else torch.zeros(40, device=device)
    given = correction if bias else None
    _, ids = OPS["route"](z, 6, scoring="sigmoid", correction_bias=given, num_expert_group=5, topk_group=2)
    choice = (z.sigmoid() + correction).reshape(7, 5, 8)
    score = choice.topk(2)[0].sum(-1) if bias else choice.amax(-1)
    kept = torch.zeros_like(score).scatter(1, score.topk(2)[1], 1.0).bool()
    expected = torch.where(kept[..., None], choice, -9.0).reshape(7, 40).topk(6)[1]
    assert ids.equal(expected.int())


@pytest.mark.parametrize(("E", "top_k"), [(2048, 32), (1025, 7), (257, 32), (1, 1)])
def test_many_experts(E, top_k, device):
    z = randn(3, E, device=device)
    weights, ids = OPS["route"](z, top_k)
    assert ids.equal(z.topk(top_k)[1].int())
    assert torch.allclose(weights.sum(-1), torch.ones(3, device=device))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(top_k=0), "route.top_k: expected 1 to 16 of 16 experts, got 0"),
        (dict(top_k=17), "route.top_k: expected 1 to 16"),
        (dict(top_k=5, num_expert_group=4, topk_group=1), "route.top_k: expected 1 to 4 of 4 experts, got 5"),
        (dict(top_k=2, scoring="soft"), "route.scoring: expected one of 'softmax'"),
        (dict(top_k=2, num_expert_group=4, topk_group=5), "route.topk_group: expected 1 to 4"),
        (dict(top_k=2, scoring="topk_softmax", num_expert_group=4), "route.scoring: expected another"),
    ],
)
def test_routing_errors(arguments, message, device):
    with pytest.raises(ValueError, match=message):
        OPS["route"](torch.zeros(2, 16, device=device), **arguments)


# ---- order -----------------------------------------------------------------
def by_hand(ids, E, expert_map=None):
    rows = []
    for slot, expert in enumerate(ids.flatten().tolist()):
        if expert_map is not None:
            expert = expert_map[expert] if 0 <= expert < len(expert_map) else -1
        rows.append((expert if 0 <= expert < E else E, slot))
    rows.sort()
    index = [slot if expert < E else -1 for expert, slot in rows]
    return index, [sum(expert <= e for expert, _ in rows) for e in range(E)]


@pytest.mark.parametrize("kernel", ["rank", "chunks", "scan"])
@pytest.mark.parametrize(("T", "E", "top_k"), [(1, 1, 1), (40, 5, 3), (70, 257, 4), (23, 1025, 2)])
def test_order_is_a_stable_sort(T, E, top_k, kernel, device):
    op = OPS["sort_by_expert"]
    ids = torch.randint(-1, E + 1, (T, top_k), generator=generator(3, device), device=device)
    legal = [c for c in op.configs(ids=ids, num_experts=E) if op.legal(config=c, num_experts=E)]
    config = next(c for c in legal if c["kernel"] == kernel)
    index, position, offs = op.launch(ids, E, config=config)
    assert (index.tolist(), offs.tolist()) == by_hand(ids, E)
    assert all(p < 0 or index[p] == slot for slot, p in enumerate(position.flatten().tolist()))
    assert int((position >= 0).sum()) == int(offs[-1])


@pytest.mark.parametrize("where", [[0, -1, 1, -1, -1, 2], [-1] * 6, [2, 1, 0, -1, -1, -1], [9, -5, 0, 1, 2, -1]])
def test_expert_maps_may_be_uneven_or_empty(where, device):
    ids = torch.randint(0, 6, (11, 2), generator=generator(0, device), device=device)
    index, position, offs = OPS["sort_by_expert"](ids, 3, torch.tensor(where, device=device))
    assert (index.tolist(), offs.tolist()) == by_hand(ids, 3, where)
    assert int((position < 0).sum()) == 22 - int(offs[-1])


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_unpermute_undoes_permute(dtype, top_k, device):
    x = sample((13, 48), dtype, "normal", device)
    index, position, _ = OPS["sort_by_expert"](random_ids(13, 5, top_k, device), 5)
    rows, _ = OPS["moe_permute"](x, index, top_k)
    values = rows.float() if dtype is E4M3 else rows
    weights = torch.full((13, top_k), 1 / top_k, device=device)
    back = OPS["moe_unpermute"](values, position, weights)
    assert_close(back, (x.float() if dtype is E4M3 else x) + 0.0, 0.0)  # a sum has no -0


def test_scales_move_with_their_codes(device):
    x = randn(9, 64, device=device, dtype=torch.bfloat16)
    codes, scale = OPS["quantize_fp8_group"](x, group=32)
    index, _, _ = OPS["sort_by_expert"](random_ids(9, 4, 2, device), 4)
    moved = OPS["moe_permute"](codes, index, 2, scale)
    rows, _ = OPS["moe_permute"](x, index, 2)
    for got, expected in zip(moved, OPS["quantize_fp8_group"](rows, group=32), strict=True):
        assert_close(got, expected, 0.0)


def test_dropped_slots_neither_read_nor_count(device):
    y = randn(8, 16, device=device)
    position = torch.tensor([[0, -1], [-1, -1], [5, 2], [3, -1]], dtype=torch.int32, device=device)
    y[[1, 4, 6, 7]] = float("nan")
    weights = torch.ones(4, 2, device=device)
    weights[position < 0] = float("nan")
    out = OPS["moe_unpermute"](y, position, weights)
    assert_close(out, torch.stack([y[0], torch.zeros_like(y[0]), y[5] + y[2], y[3]]), 0.0)


# ---- grouped products ------------------------------------------------------
def arguments_of(name, R, N, K, E, device, bias=False):
    g = dict(device=device)
    if name == "grouped_mm":
        args = dict(a=randn(R, K, dtype=torch.bfloat16, **g), b=randn(E, N, K, dtype=torch.bfloat16, seed=1, **g))
    elif name == "grouped_mm_weight_only":
        args = dict(a=randn(R, K, dtype=torch.bfloat16, **g), b=sample((E, N, K), E4M3, seed=1, **g))
        args |= dict(scale_b=scales((E, N, 1), seed=2, **g))
    else:
        args = dict(a=sample((R, K), E4M3, **g), b=sample((E, N, K), E4M3, seed=1, **g))
        if name == "grouped_scaled_mm":
            args |= dict(scale_a=scales((R, 1), seed=2, **g), scale_b=scales((E, N, 1), seed=3, **g))
        else:
            grid = -(-N // 32), -(-K // 32)
            args |= BLOCKS | dict(scale_a=scales((R, grid[1]), seed=2, **g), scale_b=scales((E, *grid), seed=3, **g))
    return args | (dict(bias=randn(E, N, seed=4, **g)) if bias else {})


TILE = dict(kernel="tile", SWAP=False, BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=2)


def dense(name, args, e, rows):
    """The dense op on the rows of expert e, with the same tile as the grouped one."""
    by_expert = {n: v[e] for n, v in args.items() if n in ("b", "scale_b", "bias")}
    by_row = {n: v[rows] for n, v in args.items() if n in ("a", "scale_a")}
    rest = {n: v for n, v in args.items() if n in BLOCKS}
    extra = {} if name == "grouped_mm_weight_only" else dict(out_dtype=torch.bfloat16)
    op = OPS[name.removeprefix("grouped_")]
    return op.launch(**by_expert, **by_row, **rest, **extra, config=TILE | dict(GROUP_M=8))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [n for n in PRODUCTS if n != "grouped_mm"])
@pytest.mark.parametrize("counts", [[37], [0, 5, 0, 33, 1, 0]])
def test_every_expert_is_the_dense_op_bit_for_bit(name, counts, bias, device):
    R = sum(counts)
    args = arguments_of(name, R, 48, 96, len(counts), device, bias)
    out = OPS[name].launch(**args, offs=ends(counts, device), config=TILE)
    start = 0
    for e, count in enumerate(counts):
        rows = torch.arange(start, start + count, device=device)
        if count:
            assert_close(out[rows], dense(name, args, e, rows), 0.0, f"expert {e}")
        start += count


@pytest.mark.parametrize("counts", [[37], [0, 5, 0, 33, 1, 0]])
def test_unquantized_experts_are_linear_layers(counts, device):
    args = arguments_of("grouped_mm", sum(counts), 48, 96, len(counts), device, bias=True)
    out = OPS["grouped_mm"](**args, offs=ends(counts, device))
    parts = args["a"].float().split(counts)
    expected = [F.linear(p, w.float(), v) for p, w, v in zip(parts, args["b"], args["bias"], strict=True)]
    assert rel_error(out, torch.cat(expected)) < 2e-3


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [0, 12, 0]])
def test_rows_of_no_expert_are_zeros_and_leak_nothing(name, counts, device):
    args = arguments_of(name, 20, 33, 64, 3, device, bias=True)
    offs = ends(counts, device)
    clean = OPS[name](**args, offs=offs)
    last = sum(counts)
    bits(args["a"])[last:] = 0x7FFF if args["a"].element_size() == 2 else 0x7F
    if "scale_a" in args:
        args["scale_a"][last:] = float("nan")
    out = OPS[name](**args, offs=offs)
    assert not int(bits(out[last:]).count_nonzero())
    assert_close(out[:last], clean[:last], 0.0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_weights_may_lie_in_a_wider_buffer(name, device):
    args = arguments_of(name, 9, 20, 64, 3, device)
    offs = ends([2, 3, 4], device)
    expected = OPS[name].launch(**args, offs=offs, config=TILE)
    raw = args["b"].view(torch.uint8 if args["b"].element_size() == 1 else torch.int16)
    wide = torch.full((3, 24, 96), 0x7F, dtype=raw.dtype, device=device)
    wide[:, :20, :64] = raw
    out = OPS[name].launch(**args | dict(b=wide.view(args["b"].dtype)[:, :20, :64]), offs=offs, config=TILE)
    assert_close(out, expected, 0.0)


@pytest.mark.parametrize("name", PRODUCTS)
def test_gathering_is_permuting(name, device):
    """Few columns, an odd K, weights in a wider buffer; a token may stand twice, another nowhere."""
    args = arguments_of(name, 8, 16, 511, 3, device, bias=True)
    raw = args["b"].view(torch.uint8 if args["b"].element_size() == 1 else torch.int16)
    wide = torch.full((3, 16, 640), 0x7F, dtype=raw.dtype, device=device)
    wide[:, :, :511] = raw
    args["b"] = wide.view(args["b"].dtype)[:, :, :511]
    index = torch.tensor([3, 3, 11, 0, 15, 8, 9, 2, 14, 1, 5, 4, 7, 12, -1, -1], dtype=torch.int32, device=device)
    offs = ends([5, 0, 9], device)
    out = OPS[name].launch(**args, offs=offs, gather=index, top_k=2, config=TILE)
    rows = index.long().clamp(min=0) // 2
    moved = {n: bits(args[n])[rows].view(args[n].dtype) for n in ("a", "scale_a") if n in args}
    assert_close(out, OPS[name].launch(**args | moved, offs=offs, config=TILE), 0.0)
    with pytest.raises(ValueError, match="top_k: expected 1 without gather"):
        OPS[name](**args, offs=offs, top_k=2)


# ---- layers ----------------------------------------------------------------
def layer(device, E=4, H=64, I=32, dtype=torch.float32):
    return dict(
        w13=(randn(E, 2 * I, H, device=device, seed=1) / 8).to(dtype),
        w2=(randn(E, H, I, device=device, seed=2) / 8).to(dtype),
    )


@functools.cache
def quantized_layer(device, scheme):
    """By the references of the quantizers, which take no time in the interpreter."""
    options = {"fp8_block128": (128, 128), "int8_channel": (-127,)}.get(scheme, ())
    quantize = OPS[scheme_of(scheme).quantizer].reference
    weights = layer(device, dtype=torch.bfloat16)
    return {n: fpk.Quantized(*quantize(w, *options), scheme) for n, w in weights.items()}


SCHEMES = [("fp8_channel", "fp8_token"), ("fp8_tensor", "fp8_tensor"), ("fp8_block128", "fp8_group128"),
           ("int8_channel", "int8_token"), ("fp8_channel", "none")]  # fmt: skip


@pytest.mark.parametrize(("weight", "act"), SCHEMES)
def test_permuting_tokens_permutes_outputs(weight, act, device):
    x, logits = randn(9, 64, device=device, dtype=torch.bfloat16), randn(9, 4, device=device, seed=5)
    parts = quantized_layer(device, weight)
    order = torch.randperm(9, generator=generator(6, device), device=device)
    out = fpk.moe(x, logits, **parts, act=act)
    assert_close(fpk.moe(x[order], logits[order], **parts, act=act), out[order], 0.0)


@pytest.mark.parametrize("map_to", [[0, 1, -1, 2, -1, 3, -1], [-1] * 7])
@pytest.mark.parametrize(("weight", "act"), SCHEMES)
def test_tokens_of_other_ranks_leak_nothing(weight, act, map_to, device):
    """NaN tokens that only experts elsewhere see: nothing here changes, common scales included."""
    x = randn(9, 64, device=device, dtype=torch.bfloat16)
    ids = random_ids(9, 7, 2, device)
    ids[0] = torch.tensor([2, 4])
    elsewhere = ~(torch.tensor(map_to, device=device) >= 0)[ids].any(1)
    weights = torch.rand((9, 2), generator=generator(1, device), device=device)
    call = dict(expert_map=torch.tensor(map_to, device=device), act=act, **quantized_layer(device, weight))
    poisoned = x.masked_fill(elsewhere[:, None], float("nan"))
    out = fpk.moe_experts(poisoned, weights, ids, **call)
    kept = ~elsewhere
    assert not int(bits(out[elsewhere]).count_nonzero())
    assert_close(out[kept], fpk.moe_experts(x[kept], weights[kept], ids[kept], **call), 0.0)


@pytest.mark.parametrize("E", [1, 3, 8])
@pytest.mark.parametrize("shuffled", [False, True])
def test_experts_cut_from_an_mlp_sum_to_it(E, shuffled, device):
    """A SwiGLU MLP is a sum over its neurons: cut into experts that all tokens visit with weight 1, it stays itself."""
    H, I = 72, 192
    gate, up, down = (randn(*s, device=device, seed=n) / 8 for n, s in enumerate(((I, H), (I, H), (H, I))))
    x = randn(10, H, device=device, seed=7)
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    neurons = torch.arange(I, device=device)
    if shuffled:
        neurons = torch.randperm(I, generator=generator(8, device), device=device)
    cut = neurons.reshape(E, I // E)
    w13 = torch.cat([gate[cut], up[cut]], 1)
    w2 = down[:, cut].permute(1, 0, 2).contiguous()
    out = fpk.moe(x, torch.zeros(10, E, device=device), w13, w2, top_k=E, routed_scaling_factor=float(E))
    assert rel_error(out, expected) < 1e-6


def test_an_expert_that_stands_twice_counts_twice(device):
    x, parts = randn(3, 64, device=device), layer(device)
    ids = torch.tensor([[2, 2], [1, 4], [0, 0]], device=device)
    out = fpk.moe_experts(x, torch.ones(3, 2, device=device), ids, **parts)
    once = fpk.moe_experts(x, torch.ones(3, 1, device=device), ids[:, :1], **parts)
    assert_close(out[0], 2 * once[0], 0.0)
    assert_close(out[2], 2 * once[2], 0.0)
