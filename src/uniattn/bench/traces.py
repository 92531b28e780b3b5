"""Request lengths from public traces, replayed into the batches that a continuous-batching scheduler forms.

The scheduler is the common one: requests wait in order and all are there at the start; a step first gives every decoding
sequence its one token, then fills what is left of a token budget with chunks of prefills. A sequence is admitted when its whole
length fits in the KV capacity, so none is ever preempted.
"""

from __future__ import annotations

import csv
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from uniattn.bench.roofline import Peaks, cost
from uniattn.bench.workloads import Lengths, Workload

# Column names of the known traces: Mooncake and LLMServingSim, Azure, Sarathi's ShareGPT.
_PROMPT = ("input_length", "ContextTokens", "num_prefill_tokens")
_OUTPUT = ("output_length", "GeneratedTokens", "num_decode_tokens")

TOKEN_BUDGET, MAX_SEQS, KV_CAPACITY = 8192, 256, 1 << 20


@dataclass(frozen=True)
class Request:
    """Prompt and output of one request, in tokens."""

    prompt: int
    output: int


def read(path: Path, limit: int | None = None) -> list[Request]:
    """The requests of a CSV or JSONL trace in the file's order, `limit` of them at most; its columns tell the format.

    Requests without prompt or output (Azure's has some) are left out. Raises `ValueError` for columns that are not known.
    """
    with path.open(newline="") as file:
        first = file.readline()
        file.seek(0)
        rows = (json.loads(line) for line in file if line.strip()) if first.lstrip().startswith("{") else csv.DictReader(file)
        requests = (Request(*_lengths(row, path)) for row in rows)
        return list(islice((r for r in requests if r.prompt > 0 and r.output > 0), limit))


def _lengths(row: dict, path: Path) -> tuple[int, int]:
    def one(names: tuple[str, ...]) -> int:
        for name in names:
            if name in row:
                return int(row[name])
        raise ValueError(f"{path}: needs a column of {', '.join(names)}; it has {', '.join(map(str, row))}")

    return one(_PROMPT), one(_OUTPUT)


@dataclass
class _Sequence:
    request: Request
    done: int = 0  # tokens whose K/V are in the cache

    @property
    def total(self) -> int:
        # The last output token is never fed back.
        return self.request.prompt + self.request.output - 1


def replay(
    requests: Sequence[Request], *, token_budget: int = TOKEN_BUDGET, max_seqs: int = MAX_SEQS, kv_capacity: int = KV_CAPACITY
) -> list[Lengths]:
    """The batch of every step, `(q_len, kv_len)` a sequence: decodes first, then prefill chunks, in order of arrival.

    Every token of every request is a query token of exactly one step; a prompt's last chunk yields the first output token, so a
    request of `n` output tokens has `n - 1` decode steps. A request longer than `kv_capacity` is left out.
    """
    if token_budget < max_seqs:
        raise ValueError(f"{token_budget=} must be at least {max_seqs=}, or decodes do not fit in a step")
    waiting = deque(s for s in map(_Sequence, requests) if s.total <= kv_capacity)
    running: list[_Sequence] = []
    steps: list[Lengths] = []
    reserved = 0
    while waiting or running:
        while waiting and len(running) < max_seqs and reserved + waiting[0].total <= kv_capacity:
            reserved += waiting[0].total
            running.append(waiting.popleft())
        decoding = [s for s in running if s.done >= s.request.prompt]
        prefilling = [s for s in running if s.done < s.request.prompt]
        budget = token_budget - len(decoding)
        step = []
        for s in decoding:
            s.done += 1
            step.append((1, s.done))
        for s in prefilling:
            chunk = min(budget, s.request.prompt - s.done)
            if chunk == 0:
                break
            budget -= chunk
            s.done += chunk
            step.append((chunk, s.done))
        steps.append(tuple(step))
        reserved -= sum(s.total for s in running if s.done == s.total)
        running = [s for s in running if s.done < s.total]
    return steps


def representative(steps: Sequence[Workload], count: int, peaks: Peaks) -> list[Workload]:
    """`count` of the steps, each standing for an equal share of the trace's floor time, in order of cost.

    Steps are sorted by floor and those at the middles of `count` equal parts of the summed floor are taken; where one step covers
    several middles, the next ones fill up.
    """
    floors = sorted((cost(w).floor_us(peaks), i) for i, w in enumerate(steps))
    total, so_far = sum(floor for floor, _ in floors), 0.0
    chosen: list[int] = []
    for floor, i in floors:
        so_far += floor
        if len(chosen) < count and so_far >= total * (len(chosen) + 0.5) / count:
            chosen.append(i)
    return [steps[i] for i in chosen]


def workloads(
    path: Path, peaks: Peaks, *, count: int, num_requests: int, token_budget: int = TOKEN_BUDGET, **shape: object
) -> list[Workload]:
    """Representative steps of the trace at `path` as rows; `shape` holds other fields of `Workload`."""
    batches = replay(read(path, num_requests), token_budget=token_budget, max_seqs=min(MAX_SEQS, token_budget))
    steps = []
    for number, lengths in enumerate(batches):
        decodes = sum(q_len == 1 for q_len, _ in lengths)
        tokens = sum(q_len for q_len, _ in lengths)
        parts = [f"{decodes} decodes"] * (decodes > 0)
        if decodes < len(lengths):
            parts.append(f"{tokens - decodes} tokens of {len(lengths) - decodes} prefills")
        name = f"{path.stem} step {number}: {' + '.join(parts)}"
        steps.append(Workload(name, f"trace {path.stem}", lengths, **shape))  # type: ignore[arg-type]
    return representative(steps, count, peaks)
