"""The laws can fail: each of these wrong kernels is caught, and an unchanged copy of each op is not."""

import pytest
from planted import Plant, change, first_violation, load, source_of

from fpk.op import OPS

EXAMPLES = 40

PLANTS = [
    Plant("quantize_fp8_token", "dropped scale", "quantize_fp8(x, scale[:, None],",
          "quantize_fp8(x, scale[:, None] * 0 + 1.0,"),
    Plant("quantize_fp8_token", "tail off by one", "(offs_k < K)[None, :]", "(offs_k < K + 1)[None, :]", 3),
    Plant(
        "quantize_fp8_token", "store without its mask in K",
        "tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=mask)",
        "tl.store(codes_ptr + rows[:, None] * K + offs_k[None, :], codes, mask=(offs_m < M)[:, None])", 2,
    ),
    Plant(
        "quantize_fp8_token", "one scale for the whole tile",
        "amax_of_key(tl.max(keys, axis=1))", "amax_of_key(tl.max(keys, axis=1) * 0 + tl.max(keys))", 2,
    ),
    Plant(
        "quantize_fp8_token", "last row unwritten",
        "tl.store(scale_ptr + rows, scale, mask=mask_m)", "tl.store(scale_ptr + rows, scale, mask=offs_m < M - 1)",
    ),
    Plant(
        "quantize_fp8_token", "no zero-row guard",
        "tl.maximum(tl.math.div_rn(amax, QMAX), 1 / (512 * QMAX))", "tl.math.div_rn(amax, QMAX)", 4,
    ),
    Plant("quantize_fp8_token", "NaN counts", "keys = tl.maximum(keys, tl.where(mask, amax_key(x), 0))",
          "keys = tl.maximum(keys, tl.where(mask, amax_key(tl.where(x != x, 1e30, x)), 0))"),
    Plant("quantize_fp8_token", "NaN lost", "quantize_fp8(x, scale", "quantize_fp8(tl.where(x != x, 0.0, x), scale"),
    Plant(
        "quantize_fp8_token", "wrong in one kernel of two",
        "amax = tl.max(tl.abs(x), axis=1)", "amax = tl.max(tl.abs(x), axis=1) * 1.0000005",
    ),
    Plant("quantize_fp8_token", "stack index dropped", "rows = e * M + offs_m", "rows = offs_m", 3),
    Plant("quantize_fp8_tensor", "dropped scale", "quantize_fp8(x, scale,", "quantize_fp8(x, scale * 0 + 1.0,"),
    Plant(
        "quantize_fp8_tensor", "no zero guard",
        "tl.maximum(tl.math.div_rn(total_amax(key_ptr, e, parts, BLOCK_P), QMAX), 1 / (512 * QMAX))",
        "tl.math.div_rn(total_amax(key_ptr, e, parts, BLOCK_P), QMAX)", 2,
    ),
    Plant(
        "quantize_fp8_tensor", "first matrix's maximum for all", "total_amax(key_ptr, e,", "total_amax(key_ptr, 0,", 2,
    ),
    Plant("quantize_fp8_tensor", "scales of a stack unwritten", "tl.store(scale_ptr + e, scale)",
          "tl.store(scale_ptr, scale)", 2),
    Plant("quantize_fp8_tensor", "padding rows unquantized", "(offs_m < M)[:, None]", "(offs_m < M - 1)[:, None]"),
    Plant("dequantize", "dropped scale", "(value * scale)", "(value)"),
    Plant("dequantize", "groups along K ignored", "(offs_k * 0 if COLS == -1 else offs_k // COLS)", "(offs_k * 0)"),
    Plant("dequantize", "groups along M ignored", "(offs_m * 0 if ROWS == -1 else offs_m // ROWS)", "(offs_m * 0)"),
    Plant("dequantize", "zero point added", "value -= zero", "value += zero"),
    Plant("dequantize", "tail off by one", "(offs_k < K)[None, :]", "(offs_k < K + 1)[None, :]"),
    Plant("dequantize", "NaN codes are numbers", "decode_fp8(code, MANTISSA, BIAS, NAN_CODE, IEEE)",
          "decode_fp8(code, MANTISSA, BIAS, 0, False)"),
    Plant(
        "dequantize", "missing other", "mask=mask, other=0)\n    if E8M0:\n        scale = decode_e8m0(scale)",
        "mask=mask & (offs_k < K - 1)[None, :])\n    if E8M0:\n        scale = decode_e8m0(scale)",
    ),
    Plant("scaled_mm", "dropped scale", "out *= tl.load(scale_b_ptr", "tl.load(scale_b_ptr"),
    Plant("scaled_mm", "missing other in the tail of K", "mask=offs_k < K, other=0.0)", "mask=offs_k < K)"),
    Plant(
        "scaled_mm", "wrong axis of the weight's scale",
        "tl.load(scale_b_ptr + offs_n * stride_sb, mask=mask_n, other=0.0)[None, :]",
        "tl.load(scale_b_ptr + offs_m * stride_sb, mask=mask_m, other=0.0)[:, None]",
    ),
    Plant("scaled_mm", "scales read past the end", "tl.load(scale_b_ptr + offs_n * stride_sb, mask=mask_n, other=0.0)",
          "tl.load(scale_b_ptr + offs_n * stride_sb)"),
    Plant("scaled_mm", "zero point added", "acc -= zero[:, None]", "acc += zero[:, None]"),
    Plant("scaled_mm", "last row unwritten", "mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]\n    tl.store",
          "mask = (offs_m < M - 1)[:, None] & (offs_n < N)[None, :]\n    tl.store"),
    Plant("scaled_mm", "a part of the split lost", "for _ in range(1, SPLIT_K)", "for _ in range(2, SPLIT_K)"),
    Plant("scaled_mm", "bias dropped", "if bias_ptr is not None:", "if False:"),
    Plant("route", "ties to the higher id", "COUNT - 1 - ", "0 + ", 2),
    Plant("route", "weights of the first experts", "stride_lm + ids * stride_le", "stride_lm + pick * stride_le"),
    Plant("route", "a group too few", "for _ in range(TOPK_GROUP)", "for _ in range(TOPK_GROUP - 1)"),
    Plant("sort_by_expert", "dropped slots keep their number", "tl.where(local, slots, -1)", "slots"),
    Plant("sort_by_expert", "not stable", "(other[None, :] < row[:, None])", "(other[None, :] > row[:, None])"),
    Plant("sort_by_expert", "earlier chunks forgotten", "(other < chunk)[:, None]", "(other < chunk - 1)[:, None]"),
    Plant("moe_permute", "weight of the first slot", "slot % top_k * stride_wk", "0 * stride_wk"),
    Plant("moe_unpermute", "dropped slots count", "mask=there[:, None] & mask_k", "mask=mask_k"),
    Plant("moe_unpermute", "unweighted", "value *= w[:, None]", "value *= 1.0"),
    Plant("grouped_mm", "bias of the first expert", "bias_ptr + e * stride_bias", "bias_ptr"),
    Plant("grouped_mm", "weights of the first expert", "b_ptr + e * stride_be", "b_ptr"),
    Plant("grouped_scaled_mm", "scales of the first expert", "scale_b_ptr + e * stride_sbe", "scale_b_ptr"),
    Plant("grouped_scaled_mm", "rows of no expert unwritten", "elif expert == E:", "elif expert == E + 99:"),
    Plant("grouped_scaled_mm_group", "scales of the first expert", "sb_ptr + e * stride_sbe", "sb_ptr"),
    Plant("grouped_mm_weight_only", "scales of the first expert", "scale_ptr + e * stride_se", "scale_ptr"),
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
