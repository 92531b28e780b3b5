"""The one place that knows what Gluon calls things in Triton 3.6 to 3.9."""

import triton.language.core as _core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

# Waits for the warps of a partition, not of the whole program.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
aggregate = getattr(gluon, "aggregate", None) or _core._aggregate
constexpr_function = getattr(gluon, "constexpr_function", None) or gluon.jit.__globals__["constexpr_function"]


def from_triton(fn):
    """A `@triton.jit` function of plain integer arithmetic as a Gluon one."""
    return gluon.jit(fn.fn)


# From 3.9 on the old names are there and raise.
copy_by_address = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
copy_by_map = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
