"""The portable Triton kernel: attention of query tiles of any length over paged or contiguous K/V.

One program serves one item of the plan for one KV head: a query tile, or a piece of its KV tokens. Items of small tiles (at
most SMALL_M rows: decode in a mixed batch) take a loop of their own in the same launch, so that they do not pay for BLOCK_M
padded rows.
"""

import triton
import triton.language as tl

from uniattn.kernels.blocks.bounds import piece_range, tile_range
from uniattn.kernels.triton.tile import attend_tile, store_partial, store_tile


@triton.jit(do_not_specialize=["kv_capacity", "num_tokens", "num_seqs", "window_left", "window_right"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, items_ptr, page_table_ptr, cu_seqlens_k_ptr,
    causal_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, out_strides, page_table_stride, kv_capacity,
    num_tokens, num_seqs, num_kv_heads, window_left, window_right, scale, softcap,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    SMALL_M: tl.constexpr, SMALL_N: tl.constexpr, SMALL_STAGES: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Grid: a program a record of the plan's list `items_ptr` (`kernels.plan`), whose length the device knows, or more.

    Strides in elements: q token, head; k, v page, slot, head; out token, head. Pieces of a cut tile go to `partial_out_ptr`
    `[slots * num_kv_heads, BLOCK_M, DV]` and `partial_lse_ptr` without DV, in fp32, each normalised; both None
    where nothing can be cut. `kv_capacity` is the KV tokens that a page table's row, or contiguous K/V, can hold: none past it is
    read. `page_table_ptr` None means contiguous K/V at `cu_seqlens_k`.
    """
    # The record is read before it is known to exist, so that one wait on memory serves both.
    record = items_ptr + (1 + tl.program_id(0)) * 8
    seq = tl.load(record)
    first_row = tl.load(record + 1)
    q_begin = tl.load(record + 2)
    q_len = tl.load(record + 3)
    kv_len = tl.load(record + 4)
    piece = tl.load(record + 5)
    partial = tl.load(record + 6)
    kv_head = tl.load(record + 7)
    if tl.program_id(0) >= (tl.load(items_ptr) + tl.load(items_ptr + 1)) * num_kv_heads:
        return
    split = piece & 0xFFFF
    num_splits = piece >> 16
    small = q_len * GROUP <= SMALL_M
    real_seq = tl.minimum(seq, num_seqs - 1)
    first_token = 0
    readable = tl.minimum(kv_len, kv_capacity)
    if page_table_ptr is not None:
        page_table_ptr += real_seq.to(tl.int64) * page_table_stride
    else:
        first_token = tl.load(cu_seqlens_k_ptr + real_seq)
        segment = tl.load(cu_seqlens_k_ptr + real_seq + 1) - first_token
        readable = tl.minimum(kv_len, tl.minimum(segment, kv_capacity - first_token))
    right = window_right
    if causal_ptr is not None:
        right = tl.where(tl.load(causal_ptr + real_seq) != 0, 0, right)
    elif CAUSAL:
        right = 0
    # One piece alone carries the sink: the merge counts each part once. Padding rows have none.
    takes_sink = (split == 0) & (seq != num_seqs)
    part = (partial + split) * num_kv_heads + kv_head

    if SMALL_M > 0 and small:
        begin, full_begin, full_end, end = tile_range(kv_len, q_len, first_row, window_left, right, readable, GROUP, SMALL_M)
        begin, end = piece_range(begin, end, split, num_splits, SMALL_N)
        small_out, small_lse = attend_tile(
            q_begin, q_len, kv_len, first_token, first_row, kv_head, begin, full_begin, full_end, end, window_left, right,
            takes_sink, q_ptr, k_ptr, v_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, scale,
            softcap, GROUP, HAS_WINDOW, False, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE, SAME_STRIDES, HAS_SOFTCAP, UPCAST,
            SMALL_M, SMALL_N, SMALL_STAGES,
        )  # fmt: skip
        if num_splits == 1:
            store_tile(
                small_out, small_lse, q_begin, q_len, first_row, kv_head, out_ptr, lse_ptr, out_strides, num_tokens, GROUP,
                V_HEAD_DIM, DV, SMALL_M,
            )  # fmt: skip
        elif partial_out_ptr is not None:
            store_partial(small_out, small_lse, part, partial_out_ptr, partial_lse_ptr, BLOCK_M, DV, SMALL_M)
    else:
        begin, full_begin, full_end, end = tile_range(kv_len, q_len, first_row, window_left, right, readable, GROUP, BLOCK_M)
        begin, end = piece_range(begin, end, split, num_splits, BLOCK_N)
        out, lse = attend_tile(
            q_begin, q_len, kv_len, first_token, first_row, kv_head, begin, full_begin, full_end, end, window_left, right,
            takes_sink, q_ptr, k_ptr, v_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, scale,
            softcap, GROUP, HAS_WINDOW, BULK, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE, SAME_STRIDES, HAS_SOFTCAP, UPCAST,
            BLOCK_M, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
        if num_splits == 1:
            store_tile(
                out, lse, q_begin, q_len, first_row, kv_head, out_ptr, lse_ptr, out_strides, num_tokens, GROUP, V_HEAD_DIM,
                DV, BLOCK_M,
            )  # fmt: skip
        elif partial_out_ptr is not None:
            store_partial(out, lse, part, partial_out_ptr, partial_lse_ptr, BLOCK_M, DV, BLOCK_M)
