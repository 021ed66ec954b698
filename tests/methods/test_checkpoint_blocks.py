"""load_quantized: layers with packed codes and block scales, and experts, from the exporters' fixtures."""

import json

import pytest
import torch
from checkpoint_kit import FIXTURES, config_of, values, write_checkpoint
from moe_kit import expected
from torch.nn import functional as F

import fpk
from fpk._experts import QuantizedExperts
from fpk.check import rel_error
from fpk.checkpoint import empty_parameters
from fpk.nn import QuantizedLinear

pytestmark = pytest.mark.usefixtures("references", "on_cpu")
transformers = pytest.importorskip("transformers")

DENSE = {  # fixture: scheme, family, largest relative error of the weights
    "lc_MXFP4_llama": ("mxfp4:mxfp4", "compressed-tensors", 0.13),
    "lc_NVFP4_llama": ("nvfp4:nvfp4_static", "compressed-tensors", 0.11),
    "lc_NVFP4A16_llama": ("nvfp4:none", "compressed-tensors", 0.11),
    "mo_MXFP4_DEFAULT_CFG": ("mxfp4:mxfp4", "modelopt", 0.14),
    "mo_MXFP8_DEFAULT_CFG": ("mxfp8_e4m3:mxfp8_e4m3", "modelopt", 0.034),
    "mo_NVFP4_DEFAULT_CFG": ("nvfp4:nvfp4_static", "modelopt", 0.11),
    "mo_W4A16_NVFP4_CFG": ("nvfp4:none", "modelopt", 0.11),
    "q_mxfp4": ("mxfp4:mxfp4", "quark", 0.13),
    "q_mxfp4_weight_only": ("mxfp4:none", "quark", 0.13),
    "q_mxfp6_e2m3": ("mxfp6_e2m3:mxfp6_e2m3", "quark", 0.033),
    "q_nvfp4": ("nvfp4:nvfp4_static", "quark", 0.11),
}
EXPERTS = {  # fixture: scheme of the experts, source, largest relative error of their weights
    "lc_FP8_mixtral": ("fp8_channel/fp8_tensor:fp8_tensor_static", "mixtral", 0.0305),
    "lc_FP8_DYNAMIC_mixtral": ("fp8_channel:fp8_token", "mixtral", 0.0305),
    "mom_FP8_DEFAULT_CFG": ("fp8_channel/fp8_tensor:fp8_tensor_static", "mixtral", 0.0305),
    "qff_mxfp4": ("mxfp4:mxfp4", "mixtral", 0.13),
    "gptoss_mx": ("mxfp4:none", "gptoss_bf16", 0.13),
}
IDS = (torch.arange(40)[None] * 37 + torch.tensor([[0], [5]])) % 256


def model_of(fixture, empty=True):
    config = {k: v for k, v in config_of(fixture).items() if k != "quantization_config"}
    config = transformers.AutoConfig.for_model(**config)
    if not empty:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with empty_parameters():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def small(code, mantissa, bias):
    """The value of an FP4 or FP6 code."""
    bits = 3 if mantissa == 1 else 5
    sign = -1.0 if code >> bits else 1.0
    exponent, fraction = (code & ((1 << bits) - 1)) >> mantissa, code & ((1 << mantissa) - 1)
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)


FP4 = torch.tensor([small(c, 1, 1) for c in range(16)])
FP6 = torch.tensor([small(c, 3, 1) for c in range(64)])


def block_decoded(stored, layer):
    """The weight of a layer in fp32, by the families' definition."""
    scale = stored[f"{layer}.weight_scale"]
    codes = stored.get(f"{layer}.weight_packed", stored.get(f"{layer}.weight"))
    if codes.dtype is torch.float8_e4m3fn:
        elements = codes.float()
    elif scale.dtype is torch.uint8 and codes.shape[1] == 24 * scale.shape[1]:
        b = codes.long().unflatten(1, (-1, 3))
        word = b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16
        elements = FP6[torch.stack([word >> (6 * i) & 63 for i in range(4)], -1).flatten(1)]
    else:
        elements = FP4[torch.stack([codes.long() & 15, codes.long() >> 4], -1).flatten(1)]
    if scale.dtype is torch.uint8:
        return elements * torch.exp2(scale.double() - 127).float().repeat_interleave(32, 1)
    value = elements * scale.float().repeat_interleave(16, 1)
    if f"{layer}.weight_global_scale" in stored:
        return value * (1 / stored[f"{layer}.weight_global_scale"].float())
    return value * stored[f"{layer}.weight_scale_2"].float()


def input_scale(stored, layer):
    if f"{layer}.input_global_scale" in stored:
        return 1 / stored[f"{layer}.input_global_scale"].float().reshape(1, 1)
    name = "input_scale_2" if f"{layer}.input_scale_2" in stored else "input_scale"
    return stored[f"{layer}.{name}"].float().reshape(1, 1)


