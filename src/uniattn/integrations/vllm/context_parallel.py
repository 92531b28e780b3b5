"""Attention where ranks share a sequence's cache (decode context parallelism).

Each rank holds the KV heads of its group whole, but of each sequence's tokens only its turn. What was in the cache before the
batch is attended by every rank for the query heads of all ranks, and merged between them by the LSE; the batch's own tokens are
attended by each rank for its own heads, from the tensors at hand. The two parts are merged at last. Sinks belong to one part.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from uniattn.attention import attention, merge_states
from uniattn.integrations.vllm import releases
from uniattn.integrations.vllm.metadata import UniattnMetadata
from uniattn.integrations.vllm.refusal import refuse
from uniattn.integrations.vllm.steps import CONTEXT, TOKENS, Ranks, step_of

if TYPE_CHECKING:
    from uniattn.integrations.vllm.impl import UniattnImpl


def check(impl: "UniattnImpl") -> None:
    """Refuse what the split does not allow for: scores and masks that depend on a key's place in its sequence."""
    if impl.alibi_slopes is not None:
        refuse("ALiBi with decode context parallelism: a rank's keys are not at their own places")
    if impl.sliding_window is not None:
        refuse("a sliding window with decode context parallelism: a rank's keys are not at their own places")


def forward(
    impl: "UniattnImpl",
    metadata: UniattnMetadata,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    scales: dict[str, Any],
    out: Tensor,
) -> None:
    """Attention of one layer into `out`. `q`, `k`, `v` are the batch's tokens, `scales` those of a quantised cache."""
    # vLLM sets its groups up after this module may have been imported.
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    parallel = metadata.parallel_config
    ranks = Ranks(impl.dcp_world_size, impl.dcp_rank, parallel.cp_kv_cache_interleave_size)
    combine = releases.context_parallel_combine(parallel.dcp_comm_backend == "a2a")
    scores = impl.scores

    q_of_all = group.all_gather(q.contiguous(), dim=1)
    step = step_of(impl, metadata, CONTEXT, q_of_all, k_pages, v_pages, None, causal=False, ranks=ranks)
    context: Any = attention(
        q_of_all, k_pages, v_pages, page_table=metadata.block_table, **step.lengths, plan=step.plan,
        **{**scores, "sinks": None}, **scales, return_lse=True,
    )  # fmt: skip
    context_out, context_lse = combine(context[0], context[1].t().contiguous(), group, return_lse=True)

    step = step_of(impl, metadata, TOKENS, q, k, v, None, metadata.causal)
    tokens: Any = attention(q, k, v, **step.lengths, plan=step.plan, **scores, return_lse=True)

    merged, _ = merge_states([context_out, tokens[0]], [context_lse.t().contiguous(), tokens[1]])
    out.copy_(merged)
