"""Writing quantized checkpoints: the config and tensor forms of each family; files appear whole or not at all."""

import contextlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fpk.formats import scheme_of
from fpk.methods._families import MODELOPT, LayerSpec

SHARD_BYTES = 5 * 1000**3

WEIGHTS = {
    "compressed-tensors": ("fp8_tensor", "fp8_channel", "fp8_block128", "fp8_group128", "int8_tensor", "int8_channel",
                           "int8_group128", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "nvfp4"),
    "quark": ("fp8_tensor", "fp8_channel", "fp8_block128", "int8_tensor", "int8_channel", "mxfp4", "mxfp6_e2m3",
              "mxfp6_e3m2", "nvfp4"),
}  # fmt: skip
"""Weight schemes of the families that describe weights and activations one by one."""

FP8_FAMILY: dict[LayerSpec, dict[str, Any]] = {
    LayerSpec("fp8_tensor", "fp8_token"): {"activation_scheme": "dynamic"},
    LayerSpec("fp8_tensor", "fp8_tensor_static"): {"activation_scheme": "static"},
    LayerSpec("fp8_block128", "fp8_group128"): {"activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}

FAMILIES = ("compressed-tensors", "fp8", "modelopt", "quark")


def check_specs(family: str, specs: Mapping[str, LayerSpec]) -> None:
    """Raise ValueError for a family that is none, or cannot say what a layer's schemes are."""
    if family not in FAMILIES:
        raise ValueError(f"save_quantized.family: expected one of {', '.join(FAMILIES)}, got {family!r}")
    for name, spec in specs.items():
        if not _can_say(family, spec):
            raise ValueError(f"{name}: {family} cannot say {spec}; it can say {', '.join(_sayable(family))}")
    if family == "fp8" and len(set(specs.values())) > 1:
        told = ", ".join(sorted(map(str, set(specs.values()))))
        raise ValueError(f"save_quantized.family: fp8 has one scheme for all layers, got {told}")


def _can_say(family: str, spec: LayerSpec) -> bool:
    if family == "fp8":
        return spec in FP8_FAMILY
    if family == "modelopt":
        return spec in MODELOPT.values()
    return spec.weight in WEIGHTS[family]


def _sayable(family: str) -> list[str]:
    if family == "fp8":
        return [str(s) for s in FP8_FAMILY]
    return [str(s) for s in MODELOPT.values()] if family == "modelopt" else [f"{w}:..." for w in WEIGHTS[family]]


def layer_tensors(
    family: str, name: str, spec: LayerSpec, codes: Tensor, scale: Tensor, input_scale: Tensor | None,
    global_scale: Tensor | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """A layer's tensors as the family names and shapes them: codes, scale, second scale, static input scale."""
    if scheme_of(spec.weight).product:
        return _packed_tensors(family, name, spec, codes, scale, input_scale, global_scale)
    granularity = scheme_of(spec.weight).granularity
    per_tensor, block = granularity.rows < 0, granularity.rows > 1
    one: tuple[int, ...] = (1,) if family == "compressed-tensors" else ()
    made = {"weight": codes}
    if per_tensor:
        made["weight_scale"] = scale.reshape(one)
    elif block:
        rows, cols = scale.shape
        made["weight_scale_inv" if family == "fp8" else "weight_scale"] = (
            scale.reshape(rows, 1, cols, 1) if family == "modelopt" else scale
        )
    elif granularity.cols < 0 and family in ("modelopt", "quark"):
        made["weight_scale"] = scale.reshape(-1)
    else:
        made["weight_scale"] = scale
    if input_scale is not None:
        made["input_scale"] = input_scale.reshape(one)
    return {f"{name}.{last}": tensor for last, tensor in made.items()}


def _packed_tensors(
    family: str, name: str, spec: LayerSpec, codes: Tensor, scale: Tensor, input_scale: Tensor | None,
    global_scale: Tensor | None,
) -> dict[str, Tensor]:  # fmt: skip
    ct = family == "compressed-tensors"
    made = {"weight_packed" if ct and codes.dtype is torch.uint8 else "weight": codes, "weight_scale": scale}
    over, given = ("weight_global_scale", "input_global_scale") if ct else ("weight_scale_2", "input_scale_2")
    if global_scale is not None:
        if bool((global_scale != global_scale.flatten()[0]).any()):
            raise ValueError(f"{name}: {family} has one second scale for a layer, got {global_scale.numel()}")
        one = global_scale.flatten()[:1]
        made[over] = 1 / one if ct else one.reshape(())
        given = "input_scale" if family == "modelopt" else given
    else:
        given = "input_scale"
    if input_scale is not None:
        divides = ct and global_scale is not None
        made[given] = (1 / input_scale if divides else input_scale).reshape((1,) if ct else ())
    return {f"{name}.{last}": tensor for last, tensor in made.items()}


def config_of(family: str, specs: Mapping[str, LayerSpec], ignored: list[str]) -> dict[str, dict[str, Any]]:
    """What describes these layers: "quantization_config" for config.json, and further files by name.

    Args:
        specs: the quantized layers.
        ignored: the other linear layers.
    """
    check_specs(family, specs)
    if family == "fp8":
        body = FP8_FAMILY[next(iter(specs.values()))]
        return {
            "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", **body, "modules_to_not_convert": ignored}
        }
    if family == "modelopt":
        return _modelopt_config(specs, ignored)
    return {"quantization_config": (_quark_config if family == "quark" else _ct_config)(specs, ignored)}


def _by_spec(specs: Mapping[str, LayerSpec]) -> list[tuple[LayerSpec, list[str]]]:
    """Layers by spec, the most frequent first."""
    counts = Counter(specs.values())
    return [(spec, [n for n, s in specs.items() if s == spec]) for spec, _ in counts.most_common()]


def _modelopt_config(specs: Mapping[str, LayerSpec], ignored: list[str]) -> dict[str, dict[str, Any]]:
    names = {spec: algo for algo, spec in MODELOPT.items()}
    disk = {algo: algo.lower() if algo == "FP8_PB_WO" else algo for algo in MODELOPT}
    groups = _by_spec(specs)
    body: dict[str, Any] = {"quant_algo": disk[names[groups[0][0]]]}
    if len(groups) > 1:
        layers = {name: {"quant_algo": disk[names[spec]]} for name, spec in specs.items()}
        body = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    flat = {"quant_method": "modelopt", **body, "ignore": ignored}
    nested = {"quantization": {**body, "kv_cache_quant_algo": None, "exclude_modules": ignored}}
    return {"quantization_config": flat, "hf_quant_config.json": nested}


def _ct_config(specs: Mapping[str, LayerSpec], ignored: list[str]) -> dict[str, Any]:
    groups = _by_spec(specs)
    formats = [CT_FORMATS.get(spec.weight) or f"{_kind(spec.weight)}-quantized" for spec, _ in groups]
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(set(formats)) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "format": form,
                "targets": ["Linear"] if len(groups) == 1 else layers,
                "weights": _ct_arguments(spec.weight, False),
                "input_activations": _ct_arguments(spec.activation, True) if spec.activation else None,
                "output_activations": None,
            }
            for i, ((spec, layers), form) in enumerate(zip(groups, formats, strict=True))
        },
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


