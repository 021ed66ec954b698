"""quantize_ on torch and transformers models: numbers, what is swapped and what is not, what modules survive."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import fpk
from fpk.check import assert_close, bits, rel_error
from fpk.nn import QuantizedLinear, quantize_, quantized

SCHEMES = [
    "fp8_tensor", "fp8_channel", "fp8_tensor:fp8_tensor", "fp8_block128", "fp8_block128:fp8_token", "int8_channel",
    "int8_group128", "int8_channel:int8_token_asymmetric", "fp8_channel:none", "fp8_block128:none", "int8_tensor:none",
]  # fmt: skip


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def small_model(device, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 64, bias=False))
    return nn.ModuleDict({"blocks": blocks, "lm_head": nn.Linear(64, 32)}).to(device, dtype).eval()


def run(model: nn.Module, x: Tensor) -> Tensor:
    return model["lm_head"](model["blocks"](x))


@pytest.fixture(scope="module")
def llama(device):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


# ---- numbers ---------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layer_is_quantize_and_mm(scheme, dtype, device):
    """The layer is fake quantization of x and weight, then an ordinary linear layer."""
    linear = nn.Linear(160, 48).to(device, dtype)
    layer = QuantizedLinear.from_linear(linear, scheme)
    x = randn(2, 5, 160, dtype=dtype).to(device)
    pair = fpk.parse_layer_scheme(scheme)
    values = x.reshape(-1, 160).double()
    if pair.activation is not None:
        values = fpk.quantize(x.reshape(-1, 160), pair.activation).dequantize().double()
    elif dtype is torch.float32:
        with pytest.raises(ValueError, match="expected bfloat16 or float16, got float32"):
            layer(x)
        return
    options = {"qmin": -127} if scheme.startswith("int8") else {}
    weight = fpk.quantize(linear.weight.detach(), pair.weight, **options).dequantize().double()
    assert layer.weight.dtype is not torch.int8 or layer.weight.min() >= -127
    expected = (values @ weight.T + linear.bias.detach().double()).reshape(2, 5, 48)
    out = layer(x)
    assert out.dtype is dtype and out.shape == (2, 5, 48)
    assert rel_error(out, expected) <= {torch.bfloat16: 3e-3, torch.float16: 5e-4, torch.float32: 1e-5}[dtype]
    assert_close(layer.dequantize().double(), weight, 0.0)
    with torch.no_grad():  # and close to the layer it replaces
        assert rel_error(out, linear(x)) <= 0.05


def test_any_leading_dimensions(device):
    layer = QuantizedLinear.from_linear(nn.Linear(64, 48).to(device, torch.bfloat16), "fp8_channel")
    x = randn(6, 64).to(device)
    whole = layer(x)
    assert_close(layer(x[3]), whole[3], 0.0)
    assert_close(layer(input=x), whole, 0.0)
    assert_close(layer(x.reshape(2, 1, 3, 64)), whole.reshape(2, 1, 3, 48), 0.0)
    assert layer(x[:0]).shape == (0, 48)
    assert_close(layer(x.T.contiguous().T), whole, 0.0)


@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_channel", "fp8_block128", "fp8_channel:none"])
def test_llama_still_says_the_same(llama, scheme, device):
    tokens = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        before = llama(tokens).logits
        with quantized(llama, scheme) as report:
            inside = llama(tokens).logits
        after = llama(tokens).logits
    assert 0 < rel_error(inside, before) <= 0.1
    assert_close(after, before, 0.0)
    assert len(report.changed) == 2 * 7
    assert [(r.name, r.reason) for r in report.skipped] == [("lm_head", "output layer (lm_head=True quantizes it)")]


# ---- what is swapped -------------------------------------------------------
def test_report(device):
    model = small_model(device)
    before = sum(p.nbytes for p in model.parameters())
    report = quantize_(model, "fp8_channel", ignore=["blocks.2"])
    assert [r.name for r in report.changed] == ["blocks.0"]
    assert {r.name: r.reason for r in report.skipped} == {
        "blocks.2": "ignored by 'blocks.2'",
        "lm_head": "output layer (lm_head=True quantizes it)",
    }
    changed = report.changed[0]
    assert changed.scheme == "fp8_channel:fp8_token" and changed.shape == (48, 64)
    assert (changed.bytes_before, changed.bytes_after) == (48 * 64 * 2 + 48 * 2, 48 * 64 + 48 * 4 + 48 * 2)
    assert report.bytes_before == before
    assert report.bytes_before - report.bytes_after == changed.bytes_before - changed.bytes_after
    text = str(report)
    assert "layers quantized 1, left alone 2" in text and "ignored by 'blocks.2'" in text
    assert report._repr_html_().count("<tr>") == 4 and "&#x27;blocks.2&#x27;" in report._repr_html_()
    frame = report.to_frame()
    assert list(frame["layer"]) == ["blocks.0", "blocks.2", "lm_head"]
    assert list(frame["status"]) == ["quantized", "skipped", "skipped"]


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (["blocks.0"], {"blocks.0"}),
        (["blocks"], {"blocks.0", "blocks.2"}),
        (["*.2"], {"blocks.2"}),
        (["blocks.[01]"], {"blocks.0"}),
        (["re:.*2$"], {"blocks.2"}),
        (["re:blocks"], {"blocks.0", "blocks.2"}),
        (["blocks.0", "re:.*[.]2"], {"blocks.0", "blocks.2"}),
    ],
)
def test_ignore_patterns(ignore, left, device):
    report = quantize_(small_model(device), "fp8_channel", ignore=ignore, lm_head=True)
    assert {r.name for r in report.skipped} == left
    assert {r.name for r in report.changed} == {"blocks.0", "blocks.2", "lm_head"} - left
    assert not report.unmatched


def test_patterns_that_match_nothing_are_reported(device):
    with pytest.warns(UserWarning, match="'block.0' matches no module"):
        report = quantize_(small_model(device), "fp8_channel", ignore=["block.0", "re:locks", "*.7", "lm_head"])
    assert report.unmatched == ["block.0", "re:locks", "*.7"]
    assert len(report.changed) == 2
    assert "ignore pattern '*.7' matches no module" in str(report)


def test_bad_patterns(device):
    model = small_model(device)
    for ignore, message in (
        (["re:("], "expected a regular expression"),
        ("lm_head", "expected a list of patterns"),
        ([""], "expected names, wildcards"),
        ([3], "expected names, wildcards"),
    ):
        with pytest.raises(ValueError, match=message):
            quantize_(model, "fp8_channel", ignore=ignore)
    with pytest.raises(ValueError, match="got 'fp8_chanel'"):
        quantize_(model, "fp8_chanel")
    with pytest.raises(ValueError, match="holds linear layers"):
        quantize_(nn.Linear(4, 4), "fp8_channel")
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())


def test_filter(device):
    asked = []
    report = quantize_(small_model(device), "fp8_channel", filter=lambda m, n: asked.append(n) or m.in_features == 48)
    assert asked == ["blocks.0", "blocks.2"]
    assert [r.name for r in report.changed] == ["blocks.2"]
    assert report.skipped[0].reason == "refused by filter"


def test_what_is_left_alone(device):
    class Special(nn.Linear):
        pass

    model = nn.ModuleDict(
        {
            "embed": nn.Embedding(32, 64),
            "tied": nn.Linear(64, 32, bias=False),
            "special": Special(64, 32),
            "hooked": nn.Linear(64, 32),
            "attention": nn.MultiheadAttention(64, 2),
            "plain": nn.Linear(64, 32),
        }
    ).to(device)
    model["tied"].weight = model["embed"].weight
    model["hooked"].register_forward_hook(lambda *_: None)
    model["experts"] = nn.Module()
    model["experts"].w = nn.Parameter(torch.zeros(2, 4, 8, device=device))
    report = quantize_(model, "fp8_channel")
    assert [r.name for r in report.changed] == ["plain"]
    assert {r.name: r.reason for r in report.skipped} == {
        "tied": "weight shared with embed",
        "special": "Special, a subclass of nn.Linear",
        "hooked": "has hooks",
        "attention.out_proj": "NonDynamicallyQuantizableLinear, a subclass of nn.Linear",
        "experts": "holds stacked weights, not nn.Linear layers",
    }
    again = quantize_(model, "int8_channel")
    assert not again.changed
    assert {r.name: r.reason for r in again.skipped}["plain"] == "already fp8_channel:fp8_token"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_computed_weights_are_left_alone(device):
    model = nn.ModuleDict({n: nn.Linear(64, 32) for n in ("normed", "pruned", "plain")}).to(device)
    nn.utils.weight_norm(model["normed"])
    prune.random_unstructured(model["pruned"], "weight", 0.5)
    report = quantize_(model, "fp8_channel")
    assert [r.name for r in report.changed] == ["plain"]
    computed = "weight is computed at every call (weight_norm, prune), not a parameter"
    assert {r.name: (r.shape, r.reason) for r in report.skipped} == dict.fromkeys(
        ("normed", "pruned"), ((32, 64), computed)
    )


def test_output_embeddings_by_any_name(llama):
    model = copy.deepcopy(llama)
    model.out = model.lm_head
    del model.lm_head
    model.get_output_embeddings = lambda: model.out
    report = quantize_(model, "fp8_channel")
    assert [r.name for r in report.skipped] == ["out"]


def test_a_layer_in_two_places_stays_one(device):
    layer = nn.Linear(64, 64)
    model = nn.Sequential(layer, nn.ReLU(), layer).to(device)
    with quantized(model, "fp8_channel") as report:
        assert model[0] is model[2] and isinstance(model[0], QuantizedLinear)
        assert len(report.changed) == 1
    assert model[0] is layer and model[2] is layer


def test_the_block_restores_after_an_error(device):
    model = small_model(device)
    layers = dict(model.named_modules())
    with pytest.raises(RuntimeError, match="inside"), quantized(model, "fp8_channel"):
        raise RuntimeError("inside")
    assert dict(model.named_modules()) == layers
    with torch.no_grad():
        model["blocks"][2].weight[0] = float("inf")  # a row without a finite scale, after blocks.0 was swapped
    message = r"blocks.2.weight_scale: expected finite positive scales"
    with pytest.raises(ValueError, match=message), quantized(model, "fp8_channel"):
        pass
    assert dict(model.named_modules()) == layers


def test_weights_without_data_are_refused():
    with pytest.raises(ValueError, match=r"0.weight: expected a tensor with data, got one on the meta device"):
        quantize_(nn.Sequential(nn.Linear(8, 8, device="meta")), "fp8_channel")


# ---- what modules survive --------------------------------------------------
@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_channel", "int8_channel:int8_token_asymmetric"])
def test_state_dict_round_trip(scheme, device):
    one, other = small_model(device), small_model(device)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-0.5)
    quantize_(one, scheme)
    quantize_(other, scheme)
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {"blocks.0.weight", "blocks.0.weight_scale", "blocks.0.bias"} <= state.keys()
    other.load_state_dict(state)
    x = randn(3, 64).to(device)
    with torch.no_grad():
        assert_close(run(other, x), run(one, x), 0.0)


def test_loading_refuses_other_dtypes_and_impossible_scales(device):
    model = small_model(device)
    plain = {k: v.clone() for k, v in model.state_dict().items()}
    quantize_(model, "fp8_channel")
    kept = model["blocks"][0].weight.clone()
    with pytest.raises(RuntimeError, match=r"blocks.0.weight: expected float8_e4m3fn, got bfloat16"):
        model.load_state_dict(plain, strict=False)
    state = model.state_dict()
    state["blocks.0.weight_scale"] = -state["blocks.0.weight_scale"]
    with pytest.raises(RuntimeError, match=r"blocks.0.weight_scale: expected finite positive scales"):
        model.load_state_dict(state)
    assert same_bits(model["blocks"][0].weight, kept)


def test_copies(device):
    model = small_model(device)
    quantize_(model, "fp8_channel")
    x = randn(3, 64).to(device)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        expected = run(model, x)
        for copied in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(file, weights_only=False),
        ):
            assert copied["blocks"][0].weight.dtype is torch.float8_e4m3fn
            assert repr(copied) == repr(model)
            assert_close(run(copied, x), expected, 0.0)
        copied["blocks"][0].weight_scale.mul_(2)
        assert_close(run(model, x), expected, 0.0)


def test_casting_a_model_leaves_codes_and_scales(device):
    model = small_model(device, torch.float32)
    quantize_(model, "fp8_channel")
    layer = model["blocks"][0]
    weight, scale = layer.weight.clone(), layer.weight_scale.clone()
    for cast in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to(device), lambda m: m.double()):
        cast(model)
        assert same_bits(layer.weight, weight) and same_bits(layer.weight_scale, scale)
    model.bfloat16()
    assert layer.bias.dtype is torch.bfloat16 and model["lm_head"].weight.dtype is torch.bfloat16
    assert layer(randn(3, 64).to(device)).dtype is torch.bfloat16
    meta = copy.deepcopy(model).to("meta")
    assert meta["blocks"][0].weight.is_meta and meta["blocks"][0].weight.dtype is torch.float8_e4m3fn


def test_repr(device):
    layer = QuantizedLinear.from_linear(nn.Linear(64, 48), "fp8_channel")
    assert repr(layer) == (
        "QuantizedLinear(in_features=64, out_features=48, bias=True, scheme=fp8_channel:fp8_token, "
        "weight=float8_e4m3fn (48, 64), weight_scale=float32 (48, 1))"
    )
    assert not list(layer.parameters())


def test_layer_refuses(device):
    layer = QuantizedLinear.from_linear(nn.Linear(64, 48).to(device), "fp8_channel")
    x = torch.zeros(2, 64, device=device)
    with pytest.raises(ValueError, match=r"QuantizedLinear.input: expected a tensor that needs no gradient"):
        layer(x.clone().requires_grad_())
    with torch.no_grad():
        layer(x.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"QuantizedLinear.input: expected \(..., 64\), got \(2, 63\)"):
        layer(x[:, 1:])
    with pytest.raises(
        ValueError, match=r"QuantizedLinear.input: expected float32 or bfloat16 or float16, got float64"
    ):
        layer(x.double())
    with pytest.raises(ValueError, match=r"QuantizedLinear.weight: expected an \(N, K\) matrix"):
        QuantizedLinear(fpk.quantize(x[None], "fp8_channel"))
    with pytest.raises(ValueError, match="no product"):
        QuantizedLinear(fpk.quantize(x, "fp8_channel"), "int8_token")
    with pytest.raises(ValueError, match=r"proj.weight: expected .* got float64"):
        QuantizedLinear.from_linear(nn.Linear(8, 8).double(), "fp8_channel", "proj")


# ---- torch.compile ---------------------------------------------------------
@pytest.mark.parametrize(
    "scheme", ["fp8_channel", "int8_channel:int8_token_asymmetric", "fp8_block128", "fp8_tensor:none"]
)
def test_compiles_in_one_graph(scheme, device):
    model = small_model(device)["blocks"]
    quantize_(model, scheme)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for shape in ((4, 64), (2, 3, 64)):
            x = randn(*shape).to(device)
            assert_close(compiled(x), model(x), 0.0)


def test_scales_of_blocks_lie_by_groups(monkeypatch):
    """As products were measured, which tables are looked up by, and as a column begins at 16 bytes."""
    op, seen = fpk.OPS["scaled_mm_group"], []

    def look(*args, **more):
        seen.append(op.bind(*args, **more))
        return op(*args, **more)

    monkeypatch.setitem(fpk.OPS, "scaled_mm_group", look)
    for m in (1, 5):
        layer = QuantizedLinear.from_linear(nn.Linear(272, 136, dtype=torch.bfloat16), "fp8_block128:fp8_group128")
        layer(torch.randn(m, 272).bfloat16())
        assert seen[-1]["scale_a"].stride() == (1, -(-m // 4) * 4) and op.key(**seen[-1])["column_scales"] == 1
