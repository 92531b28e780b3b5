"""Facts about the device that a call runs on, read once a device. A leaf: it imports nothing of uniattn."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """One chip, as far as the choice of kernels and tiles depends on it.

    Attributes:
        name: as the driver tells it, for messages and tuning tables.
        backend: `"cuda"`, `"hip"` or `"cpu"`.
        arch: CUDA compute capability as `10 * major + minor` (90 for an H200), `"gfx942"` and the like on HIP, 0 on a CPU.
        num_sms: streaming multiprocessors or compute units; 1 on a CPU.
        max_shared_bytes: shared memory that one block may ask for; 0 on a CPU.
    """

    name: str
    backend: str
    arch: int | str
    num_sms: int
    max_shared_bytes: int


CPU = Target(name="CPU", backend="cpu", arch=0, num_sms=1, max_shared_bytes=0)

_by_index: dict[int, Target] = {}


def of(device: torch.device) -> Target:
    """The `Target` of a device; the driver is asked once for each device index."""
    if device.type != "cuda":
        return CPU
    index = torch.cuda.current_device() if device.index is None else device.index
    target = _by_index.get(index)
    if target is None:
        target = _by_index[index] = from_properties(torch.cuda.get_device_properties(index), hip=torch.version.hip is not None)
    return target


def from_properties(properties, *, hip: bool) -> Target:
    """A `Target` from what `torch.cuda.get_device_properties` returns."""
    if hip:
        # The arch name carries feature flags behind a colon: gfx942:sramecc+:xnack-.
        arch: int | str = properties.gcnArchName.split(":")[0]
        shared = properties.shared_memory_per_block
    else:
        arch = 10 * properties.major + properties.minor
        # CUDA grants the larger amount only on request, which Triton makes.
        shared = properties.shared_memory_per_block_optin
    return Target(properties.name, "hip" if hip else "cuda", arch, properties.multi_processor_count, shared)
