"""What only a GPU can show: offsets beyond 2^31, CUDA graphs, inductor, a device that is not the current one."""

import threading

import pytest
import torch
from op_laws import make, middle, results

from fpk.check import assert_close
from fpk.device import of
from fpk.op import OPS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; run by hand on the H200")

every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
ROWS, COLS, LAST = 70_000, 32_768, 40  # 2.3e9 elements, and the rows that are compared

ROW_WISE = {
    "quantize_fp8_token": {}, "quantize_fp8_group": {}, "quantize_int8_token": {}, "quantize_int8_group": {},
    "quantize_int8_token_asymmetric": {}, "act_and_mul": {}, "act_and_mul_quantize_fp8_token": {},
    "act_and_mul_quantize_fp8_group": {}, "act_and_mul_quantize_int8_token": {},
}  # fmt: skip


def huge() -> torch.Tensor:
    x = torch.empty(ROWS, COLS, dtype=torch.bfloat16, device="cuda")
    x[-LAST:].normal_(generator=torch.Generator("cuda").manual_seed(1))
    return x


@pytest.mark.parametrize("name", ROW_WISE)
def test_offsets_beyond_int32(name):
    x, op = huge(), OPS[name]
    out, expected = op(x), op.reference(x[-LAST:])
    out, expected = (v if isinstance(v, tuple) else (v,) for v in (out, expected))
    args = op.bind(x)
    for o, e in zip(out, expected, strict=True):
        assert_close(o[-LAST:].contiguous(), e.contiguous(), op.tolerance(args))


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_mm_group", "mm_weight_only"])
def test_products_beyond_int32(name):
    op = OPS[name]
    args = op.inputs(M=ROWS, N=COLS, K=128, device="cuda")
    out = op(**args)
    last = {n: v[-LAST:] if n in ("a", "scale_a") else v for n, v in args.items()}
    assert_close(out[-LAST:].contiguous(), op.reference(**last), op.tolerance(op.bind(**args)))


@every_op
def test_cuda_graph_replays_with_new_values(op):
    case = middle(op)
    args, fresh = make(op, case), op.inputs(**case, device="cuda", seed=11)
    op(**args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = op(**args)
    for name, value in args.items():
        if isinstance(value, torch.Tensor):
            value.copy_(fresh[name])
    graph.replay()
    torch.cuda.synchronize()
    assert_close(results(op, lambda **_: captured, args), results(op, op, fresh), 0.0)


@every_op
def test_inductor_runs_it(op):
    torch._dynamo.reset()
    compiled = torch.compile(lambda kwargs: op(**kwargs), fullgraph=True)
    out = results(op, lambda **args: compiled(args), make(op, middle(op)))
    assert_close(out, results(op, op, make(op, middle(op))), 0.0)


@every_op
def test_a_device_that_is_not_current(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    args = make(op, middle(op))
    there = {n: v.to("cuda:1") if isinstance(v, torch.Tensor) else v for n, v in args.items()}
    out, here = results(op, op, there), results(op, op, args)
    out = tuple(v.cpu() for v in out) if isinstance(out, tuple) else out.cpu()
    here = tuple(v.cpu() for v in here) if isinstance(here, tuple) else here.cpu()
    assert_close(out, here, 0.0)


@pytest.mark.parametrize("name", ["scaled_mm", "scaled_mm_group", "mm_weight_only", "grouped_scaled_mm", "mm_packed"])
def test_the_first_thing_that_a_thread_does(name):
    """Everything is compiled and cached already: nothing but the op gives the thread a context."""
    op = OPS[name]
    args = make(op, middle(op) | dict(M=300, N=512, K=1024))
    expected, outs = op(**args), []

    def call() -> None:
        outs.append(op(**args))

    first: dict[str, dict] = {}  # of each kernel the first that is legal: all of them compile for an hour
    for config in op.configs(**op.bind(**args)):
        if op.is_legal(config, op.bind(**args), of(torch.device("cuda"))):
            first.setdefault(config.get("kernel", ""), config)
    for config in first.values():
        op.launch(**args, config=config)
        thread = threading.Thread(target=lambda config=config: outs.append(op.launch(**args, config=config)))
        thread.start()
        thread.join()
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(outs) > 1
    for out in outs:
        assert_close(out, expected, 2 * op.tolerance(op.bind(**args)))
    assert torch.equal(outs[-1], expected)
