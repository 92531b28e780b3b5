"""The torch ops under the front door: tensors and scalars only, outputs passed in, with fake implementations.

`torch.ops.uniattn.attend`, `.build_plan`, `.merge` and `.write_kv` make `torch.compile(fullgraph=True)` work. They are defined with
`torch.library.Library.define`, whose dispatch costs about 3 us a call with this argument list, against 72 us for `custom_op`.
An eager call that nothing watches skips even that: `watched` says when.
"""

import functools
from types import ModuleType
from typing import overload

import torch
from torch import Tensor

from uniattn.launch import backend
from uniattn.schedule.fill import fill
from uniattn.schedule.plan import PlanSpec

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
    plan_spec: PlanSpec | list[int] | None,
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
        _launches().attend(
            q, k_cache, v_cache, cu_seqlens_q, seqlens_k, page_table, cu_seqlens_k, max_seqlen_q, softmax_scale, causal,
            causal_per_seq, window_left, window_right, softcap, sinks, alibi_slopes, _spec(plan_spec), plan_buffer, out, lse,
        )  # fmt: skip


def build_plan(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal_per_seq: Tensor | None,
    paged: bool,
    kv_capacity: int,
    spec: PlanSpec | list[int],
    buffer: Tensor,
) -> None:
    """Build a plan's list of items into `buffer`. The reference path has no use for one, but fills it alike."""
    if backend.choose(buffer) == "reference":
        if not buffer.is_meta:
            fill(_spec(spec), cu_seqlens_q, seqlens_k, cu_seqlens_k, causal_per_seq, buffer)
    else:
        _launches().build(
            _spec(spec), cu_seqlens_q, seqlens_k, cu_seqlens_k, causal_per_seq, paged, kv_capacity, buffer
        )  # fmt: skip


@overload
def _spec(spec: PlanSpec | list[int]) -> PlanSpec: ...
@overload
def _spec(spec: PlanSpec | list[int] | None) -> PlanSpec | None: ...
def _spec(spec: PlanSpec | list[int] | None) -> PlanSpec | None:
    """The spec itself, which direct calls pass, or that of the op's ints."""
    return PlanSpec.from_ints(spec) if isinstance(spec, list) else spec


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """Merge parts by their LSE into `out` (and `lse`)."""
    if backend.choose(outs) == "reference":
        from uniattn.kernels import eager

        eager.merge(outs, lses, out, lse)
    else:
        _launches().merge(outs, lses, out, lse)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write new K/V tokens into their cache slots."""
    if backend.choose(k) == "reference":
        from uniattn.kernels import eager

        eager.write_kv(k, v, k_cache, v_cache, slot_mapping)
    else:
        _launches().write_kv(k, v, k_cache, v_cache, slot_mapping)


@functools.cache
def _launches() -> ModuleType:
    """The launches, imported when first needed, since they need Triton. An import statement in each call costs 0.7 us."""
    from uniattn.launch import launches

    return launches


def watched(*tensors: Tensor) -> bool:
    """Whether something must see the op itself: a compiler, a dispatch mode, a functional transform, the profiler, a subclass."""
    return (
        torch.compiler.is_compiling()
        or not _PLAIN.issuperset(map(type, tensors))
        or _num_dispatch_modes() > 0
        or _transform() is not None
        or _profiling()
    )


_PLAIN = {Tensor, torch.nn.Parameter}
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_profiling = torch.autograd._profiler_enabled

for _name, _impl in (("attend", attend), ("build_plan", build_plan), ("merge", merge), ("write_kv", write_kv)):
    for _key in ("CPU", "CUDA"):
        _LIB.impl(_name, _impl, _key)
    torch.library.register_fake(f"uniattn::{_name}", lambda *args: None, lib=_LIB)
