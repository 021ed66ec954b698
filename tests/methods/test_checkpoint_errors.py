"""Checkpoints that cannot be loaded: what is said, and that the model stays as it was."""

import json

import pytest
import torch
from checkpoint_kit import fp8_blocks, fp8_tensor_checkpoint, tiny, write_checkpoint

import fpk
from fpk.check import bits
from fpk.nn import QuantizedLinear

pytestmark = pytest.mark.usefixtures("references", "on_cpu")

UP = "block.up_proj"


def state(model):
    return {n: bits(t.detach().clone()) for n, t in model.state_dict().items()}


def refuse(path, error, words, model=None, **options):
    """Loading raises, and the model has its modules and values afterwards."""
    model = tiny() if model is None else model
    before, modules = state(model), dict(model.named_modules())
    with pytest.raises(error, match=words):
        fpk.load_quantized(model, path, **options)
    assert dict(model.named_modules()) == modules
    after = state(model)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)


def poke(index, value):
    def change(tensors):
        tensors[f"{UP}.weight"].view(torch.uint8).view(-1)[index] = value

    return change


def put(name, value):
    return lambda tensors: tensors.__setitem__(name, value)


def drop(name):
    return lambda tensors: tensors.pop(name)


BROKEN = {
    "no scale": (drop(f"{UP}.weight_scale"), rf"{UP}\.weight: F8_E4M3 without a scale"),
    "no codes": (drop(f"{UP}.weight"), rf"{UP}\.weight_scale: expected {UP}\.weight beside it"),
    "floats with a scale": (put(f"{UP}.weight", torch.ones(96, 64)), rf"{UP}\.weight: expected codes .* got F32"),
    "two scales": (put(f"{UP}.weight_scale_inv", torch.ones(())), rf"{UP}\.weight_scale.* is the same thing"),
    "NaN scale": (put(f"{UP}.weight_scale", torch.tensor(float("nan"))), rf"{UP}\.weight_scale: .*finite.* nan"),
    "Inf scale": (put(f"{UP}.weight_scale", torch.tensor(float("inf"))), rf"{UP}\.weight_scale: .*finite.* inf"),
    "zero scale": (put(f"{UP}.weight_scale", torch.tensor(0.0)), rf"{UP}\.weight_scale: .*positive.* 0\.0"),
    "negative scale": (put(f"{UP}.weight_scale", torch.tensor(-1.0)), rf"{UP}\.weight_scale: .*positive.* -1\.0"),
    "scale of another shape": (put(f"{UP}.weight_scale", torch.ones(96)), rf"{UP}\.weight_scale: expected .*\[96\]"),
    "scale of another dtype": (
        put(f"{UP}.weight_scale", torch.ones((), dtype=torch.int32)), rf"{UP}\.weight_scale: expected F32 .* got I32"
    ),
    "other codes": (put(f"{UP}.weight", torch.ones(96, 64, dtype=torch.int8)), rf"{UP}\.weight: expected F8_.* got I8"),
    "another width": (
        put(f"{UP}.weight", torch.ones(96, 32).to(torch.float8_e4m3fn)), rf"{UP}\.weight: expected \(96, 64\) .* 32\)"
    ),
    "NaN code": (poke(77, 0x7F), rf"{UP}\.weight: expected finite codes, 1 of 6144 are NaN"),
    "negative NaN code": (poke(6143, 0xFF), rf"{UP}\.weight: expected finite codes, 1 of 6144"),
    "bias that is none": (put(f"{UP}.bias", torch.ones(96)), rf"{UP}\.bias: expected no bias"),
    "missing plain": (drop("block.norm.weight"), r"missing: block\.norm\.weight \(strict"),
    "missing layer": (
        lambda t: [t.pop(n) for n in list(t) if n.startswith(UP)], rf"missing: {UP}\.weight \(strict"
    ),
    "unused plain": (put("other.weight", torch.ones(3)), r"unused: other\.weight \(strict"),
    "unused layer": (
        lambda t: t.update({"other.weight": t[f"{UP}.weight"].clone(), "other.weight_scale": torch.ones(())}),
        r"unused: other\.weight, other\.weight_scale \(",
    ),
    "plain of another shape": (put("block.norm.weight", torch.ones(63)), r"block\.norm\.weight: expected \(64,\), got"),
    "plain of integers": (
        put("block.norm.weight", torch.ones(64, dtype=torch.int64)), r"block\.norm\.weight: expected bfloat16, got I64"
    ),
    "embedding in codes": (
        put("embed.weight", torch.ones(16, 64).to(torch.float8_e4m3fn)), r"embed\.weight: F8_E4M3 without a scale"
    ),
    "not a linear layer": (
        lambda t: t.update({"block.norm.weight": t[f"{UP}.weight"].clone(), "block.norm.weight_scale": torch.ones(())}),
        r"block\.norm\.weight: expected a linear layer block\.norm, got LayerNorm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_checkpoint_changes_nothing(case, tmp_path):
    change, words = BROKEN[case]
    refuse(fp8_tensor_checkpoint(tmp_path, tiny(), change), ValueError, words)


@pytest.mark.parametrize("where", ["middle", "header", "last byte"])
def test_a_cut_file_changes_nothing(where, tmp_path):
    file = fp8_tensor_checkpoint(tmp_path, tiny()) / "model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[: {"middle": len(raw) // 2, "header": 100, "last byte": len(raw) - 1}[where]])
    refuse(tmp_path, ValueError, r"model\.safetensors")


def test_not_strict_reports(tmp_path):
    def change(tensors):
        tensors["other.weight"] = tensors.pop("block.norm.weight")

    model = tiny()
    path = fp8_tensor_checkpoint(tmp_path, tiny(), change)
    report = fpk.load_quantized(model, path, strict=False)
    assert report.missing == ["block.norm.weight"] and report.unused == ["other.weight"]
    assert "missing: block.norm.weight" in str(report) and "2 fp8_tensor:fp8_token" in str(report)


def test_static_scales(tmp_path):
    def with_scales(tensors):
        for name in (UP, "block.down_proj"):
            tensors[f"{name}.{'act_scale' if name == UP else 'activation_scale'}"] = torch.tensor([0.5])

    static = {"activation_scheme": "static"}
    path = fp8_tensor_checkpoint(tmp_path / "no", tiny(), **static)
    refuse(path, ValueError, r"_proj\.weight: expected block\.(up|down)_proj\.input_scale for fp8_tensor:fp8_t")
    model = tiny()
    report = fpk.load_quantized(model, fp8_tensor_checkpoint(tmp_path / "yes", tiny(), with_scales, **static))
    assert set(report.layers.values()) == {"fp8_tensor:fp8_tensor_static"}
    assert model.block["up_proj"].input_scale.item() == 0.5
    bad = {"nan": float("nan"), "zero": 0.0}
    for name, value in bad.items():
        path = fp8_tensor_checkpoint(
            tmp_path / name, tiny(), lambda t, v=value: (with_scales(t), t[f"{UP}.act_scale"].fill_(v)), **static
        )
        refuse(path, ValueError, rf"{UP}\.act_scale: expected finite positive")


def test_tensors_decide_and_disagreement_is_a_note(tmp_path):
    """A layer that the list skips but is FP8, and one that it does not skip but is not."""

    def plain(tensors):
        tensors["block.down_proj.weight"] = tiny().block["down_proj"].weight
        del tensors["block.down_proj.weight_scale"]

    model = tiny()
    report = fpk.load_quantized(model, fp8_tensor_checkpoint(tmp_path, tiny(), plain, ignored_layers=[UP, "typo"]))
    assert report.layers == {UP: "fp8_tensor:fp8_token"} and "block.down_proj.weight" in report.plain
    assert f"{UP}: skipped by the config, but its weight is F8_E4M3" in report.notes
    assert "block.down_proj: fp8_tensor:fp8_token by the config, but its weight is BF16" in report.notes
    assert "skip entry 'typo' matches no layer" in report.notes and len(report.notes) == 3


def test_loading_again_replaces(tmp_path):
    model = tiny()
    fpk.load_quantized(model, fp8_tensor_checkpoint(tmp_path / "a", tiny()))
    other = tiny()
    other.block["up_proj"].weight.data.mul_(3)
    path = fp8_tensor_checkpoint(tmp_path / "b", other)
    fpk.load_quantized(model, path)
    again = tiny()
    fpk.load_quantized(again, path)
    assert torch.equal(model.block["up_proj"].dequantize(), again.block["up_proj"].dequantize())


# ---- what has no layer yet -----------------------------------------------------------------------------------------
U8 = torch.uint8
CT_GROUP = {"targets": ["Linear"], "input_activations": None}


def ct(form, **weights):
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False} | weights
    return {"quant_method": "compressed-tensors", "format": form,
            "config_groups": {"group_0": CT_GROUP | {"weights": weights}}}  # fmt: skip


def quark(dtype, group, **spec):
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": group, "is_dynamic": False, "scale_format": "e8m0"}
    return {"quant_method": "quark", "export": {}, "global_quant_config": {"weight": weight | spec}}


PACKED = {"weight": torch.zeros(96, 32, dtype=U8), "weight_scale": torch.zeros(96, 2, dtype=U8)}
CT_PACKED = {"weight_packed": PACKED["weight"], "weight_scale": PACKED["weight_scale"]}
NVFP4 = {"weight": PACKED["weight"], "weight_scale": torch.ones(96, 4).to(torch.float8_e4m3fn),
         "weight_scale_2": torch.ones(()), "input_scale": torch.ones(())}  # fmt: skip
MXFP8 = {"weight": torch.ones(96, 64).to(torch.float8_e4m3fn), "weight_scale": PACKED["weight_scale"]}
FP8 = {"weight": torch.ones(96, 64).to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}
INT8 = {"weight": torch.ones(96, 64, dtype=torch.int8), "weight_scale": torch.ones(96)}
REFUSED = {
    "compressed-tensors MXFP4": (CT_PACKED, ct("mxfp4-pack-quantized"), r"up_proj\.weight_packed: mxfp4-pack"),
    "compressed-tensors NVFP4": (CT_PACKED, ct("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
    "compressed-tensors MXFP8": (MXFP8, ct("mxfp8-quantized", num_bits=8), r"up_proj\.weight: mxfp8-quantized"),
    "compressed-tensors int4": (CT_PACKED, ct("pack-quantized", type="int"), "pack-quantized"),
    "compressed-tensors asymmetric": (
        INT8, ct("int-quantized", num_bits=8, type="int", symmetric=False, strategy="channel"), "weights of int 8"
    ),
    "Quark int4": (PACKED, quark("int4", 128), "weights of int4"),
    "ModelOpt AWQ": (NVFP4, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, r"up_proj\.weight: NVFP4_AWQ"),
    "SmoothQuant": (
        INT8 | {"pre_quant_scale": torch.ones(64), "input_scale": torch.ones(())},
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"}, "up_proj.pre_quant_scale: .*pre_quant_scale",
    ),
    "bounded activations": (
        FP8 | {"weight_scale": torch.ones(96, 1)}, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "fbgemm_fp8 with activation_scale_ub",
    ),
    "zero points of weights": (
        INT8 | {"weight_zero_point": torch.full((96,), 3, dtype=torch.int8)},
        quark("int8", None, qscheme="per_channel"),
        r"up_proj\.weight_zero_point: .*zero points",
    ),
    "other method": (FP8, {"quant_method": "gptq"}, "quant_method: expected one of .*'gptq'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_layer_is_named(case, tmp_path):
    tensors, config, words = REFUSED[case]
    stored = {n: t for n, t in tiny().state_dict().items() if not n.startswith(UP)}
    stored |= {f"{UP}.{n}": t for n, t in tensors.items()}
    refuse(write_checkpoint(tmp_path, stored, config), NotImplementedError, words)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
WRONG = {  # tensors of a layer, config, error
    "second scale": ({n: t for n, t in NVFP4.items() if n != "weight_scale_2"}, MODELOPT, "up_proj.weight_scale_2 for"),
    "input scale": ({n: t for n, t in NVFP4.items() if n != "input_scale"}, MODELOPT, "up_proj.input_scale for"),
    "negative": (NVFP4 | {"weight_scale": torch.full((96, 4), -1.0).to(torch.float8_e4m3fn)}, MODELOPT,
                 "weight_scale: expected finite positive scales, 384 of 384 are not"),
    "NaN": (PACKED | {"weight_scale": torch.full((96, 2), 255, dtype=U8)}, {"quant_method": "mxfp4"},
            "weight_scale: expected finite positive scales, 192"),
    "scale shape": (PACKED | {"weight_scale": torch.zeros(96, 4, dtype=U8)}, {"quant_method": "mxfp4"},
                    r"weight_scale: expected \[96, 2\] for mxfp4, got \[96, 4\]"),
    "scale dtype": (PACKED | {"weight_scale": torch.ones(96, 2)}, {"quant_method": "mxfp4"}, "expected U8 or F8_E8M0"),
    "code dtype": (MXFP8 | {"weight": torch.zeros(96, 64, dtype=U8)}, {"quant_method": "mxfp8"},
                   "expected F8_E4M3 for mxfp8_e4m3, got U8"),
    "size": (PACKED | {"weight": torch.zeros(96, 48, dtype=U8), "weight_scale": torch.zeros(96, 3, dtype=U8)},
             {"quant_method": "mxfp4"}, r"up_proj\.weight: expected \(96, 64\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_block_scaled_layers_that_are_not_right(case, tmp_path):
    tensors, config, words = WRONG[case]
    stored = {n: t for n, t in tiny().state_dict().items() if not n.startswith(UP)}
    stored |= {f"{UP}.{n}": t for n, t in tensors.items()}
    refuse(write_checkpoint(tmp_path, stored, config), ValueError, words)


def test_experts_have_no_layer(tmp_path):
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    experts = {f"block.experts.0.w1.{n}": t for n, t in FP8.items()}
    path = write_checkpoint(tmp_path / "a", tiny().state_dict() | experts, config)
    refuse(path, NotImplementedError, r"experts\.0\.w1\.weight: fp8_tensor:fp8_token: experts")
    gpt_oss = {"block.experts.gate_up_proj_blocks": torch.zeros(2, 8, 1, 16, dtype=U8)}
    path = write_checkpoint(tmp_path / "b", tiny().state_dict() | gpt_oss, {"quant_method": "mxfp4"})
    refuse(path, NotImplementedError, r"gate_up_proj_blocks: stacked mxfp4 experts")
    model = tiny()
    model.experts = torch.nn.ParameterDict({"gate_up_proj": torch.nn.Parameter(torch.ones(2, 8, 4).bfloat16())})
    stacked = tiny().state_dict() | {"experts.gate_up_proj": torch.ones(2, 8, 4).to(torch.float8_e4m3fn)}
    path = write_checkpoint(tmp_path / "c", stacked, config)
    refuse(path, NotImplementedError, r"experts\.gate_up_proj: stacked weights of F8_E4M3", model)
    stacked = tiny().state_dict() | {
        "experts.weight": stacked["experts.gate_up_proj"],
        "experts.weight_scale": torch.ones(2),
    }
    path = write_checkpoint(tmp_path / "d", stacked, config)
    refuse(path, NotImplementedError, r"experts\.weight: fp8_tensor:fp8_token: ")


def test_experts_that_are_linear_layers_load(tmp_path):
    model = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Linear(64, 96, bias=False)])})
    tensors = {f"experts.0.{n}": t for n, t in FP8.items()}
    report = fpk.load_quantized(model, write_checkpoint(tmp_path, tensors, {"quant_method": "fp8"}))
    assert report.layers == {"experts.0": "fp8_tensor:fp8_token"} and isinstance(model["experts"][0], QuantizedLinear)


def test_not_quantized(tmp_path):
    refuse(write_checkpoint(tmp_path, tiny().state_dict(), None), ValueError, "is it quantized")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {}}))
    refuse(tmp_path, ValueError, "quant_method: expected a name, got None")


