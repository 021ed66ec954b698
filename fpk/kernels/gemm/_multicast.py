"""Pieces of the Gluon kernels of scaled_mm in which the programs of a cluster load weights for one another (sm90).

Loads to all programs of a cluster (_cluster.in_clusters) and arrivals at their barriers are inline assembly, which
wants addresses in shared memory. Ring and barriers are one allocation, which Triton puts at the start; `ring_at_start`
reads in the compiled text that it did. An arrival in another program's memory has the scope of its own
program, the default: with the cluster's scope each one would wait for all that the program has written.
"""

import re
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from fpk.kernels.gemm._gluon import tma_load


@gluon.jit
def meet(x):
    """All warps of all programs of the cluster have come here, and barriers initialized before are so for everybody."""
    gl.inline_asm_elementwise(
        """
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 $0, $1;
        """, "=r,r,~{memory}", [x], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_alone(at, phase):
    """Wait for the barrier at byte `at`; the calling warps do not wait for one another."""
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred done;
        .reg .b32 barrier;
        mov.u32 barrier, global_smem;
        add.u32 barrier, barrier, $1;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [barrier], $2;
        @!done bra.uni again;
        mov.u32 $0, 0;
        }
        """, "=r,r,r,~{memory}", [at, phase], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release(at, CLUSTER: gl.constexpr):
    """One thread of the four calling warps for each program arrives at the barrier at byte `at` there.

    For buffers that a product has read: a wait for a product is one for all four warps.
    """
    gl.inline_asm_elementwise(
        """
        {
        .reg .pred mine;
        .reg .b32 thread, barrier;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.lt.u32 mine, thread, $2;
        mov.u32 barrier, global_smem;
        add.u32 barrier, barrier, $1;
        @mine mapa.shared::cluster.u32 barrier, barrier, thread;
        @mine mbarrier.arrive.shared::cluster.b64 _, [barrier];
        mov.u32 $0, 0;
        }
        """, "=r,r,r,~{memory}", [at, CLUSTER], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _load_asm(kernel: str) -> str:
    return f"""
        {{
        .reg .pred first;
        .reg .b16 both;
        .reg .b32 thread, start, to, barrier;
        .reg .b64 tensor;
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        setp.eq.u32 first, thread, 0;
        mov.b16 both, 3;
        mov.b64 tensor, {kernel}_param_0;
        cvta.param.u64 tensor, tensor;
        mov.u32 start, global_smem;
        add.u32 to, start, $1;
        add.u32 barrier, start, $4;
        @first cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [to], [tensor, {{$2, $3}}], [barrier], both;
        mov.u32 $0, 0;
        }}
        """


@gluon.jit
def _load_to_both(KERNEL: gl.constexpr, to, row, column, at):
    """A tile of the kernel's first argument to byte `to` of both programs, told by the barriers at byte `at` there."""
    gl.inline_asm_elementwise(
        _load_asm(KERNEL), "=r,r,r,r,r,~{memory}", [to, column, row, at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def place(item, tiles_m, tiles_n, GROUP_M: gl.constexpr):
    """(row, column) of a cluster's tiles; GROUP_M rows share columns in L2."""
    per_group = GROUP_M * tiles_n
    first = item // per_group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    return first + item % per_group % height, item % per_group // height


@gluon.jit
def tokens_of(pool, slot, first: gl.constexpr, ROWS: gl.constexpr, desc, CODES: gl.constexpr, SLOT: gl.constexpr):
    """ROWS of a slot's tokens; a slot is SLOT rows, tokens and then weights, and the pool's elements are 8 rows."""
    return pool.index(slot * (SLOT // 8) + first // 8)._reinterpret(CODES, [ROWS, 128], desc.layout)


@gluon.jit
def weights_of(pool, slot, desc, CODES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """A slot's weights as the right operand of a product."""
    at = slot * ((BLOCK_M + BLOCK_N) // 8) + BLOCK_M // 8
    return pool.index(at)._reinterpret(CODES, [BLOCK_N, 128], desc.layout).permute((1, 0))


@gluon.jit
def fill(
    KERNEL: gl.constexpr, right_desc, left_desc, pool, barriers, tiles_m, tiles_n, steps,
    CLUSTER: gl.constexpr, CODES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Fill the ring: the program's own tokens, and its share of the weights for all programs of the cluster."""
    rank = gl.program_id(0) % CLUSTER
    meet(rank)
    STEP: gl.constexpr = (BLOCK_M + BLOCK_N) * 128
    SHARE: gl.constexpr = BLOCK_N // CLUSTER
    turn = 0
    for item in range(gl.program_id(0) // CLUSTER, tiles_m * tiles_n, gl.num_programs(0) // CLUSTER):
        tile_m, tile_n = place(item, tiles_m, tiles_n, GROUP_M)
        row, column = (tile_m * CLUSTER + rank) * BLOCK_M, tile_n * BLOCK_N + rank * SHARE
        for k in range(steps):
            slot = turn % STAGES
            mbarrier.wait(barriers.index(STAGES + slot), ((turn // STAGES) & 1) ^ 1)
            full = barriers.index(slot)
            mbarrier.expect(full, STEP)
            tokens = tokens_of(pool, slot, 0, BLOCK_M, left_desc, CODES, BLOCK_M + BLOCK_N)
            tma_load(left_desc, [row, k * 128], full, tokens)
            if CLUSTER == 2:
                to = slot * STEP + BLOCK_M * 128 + rank * (SHARE * 128)
                _load_to_both(KERNEL, to, column, k * 128, STAGES * STEP + slot * 8)
            else:
                at = slot * ((BLOCK_M + BLOCK_N) // 8) + BLOCK_M // 8
                weights = pool.index(at)._reinterpret(CODES, [BLOCK_N, 128], right_desc.layout)
                tma_load(right_desc, [column, k * 128], full, weights)
            turn += 1
    for _ in range(STAGES):  # no other program arrives here any more: this one may end
        mbarrier.wait(barriers.index(STAGES + turn % STAGES), ((turn // STAGES) & 1) ^ 1)
        turn += 1


def ring_at_start(compiled: Any) -> None:
    """RuntimeError if Triton did not put the ring where shared memory begins: for `in_clusters`."""
    pool = re.search(r"memdesc<(\d+)x8x128xi8", compiled.asm["ttgir"])
    barrier = re.search(r"mbarrier\.init\S* \[(%r\d+)\]", compiled.asm["ptx"])
    offset = barrier and re.search(rf"add\.s32 \t{barrier[1]}, %r\d+, (\d+);", compiled.asm["ptx"])
    if not pool or not offset or int(offset[1]) != (int(pool[1]) - 1) * 1024:
        raise RuntimeError(f"{compiled.metadata.name}: its ring does not begin where shared memory does")
