"""Fixtures of the method tests."""

import contextlib

import pytest
import torch

import fpk.op


@pytest.fixture(autouse=True)
def _inference():
    with torch.no_grad(), torch.device("cuda") if torch.cuda.is_available() else contextlib.nullcontext():
        yield


@pytest.fixture
def on_cpu():
    """Tensors are made on the CPU, where ops run their references: for what the GPU at hand cannot be."""
    with torch.device("cpu"):
        yield


@pytest.fixture
def references(monkeypatch):
    """Ops on CPU tensors run their references: fast, and the kernels have their own laws."""
    _forget()
    monkeypatch.setattr(fpk.op, "INTERPRETING", False)
    yield
    _forget()


def _forget() -> None:
    """Empty the memos: what they hold depends on INTERPRETING."""
    for op in fpk.op.OPS.values():
        op._memo.clear()
