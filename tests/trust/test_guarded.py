"""The guard around memory sees what it is for, in every type and by every way that a kernel touches memory."""

import guarded
import pytest
import torch
import triton
import triton.language as tl

FLOATS = (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_nobody_wrote_is_nan(dtype):
    assert torch.empty(3, 5, dtype=dtype).float().isnan().all()
    assert torch.empty_like(torch.zeros(4, dtype=dtype)).float().isnan().all()
    fenced = guarded.fenced(torch.zeros(8, dtype=dtype))
    around = torch.empty(0, dtype=dtype).set_(fenced.untyped_storage(), 0, (fenced.storage_offset() + 16,))
    assert around[:4].float().isnan().all() and around[-4:].float().isnan().all() and (fenced.float() == 0).all()


@triton.jit
def _touch(ptr, at, HOW: tl.constexpr):
    if HOW == "load":
        tl.store(ptr, tl.load(ptr + at))
    elif HOW == "store":
        tl.store(ptr + at, 1)
    elif HOW == "add":
        tl.atomic_add(ptr + at, 1)
    else:
        tl.atomic_cas(ptr + at, 0, 1)


@pytest.mark.parametrize("how", ["load", "store", "add", "cas"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's addresses; a memory checker's on a GPU")
def test_every_way_to_a_byte_outside_is_seen(how):
    for at in (3, -1, 4):
        inside = guarded.fenced(torch.zeros(4, dtype=torch.int32))
        _touch[(1,)](inside, at, HOW=how)
        if at == 3:
            guarded.check()
        else:
            with pytest.raises(AssertionError, match="outside its tensors"):
                guarded.check()
