"""load_quantized: the exporters' fixtures and files written by hand, against decoding in plain torch."""

import json

import pytest
import torch
from checkpoint_kit import (
    FIXTURES,
    Tiny,
    config_of,
    decoded,
    fake_input,
    fp8_blocks,
    fp8_tensor_checkpoint,
    tiny,
    values,
    write_checkpoint,
)
from safetensors.torch import save_file
from test_reload import Live
from torch import nn
from torch.nn import functional as F

import fpk
import fpk.op
from fpk.check import bits, rel_error
from fpk.checkpoint import empty_parameters
from fpk.nn import QuantizedLinear

pytestmark = pytest.mark.usefixtures("references", "on_cpu")

DENSE = {  # fixture: scheme, family, what the input is rounded to, largest relative error of the weights
    "lc_FP8_DYNAMIC": ("fp8_channel:fp8_token", "compressed-tensors", 0.0305),
    "lc_FP8_llama": ("fp8_tensor:fp8_tensor_static", "compressed-tensors", 0.0305),
    "lc_W8A8_llama": ("int8_channel:int8_token", "compressed-tensors", 0.0092),
    "mo_FP8_DEFAULT_CFG": ("fp8_tensor:fp8_tensor_static", "modelopt", 0.0305),
    "mo_FP8_PER_CHANNEL_PER_TOKEN_CFG": ("fp8_channel:fp8_token", "modelopt", 0.0305),
    "mo_INT8_DEFAULT_CFG": ("int8_channel:int8_tensor_static", "modelopt", 0.0092),
    "q_fp8": ("fp8_tensor:fp8_tensor_static", "quark", 0.0305),
    "q_ptpc_fp8": ("fp8_channel:fp8_token", "quark", 0.0305),
    "q_int8": ("int8_tensor:int8_tensor_static", "quark", 0.0125),  # one scale: amax of the whole tensor
    "qf_fp8": ("fp8_tensor:fp8_tensor_static", "fp8", 0.0305),
}
IDS = (torch.arange(40)[None] * 37 + torch.tensor([[0], [5]])) % 256


def llama(fixture: str, empty: bool = True):
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in config_of(fixture).items() if k != "quantization_config"}
    config = transformers.AutoConfig.for_model(**config)
    if not empty:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with empty_parameters():
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


@pytest.mark.parametrize("fixture", DENSE)
def test_weights_are_the_familys_own_decoding(fixture):
    scheme, family, bound = DENSE[fixture]
    model = llama(fixture)
    report = fpk.load_quantized(model, FIXTURES / fixture)
    assert report.family == family and set(report.layers.values()) == {scheme} and len(report.layers) == 14
    assert not report.missing and not report.unused and not report.accepted and not report.notes
    stored, source = values(fixture), values("llama")
    for name, layer in linears(model).items():
        assert torch.equal(layer.dequantize(), decoded(stored, name)), name
        assert rel_error(layer.dequantize(), source[f"{name}.weight"]) < bound
        if layer.input_scale is not None:
            assert layer.input_scale.item() == stored[f"{name}.input_scale"].float().item()
    for name in report.plain:
        assert torch.equal(bits(model.state_dict()[name]), bits(stored[name])), name
    assert "lm_head.weight" in report.plain and not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("fixture", DENSE)
def test_logits_are_those_of_a_dequantized_model(fixture):
    """transformers' own layers on decoded weights, their inputs rounded as the config says."""
    scheme, _, _ = DENSE[fixture]
    model, plain, stored = llama(fixture), llama(fixture, empty=False), values(fixture)
    fpk.load_quantized(model, FIXTURES / fixture)
    state = {n: t for n, t in stored.items() if n in plain.state_dict()}
    plain.load_state_dict(state | {f"{n}.weight": decoded(stored, n) for n in linears(model)})
    unrounded = plain(IDS).logits.float()
    for name in linears(model):
        layer = plain.get_submodule(name)
        layer.weight.data = layer.weight.data.float()
        static = stored[f"{name}.input_scale"] if scheme.endswith("static") else None
        fake, weight = fake_input(scheme.split("_")[0], static), decoded(stored, name)
        layer.forward = lambda x, fake=fake, weight=weight: F.linear(fake(x), weight).to(x.dtype)
    out, expected = model(IDS).logits.float(), plain(IDS).logits.float()
    assert rel_error(out, expected) < 0.02  # bf16 rounding that falls the other way moves a few FP8 codes
    assert rel_error(expected, unrounded) > 2 * rel_error(out, expected)  # the input's rounding is really in it


def test_kv_scales_are_handed_over():
    for fixture, k in (("lc_FP8_llama", "k_scale"), ("q_fp8", "k_proj.output_scale"), ("qf_fp8", "k_scale")):
        stored = values(fixture)
        scales = fpk.load_quantized(llama(fixture), FIXTURES / fixture).kv_scales
        assert set(scales) == {f"model.layers.{i}.self_attn" for i in range(2)}
        for module, kinds in scales.items():
            assert set(kinds) == {"k", "v"} and kinds["k"].dtype is torch.float32
            assert torch.equal(kinds["k"], stored[f"{module}.{k}"].float())


