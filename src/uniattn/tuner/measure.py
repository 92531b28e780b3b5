"""Times of configurations on this GPU: the bench's batches, its check against float64, its timing."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

import torch

from uniattn.bench.workloads import Workload
from uniattn.errors import UnsupportedError
from uniattn.launch.target import Target
from uniattn.schedule.tiles import Tiles
from uniattn.tuner.compiling import Compiler
from uniattn.tuner.journal import Journal

# Sampled query tokens that are checked against the oracle.
_SAMPLES = 8


class Meter(Protocol):
    """What the search asks. A result is a number, or a reason why there is none, as a string."""

    def expect(self, w: Workload, tiles: Sequence[Tiles]) -> None:
        """These will be asked for: prepare what can be prepared beside other work."""

    def counted(self, w: Workload, tiles: Sequence[Tiles]) -> list[Tiles | str]:
        """Each with the number of programs that live on an SM; as it is where its kernel fills the SM by design."""

    def times(self, w: Workload, tiles: Sequence[Tiles], rounds: int) -> list[float | str]:
        """Microseconds of `w` with each, medians of `rounds` alternating rounds; none where an output is wrong or a call fails."""


class ContextLost(Exception):
    """A configuration broke the process's hold of the GPU: nothing can be measured here any more."""

    def __init__(self, tiles: Tiles, reason: str):
        super().__init__(reason)
        self.tiles = tiles


class Remembered:
    """A meter that asks another one only what its journal does not know.

    A configuration that loses the context is remembered too, and not tried again.
    """

    def __init__(self, meter: Meter, journal: Journal):
        self._meter, self._journal = meter, journal

    def expect(self, w: Workload, tiles: Sequence[Tiles]) -> None:
        if not self._journal.knows(*_question("counted", w, tiles)):
            self._meter.expect(w, tiles)

    def counted(self, w: Workload, tiles: Sequence[Tiles]) -> list[Tiles | str]:
        def answer() -> list[Any]:
            return [t if isinstance(t, str) else asdict(t) for t in self._meter.counted(w, tiles)]

        return [t if isinstance(t, str) else Tiles(**t) for t in self._journal.recall(answer, *_question("counted", w, tiles))]

    def times(self, w: Workload, tiles: Sequence[Tiles], rounds: int) -> list[float | str]:
        return self._journal.recall(lambda: self._measured(w, tiles, rounds), *_question("times", w, tiles), rounds)

    def _measured(self, w: Workload, tiles: Sequence[Tiles], rounds: int) -> list[float | str]:
        shape = {name: value for name, value in asdict(w).items() if name not in ("name", "group", "lengths", "x")}
        lost = [t for t in tiles if self._journal.knows("lost", shape, asdict(t))]
        try:
            times = iter(self._meter.times(w, [t for t in tiles if t not in lost], rounds))
        except ContextLost as error:
            fault = str(error)
            self._journal.recall(lambda: fault, "lost", shape, asdict(error.tiles))
            raise UnsupportedError(
                "GPU",
                f"{fault} with {error.tiles}",
                "nothing more can be measured in this process",
                "run it again: it goes on without this configuration",
            ) from error
        return ["it made the process lose the GPU" if t in lost else next(times) for t in tiles]


def current_gpu(target: Target, compiler: Compiler) -> Gpu:
    """The meter of the current device."""
    from uniattn.bench.timing import Timer

    return Gpu(target, compiler, Timer())


def triton_target() -> tuple[Any, ...]:
    """Triton's target of the current device: `(backend, arch, warp_size)`."""
    import triton

    found = triton.runtime.driver.active.get_current_target()
    return found.backend, found.arch, found.warp_size


def _question(kind: str, w: Workload, tiles: Sequence[Tiles]) -> tuple[Any, ...]:
    return kind, asdict(w), [asdict(t) for t in tiles]


class Gpu:
    """The meter of a device. Within `torch.inference_mode()`.

    Args:
        target: facts of the device.
        compiler: what compiles beside.
        timer: a `bench.timing.Timer`.
        device: where the batches are built.
    """

    def __init__(self, target: Target, compiler: Compiler, timer: Any, device: str = "cuda"):
        # What was imported so far lives on: the collections before each capture need not look at it.
        gc.freeze()
        self._target, self._compiler, self._timer, self._device = target, compiler, timer, device
        self._batch: Any = None

    def expect(self, w: Workload, tiles: Sequence[Tiles]) -> None:
        for t in tiles:
            self._compiler.ask(w, t)

    def counted(self, w: Workload, tiles: Sequence[Tiles]) -> list[Tiles | str]:
        self.expect(w, tiles)
        return [self._counted(w, t) for t in tiles]

    def _counted(self, w: Workload, t: Tiles) -> Tiles | str:
        used = self._compiler.resources(w, t)
        if isinstance(used, str):
            return used
        live = self._target.programs_per_sm(used.shared, t.num_warps, used.registers)
        if used.shared > self._target.max_shared_bytes or live < 1:
            return f"it takes {used.shared} bytes of shared memory and {used.registers} registers a thread"
        return t if t.kernel == "hopper" else replace(t, programs_per_sm=live)

    def times(self, w: Workload, tiles: Sequence[Tiles], rounds: int) -> list[float | str]:
        from uniattn.bench.providers.base import Prepared, reason
        from uniattn.bench.providers.ours import Uniattn

        self.expect(w, tiles)
        results: list[float | str] = []
        captured = {}
        # Graphs hold addresses, not tensors: what a call writes to must live until the last replay.
        alive: list[Prepared] = []
        try:
            batch, checker = self._built(w)
        except Exception as error:  # such as too little memory for this batch
            return [f"failed: {reason(error)}"] * len(tiles)
        for number, t in enumerate(tiles):
            used = self._compiler.resources(w, t)
            if isinstance(used, str):
                results.append(used)
                continue
            try:
                prepared = Uniattn(t).prepare(batch)
                alive.append(prepared)
                failure = checker.verdict(prepared.run()).failure
                if failure is None:
                    captured[str(number)] = self._timer.capture(prepared.run)
                results.append("" if failure is None else f"wrong: {failure}")
            except Exception as error:  # a configuration that fails is one that is not taken
                results.append(f"failed: {reason(error)}")
                self._check_context(t, reason(error))
        for key, rounds_us in self._timer.rounds(captured, rounds).items():
            results[int(key)] = statistics.median(rounds_us)
        return results

    def _check_context(self, t: Tiles, fault: str) -> None:
        """Raise `ContextLost` where what `t` did has taken the GPU away, as an access out of bounds does."""
        if self._device == "cpu":
            return
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            raise ContextLost(t, fault) from error

    def _built(self, w: Workload) -> Any:
        """The batch and its checker, kept for the next question."""
        from uniattn.bench import batch
        from uniattn.bench.check import Checker

        if self._batch is None or self._batch[0] != w:
            self._batch = None
            built = batch.build(w, self._device)
            self._batch = (w, built, Checker(built, _SAMPLES))
        return self._batch[1:]
