"""What the inline assembly of row_copies.py does, for tests/gluon_language.py; the rest is block/counterparts.py."""

import torch
from counterparts import copy
from gluon_language import Pointer
from torch import Tensor


def copy_rows(at: int, rows: Tensor, chunks: Tensor, pointers: Pointer, bytes: Tensor) -> None:
    each = Pointer(pointers.tensor.view(torch.uint8), torch.as_tensor(pointers.at)[..., None] + torch.arange(16))
    flat, places, wanted = each.places(torch.arange(16) < bytes[..., None])
    data = torch.where(wanted, flat[places], torch.zeros((), dtype=torch.uint8))
    assert (rows * 8 + chunks).flatten().tolist() == list(range(data.numel() // 16))
    copy(at, data.flatten())


ASSEMBLY = dict(copy_rows=copy_rows)
