"""What the drafts are made of."""

from fpk.kernels.gemm._streams import *  # noqa: F403
