"""The one merge formula on the device: pieces of one launch, cascade levels, context-parallel parts.

out = sum_s w_s out_s / sum_s w_s and lse = log sum_s exp(lse_s), with w_s = exp(lse_s - max lse).
"""

import triton
import triton.language as tl


@triton.jit
def _merge_rows(
    outs_ptr, lses_ptr, out_stride, lse_stride, out_row, lse_row, row_exists, num_parts,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`(out [ROWS, BLOCK_D], lse [ROWS])` of the parts of ROWS rows at the offsets `out_row` and `lse_row`, the parts `*_stride`
    elements apart, BLOCK_P loaded at once. A part of LSE -inf may hold anything, NaN included."""
    d = tl.arange(0, BLOCK_D)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, num_parts, BLOCK_P):
        part = (first + tl.arange(0, BLOCK_P)).to(tl.int64)
        exists = (part < num_parts)[:, None] & row_exists[None, :]
        lse = tl.load(lses_ptr + part[:, None] * lse_stride + lse_row[None, :], mask=exists, other=float("-inf"))
        outs_mask = (lse > float("-inf"))[:, :, None] & (d < DIM)[None, None, :]
        outs_offset = (part * out_stride)[:, None] + out_row[None, :]
        outs = tl.load(outs_ptr + outs_offset[:, :, None] + d[None, None, :], mask=outs_mask, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        pivot = tl.where(new_top == float("-inf"), 0.0, new_top)
        correction = tl.exp2((top - pivot) * 1.4426950408889634)
        weight = tl.exp2((lse - pivot[None, :]) * 1.4426950408889634)
        acc = acc * correction[:, None] + tl.sum(outs.to(tl.float32) * weight[:, :, None], 0)
        total = total * correction + tl.sum(weight, 0)
        top = new_top
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    return acc / total[:, None], tl.where(empty, float("-inf"), top + tl.log2(total) * 0.6931471805599453)


@triton.jit(do_not_specialize=["num_parts", "num_tokens", "num_heads"])
def merge_kernel(
    outs_ptr, lses_ptr, out_ptr, lse_ptr, outs_strides, lses_strides, out_strides, lse_strides, num_parts, num_tokens, num_heads,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Grid: num_tokens * num_heads programs. Strides in elements: outs part, token, head; lses part, head, token; out token,
    head; lse head, token."""
    pid = tl.program_id(0)
    head = (pid % num_heads).to(tl.int64)
    token = (pid // num_heads).to(tl.int64)
    row = tl.arange(0, 1).to(tl.int64)
    out, lse = _merge_rows(
        outs_ptr, lses_ptr, outs_strides[0], lses_strides[0], row + token * outs_strides[1] + head * outs_strides[2],
        row + head * lses_strides[1] + token * lses_strides[2], row == 0, num_parts, DIM, BLOCK_D, BLOCK_P, 1,
    )  # fmt: skip
    d = tl.arange(0, BLOCK_D)[None, :]
    out_offset = (row + token * out_strides[0] + head * out_strides[1])[:, None]
    tl.store(out_ptr + out_offset + d, out.to(out_ptr.dtype.element_ty), mask=d < DIM)
    if lse_ptr is not None:
        tl.store(lse_ptr + row + head * lse_strides[0] + token * lse_strides[1], lse)


@triton.jit(do_not_specialize=["first_tile", "num_tokens", "num_seqs", "num_kv_heads", "row_blocks"])
def merge_pieces_kernel(
    partial_out_ptr, partial_lse_ptr, out_ptr, lse_ptr, items_ptr, cu_seqlens_q_ptr, out_strides, first_tile, num_tokens,
    num_seqs, num_kv_heads, row_blocks, GROUP: tl.constexpr, DIM: tl.constexpr, DV: tl.constexpr, PART_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The pieces of a plan's cut tiles. Grid: num_tiles * num_kv_heads * row_blocks programs, ROWS rows of a tile each.

    The plan's tiles (`kernels.plan`) start `first_tile` ints behind `items_ptr`; partials are `[slots * num_kv_heads, PART_ROWS(, DV)]`.
    """
    pid = tl.program_id(0)
    kv_head = pid // row_blocks % num_kv_heads
    tile_ptr = items_ptr + first_tile + pid // (row_blocks * num_kv_heads) * 4
    num_pieces = tl.load(tile_ptr + 2)
    if num_pieces <= 1:
        return
    seq = tl.load(tile_ptr)
    in_tile = pid % row_blocks * ROWS + tl.arange(0, ROWS)
    row = tl.load(tile_ptr + 1) + in_tile
    q_begin = tl.load(cu_seqlens_q_ptr + seq)
    q_end = tl.load(cu_seqlens_q_ptr + seq + 1, mask=seq < num_seqs, other=num_tokens)
    exists = row < (q_end - q_begin) * GROUP
    first = (tl.load(tile_ptr + 3) * num_kv_heads + kv_head).to(tl.int64) * PART_ROWS + in_tile
    part_stride = num_kv_heads * PART_ROWS
    out, lse = _merge_rows(
        partial_out_ptr, partial_lse_ptr, part_stride * DV, part_stride, first * DV, first, exists, num_pieces, DIM, DV, BLOCK_P, ROWS
    )
    token = (q_begin + row // GROUP).to(tl.int64)
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    d = tl.arange(0, DV)[None, :]
    out_offset = (token * out_strides[0] + head * out_strides[1])[:, None]
    tl.store(out_ptr + out_offset + d, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & (d < DIM))
    if lse_ptr is not None:
        tl.store(lse_ptr + head * num_tokens + token, lse, mask=exists)
