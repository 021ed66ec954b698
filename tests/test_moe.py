"""fpk.moe against a layer computed token by token in plain torch, and what it refuses."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fpk
from fpk._moe import moe_experts
from fpk._moe_shortcuts import fits_few
from fpk.check import assert_close, rel_error
from fpk.device import pretend
from fpk.formats import encode_int8, expand_groups, scheme_of
from fpk.op import OPS

ON_GPU = torch.cuda.is_available()
E, H, I, TOP_K = 4, 160, 144, 2  # 144 and 160 leave short blocks of 128

WEIGHTS = ("plain", "fp8_channel", "fp8_tensor", "fp8_block128", "int8_channel")
ACTS = ("none", "fp8_token", "fp8_tensor", "fp8_group128", "int8_token")
PAIRS = [
    (w, a)
    for w in WEIGHTS
    for a in ACTS
    if a == "none" or (w != "plain" and w.startswith("int8") == a.startswith("int8"))
]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fake(x: Tensor, scheme: str) -> Tensor:
    """Values that quantized rows, or one matrix of weights, stand for; fp32."""
    rows, cols = {"tensor": (-1, -1), "group128": (1, 128), "block128": (128, 128)}.get(scheme.split("_")[1], (1, -1))
    x = x.float()
    M, K = x.shape
    padded = F.pad(x, (0, -K % cols if cols > 0 else 0, 0, -M % rows if rows > 0 else 0)).abs()
    tall, wide = rows if rows > 0 else M, cols if cols > 0 else K
    amax = padded.unflatten(1, (-1, wide)).amax(2).unflatten(0, (-1, tall)).amax(1)
    if scheme.startswith("int8"):
        scale = expand_groups(amax.clamp(min=1e-10) / 127, x.shape, rows, cols)
        return encode_int8(x / scale).float() * scale
    floor = {"group128": 1e-10, "block128": 1e-4}.get(scheme.split("_")[1], 1 / 512)
    scale = expand_groups(amax.clamp(min=floor) / amax.new_tensor(448.0), x.shape, rows, cols)
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def fake_static(x: Tensor, scale: float) -> Tensor:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def expected_layer(
    x, weights, ids, w13, w2, act="none", bias13=None, bias2=None, local=None, activate=None, static=(None, None)
):
    """The formulas of a layer, expert by expert; w13 and w2 are fp32 values."""
    dtype = x.dtype
    local = list(range(len(w13))) if local is None else local
    slots = [(t, j) for t in range(len(x)) for j in range(ids.shape[1]) if local[ids[t, j]] >= 0]
    rows = x[[t for t, _ in slots]]
    expert = [local[ids[slot]] for slot in slots]

    def product(values: Tensor, weight: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
        if scale is not None:
            values = fake_static(values, scale)
        else:
            values = values.float() if act == "none" else fake(values, act)
        out = [weight[e] @ v + (0 if bias is None else bias[e].float()) for e, v in zip(expert, values, strict=True)]
        return torch.stack(out).to(dtype)

    out = torch.zeros(x.shape, dtype=torch.float32)
    if not slots:
        return out.to(dtype)
    hidden = product(rows, w13, bias13, static[0]).float()
    gate, up = hidden.chunk(2, 1)
    hidden = (F.silu(gate) * up if activate is None else activate(hidden)).to(dtype)
    for (t, j), value in zip(slots, product(hidden, w2, bias2, static[1]).float(), strict=True):
        out[t] += weights[t, j] * value
    return out.to(dtype)


def stored(w: Tensor, scheme: str) -> fpk.Quantized:
    """As fpk.quantize gives it; by the references, which take no time in the interpreter."""
    options = {"fp8_block128": (128, 128), "int8_channel": (-127,)}.get(scheme, ())
    codes, scale = OPS[scheme_of(scheme).quantizer].reference(w.to("cuda" if ON_GPU else "cpu"), *options)
    return fpk.Quantized(codes, scale, scheme)


@functools.cache
def parts(scheme: str):
    """Weights for the layer, and the values they stand for."""
    given, values = {}, {}
    for seed, (name, shape) in enumerate(dict(w13=(E, 2 * I, H), w2=(E, H, I)).items()):
        w = randn(*shape, seed=seed + 1) / 8
        given[name] = w if scheme == "plain" else stored(w, scheme)
        values[name] = w.float() if scheme == "plain" else given[name].dequantize(torch.float32).cpu()
    return given, values


def routing(T: int, experts: int = E, seed: int = 9) -> tuple[Tensor, Tensor]:
    logits = randn(T, experts, seed=seed, dtype=torch.float32)
    value, ids = logits.softmax(-1).topk(TOP_K)
    return value / value.sum(-1, keepdim=True), ids


def on(device, value):
    return value.to(device) if isinstance(value, Tensor) else value


@pytest.mark.parametrize(("weight", "act"), PAIRS)
def test_every_pair_of_schemes(weight, act, device):
    x = randn(7, H)
    biases = dict(bias13=randn(E, 2 * I, seed=5), bias2=randn(E, H, seed=6))
    given, values = parts(weight)
    weights, ids = routing(7)
    local = [2, -1, 0, 1, 3]  # five experts, one of which lives elsewhere
    weights, ids = routing(7, 5)
    expected = expected_layer(x, weights, ids, **values, act=act, local=local, **biases)
    moved = {n: on(device, v) for n, v in (given | biases | dict(x=x, weights=weights, ids=ids)).items()}
    out = fpk.moe_experts(**moved, act=act, expert_map=torch.tensor(local, device=device))
    # bf16 in between, and codes that flip where the products' last bits differ
    assert rel_error(out.cpu(), expected) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_from_logits_in_other_dtypes(dtype, device):
    x, logits = randn(5, H, dtype=dtype), randn(5, E, seed=9, dtype=torch.float32)
    weights, ids = routing(5)
    _, values = parts("plain")
    expected = expected_layer(x, weights, ids, **values)
    given = {n: v.to(device, dtype) for n, v in values.items()}
    out = fpk.moe(x.to(device), logits.to(device), **given, top_k=TOP_K)
    assert out.dtype is dtype
    assert rel_error(out.cpu(), expected) < (2e-6 if dtype is torch.float32 else 2e-3)


def test_interleaved_rows_are_the_same_layer(device):
    x, (weights, ids) = randn(6, H).to(device), routing(6)
    given = {n: v.to(device) for n, v in parts("plain")[0].items()}
    gate, up = given["w13"].chunk(2, 1)
    turned = torch.stack([gate, up], 2).flatten(1, 2)
    route = dict(weights=weights.to(device), ids=ids.to(device))
    expected = fpk.moe_experts(x, **route, **given)
    assert_close(fpk.moe_experts(x, **route, w13=turned, w2=given["w2"], interleaved=True), expected, 0.0)


def test_the_activation_of_gpt_oss(device):
    x, (weights, ids) = randn(6, H), routing(6)
    given, values = parts("plain")

    def activate(hidden):
        gate, up = hidden[:, 0::2].clamp(max=7), hidden[:, 1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    expected = expected_layer(x, weights, ids, **values, activate=activate)
    moved = [v.to(device) for v in (x, weights, ids, given["w13"], given["w2"])]
    assert rel_error(fpk.moe_experts(*moved, activation="swigluoai", interleaved=True).cpu(), expected) < 1e-2


def test_experts_without_a_gate(device):
    x, (weights, ids) = randn(6, H), routing(6)
    given, values = parts("plain")
    w13, up = given["w13"][:, :I], values["w13"][:, :I]
    expected = expected_layer(x, weights, ids, up, values["w2"], activate=lambda h: F.relu(h).square())
    moved = [v.to(device) for v in (x, weights, ids, w13, given["w2"])]
    assert rel_error(fpk.moe_experts(*moved, activation="relu2", gated=False).cpu(), expected) < 1e-2


@pytest.mark.parametrize(("weight", "act"), [("plain", "none"), ("fp8_channel", "fp8_token")])
def test_router_weight_on_the_input(weight, act, device):
    x, (weights, ids) = randn(6, H), routing(6)
    given, values = parts(weight)
    scaled = (x.float() * weights[:, :1]).to(x.dtype)
    expected = expected_layer(scaled, torch.ones(6, 1), ids[:, :1], **values, act=act)
    moved = {n: on(device, v) for n, v in given.items()}
    call = [v.to(device) for v in (x, weights[:, :1], ids[:, :1])]
    out = fpk.moe_experts(*call, **moved, act=act, apply_router_weight_on_input=True)
    assert rel_error(out.cpu(), expected) < 1e-2


@pytest.mark.parametrize("weight", ["fp8_tensor", "fp8_block128"])
def test_static_scales(weight, device):
    x, (weights, ids) = randn(6, H), routing(6)
    given, values = parts(weight)
    moved = {n: on(device, v) for n, v in given.items()}
    call = [v.to(device) for v in (x, weights, ids)]
    scales = [torch.full((1, 1), v, device=device) for v in (0.006, 0.02)]  # the first saturates
    out = fpk.moe_experts(*call, **moved, act="fp8_tensor", input_scale13=scales[0], input_scale2=scales[1])
    expected = expected_layer(x, weights, ids, **values, static=[v.cpu() for v in scales])
    assert rel_error(out.cpu(), expected) < 1e-2
    with pytest.raises(ValueError, match=r"moe.input_scale2: expected a tensor, as the other input scale, got None"):
        fpk.moe_experts(*call, **moved, act="fp8_tensor", input_scale13=scales[0])


@pytest.mark.parametrize("act", ["none", "fp8_token", "fp8_tensor"])
def test_no_tokens(act, device):
    given = {n: on(device, v) for n, v in parts("fp8_channel")[0].items()}
    x = torch.zeros(0, H, dtype=torch.bfloat16, device=device)
    out = fpk.moe(x, torch.zeros(0, E, device=device), **given, act=act)
    assert out.shape == (0, H) and out.dtype is torch.bfloat16


def test_the_fewest_launches(launches, device):
    """route, sort, product, activation, product, unpermute; quantizing costs one more, or none."""
    x, logits = randn(3, H).to(device), randn(3, E).to(device)
    cases = ("plain", "none", 6), ("fp8_channel", "fp8_token", 7), ("fp8_channel", "none", 6)
    for weight, act, count in cases:
        given = {n: on(device, v) for n, v in parts(weight)[0].items()}
        start = launches()
        fpk.moe(x, logits, **given, act=act)
        assert launches() - start == count, (weight, act)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4"])
def test_shuffled_experts_are_the_same_layer(scheme, device):
    given = {n: randn(*s, seed=2).to(device) / 8 for n, s in dict(w13=(3, 192, 128), w2=(3, 128, 96)).items()}
    plain = {n: fpk.quantize(w, scheme) for n, w in given.items()}
    shuffled = {n: fpk.shuffle(w) for n, w in plain.items()}
    assert_close(shuffled["w2"].parts()["codes"], plain["w2"].codes, 0.0)
    x, logits = randn(5, 128).to(device), randn(5, 3).to(device)
    assert rel_error(fpk.moe(x, logits, **shuffled), fpk.moe(x, logits, **plain)) < 6e-3
    with pytest.raises(ValueError, match=r"moe.w13: expected float16|moe.w13: expected dtype"):
        fpk.moe(x.half(), logits, **shuffled)


FEW = [("plain", "none", 4), ("fp8_channel", "fp8_token", 6), ("fp8_block128", "fp8_group128", 6),
       ("fp8_channel", "none", 4)]  # fmt: skip


@pytest.mark.parametrize(("weight", "act", "count"), FEW)
def test_few_tokens_are_not_sorted(weight, act, count, launches, device, monkeypatch):
    """A wide layer of one token: route, up, down, a sum, and quantizers; the same result as by all the steps."""
    generator = torch.Generator().manual_seed(3)
    shapes = dict(w13=(8, 1024, 512), w2=(8, 512, 512))
    given = {n: torch.randn(s, generator=generator).bfloat16() / 8 for n, s in shapes.items()}
    given = {n: w.to(device) if weight == "plain" else stored(w, weight) for n, w in given.items()}
    x, logits = randn(1, 512).to(device), randn(1, 8).to(device)
    start = launches()
    out = fpk.moe(x, logits, **given, act=act, expert_map=torch.tensor([0, 1, 2, 3, 4, -1, 6, 5], device=device))
    assert launches() - start == count
    monkeypatch.setattr("fpk._moe.fits_few", lambda *_: False)
    steps = fpk.moe(x, logits, **given, act=act, expert_map=torch.tensor([0, 1, 2, 3, 4, -1, 6, 5], device=device))
    assert launches() - start >= count + 6
    assert rel_error(out, steps) < (6e-3 if act == "none" else 0.02)


def test_no_few_tokens_where_the_batch_must_not_matter(launches, device):
    given = {n: randn(*s).to(device) / 8 for n, s in dict(w13=(8, 1024, 512), w2=(8, 512, 512)).items()}
    start = launches()
    with fpk.batch_invariant():
        fpk.moe(randn(1, 512).to(device), randn(1, 8).to(device), **given)
    assert launches() - start == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(act="fp8_token", scheme="plain"), "moe.w13: expected Quantized weights with act 'fp8_token'"),
        (dict(act="int8_token"), "moe.act: int8_token activations have no product with fp8_channel weights"),
        (dict(act="fp8_block128"), "moe.act: expected codes with a scale per tensor, token or group"),
        (dict(act="int8_token_asymmetric"), "moe.act: int8_token_asymmetric activations have no product"),
        (dict(act="fp9"), "scheme: expected one of"),
        (dict(gated=False), r"moe.w13: expected \(4, 144, 160\), got \(4, 288, 160\)"),
        (dict(apply_router_weight_on_input=True), "moe.apply_router_weight_on_input: expected False with top_k > 1"),
        (dict(input_scale13=torch.ones(1, 1)), "moe.input_scale13: expected None with act 'none'"),
        (dict(act="fp8_token", input_scale2=torch.ones(1, 1)), "moe.input_scale2: expected None with act 'fp8_token'"),
        (dict(logits=torch.zeros(3, E + 1)), r"moe.router_logits: expected \(3, 4\), got \(3, 5\)"),
        (dict(x=torch.zeros(3, H + 1)), r"moe.x: expected \(3, 160\), got \(3, 161\)"),
        (dict(routing="sigmoidal"), "route.scoring: expected one of"),
        (dict(bias2=torch.zeros(E, H + 1)), r"grouped_mm_weight_only.bias: expected \(4, 160\), got \(4, 161\)"),
    ],
)
def test_errors(changes, message, device):
    changes = {n: on(device, v) for n, v in changes.items()}
    given = {n: on(device, v) for n, v in parts(changes.pop("scheme", "fp8_channel"))[0].items()}
    x, logits = changes.pop("x", randn(3, H).to(device)), changes.pop("logits", torch.zeros(3, E, device=device))
    with pytest.raises(ValueError, match=message):
        fpk.moe(x, logits, **given, **changes)


def test_one_graph_of_torch_compile(device):
    given = {n: on(device, v) for n, v in parts("plain")[0].items()}
    x, logits = randn(4, H).to(device), randn(4, E).to(device)
    compiled = torch.compile(lambda x, z: fpk.moe(x, z, **given), fullgraph=True, backend="aot_eager")
    assert_close(compiled(x, logits), fpk.moe(x, logits, **given), 0.0)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize(("weight", "act"), PAIRS)
def test_a_captured_graph_serves_every_routing(weight, act):
    given = {n: on("cuda", v) for n, v in parts(weight)[0].items()}
    x, logits = randn(9, H).cuda(), randn(9, E).cuda()
    fpk.moe(x, logits, **given, act=act)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fpk.moe(x, logits, **given, act=act)
    for seed in (1, 2):
        x.copy_(randn(9, H, seed=seed))
        logits.copy_(randn(9, E, seed=seed))
        logits[:, 0] += 9.0 * (seed == 2)  # one expert sees every token
        graph.replay()
        torch.cuda.synchronize()
        assert_close(captured, fpk.moe(x, logits, **given, act=act), 0.0)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("name", ["grouped_scaled_mm", "grouped_scaled_mm_group", "grouped_mm_weight_only"])
def test_products_beyond_int32(name):
    op = OPS[name]
    args = op.inputs(M=70_000, N=32_768, K=128, E=2, device="cuda")  # 2.3e9 outputs
    out = op(**args)
    last = {n: v[-40:] if n in ("a", "scale_a") else v for n, v in args.items()}
    last["offs"] = torch.tensor([0, 40], dtype=torch.int32, device="cuda")
    assert_close(out[-40:].contiguous(), op.reference(**last), op.tolerance(op.bind(**args)))


def integers(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Values that asymmetric int8 codes of x stand for."""
    return (((x.float() / scale).round() + zero).clamp(-128, 127) - zero) * scale


