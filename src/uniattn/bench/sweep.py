"""The sweep that looks for cliffs: batch, query length and context, one axis at a time from six base points.

A step from one point to the next is a cliff where time grows by more than `SLACK` over the growth of the floor.
"""

from __future__ import annotations

from uniattn.bench.workloads import Workload

#: `(num_seqs, q_len, kv_len)`: alone and short, alone and long, small batches, a full one, drafts.
BASES = ((1, 1, 2048), (1, 1, 16384), (8, 1, 4096), (32, 1, 2048), (4, 5, 8192), (16, 8, 1024))
BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64)
QUERIES = tuple(range(1, 17))
CONTEXTS = tuple(sorted([512 << i for i in range(9)] + [768 << i for i in range(8)]))
AXES = ("batch", "query", "context")
PREFIX = "sweep "

SLACK = 1.3


def group(axis: str, base: tuple[int, int, int]) -> str:
    """Name of one curve: what varies, then what stays."""
    num_seqs, q_len, kv_len = base
    fixed = {
        "batch": f"{num_seqs} sequence{'s' * (num_seqs > 1)}",
        "query": f"{q_len} quer{'ies' if q_len > 1 else 'y'}",
        "context": f"{kv_len} KV",
    }
    return f"{PREFIX}{axis}: {', '.join(words for name, words in fixed.items() if name != axis)}"


def axis_of(curve: str) -> str:
    """The axis that a curve of this name runs along."""
    return curve.removeprefix(PREFIX).split(":")[0]


def workloads(**shape: object) -> list[Workload]:
    """All points of all curves; `shape` holds other fields of `Workload`. A point on three curves is three rows.

    Bases that differ in one axis only share the curve along it, which comes once.
    """
    rows: dict[str, Workload] = {}
    for base in BASES:
        for axis, values in zip(AXES, (BATCHES, QUERIES, CONTEXTS), strict=True):
            for value in values:
                num_seqs, q_len, kv_len = (value if name == axis else at for name, at in zip(AXES, base, strict=True))
                curve = group(axis, base)
                name, lengths = f"{curve}, {axis} {value}", ((q_len, kv_len),) * num_seqs
                rows[name] = Workload(name, curve, lengths, x=value, **shape)  # type: ignore[arg-type]
    return list(rows.values())


def is_cliff(us: float, next_us: float, floor_us: float, next_floor_us: float) -> bool:
    """Does the time jump between two neighbouring points of a curve by more than the work explains?"""
    return next_us / us > SLACK * max(1.0, next_floor_us / floor_us)
