"""The plan's builder in plain Python: the readable twin of `kernels.plan`, from lists of lengths to lists of items.

Example: three short decodes and a long one on a chip of 4 slots, one KV head, 16-row tiles, blocks of 32 tokens. The long sequence
is cut, since it alone would take far longer than the mean.

>>> items = build([(1, 64), (1, 300), (1, 64), (1, 4096)], group=1, num_kv_heads=1, num_slots=4, block_m=16, block_n=32)
>>> items[0]
Item(seq=3, first_row=0, split=0, num_splits=8, cost=512, small=False, tile_cost=4096)
>>> [(item.seq, item.cost) for item in items]
[(3, 512), (3, 512), (3, 512), (3, 512), (3, 512), (3, 512), (3, 512), (3, 512), (1, 320), (0, 64), (2, 64)]
"""

import math
from dataclasses import dataclass

from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule.plan import MIN_PIECE_TOKENS, halves
from uniattn.schedule.tiles import cdiv


@dataclass(frozen=True)
class Item:
    """A query tile, or piece `split` of `num_splits` of it. `cost` is the piece's KV tokens, `tile_cost` the whole tile's; `small` takes
    the small-tile loop."""

    seq: int
    first_row: int
    split: int
    num_splits: int
    cost: int
    small: bool
    tile_cost: int


def build(
    lens: list[tuple[int, int]],
    *,
    group: int,
    num_kv_heads: int,
    num_slots: int,
    item_overhead: int = 32,
    block_m: int,
    block_n: int,
    small_m: int = 0,
    small_n: int = 0,
    may_cut: bool = True,
    num_splits: int = 0,
    causal: list[bool] | bool = True,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    padding_tokens: int = 0,
    persistent: bool = False,
) -> list[Item]:
    """Items of a batch of `(q_len, kv_len)` in order: large ones longest first, then small ones longest first."""
    tiles = []
    sequences = [*lens, (padding_tokens, 0)]
    causals = [*(causal if isinstance(causal, list) else [causal] * len(lens)), True]
    for seq, (q_len, kv_len) in enumerate(sequences):
        small = q_len * group <= small_m
        rows, tokens = (small_m, small_n) if small else (block_m, block_n)
        for first_row in range(0, q_len * group, block_m):
            first_pos = kv_len - q_len + first_row // group
            last_pos = kv_len - q_len + min((first_row + rows - 1) // group, q_len - 1)
            begin = max(0, first_pos - window[0])
            end = min(kv_len, last_pos + (0 if causals[seq] else window[1]) + 1)
            tiles.append((seq, first_row, cdiv(max(1, end - begin), tokens) * tokens, small))
    costs = [cost for _, _, cost, _ in tiles]
    length = piece_tokens(costs, num_kv_heads, num_slots, item_overhead, halves(persistent)) if may_cut and tiles else 1 << 30
    items = []
    for seq, first_row, cost, small in tiles:
        pieces = min(num_splits, cost // (small_n if small else block_n)) if num_splits else cdiv(cost, length)
        items += [Item(seq, first_row, split, pieces, cdiv(cost, pieces), small, cost) for split in range(pieces)]
    return sorted(items, key=lambda item: (item.small, -item.cost))


def piece_tokens(costs: list[int], num_kv_heads: int, num_slots: int, item_overhead: int, tried: tuple[int, ...]) -> int:
    """The piece length of least estimated time; `kernels.plan._piece_tokens` gives the reasons."""
    mean_load = sum(costs) * num_kv_heads / num_slots
    longest = max(costs)

    def estimate(length: int) -> float:
        items = sum(cdiv(cost, length) for cost in costs) * num_kv_heads
        return min(cdiv(items, num_slots) * length, mean_load + length) + item_overhead * items / num_slots

    lengths = [max(math.ceil(mean_load * 2 / half / MIN_PIECE_TOKENS), 1) * MIN_PIECE_TOKENS for half in tried]
    return min([longest, *(min(length, longest) for length in lengths)], key=estimate)


def places(
    items: list[Item], num_kv_heads: int, *, heads_first: bool, interleave: bool = False, l2_tokens: int = 0
) -> list[tuple[Item, int]]:
    """`(item, kv_head)` of each record in order, as `kernels.plan._places` has it; `l2_tokens` KV tokens of a head fit in L2."""
    large, small = ([item for item in items if item.small == kind] for kind in (False, True))
    heads_a_pass = 1
    if interleave:
        heads_a_pass = num_kv_heads
        longest = max((item.tile_cost for item in items), default=0)
        while heads_a_pass % 2 == 0 and heads_a_pass * longest > l2_tokens:
            heads_a_pass //= 2
    if heads_first:
        heads_a_pass = num_kv_heads
    larges = [
        (item, first + head) for first in range(0, num_kv_heads, heads_a_pass) for item in large for head in range(heads_a_pass)
    ]
    smalls = [(item, head) for item in small for head in range(num_kv_heads)]
    if not interleave:
        return larges + smalls
    total = len(larges) + len(smalls)
    order: list[tuple[Item, int] | None] = [None] * total
    # A large one opens each stretch of total / len(larges) places.
    for i, record in enumerate(larges):
        order[i * total // len(larges)] = record
    rest = iter(smalls)
    return [next(rest) if record is None else record for record in order]
