"""Rows and scales that no tensor descriptor can read, copied to shared memory by all lanes of the loading warps.

Nothing goes through registers (cp.async), so no warp waits for what it has asked for: the barrier of a slot counts an
arrival of every thread, which comes when that thread's copies have landed. Shared memory is named as in pieces.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def copy_rows(at, rows, chunks, pointers, bytes):
    """16 bytes a place, `bytes` (16 or none) of them from memory and zeros for the rest, as chunk of a row of 128 bytes
    from byte `at` on, which lies at a multiple of 1024: swizzled as TMA would."""
    to = at + rows * 128 + (chunks ^ (rows & 7)) * 16
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        cp.async.cg.shared.global [a], [$2], 16, $3;
        mov.u32 $0, 0;
        }
        """, "=r,r,l,r,~{memory}", [to, pointers, bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
