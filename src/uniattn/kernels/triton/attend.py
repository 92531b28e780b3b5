"""The portable Triton kernel: attention of query tiles of any length over paged or contiguous K/V.

One program serves one query tile, KV head and split. It finds its tile on the device, bounds the loop by what the tile's rows
see, and runs unmasked blocks in the middle and masked ones at the edges. Tiles of at most SMALL_M rows (decode in a mixed
batch) take a small-tile loop of the same code, so that they do not pay for BLOCK_M padded rows.
"""

import triton
import triton.language as tl

from uniattn.kernels.blocks.bounds import split_range, tile_range, visible
from uniattn.kernels.blocks.paging import slots
from uniattn.kernels.blocks.scores import modify
from uniattn.kernels.blocks.softmax import finalize, online_step, with_sink
from uniattn.kernels.blocks.tiles import find_tile


@triton.jit
def _load_part(ptr, offsets, dims, mask, DIM: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Elements `[FIRST, FIRST + SIZE)` of the last dimension, those past DIM as 0; `offsets`, `mask` broadcast against `dims`."""
    if FIRST + SIZE <= DIM:
        if MASKED:
            return tl.load(ptr + offsets + FIRST + dims, mask=mask, other=0.0)
        else:
            return tl.load(ptr + offsets + FIRST + dims)
    else:
        return tl.load(ptr + offsets + FIRST + dims, mask=mask & (FIRST + dims < DIM), other=0.0)


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """a @ b + acc in fp32; fp32 operands in IEEE fp32. UPCAST: the interpreter's bf16 product is wrong, so it multiplies fp32."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _kv_loop(
    acc, row_max, row_sum, q0, q1, begin, end, kv_end, pos, slopes, k_ptr, v_ptr, page_table_ptr, first_token,
    k_strides, v_strides, left, right, scale, softcap,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Accumulate the KV blocks of `[begin, end)`; MASKED ones check each score and read no token at or past `kv_end`."""
    k_page, k_slot = k_strides
    v_page, v_slot = v_strides
    d0 = tl.arange(0, D0)
    dv = tl.arange(0, DV)
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        kv = start + tl.arange(0, BLOCK_N)
        exists = kv < kv_end
        page, slot = slots(kv, exists, page_table_ptr, first_token, PAGE_SIZE, MASKED)
        k_offset = page * k_page + slot * k_slot
        k0 = _load_part(k_ptr, k_offset[None, :], d0[:, None], exists[None, :], HEAD_DIM, 0, D0, MASKED)
        products = _dot(q0, k0, None, UPCAST)
        if D1 > 0:
            d1 = tl.arange(0, D1)
            k1 = _load_part(k_ptr, k_offset[None, :], d1[:, None], exists[None, :], HEAD_DIM, D0, D1, MASKED)
            products = _dot(q1, k1, products, UPCAST)
        if HAS_SOFTCAP or HAS_ALIBI:
            scores = modify(products, scale, softcap, slopes, pos, kv, HAS_SOFTCAP, HAS_ALIBI)
            unit = 1.0
        else:
            scores = products
            unit = scale
        if MASKED:
            scores = tl.where(visible(pos, kv, left, right) & exists[None, :], scores, float("-inf"))
        p, correction, row_max, row_sum = online_step(scores, row_max, row_sum, unit)
        acc = acc * correction[:, None]
        v_offset = page * v_page + slot * v_slot
        v = _load_part(v_ptr, v_offset[:, None], dv[None, :], exists[:, None], V_HEAD_DIM, 0, DV, MASKED)
        acc = _dot(p.to(v.dtype), v, acc, UPCAST)
    return acc, row_max, row_sum


@triton.jit
def _attend_tile(
    q_begin, q_len, kv_len, readable, first_token, first_row, kv_head, split, num_splits, left, right, is_padding,
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, out_strides,
    num_tokens, num_q_heads, scale, softcap,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, BULK: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Compute and store BLOCK_M rows. BULK runs the blocks that every row sees without masks; without it all are masked."""
    q_token, q_head = q_strides
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_exists = row < q_len * GROUP
    pos = kv_len - q_len + token

    q_offset = (q_begin + token).to(tl.int64) * q_token + head * q_head
    d0 = tl.arange(0, D0)
    q0 = _load_part(q_ptr, q_offset[:, None], d0[None, :], row_exists[:, None], HEAD_DIM, 0, D0, True)
    q1 = q0
    if D1 > 0:
        d1 = tl.arange(0, D1)
        q1 = _load_part(q_ptr, q_offset[:, None], d1[None, :], row_exists[:, None], HEAD_DIM, D0, D1, True)
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
    slopes = row_exists.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_ptr + head, mask=row_exists, other=0.0).to(tl.float32) * 1.4426950408889634

    first_pos = kv_len - q_len + first_row // GROUP
    last_pos = kv_len - q_len + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    begin, full_begin, full_end, end = tile_range(first_pos, last_pos, left, right, readable)
    begin, end = split_range(begin, end, split, num_splits, BLOCK_N, MIN_BLOCKS)

    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    k_ptr += kv_head.to(tl.int64) * k_strides[2]
    v_ptr += kv_head.to(tl.int64) * v_strides[2]
    edge = begin
    if BULK:
        if HAS_WINDOW:
            left_end = begin + tl.cdiv(tl.maximum(tl.minimum(full_begin, end) - begin, 0), BLOCK_N) * BLOCK_N
            acc, row_max, row_sum = _kv_loop(
                acc, row_max, row_sum, q0, q1, begin, left_end, end, pos, slopes, k_ptr, v_ptr, page_table_ptr, first_token,
                k_strides[:2], v_strides[:2], left, right, scale, softcap, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE,
                HAS_SOFTCAP, HAS_ALIBI, True, UPCAST, BLOCK_M, BLOCK_N, 1,
            )  # fmt: skip
            begin = left_end
        edge = begin + tl.maximum(tl.minimum(full_end, end) - begin, 0) // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = _kv_loop(
            acc, row_max, row_sum, q0, q1, begin, edge, end, pos, slopes, k_ptr, v_ptr, page_table_ptr, first_token,
            k_strides[:2], v_strides[:2], left, right, scale, softcap, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE,
            HAS_SOFTCAP, HAS_ALIBI, False, UPCAST, BLOCK_M, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
    acc, row_max, row_sum = _kv_loop(
        acc, row_max, row_sum, q0, q1, edge, end, end, pos, slopes, k_ptr, v_ptr, page_table_ptr, first_token,
        k_strides[:2], v_strides[:2], left, right, scale, softcap, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE,
        HAS_SOFTCAP, HAS_ALIBI, True, UPCAST, BLOCK_M, BLOCK_N, 1 if BULK else NUM_STAGES,
    )  # fmt: skip

    if not (HAS_SOFTCAP or HAS_ALIBI):
        row_max = row_max * scale
    if sinks_ptr is not None:
        # One split alone carries the sink: the merge counts each part once. Padding rows have none.
        takes_sink = row_exists & (split == 0) & (is_padding == 0)
        sink = tl.load(sinks_ptr + head, mask=takes_sink, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sink)
    out, lse = finalize(acc, row_max, row_sum)

    out_split, out_token, out_head = out_strides
    dv = tl.arange(0, DV)
    out_offset = split.to(tl.int64) * out_split + (q_begin + token).to(tl.int64) * out_token + head * out_head
    tl.store(
        out_ptr + out_offset[:, None] + dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_exists[:, None] & (dv < V_HEAD_DIM)[None, :],
    )
    if lse_ptr is not None:
        lse_offset = (split * num_q_heads + head).to(tl.int64) * num_tokens + q_begin + token
        tl.store(lse_ptr + lse_offset, lse, mask=row_exists)


