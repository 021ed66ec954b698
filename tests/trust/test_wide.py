"""Rows of several tiles: the domains of packing ops end within the first, as mutants showed."""

import pytest
from op_laws import check_reference, middle

from fpk.op import OPS


@pytest.mark.parametrize("name", ["pack_fp4", "pack_fp6", "unpack_fp4", "unpack_fp6"])
def test_rows_of_several_tiles(name, launches):
    op = OPS[name]
    for layout in ("contiguous", "transposed"):
        check_reference(op, middle(op) | dict(M=9, K=9004, E=2, layout=layout))
    assert launches() > 0
