"""vLLM's backend on a GPU: the batches of vLLM's own backend tests, and CUDA graphs of whole steps that replay with others."""

from dataclasses import replace

import pytest
import torch
from vllm_standins import RELEASES, CUDAGraphMode
from vllm_tools import LAYER, make_builder, make_cache, make_common, make_impl, run

from uniattn.launch.cache import num_compilations
from uniattn.testing import assert_matches_oracle, make_batch, poison_unread

pytestmark = pytest.mark.gpu
# `seq_lens` and `query_lens` of vLLM's tests/v1/attention/test_attention_backends.py.
BATCHES = {
    "small_decode": [(1, 32), (1, 40)],
    "small_prefill": [(8, 32), (8, 40)],
    "mixed_small": [(1, 32), (1, 40), (5, 48), (5, 56)],
    "medium_decode": [(1, n) for n in (128, 256, 512, 1024) * 2],
    "medium_prefill": [(16, n) for n in (256, 512, 1024, 2048)],
    "mixed_medium": [*((1, n) for n in (512, 1024, 2048)), *((7, n) for n in (512, 1024, 2048))],
    "large_decode": [(1, 2048)] * 32,
    "large_prefill": [(32, 4096)] * 8,
    "mixed_large": [*((1, n) for n in (1024, 2048, 4096)), *((32, n) for n in (1024, 2048, 4096))],
    "single_decode": [(1, 1024)],
    "single_prefill": [(64, 1024)],
}
SIZES = dict(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("release", [RELEASES[1], RELEASES[2]], ids=str)
def test_vllms_own_batches(load, release, lengths, window):
    """Releases with the split and the packed cache; nothing is compiled after the builder was made."""
    ours, layout = load(release), release.layouts[0]
    options = {} if window is None else {"window": (window - 1, 0)}
    batch = poison_unread(make_batch(lengths, layout=layout, **SIZES, **options))
    impl = make_impl(ours, batch)
    builder = make_builder(ours, impl, device="cuda", dtype=torch.bfloat16)
    before = num_compilations()
    common, cache = make_common(batch), make_cache(batch, layout)
    metadata = builder.build(0, common)
    page_size = batch.k_cache.shape[1]
    slots = common.slot_mapping // page_size, common.slot_mapping % page_size
    new = [x[slots].clone() for x in (batch.k_cache, batch.v_cache)]
    batch.k_cache[slots] = batch.v_cache[slots] = torch.nan
    impl.do_kv_cache_update(LAYER, *new, cache, common.slot_mapping)
    out = run(impl, metadata, batch, cache)
    assert num_compilations() == before
    assert_matches_oracle(batch, out)


def test_a_graph_of_a_step_replays_with_any_batch_of_its_size(load):
    """Captured with one token a sequence after a warm-up with the same metadata, as vLLM's runners do; then one long prompt, mixed
    batches, decodes and empty sequences come to the same addresses. Two layers share the step's plan."""
    num_tokens, num_seqs = 64, 16
    batches = [
        [(1, 1)] * 16,
        [(64, 64)] + [(0, 0)] * 15,
        [(1, 900)] * 8 + [(50, 700)] + [(0, 0)] * 7,
        [(4, 300 + i) for i in range(16)],
        [(1, 2000 - i) for i in range(12)] + [(0, 0)] * 4,
    ]
    ours = load()
    made = [
        make_batch(lengths, layout="packed", seed=i, num_padding_rows=num_tokens - sum(q for q, _ in lengths),
                   num_spare_pages=0, num_spare_columns=0, **SIZES)
        for i, lengths in enumerate(batches)
    ]  # fmt: skip
    num_pages, width = max(b.k_cache.shape[0] for b in made), max(b.page_table.shape[1] for b in made)
    first = made[0]
    q, out = torch.zeros_like(first.q), torch.zeros_like(first.q)
    cache = torch.zeros(num_pages, 16, 8, 256, dtype=torch.bfloat16, device="cuda").permute(0, 2, 1, 3)
    common = make_common(
        first, query_start_loc=first.cu_seqlens_q.clone(), seq_lens=first.seqlens_k.clone(), num_actual_tokens=num_tokens,
        block_table_tensor=torch.zeros(num_seqs, width, dtype=torch.int32, device="cuda"), causal=True,
    )  # fmt: skip
    impls = [make_impl(ours, first) for _ in range(2)]
    builder = make_builder(ours, impls[0], device="cuda", dtype=torch.bfloat16, mode=CUDAGraphMode.FULL)
    metadata = builder.build_for_cudagraph_capture(common)

    def step():
        for impl in impls:
            impl.forward(LAYER, q, None, None, cache, metadata, out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in made:
        q.copy_(batch.q.nan_to_num())
        k, v = ours.releases.pages(cache, 128)
        k[: batch.k_cache.shape[0]], v[: batch.v_cache.shape[0]] = batch.k_cache, batch.v_cache
        common.query_start_loc.copy_(batch.cu_seqlens_q)
        common.seq_lens.copy_(batch.seqlens_k)
        common.block_table_tensor[:, : batch.page_table.shape[1]] = batch.page_table.clamp(min=0)
        out.fill_(torch.nan)
        graph.replay()
        assert_matches_oracle(replace(batch, q=q.clone()), out)
