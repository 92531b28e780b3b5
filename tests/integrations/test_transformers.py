"""transformers' continuous batching through `paged|uniattn`: the same greedy tokens as the model's eager attention, in fp32."""

import sys
from types import SimpleNamespace

import pytest
import torch
from tiny_models import FAMILIES, batched, eager, gemma2, gpt_oss, llama, make_model, make_prompts, mistral, qwen3_windows
from transformers import AttentionInterface, CompileConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from uniattn import UnsupportedError
from uniattn.integrations import transformers as integration


@pytest.fixture(autouse=True)
def one_thread():
    """Models this small run several times faster on one thread. The test's own stand-in for `attend` goes, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    integration.register()


@pytest.mark.parametrize("make_config", FAMILIES)
def test_same_tokens_as_eager(make_config):
    """Several requests of mixed lengths; 40 tokens a step cut the longer prompts into chunks, which share steps with decodes."""
    model, prompts = make_model(make_config()), make_prompts()
    assert batched(model, prompts, 40) == eager(model, prompts, 40)


SIZES = {
    "small blocks and chunks": (4, 17),
    "whole prompts, so that the first step has nothing old to read": (16, 256),
    "a block size that is no power of two": (24, 64),
    "a block longer than any sequence": (256, 33),
}


@pytest.mark.parametrize(("block_size", "max_batch_tokens"), SIZES.values(), ids=SIZES.keys())
@pytest.mark.parametrize("make_config", [llama, mistral, gemma2])
def test_block_and_chunk_sizes(make_config, block_size, max_batch_tokens):
    model, prompts = make_model(make_config()), make_prompts()
    got = batched(model, prompts, 8, block_size=block_size, max_batch_tokens=max_batch_tokens, num_blocks=1 + 8192 // block_size)
    assert got == eager(model, prompts, 8)


def test_shared_prefixes():
    """The engine lets requests share the blocks of a common prefix, so that a new request's page table has old blocks in it."""
    model = make_model(llama())
    (prefix,) = make_prompts([48])
    prompts = [prefix + tail for tail in make_prompts([5, 1, 20, 9])]
    # One request at a time in a step, so that the first has completed its blocks before the others are looked up.
    assert batched(model, prompts, 8, max_batch_tokens=53) == eager(model, prompts, 8)


@pytest.mark.parametrize("make_config", [llama, mistral, gemma2, gpt_oss])
def test_padded_steps_compiled(make_config, monkeypatch):
    """With a compiled forward the engine pads every step: plateaus in the cumulative lengths, and slots in its trash blocks.

    The compiler's frontend alone (`backend="eager"`) traces the whole model, without a graph break.
    """
    model, prompts = make_model(make_config()), make_prompts([5, 40, 1])
    get_model_kwargs = ContinuousBatchingIOs.get_model_kwargs
    num_padding = []  # (tokens, sequences) of each step

    def noted(self, *args, **options):
        engine = get_model_kwargs(self, *args, **options)
        cu_seqlens_q = engine["cu_seq_lens_q"]
        num_padding.append((engine["input_ids"].numel() - int(cu_seqlens_q[-1]), int((cu_seqlens_q.diff() == 0).sum())))
        return engine

    monkeypatch.setattr(ContinuousBatchingIOs, "get_model_kwargs", noted)
    torch._dynamo.reset()
    compiled = CompileConfig(backend="eager", mode=None, fullgraph=True, dynamic=None)
    got = batched(model, prompts, 6, max_batch_tokens=24, max_requests_per_batch=6, varlen_compile_config=compiled)
    assert got == eager(model, prompts, 6)
    assert any(tokens > 0 and sequences > 0 for tokens, sequences in num_padding)


