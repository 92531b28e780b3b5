"""What the bench needs of an implementation of attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from uniattn.bench.batch import DeviceBatch
from uniattn.bench.workloads import Workload


@dataclass(frozen=True)
class Paths:
    """Where peers that are no installed package lie.

    Attributes:
        fa3: vLLM's FlashAttention-3 library, `_vllm_fa3_C.abi3.so`.
        vllm_kernel: vLLM's `triton_unified_attention.py`, its `triton_attention_helpers.py` beside it.
    """

    fa3: Path | None = None
    vllm_kernel: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A provider ready to run one batch.

    Attributes:
        run: attention as a layer calls it, with what a step shares made before. Returns the output: the provider's own buffer,
            poisoned with NaN before the first call, or a new tensor where the provider takes none.
        plan: makes what the layers of a step share; None where there is nothing.
        unplanned: attention that makes its plan itself; None where `run` is that already.
        plan_waits: the plan waits for the device, so that no graph can hold it.
    """

    run: Callable[[], Tensor]
    plan: Callable[[], object] | None = None
    unplanned: Callable[[], Tensor] | None = None
    plan_waits: bool = False


class Provider(ABC):
    """One implementation of attention.

    Attributes:
        key: what `--providers` and saved files call it.
        label: what tables and plots call it.
    """

    key: str
    label: str

    @abstractmethod
    def available(self) -> str | None:
        """None where it can run here, else why not."""

    def covers(self, w: Workload) -> str | None:
        """None where it can serve `w`, else the feature that it lacks. What only a call can tell, `prepare` and `run` raise."""
        return None

    @abstractmethod
    def prepare(self, batch: DeviceBatch) -> Prepared:
        """Set up everything that a serving engine would, before it is timed."""


def fa_window(w: Workload) -> tuple[int, int]:
    """The window as FlashAttention takes it: closed, -1 unbounded."""
    return (-1, -1) if w.window is None else (w.window[0], 0)


def reason(error: BaseException) -> str:
    """An exception in one line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."
