"""Launch of the portable kernel and, where K/V was split, of the merge."""

import math

import torch
from torch import Tensor

from uniattn.kernels.triton.attend import attend_kernel
from uniattn.launch import merge as merge_launch
from uniattn.launch.target import interpreted, on_device, target_of
from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule import plan as planning
from uniattn.schedule.split import MIN_BLOCKS_PER_SPLIT
from uniattn.schedule.tiles import dim_parts, next_power_of_2, num_tiles

LOG2E = math.log2(math.e)


def attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    causal_per_seq: Tensor | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    plan: list[int] | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attention of one batch into `out` and `lse`; arguments as `uniattn.ops.attend`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, v_head_dim = k_cache.shape[-2], v_cache.shape[-1]
    num_seqs = cu_seqlens_q.shape[0] - 1
    if num_tokens == 0:
        return
    if num_seqs == 0:
        # Padding alone, and no row of lengths or pages that a program could read.
        out.zero_()
        if lse is not None:
            lse.fill_(-torch.inf)
        return
    if plan is None:
        p = planning.make(
            num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, v_head_dim, q.element_size(),
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, target=target_of(q.device),
        )  # fmt: skip
    else:
        p = planning.Plan.from_ints(plan)

    partial_out, partial_lse = out, lse
    if p.num_splits > 1:
        partial_out = q.new_empty((p.num_splits, num_tokens, num_q_heads, v_head_dim), dtype=torch.float32)
        partial_lse = q.new_empty((p.num_splits, num_q_heads, num_tokens), dtype=torch.float32)
    out_strides = partial_out.stride()[:-1] if p.num_splits > 1 else (0, *out.stride()[:-1])
    page_size = 0 if page_table is None else k_cache.shape[1]
    # Contiguous K/V has no pages: its token stride stands at the slot's place.
    k_strides = k_cache.stride()[:-1] if page_size else (0, *k_cache.stride()[:-1])
    v_strides = v_cache.stride()[:-1] if page_size else (0, *v_cache.stride()[:-1])
    has_softcap = softcap > 0
    if has_softcap:
        scale, cap = softmax_scale / softcap, softcap * LOG2E
    else:
        scale, cap = softmax_scale * LOG2E, 0.0
    d0, d1 = dim_parts(head_dim)
    group = num_q_heads // num_kv_heads
    tiles = num_tiles(num_tokens, num_seqs, group, p.block_m)
    with on_device(q.device):
        attend_kernel[(tiles * num_kv_heads * p.num_splits,)](
            q, k_cache, v_cache, partial_out, partial_lse, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, causal_per_seq,
            sinks, alibi_slopes, q.stride()[:-1], k_strides, v_strides, out_strides,
            0 if page_table is None else page_table.stride(0),
            k_cache.shape[0] if page_table is None else page_table.shape[1] * page_size,
            num_tokens, num_seqs, tiles, num_kv_heads, p.num_splits, window_left, window_right, scale, cap,
            CAUSAL=causal, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, D0=d0, D1=d1, DV=next_power_of_2(max(16, v_head_dim)),
            GROUP=group, PAGE_SIZE=page_size, SAME_STRIDES=k_strides == v_strides, HAS_WINDOW=window_left != UNBOUNDED,
            HAS_SOFTCAP=has_softcap, UPCAST=interpreted() and q.dtype == torch.bfloat16, BLOCK_M=p.block_m, BLOCK_N=p.block_n,
            NUM_STAGES=p.num_stages, SMALL_M=p.small_m, SMALL_N=p.small_n, SMALL_STAGES=p.small_stages, BULK=p.bulk,
            HEADS_FIRST=p.block_m == 16, MIN_BLOCKS=MIN_BLOCKS_PER_SPLIT, num_warps=p.num_warps,
        )  # fmt: skip
    if p.num_splits > 1:
        assert partial_lse is not None
        merge_launch.merge(partial_out, partial_lse, out, lse)
