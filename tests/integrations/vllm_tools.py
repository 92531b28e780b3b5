"""What the tests of vLLM's backend share: a batch as vLLM tells it, and one layer run on it."""

from types import SimpleNamespace

import pytest
import torch
from vllm_standins import RELEASES, Common, make_config

NEWEST = RELEASES[-1]
MIXED = [(1, 40), (1, 17), (5, 37), (23, 23), (0, 0), (7, 64)]
LAYER = SimpleNamespace()
every_release = pytest.mark.parametrize("release", RELEASES, ids=str)


def make_impl(ours, batch, **options):
    """A layer with the batch's sizes and options."""
    asked = dict(
        sinks=batch.options.get("sinks"), logits_soft_cap=batch.options.get("softcap"),
        alibi_slopes=None if batch.options.get("alibi_slopes") is None else batch.options["alibi_slopes"].tolist(),
        sliding_window=None if batch.options.get("window") is None else batch.options["window"][0] + 1,
    )  # fmt: skip
    _, num_heads, head_size = batch.q.shape
    return ours.impl.UniattnImpl(num_heads, head_size, head_size**-0.5, batch.k_cache.shape[-2], **asked | options)


def make_builder(ours, impl, page_size=16, device="cpu", **config):
    """A builder for one layer."""
    config = make_config({"layer": SimpleNamespace(impl=impl)}, **config)
    return ours.metadata.UniattnMetadataBuilder(SimpleNamespace(block_size=page_size), ["layer"], config, torch.device(device))


def make_common(batch, **changes):
    """The batch as vLLM tells it, with the slots of the new tokens; vLLM fills its tables up with page 0."""
    slots = []
    for seq, (q_len, kv_len) in enumerate(batch.lengths):
        positions = torch.arange(max(kv_len - q_len, 0), kv_len, device=batch.page_table.device)
        page_size = batch.k_cache.shape[1]
        slots.append(batch.page_table[seq].long()[positions // page_size] * page_size + positions % page_size)
    lengths = [q_len for q_len, _ in batch.lengths]
    fields = dict(
        query_start_loc=batch.cu_seqlens_q, seq_lens=batch.seqlens_k, num_actual_tokens=batch.num_tokens,
        max_query_len=max(lengths), max_seq_len=int(batch.seqlens_k.max()), block_table_tensor=batch.page_table.clamp(min=0),
        slot_mapping=torch.cat(slots), causal=batch.options["causal"],
    )  # fmt: skip
    return Common(**fields | changes)


def make_cache(batch, layout):
    """The one tensor that vLLM gives a layer as its cache, of which the batch's caches are views."""
    base = batch.k_cache._base
    return base.permute(0, 2, 1, 3) if layout == "packed" else base


def run(impl, metadata, batch, cache, key=None, value=None):
    """One layer's forward, into an output that is NaN before."""
    out = torch.full_like(batch.q, torch.nan)
    assert impl.forward(LAYER, batch.q, key, value, cache, metadata, out) is out
    return out