def test_codes_the_config_has_no_word_for(tmp_path):
    """A layer beside a mixed-precision list has codes: that is an error, not a guess."""

    def path(layers):
        tensors = tiny().state_dict() | {f"{UP}.{n}": t for n, t in FP8.items()}
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        return write_checkpoint(tmp_path, tensors, config)

    refuse(path({"other": {"quant_algo": "FP8"}}), ValueError, rf"{UP}\.weight: F8_E4M3, and the config does not say")
    refuse(path({UP: {"quant_algo": "NVFP4"}}), ValueError, rf"{UP}\.weight: expected U8 or I8 for nvfp4, got F8_E4M3")
    refuse(path({UP: {"quant_algo": "NVFP4_SVD"}}), NotImplementedError, "NVFP4_SVD")


def test_e8m0_block_scale_of_nan(tmp_path):
    codes, scale = fp8_blocks(torch.ones(96, 64))
    exponents = torch.full(scale.shape, 255, dtype=U8).view(torch.float8_e8m0fnu)
    tensors = tiny().state_dict() | {f"{UP}.weight": codes, f"{UP}.weight_scale_inv": exponents}
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    refuse(
        write_checkpoint(tmp_path, tensors, config), ValueError, rf"{UP}\.weight_scale_inv: expected finite positive"
    )
