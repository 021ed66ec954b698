"""save_quantized: every family and scheme there and back bit for bit, and what is refused, leaving nothing behind."""

import json
import os

import pytest
import torch
from checkpoint_kit import FIXTURES, Tiny, decoded, fp8_tensor_checkpoint, tiny
from safetensors.torch import load_file

import fpk
from fpk.check import bits
from fpk.device import pretend
from fpk.methods._dense import find_layers, read_layer
from fpk.methods._families import dialect_of
from fpk.methods.checkpoint import Checkpoint
from fpk.nn import QuantizedLinear

pytestmark = pytest.mark.usefixtures("references", "on_cpu")

UP, DOWN = "block.up_proj", "block.down_proj"
SAYABLE = {
    "compressed-tensors": [
        "fp8_tensor", "fp8_channel", "fp8_block128", "fp8_group128", "int8_tensor", "int8_channel", "int8_group128",
        "fp8_tensor:fp8_tensor", "fp8_channel:none", "fp8_block128:none", "int8_tensor:none", "fp8_block128:fp8_token",
        "int8_channel:int8_token_asymmetric", "int8_channel:int8_tensor_asymmetric", "fp8_tensor:fp8_tensor_static",
        "fp8_channel:fp8_tensor_static", "int8_channel:int8_tensor_static", "fp8_token", "mxfp4:mxfp4", "mxfp4:none",
        "mxfp4:fp8_token", "mxfp6_e2m3:none", "mxfp6_e2m3:mxfp8_e4m3", "mxfp8_e4m3", "nvfp4:none",
        "nvfp4:nvfp4_static", "nvfp4:nvfp4",
    ],
    "fp8": ["fp8_tensor", "fp8_tensor:fp8_tensor_static", "fp8_block128"],
    "modelopt": [
        "fp8_tensor:fp8_tensor_static", "fp8_channel", "fp8_block128:none", "int8_channel:int8_tensor_static",
        "nvfp4:nvfp4_static", "nvfp4:none", "mxfp8_e4m3", "mxfp4:mxfp4",
    ],
    "quark": [
        "fp8_tensor", "fp8_channel", "fp8_block128", "int8_tensor", "int8_channel", "fp8_tensor:fp8_tensor",
        "fp8_tensor:fp8_tensor_static", "fp8_channel:fp8_tensor_static", "int8_tensor:int8_tensor_static",
        "fp8_channel:none", "int8_channel:int8_token_asymmetric", "int8_channel:int8_tensor_static",
        "fp8_block128:fp8_token", "mxfp4:mxfp4", "mxfp4:none", "mxfp4:fp8_tensor_static", "mxfp6_e2m3:mxfp6_e2m3",
        "mxfp6_e3m2:none", "nvfp4:nvfp4_static", "nvfp4:none",
    ],
}  # fmt: skip
CASES = [(family, scheme) for family, schemes in SAYABLE.items() for scheme in schemes]


def quantized(scheme: str, **sizes) -> Tiny:
    model = tiny(**sizes)
    for i, name in enumerate((UP, DOWN)):
        amax = 2.5 + i if fpk.parse_layer_scheme(scheme).static else None
        layer = QuantizedLinear.from_linear(model.get_submodule(name), scheme, name, amax)
        model.block[name.removeprefix("block.")] = layer
    return model


def same(a, b) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[n].dtype == theirs[n].dtype and torch.equal(bits(ours[n]), bits(theirs[n])) for n in ours
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]} {c[1]}")
def test_there_and_back(case, tmp_path):
    """200 x 320: partial blocks and groups on both sides."""
    family, scheme = case
    model = quantized(scheme, hidden=320, inner=200, bias=True)
    fpk.save_quantized(model, tmp_path / "out", family)
    back = tiny(hidden=320, inner=200, bias=True)
    for parameter in back.parameters():
        torch.nn.init.zeros_(parameter)
    report = fpk.load_quantized(back, tmp_path / "out")
    assert report.family == family and not report.notes and not report.accepted
    expected = str(model.block["up_proj"].scheme).replace("fp8_token:", "fp8_channel:")
    assert report.layers == {UP: expected, DOWN: expected}
    assert same(model, back)
    ids = torch.arange(16)
    assert torch.equal(model(ids), back(ids))


@pytest.mark.parametrize("family", SAYABLE)
def test_files_say_what_the_layers_are(family, tmp_path):
    """Decoded by the families' definition, without fpk."""
    scheme = "fp8_tensor:fp8_tensor_static"
    model = quantized(scheme)
    fpk.save_quantized(model, tmp_path / "out", family, config={"architectures": ["Tiny"]})
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for name in (UP, DOWN):
        assert torch.equal(decoded(stored, name), model.get_submodule(name).dequantize())
        assert stored[f"{name}.input_scale"].shape == ((1,) if family == "compressed-tensors" else ())
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["Tiny"] and config["quantization_config"]["quant_method"] == family
    assert "lm_head" in json.dumps(config["quantization_config"])
    assert (tmp_path / "out" / "hf_quant_config.json").exists() == (family == "modelopt")


