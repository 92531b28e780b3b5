"""Which rows a program works on: from a tile's number to a sequence and its query rows.

A sequence's query rows are its query tokens times the group, token-major: row r is token r // GROUP and the group's head
r % GROUP. So the rows of one KV head fill BLOCK_M-row tiles whatever the group, and rows of one token may lie in two tiles.

Tiles are numbered without a device-side scan: sequence i starts at tile cu_seqlens_q[i] * GROUP // BLOCK_M + i, which leaves each
sequence at least the tiles it needs and wastes at most one a sequence. A last, pretended sequence of no KV tokens holds the
tokens past cu_seqlens_q[-1] (graph padding), so that their outputs are written like any other empty row.
"""

import triton
import triton.language as tl


@triton.jit
def find_tile(tile, cu_seqlens_q_ptr, num_seqs, num_tokens, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """`(seq, q_begin, q_end, first_row)` of a tile; `seq == num_seqs` is padding; past `q_end`'s rows the tile is empty.

    Vector loads and reductions over all sequences take one round trip to memory for 128 of them; a binary search takes seven.
    """
    seq = -1
    q_begin = 0
    q_end = num_tokens
    for first in range(0, num_seqs + 1, BLOCK_S):
        i = first + tl.arange(0, BLOCK_S)
        valid = i <= num_seqs
        begin = tl.load(cu_seqlens_q_ptr + i, mask=valid, other=0)
        begin = tl.minimum(begin, num_tokens)
        at_or_before = valid & (begin * GROUP // BLOCK_M + i <= tile)
        seq += tl.sum(at_or_before.to(tl.int32), 0)
        q_begin = tl.maximum(q_begin, tl.max(tl.where(at_or_before, begin, 0), 0))
        q_end = tl.minimum(q_end, tl.min(tl.where(valid & (at_or_before == 0), begin, num_tokens), 0))
    first_row = (tile - (q_begin * GROUP // BLOCK_M + seq)) * BLOCK_M
    return seq, q_begin, q_end, first_row