@pytest.mark.parametrize("static", [False, True])
def test_activations_and_weights_with_zero_points(static, device):
    x, (weights, ids) = randn(7, H) + 1, routing(7)
    given, shifts = {}, {}
    for seed, (name, shape) in enumerate(dict(w13=(E, 2 * I, H), w2=(E, H, I)).items()):
        codes = torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)
        shifts[name] = torch.randint(-9, 9, (E, shape[1], 1), generator=torch.Generator().manual_seed(seed)).int()
        scale = torch.full((E, shape[1], 1), 2.0**-9 if name == "w13" else 2.0**-10)
        parts_ = (t.to(device) for t in (codes, scale))
        given[name] = fpk.Quantized(*parts_, "int8_channel", zero_point=shifts[name].to(device), check=False)
        shifts[name] = (codes - shifts[name]) * scale
    options = dict(act="int8_token_asymmetric")
    if static:
        scales, zeros = (0.03, 0.05), (-20, 7)
        options = dict(act="int8_tensor")
        for name, scale, zero in zip(("13", "2"), scales, zeros, strict=True):
            options[f"input_scale{name}"] = torch.full((1, 1), scale, device=device)
            options[f"zero_point{name}"] = torch.full((1, 1), zero, dtype=torch.int8, device=device)
    out = fpk.moe_experts(x.to(device), weights.to(device), ids.to(device), **given, **options)

    def fake_rows(v: Tensor, which: int) -> Tensor:
        if static:
            return integers(v, torch.tensor(scales[which]), torch.tensor(float(zeros[which])))
        codes, scale, zero = OPS["quantize_int8_token_asymmetric"].reference(v.to(torch.bfloat16))
        return (codes.float() - zero) * scale

    expected = torch.zeros(7, H)
    for t in range(7):
        for j in range(TOP_K):
            e = int(ids[t, j])
            hidden = (fake_rows(x[t : t + 1], 0) @ shifts["w13"][e].T).bfloat16().float()
            gate, up = hidden.chunk(2, 1)
            hidden = (F.silu(gate) * up).bfloat16()
            expected[t] += weights[t, j] * (fake_rows(hidden, 1) @ shifts["w2"][e].T).bfloat16().float()[0]
    assert rel_error(out.cpu(), expected.bfloat16()) < 0.02


