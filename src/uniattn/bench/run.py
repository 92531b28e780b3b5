"""Runs workloads on the GPU: one batch at a time, each provider checked, then all of them timed in alternating rounds."""

from __future__ import annotations

import gc
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import uniattn
from uniattn.bench import batch as batches
from uniattn.bench.check import Checker
from uniattn.bench.providers.base import Prepared, Provider, reason
from uniattn.bench.records import Host, Report, Result, Row
from uniattn.bench.roofline import Peaks, cost
from uniattn.bench.timing import Captured, Timer, host_us
from uniattn.bench.workloads import Workload
from uniattn.launch import triton_version

#: Sampled query tokens a row, and a row of a sweep.
SAMPLES, SWEEP_SAMPLES = 24, 4

# Small enough that no device is the bottleneck, large enough that no provider takes a shortcut.
_HOST_WORKLOAD = Workload("host", "host", ((1, 256),) * 4)


def run(
    workloads: Sequence[Workload],
    providers: Sequence[Provider],
    missing: dict[str, str],
    peaks: Peaks,
    *,
    rounds: int,
    quiet: bool = False,
) -> Report:
    """Measure `workloads` with `providers`; `missing` is passed on to the report. `quiet` shows no progress."""
    # What was imported so far lives on: the collections before each capture need not look at it.
    gc.freeze()
    labels = {provider.key: provider.label for provider in providers}
    report = Report(facts(), peaks.flops, peaks.bytes, peaks.source, labels, missing)
    with torch.inference_mode(), torch.cuda.device(torch.cuda.current_device()):
        timer = Timer()
        for w in _progress(workloads, quiet):
            report.rows.append(_measure_or_tell(w, providers, peaks, timer, rounds))
        for provider in providers:
            host = _host(provider)
            if host is not None:
                report.host[provider.key] = host
    return report


def _measure_or_tell(w: Workload, providers: Sequence[Provider], peaks: Peaks, timer: Timer, rounds: int) -> Row:
    """One row. One that cannot be built, checked or timed at all (too little memory) must not take the rows before it along."""
    row = empty_row(w, peaks)
    try:
        measure(row, w, providers, timer, rounds)
    except Exception as error:
        row.results = {provider.key: Result(f"failed: {reason(error)}") for provider in providers}
    return row


def empty_row(w: Workload, peaks: Peaks) -> Row:
    """The row of `w` before anything has run."""
    least = cost(w)
    return Row(w.name, w.group, w.shape(), w.runs(), least.flops, least.bytes, least.floor_us(peaks), w.x)


def measure(
    row: Row, w: Workload, providers: Sequence[Provider], timer: Timer, rounds: int, device: torch.device | str = "cuda"
) -> None:
    """Fill in `row`. A provider that fails, or whose output is wrong, gets no time; the others go on."""
    batch = batches.build(w, device)
    checker = Checker(batch, SAMPLES if w.x is None else SWEEP_SAMPLES)
    captured: dict[str, Captured] = {}
    # Graphs hold addresses, not tensors: what a call writes to must live until the last replay.
    alive: list[Prepared] = []
    for provider in providers:
        result = row.results[provider.key] = Result()
        lacks = provider.covers(w)
        if lacks is not None:
            result.status = f"not covered: {lacks}"
            continue
        try:
            prepared = provider.prepare(batch)
            alive.append(prepared)
            verdict = checker.verdict(prepared.run())
            result.relative_error, result.max_error = verdict.relative, verdict.largest
            result.error_of_allowed = verdict.of_allowed
            if verdict.failure is not None:
                result.status = f"wrong: {verdict.failure}"
                continue
            captured[provider.key] = timer.capture(prepared.run)
        except Exception as error:  # whatever a peer raises must not end the run
            result.status = f"failed: {reason(error)}"
            continue
        if w.x is None and prepared.plan is not None and not prepared.plan_waits:
            try:
                captured[f"{provider.key} plan"] = timer.capture(prepared.plan)
            except Exception as error:
                result.plan_failure = reason(error)
    times = timer.rounds(captured, rounds)
    for key, result in row.results.items():
        result.rounds_us = times.get(key, [])
        plan_rounds = times.get(f"{key} plan")
        result.plan_us = statistics.median(plan_rounds) if plan_rounds else None


def _host(provider: Provider) -> Host | None:
    """Host times of one provider; None where it cannot run."""
    try:
        prepared = provider.prepare(batches.build(_HOST_WORKLOAD, "cuda"))
        calls = (prepared.run, prepared.unplanned, prepared.plan)
        for call in calls:
            if call is not None:
                call()
        planned, unplanned, plan = (None if call is None else host_us(call) for call in calls)
    except Exception:
        return None
    assert planned is not None
    return Host(planned, unplanned, plan)


def facts() -> dict[str, str]:
    """Versions, card and driver, for a reader who wants to repeat a run."""
    folder = str(Path(uniattn.__file__).parent)
    # An installed package may lie inside somebody else's repository.
    ours = _output("git", "-C", folder, "ls-files", "__init__.py")
    found = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "torch": torch.__version__,
        "triton": triton_version.installed() or "none",
        "uniattn": _version(),
        "git": _output("git", "-C", folder, "describe", "--always", "--dirty") if ours else "",
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return {name: value for name, value in found.items() if value}


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("uniattn")
    except metadata.PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """What a command prints, empty where it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _progress(workloads: Sequence[Workload], quiet: bool) -> Iterable[Workload]:
    """The workloads, with a bar on stderr that names the one at hand; plain lines in a file, and where tqdm is not installed."""
    if quiet:
        return workloads
    if not sys.stderr.isatty():
        return _lines(workloads)
    try:
        from tqdm import tqdm
    except ImportError:
        return _lines(workloads)
    return _bar(tqdm(workloads, unit="row", dynamic_ncols=True))


def _bar(bar: Any) -> Iterator[Workload]:
    for w in bar:
        bar.set_description(w.name)
        yield w


def _lines(workloads: Sequence[Workload]) -> Iterator[Workload]:
    for number, w in enumerate(workloads, 1):
        print(f"[{number}/{len(workloads)}] {w.name}", file=sys.stderr, flush=True)
        yield w

