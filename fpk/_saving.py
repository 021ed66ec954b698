"""`save_quantized`: a model's quantized layers as a checkpoint that other tools read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fpk._experts import QuantizedExperts, parts_of
from fpk.methods._dense import Dense
from fpk.methods._families import LayerSpec
from fpk.methods._writing import (
    SHARD_BYTES,
    ShardWriter,
    config_of,
    is_written,
    layer_tensors,
    new_directory,
    write_json,
)
from fpk.nn import QuantizedLinear


def save_quantized(
    model: nn.Module,
    directory: str | Path,
    family: str = "compressed-tensors",
    *,
    config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model with `QuantizedLinear` layers as safetensors and a config.json with its `quantization_config`.

    `load_quantized` gives the same codes and scales back, bit for bit. The directory appears when everything is
    written, or not at all.

    Args:
        model: with at least one quantized layer; experts are written one by one ("experts.3.gate_proj.weight").
            Scales of the KV cache are not part of it and not written.
        directory: new, or empty.
        family: "compressed-tensors" (every scheme but MXFP6 E3M2), "fp8" (one scheme for all layers: per tensor or
            blocks of 128), "modelopt" or "quark".
        config: the rest of config.json; None takes `model.config` of a transformers model.
        max_shard_bytes: more than that is written into several files with an index.

    Raises:
        ValueError: a layer's scheme that the family cannot express, a model without quantized layers or without data,
            or a directory that is not empty.
        NotImplementedError: codes of another FP8 type than e4m3fn.
    """
    layers = {n: m for n, m in model.named_modules() if n and isinstance(m, QuantizedLinear)}
    experts = {n: m for n, m in model.named_modules() if n and isinstance(m, QuantizedExperts)}
    if not layers and not experts:
        raise ValueError("save_quantized.model: expected QuantizedLinear layers, got none (see fpk.quantize_)")
    specs = {name: _spec(layer.weight_scheme, layer.activation_scheme) for name, layer in layers.items()}
    parts = {name: part for n, m in experts.items() for name, part in parts_of(n, m).items()}
    specs |= {name: _spec(part.scheme.name, part.activation) for name, part in parts.items()}
    others = [n for n, m in model.named_modules() if n and isinstance(m, nn.Linear)]
    described = config_of(family, specs, others)
    written = dict(config) if config is not None else _config(model)
    written["quantization_config"] = described.pop("quantization_config")
    with new_directory(directory) as made:
        shards = ShardWriter(made, max_shard_bytes)
        for name, tensor in _tensors(model, layers, parts, list(experts), specs, family).items():
            if tensor.is_meta:
                raise ValueError(f"{name}: expected a tensor with data, got one on the meta device")
            shards.add(name, tensor)
        shards.close()
        write_json(made / "config.json", written)
        for file, content in described.items():
            write_json(made / file, content)


def _spec(weight: str, activation: str | None) -> LayerSpec:
    return LayerSpec(weight.removesuffix("token") + "channel" if weight.endswith("_token") else weight, activation)


def _tensors(
    model: nn.Module, layers: Mapping[str, QuantizedLinear], parts: Mapping[str, Dense], experts: list[str],
    specs: Mapping[str, LayerSpec], family: str,
) -> dict[str, Tensor]:  # fmt: skip
    """Everything that is written, by name; tied tensors once."""
    made: dict[str, Tensor] = {}
    for name, layer in layers.items():
        _expect_written(name, layer.weight)
        made |= layer_tensors(
            family, name, specs[name], layer.weight, layer.weight_scale, layer.input_scale, layer.weight_global_scale
        )
        if layer.bias is not None:
            made[f"{name}.bias"] = layer.bias
    for name, part in parts.items():
        _expect_written(name, part.codes)
        made |= layer_tensors(
            family, name, specs[name], part.codes, part.scale, part.input_scale, part.global_scale
        )  # fmt: skip
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        owner, _, last = name.rpartition(".")
        of_layer = owner in layers or (owner in experts and not last.endswith("_bias"))
        if not of_layer and id(tensor) not in seen:
            seen.add(id(tensor))
            made[name] = tensor.detach()
    return made


def _expect_written(name: str, codes: Tensor) -> None:
    if not is_written(codes.dtype):
        raise NotImplementedError(f"{name}.weight: expected e4m3fn, int8 or packed codes to write, got {codes.dtype}")


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    made: dict[str, Any] = json.loads(config.to_json_string())  # type: ignore[union-attr]
    return {k: v for k, v in made.items() if k not in ("quantization_config", "compression_config")}
