"""Compiling all that a group of layers may need, before any graph is captured or request served."""

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionType

from uniattn.attention import merge_states
from uniattn.launch.warmup import warmup

if TYPE_CHECKING:
    from uniattn.integrations.vllm.impl import UniattnImpl

# Below vLLM's own logger, whose handlers show it among the other lines of the start-up.
logger = logging.getLogger("vllm.uniattn")


def layers(kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
    """Compile for the layers of these names; what one has compiled costs its likes nothing."""
    dtype, non_causal = vllm_config.model_config.dtype, _may_be_non_causal(vllm_config)
    impls = {}
    for name in layer_names:
        impl = vllm_config.compilation_config.static_forward_context[name].impl
        impls[tuple(sorted((key, repr(value)) for key, value in impl.kind.items()))] = impl
    num_compiled = 0
    for impl in impls.values():
        for arguments in _calls(impl, kv_cache_spec.block_size, non_causal):
            num_compiled += warmup(dtype=dtype, device=device, **arguments)
        if impl.dcp_world_size > 1:
            parts = torch.zeros(2, 1, impl.num_heads, impl.head_size, dtype=dtype, device=device)
            merge_states(parts, torch.zeros(2, impl.num_heads, 1, device=device))
    if num_compiled:
        logger.info("uniattn: %d kernels ready for %d attention layers", num_compiled, len(layer_names))


def _may_be_non_causal(vllm_config: Any) -> bool:
    """Whether batches may come that are not causal: diffusion models and drafters that say so."""
    return bool(vllm_config.attention_config.use_non_causal or getattr(vllm_config.model_config, "is_diffusion", False))


def _calls(impl: "UniattnImpl", page_size: int, non_causal: bool) -> Iterator[dict[str, Any]]:
    """Arguments of `uniattn.warmup`, one set for each way in which the layer calls the operator."""
    # K comes from the rotary embedding and V from the fused projection, or both from one, so their strides may differ.
    tokens = [dict(page_size=None, seqlens_k=False, cu_seqlens_k=True, same_strides=same) for same in (True, False)]
    pages = dict(page_size=page_size, same_strides=True, **impl.cache_kind)
    if impl.is_encoder:
        for strides in tokens:
            yield dict(**impl.kind, **strides, causal=False)
    elif impl.dcp_world_size > 1:
        of_all = {**impl.kind, "num_q_heads": impl.num_heads * impl.dcp_world_size, "sinks": None}
        yield dict(**of_all, **pages, causal=False, return_lse=True)
        for strides in tokens:
            yield dict(**impl.kind, **strides, causal=True, return_lse=True)
    elif impl.attn_type == AttentionType.ENCODER_DECODER:
        yield dict(**impl.kind, **pages, causal=False)
    else:
        for causal in (True, False, None) if non_causal else (True,):
            yield dict(**impl.kind, **pages, causal=causal)
