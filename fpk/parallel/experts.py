"""A mixture-of-experts layer whose experts live on several ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fpk.api import Quantized, quantize
from fpk.check import expect_one_of, expect_rank, expect_shape
from fpk.parallel.exchange import combine, dispatch, expect_payload
from fpk.parallel.group import Group
from fpk.parallel.placement import Placement

EXCHANGES = ("all_to_all", "gather")

Experts = Callable[[Any, Tensor, Tensor], Tensor]


class ExpertParallel:
    """Brings tokens to their experts' ranks and the outputs back.

    "all_to_all" sends each row where it is needed, and back: results are those of a single device, bit for bit, for
    every placement. It waits for the device once, to learn the counts.
    "gather" shows all tokens to all ranks and adds their partial sums up; nothing waits for the device, so a captured
    graph serves every routing, but every rank must have the same number of tokens. Sums round once a rank.

    Args:
        group: the ranks.
        placement: of the experts; the ranks agree on it here.
        exchange: see above.
        payload: scheme that tokens travel in, None for their own dtype: "fp8_token", "fp8_group128", ...
        payload_back: scheme that outputs travel back in ("all_to_all" only), None for their own dtype.

    Raises:
        ValueError: unknown exchange, a payload whose scales tokens share, or a placement for another number of ranks.
        RuntimeError: ranks came with different placements or exchanges.
    """

    def __init__(
        self, group: Group, placement: Placement, exchange: str = "all_to_all", payload: str | None = None,
        payload_back: str | None = None,
    ) -> None:  # fmt: skip
        expect_one_of("ExpertParallel.exchange", exchange, EXCHANGES)
        if len(placement.ranks) != group.size:
            raise ValueError(
                f"ExpertParallel.placement: expected one of {group.size} ranks, got one of {len(placement.ranks)}"
            )
        if payload is not None:
            expect_payload("ExpertParallel.payload", payload)
        if payload_back is not None:
            expect_payload("ExpertParallel.payload_back", payload_back)
            if exchange == "gather":
                raise ValueError(
                    f"ExpertParallel.payload_back: expected None with sums that ranks add, got {payload_back!r}"
                )
        group.agree("placement of experts", f"{placement.ranks} by {exchange} in {payload}, {payload_back}")
        self.group, self.placement, self.exchange = group, placement, exchange
        self.payload, self.payload_back = payload, payload_back
        self.expert_map = placement.expert_map(group.rank, group.device)
        self._owners = placement.owners(group.device)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Experts) -> Tensor:
        """One layer behind its router; all ranks call it together.

        Args:
            x: (T, H) tokens of this rank, bf16, fp16 or fp32. T may be 0, and with "all_to_all" differ between ranks.
            weights: (T, top_k) fp32.
            ids: (T, top_k) int32 or int64, experts of all ranks; a slot whose id is out of range is skipped.
            experts: `experts(rows, weights, ids)` computes this rank's experts: rows (R, H) in x's dtype or Quantized
                by the payload, weights and ids (R, k). Ids count the experts of all ranks; slots of others' are to be
                skipped. `fpk.moe_experts` with its weights and `expert_map` bound is one, and so is a method's `apply`.

        Returns:
            (T, H) of x's dtype.

        Raises:
            ValueError: a shape does not fit.
            RuntimeError: a rank was lost.
        """
        expect_rank("ExpertParallel.x", x, 2)
        expect_rank("ExpertParallel.ids", ids, 2)
        expect_shape("ExpertParallel.ids", ids, (x.shape[0], ids.shape[1]))
        expect_shape("ExpertParallel.weights", weights, tuple(ids.shape))
        if self.exchange == "gather":
            return self._gathered(x, weights, ids, experts)
        sent = dispatch(self.group, x, ids, self._owners, self.payload)
        ones = torch.ones(sent.ids.shape, dtype=torch.float32, device=x.device)
        y = experts(sent.rows, ones, sent.ids).to(x.dtype)
        return combine(self.group, y, sent, weights, self.payload_back)

    def _gathered(self, x: Tensor, weights: Tensor, ids: Tensor, experts: Experts) -> Tensor:
        gather = self.group.all_gather
        tokens: Tensor | Quantized
        if self.payload is None:
            tokens = gather(x.contiguous())
        else:
            quantized = quantize(x, self.payload)
            tokens = Quantized(gather(quantized.codes), gather(quantized.scale), self.payload, check=False)
        y = experts(tokens, gather(weights.contiguous()), gather(ids.contiguous()))
        return self.group.reduce_scatter(y.to(x.dtype))
