"""transformers' from_pretrained with fpk's config: the same model as quantize_ makes."""

from pathlib import Path

import pytest
import torch

import fpk
import fpk.op

transformers = pytest.importorskip("transformers")
FIXTURES = Path(__file__).parent / "fixtures"
IDS = torch.arange(16)[None]


@pytest.fixture(autouse=True)
def _references(monkeypatch):
    """Models run on the ops' references: the kernels have their own laws."""
    for op in fpk.OPS.values():
        op._memo.clear()
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    with torch.no_grad():
        yield
    for op in fpk.OPS.values():
        op._memo.clear()


@pytest.mark.parametrize("source", ("llama", "mixtral", "gptoss_bf16"))
def test_from_pretrained(source):
    from fpk.hf import FpkConfig

    def load(**more):
        return transformers.AutoModelForCausalLM.from_pretrained(FIXTURES / source, dtype=torch.bfloat16, **more).eval()

    model, plain = load(quantization_config=FpkConfig("fp8_channel", ignore=["*k_proj"])), load()
    report = fpk.quantize_(plain, "fp8_channel", ["*k_proj"])
    assert [r.name for r in model.fpk_report.changed] == [r.name for r in report.changed]
    assert any("experts" in r.name for r in report.changed) == (source != "llama")
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert model.config.quantization_config.scheme == "fp8_channel:fp8_token" and model.is_quantized


def test_what_it_refuses():
    from fpk.hf import FpkConfig, FpkQuantizer

    with pytest.raises(ValueError, match="expected dynamic activations"):
        FpkConfig("fp8_tensor:fp8_tensor_static")
    with pytest.raises(ValueError, match="scheme: expected one of"):
        FpkConfig("fp9")
    with pytest.raises(ValueError, match="expected an unquantized checkpoint"):
        FpkQuantizer(FpkConfig(), pre_quantized=True)
