"""Sums that the programs of a cluster add up in each other's shared memory, for mm_weight_only's `shares` kernel.

Gluon of triton 3.6 has no word for a cluster whose programs are compiled one by one. Its launch takes one, and the rest
is PTX: shared memory of the program is named by bytes from its start, where the ring lies, which nobody needs any more.
"""

import functools
from typing import Any

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
def memory_of(rank):
    """Address of the shared memory of a program of the cluster."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        mapa.shared::cluster.u32 $0, a, $1;
        }
        """, "=r,r", [rank], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


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


@gluon.jit
def take_fours(at):
    """fp32 values at addresses in the cluster's shared memory; a thread's come in fours of neighbours."""
    return gl.inline_asm_elementwise(
        "ld.shared::cluster.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,r,r,r,~{memory}", [at], dtype=gl.int32,
        is_pure=False, pack=4,
    ).to(gl.float32, bitcast=True)  # fmt: skip


def in_clusters(kernel: Any) -> Any:
    """Launch a Gluon kernel in clusters of CLUSTER programs each; its grid counts clusters along the first dimension.

    num_ctas would compile a program for all of them together: only what the launcher makes of it is wanted.
    """
    index = next(i for i, p in enumerate(kernel.params) if p.name == "CLUSTER")
    compile_kernel = kernel._do_compile

    @functools.wraps(compile_kernel)
    def compiled(key: Any, signature: Any, device: Any, constexprs: Any, *rest: Any) -> Any:
        out = compile_kernel(key, signature, device, constexprs, *rest)
        if out is not None and constexprs[(index,)] > 1:
            warps, _, shared = out.packed_metadata
            out.packed_metadata = (warps, constexprs[(index,)], shared)
        return out

    kernel._do_compile = compiled
    return kernel
