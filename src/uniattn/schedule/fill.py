"""The plan's buffer as `kernels.plan` fills it, from the items of `schedule.build`: the reference path's builder."""

from itertools import pairwise

import torch
from torch import Tensor

from uniattn.schedule.build import build, places
from uniattn.schedule.hopper import L2_BYTES, token_bytes
from uniattn.schedule.plan import RECORD_INTS, TILE_INTS, PlanSpec


def fill(
    spec: PlanSpec,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal_per_seq: Tensor | None,
    buffer: Tensor,
) -> None:
    """Write the plan's items and tiles into `buffer`; reads the lengths from the device."""
    starts = [min(start, spec.num_tokens) for start in cu_seqlens_q.tolist()]
    q_lens = [end - start for start, end in pairwise(starts)]
    if seqlens_k is not None:
        kv_lens = seqlens_k.tolist()
    else:
        assert cu_seqlens_k is not None
        kv_lens = cu_seqlens_k.diff().tolist()
    lens = list(zip(q_lens, kv_lens, strict=True))
    padding = (spec.num_tokens - starts[-1], 0)
    group = spec.num_q_heads // spec.num_kv_heads
    items = build(
        lens, group=group, num_kv_heads=spec.num_kv_heads, num_slots=spec.num_slots, item_overhead=spec.item_overhead,
        block_m=spec.block_m, block_n=spec.block_n, small_m=spec.small_m, small_n=spec.small_n, may_cut=spec.num_partials > 0,
        num_splits=spec.num_splits, causal=spec.causal == 1 if causal_per_seq is None else causal_per_seq.tolist(),
        window=(spec.window_left, spec.window_right), padding_tokens=padding[0],
        persistent=bool(spec.is_hopper),
    )  # fmt: skip

    # Wrong lengths may ask for more than the sizes allow; what has no place is left out.
    items = items[: spec.num_items]
    sequences = [*lens, padding]
    pieces = {(item.seq, item.first_row): item.num_splits for item in items}
    slots, next_slot = {}, 0
    tiles = [[0] * TILE_INTS for _ in range(spec.num_tiles)]
    for (seq, first_row), count in sorted(pieces.items()):
        slots[seq, first_row] = next_slot if count > 1 else -1
        next_slot += count if count > 1 else 0
        number = starts[seq] * group // spec.block_m + seq + first_row // spec.block_m
        if number < spec.num_tiles:
            tiles[number] = [seq, first_row, count, slots[seq, first_row]]
    num_small = sum(item.small for item in items)
    header = [len(items) - num_small, num_small] + [0] * (RECORD_INTS - 2)
    order = places(
        items, spec.num_kv_heads, heads_first=bool(spec.heads_first), interleave=bool(spec.is_hopper),
        l2_tokens=L2_BYTES // token_bytes(spec.head_dim, spec.v_head_dim, spec.itemsize),
    )  # fmt: skip
    records = [
        [i.seq, i.first_row, starts[i.seq], *sequences[i.seq], i.num_splits << 16 | i.split, slots[i.seq, i.first_row], head]
        for i, head in order
    ]
    unused = [[0] * RECORD_INTS] * (spec.num_records - len(records))
    ints = torch.tensor([header, *records, *unused], dtype=torch.int32).flatten()
    buffer[: spec.first_counter].copy_(torch.cat([ints, torch.tensor(tiles, dtype=torch.int32).flatten()]))
    buffer[spec.first_counter : spec.buffer_ints] = 0
