"""The portable Triton kernel: attention of query tiles of any length over paged or contiguous K/V.

One program serves one query tile, KV head and split. It finds its tile on the device, bounds the loop by what the tile's rows
see, and runs unmasked blocks in the middle and masked ones at the edges. Tiles of at most SMALL_M rows (decode in a mixed
batch) take a small-tile loop of the same code, so that they do not pay for BLOCK_M padded rows.
"""

import triton
import triton.language as tl

from uniattn.kernels.blocks.bounds import split_range, tile_range
from uniattn.kernels.blocks.tiles import find_tile
from uniattn.kernels.triton.tile import attend_tile, store_tile


@triton.jit(
    do_not_specialize=["kv_capacity", "num_tokens", "num_seqs", "num_tiles", "num_splits", "window_left", "window_right"]
)
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, page_table_ptr, cu_seqlens_k_ptr, causal_ptr,
    sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, out_strides, page_table_stride, kv_capacity,
    num_tokens, num_seqs, num_tiles, num_kv_heads, num_splits, window_left, window_right, scale, softcap,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    SMALL_M: tl.constexpr, SMALL_N: tl.constexpr, SMALL_STAGES: tl.constexpr, BULK: tl.constexpr, HEADS_FIRST: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: num_tiles * num_kv_heads * num_splits programs. Strides in elements: q token, head; k, v page, slot, head; out
    split, token, head.

    With num_splits > 1, `out_ptr` and `lse_ptr` hold fp32 partials `[num_splits, ...]`, each normalised, for the merge kernel.
    `kv_capacity` is the KV tokens that a page table's row, or contiguous K/V, can hold: none past it is read.
    `page_table_ptr` None means contiguous K/V at `cu_seqlens_k`; `seqlens_k_ptr` None takes lengths from `cu_seqlens_k`.
    """
    pid = tl.program_id(0)
    if HEADS_FIRST:
        # Decode: the heads of a sequence run together, since their K/V tokens lie side by side in memory.
        kv_head = pid % num_kv_heads
        split = pid // num_kv_heads % num_splits
        tile = pid // (num_kv_heads * num_splits)
    else:
        # Prefill: the tiles of a head run together and share its K/V in L2.
        tile = pid % num_tiles
        split = pid // num_tiles % num_splits
        kv_head = pid // (num_tiles * num_splits)
    # A sequence's last tile sees the most keys: longest first.
    tile = num_tiles - 1 - tile
    seq, q_begin, q_end, first_row = find_tile(tile, cu_seqlens_q_ptr, num_seqs, num_tokens, GROUP, BLOCK_M, 128)
    q_len = q_end - q_begin
    if first_row >= q_len * GROUP:
        return
    real_seq = tl.minimum(seq, num_seqs - 1)
    first_token = 0
    if page_table_ptr is not None:
        page_table_ptr += real_seq.to(tl.int64) * page_table_stride
    kv_len = 0
    readable = kv_capacity
    if cu_seqlens_k_ptr is not None:
        first_token = tl.load(cu_seqlens_k_ptr + real_seq)
        kv_len = tl.load(cu_seqlens_k_ptr + real_seq + 1) - first_token
        if PAGE_SIZE == 0:
            readable = tl.minimum(kv_len, kv_capacity - first_token)
    if seqlens_k_ptr is not None:
        kv_len = tl.load(seqlens_k_ptr + real_seq)
    kv_len = tl.where(seq == num_seqs, 0, kv_len)
    readable = tl.minimum(readable, kv_len)
    right = window_right
    if causal_ptr is not None:
        right = tl.where(tl.load(causal_ptr + real_seq) != 0, 0, right)
    elif CAUSAL:
        right = 0
    out_ptr += split.to(tl.int64) * out_strides[0]
    if lse_ptr is not None:
        lse_ptr += split.to(tl.int64) * num_kv_heads * GROUP * num_tokens
    # One split alone carries the sink: the merge counts each part once. Padding rows have none.
    takes_sink = (split == 0) & (seq != num_seqs)

    if SMALL_M > 0 and q_len * GROUP <= SMALL_M:
        begin, full_begin, full_end, end = tile_range(kv_len, q_len, first_row, window_left, right, readable, GROUP, SMALL_M)
        begin, end = split_range(begin, end, split, num_splits, SMALL_N, MIN_BLOCKS)
        small_out, small_lse = attend_tile(
            q_begin, q_len, kv_len, first_token, first_row, kv_head, begin, full_begin, full_end, end, window_left, right,
            takes_sink, q_ptr, k_ptr, v_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, scale,
            softcap, GROUP, HAS_WINDOW, False, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE, SAME_STRIDES, HAS_SOFTCAP, UPCAST,
            SMALL_M, SMALL_N, SMALL_STAGES,
        )  # fmt: skip
        store_tile(
            small_out, small_lse, q_begin, q_len, first_row, kv_head, out_ptr, lse_ptr, out_strides[1:], num_tokens, GROUP,
            V_HEAD_DIM, DV, SMALL_M,
        )  # fmt: skip
    else:
        begin, full_begin, full_end, end = tile_range(kv_len, q_len, first_row, window_left, right, readable, GROUP, BLOCK_M)
        begin, end = split_range(begin, end, split, num_splits, BLOCK_N, MIN_BLOCKS)
        out, lse = attend_tile(
            q_begin, q_len, kv_len, first_token, first_row, kv_head, begin, full_begin, full_end, end, window_left, right,
            takes_sink, q_ptr, k_ptr, v_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, scale,
            softcap, GROUP, HAS_WINDOW, BULK, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE, SAME_STRIDES, HAS_SOFTCAP, UPCAST,
            BLOCK_M, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
        store_tile(
            out, lse, q_begin, q_len, first_row, kv_head, out_ptr, lse_ptr, out_strides[1:], num_tokens, GROUP, V_HEAD_DIM,
            DV, BLOCK_M,
        )  # fmt: skip
