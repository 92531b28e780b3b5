"""vLLM's backend on batches, against the oracle, in the layouts of its releases."""

import pytest
import torch
from vllm_standins import AttentionType
from vllm_tools import LAYER, MIXED, every_release, make_builder, make_cache, make_common, make_impl, run

from uniattn.testing import assert_matches_oracle, assert_within, make_batch, oracle, poison_unread

KINDS = {
    "plain": {},
    "heads of 80 in groups of 3": dict(num_q_heads=6, num_kv_heads=2, head_dim=80),
    "window": dict(window=(11, 0)),
    "softcap": dict(softcap=20.0),
    "sinks": dict(sinks=True),
    "alibi": dict(alibi=True),
    "pages of 48": dict(page_size=48),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@every_release
def test_batches(load, release, kind):
    """New K/V are written into their slots, then a mixed batch is attended, with NaN wherever nothing may be read."""
    ours = load(release)
    for layout in release.layouts:
        batch = poison_unread(make_batch(MIXED, layout=layout, **kind))
        cache, common = make_cache(batch, layout), make_common(batch)
        page_size = batch.k_cache.shape[1]
        slots = common.slot_mapping
        written = [x[slots // page_size, slots % page_size].clone() for x in (batch.k_cache, batch.v_cache)]
        for x in (batch.k_cache, batch.v_cache):
            x[slots // page_size, slots % page_size] = torch.nan
        impl = make_impl(ours, batch)
        metadata = make_builder(ours, impl, page_size).build(0, common)
        padded = [torch.cat([x, torch.full_like(x[:3], torch.nan)]) for x in written]
        impl.do_kv_cache_update(LAYER, *padded, cache, metadata.slot_mapping)
        assert_matches_oracle(batch, run(impl, metadata, batch, cache))


@every_release
def test_a_filled_up_graph(load, release):
    """More tokens and sequences than the batch has: plateaus, lengths of 0, slots of -1, and rows that the metadata leaves out."""
    ours, layout = load(release), release.layouts[0]
    batch = make_batch([*MIXED, (0, 0), (0, 0)], layout=layout, num_padding_rows=4)
    impl = make_impl(ours, batch)
    common = make_common(batch, num_actual_tokens=batch.num_tokens - 1)
    metadata = make_builder(ours, impl).build_for_cudagraph_capture(common)
    out = run(impl, metadata, batch, make_cache(batch, layout))
    right = oracle(batch)
    assert_within(out[:-1], right.out[:-1], right.out_allowed[:-1])
    assert out[-1].isnan().all()


def test_a_length_beyond_the_table_reads_none_past_its_row(load):
    """Graphs are captured with lengths up to the largest model length rounded up."""
    ours = load()
    batch = make_batch([(1, 40)], layout="packed", num_spare_columns=0)
    longer = batch.replace(seqlens_k=torch.full_like(batch.seqlens_k, 1000), lengths=((1, 1000),))
    impl = make_impl(ours, batch)
    # A wider table behind the row, as vLLM's slices have, with an id that would be a bad read.
    table = torch.full((1, 8), 2**30, dtype=torch.int32)
    table[:, :3] = batch.page_table
    metadata = make_builder(ours, impl).build(0, make_common(batch, seq_lens=longer.seqlens_k, block_table_tensor=table[:, :3]))
    for x in (batch.k_cache, batch.v_cache):
        x[batch.page_table[0, 2], 8:] = 0.0
    assert_matches_oracle(longer, run(impl, metadata, batch, make_cache(batch, "packed")))


def test_while_vllm_measures_memory_the_output_is_zero(load):
    ours, batch = load(), make_batch(MIXED)
    assert (run(make_impl(ours, batch), None, batch, torch.tensor([])) == 0).all()


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("attn_type", [AttentionType.ENCODER_ONLY, AttentionType.ENCODER])
def test_encoders_attend_their_own_tokens_both_ways(load, attn_type, window):
    ours = load()
    lengths = [(9, 9), (1, 1), (30, 30)]
    sides = None if window is None else (window - 1, window - 1)
    tokens = make_batch(lengths, page_size=None, causal=False, window=sides)
    impl = make_impl(ours, tokens, attn_type=attn_type, sliding_window=window)
    impl.do_kv_cache_update(LAYER, tokens.k_cache, tokens.v_cache, None, torch.zeros(40, dtype=torch.int64))
    paged = make_batch(lengths, layout="packed")
    metadata = make_builder(ours, impl).build(0, make_common(paged, causal=False))
    out = run(impl, metadata, tokens, torch.tensor([]), tokens.k_cache, tokens.v_cache)
    assert_matches_oracle(tokens, out)


def test_cross_attention_sees_the_whole_encoder_and_writes_only_what_is_new(load):
    ours = load()
    batch = make_batch([(1, 30), (4, 12), (1, 1)], layout="packed", causal=False)
    impl = make_impl(ours, batch, attn_type=AttentionType.ENCODER_DECODER)
    metadata = make_builder(ours, impl).build(0, make_common(batch))
    assert_matches_oracle(batch, run(impl, metadata, batch, make_cache(batch, "packed")))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32])
def test_sequences_that_are_not_causal_have_windows_to_both_sides(load, dtype):
    ours = load()
    flags = [True, False, True, False, True, False]
    batch = make_batch(MIXED, layout="packed", causal=flags, window=(5, 5))
    impl = make_impl(ours, batch)
    common = make_common(batch, causal=torch.tensor(flags).to(dtype))
    metadata = make_builder(ours, impl).build(0, common)
    assert_matches_oracle(batch, run(impl, metadata, batch, make_cache(batch, "packed")))
    batch = make_batch(MIXED, layout="packed", causal=False, window=(5, 5))
    metadata = make_builder(ours, impl).build(0, make_common(batch))
    assert_matches_oracle(batch, run(impl, metadata, batch, make_cache(batch, "packed")))