@pytest.mark.parametrize("make_config", [llama, gemma2, gpt_oss])
def test_same_tokens_from_the_triton_kernel(make_config, monkeypatch):
    """The kernel itself, in Triton's interpreter where there is no GPU, on a shorter job."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, prompts = make_model(make_config(), device), make_prompts([5, 30, 1])
    expected = eager(model, prompts, 3)
    monkeypatch.setenv("UNIATTN_BACKEND", "triton")
    assert batched(model, prompts, 3, max_batch_tokens=24) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True], ids=["launches", "graphs"])
@pytest.mark.parametrize("make_config", FAMILIES)
def test_on_a_gpu(make_config, graphs):
    """With CUDA graphs a step's shapes are padded, and a graph captured for one step serves others of other lengths.

    Not with `use_async_batching`: under it transformers 5.17 answers some requests wrongly on a busy machine, whatever the attention
    (`paged|sdpa` on an H200: 247 of 415 runs of these prompts without graphs, 1 of 365 with them).
    """
    if graphs and make_config is gpt_oss:
        pytest.skip("transformers' experts copy from the host on layers this small, which a graph cannot capture")
    model, prompts = make_model(make_config(), "cuda"), make_prompts()
    got = batched(model, prompts, 40, max_batch_tokens=64, use_cuda_graph=graphs, use_async_batching=False)
    assert got == eager(model, prompts, 40)


BREAKAGES = {
    "softcap": (gemma2, {"softcap": None}),
    "sinks": (gpt_oss, {"s_aux": None}),
    "scaling": (gemma2, {"scaling": None}),
}


@pytest.mark.parametrize(("make_config", "change"), BREAKAGES.values(), ids=BREAKAGES.keys())
def test_tokens_show_a_dropped_option(make_config, change, monkeypatch):
    """The comparison of tokens is worth something only if an attention without the option gives others."""
    model, prompts = make_model(make_config()), make_prompts()
    attend = integration.attend
    monkeypatch.setattr(integration, "attend", lambda *args, **options: attend(*args, **{**options, **change}))
    got = batched(model, prompts, 12)
    monkeypatch.undo()
    assert got != eager(model, prompts, 12)


@pytest.mark.parametrize("make_config", [mistral, qwen3_windows, gpt_oss])
@pytest.mark.parametrize("off_by", [-1, 1])
def test_tokens_show_a_window_off_by_one(make_config, off_by, monkeypatch):
    """As above, for each edge of the window."""
    model, prompts = make_model(make_config()), make_prompts()
    attention = integration.attention

    def shifted(*args, **options):
        if options["window"] is not None:
            options["window"] = (options["window"][0] + off_by, 0)
        return attention(*args, **options)

    monkeypatch.setattr(integration, "attention", shifted)
    # A window one too wide reads a key too many only inside a chunk: the engine's decodes are handed no more than the window.
    assert batched(model, prompts, 12, max_batch_tokens=256) != eager(model, prompts, 12)


def test_layers_of_a_group_share_their_step(monkeypatch):
    """One build a step and group, not one a layer: gemma2 here has a full group and a sliding group of two layers each."""
    model, prompts = make_model(gemma2()), make_prompts([5, 40, 1])
    build, attend = integration._build_step, integration.attend
    calls = {"build": 0, "attend": 0}

    def count(name, function):
        def counted(*args, **options):
            calls[name] += 1
            return function(*args, **options)

        return counted

    monkeypatch.setattr(integration, "_build_step", count("build", build))
    monkeypatch.setattr(integration, "attend", count("attend", attend))
    batched(model, prompts, 6)
    monkeypatch.undo()
    assert calls["attend"] == 2 * calls["build"] > 0


def test_a_step_of_decodes_gathers_nothing(monkeypatch):
    """A sliding layer in a step of single tokens reads its ring through a page table, and only a chunk gathers old K/V."""
    seen = set()
    build = integration._build_step

    def noted(cache, group, window, engine):
        step = build(cache, group, window, engine)
        seen.add((engine["max_seqlen_q"] == 1, step.page_table is not None, step.old_slots is not None))
        return step

    monkeypatch.setattr(integration, "_build_step", noted)
    batched(make_model(mistral()), make_prompts([5, 60]), 6)
    assert seen == {(False, False, False), (False, False, True), (True, True, False)}


def test_outside_the_engine_it_says_what_to_call():
    model = make_model(llama())
    model.set_attn_implementation(integration.register())
    with pytest.raises(UnsupportedError, match=r"without the arguments of the continuous batching engine.*generate_batch"):
        model(torch.tensor([[1, 2, 3]]))


def test_a_block_table_is_refused():
    """The engine gives one to flash attentions only; were that to change, decodes must not be written to a wrong place."""
    cache = SimpleNamespace(layer_index_to_group_indices={0: (0, 0)})
    ids = torch.zeros(1, dtype=torch.int64)
    engine = {"cu_seq_lens_q": ids, "cu_seq_lens_k": ids, "read_index": [ids], "write_index": [ids], "block_table": ids}
    with pytest.raises(UnsupportedError, match="max_blocks_per_request"):
        integration.attend(SimpleNamespace(layer_idx=0), *torch.zeros(3, 1, 1, 1, 8), cache=cache, **engine)


def test_register_is_idempotent():
    assert integration.register() == integration.register() == "paged|uniattn"
    assert AttentionInterface()[integration.NAME] is integration.attend


def test_a_missing_transformers_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'uniattn\[transformers\]'"):
        integration.register()


def test_an_engine_without_registered_attentions_is_named(monkeypatch):
    """transformers 5.24, say, where the mapping has only the engine's built-in attentions."""
    monkeypatch.delitem(AttentionInterface._global_mapping, "paged|sdpa")
    with pytest.raises(UnsupportedError, match=r"transformers: got version 5\.17.*pip install 'uniattn\[transformers\]'"):
        integration.register()