CT_FORMATS = {"mxfp4": "mxfp4-pack-quantized", "mxfp6_e2m3": "mxfp6-pack-quantized", "mxfp8_e4m3": "mxfp8-quantized",
              "nvfp4": "nvfp4-pack-quantized"}  # fmt: skip


def _kind(weight: str) -> str:
    return "int" if weight.startswith("int8") else "float"


def _ct_arguments(name: str, is_input: bool) -> dict[str, Any]:
    base = name.removesuffix("_static")
    if base in CT_FORMATS:
        bits, nv = {"mxfp4": 4, "mxfp6_e2m3": 6, "mxfp8_e4m3": 8, "nvfp4": 4}[base], base == "nvfp4"
        return {
            "num_bits": bits, "type": "float", "symmetric": True, "strategy": "tensor_group" if nv else "group",
            "group_size": 16 if nv else 32, "scale_dtype": "torch.float8_e4m3fn" if nv else "torch.uint8",
            "dynamic": ("local" if name != base else True) if is_input else False,
        }  # fmt: skip
    element, _, rest = name.partition("_")
    strategy = rest.removesuffix("_static").removesuffix("_asymmetric")
    made: dict[str, Any] = {
        "num_bits": 8, "type": "int" if element == "int8" else "float", "symmetric": "asymmetric" not in rest,
        "strategy": "block" if strategy == "block128" else "group" if strategy == "group128" else strategy,
        "dynamic": is_input and not name.endswith("_static"),
    }  # fmt: skip
    if strategy == "group128":
        made["group_size"] = 128
    if strategy == "block128":
        made["block_structure"] = [128, 128]
    return made


