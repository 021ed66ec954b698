"""Routings for the inputs of MoE ops."""

import torch
from torch import Tensor

from fpk.samples import generator


def routed_experts(T: int, E: int, top_k: int, dropped: float, device: torch.device | str, seed: int) -> Tensor:
    """(T * top_k,) int64: an expert of each slot, E for the dropped share of them."""
    g = generator(seed + 77, device)
    expert = torch.randint(0, E, (T * top_k,), generator=g, device=device)
    lost = torch.rand((T * top_k,), generator=g, device=device) < dropped
    return torch.where(lost, E, expert)


def sorted_slots(
    T: int, E: int, top_k: int, dropped: float, device: torch.device | str, seed: int
) -> tuple[Tensor, Tensor]:
    """index (T * top_k,) and position (T, top_k) of a random routing, as sort_by_expert gives them."""
    expert = routed_experts(T, E, top_k, dropped, device, seed)
    order = expert.argsort(stable=True)
    index = torch.where(expert[order] == E, -1, order).to(torch.int32)
    position = torch.where(expert == E, -1, order.argsort()).to(torch.int32)
    return index, position.reshape(T, top_k)


def row_ends(R: int, E: int, dropped: float, spread: str, device: torch.device | str, seed: int) -> Tensor:
    """offs (E,) int32 for R rows: "even" experts, a "skewed" one, or "one" expert that has them all."""
    expert = routed_experts(R, E, 1, dropped, device, seed)
    if spread == "one":
        expert = torch.where(expert == E, E, E // 2)
    elif spread == "skewed":
        expert = torch.where(expert == E, E, expert * expert // max(E, 1))
    counts = torch.zeros(E + 1, dtype=torch.long, device=device)
    counts = counts.scatter_add(0, expert, torch.ones_like(expert))
    return counts.cumsum(0)[:E].to(torch.int32)


def gather_rows(R: int, device: torch.device | str, seed: int) -> Tensor:
    """(R,) int32: slots in some order, as sort_by_expert's index, the last one dropped."""
    order = torch.randperm(R, generator=generator(seed + 55, device), device=device)
    return torch.where(torch.arange(R, device=device) == R - 1, -1, order).to(torch.int32)
