"""What the layers of a step share in vLLM's backend, and what is compiled before the first."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_standins import AttentionType, CUDAGraphMode
from vllm_tools import LAYER, MIXED, make_builder, make_cache, make_common, make_impl, run

import uniattn
from uniattn.launch.cache import num_compilations
from uniattn.testing import assert_matches_oracle, make_batch


@pytest.fixture
def plans(monkeypatch):
    """Counts the plans that are built, after the backend was loaded: `plans(ours)` starts it and returns the list of their windows."""

    def start(ours):
        built = []

        def plan(*args, **kwargs):
            built.append(kwargs["window"])
            return uniattn.plan(*args, **kwargs)

        monkeypatch.setattr(ours.steps, "plan", plan)
        return built

    return start


def test_layers_alike_share_one_plan_a_pass(load, plans):
    ours = load()
    batch = make_batch(MIXED, layout="packed")
    cache, built = make_cache(batch, "packed"), plans(ours)
    full = [make_impl(ours, batch) for _ in range(3)]
    windowed = [make_impl(ours, batch, sliding_window=9) for _ in range(2)]
    builder = make_builder(ours, full[0])
    metadata = builder.build(0, make_common(batch))
    for _ in range(2):
        for impl in (full[0], windowed[0], full[1], windowed[1], full[2]):
            run(impl, metadata, batch, cache)
    assert built == [None, (8, 0)] * 2


def test_groups_with_tables_of_their_own_share_the_plan(load, plans):
    ours = load()
    batch, other = (make_batch(MIXED, layout="packed", seed=seed) for seed in (0, 1))
    built = plans(ours)
    impls = [make_impl(ours, batch) for _ in range(2)]
    builder = make_builder(ours, impls[0])
    assert builder.supports_update_block_table
    first = builder.build(0, make_common(batch))
    common = make_common(other)
    second = builder.update_block_table(first, common.block_table_tensor, common.slot_mapping)
    assert second.slot_mapping is common.slot_mapping
    for impl, metadata, each in ((impls[0], first, batch), (impls[1], second, other)):
        assert_matches_oracle(each, run(impl, metadata, each, make_cache(each, "packed")))
    assert len(built) == 1


def test_a_pass_sees_lengths_that_moved_under_one_metadata(load, plans):
    """Draft steps move the lengths in place, and a graph is warmed up and captured with one description."""
    ours = load()
    batch = make_batch([(1, 30), (1, 20)], layout="packed")
    longer = batch.replace(seqlens_k=batch.seqlens_k.clone(), lengths=((1, 32), (1, 32)))
    for x in (batch.k_cache, batch.v_cache):
        x.nan_to_num_(0.5)
    built = plans(ours)
    impls = [make_impl(ours, batch) for _ in range(2)]
    builder = make_builder(ours, impls[0])
    assert builder.supports_draft_decode_metadata_update
    metadata = builder.build(0, make_common(batch, seq_lens=longer.seqlens_k))
    for each, lengths in ((batch, batch.seqlens_k), (longer, torch.tensor([32, 32], dtype=torch.int32))):
        longer.seqlens_k.copy_(lengths)
        builder.update_draft_decode_metadata(metadata)
        for impl in impls:
            assert_matches_oracle(each, run(impl, metadata, batch, make_cache(batch, "packed")))
    assert len(built) == 2


def test_bounds_of_the_query_lengths(load):
    ours = load()
    batch = make_batch([(1, 9), (3, 9)], layout="packed")
    impl, common = make_impl(ours, batch), make_common(batch)
    builder = make_builder(ours, impl)
    assert builder.build(0, common).max_query_len == 3
    # The runners take it from a numpy array, and the operator wants an int.
    common.max_query_len = np.int32(3)
    assert type(builder.build(0, common).max_query_len) is int
    # Decodes are captured apart, and such a graph replays with no longer query.
    assert builder.build_for_cudagraph_capture(common).max_query_len == 3
    # A graph for everything is captured with short queries and may replay with one long one.
    builder = make_builder(ours, impl, mode=CUDAGraphMode.FULL)
    assert builder.build_for_cudagraph_capture(common).max_query_len is None
    assert builder.build(0, common).max_query_len == 3
    # Verified drafts may be dealt out on the device.
    drafts = make_builder(ours, impl, speculative_config=SimpleNamespace(num_speculative_tokens=7))
    assert drafts.build_for_drafting(common, 0).max_query_len == 8
    assert builder._cudagraph_support.name == "ALWAYS"


class NothingRead(TorchDispatchMode):
    """Fails where a tensor's value is read on the host, which on a GPU would wait for the device and end a capture."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value was read on the host"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("causal", [True, "tensor"])
def test_a_step_reads_nothing_on_the_host(load, monkeypatch, causal):
    """The operator's own calls are tested elsewhere: here they are left out, since the path for CPU tensors does read lengths."""
    ours = load()
    batch = make_batch(MIXED, layout="packed")
    impl = make_impl(ours, batch)
    builder = make_builder(ours, impl)
    common = make_common(batch, causal=True if causal is True else torch.ones(len(MIXED), dtype=torch.int32))
    calls = []
    monkeypatch.setattr(ours.steps, "plan", lambda *args, **kwargs: None)
    monkeypatch.setattr(ours.impl, "attention", lambda *args, **kwargs: calls.append("attention"))
    monkeypatch.setattr(ours.impl, "write_kv", lambda *args, **kwargs: calls.append("write_kv"))
    with NothingRead():
        metadata = builder.build_for_cudagraph_capture(common)
        impl.do_kv_cache_update(LAYER, batch.q[:, :1], batch.q[:, :1], make_cache(batch, "packed"), metadata.slot_mapping)
        run(impl, metadata, batch, make_cache(batch, "packed"))
    assert calls == ["write_kv", "attention"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter stands in for the compiler")
@pytest.mark.parametrize("kind", [{}, dict(window=(5, 0), sinks=True), dict(softcap=5.0)], ids=str)
def test_nothing_is_compiled_after_the_builder_is_made(load, monkeypatch, kind):
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    ours = load()
    batches = [
        make_batch(lengths, layout="packed", num_q_heads=4, head_dim=24, seed=seed, **kind)
        for seed, lengths in enumerate([[(1, 5)], [(1, 40)] * 3, [(20, 33), (1, 7)], [(70, 70)]])
    ]
    impl = make_impl(ours, batches[0])
    builder = make_builder(ours, impl)
    before = num_compilations()
    for batch in batches:
        common = make_common(batch)
        metadata, cache = builder.build(0, common), make_cache(batch, "packed")
        new = torch.randn(len(common.slot_mapping), 2, 24).split(1, dim=1)
        impl.do_kv_cache_update(LAYER, *new, cache, common.slot_mapping)
        run(impl, metadata, batch, cache)
    assert num_compilations() == before


def test_each_way_of_calling_is_warmed_up(load, monkeypatch):
    ours, batch = load(), make_batch(MIXED)
    calls = []
    monkeypatch.setattr(ours.warm, "warmup", lambda **arguments: calls.append(arguments) or 0)

    def causality_of(attn_type="decoder", **config):
        calls.clear()
        make_builder(ours, make_impl(ours, batch, attn_type=attn_type), **config)
        return [(call["page_size"], call["causal"]) for call in calls]

    assert causality_of() == [(16, True)]
    assert causality_of(AttentionType.ENCODER_DECODER) == [(16, False)]
    assert causality_of(AttentionType.ENCODER_ONLY) == [(None, False)] * 2
    assert causality_of(attention_config=SimpleNamespace(use_non_causal=True)) == [(16, True), (16, False), (16, None)]
