"""Experts in several copies, which move between ranks as loads change, while their layer goes on serving.

A layer of `experts` has more slots than experts: slot s lies on rank s // (slots / ranks). What a slot holds, which
slots an expert has, and the weights themselves change in place between two calls of the layer, so captured graphs stay
good. Until then calls find the old weights: they are moved into spare memory first.

Source: the expert parallel load balancer of DeepSeek-V3 (EPLB), without its node groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fpk.kernels.moe.map_experts import map_experts
from fpk.parallel.group import Group
from fpk.parallel.placement import Placement


@dataclass(frozen=True)
class Plan:
    """Slots before and after: the expert of each, and for every slot that changes the slot its weights come from."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    sources: dict[int, int]


class Balancer:
    """The slots of one layer.

    Args:
        group: the ranks.
        experts: how many the router knows.
        tensors: of this rank, each with a slot for a row: weights, scales, biases; contiguous. `slot_tensors` finds
            those of a layer. They hold what `slots` says before the first move.
        redundant: slots beyond one an expert; slots must be a multiple of the ranks.
        slots: the expert of each slot, None: all experts in turn, then again from the first.

    Attributes:
        table: (experts, most copies) int32, the slots of each expert, -1 behind the last; changes in place.
        copies: (experts,) int32, how many it has; changes in place.
        placement: of the slots, for `ExpertParallel`; never changes.
        loads: (slots,) int64, tokens since the last plan; of this rank's tokens.

    Raises:
        ValueError: slots that ranks do not divide, an expert without a slot, or a tensor without a row for each slot.
    """

    def __init__(
        self, group: Group, experts: int, tensors: Mapping[str, Tensor], redundant: int = 0,
        slots: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        total = experts + redundant
        if total % group.size:
            raise ValueError(
                f"Balancer.redundant: expected a multiple of {group.size} slots (ranks), got {experts} + {redundant}"
            )
        self.group, self.experts = group, experts
        self.slots = list(slots) if slots is not None else [s % experts for s in range(total)]
        self.per_rank = total // group.size
        self.placement = Placement.linear(total, group.size)
        self._expect_slots(total)
        self.tensors = dict(tensors)
        for name, tensor in self.tensors.items():
            if tensor.shape[:1] != (self.per_rank,) or not tensor.is_contiguous():
                raise ValueError(
                    f"Balancer.{name}: expected ({self.per_rank}, ...) contiguous, got {tuple(tensor.shape)} "
                    f"{tensor.stride()}"
                )
        group.agree("slots of experts", str(self.slots))
        self._group = group.part(range(group.size)) or group  # its collectives never wait for those of the layer
        device = group.device
        self.table = torch.full((experts, redundant + 1), -1, dtype=torch.int32, device=device)
        self.copies = torch.zeros(experts, dtype=torch.int32, device=device)
        self.loads = torch.zeros(total, dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming: tuple[Plan, dict[str, Tensor], list[int]] | None = None
        self._tell()

    def route(self, weights: Tensor, ids: Tensor, count: bool = True) -> tuple[Tensor, Tensor]:
        """Experts (T, top_k) to slots, spread over an expert's copies, and count them; waits for nothing."""
        weights, slots, _ = map_experts(weights, ids, self.experts, 0, self.table, self.copies)
        if count:
            served = (slots >= 0).long()
            self.loads.scatter_add_(0, slots.clamp(min=0).long().reshape(-1), served.reshape(-1))
        return weights, slots

    def plan(self) -> Plan:
        """What the slots should hold by the loads of all ranks since the last plan. Waits for the device."""
        loads = self._group.all_reduce(self.loads.clone()).tolist()
        self.loads.zero_()
        of_expert = [0] * self.experts
        for slot, load in enumerate(loads):
            of_expert[self.slots[slot]] += load
        after = arranged(of_expert, self.slots, self.group.size)
        sources = {s: source_of(s, e, self.slots, self.per_rank) for s, e in enumerate(after) if self.slots[s] != e}
        return Plan(tuple(self.slots), tuple(after), sources)

    def move(self, plan: Plan) -> None:
        """Fetch the weights that this rank's slots will hold into spare memory; the layer goes on with its old ones.

        All ranks call it with the same plan; on a GPU the copies run beside the layer.
        """
        with self._beside():
            first = self.group.rank * self.per_rank
            wanted = [s for s in sorted(plan.sources) if first <= s < first + self.per_rank]
            rows, coming = list(self._rows(plan)), {}
            for name, tensor in self.tensors.items():
                raw = _rows_of_bytes(tensor)
                mine = [[s - first for s in row] for row in rows]  # slots here, by the rank that wants them
                send = raw[torch.tensor([s for row in mine for s in row], dtype=torch.long, device=raw.device)]
                receive = [sum(plan.sources[s] // self.per_rank == r for s in wanted) for r in range(self.group.size)]
                coming[name] = self._group.all_to_all(send, [len(row) for row in mine], receive)
        # rows come by the rank they come from, and from each in the order of the slots that want them
        order = sorted(wanted, key=lambda s: (plan.sources[s] // self.per_rank, s))
        self._coming = plan, coming, [s - first for s in order]

    def commit(self) -> None:
        """Put the fetched weights into their slots and tell the router, between two calls of the layer.

        Raises:
            RuntimeError: nothing was fetched, or ranks fetched by different plans.
        """
        if self._coming is None:
            raise RuntimeError("Balancer.commit: expected a move before it")
        plan, coming, slots = self._coming
        self._group.agree("plan of experts", str(plan.after))
        if self._stream is not None:
            torch.cuda.current_stream(self.group.device).wait_stream(self._stream)
        at = torch.tensor(slots, dtype=torch.long, device=self.group.device)
        for name, rows in coming.items():
            _rows_of_bytes(self.tensors[name]).index_copy_(0, at, rows)
        self.slots = list(plan.after)
        self._coming = None
        self._tell()

    def _rows(self, plan: Plan) -> Iterator[list[int]]:
        """Slots of this rank that each rank needs, in the order of its slots that will hold them."""
        for rank in range(self.group.size):
            first = rank * self.per_rank
            wanted = [plan.sources[s] for s in range(first, first + self.per_rank) if s in plan.sources]
            yield [s for s in wanted if s // self.per_rank == self.group.rank]

    def _tell(self) -> None:
        """Table and copies from the slots, in place."""
        held: list[list[int]] = [[] for _ in range(self.experts)]
        for slot, expert in enumerate(self.slots):
            held[expert].append(slot)
        width = self.table.shape[1]
        rows = [h + [-1] * (width - len(h)) for h in held]
        self.table.copy_(torch.tensor(rows, dtype=torch.int32))
        self.copies.copy_(torch.tensor([len(h) for h in held], dtype=torch.int32))

    def _beside(self) -> torch.cuda.StreamContext:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.group.device))
        return torch.cuda.stream(self._stream)

    def _expect_slots(self, total: int) -> None:
        missing = sorted(set(range(self.experts)) - set(self.slots))
        if len(self.slots) != total or missing or not set(self.slots) <= set(range(self.experts)):
            raise ValueError(
                f"Balancer.slots: expected {total} slots with every expert of {self.experts}, got {len(self.slots)} "
                f"without {missing[:8]}"
            )


def _rows_of_bytes(tensor: Tensor) -> Tensor:
    """The memory of each slot, whatever the dtype."""
    return tensor.view(tensor.shape[0], -1).view(torch.uint8)


def slot_tensors(layer: nn.Module, slots: int) -> dict[str, Tensor]:
    """Parameters and buffers of a layer with a row for each of its experts; not input scales, which ranks share."""
    named = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {n: t.data for n, t in named.items() if t.shape[:1] == (slots,) and not n.endswith("input_scale")}


def arranged(loads: Sequence[float], before: Sequence[int], ranks: int) -> list[int]:
    """The expert of each slot: copies for the most loaded experts, ranks of equal load, and few changes.

    Args:
        loads: of each expert.
        before: the expert of each slot now; equal parts of the slots lie on each rank.
    """
    copies = [1] * len(loads)
    for _ in range(len(before) - len(loads)):
        copies[max(range(len(loads)), key=lambda e: (loads[e] / copies[e], -e))] += 1
    per_rank = len(before) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    weight = [0.0] * ranks
    shares = sorted(((loads[e] / copies[e], e) for e in range(len(loads)) for _ in range(copies[e])),
                    key=lambda s: (-s[0], s[1]))  # fmt: skip
    for share, expert in shares:
        free = [r for r in range(ranks) if len(held[r]) < per_rank]
        # the least loaded; a second copy on one rank helps nobody; where it is now costs no move
        rank = min(free, key=lambda r: (expert in held[r], weight[r], expert not in _on(before, r, per_rank), r))
        held[rank].append(expert)
        weight[rank] += share
    after = []
    for rank, name in enumerate(_named(held, before, per_rank)):
        slots = _on(before, rank, per_rank)
        rest = list(held[name])
        kept: list[int | None] = []
        for expert in slots:
            kept.append(expert if expert in rest else None)
            if expert in rest:
                rest.remove(expert)
        after += [rest.pop(0) if expert is None else expert for expert in kept]
    return after


def _named(held: list[list[int]], before: Sequence[int], per_rank: int) -> list[int]:
    """Which of the sets of experts each rank takes: that of which it has most already, the best pairs first."""
    ranks = range(len(held))
    overlap = {(r, s): len(set(held[s]) & set(_on(before, r, per_rank))) for r in ranks for s in ranks}
    pairs = sorted((-count, r, s) for (r, s), count in overlap.items())
    taken: dict[int, int] = {}
    for _, rank, chosen in pairs:
        if rank not in taken and chosen not in taken.values():
            taken[rank] = chosen
    return [taken[r] for r in range(len(held))]


def _on(before: Sequence[int], rank: int, per_rank: int) -> list[int]:
    return list(before[rank * per_rank : (rank + 1) * per_rank])


def source_of(slot: int, expert: int, before: Sequence[int], per_rank: int) -> int:
    """The slot that has an expert's weights now: on the same rank if there is one, else slots take turns."""
    having = [s for s, e in enumerate(before) if e == expert]
    near = [s for s in having if s // per_rank == slot // per_rank]
    return near[0] if near else having[slot % len(having)]