def test_zero_experts_and_copies(device):
    """Experts that pass tokens on, and experts of which there are two."""
    x, logits = randn(9, H).to(device), randn(9, 5, seed=4, dtype=torch.float32).to(device)
    w13, w2 = (given.to(device) for given in parts("plain")[0].values())
    out = fpk.moe(x, logits, w13, w2, num_zero_experts=1)
    weights, ids = OPS["route"](logits, 2)
    routed = fpk.moe_experts(x, weights, torch.where(ids < E, ids, -1), w13, w2, out_dtype=None)
    passed = torch.where(ids >= E, weights, 0.0).sum(1, keepdim=True)
    assert rel_error(out, routed + passed * x.float()) < 0.01
    assert_close(
        fpk.moe_experts(x, weights, ids, w13, w2, residual=x, residual_weight=passed), out, 0.0
    )  # fmt: skip
    table = torch.tensor([[0, 4], [1, -1], [5, 2], [3, -1]], dtype=torch.int32, device=device)
    copies = torch.tensor([2, 1, 2, 1], dtype=torch.int32, device=device)
    more = [torch.cat([w, w[[0, 2]]]) for w in (w13, w2)]
    assert_close(
        fpk.moe(x, logits[:, :4], *more, expert_table=table, expert_copies=copies),
        fpk.moe(x, logits[:, :4], w13, w2),
        0.0,
    )


@pytest.mark.parametrize("tokens", [1, 2])
def test_weight_only_experts_need_no_fp8_units(tokens):
    """A GPU without them serves one token as it serves two: launches are recorded, none runs."""
    w13 = fpk.quantize(randn(2, 1024, 512, dtype=torch.bfloat16), "fp8_token")
    w2 = fpk.quantize(randn(2, 512, 512, dtype=torch.bfloat16), "fp8_token")
    weights, ids = torch.ones(tokens, 1), torch.zeros(tokens, 1, dtype=torch.int32)
    with pretend("sm80"):
        assert not fits_few(randn(tokens, 512, dtype=torch.bfloat16), ids, w13, w2, None, [], torch.bfloat16)
    if not torch.cuda.is_available():
        with pretend("sm80"):
            out = moe_experts(randn(tokens, 512, dtype=torch.bfloat16), weights, ids, w13, w2)
        assert out.shape == (tokens, 512)