@pytest.mark.parametrize("family", ["compressed-tensors", "quark", "modelopt"])
def test_layers_of_several_schemes(family, tmp_path):
    model = tiny()
    for name, scheme, amax in ((UP, "int8_channel:int8_tensor_static", 3.0), (DOWN, "fp8_channel", None)):
        layer = QuantizedLinear.from_linear(model.get_submodule(name), scheme, name, amax)
        model.block[name.removeprefix("block.")] = layer
    fpk.save_quantized(model, tmp_path / "out", family)
    back = tiny()
    report = fpk.load_quantized(back, tmp_path / "out")
    assert report.layers == {UP: "int8_channel:int8_tensor_static", DOWN: "fp8_channel:fp8_token"} and same(model, back)
    with pytest.raises(ValueError, match=r"fp8 cannot say|one scheme for all"):
        fpk.save_quantized(model, tmp_path / "other", "fp8")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("fixture", ["lc_FP8_llama", "q_int8", "mo_FP8_PER_CHANNEL_PER_TOKEN_CFG", "lc_W8A8_llama"])
@pytest.mark.parametrize("family", ["compressed-tensors", "quark"])
def test_an_exporters_model_goes_through_another_family(fixture, family, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = json.loads((FIXTURES / fixture / "config.json").read_text())
    del config["quantization_config"]
    config = transformers.AutoConfig.for_model(**config)
    model, back = (transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16) for _ in range(2))
    fpk.load_quantized(model, FIXTURES / fixture)
    fpk.save_quantized(model, tmp_path / "out", family, max_shard_bytes=100_000)
    fpk.load_quantized(back, tmp_path / "out")
    assert same(model, back)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_size"] == 128


def test_shards_and_their_index(tmp_path):
    model = quantized("fp8_channel")
    fpk.save_quantized(model, tmp_path / "out", max_shard_bytes=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert len(files) > 2 and files[0].startswith("model-00001-of-0000")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json",
        *files,
        "model.safetensors.index.json",
    ]
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / f).values()) for f in files]
    assert sum(sizes) == index["metadata"]["total_size"] and all(s <= 4000 or s == 96 * 64 for s in sizes)
    back = tiny()
    fpk.load_quantized(back, tmp_path / "out")
    assert same(model, back)
    with pytest.raises(ValueError, match="max_shard_bytes"):
        fpk.save_quantized(model, tmp_path / "b", max_shard_bytes=0)


def test_tied_and_shared_tensors_are_written_once(tmp_path):
    model = quantized("fp8_channel")
    model.lm_head.weight = model.embed.weight
    model.block["norm"].bias.data = model.block["norm"].weight.data  # another tensor, the same storage
    fpk.save_quantized(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert "embed.weight" in stored and "lm_head.weight" not in stored and "block.norm.bias" in stored
    back = tiny()
    back.lm_head.weight = back.embed.weight
    assert not fpk.load_quantized(back, tmp_path / "out").missing and same(model, back)


# ---- what is refused --------------------------------------------------------
def test_nothing_is_left_of_a_save_that_fails(tmp_path):
    model = quantized("fp8_channel")
    for build, words in (
        (lambda: fpk.save_quantized(tiny(), tmp_path / "a"), "expected QuantizedLinear layers, got none"),
        (lambda: fpk.save_quantized(model, tmp_path / "a", "gguf"), "expected one of .* 'gguf'"),
        (lambda: fpk.save_quantized(model, tmp_path / "a", "fp8"), rf"{UP}: fp8 cannot say fp8_channel:fp8_token"),
        (lambda: fpk.save_quantized(quantized("int8_channel"), tmp_path / "a", "modelopt"), "modelopt cannot say int8"),
        (lambda: fpk.save_quantized(model.to("meta"), tmp_path / "a"), "meta device"),
    ):
        with pytest.raises(ValueError, match=words):
            build()
    assert not list(tmp_path.iterdir())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_text("kept")
    with pytest.raises(ValueError, match="empty directory"):
        fpk.save_quantized(quantized("fp8_channel"), tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="empty directory"):
        fpk.save_quantized(quantized("fp8_channel"), tmp_path / "file")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "file", "mine"]


def test_files_have_the_users_permissions(tmp_path):
    (tmp_path / "out").mkdir()  # empty is well
    old = os.umask(0o027)
    try:
        fpk.save_quantized(quantized("fp8_channel"), tmp_path / "out")
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "out").iterdir()} == {0o640}


def test_fnuz_codes_are_converted_on_loading_and_refused_on_saving(tmp_path):
    """On gfx942 the same bytes mean half as much: values stay, scales double, -0 becomes 0."""
    path = fp8_tensor_checkpoint(tmp_path, tiny(), lambda t: t[f"{UP}.weight"].view(torch.uint8)[0].fill_(0x80))
    checkpoint = Checkpoint(path)
    layer = find_layers(checkpoint, dialect_of(checkpoint.quantization)).layers[UP]
    plain = read_layer(checkpoint, layer)
    with pretend("gfx942"):
        fnuz = read_layer(checkpoint, layer)
        kept = read_layer(checkpoint, layer, native=False)
        model = tiny()
        fpk.load_quantized(model, path)
        with pytest.raises(NotImplementedError, match=rf"{UP}\.weight: expected e4m3fn, int8 or packed"):
            fpk.save_quantized(model, tmp_path / "out", "fp8")
    assert fnuz.codes.dtype is torch.float8_e4m3fnuz and torch.equal(fnuz.scale, 2 * plain.scale)
    assert torch.equal(fnuz.codes.float() * fnuz.scale, plain.codes.float() * plain.scale)
    assert (fnuz.codes[0].float() == 0).all() and kept.codes.dtype is torch.float8_e4m3fn
    assert not (tmp_path / "out").exists()
