#!/usr/bin/env python3
"""Runs uniattn's backend inside the vLLM that can be imported, on a CPU, and compares with the float64 oracle.

    PYTHONPATH=path/to/vllm-tree python scripts/run_vllm_layer.py

vLLM's own code registers the plugin by its entry point, validates, makes attention layers, groups, builders and batch
descriptions, and runs the layers (one full, one with a sliding window, with sinks and softcap) in its forward context. No compiled
part of vLLM is needed, only its Python files and what they import; uniattn must be installed, or the plugin is not found.
"""

import sys
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.cross_attention import create_cross_attention_backend
from vllm.model_executor.layers.attention.encoder_only_attention import create_encoder_only_attention_backend
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.utils import AttentionGroup

from uniattn.testing import Batch, assert_matches_oracle, make_batch

LENGTHS = [(1, 40), (1, 17), (5, 37), (23, 23), (7, 64)]
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 4, 2, 64, 16
LAYERS = {"full": {}, "window": {"window": (11, 0)}, "sinks": {"sinks": True}, "softcap": {"softcap": 20.0}}


def select() -> Any:
    """The backend as vLLM finds it, on a platform that claims a GPU: the reference path then computes on the CPU."""
    type(current_platform).is_cuda_alike = lambda self: True
    load_general_plugins()
    backend = AttentionBackendEnum.CUSTOM.get_class()
    type(current_platform).get_attn_backend_cls = classmethod(lambda *args, **kwargs: AttentionBackendEnum.CUSTOM.get_path())

    def reasons(**changes: Any) -> list[str]:
        asked = dict(head_size=HEAD_DIM, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=PAGE_SIZE, has_sink=True)
        chosen = AttentionSelectorConfig(**asked | changes)
        return backend.validate_configuration(device_capability=DeviceCapability(9, 0), **chosen._asdict())

    assert reasons() == reasons(use_non_causal=True) == reasons(dtype=torch.float32) == [], reasons()
    for changes in (dict(use_mm_prefix=True), dict(use_batch_invariant=True), dict(head_size=4), dict(block_size=8)):
        assert reasons(**changes), changes
    for create in (create_cross_attention_backend, create_encoder_only_attention_backend):
        assert issubclass(create(backend), backend)
    return backend


def describe(batch: Batch) -> CommonAttentionMetadata:
    """vLLM's description of the batch, with the slots of its new tokens."""
    assert batch.page_table is not None
    assert batch.seqlens_k is not None
    slots = []
    for seq, (q_len, kv_len) in enumerate(batch.lengths):
        positions = torch.arange(kv_len - q_len, kv_len)
        slots.append(batch.page_table[seq].long()[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE)
    return CommonAttentionMetadata(
        query_start_loc=batch.cu_seqlens_q, query_start_loc_cpu=batch.cu_seqlens_q, seq_lens=batch.seqlens_k,
        num_reqs=len(batch.lengths), num_actual_tokens=batch.num_tokens, max_query_len=max(q for q, _ in batch.lengths),
        max_seq_len=max(kv for _, kv in batch.lengths), block_table_tensor=batch.page_table, slot_mapping=torch.cat(slots),
    )  # fmt: skip


def run(layer: Attention, config: VllmConfig, batch: Batch, layout: str) -> None:
    """Write the batch's new K/V and attend, through the layer, with each kind of metadata that vLLM asks a builder for."""
    base = batch.k_cache._base
    layer.kv_cache = base.permute(0, 2, 1, 3) if layout == "packed" else base
    spec = FullAttentionSpec(block_size=PAGE_SIZE, num_kv_heads=NUM_KV_HEADS, head_size=HEAD_DIM, dtype=torch.float32)
    group = AttentionGroup(layer.get_attn_backend(), [layer.layer_name], spec, 0)
    model = SimpleNamespace(dtype=torch.float32, rswa_window=None, is_diffusion=False)
    names = ("attention_config", "compilation_config", "parallel_config", "speculative_config", "scheduler_config")
    of_builder = SimpleNamespace(model_config=model, **{name: getattr(config, name) for name in names})
    group.create_metadata_builders(of_builder, torch.device("cpu"), kernel_block_size=PAGE_SIZE)
    builder, common = group.get_metadata_builder(0), describe(batch)
    index = common.slot_mapping // PAGE_SIZE, common.slot_mapping % PAGE_SIZE
    k, v = batch.k_cache[index].clone(), batch.v_cache[index].clone()
    batch.k_cache[index] = batch.v_cache[index] = torch.nan
    for metadata in (builder.build(0, common), builder.build_for_cudagraph_capture(common), builder.build_for_drafting(common, 0)):
        slots = {layer.layer_name: common.slot_mapping}
        with set_forward_context({layer.layer_name: metadata}, config, slot_mapping=slots):
            out = layer(batch.q.flatten(1), k.flatten(1), v.flatten(1))
        assert_matches_oracle(batch, out.view_as(batch.q))


def main() -> int:
    """Run every layer; an exception tells what is amiss."""
    release = tuple(map(int, vllm.__version__.split(".")[:2]))
    layout = "packed" if release >= (0, 26) else "interleaved"
    backend = select()
    config = VllmConfig(device_config=DeviceConfig(device="cpu"), cache_config=CacheConfig(block_size=PAGE_SIZE))
    for number, (name, options) in enumerate(LAYERS.items()):
        batch = make_batch(
            LENGTHS, layout=layout, num_q_heads=NUM_Q_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, **options
        )
        sinks = {"sinks": batch.options["sinks"]} if "sinks" in options else {}
        window = {"per_layer_sliding_window": batch.options["window"][0] + 1} if "window" in options else {}
        with set_current_vllm_config(config):
            layer = Attention(
                NUM_Q_HEADS, HEAD_DIM, HEAD_DIM**-0.5, num_kv_heads=NUM_KV_HEADS, cache_config=config.cache_config,
                logits_soft_cap=batch.options.get("softcap"), prefix=f"model.layers.{number}.attn", **window, **sinks,
            )  # fmt: skip
        run(layer, config, batch, layout)
        print(f"vLLM {vllm.__version__}, {backend.get_name()}: {name} layer agrees with the oracle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