# ---- blocks -------------------------------------------------------------------------------------------------------
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def block_tensors(model: Tiny, suffix="weight_scale_inv", form=lambda s: s):
    tensors = dict(model.state_dict())
    for name in ("block.up_proj", "block.down_proj"):
        tensors[f"{name}.weight"], scale = fp8_blocks(tensors[f"{name}.weight"])
        tensors[f"{name}.{suffix}"] = form(scale)
    return tensors


def power_of_two(scale):
    return torch.exp2(scale.log2().ceil())


FORMS = {
    "f32": ("weight_scale_inv", lambda s: s, {}),
    "bf16": ("weight_scale_inv", lambda s: s.bfloat16(), {}),
    "f16": ("weight_scale_inv", lambda s: (s * 64).half(), {}),
    "e8m0": ("scale", lambda s: power_of_two(s).to(torch.float8_e8m0fnu), {"scale_fmt": "ue8m0"}),
    "modelopt": ("weight_scale", lambda s: s[:, None, :, None], {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_block_scales_in_every_form(form, tmp_path):
    """Partial blocks on both sides: 200 x 320 is 2 x 3 blocks."""
    suffix, change, extra = FORMS[form]
    model = tiny(hidden=320, inner=200)
    tensors = block_tensors(model, suffix, change)
    config = BLOCKS | extra if form != "modelopt" else {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}
    report = fpk.load_quantized(model, write_checkpoint(tmp_path, tensors, config))
    activation = {"modelopt": "none", "e8m0": "fp8_group128_e8m0"}.get(form, "fp8_group128")
    assert set(report.layers.values()) == {f"fp8_block128:{activation}"}
    scales = {n.replace(f".{suffix}", ".weight_scale"): t for n, t in tensors.items()}
    for name, layer in linears(model).items():
        assert torch.equal(layer.dequantize(), decoded(scales, name))
    x = torch.randn(5, 320, generator=torch.Generator().manual_seed(3)).bfloat16()
    rounded = x.float() if form == "modelopt" else fake_input("fp8", powers=form == "e8m0")(x, group=128)
    expected = F.linear(rounded, decoded(scales, "block.up_proj"))
    assert rel_error(model.block["up_proj"](x), expected) < 3e-3
    assert any("lm_head" in n for n in report.notes) is False


def test_deepseek_shards_and_further_layers(tmp_path):
    """Scales in another file than their weights, no skip list, a prediction layer behind the last."""
    model = tiny(hidden=320, inner=200)
    tensors = block_tensors(model)
    tensors |= {"model.layers.2.eh_proj.weight": torch.ones(4, 8), "model.layers.2.q_proj.weight": fp8_blocks(
        torch.ones(4, 8))[0], "model.layers.2.q_proj.weight_scale_inv": torch.ones(1, 1),
        "model.layers.0.rotary_emb.inv_freq": torch.ones(3)}  # fmt: skip
    weights = {n: t for n, t in tensors.items() if not n.endswith("scale_inv")}
    scales = {n: t for n, t in tensors.items() if n.endswith("scale_inv")}
    save_file(weights, tmp_path / "one.safetensors")
    save_file(scales, tmp_path / "two.safetensors")
    index = dict.fromkeys(weights, "one.safetensors") | dict.fromkeys(scales, "two.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BLOCKS, "num_hidden_layers": 2}))
    report = fpk.load_quantized(model, tmp_path)
    assert len(report.layers) == 2 and len(report.accepted) == 4 and not report.unused


# ---- what the model needs -----------------------------------------------------------------------------------------
def test_fused_parts_become_one_layer(tmp_path):
    """Each part keeps its own scale, now per row: nothing is rounded again."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv_proj = torch.nn.Linear(64, 48 + 16 + 16)

    widths, tensors = {"q": 48, "k": 16, "v": 16}, {}
    for i, (name, n) in enumerate(widths.items()):
        generator = torch.Generator().manual_seed(i)
        tensors[f"attn.{name}_proj.weight"] = torch.randn(n, 64, generator=generator).to(torch.float8_e4m3fn)
        tensors[f"attn.{name}_proj.weight_scale"] = torch.tensor(0.5 + i)
        tensors[f"attn.{name}_proj.input_scale"] = torch.tensor([0.1 * (3 - i)])
        tensors[f"attn.{name}_proj.bias"] = torch.full((n,), float(i))
    path = write_checkpoint(tmp_path, tensors, {"quant_method": "fp8", "activation_scheme": "static"})
    fused = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model = torch.nn.ModuleDict({"attn": Attention()})
    report = fpk.load_quantized(model, path, fused=fused)
    assert report.layers == {"attn.qkv_proj": "fp8_channel:fp8_tensor_static"}
    layer = model["attn"].qkv_proj
    assert torch.equal(layer.dequantize(), torch.cat([decoded(tensors, f"attn.{n}_proj") for n in widths]))
    assert layer.input_scale.item() == pytest.approx(0.3) and layer.bias.tolist() == [0] * 48 + [1] * 16 + [2] * 16
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["attn.q_proj"]}
    assert fpk.load_quantized(model, write_checkpoint(tmp_path, tensors, config), fused=fused).notes
    tensors["attn.v_proj.weight"] = torch.randn(16, 64)
    del tensors["attn.v_proj.weight_scale"]
    with pytest.raises(ValueError, match=r"attn\.qkv_proj: expected all parts .* attn\.v_proj is not"):
        fpk.load_quantized(model, write_checkpoint(tmp_path, tensors, config), fused=fused)


def test_fused_blocks_must_begin_at_blocks(tmp_path):
    def tensors(n):
        made = {}
        for name, rows in (("gate", n), ("up", 100)):
            weight = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows))
            made[f"{name}_proj.weight"], made[f"{name}_proj.weight_scale_inv"] = fp8_blocks(weight)
        return made

    fused = {"gate_up_proj": ["gate_proj", "up_proj"]}
    model = torch.nn.ModuleDict({"gate_up_proj": torch.nn.Linear(192, 356, bias=False)})
    fpk.load_quantized(model, write_checkpoint(tmp_path / "a", tensors(256), BLOCKS), fused=fused)
    expected = torch.cat([decoded(tensors(256), n) for n in ("gate_proj", "up_proj")])
    assert torch.equal(model["gate_up_proj"].dequantize(), expected)
    model = torch.nn.ModuleDict({"gate_up_proj": torch.nn.Linear(192, 300, bias=False)})
    with pytest.raises(ValueError, match=r"gate_up_proj: expected parts of multiples of 128 rows .* \[200, 100\]"):
        fpk.load_quantized(model, write_checkpoint(tmp_path / "b", tensors(200), BLOCKS), fused=fused)


def test_tied_output_layer(tmp_path):
    model = tiny()
    model.lm_head.weight = model.embed.weight
    path = fp8_tensor_checkpoint(tmp_path, tiny(), lambda t: t.pop("lm_head.weight"))
    report = fpk.load_quantized(model, path)
    assert not report.missing and model.lm_head.weight is model.embed.weight
    empty = tiny().to("meta")
    empty.lm_head.weight = empty.embed.weight
    fpk.load_quantized(empty, path)
    made = empty.embed._parameters["weight"]
    assert isinstance(made, torch.nn.Parameter) and not made.requires_grad
    assert empty.lm_head.weight is empty.embed.weight and torch.equal(empty.embed.weight, tiny().embed.weight)


def test_bias_is_loaded_in_the_models_dtype(tmp_path):
    source = tiny(bias=True, dtype=torch.float32)
    model = tiny(bias=True)
    for layer in (model.block["up_proj"], model.block["down_proj"]):
        layer.bias.data.zero_()
    fpk.load_quantized(model, fp8_tensor_checkpoint(tmp_path, source))
    assert torch.equal(model.block["up_proj"].bias, source.block["up_proj"].bias.bfloat16())


def test_load_keeps_storages_of_what_is_there(tmp_path):
    model = tiny()
    pointers = {n: p.data_ptr() for n, p in model.named_parameters() if "proj" not in n}
    fpk.load_quantized(model, fp8_tensor_checkpoint(tmp_path, tiny()))
    assert pointers == {n: p.data_ptr() for n, p in model.named_parameters()}


def test_loaded_model_outlives_the_file(tmp_path):
    model = tiny()
    fpk.load_quantized(model, fp8_tensor_checkpoint(tmp_path, tiny()))
    before = model(torch.arange(8))
    (tmp_path / "model.safetensors").write_bytes(bytes(10))
    assert torch.equal(before, model(torch.arange(8)))


def test_meta_buffers_are_refused():
    transformers = pytest.importorskip("transformers")
    config = {k: v for k, v in config_of("llama").items() if k != "quantization_config"}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    with pytest.raises(ValueError, match=r"inv_freq.*empty_parameters"):
        fpk.load_quantized(model, FIXTURES / "qf_fp8")


def test_loading_needs_the_quantized_model_and_one_layer(tmp_path, monkeypatch):
    """Beside the mapped file, which the system may drop at any time."""
    monkeypatch.undo()  # the suite's guarded memory keeps allocations alive
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    n, k, count = 256, 512, 24
    tensors = {}
    for i in range(count):
        q = fpk.quantize(torch.randn(n, k), "fp8_channel")
        tensors |= {f"{i}.weight": q.codes, f"{i}.weight_scale": q.scale}
    weights = dict(num_bits=8, type="float", strategy="channel")
    group = dict(targets=["Linear"], weights=weights, input_activations=weights | dict(strategy="token", dynamic=True))
    quantization = dict(quant_method="compressed-tensors", format="float-quantized", config_groups=dict(group=group))
    path = write_checkpoint(tmp_path / "many", tensors, quantization)
    del tensors, q
    with torch.no_grad(), Live() as live:
        with empty_parameters():
            model = nn.Sequential(*[nn.Linear(k, n, bias=False, dtype=torch.bfloat16) for _ in range(count)])
        fpk.load_quantized(model, path)
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    mapped = (path / "model.safetensors").stat().st_size
    assert held < 0.52 * count * n * k * 2
    assert live.peak <= mapped + held + 1.1 * n * k * 2
