"""Building a plan's items for checked arguments: `uniattn.plan` does, and so does what checks a plan against a call's lengths."""

import torch
from torch import Tensor

from uniattn import ops
from uniattn.problem.layout import kv_capacity
from uniattn.schedule.plan import Plan


def build(
    plan: Plan,
    k_cache: Tensor,
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor | None,
    page_table: Tensor | None,
    cu_seqlens_k: Tensor | None,
    causal: bool | Tensor,
) -> None:
    """Build the items of `plan` on the device."""
    watched = ops.watched(k_cache, cu_seqlens_q, plan.buffer)
    build = torch.ops.uniattn.build_plan if watched else ops.build_plan
    build(
        cu_seqlens_q, seqlens_k, offsets_k(seqlens_k, page_table, cu_seqlens_k), causal if isinstance(causal, Tensor) else None,
        page_table is not None, kv_capacity(k_cache, page_table), plan.spec.as_ints() if watched else plan.spec, plan.buffer,
    )  # fmt: skip


def offsets_k(seqlens_k: Tensor | None, page_table: Tensor | None, cu_seqlens_k: Tensor | None) -> Tensor | None:
    """`cu_seqlens_k`, made from the lengths where contiguous K/V came without."""
    if page_table is None and cu_seqlens_k is None:
        assert seqlens_k is not None
        return torch.nn.functional.pad(seqlens_k.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens_k
