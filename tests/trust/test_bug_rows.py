"""Faults that others reported: rows without a case (tests/cases has those) by their id, and their kind in every op.

results/bug-reports.csv names the test of every row; the last test here holds it to that.
"""

import csv
import re
from pathlib import Path

import pytest
import torch
from op_laws import make, middle

import fpk
from fpk import db
from fpk.device import Device, pretend
from fpk.op import OPS

ROOT = Path(__file__).parents[2]
FNUZ = torch.float8_e4m3fnuz
DYNAMIC_FP8 = ("quantize_fp8_token", "quantize_fp8_tensor", "quantize_fp8_group", "quantize_fp8_block")
FREE = ("moe_permute", "swizzle_scales")
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@pytest.mark.parametrize("name", DYNAMIC_FP8)
def test_B11_fnuz_scales_by_224(name, device):
    codes, scale = OPS[name](torch.ones(3, 32, device=device), dtype=FNUZ)
    assert torch.equal(scale, torch.full_like(scale, 1.0) / torch.tensor(224.0, device=device))
    assert torch.equal(codes.float().unique(), torch.tensor([224.0], device=device))


@every_op
def test_B71_scales_of_one_dimension_are_not_guessed(op):
    """Nor scales with an element too many: shapes are refused by name, never broadcast (B20)."""
    for name, value in make(op, middle(op)).items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or not re.match("(global_)?scale|zero_point", name):
            continue
        wider = torch.cat([value, value[..., :1]], dim=-1)
        wrongs = [value.flatten(), wider, value[None]]
        if op.name in FREE:  # whatever has two dimensions is right
            wrongs = [value.flatten(), value[None, None]]
        for wrong in wrongs:
            args = make(op, middle(op)) | {name: wrong}
            with pytest.raises(ValueError, match=f"{op.name}.{name}"):
                op(**args)


def test_B115_more_slots_than_32_bits_count_are_refused():
    """Slots are numbered in int32: tokens * top_k stays below 2^31, which is checked and not found out."""
    ids = torch.empty(2**28, 8, dtype=torch.int32, device="meta")
    for name, args in (
        ("sort_by_expert", dict(ids=ids, num_experts=8)),
        ("moe_unpermute", dict(x=torch.empty(2**31, 8, dtype=torch.bfloat16, device="meta"), position=ids)),
    ):
        op = OPS[name]
        with pytest.raises(ValueError, match=rf"{name}.*2\^31"):
            op._validate(op.bind(**args))


def test_B134_tables_of_another_triton_are_used():
    """A row is found by GPU and shape; the version that measured it is told in its run and picks nothing."""
    gpu = Device("sm90", "NVIDIA H200", "nv", 132)
    run = db.Run("amax", gpu.id, "2026-01-01", "0.1", "2.11", "3.2.0", "13", "1", "abc", "graph", "1980", "3201", "700")
    op, args = OPS["amax"], dict(x=torch.empty(64, 64, dtype=torch.bfloat16, device="meta"))
    with pretend(gpu):
        bound = op.bind(**args)
        other = list(op.configs(**bound))[-1]
        row = db.Row(op.key(**bound), 1, other, 1.0, 2.0, 0.1, 0, "case", run.run)
        texts = {f"{gpu.id}/amax.csv": db.dump_table([row]), f"{gpu.id}/runs.csv": db.dump_runs([run])}
        with fpk.use(db.Tables(db.MemorySource(texts, "memory"))):
            assert op.config_for(**args) == other


@pytest.mark.parametrize("name", ["scaled_mm_group", "mm_weight_only", "grouped_mm_weight_only", "grouped_scaled_mm",
                                  "grouped_scaled_mm_group", "grouped_mm", "scaled_mm"])  # fmt: skip
