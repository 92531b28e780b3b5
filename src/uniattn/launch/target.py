"""Facts of the chip that a launch runs on, by device."""

import contextlib
import functools
import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Target:
    """One device. `arch` is 90 for sm_90 or 'gfx942'; `max_shared_bytes` is what one program may use."""

    name: str
    backend: str
    arch: int | str
    num_sms: int
    max_shared_bytes: int


# Triton's interpreter has no chip; small limits keep its tiles small.
_CPU = Target("cpu", "cpu", "cpu", 4, 65536)


def target_of(device: torch.device) -> Target:
    """The target of `device`."""
    return _CPU if device.type == "cpu" else _of_index(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _of_index(index: int) -> Target:
    p = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target(p.name, "hip", p.gcnArchName.split(":")[0], p.multi_processor_count, 65536)
    return Target(p.name, "cuda", p.major * 10 + p.minor, p.multi_processor_count, p.shared_memory_per_block_optin)


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def on_device(device: torch.device):
    """A context in which launches go to `device`; nothing where it is current already."""
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
