"""The torch ops under the front door: tensors and scalars only, outputs passed in, with fake implementations.

`torch.ops.uniattn.attend`, `.merge` and `.write_kv` make `torch.compile(fullgraph=True)` work. They are defined with
`torch.library.Library.define`, whose dispatch costs about 3 us a call with this argument list, against 72 us for `custom_op`.
"""

import torch
from torch import Tensor

from uniattn.launch import backend

_LIB = torch.library.Library("uniattn", "DEF")
_LIB.define(
    "attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_seqlens_q, Tensor? seqlens_k, Tensor? page_table,"
    " Tensor? cu_seqlens_k, SymInt max_seqlen_q, float softmax_scale, bool causal, Tensor? causal_per_seq,"
    " int window_left, int window_right, float softcap, Tensor? sinks, Tensor? alibi_slopes, int[]? plan_spec,"
    " Tensor? plan_buffer, Tensor(a!) out, Tensor(b!)? lse) -> ()"
)
_LIB.define(
    "build_plan(Tensor cu_seqlens_q, Tensor? seqlens_k, Tensor? cu_seqlens_k, Tensor? causal_per_seq, bool paged, int kv_capacity,"
    " int[] spec, Tensor(a!) buffer) -> ()"
)
_LIB.define("merge(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!)? lse) -> ()")
_LIB.define("write_kv(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()")


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
    """Attention of one batch into `out` (and `lse`), on the backend that `UNIATTN_BACKEND` and the device choose."""
    if backend.choose(q) == "reference":
        from uniattn.kernels import eager

        eager.attend(
            q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, softmax_scale, causal, causal_per_seq,
            window_left, window_right, softcap, sinks, alibi_slopes, out, lse,
        )  # fmt: skip
    else:
        from uniattn.launch import attend as launch

        launch.attend(
            q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, softmax_scale,
            causal, causal_per_seq, window_left, window_right, softcap, sinks, alibi_slopes, plan_spec, plan_buffer, out, lse,
        )  # fmt: skip


def build_plan(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal_per_seq: Tensor | None,
    paged: bool,
    kv_capacity: int,
    spec: list[int],
    buffer: Tensor,
) -> None:
    """Build a plan's list of items into `buffer`. The reference path has no use for one and leaves it as it is."""
    if backend.choose(buffer) != "reference":
        from uniattn.launch import plan as launch
        from uniattn.schedule.plan import PlanSpec

        plan_spec = PlanSpec.from_ints(spec)
        launch.build(plan_spec, cu_seqlens_q, seqlens_k, cu_seqlens_k, causal_per_seq, paged, kv_capacity, buffer)


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Merge parts by their LSE into `out` (and `lse`)."""
    if backend.choose(outs) == "reference":
        from uniattn.kernels import eager

        eager.merge(outs, lses, out, lse)
    else:
        from uniattn.launch import merge as launch

        launch.merge(outs, lses, out, lse)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new K/V tokens into their cache slots."""
    if backend.choose(k) == "reference":
        from uniattn.kernels import eager

        eager.write_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        from uniattn.launch import write_kv as launch

        launch.write_kv(k, v, k_cache, v_cache, slot_mapping)


for _name, _impl in (("attend", attend), ("build_plan", build_plan), ("merge", merge), ("write_kv", write_kv)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _impl, _key)
    torch.library.register_fake(f"uniattn::{_name}", lambda *args: None, lib=_LIB)
