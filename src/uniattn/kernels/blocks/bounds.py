"""Which KV tokens a tile's rows see. All intervals are half-open here, in KV tokens of the sequence.

Query token t of a sequence stands at position kv_len - q_len + t (aligned bottom-right, negative where the query is longer)
and sees [position - left, position + right]. Causal is right == 0; no window is left or right == UNBOUNDED. So every mask of
this kind is two run-time integers, and no kernel is compiled for a window's size.
"""

import triton
import triton.language as tl


@triton.jit
def tile_range(kv_len, q_len, first_row, left, right, readable, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """`(begin, full_begin, full_end, end)`: some row sees `[begin, end)`, every row sees `[full_begin, full_end)`.

    For the BLOCK_M query rows from `first_row` on; `readable` is the KV tokens that exist.
    """
    first_pos = kv_len - q_len + first_row // GROUP
    last_pos = kv_len - q_len + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    begin = tl.maximum(first_pos - left, 0)
    end = tl.minimum(last_pos + right + 1, readable)
    full_begin = tl.maximum(last_pos - left, 0)
    full_end = tl.minimum(first_pos + right + 1, readable)
    return begin, full_begin, full_end, end


@triton.jit
def piece_range(begin, end, piece, num_pieces, BLOCK_N: tl.constexpr):
    """Piece `piece` of `[begin, end)` cut into `num_pieces` as equal as whole blocks of BLOCK_N allow; maybe empty."""
    num_blocks = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_N)
    first = num_blocks * piece // num_pieces
    last = num_blocks * (piece + 1) // num_pieces
    return begin + first * BLOCK_N, tl.minimum(begin + last * BLOCK_N, end)


@triton.jit
def visible(pos, kv, left, right):
    """Whether the query at `pos` sees KV token `kv`, broadcast; the caller bounds `kv` by the sequence's length."""
    return (kv >= pos - left) & (kv <= pos + right)
