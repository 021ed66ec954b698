"""Model directories, the cache of the default model, and what is said when one of them is not as it should be."""

import json
import shutil

import pytest
import torch

from fpk.study import model as models
from fpk.study.model import StudyError, cache_directory, check_directory, load_model
from fpk.study.text import load_text

transformers = pytest.importorskip("transformers")

CONFIG = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=64, hidden_size=32, intermediate_size=48,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128, rms_norm_eps=1e-5,
    tie_word_embeddings=True, dtype="float32",
)  # fmt: skip


def tiny_parts():
    """What `convert_gguf` returns, for a model of 2 layers and a vocabulary of 64."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(CONFIG))
    state = {n: p.detach().clone() for n, p in model.named_parameters()}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:64]
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return dict(CONFIG), state, tokenizer


@pytest.fixture(scope="module")
def whole_directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    models._keep(directory, *tiny_parts())
    return directory


@pytest.fixture
def directory(whole_directory, tmp_path):
    return shutil.copytree(whole_directory, tmp_path / "tiny")


def logits(subject):
    with torch.inference_mode():
        return subject.model(input_ids=torch.arange(16, device=subject.device)[None]).logits


def test_a_directory_is_read_as_transformers_reads_it(directory):
    subject = load_model(directory, device="cpu", dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(logits(subject), theirs(input_ids=torch.arange(16)[None]).logits)
    assert subject.name == "tiny" and len(subject.encode("ABBA")) == 4
    assert not any(p.requires_grad for p in subject.model.parameters())
    assert load_model(directory, device="cpu").dtype is torch.bfloat16


def test_a_cut_has_the_first_layers(directory):
    cut = load_model(directory, layers=1, device="cpu")
    assert len(cut.model.model.layers) == 1 and cut.model.config.num_hidden_layers == 1
    with pytest.raises(StudyError, match="from 1 to 2"):
        load_model(directory, layers=3, device="cpu")


def test_fingerprint_follows_the_weights(directory):
    before = load_model(directory, device="cpu").fingerprint
    from safetensors.torch import load_file, save_file

    state = load_file(directory / "model.safetensors")
    state["model.norm.weight"][0] += 1
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    assert load_model(directory, device="cpu").fingerprint != before


def _remove(name):
    return lambda d: (d / name).unlink()


def _cut_weights(d):
    data = (d / "model.safetensors").read_bytes()
    (d / "model.safetensors").write_bytes(data[: len(data) // 2])


def _quantized(d):
    config = CONFIG | {"quantization_config": {"quant_method": "fp8"}}
    (d / "config.json").write_text(json.dumps(config))


def _lacking(d):
    from safetensors.torch import load_file, save_file

    state = load_file(d / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, d / "model.safetensors", metadata={"format": "pt"})


def _misshapen(d):
    (d / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 40}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (shutil.rmtree, "expected a model directory, got nothing"),
        (_remove("config.json"), "config.json"),
        (_remove("model.safetensors"), "expected \\*.safetensors"),
        (_remove("tokenizer.json"), "tokenizer"),
        (_cut_weights, "cut short or damaged"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "cut short or damaged"),
        (lambda d: (d / "config.json").write_text("{"), "not JSON"),
        (lambda d: (d / "config.json").write_text('{"model_type": "nosuch"}'), "not a readable causal"),
        (_quantized, "already quantized \\(fp8\\)"),
        (_lacking, "1 tensors of the model are not in its files, first model.layers.1.mlp.up_proj"),
        (_misshapen, "tiny"),
    ],
)
def test_directories_that_cannot_be_studied(directory, damage, message):
    damage(directory)
    with pytest.raises(StudyError, match=message):
        load_model(directory, device="cpu")


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="got a file"):
        check_directory(tmp_path / "file")


# ---- the cache of the default model


@pytest.fixture
def tiny_default(monkeypatch, tmp_path):
    """The default model's file is a small stand-in; counts conversions."""
    import hashlib

    file = tmp_path / models.DEFAULT_FILE
    file.write_bytes(b"weights")
    conversions = []
    monkeypatch.setattr(models, "default_file", lambda: file)
    monkeypatch.setattr(models, "DEFAULT_SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setattr(models, "convert_gguf", lambda path, layers: conversions.append(path) or tiny_parts())
    return conversions


def test_the_conversion_is_cached_and_exact(tiny_default, tmp_path):
    cache = tmp_path / "cache"
    first = load_model(cache=cache, device="cpu", dtype=torch.float32)
    second = load_model(cache=cache, device="cpu", dtype=torch.float32)
    assert len(tiny_default) == 1
    assert torch.equal(logits(first), logits(second))
    assert first.fingerprint == second.fingerprint == models.DEFAULT_SHA256
    assert len(list(cache.iterdir())) == 1  # no scratch directory is left


@pytest.mark.parametrize("cache", ["/proc/no/such", None])
def test_without_a_place_to_write_the_model_is_built_in_memory(tiny_default, tmp_path, monkeypatch, cache):
    kept = load_model(cache=tmp_path / "cache", device="cpu", dtype=torch.float32)
    monkeypatch.setattr(models, "cache_directory", lambda: None)
    memory = load_model(cache=cache, device="cpu", dtype=torch.float32)
    assert len(tiny_default) == 2
    assert torch.equal(logits(kept), logits(memory))
    assert kept.encode("ABBA") == memory.encode("ABBA")


def test_a_damaged_cache_is_made_again(tiny_default, tmp_path):
    cache = tmp_path / "cache"
    expected = logits(load_model(cache=cache, device="cpu"))
    _cut_weights(next(cache.iterdir()))
    assert torch.equal(logits(load_model(cache=cache, device="cpu")), expected)
    assert len(tiny_default) == 2
    load_model(cache=cache, device="cpu")
    assert len(tiny_default) == 2


def test_cache_directory_without_home(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert str(cache_directory()) == "/some/where/fpk"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/of")
    assert str(cache_directory()) == "/home/of/.cache/fpk"
    monkeypatch.setattr("pathlib.Path.home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert cache_directory() is None


def test_text_of_a_model_with_a_short_context(directory):
    subject = load_model(directory, device="cpu")
    with pytest.raises(StudyError, match="at most 128"):
        load_text(subject, "pydoc", 1, 129)


def test_rotary_rows_are_put_back():
    """GGUF's order, written from its definition: rows 2i and 2i + 1 of a head are i and i + half of transformers'."""
    heads, size, columns = 3, 8, 5
    ours = torch.randn(heads * size, columns)
    theirs = torch.empty_like(ours)
    for head in range(heads):
        for i in range(size // 2):
            theirs[head * size + 2 * i] = ours[head * size + i]
            theirs[head * size + 2 * i + 1] = ours[head * size + i + size // 2]
    assert torch.equal(models._undo_rotary_order(theirs, heads), ours)
