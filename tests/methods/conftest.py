"""Fixtures of the method tests."""

import pytest
import torch

import fpk.op


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
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
