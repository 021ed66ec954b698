"""Laws that every op obeys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_laws import (
    any_case,
    check_config,
    check_corners,
    check_deterministic,
    check_far_apart,
    check_many_tiles,
    check_reference,
    check_strides,
    check_without_fp8_units,
    make,
    middle,
    pairwise,
    results,
)

from fpk.check import assert_close
from fpk.op import OPS

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@every_op
def test_matches_reference(op, launches):
    @given(case=any_case(op))
    def law(case):
        check_reference(op, case)

    law()
    assert launches() > 0


@every_op
def test_every_pair_of_options(op, launches):
    for pick, case in enumerate(pairwise(op)):
        check_reference(op, case)
        check_config(op, case, 7919 * pick)
    assert launches() > 0


@every_op
def test_no_config_changes_the_result(op, launches):
    @given(case=any_case(op), pick=st.integers(0, 10_000))
    def law(case, pick):
        check_config(op, case, pick)

    law()
    assert launches() > 0


@every_op
def test_every_argument_may_have_strides_or_is_refused(op):
    """Biases, offsets and scales too, which `layout` in a domain leaves alone."""
    check_strides(op)


@every_op
def test_every_corner_counts(op):
    check_corners(op)


@every_op
def test_matrices_of_many_tiles(op):
    check_many_tiles(op)


@every_op
def test_offsets_beyond_32_bits(op):
    check_far_apart(op)


@every_op
def test_deterministic(op, launches):
    check_deterministic(op, middle(op))
    assert launches() >= 2


@every_op
def test_same_bits_without_fp8_units(op):
    for seed_case in (middle(op), {n: tuple(v)[-1] for n, v in op.domain.items()}):
        check_without_fp8_units(op, seed_case)


@every_op
def test_fake_kernel_agrees(op):
    torch.library.opcheck(op.torch_op, (), make(op, middle(op)), test_utils="test_faketensor")


@every_op
def test_compiles_in_one_graph(op):
    torch._dynamo.reset()
    compiled = torch.compile(lambda kwargs: op(**kwargs), fullgraph=True, backend="aot_eager")
    out = results(op, lambda **args: compiled(args), make(op, middle(op)))
    assert_close(out, results(op, op, make(op, middle(op))), 0.0)


@every_op
def test_one_graph_for_every_m(op):
    """M >= 2 marked dynamic: one compilation serves every M."""
    if "M" not in op.domain:
        pytest.skip("no M")
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda kwargs: op(**kwargs), fullgraph=True, backend=backend, dynamic=None)
    for m in (4, 7, 12):
        case = middle(op) | dict(M=m, layout="contiguous") if "layout" in op.domain else middle(op) | dict(M=m)
        args = make(op, case)
        for value in args.values():
            if isinstance(value, torch.Tensor):
                for dim, size in enumerate(value.shape):
                    if size == m:
                        torch._dynamo.mark_dynamic(value, dim)
        out = results(op, lambda **args: compiled(args), args)
        assert_close(out, results(op, op, make(op, case)), 0.0)
    assert len(graphs) == 1, f"{len(graphs)} graphs for three values of M"


@every_op
def test_refuses_gradients(op):
    args = make(op, middle(op))
    name = next((n for n, v in args.items() if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
    if name is None:
        pytest.skip("no floating-point tensor")
    args[name] = args[name].detach().requires_grad_()
    with pytest.raises(ValueError, match=f"{op.name}.{name}: expected a tensor that needs no gradient"):
        op(**args)
    with torch.no_grad():
        op(**args)


@every_op
def test_unknown_config_key_is_refused(op):
    args = make(op, middle(op))
    config = op.config_for(**args)
    with pytest.raises(ValueError, match="BLOCK_TYPO"):
        op.launch(**args, config=config | dict(BLOCK_TYPO=1))


@every_op
def test_device_mismatch_is_refused(op):
    args = make(op, middle(op))
    tensors = [n for n, v in args.items() if isinstance(v, torch.Tensor)]
    if len(tensors) < 2:
        pytest.skip("one tensor")
    args[tensors[-1]] = args[tensors[-1]].to("meta")
    with pytest.raises((ValueError, NotImplementedError)):
        op.launch(**args, config=next(iter(op.configs(**op.bind(**args)))))
