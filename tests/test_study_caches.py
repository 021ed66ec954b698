"""KV-cache formats in a study: what attention reads is what the cache holds, and models are left as they were."""

import pytest
import torch

from fpk.check import assert_close
from fpk.formats import decode, encode
from fpk.study.caches import CACHES, PREFIX, quantized_cache, through_cache
from fpk.study.measure import perplexity, run_study
from fpk.study.model import Subject
from fpk.study.text import Text

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def subject(device):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    return Subject("small", model, lambda text: [ord(c) % 96 for c in text], "0")


@pytest.fixture(scope="module")
def text(device):
    tokens = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1)).to(device)
    return Text("random", tokens, "0")


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_and_values_come_back_rounded(kind, dtype, device):
    fmt, by_token = CACHES[kind]
    rows = [torch.randn(37, 3, n, generator=torch.Generator().manual_seed(n)).to(dtype).to(device) for n in (16, 24)]
    for x, y in zip(rows, through_cache(rows[0], rows[1], kind), strict=True):
        scale = torch.ones((), device=device)
        if by_token:
            scale = (x.float().abs().amax(-1, keepdim=True) / torch.tensor(fmt.qmax, device=device)).clamp(min=1e-6)
        expected = decode(encode(x.float() / scale, fmt), fmt) * scale
        assert_close(y, expected.to(dtype), 0.0)


@pytest.mark.parametrize("kind", CACHES)
def test_attention_reads_the_cache(kind, subject, text, monkeypatch):
    plain = perplexity(subject.model, text.tokens)
    with quantized_cache(subject.model, kind):
        rounded = perplexity(subject.model, text.tokens)
    assert rounded != plain and abs(rounded / plain - 1) < 0.05
    assert perplexity(subject.model, text.tokens) == plain
    monkeypatch.setattr("fpk.study.caches.through_cache", lambda key, value, kind: (key, value))
    with quantized_cache(subject.model, kind):
        assert perplexity(subject.model, text.tokens) == pytest.approx(plain, rel=1e-6)


def test_other_models_are_not_touched(subject, text):
    other = transformers.LlamaForCausalLM(subject.model.config).to(subject.device).eval()
    plain = perplexity(other, text.tokens)
    with quantized_cache(subject.model, "fp8_e4m3"):
        assert perplexity(other, text.tokens) == plain


def test_rows_of_a_study(subject, text):
    study = run_study(subject, [text], schemes=[], caches=["fp8_e4m3", "int8_per_token_head"])
    table = study.summary().set_index("scheme")
    assert list(table.index) == ["none", PREFIX + "fp8_e4m3", PREFIX + "int8_per_token_head"]
    assert (table["perplexity[random]"] > 1).all()
    assert abs(table.loc[PREFIX + "int8_per_token_head", "delta_pct[random]"]) < 1


def test_unknown_formats_and_models_are_refused(subject):
    with (
        pytest.raises(ValueError, match=r"cache: expected one of fp8_e4m3, .* got 'fp4'"),
        quantized_cache(subject.model, "fp4"),
    ):
        pass
    with (
        pytest.raises(NotImplementedError, match="expected attention by transformers' functions"),
        quantized_cache(torch.nn.Linear(2, 2), "fp8_e4m3"),
    ):
        pass
