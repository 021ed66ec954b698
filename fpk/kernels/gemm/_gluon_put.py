"""How the tiles of `pairs` leave: in pieces through two buffers a consumer, or at once through buffers of their own."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from fpk.kernels.gemm._gluon import barrier, halves, put_pieces, tma_store


@gluon.jit
def _put_128(out_desc, bufs, tile, row, column, WHICH: gl.constexpr, WHOLE: gl.constexpr):
    """Write 64 x 128 sums; if WHOLE, at once through buffers of their own."""
    if WHOLE:
        tma.store_wait(0)
        barrier()
        a, b = halves(tile)
        bufs.index(2 * WHICH).store(a)
        bufs.index(2 * WHICH + 1).store(b)
        fence_async_shared()
        barrier()
        tma_store(out_desc, [row, column], bufs.index(2 * WHICH))
        tma_store(out_desc, [row, column + 64], bufs.index(2 * WHICH + 1))
    else:
        put_pieces(out_desc, bufs, 2 * WHICH, tile, row, column)


@gluon.jit
def _put_128_and_64(out_desc, bufs, tile, more, row, column, second, WHICH: gl.constexpr, WHOLE: gl.constexpr):
    if WHOLE:
        tma.store_wait(0)
        barrier()
        a, b = halves(tile)
        bufs.index(3 * WHICH).store(a)
        bufs.index(3 * WHICH + 1).store(b)
        bufs.index(3 * WHICH + 2).store(more)
        fence_async_shared()
        barrier()
        tma_store(out_desc, [row, column], bufs.index(3 * WHICH))
        tma_store(out_desc, [row, column + 64], bufs.index(3 * WHICH + 1))
        tma_store(out_desc, [row, second], bufs.index(3 * WHICH + 2))
    else:
        put_pieces(out_desc, bufs, 2 * WHICH, tile, row, column)
        put_pieces(out_desc, bufs, 2 * WHICH, more, row, second)


@gluon.jit
def _put_256(out_desc, bufs, left, right, row, column, WHICH: gl.constexpr, WHOLE: gl.constexpr):
    if WHOLE:
        tma.store_wait(0)
        barrier()
        a, b = halves(left)
        bufs.index(4 * WHICH).store(a)
        bufs.index(4 * WHICH + 1).store(b)
        c, d = halves(right)
        bufs.index(4 * WHICH + 2).store(c)
        bufs.index(4 * WHICH + 3).store(d)
        fence_async_shared()
        barrier()
        for i in gl.static_range(4):
            tma_store(out_desc, [row, column + 64 * i], bufs.index(4 * WHICH + i))
    else:
        put_pieces(out_desc, bufs, 2 * WHICH, left, row, column)
        put_pieces(out_desc, bufs, 2 * WHICH, right, row, column + 128)
