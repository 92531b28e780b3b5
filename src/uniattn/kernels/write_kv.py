"""New K/V tokens into their slots of a paged cache."""

import triton
import triton.language as tl


@triton.jit
def _copy(src_ptr, dst_ptr, heads_dims, src_strides, dst_strides, DIM: tl.constexpr, num_heads):
    head = heads_dims // DIM
    d = heads_dims % DIM
    ok = head < num_heads
    x = tl.load(src_ptr + head.to(tl.int64) * src_strides[1] + d, mask=ok)
    tl.store(dst_ptr + head.to(tl.int64) * dst_strides[2] + d, x, mask=ok)


@triton.jit(do_not_specialize=["num_slots"])
def write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, k_strides, v_strides, k_cache_strides, v_cache_strides,
    slot_stride, num_slots, num_heads, HEAD_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_tokens, blocks of BLOCK elements that cover num_heads * the larger head dim). Strides in elements: k, v token,
    head; caches page, slot, head. A slot outside `[0, num_slots)` is skipped, so that a wrong one never writes elsewhere."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_stride).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    page = slot // PAGE_SIZE
    in_page = slot % PAGE_SIZE
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k_dst = k_cache_ptr + page * k_cache_strides[0] + in_page * k_cache_strides[1]
    v_dst = v_cache_ptr + page * v_cache_strides[0] + in_page * v_cache_strides[1]
    _copy(k_ptr + token * k_strides[0], k_dst, e, k_strides, k_cache_strides, HEAD_DIM, num_heads)
    _copy(v_ptr + token * v_strides[0], v_dst, e, v_strides, v_cache_strides, V_HEAD_DIM, num_heads)