@pytest.mark.parametrize("fixture", DENSE)
def test_dense_layers(fixture):
    """Weights are the family's own decoding; logits those of transformers' layers with them and rounded inputs."""
    scheme, family, bound = DENSE[fixture]
    model, plain, stored, source = model_of(fixture), model_of(fixture, False), values(fixture), values("llama")
    report = fpk.load_quantized(model, FIXTURES / fixture)
    assert report.family == family and set(report.layers.values()) == {scheme} and len(report.layers) == 7
    assert not report.missing and not report.unused and not report.notes
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}
    weights = {n: block_decoded(stored, n) for n in linears}
    state = {n: t for n, t in stored.items() if n in plain.state_dict()}
    plain.load_state_dict(state | {f"{n}.weight": w for n, w in weights.items()})
    activation = scheme.split(":")[1]
    for name, layer in linears.items():
        torch.testing.assert_close(layer.dequantize(), weights[name], rtol=1e-6, atol=0)
        assert rel_error(layer.dequantize(), source[f"{name}.weight"]) < bound
        given = input_scale(stored, name) if activation == "nvfp4_static" else None
        if given is not None:
            torch.testing.assert_close(layer.input_scale, given)

        def forward(x, weight=weights[name], given=given):
            rows = x.flatten(0, -2)
            if activation != "none":
                options = {} if given is None else {"global_scale": given}
                rows = fpk.quantize(rows, activation.removesuffix("_static"), **options).dequantize()
            return F.linear(rows.float(), weight).to(x.dtype).unflatten(0, x.shape[:-1])

        plain.get_submodule(name).forward = forward
    assert rel_error(model(IDS).logits.float(), plain(IDS).logits.float()) < 0.03


@pytest.mark.parametrize("fixture", EXPERTS)
def test_experts(fixture):
    """Experts one by one or as stacks; logits follow a transformers model with the decoded weights."""
    scheme, source, bound = EXPERTS[fixture]
    model, stored = model_of(fixture), values(fixture)
    report = fpk.load_quantized(model, FIXTURES / fixture)
    assert report.layers["model.layers.0.mlp.experts"] == scheme and not report.missing and not report.unused
    layer = model.model.layers[0].mlp.experts
    assert isinstance(layer, QuantizedExperts)
    gate_up, down = layer.dequantize()
    original = values(source)
    if source == "mixtral":
        name = "model.layers.0.block_sparse_moe.experts"
        names = [[f"{name}.{e}.{w}.weight" for w in ("w1", "w3", "w2")] for e in range(4)]
        want13 = torch.stack([torch.cat([original[a], original[b]]) for a, b, _ in names])
        want2 = torch.stack([original[c] for *_, c in names])
    else:
        want13, want2 = (original[f"model.layers.0.mlp.experts.{n}"].mT for n in ("gate_up_proj", "down_proj"))
        assert torch.equal(layer.gate_up_proj_bias, stored["model.layers.0.mlp.experts.gate_up_proj_bias"])
    assert rel_error(gate_up, want13) < bound and rel_error(down, want2) < bound
    seen = []
    layer.register_forward_hook(lambda _, args, out: seen.append((*args, out)))
    assert model(IDS).logits.isfinite().all()
    ((x, ids, weights, out),) = seen
    if source == "mixtral":
        act = scheme.split(":")[1].removesuffix("_static")

        def rounded(scale):
            options = {} if scale is None else {"scale": scale}
            return lambda rows: fpk.quantize(rows, act, **options).dequantize()

        fakes = [rounded(s) for s in (layer.gate_up_proj_input_scale, layer.down_proj_input_scale)]
        want = expected(x, weights.float(), ids, gate_up, down, *fakes)
    else:
        module = model_of(fixture, False).model.layers[0].mlp.experts  # transformers' own, on the decoded weights
        module.gate_up_proj.copy_(gate_up.mT)
        module.down_proj.copy_(down.mT)
        for bias in ("gate_up_proj_bias", "down_proj_bias"):
            getattr(module, bias).copy_(getattr(layer, bias))
        want = module(x, ids, weights)
    assert rel_error(out, want) < 0.008


@pytest.mark.parametrize("fixture, scheme, error", (
    ("qm_nvfp4", "nvfp4:nvfp4_static", 0.11), ("qm_fp8", "fp8_tensor:fp8_tensor_static", 0.0305),
    ("qm_mxfp4", "mxfp4:mxfp4", 0.13),
))  # fmt: skip
def test_unquantized_experts_beside_quantized_layers(fixture, scheme, error):
    model = model_of(fixture)
    report = fpk.load_quantized(model, FIXTURES / fixture)
    assert set(report.layers.values()) == {scheme} and len(report.layers) == 4
    name = "model.layers.0.mlp.experts.down_proj"
    assert torch.equal(model.get_parameter(name), values(fixture)[name])
    source = values("mixtral")
    for layer in report.layers:
        assert rel_error(model.get_submodule(layer).dequantize(), source[f"{layer}.weight"]) < error
    with torch.no_grad():
        assert model(IDS).logits.isfinite().all()


