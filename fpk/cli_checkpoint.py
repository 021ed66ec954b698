"""`fpk inspect`, `fpk quantize`, `fpk dequantize`: quantized checkpoints on disk."""

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fpk.methods._dense import Found
    from fpk.methods._families import Dialect
    from fpk.methods._stored_experts import StoredExperts
    from fpk.methods.checkpoint import Checkpoint

inspect_app = typer.Typer(add_completion=False)
quantize_app = typer.Typer(add_completion=False)
dequantize_app = typer.Typer(add_completion=False)

NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


@inspect_app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Model directory, or one safetensors file.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="Every tensor, not only quantized layers.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """What a checkpoint holds: its family, its quantized layers, its size. Reads headers only."""
    found = describe(path)
    if json_:
        typer.echo(json.dumps(found, indent=1))
        return
    for key in ("path", "family", "config", "tensors_total", "bytes_total", "quantized_bytes"):
        typer.echo(f"{key.replace('_', ' ')}: {found[key]}")
    rows = found["tensors"] if tensors else found["layers"]
    if rows:
        lines = [list(rows[0]), *([_spell(v) for v in row.values()] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        typer.echo("")
        for line in lines:
            typer.echo("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip())
    for note in found["notes"]:
        typer.echo(f"note: {note}")


def _spell(value: Any) -> str:
    return " x ".join(map(str, value)) or "scalar" if isinstance(value, list) else str(value)


def describe(path: Path) -> dict[str, Any]:
    """What `fpk inspect` tells, as plain values.

    Raises:
        ValueError: a file or config that is not as it should be.
    """
    from fpk.methods.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    found: dict[str, Any] = {
        "path": str(path), "family": "", "config": checkpoint.quantization_source or "none",
        "tensors_total": len(checkpoint.tensors), "bytes_total": checkpoint.nbytes, "quantized_bytes": 0,
        "layers": [], "kv_scales": [], "notes": [],
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "bytes": t.nbytes, "file": t.path.name}
            for t in checkpoint
        ],
    }  # fmt: skip
    if checkpoint.quantization is None:
        found["family"] = "unknown: no config" if path.is_file() else "unquantized"
        return found
    dialect, stored = _layers(checkpoint)
    stacks = [layer for held in _stacks(dialect, stored).values() for layer in held.stacks.values()]
    layers = [*stored.layers.values(), *stacks]
    found |= {
        "family": dialect.name,
        "quantized_bytes": sum(layer.nbytes for layer in layers),
        "layers": [
            {
                "name": layer.name, "scheme": str(layer.spec), "dtype": layer.weight.dtype,
                "shape": list(layer.weight.shape), "bytes": layer.nbytes, "loads": not layer.spec.unsupported,
            }
            for layer in layers
        ],
        "kv_scales": [t.name for t in stored.kv_scales.values()],
        "notes": stored.notes,
    }  # fmt: skip
    return found


def _layers(checkpoint: "Checkpoint") -> "tuple[Dialect, Found]":
    from fpk.methods._dense import find_layers
    from fpk.methods._families import dialect_of

    if checkpoint.quantization is None:
        raise ValueError(f"{checkpoint.path}: expected a quantized checkpoint, its config has no quantization_config")
    dialect = dialect_of(checkpoint.quantization)
    return dialect, find_layers(checkpoint, dialect)


def _stacks(dialect: "Dialect", found: "Found") -> "dict[str, StoredExperts]":
    """Experts that stand in stacks, taken out of `found`."""
    from fpk.methods._stored_experts import take_experts

    stacked = {name.rpartition(".")[0] for name in found.plain if name.endswith("_blocks")}
    return take_experts(found, dialect.spec, stacked.__contains__)


@quantize_app.command()
def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Model directory that transformers can load.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    scheme: Annotated[str, typer.Option(help="Layer scheme, 'weights:activations', see `fpk list`.")],
    family: Annotated[
        str, typer.Option(help="Whose format to write: compressed-tensors, fp8, modelopt, quark.")
    ] = "compressed-tensors",
    ignore: Annotated[
        list[str] | None, typer.Option(help="Layers to leave alone: name, wildcard or 're:' expression; repeatable.")
    ] = None,
    max_shard: Annotated[float, typer.Option(help="Gigabytes of a file at most.")] = 5.0,
) -> None:
    """Quantize the linear layers of a model and write them as a checkpoint that engines load."""
    import torch

    import fpk
    from fpk.methods._families import LayerSpec
    from fpk.methods._writing import check_specs, expect_new
    from fpk.methods.checkpoint import Checkpoint

    pair, most = fpk.parse_layer_scheme(scheme), _bytes(max_shard)  # what is wrong is told before the model is read
    check_specs(family, {"--scheme": LayerSpec(str(pair.weight), pair.activation_name if pair.activation else None)})
    if pair.static:
        raise ValueError(f"--scheme: expected dynamic activations, got {pair} (fpk.calibrate finds fixed scales)")
    if not (source / "config.json").is_file():
        raise ValueError(f"{source}: expected a model directory with config.json")
    if any(source.glob("*.safetensors")) and (found := Checkpoint(source)).quantization is not None:
        raise ValueError(f"{source}: expected an unquantized model, {found.quantization_source} says it is quantized")
    expect_new(target)
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ValueError("fpk quantize loads models with transformers, which is not installed (fpk[study])") from error

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", local_files_only=True).eval()
    with torch.inference_mode():
        report = fpk.quantize_(model, pair, ignore or ())
    fpk.save_quantized(model, target, family, max_shard_bytes=most)
    _copy_others(source, target)
    typer.echo(f"{len(report.changed)} layers as {pair} in {target} ({family})")


@dequantize_app.command()
def dequantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Quantized model directory.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New directory.")],
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    max_shard: Annotated[float, typer.Option(help="Gigabytes of a file at most.")] = 5.0,
) -> None:
    """Turn a quantized checkpoint into an unquantized one, layer by layer. Static activation scales are dropped."""
    count = dequantize_checkpoint(source, target, dtype, _bytes(max_shard))
    typer.echo(f"{count} layers in {dtype} in {target}")


def _bytes(gigabytes: float) -> int:
    if not 1 <= gigabytes * 1000**3 < math.inf:
        raise ValueError(f"--max-shard: expected gigabytes, got {gigabytes}")
    return int(gigabytes * 1000**3)


def dequantize_checkpoint(source: Path, target: Path, dtype: str = "bfloat16", most: int = 5 * 1000**3) -> int:
    """What `fpk dequantize` does; returns the number of layers.

    Raises:
        ValueError: a checkpoint that is not as it should be, another dtype, or a target that is not empty.
        NotImplementedError: a scheme that fpk does not read.
    """
    import torch

    from fpk.methods._dense import check_layer, read_layer, refuse_codes
    from fpk.methods._stored_experts import read_stack
    from fpk.methods._writing import ShardWriter, new_directory, write_json
    from fpk.methods.checkpoint import Checkpoint

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in dtypes:
        raise ValueError(f"--dtype: expected one of {', '.join(dtypes)}, got {dtype!r}")
    checkpoint = Checkpoint(source)
    dialect, found = _layers(checkpoint)
    experts = _stacks(dialect, found)
    for layer in found.layers.values():
        check_layer(layer)
    for stored in found.plain.values():
        refuse_codes(stored)
    with new_directory(target) as made:
        shards = ShardWriter(made, most)
        for layer in found.layers.values():
            dense = read_layer(checkpoint, layer, native=False)
            shards.add(f"{layer.name}.weight", dense.weight.dequantize(dtypes[dtype]))
            if "bias" in layer.parts:
                shards.add(layer.parts["bias"].name, checkpoint.read(layer.parts["bias"].name))
        for held in experts.values():
            for role, layer in held.stacks.items():  # transformers has such stacks as (E, K, N)
                values = read_stack(checkpoint, layer, torch.device("cpu")).dequantize(dtypes[dtype])
                shards.add(f"{held.name}.{role}_proj", values.mT)
        for name in [*found.plain, *(bias.name for held in experts.values() for bias in held.biases.values())]:
            shards.add(name, checkpoint.read(name))
        shards.close()
        write_json(made / "config.json", _without_quantization(checkpoint.config))
        _copy_others(checkpoint.path, made, but=("config.json", "hf_quant_config.json"))
    return len(found.layers) + sum(len(held.stacks) for held in experts.values())


def _without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in config.items() if k not in ("quantization_config", "compression_config")}
    if isinstance(kept.get("text_config"), dict):
        kept["text_config"] = _without_quantization(kept["text_config"])
    return kept


def _copy_others(source: Path, target: Path, but: tuple[str, ...] = ()) -> None:
    """Tokenizer, generation config and the like; not what is there already."""
    for path in sorted(source.iterdir()):
        kept = path.is_file() and not path.name.endswith(NOT_COPIED) and path.name not in ("config.json", *but)
        if kept and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)
