"""Layers of every method in an engine: batch invariance, graphs, threads."""

import threading

import engine
import pytest
import torch
from table import EXPERTS, LINEAR

from fpk.check import bits

with torch.device("cpu"):  # torch remembers now which functions make tensors, before tests replace some
    torch.empty(0)

METHODS = [*LINEAR, *EXPERTS]
ON_GPU = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _device(device):
    with torch.device(device):
        yield


@pytest.mark.parametrize("method", METHODS)
def test_rows_do_not_depend_on_the_batch(method):
    assert engine.is_batch_invariant(method)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_graph_serves_every_routing(method):
    assert engine.replays_with_changed_routing(method)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("method", METHODS)
def test_layers_on_a_gpu_that_is_not_current(method):
    x, (weights, ids) = engine.values(9, engine.H, seed=3), engine.routing(9, 5)
    with torch.no_grad():
        here = engine.call(engine.made(method), x, weights, ids)
        with torch.device("cuda:1"):
            layer = engine.made(method)
        there = engine.call(layer, *(t.to("cuda:1") for t in (x, weights, ids)))
    assert there.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(bits(there).cpu(), bits(here).cpu())


@pytest.mark.parametrize("method", ["Fp8PtpcOnlineLinearMethod", "Fp8PtpcOnlineMoEMethod"])
def test_many_threads_share_a_layer(method, monkeypatch):
    """First calls included: every thread finds configs, compiles and launches for itself."""
    if not ON_GPU:  # the interpreter serves one thread at a time
        monkeypatch.setattr("fpk.op.INTERPRETING", False)
        for op in engine.fpk.OPS.values():
            op._memo.clear()
    layer = engine.made(method)
    inputs = [(engine.values(t, engine.H, seed=t), *engine.routing(t, t)) for t in range(1, 9)]
    outputs: list[torch.Tensor | None] = [None] * len(inputs)
    start = threading.Barrier(len(inputs))

    def run(i: int) -> None:
        start.wait()
        with torch.no_grad():
            for _ in range(3):
                outputs[i] = engine.call(layer, *inputs[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for given, out in zip(inputs, outputs, strict=True):
            assert out is not None and torch.equal(bits(out), bits(engine.call(layer, *given)))
    if not ON_GPU:
        for op in engine.fpk.OPS.values():
            op._memo.clear()
