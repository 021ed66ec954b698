"""Tokens to the ranks of their experts and back: an all-to-all of rows, each way as codes and scales if wanted."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fpk.api import Quantized, quantize
from fpk.formats import scheme_of
from fpk.kernels.moe.moe_permute import moe_permute
from fpk.kernels.moe.moe_unpermute import moe_unpermute
from fpk.kernels.moe.sort_by_expert import sort_by_expert
from fpk.parallel.group import Group


@dataclass
class Dispatched:
    """Rows that came to this rank, one for every slot of a token that one of its experts serves.

    Attributes:
        rows: (R, H) tokens, or Quantized by the payload's scheme.
        ids: (R, 1) of the sender's type, the expert, by its number among those of all ranks.
        position: (T, top_k) int32 on the sender's side: the place of each slot among the rows it sent, -1 if dropped.
        send, receive: rows to and from each rank.
    """

    rows: Tensor | Quantized
    ids: Tensor
    position: Tensor
    send: list[int]
    receive: list[int]


def dispatch(group: Group, x: Tensor, ids: Tensor, owners: Tensor, payload: str | None = None) -> Dispatched:
    """Send each token's row to the ranks of its experts. Waits for the device: other ranks must learn the counts.

    Args:
        x: (T, H) tokens of this rank.
        ids: (T, top_k) int32 or int64 experts, of all ranks; a slot whose id is out of range is dropped.
        owners: (experts,) int32, the rank of each expert, see `Placement`.
        payload: scheme that rows travel in; None: as they are. Every row is quantized by itself, so the payload must
            have a scale for every token or finer.

    Raises:
        ValueError: a payload with scales that tokens share.
        RuntimeError: a rank was lost.
    """
    top_k = ids.shape[1]
    index, position, offs = sort_by_expert(ids, group.size, owners)
    counts = torch.diff(offs, prepend=offs.new_zeros(1)).to(torch.int32)
    theirs = torch.empty_like(counts)
    group.all_to_all(counts, [1] * group.size, [1] * group.size, out=theirs)
    known = _Later(torch.stack([counts, theirs]))
    # what needs no counts is queued before anyone waits for them
    slots = ids.reshape(-1)[index.long()]  # those of no expert lie behind all others
    if payload is None:
        moved = [moe_permute(x, index, top_k)[0]]
    else:
        quantized = quantize(x, expect_payload("dispatch.payload", payload))
        moved = list(moe_permute(quantized.codes, index, top_k, quantized.scale))
    send, receive = known.tolist()
    group.check()  # a collective that was aborted leaves any numbers
    count = sum(send)
    parts = [group.all_to_all(t[:count], send, receive) for t in moved]
    arrived = group.all_to_all(slots[:count], send, receive).view(-1, 1)
    rows = parts[0] if payload is None else Quantized(parts[0], parts[1], payload, check=False)
    return Dispatched(rows, arrived, position, send, receive)


class _Later:
    """Numbers on their way from the device; work that is queued after them does not delay them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers, self._event = numbers, None
        if numbers.device.type == "cuda":
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def tolist(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()


def combine(
    group: Group, y: Tensor, dispatched: Dispatched, weights: Tensor | None, payload: str | None = None
) -> Tensor:
    """The way back of `dispatch`: the experts' outputs (R, H) to the tokens' ranks, and their weighted sums (T, H).

    Every slot travels by itself and the sum runs over a token's slots in their order, so the result does not depend on
    how the experts are placed. A payload rounds the outputs to its scheme.
    """
    there, back = dispatched.receive, dispatched.send  # what came goes back
    if payload is not None:
        quantized = quantize(y, expect_payload("combine.payload", payload))
        codes = group.all_to_all(quantized.codes, there, back)
        scale = group.all_to_all(quantized.scale, there, back)
        rows = Quantized(codes, scale, payload, check=False).dequantize(y.dtype)
    else:
        rows = group.all_to_all(y, there, back)
    slots = dispatched.position.numel()
    if rows.shape[0] < slots:  # the op takes a row for every slot; those of dropped ones are not read
        rows = torch.cat([rows, rows.new_zeros((slots - rows.shape[0], rows.shape[1]))])
    return moe_unpermute(rows, dispatched.position, weights)


def expect_payload(what: str, payload: str) -> str:
    """Raise ValueError unless rows of this scheme can be told apart from each other."""
    scheme = scheme_of(payload)
    if scheme.granularity.rows != 1 or "zero_point" in scheme.outputs or "global_scale" in scheme.outputs:
        raise ValueError(f"{what}: expected a scheme with scales for every token, got {payload!r}")
    return payload
