"""`uniattn bench`: from the command line's options to a run and its results."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import torch

from uniattn.bench import grammar, html, providers, records, report, roofline, sweep, traces, workloads
from uniattn.bench.options import or_argument_error, require_folder, shape, words
from uniattn.bench.records import OURS, Report
from uniattn.bench.roofline import Peaks, cost
from uniattn.bench.workloads import Workload
from uniattn.errors import UnsupportedError

# What floors are computed from where no card is at hand: `--list`.
_DEFAULT_CARD = "NVIDIA H200"


def run(options: Namespace) -> bool:
    """Do what the options say; False where an output of uniattn's was wrong or a call of it failed.

    Raises `ArgumentError` for a wrong option and `UnsupportedError` where there is no GPU to measure on.
    """
    paths = providers.Paths(options.fa3, options.vllm_kernel)
    if options.list:
        print(listing(or_argument_error("--only", workloads.select, words(options.only)), paths))
        return True
    for name in ("save", "html"):
        require_folder(f"--{name}", getattr(options, name))
    old = or_argument_error("--compare", records.load, options.compare) if options.compare else None
    result = or_argument_error("--load", records.load, options.load) if options.load else _measure(options, paths)
    moved = report.moves(old, result) if old is not None else None
    print(report.table(result))
    if options.save:
        records.save(result, options.save)
    if options.html:
        options.html.write_text(html.page(result, moved), encoding="utf-8")
    if old is not None and moved is not None:
        print(report.moves_text(moved, old))
    for path in filter(None, (options.save, options.html)):
        print(f"Wrote {path}")
    ours = result.labels.get(OURS)
    return not any(label == ours for _, label, _ in report.failures(result))


def chosen(options: Namespace, peaks: Peaks) -> list[Workload]:
    """The workloads that the options ask for: named rows unless batches, a trace or the sweep stand alone."""
    fields = shape(options)
    asked: list[Workload] = []
    if options.only or not (options.batch or options.trace or options.sweep):
        asked += or_argument_error("--only", workloads.select, words(options.only))
    for text in options.batch:
        asked += or_argument_error("--batch", grammar.workloads, text, **fields)
    if options.trace:
        budget = dict(count=options.steps, num_requests=options.requests, token_budget=options.token_budget)
        asked += or_argument_error("--trace", traces.workloads, options.trace, peaks, **budget, **fields)
    if options.sweep:
        asked += sweep.workloads(**fields)
    return asked


def listing(rows: Sequence[Workload], paths: providers.Paths) -> str:
    """The rows with lengths and floors, and the providers with what keeps them from running."""
    peaks = roofline.known_peaks(_DEFAULT_CARD)
    assert peaks is not None
    width = max(len(w.name) for w in rows)
    lines = [f"{'group':8}  {'name':{width}}  {'floor, H200':>11}  shape"]
    lines += [f"{w.group:8}  {w.name:{width}}  {cost(w).floor_us(peaks):8.1f} us  {w.shape()}" for w in rows]
    lines += ["", "providers:"]
    for provider in providers.every(paths):
        lines.append(f"  {provider.key:14}{provider.label:20}{provider.available() or 'can be imported'}")
    return "\n".join(lines)


def _measure(options: Namespace, paths: providers.Paths) -> Report:
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "GPU",
            got="none that torch sees",
            limit="times come from kernels on a GPU",
            fix="run it on a machine with one; --list and --load FILE.json work here",
        )
    keys = words([options.providers]) if options.providers else []
    running, missing = or_argument_error("--providers", providers.select, keys, paths)
    if not running:
        why = "; ".join(f"{label}: {text}" for label, text in missing.items())
        got = options.providers or "none that runs"
        raise UnsupportedError("--providers", got=got, limit="at least one must run here", fix=why)
    from uniattn.bench import run as runner
    from uniattn.bench import timing

    peaks = roofline.known_peaks(torch.cuda.get_device_name())
    if peaks is None or options.measure_peaks:
        peaks = Peaks(*timing.measure_peaks(), "measured in this run")
    return runner.run(chosen(options, peaks), running, missing, peaks, rounds=options.rounds)
