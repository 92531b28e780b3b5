"""`uniattn tune`: from the command line's options to a table of the user's card, and a short account of it."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from uniattn.bench import grammar, workloads
from uniattn.bench.options import or_argument_error, require_folder, shape, words
from uniattn.bench.run import facts as run_facts
from uniattn.bench.workloads import Workload
from uniattn.errors import ArgumentError, UnsupportedError
from uniattn.launch import backend
from uniattn.launch.target import Target, target_of
from uniattn.tuner.compiling import Compiler
from uniattn.tuner.explain import named
from uniattn.tuner.journal import Journal
from uniattn.tuner.measure import Meter, Remembered, current_gpu, triton_target
from uniattn.tuner.search import Settled, tune
from uniattn.tuner.shapes import Group, grid, groups
from uniattn.tuning.choose import card_of, user_folder
from uniattn.tuning.kernels import KERNELS, source_hash
from uniattn.tuning.problem import Bucket
from uniattn.tuning.table import Entry, Table, facts, load, save


def run(options: Namespace) -> bool:
    """Tune as the options say; False where a default configuration was wrong or failed.

    Raises `ArgumentError` for a wrong option and `UnsupportedError` where there is no GPU to measure on.
    """
    asked = groups(chosen(options))
    require_folder("--table", options.table)
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "GPU",
            got="none that torch sees",
            limit="configurations are timed on the card that they are for",
            fix="run it on a machine with one; uniattn explain --card h200 works here",
        )
    if backend.choose(torch.empty(0, device="cuda")) != "triton" or backend.asked() == "hopper":
        fix = "unset it, or set UNIATTN_BACKEND=triton to tune the portable kernel alone"
        raise UnsupportedError("UNIATTN_BACKEND", repr(backend.asked()), "tune compares what auto or triton may run", fix)
    target = target_of(torch.device("cuda"))
    path = options.table or user_folder() / f"{card_of(target.name)}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    table = starting_table(path, target)
    stamp = {"card": table.card, "triton": table.triton, "sources": table.sources}
    with torch.inference_mode():
        compiler = Compiler(triton_target(), target)
        try:
            journal = Journal(path.with_suffix(".measured.jsonl"), stamp, options.fresh)
            print(_opening(asked, target, path, len(journal)), file=sys.stderr)
            settled = measured(asked, target, Remembered(current_gpu(target, compiler), journal), table, path, options.minutes)
        finally:
            compiler.close()
    print(account(settled, len(asked), path))
    return all(one.default_us for one in settled if isinstance(one.key, Bucket))


def chosen(options: Namespace) -> list[Workload]:
    """The batches to tune on: named ones, those of the grammar, or else a grid for each shape."""
    shapes = []
    for heads in options.heads.split(","):
        for dim in options.head_dim.split(","):
            if not dim.strip().isdecimal():
                raise ArgumentError("--head-dim", dim, "it must be a whole number, or several with commas", "write it as 64,128")
            shapes.append(shape(Namespace(**{**vars(options), "heads": heads.strip(), "head_dim": int(dim)})))
    asked: list[Workload] = []
    if options.only:
        asked += or_argument_error("--only", workloads.select, words(options.only))
    for text in options.batch:
        for fields in shapes:
            asked += or_argument_error("--batch", grammar.workloads, text, **fields)
    return asked or [w for fields in shapes for w in grid(**fields)]


def starting_table(path: Path, target: Target) -> Table:
    """The table at `path` where it is of this card, Triton and source, else an empty one."""
    found = run_facts()
    new = Table(facts(target), found["triton"], {name: source_hash(name) for name in KERNELS})
    if path.is_file():
        try:
            old, faults = load(path)
        except ValueError as error:
            raise ArgumentError("--table", str(path), str(error), "move it away, or name another file") from error
        if not faults and (old.card, old.triton, old.sources) == (new.card, new.triton, new.sources):
            return old
    return new


def measured(
    asked: Sequence[Group], target: Target, meter: Meter, table: Table, path: Path, minutes: float | None
) -> list[Settled]:
    """Settle the groups; the table is written after each."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    settled: list[Settled] = []
    with Progress(len(asked)) as progress:
        for outcomes in tune(asked, target, meter, progress.step, lambda: deadline is None or time.monotonic() < deadline):
            for one in outcomes:
                settled.append(one)
                # An answer that no longer wins goes.
                table.entries = [entry for entry in table.entries if entry.key != one.key] + list(one.entries)
            table.written = run_facts()["date"]
            save(table, path)
            progress.done()
    return settled


def account(settled: Sequence[Settled], num_groups: int, path: Path) -> str:
    """What a person wants to know at the end: a line for each answer, and what stays as it is."""
    lines = [f"{'class of batches':44} {'default, us':>11} {'tuned, us':>10} {'held out':>9}  now"]
    for one in settled:
        if not one.default_us and isinstance(one.key, Bucket):
            lines.append(f"{named(one.key):44} {'-':>11} {'-':>10} {'-':>9}  {one.note}")
        elif one.entries or isinstance(one.key, Bucket):
            # Where the default stays the first, the others are for calls that its kernel cannot serve.
            stays = not one.entries or one.us == one.default_us
            others = "; ".join(map(configuration, one.entries[1:]))
            now = configuration(one.entries[0]) if not stays else "the default" + (f"; where it cannot serve {others}" if others else "")
            held = "-" if one.held_out is None else f"{one.held_out:.3f}"
            lines.append(f"{named(one.key):44} {one.default_us:11.1f} {one.us:10.1f} {held:>9}  {now}")
    faults = list(dict.fromkeys(fault for one in settled if one.default_us and one.note for fault in one.note.split("; ")))
    if faults:
        lines += ["", f"{len(faults)} configurations were wrong or failed, and are not taken, such as {faults[0][:200]}"]
    count = sum(bool(one.entries) for one in settled)
    buckets = sum(isinstance(one.key, Bucket) for one in settled)
    lines += ["", f"{count} answers in {path}, which uniattn reads when a process first plans."]
    if buckets < num_groups:
        lines.append(f"{num_groups - buckets} of {num_groups} classes are left: run it again to go on.")
    return "\n".join(lines)


def configuration(entry: Entry) -> str:
    """An entry's tiles in a few words."""
    t = entry.tiles
    small = f" + {t.small_m}x{t.small_n}, {t.small_stages} st" if t.small_m else ""
    tail = f", {t.programs_per_sm} an SM, overhead {t.item_overhead}"
    return f"{t.kernel} {t.block_m}x{t.block_n}, {t.num_stages} stages, {t.num_warps} warps{small}{tail}"


def _opening(asked: Sequence[Group], target: Target, path: Path, num_known: int) -> str:
    batches = sum(len(group.members) for group in asked)
    known = f" {num_known} measurements of an earlier run are known." if num_known else ""
    return f"Tuning {target.name} on {batches} batches in {len(asked)} classes into {path}.{known} Ctrl-C stops it; it goes on next time."


class Progress:
    """A bar on a terminal, a line a step elsewhere, on stderr."""

    def __init__(self, total: int):
        self._bar: Any = None
        self._total, self._count, self._begin = total, 0, time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return self
            self._bar = tqdm(total=self._total, unit="class", dynamic_ncols=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def step(self, name: str) -> None:
        """Tell what comes next."""
        if self._bar is not None:
            self._bar.set_description(name)
        else:
            print(f"[{self._count}/{self._total} {time.monotonic() - self._begin:.0f} s] {name}", file=sys.stderr, flush=True)

    def done(self) -> None:
        """One class more is settled."""
        self._count += 1
        if self._bar is not None:
            self._bar.update()
