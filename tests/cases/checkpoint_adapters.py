"""Cases about files: each writes a small checkpoint with the case's tensors and lets fpk read it."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from adapters import adapter
from safetensors.torch import save_file
from torch import Tensor, nn

import fpk
from fpk.methods._dense import find_layers
from fpk.methods._families import ROLES, dialect_of
from fpk.methods._stored_experts import take_experts
from fpk.methods.checkpoint import Checkpoint
from fpk.methods.parallel import shard_range

CT_NVFP4 = {
    "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "format": "nvfp4-pack-quantized", "targets": ["Linear"], "input_activations": None,
        "weights": {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group", "symmetric": True,
                    "dynamic": False},
    }},
}  # fmt: skip
MODELOPT_NVFP4 = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def written(directory: str, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, Path(directory, "model.safetensors"))
    Path(directory, "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return Path(directory)


def loaded(tensors: dict[str, Tensor], quantization: dict[str, Any], rows: int, cols: int) -> Tensor:
    """The weight, decoded, of a bf16 model's one layer `m.proj` after loading."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.ModuleDict({"m": nn.ModuleDict({"proj": nn.Linear(cols, rows, bias=False, device=device)})}).bfloat16()
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        fpk.load_quantized(model, written(directory, tensors, quantization))
    return model["m"]["proj"].dequantize()


def fp8(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn)


@adapter("B41")
def nvfp4_of_two_families(i):
    scale = fp8(i["block_scale"])
    theirs = {
        "ct": (CT_NVFP4, dict(weight_packed=i["packed"], weight_scale=scale, weight_global_scale=i["ct_global"])),
        "modelopt": (
            MODELOPT_NVFP4,
            dict(weight=i["packed"], weight_scale=scale, weight_scale_2=i["modelopt_scale_2"]),
        ),
    }
    return {
        family: loaded({f"m.proj.{n}": t for n, t in parts.items()}, config, *i["codes"].shape)
        for family, (config, parts) in theirs.items()
    }


@adapter("B47")
def nvfp4_with_a_global_scale_of_zero(i):
    parts = dict(
        weight_packed=torch.zeros(2, 16, dtype=torch.uint8), weight_scale=torch.ones(2, 2).to(torch.float8_e4m3fn),
        weight_global_scale=i["weight_global_scale"],
    )  # fmt: skip
    return loaded({f"m.proj.{n}": t for n, t in parts.items()}, CT_NVFP4, 2, 32)


@adapter("B76")
def scales_cut_with_the_weight(i):
    ranges = [shard_range(i["in_features"], i["group"], i["tp"], rank) for rank in range(i["tp"])]
    assert all(start % i["group"] == 0 for start, _ in ranges)
    return [i["scale"][:, start // i["group"] : -(-stop // i["group"])] for start, stop in ranges]


@adapter("B82")
def scale_inv_multiplies(i):
    """Per tensor and in blocks, under both names; fpk's layers have one name for it, the case asks for the file's."""
    names, values = [], []
    for name, block in i["items"]:
        last = name.rpartition(".")[2]
        assert ROLES[last] == "weight_scale"
        config = FP8 | ({"weight_block_size": list(block)} if block else {})
        scale = i["scale_inv"].reshape(1, 1) if block else i["scale_inv"]
        q = fp8(i["q"])
        values.append(loaded({"m.proj.weight": q, f"m.proj.{last}": scale}, config, *q.shape))
        names.append(name if block else name.replace("weight_scale_inv", "weight_scale"))
    assert all(torch.equal(v, values[0]) for v in values)
    return dict(names=names, deq=values[0])


@adapter("B84")
def codes_for_a_bf16_layer(i):
    return loaded({"m.proj.weight": fp8(i["q"]), "m.proj.weight_scale": i["weight_scale"]}, FP8, *i["q"].shape)


@adapter("B88")
def names_of_experts(i):
    """What fpk takes for its experts, of a checkpoint that also has a quantized head that no model asks for."""
    tensors = {}
    for module in [f"mlp.experts.0.{p}_proj" for p in ("gate", "up", "down")] + ["shared_head.head"]:
        tensors[f"{module}.weight"] = torch.ones(16, 16).to(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale"] = torch.tensor(0.5)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = Checkpoint(written(directory, tensors, FP8))
        assert checkpoint.quantization is not None
        dialect = dialect_of(checkpoint.quantization)
        experts = take_experts(find_layers(checkpoint, dialect), dialect.spec, lambda name: name == "mlp.experts")
    taken = {name for stored in experts.values() for name in stored.names}
    return [name for name in i["names"] if name in taken]


@adapter("B92")
def old_name_of_input_scales(i):
    """A static layer whose file says act_scale has that scale for its activations."""
    module, _, last = i["name"].rpartition(".")
    model = nn.ModuleDict({"m": nn.ModuleDict({"proj": nn.Linear(16, 16, bias=False)})}).bfloat16()
    tensors = {
        "m.proj.weight": torch.ones(16, 16).to(torch.float8_e4m3fn), "m.proj.weight_scale": torch.tensor(0.5),
        f"m.proj.{last}": torch.tensor(0.25),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        fpk.load_quantized(model, written(directory, tensors, FP8 | {"activation_scheme": "static"}))
    assert model["m"]["proj"].input_scale.item() == 0.25
    return f"{module}.{ROLES[last]}"
