"""Tables for the tests: of an H200, with answers that no heuristic gives."""

from dataclasses import replace

from uniattn.tuning.cards import CARDS
from uniattn.tuning.kernels import KERNELS, source_hash
from uniattn.tuning.problem import problem
from uniattn.tuning.table import Entry, Table, facts

H200 = CARDS["h200"]
DECODE = problem(32, 32, 1, 32, 8, 128, 128, 2, 16, False)


def table(*entries: Entry, **changes) -> Table:
    """A table of the H200 for this version's kernels."""
    made = Table(facts(H200), "3.6.0", {name: source_hash(name) for name in KERNELS}, "2026-01-02 03:04 UTC", list(entries))
    return replace(made, **changes)


def entry(key, tiles, us=90.0, default_us=100.0) -> Entry:
    level = "exact" if hasattr(key, "num_tokens") else "bucket"
    return Entry(level, key, tiles, us, default_us, ("decode 32 x 2048",), ("decode 32 x 2048, held out 1",))
