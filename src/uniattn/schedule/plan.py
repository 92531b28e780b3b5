"""What a plan is: how a batch's work is cut. Made once a step, shared by all layers whose facts agree."""

import functools
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from uniattn.errors import ArgumentError
from uniattn.launch.target import Target
from uniattn.schedule import split, tiles
from uniattn.schedule.split import cdiv


@dataclass(frozen=True)
class Plan:
    """The cut of a batch, chosen on the host from bounds alone: no lengths are read, so it holds for every batch of its sizes.

    The first seven fields are the facts that a call must share; the others are the choice. `num_splits` parts of each sequence's
    visible K/V are attended by separate programs and merged.

    Example: 64 decodes of up to 8192 KV tokens, 32 query and 8 KV heads, fill 132 SMs without splits; one decode needs them.

    >>> import torch
    >>> from uniattn.schedule.plan import make
    >>> from uniattn.launch.target import Target
    >>> h200 = Target("NVIDIA H200", "cuda", 90, 132, 232448)
    >>> make(64, 64, 32, 8, 128, 128, 2, max_seqlen_q=1, max_seqlen_k=8192, target=h200).num_splits
    1
    >>> make(1, 1, 32, 8, 128, 128, 2, max_seqlen_q=1, max_seqlen_k=8192, target=h200).num_splits
    55
    """

    num_tokens: int
    num_seqs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    small_m: int
    small_n: int
    small_stages: int
    bulk: bool
    num_splits: int

    @functools.cached_property
    def tiles(self) -> tuple[Any, ...]:
        """The tile fields, as a launch's key holds them."""
        return tiles.Tiles(
            self.block_m, self.block_n, self.num_stages, self.num_warps, self.small_m, self.small_n, self.small_stages, self.bulk,
        ).as_tuple()  # fmt: skip

    def as_ints(self) -> list[int]:
        """The plan as the op takes it."""
        return [int(getattr(self, field.name)) for field in fields(self)]

    @classmethod
    def from_ints(cls, ints: list[int]) -> "Plan":
        """The inverse of `as_ints`."""
        return _from_ints(tuple(ints))

    def check(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, num_seqs: int) -> None:
        """Raise where a call's facts differ from the plan's."""
        came = (q.shape[0], num_seqs, q.shape[1], k_cache.shape[-2], q.shape[2], v_cache.shape[-1], q.element_size())
        for field, got in zip(fields(self), came, strict=False):
            planned = getattr(self, field.name)
            if planned != got:
                raise ArgumentError(
                    "plan",
                    got=f"a plan for {field.name}={planned} with a call of {field.name}={got}",
                    limit="a plan serves calls of its own sizes only",
                    fix="make one with uniattn.plan(...) from this call's arguments",
                )


@functools.lru_cache(maxsize=1024)
def _from_ints(ints: tuple[Any, ...]) -> Plan:
    return Plan(*ints)


@functools.lru_cache(maxsize=1024)
def make(
    num_tokens: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    target: Target,
    num_splits: int | None = None,
) -> Plan:
    """Choose tiles and splits; `max_seqlen_*` are upper bounds in tokens, `num_splits` forces that choice.

    Remembered, since all layers of a step ask the same: 0.5 us in place of 10.
    """
    group = num_q_heads // num_kv_heads
    # A bound far above the mean (a graph captured for any mix) would give decodes prefill's tiles; any tile size is right.
    rows = min(max_seqlen_q, cdiv(num_tokens, max(1, num_seqs))) * group
    t = tiles.choose(rows, head_dim, v_head_dim, itemsize, target.max_shared_bytes)
    if num_splits is None:
        # Registers let about 16 warps of these kernels live on an SM.
        slots = target.num_sms * max(1, 16 // t.num_warps)
        programs = max(1, (num_tokens * group // t.block_m + min(num_seqs, num_tokens)) * num_kv_heads)
        if t.block_m >= group * max_seqlen_q:
            programs = max(1, min(num_seqs, num_tokens) * num_kv_heads)
        num_splits = split.num_splits(programs, cdiv(max_seqlen_k, t.block_n), slots)
    return Plan(
        num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, v_head_dim, itemsize, t.block_m, t.block_n, t.num_stages,
        t.num_warps, t.small_m, t.small_n, t.small_stages, t.bulk, num_splits,
    )  # fmt: skip
