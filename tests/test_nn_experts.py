"""quantize_ on the experts of transformers' models; the layer's life: casts, copies, pickles, tracing."""

import copy
import io
import pickle

import pytest
import torch

import fpk
from fpk._experts import QuantizedExperts
from fpk._experts_layout import expert_layout
from fpk.check import bits, rel_error

transformers = pytest.importorskip("transformers")


pytestmark = pytest.mark.usefixtures("on_references")


def model_of(kind):
    torch.manual_seed(0)
    common = dict(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
        num_experts_per_tok=2, num_local_experts=4,
    )  # fmt: skip
    sizes = {
        "mixtral": dict(intermediate_size=96), "gpt_oss": dict(intermediate_size=96, layer_types=["full_attention"]),
        "qwen3_moe": dict(intermediate_size=96, moe_intermediate_size=96, num_experts=4),
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **common, **sizes[kind])
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


KINDS = ("mixtral", "qwen3_moe", "gpt_oss")
IDS = torch.arange(32).view(2, 16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ("fp8_channel", "fp8_block128", "int8_channel:int8_token", "mxfp4:none", "nvfp4"))
def test_experts_are_swapped(kind, scheme):
    """The layer is transformers' own on the dequantized weights; inside the block, then the old one is back."""
    model = model_of(kind)
    old = model.model.layers[0].mlp.experts
    x = torch.randn(6, 64).bfloat16()
    ids, weights = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3], [2, 0]]), torch.rand(6, 2)
    before = old(x, ids, weights.bfloat16())
    with fpk.quantized(model, scheme, ignore=["*attn*"]) as report:
        new = model.model.layers[0].mlp.experts
        assert isinstance(new, QuantizedExperts) and [r.name for r in report.changed] == ["model.layers.0.mlp.experts"]
        assert report.changed[0].bytes_after < 0.6 * report.changed[0].bytes_before
        assert model(IDS).logits.isfinite().all()
        out = new(x, ids, weights.bfloat16())
        bound = 0.25 if scheme.startswith(("mx", "nv")) else 0.08  # two products of three rounded operands
        assert 0 < rel_error(out, before) < bound and str(fpk.parse_layer_scheme(scheme)) == new.scheme
        plain = copy.deepcopy(old)
        for name, values in zip(("gate_up_proj", "down_proj"), new.dequantize(), strict=True):
            getattr(plain, name).copy_(values.mT if expert_layout(old)["transposed"] else values)
        if scheme.endswith("none") or scheme == "nvfp4":
            assert rel_error(out, plain(x, ids, weights.bfloat16())) < 0.01
    assert model.model.layers[0].mlp.experts is old


def test_static_schemes_and_patterns_leave_experts_alone():
    model = model_of("mixtral")
    ranges = fpk.calibrate(model, [IDS])
    report = fpk.quantize_(copy.deepcopy(model), "fp8_tensor:fp8_tensor_static", calibration=ranges)
    assert {r.name: r.reason for r in report.skipped}["model.layers.0.mlp.experts"].startswith("holds experts, which")
    report = fpk.quantize_(model, "fp8_channel", ignore=["*experts"])
    assert "ignored by" in {r.name: r.reason for r in report.skipped}["model.layers.0.mlp.experts"]
    fpk.quantize_(model, "fp8_channel")
    again = fpk.quantize_(model, "int8_channel")
    assert {r.name: r.reason for r in again.skipped}["model.layers.0.mlp.experts"] == "already fp8_channel:fp8_token"


def test_a_life_of_experts():
    model = model_of("gpt_oss")
    fpk.quantize_(model, "nvfp4", ignore=["*attn*"])
    layer = model.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.rand(3, 2)
    out = layer(x, ids, weights)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert torch.equal(bits(other(x, ids, weights)), bits(out))
    dtypes = {n: b.dtype for n, b in layer.named_buffers() if not n.endswith("_bias")}
    layer.to(torch.float16)
    assert dtypes == {n: b.dtype for n, b in layer.named_buffers() if not n.endswith("_bias")}
    assert layer.down_proj_bias.dtype is torch.float16
    with torch.enable_grad(), pytest.raises(ValueError, match="needs no gradient"):
        layer(x.float().requires_grad_(), ids, weights)
    assert "experts=4" in repr(layer) and "nvfp4:none" in repr(layer)


def test_fullgraph():
    model = model_of("mixtral")
    fpk.quantize_(model, "fp8_block128", ignore=["*attn*"])
    layer = model.model.layers[0].mlp.experts
    x, ids, weights = torch.randn(3, 64).bfloat16(), torch.tensor([[0, 1], [1, 2], [2, 3]]), torch.rand(3, 2)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, ids, weights), layer(x, ids, weights))
