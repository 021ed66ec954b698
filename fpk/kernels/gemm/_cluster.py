"""Clusters of programs in Gluon kernels for sm90: tiles that several multiprocessors share, barriers across them.

Triton's own TMA loads cannot deliver one tile to several multiprocessors, and its barrier operations make four warps
meet before each of them. These do the former and not the latter; they are written in PTX. Shared memory is named by
bytes from its start: a kernel allocates its buffers in the order of falling size, which is how Triton lays them out.
(`place` says where.) Descriptors are named by the position of their parameter in the compiled kernel.
"""

import functools
from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fpk.device import triton_is

AVAILABLE = triton_is("3.6")  # where buffers were seen to lie as the kernels expect


def available() -> bool:
    """AVAILABLE, for the version of triton that is pretended."""
    return triton_is("3.6")


@gluon.constexpr_function
def place(which: int, *sizes: int) -> int:
    """First byte of the buffer `which` of those that a kernel allocates, in their order, with these bytes."""
    before = [size for i, size in enumerate(sizes) if (-size, i) < (-sizes[which], which)]
    return sum(before)


@gluon.jit
def cluster_rank():
    """Number of this program in its cluster."""
    return gl.inline_asm_elementwise("mov.u32 $0, %cluster_ctarank;", "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _sync_asm(size: int, sees: bool) -> str:
    # of a launch without clusters ptxas would make a barrier of all threads the one that Triton's own warps meet at
    if size == 1:
        return "bar.sync 15, 384; mov.u32 $0, 0;"
    if sees:
        return "barrier.cluster.arrive.release; barrier.cluster.wait.acquire; mov.u32 $0, 0;"
    return "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed; barrier.cluster.wait; mov.u32 $0, 0;"


@gluon.jit
def cluster_sync(SIZE: gl.constexpr):
    """Wait for every thread of the cluster, and see what they have written; all warps of all three partitions of four
    warps call it."""
    gl.inline_asm_elementwise(_sync_asm(SIZE, True), "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def cluster_meet(SIZE: gl.constexpr):
    """Wait for every thread of the cluster, like cluster_sync. Of what was written only initialized barriers are seen:
    for the beginning, before others use them, and the end, when nothing of this program is used any more."""
    gl.inline_asm_elementwise(_sync_asm(SIZE, False), "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _init_asm(at: int, stages: int, arrivals_full: int, arrivals_empty: int) -> str:
    inits = [(at + 8 * i, arrivals_full if i < stages else arrivals_empty) for i in range(2 * stages)]
    lines = "\n".join(f"@p mbarrier.init.shared::cta.b64 [a + {byte}], {count};" for byte, count in inits)
    return f"""
        {{
        .reg .pred p;
        .reg .b32 t, a;
        mov.u32 t, %tid.x;
        setp.eq.u32 p, t, 0;
        mov.u32 a, global_smem;
        {lines}
        @p fence.mbarrier_init.release.cluster;
        mov.u32 $0, 0;
        }}
        """


@gluon.jit
def init_ring(AT: gl.constexpr, STAGES: gl.constexpr, FULL: gl.constexpr, EMPTY: gl.constexpr):
    """Make a ring's barriers from byte AT on, before the partitions begin: STAGES that FULL arrivals complete, then
    STAGES that EMPTY arrivals do. (Triton's own initialization lets four warps meet for every barrier.)"""
    gl.inline_asm_elementwise(
        _init_asm(AT, STAGES, FULL, EMPTY), "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait(at, phase):
    """Every calling thread waits for the barrier at byte `at`."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred done;
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [a], $2;
        @!done bra.uni again;
        mov.u32 $0, 0;
        }
        """, "=r,r,r,~{memory}", [at, phase], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def arrive_everywhere(at, size, first=0):
    """One thread of each calling warp arrives at the barrier of each of `size` of the cluster's programs."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 t, a, r;
        mov.u32 t, %laneid;
        setp.lt.u32 p, t, $2;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        add.u32 t, t, $3;
        mapa.shared::cluster.u32 r, a, t;
        bar.warp.sync 0xffffffff;
        @p mbarrier.arrive.shared::cluster.b64 _, [r];
        mov.u32 $0, 0;
        }
        """, "=r,r,r,r,~{memory}", [at, size, first], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def expect(at, bytes):
    """One thread of the four calling warps announces so many bytes and arrives."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred p;
        .reg .b32 t, a;
        mov.u32 t, %tid.x;
        and.b32 t, t, 127;
        setp.eq.u32 p, t, 0;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [a], $2;
        mov.u32 $0, 0;
        }
        """, "=r,r,r,~{memory}", [at, bytes], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _load_asm(kernel: str, parameter: int, many: bool) -> str:
    return f"""
        {{
        .reg .pred p;
        .reg .b32 t, a, b;
        .reg .b64 d;
        .reg .b16 m;
        mov.u32 t, %tid.x;
        and.b32 t, t, 127;
        setp.eq.u32 p, t, 0;
        mov.u32 a, global_smem;
        add.u32 b, a, $4;
        add.u32 a, a, $1;
        mov.b64 d, {kernel}_param_{parameter};
        cvta.param.u64 d, d;
        cvt.u16.u32 m, $5;
        @p cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes{".multicast::cluster" * many}
            [a], [d, {{$3, $2}}], [b]{", m" * many};
        mov.u32 $0, 0;
        }}
        """


@gluon.jit
def load(KERNEL: gl.constexpr, PARAMETER: gl.constexpr, to, row, column, at, MANY: gl.constexpr = False, mask=0):
    """One thread of the four calling warps loads a tile to byte `to`, told by the barrier at byte `at`; if MANY, in
    every program of the cluster that `mask` has a bit for."""
    gl.inline_asm_elementwise(
        _load_asm(KERNEL, PARAMETER, MANY), "=r,r,r,r,r,r,~{memory}", [to, row, column, at, mask], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def meet():
    """Two groups of four warps of a program wait for each other, at a barrier that Triton does not use."""
    gl.inline_asm_elementwise(
        "bar.sync 14, 256; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def put_pairs(at, values):
    """Store fp32 values at bytes `at` of shared memory; a thread's elements come in pairs of neighbours."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $2;
        st.shared.v2.b32 [a], {$4, $5};
        mov.u32 $0, 0;
        mov.u32 $1, 0;
        }
        """, "=r,=r,r,r,r,r,~{memory}", [at, values.to(gl.int32, bitcast=True)], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def put_ones(at, values):
    """Store fp32 values at bytes `at` of shared memory, one by one."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a;
        mov.u32 a, global_smem;
        add.u32 a, a, $1;
        st.shared.b32 [a], $2;
        mov.u32 $0, 0;
        }
        """, "=r,r,r,~{memory}", [at, values.to(gl.int32, bitcast=True)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
def take_fours(at):
    """fp32 values at addresses in the cluster's shared memory; a thread's come in fours of neighbours."""
    return gl.inline_asm_elementwise(
        "ld.shared::cluster.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r,r,r,r,~{memory}", [at], dtype=gl.int32,
        is_pure=False, pack=4,
    ).to(gl.float32, bitcast=True)  # fmt: skip


def in_clusters(kernel: Any, check: Callable[[Any], None] | None = None) -> Any:
    """Make launches of a Gluon kernel clusters of CLUSTER programs, each of which is compiled as one by itself.

    What Triton calls num_ctas would make a program of them together; only its launch is wanted. A grid is of clusters.
    check: raises where the compiled kernel is not as its inline assembly takes it to be.
    """
    index = next(i for i, p in enumerate(kernel.params) if p.name == "CLUSTER")
    compile_kernel = kernel._do_compile

    @functools.wraps(compile_kernel)
    def compiled(key: Any, signature: Any, device: Any, constexprs: Any, *rest: Any) -> Any:
        out = compile_kernel(key, signature, device, constexprs, *rest)
        if hasattr(out, "result"):  # on its way, in another thread
            out = out.result()
        if out is not None:
            if check is not None:
                check(out)
            if constexprs[(index,)] > 1:  # other versions of triton, which have no clusters here, pack otherwise
                warps, _, shared = out.packed_metadata
                out.packed_metadata = (warps, constexprs[(index,)], shared)
        return out

    kernel._do_compile = compiled
    return kernel
