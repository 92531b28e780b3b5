"""Facts about the chip that a launch runs on, read once a device. A leaf: it imports nothing of uniattn."""

import contextlib
import functools
import os
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Target:
    """One chip, as far as the choice of kernels and tiles depends on it.

    Attributes:
        name: as the driver tells it, for messages and tuning tables.
        backend: `"cuda"`, `"hip"` or `"cpu"`.
        arch: CUDA compute capability as `10 * major + minor` (90 for an H200), `"gfx942"` and the like on HIP, `"cpu"` on a CPU.
        num_sms: streaming multiprocessors or compute units ("SM" below stands for both).
        max_shared_bytes: shared memory that one program may use.
        memory_bytes_per_s: what the memory delivers at most, by clock and bus width; None where torch does not tell.
    """

    name: str
    backend: str
    arch: int | str
    num_sms: int
    max_shared_bytes: int
    memory_bytes_per_s: float | None = None

    @functools.cached_property
    def matrix_unit(self) -> str:
        """What multiplies matrices, by what holds its operands: "wgmma" (Hopper) and "tcgen05" (Blackwell of data centres) read
        shared memory; "mma" (other NVIDIA chips) and "mfma" (AMD) registers. The interpreter has neither, and takes Hopper's tiles."""
        if self.backend != "cuda":
            return "mfma" if self.backend == "hip" else "wgmma"
        return {9: "wgmma", 10: "tcgen05"}.get(int(self.arch) // 10, "mma")

    @property
    def warp_size(self) -> int:
        """Threads a warp; AMD's data-centre chips (gfx9) call it a wavefront and have 64, its others 32."""
        return 64 if self.backend == "hip" and str(self.arch).startswith("gfx9") else 32

    @property
    def registers_per_sm(self) -> int:
        """32-bit registers that the threads on an SM share, over its four schedulers."""
        return 131072 if self.warp_size == 64 else 65536

    @property
    def registers_per_thread(self) -> int:
        """The most that a thread may hold; on AMD vector and accumulation registers together."""
        return 512 if self.warp_size == 64 else 255

    @property
    def shared_bytes_per_sm(self) -> int:
        """Shared memory that the programs on an SM share. The interpreter has no SM: whatever is counted there fits."""
        if self.backend == "cpu":
            return 4 * self.max_shared_bytes
        return self.max_shared_bytes + self.reserved_shared_bytes

    @property
    def reserved_shared_bytes(self) -> int:
        """What CUDA keeps of an SM's shared memory for each program that lives there."""
        return 1024 if self.backend == "cuda" else 0

    def programs_per_sm(self, shared_bytes: int, num_warps: int, registers: int) -> int:
        """How many programs of a kernel live on an SM at once; `registers` are a thread's, and 0 where only shared memory counts.

        Registers come in units of 8 a thread, and a warp's lie with one of four schedulers; a program's warps go anywhere.
        """
        by_shared = self.shared_bytes_per_sm // (shared_bytes + self.reserved_shared_bytes)
        by_threads = 2048 // (self.warp_size * num_warps)
        warps = self.registers_per_sm // 4 // (max(8, -(-registers // 8) * 8) * self.warp_size) * 4
        return min(by_shared, by_threads, warps // num_warps)


# Triton's interpreter has no chip; small limits keep its tiles small.
_CPU = Target("cpu", "cpu", "cpu", 4, 65536)


def target_of(device: torch.device) -> Target:
    """The target of `device`; the driver is asked once for each device index."""
    if device.type != "cuda":
        return _CPU
    return _of_index(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _of_index(index: int) -> Target:
    return from_properties(torch.cuda.get_device_properties(index), hip=torch.version.hip is not None)


def from_properties(properties: Any, *, hip: bool) -> Target:
    """The target that `torch.cuda.get_device_properties` describes."""
    # kHz, two transfers a clock, bits. Older versions of torch tell neither.
    clock, bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    memory = 2e3 * clock * bits / 8 or None
    if hip:
        # The arch name carries feature flags behind a colon: gfx942:sramecc+:xnack-.
        arch = properties.gcnArchName.split(":")[0]
        # A compute unit has 64 KiB of LDS, since gfx950 160.
        return Target(properties.name, "hip", arch, properties.multi_processor_count, 163840 if arch == "gfx950" else 65536, memory)
    arch = 10 * properties.major + properties.minor
    # CUDA grants the larger amount of shared memory only on request, which Triton makes.
    return Target(properties.name, "cuda", arch, properties.multi_processor_count, properties.shared_memory_per_block_optin, memory)


def interpreted() -> bool:
    """Whether the environment asks for Triton's interpreter, in any of the words that Triton takes."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")


# torch.cuda.current_device() checks first that CUDA is initialised, which any CUDA tensor shows: 0.3 us in place of 0.1.
_current_index = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_NOTHING = contextlib.nullcontext()


def on_index(index: int) -> Any:
    """A context in which launches go to the device of that index; nothing to do for a CPU (-1) or the current device."""
    return _NOTHING if index < 0 or index == _current_index() else torch.cuda.device(index)
