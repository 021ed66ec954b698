"""Laws that living mutants asked for, where no law of all ops could notice them."""

import contextlib

import pytest
import torch
import triton
from op_laws import far_apart, make, middle, results

from fpk.check import assert_close
from fpk.device import of, pretend
from fpk.kernels.gemm._weight_shares import renamed
from fpk.kernels.moe._gluon_grouped import schedule_kernel
from fpk.op import OPS


@pytest.mark.parametrize("name", ["quantize_mx", "act_and_mul_quantize_mx"])
@pytest.mark.parametrize("tiny", [2.0**-127, 2.0**-130, 2.0**-133])
def test_mx_of_nothing_but_tiny_values(name, tiny, device):
    """A program that sees no larger block takes a way of its own. The largest of some blocks lie below every scale."""
    op = OPS[name]
    x = torch.full((8, 128), tiny, dtype=torch.bfloat16, device=device)
    x[::2] *= -1
    args = dict(x=x, format="mxfp4", packed=True)
    if name.startswith("act"):
        args |= dict(activation="relu2", gated=False)
        args["x"] = x.abs().float().sqrt().to(torch.bfloat16)
    bound = op.bind(**args)
    for config in op.configs(**bound):
        if op.is_legal(config, bound, op._device(bound)):
            assert_close(op.launch(**args, config=config), op.reference(**bound), 0.0, f"{config}: out")


def test_weights_of_experts_that_pass_on_may_be_negative(device):
    weights = torch.tensor([[-0.5, 0.25, -1.0]], device=device)
    ids = torch.tensor([[4, 0, 5]], dtype=torch.int32, device=device)
    out, found, passed = OPS["map_experts"](weights, ids, 4, 2)
    assert out.tolist() == [[0, 0.25, 0]] and found.tolist() == [[-1, 0, -1]] and passed.tolist() == [[-1.5]]


@pytest.mark.parametrize("counts", [[5, 0, 33, 16, 1], [0, 0, 0], [40], [0, 17, 0, 3], [16, 16, 15]])
@pytest.mark.parametrize("spare", [0, 20])
def test_schedule_of_row_tiles(counts, spare, device):
    """The kernel that cuts rows of experts into tiles, against a loop; rows behind the last expert are of none."""
    block, ends = 16, torch.tensor(counts).cumsum(0)
    rows, experts = int(ends[-1]) + spare, len(counts)
    expected = []
    for expert, (count, end) in enumerate(zip([*counts, spare], [*ends.tolist(), rows], strict=True)):
        expected += [(expert, start, end) for start in range(end - count, end, block)]
    most = triton.cdiv(rows, block) + experts + 1
    table = torch.zeros(1 + 3 * (most + 32), dtype=torch.int32, device=device)
    offs = ends.to(torch.int32).to(device)
    bins = triton.next_power_of_2(experts + 1)
    schedule_kernel[(triton.cdiv(most, 32),)](
        offs, table, rows, experts, PDL=False, BLOCK_E=bins, BLOCK_M=block, BLOCK=32
    )  # fmt: skip
    total = int(table[0])
    assert [tuple(line) for line in table[1 : 1 + 3 * total].reshape(-1, 3).tolist()] == expected


OF_X = [n for n, op in OPS.items() if "x" in op._parameters and "special" in op.domain.get("kind", ())]


@pytest.mark.parametrize("name", OF_X)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_but_nan(name, dtype, device):
    """The maximum of no finite value is 0, and of NaN there is no other."""
    op = OPS[name]
    case = middle(op) | dict(kind="normal", layout="contiguous", x_dtype=dtype)
    args, theirs = make(op, case), make(op, case)
    args["x"][..., 0, :] = theirs["x"][..., 0, :] = float("nan")
    assert_close(results(op, op, args), results(op, op.reference, theirs), op.tolerance(op.bind(**args)))
    args["x"][:], theirs["x"][:] = float("nan"), float("nan")
    assert_close(results(op, op, args), results(op, op.reference, theirs), op.tolerance(op.bind(**args)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to be another GPU")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("arch", [None, "sm80"])
def test_what_rounds_to_negative_zero_keeps_its_sign(arch, dtype):
    """By the units of a GPU that has them, and by integers where it has none; on a CPU both are interpreted."""
    x = torch.tensor([[448.0, -0.0, 0.0, -1e-20, 1e-20, -1e-30]])
    with pretend(arch) if arch else contextlib.nullcontext():
        codes, _ = OPS["quantize_fp8_token"](x, dtype=dtype)
    assert [int(c) >> 7 for c in codes.view(torch.uint8)[0, 1:]] == [1, 0, 1, 0, 1]
    assert not any(int(c) & 0x7F for c in codes.view(torch.uint8)[0, 1:])


@pytest.mark.parametrize("rows, columns", [(3, 128), (1, 130), (2, 2304)])
def test_columns_of_activations_are_renamed(rows, columns, device):
    """Of every 128, 32 q + 16 s + 4 j + 2 h + e goes to 64 s + 16 j + 8 h + 2 q + e; zeros fill up the last."""
    a = torch.randn(rows, columns + 6).to(torch.bfloat16).to(device)[:, :columns]
    width = -(-columns // 128) * 128
    padded = torch.nn.functional.pad(a, (0, width - columns)).reshape(rows, -1, 4, 2, 4, 2, 2)  # q, s, j, h, e
    expected = padded.permute(0, 1, 3, 4, 5, 2, 6).reshape(rows, width)
    for given in (a, far_apart(a, 0)) if rows > 2 else (a,):
        assert_close(renamed(given, of(a.device)), expected.contiguous(), 0.0)
