"""Requests of the serving benchmark: lengths from traces, token ids at random, and when they arrive."""

import random
from pathlib import Path

from uniattn.bench.traces import Request, read

# Name of a trace: file below the folder of traces (None: made here), requests taken, longest prompt in tokens.
TRACES: dict[str, tuple[str | None, int, int]] = {
    "random": (None, 400, 1000),
    "sharegpt": ("sharegpt_300req_llama31tok_hash16.jsonl", 300, 30000),
    "mooncake": ("mooncake_conversation.jsonl", 80, 30000),
}


def requests(name: str, folder: Path, limit: int | None = None) -> list[Request]:
    """The trace's requests, `limit` of them at most."""
    file, count, longest = TRACES[name]
    count = count if limit is None else min(count, limit)
    if file is None:
        return [Request(1000, 100)] * count
    return [Request(min(r.prompt, longest), r.output) for r in read(folder / file, count)]


def prompts(wanted: list[Request], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids of the requests' lengths, without the first few, which are special in most vocabularies."""
    draw = random.Random(seed)
    return [draw.choices(range(10, vocab_size), k=r.prompt) for r in wanted]


def arrivals(count: int, rate: float | None, seed: int = 0) -> list[float]:
    """Seconds after the start at which each request arrives: a Poisson process of `rate` a second, or all at once."""
    if rate is None:
        return [0.0] * count
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times
