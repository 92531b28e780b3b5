"""The named batches that the bench runs, as plain data.

Lengths are exact and fixed: mixes are drawn once from Python's own generator, whose numbers no library version changes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Lengths = tuple[tuple[int, int], ...]

#: Groups of the default table, in its order. `shapes` is run on request only.
TABLE_GROUPS = ("decode", "skew", "prefill", "mixed", "spec", "models")
GROUPS = (*TABLE_GROUPS, "shapes")


@dataclass(frozen=True)
class Workload:
    """One causal batch over a paged KV cache.

    Attributes:
        name: unique in a run.
        group: heading that it is reported and averaged under.
        lengths: `(q_len, kv_len)` a sequence, in tokens; `kv_len` includes the query tokens.
        dtype: of q and the caches, a name of torch's (`bfloat16`).
        window: `(left, right)`, closed: `left` tokens before the own one are visible. None: all of them.
        softcap: 0 is off.
        x: place on the axis of a sweep, else None.
    """

    name: str
    group: str
    lengths: Lengths
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    dtype: str = "bfloat16"
    window: tuple[int, int] | None = None
    softcap: float = 0.0
    x: int | None = None

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError(f"{self.name}: a batch needs at least one sequence")
        for q_len, kv_len in self.lengths:
            if not 1 <= q_len <= kv_len:
                raise ValueError(f"{self.name}: needs 1 <= q_len <= kv_len, got q_len {q_len}, kv_len {kv_len}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"{self.name}: {self.num_q_heads} query heads are no multiple of {self.num_kv_heads} KV heads")

    @property
    def num_tokens(self) -> int:
        """Query tokens of all sequences."""
        return sum(q_len for q_len, _ in self.lengths)

    @property
    def max_q_len(self) -> int:
        return max(q_len for q_len, _ in self.lengths)

    @property
    def max_kv_len(self) -> int:
        return max(kv_len for _, kv_len in self.lengths)

    def runs(self) -> list[tuple[int, int, int]]:
        """The lengths as `(count, q_len, kv_len)`, equal neighbours counted together."""
        return [(len(list(same)), *lengths) for lengths, same in groupby(self.lengths)]

    def shape(self) -> str:
        """Heads, dims and options in a few words, for a report."""
        words = [f"heads {self.num_q_heads}/{self.num_kv_heads}", f"dim {self.head_dim}", f"page {self.page_size}", self.dtype]
        if self.window is not None:
            words.append(f"window {self.window[0] + 1}")
        if self.softcap:
            words.append(f"softcap {self.softcap:g}")
        return ", ".join(words)


def table() -> list[Workload]:
    """Every named batch: the default table and the `shapes` that are run on request."""
    return [*_decode(), *_skew(), *_prefill(), *_mixed(), *_spec(), *_models(), *_shapes()]


def select(only: Sequence[str] = ()) -> list[Workload]:
    """The rows that `only` names: groups (`decode`), `table` for the default groups, or any part of a row's name.

    Nothing in `only` means the default table. Rows come in the table's order, each once. Raises `ValueError` for a word that
    names nothing.
    """
    rows = table()
    chosen: set[str] = set()
    for word in only or ("table",):
        names = {row.name for row in rows if _named(row, word)}
        if not names:
            raise ValueError(f"{word!r} is no group ({', '.join(GROUPS)}) and in no row's name; --list shows all")
        chosen |= names
    return [row for row in rows if row.name in chosen]


def _named(row: Workload, word: str) -> bool:
    if word == "table":
        return row.group in TABLE_GROUPS
    return row.group == word if word in GROUPS else word.lower() in row.name.lower()


def drawn(seed: int, count: int, low: int, high: int) -> list[int]:
    """`count` lengths from `[low, high]`, the same for a seed everywhere."""
    gen = random.Random(seed)
    return [gen.randint(low, high) for _ in range(count)]


def _decodes(kv_lens: Iterable[int]) -> Lengths:
    return tuple((1, kv_len) for kv_len in kv_lens)


def _decode() -> list[Workload]:
    even = [(1, 512), (1, 8192), (1, 131072), (8, 4096), (32, 2048), (64, 8192), (256, 1024)]
    rows = [Workload(f"decode {n} x {kv}", "decode", _decodes([kv] * n)) for n, kv in even]
    return [
        *rows,
        Workload("decode 64, lengths 128-16384", "decode", _decodes(drawn(1, 64, 128, 16384))),
        Workload("decode 64 x 4096, heads 8/1", "decode", _decodes([4096] * 64), num_q_heads=8, num_kv_heads=1),
        Workload("decode 16 x 4096, heads 32/32", "decode", _decodes([4096] * 16), num_kv_heads=32),
    ]


def _skew() -> list[Workload]:
    """One long sequence, in the middle of the batch, where no order of arrival puts it first by luck."""
    short = drawn(5, 63, 64, 512)
    return [Workload("decode 131072 among 63 x 64-512", "skew", _decodes([*short[:31], 131072, *short[31:]]))]


def _prefill() -> list[Workload]:
    even = [(1, 512), (1, 2048), (4, 2048), (1, 8192), (1, 32768), (16, 512)]
    chunks = [(2048, 32768), (512, 131072)]
    return [Workload(f"prefill {n} x {q}", "prefill", ((q, q),) * n) for n, q in even] + [
        Workload(f"chunk {q} of {kv}", "prefill", ((q, kv),)) for q, kv in chunks
    ]


def _mixed() -> list[Workload]:
    # The seeds give the floors (141.9, 2059 and 16.6 us on an H200) of the batches that peers' recorded times belong to.
    return [
        Workload("63 decodes (256-4096) + prefill 1985", "mixed", (*_decodes(drawn(2, 63, 256, 4096)), (1985, 1985))),
        Workload("120 decodes (256-8192) + 8072 of 16264", "mixed", (*_decodes(drawn(0, 120, 256, 8192)), (8072, 16264))),
        Workload("15 decodes (256-2048) + prefill 497", "mixed", (*_decodes(drawn(4, 15, 256, 2048)), (497, 497))),
    ]


def _spec() -> list[Workload]:
    return [
        Workload("64 x 5 queries at 4096", "spec", ((5, 4096),) * 64),
        Workload("8 x 8 queries at 8192", "spec", ((8, 8192),) * 8),
    ]


def _models() -> list[Workload]:
    """Windows, softcap and head dims as models have them."""
    windowed: dict[str, Any] = dict(num_q_heads=32, num_kv_heads=16, window=(1023, 0))
    capped: dict[str, Any] = dict(num_q_heads=16, num_kv_heads=8, head_dim=256, softcap=50.0)
    narrow: dict[str, Any] = dict(num_q_heads=64, num_kv_heads=8, head_dim=64)
    return [
        Workload("windowed prefill 1 x 16384", "models", ((16384, 16384),), **windowed),
        Workload("windowed decode 32 x 16384", "models", _decodes([16384] * 32), **windowed),
        Workload("softcapped prefill 1 x 4096", "models", ((4096, 4096),), **capped),
        Workload("softcapped decode 32 x 4096", "models", _decodes([4096] * 32), **capped),
        Workload("head_dim 64 prefill 1 x 4096", "models", ((4096, 4096),), **narrow),
        Workload("head_dim 64 decode 32 x 4096", "models", _decodes([4096] * 32), **narrow),
    ]


def _shapes() -> list[Workload]:
    """Head dims, groups and page sizes, each on one decode and one prefill; the others are held against the first pair."""
    variants: list[tuple[str, dict[str, Any]]] = [("head_dim 128", {})]
    variants += [(f"head_dim {dim}", dict(head_dim=dim)) for dim in (64, 96, 192, 256, 512)]
    variants += [(f"group {group}", dict(num_q_heads=8 * group)) for group in (1, 7, 8, 16)]
    variants += [(f"page {size}", dict(page_size=size)) for size in (64, 256, 544)]
    base = [("decode 32 x 4096", _decodes([4096] * 32)), ("prefill 1 x 4096", ((4096, 4096),))]
    return [
        Workload(f"{name}, {words}", "shapes", lengths, **changes) for words, changes in variants for name, lengths in base
    ]
