"""One query tile: load its rows, run over a range of its KV tokens, give its normalised output and LSE; store it."""

import triton
import triton.language as tl

from uniattn.kernels.blocks.bounds import visible
from uniattn.kernels.blocks.paging import slots
from uniattn.kernels.blocks.scores import modify
from uniattn.kernels.blocks.softmax import finalize, online_step, with_sink


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
    k_strides, v_strides, left, right, scale, softcap, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Accumulate the KV blocks of `[begin, end)`; MASKED ones check each score and read no token at or past `kv_end`."""
    d0 = tl.arange(0, D0)
    dv = tl.arange(0, DV)
    for start in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        kv = start + tl.arange(0, BLOCK_N)
        exists = kv < kv_end
        page, slot = slots(kv, exists, page_table_ptr, first_token, PAGE_SIZE, MASKED)
        k_offset = page * k_strides[0] + slot * k_strides[1]
        k0 = _load_part(k_ptr, k_offset[None, :], d0[:, None], exists[None, :], HEAD_DIM, 0, D0, MASKED)
        products = _dot(q0, k0, None, UPCAST)
        if D1 > 0:
            d1 = tl.arange(0, D1)
            k1 = _load_part(k_ptr, k_offset[None, :], d1[:, None], exists[None, :], HEAD_DIM, D0, D1, MASKED)
            products = _dot(q1, k1, products, UPCAST)
        if HAS_SOFTCAP or HAS_ALIBI:
            scores = modify(products, scale, softcap, slopes[:, None], pos[:, None], kv[None, :], HAS_SOFTCAP, HAS_ALIBI)
            unit = 1.0
        else:
            scores = products
            unit = scale
        if MASKED:
            scores = tl.where(visible(pos[:, None], kv[None, :], left, right) & exists[None, :], scores, float("-inf"))
        p, correction, row_max, row_sum = online_step(scores, row_max, row_sum, unit)
        acc = acc * correction[:, None]
        v_offset = k_offset if SAME_STRIDES else page * v_strides[0] + slot * v_strides[1]
        v = _load_part(v_ptr, v_offset[:, None], dv[None, :], exists[:, None], V_HEAD_DIM, 0, DV, MASKED)
        acc = _dot(p.to(v.dtype), v, acc, UPCAST)
    return acc, row_max, row_sum


@triton.jit
def attend_tile(
    q_begin, q_len, kv_len, first_token, first_row, kv_head, begin, full_begin, full_end, end, left, right, takes_sink,
    q_ptr, k_ptr, v_ptr, page_table_ptr, sinks_ptr, alibi_ptr, q_strides, k_strides, v_strides, scale, softcap,
    GROUP: tl.constexpr, HAS_WINDOW: tl.constexpr, BULK: tl.constexpr,
    HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SAME_STRIDES: tl.constexpr, HAS_SOFTCAP: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`(out, lse)`, `[BLOCK_M, DV]` and `[BLOCK_M]` in fp32, of the rows from `first_row` over the KV tokens `[begin, end)`.

    `[full_begin, full_end)` is what every row sees. BULK runs the blocks inside it without masks; without BULK all are masked.
    `takes_sink` is whether this part carries the sink.
    """
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_exists = row < q_len * GROUP
    pos = kv_len - q_len + token

    q_offset = (q_begin + token).to(tl.int64) * q_strides[0] + head.to(tl.int64) * q_strides[1]
    q0 = _load_part(q_ptr, q_offset[:, None], tl.arange(0, D0)[None, :], row_exists[:, None], HEAD_DIM, 0, D0, True)
    q1 = q0
    if D1 > 0:
        q1 = _load_part(q_ptr, q_offset[:, None], tl.arange(0, D1)[None, :], row_exists[:, None], HEAD_DIM, D0, D1, True)
    HAS_ALIBI: tl.constexpr = alibi_ptr is not None
    slopes = row_exists.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_ptr + head, mask=row_exists, other=0.0).to(tl.float32) * 1.4426950408889634
    k_ptr += kv_head.to(tl.int64) * k_strides[2]
    v_ptr += kv_head.to(tl.int64) * v_strides[2]

    acc = tl.zeros([BLOCK_M, DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # All loops are pipelined, those of one or two blocks too: unpipelined ones gave wrong products on Hopper where V's part was smaller
    # than K's (Triton 3.6.0, wgmma, head dims 40/16, 64/16, 64/24), and illegal accesses.
    edge = begin
    if BULK:
        if HAS_WINDOW:
            left_end = begin + tl.cdiv(tl.maximum(tl.minimum(full_begin, end) - begin, 0), BLOCK_N) * BLOCK_N
            acc, row_max, row_sum = _kv_loop(
                acc, row_max, row_sum, q0, q1, begin, left_end, end, pos, slopes, k_ptr, v_ptr, page_table_ptr, first_token,
                k_strides, v_strides, left, right, scale, softcap, True, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE,
                SAME_STRIDES, HAS_SOFTCAP, HAS_ALIBI, UPCAST, BLOCK_M, BLOCK_N, NUM_STAGES,
            )  # fmt: skip
            begin = left_end
        edge = begin + tl.maximum(tl.minimum(full_end, end) - begin, 0) // BLOCK_N * BLOCK_N
        acc, row_max, row_sum = _kv_loop(
            acc, row_max, row_sum, q0, q1, begin, edge, end, pos, slopes, k_ptr, v_ptr, page_table_ptr, first_token,
            k_strides, v_strides, left, right, scale, softcap, False, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE,
            SAME_STRIDES, HAS_SOFTCAP, HAS_ALIBI, UPCAST, BLOCK_M, BLOCK_N, NUM_STAGES,
        )  # fmt: skip
    acc, row_max, row_sum = _kv_loop(
        acc, row_max, row_sum, q0, q1, edge, end, end, pos, slopes, k_ptr, v_ptr, page_table_ptr, first_token,
        k_strides, v_strides, left, right, scale, softcap, True, HEAD_DIM, V_HEAD_DIM, D0, D1, DV, PAGE_SIZE,
        SAME_STRIDES, HAS_SOFTCAP, HAS_ALIBI, UPCAST, BLOCK_M, BLOCK_N, NUM_STAGES,
    )  # fmt: skip
    if not (HAS_SOFTCAP or HAS_ALIBI):
        row_max = row_max * scale

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_exists & takes_sink, other=float("-inf")).to(tl.float32)
        acc, row_max, row_sum = with_sink(acc, row_max, row_sum, sink * 1.4426950408889634)
    return finalize(acc, row_max, row_sum)


@triton.jit
def store_tile(
    out, lse, q_begin, q_len, first_row, kv_head, out_ptr, lse_ptr, out_strides, num_tokens,
    GROUP: tl.constexpr, V_HEAD_DIM: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Write a tile's rows to their tokens and heads; `out_strides` token, head; `lse` `[num_q_heads, num_tokens]`."""
    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_exists = row < q_len * GROUP
    dv = tl.arange(0, DV)
    out_offset = (q_begin + token).to(tl.int64) * out_strides[0] + head.to(tl.int64) * out_strides[1]
    tl.store(
        out_ptr + out_offset[:, None] + dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_exists[:, None] & (dv < V_HEAD_DIM)[None, :],
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + head.to(tl.int64) * num_tokens + q_begin + token, lse, mask=row_exists)


@triton.jit
def store_partial(out, lse, part, out_ptr, lse_ptr, PART_ROWS: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr):
    """Write a piece's rows at the front of its place `part` in `[parts, PART_ROWS, DV]` and `[parts, PART_ROWS]`, fp32."""
    row = part.to(tl.int64) * PART_ROWS + tl.arange(0, BLOCK_M)
    tl.store(out_ptr + row[:, None] * DV + tl.arange(0, DV)[None, :], out)
    tl.store(lse_ptr + row, lse)
