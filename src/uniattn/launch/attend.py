"""Launch of the portable kernel and, where the plan may have cut tiles, of the merge."""

import math

import torch
from torch import Tensor

from uniattn.kernels.merge import merge_pieces_kernel
from uniattn.kernels.triton.attend import attend_kernel
from uniattn.launch import plan as plan_launch
from uniattn.launch.target import interpreted, on_device, target_of
from uniattn.problem.layout import UNBOUNDED
from uniattn.schedule.plan import RECORD_INTS, PlanSpec, make_spec
from uniattn.schedule.tiles import cdiv, dim_parts, next_power_of_2

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
    softmax_scale: float,
    causal: bool,
    causal_per_seq: Tensor | None,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    plan_spec: list[int] | None,
    plan_buffer: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
) -> None:
    """Attention of one batch into `out` and `lse`; arguments as `uniattn.ops.attend`. Without a plan it builds one."""
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
    page_size = 0 if page_table is None else k_cache.shape[1]
    kv_capacity = k_cache.shape[0] if page_table is None else page_table.shape[1] * page_size
    if plan_spec is None or plan_buffer is None:
        spec = make_spec(
            num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, v_head_dim, q.element_size(),
            2 if causal_per_seq is not None else int(causal), window_left, window_right, max_seqlen_q, target_of(q.device),
        )  # fmt: skip
        plan_buffer = cu_seqlens_q.new_empty(spec.buffer_ints)
        plan_launch.build(
            spec, cu_seqlens_q, seqlens_k, cu_seqlens_k, causal_per_seq, page_table is not None, kv_capacity, plan_buffer
        )  # fmt: skip
    else:
        spec = PlanSpec.from_ints(plan_spec)

    partial_out = partial_lse = None
    dv = next_power_of_2(max(16, v_head_dim))
    if spec.num_partials:
        parts = spec.num_partials * num_kv_heads
        partial_out = q.new_empty((parts, spec.block_m, dv), dtype=torch.float32)
        partial_lse = q.new_empty((parts, spec.block_m), dtype=torch.float32)
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
    with on_device(q.device):
        attend_kernel[(spec.num_items * num_kv_heads,)](
            q, k_cache, v_cache, out, lse, partial_out, partial_lse, plan_buffer, page_table, cu_seqlens_k, causal_per_seq,
            sinks, alibi_slopes, q.stride()[:-1], k_strides, v_strides, out.stride()[:-1],
            0 if page_table is None else page_table.stride(0), kv_capacity, num_tokens, num_seqs, num_kv_heads,
            window_left, window_right, scale, cap,
            CAUSAL=causal, HEAD_DIM=head_dim, V_HEAD_DIM=v_head_dim, D0=d0, D1=d1, DV=dv, GROUP=group, PAGE_SIZE=page_size,
            SAME_STRIDES=k_strides == v_strides, HAS_WINDOW=window_left != UNBOUNDED, HAS_SOFTCAP=has_softcap,
            UPCAST=interpreted() and q.dtype == torch.bfloat16, BLOCK_M=spec.block_m, BLOCK_N=spec.block_n,
            NUM_STAGES=spec.num_stages, SMALL_M=spec.small_m, SMALL_N=spec.small_n, SMALL_STAGES=spec.small_stages,
            BULK=bool(spec.bulk), HEADS_FIRST=bool(spec.heads_first), num_warps=spec.num_warps,
        )  # fmt: skip
        if partial_out is not None:
            # Few rows with many pieces in decode, many rows with few pieces in prefill: 16 rows of pieces at once in either case.
            rows = 1 if spec.block_m == 16 else 8
            row_blocks = cdiv(spec.max_rows, rows)
            merge_pieces_kernel[(spec.num_tiles * num_kv_heads * row_blocks,)](
                partial_out, partial_lse, out, lse, plan_buffer[(1 + spec.num_items) * RECORD_INTS :], cu_seqlens_q,
                out.stride()[:-1], num_tokens, num_seqs, num_kv_heads, row_blocks, GROUP=group, DIM=v_head_dim, DV=dv,
                PART_ROWS=spec.block_m, BLOCK_P=16 // rows, ROWS=rows, num_warps=4,
            )  # fmt: skip
