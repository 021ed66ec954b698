"""Checkpoints written by hand, and each family's decoding written out in plain torch."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

FIXTURES = Path(__file__).parents[1] / "fixtures"


def header_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with this header (an object, or raw bytes) and a length that may be a lie."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_checkpoint(
    directory: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None, **config: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    if quantization is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def values(fixture: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / fixture / "model.safetensors")


def config_of(fixture: str) -> dict[str, Any]:
    return json.loads((FIXTURES / fixture / "config.json").read_text())


def decoded(tensors: dict[str, Tensor], layer: str) -> Tensor:
    """The weight of a layer in fp32, by the families' definition: code times scale, whatever the scale's form."""
    codes = tensors[f"{layer}.weight"].float()
    scale = next(tensors[f"{layer}.{n}"] for n in ("weight_scale", "weight_scale_inv") if f"{layer}.{n}" in tensors)
    scale = scale.float()
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0]
    if scale.numel() == 1:
        return codes * scale.reshape(())
    if scale.numel() == codes.shape[0]:
        return codes * scale.reshape(-1, 1)
    out = torch.empty_like(codes)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            out[block] = codes[block] * scale[i, j]
    return out


def fake_input(kind: str, input_scale: Tensor | None = None, powers: bool = False):
    """Quantizes and dequantizes x as activations of this kind are: "fp8" or "int8", static, per token or per group."""
    limit = 127.0 if kind == "int8" else 448.0

    def rounded(x: Tensor, scale: Tensor) -> Tensor:
        if kind == "int8":
            return (x / scale).round().clamp(-128, 127) * scale
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    def apply(x: Tensor, group: int | None = None) -> Tensor:
        y = x.float()
        if input_scale is not None:
            return rounded(y, input_scale.float().reshape(()))
        if group:
            scales = [(p.abs().amax(-1, keepdim=True) / limit).clamp(min=1e-12) for p in y.split(group, -1)]
            scales = [torch.exp2(s.double().log2().ceil()).float() for s in scales] if powers else scales
            return torch.cat([rounded(p, s) for p, s in zip(y.split(group, -1), scales, strict=True)], -1)
        return rounded(y, (y.abs().amax(-1, keepdim=True) / limit).clamp(min=1e-9))

    return apply


def fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of 128 x 128 blocks, partial ones at the edges, from the definition."""
    n, k = weight.shape
    grid = torch.empty(-(-n // 128), -(-k // 128))
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            part = weight[block].float()
            grid[i, j] = part.abs().max() / 448
            codes.view(torch.uint8)[block] = (part / grid[i, j]).clamp(-448, 448).to(codes.dtype).view(torch.uint8)
    return codes, grid


class Tiny(nn.Module):
    """An embedding, a block with two linear layers and a norm, and an output layer."""

    def __init__(self, hidden: int = 64, inner: int = 96, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, hidden)
        self.block = nn.ModuleDict({
            "up_proj": nn.Linear(hidden, inner, bias=bias), "down_proj": nn.Linear(inner, hidden, bias=bias),
            "norm": nn.LayerNorm(hidden),
        })  # fmt: skip
        self.lm_head = nn.Linear(hidden, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.lm_head(self.block["norm"](x + self.block["down_proj"](self.block["up_proj"](x).relu())))


def tiny(dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Tiny:
    torch.manual_seed(0)
    return Tiny(**sizes).to(dtype).eval()


def fp8_tensor_checkpoint(directory: Path, model: Tiny, change=None, **quantization: Any) -> Path:
    """`model` with its two block layers in FP8 per tensor; `change` edits the tensors before they are written."""
    tensors = dict(model.state_dict())
    for name in ("block.up_proj", "block.down_proj"):
        weight = tensors[f"{name}.weight"].float()
        scale = weight.abs().max() / 448
        tensors[f"{name}.weight"] = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale"] = scale
    if change is not None:
        change(tensors)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]} | quantization
    return write_checkpoint(directory, tensors, config)
