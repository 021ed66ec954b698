"""Sums that the programs of a cluster add up in each other's shared memory, for mm_weight_only's `shares` kernel.

Gluon of triton 3.6 has no word for a cluster whose programs are compiled one by one. Its launch takes one, and the rest
is PTX: shared memory of the program is named by bytes from its start, where the ring lies, which nobody needs any more.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def everybody():
    """Every thread of the cluster waits for the others, and then sees what they have written."""
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.u32 $0, 0;", "=r,~{memory}", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def both_groups():
    """The two groups of four warps that multiply wait for each other, at a barrier that Triton does not use."""
    gl.inline_asm_elementwise(
        "bar.sync 14, 256; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put_fours(at, values):
    """Store fp32 values at bytes `at` of shared memory; a thread's come in fours of neighbours."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $4;
        st.shared.v4.b32 [a], {$8, $9, $10, $11};
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        mov.u32 $2, 0;
        mov.u32 $3, 0;
        }
        """, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,~{memory}", [at, values.to(gl.int32, bitcast=True)], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip
