"""The batch as vLLM's model runner tells it, once a step for each group of layers."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from uniattn.integrations.vllm import warm
from uniattn.integrations.vllm.refusal import refuse
from uniattn.integrations.vllm.steps import Step


@dataclass
class UniattnMetadata:
    """One step's batch. Its tensors are vLLM's own, at addresses that stay, so that graphs replay with what they then hold.

    Attributes:
        num_actual_tokens: query tokens of the batch, those included with which vLLM fills up a CUDA graph.
        max_query_len: an upper bound of the query lengths, None for the number of tokens.
        max_seq_len: an upper bound of `seq_lens`, as vLLM gave it.
        query_start_loc: int32 `[num_seqs + 1]`, plateaus where a graph was filled up.
        seq_lens: int32 `[num_seqs]`, KV tokens, the query tokens included.
        block_table: int32 `[num_seqs, max_pages]`.
        slot_mapping: int64 `[num_tokens]`; -1 where nothing is written.
        causal: True, False, or an int32 or bool tensor `[num_seqs]`.
        parallel_config: vLLM's.
        steps: what the layers have built so far, by what they are alike in.
    """

    num_actual_tokens: int
    max_query_len: int | None
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor
    parallel_config: Any
    steps: dict[tuple[Any, ...], Step] = field(default_factory=dict)


class UniattnMetadataBuilder(AttentionMetadataBuilder):
    """Makes `UniattnMetadata`. Made once for each group of layers that are alike, before any graph is captured or request served,
    so it is also where the group's kernels are compiled."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    # Draft steps inside a graph move the lengths in place, and each step's first layer builds its plan anew.
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if getattr(vllm_config.model_config, "rswa_window", None) is not None:
            refuse("R-SWA (a window that spares the prompt) not supported")
        # Drafts that are verified may be shared out on the device, so that a query is longer there than the host knows.
        speculative = vllm_config.speculative_config
        self.least_max_query_len = 1 + (getattr(speculative, "num_speculative_tokens", None) or 0)
        warm.layers(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> UniattnMetadata:
        """The metadata of a step. Nothing is launched: the first layer builds the plan, inside whatever graph it runs in.

        Args:
            common_prefix_len: tokens that all sequences share; the plan's pieces serve them like any others.
            common_attn_metadata: vLLM's description of the batch.
            fast_build: that few layers will use it; all building is fast here.
        """
        common = common_attn_metadata
        return UniattnMetadata(
            common.num_actual_tokens, max(int(common.max_query_len), self.least_max_query_len), common.max_seq_len,
            common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping, common.causal,
            self.vllm_config.parallel_config,
        )  # fmt: skip

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> UniattnMetadata:
        """The metadata that a graph is captured with. A graph for mixed batches may replay with one query of all its tokens,
        although it is captured with one token a sequence."""
        metadata = self.build(0, common_attn_metadata)
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode is None or mode.mixed_mode().name == "FULL":
            metadata.max_query_len = None
        return metadata

    def update_block_table(self, metadata: UniattnMetadata, blk_table: Tensor, slot_mapping: Tensor) -> UniattnMetadata:
        """The same step for a group of layers with pages of its own. The plan holds no page ids, so the groups share it."""
        metadata = copy.copy(metadata)
        metadata.block_table, metadata.slot_mapping = blk_table, slot_mapping
        return metadata

    def update_draft_decode_metadata(self, metadata: UniattnMetadata) -> None:
        """Between draft steps inside a graph: nothing, since the lengths are read from vLLM's own tensors."""
