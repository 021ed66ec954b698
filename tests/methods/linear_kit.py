"""Layers under test, references of their products, and ranks that are threads."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpk.formats import FP8, finite_amax
from fpk.methods import Linear, use_reduce_max

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def default_device() -> torch.device:
    """Where tensors are made now: DEVICE, unless a test is about the CPU."""
    return torch.tensor(0).device


def loaded(layer: Linear, weights: list[Tensor] | Tensor) -> Linear:
    """The layer with these weights: one tensor for all of it, or one a shard."""
    if isinstance(weights, Tensor):
        layer.weight.weight_loader(layer.weight, weights)
    else:
        for i, w in enumerate(weights):
            layer.weight.weight_loader(layer.weight, w, i)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def random_weight(n: int, k: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values, an outlier in the last row and column, and a row of zeros."""
    w = torch.randn(n, k, generator=torch.Generator().manual_seed(seed), device="cpu")
    if n > 2:
        w[-1, -1], w[1] = 7.0, 0.0
    return w.to(dtype).to(default_device())


def random_x(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return x.to(dtype).to(default_device())


def token_rounded(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x quantized a scale a token and dequantized, fp32; int8 or an fp8 type. Straight from the definition."""
    amax = finite_amax(x, (-1,))
    if dtype is torch.int8:
        scale = amax.clamp(min=1e-10) / 127
        return (x.float() / scale).round().clamp(-128, 127) * scale
    fmt = FP8[dtype]
    scale = (amax / fmt.qmax).clamp(min=1 / (512 * fmt.qmax))
    return (x.float() / scale).clamp(-fmt.max, fmt.max).to(dtype).float() * scale


class Ranks:
    """Threads as ranks. One runs at a time, as the interpreter wants it, except while all wait for a maximum."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(count, timeout=300)  # a rank that does not come
        self.slots: list[Tensor | None] = [None] * count
        self.reductions = [0] * count

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * self.count
        errors: list[BaseException] = []

        def main(rank: int) -> None:
            def reduce(tensor: Tensor, group: Any) -> Tensor:
                self.reductions[rank] += 1
                self.slots[rank] = tensor.clone()
                self.turn.release()
                try:
                    self.barrier.wait()
                    result = torch.stack(self.slots).amax(0)
                    self.barrier.wait()
                finally:
                    self.turn.acquire()
                return result

            with self.turn, torch.no_grad(), torch.device(DEVICE), use_reduce_max(reduce):
                try:
                    results[rank] = work(rank)
                except BaseException as error:
                    errors.append(error)
                    self.barrier.abort()

        threads = [threading.Thread(target=main, args=(r,)) for r in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        assert not errors
        return results


def group_rounded(x: Tensor, group: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """x quantized a scale per `group` columns and dequantized, fp32; straight from the definition."""
    fmt = FP8[dtype]
    parts = []
    for part in x.float().split(group, dim=-1):
        scale = part.abs().amax(-1, keepdim=True).clamp(min=1e-10) / fmt.qmax
        parts.append((part / scale).clamp(-fmt.max, fmt.max).to(dtype).float() * scale)
    return torch.cat(parts, dim=-1)
