"""What the layers of a step share: the batch's lengths as `uniattn.attention` takes them, and the plan built from them.

The first layer of a forward pass builds it and the others take it. Which layer is the first shows by itself: the one that built
the step last builds it anew, since it can only come again in another pass. So whatever vLLM does with one batch description is
right: run it to warm up and then once more to capture a CUDA graph, which then holds the building; capture several draft steps
that move the lengths on the device between them; run it piece by piece, or in another graph.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uniattn.attention import Plan, plan

if TYPE_CHECKING:
    from uniattn.integrations.vllm.metadata import UniattnMetadata

# How keys reach a layer: in the cache's pages, as the batch's own tokens, or, where ranks share the cache, this rank's part of
# what was there before the batch.
PAGES, TOKENS, CONTEXT = "pages", "tokens", "context"


@dataclass(frozen=True)
class Step:
    """One step of layers that are alike.

    Attributes:
        builder: the layer that built it.
        lengths: arguments of `uniattn.plan` and `uniattn.attention` that tell the batch, all but the page table, since groups of
            layers that share a step have tables of their own.
        window: `(left, right)` in tokens, closed, or None.
        plan: built from them.
    """

    builder: object
    lengths: dict[str, Any]
    window: tuple[int, int] | None
    plan: Plan


@dataclass(frozen=True)
class Ranks:
    """How decode context parallelism deals the tokens of a sequence to the ranks: `interleave` tokens to each in turn."""

    size: int
    rank: int
    interleave: int

    def tokens_here(self, num_tokens: Tensor) -> Tensor:
        """How many of the first `num_tokens` (int32 `[num_seqs]`) of each sequence this rank's cache holds."""
        whole = num_tokens // (self.size * self.interleave) * self.interleave
        rest = num_tokens - whole * self.size - self.rank * self.interleave
        return whole + rest.clamp(0, self.interleave)


def step_of(
    builder: object,
    metadata: "UniattnMetadata",
    kind: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sliding_window: int | None,
    causal: bool | Tensor,
    ranks: Ranks | None = None,
) -> Step:
    """The step of a layer whose call has these q, K and V (pages or tokens): the last one built for its likes, or a new one.

    `sliding_window` counts the tokens that a query sees, its own included. A query that also sees later tokens sees as many of
    them; to causal ones the right side does not matter.
    """
    is_tensor = isinstance(causal, Tensor)
    window = None if sliding_window is None else (sliding_window - 1, 0 if causal is True else sliding_window - 1)
    table = None if kind == TOKENS else metadata.block_table
    capacity = None if table is None else (table.shape[1], k.shape[1])
    key = (kind, q.shape, k.shape[-2], v.shape[-1], q.dtype, window, None if is_tensor else causal, capacity)
    step = metadata.steps.get(key)
    if step is None or step.builder is builder:
        lengths: dict[str, Any] = {
            "cu_seqlens_q": metadata.query_start_loc,
            "max_seqlen_q": metadata.max_query_len,
            # vLLM's flags are int32, kept at one address; what is made of them here is made inside the graph.
            "causal": causal != 0 if isinstance(causal, Tensor) and causal.dtype != torch.bool else causal,
        }
        if kind == TOKENS:
            lengths["cu_seqlens_k"] = metadata.query_start_loc
        elif ranks is None:
            lengths["seqlens_k"] = metadata.seq_lens
        else:
            lengths["seqlens_k"] = ranks.tokens_here(metadata.seq_lens - metadata.query_start_loc.diff())
        built = plan(q, k, v, page_table=table, window=window, **lengths)
        step = metadata.steps[key] = Step(builder, lengths, window, built)
    return step
