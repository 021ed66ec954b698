"""The laws can fail: each of these wrong kernels is caught, and an unchanged copy of each op is not."""

import pytest
from planted import Plant, change, first_violation, load, source_of

from fpk.op import OPS

EXAMPLES = 40

PLANTS = [
    Plant(
        "quantize_fp8_token", "dropped scale", "tl.math.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))", "x", 2
    ),
    Plant("quantize_fp8_token", "tail off by one", "(offs_k < K)[None, :]", "(offs_k < K + 1)[None, :]", 3),
    Plant(
        "quantize_fp8_token", "store without its mask in K",
        "tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)",
        "tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=(offs_m < M)[:, None])", 2,
    ),
    Plant(
        "quantize_fp8_token", "one scale for the whole tile",
        "amax_of_key(tl.max(keys, axis=1))", "amax_of_key(tl.max(keys, axis=1) * 0 + tl.max(keys))",
    ),
    Plant(
        "quantize_fp8_token", "last row unwritten",
        "tl.store(scale_ptr + rows, scale, mask=mask_m)", "tl.store(scale_ptr + rows, scale, mask=offs_m < M - 1)",
    ),
    Plant(
        "quantize_fp8_token", "no zero-row guard",
        "tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))", "tl.math.div_rn(amax, QMAX)", 2,
    ),
    Plant("quantize_fp8_token", "NaN counts", "amax_key(x), 0)", "amax_key(tl.where(x != x, 1e30, x)), 0)", 2),
    Plant("quantize_fp8_token", "NaN lost", "encode_fp8(quotient,", "encode_fp8(tl.maximum(quotient, -1e30),", 2),
    Plant(
        "quantize_fp8_token", "wrong in one kernel of two",
        "amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=1))",
        "amax_of_key(tl.max(tl.where(mask, amax_key(x), 0), axis=1)) * 1.0000001",
    ),
    Plant("quantize_fp8_token", "stack index dropped", "rows = e * M + offs_m", "rows = offs_m", 2),
]  # fmt: skip

PLANTED_OPS = sorted({p.op for p in PLANTS})


@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_wrong_kernel_is_caught(plant, tmp_path, monkeypatch, launches):
    wrong = load(plant.op, change(source_of(OPS[plant.op]), plant), tmp_path, monkeypatch)
    assert first_violation(wrong, EXAMPLES) is not None
    assert launches() > 0


@pytest.mark.parametrize("name", PLANTED_OPS)
def test_unchanged_copy_passes(name, tmp_path, monkeypatch, launches):
    copy = load(name, source_of(OPS[name]), tmp_path, monkeypatch)
    assert first_violation(copy, EXAMPLES) is None
    assert launches() >= EXAMPLES


def test_a_pattern_that_moved_is_noticed():
    with pytest.raises(AssertionError, match="expected 1 of 'absent'"):
        change("present", Plant("x", "y", "absent", ""))
