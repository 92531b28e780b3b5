"""What a plan is: how a batch's work is cut into items, and in which order they run. Made once a step, shared by layers."""

import functools
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from uniattn.launch.target import Target
from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule import hopper, tiles
from uniattn.schedule.tiles import Tiles, cdiv
from uniattn.tuning.choose import choose, tables_of
from uniattn.tuning.problem import problem

# Ints of an item's record and of a tile's entry in the plan's buffer (kernels.plan).
RECORD_INTS = 8
TILE_INTS = 4
# The builder cuts no piece shorter than this: shorter ones cost more in their merge than they gain.
MIN_PIECE_TOKENS = 128
# The builder's piece lengths are a slot's mean load over halves of these; the last bounds items and partials. A persistent program
# is a slot by itself and takes one piece after another, where the portable kernel has four and more programs an SM.
_HALVES = (1, 2, 3, 4, 5)
_PERSISTENT_HALVES = (2, 3, 4, 6, 9, 14, 20)
# Largest number of tiles that the builder holds at once; batches of more tiles are not cut.
MAX_CUT_TILES = 1024


def halves(persistent: bool | int) -> tuple[int, ...]:
    """By how many halves of themselves a slot's mean load is divided for the piece lengths that the builder tries."""
    return _PERSISTENT_HALVES if persistent else _HALVES


@dataclass(frozen=True)
class PlanSpec:
    """The host's part of a plan: what the batch's sizes fix. No lengths are read, so it holds for every batch of these sizes.

    `causal` is 0 no, 1 yes, 2 for each sequence; windows in tokens. Tiles are numbered by arithmetic on `cu_seqlens_q`, and
    `num_tiles` bounds them; `num_items` bounds the plan's items of a KV head, `num_partials` those that are pieces, `max_rows` a
    tile's rows. `num_splits` > 0 forces the number of pieces a tile.
    """

    num_tokens: int
    num_seqs: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int
    causal: int
    window_left: int
    window_right: int
    block_m: int
    block_n: int
    num_stages: int
    num_warps: int
    small_m: int
    small_n: int
    small_stages: int
    bulk: int
    heads_first: int
    num_slots: int
    item_overhead: int
    num_tiles: int
    num_items: int
    num_partials: int
    max_rows: int
    num_splits: int
    is_hopper: int

    # Plain properties: torch.compile cannot trace functools.cached_property before Python 3.12, for its lock.
    @property
    def compiled_in(self) -> tuple[Any, ...]:
        """`Tiles.compiled_in` of the plan's tiles."""
        return (
            self.block_m, self.block_n, self.num_stages, self.num_warps, self.small_m, self.small_n, self.small_stages,
            bool(self.bulk),
        )  # fmt: skip

    @property
    def facts(self) -> tuple[int, ...]:
        """The first ten fields, which a call must share."""
        return (
            self.num_tokens, self.num_seqs, self.num_q_heads, self.num_kv_heads, self.head_dim, self.v_head_dim, self.itemsize,
            self.causal, self.window_left, self.window_right,
        )  # fmt: skip

    def as_ints(self) -> list[int]:
        """The spec as the op takes it."""
        return [getattr(self, field.name) for field in fields(self)]

    @classmethod
    def from_ints(cls, ints: list[int]) -> "PlanSpec":
        """The inverse of `as_ints`."""
        return _from_ints(tuple(ints))

    @property
    def num_records(self) -> int:
        """Bound of the plan's records: its items, each for every KV head."""
        return self.num_items * self.num_kv_heads

    @property
    def first_tile(self) -> int:
        """Where the tiles start in the plan's buffer, in int32: behind a header in a record's place and the records."""
        return (1 + self.num_records) * RECORD_INTS

    @property
    def first_counter(self) -> int:
        """Where the counters start, behind the tiles."""
        return self.first_tile + self.num_tiles * TILE_INTS

    @property
    def num_counters(self) -> int:
        """Counters of pieces done, of the kernel that merges them itself: one for each partial slot, KV head and consumer."""
        return self.num_partials * self.num_kv_heads * hopper.NUM_CONSUMERS if self.is_hopper else 0

    @property
    def buffer_ints(self) -> int:
        """Length of the plan's buffer in int32."""
        return self.first_counter + self.num_counters


@dataclass(frozen=True, eq=False)
class Plan:
    """A plan: its spec on the host and its list of items on the device (`kernels.plan` tells the layout).

    It holds the lengths of the batch that it was built from, not the page ids: one plan serves all layers of a step whose sizes,
    causality and windows agree. The lists that the builder writes are those of `schedule.build`, where an example stands.
    """

    spec: PlanSpec
    buffer: Tensor

    def records(self) -> list[tuple[int, ...]]:
        """The plan's records in order, as `kernels.plan` writes them; waits for the device."""
        records = self.buffer[: self.spec.first_tile].view(-1, RECORD_INTS).tolist()
        num_large, num_small = records[0][:2]
        return [tuple(record) for record in records[1 : 1 + (num_large + num_small) * self.spec.num_kv_heads]]


@functools.lru_cache(maxsize=1024)
def _from_ints(ints: tuple[int, ...]) -> PlanSpec:
    return PlanSpec(*ints)


@functools.lru_cache(maxsize=4096)
def make_spec(
    num_tokens: int,
    num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    causal: int,
    window_left: int,
    window_right: int,
    max_seqlen_q: int,
    page_size: int,
    target: Target,
    kernels: tuple[str, ...] = ("triton",),
    num_splits: int = 0,
    forced_tiles: Tiles | None = None,
) -> PlanSpec:
    """Choose tiles and bounds.

    `max_seqlen_q` is an upper bound in tokens, `page_size` 0 for contiguous K/V, `kernels` are those that can serve the call, the
    one that a chip rewards first.
    """
    group = num_q_heads // num_kv_heads
    t = forced_tiles or choose(
        problem(
            num_tokens, num_seqs, max_seqlen_q, num_q_heads, num_kv_heads, head_dim, v_head_dim, itemsize, page_size,
            windowed=window_left != UNBOUNDED,
        ),
        target,
        tables_of(target),
        kernels,
    ).tiles  # fmt: skip
    num_slots = target.num_sms * t.programs_per_sm
    num_tiles = tiles.num_tiles(num_tokens, num_seqs, group, t.block_m)
    may_cut = num_tiles <= MAX_CUT_TILES and (num_splits > 0 or num_tokens * group // t.block_m * num_kv_heads < 2 * num_slots)
    num_items, num_partials = num_tiles, 0
    if may_cut:
        pieces = cdiv(halves(t.kernel == "hopper")[-1] * num_slots, 2 * num_kv_heads) + 1
        num_items = num_tiles * num_splits if num_splits else num_tiles + pieces
        num_partials = num_tiles * num_splits if num_splits else 2 * pieces
    return PlanSpec(
        num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, v_head_dim, itemsize, causal, window_left, window_right,
        t.block_m, t.block_n, t.num_stages, t.num_warps, t.small_m, t.small_n, t.small_stages, int(t.bulk), int(t.heads_first),
        num_slots, t.item_overhead, num_tiles, num_items, num_partials, max(1, min(t.block_m, max_seqlen_q * group)), num_splits,
        int(t.kernel == "hopper"),
    )  # fmt: skip


__all__ = ["Plan", "PlanSpec", "Tiles", "make_spec"]
