"""The front door: `attention`, `merge_states`, `write_kv`. Validate, then launch."""

import torch
from torch import Tensor

from uniattn import ops
from uniattn.launch.target import target_of
from uniattn.problem import validate
from uniattn.problem.layout import window_bounds
from uniattn.schedule.plan import Plan
from uniattn.schedule.plan import make as make_plan


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool | Tensor = True,
    window: tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    mask: object | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    kv_format: str | None = None,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    return_lse: bool = False,
    plan: Plan | None = None,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a batch of sequences, each with any number of query tokens, over paged or contiguous K/V."""
    validate.attention(
        q, k_cache, v_cache, cu_seqlens_q=cu_seqlens_q, seqlens_k=seqlens_k, page_table=page_table, cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, softmax_scale=softmax_scale, causal=causal, window=window,
        softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes, mask=mask, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        kv_format=kv_format, out=out, out_scale=out_scale, plan=plan,
    )  # fmt: skip
    num_tokens, num_q_heads, head_dim = q.shape
    if out is None:
        out = q.new_empty((num_tokens, num_q_heads, v_cache.shape[-1]))
    lse = q.new_empty((num_q_heads, num_tokens), dtype=torch.float32) if return_lse else None
    max_seqlen_q, max_seqlen_k = _bounds(q, k_cache, page_table, max_seqlen_q, max_seqlen_k)
    if page_table is None and cu_seqlens_k is None:
        assert seqlens_k is not None
        cu_seqlens_k = torch.nn.functional.pad(seqlens_k.cumsum(0, dtype=torch.int32), (1, 0))
    causal_per_seq = causal if isinstance(causal, Tensor) else None
    window_left, window_right = window_bounds(window)
    torch.ops.uniattn.attend(
        q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        head_dim**-0.5 if softmax_scale is None else softmax_scale, causal is True, causal_per_seq, window_left, window_right,
        softcap, sinks, alibi_slopes, None if plan is None else plan.as_ints(), out, lse,
    )  # fmt: skip
    return out if lse is None else (out, lse)


def plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    num_splits: int | None = None,
) -> Plan:
    """How `attention` would cut a batch of these sizes: made once a step, shared by its layers through `attention(plan=...)`."""
    max_seqlen_q, max_seqlen_k = _bounds(q, k_cache, page_table, max_seqlen_q, max_seqlen_k)
    return make_plan(
        q.shape[0], cu_seqlens_q.shape[0] - 1, q.shape[1], k_cache.shape[-2], q.shape[2], v_cache.shape[-1], q.element_size(),
        max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, target=target_of(q.device), num_splits=num_splits,
    )  # fmt: skip


def _bounds(
    q: Tensor, k_cache: Tensor, page_table: Tensor | None, max_seqlen_q: int | None, max_seqlen_k: int | None
) -> tuple[int, int]:
    """The caller's upper bounds in tokens, or those that the shapes give; never a device read."""
    if max_seqlen_q is None:
        max_seqlen_q = q.shape[0]
    if max_seqlen_k is None:
        max_seqlen_k = k_cache.shape[0] if page_table is None else page_table.shape[1] * k_cache.shape[1]
    return max_seqlen_q, max_seqlen_k


def merge_states(outs: Tensor | list[Tensor], lses: Tensor | list[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge partial attention results of the same queries over disjoint keys."""
    outs = outs if isinstance(outs, Tensor) else torch.stack(outs)
    lses = lses if isinstance(lses, Tensor) else torch.stack(lses)
    validate.merge_states(outs, lses)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    torch.ops.uniattn.merge(outs, lses, out, lse)
    return out, lse


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write the K and V of new tokens into a paged cache."""
    validate.write_kv(k, v, k_cache, v_cache, slot_mapping)
    torch.ops.uniattn.write_kv(k, v, k_cache, v_cache, slot_mapping)


__all__ = ["Plan", "attention", "merge_states", "ops", "plan", "write_kv"]