def test_unquantized_experts_that_stand_one_by_one(tmp_path):
    stored = {n: t for n, t in values("mixtral").items()}
    name = "model.layers.0.self_attn.q_proj"
    stored[f"{name}.weight"] = stored[f"{name}.weight"].to(torch.float8_e4m3fn)
    stored[f"{name}.weight_scale"] = torch.tensor(1.0)
    config = {k: v for k, v in config_of("mixtral").items()}
    path = write_checkpoint(tmp_path, stored, {"quant_method": "fp8", "activation_scheme": "dynamic"}, **config)
    model = model_of("mixtral")
    report = fpk.load_quantized(model, path)
    assert len(report.layers) == 1 and "model.layers.0.mlp.experts.gate_up_proj" in report.plain
    experts = model.model.layers[0].mlp.experts
    one = stored["model.layers.0.block_sparse_moe.experts.2.w3.weight"]
    assert torch.equal(experts.gate_up_proj[2, one.shape[0] :], one)
    assert torch.equal(experts.down_proj[3], stored["model.layers.0.block_sparse_moe.experts.3.w2.weight"])


@pytest.mark.parametrize("what", ("expert", "projection", "scale", "size", "stack", "stack scale", "scheme"))
def test_experts_that_are_not_whole_leave_the_model_alone(what, tmp_path):
    fixture = "gptoss_mx" if what.startswith("stack") else "qff_mxfp4"
    stored = values(fixture)
    name = "model.layers.0.block_sparse_moe.experts"
    if what == "expert":
        stored = {n: t for n, t in stored.items() if not n.startswith(f"{name}.3.")}
        error = r"experts: expected all experts to be quantized, missing expert 3 gate"
    elif what == "projection":
        stored = {n: t for n, t in stored.items() if not n.startswith(f"{name}.1.w3")}
        error = r"experts to be quantized, missing expert 1 up"
    elif what == "scale":
        del stored[f"{name}.2.w1.weight_scale"]
        error = r"experts\.2\.w1\.weight: U8 without a scale"
    elif what == "size":
        stored[f"{name}.2.w1.weight"] = stored[f"{name}.2.w1.weight"][:100]
        stored[f"{name}.2.w1.weight_scale"] = stored[f"{name}.2.w1.weight_scale"][:100]
        error = r"experts\.2\.w1\.weight: expected \(256, 128\), got \(100, 128\)"
    elif what == "stack":
        del stored["model.layers.0.mlp.experts.down_proj_blocks"], stored["model.layers.0.mlp.experts.down_proj_scales"]
        error = "experts to be quantized, missing .*down_proj"
    elif what == "stack scale":
        del stored["model.layers.0.mlp.experts.down_proj_scales"]
        error = "down_proj_blocks: U8 without a scale"
    else:
        stored[f"{name}.2.w1.weight"] = torch.zeros(256, 128).to(torch.float8_e4m3fn)
        error = r"experts\.2\.w1\.weight: expected U8 or I8 for mxfp4, got F8_E4M3"
    config = json.loads((FIXTURES / fixture / "config.json").read_text())
    model = model_of(fixture)
    before = {n: id(m) for n, m in model.named_modules()}
    with pytest.raises(ValueError, match=error):
        fpk.load_quantized(model, write_checkpoint(tmp_path, stored, config.pop("quantization_config"), **config))
    assert before == {n: id(m) for n, m in model.named_modules()} and all(p.is_meta for p in model.parameters())


# ---- there and back -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", ("compressed-tensors", "quark", "modelopt"))
@pytest.mark.parametrize("fixture", EXPERTS)
def test_experts_are_written_one_by_one_and_read_back(fixture, family, tmp_path):
    model, back = model_of(fixture), model_of(fixture)
    fpk.load_quantized(model, FIXTURES / fixture)
    if family == "modelopt" and fixture in ("gptoss_mx", "lc_FP8_mixtral", "mom_FP8_DEFAULT_CFG"):
        with pytest.raises(ValueError, match=r"experts\.0\.\w+: modelopt cannot say"):
            fpk.save_quantized(model, tmp_path / "out", family)
        return
    fpk.save_quantized(model, tmp_path / "out", family, max_shard_bytes=200_000)
    report = fpk.load_quantized(back, tmp_path / "out")
    assert not report.missing and not report.unused
    ours, theirs = (m.model.layers[0].mlp.experts for m in (model, back))
    for a, b in zip(ours.dequantize(), theirs.dequantize(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(model(IDS).logits, back(IDS).logits)
