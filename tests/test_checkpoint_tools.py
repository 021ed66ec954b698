"""Checkpoints and other tools: what transformers and compressed-tensors make of our files, and the commands."""

import json
from pathlib import Path

import pytest
import torch
import typer.testing
from safetensors.torch import load_file

import fpk
import fpk.op
from fpk import cli
from fpk.check import rel_error
from fpk.checkpoint import empty_parameters
from fpk.nn import QuantizedLinear

FIXTURES = Path(__file__).parent / "fixtures"
RUNNER = typer.testing.CliRunner()


@pytest.fixture(autouse=True)
def references(monkeypatch):
    """Ops on CPU tensors run their references."""
    for op in fpk.OPS.values():
        op._memo.clear()
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    yield
    for op in fpk.OPS.values():
        op._memo.clear()


def llama(directory=FIXTURES / "llama"):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


def linears(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLinear)}


# ---- others read ours -------------------------------------------------------
def test_transformers_decodes_our_blocks(tmp_path):
    """An independent reader of the family fp8."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # it reads FP8 only beside it
    model = llama()
    fpk.quantize_(model, "fp8_block128", ignore=["*.k_proj", "*.v_proj"])  # transformers refuses partial blocks
    fpk.save_quantized(model, tmp_path / "out", family="fp8")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", quantization_config=transformers.FineGrainedFP8Config(dequantize=True), dtype=torch.bfloat16
    )
    assert len(linears(model)) == 10
    for name, layer in linears(model).items():
        assert torch.equal(theirs.get_submodule(name).weight, layer.dequantize(torch.bfloat16)), name


CT_SCHEMES = [
    "fp8_channel", "fp8_tensor", "fp8_channel:none", "fp8_block128", "int8_channel", "int8_tensor",
    "int8_channel:int8_token_asymmetric", "mxfp4:none", "mxfp4:mxfp4", "mxfp8_e4m3", "nvfp4:none", "nvfp4:nvfp4",
]  # fmt: skip


@pytest.mark.parametrize("scheme", CT_SCHEMES)
def test_compressed_tensors_decodes_ours(scheme, tmp_path):
    """Its config classes take what we write, and its decompression gives our weights."""
    compressed_tensors = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    model = llama()
    fpk.quantize_(model, scheme)
    fpk.save_quantized(model, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = compressed_tensors.QuantizationConfig.model_validate(written)
    (group,) = config.config_groups.values()
    stored = load_file(tmp_path / "out" / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(group.format)
    for name, layer in linears(model).items():
        parts = {k.removeprefix(f"{name}."): t for k, t in stored.items() if k.startswith(f"{name}.")}
        weight = decompress(compressor, parts, group)
        assert torch.equal(weight.float(), layer.dequantize(weight.dtype).float()), name


def decompress(compressor, parts, group):
    found = compressor.decompress(dict(parts), group)
    return found["weight"] if isinstance(found, dict) else found


@pytest.mark.parametrize(
    "fixture", ["lc_FP8_DYNAMIC", "lc_FP8_llama", "lc_W8A8_llama", "lc_MXFP4_llama", "lc_NVFP4_llama"]
)
def test_compressed_tensors_decodes_its_own_as_we_do(fixture):
    compressed_tensors = pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    from compressed_tensors.compressors import BaseCompressor

    config = json.loads((FIXTURES / fixture / "config.json").read_text())
    (group,) = compressed_tensors.QuantizationConfig.model_validate(
        config.pop("quantization_config")
    ).config_groups.values()
    with empty_parameters():
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    fpk.load_quantized(model, FIXTURES / fixture)
    stored = load_file(FIXTURES / fixture / "model.safetensors")
    compressor = BaseCompressor.get_value_from_registry(group.format)
    for name, layer in linears(model).items():
        parts = {k.removeprefix(f"{name}."): t for k, t in stored.items() if k.startswith(f"{name}.")}
        weight = decompress(compressor, parts, group)
        assert torch.equal(weight.float(), layer.dequantize(weight.dtype).float()), name


# ---- commands ---------------------------------------------------------------
def run(*arguments):
    return RUNNER.invoke(cli.app, [str(a) for a in arguments])


def test_inspect_tells_the_family_and_layers():
    done = run("inspect", FIXTURES / "q_fp8", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["family"] == "quark" and len(found["layers"]) == 14 and len(found["kv_scales"]) == 4
    assert found["layers"][0] == {
        "name": "model.layers.0.mlp.down_proj", "scheme": "fp8_tensor:fp8_tensor_static", "dtype": "F8_E4M3",
        "shape": [128, 256], "bytes": 128 * 256 + 4, "loads": True,
    }  # fmt: skip
    size = sum(t.nbytes for t in load_file(FIXTURES / "q_fp8" / "model.safetensors").values())
    assert found["bytes_total"] == size == sum(t["bytes"] for t in found["tensors"])
    text = run("inspect", FIXTURES / "q_fp8").stdout
    assert "model.layers.1.self_attn.o_proj" in text and "128 x 256" in text and "lm_head" not in text
    assert "lm_head.weight" in run("inspect", FIXTURES / "q_fp8", "--tensors").stdout
    assert "unquantized" in run("inspect", FIXTURES / "llama").stdout
    assert "unknown" in run("inspect", FIXTURES / "llama" / "model.safetensors").stdout


def test_inspect_refuses_in_one_line(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"12345678{}")
    done = run("inspect", tmp_path)
    assert done.exit_code == 1 and "a.safetensors: expected a safetensors file" in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


@pytest.mark.parametrize("family", ["compressed-tensors", "modelopt", "quark"])
def test_quantize_and_dequantize(family, tmp_path):
    """The round trip through both commands is the model with its weights rounded."""
    (tmp_path / "in").mkdir()
    for path in (FIXTURES / "llama").iterdir():
        (tmp_path / "in" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    done = run("quantize", tmp_path / "in", tmp_path / "q", "--scheme", "fp8_channel", "--family", family,
               "--ignore", "*.o_proj")  # fmt: skip
    assert done.exit_code == 0 and "12 layers as fp8_channel:fp8_token" in done.stdout, done.output
    assert (tmp_path / "q" / "tokenizer.json").is_file()
    done = run("dequantize", tmp_path / "q", tmp_path / "d", "--max-shard", "0.0002")
    assert done.exit_code == 0, done.output
    assert "quantization_config" not in json.loads((tmp_path / "d" / "config.json").read_text())
    assert not (tmp_path / "d" / "hf_quant_config.json").exists() and (tmp_path / "d" / "tokenizer.json").is_file()
    assert len(list((tmp_path / "d").glob("model-*.safetensors"))) > 2
    expected, back = llama(), llama(tmp_path / "d")
    fpk.quantize_(expected, "fp8_channel", ignore=["*.o_proj"])
    for name, layer in linears(expected).items():
        assert torch.equal(back.get_submodule(name).weight, layer.dequantize(torch.bfloat16))
    ids = torch.arange(30)[None]
    with torch.inference_mode():
        assert 0.01 < rel_error(back(ids).logits, llama()(ids).logits) < 0.08


def test_commands_refuse_before_they_work(tmp_path):
    done = run("quantize", FIXTURES / "llama", tmp_path / "q", "--scheme", "int8_channel", "--family", "fp8")
    assert done.exit_code == 1 and "fp8 cannot say int8_channel:int8_token" in done.stderr
    done = run("quantize", FIXTURES / "llama", tmp_path / "q", "--scheme", "fp9")
    assert done.exit_code == 1 and "fp9" in done.stderr
    done = run("quantize", tmp_path, tmp_path / "q", "--scheme", "fp8_channel")
    assert done.exit_code == 1 and "config.json" in done.stderr
    done = run("dequantize", FIXTURES / "llama", tmp_path / "q")
    assert done.exit_code == 1 and "no quantization_config" in done.stderr
    done = run("dequantize", FIXTURES / "q_fp8", tmp_path / "q", "--dtype", "int8")
    assert done.exit_code == 1 and "--dtype" in done.stderr
    assert not list(tmp_path.iterdir())
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "mine").touch()
    done = run("dequantize", FIXTURES / "q_fp8", tmp_path / "q")
    assert done.exit_code == 1 and "empty directory" in done.stderr and [p.name for p in tmp_path.iterdir()] == ["q"]


def test_stacked_experts_are_seen_and_dequantized(tmp_path):
    """gpt-oss: the model that transformers makes of it is the one that was quantized."""
    transformers = pytest.importorskip("transformers")
    found = RUNNER.invoke(cli.app, ["inspect", str(FIXTURES / "gptoss_mx"), "--json"])
    layers = json.loads(found.stdout)["layers"]
    assert [layer["name"].rsplit(".", 1)[1] for layer in layers] == ["down_proj", "gate_up_proj"]
    assert all(layer["scheme"] == "mxfp4:none" and layer["loads"] for layer in layers)
    done = RUNNER.invoke(cli.app, ["dequantize", str(FIXTURES / "gptoss_mx"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    ids, models = torch.arange(32).view(2, 16), (tmp_path / "out", FIXTURES / "gptoss_bf16")
    with torch.no_grad():
        ours, source = (
            transformers.AutoModelForCausalLM.from_pretrained(m, dtype=torch.float32)(ids).logits for m in models
        )
    assert 0 < rel_error(ours, source) < 0.05


def test_quantize_tells_what_is_wrong_before_it_reads_the_model(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "AutoModelForCausalLM", None)  # whoever reads a model fails otherwise
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "plain").touch()
    llama, out = str(FIXTURES / "llama"), str(tmp_path / "out")
    for arguments, told in (
        ([llama, str(tmp_path / "full")], "expected a new or an empty directory"),
        ([llama, str(tmp_path / "plain" / "out")], "expected a directory that can be written to"),
        ([str(FIXTURES / "lc_FP8_llama"), out], "expected an unquantized model, config.json: quantization_config"),
        ([llama, out, "--max-shard", "nan"], "--max-shard: expected gigabytes, got nan"),
        ([llama, out, "--max-shard", "0"], "--max-shard: expected gigabytes, got 0"),
        ([llama, out, "--scheme", "fp8_channel:fp8_tensor_static"], "--scheme: expected dynamic activations"),
    ):
        done = RUNNER.invoke(cli.app, ["quantize", "--scheme", "fp8_channel", *arguments])
        assert done.exit_code == 1 and told in " ".join(done.stderr.split()), (arguments, done.output)
    assert not (tmp_path / "out").exists()
