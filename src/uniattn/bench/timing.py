"""Times a call on the device as a serving step sees it, and on the host.

Device: the call is captured in a CUDA graph, with a write over more than the L2 cache before each repetition, so that K/V come
from memory as they do when a model's other layers ran in between. The flush's own time, measured in the same round, is taken off.
A round is the median of a few replays; rounds of the providers alternate, so that a card that warms up slows all of them.

Host: many calls without waiting for the device, on a batch so small that the device keeps up.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# A graph holds as many calls as fill about this time, so that the replay's own start is spread thin.
_GRAPH_US = 2000
_MAX_CALLS = 16
_REPLAYS = 5
_MIN_FLUSH_BYTES = 160 << 20


@dataclass(frozen=True)
class Captured:
    """A graph of `calls` repetitions, each after a flush."""

    graph: torch.cuda.CUDAGraph
    calls: int


class Timer:
    """Captures and times calls on the current device."""

    def __init__(self) -> None:
        cache = getattr(torch.cuda.get_device_properties(), "L2_cache_size", 0)
        self._flush = torch.empty(max(3 * cache, _MIN_FLUSH_BYTES), dtype=torch.uint8, device="cuda")
        self._baselines: dict[int, Captured] = {}

    def capture(self, call: Call) -> Captured:
        """Capture `call`, which has run before (nothing may compile or allocate for the first time here)."""
        return self._capture(call, max(1, min(_MAX_CALLS, round(_GRAPH_US / self._estimate_us(call)))))

    def rounds(self, captured: dict[str, Captured], count: int) -> dict[str, list[float]]:
        """Microseconds a call, one number a round for each key; every second round goes through the keys backwards."""
        times: dict[str, list[float]] = {key: [] for key in captured}
        for number in range(count):
            flush_us = {calls: self._replay_us(self._baseline(calls)) for calls in {c.calls for c in captured.values()}}
            for key in sorted(captured, key=list(captured).index, reverse=number % 2 == 1):
                one = captured[key]
                times[key].append(max(0.0, self._replay_us(one) - flush_us[one.calls]))
        return times

    def _capture(self, call: Call | None, calls: int) -> Captured:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Once outside of the graph on the capturing stream: libraries set up their workspaces a stream.
            if call is not None:
                call()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(calls):
                self._flush.zero_()
                if call is not None:
                    call()
        return Captured(graph, calls)

    def _baseline(self, calls: int) -> Captured:
        """The flush alone, in a graph of as many repetitions."""
        if calls not in self._baselines:
            self._baselines[calls] = self._capture(None, calls)
        return self._baselines[calls]

    def _estimate_us(self, call: Call) -> float:
        times = []
        for _ in range(2):
            self._flush.zero_()
            times.append(_elapsed_us(call))
        return max(1.0, min(times))

    def _replay_us(self, captured: Captured) -> float:
        captured.graph.replay()
        return statistics.median(_elapsed_us(captured.graph.replay) for _ in range(_REPLAYS)) / captured.calls


def _elapsed_us(call: Call) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def host_us(call: Call, calls: int = 100, repeats: int = 7) -> float:
    """Microseconds of host time an eager call: the median of `repeats` loops of `calls` calls that nothing waits for."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - begin) / calls * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def measure_peaks() -> tuple[float, float]:
    """`(FLOP/s, bytes/s)` of this card: a bf16 matrix product of 8192 cubed, and a copy of 1 GiB, each the best of five."""
    n = 8192
    a, b = torch.randn(2, n, n, dtype=torch.bfloat16, device="cuda")
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    best = []
    for call in (lambda: a @ b, lambda: target.copy_(source)):
        call()
        best.append(min(_elapsed_us(call) for _ in range(5)) * 1e-6)
    return 2 * n**3 / best[0], 2 * source.numel() / best[1]
