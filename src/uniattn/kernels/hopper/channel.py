"""A ring of buffers in shared memory between one producer and the consumers, on mbarriers.

Slot i of a stream of items lies in buffer i % stages, and the barriers' phase flips each time round. The producer waits until a
buffer is free and fills it; a consumer waits until it is full and releases it. Nobody else sees a barrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from uniattn.kernels.hopper.compat import aggregate, constexpr_function


@aggregate
class Ring:
    """`buffers` `[stages * parts, ...]`, a slot's parts side by side; barriers `full` and `empty`, one a stage."""

    buffers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    stages: gl.constexpr

    @constexpr_function
    def __init__(self, buffers, full, empty, stages):
        self.buffers = buffers
        self.full = full
        self.empty = empty
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def stage(self, i):
        return i % self.stages

    @gluon.jit
    def wait_empty(self, i):
        """For the producer: wait until slot i's buffer is free; the first time round it is."""
        mbarrier.wait(self.empty.index(i % self.stages), ((i // self.stages) & 1) ^ 1)

    @gluon.jit
    def wait_full(self, i):
        """For a consumer: wait until slot i is filled."""
        mbarrier.wait(self.full.index(i % self.stages), (i // self.stages) & 1)

    @gluon.jit
    def release(self, i):
        """For a consumer: slot i has been read. One thread arrives for a partition, after all of it."""
        mbarrier.arrive(self.empty.index(i % self.stages), count=1)


@gluon.jit
def make_ring(dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr, stages: gl.constexpr, arrivals: gl.constexpr,
              consumers: gl.constexpr):  # fmt: skip
    """A ring whose slots are full after `arrivals` arrivals (and the bytes that TMA brings), free after `consumers` releases."""
    buffers = gl.allocate_shared_memory(dtype, shape, layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=arrivals)
        mbarrier.init(empty.index(i), count=consumers)
    return Ring(buffers, full, empty, stages)