@triton.jit(
    do_not_specialize=["page_table_width", "num_tokens", "num_seqs", "num_tiles", "num_splits", "window_left", "window_right"]
)
def attend_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, cu_seqlens_q_ptr, seqlens_k_ptr, page_table_ptr, cu_seqlens_k_ptr, causal_ptr,
    sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, out_strides, page_table_stride, page_table_width,
    num_tokens, num_seqs, num_tiles, num_kv_heads, num_splits, window_left, window_right, scale, softcap,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, SMALL_M: tl.constexpr, SMALL_N: tl.constexpr,
    SMALL_STAGES: tl.constexpr, BULK: tl.constexpr, HEADS_FIRST: tl.constexpr, MIN_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid: num_tiles * num_kv_heads * num_splits programs. Strides in elements: q token, head; k, v page, slot, head; out
    split, token, head.

    With num_splits > 1, `out_ptr` and `lse_ptr` hold fp32 partials `[num_splits, ...]`, each normalised, for the merge kernel.
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
    is_padding = seq == num_seqs
    real_seq = tl.minimum(seq, num_seqs - 1)
    first_token = 0
    if page_table_ptr is not None:
        page_table_ptr += real_seq.to(tl.int64) * page_table_stride
    kv_len = 0
    readable = page_table_width * PAGE_SIZE
    if cu_seqlens_k_ptr is not None:
        first_token = tl.load(cu_seqlens_k_ptr + real_seq)
        kv_len = tl.load(cu_seqlens_k_ptr + real_seq + 1) - first_token
        if PAGE_SIZE == 0:
            readable = kv_len
    if seqlens_k_ptr is not None:
        kv_len = tl.load(seqlens_k_ptr + real_seq)
    kv_len = tl.where(is_padding, 0, kv_len)
    readable = tl.minimum(readable, kv_len)
    right = window_right
    if causal_ptr is not None:
        right = tl.where(tl.load(causal_ptr + real_seq) != 0, 0, right)
    elif CAUSAL:
        right = 0
    num_q_heads = num_kv_heads * GROUP

    if SMALL_M > 0 and q_len * GROUP <= SMALL_M:
        _attend_tile(
            q_begin, q_len, kv_len, readable, first_token, first_row, kv_head, split, num_splits, window_left, right, is_padding,
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides,
            out_strides, num_tokens, num_q_heads, scale, softcap, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, GROUP, PAGE_SIZE, HAS_WINDOW,
            HAS_SOFTCAP, UPCAST, SMALL_M, SMALL_N, SMALL_STAGES, False, MIN_BLOCKS,
        )  # fmt: skip
    else:
        _attend_tile(
            q_begin, q_len, kv_len, readable, first_token, first_row, kv_head, split, num_splits, window_left, right, is_padding,
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides,
            out_strides, num_tokens, num_q_heads, scale, softcap, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, GROUP, PAGE_SIZE, HAS_WINDOW,
            HAS_SOFTCAP, UPCAST, BLOCK_M, BLOCK_N, NUM_STAGES, BULK, MIN_BLOCKS,
        )  # fmt: skip
