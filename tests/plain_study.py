"""Fake quantization of a model in plain PyTorch: what the study's numbers are compared with."""

import math

import torch
import torch.nn.functional as F
from torch import nn

import fpk


def fake(x, kind, rows, cols, floor, amax=None):
    """Codes as fp32, and their scale, one per rows x cols elements (-1: all), as something that broadcasts to them.

    `amax` is given for static scales.
    """
    n, k = x.shape
    rows, cols = (n if rows < 0 else rows), (k if cols < 0 else cols)
    padded = F.pad(x.float(), (0, -k % cols, 0, -n % rows))
    tiles = padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    amax = tiles.abs().amax((1, 3), keepdim=True) if amax is None else amax
    largest = torch.tensor(127.0 if kind == "int8" else 448.0, device=x.device)  # torch turns division by a number
    if kind == "int8":  # into a product on some devices
        scale = amax.clamp(min=floor) / largest
        codes = (tiles / scale).round().clamp(-128, 127)
    else:
        scale = (amax / largest).clamp(min=1 / (512 * 448)) if floor is None else amax.clamp(min=floor) / largest
        codes = (tiles / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    scale = scale.expand_as(tiles).reshape(padded.shape)[:n, :k]
    return codes.reshape(padded.shape)[:n, :k], scale


def fake_asymmetric(x, dims):
    """Codes less their zero point, and their scale."""
    x = x.float()
    low, high = x.amin(dims, keepdim=True).clamp(max=0), x.amax(dims, keepdim=True).clamp(min=0)
    scale = (high - low) / torch.tensor(255.0, device=x.device)
    zero = (-128 - low / scale).round()
    return ((x / scale).round() + zero).clamp(-128, 127) - zero, scale.expand_as(x)


FAKES = {
    "fp8_tensor": ("fp8", -1, -1, None),
    "fp8_token": ("fp8", 1, -1, None),
    "fp8_channel": ("fp8", 1, -1, None),
    "fp8_group128": ("fp8", 1, 128, 1e-10),
    "fp8_block128": ("fp8", 128, 128, 1e-4),
    "int8_tensor": ("int8", -1, -1, 1e-10),
    "int8_token": ("int8", 1, -1, 1e-10),
    "int8_channel": ("int8", 1, -1, 1e-10),
}
ASYMMETRIC = {"int8_tensor_asymmetric": (0, 1), "int8_token_asymmetric": (1,)}


def fake_by_name(x, scheme, amax=None):
    if scheme == "none":
        return x.float(), torch.ones((), device=x.device).expand(x.shape)
    if scheme.removesuffix("_static") in FAKES:
        assert scheme.endswith("_static") == (amax is not None)
        return fake(x, *FAKES[scheme.removesuffix("_static")], amax)
    if scheme in ASYMMETRIC:
        return fake_asymmetric(x, ASYMMETRIC[scheme])
    values = fpk.quantize(x, scheme).dequantize(torch.float32)  # formats that torch itself cannot round to
    return values, torch.ones((), device=x.device).expand(x.shape)


def constant_along_k(scheme):
    name = scheme.removesuffix("_static")
    return name in ASYMMETRIC or FAKES.get(name, (0, 0, 0))[2] == -1


class FakeLinear(nn.Module):
    """Scales that are constant along K multiply the product, others the codes; without quantized activations, all do.

    The two are equal but for fp32 rounding. That much is enough to flip roundings of the next layer's activations, and
    after thirty layers perplexities differ by half a percent; so the order is the one that such products have.
    """

    def __init__(self, linear, weights, activations, amax=None):
        super().__init__()
        self.codes, self.scale = fake_by_name(linear.weight, weights)
        self.bias, self.activations = linear.bias, activations
        self.amax = amax if activations.endswith("_static") else None
        self.after = activations != "none" and constant_along_k(weights) and constant_along_k(activations)

    def forward(self, x):
        codes, scale = fake_by_name(x.reshape(-1, x.shape[-1]), self.activations, self.amax)
        if self.after:
            out = codes @ self.codes.T * scale[:, :1] * self.scale[:, :1].T
        else:
            out = (codes * scale) @ (self.codes * self.scale).T
        out = out if self.bias is None else out + self.bias.float()
        return out.to(x.dtype).view(*x.shape[:-1], -1)


def plain_ranges(model, sequences):
    """Largest magnitude of every linear layer's input over sequences (n, length), by layer name."""
    ranges, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def see(_, x, name=name):
                ranges[name] = torch.maximum(
                    ranges.get(name, torch.zeros((), device=x[0].device)), x[0].float().abs().max()
                )

            handles.append(module.register_forward_pre_hook(see))
    with torch.inference_mode():
        for tokens in sequences:
            model(input_ids=tokens[None])
    for handle in handles:
        handle.remove()
    return ranges


def plain_perplexity(model, tokens, scheme, ranges):
    """Perplexity with every linear layer but the output layer replaced."""
    weights, _, activations = scheme.partition(":")
    replaced = []
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            parent, _, attribute = name.rpartition(".")
            replaced.append((model.get_submodule(parent), attribute, module))
            setattr(model.get_submodule(parent), attribute, FakeLinear(module, weights, activations, ranges.get(name)))
    try:
        with torch.inference_mode():
            logits = model(input_ids=tokens).logits[:, :-1].float()
        return math.exp(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item())
    finally:
        for parent, attribute, module in replaced:
            setattr(parent, attribute, module)
