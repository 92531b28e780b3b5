"""The plan's builder: from a batch's lengths to an ordered list of work items, on the device, in one launch.

A tile's cost is the KV tokens that it visits, in whole blocks. Tiles longer than a piece length are cut into equal pieces, and
pieces are listed longest first, those of large tiles before those of small ones. Every program repeats the sums over all tiles and
then places the pieces of its own OWN tiles by counting what comes before them: no scan, no second pass, no communication.

A record is what one program runs: an item for one KV head, in 8 ints: seq, first_row, q_begin, q_len, kv_len, the piece as
num_splits << 16 | split, the first partial slot of its tile (-1: not cut), kv_head. Records lie in the order in which they run, so that a
program's first load finds its work. The header, in the first record's place, holds the numbers of large and of small items,
and the count of records that persistent programs have taken so far, 0.
"""

import triton
import triton.language as tl

from uniattn.kernels.blocks.bounds import tile_range


@triton.jit
def _sequences(first, second, cu_seqlens_q_ptr, num_seqs, search_steps, num_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The sequences that own the tiles numbered `first` and `second`, two vectors searched in step, so that their loads overlap.

    Sequence i owns the tiles from cu_seqlens_q[i] * GROUP // BLOCK_M + i on: the tiles it needs, and at most one more. A last,
    pretended sequence of no KV tokens holds the tokens past cu_seqlens_q[-1] (graph padding).
    """
    low_1 = tl.zeros_like(first)
    low_2 = tl.zeros_like(second)
    high_1 = low_1 + num_seqs
    high_2 = low_2 + num_seqs
    for _ in range(search_steps):
        middle_1 = (low_1 + high_1 + 1) // 2
        middle_2 = (low_2 + high_2 + 1) // 2
        begin_1 = tl.minimum(tl.load(cu_seqlens_q_ptr + middle_1), num_tokens)
        begin_2 = tl.minimum(tl.load(cu_seqlens_q_ptr + middle_2), num_tokens)
        before_1 = begin_1 * GROUP // BLOCK_M + middle_1 <= first
        before_2 = begin_2 * GROUP // BLOCK_M + middle_2 <= second
        low_1 = tl.where(before_1, middle_1, low_1)
        low_2 = tl.where(before_2, middle_2, low_2)
        high_1 = tl.where(before_1, high_1, middle_1 - 1)
        high_2 = tl.where(before_2, high_2, middle_2 - 1)
    return low_1, low_2


@triton.jit
def _tile_facts(
    tile, seq, cu_seqlens_q_ptr, seqlens_k_ptr, cu_seqlens_k_ptr, causal_ptr, num_seqs, num_tokens, num_tiles, kv_capacity,
    window_left, window_right, CAUSAL: tl.constexpr, GROUP: tl.constexpr, PAGED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SMALL_M: tl.constexpr, SMALL_N: tl.constexpr,
):  # fmt: skip
    """Facts of the tiles numbered `tile` (a vector) of the sequences `seq`: `(exists, small, first_row, q_begin, q_len, kv_len, cost)`."""
    real = seq < num_seqs
    q_begin = tl.minimum(tl.load(cu_seqlens_q_ptr + seq), num_tokens)
    q_end = tl.minimum(tl.load(cu_seqlens_q_ptr + seq + 1, mask=real, other=num_tokens), num_tokens)
    q_len = q_end - q_begin
    first_row = (tile - (q_begin * GROUP // BLOCK_M + seq)) * BLOCK_M
    exists = (first_row < q_len * GROUP) & (tile < num_tiles)
    kv_len = tl.zeros_like(tile)
    readable = kv_len + kv_capacity
    if cu_seqlens_k_ptr is not None:
        first_token = tl.load(cu_seqlens_k_ptr + seq, mask=real, other=0)
        kv_len = tl.load(cu_seqlens_k_ptr + seq + 1, mask=real, other=0) - first_token
        if not PAGED:
            readable = tl.minimum(kv_len, kv_capacity - first_token)
    if seqlens_k_ptr is not None:
        kv_len = tl.load(seqlens_k_ptr + seq, mask=real, other=0)
    kv_len = tl.where(real, kv_len, 0)
    readable = tl.minimum(readable, kv_len)
    right = tl.zeros_like(tile) + window_right
    if causal_ptr is not None:
        right = tl.where(tl.load(causal_ptr + seq, mask=real, other=0) != 0, 0, right)
    elif CAUSAL:
        right = tl.zeros_like(tile)
    begin, _, _, end = tile_range(kv_len, q_len, first_row, window_left, right, readable, GROUP, BLOCK_M)
    seen = tl.maximum(end - begin, 1)
    cost = tl.cdiv(seen, BLOCK_N) * BLOCK_N
    small = q_len * GROUP <= SMALL_M
    if SMALL_M > 0:
        begin, _, _, end = tile_range(kv_len, q_len, first_row, window_left, right, readable, GROUP, SMALL_M)
        cost = tl.where(small, tl.cdiv(tl.maximum(end - begin, 1), SMALL_N) * SMALL_N, cost)
    return exists, small, first_row, q_begin, q_len, kv_len, tl.where(exists, cost, 0)


@triton.jit
def _pieces(cost, exists, piece_tokens, forced_splits, block):
    """Pieces that each tile is cut into: the fewest of at most `piece_tokens`, or the forced number as far as it has
    blocks; 0 where there is no tile."""
    free = tl.ceil(cost.to(tl.float32) / tl.maximum(piece_tokens, 1).to(tl.float32)).to(tl.int32)
    forced = tl.minimum(forced_splits, cost // block)
    return tl.where(exists, tl.where(forced_splits > 0, forced, free), 0)


@triton.jit
def _estimate(cost, exists, tried, mean_load, num_kv_heads, num_slots, item_overhead):
    """Time, in KV tokens of one slot, of a batch cut into pieces of at most `tried`.

    Items of equal length run in whole waves over the chip's slots; items of mixed lengths, longest first, end at most one piece
    after the mean; each item costs `item_overhead` tokens more.
    """
    items = tl.sum(_pieces(cost, exists, tried, 0, 1), 0) * num_kv_heads
    in_waves = tl.cdiv(items, num_slots).to(tl.float32) * tried
    return tl.minimum(in_waves, mean_load + tried) + item_overhead * items / num_slots


@triton.jit
def _piece_tokens(cost, exists, num_kv_heads, num_slots, item_overhead, MIN_PIECE: tl.constexpr, HALVES: tl.constexpr):
    """The piece length of least estimated time, of the longest tile (no cut) and a slot's mean load over h / 2 for h of HALVES."""
    mean_load = tl.sum(cost.to(tl.float32), 0) * num_kv_heads / num_slots
    longest = tl.max(cost, 0)
    best = longest
    least = _estimate(cost, exists, longest, mean_load, num_kv_heads, num_slots, item_overhead)
    for i in tl.static_range(len(HALVES)):
        tried = tl.maximum(tl.ceil(mean_load * 2.0 / HALVES[i] / MIN_PIECE), 1.0).to(tl.int32) * MIN_PIECE
        tried = tl.minimum(tried, longest)
        estimate = _estimate(cost, exists, tried, mean_load, num_kv_heads, num_slots, item_overhead)
        best = tl.where(estimate < least, tried, best)
        least = tl.minimum(estimate, least)
    return best


@triton.jit
def _places(index, small, num_large, num_small, head, num_kv_heads, heads_a_pass, HEADS_FIRST: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Where the records of items number `index` of their kind lie, for each `head`.

    HEADS_FIRST and small items: the heads of a sequence run together, since their K/V lie side by side in memory. Else the items of
    a head, or of `heads_a_pass` heads, run together and share their K/V in L2. Large ones first: 324 us against 336 for small ones
    first or both interleaved (63 decodes + a prefill of 1985, H200, portable kernel), as small items fill the large ones' tail.
    INTERLEAVE: large and small ones in proportion, so that on every SM of persistent programs decode's bytes hide under prefill's
    products (prototype of the Hopper kernel: 169 us against 201 in either order).
    """
    in_small = index * num_kv_heads + head
    if HEADS_FIRST:
        in_large = in_small
    else:
        in_large = (head // heads_a_pass * num_large + index) * heads_a_pass + head % heads_a_pass
    if INTERLEAVE:
        # Of each stretch of total / num_large places the first is a large one's; these are the places that leaves.
        total = (num_large + num_small).to(tl.int64)
        others = tl.maximum(num_small, 1)
        in_large = (in_large * total // tl.maximum(num_large, 1)).to(tl.int32)
        in_small = (((in_small + 1) * total + others - 1) // others - 1).to(tl.int32)
        return tl.where(small, in_small, in_large)
    else:
        return tl.where(small, num_large * num_kv_heads + in_small, in_large)


@triton.jit(
    do_not_specialize=[
        "first_tile", "num_counters", "num_seqs", "search_steps", "num_tokens", "num_tiles", "num_kv_heads", "num_slots", "item_overhead",
        "forced_splits", "kv_capacity", "window_left", "window_right",
    ]
)  # fmt: skip
def plan_kernel(
    items_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, cu_seqlens_k_ptr, causal_ptr, first_tile, num_counters, num_seqs, search_steps,
    num_tokens, num_tiles, num_kv_heads, num_slots, item_overhead, forced_splits, kv_capacity, window_left, window_right,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, PAGED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SMALL_M: tl.constexpr, SMALL_N: tl.constexpr, HEADS_FIRST: tl.constexpr, INTERLEAVE: tl.constexpr, L2_TOKENS: tl.constexpr,
    MAY_SPLIT: tl.constexpr, MIN_PIECE: tl.constexpr, HALVES: tl.constexpr, CHUNK: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Grid: cdiv(num_tiles, OWN) programs. Writes `items_ptr` `[1 + records, 8]`, the header and the records; `first_tile` ints from its
    start `[num_tiles, 4]`, what the merge needs of each tile: seq, first_row, num_splits, first partial slot; then `num_counters` zeros.

    MAY_SPLIT needs num_tiles <= CHUNK; without it no tile is cut. `forced_splits` > 0 cuts every tile into that many pieces, as far as it
    has blocks. INTERLEAVE (`_places`) runs as many heads together as L2 holds of the longest tile's K/V, L2_TOKENS of one head.
    """
    tiles_ptr = items_ptr + first_tile
    counters_ptr = tiles_ptr + num_tiles * 4
    for first in range(tl.program_id(0) * CHUNK, num_counters, tl.num_programs(0) * CHUNK):
        counter = first + tl.arange(0, CHUNK)
        tl.store(counters_ptr + counter, tl.zeros_like(counter), mask=counter < num_counters)
    own = tl.program_id(0) * OWN + tl.arange(0, OWN)
    before = tl.zeros_like(own)
    slot = tl.zeros_like(own)
    num_large = 0
    num_small = 0
    longest = 0
    seq = tl.zeros_like(own)
    exists = seq > 0
    small = exists
    first_row = seq
    q_begin = seq
    q_len = seq
    kv_len = seq
    pieces = seq
    for first in range(0, num_tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        seq, c_seq = _sequences(own, tile, cu_seqlens_q_ptr, num_seqs, search_steps, num_tokens, GROUP, BLOCK_M)
        exists, small, first_row, q_begin, q_len, kv_len, cost = _tile_facts(
            own, seq, cu_seqlens_q_ptr, seqlens_k_ptr, cu_seqlens_k_ptr, causal_ptr, num_seqs, num_tokens, num_tiles, kv_capacity,
            window_left, window_right, CAUSAL, GROUP, PAGED, BLOCK_M, BLOCK_N, SMALL_M, SMALL_N,
        )  # fmt: skip
        c_exists, c_small, _, _, _, _, c_cost = _tile_facts(
            tile, c_seq, cu_seqlens_q_ptr, seqlens_k_ptr, cu_seqlens_k_ptr, causal_ptr, num_seqs, num_tokens, num_tiles, kv_capacity,
            window_left, window_right, CAUSAL, GROUP, PAGED, BLOCK_M, BLOCK_N, SMALL_M, SMALL_N,
        )  # fmt: skip
        pieces = exists.to(tl.int32)
        piece_cost = cost
        c_pieces = c_exists.to(tl.int32)
        if MAY_SPLIT:
            piece_tokens = _piece_tokens(c_cost, c_exists, num_kv_heads, num_slots, item_overhead, MIN_PIECE, HALVES)
            pieces = _pieces(cost, exists, piece_tokens, forced_splits, tl.maximum(tl.where(small, SMALL_N, BLOCK_N), 1))
            piece_cost = tl.cdiv(cost, tl.maximum(pieces, 1))
            c_block = tl.maximum(tl.where(c_small, SMALL_N, BLOCK_N), 1)
            c_pieces = _pieces(c_cost, c_exists, piece_tokens, forced_splits, c_block)
            is_cut = (c_pieces > 1)[None, :] & (tile[None, :] < own[:, None])
            slot += tl.sum(tl.where(is_cut, c_pieces[None, :], 0), 1)
        c_piece_cost = tl.cdiv(c_cost, tl.maximum(c_pieces, 1))
        longer = c_piece_cost[None, :] > piece_cost[:, None]
        earlier = (c_piece_cost[None, :] == piece_cost[:, None]) & (tile[None, :] < own[:, None])
        counts = (longer | earlier) & (c_small[None, :] == small[:, None])
        before += tl.sum(tl.where(counts, c_pieces[None, :], 0), 1)
        num_large += tl.sum(tl.where(c_small, 0, c_pieces), 0)
        num_small += tl.sum(tl.where(c_small, c_pieces, 0), 0)
        if INTERLEAVE:
            longest = tl.maximum(longest, tl.max(c_cost, 0))
    if tl.program_id(0) == 0:
        tl.store(items_ptr, num_large)
        tl.store(items_ptr + 1, num_small)
        tl.store(items_ptr + 2, 0)
    slot = tl.where(pieces > 1, slot, -1)
    tile_ptr = tiles_ptr + own * 4
    in_range = own < num_tiles
    tl.store(tile_ptr, seq, mask=in_range)
    tl.store(tile_ptr + 1, first_row, mask=in_range)
    tl.store(tile_ptr + 2, pieces, mask=in_range)
    tl.store(tile_ptr + 3, slot, mask=in_range)
    heads_a_pass = 1
    if INTERLEAVE:
        heads_a_pass = num_kv_heads
        while (heads_a_pass % 2 == 0) & (heads_a_pass.to(tl.int64) * longest > L2_TOKENS):
            heads_a_pass = heads_a_pass // 2
    # Sixteen pieces and eight heads at a time: one piece at a time took 32 us for a tile of 128.
    lane = tl.arange(0, 128)[None, :]
    for first_head in range(0, num_kv_heads, 8):
        head = first_head + lane % 8
        for first_split in range(0, tl.max(pieces, 0), 16):
            split = first_split + lane // 8
            place = _places(
                before[:, None] + split, small[:, None], num_large, num_small, head, num_kv_heads, heads_a_pass, HEADS_FIRST, INTERLEAVE
            )
            record = items_ptr + (1 + place) * 8
            write = (split < pieces[:, None]) & (head < num_kv_heads)
            tl.store(record, seq[:, None], mask=write)
            tl.store(record + 1, first_row[:, None], mask=write)
            tl.store(record + 2, q_begin[:, None], mask=write)
            tl.store(record + 3, q_len[:, None], mask=write)
            tl.store(record + 4, kv_len[:, None], mask=write)
            tl.store(record + 5, pieces[:, None] << 16 | split, mask=write)
            tl.store(record + 6, slot[:, None], mask=write)
            tl.store(record + 7, head, mask=write)
