"""Which rank holds which experts."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fpk.parallel.group import Group


@dataclass(frozen=True)
class Placement:
    """Experts of each rank, in the order of its weights. Counts may differ; no expert stands twice.

    Raises:
        ValueError: an expert that no rank has, one that two have, or a number out of range.
    """

    ranks: tuple[tuple[int, ...], ...]
    experts: int

    def __post_init__(self) -> None:
        owners: dict[int, int] = {}
        for rank, held in enumerate(self.ranks):
            for expert in held:
                if not 0 <= expert < self.experts:
                    raise ValueError(f"placement: expected experts 0..{self.experts - 1}, got {expert} on rank {rank}")
                if expert in owners:
                    raise ValueError(f"placement: expert {expert} is on rank {owners[expert]} and on rank {rank}")
                owners[expert] = rank
        missing = sorted(set(range(self.experts)) - owners.keys())
        if missing:
            raise ValueError(f"placement: no rank has expert {', '.join(map(str, missing[:8]))} of {self.experts}")

    @classmethod
    def linear(cls, experts: int, ranks: int) -> "Placement":
        """Neighbours together; the first ranks have one more where the numbers do not divide."""
        base, more = divmod(experts, ranks)
        starts = [r * base + min(r, more) for r in range(ranks + 1)]
        return cls(tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts)), experts)

    @classmethod
    def round_robin(cls, experts: int, ranks: int) -> "Placement":
        """Expert e on rank e modulo ranks."""
        return cls(tuple(tuple(range(r, experts, ranks)) for r in range(ranks)), experts)

    @classmethod
    def of_maps(cls, maps: Sequence[Sequence[int]]) -> "Placement":
        """From the expert maps of all ranks: entry e is the number of expert e among the rank's own, or -1."""
        held = [[e for _, e in sorted((n, e) for e, n in enumerate(numbers) if n >= 0)] for numbers in maps]
        for rank, numbers in enumerate(maps):
            local = sorted(n for n in numbers if n >= 0)
            if local != list(range(len(local))):
                raise ValueError(f"placement: expected local numbers 0..{len(local) - 1} on rank {rank}, got {local}")
        return cls(tuple(map(tuple, held)), len(maps[0]))

    @classmethod
    def gathered(cls, group: Group, expert_map: Tensor) -> "Placement":
        """From this rank's expert map and those of the others.

        Raises:
            ValueError: an expert that no rank has, or two have; on every rank.
            RuntimeError: a rank with another number of experts, or one that does not answer.
        """
        group.agree("number of experts", str(expert_map.numel()))
        maps = group.all_gather(expert_map.to(torch.int32).contiguous().view(1, -1))
        return cls.of_maps(maps.tolist())

    def expert_map(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """(experts,) int32: the number of an expert on `rank`, -1 for those of others."""
        numbers = [-1] * self.experts
        for number, expert in enumerate(self.ranks[rank]):
            numbers[expert] = number
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    def owners(self, device: torch.device | str | None = None) -> Tensor:
        """(experts,) int32: the rank of each expert."""
        owners = [0] * self.experts
        for rank, held in enumerate(self.ranks):
            for expert in held:
                owners[expert] = rank
        return torch.tensor(owners, dtype=torch.int32, device=device)