def test_B64_B66_one_rounding_after_scale_and_bias(name, device):
    """Sums of 257 by scale, plus a bias of 1: 258 in bf16, but 256 or 257 where something was rounded before. And sums
    beyond fp16 with scales that bring them back."""
    op = OPS[name]
    case = {k: v[0] for k, v in op.domain.items()} | dict(M=5, N=16, K=272, bias=True, out_dtype=torch.bfloat16)
    case |= {k: v for k, v in dict(E=3, a_dtype=torch.bfloat16, kind="normal").items() if k in op.domain}
    args = op.inputs(**case, device=device)
    ones = {"a": 257, "b": 272}
    for key, count in ones.items():
        value = torch.zeros(args[key].shape, device=device)
        value[..., :count] = 1
        args[key] = value.to(args[key].dtype)
    for key in args:
        if key.startswith("scale"):
            args[key] = (
                torch.ones_like(args[key]) if args[key].dtype is torch.float32 else torch.full_like(args[key], 127)
            )
    args["bias"] = torch.ones_like(args["bias"])
    rows = slice(None) if "offs" not in args else slice(0, int(args["offs"][-1]))
    assert torch.equal(op(**args)[rows].float().unique(), torch.tensor([258.0], device=device))
    down = [key for key in args if key.startswith("scale") and args[key].dtype is torch.float32]
    if down and "out_dtype" in args:
        big = 448.0 if args["a"].dtype.itemsize == 1 and args["a"].is_floating_point() else 100.0
        for key in ("a", "b"):
            args[key] = torch.full(args[key].shape, big, device=device).to(args[key].dtype)
        args[down[0]] = torch.full_like(args[down[0]], 2.0**-14)
        args |= dict(bias=torch.zeros_like(args["bias"]), out_dtype=torch.float16)
        out = op(**args)[rows].float()
        assert bool(out.isfinite().all()) and out.numel() and out.max() > 0


def test_B53_ties_to_even_and_saturation_in_every_int_quantizer(device):
    """The case's vector, under scales that the data give: the largest element is the format's."""
    for name, largest, options in (
        ("quantize_int8_token", 127.0, {}), ("quantize_int8_group", 127.0, dict(group=16)),
        ("quantize_int8_tensor", 127.0, {}), ("quantize_int4_group", 7.0, dict(group=16)),
    ):  # fmt: skip
        x = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, largest] * 2], device=device)
        codes, scale = OPS[name](x, **options)[:2]
        if codes.dtype is torch.uint8:
            nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()
            codes = ((nibbles ^ 8) - 8) if int(nibbles[0, 7]) < 8 else nibbles - 8
        assert codes[0, :8].tolist() == [0, 2, 2, 0, -2, -2, 4, int(largest)], name
        assert torch.equal(scale, torch.ones_like(scale)), name


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_mm_group", "mm_weight_only", "mm_packed"])
def test_B58_every_split_gives_what_one_gives(name):
    """Whatever the share of K: not even the last bit depends on tiles where sums are exact."""
    op = OPS[name]
    case = middle(op) | dict(M=5, N=33, K=272)
    args = make(op, case)
    bound = op.bind(**args)
    splits = [c for c in op.configs(**bound) if c.get("SPLIT_K", 1) > 1 and op.is_legal(c, bound, op._device(bound))]
    assert splits
    reference = op.reference(**make(op, case))
    for config in {c["SPLIT_K"]: c for c in splits}.values():
        out = op.launch(**args, config=config)
        fpk.check.assert_close(out, reference, op.tolerance(bound), str(config))


# ---- the table -------------------------------------------------------------------------------------------------------
def test_every_report_has_a_test():
    with (ROOT / "results/bug-reports.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len({r["id"] for r in rows}) == len(rows) == 87
    for row in rows:
        assert row["verdict"] in ("right", "refused", "cannot apply"), row
        assert row["test"] or row["verdict"] == "cannot apply", row
        for test in filter(None, row["test"].split("; ")):
            path, _, name = test.partition("::")
            text = (ROOT / path).read_text()
            assert f"def {name.partition('[')[0]}(" in text, test


def test_the_table_knows_every_case():
    import sys

    sys.path.insert(0, str(ROOT / "tests/cases"))
    from adapters import ADAPTERS, REFUSED

    with (ROOT / "results/bug-reports.csv").open(newline="") as file:
        rows = {r["id"]: r for r in csv.DictReader(file)}
    for id in (*ADAPTERS, *REFUSED):
        assert f"[{id}]" in rows[id]["test"], id
