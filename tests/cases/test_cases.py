"""Faults that other projects had, one case each: fpk's answer passes the case's check, the imitated fault does not."""

import checkpoint_adapters  # noqa: F401  registers its own
import pytest
import torch
from adapters import ADAPTERS, FAILING, REFUSED, WAITING, exists
from cases_open import CASES
from torch import Tensor

ON_GPU = torch.cuda.is_available()
BY_ID = {c["id"]: c for c in CASES}

adapted = pytest.mark.parametrize("case", [c for c in CASES if c["id"] in ADAPTERS], ids=lambda c: c["id"])


def answer(case, inputs):
    try:
        return to_cpu(ADAPTERS[case["id"]](to_device(inputs)))
    except (ValueError, NotImplementedError) as error:  # an answer too; the check says whether it is a right one
        return error


def to_device(value):
    """Inputs on the GPU where there is one; views keep the buffer around them, for some cases are about that."""
    if isinstance(value, dict):
        return {k: to_device(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_device, value))
    if not isinstance(value, Tensor) or not ON_GPU:
        return value
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage()).cuda()
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def to_cpu(value):
    if isinstance(value, dict):
        return {k: to_cpu(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_cpu, value))
    return value.cpu() if isinstance(value, Tensor) else value


@adapted
def test_case(case):
    inputs = case["make_inputs"]()
    out = answer(case, inputs)
    try:
        case["check"](out, inputs)
    except Exception as failure:
        if case["id"] in FAILING:
            pytest.xfail(FAILING[case["id"]])
        raise failure from (out if isinstance(out, Exception) else None)
    assert case["id"] not in FAILING, f"passes now: take {case['id']} from FAILING"


@adapted
def test_imitated_fault_is_caught(case):
    inputs = case["make_inputs"]()
    try:
        fault = case["bad"](inputs)
    except Exception as error:
        fault = error
    with pytest.raises(AssertionError):
        case["check"](fault, case["make_inputs"]() | {k: v for k, v in inputs.items() if k == "calls"})


def test_every_case_is_adapted_or_waits():
    assert sorted([*ADAPTERS, *WAITING, *REFUSED]) == sorted(BY_ID)


@pytest.mark.parametrize("id", REFUSED)
def test_what_fpk_does_not_do_is_refused(id):
    with pytest.raises(ValueError, match="expected"):
        REFUSED[id](to_device(BY_ID[id]["make_inputs"]()))


@pytest.mark.parametrize("id", WAITING)
def test_what_a_case_waits_for_is_missing(id):
    need = WAITING[id]
    assert not exists(need), f"{need} is here: move {id} ({BY_ID[id]['op']}) from WAITING to an adapter"


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_token", "fp8_channel"])
def test_zero_row_in_every_granularity(scheme):
    """B12 asks for more than tokens."""
    import adapters

    import fpk

    case = BY_ID["B12"]
    inputs = case["make_inputs"]()
    case["check"](to_cpu(adapters.parts(fpk.quantize(to_device(inputs["x"]), scheme))), inputs)