def _quark_config(specs: Mapping[str, LayerSpec], ignored: list[str]) -> dict[str, Any]:
    (first, _), *others = _by_spec(specs)
    return {
        "quant_method": "quark",
        "global_quant_config": _quark_layer(first),
        "layer_quant_config": {name: _quark_layer(spec) for spec, layers in others for name in layers},
        "layer_type_quant_config": {},
        "kv_cache_quant_config": {},
        "exclude": ignored,
        "algo_config": None,
        "quant_mode": "eager_mode",
        "export": {
            "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }  # fmt: skip


def _quark_layer(spec: LayerSpec) -> dict[str, Any]:
    inputs = _quark_spec(spec.activation, True) if spec.activation else None
    weight = _quark_spec(spec.weight, False)
    return {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None, "target_device": None}


QUARK_MX = {"mxfp4": "fp4", "mxfp6_e2m3": "fp6_e2m3", "mxfp6_e3m2": "fp6_e3m2", "mxfp8_e4m3": "fp8_e4m3"}


def _quark_spec(name: str, is_input: bool) -> Any:
    base = name.removesuffix("_static")
    if base in QUARK_MX:
        return {
            "dtype": QUARK_MX[base], "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "block_size": None,
            "is_dynamic": is_input, "symmetric": None, "round_method": "half_even", "scale_type": "float",
            "scale_format": "e8m0", "scale_calculation_mode": "even", "is_scale_quant": False,
        }  # fmt: skip
    if base == "nvfp4":
        block = _quark_spec("mxfp4", is_input) | {
            "group_size": 16, "scale_type": "float32", "scale_format": "float32", "scale_calculation_mode": None,
        }  # fmt: skip
        above = _quark_spec("fp8_tensor" + ("_static" if name != base or not is_input else ""), is_input)
        return [block, above | {"is_scale_quant": True}]
    element, _, rest = name.partition("_")
    strategy = rest.removesuffix("_static").removesuffix("_asymmetric")
    per_row = strategy in ("token", "channel")
    return {
        "dtype": "int8" if element == "int8" else "fp8_e4m3",
        "qscheme": "per_channel" if per_row else f"per_{strategy.removesuffix('128')}",
        "ch_axis": (1 if is_input else 0) if per_row else -1 if strategy == "group128" else None,
        "group_size": 128 if strategy == "group128" else None,
        "block_size": [128, 128] if strategy == "block128" else None,
        "is_dynamic": is_input and not name.endswith("_static"),
        "symmetric": "asymmetric" not in rest,
        "round_method": "half_even", "scale_type": "float", "scale_format": None, "is_scale_quant": False,
    }  # fmt: skip


def expect_new(target: Path) -> None:
    """Raise ValueError unless `target` is free, or an empty directory."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target}: expected a new or an empty directory")
    above = next(p for p in (target.absolute(), *target.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{target}: expected a directory that can be written to, {above} cannot")


@contextlib.contextmanager
def new_directory(target: str | Path) -> Iterator[Path]:
    """A directory to write into, that becomes `target` when the block ends well and vanishes when it does not.

    Raises:
        ValueError: target exists and is not an empty directory, or cannot be made.
    """
    target = Path(target)
    expect_new(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield made
        made.chmod(0o777 & ~_umask())
        os.replace(made, target)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class ShardWriter:
    """Writes tensors into one safetensors file, or into several and an index when they are more than `most` bytes."""

    def __init__(self, directory: Path, most: int = SHARD_BYTES) -> None:
        if most < 1:
            raise ValueError(f"max_shard_bytes: expected at least 1, got {most}")
        self.directory, self.most = directory, most
        self._held: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        if self._held and self._bytes + tensor.nbytes > self.most:
            self._flush()
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        if any(storage == t.untyped_storage().data_ptr() for t in self._held.values()):
            tensor = tensor.clone()  # the format has no views
        self._held[name] = tensor
        self._bytes += tensor.nbytes
        self._total += tensor.nbytes

    def _flush(self) -> None:
        path = self.directory / f"part-{len(self._files)}.safetensors"
        save_file(self._held, path, metadata={"format": "pt"})
        path.chmod(0o666 & ~_umask())
        self._files.append(list(self._held))
        self._held, self._bytes = {}, 0

    def close(self) -> None:
        """Write what is held, give the files their names and write the index."""
        if self._held or not self._files:
            self._flush()
        count = len(self._files)
        if count == 1:
            os.replace(self.directory / "part-0.safetensors", self.directory / "model.safetensors")
            return
        where: dict[str, str] = {}
        for i, names in enumerate(self._files):
            file = f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self.directory / f"part-{i}.safetensors", self.directory / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(where.items()))}
        write_json(self.directory / "model.safetensors.index.json", index)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def is_written(dtype: torch.dtype) -> bool:
    """Do the families have a name for codes of this dtype?"""
    return dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8)
